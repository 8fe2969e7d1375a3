"""Decide which init times are predicted from which members, read them, and reduce them to the inputs of the model.

`check_source` and `plan_starts` refuse everything that can be refused before anything is computed; `sum_cuts` returns
the hours at which sums began or ended in training. `Samples` reads init times and compares them with the range of the
training dates, `collate` joins them to a batch, and `replace_static` gives a model other static fields.

Axes: B date in a batch, M member, T lead, V pressure-level variable, S surface variable, Z level, F field (variables
and levels, then surface variables), Y latitude, X longitude.
"""

from __future__ import annotations

import logging
from calendar import month_abbr
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ensemble_ml.config import PredictConfig
from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.grid import settings_for
from ensemble_ml.loading.batches import filled
from ensemble_ml.loading.reader import Reader, Span, day_of_year, iso
from ensemble_ml.models import AnyModel, Climate, EnsembleInput, ModelSpec
from ensemble_ml.models.features import Features
from ensemble_ml.models.inputs import valid_shares
from ensemble_ml.store.source import Fields, Part, Source, bounds_at, hour_of_day, select_dates, zero_by_nature

log = logging.getLogger(__name__)

_MARGIN = 0.1  # of the width of the training range: values closer to the range give no warning
_SEASON = 45  # days of the year: a start farther from all training dates lies in a season that training lacked


@dataclass(frozen=True, eq=False)
class Start:
    """An init time to predict.

    Attributes:
        date: index of the init time in the source.
        init_time: the init time itself.
        positions: positions of the members that are complete, ascending.
        missing: the members that are not complete, in words; empty if all are.
        unlike: how it differs from all training dates, in words; empty if it does not.
    """

    date: int
    init_time: np.datetime64
    positions: tuple[int, ...]
    missing: str = ""
    unlike: str = ""


def check_source(source: Source, spec: ModelSpec, bounds: Mapping[str, Sequence[Any]] | None, *, warn: bool) -> None:
    """Refuse a source that lacks anything that the model takes.

    `bounds` are the intervals (hours) of sums and maxima in the training data at `spec.leads_in`
    (`store.source.bounds_at`); None if the checkpoint does not state them.

    Raises:
        UserError: the grid differs; variables, levels or leads are missing (the message names all of them); sums or
            maxima are over other intervals.
    """
    layout = source.layout
    if not layout.grid.same_as(spec.grid):
        fitting = settings_for(layout.grid, spec.grid)
        store = f"made with {fitting}" if fitting else "on it"
        raise UserError(
            f"input {source.path}: its grid has {layout.grid.describe()}, the checkpoint's {spec.grid.describe()};"
            f" regrid=true brings an archive to the checkpoint's grid, or give a store {store} by prepare"
        )
    # Everything that is missing stands in one message. Otherwise a user would need one run for each missing item.
    pairs: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
        ("pressure-level variables", spec.variables, layout.variables),
        ("levels (hPa)", spec.levels if spec.variables else (), layout.levels),
        ("surface variables", spec.surface, layout.surface),
        ("leads (h)", spec.leads_in, layout.lead_hours),
    )
    lacks = [
        f"{what} {_list([w for w in wanted if w not in there])} (there are {_list(there)})"
        for what, wanted, there in pairs
        if set(wanted) - set(there)
    ]
    if lacks:
        raise UserError(f"input {source.path}: the checkpoint needs {'; '.join(lacks)}; give data that hold them")
    known, here = bounds or {}, bounds_at(source, (*spec.variables, *spec.surface), spec.leads_in)
    for name in known.keys() & here.keys():
        if here[name] != list(known[name]):
            raise UserError(
                f"input {source.path}: {name} over {_spans(here[name])}, the checkpoint knows it over"
                f" {_spans(known[name])}; give data of the same lead times as in training"
            )
    # Here only one side states its intervals. This is no error, because the quantity may still be the same.
    for name in known.keys() ^ here.keys() if bounds is not None and warn else ():
        text = "%s is over %s in %s, and over no interval that is known in %s: it may be another quantity"
        both = [f"input {source.path}", "training"]
        log.warning(text, name, _spans(here.get(name) or known[name]), *(both if name in here else reversed(both)))


def plan_starts(
    source: Source, spec: ModelSpec, config: PredictConfig, trained: Sequence[str], *, warn: bool
) -> list[Start]:
    """Return the init times to predict, each with the members that are complete at it.

    Each init time with missing members gives a warning. All those at an hour of the day, or in a season, that training
    lacked give one warning together.

    `trained` are the training dates, ISO 8601 in UTC; empty if they are not known.

    Raises:
        UserError: the source holds no forecast, an init time or member is not there, every member asked for lacks a
            field, or the model or the output needs more members.
    """
    layout = source.layout
    if not len(layout.init_time) or not source.has(Part.FORECAST):
        raise UserError(f"input {source.path}: holds no ensemble forecast")
    wanted = choose_members(layout.realization, config.members_in)
    if config.dates is not None and not len(config.dates):
        raise UserError("dates=[]: names no init time; leave it out for all")
    every = np.arange(len(layout.init_time))
    dates = every if config.dates is None else select_dates(layout.init_time, config.dates)
    # This checks the request itself. `_start` checks again for dates with missing members.
    _enough(len(wanted), spec, config, f"members_in={config.members_in}: {len(wanted)} members")
    starts = [_start(source, spec, config, int(date), wanted, warn) for date in dates]
    unlike = _unlike([start.init_time for start in starts], trained)
    if unlike and warn:
        text = "input %s: %d of %d init times are at an hour or in a season that training lacked, the first %s: %s"
        first = min(unlike)
        log.warning(text, source.path, len(unlike), len(starts), iso(first), unlike[first])
    return [replace(start, unlike=unlike.get(start.init_time, "")) for start in starts]


def choose_members(realization: Sequence[int], members_in: Any) -> tuple[int, ...]:
    """Return the positions of the members that `members_in` names, in ascending order.

    Args:
        realization: numbers of all members.
        members_in: how many members to take, from the first on, a list of member numbers, or None for all.

    Raises:
        UserError: `members_in` is no number or list, or names too many members, one that is not there, or one twice.
    """
    numbers = _list(realization)
    if members_in is None:
        return tuple(range(len(realization)))
    # True is an int in Python, but not a number of members.
    if isinstance(members_in, int) and not isinstance(members_in, bool):
        if not 1 <= members_in <= len(realization):
            raise UserError(f"members_in={members_in}: the input holds {len(realization)} members ({numbers})")
        return tuple(range(members_in))
    wanted = list(members_in) if isinstance(members_in, list | tuple) else []
    if not wanted or not all(type(n) is int for n in wanted) or len(set(wanted)) < len(wanted):
        raise UserError(f"members_in={members_in}: give a number of members, or a list of different member numbers")
    absent = [n for n in wanted if n not in realization]
    if absent:
        raise UserError(f"members_in={members_in}: member {absent[0]} is not there; the input holds {numbers}")
    return tuple(sorted(list(realization).index(n) for n in wanted))


def _start(
    source: Source, spec: ModelSpec, config: PredictConfig, date: int, wanted: tuple[int, ...], warn: bool
) -> Start:
    """Return an init time with its complete members, or raise a UserError if there are too few."""
    init_time = source.layout.init_time[date]
    gaps = _gaps(source, spec, date, wanted)
    left = tuple(position for position in wanted if position not in gaps)
    numbers = {position: source.layout.realization[position] for position in wanted}
    where = f"input {source.path}: {iso(init_time)}"
    if not left:
        raise UserError(f"{where}: {gaps[wanted[0]]}, is missing for every member asked for; leave the date out")
    if not gaps:
        return Start(date, init_time, left)
    missing = "; ".join(f"member {numbers[position]} is missing ({gap})" for position, gap in gaps.items())
    where = f"{where}: {missing}, which leaves {len(left)}"
    _enough(len(left), spec, config, where)
    if warn:
        log.warning("%s of %d members", where, len(wanted))
    return Start(date, init_time, left, missing)


def _gaps(source: Source, spec: ModelSpec, date: int, wanted: tuple[int, ...]) -> dict[int, str]:
    """Describe, for each member that lacks a field of the model, the first such field."""
    layout = source.layout
    pressure, surface = source.present(Part.FORECAST, date)  # (M, T, V, Z) and (M, T, S)
    leads = [layout.lead_hours.index(lead) for lead in spec.leads_in]
    variables = [layout.variables.index(name) for name in spec.variables]
    levels = [layout.levels.index(level) for level in spec.levels] if variables else []
    flat = [layout.surface.index(name) for name in spec.surface]
    # A field that is zero by nature, such as rain at lead zero, need not be in the archive.
    unneeded = np.array([[zero_by_nature(name, lead) for name in spec.surface] for lead in spec.leads_in], bool)
    found = {}
    for position in wanted:
        absent_p = np.argwhere(~pressure[position][np.ix_(leads, variables, levels)])
        absent_s = np.argwhere(~(surface[position][np.ix_(leads, flat)] | unneeded.reshape(len(leads), len(flat))))
        if len(absent_p):
            lead, variable, level = absent_p[0]
            found[position] = f"{spec.variables[variable]} at {spec.levels[level]} hPa, +{spec.leads_in[lead]} h"
        elif len(absent_s):
            lead, variable = absent_s[0]
            found[position] = f"{spec.surface[variable]}, +{spec.leads_in[lead]} h"
    return found


def _enough(count: int, spec: ModelSpec, config: PredictConfig, where: str) -> None:
    """Raise a UserError if the model, or `members_out`, needs more members than `count`."""
    least = spec.config.min_members
    if count < least:
        raise UserError(f"{where}; the checkpoint was made with model.min_members={least}: give that many or more")
    if config.members_out and count < 2:
        raise UserError(f"{where}; members_out=true needs two members or more: turn it off or give more")


def _unlike(init_times: Sequence[np.datetime64], trained: Sequence[str]) -> dict[np.datetime64, str]:
    """Describe, by init time, how the hour or the season differs from those of all training dates, where it does.

    The corrections of a model depend on both: at a given grid point and lead, the hour of the start fixes the local
    time, and biases change with the seasons.
    """
    if not len(trained):
        return {}
    known = np.asarray(trained, "datetime64[m]")
    hours, days = {hour_of_day(time) for time in known}, np.array([day_of_year(time) for time in known])
    months = np.unique(known.astype("datetime64[M]").astype(np.int64) % 12) + 1
    trained_on = f"{_list([f'{hour:02d}' for hour in sorted(hours)])} UTC in {_list([month_abbr[m] for m in months])}"
    found = {}
    for time in init_times:
        # Days of the year lie on a circle: 31 December is next to 1 January.
        apart = abs(days - day_of_year(time))
        nearest = int(np.minimum(apart, abs(365 - apart)).min())
        ways = [f"at {hour_of_day(time):02d} UTC"] if hour_of_day(time) not in hours else []
        ways += [f"{nearest} days of the year away"] if nearest > _SEASON else []
        if ways:
            found[time] = f"start {' and '.join(ways)}, those trained on are at {trained_on}"
    return found


def sum_cuts(spec: ModelSpec, bounds: Mapping[str, Sequence[Any]] | None) -> dict[str, list[int]]:
    """Return the hours at which sums of each variable began or ended in training, if the checkpoint states them.

    An archive may hold sums since the start, and more leads than training had. Differences between neighbouring leads
    would then be sums over other, shorter intervals. `bounds` are as in `check_source`.
    """
    known = bounds or {}
    return {name: [*spec.leads_in, *(hour for pair in known[name] if pair for hour in pair)] for name in known}


def _spans(pairs: Sequence[Any]) -> str:
    """Return intervals as text."""
    return ", ".join("nothing" if pair is None else f"{pair[0]}-{pair[1]} h" for pair in pairs)


def _list(values: Sequence[Any]) -> str:
    """Return values as text, or "none"."""
    return ", ".join(map(str, values)) or "none"


@dataclass(frozen=True, eq=False)
class Sample:
    """The data of one init time.

    Attributes:
        start: the init time and its members.
        members: raw members, (M, T_in, ...), as the source has them. They take most of the memory of a date, so M is 0
            if nothing needs them.
        mean: (T_in, F, Y, X) mean of the members.
        spread: (T_in, F, Y, X) standard deviation of the members.
        remarks: sentences for the file, about values beyond the training range.
        extremes: smallest and largest value of each field, (F,) each; None if no training range is known.
    """

    start: Start
    members: Fields
    mean: np.ndarray
    spread: np.ndarray
    remarks: tuple[str, ...] = ()
    extremes: tuple[np.ndarray, np.ndarray] | None = None


class Samples:
    """A reader of samples, which warns once for each variable with values beyond the training range.

    Args:
        source: the reduced ensemble.
        spec: the inputs and outputs of the model.
        meta: the content of checkpoint.json, which may state the training range of the inputs.
        window: the rows and columns of the grid to read, as in `Reader`; None reads the whole grid.
        members: whether the output needs the members. The model may need them, too.
    """

    def __init__(
        self,
        source: Source,
        spec: ModelSpec,
        meta: Mapping[str, Any],
        window: tuple[Span, Span] | None = None,
        members: bool = True,
    ):
        self.reader, self.spec = Reader(source, spec, window=window), spec
        self._limits = _limits(spec, meta["input_range"]) if "input_range" in meta else None
        self._warned: set[str] = set()
        # Members are also needed for masks, and by models that look at single members.
        self._keep = members or bool(spec.masked) or spec.config.one_member or spec.takes_members

    def read(self, start: Start) -> Sample:
        """Read one init time.

        Raises:
            UserError: a field is missing, or a value is infinite, or NaN where its variable has no mask. The message
                names the variable, level, lead, date and member.
        """
        members = self.reader.forecast(start.date, start.positions)
        mean, spread = self.reader.reduced(members)
        extremes = None
        if self._limits is not None:
            extremes = _by_field(members, np.fmin.reduce), _by_field(members, np.fmax.reduce)
        # Members are dropped here, after the mean and spread were made of them: M = 0 keeps all other axes.
        if not self._keep:
            members = Fields(*(np.empty((0, *v.shape[1:]), v.dtype) for v in (members.pressure, members.surface)))
        return Sample(start, members, mean, spread, extremes=extremes)

    def check_together(self, sample: Sample, spatial: Communicator) -> None:
        """Refuse a masked field that has no value on any rank of the group.

        One rank alone cannot decide this, because its part of the grid may be all land, where sea surface temperature
        has no value.

        Raises:
            UserError: there is such a field. All ranks raise it.
        """
        start, members = sample.start, sample.members
        for values, names in ((members.pressure, self.spec.variables), (members.surface, self.spec.surface)):
            if values.size:
                known = torch.from_numpy(np.isfinite(values).any((-2, -1)).astype(np.float32))
                # The maximum over the ranks is 1 if any of them has a value.
                spatial.all_reduce(known, op="max")
                self.reader.refuse(known.numpy() > 0, names, start.date, np.array(start.positions))

    def judged(self, sample: Sample) -> Sample:
        """Return the sample with remarks on values beyond the training range. Log each variable only once."""
        beyond = {} if sample.extremes is None else self._beyond(*sample.extremes)
        for name, text in beyond.items():
            if name not in self._warned:
                log.warning("input %s: %s", self.reader.source.path, text)
        self._warned |= beyond.keys()
        return replace(sample, remarks=tuple(beyond.values()))

    def _beyond(self, low: np.ndarray, high: np.ndarray) -> dict[str, str]:
        """Describe, for each variable beyond the training range at any level, the level where it is farthest beyond."""
        assert self._limits is not None
        limits = self._limits
        # The excess is measured in widths of the training range. A field that was constant in training gets a tiny
        # width.
        width = np.maximum(limits[:, 1] - limits[:, 0], np.finfo(np.float32).tiny)
        excess = np.maximum(limits[:, 0] - low, high - limits[:, 1]) / width
        found: dict[str, tuple[float, str]] = {}
        for index, (name, level) in enumerate(self.spec.names):
            if excess[index] > _MARGIN and excess[index] > found.get(name, (0.0, ""))[0]:
                above = high[index] - limits[index, 1] >= limits[index, 0] - low[index]
                value = high[index] if above else low[index]
                found[name] = excess[index], _describe(name, level, value, limits[index])
        return {name: text for name, (_, text) in found.items()}


def collate(samples: Sequence[Sample], spec: ModelSpec) -> EnsembleInput:
    """Collect samples, whose numbers of members may differ, into one batch of inputs, with the axis B in front.

    Members are included only if the model takes them, and filled up with zeros to the largest number.
    """

    def stack(arrays: Iterable[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(list(arrays)))

    single, every = spec.config.one_member, spec.takes_members
    most = max(len(s.start.positions) for s in samples)
    given = [s.members for s in samples]
    return EnsembleInput(
        stack(s.mean for s in samples),
        stack(s.spread for s in samples),
        torch.tensor([float(len(s.start.positions)) for s in samples]),
        torch.tensor([float(day_of_year(s.start.init_time)) for s in samples]),
        stack(Fields(one.pressure[0], one.surface[0]).joined() for one in given) if single else None,
        stack(filled(one.joined(), most) for one in given) if every else None,
        stack(valid_shares(spec, one.pressure, one.surface) for one in given) if spec.masked else None,
    )


def replace_static(model: AnyModel, source: Source) -> None:
    """Replace the static fields of the checkpoint in `model` by those of `source`.

    Raises:
        UserError: the source lacks a static field that the model takes.
    """
    spec, there = model.spec, source.static()
    absent = [name for name in spec.static if name not in there]
    if absent:
        held = ", ".join(there) or "none"
        raise UserError(f"static: {', '.join(absent)} missing, which the checkpoint takes; it holds {held}")
    climate = Climate.default(spec)
    climate.static = np.stack([there[name] for name in spec.static]) if spec.static else climate.static
    # Only the buffer `position`, which holds the static fields, is replaced. All other buffers stay those of the
    # training.
    model.features.load_state_dict({"position": Features(spec, climate.checked(spec)).position}, strict=False)


def _limits(spec: ModelSpec, ranges: Mapping[str, Any]) -> np.ndarray:
    """Return the training range of each field, (F, 2).

    The checkpoint has it as {"t": {"500": [smallest, largest], ...}, "t2m": [smallest, largest]}.
    """
    pairs = [ranges[name] if level is None else ranges[name][str(level)] for name, level in spec.names]
    return np.asarray(pairs, np.float64)


def _by_field(members: Fields, reduce: Any) -> np.ndarray:
    """Reduce members, leads and grid points to one number for each field, (F,). NaN is ignored."""
    upper = reduce(members.pressure, axis=(0, 1, 4, 5)) if members.pressure.size else np.zeros(0)
    flat = reduce(members.surface, axis=(0, 1, 3, 4)) if members.surface.size else np.zeros(0)
    return np.concatenate([upper.ravel(), flat.ravel()]).astype(np.float64)


def _describe(name: str, level: int | None, value: float, limits: np.ndarray) -> str:
    """Return in words how far a value lies beyond the training range."""
    units, where = field(name).units, "" if level is None else f" at {level} hPa"
    above = value > limits[1]
    distance, side = (value - limits[1], "above") if above else (limits[0] - value, "below")
    return (
        f"{name}{where} reaches {value:.6g} {units}, {distance:.3g} {side} the training range"
        f" ({limits[0]:.6g} to {limits[1]:.6g})"
    )
