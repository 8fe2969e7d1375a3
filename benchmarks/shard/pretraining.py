"""Pretrain on members that stand for the truth, or by a masked autoencoder, against training from scratch.

A training has some init times whose truth it may use, evenly spaced among all. Pretraining sees the members of all of
them. The autoencoder gets as much time of processors as pretraining on members took, and training from scratch as many
steps as take the time of both parts of a pretrained one. All are validated equally often. Each one's best checkpoint is
scored on test dates that had no part in it.

Each training is kept with its time; a benchmark that was stopped begins with the first that is not there.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.results import LOST, Figure
from benchmarks.common.sections import Bench
from benchmarks.shard.masked import pretrain_masked
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
_MEMBERS_FIRST, _MASKED_FIRST = "pretrained on members", "pretrained by masking"
_SCRATCH, _FITS = "from scratch", "the fits alone"
_SCORES = {"crps_ratio": "CRPS", "spread_ratio": "spread RMSE"}


@dataclass(eq=False)
class Contest:
    """The trainings on some labelled init times.

    Attributes:
        dates: indices of the init times.
        scores: the scores by kind of training, one for each seed.
        seconds: time of processors, alike.
    """

    dates: np.ndarray
    scores: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, scores: dict[str, float], seconds: float) -> None:
        """Add a training of the next seed."""
        self.scores.setdefault(name, []).append(scores)
        self.seconds.setdefault(name, []).append(seconds)

    def gains(self, score: str, name: str, over: str) -> list[float]:
        """Return by how many per cent one kind of training is below another, one for each seed."""
        pairs = zip(self.scores[name], self.scores[over], strict=True)
        return [100 * (1 - ours[score] / theirs[score]) for ours, theirs in pairs]

    def times(self, name: str) -> list[float]:
        """Return the time of processors of one kind over that of training from scratch, one for each seed."""
        return [ours / theirs for ours, theirs in zip(self.seconds[name], self.seconds[_SCRATCH], strict=True)]


def pretraining(bench: Bench) -> None:
    """Train from several numbers of labelled init times, with either pretraining and without.

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
    contests = [Contest(spaced(every, count)) for count in given.labelled]
    taken: list[int] = []
    for seed in range(given.seeds):
        members, spent = _trained(bench, f"members-seed{seed}", seed, every, first, objective=Objective.members)
        masked, steps, spent_masked = _masked(bench, seed, store, every, members / "checkpoints" / "last", spent)
        taken.append(steps)
        begins = {_MEMBERS_FIRST: (spent, members / "checkpoints" / "last"), _MASKED_FIRST: (spent_masked, masked)}
        for contest in contests:
            _compete(bench, contest, seed, _FITS, 0)
            # Again without a step: the fits are kept by now, so this is what a training takes beside its steps.
            _, beside = _trained(bench, f"no_step-{len(contest.dates)}-seed{seed}", seed, contest.dates, 0)
            own = [_compete(bench, contest, seed, name, then, *begin) for name, begin in begins.items()]
            more = math.ceil(spent / max((sum(own) / len(own) - beside) / then, 1e-3))
            _compete(bench, contest, seed, _SCRATCH, then + more)
    for contest in contests:
        _tell(bench, f"{len(contest.dates)} labelled dates", contest)
    of = [f"{values} {unit}" for values, unit in ((given.levels, "hPa"), (given.leads, "h")) if values]
    of += [f"{given.channels[0]} to {given.channels[1]} channels, batches of {given.batch_size}"]
    fits = "with the fits of ours" if given.fits else "the U-Net alone (model.linear=false, local_terms=false)"
    bench.notes.append(
        f"Pretraining: {'; '.join([fits, *of])}; {first} steps on the members of {len(every)} dates, or"
        f" {min(taken)} to {max(taken)} of a masked autoencoder, and {then} on the truth, against as many on the truth"
        f" as take the same time of processors; brackets are 95 % intervals of the mean over {given.seeds} seeds, by"
        " Student's t."
    )


def _compete(
    bench: Bench, contest: Contest, seed: int, name: str, steps: int, before: float = 0.0, start: Path | None = None
) -> float:  # fmt: skip
    """Add a training to a contest, which begins with a checkpoint or without. Return its time of processors alone.

    `before` is the time that the checkpoint took, which counts in the contest.
    """
    settings = {} if start is None else {"init_from": str(start)}
    run = f"{name}-{len(contest.dates)}-seed{seed}".replace(" ", "_")
    folder, seconds = _trained(bench, run, seed, contest.dates, steps, **settings)
    contest.add(name, _scored(bench, folder), seconds + before)
    return seconds


def _tell(bench: Bench, where: str, contest: Contest) -> None:
    """Add figures and claims of the trainings on as many labelled dates."""
    for name, scores in contest.scores.items():
        for score, words in _SCORES.items():
            values = [one[score] for one in scores]
            bench.figures[f"{words} over the raw members', test dates, {where}: {name}"] = Figure.of(values, "ratio")
    for score, words in _SCORES.items():
        text = f"{where}: {words} of {_MEMBERS_FIRST} below {_SCRATCH}, same processor time"
        gains = contest.gains(score, _MEMBERS_FIRST, _SCRATCH)
        gain = bench.figures[text] = Figure.of_mean(gains, "%")
        bench.claim(text, gain.median, "%", 1.0 if score == "spread_ratio" else 0.0)
        if len(gains) > 1:
            bench.claim(f"{text}: lower end of the interval", gain.min, "%", 1e-9)
        for over in (_SCRATCH, _MEMBERS_FIRST):
            gain = Figure.of_mean(contest.gains(score, _MASKED_FIRST, over), "%")
            bench.figures[f"{where}: {words} of {_MASKED_FIRST} below {over}, same processor time"] = gain
        if gain.median > 0:
            bench.notes.append(f"{LOST}{where}: {words} is {gain.median:.2f} % lower {_MASKED_FIRST} than on members.")
    for name in (_MEMBERS_FIRST, _MASKED_FIRST):
        figure = Figure.of(contest.times(name), "times")
        bench.figures[f"processor time of {name} over {_SCRATCH}, {where}"] = figure


def _masked(
    bench: Bench, seed: int, store: TensorStore, dates: np.ndarray, given: Path, seconds: float
) -> tuple[Path, int, float]:  # fmt: skip
    """Return the checkpoint of a masked autoencoder, its steps and its seconds; one that is there is taken as it is."""
    folder = bench.folder / "runs" / f"masked-seed{seed}"
    spent = folder.with_suffix(".seconds")
    if not spent.exists():
        began = time.process_time()
        steps = pretrain_masked(_settings(bench, folder.name, seed, dates, 0), store, dates, given, folder, seconds)
        spent.write_text(f"{steps} {time.process_time() - began}")
    taken, time_taken = spent.read_text().split()
    return folder, int(taken), float(time_taken)


def _trained(
    bench: Bench, run: str, seed: int, dates: np.ndarray, steps: int, **settings: Any
) -> tuple[Path, float]:  # fmt: skip
    """Return the folder of a training, and its seconds of processors; one that is there is taken as it is."""
    folder, spent = bench.folder / "runs" / run, bench.folder / "runs" / f"{run}.seconds"
    if not spent.exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a training that was stopped, whose time nobody knows
        config = replace(_settings(bench, run, seed, dates, steps), **settings)
        began = time.process_time()
        train(config)
        spent.write_text(f"{time.process_time() - began}")
    return folder, float(spent.read_text())


def _settings(bench: Bench, run: str, seed: int, dates: np.ndarray, steps: int) -> TrainConfig:
    """Return the settings that all trainings share."""
    given = bench.config.shard
    assert given.store is not None
    data = DataConfig(
        store=given.store,
        train=[iso(t) for t in open_store(given.store).layout.init_time[dates]],
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
    return TrainConfig(
        run=run, output=str(bench.folder / "runs"), seed=seed, steps=steps, batch_size=given.batch_size, threads=1,
        spread_weight=0.3, average=0.98, validate_every=given.validate_every, checkpoint_every=10**6,
        data=data, model=model, optim=OptimConfig(name=OptimName.adamw, lr=1e-3, weight_decay=0.05),
        tracking=TrackingConfig(tensorboard=False),
    )  # fmt: skip


def _scored(bench: Bench, run: Path) -> dict[str, float]:
    """Return the scores of the best checkpoint of a run on the test dates, from the first members."""
    given, kept = bench.config.shard, run.with_suffix(".scores")
    assert given.store is not None
    if not kept.exists():
        model, _ = load_model(run / "checkpoints" / "best")
        reader = Reader(open_store(given.store), model.spec)
        dates = select_dates(reader.source.layout.init_time, given.test, "shard.test")
        batches = fixed_batches(reader, dates, np.arange(_MEMBERS), batch_size=4)
        area = torch.from_numpy(model.spec.grid.area_weights()).float()
        kept.write_text(json.dumps(validate(model, batches, full_size=reader.full_size, area=area).scores))
    scores: dict[str, float] = json.loads(kept.read_text())
    return scores
