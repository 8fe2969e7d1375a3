"""Choose what to compare: the dates, leads, variables and levels that the forecasts and the ensemble share.

Every date that is left out is recorded with its reason, and a note counts the fields that are left out. Other notes
name what the forecasts do not state, because a reader of the report must know what a score depends on.

Axes: T lead, V variable on pressure levels, S surface variable, Z level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ensemble_ml.config import EvaluateConfig, as_list
from ensemble_ml.errors import UserError
from ensemble_ml.store.source import Part, Source, bounds_at, hour_of_day, select_dates
from ensemble_ml.verification.aggregation import Column
from ensemble_ml.verification.baselines import FEWEST_DATES, FEWEST_SPREADS
from ensemble_ml.verification.forecasts import ForecastSet
from ensemble_ml.verification.samples import Group
from ensemble_ml.wording import date_text, shortened

_USUAL = 5  # size of the reduced ensemble if the forecast does not state its members


@dataclass(eq=False)
class Plan:
    """A plan of an evaluation, made before any field is read.

    Attributes:
        test: Test dates, as positions in the source's init times.
        fit: Dates that baselines are fitted on, as positions in the source's init times.
        columns: The fields that are scored, each at one lead.
        groups: The same fields in groups of one variable and lead.
        dropped: Dates that are not scored: {date, reason}.
        notes: Sentences for the report.
        truth: True if the source has a truth.
        reduced: Number of members of the raw reduced ensemble.
    """

    test: np.ndarray
    fit: np.ndarray
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    dropped: list[dict[str, str]]
    notes: list[str]
    truth: bool
    reduced: int


def make_plan(config: EvaluateConfig, source: Source, forecasts: list[ForecastSet]) -> Plan:
    """Plan an evaluation of what all forecasts and the source share, with notes on everything that is left out.

    `source` is the full ensemble, with the truth if there is one. `forecasts` are those that are judged, followed by
    those that serve as baselines.

    Raises:
        UserError: A forecast has another grid, or sums over other hours. The truth in the settings has no field. There
            is no common field, or no date to score. No dates to fit on are known, the source lacks some of them, or
            `config.fit` names a period without init times.
    """
    layout, notes = source.layout, list[str]()
    for forecast in forecasts:
        # Scores compare point by point. If the evaluation interpolated one side, it would smooth its fields and change
        # the scores.
        if not forecast.grid.same_as(layout.grid):
            raise UserError(
                f"{forecast.path}: its grid ({forecast.grid.describe()}) is not that of {source.path} "
                f"({layout.grid.describe()}); evaluate needs forecasts of the whole grid, without region=; "
                "regrid=true brings an archive to the forecasts' grid; give the archive, not a store made from it"
            )
        notes += [note for note in _check_intervals(source, forecast) if note not in notes]
    truth = source.has(Part.TRUTH)
    if not truth and config.truth is not None:
        given = ", ".join(as_list(config.truth))
        raise UserError(
            f"truth={given}: holds nothing at any valid time of {source.path}; give another, or none to score the"
            " spread alone"
        )
    notes += [] if truth else ["There is no truth: spread alone is scored."]
    fit = _fit_dates(config, source, forecasts, notes)
    groups, columns = _groups(source, forecasts, notes)
    # Dates are chosen after the fields, because a date counts only if it has values of a field that is scored.
    test, dropped = _test_dates(source, forecasts, fit, truth, _scored(source, groups))
    notes += _hour_notes(layout.init_time[fit], layout.init_time[test])
    if truth and not as_list(config.baselines or []):
        notes.append(
            "No forecast is among the baselines: the corrections have bias and inflation, but no slope on the ensemble"
            " mean. EMOS has one (train model=emos, predict, and give its forecasts as baselines=)."
        )
    if dropped:
        reasons = sorted({d["reason"] for d in dropped})
        counts = (f"{sum(d['reason'] == reason for d in dropped)} {reason}" for reason in reasons)
        notes.append(f"{len(dropped)} init times are not scored: {', '.join(counts)}.")
    if truth and len(fit) < FEWEST_DATES:
        notes.append(f"Only {len(fit)} dates to fit on: corrections need {FEWEST_DATES}, so none is shown.")
    if len(fit) < FEWEST_SPREADS:
        few = f"Fewer than {FEWEST_SPREADS} dates to fit on"
        notes.append(f"{few}: neither regressions nor the climatology of the spread are shown.")
    reduced = _reduced(config, source, forecasts[0])
    notes += _member_notes(config, reduced, source, forecasts)
    for forecast in forecasts:
        notes += _what_it_lacks(forecast, layout.init_time[fit])
    return Plan(test, fit, columns, groups, dropped, notes, truth, reduced)


def _what_it_lacks(forecast: ForecastSet, fitted: np.ndarray) -> list[str]:
    """Return notes on what forecasts of one folder lack or do not state, and on how their model was trained."""
    notes = []
    if {origin.get("checkpoint_step") for origin in forecast.origins.values()} == {"0"}:
        notes.append(
            f"{forecast.label}: its checkpoint is of step 0, so it is the statistical start without a trained network:"
            " no training step was made, or none was better in validation."
        )
    uneven = [f"leads {shortened(forecast.uneven_leads)} h"] if forecast.uneven_leads else []
    uneven += [f"members of {shortened(forecast.uneven_members)}"] if forecast.uneven_members else []
    notes += [f"{forecast.label}: {what} are not in all of its files, and not scored." for what in uneven]
    # `ForecastSet.predicted` makes a distribution of these pairs alone.
    pairs, read = (("location", "scale"), ("mean", "stddev")), forecast.names
    without = [n for n in forecast.variables if not any({f"{n}_{one}" for one in pair} <= read for pair in pairs)]
    if few := [name for name in without if f"{name}_mean" in read]:
        what = f"no width (stddev, or location and scale) of {shortened(few)}: no CRPS, errors of the mean alone"
        notes.append(f"{forecast.label} gives {what}.")
    if few := [name for name in without if f"{name}_location" in read and f"{name}_mean" not in read]:
        what = f"neither mean and stddev nor location and scale of {shortened(few)}: no CRPS, no errors"
        notes.append(f"{forecast.label} gives {what}.")
    # Without training dates, nobody can tell whether the model has seen the test dates. A note warns the reader.
    if forecast.files_without_dates:
        some = len(forecast.training_dates) > 0
        who = f"{forecast.label}: {forecast.files_without_dates} of its files do" if some else f"{forecast.label} does"
        notes.append(
            f"{who} not state the dates that it was trained on (attribute training_dates), if any; test dates may"
            " be among them."
        )
    if more := len(np.setdiff1d(forecast.earlier_dates, fitted)):
        notes.append(
            f"{forecast.label}: training began from weights that had seen {more} dates which baselines are not"
            " fitted on."
        )
    return notes


def _hour_notes(fit: np.ndarray, test: np.ndarray) -> list[str]:
    """Return notes on the hours of the day at which fit dates and test dates start."""
    # The errors of a model depend on the time of day. Baselines fitted at another hour, or at all hours together, are
    # too weak, so a gain over them says little.
    starts = hour_of_day(test)
    known = set(hour_of_day(fit).tolist())
    strange = ~np.isin(starts, sorted(known))
    every, new = (", ".join(f"{hour:02}" for hour in sorted(hours)) for hours in (known, set(starts[strange].tolist())))
    notes = []
    if len(known) > 1:
        notes.append(
            f"Baselines and climatology are fitted to starts at {every} UTC together, which makes them worse, because"
            " errors depend on the time of day: put the forecasts of each hour into their own folder and evaluate it"
            " alone."
        )
    if new and known:
        some = "Test dates" if strange.all() else f"{int(strange.sum())} of {len(test)} test dates"
        notes.append(
            f"{some} start at {new} UTC, and no fit date does: baselines and climatology are those of starts at"
            f" {every} UTC, so a gain over them says little."
        )
    return notes


def _check_intervals(source: Source, forecast: ForecastSet) -> list[str]:
    """Return notes on sums whose hours only the source or only the forecast states; refuse hours that differ."""
    leads = [lead for lead in source.layout.lead_hours if lead in forecast.lead_hours]
    unstated: dict[str, list[str]] = {forecast.label: [], source.path: []}
    ours = bounds_at(source, source.layout.names, leads)
    for name in (name for name in source.layout.names if name in forecast.variables):
        theirs = forecast.intervals(name)
        for lead, pair in zip(leads, ours.get(name, [None] * len(leads)), strict=True):
            # A sum up to lead 0 covers no hours, so there it does not matter whether they are stated.
            if (pair is None) != (lead not in theirs) and lead:
                unstated[source.path if pair is None else forecast.label].append(f"{name} {lead} h")
            if pair is not None and theirs.get(lead, tuple(pair)) != tuple(pair):
                first, last = theirs[lead]
                raise UserError(
                    f"{forecast.path}: {name} at {lead} h is over {first}-{last} h, in {source.path} over"
                    f" {pair[0]}-{pair[1]} h; give the data that it was made from"
                )
    return [
        f"{who} does not state the hours of sums or maxima, so those of the other are assumed: {shortened(what)}."
        for who, what in unstated.items()
        if what
    ]


def _fit_dates(config: EvaluateConfig, source: Source, forecasts: list[ForecastSet], notes: list[str]) -> np.ndarray:
    """Choose the dates that baselines are fitted on, as positions in the source's init times.

    These are the dates of `config.fit`. Without that setting, they are the training dates of the first forecast that
    states some. Training dates at other hours of the day than the forecasts' are left out if enough remain, because
    errors depend on the time of day. Notes on the choice are appended to `notes`.
    """
    times = source.layout.init_time
    if config.fit is not None:
        return select_dates(times, config.fit, "fit")
    # Baselines get the same dates as the forecasts were trained on. More or fewer would make the comparison unfair.
    trained = next((f for f in forecasts if len(f.training_dates)), None)
    if trained is None:
        raise UserError(f"{forecasts[0].path}: records no training_dates; give dates to fit baselines on by fit=[...]")
    if any(len(f.training_dates) and set(f.training_dates) != set(trained.training_dates) for f in forecasts):
        notes.append(f"Forecasts were trained on different dates; baselines are fitted on those of {trained.label}.")
    wanted = _of_hours(trained.training_dates, forecasts, notes)
    missing = np.setdiff1d(wanted, times)
    if len(missing):
        raise UserError(
            f"ensemble={source.path}: lacks {len(missing)} of the {len(wanted)} training dates of "
            f"{trained.path} (first {date_text(missing[0])}), which baselines are fitted on; "
            "give the archive that has them, or other dates with fit=[...]"
        )
    return np.flatnonzero(np.isin(times, wanted))


def _of_hours(trained: np.ndarray, forecasts: list[ForecastSet], notes: list[str]) -> np.ndarray:
    """Return the training dates at the hours of the day of the forecasts, or all training dates if those are too few.

    Fewer than FEWEST_DATES dates cannot support a correction, and a baseline of mixed hours is better than none.
    """
    hours = np.unique(hour_of_day(np.array([start for forecast in forecasts for start in forecast.files])))
    alike = trained[np.isin(hour_of_day(trained), hours)]
    if len(alike) < FEWEST_DATES or len(alike) == len(trained):
        return trained
    at, some = ", ".join(f"{hour:02}" for hour in hours), f"{len(alike)} of {len(trained)}"
    notes.append(f"Baselines are fitted to the {some} training dates at {at} UTC, as forecasts start.")
    return alike


def _test_dates(
    source: Source, forecasts: list[ForecastSet], fit: np.ndarray, truth: bool, scored: list[np.ndarray]
) -> tuple[np.ndarray, list[dict[str, str]]]:
    """Split the dates of the forecasts into positions of test dates in the source, and dropped dates with reasons.

    A date that a model has seen (in training, in the choice of the checkpoint, in earlier weights) would make its
    forecast look too good. A date that baselines were fitted on would make the baselines look too good.
    """
    times = source.layout.init_time
    offered = sorted({start for forecast in forecasts for start in forecast.files})
    # A date that any model has seen is dropped for all forecasts, so that all scores are over the same dates.
    seen = {
        "seen in training": {start for forecast in forecasts for start in forecast.training_dates},
        "chose the checkpoint": {start for forecast in forecasts for start in forecast.validation_dates},
        "seen by the weights that training began from": {start for f in forecasts for start in f.earlier_dates},
    }
    test, dropped = [], []
    for start in offered:
        found = np.flatnonzero(times == start)
        reason = _why_not(source, forecasts, found, start, truth, scored)
        reason = reason or next((why for why, dates in seen.items() if start in dates), None)
        if reason is None and found[0] in fit:
            reason = "used to fit the baselines"
        if reason is None:
            test.append(int(found[0]))
        else:
            dropped.append({"date": date_text(start), "reason": reason})
    if not test:
        why = ", ".join(sorted({d["reason"] for d in dropped}))
        counted = f"none of {len(offered)} init times can be scored ({why})"
        raise UserError(f"forecast={forecasts[0].path}: {counted}; forecast other dates")
    return np.array(test), dropped


def _why_not(
    source: Source, forecasts: list[ForecastSet], found: np.ndarray, start: np.datetime64, truth: bool,
    scored: list[np.ndarray],
) -> str | None:  # fmt: skip
    """Return the reason why a date cannot be scored, or None. `found` is its position in the source, or empty."""
    lacking = [forecast.label for forecast in forecasts if start not in forecast.files]
    if lacking:
        return f"missing from {lacking[0]}"
    if not len(found):
        return "not in the ensemble"
    there = source.present(Part.FORECAST, int(found[0]))
    if not any(part.any() for part in there):
        return "without members"
    # A score needs every member at a point, so a field with a missing member cannot be scored.
    if not any((part.all(0) & wanted).any() for part, wanted in zip(there, scored, strict=True)):
        return "with some members missing of every field that is scored"
    verified = source.present(Part.TRUTH, int(found[0])) if truth else ()
    if truth and not any((part[0] & wanted).any() for part, wanted in zip(verified, scored, strict=True)):
        return "without truth"
    return None


def _groups(
    source: Source, forecasts: list[ForecastSet], notes: list[str]
) -> tuple[tuple[Group, ...], tuple[Column, ...]]:
    """Find the leads, variables and levels that all forecasts and the source share; note the other fields."""
    layout = source.layout
    leads = [h for h in layout.lead_hours if all(h in f.lead_hours for f in forecasts)]
    # A field that one forecast lacks is scored for none, because means over different fields cannot be compared.
    names = [name for name in layout.names if all(name in f.variables for f in forecasts)]
    groups: list[Group] = []
    columns: list[Column] = []
    for lead in leads:
        for name in names:
            held: tuple[int | None, ...] = layout.levels if name in layout.variables else (None,)
            levels = tuple(level for level in held if all(level in f.variables[name] for f in forecasts))
            if levels:
                groups.append(Group(name, lead, levels, slice(len(columns), len(columns) + len(levels))))
                columns += [Column(lead, name, level) for level in levels]
    if not columns:
        raise UserError(
            f"forecast={forecasts[0].path}: shares no lead, variable and level with {source.path}; variables are"
            " read that are called NAME_mean, NAME_location or NAME_ensemble_spread, as in t2m_mean"
        )
    offered = {Column(h, *field) for f in forecasts for h in f.lead_hours for field in f.fields()}
    unpaired = sorted(f"{column.title} at {column.lead_hours} h" for column in offered - set(columns))
    if unpaired:
        notes.append(f"{len(unpaired)} fields are not in all forecasts and the ensemble: {shortened(unpaired)}.")
    return tuple(groups), tuple(columns)


def _scored(source: Source, groups: tuple[Group, ...]) -> list[np.ndarray]:
    """Return masks of the fields that are scored: bool (T, V, Z) on pressure levels and (T, S) at the surface."""
    lay = source.layout
    leads = len(lay.lead_hours)
    pressure = np.zeros((leads, len(lay.variables), len(lay.levels)), bool)
    surface = np.zeros((leads, len(lay.surface)), bool)
    for group in groups:
        lead = lay.lead_hours.index(group.lead_hours)
        if group.levels == (None,):
            surface[lead, lay.surface.index(group.variable)] = True
        else:
            pressure[lead, lay.variables.index(group.variable), [lay.levels.index(z) for z in group.levels if z]] = True
    return [pressure, surface]


def _reduced(config: EvaluateConfig, source: Source, first: ForecastSet) -> int:
    """Return the number of members of the raw reduced ensemble: as the settings or the first forecast state it."""
    if config.members_in is not None:
        return config.members_in
    return min(len(first.members_in) or _USUAL, len(source.layout.realization))


def _member_notes(config: EvaluateConfig, size: int, source: Source, forecasts: list[ForecastSet]) -> list[str]:
    """Return notes on forecasts whose members make a comparison weaker or unfair."""
    # The raw reduced ensemble is the first `size` members. A forecast from other members is scored, and gets a note.
    held = [str(number) for number in source.layout.realization]
    reduced, ours = held[:size], forecasts[: len(as_list(config.forecast))]
    notes = [f"{f.label}: members or checkpoints differ between its dates." for f in forecasts if f.mixed]
    notes += [
        f"{f.label} was made from members {' '.join(f.members_in)}, not from {' '.join(reduced)}, the reduced ensemble"
        f"{': it has more input, so no gain over it is sure' if f in ours and len(f.members_in) > size else ''}."
        for f in forecasts
        if f.members_in and list(f.members_in) != reduced
    ]
    notes += [
        f"{f.label} does not state the members that it was made from (attribute members_in)"
        f"{' in all of its files' if f.seen else ''}; it may have more input than what it is compared with."
        for f in forecasts
        if f.silent
    ]
    notes += [
        f"{f.label} was made from all {len(held)} members: their spread is its input and target, so no gain in spread"
        " is sure."
        for f in ours
        if len(f.members_in) >= len(held) > 1
    ]
    for f in forecasts:
        others = sorted(f.seen - {*held}, key=int) if any(name.endswith("_ensemble_spread") for name in f.names) else []
        if others and len(held) - size > 1 and not f.silent and f.seen.isdisjoint(held[size:]):
            notes.append(
                f"{f.label} names members that the ensemble does not have ({shortened(others)}), so its spread is"
                " compared with that of the held-out members without a conversion."
            )
    if len(held) == size:
        notes.append("The reduced ensemble is the full one: its spread is both input and target.")
    return notes
