"""Compare the validation scores of whole trainings that differ only in their exchange.

Data, seeds, steps and batches are the same. Every training is that of `experiment=quickstart` with Lion. Its ranks are
threads of this process (`trials`), or `ensemble-ml train` runs on several hosts. Seeds come in turn: every promised
exchange is trained with one seed before the next seed begins. So a budget that ends early leaves whole seeds.
"""

from __future__ import annotations

import logging
import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.common.hosts import Hosts, python
from benchmarks.lion import trials
from benchmarks.lion.trials import Training
from ensemble_ml.config import Assign, ExchangeName, MomentumSync
from ensemble_ml.training.tracking import read_log

log = logging.getLogger(__name__)

REFERENCE = "allreduce"
_VOTE: dict[str, Any] = {"exchange": ExchangeName.vote}
_CUB: dict[str, Any] = {"exchange": ExchangeName.lion_cub, "bits": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE: {"exchange": ExchangeName.allreduce},
    "vote": _VOTE,
    "lion_cub": _CUB,
    "vote, assign=locality": _VOTE,
    "lion_cub, assign=locality": _CUB,
    "vote, momentum every 50": _VOTE | {"momentum_sync": MomentumSync.every, "momentum_every": 50},
    "vote, momentum growing": _VOTE | {"momentum_sync": MomentumSync.growing, "momentum_every": 20},
    "vote, momentum selective": _VOTE
    | {"momentum_sync": MomentumSync.selective, "momentum_every": 20, "momentum_mb": 0.5},
    "vote, 4 bits": _VOTE | {"bits": 4},
    **{f"powersgd, rank {r}": {"exchange": ExchangeName.powersgd, "rank": r} for r in (1, 2, 4, 8)},
}


# Exchanges that must not cost quality are trained with every seed, as the reference is; all others with one.
PROMISED = ("vote", "lion_cub", "vote, assign=locality", "lion_cub, assign=locality")


def assigned(name: str) -> Assign:
    """Return how samples are assigned in a variant. With locality a rank meets the same samples in every epoch.

    Args:
        name: name of the variant.
    """
    return Assign.locality if name.endswith("assign=locality") else Assign.fixed


Trainer = Callable[[str, int], Training]  # (name of the variant, seed)


def train_all(
    trainer: Trainer, names: Sequence[str], *, seeds: int, minutes: float
) -> tuple[dict[str, list[Training]], list[str]]:
    """Train each variant, as far as the budget allows.

    The reference and the variants in `PROMISED` come first, seed by seed; then the others, with the first seed only.

    Args:
        trainer: trains one variant with one seed.
        names: names of the variants.
        seeds: number of seeds.
        minutes: the budget. A training that has begun is completed.

    Returns:
        The trainings of each variant, and the names of those that were not reached.
    """
    until = time.monotonic() + 60 * minutes
    found: dict[str, list[Training]] = {name: [] for name in names}
    first = [name for name in names if name in (REFERENCE, *PROMISED)]
    turns = [(name, seed) for seed in range(seeds) for name in first] + [(n, 0) for n in names if n not in first]
    for number, (name, seed) in enumerate(turns):
        if time.monotonic() > until:
            return found, [f"{name}, seed {seed}" for name, seed in turns[number:]]
        found[name].append(trainer(name, seed))
        log.info("quality: %s, seed %d: CRPS ratio %.5f", name, seed, found[name][-1].crps)
    return found, []


def in_threads(store: str, *, ranks: int, steps: int) -> Trainer:
    """Return a trainer whose ranks are threads of this process.

    Args:
        store: path of the tensor store.
        ranks: number of ranks.
        steps: number of steps.
    """
    starts: dict[int, trials.Run] = {}

    def train(name: str, seed: int) -> Training:
        config = trials.quickstart_config(store, seed=seed, steps=steps, optim=VARIANTS[name], assign=assigned(name))
        if seed not in starts:
            starts[seed] = trials.prepare(config)
        return trials.train(config, starts[seed], ranks)

    return train


def on_hosts(hosts: Hosts, store: str, folder: Path, *, steps: int) -> Trainer:
    """Return a trainer that runs processes on `hosts` and measures their times.

    Args:
        hosts: the hosts, one rank each.
        store: path of the tensor store.
        folder: folder of the runs.
        steps: number of steps.
    """
    return lambda name, seed: _train(hosts, store, folder, name, seed, steps)


def _overrides(name: str) -> list[str]:
    optim = [f"optim.{k}={v.value if isinstance(v, Enum) else v}" for k, v in VARIANTS[name].items()]
    return [*optim, f"loading.assign={assigned(name).value}"]


def _train(hosts: Hosts, store: str, folder: Path, name: str, seed: int, steps: int) -> Training:
    run = f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}"
    shutil.rmtree(folder / run, ignore_errors=True)
    command = python(
        "-m", "ensemble_ml", "train", "experiment=quickstart", "optim=lion", f"data.store={store}", f"run={run}",
        f"output={folder}", f"seed={seed}", f"steps={steps}", f"validate_every={max(1, steps // 6)}", "max_minutes=0",
        "threads=1", "model.precision=float32", "tracking.tensorboard=false", "tracking.log_every=5", *_overrides(name),
    )  # fmt: skip
    hosts.run(command, seconds=3600)
    return read(folder / run)


def read(run: Path) -> Training:
    """Read a training from the log of its run.

    Args:
        run: the run folder.
    """
    lines = read_log(run / "log.jsonl")
    trained = [line for line in lines if "loss" in line]
    steps, losses, seconds = [], [], []
    total, before = 0.0, 0
    for line in trained:
        batch = 4  # init times a step in experiment=quickstart
        total += (line["step"] - before) * batch / line["samples_per_s"]
        before = line["step"]
        if line["loss"] is not None:  # None means that no step was taken since the line before
            steps.append(line["step"])
            losses.append(line["loss"])
            seconds.append(total)
    return Training(
        crps=[line["validation"]["crps_ratio"] for line in lines if "validation" in line][-1],
        steps=tuple(steps),
        losses=tuple(losses),
        seconds=tuple(seconds),
        sent_mb=statistics.median(line.get("sent_mb", 0.0) for line in trained),
        momentum_bytes=sum(line["momentum_sync"]["bytes"] for line in lines if "momentum_sync" in line),
    )


def excess(trainings: list[Training], reference: list[Training]) -> list[float]:
    """Return by how many per cent the CRPS of each seed exceeds that of the reference.

    Args:
        trainings: the trainings, by seed.
        reference: those of the reference, by seed.
    """
    return [100 * (t.crps / r.crps - 1) for t, r in zip(trainings, reference, strict=False)]


def seconds_to_loss(training: Training, loss: float, window: int = 5) -> float:
    """Return the seconds until the running mean of the training loss first reaches `loss`, or infinity.

    Args:
        training: the training.
        loss: the loss to reach.
        window: number of losses in the running mean.
    """
    for i in range(window, len(training.losses) + 1):
        if statistics.fmean(training.losses[i - window : i]) <= loss:
            return training.seconds[i - 1]
    return math.inf


def plot(found: dict[str, list[Training]], path: Path) -> None:
    """Plot the loss against steps and against time, for the first seed of each variant.

    Args:
        found: the trainings of each variant.
        path: the file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for name, trainings in found.items():
        if trainings:
            by_step.plot(trainings[0].steps, trainings[0].losses, label=name, linewidth=1)
            by_time.plot(trainings[0].seconds, trainings[0].losses, label=name, linewidth=1)
    by_step.set(xlabel="step", ylabel="training loss")
    by_time.set(xlabel="seconds")
    by_time.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
