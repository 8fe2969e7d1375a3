"""Change the grid when a store is made: cut out regions, take means over cells, interpolate from Gaussian grids.

A new value is the mean of the old values over the area of its cell (first-order conservative remapping, Jones 1999,
doi:10.1175/1520-0493(1999)127<2204:FASOCR>2.0.CO;2):

    v_i = sum_j |A_i n B_j| v_j / |A_i|

    v_i  new value
    v_j  old value
    A_i  cell of the new grid
    B_j  cell of the old grid

Between regular grids, the overlap of two cells is the overlap of the sines of their latitudes times that of their
longitudes. So the weights are two small sparse matrices. They are exact also for a row on a pole, whose cell is a cap,
and across the meridian where longitude wraps.

At masked points the mean is over the valid area, and a new point is masked if less than half of its area is valid. A
crop only selects points, so packed integers stay as they are.

The points of a reduced Gaussian grid, on which the IFS computes, do not lie in columns. So values are interpolated from
any Gaussian grid. The sines of the rows' latitudes are the zeros of a Legendre polynomial. Each row has points of its
own, evenly spaced from Greenwich eastwards (ECMWF's N grids, and the octahedral O grids of Malardel et al. 2016, ECMWF
Newsletter 146). A field is kept in an array of all rows (Y, X) with as many columns as the longest row has points. A
shorter row is filled up with its last value; these columns are never used.

A new value at latitude p and longitude l is linear between the two rows around it, and in each row linear between the
two points around it:

    v(p, l) = ((p - p_s) v_n(l) + (p_n - p) v_s(l)) / (p_n - p_s)
    v_r(l)  = (1 - f) v_r,i + f v_r,i+1,   i + f = l / (360 / K_r)

    n, s  row north and row south of it
    K_r   number of points of row r, on which i counts modulo K_r

Beyond the outermost rows, less than a row from the pole, the value is that of the row.

Axes: Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from scipy.special import roots_legendre

from data_prep.records import RawField
from ensemble_ml.errors import UserError
from ensemble_ml.grid import TOLERANCE, Grid, coarse_grid, cut, even_grid

_VALID_SHARE = 0.5  # least valid share of a new cell's area that gives a value
_SLIVER = 1e-9  # smaller overlaps, as a share of a cell, are rounding errors of the bounds
# The end of messages about a Gaussian grid.
READ_WITH = "is read with regrid=DEGREES alone, which interpolates it to a regular grid"


@dataclass(frozen=True)
class GridChange:
    """The user's settings for the grid of a store: first another grid (`coarsen` or `regrid`), then a `region` of it.

    `coarsen` holds the factors of rows and columns, and `regrid` a spacing in degrees or the grid itself.
    """

    region: tuple[float, ...] | None = None
    coarsen: tuple[int, int] | None = None
    regrid: float | Grid | None = None

    def of(self, source: Grid) -> Geometry:
        """Return the mapping from data on `source` to the grid that the settings ask for.

        Raises:
            UserError: the settings do not fit the grid of the data, or `Geometry` refuses the grid.
        """
        if isinstance(self.regrid, ReducedGrid):
            raise UserError(f"regrid: {self.regrid.describe()}: stores are on regular grids; give one, or a spacing")
        if isinstance(source, ReducedGrid) and self.regrid is None:
            raise UserError(f"grid: {source.describe()} {READ_WITH}")
        whole = source
        if isinstance(self.regrid, Grid):
            whole = self.regrid
        elif self.regrid is not None:
            whole = even_grid(source, self.regrid)
        elif self.coarsen is not None:
            whole = coarse_grid(source, *self.coarsen)
        return Geometry(source, whole if self.region is None else cut(whole, self.region), whole)


@dataclass(frozen=True, eq=False)
class Geometry:
    """A mapping from the grid `source` to the grid `target`: the same grid, a crop, means over cells, or interpolation.

    `whole` is the grid of which `target` is a region, or None. The cells of a single row or column have a size only by
    this grid.

    Raises:
        UserError: a cell of `target` reaches beyond `source`, or its size is not known.
    """

    source: Grid
    target: Grid
    whole: Grid | None = None

    def __post_init__(self) -> None:
        if self.crop is None and not self.reduced:
            if 1 in self.cells.shape:
                raise UserError(
                    f"grid: {self.target.describe()}: values are means over cells, and one row or column does not say"
                    " how large a cell is; take two at least"
                )
            for name, weights in zip(("latitude", "longitude"), self.weights, strict=True):
                _check_covered(name, weights, self.source, self.target)

    @cached_property
    def crop(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the rows (Y',) and columns (X',) of the source that are the target's points; None for new points."""
        if self.reduced and not self.same:
            return None
        if self.cells is not self.target and not self.same and _region(self.cells, self.source) is None:
            return None  # points of a coarser grid may also be points of the source, but their values are means
        return _region(self.source, self.target)

    @property
    def cells(self) -> Grid:
        """Return the grid whose cells the means are taken over: `target`, or the grid of which it is a region."""
        return self.target if self.whole is None else self.whole

    @property
    def reduced(self) -> bool:
        """Return whether the source is a Gaussian grid (reduced or not), from which values are interpolated."""
        return isinstance(self.source, ReducedGrid)

    @cached_property
    def same(self) -> bool:
        """Return whether source and target are the same grid."""
        return self.source.same_as(self.target)

    @cached_property
    def weights(self) -> tuple[csr_matrix, csr_matrix]:
        """Return the weights of the old rows in the new ones (Y', Y), and those of the columns (X', X)."""
        old, new = (np.sin(np.deg2rad(grid.latitude_bounds()))[::-1] for grid in (self.source, self.cells))
        latitude = _overlaps(old, new)[::-1, ::-1]
        # The two grids may begin at different meridians, so the old cells are also shifted by one and two full turns.
        shifts = (-720.0, -360.0, 0.0, 360.0, 720.0)
        longitude = _overlaps(self.source.longitude_bounds(), self.cells.longitude_bounds(), shifts)
        rows = _matches(self.cells.latitude, self.target.latitude, period=None)
        columns = _matches(self.cells.longitude, self.target.longitude, period=360.0)
        assert rows is not None and columns is not None  # `target` is a region of `cells`
        return csr_matrix(latitude[rows]), csr_matrix(longitude[columns])

    @cached_property
    def points(self) -> csr_matrix:
        """Return the weights of the points of a Gaussian grid in the new ones, (Y' X', Y X)."""
        assert isinstance(self.source, ReducedGrid)
        return bilinear(self.source, self.target)

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return values (Y, X), NaN where masked, on the new grid: (Y', X') float64.

        They are selected by a crop, interpolated from a Gaussian grid, and means over the new cells otherwise.
        """
        values = np.asarray(values, np.float64)
        if self.crop is not None:
            return values[np.ix_(*self.crop)]
        valid = np.isfinite(values)
        if not valid.any():
            return np.full(self.target.shape, np.nan)
        # Means are taken of departures from one value, so that a constant field stays exactly constant and no digits
        # are lost. If there are zeros, as in rain, that value is zero: dry cells then get exactly 0 and not 1e-18 m.
        origin = 0.0 if (values == 0).any() else values[valid][0]
        if valid.all():
            return self._sums(values - origin) + origin
        share = self._sums(valid.astype(np.float64))
        kept = share >= _VALID_SHARE - _SLIVER
        sums = self._sums(np.where(valid, values - origin, 0.0))
        return np.where(kept, sums / np.where(kept, share, 1.0) + origin, np.nan)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Return the weighted sums of values (Y, X) over the new cells, (Y', X')."""
        if self.reduced:
            return (self.points @ values.ravel()).reshape(self.target.shape)
        rows, columns = self.weights
        return np.ascontiguousarray((columns @ np.ascontiguousarray((rows @ values).T)).T)

    def floats(self, values: np.ndarray) -> np.ndarray:
        """Return float32 values (Y, X), NaN where masked, on the new grid: (Y', X') float32."""
        return values if self.same else self.means(values).astype(np.float32)

    def field(self, raw: RawField) -> RawField:
        """Return a field on the new grid.

        Packed integers stay packed on the same grid and in a crop of it. Otherwise the result is float32 values, NaN at
        points without a value, with neither mask nor packing step.
        """
        if self.same:
            return raw
        if self.crop is None:
            return RawField(self.floats(raw.decode()))
        maps = [item.name for item in fields(raw) if np.shape(getattr(raw, item.name)) == self.source.shape]
        return replace(raw, **{name: getattr(raw, name)[np.ix_(*self.crop)] for name in maps})


def as_change(region: Sequence[float] | None, coarsen: Any, regrid: float | Grid | None) -> GridChange | None:
    """Return the change of grid that the settings of `prepare` ask for; None if they ask for none.

    Args:
        region: [north, west, south, east] in degrees, or None.
        coarsen: a whole factor, or one for rows and one for columns, or None.
        regrid: a spacing in degrees, a grid, or None.
    """
    if region is None and coarsen is None and regrid is None:
        return None
    pair = None if coarsen is None else tuple(coarsen) if isinstance(coarsen, list | tuple) else (coarsen, coarsen)
    return GridChange(None if region is None else tuple(region), pair, regrid)  # type: ignore[arg-type]


def _region(grid: Grid, part: Grid) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the rows and columns of `grid` that form `part`.

    The result is None if `part` has new points, or leaves out some between its own.
    """
    rows = _matches(grid.latitude, part.latitude, period=None)
    columns = _matches(grid.longitude, part.longitude, period=360.0)
    if rows is None or columns is None:
        return None
    steps = (*np.diff(rows), *np.diff(columns) % len(grid.longitude))
    return (rows, columns) if all(step == 1 for step in steps) else None


def _matches(old: np.ndarray, new: np.ndarray, period: float | None) -> np.ndarray | None:
    """Return the position in `old` of each value of `new`, modulo `period` if it is given; None if one is not there."""
    apart = old[None] - new[:, None]
    if period is not None:
        apart = np.mod(apart + period / 2, period) - period / 2
    found = np.abs(apart).argmin(1)
    return found if (np.abs(np.take_along_axis(apart, found[:, None], 1)) < TOLERANCE).all() else None


def _overlaps(old: np.ndarray, new: np.ndarray, shifts: Sequence[float] = (0.0,)) -> np.ndarray:
    """Return the share of each new interval that each old one covers, (N', N), by their ascending bounds.

    The old intervals are repeated at distances of `shifts`.
    """
    total = np.zeros((len(new) - 1, len(old) - 1))
    low, high = new[:-1, None], new[1:, None]
    for shift in shifts:
        total += np.maximum(np.minimum(high, old[1:] + shift) - np.maximum(low, old[:-1] + shift), 0)
    shares = total / (high - low)
    return np.where(shares < _SLIVER, 0.0, shares)


def _check_covered(name: str, weights: csr_matrix, source: Grid, target: Grid) -> None:
    """Raise a UserError if cells of the target reach beyond the source: their weights do not add up to 1."""
    share = np.asarray(weights.sum(1)).ravel()
    if share.min() < 1 - 1e-3:
        at = getattr(target, name)[share.argmin()]
        raise UserError(
            f"grid: the cell at {name} {at:g} of {target.describe()} reaches beyond the data, {source.describe()}; "
            "choose a smaller region"
        )


@dataclass(frozen=True, eq=False)
class ReducedGrid(Grid):
    """A global Gaussian grid, whose rows may have different numbers of points.

    `longitude` holds the points of the longest row, and `counts` (Y,) the number of points of each row.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, int))

    def latitude_bounds(self) -> np.ndarray:
        """Return the edges of the rows, (Y + 1,) degrees north: midway between rows, and the poles."""
        return np.concatenate([[90.0], (self.latitude[:-1] + self.latitude[1:]) / 2, [-90.0]])

    def same_as(self, other: Grid) -> bool:
        """Return whether both grids have the same points."""
        return (
            isinstance(other, ReducedGrid) and np.array_equal(self.counts, other.counts) and Grid.same_as(self, other)
        )

    def describe(self) -> str:
        """Return the size of the grid as messages show it."""
        least, most = int(self.counts.min()), int(self.counts.max())
        points = f"{least} to {most}" if least < most else f"{most}"
        kind = "reduced Gaussian" if least < most else "Gaussian"
        return f"a {kind} grid of {len(self.counts)} rows with {points} points"


@lru_cache(16)
def gaussian_latitudes(rows: int) -> np.ndarray:
    """Return the latitudes of a Gaussian grid, (rows,) degrees north, descending."""
    return np.rad2deg(np.arcsin(roots_legendre(rows)[0]))[::-1]


def reduced_grid(counts: tuple[int, ...]) -> ReducedGrid:
    """Return the Gaussian grid whose rows have the given numbers of points, from north to south."""
    longest = max(counts)
    return ReducedGrid(gaussian_latitudes(len(counts)), np.arange(longest) * 360 / longest, np.array(counts))


def spread_rows(values: np.ndarray, counts: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Fill `out` (Y, X) with values (N,) that are stored row by row, with `counts` (Y,) points each, and return it."""
    ends = np.cumsum(counts)
    columns = np.minimum(np.arange(out.shape[1]), counts[:, None] - 1)
    out[...] = values[(ends - counts)[:, None] + columns]
    return out


def bilinear(grid: ReducedGrid, target: Grid) -> csr_matrix:
    """Return the sparse matrix that interpolates fields to a regular grid, (Y' X', Y X)."""
    south = np.clip(np.searchsorted(-grid.latitude, -target.latitude), 1, len(grid.latitude) - 1)
    pair = np.stack([south - 1, south])  # the rows around each row of the target
    gap = grid.latitude[pair[0]] - grid.latitude[pair[1]]
    share = np.clip((grid.latitude[pair[0]] - target.latitude) / gap, 0, 1)
    places, weights = [], []
    for rows, of_row in zip(pair, (1 - share, share), strict=True):
        counts = grid.counts[rows][:, None]
        position = np.mod(target.longitude, 360) / (360 / counts)  # (Y', X')
        first = np.floor(position).astype(int)
        for column, of_point in ((first, 1 - (position - first)), (first + 1, position - first)):
            places.append(rows[:, None] * grid.shape[1] + column % counts)
            weights.append(of_row[:, None] * of_point)
    points = target.shape[0] * target.shape[1]
    index = np.tile(np.arange(points), len(places))
    shape = points, grid.shape[0] * grid.shape[1]
    return csr_matrix((np.ravel(weights), (index, np.ravel(places))), shape=shape)
