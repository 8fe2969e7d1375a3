"""Reads single dates for the fits of `climate_fit`, with pressure levels and surface joined into one axis of fields.

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

_KEPT = 256 << 20  # bytes up to which the members of a date are kept in memory
_STRETCH = 10  # training dates for each held-out stretch; there are five stretches at most
FEWEST_TO_WIDEN = 4  # fewest dates from which a calibration factor is taken
# How many dates a fit reads: all if fields are small (320 instead of 200 were worth 0.2 % of CRPS), fewer if each date
# takes seconds.
_MOST_VALUES, _MOST_DATES, _ALWAYS = 5 * 10**9, 2000, 400
_SINGLE_MEMBERS = 800  # single members, over all dates, that moments are computed from


@dataclass(eq=False)
class Sample:
    """The members of one date, reduced; fields (T, F, Y, X) float32, NaN where absent."""

    mean: Tensor  # mean of the M members
    spread: Tensor  # standard deviation of the M members, ddof = 1
    full_spread: Tensor  # standard deviation of all members
    day: float  # day of the year of the initialisation time


class _Latest:
    """A cache of the members of the last date, for dates that are small enough.

    The fits take several choices of a date's members, one after the other. So most members are asked for again at once.
    """

    def __init__(self, reader: Reader):
        spec = reader.spec
        points = spec.fields * spec.grid.shape[0] * spec.grid.shape[1]
        self._reader, self._keeps = reader, reader.full_size * len(spec.leads_out) * points * 4 <= _KEPT
        self._date, self._known = -1, dict[int, Tensor]()

    def members(self, date: int, chosen: np.ndarray) -> Tensor:
        """Return the members at positions `chosen`, (M, T, F, Y, X), NaN where absent."""
        if not self._keeps:
            return self._read(date, chosen)
        # Only one date is kept, because the fits look at dates one after the other.
        if date != self._date:
            self._date, self._known = date, {}
        # Choices of the same date overlap. Only members that no earlier choice had are read.
        lacking = [position for position in chosen.tolist() if position not in self._known]
        if lacking:
            self._known |= zip(lacking, self._read(date, np.array(lacking)), strict=True)
        return torch.stack([self._known[position] for position in chosen.tolist()])

    def _read(self, date: int, chosen: np.ndarray) -> Tensor:
        """Read members from the store."""
        return join(self._reader.forecast(date, chosen, strict=False, leads=self._reader.spec.leads_out))


class Dates:
    """A reader of single dates of a store, for the fits.

    Args:
        reader: reads the store.
        members: M, the number of first members of a `Sample`.
        seed: seed of what the fits draw at random.
        progress: shows how far each fit is, and bounds its time.
        team: the ranks that make the fits together; None for this one alone.
    """

    def __init__(
        self, reader: Reader, members: int, seed: int = 0, progress: Progress | None = None, team: Team | None = None
    ):
        self.reader, self.spec, self.seed = reader, reader.spec, seed
        self.progress, self.team = progress or Progress(), team or Team()
        self.members = min(members, reader.most)
        self._latest = _Latest(reader)

    def of(self, members: int) -> Dates:
        """Return the same dates with another number of members.

        Args:
            members: M.

        Returns:
            A reader that shares the cache of the last date.
        """
        other = copy.copy(self)  # a shallow copy shares the cache of the last date
        other.members = min(members, self.reader.most)
        return other

    @property
    def shape(self) -> tuple[int, int]:
        """Return (T, F)."""
        return len(self.spec.leads_out), self.spec.fields

    def sample(self, date: int, chosen: np.ndarray | None = None) -> Sample:
        """Return mean and spread of some members of a date, and the spread of all.

        By default these are the first M members that the date has complete. If it has fewer, they are the first M, and
        what one of them lacks is NaN. If the members given are all that the date has, the spread of all is NaN, because
        the input must never be the target.

        Args:
            date: index of the date.
            chosen: positions of the members; None for the default.

        Returns:
            The sample.
        """
        whole = self.reader.available(date)
        if chosen is None:
            chosen = self._among(date, self.members)[: self.members]
        members = self._latest.members(int(date), chosen)
        mean, spread = (torch.from_numpy(v) for v in self.reader.reduce(members.numpy()))
        # With masks, a mean is taken over the members that have a value. A field that some member lacks altogether is
        # not masked, but absent.
        if self.spec.masked and len(whole) < len(chosen):
            absent = ~torch.isfinite(members).flatten(-2).any(-1).all(0)
            mean[absent], spread[absent] = torch.nan, torch.nan
        day = float(day_of_year(self.reader.time(date)))
        full_spread = self.target(Part.SPREAD, date)
        # With all members in, the spread of all is an input. As a target it would teach the model nothing but to copy
        # it.
        if len(chosen) == len(whole):
            full_spread = torch.full_like(full_spread, torch.nan)
        return Sample(mean, spread, full_spread, day)

    def drawn(self, date: int, size: int, draw: np.random.Generator) -> np.ndarray:
        """Draw random members of a date: of those that it has complete, if there are enough, else of all.

        Args:
            date: index of the date.
            size: how many members.
            draw: the generator of random numbers.

        Returns:
            Their positions, ascending.
        """
        return np.sort(draw.permutation(self._among(date, size))[:size])

    def _among(self, date: int, size: int) -> np.ndarray:
        """Return the members that a sample of a date may show: complete ones if there are enough, else any."""
        shown = self.reader.shown(date)
        if len(shown) >= size:
            return shown
        every = np.arange(self.reader.full_size)
        return every[every != self.reader.withheld(date)]

    def each(self, stage: str, dates: np.ndarray) -> Iterator[int]:
        """Yield this rank's part of the dates, as the steps of a stage of the fits.

        Args:
            stage: name of the stage that progress shows.
            dates: indices of the dates of all ranks.

        Yields:
            Index of a date.
        """
        yield from self.progress.over(stage, self.team.mine(dates.tolist()))

    def target(self, part: Part, date: int) -> Tensor:
        """Return the truth, or the mean or the spread of all members.

        Args:
            part: which of them.
            date: index of the date.

        Returns:
            (T, F, Y, X), NaN where absent.
        """
        return join(self.reader.target(part, int(date)))

    def level_spread(self, dates: np.ndarray) -> np.ndarray:
        """Return the root mean square of the full ensemble's spread at the input leads, over area and dates.

        Args:
            dates: indices of the dates.

        Returns:
            (T_in, F); zero for a field that no date has, such as rain at the initialisation time.
        """
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
        return np.sqrt(sums / np.maximum(counts, 1))

    def input_moments(self, dates: np.ndarray) -> Moments:
        """Return the moments of all members' values at the input leads.

        For whole years they are the store's own. Otherwise values are read, one member at a time, from at most
        `most_dates` dates: all members if the dates are few, else some members of each date, in turn.

        Args:
            dates: indices of the dates.

        Returns:
            Moments of each field, (F,).
        """
        # The store has moments for each year, which spares reading the fields again.
        years = _whole_years(self.reader.source.layout.init_time, dates)
        if years and hasattr(self.reader.source, "statistics"):
            return self._stored_moments(self.reader.source.statistics(years))
        total = Moments.nothing((self.shape[1],))
        chosen, members = spaced(dates, most_dates(self.spec)), self.reader.full_size
        # With many dates, a few members of each suffice. Different dates give different members, so that all are seen.
        each = max(1, min(members, _SINGLE_MEMBERS // max(1, len(chosen))))
        turns = list(product(enumerate(chosen), range(each)))
        for (place, date), turn in self.progress.over("moments of the inputs", self.team.mine(turns)):
            member = (place * each + turn) % members if each < members else turn
            fields = self.reader.forecast(int(date), np.array([member]), strict=False)
            for lead, variable in self.reader.zeros:
                fields.surface[:, lead, variable] = np.nan  # zero by nature; the store's own moments lack them too
            values = join(fields).double().permute(2, 0, 1, 3, 4).flatten(1).numpy()
            total = total.merge(_moments(values))
        if self.team.alone:
            return total
        # Moments are merged, not added, and always in the order of the ranks.
        by_rank = self.team.joined(torch.from_numpy(np.stack([*total.arrays().values()]))[None]).numpy()
        return reduce(Moments.merge, (Moments(*arrays) for arrays in by_rank))

    def _stored_moments(self, statistics: object) -> Moments:
        """Return the store's moments of the input leads, in the order of the fields."""
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
        """Refuse a field that no date has.

        Args:
            count: (T, F) how many dates have each field.
            part: what is missing.

        Raises:
            UserError: names the first such field.
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
    """Return the moments (F,) of the values (F, N) that are not NaN."""
    there = np.isfinite(values)
    count = there.sum(1).astype(float)
    mean = np.where(there, values, 0).sum(1) / np.maximum(count, 1)
    m2 = (np.where(there, values - mean[:, None], 0) ** 2).sum(1)
    ends = np.where(there, values, np.inf).min(1), np.where(there, values, -np.inf).max(1)
    return Moments(count, mean, m2, *ends)


def join(fields: Fields) -> Tensor:
    """Join pressure levels and surface: (..., T, V, Z, Y, X) and (..., T, S, Y, X) -> (..., T, F, Y, X).

    Args:
        fields: the fields.

    Returns:
        The joined tensor.
    """
    pressure = fields.pressure.reshape(*fields.pressure.shape[:-4], -1, *fields.pressure.shape[-2:])
    return torch.from_numpy(np.concatenate([pressure, fields.surface], axis=-3))


def split(spec: ModelSpec, values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Undo `join`.

    Args:
        spec: variables and levels.
        values: an array, one of whose axes is F.
        axis: the number of that axis.

    Returns:
        Pressure levels (..., V, Z, ...) and surface (..., S, ...), float32.
    """
    values = np.asarray(values, np.float32)
    shape = (len(spec.variables), len(spec.levels))
    pressure, surface = np.split(values, [shape[0] * shape[1]], axis)
    return pressure.reshape(*values.shape[:axis], *shape, *values.shape[axis + 1 :]), surface


def field_names(spec: ModelSpec) -> list[str]:
    """Return a name for each of the F fields, such as `z at 500 hPa`.

    Args:
        spec: variables and levels.

    Returns:
        F names.
    """
    return [f"{v} at {z} hPa" for v in spec.variables for z in spec.levels] + list(spec.surface)


def ranges(spec: ModelSpec, extremes: np.ndarray) -> dict[str, dict[str, list[float]] | list[float]]:
    """Return smallest and largest values by name: {"t": {"500": [low, high], ...}, "t2m": [low, high]}.

    Args:
        spec: variables and levels.
        extremes: (F, 2) smallest and largest value of each field.

    Returns:
        Plain values for JSON.
    """
    pressure, surface = split(spec, extremes, 0)
    found: dict[str, dict[str, list[float]] | list[float]] = {}
    for name, rows in zip(spec.variables, pressure.tolist(), strict=True):
        found[name] = {str(level): row for level, row in zip(spec.levels, rows, strict=True)}
    return found | dict(zip(spec.surface, surface.tolist(), strict=True))


def widest(ranges: dict[str, Any], earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Widen ranges so that they include those of an earlier run with the same fields.

    Args:
        ranges: the result of `ranges`.
        earlier: the ranges of the earlier run, or None.

    Returns:
        Ranges for the fields of `ranges`.
    """

    def joined(now: Any, then: Any) -> Any:
        """Join two ranges, or two dictionaries of ranges."""
        if isinstance(now, dict):
            return {key: joined(value, then.get(key)) if then else value for key, value in now.items()}
        return [min(now[0], then[0]), max(now[1], then[1])] if then else now

    return joined(ranges, earlier)


def families(spec: ModelSpec) -> list[Family]:
    """Return the distribution of each of the F fields.

    Args:
        spec: variables and levels.

    Returns:
        F distributions.
    """
    pressure, surface = spec.families
    return [family for family in pressure for _ in spec.levels] + list(surface)


def present(values: Tensor) -> Tensor:
    """Return which fields have a value at any point.

    Args:
        values: (..., Y, X), NaN where absent.

    Returns:
        (...) bool.
    """
    return torch.isfinite(values).any(-1).any(-1)


def most_dates(spec: ModelSpec) -> int:
    """Return how many dates a fit reads at most: of 52 fields, 400 at half a degree and 2000 at two degrees.

    Args:
        spec: variables, leads and grid.

    Returns:
        The number of dates.
    """
    values = len(spec.leads_out) * spec.fields * len(spec.latitude) * len(spec.longitude)
    return min(_MOST_DATES, max(_ALWAYS, _MOST_VALUES // values))


def spaced(dates: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` dates, evenly spaced.

    Args:
        dates: the dates.
        most: how many.

    Returns:
        A selection of `dates`.
    """
    if len(dates) <= most:
        return dates
    return dates[np.linspace(0, len(dates) - 1, most).round().astype(int)]


def kept_apart(train: np.ndarray, validation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the dates to fit to and the dates to choose by.

    Without validation dates, a fifth of the training dates is held out, in a few stretches, because a single one would
    be of one season.

    Args:
        train: indices of the training dates.
        validation: indices of the validation dates.

    Returns:
        Dates to fit to and dates to choose by.
    """
    if len(validation):
        return train, validation
    # Less than one date would be held out.
    if len(train) < 5:
        return train, train[:0]
    # Held-out dates next to training dates would be too much alike, so whole stretches are held out.
    stretches = np.array_split(np.arange(len(train)), 5 * min(max(1, len(train) // _STRETCH), 5))
    apart = np.concatenate(stretches[2::5])
    return np.delete(train, apart), train[apart]


def dates_called(validation: np.ndarray) -> str:
    """Return what messages call the dates to choose by.

    Args:
        validation: the validation dates that `kept_apart` was given.

    Returns:
        The words.
    """
    return "the validation dates" if len(validation) else "training dates held out"


def neighbours(times: np.ndarray) -> np.ndarray:
    """Return, for each date, True if the date before it is as close as dates are in this archive.

    Args:
        times: (D,) initialisation times, ascending.

    Returns:
        (D,) bool.
    """
    if len(times) < 2:
        return np.zeros(len(times), bool)
    # Correlation between dates is estimated from neighbours only. A gap, such as one between two years, must not count.
    gaps = np.diff(times).astype(np.int64)
    return np.concatenate([[False], gaps <= 1.5 * gaps.min()])


def _whole_years(times: np.ndarray, dates: np.ndarray) -> list[int]:
    """Return the calendar years that `dates` consist of, if they take all dates of each; otherwise none."""
    years = times.astype("datetime64[Y]").astype(int) + 1970
    chosen = np.unique(years[dates])
    return [int(y) for y in chosen] if np.isin(years, chosen).sum() == len(np.unique(dates)) else []
