"""The geometry of regular latitude-longitude grids (order, wrap, poles, exact cell areas), and grids made from grids.

In the program latitude runs from north to south, and longitude eastwards. A grid that closes the circle starts at its
first longitude in [0, 360). A regional grid stays in one piece, so it starts below zero if it crosses Greenwich or ends
there.

Settings turn one grid into another: a region, a coarser grid, an even grid.

Axes: Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ensemble_ml.errors import UserError

TOLERANCE = 1e-3  # degrees; GRIB edition 1 stores coordinates in millidegrees


class Edge(Enum):
    """The kinds of edge of a grid: what lies beyond its first or last row."""

    POLE_ROW = "pole_row"  # the row lies on the pole itself
    POLE_BETWEEN = "pole_between"  # the pole lies half a spacing beyond the row
    OPEN = "open"  # any other edge, such as that of a regional grid: nothing is known beyond


@dataclass(frozen=True, eq=False)
class Grid:
    """A regular grid of `latitude` (Y,) degrees north, descending, and `longitude` (X,) degrees east, ascending.

    Raises:
        UserError: an axis is empty, has NaN, is not monotonic or not evenly spaced, or a latitude is outside -90..90.
    """

    latitude: np.ndarray
    longitude: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "latitude", np.asarray(self.latitude, np.float64))
        object.__setattr__(self, "longitude", np.asarray(self.longitude, np.float64))
        _check_axis("latitude", -self.latitude)
        _check_axis("longitude", self.longitude)
        if np.abs(self.latitude).max() > 90 + TOLERANCE:
            raise UserError(f"latitude {self.latitude[np.abs(self.latitude).argmax()]:g}: outside -90..90")

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and columns (Y, X)."""
        return len(self.latitude), len(self.longitude)

    @property
    def wraps(self) -> bool:
        """Return whether the last longitude is one spacing west of the first, so that the axis is periodic."""
        step = spacing(self.longitude)
        return bool(abs(self.longitude[-1] + step - self.longitude[0] - 360) < max(TOLERANCE, step * 0.01))

    @property
    def north(self) -> Edge:
        """Return what lies north of the first row."""
        return self._edge(90 - self.latitude[0])

    @property
    def south(self) -> Edge:
        """Return what lies south of the last row."""
        return self._edge(90 + self.latitude[-1])

    def _edge(self, distance: float) -> Edge:
        """Return the kind of edge, given the distance of the outermost row from the pole in degrees."""
        if not self.wraps or len(self.latitude) < 2:
            return Edge.OPEN
        step = spacing(self.latitude)
        if distance < 0.01 * step:
            return Edge.POLE_ROW
        return Edge.POLE_BETWEEN if abs(distance - step / 2) < 0.01 * step else Edge.OPEN

    @property
    def gaussian(self) -> bool:
        """Return whether the rows of a global grid are those of a Gaussian grid, the zeros of a Legendre polynomial.

        Such rows are nearly evenly spaced. They differ from regular rows in the distance of the first row from the pole
        (Abramowitz and Stegun 1964, 22.16.6), here in radians:

            distance = j / (Y + 1/2) = (j / pi) spacing

            j  first zero of Bessel's J_0, 2.405
            Y  number of rows
        """
        if not self.wraps or len(self.latitude) < 4:
            return False
        step = spacing(self.latitude)
        return all(abs((90 - abs(self.latitude[end])) / step - 2.4048 / np.pi) < 0.01 for end in (0, -1))

    def latitude_bounds(self) -> np.ndarray:
        """Return the edges of the rows, (Y + 1,) degrees north, descending: midway between rows.

        The outer edges lie half a spacing beyond the outermost rows, but not beyond the poles. A single row is 1 degree
        wide.
        """
        middle = (self.latitude[:-1] + self.latitude[1:]) / 2
        first, last = _outer_bounds(self.latitude)
        return np.concatenate([[min(first, 90.0)], middle, [max(last, -90.0)]])

    def longitude_bounds(self) -> np.ndarray:
        """Return the edges of the columns, (X + 1,) degrees east, ascending: midway between columns.

        The outer edges lie half a spacing beyond the outermost columns. If the grid wraps, they are 360 degrees apart.
        A single column is 1 degree wide.
        """
        if self.wraps:
            around = np.concatenate([[self.longitude[-1] - 360], self.longitude, [self.longitude[0] + 360]])
            return (around[:-1] + around[1:]) / 2
        last, first = _outer_bounds(self.longitude[::-1])
        return np.concatenate([[first], (self.longitude[:-1] + self.longitude[1:]) / 2, [last]])

    def area_weights(self) -> np.ndarray:
        """Return the area of each cell divided by the mean area: (Y, X) float64, with mean one.

        The area between two latitudes is proportional to the difference of their sines. Bounds lie midway between rows
        and stop at the poles, so a row on a pole keeps the small cap that belongs to it.
        """
        heights = -np.diff(np.sin(np.deg2rad(self.latitude_bounds())))
        return np.broadcast_to((heights / heights.mean())[:, None], self.shape).copy()

    def same_as(self, other: Grid) -> bool:
        """Return whether both grids have the same points, to the precision of GRIB edition 1."""
        return self.shape == other.shape and all(
            np.allclose(a, b, rtol=0, atol=TOLERANCE)
            for a, b in ((self.latitude, other.latitude), (self.longitude, other.longitude))
        )

    def describe(self) -> str:
        """Return the size and extent of the grid as messages show them."""
        rows, columns = self.shape
        lat, lon = self.latitude, self.longitude
        return f"{rows} x {columns} points, {lat[0]:g} to {lat[-1]:g} N, {lon[0]:g} to {lon[-1]:g} E"


def _check_axis(name: str, ascending: np.ndarray) -> None:
    """Raise a UserError if an axis is not a vector, is empty, has NaN, or is not evenly spaced."""
    if ascending.ndim != 1:
        raise UserError(f"{name}: expected one axis, got shape {ascending.shape}")
    if not len(ascending):
        raise UserError(f"{name}: has no points; an axis needs at least one")
    if not np.isfinite(ascending).all():
        raise UserError(f"{name}: {int((~np.isfinite(ascending)).sum())} of {ascending.size} values are absent (NaN)")
    steps = np.diff(ascending)
    if len(steps) and (steps.min() <= 0 or np.ptp(steps) > max(0.02 * steps.mean(), 2 * TOLERANCE)):
        raise UserError(f"{name}: not evenly spaced in one direction; only regular latitude-longitude grids are read")


def _outer_bounds(latitude: np.ndarray) -> tuple[float, float]:
    """Return the northern edge of the first row and the southern edge of the last. A single row is 1 degree wide."""
    half = spacing(latitude) / 2
    return latitude[0] + half, latitude[-1] - half


def spacing(axis: np.ndarray) -> float:
    """Return the mean spacing of an axis in degrees; 1 if it has a single point."""
    return abs(axis[-1] - axis[0]) / (len(axis) - 1) if len(axis) > 1 else 1.0


def canonical(latitude: np.ndarray, longitude: np.ndarray) -> tuple[Grid, np.ndarray, np.ndarray]:
    """Bring an archive's axes into the program's order.

    Args:
        latitude: (Y,) degrees north, in either order.
        longitude: (X,) degrees east, ascending in the archive's order of points; any multiple of 360 may be added. A
            region across Greenwich may consist of two pieces, the eastern one first, as a cut out of 0 to 360 leaves
            it.

    Returns:
        The grid, and the index arrays (Y,), (X,) that take a field of the archive to it: `values[rows[:, None],
        columns]`. A meridian that appears at both ends is taken once.

    Raises:
        UserError: an axis has no points, longitude runs westwards, or the axes make no regular grid.
    """
    latitude, longitude = np.asarray(latitude, np.float64), np.asarray(longitude, np.float64)
    rows = np.argsort(-latitude, kind="stable")
    pieces = np.roll(np.arange(len(longitude)), -_second_piece(longitude))
    if pieces[:1].any():  # where the two pieces meet, one meridian may appear twice
        pieces = pieces[~(_eastwards(np.diff(longitude[pieces], prepend=np.nan)) < TOLERANCE)]
    longitude = longitude[pieces]
    unwrapped = np.unwrap(longitude, period=360) if len(longitude) > 1 else longitude
    if len(longitude) > 1 and unwrapped[-1] < unwrapped[0]:
        raise UserError("longitude: runs westwards; only grids scanned eastwards are read")
    unwrapped = np.round(unwrapped, 9)
    if len(unwrapped) > 2 and abs(unwrapped[-1] - unwrapped[0] - 360) < TOLERANCE:
        unwrapped = unwrapped[:-1]  # the last meridian is the first one again
    trial = Grid(latitude[rows], unwrapped)
    if trial.wraps:
        modulo = np.mod(unwrapped, 360)
        modulo[np.isclose(modulo, 360, atol=TOLERANCE)] = 0
        columns = np.argsort(modulo, kind="stable")
        return Grid(latitude[rows], modulo[columns]), rows, pieces[columns]
    first = np.mod(unwrapped[0], 360)
    shifted = unwrapped - unwrapped[0] + first
    if shifted[-1] > 360 - TOLERANCE:  # the region crosses Greenwich, or ends there
        shifted = shifted - 360
    return Grid(latitude[rows], shifted), rows, pieces[: len(unwrapped)]


def _second_piece(longitude: np.ndarray) -> int:
    """Return the index where a region across Greenwich jumps back to its western piece; 0 if there is no such jump."""
    if len(longitude) < 3 or not np.isfinite(longitude).all():
        return 0
    steps = _eastwards(np.diff(longitude, append=longitude[0]))  # the last one closes the circle
    gap, usual = int(steps.argmax()), float(np.median(steps))
    once_around = abs(steps.sum() - 360) < TOLERANCE
    return gap + 1 if once_around and gap < len(steps) - 1 and steps[gap] > 1.5 * usual else 0


def _eastwards(steps: np.ndarray) -> np.ndarray:
    """Return steps of longitude as degrees eastwards below 360; a meridian that appears again is about zero away."""
    return np.mod(steps + TOLERANCE, 360) - TOLERANCE


def region_points(grid: Grid, region: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows (Y',) and columns (X',) of `grid` within a region, including the region's edges.

    Args:
        grid: the grid.
        region: [north, west, south, east] in degrees. It runs eastwards from west to east, in either convention of
            longitude; the columns are in that order.

    Raises:
        UserError: the region reaches beyond the grid by more than one spacing, or beyond a pole, or contains no grid
            point.
    """
    north, west, south, east = (float(x) for x in region)
    margin = spacing(grid.latitude) + TOLERANCE
    most, least = grid.latitude[0] + margin, grid.latitude[-1] - margin
    beyond = north > min(most, 90 + TOLERANCE) or south < max(least, -90 - TOLERANCE)
    if not grid.wraps:
        margin = spacing(grid.longitude) + TOLERANCE
        first = np.mod(west - (grid.longitude[0] - margin), 360)
        beyond = beyond or first + _width(west, east) > grid.longitude[-1] - grid.longitude[0] + 2 * margin
    if beyond:
        raise UserError(f"region={list(region)}: reaches beyond the grid, which has {grid.describe()}")
    rows, columns = points_within(grid, region)
    if not len(rows) or not len(columns):
        raise UserError(f"region={list(region)}: holds no grid point; the grid has {grid.describe()}")
    return rows, columns


def points_within(grid: Grid, region: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return indices as `region_points` does, for a region that may reach beyond `grid`. Both may be empty."""
    north, west, south, east = (float(x) for x in region)
    rows = np.flatnonzero((grid.latitude <= north + TOLERANCE) & (grid.latitude >= south - TOLERANCE))
    # The eastward distance from the western edge. A point to the west of it by a rounding error must not become the
    # last one, 360 degrees to the east.
    offset = np.mod(grid.longitude - west + TOLERANCE, 360) - TOLERANCE
    columns = np.flatnonzero(offset <= _width(west, east) + TOLERANCE)
    return rows, columns[np.argsort(offset[columns], kind="stable")]


def _width(west: float, east: float) -> float:
    """Return the degrees eastwards from west to east: 360 for a whole turn or more, and for west 180 and east -180."""
    span = east - west
    return 360.0 if span >= 360 - TOLERANCE or abs(span + 360) <= TOLERANCE else span % 360


def cut(grid: Grid, region: Sequence[float]) -> Grid:
    """Return the part of `grid` within a region, [north, west, south, east] in degrees.

    Raises:
        UserError: as `region_points`.
    """
    rows, columns = region_points(grid, region)
    return canonical(grid.latitude[rows], eastward(grid.longitude[columns]))[0]


def eastward(longitude: np.ndarray) -> np.ndarray:
    """Return longitudes that ascend. If they jump from 360 back to 0, 360 is subtracted from those before the jump."""
    falls = np.flatnonzero(np.diff(longitude) < 0)
    moved = longitude.copy()
    if len(falls):
        moved[: falls[0] + 1] -= 360
    return moved


def coarse_grid(grid: Grid, rows: int, columns: int) -> Grid:
    """Return the grid with `rows` and `columns` times the spacing.

    If the grid closes the circle and has a row on a pole, every n-th point stays, counted from that pole and from the
    first longitude: 361 x 720 with n = 2 gives 181 x 360, poles included. In any other grid, blocks of whole cells are
    joined, and their centres are the new points. If only one pole has a row, `rows` need not divide the grid: rows with
    incomplete cells are left out.

    Raises:
        UserError: a factor does not divide the grid, or leaves fewer than two rows or columns.
    """
    latitude, longitude = grid.latitude, grid.longitude
    if Edge.POLE_ROW not in (grid.north, grid.south):
        return Grid(_blocks("rows", latitude, rows), _blocks("columns", longitude, columns))
    # With a row on each pole, the factor must divide the intervals between rows, so that both rows stay.
    if grid.north is grid.south:
        _check_factor(rows, len(latitude) - 1, "intervals between rows")
    _check_factor(columns, len(longitude), "columns")
    kept = latitude[::rows] if grid.north is Edge.POLE_ROW else latitude[::-1][::rows][::-1]
    return covered(grid, kept, longitude[::columns])


def _blocks(name: str, axis: np.ndarray, factor: int) -> np.ndarray:
    """Return the centres of blocks of `factor` points of an axis."""
    _check_factor(factor, len(axis), name)
    if len(axis) // factor < 2:
        raise UserError(f"coarsen={factor}: leaves fewer than two {name} of {len(axis)}; choose a smaller factor")
    return axis.reshape(-1, factor).mean(1)


def _check_factor(factor: int, count: int, what: str) -> None:
    """Raise a UserError if a factor does not divide the grid. The message lists factors that do."""
    if factor < 1 or count % factor:
        fitting = [str(n) for n in range(2, count // 2 + 1) if count % n == 0]
        some = ", ".join(fitting[:8]) or "none but 1"
        raise UserError(f"coarsen={factor}: does not divide the {count} {what} of the grid; {some} do; or use regrid")


def even_grid(grid: Grid, degrees: float) -> Grid:
    """Return the points at multiples of a spacing in degrees whose cells lie completely on `grid`.

    The multiples count from the north pole and from Greenwich.

    Raises:
        UserError: `degrees` does not divide 180, or fewer than two rows or columns of cells lie on the grid.
    """
    rows = 180 / degrees
    if abs(rows - round(rows)) > 1e-6 * rows:
        raise UserError(f"regrid={degrees:g}: does not divide 180 degrees; 1, 1.5, 2, 2.5 and 5 do")
    latitude = 90 - np.arange(round(rows) + 1) * degrees
    first = 0.0 if grid.wraps else np.ceil(grid.longitude[0] / degrees - 1e-6) * degrees
    span = 360.0 - degrees if grid.wraps else grid.longitude[-1] - first
    return covered(grid, latitude, first + np.arange(int(span / degrees + 1e-6) + 1) * degrees)


def covered(grid: Grid, latitude: np.ndarray, longitude: np.ndarray) -> Grid:
    """Return the grid of those evenly spaced points whose cells lie completely within the cells of `grid`.

    Raises:
        UserError: fewer than two rows or columns are left.
    """
    # The cell of a row on a pole is a cap that ends there.
    half = np.abs(latitude[1] - latitude[0]) / 2 if len(latitude) > 1 else 0.0
    bounds = grid.latitude_bounds()
    north, south = np.minimum(latitude + half, 90), np.maximum(latitude - half, -90)
    latitude = latitude[(north <= bounds[0] + TOLERANCE) & (south >= bounds[-1] - TOLERANCE)]
    if not grid.wraps:
        half = (longitude[1] - longitude[0]) / 2 if len(longitude) > 1 else 0.0
        west, east = grid.longitude_bounds()[[0, -1]]
        longitude = longitude[(longitude - half >= west - TOLERANCE) & (longitude + half <= east + TOLERANCE)]
    if len(latitude) < 2 or len(longitude) < 2:
        raise UserError(f"coarsen or regrid: leaves fewer than two rows or columns of {grid.describe()}; choose less")
    return Grid(latitude, longitude)


def settings_for(source: Grid, target: Grid) -> str:
    """Return the settings of `prepare` that bring `source` onto `target`, e.g. `coarsen=2 region=[60,-20,40,20]`.

    The text is empty if the grids are the same, or if no settings do so.
    """
    lat, lon = target.latitude, target.longitude
    corners = (lat[0], lon[0], lat[-1], lon[-1])
    region = "region=[" + ",".join(f"{x:g}" for x in corners) + "]"
    for setting, grid in _candidates(source, target):
        if grid.same_as(target):
            return setting
        try:
            if cut(grid, corners).same_as(target):
                return f"{setting} {region}".strip()
        except UserError:
            continue
    return ""


def _candidates(source: Grid, target: Grid) -> list[tuple[str, Grid]]:
    """Return `source`, and the grids that one setting makes of it at the spacing of `target`, each with its setting."""
    found = [("", source)]
    # A single row or column has no spacing to compare.
    if min(source.shape + target.shape) < 2:
        return found
    steps = [[abs(axis[1] - axis[0]) for axis in (grid.latitude, grid.longitude)] for grid in (source, target)]
    rows, columns = (max(round(new / old), 1) for old, new in zip(*steps, strict=True))
    degrees, factors = float(f"{steps[1][0]:.6g}"), f"{rows}" if rows == columns else f"[{rows},{columns}]"
    tries: list[tuple[str, Callable[[], Grid]]] = [
        (f"coarsen={factors}", lambda: coarse_grid(source, rows, columns)),
        (f"regrid={degrees:g}", lambda: even_grid(source, degrees)),
    ]
    for setting, make in tries:
        try:
            found.append((setting, make()))
        except UserError:
            continue
    return found
