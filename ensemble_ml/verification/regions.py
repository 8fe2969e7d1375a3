"""Define regions as masks on the grid, and seasons as sets of initialisation times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ensemble_ml.domains import points_within
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid

TROPICS = 20.0  # degrees of latitude, the WMO's border between tropics and extratropics
SEASONS = ("DJF", "MAM", "JJA", "SON")


def region_masks(
    grid: Grid,
    land: np.ndarray | None = None,
    boxes: Mapping[str, Sequence[float]] | None = None,
    taken: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """Return the masks of the regions that the grid reaches: extratropics, tropics, land, sea, and boxes.

    Args:
        grid: Grid of the fields.
        land: (Y, X) land fraction. A point is land from one half on. None leaves out land and sea.
        boxes: [north, west, south, east] in degrees by name. If west exceeds east, the box crosses Greenwich or the
            date line.
        taken: Names that boxes may not have, besides those of the other regions that the grid reaches.

    Returns:
        (Y, X) bool masks by name.

    Raises:
        UserError: A box holds no point of the grid, or its name is taken.
    """
    lat = np.broadcast_to(grid.latitude[:, None], grid.shape)
    found = {
        "northern extratropics": lat >= TROPICS,
        "tropics": np.abs(lat) < TROPICS,
        "southern extratropics": lat <= -TROPICS,
    }
    if land is not None:
        found |= {"land": np.asarray(land) >= 0.5, "sea": np.asarray(land) < 0.5}
    found = {name: mask for name, mask in found.items() if mask.any()}
    for name, box in (boxes or {}).items():
        if name in found or name in taken:
            raise UserError(f"regions.{name}={list(box)}: the name stands for something else in scores; give another")
        found[name] = _box(grid, name, box)
    return found


def _box(grid: Grid, name: str, box: Sequence[float]) -> np.ndarray:
    """Return the mask of a box, (Y, X); raise a UserError if it holds no point of the grid."""
    mask = np.zeros(grid.shape, bool)
    mask[np.ix_(*points_within(grid, box))] = True
    if not mask.any():
        raise UserError(
            f"regions.{name}={list(box)}: holds no point of {grid.describe()}; give [north, west, south, east]"
        )
    return mask


def season_of(times: np.ndarray) -> np.ndarray:
    """Return the meteorological season of each time, (D,) positions in `SEASONS`.

    Args:
        times: (D,) datetime64.
    """
    month = times.astype("datetime64[M]").astype(int) % 12
    return ((month + 1) // 3) % 4
