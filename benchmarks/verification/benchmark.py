"""Measure how fast raw ensembles are scored, compared with the package `scores`.

The scores are fair CRPS, spread/skill and rank histogram, all weighted by area. Fields have 361 x 720 points and ten
members, and come date by date, as from a forecast archive. Both packages get the same arrays in memory and keep only
sums. Each runs in its own process, whose peak memory is read at the end. This peak includes Python, xarray and the
fields of one date.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from benchmarks.common import process
from benchmarks.common.results import Claim, Figure, summary, write_results
from benchmarks.common.sections import chosen
from ensemble_ml.config import BenchmarkConfig
from ensemble_ml.grid import Grid
from ensemble_ml.machine import cores
from ensemble_ml.verification.streaming import EnsembleSums, score_members

_SIZES = {"full": (100, 361, 720), "small": (5, 361, 720), "tiny": (2, 19, 36)}  # dates, rows, columns
_MEMBERS = 10
_APART = 1e-3  # largest relative difference of a score; this package sums in float32
_DISTINCT = 2  # dates that differ; the others repeat them, so that no time goes into random numbers


def run(config: BenchmarkConfig) -> Path:
    """Time both entrants on the same dates.

    Args:
        config: the settings of the benchmark.

    Returns:
        The path of results.json.
    """
    chosen(config.only, {})
    dates, rows, columns = _SIZES[config.size.value]
    extent = {"dates": dates, "rows": rows, "columns": columns}
    times: dict[str, list[float]] = {name: [] for name in _ENTRANTS}
    memory: dict[str, list[float]] = {name: [] for name in _ENTRANTS}
    answers: dict[str, list[list[float]]] = {name: [] for name in _ENTRANTS}
    for _ in range(config.repeats):
        for name in _ENTRANTS:
            found = process.run("verification.benchmark", "measure", cores=cores(), entrant=name, **extent)
            times[name].append(found["seconds"])
            memory[name].append(found["peak_bytes"] / 1e6)
            answers[name].append(found["scores"])
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
        Claim(f"{what}: the largest relative difference between their scores", apart, "1", _APART, at_most=True),
    ]
    print(summary(figures, claims, config.size))
    return write_results(
        Path(config.output) / "verification",
        title="Scoring raw ensembles",
        runs=config.repeats,
        figures=figures,
        claims=claims,
        size=config.size,
    )


def measure(entrant: str, dates: int, rows: int, columns: int) -> dict[str, Any]:
    """Time an entrant in this process.

    Args:
        entrant: "ours" or "scores".
        dates: number of dates.
        rows: latitudes.
        columns: longitudes.

    Returns:
        `seconds`, and `scores`: the results, for comparison.
    """
    score = _ENTRANTS[entrant]
    grid = Grid(np.linspace(90, -90, rows), np.arange(columns) * (360 / columns))
    rng = np.random.default_rng(0)
    archive = []
    for _ in range(_DISTINCT):
        centre = (250 + 20 * rng.standard_normal(grid.shape)).astype(np.float32)
        fields = centre + rng.standard_normal((_MEMBERS + 1, *grid.shape), dtype=np.float32)
        archive.append((fields[:-1].copy(), fields[-1].copy()))
    weights = grid.area_weights()
    score(archive[:1], weights)  # imports and caches do not count
    started = time.perf_counter()
    found = score([archive[i % _DISTINCT] for i in range(dates)], weights)
    return {"seconds": time.perf_counter() - started, "scores": found}


def _ours(dates: list[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> list[float]:
    """Return our scores, from sums over all dates."""
    total = EnsembleSums.zeros(_MEMBERS)
    for members, truth in dates:
        total = total + score_members(members, truth, weights)
    return [total.crps_fair, total.spread_skill, *total.rank_histogram]


def _peer(dates: list[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> list[float]:
    """Return the same scores by `scores` 2.7, date by date. xarray computes the variance, which `scores` lacks."""
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


_ENTRANTS = {"ours": _ours, "scores": _peer}
