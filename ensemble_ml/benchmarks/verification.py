"""How fast raw ensembles are scored: fair CRPS, spread/skill and rank histogram, all area-weighted, beside `scores`.

Fields of 361 x 720 points and ten members, one start date after the other, as a forecast archive gives them; both
entrants get the same arrays in memory and keep nothing but sums. Each entrant runs in a process of its own, whose peak
memory is read in the end: with Python, xarray and one date it is what scoring takes.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xarray as xr

from ensemble_ml.benchmarks.common.sections import chosen
from ensemble_ml.benchmarks.results import Claim, Figure, summary, write_results
from ensemble_ml.config import BenchmarkConfig
from ensemble_ml.grid import Grid
from ensemble_ml.verification.streaming import EnsembleSums, score_members

_SIZES = {"full": (100, 361, 720), "small": (5, 361, 720), "tiny": (2, 19, 36)}  # dates, rows, columns
_MEMBERS = 10
_DISTINCT = 2  # dates that are really different; the others repeat them, so that no time goes into drawing numbers


def run(config: BenchmarkConfig) -> Path:
    """Time both entrants on the same dates and write OUTPUT/verification/results.json."""
    chosen(config.only, {})
    dates, rows, columns = _SIZES[config.size.value]
    entrants = {"ours": _ours, "scores": _peer}
    times: dict[str, list[float]] = {name: [] for name in entrants}
    memory: dict[str, list[float]] = {name: [] for name in entrants}
    answers: dict[str, list[float]] = {}
    for _ in range(config.repeats):
        for name, entrant in entrants.items():
            seconds, megabytes, answers[name] = _alone(entrant, dates, rows, columns)
            times[name].append(seconds)
            memory[name].append(megabytes)
    apart = float(np.abs(np.array(answers["ours"]) / np.array(answers["scores"]) - 1).max())
    figures = {f"{name}: time of {dates} dates": Figure.of(values, "s") for name, values in times.items()}
    figures |= {f"{name}: peak memory": Figure.of(values, "MB") for name, values in memory.items()}
    faster = [theirs / ours for ours, theirs in zip(times["ours"], times["scores"], strict=True)]
    figures["time of scores over ours"] = Figure.of(faster, "times")
    what = f"scoring {dates} dates of {rows} x {columns} x {_MEMBERS} members"
    rest = "(fair CRPS, spread/skill, rank histogram, all area-weighted)"
    claims = [
        Claim(
            f"{what} {rest}: times faster than the same with scores",
            figures["time of scores over ours"].median,
            "times",
            3,
        ),
        Claim(f"{what}: peak memory of the process", figures["ours: peak memory"].max, "MB", 1000, at_most=True),
    ]
    print(summary(figures, claims, config.size))
    return write_results(
        Path(config.output) / "verification",
        title="Scoring raw ensembles",
        runs=config.repeats,
        figures=figures,
        claims=claims,
        notes=[f"The largest relative difference between their scores is {apart:.1e}."],
        size=config.size,
    )


def _alone(entrant: Callable, dates: int, rows: int, columns: int) -> tuple[float, float, list[float]]:
    """Run an entrant in a fresh process: seconds, peak memory in MB, scores."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(there, entrant, dates, rows, columns))
    child.start()
    there.close()
    try:
        return here.recv()
    finally:
        child.join()


def _measure(pipe, entrant: Callable, dates: int, rows: int, columns: int) -> None:
    grid = Grid(np.linspace(90, -90, rows), np.arange(columns) * (360 / columns))
    rng = np.random.default_rng(0)
    archive = []
    for _ in range(_DISTINCT):
        centre = (250 + 20 * rng.standard_normal(grid.shape)).astype(np.float32)
        fields = centre + rng.standard_normal((_MEMBERS + 1, *grid.shape), dtype=np.float32)
        archive.append((fields[:-1].copy(), fields[-1].copy()))
    weights = grid.area_weights()
    entrant(archive[:1], weights)  # imports, caches
    started = time.perf_counter()
    found = entrant([archive[i % _DISTINCT] for i in range(dates)], weights)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    pipe.send((seconds, peak, found))


def _ours(dates: list[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> list[float]:
    total = EnsembleSums.zeros(_MEMBERS)
    for members, truth in dates:
        total = total + score_members(members, truth, weights)
    return [total.crps_fair, total.spread_skill, *total.rank_histogram]


def _peer(dates: list[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> list[float]:
    """The same with `scores` 2.7, date by date; what it lacks (the variance) with xarray."""
    from scores.continuous import mse
    from scores.probability import crps_for_ensemble, rank_histogram

    w = xr.DataArray(weights, dims=("latitude", "longitude"))
    rows = []
    for members, truth in dates:
        forecast = xr.DataArray(members, dims=("realization", "latitude", "longitude"))
        observed = xr.DataArray(truth, dims=("latitude", "longitude"))
        crps = crps_for_ensemble(forecast, observed, "realization", method="fair", weights=w)
        error = mse(forecast.mean("realization"), observed, weights=w)
        variance = forecast.var("realization", ddof=1).weighted(w).mean()
        ranks = rank_histogram(forecast, observed, "realization", weights=w)
        rows.append([float(crps), float(error), float(variance), *ranks.values.tolist()])
    crps, error, variance, *ranks = np.mean(rows, axis=0).tolist()
    return [crps, float(np.sqrt((1 + 1 / _MEMBERS) * variance / error)), *ranks]
