"""Compare the forecast skill of our network with EMOS, DRN, ENS-10's U-Net and a network like PoET.

    OUTPUT/skill/runs/NAME-trialT-seedS     trainings
    OUTPUT/skill/forecasts/...-fromM        forecasts of the test dates
    OUTPUT/skill/{results.json, report.html}

The section `contest` trains and scores the models. The section `reach` needs no training (`reach.py`).

All models are trained and scored in the same way. Trials and checkpoints are chosen on validation dates, and everything
is scored on test dates that had no part in a run. If the benchmark is run again, it continues where it stopped.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.results import LOST, Claim, Figure, commit, summary, write_results
from benchmarks.common.sections import chosen
from benchmarks.skill.claims import Contest, report
from benchmarks.skill.entrants import (
    OURS,
    Dates,
    Trained,
    cut_short,
    fit_seconds,
    forecast,
    made_at,
    split,
    start_of_ours,
    steps_taken,
    train_entrant,
)
from benchmarks.skill.reach import measure
from benchmarks.skill.realistic import realism_of
from benchmarks.skill.scoring import Data, groups_of, score
from benchmarks.skill.table import Board
from data_prep import open_orographies
from ensemble_ml.config import BenchmarkConfig, SkillConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import TensorStore, open_store
from ensemble_ml.store.source import Part, select_dates
from ensemble_ml.verification.bootstrap import blocks_of, draw_dates
from ensemble_ml.verification.heights import Heights, note
from ensemble_ml.verification.samples import settled

log = logging.getLogger(__name__)

_OROGRAPHY = "archive/forecast_static.grib"  # beside the store that the quickstart or the README makes
_STORES = ("runs/full-data/store.zarr", "runs/quickstart-data/store.zarr")
_HEADLINE = 48
_CONFIDENCE = 0.95


def run(config: BenchmarkConfig) -> Path:
    """Train all models, make their forecasts and score them, and measure how far around a point errors can be foretold.

    Args:
        config: the settings of the benchmark.

    Returns:
        The path of results.json.

    Raises:
        UserError: there is no store, it holds no truth, or it has too few members.
    """
    wanted = chosen(config.only, {"contest": _race, "reach": _reach})
    skill, folder = config.skill, Path(config.output) / "skill"
    store = _store(skill)
    dates = split(skill, store.layout.init_time)
    figures: dict[str, Figure] = {}
    claims: list[Claim] = []
    notes: list[str] = []
    tables: dict[str, list[dict[str, Any]]] = {}
    if "contest" in wanted:
        figures, claims, notes, tables = _race(config, dates, store, folder)
    if "reach" in wanted:
        found, sure = _reach(skill, dates, store)
        figures, claims = figures | found, claims + sure
    print(summary(figures, claims, config.size))
    return write_results(
        folder,
        title="Forecast skill on the embedded archive (simulated): ours and published methods",
        runs=skill.seeds,
        figures=figures,
        claims=claims,
        notes=[*notes, _split_in_words(dates, store)],
        tables=tables,
        size=config.size,
    )


def _race(
    config: BenchmarkConfig, dates: Dates, store: TensorStore, folder: Path
) -> tuple[dict[str, Figure], list[Claim], list[str], dict[str, list[dict[str, Any]]]]:
    """Train all models, make their forecasts, and return figures, claims, notes and the table of trials."""
    skill = config.skill
    start = start_of_ours(skill, dates, store, folder / "runs", config.size)  # its fits are also those of our trainings
    trained = [train_entrant(name, skill, dates, store, folder / "runs", config.size) for name in skill.models]
    trained.append(start)
    forecasts = _forecasts(trained, skill, dates, store, folder / "forecasts")
    contest = _contest(forecasts, skill, dates, store)
    figures, claims, notes = report(contest)
    figures["ours: the fits before its first step, made once a seed"] = Figure.of(fit_seconds(start), "s")
    trials = [row for one in trained for row in one.trials]
    best = (f"{one.name} {', '.join(map(str, steps_taken(one)))}" for one in trained if one.trials)
    notes.append(f"Best on the validation dates at steps, by seed: {'; '.join(best)}.")
    unended = {one.name: cut_short(one, skill.steps) for one in trained if len(one.trials) > 1}
    if cut := [f"{name} ({count} of {skill.seeds} seeds)" for name, count in unended.items() if count]:
        notes.append(f"{LOST}Still within their patience after all {skill.steps} steps: {', '.join(cut)}.")
    # Trainings and forecasts of an earlier run may be those of another commit, which the report has to state.
    made = [run for one in trained for run in one.runs]
    made += [path for sizes in forecasts.values() for labels in sizes.values() for path in labels.values()]
    if others := made_at(made) - {commit()}:
        notes.append(f"Trainings or forecasts of an earlier run were taken, made at {', '.join(sorted(others))}.")
    return figures, claims, notes, {"Trials, on the validation dates": trials}


def _reach(skill: SkillConfig, dates: Dates, store: TensorStore) -> tuple[dict[str, Figure], list[Claim]]:
    """Return figures and claims on how far around a point errors can be foretold."""
    train, validation = (select_dates(store.layout.init_time, part) for part in (dates.train, dates.validation))
    return measure(store, train, validation, skill.members, skill.bootstrap, skill.block_days)


def _store(skill: SkillConfig) -> TensorStore:
    """Open the store, and refuse one with gaps, without a truth or with too few members."""
    path = skill.store or next((path for path in _STORES if Path(path).exists()), None)
    if path is None:
        raise UserError(f"skill.store: none given, and neither {' nor '.join(_STORES)} exists; give a tensor store")
    store = open_store(path)
    if not store.has(Part.TRUTH):
        raise UserError(f"skill.store={path}: holds no truth; prepare it with truth=...")
    most = max(4, *skill.sizes)
    if len(store.layout.realization) < most:
        raise UserError(f"skill.store={path}: {len(store.layout.realization)} members; {most} are needed")
    lacking = [date for date in range(len(store.layout.init_time)) if not _whole(store, date)]
    if store.masked or lacking:
        what = f"masked points of {', '.join(store.masked)}" if store.masked else f"gaps on {len(lacking)} init times"
        raise UserError(f"skill.store={path}: has {what}, which are not scored here; prepare it without them")
    return store


def _heights(skill: SkillConfig, store: TensorStore) -> Heights | None:
    """Read the orographies of model and truth, or return None if no file states them."""
    beside = Path(store.path).parent / _OROGRAPHY
    forecast = skill.orography or (str(beside) if beside.is_file() else None)
    ground = open_orographies(forecast, skill.truth_orography, store)
    if ground is None:
        return None
    heights = Heights(*ground)
    heights.check(store.layout.grid)
    return heights


def _whole(store: TensorStore, date: int) -> bool:
    """Return whether all members and the truth have all fields of an init time.

    Lead zero is left out, because it has no rain yet.
    """
    later = np.array([hour > 0 for hour in store.layout.lead_hours])
    parts = (there for part in (Part.FORECAST, Part.TRUTH) for there in store.present(part, date))
    return all(there[:, later].all() for there in parts)


def _forecasts(
    trained: list[Trained], skill: SkillConfig, dates: Dates, store: TensorStore, folder: Path
) -> dict[str, dict[int, dict[str, Path]]]:
    """Make the forecasts, and return their folders by model, ensemble size and label.

    All seeds predict from `members` members, and the first seed predicts from every size.
    """
    found: dict[str, dict[int, dict[str, Path]]] = {}
    for one in trained:
        for size in skill.sizes if one.trials else [skill.members]:
            for run_folder in one.runs if size == skill.members else one.runs[:1]:
                path = forecast(run_folder, size, skill, dates, store, folder)
                found.setdefault(one.name, {}).setdefault(size, {})[path.name] = path
        log.info("skill: forecasts of %s are there", one.name)
    return found


def _contest(
    forecasts: dict[str, dict[int, dict[str, Path]]], skill: SkillConfig, dates: Dates, store: TensorStore
) -> Contest:
    """Score all forecasts, and return all that the claims need."""
    times = store.layout.init_time
    train, test = (select_dates(times, part) for part in (dates.train, dates.test))
    hours = [hour for hour in store.layout.lead_hours if hour > 0] or list(store.layout.lead_hours)
    lead = _HEADLINE if _HEADLINE in hours else hours[-1]
    groups, columns = groups_of(store, (lead,))
    heights = _heights(skill, store)
    if heights is not None:
        heights = settled(store, heights, groups, train.tolist(), store.layout.grid.area_weights())
    data = Data(store, train, test, skill.members, heights=heights)
    folders = {label: path for sizes in forecasts.values() for part in sizes.values() for label, path in part.items()}
    extremes = {label for sizes in forecasts.values() for label in sizes[skill.members]}
    calibration = {label for labels in forecasts[OURS].values() for label in labels}
    table = score(data, groups, len(columns), folders, extremes, calibration)
    blocks = blocks_of(times[test], skill.block_days)
    counts = np.vstack([np.ones(len(test)), draw_dates(blocks, skill.bootstrap, 0)])
    board = Board(table, counts, np.arange(len(columns)), _CONFIDENCE, blocks)
    labels = {name: {size: tuple(part) for size, part in sizes.items()} for name, sizes in forecasts.items()}
    fields = tuple(column.name for column in columns)
    of_heights = note(data.heights, {column.variable for column in columns})
    return Contest(
        board, labels, skill.members, data.full, lead, len(train), fields, realism_of(data, groups), of_heights
    )


def _split_in_words(dates: Dates, store: TensorStore) -> str:
    """Return a sentence on the dates of training, validation and test."""
    parts = {"trained on": dates.train, "chosen on": dates.validation, "scored on": dates.test}
    told = ", ".join(f"{word} {' '.join(part)}" for word, part in parts.items())
    return f"{Path(store.path).name} ({store.fingerprint()}): {told}."
