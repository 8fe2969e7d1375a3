"""Train on data-parallel ranks that are threads of one process, to see what an exchange does to the weights.

Every rank runs the trainer's own step, loss and exchange on its share of each batch, as a process would. Only the
communicators pass tensors in memory. So losses, scores, bytes and final weights equal those of as many processes, while
the data is read and the statistics are fitted only once, and no rank waits for a network. The wall time is therefore
not that of a job on several hosts. The predicted time adds the time of the bytes on a link to the measured work of a
rank.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.simulated import Room, SimulatedCommunicator, on_ranks
from ensemble_ml.config import (
    Assign,
    DataConfig,
    LoadingConfig,
    ModelConfig,
    OptimConfig,
    OptimName,
    ParallelConfig,
    Precision,
    TrackingConfig,
    TrainConfig,
)
from ensemble_ml.distributed import Communicator, Mesh, NullCommunicator, Session, solo
from ensemble_ml.distributed.choice import exchange_between
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.distributed.world import World
from ensemble_ml.loading import Reader
from ensemble_ml.loading.batches import Batch, Schedule, collate
from ensemble_ml.optim import Exchange, build
from ensemble_ml.store import open_store
from ensemble_ml.training import setup
from ensemble_ml.training.assemble import Run, assemble
from ensemble_ml.training.judge import Judge
from ensemble_ml.training.state import Average, State
from ensemble_ml.training.trainer import Trainer

NO_FITS: dict[str, Any] = {
    "linear": False,
    "local_terms": False,
}  # a model without what is fitted before the first step


@dataclass(frozen=True)
class Training:
    """The results of one training.

    Attributes:
        crps: last CRPS ratio of the validation.
        steps: steps at which the loss was recorded.
        losses: training loss at these steps.
        seconds: time at these steps.
        sent_mb: megabytes that a rank sends in a step.
        momentum_bytes: bytes that were sent to average momenta.
        curve: CRPS ratio of the validation by step, where it was asked for.
        weights: the final weights by name.
    """

    crps: float
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    sent_mb: float
    momentum_bytes: int
    curve: dict[int, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)


def quickstart_config(
    store: str, *, seed: int, steps: int, optim: dict[str, Any], assign: Assign = Assign.fixed
) -> TrainConfig:
    """Return the settings of `experiment=quickstart optim=lion` in float32.

    Args:
        store: path of the tensor store.
        seed: the seed.
        steps: number of steps.
        optim: settings of the exchange.
        assign: how samples are assigned to ranks.
    """
    return TrainConfig(
        run="trial",
        seed=seed,
        steps=steps,
        threads=1,
        spread_weight=0.3,
        average=0.98,
        data=DataConfig(store=store, train=["2001"], validation=["2002"]),
        model=ModelConfig(hidden=16, max_hidden=64, precision=Precision.float32),
        optim=OptimConfig(**({"weight_decay": 0.05} | optim)),
        loading=LoadingConfig(assign=assign),
    )


def network_alone(store: str, folder: Path, run: str, *, seed: int, steps: int, **model: Any) -> TrainConfig:
    """Return the settings of a training of the U-Net without the fits, which would hide what the network gains.

    Args:
        store: path of the tensor store.
        folder: folder of the runs.
        run: name of the run.
        seed: the seed.
        steps: number of steps; one checkpoint and one validation are after the last.
        **model: settings of the model.
    """
    size: dict[str, Any] = {"hidden": 16, "max_hidden": 64, "precision": Precision.float32} | NO_FITS | model
    return replace(
        quickstart_config(store, seed=seed, steps=steps, optim={}),
        run=run, output=str(folder), model=ModelConfig(**size),
        optim=OptimConfig(name=OptimName.adamw, beta2=0.999, lr=1e-3, weight_decay=0.05),
        validate_every=10**6, checkpoint_every=10**6, checkpoint_minutes=0, tracking=TrackingConfig(tensorboard=False),
    )  # fmt: skip


def prepare(config: TrainConfig) -> Run:
    """Fit the climate and make the loss and the model, with which all trainings of a seed begin.

    Args:
        config: the settings of the training.
    """
    torch.set_num_threads(1)
    source = open_store(config.data.store)
    reader = Reader(source, setup.build_spec(config, source))
    return assemble(config, reader, None, 1, _on_cpu(solo()))


def score(start: Run) -> float:
    """Return the CRPS ratio of the validation dates before the first step.

    Args:
        start: the result of `prepare`.
    """
    return Judge(start).scores(None).scores["crps_ratio"]


def _on_cpu(session: Session) -> Session:
    """Move the session to the CPU.

    On a GPU, one thread runs the backward pass of all threads, so a rank that waits for another would stop both.
    """
    session.device = torch.device("cpu")
    return session


Make = Callable[[Communicator], Exchange]  # makes the exchange of a rank


def train(
    config: TrainConfig,
    start: Run,
    ranks: int,
    *,
    every: int = 5,
    rate: float = 1e8,
    make: Make | None = None,
    score_every: int = 0,
) -> Training:
    """Train on `ranks` ranks, beginning with `start`.

    Args:
        config: the settings of the training.
        start: the result of `prepare`.
        ranks: number of ranks.
        every: number of steps between recorded losses, each of which is a mean over these steps.
        rate: bits a second of the links in the predicted time.
        make: makes the exchange of a rank; None makes that of the settings.
        score_every: steps between scores on the validation dates, at which all ranks have to meet; 0 for the end alone.
    """
    others = Room(ranks)

    def rank(group: Communicator) -> Training:
        session = _on_cpu(Session(World(), Topology(data=ranks, rank=group.rank), ParallelConfig()))
        shared = SimulatedCommunicator(others, group.rank)
        session.mesh = Mesh(session.topology, {("data",): shared, ("data", "lat", "lon"): shared})
        return _train(Trainer(_own(config, start, session, group, make), Path()), every, rate, ranks, score_every)

    return on_ranks(ranks, rank)[0]


def _own(config: TrainConfig, start: Run, session: Session, group: Communicator, make: Make | None) -> Run:
    """Return the run of one rank: its own weights, optimizer and reader, and its share of each batch."""
    model = copy.deepcopy(start.state.model)
    exchange = make(group) if make is not None else exchange_between(config.optim, group, NullCommunicator())
    optimizer, schedule = build(config.optim, model.param_groups(), config.steps, exchange)
    average = Average(model, config.average) if config.average else None
    state = State(model, optimizer, schedule, config.steps, start.state.spread_error, average, exchange)
    reader = Reader(start.reader.source, start.reader.spec)
    loss = replace(start.loss, ranks=session.mesh.spatial if exchange.slack else session.mesh.model)
    return replace(start, config=config, reader=reader, state=state, loss=loss, session=session)


def _train(trainer: Trainer, every: int, rate: float, ranks: int, score_every: int) -> Training:
    state, losses, momentum_bytes, curve = trainer.state, [], 0, dict[int, float]()
    state.model.train()
    began = time.thread_time()
    batches = _batches(trainer.setup, ranks)
    for batch in batches:
        found = trainer._step(trainer.judge.moved(batch))
        for values, _ in trainer.stepper.missed.values():
            losses.append(values["loss"])
            next(batches)
        losses.append(found["loss"])
        momentum_bytes += trainer.stepper.noted.get("bytes", 0)
        if score_every and state.step % score_every == 0:
            curve[state.step] = trainer.judge.scores(None).scores["crps_ratio"]
    work = (time.thread_time() - began + _beside(state.exchange)) / state.steps
    scores = trainer.judge.scores(None).scores
    state.exchange.close()
    sent = (getattr(state.exchange, "bytes_sent", 0) - momentum_bytes) / state.steps
    kept = range(every, len(losses) + 1, every)
    a_step = work + 8 * (sent + momentum_bytes / state.steps) / rate
    return Training(
        crps=scores["crps_ratio"],
        steps=tuple(kept),
        losses=tuple(sum(losses[i - every : i]) / every for i in kept),
        seconds=tuple(a_step * i for i in kept),
        sent_mb=sent / 1e6,
        momentum_bytes=momentum_bytes,
        curve=curve,
        weights={name: p.detach() for name, p in state.model.named_parameters()},
    )


def _beside(exchange: Exchange) -> float:
    """Return the seconds of work of an exchange's own thread, which packs and counts while the rank computes."""
    thread = getattr(exchange, "_thread", None)
    return 0.0 if thread is None else thread.submit(time.thread_time).result()


def _batches(run: Run, ranks: int) -> Iterator[Batch]:
    """Yield a rank's share of each batch, as the loader would assign it."""
    batches = run.batches(0, run.state.steps)
    schedule = Schedule(batches, parts=ranks)
    if run.config.loading.assign is Assign.locality:
        schedule = replace(schedule, holders=schedule.homes()[np.searchsorted(schedule.dates, batches.dates)])
    rank, _ = run.share
    for turn in schedule:
        yield collate(batches.reader, turn.read_by(rank), idle=turn.idle(rank))
