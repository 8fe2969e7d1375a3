"""Read init times one by one for the fits, with pressure levels and surface joined into one axis of fields.

Axes: M member, T predicted lead, F field (variables and levels, then surface variables), V pressure-level variable,
S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.errors import UserError
from ensemble_ml.loading.reader import Reader, day_of_year
from ensemble_ml.models import ModelSpec
from ensemble_ml.store.source import Fields, Part, Selection
from ensemble_ml.store.statistics import Moments, Statistics
from ensemble_ml.training.progress import Progress, Team

_KEPT = 256 << 20  # bytes up to which the members of a date are kept in memory
_STRETCH = 10  # training dates for each stretch of dates that is held out; there are five stretches at most
FEWEST_TO_WIDEN = 4  # fewest dates from which a calibration factor is computed
# A fit reads at most _MOST_VALUES values, but at least _ALWAYS dates (if there are so many) and at most _MOST_DATES. So
# small fields are read on many dates (320 instead of 200 lowered the CRPS by 0.2 %), and large ones, which take seconds
# for each date, on fewer.
_MOST_VALUES, _MOST_DATES, _ALWAYS = 5 * 10**9, 2000, 400
_SINGLE_MEMBERS = 800  # single members, over all dates, that moments are computed from; at least one of each date


@dataclass(eq=False)
class Sample:
    """The mean and spread of the members of one date: (T, F, Y, X) float32, NaN where a field is absent."""

    mean: Tensor  # mean of the M members
    spread: Tensor  # standard deviation of the M members, ddof = 1
    full_spread: Tensor  # standard deviation of all members; NaN if M is the number of all or of all complete members
    day: float  # day of the year of the initialisation time

    def batch(self, members: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return mean, spread, M and day of the year with a batch axis of length one, as `models.model` takes them."""
        return self.mean[None], self.spread[None], torch.tensor([float(members)]), torch.tensor([self.day])


class _Latest:
    """A cache of the members of the date read last, if the members of a date take at most `_KEPT` bytes.

    The fits use several subsets of a date's members in succession, so most members are needed again soon.
    """

    def __init__(self, reader: Reader):
        spec = reader.spec
        points = spec.fields * spec.grid.shape[0] * spec.grid.shape[1]
        self._reader, self._keeps = reader, reader.full_size * len(spec.leads_out) * points * 4 <= _KEPT
        self._date, self._known = -1, dict[int, Tensor]()

    def members(self, date: int, chosen: np.ndarray) -> Tensor:
        """Return the members at positions `chosen`, (M, T, F, Y, X), NaN where a field is absent."""
        if not self._keeps:
            return self._read(date, chosen)
        # Only one date is kept, because the fits take dates one after the other.
        if date != self._date:
            self._date, self._known = date, {}
        # Subsets of the same date overlap. Only members that were in no earlier subset are read.
        lacking = [position for position in chosen.tolist() if position not in self._known]
        if lacking:
            self._known |= zip(lacking, self._read(date, np.array(lacking)), strict=True)
        return torch.stack([self._known[position] for position in chosen.tolist()])

    def _read(self, date: int, chosen: np.ndarray) -> Tensor:
        """Read members from the store."""
        leads = self._reader.spec.leads_out
        return torch.from_numpy(self._reader.forecast(date, chosen, strict=False, leads=leads).joined())


class Dates:
    """A reader of single dates of a store, for the fits.

    Args:
        reader: reads the store.
        members: M, the number of members of a `Sample`; limited to those that a sample may show.
        seed: seed of the random numbers of the fits.
        progress: shows how far each fit is, and limits its time.
        team: the ranks that make the fits together; None for this rank alone.
    """

    def __init__(
        self, reader: Reader, members: int, seed: int = 0, progress: Progress | None = None, team: Team | None = None
    ):
        self.reader, self.spec, self.seed = reader, reader.spec, seed
        self.progress, self.team = progress or Progress(), team or Team()
        self.members = min(members, reader.most)
        self._latest = _Latest(reader)

    def of(self, members: int) -> Dates:
        """Return the same dates with another M; both share the cache of the date read last."""
        other = copy.copy(self)
        other.members = min(members, self.reader.most)
        return other

    @property
    def shape(self) -> tuple[int, int]:
        """Return (T, F)."""
        return len(self.spec.leads_out), self.spec.fields

    def sample(self, date: int, chosen: np.ndarray | None = None) -> Sample:
        """Return the mean and the spread of the members at positions `chosen`, and the spread of all members of a date.

        By default the first M complete members are taken. If fewer than M are complete, the first M members are taken,
        and a field that one of them lacks is NaN. The member that stands for the truth is never among them. If all
        members are taken, or as many as are complete, the spread of all is NaN: the target must not be an input.
        """
        whole = self.reader.available(date)
        if chosen is None:
            chosen = self._among(date, self.members)[: self.members]
        members = self._latest.members(int(date), chosen)
        mean, spread = (torch.from_numpy(v) for v in self.reader.reduce(members.numpy()))
        # For masked variables, the mean at a point is taken over the members that have a value there. A field without
        # any value in some member is absent, not masked, so it must be NaN.
        if self.spec.masked and not np.isin(chosen, whole).all():
            absent = ~torch.isfinite(members).flatten(-2).any(-1).all(0)
            mean[absent], spread[absent] = torch.nan, torch.nan
        day = float(day_of_year(self.reader.time(date)))
        full_spread = self.target(Part.SPREAD, date)
        # If all members are taken, the spread of all is an input. As a target it would teach the model to copy it.
        if len(chosen) in (len(whole), self.reader.full_size):
            full_spread = torch.full_like(full_spread, torch.nan)
        return Sample(mean, spread, full_spread, day)

    def drawn(self, date: int, size: int, draw: np.random.Generator) -> np.ndarray:
        """Draw random members of a date from its complete members, or from all members if too few are complete.

        The member that stands for the truth is never drawn.

        Returns:
            (size,) positions of the members, ascending; fewer if the store has fewer.
        """
        return np.sort(draw.permutation(self._among(date, size))[:size])

    def _among(self, date: int, size: int) -> np.ndarray:
        """Return the positions of the members that a sample of a date may show.

        These are the complete members if there are at least `size` of them, and otherwise all members. The member that
        stands for the truth is left out.
        """
        shown = self.reader.shown(date)
        if len(shown) >= size:
            return shown
        every = np.arange(self.reader.full_size)
        return every[every != self.reader.withheld(date)]

    def each(self, stage: str, dates: np.ndarray) -> Iterator[int]:
        """Yield this rank's part of the dates of all ranks, and show progress over them as a stage of the fits."""
        yield from self.progress.over(stage, self.team.mine(dates.tolist()))

    def target(self, part: Part, date: int) -> Tensor:
        """Read the truth, or the mean or spread of all members, (T, F, Y, X), NaN where a field is absent."""
        return torch.from_numpy(self.reader.target(part, int(date)).joined())

    def level_spread(self, dates: np.ndarray) -> np.ndarray:
        """Return the root mean square of the full ensemble's spread at the input leads, over grid points and dates.

        All grid points of a date have the same weight, whatever their area, and so have all dates of all ranks.

        Returns:
            (T_in, F) in the fields' units; zero for a field that is absent on all dates, such as rain at lead zero.
        """
        spec = self.spec
        sums, counts = np.zeros((2, len(spec.leads_in), self.shape[1]))
        chosen = Selection(None, spec.leads_in, spec.variables, spec.levels, spec.surface)
        for date in self.team.mine(dates.tolist()):
            fields = self.reader.source.read(Part.SPREAD, date, chosen)
            square = torch.from_numpy(Fields(fields.pressure[0], fields.surface[0]).joined()).double() ** 2
            whole = bool(torch.isfinite(square).all())
            mean = (square.mean((-2, -1)) if whole else square.nanmean((-2, -1))).numpy()
            sums, counts = sums + np.nan_to_num(mean), counts + np.isfinite(mean)
        self.team.add_up(torch.from_numpy(sums), torch.from_numpy(counts))
        return np.sqrt(sums / np.maximum(counts, 1))

    def input_moments(self, dates: np.ndarray) -> Moments:
        """Return the moments of the members' values at the input leads, (F,), on the dates of all ranks.

        If `dates` are whole years of a tensor store, the moments in the store are taken. Otherwise values are read, one
        member at a time, from at most `most_dates` dates: all members if the dates are few, else a few members of each
        date, in rotation.
        """
        years = _whole_years(self.reader.source.layout.init_time, dates)
        if years and hasattr(self.reader.source, "statistics"):
            return self._stored_moments(self.reader.source.statistics(years))
        total = Moments.nothing((self.shape[1],))
        chosen, members = spaced(dates, most_dates(self.spec)), self.reader.full_size
        # With many dates, a few members of each are enough. Successive dates take different ones, so that all members
        # are read.
        each = max(1, min(members, _SINGLE_MEMBERS // max(1, len(chosen))))
        turns = list(product(enumerate(chosen), range(each)))
        for (place, date), turn in self.progress.over("moments of the inputs", self.team.mine(turns)):
            member = (place * each + turn) % members if each < members else turn
            fields = self.reader.forecast(int(date), np.array([member]), strict=False)
            for lead, variable in self.reader.zeros:
                fields.surface[:, lead, variable] = np.nan  # `zero_by_nature`; the store's moments leave them out, too
            values = torch.from_numpy(fields.joined()).double().permute(2, 0, 1, 3, 4).flatten(1).numpy()
            total = total.merge(_moments(values))
        if self.team.alone:
            return total
        # Moments cannot be added up. They are merged, always in the order of the ranks.
        by_rank = self.team.joined(torch.from_numpy(np.stack([*total.arrays().values()]))[None]).numpy()
        return reduce(Moments.merge, (Moments(*arrays) for arrays in by_rank))

    def _stored_moments(self, statistics: Statistics) -> Moments:
        """Return the store's moments merged over the input leads, (F,)."""
        spec, layout = self.spec, self.reader.source.layout
        leads = [layout.lead_hours.index(lead) for lead in spec.leads_in]
        total = Moments.nothing((self.shape[1],))
        variables = [layout.variables.index(v) for v in spec.variables]
        levels = [layout.levels.index(z) for z in spec.levels]
        surface = [layout.surface.index(v) for v in spec.surface]
        for lead in leads:
            pressure, ground = statistics.pressure.at(lead), statistics.surface.at(lead)
            parts = {
                name: np.concatenate([values[variables][:, levels].ravel(), ground.arrays()[name][surface]])
                for name, values in pressure.arrays().items()
            }
            total = total.merge(Moments(**parts))
        return total

    def refuse_empty(self, count: Tensor, part: Part) -> None:
        """Check that each field is present on some date, by the numbers of dates `count` (T, F).

        Raises:
            UserError: a field is absent on all dates; the message names the first one.
        """
        if (count > 0).all():
            return
        lead, field = torch.argwhere(count == 0)[0].tolist()
        what = f"{field_names(self.spec)[field]} at +{self.spec.leads_out[lead]} h"
        raise UserError(
            f"{self.reader.source.path}: {what} has no complete {part.value} on any training date;"
            " leave it out of data.variables, data.surface or data.leads_out"
        )


def _moments(values: np.ndarray) -> Moments:
    """Return the moments (F,) of the finite values among `values` (F, N)."""
    there = np.isfinite(values)
    count = there.sum(1).astype(float)
    mean = np.where(there, values, 0).sum(1) / np.maximum(count, 1)
    m2 = (np.where(there, values - mean[:, None], 0) ** 2).sum(1)
    ends = np.where(there, values, np.inf).min(1), np.where(there, values, -np.inf).max(1)
    return Moments(count, mean, m2, *ends)


def field_names(spec: ModelSpec) -> list[str]:
    """Return a name for each of the F fields, such as `z at 500 hPa`."""
    return [name if level is None else f"{name} at {level} hPa" for name, level in spec.names]


def ranges(spec: ModelSpec, extremes: np.ndarray) -> dict[str, dict[str, list[float]] | list[float]]:
    """Return the extremes (F, 2) by name, as values for JSON: {"t": {"500": [low, high], ...}, "t2m": [low, high]}."""
    found: dict[str, Any] = {}
    for (name, level), row in zip(spec.names, extremes.tolist(), strict=True):
        if level is None:
            found[name] = row
        else:
            found.setdefault(name, {})[str(level)] = row
    return found


def widest(ranges: Any, earlier: Any) -> Any:
    """Widen the result of `ranges` so that it includes that of an earlier run, if there is one.

    A field that the earlier run lacks keeps its range.
    """
    if not earlier:
        return ranges
    if isinstance(ranges, dict):
        return {key: widest(value, earlier.get(key)) for key, value in ranges.items()}
    return [min(ranges[0], earlier[0]), max(ranges[1], earlier[1])]


def present(values: Tensor) -> Tensor:
    """Return whether each field (..., Y, X) has a value at any point, (...) bool; NaN is none."""
    return torch.isfinite(values).any(-1).any(-1)


def most_dates(spec: ModelSpec) -> int:
    """Return the largest number of dates that a fit reads.

    For 52 fields at one predicted lead it is 400 at half a degree and 2000 at two degrees.
    """
    values = len(spec.leads_out) * spec.fields * len(spec.latitude) * len(spec.longitude)
    return min(_MOST_DATES, max(_ALWAYS, _MOST_VALUES // values))


def spaced(dates: np.ndarray, most: int) -> np.ndarray:
    """Return `dates`, or `most` of them, evenly spaced, if there are more."""
    if len(dates) <= most:
        return dates
    return dates[np.linspace(0, len(dates) - 1, most).round().astype(int)]


def kept_apart(train: np.ndarray, validation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the dates to fit to, and the dates by which fits are chosen.

    Without validation dates, a fifth of the training dates is held out to choose by, or none if there are fewer than
    five. The held-out dates form up to five stretches, because a single stretch would lie in one season.
    """
    if len(validation):
        return train, validation
    if len(train) < 5:
        return train, train[:0]
    # Neighbouring dates have similar weather. Whole stretches are held out, so that few held-out dates have a neighbour
    # among the training dates.
    stretches = np.array_split(np.arange(len(train)), 5 * min(max(1, len(train) // _STRETCH), 5))
    apart = np.concatenate(stretches[2::5])
    return np.delete(train, apart), train[apart]


def dates_called(validation: np.ndarray) -> str:
    """Return the name, in messages, of the dates that `kept_apart` gives to choose fits by."""
    return "the validation dates" if len(validation) else "training dates held out"


def neighbours(times: np.ndarray) -> np.ndarray:
    """Return for each of D ascending times whether it follows the one before it without a gap, (D,) bool.

    A gap is a step of more than one and a half times the shortest step. The first date follows none.
    """
    if len(times) < 2:
        return np.zeros(len(times), bool)
    # Correlation between dates is estimated from neighbours only. Dates on either side of a gap, such as a summer that
    # is left out, must not count as neighbours.
    gaps = np.diff(times).astype(np.int64)
    return np.concatenate([[False], gaps <= 1.5 * gaps.min()])


def _whole_years(times: np.ndarray, dates: np.ndarray) -> list[int]:
    """Return the calendar years of `dates` if these include every date of `times` in these years; otherwise nothing."""
    years = times.astype("datetime64[Y]").astype(int) + 1970
    chosen = np.unique(years[dates])
    return [int(y) for y in chosen] if np.isin(years, chosen).sum() == len(np.unique(dates)) else []
