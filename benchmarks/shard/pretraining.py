"""Pretrain on members that stand for the truth, and compare with training from scratch in the same number of steps.

A training has some init times whose truth it may use, evenly spaced among all. Pretraining sees the members of all of
them. Both are validated equally often, and each one's best checkpoint is scored on test dates that had no part in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench
from ensemble_ml.config import (
    DataConfig,
    ModelConfig,
    Objective,
    OptimConfig,
    OptimName,
    Precision,
    TrackingConfig,
    TrainConfig,
)
from ensemble_ml.loading import Reader, fixed_batches
from ensemble_ml.loading.reader import iso
from ensemble_ml.store import TensorStore, open_store
from ensemble_ml.store.source import select_dates
from ensemble_ml.training import load_model, train
from ensemble_ml.training.climate_data import spaced
from ensemble_ml.training.validation import validate

_MEMBERS = 5
_BOTH, _SCRATCH, _FITS = "pretrained on members", "from scratch", "the fits alone"
_SCORES = {"crps_ratio": "CRPS", "spread_ratio": "spread RMSE"}


@dataclass(eq=False)
class Contest:
    """The trainings on some labelled init times: score by kind, one for each seed, and seconds of processors."""

    scores: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, scores: dict[str, float], seconds: float) -> None:
        """Add a training of the next seed."""
        self.scores.setdefault(name, []).append(scores)
        self.seconds.setdefault(name, []).append(seconds)

    def gains(self, score: str) -> list[float]:
        """Return by how many per cent pretraining is below training from scratch, one for each seed."""
        pairs = zip(self.scores[_BOTH], self.scores[_SCRATCH], strict=True)
        return [100 * (1 - ours[score] / theirs[score]) for ours, theirs in pairs]


def pretraining(bench: Bench) -> None:
    """Train from several numbers of labelled init times, with and without pretraining.

    Args:
        bench: the benchmark.
    """
    given = bench.config.shard
    if given.store is None:
        bench.notes.append("Pretraining was left out: give shard.store=STORE.")
        return
    store = open_store(given.store)
    every = select_dates(store.layout.init_time, given.train, "shard.train")
    first, then = given.steps
    contests = {count: Contest() for count in given.labelled}
    for seed in range(given.seeds):
        before, spent = _trained(bench, f"members-seed{seed}", seed, every, first, objective=Objective.members)
        for count, contest in contests.items():
            dates = spaced(every, count)
            for name, steps, more in (
                (_BOTH, then, {"init_from": str(before / "checkpoints" / "last")}),
                (_SCRATCH, first + then, {}),
                (_FITS, 0, {}),
            ):
                run, seconds = _trained(
                    bench, f"{name}-{count}-seed{seed}".replace(" ", "_"), seed, dates, steps, **more
                )
                contest.add(name, _scored(run, store, given.test), seconds + spent * (name == _BOTH))
    for count, contest in contests.items():
        _tell(bench, f"{count} labelled dates", contest)
    of = [f"{values} {unit}" for values, unit in ((given.levels, "hPa"), (given.leads, "h")) if values]
    of += [f"{given.channels[0]} to {given.channels[1]} channels, batches of {given.batch_size}"]
    fits = "with the fits of ours" if given.fits else "the U-Net alone (model.linear=false, local_terms=false)"
    bench.notes.append(
        f"Pretraining: {'; '.join([fits, *of])}; {first} steps on the members of {len(every)} dates and {then} on the"
        f" truth, against {first + then} on the truth; brackets are 95 % intervals of the mean over {given.seeds}"
        " seeds, by Student's t."
    )


def _tell(bench: Bench, where: str, contest: Contest) -> None:
    """Add figures and claims of the trainings on as many labelled dates."""
    for name, scores in contest.scores.items():
        for score, words in _SCORES.items():
            values = [one[score] for one in scores]
            bench.figures[f"{words} over the raw members', test dates, {where}: {name}"] = Figure.of(values, "ratio")
    for score, words in _SCORES.items():
        text = f"{where}: {words} of {_BOTH} below {_SCRATCH}, same number of steps"
        gain = bench.figures[text] = Figure.of_mean(contest.gains(score), "%")
        bench.claim(text, gain.median, "%", 1.0 if score == "spread_ratio" else 0.0)
        if len(contest.gains(score)) > 1:
            bench.claim(f"{text}: lower end of the interval", gain.min, "%", 1e-9)
    pairs = zip(contest.seconds[_BOTH], contest.seconds[_SCRATCH], strict=True)
    text = f"processor time of {_BOTH} over {_SCRATCH}, {where}"
    bench.figures[text] = Figure.of([ours / theirs for ours, theirs in pairs], "times")


def _trained(
    bench: Bench, run: str, seed: int, dates: np.ndarray, steps: int, **settings: Any
) -> tuple[Path, float]:  # fmt: skip
    """Return the folder of a training, and its seconds of processors; one that is there is taken as it is."""
    given = bench.config.shard
    assert given.store is not None
    folder, spent = bench.folder / "runs" / run, bench.folder / "runs" / f"{run}.seconds"
    if spent.exists():
        return folder, float(spent.read_text())
    begun = (folder / "checkpoints" / "last").exists()
    if begun:
        settings.pop("init_from", None)  # its weights are in the checkpoint
    times = open_store(given.store).layout.init_time[dates]
    data = DataConfig(
        store=given.store,
        train=[iso(t) for t in times],
        validation=given.validation,
        levels=given.levels,
        leads_out=given.leads,
    )
    model = ModelConfig(
        hidden=given.channels[0],
        max_hidden=given.channels[1],
        precision=Precision.float32,
        linear=given.fits,
        local_terms=given.fits,
    )
    config = TrainConfig(
        run=run, output=str(folder.parent), seed=seed, steps=steps, batch_size=given.batch_size, threads=1,
        spread_weight=0.3, average=0.98, validate_every=given.validate_every, checkpoint_every=10**6,
        resume=begun, data=data, model=model,
        optim=OptimConfig(name=OptimName.adamw, lr=1e-3, weight_decay=0.05),
        tracking=TrackingConfig(tensorboard=False), **settings,
    )  # fmt: skip
    began = time.process_time()
    train(config)
    seconds = time.process_time() - began
    spent.write_text(f"{seconds}")
    return folder, seconds


def _scored(run: Path, store: TensorStore, periods: list[str]) -> dict[str, float]:
    """Return the scores of the best checkpoint of a run on the test dates, from the first members."""
    model, _ = load_model(run / "checkpoints" / "best")
    reader = Reader(store, model.spec)
    dates = select_dates(store.layout.init_time, periods, "shard.test")
    batches = fixed_batches(reader, dates, np.arange(_MEMBERS), batch_size=4)
    area = torch.from_numpy(model.spec.grid.area_weights()).float()
    return validate(model, batches, full_size=reader.full_size, area=area).scores
