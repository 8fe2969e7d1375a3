"""Quantiles of the model climate around a day of the year, from members of other years: what EFI is measured against.

Axes: M member, K quantile, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

LEVELS = np.linspace(0, 1, 21)
FEWEST_VALUES = 20  # members of all dates together; of fewer, quantiles say nothing
_CACHE_BYTES = 512 << 20


class ModelClimate:
    """Climate of one field, read date by date; dates are kept as far as half a gigabyte allows.

    Args:
        times: (D,) start dates of the archive.
        days: how far from the day of the year other years' dates may lie.
        read: the members (M, Z, Y, X) of a date.
    """

    def __init__(self, times: np.ndarray, days: int, read: Callable[[int], np.ndarray]):
        self._times, self._days, self._read = times, days, read
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()

    def dates(self, date: int) -> list[int]:
        """Positions of the start dates of other years within `days` of this day of the year."""
        year = self._times.astype("datetime64[Y]").astype(int)
        day = (self._times.astype("datetime64[D]") - self._times.astype("datetime64[Y]")).astype(int)
        apart = np.abs(day - day[date])
        near = np.minimum(apart, 365 - apart) <= self._days
        return np.flatnonzero(near & (year != year[date])).tolist()

    def quantiles(self, date: int) -> np.ndarray | None:
        """At `LEVELS` (K, Z, Y, X), of years other than the date's; None where there are too few."""
        members = [self._members(other) for other in self.dates(date)]
        if sum(map(len, members)) < FEWEST_VALUES:
            return None
        values = np.concatenate(members)
        values = np.sort(values, axis=0)  # NaN goes to the end
        whole = np.isfinite(values[-1])
        at = LEVELS * (len(values) - 1)
        low = np.floor(at).astype(int)
        high, share = np.minimum(low + 1, len(values) - 1), (at - low)[:, None, None, None]
        found = values[low] * (1 - share) + values[high] * share
        return np.where(whole, found, np.nan)

    def _members(self, date: int) -> np.ndarray:
        if date not in self._kept:
            self._kept[date] = self._read(date).astype(np.float32)
            while len(self._kept) > 1 and sum(a.nbytes for a in self._kept.values()) > _CACHE_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(date)
        return self._kept[date]
