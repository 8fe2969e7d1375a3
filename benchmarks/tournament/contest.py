"""Hold contests between trainers that are threads of one process, which communicate in memory.

Every trainer runs the trainer's own step, validation and tournament, as a process would. Tournaments are decided on
every other validation date; the results are scores on those between.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.simulated import on_mesh
from ensemble_ml.config import ParallelConfig, TrainConfig
from ensemble_ml.distributed import Mesh, Session
from ensemble_ml.distributed.world import World
from ensemble_ml.loading import Batch, Reader, fixed_batches
from ensemble_ml.loading.batches import Schedule, collate
from ensemble_ml.optim import build
from ensemble_ml.training import setup
from ensemble_ml.training.assemble import Run
from ensemble_ml.training.state import State, learned
from ensemble_ml.training.tournament import compete, mean_weights, packed, partners, take_over
from ensemble_ml.training.trainer import Trainer
from ensemble_ml.training.validation import NotFiniteForecast, validate

Judge = Callable[[], float]  # scores a run on the dates of the tournaments
Rule = Callable[[Run, Judge], object]  # holds a tournament


@dataclass
class Outcome:
    """The result of a contest on one trainer.

    Attributes:
        chosen: its score on the dates of the tournaments after the last step.
        score: its score on the other dates.
        soup: the same of the mean of all trainers' weights, (on the tournament's dates, on the others).
        varied: the trainer whose varied settings it had after each tournament.
        finite: whether its weights were finite after each tournament.
        sent: bytes that it sent in each tournament.
    """

    chosen: float
    score: float
    soup: tuple[float, float]
    varied: list[int] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)


def ours(run: Run, judge: Judge) -> None:
    """Hold a tournament by our rule: scores first, then winners send to losers."""
    own = torch.tensor([judge()], dtype=torch.float64)
    scores = torch.empty(run.session.topology.trainer, dtype=torch.float64)
    run.session.mesh.trainers.all_gather(scores, own)
    compete(run, scores.tolist())


def published(run: Run, judge: Judge) -> None:
    """Hold a tournament as LBANN does (random_pairwise_exchange.cpp): exchange models, and keep the own if it is <=."""
    own, group = run.session.topology.place.trainer, run.session.mesh.trainers
    number = run.state.step // run.base.tournament.every
    pairs = partners(run.base.seed, number, group.size)
    partner = {a: b for pair in pairs for a, b in (pair, pair[::-1])}.get(own, own)
    mine, sizes = packed(run), torch.empty(group.size, dtype=torch.int64)
    group.all_gather(sizes, torch.tensor([len(mine)]))
    theirs = torch.empty(int(sizes[partner]), dtype=torch.uint8)
    counts = [[int(size) * (k == partner) for k in range(group.size)] for size in (sizes[partner], len(mine))]
    group.all_to_all_single(theirs, mine, *counts)
    local = judge()
    take_over(run, theirs)
    if local <= judge():
        take_over(run, mine)


def contest(
    start: Run, config: TrainConfig, rule: Rule | None, *, poisoned: int | None = None, soup: bool = False
) -> list[Outcome]:
    """Train all trainers of a configuration, and return the outcome of each.

    Args:
        start: the run that all begin with, from `benchmarks.lion.trials.prepare`.
        config: the settings.
        rule: the rule of the tournaments; None holds none.
        poisoned: a trainer whose weights are NaN before the first tournament.
        soup: also score the mean of the weights.
    """

    def trainer(mesh: Mesh) -> Outcome:
        run = _run_of(start, config, mesh)
        own = mesh.topology.place.trainer
        outcome, loop = Outcome(math.nan, math.nan, (math.nan, math.nan)), Trainer(run, Path())
        run.state.model.train()
        for batch in _batches(run):
            loop._step(batch)
            step = run.state.step
            if step == 1 and own == poisoned:
                next(run.state.model.parameters()).data.fill_(torch.nan)
            if rule is not None and step % config.tournament.every == 0 and step < config.steps:
                before = mesh.trainers.bytes_sent
                rule(run, lambda: judged(run, 0))
                outcome.sent.append(mesh.trainers.bytes_sent - before)
                outcome.varied.append(run.state.varied)
                outcome.finite.append(all(bool(p.isfinite().all()) for _, p in learned(run.state.model)))
        outcome.chosen, outcome.score = judged(run, 0), judged(run, 1)
        if soup:
            mean_weights(run, [0.0] * config.parallel.trainer)
            outcome.soup = judged(run, 0), judged(run, 1)
        return outcome

    return on_mesh(trainer, trainer=config.parallel.trainer)


def judged(run: Run, half: int) -> float:
    """Return the score of a run on every other validation date, from the first or from the second; NaN if it is NaN."""
    dates = run.validation_dates[half::2]
    members = np.arange(min(run.config.data.validation_members, run.reader.full_size))
    batches = fixed_batches(run.reader, dates, members, batch_size=4, share=(0, 1))
    with run.state.predicting() as model:
        try:
            found = validate(model, batches, full_size=run.reader.full_size, area=run.loss.area)
        except NotFiniteForecast:
            return math.nan
    return found.scores["score"]


def score_of(start: Run, weights: dict[str, Tensor], half: int) -> float:
    """Return the score of given weights on every other validation date."""
    run = replace(start, state=replace(start.state, model=copy.deepcopy(start.state.model), average=None))
    for name, p in run.state.model.named_parameters():
        p.data.copy_(weights[name])
    return judged(run, half)


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the trainer that the tournament's dates choose."""
    return min(outcomes, key=lambda one: one.chosen if math.isfinite(one.chosen) else math.inf)


def _run_of(start: Run, config: TrainConfig, mesh: Mesh) -> Run:
    """Return the run of one trainer, with a model, an optimizer and dates of its own."""
    own = mesh.topology.place.trainer
    session = Session(World(), mesh.topology, ParallelConfig())
    session.device, session.mesh = torch.device("cpu"), mesh
    model = copy.deepcopy(start.state.model)
    optimizer, schedule = build(config.optim, model.param_groups(), config.steps)
    state = State(model, optimizer, schedule, config.steps, start.state.spread_error, varied=own)
    dates = setup.own_dates(config, start.train_dates, own)
    reader = Reader(start.reader.source, start.reader.spec)
    loss = replace(start.loss)
    return Run(config, reader, dates, start.validation_dates, state, loss, start.facts, session)


def _batches(run: Run) -> Iterator[Batch]:
    """Yield the batches of a trainer."""
    for turn in Schedule(run.batches(0, run.state.steps), parts=1):
        yield collate(run.reader, turn.read_by(0), idle=turn.idle(0))
