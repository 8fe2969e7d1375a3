"""Select where a forecast is written: on the whole grid, in a region, or at the grid points nearest to given places.

Axes: Y latitude, X longitude, P point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.grid import TOLERANCE, Grid, eastward, region_points, spacing


@dataclass(frozen=True, eq=False)
class Places:
    """The rows and columns of the model's grid that a forecast holds.

    Attributes:
        rows: (Y',) indices of a region's rows, or (P,) the row of each point.
        columns: (X',) indices of a region's columns, or (P,) the column of each point.
        latitude: degrees north; (Y',) descending, or (P,).
        longitude: degrees east; (X',) ascending, or (P,).
        asked: (P, 2) latitudes and longitudes of the points as they were requested; None for a region.
    """

    rows: np.ndarray
    columns: np.ndarray
    latitude: np.ndarray
    longitude: np.ndarray
    asked: np.ndarray | None = None

    @property
    def dims(self) -> tuple[str, ...]:
        """Return the names of the horizontal dimensions."""
        return ("latitude", "longitude") if self.asked is None else ("point",)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the horizontal dimensions, (Y', X') or (P,)."""
        return (len(self.rows), len(self.columns)) if self.asked is None else (len(self.rows),)

    def cut(self, values: np.ndarray) -> np.ndarray:
        """Cut values on the model's grid, (..., Y, X), to (..., Y', X') or (..., P)."""
        if self.asked is not None:
            return values[..., self.rows, self.columns]
        return values[..., self.rows[:, None], self.columns]


def select(grid: Grid, region: Sequence[float] | None, points: Any) -> Places:
    """Select the grid points that `region` or `points` name; all of them if both are None.

    Args:
        grid: the model's grid.
        region: [north, west, south, east] in degrees, ends included, or None. It runs eastwards from west to east, and
            longitudes may be in either convention. If it crosses the meridian at which the grid begins (mostly
            Greenwich), the longitudes west of this meridian are returned as smaller numbers, so that they ascend: -20
            to 20.
        points: a list of [latitude, longitude] in degrees, or None. It takes precedence over `region`.

    Raises:
        UserError: a region or point reaches beyond the grid, a region holds no grid point, or `points` is not a list of
            pairs.
    """
    if points is not None:
        return nearest_points(grid, points)
    if region is not None:
        rows, columns = region_points(grid, region)
        return Places(rows, columns, grid.latitude[rows], eastward(grid.longitude[columns]))
    rows, columns = (np.arange(n) for n in grid.shape)
    return Places(rows, columns, grid.latitude, grid.longitude)


def nearest_points(grid: Grid, points: Any) -> Places:
    """Select the grid points nearest to [latitude, longitude] pairs, with longitudes in either convention.

    Args:
        grid: the model's grid.
        points: a list of [latitude, longitude] in degrees.

    Raises:
        UserError: `points` is not a list of pairs, or a point lies beyond a pole, or outside the grid by more than half
            a spacing.
    """
    asked = _as_pairs(points)
    rows = np.abs(grid.latitude[None] - asked[:, :1]).argmin(1)
    # Distances in longitude are taken around the circle: 359.9 is close to 0.
    away = np.abs(np.mod(grid.longitude[None] - asked[:, 1:] + 180, 360) - 180)
    columns = away.argmin(1)
    # A point that is more than half a step away from the nearest row or column lies outside the grid.
    far = np.abs(grid.latitude[rows] - asked[:, 0]) > spacing(grid.latitude) / 2 + TOLERANCE
    far |= away.min(1) > spacing(grid.longitude) / 2 + TOLERANCE
    far |= np.abs(asked[:, 0]) > 90
    if far.any():
        latitude, longitude = asked[far.argmax()]
        raise UserError(f"points: [{latitude:g}, {longitude:g}] lies outside the grid, which has {grid.describe()}")
    return Places(rows, columns, grid.latitude[rows], grid.longitude[columns], asked)


def _as_pairs(points: Any) -> np.ndarray:
    """Return the points as an array (P, 2), or raise a UserError if they are not a list of pairs of numbers."""
    pairs = list(points) if isinstance(points, list | tuple) else []
    good = bool(pairs) and all(
        isinstance(p, list | tuple) and len(p) == 2 and all(type(x) in (int, float) and abs(x) < 1e9 for x in p)
        for p in pairs
    )
    if not good:
        raise UserError(f"points={points}: give a list of [latitude, longitude], e.g. [[47.3,11.4],[48.2,16.4]]")
    return np.asarray(pairs, np.float64)
