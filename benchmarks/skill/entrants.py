"""Train all entrants alike: the same dates, inputs, trials and seeds, each until its validation score stops improving.

No entrant has a time limit: a network that still improved when its time was up would be no fair competitor. All
networks get departures from the training mean at the point, their differences, place and season, which ours has too.

A trial is a setting of the optimizer. The one with the lowest CRPS on the validation dates is trained with more seeds.
A complete training or forecast is not made again, and an interrupted one is continued.
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

from benchmarks.common.results import commit
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
CLOSED_FORM = ("emos",)  # a single fit, without trials or seeds
# The settings of conf/model, except that our U-Net has the size of the quickstart.
NETS: dict[str, dict[str, Any]] = {
    "unet3d": {"hidden": 16, "max_hidden": 64, "depth": 3, "points": 2048},
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
_TINY = {"hidden": 8, "max_hidden": 8, "depth": 1, "points": 16}


@dataclass(frozen=True)
class Dates:
    """The dates of training, validation and test, each a list of years or ranges."""

    train: list[str]
    validation: list[str]
    test: list[str]


@dataclass(frozen=True)
class Trained:
    """A network in its best setting.

    Attributes:
        name: name of the model.
        runs: run folders by seed.
        trials: the table of its trials.
    """

    name: str
    runs: tuple[Path, ...]
    trials: tuple[dict[str, Any], ...]


def split(config: SkillConfig, init_time: np.ndarray) -> Dates:
    """Return the configured dates, or a split by years.

    The last quarter of the years is for the test, the year before for validation, and the rest for training. A quarter
    is rounded up: two years of seven.

    Args:
        config: the settings of the benchmark.
        init_time: the init times of the store.

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
                f"skill.{one}, skill.{other}: share {len(both)} init times (first {str(init_time[both[0]])[:13]}); "
                "give each init time one use"
            )
    return dates


def train_entrant(
    name: str, config: SkillConfig, dates: Dates, store: TensorStore, folder: Path, size: BenchmarkSize
) -> Trained:
    """Run the trials of a model with seed 0, then the best of them with the other seeds.

    Args:
        name: name of the model.
        config: the settings of the benchmark.
        dates: the split.
        store: the tensor store.
        folder: folder of the runs.
        size: size of the benchmark.

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
    """Return our network after its fits and before any step, which shows what training adds.

    All trainings of a seed use the fits of that seed.

    Args:
        config: the settings of the benchmark.
        dates: the split.
        store: the tensor store.
        folder: folder of the runs.
        size: size of the benchmark.

    Raises:
        UserError: there are more trials than settings.
    """
    if config.trials > len(TRIALS):
        raise UserError(f"skill.trials={config.trials}: there are {len(TRIALS)} settings to try; give {len(TRIALS)}")
    runs = (_train(START, 0, seed, config, dates, store, folder, size) for seed in range(config.seeds))
    return Trained(START, tuple(runs), ())


def fit_seconds(start: Trained) -> list[float]:
    """Return the seconds that the fits of each seed took, whenever they were made.

    Args:
        start: the result of `start_of_ours`.
    """
    return [float(_last(run)["clock"]["fit_seconds"]) for run in start.runs]


def steps_taken(trained: Trained) -> list[int]:
    """Return the step at which each seed was best on the validation dates.

    Args:
        trained: the model.
    """
    return [int(load_checkpoint(run / "checkpoints" / "best").meta["step"]) for run in trained.runs]


def cut_short(trained: Trained, steps: int) -> int:
    """Return how many seeds took all `steps`, so that they might have improved further.

    Args:
        trained: the model.
        steps: the largest number of steps.
    """
    return sum(_last(run)["step"] >= steps for run in trained.runs)


def _last(run: Path) -> dict[str, Any]:
    return load_checkpoint(run / "checkpoints" / "last").meta


def _emos(meta: dict[str, Any]) -> dict[str, Any]:
    return {"emos": meta["emos"]} if "emos" in meta else {}


def _train(
    name: str, trial: int, seed: int, config: SkillConfig, dates: Dates, store: TensorStore, folder: Path,
    size: BenchmarkSize,
) -> Path:  # fmt: skip
    """Run one training, or return its folder if it is complete."""
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
        # A step that is too large must not end the benchmark, so gradients are clipped, and steps that are not finite
        # are skipped, for all entrants alike. The learning rate stays constant, because the last step is not known
        # before patience ends. The averaged weights have the effect of a decay.
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
    """Return the folder of forecasts of the test dates from the first `members` members.

    The forecasts are made if they do not exist.

    Args:
        run: the run folder.
        members: number of members.
        config: the settings of the benchmark.
        dates: the split.
        store: the tensor store.
        folder: folder of all forecasts.
    """
    checkpoint = run / "checkpoints" / "best"
    output = folder / f"{run.name}-from{members}"
    times = store.layout.init_time
    paths = [output / file_name(times[date]) for date in select_dates(times, dates.test)]
    # The last file is written last. If another checkpoint made it, all forecasts are made again.
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
    """Record the current commit in a folder, and return the folder."""
    (folder / _COMMIT).write_text(commit() + "\n")
    return folder


def made_at(folders: Iterable[Path]) -> set[str]:
    """Return the commits at which trainings or forecasts were made, as far as they are recorded.

    Args:
        folders: folders of trainings or forecasts.
    """
    return {file.read_text().strip() for folder in folders if (file := folder / _COMMIT).is_file()}


def _made_by(path: Path, sha256: str) -> bool:
    """Return whether a forecast was made by a checkpoint with this checksum."""
    with netCDF4.Dataset(path) as data:
        return bool(data.getncattr("checkpoint_sha256") == sha256)
