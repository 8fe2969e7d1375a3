"""Where a forecast is written: the whole grid, a region of it, or the grid points nearest to given places.

Axes: Y latitude, X longitude, P point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble_ml.domains import eastward, region_points, spacing
from ensemble_ml.errors import UserError
from ensemble_ml.grid import TOLERANCE, Grid


@dataclass(frozen=True, eq=False)
class Places:
    """Rows and columns of the model's grid that a forecast holds.

    A field: `rows` (Y',), `latitude` (Y',) descending, `columns` (X',), `longitude` (X',) ascending. Points: all four
    (P,), and `asked` (P, 2) holds the latitudes and longitudes as they were asked for.
    """

    rows: np.ndarray
    columns: np.ndarray
    latitude: np.ndarray
    longitude: np.ndarray
    asked: np.ndarray | None = None

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the horizontal dimensions."""
        return ("latitude", "longitude") if self.asked is None else ("point",)

    @property
    def shape(self) -> tuple[int, ...]:
        """(Y', X') or (P,)."""
        return (len(self.rows), len(self.columns)) if self.asked is None else (len(self.rows),)

    def cut(self, values: np.ndarray) -> np.ndarray:
        """(..., Y, X) of the model's grid to (..., Y', X') or (..., P)."""
        if self.asked is not None:
            return values[..., self.rows, self.columns]
        return values[..., self.rows[:, None], self.columns]


def select(grid: Grid, region: Sequence[float] | None, points: Any) -> Places:
    """The places that `region` or `points` name on `grid`; all of it where both are None.

    Raises:
        UserError: either leaves the grid, or is not written as it should be.
    """
    if points is not None:
        return nearest_points(grid, points)
    if region is not None:
        return cut_region(grid, region)
    rows, columns = (np.arange(n) for n in grid.shape)
    return Places(rows, columns, grid.latitude, grid.longitude)


def cut_region(grid: Grid, region: Sequence[float]) -> Places:
    """Rows and columns within [north, west, south, east] degrees, ends included.

    The region runs eastwards from west to east, in either convention of longitude; where it crosses Greenwich (or
    whatever meridian the grid begins with) the longitudes returned begin below that of the crossing: -20 to 20.

    Raises:
        UserError: the region reaches beyond the grid, or holds no grid point.
    """
    rows, columns = region_points(grid, region)
    return Places(rows, columns, grid.latitude[rows], eastward(grid.longitude[columns]))


def nearest_points(grid: Grid, points: Any) -> Places:
    """The grid points nearest to [latitude, longitude] pairs, longitudes in either convention.

    Raises:
        UserError: not a list of pairs, or a point lies outside the grid.
    """
    asked = _as_pairs(points)
    rows = np.abs(grid.latitude[None] - asked[:, :1]).argmin(1)
    away = np.abs(np.mod(grid.longitude[None] - asked[:, 1:] + 180, 360) - 180)
    columns = away.argmin(1)
    far = np.abs(grid.latitude[rows] - asked[:, 0]) > spacing(grid.latitude) / 2 + TOLERANCE
    far |= away.min(1) > spacing(grid.longitude) / 2 + TOLERANCE
    far |= np.abs(asked[:, 0]) > 90
    if far.any():
        latitude, longitude = asked[far.argmax()]
        raise UserError(f"points: [{latitude:g}, {longitude:g}] lies outside the grid, which has {grid.describe()}")
    return Places(rows, columns, grid.latitude[rows], grid.longitude[columns], asked)


def _as_pairs(points: Any) -> np.ndarray:
    pairs = list(points) if isinstance(points, list | tuple) else []
    good = bool(pairs) and all(
        isinstance(p, list | tuple) and len(p) == 2 and all(type(x) in (int, float) and np.isfinite(x) for x in p)
        for p in pairs
    )
    if not good:
        raise UserError(f"points={points}: give a list of [latitude, longitude], e.g. [[47.3,11.4],[48.2,16.4]]")
    return np.asarray(pairs, np.float64)
