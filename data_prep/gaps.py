"""Find and settle the gaps of an archive: fields that some init times or members lack while others have them.

If no init time and no member has a field at a lead, the archive is taken to leave it out on purpose. That is not a gap.
There is one exception: it is a gap if the archive has records of the field but cannot make the field from them, such as
a sum over an interval whose earlier part is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_prep.archive import ArchiveSource
from data_prep.pairs import Pair
from data_prep.records import variable_text
from data_prep.truth import ArchiveTruth
from ensemble_ml.config import Gaps
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.store.source import Layout, Part
from ensemble_ml.wording import date_text, dates_text

_SHOWN = 10  # number of gaps that are named one by one
_USUAL = 0.75  # a series is regular if at least this fraction of the steps between its init times are the usual ones
_MOST_STEPS = 10  # a pause longer than so many of the shorter usual step is taken as intended


@dataclass(frozen=True)
class Gap:
    """The fields that are missing for one init time and member, or for one init time of the truth."""

    date: int  # position among the init times
    start: str  # the init time as messages show it
    text: str  # a phrase that names the first missing field
    count: int  # number of missing fields

    def __str__(self) -> str:
        return f"{self.text} ({self.count} fields)" if self.count > 1 else self.text


def find_gaps(source: ArchiveSource, part: Part = Part.FORECAST) -> list[Gap]:
    """Return the gaps of the forecast or the control, ordered by init time and then by member."""
    lay, found = source.layout, []
    if not source.has(part):
        return []
    every = [source.present(part, date) for date in range(len(lay.init_time))]
    lost = source.lost(part)
    # A field is expected if any init time and member has it, or if there are records of it that cannot be combined.
    anywhere = [np.any([both[surface].any(0) for both in every], axis=0) | lost[surface] for surface in (False, True)]
    for date, both in enumerate(every):
        start = date_text(lay.init_time[date])
        for member in range(len(both[0])):
            lacking = [np.argwhere(anywhere[surface] & ~both[surface][member]) for surface in (0, 1)]
            count = sum(map(len, lacking))
            if count:
                who = "the control" if part is Part.CONTROL else f"member {lay.realization[member]}"
                surface = not len(lacking[0])
                place = lacking[surface][0].tolist()
                what, lead = _named(lay, surface, place)
                text = f"{who} at {start} lacks {what}, lead {lead} h"
                if lost[surface][tuple(place)]:
                    text += " (the archive's sums do not give its interval)"
                found.append(Gap(date, start, text, count))
    return found


def find_truth_gaps(truth: ArchiveTruth) -> list[Gap]:
    """Return the gaps of a truth, ordered by the init times of the forecast."""
    lay, found = truth.layout, []
    for date, both in enumerate(truth.presence):
        lacking = [np.argwhere((truth.anywhere[surface] & ~both[surface])[0]) for surface in (0, 1)]
        count = sum(map(len, lacking))
        if count:
            surface = not len(lacking[0])
            place = lacking[surface][0].tolist()
            start = lay.init_time[date]
            found.append(Gap(date, date_text(start), _truth_text(truth, start, surface, place), count))
    return found


def _truth_text(truth: ArchiveTruth, start: np.datetime64, surface: bool, place: list[int]) -> str:
    """Return the phrase that names the first missing field of a gap in the truth."""
    what, hours = _named(truth.layout, surface, place)
    span = truth.span((truth.layout.surface if surface else truth.layout.variables)[place[1]], place[0])
    over = f" over hours {span[0]} to {span[1]}" if span else ""
    valid = date_text(start + np.timedelta64(hours, "h"))
    return f"lacks {what}{over} at {valid}, which verifies the init time {date_text(start)} at lead {hours} h"


def _named(lay: Layout, surface: bool, place: list[int]) -> tuple[str, int]:
    """Return the name of a missing field as messages show it, and its lead in hours."""
    lead, variable, *level = place
    known = field((lay.surface if surface else lay.variables)[variable])
    return variable_text(known, lay.levels[level[0]] if level else 0), lay.lead_hours[lead]


def listed(gaps: Sequence[Gap]) -> str:
    """Return the text of a message on gaps (one or more): the totals, and the first few gaps by name."""
    dates, fields = len({gap.date for gap in gaps}), sum(gap.count for gap in gaps)
    more = f"; and {len(gaps) - _SHOWN} more like these" if len(gaps) > _SHOWN else ""
    total = f"{fields} field{'s' * (fields > 1)} of {dates} init time{'s' * (dates > 1)}"
    return f"{total} missing: {'; '.join(map(str, gaps[:_SHOWN]))}{more}"


def settle(both: Pair, policy: Gaps) -> tuple[Pair, list[Gap]]:
    """Find the gaps of an archive and its truth, and apply a policy to them.

    The policy is to refuse gaps (`error`), to drop their init times (`skip`), or to keep all init times (`mask`).

    Returns:
        Forecast and truth without the init times that were dropped, and all gaps. `Gap.date` counts the init times as
        they were before any was dropped.

    Raises:
        UserError: there are gaps and the policy is `error`; every init time has a gap and the policy is `skip`; or the
            truth has no field at any valid time, or intervals that do not fit those of the forecast.
    """
    source, truth = both.forecast, both.truth
    assert isinstance(source, ArchiveSource)
    gaps = [gap for part in (Part.FORECAST, Part.CONTROL) for gap in find_gaps(source, part)]
    if gaps and policy is Gaps.error:
        raise UserError(
            f"input {source.path}: {listed(gaps)}; other dates or members have them: complete the archive, leave them "
            "out with dates=, variables=, levels= or leads=, or set gaps=skip (these dates) or gaps=mask (these fields)"
        )
    if isinstance(truth, ArchiveTruth):
        truth.unmatched()  # raises an error if intervals do not fit: no policy for gaps can help then
        of_truth = find_truth_gaps(truth)
        if not both.has(Part.TRUTH):
            raise UserError(f"truth {truth.path}: has no field at any valid time of the forecast; set truth=null")
        if of_truth and policy is Gaps.error:
            raise UserError(
                f"truth {truth.path}: {listed(of_truth)}; complete it, choose init times with dates=..., set "
                "gaps=skip (these dates) or gaps=mask (these fields), or truth=null"
            )
        gaps += of_truth
    if not gaps or policy is not Gaps.skip:
        return both, gaps
    dates = sorted({gap.date for gap in gaps})
    if len(dates) == len(source.layout.init_time):
        raise UserError(f"gaps=skip: no init time is complete; {listed(gaps)}; set gaps=mask, or leave fields out")
    return both.without(dates), gaps


def kept_gaps(gaps: Sequence[Gap], policy: Gaps, starts: Sequence[str]) -> dict[str, Any]:
    """Return what the provenance of a store records of its gaps: their init times, and the first few in words.

    `starts` holds the init times that an otherwise regular series lacks (see `holes`).
    """
    return {
        "policy": policy.value,
        "dates": dates_text(gap.start for gap in gaps),
        "fields": sum(gap.count for gap in gaps),
        "first": [str(gap) for gap in gaps[:_SHOWN]],
        **({"starts": dates_text(starts)} if starts else {}),
    }


def holes(init_time: np.ndarray) -> list[np.datetime64]:
    """Return the init times that an otherwise regular series of (D,) ascending ones lacks.

    A series is regular if most init times are one usual step apart, or if two usual steps take turns, as for Mondays
    and Thursdays. A series of fewer than four init times is too short to tell. A pause longer than `_MOST_STEPS` of the
    shorter usual step is taken as intended, so none of its init times are returned.
    """
    steps = np.diff(init_time)
    if len(steps) < 3:
        return []
    kinds, counts = np.unique(steps, return_counts=True)
    usual = kinds[np.argsort(-counts, kind="stable")[:2]]
    if counts.max() >= _USUAL * len(steps):
        usual = usual[:1]
    elif len(usual) < 2 or np.mean(_in_turn(steps, usual)) < _USUAL:
        return []
    found: list[np.datetime64] = []
    before: np.timedelta64 | None = None
    for first, gap, after in zip(init_time, steps, [*steps[1:], None], strict=False):
        hole = gap not in usual and gap <= _MOST_STEPS * usual.min()
        dates = _between(first, gap, usual, (before, after)) if hole else []
        found += dates
        # If the hole was filled, the step before the next init time is the last one within the hole.
        before = first + gap - dates[-1] if dates else gap
    return found


def _in_turn(steps: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Return for each pair of successive steps whether they are the two usual steps, in either order."""
    pairs = np.sort(np.stack([steps[:-1], steps[1:]]), 0)
    return (pairs == np.sort(usual)[:, None]).all(0)


def _between(
    first: np.datetime64, gap: np.timedelta64, usual: np.ndarray, around: tuple[np.timedelta64 | None, ...]
) -> list[np.datetime64]:
    """Return the init times within a hole of the series, or none if the usual steps do not add up to its length.

    Two usual steps take turns, also with those before and after the hole (`around`), None at the ends of the series.
    """
    # Either of two usual steps may be the first within the hole. The right one is that which alternates with the steps
    # around the hole.
    for start in range(len(usual)):
        steps = [usual[start]]
        while sum(steps, np.timedelta64(0)) < gap:
            steps.append(usual[(start + len(steps)) % len(usual)])
        turns = len(usual) == 1 or (steps[0] != around[0] and steps[-1] != around[1])
        if turns and sum(steps, np.timedelta64(0)) == gap:
            return [first + sum(steps[:count], np.timedelta64(0)) for count in range(1, len(steps))]
    return []
