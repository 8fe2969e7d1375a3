"""The grid that a store is made on: regions cut out, coarser grids, conservative regridding.

A new value is the mean over its cell's area of the old values under it: sum_j |A_i n B_j| v_j / |A_i| (first-order
conservative remapping, Jones 1999, doi:10.1175/1520-0493(1999)127<2204:FASOCR>2.0.CO;2). Between regular grids the
overlap of two cells is that of their latitudes, in the sine, times that of their longitudes, so the weights are two
small sparse matrices; they are exact where a row stands on a pole (its cell is a cap) and where longitude wraps.

At masked points the mean is over the valid area, and a new point is masked where less than half its area is valid.
A crop moves points and nothing else: packed integers stay as they are.

Axes: Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from data_prep.records import RawField
from ensemble_ml.domains import coarse_grid, cut, even_grid
from ensemble_ml.errors import UserError
from ensemble_ml.grid import TOLERANCE, Grid

_VALID_SHARE = 0.5
_SLIVER = 1e-9  # of a cell: overlaps below it are rounding of the bounds


@dataclass(frozen=True)
class GridChange:
    """What is asked of the grid: first another grid (`coarsen` or `regrid`), then a `region` of it.

    `coarsen` is (rows, columns); `regrid` degrees, or the grid itself.
    """

    region: tuple[float, ...] | None = None
    coarsen: tuple[int, int] | None = None
    regrid: float | Grid | None = None

    def of(self, source: Grid) -> Geometry:
        """The way from data on `source` to the grid that is asked for.

        Raises:
            UserError: it does not fit to the grid of the data, or as `Geometry`.
        """
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
    """The way from `source` to `target`: nothing, a crop, or conservative weights.

    `whole` is the grid of which `target` is a region, where that is known: of a single row or column it alone says how
    large a cell is.

    Raises:
        UserError: a cell of `target` reaches beyond `source`, or nothing says how large it is.
    """

    source: Grid
    target: Grid
    whole: Grid | None = None

    def __post_init__(self) -> None:
        if self.crop is None:
            if 1 in self.cells.shape:
                raise UserError(
                    f"grid: {self.target.describe()}: means over its cells are asked for, and one row or column does"
                    " not say how large a cell is; take two at least"
                )
            for name, weights in zip(("latitude", "longitude"), self.weights, strict=True):
                _check_covered(name, weights, self.source, self.target)

    @cached_property
    def crop(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Rows (Y',) and columns (X',) of the source that are the target's points; None where points are new."""
        if self.cells is not self.target and not self.same and _region(self.cells, self.source) is None:
            return None  # points of a coarser grid may be the source's points too: their values are means
        return _region(self.source, self.target)

    @property
    def cells(self) -> Grid:
        """The grid whose cells the means are over, all of them or some."""
        return self.target if self.whole is None else self.whole

    @cached_property
    def same(self) -> bool:
        """Whether nothing changes."""
        return self.source.same_as(self.target)

    @cached_property
    def weights(self) -> tuple[csr_matrix, csr_matrix]:
        """Shares of the old rows in the new ones (Y', Y), and of the old columns in the new ones (X', X)."""
        old, new = (np.sin(np.deg2rad(grid.latitude_bounds()))[::-1] for grid in (self.source, self.cells))
        latitude = _overlaps(old, new)[::-1, ::-1]
        shifts = (-720.0, -360.0, 0.0, 360.0, 720.0)
        longitude = _overlaps(self.source.longitude_bounds(), self.cells.longitude_bounds(), shifts)
        rows = _matches(self.cells.latitude, self.target.latitude, period=None)
        columns = _matches(self.cells.longitude, self.target.longitude, period=360.0)
        assert rows is not None and columns is not None  # a region of it
        return csr_matrix(latitude[rows]), csr_matrix(longitude[columns])

    def means(self, values: np.ndarray) -> np.ndarray:
        """Bring values (Y, X), NaN where masked, to (Y', X') float64."""
        values = np.asarray(values, np.float64)
        if self.crop is not None:
            return values[np.ix_(*self.crop)]
        valid = np.isfinite(values)
        if not valid.any():
            return np.full(self.target.shape, np.nan)
        # Departures from one value: a constant field stays exactly what it was, and no digit is lost to a mean. From
        # zero where there is rain here and none there: cells without have none at all, and not some 1e-18 m.
        origin = 0.0 if (values == 0).any() else values[valid][0]
        if valid.all():
            return self._sums(values - origin) + origin
        share = self._sums(valid.astype(np.float64))
        kept = share >= _VALID_SHARE - _SLIVER
        sums = self._sums(np.where(valid, values - origin, 0.0))
        return np.where(kept, sums / np.where(kept, share, 1.0) + origin, np.nan)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        rows, columns = self.weights
        return np.ascontiguousarray((columns @ np.ascontiguousarray((rows @ values).T)).T)

    def floats(self, values: np.ndarray) -> np.ndarray:
        """Bring float32 values (Y, X), NaN where masked, to (Y', X') float32."""
        return values if self.same else self.means(values).astype(np.float32)

    def field(self, raw: RawField) -> RawField:
        """Bring a field as a file holds it; packed integers stay packed through a crop."""
        if self.same:
            return raw
        if self.crop is None:
            return RawField(self.floats(raw.decode()))
        maps = [item.name for item in fields(raw) if np.shape(getattr(raw, item.name)) == self.source.shape]
        return replace(raw, **{name: getattr(raw, name)[np.ix_(*self.crop)] for name in maps})


def as_change(region: Sequence[float] | None, coarsen: Any, regrid: float | Grid | None) -> GridChange | None:
    """The settings of `prepare` as a value; None where they ask for nothing."""
    if region is None and coarsen is None and regrid is None:
        return None
    pair = None if coarsen is None else tuple(coarsen) if isinstance(coarsen, list | tuple) else (coarsen, coarsen)
    return GridChange(None if region is None else tuple(region), pair, regrid)  # type: ignore[arg-type]


def _region(grid: Grid, part: Grid) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows and columns of `grid` that `part` is; None where points are new, or some between them are left out."""
    rows = _matches(grid.latitude, part.latitude, period=None)
    columns = _matches(grid.longitude, part.longitude, period=360.0)
    if rows is None or columns is None:
        return None
    steps = (*np.diff(rows), *np.diff(columns) % len(grid.longitude))
    return (rows, columns) if all(step == 1 for step in steps) else None


def _matches(old: np.ndarray, new: np.ndarray, period: float | None) -> np.ndarray | None:
    """Position in `old` of each value of `new`; None where one is not there."""
    apart = old[None] - new[:, None]
    if period is not None:
        apart = np.mod(apart + period / 2, period) - period / 2
    found = np.abs(apart).argmin(1)
    return found if (np.abs(np.take_along_axis(apart, found[:, None], 1)) < TOLERANCE).all() else None


def _overlaps(old: np.ndarray, new: np.ndarray, shifts: Sequence[float] = (0.0,)) -> np.ndarray:
    """Share of each new interval that each old one covers: (N', N) from ascending bounds (N + 1,), (N' + 1,)."""
    total = np.zeros((len(new) - 1, len(old) - 1))
    low, high = new[:-1, None], new[1:, None]
    for shift in shifts:
        total += np.maximum(np.minimum(high, old[1:] + shift) - np.maximum(low, old[:-1] + shift), 0)
    shares = total / (high - low)
    return np.where(shares < _SLIVER, 0.0, shares)


def _check_covered(name: str, weights: csr_matrix, source: Grid, target: Grid) -> None:
    share = np.asarray(weights.sum(1)).ravel()
    if share.min() < 1 - 1e-3:
        at = getattr(target, name)[share.argmin()]
        raise UserError(
            f"grid: the cell at {name} {at:g} of {target.describe()} reaches beyond the data, {source.describe()}; "
            "choose a smaller region"
        )
