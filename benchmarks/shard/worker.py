"""One rank of the benchmark of large networks: `python -m benchmarks.shard.worker JOB OUT`.

JOB is a JSON object with `work`, the degrees `data`, `lat` and `lon`, and settings.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.jobs import take_part
from benchmarks.common.memory import peak_bytes
from benchmarks.common.turns import take_turns
from benchmarks.spatial.network import cut_input, network, perturbed, small_case, training_loss, weighted_loss
from benchmarks.step.benchmark import benchmark_spec, random_batch
from ensemble_ml.config import Backend, DataConfig, Launcher, OptimConfig, OptimName, ParallelConfig, TrainConfig
from ensemble_ml.distributed import Session, Topology
from ensemble_ml.distributed.choice import consecutive_groups, make_exchange, process_group
from ensemble_ml.distributed.communicator import TorchCommunicator
from ensemble_ml.distributed.partition import partition_model
from ensemble_ml.distributed.sharding import local, shard_weights, shards_of, split_groups, whole
from ensemble_ml.models import EnsembleInput, EnsembleModel, ModelSpec, Speed
from ensemble_ml.models.unet3d import ResidualBlock
from ensemble_ml.optim import Exchange, build
from ensemble_ml.training.rehearsal import Rehearsal, trace

OURS, KEPT, ONE_UNIT, DDP = "sharded by block", "kept after the forward pass", "sharded as one unit", "DDP"
RECOMPUTE = (False, True)  # networks that are compared in one job
_RATE = 1e-2


def shared(
    session: Session, model: EnsembleModel, shards: int, *, after_forward: bool = True, by_block: bool = True
) -> None:
    """Shard the weights of a model over consecutive ranks.

    Args:
        session: the ranks.
        model: the model.
        shards: ranks that share the weights.
        after_forward: as of `shard_weights`.
        by_block: as of `shard_weights`.
    """
    groups = consecutive_groups(session.topology, shards, process_group)
    shard_weights(model, session.mesh, *groups, after_forward=after_forward, by_block=by_block)


def _most(session: Session, values: Sequence[float]) -> list[float]:
    """Return the largest of each value over all ranks; NaN becomes infinity."""
    worst = torch.tensor([v if v == v else torch.inf for v in values], dtype=torch.float64)
    session.mesh.world.all_reduce(worst, op="max")
    return worst.tolist()


def exactness(session: Session, job: dict[str, Any]) -> list[dict[str, float]]:
    """Compare sharded weights with one process in float64: predictions, gradients and a step of each optimizer.

    Args:
        session: the ranks.
        job: `shards`.

    Returns:
        Largest errors over ranks, for each of `RECOMPUTE`: of predictions and gradients relative to the largest value,
        of weights in steps.
    """
    return [_errors(session, job["shards"], recompute=recompute) for recompute in RECOMPUTE]


def _errors(session: Session, shards: int, *, recompute: bool) -> dict[str, float]:
    """Return the largest errors of one network."""
    found: dict[str, float] = {}
    for kind in OptimName:
        errors = _compared(session, shards, kind, recompute=recompute)
        names = "forward", "weight gradient", f"step of {kind.value}"
        for name, error in zip(names, _most(session, errors), strict=True):
            found[name] = max(error, found.get(name, 0.0))
    return found


def _compared(session: Session, shards: int, kind: OptimName, *, recompute: bool) -> tuple[float, float, float]:
    """Return this rank's largest errors of predictions, gradients and weights after a step."""
    topology = session.topology
    spec, _ = small_case(topology.lat, topology.lon, even=True)
    batch = random_batch(spec, max(2, topology.data)).to(torch.float64)
    alone = perturbed(spec).double()
    mine = copy.deepcopy(alone)
    for module in mine.modules():
        if isinstance(module, ResidualBlock):
            module.recompute = recompute
    shard = partition_model(mine, session.mesh)
    shared(session, mine, shards)
    config = OptimConfig(name=kind, lr=_RATE, warmup=0, clip=0.0)
    exchange = make_exchange(config, topology)
    optimizer, _ = build(config, split_groups(mine.param_groups()), 10, exchange)
    before, _ = build(config, alone.param_groups(), 10)
    exchange.begin(0)
    part = slice(topology.place.data, None, topology.data)
    expected, got = alone(batch), mine(_samples(cut_input(shard, batch), part))
    weighted_loss(expected, None, spec).backward()
    weighted_loss(got, shard, spec).backward()
    forward = max(
        _error(getattr(got, n), shard.cut(getattr(expected, n))[part]) for n in ("location", "scale", "spread")
    )
    inner = [(p, q) for p, q in zip(alone.parameters(), mine.parameters(), strict=True) if shards_of(q) is not None]
    gradients = max(_error(whole(q.grad), p.grad) for p, q in inner)
    exchange.finish()
    optimizer.step()
    before.step()
    # Where a gradient is as good as zero, its sign, and with it a step of Lion, is a matter of rounding.
    sure = [p.grad.abs() > 1e-9 * p.grad.abs().mean() for p, _ in inner if p.grad is not None]
    steps = [((p - whole(q)).abs() * at).max().item() / _RATE for (p, q), at in zip(inner, sure, strict=True)]
    exchange.close()
    return forward, gradients, max(steps)


def _samples(x: EnsembleInput, part: slice) -> EnsembleInput:
    """Return some samples of a batch."""
    return replace(x, **{name: value[part] for name, value in vars(x).items() if value is not None})


def _error(found: Tensor, expected: Tensor | None) -> float:
    """Return the largest error relative to the largest value."""
    assert expected is not None
    return float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max())


def memory(session: Session, job: dict[str, Any]) -> list[dict[str, float]]:
    """Compare the peak memory of a step of sharded weights with what the plan says.

    Args:
        session: the ranks, all of the data axis.
        job: `shape` and `config`.

    Returns:
        For each of `RECOMPUTE`, `planned` and `measured` bytes beyond weights, optimizer and batch; the latter of the
        rank with most.
    """
    specs = [benchmark_spec(*job["shape"], **job["config"], recompute=recompute) for recompute in RECOMPUTE]
    return [_peaks(session, spec) for spec in specs]


def _peaks(session: Session, spec: ModelSpec) -> dict[str, float]:
    """Return planned and measured bytes of one network."""
    shards = session.topology.data
    torch.manual_seed(0)
    mine = Rehearsal(_run(1), spec, session.mesh, 1, Speed())
    shared(session, mine.model, shards)
    mine.step()  # FSDP2 makes its lists in the first one
    mine.model.zero_grad(set_to_none=True)
    [measured] = _most(session, [peak_bytes(mine.step)])
    planned = trace(_run(shards), spec, Topology(data=shards), 1, Speed()).activations
    return {"planned": planned, "measured": measured}


def _run(shards: int) -> TrainConfig:
    return TrainConfig(run="a", data=DataConfig(store="none"), parallel=ParallelConfig(shard=shards))


@dataclass(eq=False)
class Entrant:
    """A way to hold the weights of a network on several ranks, with its optimizer and its step."""

    model: nn.Module
    optimizer: Any
    batch: EnsembleInput
    exchange: Exchange | None = None  # of gradients that are neither sharded nor DDP's to sum
    taken: int = 0

    def step(self) -> None:
        """Run a training step."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.exchange is not None:
            self.exchange.begin(self.taken)
        training_loss(self.model, self.batch).backward()
        if self.exchange is not None:
            self.exchange.finish()
        self.optimizer.step()
        self.taken += 1

    @property
    def held(self) -> int:
        """Return the bytes of weights, gradients and momenta of this rank after a step."""
        kept = [t for p in self.model.parameters() for t in (p, p.grad, self.optimizer.momentum(p)) if t is not None]
        return sum(local(t).numel() * t.element_size() for t in kept)


def steps(session: Session, job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of all ways to hold the weights, which take turns, and measure their memory.

    Args:
        session: the ranks, all of the data axis, with a sample each.
        job: `repeats`, `shape` and `config`.

    Returns:
        By entrant: seconds of each step, most bytes that a rank holds after a step, and most bytes that a step takes
        beyond these.
    """
    spec = benchmark_spec(*job["shape"], **job["config"])
    held: dict[str, float] = {}
    peak: dict[str, float] = {}
    entrants = {name: _entrant(name, session, spec) for name in (OURS, KEPT, ONE_UNIT, DDP)}
    seconds = take_turns({k: v.step for k, v in entrants.items()}, job["repeats"], around=session.mesh.world.barrier)
    for name, entrant in entrants.items():
        session.mesh.world.barrier()
        held[name], peak[name] = _most(session, [entrant.held, _peak_of(entrant)])
    return {"seconds": seconds, "held": held, "peak": peak}


def _peak_of(entrant: Entrant) -> int:
    """Return the peak of a step beyond weights and momenta; of gradients, those of this step alone are in it."""
    entrant.optimizer.zero_grad(set_to_none=True)
    return peak_bytes(entrant.step)


def _entrant(name: str, session: Session, spec: ModelSpec) -> Entrant:
    model: nn.Module = network(spec)
    assert isinstance(model, EnsembleModel)
    group, exchange, config = session.mesh.model, None, OptimConfig(lr=1e-5, warmup=0, clip=0.0)
    assert isinstance(group, TorchCommunicator)
    if name == DDP:
        groups = model.param_groups()
        model = nn.parallel.DistributedDataParallel(model, process_group=group.group)
    else:
        shared(session, model, session.topology.data, after_forward=name != KEPT, by_block=name != ONE_UNIT)
        groups = split_groups(model.param_groups())
        exchange = make_exchange(config, session.topology)
    optimizer, _ = build(config, groups, 10**6, exchange)
    return Entrant(model, optimizer, random_batch(spec, 1), exchange)


WORK: dict[str, Callable[[Session, dict[str, Any]], Any]] = {"exactness": exactness, "memory": memory, "steps": steps}


def _config(job: dict[str, Any]) -> ParallelConfig:
    degrees = {axis: job.get(axis, 1) for axis in ("data", "lat", "lon")}
    return ParallelConfig(**degrees, launcher=Launcher.torchrun, backend=Backend.gloo, timeout=600.0, silence=60.0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    take_part(lambda session, job: WORK[job["work"]](session, job), _config)
