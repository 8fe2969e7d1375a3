"""Time training steps of one sample: on one rank, partitioned, as two separate halves, and by gathering the rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.spatial.gathered import gather_the_rows
from benchmarks.spatial.network import cut_input, network, part_spec, training_loss
from benchmarks.step.benchmark import benchmark_spec, random_batch
from ensemble_ml.config import OptimConfig
from ensemble_ml.distributed import Session
from ensemble_ml.distributed.choice import make_exchange
from ensemble_ml.distributed.communicator import Communicator, Pending
from ensemble_ml.distributed.mesh import Mesh
from ensemble_ml.distributed.overlap import Overlap
from ensemble_ml.distributed.partition import PartConvolution, partition_model
from ensemble_ml.distributed.topology import make_shard
from ensemble_ml.models import EnsembleInput, EnsembleModel, ModelSpec
from ensemble_ml.models.linear import LinearCorrection
from ensemble_ml.models.padding import Geometry
from ensemble_ml.optim import Lion

ONE, OURS, OVERLAP = "one rank", "shared out", "shared out, overlap"
HALVES, GATHER = "parts that never meet", "gather the rows"


@dataclass(eq=False)
class Clock:
    """The seconds that this rank spent in collectives of its spatial axes, including the time it waited."""

    seconds: float = 0.0


class TimedCommunicator:
    """A communicator that measures the time of halo exchanges."""

    def __init__(self, inner: Communicator, clock: Clock):
        self._inner, self._clock = inner, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_to_all_single(self, *args: Any, **settings: Any) -> Pending:
        """Start the exchange of the communicator inside, and add the time of the call to the clock.

        Waiting for what is returned adds its time, too. Arguments are those of `Communicator.all_to_all_single`.
        """
        began = time.perf_counter()
        pending = self._inner.all_to_all_single(*args, **settings)
        self._clock.seconds += time.perf_counter() - began
        return _TimedPending(pending, self._clock)


@dataclass(eq=False)
class _TimedPending:
    pending: Pending
    clock: Clock

    def wait(self) -> None:
        began = time.perf_counter()
        self.pending.wait()
        self.clock.seconds += time.perf_counter() - began


@dataclass(eq=False)
class Entrant:
    """A step, with its times so far. A barrier at the end makes each time that of the slowest rank."""

    step: Callable[[], object]
    close: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)


def race(session: Session, job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of several entrants, which take turns, with the halo's share of the time and the bytes of a step.

    The seconds of this rank's core, including its communication threads, are measured as well. A busy machine stretches
    the wall time, but hardly the core time.

    Args:
        session: the ranks.
        job: `entrants`, `repeats`, `precision`, and shape and settings of the network.
    """
    spec = benchmark_spec(*job["shape"], **job["config"])
    batch = random_batch(spec, 1)
    clock, world = Clock(), session.mesh.world
    entrants = {name: _entrant(name, session, clock, spec, batch, job["precision"]) for name in job["entrants"]}
    waits: dict[str, list[float]] = {name: [] for name in entrants}
    busy: dict[str, list[float]] = {name: [] for name in entrants}
    sent: dict[str, list[float]] = {name: [] for name in entrants}
    for repeat in range(job["repeats"] + 2):  # the first two create kernels, memory and connections
        for name, entrant in entrants.items():
            world.barrier()
            clock.seconds, before, began = 0.0, session.mesh.bytes_sent, time.perf_counter()
            computed = time.process_time()
            entrant.step()
            computed = time.process_time() - computed
            mine = time.perf_counter() - began
            world.barrier()
            if repeat >= 2:
                entrant.seconds.append(time.perf_counter() - began)
                waits[name].append(clock.seconds / mine)
                busy[name].append(computed)
                sent[name].append(session.mesh.bytes_sent - before)
    for entrant in entrants.values():
        entrant.close()
    return {
        "seconds": {name: entrant.seconds for name, entrant in entrants.items()},
        "core seconds": busy,
        "halo share": waits,
        "bytes": sent,
        **_halos(session, sent.get(OURS, ()), surface_bytes(session, spec, batch, job["precision"])),
    }


def _halos(session: Session, sent: Sequence[float], formula: int) -> dict[str, float]:
    """Return the bytes by the formula for all ranks together, and the total difference of the counts from it."""
    told = torch.tensor([formula, sum(abs(count - formula) for count in sent)], dtype=torch.float64)
    session.mesh.world.all_reduce(told)
    return {"formula": float(told[0]), "off": float(told[1])}


def _entrant(
    name: str, session: Session, clock: Clock, spec: ModelSpec, batch: EnsembleInput, precision: str
) -> Entrant:
    if name == ONE:
        if session.topology.rank:
            return Entrant(lambda: None)
        return Entrant(_stepper(network(spec, precision), batch))
    shard = make_shard(session.topology, spec.grid.shape, spec.config.depth)
    own = cut_input(shard, batch)
    if name == HALVES:
        return Entrant(_stepper(network(part_spec(spec, shard), precision), own))
    model = network(spec, precision)
    if name == GATHER:
        gather_the_rows(model, session.mesh)
    else:
        partition_model(model, timed(session.mesh, clock), Overlap(name == OVERLAP))
    exchange = make_exchange(OptimConfig(lr=1e-5), session.topology, local_size=session.world.local_size)
    return Entrant(_stepper(model, own, exchange), exchange.close)


def timed(mesh: Mesh, clock: Clock) -> Mesh:
    """Return the same mesh with timed halo exchanges.

    Args:
        mesh: the mesh.
        clock: collects the seconds.
    """
    groups = {axes: TimedCommunicator(comm, clock) if comm.size > 1 else comm for axes, comm in mesh.groups.items()}
    return Mesh(mesh.topology, groups)  # type: ignore[arg-type]


def _stepper(model: EnsembleModel, batch: EnsembleInput, exchange: Any = None) -> Callable[[], object]:
    optimizer = Lion(model.parameters(), lr=1e-5, **({} if exchange is None else {"exchange": exchange}))
    number = iter(range(10**6))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        if exchange is not None:
            exchange.begin(next(number))
        training_loss(model, batch).backward()
        if exchange is not None:
            assert exchange.finish().finite
        optimizer.step()

    return step


def surface_bytes(session: Session, spec: ModelSpec, batch: EnsembleInput, precision: str) -> int:
    """Return the bytes of halos that this rank sends in a step, computed from the surface of its part.

    The rank sends one row to each neighbour in latitude. It sends one column, including the rows beyond its ends, to
    each neighbour in longitude, and one row across each pole if longitude is partitioned. This happens once forward and
    once backward, unless nothing needs that gradient. If latitude is whole, rows across the poles bring their corners,
    which with two ranks are the rank's own.

    Args:
        session: the ranks.
        spec: the inputs and outputs of the model.
        batch: the whole batch.
        precision: name of the precision.
    """
    model = network(spec, precision)
    shard = partition_model(model, session.mesh)
    total, topology = 0, session.topology
    place = topology.place

    def count(geometry: Geometry, module: Any, given: tuple[Tensor, ...]) -> None:
        nonlocal total
        x = given[0]
        batch, channels, rows, columns, planes = (*x.shape, 1)[:5]
        low = torch.is_autocast_enabled("cpu") and isinstance(module, PartConvolution) and module.part_overlap.on
        itemsize = 2 if low else x.element_size()
        lines = 0
        if topology.lat > 1:
            lines += columns * ((place.lat > 0) + (place.lat < topology.lat - 1))
        if topology.lon > 1:
            inner = 2 if geometry.wraps else (place.lon > 0) + (place.lon < topology.lon - 1)
            poles = (place.lat == 0, geometry.north), (place.lat == topology.lat - 1, geometry.south)
            crossed = sum(here and rule.beyond.value == "mirror" for here, rule in poles)
            own_corners = 2 * inner if topology.lat == 1 and topology.lon == 2 and crossed == 2 else 0
            lines += (rows + 2) * inner + columns * crossed - own_corners
        total += lines * batch * channels * planes * itemsize * (1 + x.requires_grad)

    for module in model.modules():
        if isinstance(module, PartConvolution | LinearCorrection):
            # This module receives a field without its rim.
            bare = module if isinstance(module, PartConvolution) else module.pad
            bare.register_forward_pre_hook(partial(count, module.pad.geometry))
    model(cut_input(shard, batch))
    return total
