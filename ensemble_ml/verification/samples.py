"""Read one variable and lead of one initialisation time, from the ensemble, the truth and the forecasts.

All work in verification goes by these units. This file also decides which members a forecast has seen. A `date` is the
position of an initialisation time in the source.

Axes: W weighting, M member, Z level, Y latitude, X longitude.
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
    """A unit of reading: one variable at one lead, on all its levels.

    Attributes:
        variable: Short name of the variable.
        lead_hours: Lead time in hours.
        levels: Levels in hPa; (None,) at the surface.
        columns: Positions of the levels among the scored columns.
    """

    variable: str
    lead_hours: int
    levels: tuple[int | None, ...]
    columns: slice

    @property
    def selection(self) -> Selection:
        """Return the selection that `Source.read` takes."""
        levels = tuple(level for level in self.levels if level is not None)
        return Selection.one(self.lead_hours, self.variable, surface=not levels, levels=levels)


@dataclass(frozen=True, eq=False)
class Setting:
    """The setting that all groups share.

    Attributes:
        source: The full ensemble, and the truth where there is one.
        forecasts: The forecasts, including those that count as baselines.
        reduced: Number of members of the reduced ensemble.
        fit: Positions of the fit dates in the source.
        halves: Half of each fit date, 0 or 1. The halves are compared with each other to shrink local corrections.
        weights: (W, Y, X) exact cell areas, ones, then cell areas within each region and zero outside.
        truth: True if there is a truth.
        climate_days: Half-width in days of the window of the model climate; 0 turns it off.
        seasons: Cache of the dates that the model climate of each date is made of, as positions in the source.
        heights: Heights of the ground in model and truth, where they are known.
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
        """Return the number of members of the full ensemble."""
        return len(self.source.layout.realization)

    @property
    def held_out(self) -> int:
        """Return the number of members that the reduced ensemble lacks."""
        return self.full - self.reduced

    def thresholds(self, variable: str) -> list[float]:
        """Return the thresholds of a variable of which any forecast holds probabilities, ascending."""
        return sorted({value for one in self.forecasts for value in one.thresholds.get(variable, ())})

    @cached_property
    def informed(self) -> frozenset[str]:
        """Return the labels of forecasts that have seen held-out members, or may have.

        They cannot be scored on these members. A forecast that does not state its members on all dates may have.
        """
        held = {str(int(number)) for number in self.source.layout.realization[self.reduced :]}
        return frozenset(one.label for one in self.forecasts if held & one.seen or one.silent)

    def given(self, date: int) -> dict[str, list[int]]:
        """Return the positions of the members that each forecast of a date was made from, by label.

        A forecast is missing if it names a member that the ensemble lacks, and its list is empty if it states none.
        """
        start = self.source.layout.init_time[date]
        stated = {one.label: one.made_of.get(start, ()) for one in self.forecasts}
        return {
            label: [self._places[number] for number in numbers]
            for label, numbers in stated.items()
            if {*numbers} <= {*self._places}
        }

    @cached_property
    def _places(self) -> dict[str, int]:
        """Return the position of each member by its number."""
        return {str(int(number)): place for place, number in enumerate(self.source.layout.realization)}


@dataclass(frozen=True, eq=False)
class Sample:
    """The data of one initialisation time of a group.

    Spreads and the extreme forecast index use `members`. Comparisons with the truth use `raw`.

    Attributes:
        members: (M, Z, Y, X) members as they were read.
        raw: (M, Z, Y, X) members at the height of the truth's ground, or `members` where heights are not corrected.
        truth: (Z, Y, X), or None where there is none.
        whole: (Z, Y, X) bool, true where every member has a value.
        verified: (Z, Y, X) bool, true where every member and the truth have a value.
        given: Positions of the members that each forecast was made from, by label.
    """

    members: np.ndarray
    raw: np.ndarray
    truth: np.ndarray | None
    whole: np.ndarray
    verified: np.ndarray
    given: dict[str, list[int]]


def read_sample(setting: Setting, group: Group, date: int) -> Sample:
    """Read the members and the truth of a group on one date, with masks of where they are complete."""
    members = read_group(setting.source, Part.FORECAST, date, group)
    # A spread of fewer members would be another quantity, so a point counts only if every member has a value.
    whole, given = np.isfinite(members).all(0), setting.given(date)
    if not setting.truth:
        return Sample(members, members, None, whole, np.zeros_like(whole), given)
    truth = read_group(setting.source, Part.TRUTH, date, group)[0]
    raw = on_truths_ground(setting.source, setting.heights, group, date, members)
    return Sample(members, raw, truth, whole, whole & np.isfinite(truth), given)


def on_truths_ground(
    source: Source, heights: Heights | None, group: Group, date: int, members: np.ndarray
) -> np.ndarray:  # fmt: skip
    """Return the members of a group at the height of the truth's ground.

    The members (M, Z, Y, X) are returned unchanged if the heights are not known (None), or if the variable is not among
    those to correct.
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
    """Return the same heights with the variables to correct.

    A correction is used if it does not raise the RMSE of the ensemble mean on the fit dates, over all leads together.
    Without any dates, all variables are corrected. The heights also get the RMSE with correction over that without, for
    each scored variable that could be corrected.
    """
    # Two sums of squared errors for each variable: without and with the correction.
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
    """Return the spread of the reduced ensemble at lead 0, (Z, Y, X).

    It is None if there is no lead 0, if the group itself is at lead 0, or if the reduced ensemble has one member.
    """
    layout = setting.source.layout
    if group.lead_hours == 0 or 0 not in layout.lead_hours or setting.reduced < 2:
        return None
    given = tuple(int(number) for number in layout.realization[: setting.reduced])
    members = read_group(setting.source, Part.FORECAST, date, replace(group, lead_hours=0), given)
    return np.sqrt(ensemble_moments(members)[1])


def read_group(
    source: Source, part: Part, date: int, group: Group, members: tuple[int, ...] | None = None
) -> np.ndarray:
    """Read the fields of a group, (M, Z, Y, X) float64, of members by number or of all. The truth has M = 1."""
    return np.asarray(source.read(part, date, replace(group.selection, realization=members)).one(), np.float64)


def held_out_spread(members: np.ndarray, reduced: int) -> np.ndarray | None:
    """Return the spread (...) of the held-out members, corrected to the size of the full ensemble: s_H c4(N) / c4(H).

    The first `reduced` of the members (N, ...) are not held out. The result is None if fewer than two are.
    """
    if len(members) - reduced < 2:
        return None
    spread = np.sqrt(ensemble_moments(members[reduced:])[1])
    return spread * (c4(len(members)) / c4(len(members) - reduced))


def held_out_error(
    predicted: np.ndarray, members: np.ndarray, reduced: int, given: Sequence[int] = ()
) -> np.ndarray | None:
    """Return the error (Z, Y, X) of the spread that a forecast implies for the held-out members.

    `given` are the positions of the members that the forecast was made from. With them, the predicted spread of the
    full ensemble is converted to what it implies for the rest (`baselines.spread_of_the_rest`). Without any, it is
    compared as it is. The result is None if fewer than two members are held out, or the forecast has seen one of them.
    """
    held = held_out_spread(members, reduced)
    if held is None or any(place >= reduced for place in given):
        return None
    # The full ensemble shares members with the input, and the held-out members do not. So a forecast of the full spread
    # cannot be compared with theirs directly.
    return (spread_of_the_rest(predicted, members[list(given)], len(members)) if given else predicted) - held


def predictions(setting: Setting, group: Group, date: int) -> dict[str, Predicted]:
    """Read the prediction of each forecast for a group on one date, by label (see `ForecastSet.predicted`)."""
    start = setting.source.layout.init_time[date]
    return {
        one.label: one.predicted(start, group.variable, group.lead_hours, group.levels) for one in setting.forecasts
    }


def check_predictions(setting: Setting, groups: Sequence[Group], date: int) -> None:
    """Read everything of the forecasts that is scored, for one date.

    An error that all files share is thus found before the fits, which may take hours.

    Raises:
        UserError: A file lacks a lead or cannot be read, units are not known, or a scale or spread is below zero.
    """
    # One date is enough, because the files of one folder usually come from one program.
    start, names = setting.source.layout.init_time[date], {group.variable for group in groups}
    whole = [one for one in setting.forecasts if setting.truth and all(map(one.has_members, names))]
    for group in groups:
        predictions(setting, group, date)
        for one in whole:  # their members are scored as well
            one.members(start, group.variable, group.lead_hours, group.levels)


def check_members(source: Source, members_in: int | None) -> None:
    """Refuse a reduced ensemble that is larger than the full one; None passes.

    Raises:
        UserError: The ensemble has fewer members.
    """
    full = len(source.layout.realization)
    if members_in is not None and members_in > full:
        raise UserError(f"members_in={members_in}: {source.path} has {full} members; give {full} or fewer")
