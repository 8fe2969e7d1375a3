"""How several fields of an archive make one that is wanted: intervals of sums, maxima over parts, speed of a vector."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np

from ensemble_ml.errors import UserError

_FALL, _FALLING = 0.05, 0.01  # share of its maximum by which a sum may fall, and share of points that may fall further
_ROUNDING = 0.004  # share of its maximum by which packing into 8 bits may err, twice


class Combine(Enum):
    """How the fields of the archive make the field that is wanted."""

    ONE = "one"
    DIFFERENCE = "difference"  # first less second, not below zero: an interval of a sum that runs from the start
    SUM = "sum"
    MAXIMUM = "maximum"
    SPEED = "speed"  # of a vector, from its two components


def _difference(parts: list[np.ndarray]) -> np.ndarray:
    """What came to a sum that runs from the start.

    Packing rounds both sums, so that a dry interval may come out just below zero.

    Raises:
        UserError: the sum fell by more, over more of the field: it runs from somewhere else.
    """
    now, before = (np.maximum(part, 0) for part in parts)
    falls = now < before - _FALL * before.max() - _ROUNDING * now.max()
    if falls.mean() > _FALLING:
        raise UserError(
            f"its sum is below that of the lead before at {falls.mean():.0%} of the points, so it does not run from the"
            " start; state the interval of each (time bounds in NetCDF, a step range in GRIB)"
        )
    return np.maximum(parts[0] - parts[1], 0)


COMBINED: dict[Combine, Callable[[list[np.ndarray]], np.ndarray]] = {
    Combine.DIFFERENCE: _difference,
    Combine.SUM: lambda parts: np.sum(parts, axis=0),
    Combine.MAXIMUM: lambda parts: np.max(parts, axis=0),
    Combine.SPEED: lambda parts: np.hypot(*parts),
}
