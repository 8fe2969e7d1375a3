"""Grids derived from grids: a region, a coarser grid, an even grid; and the settings that turn one grid into another.

Axes: Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.grid import TOLERANCE, Edge, Grid, canonical


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
    _check_latitudes(grid, north, south, region)
    if not grid.wraps:
        _check_longitudes(grid, west, _width(west, east), region)
    rows, columns = points_within(grid, region)
    if not len(rows) or not len(columns):
        raise UserError(f"region={list(region)}: holds no grid point; the grid has {grid.describe()}")
    return rows, columns


def points_within(grid: Grid, region: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of rows and columns as `region_points` does, for a region that may reach beyond `grid`.

    Args:
        grid: the grid.
        region: as for `region_points`.

    Returns:
        Rows (Y',) and columns (X',). Both may be empty.
    """
    north, west, south, east = (float(x) for x in region)
    rows = np.flatnonzero((grid.latitude <= north + TOLERANCE) & (grid.latitude >= south - TOLERANCE))
    # The eastward distance from the western edge. A point to the west of it by a rounding error must not become the
    # last one, 360 degrees to the east.
    offset = np.mod(grid.longitude - west + TOLERANCE, 360) - TOLERANCE
    columns = np.flatnonzero(offset <= _width(west, east) + TOLERANCE)
    return rows, columns[np.argsort(offset[columns], kind="stable")]


def _width(west: float, east: float) -> float:
    """Return the degrees eastwards from west to east.

    The width is 360 for a whole turn or more, and also for west 180 and east -180.
    """
    span = east - west
    return 360.0 if span >= 360 - TOLERANCE or abs(span + 360) <= TOLERANCE else span % 360


def cut(grid: Grid, region: Sequence[float]) -> Grid:
    """Return the part of `grid` within a region.

    Args:
        grid: the grid.
        region: [north, west, south, east] in degrees.

    Raises:
        UserError: as `region_points`.
    """
    rows, columns = region_points(grid, region)
    return canonical(grid.latitude[rows], eastward(grid.longitude[columns]))[0]


def coarse_grid(grid: Grid, rows: int, columns: int) -> Grid:
    """Return the grid with `rows` and `columns` times the spacing.

    If the grid closes the circle and has a row on a pole, every n-th point stays, counted from that pole and from the
    first longitude: 361 x 720 with n = 2 gives 181 x 360, poles included. In any other grid, blocks of whole cells are
    joined, and their centres are the new points. If only one pole has a row, `rows` need not divide the grid: rows with
    incomplete cells are left out.

    Args:
        grid: the grid.
        rows: factor for the spacing of rows.
        columns: factor for the spacing of columns.

    Raises:
        UserError: a factor does not divide the grid, or leaves fewer than two rows or columns.
    """
    latitude, longitude = grid.latitude, grid.longitude
    if Edge.POLE_ROW not in (grid.north, grid.south):
        return Grid(_blocks("rows", latitude, rows), _blocks("columns", longitude, columns))
    # With a row on each pole, the factor must divide the intervals between rows, so that both rows stay.
    both = grid.north is grid.south
    if both:
        _check_factor(rows, len(latitude) - 1, "intervals between rows")
    _check_factor(columns, len(longitude), "columns")
    kept = latitude[::rows] if grid.north is Edge.POLE_ROW else latitude[::-1][::rows][::-1]
    return covered(grid, kept, longitude[::columns])


def even_grid(grid: Grid, degrees: float) -> Grid:
    """Return the points at multiples of a spacing whose cells lie completely on `grid`.

    The multiples count from the north pole and from Greenwich.

    Args:
        grid: the grid.
        degrees: the spacing in degrees.

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

    Args:
        grid: the grid.
        latitude: degrees north, descending.
        longitude: degrees east, ascending.

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

    Args:
        source: the grid of the data.
        target: the grid that is wanted.
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


def eastward(longitude: np.ndarray) -> np.ndarray:
    """Return longitudes that ascend. If they jump from 360 back to 0, 360 is subtracted from those before the jump."""
    falls = np.flatnonzero(np.diff(longitude) < 0)
    moved = longitude.copy()
    if len(falls):
        moved[: falls[0] + 1] -= 360
    return moved


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


def _check_latitudes(grid: Grid, north: float, south: float, region: Sequence[float]) -> None:
    """Refuse a region that reaches beyond the grid by more than one spacing, or beyond a pole."""
    margin = spacing(grid.latitude) + TOLERANCE
    most, least = grid.latitude[0] + margin, grid.latitude[-1] - margin
    if north > min(most, 90 + TOLERANCE) or south < max(least, -90 - TOLERANCE):
        raise UserError(f"region={list(region)}: reaches beyond the grid, which has {grid.describe()}")


def _check_longitudes(grid: Grid, west: float, width: float, region: Sequence[float]) -> None:
    """Refuse a region that reaches beyond a regional grid by more than one spacing."""
    margin = spacing(grid.longitude) + TOLERANCE
    first = np.mod(west - (grid.longitude[0] - margin), 360)
    if first + width > grid.longitude[-1] - grid.longitude[0] + 2 * margin:
        raise UserError(f"region={list(region)}: reaches beyond the grid, which has {grid.describe()}")


def spacing(axis: np.ndarray) -> float:
    """Return the mean spacing of an axis in degrees; 1 if it has a single point."""
    return abs(axis[-1] - axis[0]) / (len(axis) - 1) if len(axis) > 1 else 1.0
