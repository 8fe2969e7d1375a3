"""How several fields of an archive make one that is wanted: intervals of sums, maxima over parts, speed of a vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial, reduce

import numpy as np

from data_prep.records import RawField
from ensemble_ml.errors import UserError

_FALL, _FALLING = 0.05, 0.01  # share of its maximum by which a sum may fall, and share of points that may fall further
_ROUNDING = 0.004  # share of its maximum by which packing into 8 bits may err, twice


class Combine(Enum):
    """How the fields of the archive make the field that is wanted."""

    ONE = "one"
    DIFFERENCE = "difference"  # first less second: an interval of a sum that runs from the start (`difference`)
    SUM = "sum"
    MAXIMUM = "maximum"
    SPEED = "speed"  # of a vector, from its two components


def difference(later: RawField, earlier: RawField) -> np.ndarray:
    """What came to a sum that runs from the start, (Y, X) float64.

    Packing rounds both sums: what is no more than half a step of each is no rain, or a dry interval would come out just
    below zero here, just above it there.

    Raises:
        UserError: the sum fell by more, over more of the field: it runs from somewhere else.
    """
    first, second = (raw.decode().astype(np.float64) for raw in (later, earlier))
    now, before = np.maximum(first, 0), np.maximum(second, 0)
    falls = now < before - _FALL * _most(before) - _ROUNDING * _most(now)  # never at a point without a value
    share = falls.sum() / max(1, np.isfinite(now + before).sum())
    if share > _FALLING:
        raise UserError(
            f"its sum is below that of the lead before at {share:.0%} of the points, so it does not run from the"
            " start; state the interval of each (time bounds in NetCDF, a step range in GRIB)"
        )
    more = first - second
    return np.where(more <= later.rounding + earlier.rounding, 0.0, more)


def _most(values: np.ndarray) -> float:
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


COMBINED: dict[Combine, Callable[[Iterable[np.ndarray]], np.ndarray]] = {  # of parts that may come one by one
    Combine.SUM: partial(reduce, np.add),
    Combine.MAXIMUM: partial(reduce, np.maximum),
    Combine.SPEED: lambda parts: np.hypot(*parts),
}
