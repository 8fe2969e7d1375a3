"""Validation scores of whole trainings that differ in their exchange alone: same data, seeds, steps and batches.

Every training is `ensemble-ml train experiment=quickstart` with Lion, over several hosts. Seeds come in turn, every
exchange of a seed before the next, so that a budget that ends early leaves whole seeds.
"""

from __future__ import annotations

import logging
import math
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from ensemble_ml.benchmarks.voting.hosts import Hosts, python
from ensemble_ml.training.tracking import read_log

log = logging.getLogger(__name__)

REFERENCE = "allreduce"
VARIANTS: dict[str, list[str]] = {
    REFERENCE: ["optim.exchange=allreduce"],
    "vote": ["optim.exchange=vote"],
    "lion_cub": ["optim.exchange=lion_cub", "optim.bits=8"],
    "vote, momentum every 50": ["optim.exchange=vote", "optim.momentum_sync=every", "optim.momentum_every=50"],
    "vote, momentum growing": ["optim.exchange=vote", "optim.momentum_sync=growing", "optim.momentum_every=20"],
    "vote, momentum selective": [
        "optim.exchange=vote", "optim.momentum_sync=selective", "optim.momentum_every=20", "optim.momentum_mb=0.5",
    ],
    "vote, 4 bits": ["optim.exchange=vote", "optim.bits=4"],
    **{f"powersgd, rank {r}": ["optim.exchange=powersgd", f"optim.rank={r}"] for r in (1, 2, 4, 8)},
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """What one training left: last CRPS ratio, curves of the training loss, bytes a step, momentum bytes in all."""

    crps: float
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    sent_mb: float
    momentum_bytes: int


def train_all(
    hosts: Hosts, store: str, folder: Path, *, seeds: int, steps: int, minutes: float
) -> tuple[dict[str, list[Training]], list[str]]:
    """Trainings of each variant, in the order of seeds, and the names of those that the budget did not reach."""
    until = time.monotonic() + 60 * minutes
    found: dict[str, list[Training]] = {name: [] for name in VARIANTS}
    left = []
    for seed in range(seeds):
        for name, settings in VARIANTS.items():
            if time.monotonic() > until:
                left.append(f"{name}, seed {seed}")
                continue
            found[name].append(_train(hosts, store, folder, name, settings, seed, steps))
            log.info("quality: %s, seed %d: CRPS ratio %.5f", name, seed, found[name][-1].crps)
    return found, left


def _train(hosts: Hosts, store: str, folder: Path, name: str, settings: list[str], seed: int, steps: int) -> Training:
    run = f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}"
    shutil.rmtree(folder / run, ignore_errors=True)
    command = python(
        "-m", "ensemble_ml", "train", "experiment=quickstart", "optim=lion", f"data.store={store}", f"run={run}",
        f"output={folder}", f"seed={seed}", f"steps={steps}", f"validate_every={max(1, steps // 6)}", "max_minutes=0",
        "threads=1", "model.precision=float32", "tracking.tensorboard=false", "tracking.log_every=5", *settings,
    )  # fmt: skip
    hosts.run(command, seconds=3600)
    return read(folder / run)


def read(run: Path) -> Training:
    """What the log of a run says."""
    lines = read_log(run / "log.jsonl")
    trained = [line for line in lines if "loss" in line]
    seconds, total, before = [], 0.0, 0
    for line in trained:
        batch = 4  # start dates a step, of experiment=quickstart
        total += (line["step"] - before) * batch / line["samples_per_s"]
        before = line["step"]
        seconds.append(total)
    return Training(
        crps=[line["validation"]["crps_ratio"] for line in lines if "validation" in line][-1],
        steps=tuple(line["step"] for line in trained),
        losses=tuple(line["loss"] for line in trained),
        seconds=tuple(seconds),
        sent_mb=statistics.median(line.get("sent_mb", 0.0) for line in trained),
        momentum_bytes=sum(line["momentum_sync"]["bytes"] for line in lines if "momentum_sync" in line),
    )


def excess(trainings: list[Training], reference: list[Training]) -> list[float]:
    """Percent by which the CRPS of each seed exceeds the reference's."""
    return [100 * (t.crps / r.crps - 1) for t, r in zip(trainings, reference, strict=False)]


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the mean, by Student's t; endless for one value."""
    if len(values) < 2:
        return -math.inf, math.inf
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    middle = statistics.fmean(values)
    return middle - half, middle + half


def seconds_to_loss(training: Training, loss: float, window: int = 5) -> float:
    """Seconds until the running mean of the training loss is first at most `loss`; infinite where it never is."""
    for i in range(window, len(training.losses) + 1):
        if statistics.fmean(training.losses[i - window : i]) <= loss:
            return training.seconds[i - 1]
    return math.inf


def plot(found: dict[str, list[Training]], path: Path) -> None:
    """Loss against step and against wall time, first seed of each variant."""
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
