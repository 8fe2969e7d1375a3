"""What is read at once: one variable and lead of one start date, from the ensemble, the truth and the forecasts.

Axes: M member, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.store.source import Part, Selection, Source
from ensemble_ml.verification.baselines import spread_of_the_rest
from ensemble_ml.verification.forecasts import ForecastSet, Predicted
from ensemble_ml.verification.heights import OF_THE_GROUND, Heights
from ensemble_ml.verification.statistics import c4, ensemble_moments


@dataclass(frozen=True)
class Group:
    """What is read at once: one variable at one lead, all its levels ((None,) at the surface)."""

    variable: str
    lead_hours: int
    levels: tuple[int | None, ...]
    columns: slice

    @property
    def selection(self) -> Selection:
        """For `Source.read`."""
        levels = tuple(level for level in self.levels if level is not None)
        return Selection.one(self.lead_hours, self.variable, surface=not levels, levels=levels)


@dataclass(frozen=True, eq=False)
class Setting:
    """What all groups share.

    `weights` (W, Y, X): exact areas, ones, then areas of regions; `fit` indices of start dates, and the half of each (0
    or 1), which empirical Bayes holds against the other; `climate_days` of the model climate, and `seasons` as far as
    it is known which dates it is made of; `heights` of model and truth, where they are known.
    """

    source: Source
    forecasts: tuple[ForecastSet, ...]
    reduced: int
    fit: np.ndarray
    halves: np.ndarray
    weights: np.ndarray
    truth: bool
    climate_days: int = 0
    seasons: dict[int, np.ndarray] = field(default_factory=dict)
    heights: Heights | None = None

    @property
    def full(self) -> int:
        """Members of the full ensemble."""
        return len(self.source.layout.realization)

    @property
    def held_out(self) -> int:
        """Members that the reduced ensemble lacks."""
        return self.full - self.reduced

    @cached_property
    def informed(self) -> frozenset[str]:
        """Labels of forecasts that were, or may have been, made from members held out from the reduced ensemble."""
        held = {str(int(number)) for number in self.source.layout.realization[self.reduced :]}
        return frozenset(one.label for one in self.forecasts if held & one.seen or one.silent)

    def given(self, date: int) -> dict[str, list[int]]:
        """Where the members stand, by label, that forecasts of a start date were made from, of those that say so."""
        start = self.source.layout.init_time[date]
        told = {one.label: one.made_of.get(start, ()) for one in self.forecasts}
        known = {label: numbers for label, numbers in told.items() if {*numbers} <= {*self._places}}
        return {label: [self._places[number] for number in numbers] for label, numbers in known.items()}

    @cached_property
    def _places(self) -> dict[str, int]:
        return {str(int(number)): place for place, number in enumerate(self.source.layout.realization)}


@dataclass(frozen=True, eq=False)
class Sample:
    """One start date of a group: `members` (M, Z, Y, X), `truth` (Z, Y, X), and where each is whole; `given` of
    `Setting`; `raw` the members as they are held against the truth, brought to its ground. Spreads and the extreme
    forecast index are of `members`, as the ensemble and its climate have them.
    """

    members: np.ndarray
    raw: np.ndarray
    truth: np.ndarray | None
    whole: np.ndarray
    verified: np.ndarray
    given: dict[str, list[int]]


def read_sample(setting: Setting, group: Group, date: int) -> Sample:
    """Read the members and the truth of one start date."""
    members = read_group(setting.source, Part.FORECAST, date, group)
    whole, given = np.isfinite(members).all(0), setting.given(date)
    if not setting.truth:
        return Sample(members, members, None, whole, np.zeros_like(whole), given)
    truth = read_group(setting.source, Part.TRUTH, date, group)[0]
    raw, verified = on_truths_ground(setting.source, setting.heights, group, date, members), whole & np.isfinite(truth)
    if raw is not members:
        verified &= np.isfinite(raw).all(0)
    return Sample(members, raw, truth, whole, verified, given)


def on_truths_ground(
    source: Source, heights: Heights | None, group: Group, date: int, members: np.ndarray
) -> np.ndarray:  # fmt: skip
    """Return `members` (M, Z, Y, X) of a group at the height of the truth's ground.

    They are returned as they are where the heights are not known, or the variable is of no ground.
    """
    if heights is None or group.variable not in heights.variables:
        return members
    if group.variable == "t2m":
        return heights.temperature(members)
    known = "t2m" in source.layout.surface
    warmth = read_group(source, Part.FORECAST, date, replace(group, variable="t2m")) if known else None
    return heights.pressure(members, warmth)


def settled(
    source: Source, heights: Heights, groups: Sequence[Group], dates: Sequence[int], area: np.ndarray
) -> Heights:  # fmt: skip
    """Return `heights` for those variables alone whose mean errs less for the correction on `dates`.

    Args:
        groups: what is scored.
        dates: that baselines are fitted on; without any, all variables are corrected.
        area: weights (Y, X).
    """
    squares = {name: np.zeros(2) for name in OF_THE_GROUND if any(group.variable == name for group in groups)}
    for group in (group for group in groups if group.variable in squares):
        for date in dates:
            members = read_group(source, Part.FORECAST, date, group)
            truth = read_group(source, Part.TRUTH, date, group)[0]
            brought = on_truths_ground(source, heights, group, date, members)
            errors = np.stack([(one.mean(0) - truth) ** 2 for one in (members, brought)])
            squares[group.variable] += (np.where(np.isfinite(errors).all(0), errors, 0.0) * area).sum((-3, -2, -1))
    ratios = {name: float(np.sqrt(after / before)) for name, (before, after) in squares.items() if before > 0}
    return replace(heights, variables=tuple(n for n in OF_THE_GROUND if ratios.get(n, 1.0) <= 1), ratios=ratios)


def start_spread(setting: Setting, group: Group, date: int) -> np.ndarray | None:
    """Spread of the reduced ensemble at lead 0 (Z, Y, X); None where there is none, or the group is of lead 0."""
    layout = setting.source.layout
    if group.lead_hours == 0 or 0 not in layout.lead_hours or setting.reduced < 2:
        return None
    given = tuple(int(number) for number in layout.realization[: setting.reduced])
    members = read_group(setting.source, Part.FORECAST, date, replace(group, lead_hours=0), given)
    return np.sqrt(ensemble_moments(members)[1])


def read_group(
    source: Source, part: Part, date: int, group: Group, members: tuple[int, ...] | None = None
) -> np.ndarray:
    """(M, Z, Y, X) float64; truth has M = 1."""
    return np.asarray(source.read(part, date, replace(group.selection, realization=members)).one(), np.float64)


def held_out_spread(members: np.ndarray, reduced: int) -> np.ndarray | None:
    """Spread of the members not given, brought to the full size: s_H c4(N) / c4(H); None of fewer than two."""
    if len(members) - reduced < 2:
        return None
    spread = np.sqrt(ensemble_moments(members[reduced:])[1])
    return spread * (c4(len(members)) / c4(len(members) - reduced))


def held_out_error(
    predicted: np.ndarray, members: np.ndarray, reduced: int, given: Sequence[int] = ()
) -> np.ndarray | None:
    """Error of what a forecast of the full ensemble's spread says of that of the members held out.

    Args:
        predicted: (Z, Y, X).
        members: all, (N, Z, Y, X), of which the first `reduced` are not held out.
        given: positions of those that it was made from: it says what they leave (`baselines.spread_of_the_rest`); none
            where it knows none, or does not say which, and stands as it is.

    Returns:
        (Z, Y, X); None where fewer than two members are held out, or the forecast has seen one of them.
    """
    held = held_out_spread(members, reduced)
    if held is None or any(place >= reduced for place in given):
        return None
    return (spread_of_the_rest(predicted, members[list(given)], len(members)) if given else predicted) - held


def predictions(setting: Setting, group: Group, date: int) -> dict[str, Predicted]:
    """What each forecast says of a group on one start date."""
    start = setting.source.layout.init_time[date]
    return {
        one.label: one.predicted(start, group.variable, group.lead_hours, group.levels) for one in setting.forecasts
    }


def check_predictions(setting: Setting, groups: Sequence[Group], date: int) -> None:
    """Read all that forecasts say on one start date: what is wrong with all files is told before the fits, which may
    take hours.

    Raises:
        UserError: a variable cannot be read, has units that are not known, or is a scale or spread below zero.
    """
    start, names = setting.source.layout.init_time[date], {group.variable for group in groups}
    whole = [one for one in setting.forecasts if setting.truth and all(map(one.has_members, names))]
    for group in groups:
        predictions(setting, group, date)
        for one in whole:  # whose members are scored
            one.members(start, group.variable, group.lead_hours, group.levels)


def check_members(source: Source, members_in: int | None) -> None:
    """Raise a UserError where the ensemble has fewer members than the reduced one should."""
    full = len(source.layout.realization)
    if members_in is not None and members_in > full:
        raise UserError(f"members_in={members_in}: {source.path} has {full} members; give {full} or fewer")
