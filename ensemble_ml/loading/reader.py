"""Reads what a model needs of one start date, reduces members to mean and spread, and keeps decoded fields in memory.

Axes: M member, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.store.source import Fields, Part, Selection, Source, zero_by_nature

_FLOAT32 = 4


class Reader:
    """Fields of `source` in the order of `spec`, with a cache of decoded dates of at most `cache_gb` (1e9 bytes).

    A date enters the cache whole, and stays: every date is used once an epoch in random order, so that no policy of
    replacement does better than keeping the first ones. Dates beyond the budget are read anew, drawn members only.
    Safe to use from several threads.
    """

    def __init__(self, source: Source, spec: ModelSpec, *, cache_gb: float = 0.0):
        self.source, self.spec = source, spec
        self.members = len(source.layout.realization)
        places = [(t, s) for t in range(len(spec.leads_in)) for s in range(len(spec.surface))]
        self._zeros = [(t, s) for t, s in places if zero_by_nature(spec.surface[s], spec.leads_in[t])]
        self._free = int(cache_gb * 1e9)
        self._kept: dict[tuple[Part, int], Fields] = {}
        self._lock = threading.Lock()

    @property
    def full_size(self) -> int:
        """N, the number of members that the source holds."""
        return self.members

    def forecast(self, date: int, members: Sequence[int] | np.ndarray, *, strict: bool = True) -> Fields:
        """Members at positions `members` for the input leads: (M, T_in, V, Z, Y, X) and (M, T_in, S, Y, X).

        Raises:
            UserError: a value is missing or infinite, and `strict`.
        """
        positions = np.asarray(members)
        kept = self._cached(Part.FORECAST, date, self.members)
        if kept is not None:
            fields = Fields(kept.pressure[positions], kept.surface[positions])
        else:
            numbers = tuple(self.source.layout.realization[p] for p in positions)
            fields = self._read(Part.FORECAST, date, numbers)
        if strict:
            self._check_finite(fields, date, positions)
        return fields

    def check_present(self, dates: Iterable[int]) -> None:
        """Refuse `dates` on which the source lacks an input field, without reading any.

        Raises:
            UserError: names the first that is missing.
        """
        layout, spec = self.source.layout, self.spec
        leads = [layout.lead_hours.index(lead) for lead in spec.leads_in]
        levels = [layout.levels.index(level) for level in spec.levels]
        upper = [layout.variables.index(name) for name in spec.variables]
        ground = [layout.surface.index(name) for name in spec.surface]
        for date in dates:
            pressure, surface = self.source.present(Part.FORECAST, int(date))
            surface = surface[:, leads][:, :, ground]
            for lead, variable in self._zeros:
                surface[:, lead, variable] = True
            everyone = np.arange(self.members)
            self._refuse(pressure[:, leads][:, :, upper][:, :, :, levels], spec.variables, int(date), everyone)
            self._refuse(surface, spec.surface, int(date), everyone)

    def target(self, part: Part, date: int) -> Fields:
        """Truth, mean or spread at the predicted leads: (T_out, V, Z, Y, X) and (T_out, S, Y, X), NaN where absent."""
        fields = self._cached(part, date, 1) or self._read(part, date, None)
        return Fields(fields.pressure[0], fields.surface[0])

    def time(self, date: int) -> np.datetime64:
        """Start of `date` (an index into the source's dates)."""
        return self.source.layout.init_time[date]

    def _leads(self, part: Part) -> tuple[int, ...]:
        return self.spec.leads_in if part is Part.FORECAST else self.spec.leads_out

    def _read(self, part: Part, date: int, numbers: tuple[int, ...] | None) -> Fields:
        spec = self.spec
        chosen = Selection(numbers, self._leads(part), spec.variables, spec.levels, spec.surface)
        fields = self.source.read(part, int(date), chosen)
        if part is Part.FORECAST:
            for lead, variable in self._zeros:
                fields.surface[:, lead, variable] = 0
        return fields

    def _cached(self, part: Part, date: int, members: int) -> Fields | None:
        """The whole date from memory, read now if there is room for it; None where there is none."""
        with self._lock:
            key = (part, int(date))
            size = members * len(self._leads(part)) * self._values_a_lead() * _FLOAT32
            if key not in self._kept and size <= self._free:
                self._free -= size
                self._kept[key] = self._read(part, date, None)
            return self._kept.get(key)

    def _values_a_lead(self) -> int:
        spec = self.spec
        planes = len(spec.variables) * len(spec.levels) + len(spec.surface)
        return planes * len(spec.latitude) * len(spec.longitude)

    def _check_finite(self, fields: Fields, date: int, positions: np.ndarray) -> None:
        for values, names in ((fields.pressure, self.spec.variables), (fields.surface, self.spec.surface)):
            # One sum a field is enough to see NaN or infinity, and needs no array of booleans.
            self._refuse(np.isfinite(values.sum(axis=(-2, -1), dtype=np.float64)), names, date, positions)

    def _refuse(self, good: np.ndarray, names: tuple[str, ...], date: int, positions: np.ndarray) -> None:
        """Raise for the first field that is not `good`: (M, T, V, Z) or (M, T, S)."""
        if good.all():
            return
        member, lead, variable, *level = np.argwhere(~good)[0]
        where = f" at {self.spec.levels[level[0]]} hPa" if level else ""
        number = self.source.layout.realization[positions[member]]
        when = f"{iso(self.time(date))} +{self.spec.leads_in[lead]} h"
        raise UserError(
            f"{self.source.path}: {names[variable]}{where} of {when}, member {number}, is missing or holds"
            " NaN or infinite values; leave the date or the variable out"
        )


def iso(time: np.datetime64) -> str:
    """A start date as YYYY-MM-DDTHH:MM."""
    return str(time.astype("datetime64[m]"))


def mean_and_spread(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample standard deviation (ddof = 1; zero for one member) over the first axis, float32.

    Sums are kept in float64, in two passes: geopotential is 500 times its spread.
    """
    count = len(values)
    mean = values.sum(axis=0, dtype=np.float64)
    mean /= count
    squares = np.zeros_like(mean)
    for member in values if count > 1 else ():
        deviation = member - mean
        deviation *= deviation
        squares += deviation
    return mean.astype(np.float32), np.sqrt(squares / max(1, count - 1)).astype(np.float32)
