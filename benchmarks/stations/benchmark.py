"""Score models on real ensembles: a station's temperature with observations, and the spread of ERA5's ten members.

    innsbruck   gefs_innsbruck_temperature.nc: 11 members of the GEFS reforecast, minimum temperature 18-30 h ahead.
                Fitted on 2000-2010, scored on 2011-2015, CRPS with block-bootstrap intervals.
    era5        era5-levels-members.grib: four times of ten members. Three are for the fits and the training, one tests
                the spread of ten members from 1, 3 and 5.

A section whose file is absent is skipped, with a note in the log.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from benchmarks.common.results import LOST, Claim, Figure, summary, write_results
from benchmarks.common.sections import chosen
from benchmarks.stations.network import fit_network
from benchmarks.stations.series import Series, read_series
from data_prep.prepare import prepare
from ensemble_ml.config import (
    BenchmarkConfig,
    BenchmarkSize,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    PredictConfig,
    PrepareConfig,
    TrackingConfig,
    TrainConfig,
)
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.inference import predict
from ensemble_ml.models.rivals import Emos, fit_emos
from ensemble_ml.store import TensorStore
from ensemble_ml.training import train
from ensemble_ml.verification import evaluate
from ensemble_ml.verification.bootstrap import Interval, blocks_of, draw_dates, interval
from ensemble_ml.verification.families import crps
from ensemble_ml.verification.statistics import crps_members

log = logging.getLogger(__name__)
STATION, ERA5 = "gefs_innsbruck_temperature.nc", "era5-levels-members.grib"
_TRAIN, _INNER, _VALIDATION, _TEST = (2000, 2010), (2000, 2008), (2009, 2010), (2011, 2015)
_BLOCK_DAYS, _DRAWS = 10, 2000
Result = tuple[dict[str, Figure], list[Claim], list[str]]


def run(config: BenchmarkConfig) -> Path:
    """Run the sections whose files are in `config.files`.

    Args:
        config: the settings of the benchmark.

    Returns:
        The path of results.json.

    Raises:
        UserError: none of the files is there, or no folder is named.
    """
    figures: dict[str, Figure] = {}
    claims: list[Claim] = []
    notes: list[str] = []
    sections = {"innsbruck": (STATION, innsbruck), "era5": (ERA5, era5)}
    wanted, folder = chosen(config.only, sections), config.files or os.environ.get("ENSEMBLE_ML_REAL_DATA")
    if not folder:
        raise UserError(f"files: name the folder with {STATION} or {ERA5} (or set ENSEMBLE_ML_REAL_DATA)")
    for name in wanted:
        file, section = sections[name]
        path = Path(folder) / file
        if not path.is_file():
            notes.append(f"{name}: skipped, {path} is not there; give its folder by files=FOLDER")
            log.warning(notes[-1])
            continue
        found = section(config, path)
        figures, claims, notes = figures | found[0], claims + found[1], notes + found[2]
    if not figures:
        raise UserError(f"files={folder}: holds none of {', '.join(file for file, _ in sections.values())}")
    print(summary(figures, claims, config.size))
    return write_results(
        Path(config.output) / "stations", title="Real ensembles", runs=1, figures=figures, claims=claims, notes=notes,
        size=config.size,
    )  # fmt: skip


def innsbruck(config: BenchmarkConfig, path: Path) -> Result:
    """Score the post-processing of a station's temperature.

    Args:
        config: the settings of the benchmark.
        path: the file of the station.

    Returns:
        Figures, claims and notes.
    """
    series = read_series(path)
    train_dates, test = series.select(*_TRAIN), series.select(*_TEST)
    tiny = config.size is BenchmarkSize.tiny
    network = fit_network(
        train_dates,
        series.select(*_INNER),
        series.select(*_VALIDATION),
        seeds=1 if tiny else 3,
        steps=50 if tiny else 2000,
    )
    scores, apart = _raw(test), 0.0
    for count in (5, test.members.shape[1]):
        fits = {"EMOS": _emos(train_dates, count, 0), "seasonal EMOS": _emos(train_dates, count, 2)}
        apart = max(apart, _apart(train_dates, count, fits["EMOS"]))
        scores[f"debiased raw {count}"] = _debiased(train_dates, test, count)
        for name, fit in fits.items():
            law = fit(*test.moments(count), test.season(2) if name != "EMOS" else None)
            scores[f"{name} {count}"] = crps(Family.NORMAL, law[0].numpy(), law[1].numpy(), test.observed)
        scores[f"network {count}"] = crps(Family.NORMAL, *network(test, count), test.observed)
    blocks = blocks_of(test.times, _BLOCK_DAYS)
    counts = draw_dates(blocks, _DRAWS, 0)
    table = {name: _interval(values, counts, blocks) for name, values in scores.items()}
    figures = {f"Innsbruck 2011-2015, CRPS: {name}": _figure(found, "K") for name, found in table.items()}
    claims = [
        Claim(
            "Innsbruck: EMOS's coefficients differ from an independent scipy fit by",
            apart,
            "K or 1",
            1e-3,
            at_most=True,
        )
    ]
    for count in (5, test.members.shape[1]):
        for rival in ("EMOS", "seasonal EMOS"):
            gain = _gain(scores[f"network {count}"], scores[f"{rival} {count}"], counts, blocks)
            figures[f"Innsbruck: CRPS of network {count} lower than of {rival} {count}"] = _figure(gain, "%")
            claims.append(
                Claim(f"Innsbruck: per-point network from {count} members, CRPS lower than {rival}'s from as many "
                      f"(lower end of the 95 % interval)", gain.low, "%", 0)
            )  # fmt: skip
    notes = [
        f"Innsbruck: {len(train_dates.times)} dates of 2000-2010 to fit, {len(test.times)} of 2011-2015 in "
        f"{int(blocks.max()) + 1} blocks to test; {series.left_out} of the file's dates lack a value. Ranges are 95 % "
        f"intervals. The network is the mean of three seeds', which took {network.steps} steps, chosen on 2009-2010."
    ]
    return figures, claims, notes


def _raw(test: Series) -> dict[str, np.ndarray]:
    """Return the CRPS of the raw ensemble, as a normal distribution and as members."""
    scores = {}
    for count in (5, test.members.shape[1]):
        mean, variance = test.moments(count)
        scores[f"raw {count}, N(m, (1+1/M) s^2)"] = crps(
            Family.NORMAL, mean, np.sqrt((1 + 1 / count) * variance), test.observed
        )
        scores[f"raw {count}, fair CRPS of members"] = crps_members(test.members[:, :count].T, test.observed, fair=True)
    return scores


def _debiased(fit: Series, test: Series, count: int) -> np.ndarray:
    """Return the CRPS of N(m + b, (1 + 1/M) s^2), where b is the mean error of the training dates."""
    bias = (fit.observed - fit.moments(count)[0]).mean()
    mean, variance = test.moments(count)
    return crps(Family.NORMAL, mean + bias, np.sqrt((1 + 1 / count) * variance), test.observed)


def _emos(fit: Series, count: int, harmonics: int) -> Emos:
    """Fit EMOS with `harmonics` seasonal terms."""
    season = fit.season(harmonics) if harmonics else None
    return fit_emos(*fit.moments(count), fit.observed, season=season)


def _apart(fit: Series, count: int, found: Emos) -> float:
    """Return the largest difference of a, b, root c and root d from an independent fit by scipy.

    Both minimise the same closed-form CRPS.
    """
    mean, variance = fit.moments(count)

    def loss(p: np.ndarray) -> float:
        scale = np.sqrt(p[2] ** 2 + p[3] ** 2 * variance)
        return float(crps(Family.NORMAL, p[0] + p[1] * mean, scale, fit.observed).mean())

    start = np.array([0.0, 1.0, 1.0, 1.0])
    best = minimize(loss, start, method="BFGS", options={"gtol": 1e-8})
    best = minimize(loss, best.x, method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-13, "maxiter": 4000})
    ours = np.array([float(found.a), float(found.b), float(found.c) ** 0.5, float(found.d) ** 0.5])
    return float(np.abs(ours - [best.x[0], best.x[1], *np.abs(best.x[2:])]).max())


def _interval(values: np.ndarray, counts: np.ndarray, blocks: np.ndarray) -> Interval:
    """Return the mean score with its bootstrap interval."""
    return interval(float(values.mean()), counts @ values / counts.sum(1), 0.95, int(blocks.max()) + 1)


def _gain(ours: np.ndarray, theirs: np.ndarray, counts: np.ndarray, blocks: np.ndarray) -> Interval:
    """Return by how many per cent our score is lower, with its bootstrap interval."""
    draws = 100 * (1 - (counts @ ours) / (counts @ theirs))
    return interval(float(100 * (1 - ours.mean() / theirs.mean())), draws, 0.95, int(blocks.max()) + 1)


def _figure(found: Interval, unit: str) -> Figure:
    """Return an interval as a figure."""
    return Figure(found.value, found.low, found.high, unit)


def era5(config: BenchmarkConfig, path: Path) -> Result:
    """Predict the spread of ten members from 1, 3 and 5, trained on three times and tested on the fourth.

    Args:
        config: the settings of the benchmark.
        path: the file of ERA5's members.

    Returns:
        Figures, claims and notes.
    """
    figures: dict[str, Figure] = {}
    claims = []
    notes = [
        "ERA5: three times to train and fit on, one to test, twelve hours after the last: no interval can be given."
    ]
    with tempfile.TemporaryDirectory(dir=config.workspace) as folder:
        store_path = prepare(PrepareConfig(input=str(path), output=f"{folder}/store.zarr"))
        store = TensorStore(str(store_path))
        times = [str(time)[:13] for time in store.layout.init_time]
        train(_era5_training(config, str(store_path), folder, times[:-1]))
        for count in (1, 3, 5):
            made = f"{folder}/from_{count}"
            checkpoint = f"{folder}/era5/checkpoints/last"
            predict(
                PredictConfig(
                    checkpoint=checkpoint, input=str(store_path), output=made, members_in=count, dates=times[-1:]
                ),
                store,
            )
            given = EvaluateConfig(
                forecast=made,
                ensemble=str(store_path),
                members_in=count,
                fit=times[:-1],
                output=f"{folder}/scores_{count}",
            )
            ratios = _ratios(evaluate(given, store), count)
            for name, value in ratios.items():
                figures[f"ERA5, spread RMSE from {count}: network over {name}"] = Figure(value, value, value, "ratio")
            reference = f"size_corrected_{count}" if count > 1 else "climatology"
            words = "size-corrected spread" if count > 1 else "climatological spread (one member has none)"
            text = f"ERA5's ten members from {count}: RMSE of predicted spread over that of the {words}"
            claims.append(Claim(text, ratios[reference], "ratio", 1.0, at_most=True))
            notes += [
                f"{LOST}ERA5's ten members from {count}: the network's spread RMSE is {value:.3f} times that of {name}."
                for name, value in ratios.items()
                if value > 1
            ]
    return figures, claims, notes


def _era5_training(config: BenchmarkConfig, store: str, folder: str, dates: list[str]) -> TrainConfig:
    """Return the settings of the training run."""
    steps = {BenchmarkSize.tiny: 3, BenchmarkSize.small: 30, BenchmarkSize.full: 100}[config.size]
    return TrainConfig(
        run="era5", output=folder, steps=steps, batch_size=3, validate_every=steps, checkpoint_every=steps,
        data=DataConfig(store=store, train=dates, validation=[], members=[1, 3, 5]),
        model=ModelConfig(postprocess=False, hidden=16, max_hidden=64, depth=2),
        tracking=TrackingConfig(tensorboard=False),
    )  # fmt: skip


def _ratios(folder: Path, count: int) -> dict[str, float]:
    """Return the network's spread RMSE over that of each competitor, as geometric means over variables and levels."""
    rows = json.loads((folder / "scores.json").read_text())["scores"]
    rmse: dict[str, dict[tuple, float]] = {}
    for row in rows:
        if row.get("spread_rmse"):
            rmse.setdefault(row["entrant"], {})[row["variable"], row["level"]] = row["spread_rmse"]["value"]
    ours = rmse.pop(f"from_{count}")
    return {
        name: float(np.exp(np.mean([np.log(ours[key] / values[key]) for key in ours]))) for name, values in rmse.items()
    }
