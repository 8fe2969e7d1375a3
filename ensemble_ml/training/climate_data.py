"""Start dates as the fits of `climate_fit` want them: pressure levels and surface joined into one axis of fields.

Axes: M member, T predicted lead, F field (variables and levels, then surface variables), V pressure-level variable,
S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.loading.reader import Reader, day_of_year
from ensemble_ml.models import ModelSpec
from ensemble_ml.store.source import Fields, Part, Selection
from ensemble_ml.store.statistics import Moments
from ensemble_ml.training.progress import Progress
from ensemble_ml.training.team import Team

_KEPT = 256 << 20  # bytes of a date's members
_STRETCH = 10  # dates for each stretch that is held out, of five at most
FEWEST_TO_WIDEN = 4  # dates that say anything of how wide sigma should be
# Dates that are read for a fit: all where they are small (320 instead of 200 were worth 0.2 % of CRPS), fewer where
# each takes seconds.
_MOST_VALUES, _MOST_DATES, _ALWAYS = 5 * 10**9, 2000, 400
_SINGLE_MEMBERS = 800  # of all dates, that moments are read from


@dataclass(eq=False)
class Sample:
    """One start date; fields (T, F, Y, X) float32, NaN where absent."""

    mean: Tensor  # of the first M members
    spread: Tensor  # of the first M members, ddof = 1
    full_spread: Tensor
    day: float  # of the year, of the start


class _Latest:
    """The members of the date that was looked at last, as far as they were asked for, where these are small: the fits
    look at several choices of members of a date, one after the other."""

    def __init__(self, reader: Reader):
        spec = reader.spec
        points = spec.fields * spec.grid.shape[0] * spec.grid.shape[1]
        self._reader, self._keeps = reader, reader.full_size * len(spec.leads_out) * points * 4 <= _KEPT
        self._date, self._known = -1, dict[int, Tensor]()

    def members(self, date: int, chosen: np.ndarray) -> Tensor:
        """Members at positions `chosen`, (M, T, F, Y, X), NaN where absent."""
        if not self._keeps:
            return self._read(date, chosen)
        if date != self._date:
            self._date, self._known = date, {}
        lacking = [position for position in chosen.tolist() if position not in self._known]
        if lacking:
            self._known |= zip(lacking, self._read(date, np.array(lacking)), strict=True)
        return torch.stack([self._known[position] for position in chosen.tolist()])

    def _read(self, date: int, chosen: np.ndarray) -> Tensor:
        return join(self._reader.forecast(date, chosen, strict=False, leads=self._reader.spec.leads_out))


class Dates:
    """Reads single start dates of a store.

    Args:
        members: M, the number of first members of a `Sample`.
        seed: of what fits draw by chance.
        progress: that is told how far each fit is, and says when it has to end.
        team: the ranks that make the fits together; this one alone where it is None.
    """

    def __init__(
        self, reader: Reader, members: int, seed: int = 0, progress: Progress | None = None, team: Team | None = None
    ):
        self.reader, self.spec, self.seed = reader, reader.spec, seed
        self.progress, self.team = progress or Progress(), team or Team()
        self.members = min(members, reader.full_size)
        self._latest = _Latest(reader)

    def of(self, members: int) -> Dates:
        """The same with another number of members."""
        other = copy.copy(self)  # it shares what was read of the latest date
        other.members = min(members, self.reader.full_size)
        return other

    @property
    def shape(self) -> tuple[int, int]:
        """(T, F)."""
        return len(self.spec.leads_out), self.spec.fields

    def sample(self, date: int, chosen: np.ndarray | None = None) -> Sample:
        """Mean and spread of the first M members that the date has whole, and the spread of all.

        Where it has fewer, of the first M: what one of them lacks is NaN. `chosen`: positions of other members. The
        spread of all is NaN where these are all that the date has: the input is never the target.
        """
        whole = self.reader.available(date)
        if chosen is None:
            chosen = (whole if len(whole) >= self.members else np.arange(self.members))[: self.members]
        members = self._latest.members(int(date), chosen)
        mean, spread = (torch.from_numpy(v) for v in self.reader.reduce(members.numpy()))
        if self.spec.masked and len(whole) < len(chosen):  # an absent field is not one of masked points
            absent = ~torch.isfinite(members).flatten(-2).any(-1).all(0)
            mean[absent], spread[absent] = torch.nan, torch.nan
        day = float(day_of_year(self.reader.time(date)))
        full_spread = self.target(Part.SPREAD, date)
        if len(chosen) == len(whole):
            full_spread = torch.full_like(full_spread, torch.nan)
        return Sample(mean, spread, full_spread, day)

    def drawn(self, date: int, size: int, draw: np.random.Generator) -> np.ndarray:
        """Positions of `size` random members, ascending; of those that the date has whole, where they are enough."""
        whole = self.reader.available(date)
        among = whole if len(whole) >= size else np.arange(self.reader.full_size)
        return np.sort(draw.permutation(among)[:size])

    def each(self, stage: str, dates: np.ndarray) -> Iterator[int]:
        """Yield those of `dates` that this rank takes, as the steps of a stage of the fits."""
        yield from self.progress.over(stage, self.team.mine(dates.tolist()))

    def target(self, part: Part, date: int) -> Tensor:
        """Truth, mean or spread of all members, (T, F, Y, X)."""
        return join(self.reader.target(part, int(date)))

    def level_spread(self, dates: np.ndarray) -> np.ndarray:
        """Root mean square of the full ensemble's spread at the *input* leads, (T_in, F)."""
        spec = self.spec
        sums, counts = np.zeros((2, len(spec.leads_in), self.shape[1]))
        chosen = Selection(None, spec.leads_in, spec.variables, spec.levels, spec.surface)
        for date in self.team.mine(dates.tolist()):
            fields = self.reader.source.read(Part.SPREAD, date, chosen)
            joined = join(Fields(fields.pressure[0], fields.surface[0]))
            square = joined.double() ** 2
            whole = bool(torch.isfinite(square).all())
            mean = (square.mean((-2, -1)) if whole else square.nanmean((-2, -1))).numpy()
            sums, counts = sums + np.nan_to_num(mean), counts + np.isfinite(mean)
        self.team.add_up(torch.from_numpy(sums), torch.from_numpy(counts))
        return np.sqrt(sums / np.maximum(counts, 1))  # zero where no date has the field, as rain at the start

    def input_moments(self, dates: np.ndarray) -> Moments:
        """Moments (F,) of all members' values over input leads and `dates`: the store's own for whole years; else read
        a member at a time, from at most `most_dates`: all, or where that are many some of each date, others in turn."""
        years = _whole_years(self.reader.source.layout.init_time, dates)
        if years and hasattr(self.reader.source, "statistics"):
            return self._stored_moments(self.reader.source.statistics(years))
        total = Moments.nothing((self.shape[1],))
        chosen, members = spaced(dates, most_dates(self.spec)), self.reader.full_size
        each = max(1, min(members, _SINGLE_MEMBERS // max(1, len(chosen))))
        turns = list(product(enumerate(chosen), range(each)))
        for (place, date), turn in self.progress.over("moments of the inputs", self.team.mine(turns)):
            member = (place * each + turn) % members if each < members else turn
            fields = self.reader.forecast(int(date), np.array([member]), strict=False)
            for lead, variable in self.reader.zeros:
                fields.surface[:, lead, variable] = np.nan  # never stored, so no part of the store's own either
            values = join(fields).double().permute(2, 0, 1, 3, 4).flatten(1).numpy()
            total = total.merge(_moments(values))
        if self.team.alone:
            return total
        by_rank = self.team.joined(torch.from_numpy(np.stack([*total.arrays().values()]))[None]).numpy()
        return reduce(Moments.merge, (Moments(*arrays) for arrays in by_rank))

    def _stored_moments(self, statistics: object) -> Moments:
        spec, layout = self.spec, self.reader.source.layout
        leads = [layout.lead_hours.index(lead) for lead in spec.leads_in]
        total = Moments.nothing((self.shape[1],))
        variables = [layout.variables.index(v) for v in spec.variables]
        levels = [layout.levels.index(z) for z in spec.levels]
        surface = [layout.surface.index(v) for v in spec.surface]
        for lead in leads:
            pressure, ground = statistics.pressure.at(lead), statistics.surface.at(lead)  # type: ignore[attr-defined]
            parts = {
                name: np.concatenate([values[variables][:, levels].ravel(), ground.arrays()[name][surface]])
                for name, values in pressure.arrays().items()
            }
            total = total.merge(Moments(**parts))
        return total

    def refuse_empty(self, count: Tensor, part: Part) -> None:
        """Raise a UserError for the first field that no date has; `count` (T, F)."""
        if (count > 0).all():
            return
        lead, field = torch.argwhere(count == 0)[0].tolist()
        what = f"{field_names(self.spec)[field]} at +{self.spec.leads_out[lead]} h"
        raise UserError(
            f"{self.reader.source.path}: {what} has no complete {part.value} on any training date;"
            " leave it out of data.variables, data.surface or data.leads_out"
        )


def _moments(values: np.ndarray) -> Moments:
    """Moments (F,) of the values (F, N) that are there."""
    there = np.isfinite(values)
    count = there.sum(1).astype(float)
    mean = np.where(there, values, 0).sum(1) / np.maximum(count, 1)
    m2 = (np.where(there, values - mean[:, None], 0) ** 2).sum(1)
    ends = np.where(there, values, np.inf).min(1), np.where(there, values, -np.inf).max(1)
    return Moments(count, mean, m2, *ends)


def join(fields: Fields) -> Tensor:
    """(..., T, V, Z, Y, X) and (..., T, S, Y, X) -> (..., T, F, Y, X)."""
    pressure = fields.pressure.reshape(*fields.pressure.shape[:-4], -1, *fields.pressure.shape[-2:])
    return torch.from_numpy(np.concatenate([pressure, fields.surface], axis=-3))


def split(spec: ModelSpec, values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Undo `join` for an array whose axis `axis` is F: pressure (..., V, Z, ...) and surface (..., S, ...), float32."""
    values = np.asarray(values, np.float32)
    shape = (len(spec.variables), len(spec.levels))
    pressure, surface = np.split(values, [shape[0] * shape[1]], axis)
    return pressure.reshape(*values.shape[:axis], *shape, *values.shape[axis + 1 :]), surface


def field_names(spec: ModelSpec) -> list[str]:
    """A name for each of the F fields, e.g. `z at 500 hPa`."""
    return [f"{v} at {z} hPa" for v in spec.variables for z in spec.levels] + list(spec.surface)


def ranges(spec: ModelSpec, extremes: np.ndarray) -> dict[str, dict[str, list[float]] | list[float]]:
    """Smallest and largest value (F, 2) by name: {"t": {"500": [low, high], ...}, "t2m": [low, high]}."""
    pressure, surface = split(spec, extremes, 0)
    found: dict[str, dict[str, list[float]] | list[float]] = {}
    for name, rows in zip(spec.variables, pressure.tolist(), strict=True):
        found[name] = {str(level): row for level, row in zip(spec.levels, rows, strict=True)}
    return found | dict(zip(spec.surface, surface.tolist(), strict=True))


def widest(ranges: dict[str, Any], earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Ranges by name, of `ranges`, that hold those of an earlier run of the same fields, too."""

    def joined(now: Any, then: Any) -> Any:
        if isinstance(now, dict):
            return {key: joined(value, then.get(key)) if then else value for key, value in now.items()}
        return [min(now[0], then[0]), max(now[1], then[1])] if then else now

    return joined(ranges, earlier)


def families(spec: ModelSpec) -> list[Family]:
    """Distribution family of each of the F fields."""
    pressure, surface = spec.families
    return [family for family in pressure for _ in spec.levels] + list(surface)


def present(values: Tensor) -> Tensor:
    """Which fields have a value anywhere: (..., Y, X) -> (...) bool."""
    return torch.isfinite(values).any(-1).any(-1)


def most_dates(spec: ModelSpec) -> int:
    """How many dates a fit reads at most: of 52 fields 400 at half a degree, 2000 at two degrees."""
    values = len(spec.leads_out) * spec.fields * len(spec.latitude) * len(spec.longitude)
    return min(_MOST_DATES, max(_ALWAYS, _MOST_VALUES // values))


def spaced(dates: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of `dates`, evenly spaced."""
    if len(dates) <= most:
        return dates
    return dates[np.linspace(0, len(dates) - 1, most).round().astype(int)]


def kept_apart(train: np.ndarray, validation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Dates to fit to and dates to choose by: where there are none of these, a fifth of the training dates, in a few
    stretches (one would be of one season)."""
    if len(validation):
        return train, validation
    if len(train) < 5:
        return train, train[:0]
    stretches = np.array_split(np.arange(len(train)), 5 * min(max(1, len(train) // _STRETCH), 5))
    apart = np.concatenate(stretches[2::5])
    return np.delete(train, apart), train[apart]


def dates_called(validation: np.ndarray) -> str:
    """What the dates to choose by are called, of which `kept_apart` was given `validation`."""
    return "the validation dates" if len(validation) else "training dates held out"


def neighbours(times: np.ndarray) -> np.ndarray:
    """For each date, whether the one before it is as near as dates come here, (D,) bool."""
    if len(times) < 2:
        return np.zeros(len(times), bool)
    gaps = np.diff(times).astype(np.int64)
    return np.concatenate([[False], gaps <= 1.5 * gaps.min()])


def _whole_years(times: np.ndarray, dates: np.ndarray) -> list[int]:
    """The calendar years that `dates` make up, where they take all dates of each; else none."""
    years = times.astype("datetime64[Y]").astype(int) + 1970
    chosen = np.unique(years[dates])
    return [int(y) for y in chosen] if np.isin(years, chosen).sum() == len(np.unique(dates)) else []
