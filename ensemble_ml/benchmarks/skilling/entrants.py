"""Trains everyone alike: the same dates, inputs, trials and seeds, each until its validation score stops improving.

Time is nobody's limit: networks that still improved when it was up were no rivals. All networks see departures from the
training mean at the point, their differences, place and season, which ours has too.

A trial is a setting of the optimizer; the one with the lowest CRPS on the validation dates goes on with more seeds. A
training or a forecast that is whole is not made again, and one that was broken off goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np

from ensemble_ml.benchmarks.results import commit
from ensemble_ml.config import (
    BenchmarkSize,
    DataConfig,
    ModelConfig,
    Nonfinite,
    OptimConfig,
    OptimName,
    PredictConfig,
    SkillConfig,
    TrackingConfig,
    TrainConfig,
)
from ensemble_ml.errors import UserError
from ensemble_ml.inference import file_name, predict
from ensemble_ml.store import TensorStore
from ensemble_ml.store.source import select_dates
from ensemble_ml.training import load_checkpoint, train
from ensemble_ml.training.agreement import check_same_data, refuse_other_settings
from ensemble_ml.training.checkpoint import META

log = logging.getLogger(__name__)

OURS = "unet3d"
START = "start"  # our network before its first step: a statistical correction
CLOSED_FORM = ("emos",)  # one fit: no trials, no seeds
# As in conf/model, with our U-Net at the size of the quickstart's.
NETS: dict[str, dict[str, Any]] = {
    "unet3d": {"hidden": 16, "max_hidden": 64, "depth": 3, "residuals": 2048},
    "emos": {"spread": False},
    "drn": {"spread": False, "hidden": 128, "departures": True},
    "ens10_unet": {"spread": False, "hidden": 32, "max_hidden": 128, "departures": True},
    "poet": {"spread": False, "hidden": 16, "max_hidden": 64, "departures": True},
}
TRIALS: tuple[dict[str, Any], ...] = (
    {"lr": 1e-3, "weight_decay": 0.05},
    {"lr": 3e-3, "weight_decay": 0.05},
    {"lr": 1e-2, "weight_decay": 0.05},
    {"lr": 3e-4, "weight_decay": 0.05},
    {"lr": 1e-3, "weight_decay": 0.5},
)
_COMMIT = "commit.txt"
_NO_STEP = {"lr": 1e-12, "weight_decay": 0.0}
_TINY = {"hidden": 8, "max_hidden": 8, "depth": 1, "surroundings": 16, "residuals": 16}


@dataclass(frozen=True)
class Dates:
    """The split as periods, each a list of years or ranges."""

    train: list[str]
    validation: list[str]
    test: list[str]


@dataclass(frozen=True)
class Trained:
    """A network in its best setting: run folders by seed, and the table of its trials."""

    name: str
    runs: tuple[Path, ...]
    trials: tuple[dict[str, Any], ...]


def split(config: SkillConfig, init_time: np.ndarray) -> Dates:
    """The dates as configured, or by years: the last quarter to test, the year before to validate, the rest to train.

    A quarter is rounded up: two years of seven.

    Raises:
        UserError: the store has fewer than three years and no periods are given, or a date has two uses.
    """
    years = [str(y) for y in np.unique(init_time.astype("datetime64[Y]"))]
    given = (config.train, config.validation, config.test)
    if len(years) < 3 and any(part is None for part in given):
        raise UserError(f"skill.train, validation, test: the store holds {', '.join(years)}; name the dates of each")
    tests = -(-len(years) // 4)
    found = years[: -tests - 1], years[-tests - 1 : -tests], years[-tests:]
    dates = Dates(*(list(years_ if part is None else part) for part, years_ in zip(given, found, strict=True)))
    parts = {name: set(select_dates(init_time, part)) for name, part in asdict(dates).items()}
    for one, other in combinations(parts, 2):
        if both := sorted(parts[one] & parts[other]):
            raise UserError(
                f"skill.{one}, skill.{other}: share {len(both)} start dates (first {str(init_time[both[0]])[:13]}); "
                "give each start date one use"
            )
    return dates


def train_entrant(
    name: str, config: SkillConfig, dates: Dates, store: TensorStore, folder: Path, size: BenchmarkSize
) -> Trained:
    """Run the trials of `name` with seed 0, then the best of them with the other seeds.

    Raises:
        UserError: a run of that name was made with other settings or dates.
    """
    count = 1 if name in CLOSED_FORM else config.trials
    rows = []
    for trial in range(count):
        run = _train(name, trial, 0, config, dates, store, folder, size)
        best = load_checkpoint(run / "checkpoints" / "best").meta
        scores = best["best"] or {}
        row = {"model": name, "trial": trial, **TRIALS[trial], "validation_crps_ratio": scores.get("crps_ratio")}
        rows.append(row | {"best_step": best["step"], "steps": _last(run)["step"], **_emos(best)})
    known = [row["validation_crps_ratio"] or float("inf") for row in rows]
    chosen = int(np.argmin(known))
    seeds = 1 if name in CLOSED_FORM else config.seeds
    runs = tuple(_train(name, chosen, seed, config, dates, store, folder, size) for seed in range(seeds))
    told = ", ".join(f"{row['lr']:g}: {score:.4f}" for row, score in zip(rows, known, strict=True))
    log.info("skill: %s: validation CRPS by learning rate: %s", name, told)
    return Trained(name, runs, tuple(row | {"taken": row["trial"] == chosen} for row in rows))


def start_of_ours(config: SkillConfig, dates: Dates, store: TensorStore, folder: Path, size: BenchmarkSize) -> Trained:
    """Our network as its fits leave it, which tells what training adds; all trainings of a seed take the seed's fits.

    Raises:
        UserError: more trials than there are settings.
    """
    if config.trials > len(TRIALS):
        raise UserError(f"skill.trials={config.trials}: there are {len(TRIALS)} settings to try; give {len(TRIALS)}")
    runs = (_train(START, 0, seed, config, dates, store, folder, size) for seed in range(config.seeds))
    return Trained(START, tuple(runs), ())


def fit_seconds(start: Trained) -> list[float]:
    """What the fits of each seed took, whenever they were made."""
    return [float(_last(run)["fit_seconds"]) for run in start.runs]


def steps_taken(trained: Trained) -> list[int]:
    """The step at which each seed was best on the validation dates."""
    return [int(load_checkpoint(run / "checkpoints" / "best").meta["step"]) for run in trained.runs]


def cut_short(trained: Trained, steps: int) -> int:
    """Return how many seeds took all `steps`, so that they may have gone on improving."""
    return sum(_last(run)["step"] >= steps for run in trained.runs)


def _last(run: Path) -> dict[str, Any]:
    return load_checkpoint(run / "checkpoints" / "last").meta


def _emos(meta: dict[str, Any]) -> dict[str, Any]:
    return {"emos": meta["emos"]} if "emos" in meta else {}


def _train(
    name: str, trial: int, seed: int, config: SkillConfig, dates: Dates, store: TensorStore, folder: Path,
    size: BenchmarkSize,
) -> Path:  # fmt: skip
    run = f"{name}-trial{trial}-seed{seed}"
    last = folder / run / "checkpoints" / "last"
    tiny = size is BenchmarkSize.tiny
    network, optimizer = (OURS, _NO_STEP) if name == START else (name, TRIALS[trial])
    steps = 1 if name == START else config.steps
    settings = TrainConfig(
        run=run, output=str(folder), seed=seed, steps=steps, batch_size=2 if tiny else 4,
        validate_every=max(1, min(50, steps // 2)), checkpoint_every=200, patience=config.patience,
        spread_weight=0.3, average=0.98, threads=config.threads, resume=last.exists(),
        data=DataConfig(
            store=store.path, train=dates.train, validation=dates.validation, validation_members=config.members,
            members=sorted({*config.sizes, 8}),
        ),
        model=ModelConfig(
            name=network, families=config.families if network == OURS else None,
            **(NETS[network] | (_TINY if tiny else {})),
        ),
        # A step too far must not end the benchmark: it is cut or left out, for everyone alike.
        # The rate stays, for nobody knows the last step before patience ends; averaged weights take the decay's place.
        optim=OptimConfig(
            name=OptimName.adamw, beta2=0.999, clip=1.0, nonfinite=Nonfinite.skip, final_lr=1.0, **optimizer
        ),
        tracking=TrackingConfig(tensorboard=False, log_every=50),
    )  # fmt: skip
    if (last / META).is_file():
        checkpoint = load_checkpoint(last)
        refuse_other_settings(settings, checkpoint, also=("patience", "validate_every"))
        check_same_data(store, checkpoint)
        if checkpoint.meta["step"] >= checkpoint.meta["steps"]:
            return folder / run
    log.info("skill: training %s", run)
    return _marked(train(settings))


def forecast(run: Path, members: int, config: SkillConfig, dates: Dates, store: TensorStore, folder: Path) -> Path:
    """The folder of forecasts of the test dates from the first `members`, made where they are not there yet."""
    checkpoint = run / "checkpoints" / "best"
    output = folder / f"{run.name}-from{members}"
    times = store.layout.init_time
    paths = [output / file_name(times[date]) for date in select_dates(times, dates.test)]
    # The last file is written last: where another checkpoint made it, all are made again.
    if not (all(path.is_file() for path in paths) and _made_by(paths[-1], load_checkpoint(checkpoint).sha256)):
        predict(
            PredictConfig(
                checkpoint=str(checkpoint), input=store.path, output=str(output), members_in=members,
                dates=dates.test, quantiles=[], overwrite=True, threads=config.threads,
            ),
            store,
        )  # fmt: skip
        _marked(output)
    return output


def _marked(folder: Path) -> Path:
    """The same, with the commit at which its contents were made."""
    (folder / _COMMIT).write_text(commit() + "\n")
    return folder


def made_at(folders: Iterable[Path]) -> set[str]:
    """The commits at which trainings or forecasts were made, of those that say so."""
    return {file.read_text().strip() for folder in folders if (file := folder / _COMMIT).is_file()}


def _made_by(path: Path, sha256: str) -> bool:
    with netCDF4.Dataset(path) as data:
        return bool(data.getncattr("checkpoint_sha256") == sha256)
