"""Combine several archive fields into one: sums and maxima over intervals, and the speed of a vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial, reduce

import numpy as np

from data_prep.records import RawField
from ensemble_ml.errors import UserError

_FALL = 0.05  # fraction of its maximum by which a sum may fall from one lead to the next
_FALLING = 0.01  # fraction of the points that may fall by more
_ROUNDING = 0.004  # one packing step of 8 bits, as a fraction of the maximum


class Combine(Enum):
    """The ways in which fields of the archive make a wanted field."""

    ONE = "one"
    DIFFERENCE = "difference"  # first minus second: an interval of a sum from the start (see `difference`)
    SUM = "sum"
    MAXIMUM = "maximum"
    SPEED = "speed"  # magnitude of a vector, from its two components


def difference(later: RawField, earlier: RawField) -> np.ndarray:
    """Return the increase between two leads of a sum that runs from the init time, (Y, X) float64.

    Packing rounds both sums. A decrease, and an increase of at most half a packing step of each, count as zero;
    otherwise a dry interval would have values slightly below and above zero. Points without a value stay NaN.

    Args:
        later: the sum up to the later lead.
        earlier: the sum up to the earlier lead.

    Raises:
        UserError: the sum falls noticeably at more than 1 % of the points, so it does not run from the init time.
    """
    first, second = (raw.decode().astype(np.float64) for raw in (later, earlier))
    now, before = np.maximum(first, 0), np.maximum(second, 0)
    falls = now < before - _FALL * _most(before) - _ROUNDING * _most(now)  # false at points without a value
    share = falls.sum() / max(1, np.isfinite(now + before).sum())
    if share > _FALLING:
        raise UserError(
            f"its sum is below that of the lead before at {share:.0%} of the points, so it does not run from the init"
            " time; state the interval of each sum (time bounds in NetCDF, or intervals={tp: HOURS};"
            " a step range in GRIB)"
        )
    more = first - second
    return np.where(more <= later.rounding + earlier.rounding, 0.0, more)


def _most(values: np.ndarray) -> float:
    """Return the largest finite value, at least 0."""
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


COMBINED: dict[Combine, Callable[[Iterable[np.ndarray]], np.ndarray]] = {  # each takes an iterator of fields (Y, X)
    Combine.SUM: partial(reduce, np.add),
    Combine.MAXIMUM: partial(reduce, np.maximum),
    Combine.SPEED: lambda parts: np.hypot(*parts),
}
