"""Measures the local work of a training step at the shard shapes of partitions, on all ranks of a node at once.

Times are kept on disk, under a hash of what they depend on: machine, code, model, optimizer, shape and ranks (`_kept`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ensemble_ml.config import Launcher, OptimConfig, ParallelConfig, Precision, TrainConfig
from ensemble_ml.distributed import Session, Topology, start
from ensemble_ml.distributed.choice import make_exchange
from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.distributed.costs import Known, Links, Piece, measured_links
from ensemble_ml.distributed.echo import Traffic, echo_mesh, echoes, without_quorum
from ensemble_ml.distributed.exchange import Arrivals, BucketExchange
from ensemble_ml.distributed.mesh import Members, dissolve, make_mesh
from ensemble_ml.distributed.world import free_port
from ensemble_ml.errors import UserError
from ensemble_ml.folders import hash_of_code, user_cache, write_whole
from ensemble_ml.machine import keep_freed_memory, processors
from ensemble_ml.models import ModelSpec, choose
from ensemble_ml.models.speed import Speed, device_name, settle
from ensemble_ml.models.speed import candidates as speeds
from ensemble_ml.optim import Exchange, build
from ensemble_ml.training.rehearsal import Rehearsal

log = logging.getLogger(__name__)

_VISITS = 3  # rounds in which every shape is measured once: the speed of a shared machine changes within minutes
_CODE = hash_of_code("training", "models", "distributed", "optim")
_LEAST, _MOST = 2, 4  # fewest and most timed steps of a shape in a round
_PROCESS = (
    "import sys, pathlib; from ensemble_ml.training.probing import main;"
    " main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3]))"
)


@dataclass(frozen=True)
class Shape:
    """A shape to measure: a topology, seen from one rank, and the samples of this rank in a step."""

    topology: Topology
    samples: int


@dataclass(frozen=True)
class Job:
    """A list of measurements for the processes of one node.

    Attributes:
        config: settings of the run.
        spec: the model's spec.
        shapes: the shapes at which a step is timed.
        seconds: time for all shapes. If no time is on disk, at least one shape is measured.
        folder: the folder in which times are kept; None for none.
        gflops: speed from the settings; if it is not zero, no step is timed.
        links: measure the links between the ranks, too.
    """

    config: TrainConfig
    spec: ModelSpec
    shapes: tuple[Shape, ...]
    seconds: float
    folder: Path | None
    gflops: float
    links: bool


@dataclass(frozen=True)
class Found:
    """The measurements of a job, by the position of the shape.

    Attributes:
        pieces: local work of the shapes for which there was time.
        links: the links of all shapes; empty if `Job.links` is not set.
    """

    pieces: dict[int, Piece]
    links: dict[int, Links]


def probe(job: Job, session: Session) -> Found:
    """Make the measurements of a job on the ranks of a session, the same on all. All of them must call this."""
    deadline = time.perf_counter() + job.seconds
    shapes = () if job.gflops else job.shapes
    paths = [_kept(job, shape, session) for shape in shapes]
    known = [session.once(lambda path=path: _load(path)) for path in paths]  # type: ignore[misc]
    steps: dict[int, list[list[float]]] = {number: [] for number, piece in enumerate(known) if piece is None}
    for _ in range(_VISITS):
        for number, found in steps.items():
            # All ranks must make the same measurements, so the first rank's clock decides.
            late = session.once(lambda: [time.perf_counter() > deadline])[0]
            if not late or not (any(known) or any(steps.values())):
                found += _timed(job, _own(shapes[number], session), session, job.seconds / len(steps) / _VISITS)
    pieces = {number: piece for number, piece in enumerate(known) if piece is not None}
    for number, found in steps.items():
        if found:
            pieces[number] = _piece(found)
            _keep(pieces[number], paths[number] if session.first else None)
    return Found(pieces, _links(job, session) if job.links else {})


def _links(job: Job, session: Session) -> dict[int, Links]:
    """Measure the links of each shape's mesh.

    If the number of started ranks is not the planned one, these are the links between all started ranks.
    """
    meshes: dict[Members, Communicator] = {}
    known: Known = {}
    found: dict[int, Links] = {}
    for number, shape in enumerate(job.shapes):
        same = shape.topology.size == session.topology.size
        topology = shape.topology if same else Topology(lat=session.topology.size)
        mesh = make_mesh(topology.at(session.topology.rank), meshes)
        found[number] = measured_links(mesh, known, session.device)
        if not same:
            found[number] = {("lon",): found[number][("lat",)], **found[number]}
    dissolve(meshes.values(), session.mesh.world)
    return found


def _own(shape: Shape, session: Session) -> Shape:
    """Return the shape that this rank measures.

    If the number of started ranks is not the planned one, it is the shape of the busiest rank.
    """
    if shape.topology.size != session.topology.size:
        return shape
    return Shape(shape.topology.at(session.topology.rank), shape.samples)


def _timed(job: Job, shape: Shape, session: Session, seconds: float) -> list[list[float]]:
    """Return the seconds of a few steps, as `stepper` returns them; each is that of the slowest rank."""
    traffic = Traffic()
    speed = speeds(session.device, job.config.model.precision)[0]
    rehearse = partial(Rehearsal, spec=job.spec, mesh=echo_mesh(shape.topology, traffic), samples=shape.samples,
                       device=session.device, traffic=traffic)  # fmt: skip
    if job.config.model.precision is Precision.auto:
        # As in training, the speed is chosen before weights are sharded, because shards take its precision.
        whole = replace(job.config, parallel=replace(job.config.parallel, shard=1))
        speed = _fastest(rehearse(whole, speed=speed), session)
    rehearsal = rehearse(job.config, speed=speed)
    optim = replace(without_quorum(job.config.optim), hierarchical=False)  # nobody knows which ranks share a node
    exchange = make_exchange(optim, shape.topology, local_size=1, connect=echoes(Traffic()))
    step = stepper(optim, rehearsal, exchange)
    found: list[list[float]] = []
    count = _LEAST + 1
    while len(found) < count:
        # All ranks start together, so that they share the machine as in training.
        session.mesh.world.barrier()
        slowest = torch.tensor(step(), dtype=torch.float64)
        session.mesh.world.all_reduce(slowest, op="max")
        found.append(slowest.tolist())
        if len(found) == 2:  # the first step prepares kernels, so the second one shows the speed
            count = min(_MOST + 1, max(count, int(seconds / max(found[1][0], 1e-6))))
    exchange.close()
    del rehearsal, step, exchange
    gc.collect()  # hooks make reference cycles, which would keep a whole model alive
    return found[1:]


def _piece(steps: Sequence[Sequence[float]]) -> Piece:
    """Return the local work from the times of several steps, by their medians."""
    seconds, backward, *ready = (statistics.median(values) for values in zip(*steps, strict=True))
    return Piece(seconds, backward, tuple(min(1.0, r / backward) for r in ready))


def _keep(piece: Piece, path: Path | None) -> None:
    """Write a measured piece to disk, or warn if that is impossible."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(piece)))
    except OSError as error:  # for example a home folder that jobs may not write to
        log.warning("plan: times cannot be kept in %s (%s), so they are measured again each time", path, error)


def _fastest(rehearsal: Rehearsal, session: Session) -> Speed:
    """Return the speed that training would choose; all ranks take that of the first."""
    own = choose(rehearsal.model, rehearsal.step, wanted=Precision.auto)
    return session.once(lambda: own)


def stepper(config: OptimConfig, rehearsal: Rehearsal, exchange: Exchange) -> Callable[[], list[float]]:
    """Return a training step that measures itself.

    Returns:
        A function that takes a step and returns seconds: of the whole step, of the backward pass, and from the start of
        the backward pass until each bucket of gradients was ready (until its end if there are no buckets).
    """
    device = rehearsal.device
    optimizer, _ = build(config, rehearsal.model.param_groups(), 1, exchange)
    stamps: list[float] = []
    arrivals = None
    if isinstance(exchange, BucketExchange):
        exchange.ready()
        # Buckets are sent during the backward pass. The time at which each is ready decides how much of its exchange
        # overlaps with computation.
        arrivals = Arrivals(exchange.params, exchange.buckets, lambda _: stamps.append(_now(device)))

    def step() -> list[float]:
        """Take a step and return its times."""
        stamps.clear()
        begin = _now(device)
        optimizer.zero_grad(set_to_none=True)
        exchange.begin(0)
        if arrivals is not None:
            arrivals.begin()
        losses = rehearsal.loss(rehearsal.model(rehearsal.batch.inputs), rehearsal.batch)
        middle = _now(device)
        losses["loss"].backward()
        end = _now(device)
        if arrivals is not None:
            arrivals.flush()
        ready = [stamp - middle for stamp in stamps] or [end - middle]
        exchange.finish()
        optimizer.step()
        return [_now(device) - begin, end - middle, *ready]

    return step


def _now(device: torch.device) -> float:
    """Wait until a device has done all its work, and return the time."""
    settle(device)
    return time.perf_counter()


def _kept(job: Job, shape: Shape, session: Session) -> Path | None:
    """Return the file for the times of a shape, named by a hash of what they depend on; None if there is no folder."""
    if job.folder is None:
        return None
    machine = [device_name(session.device), sorted(processors()), os.cpu_count()]
    facts: list[Any] = [machine, torch.__version__, torch.get_num_threads(), session.topology.size]
    spec = job.spec.to_json()
    optim = job.config.optim
    facts += [spec, shape.topology.shape, shape.samples, optim.name.value, optim.exchange.value]
    facts += [optim.bucket_mb, optim.bits, optim.scale.value, optim.clip, optim.clip_by.value, optim.rank]
    facts += [shape.topology.size == session.topology.size, job.config.parallel.shard]
    facts += [session.world.local_size, _CODE]
    return job.folder / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.json"


def _load(path: Path | None) -> Piece | None:
    """Return a piece from disk, or None."""
    if path is None:
        return None
    try:
        plain = json.loads(path.read_text())
        return Piece(plain["seconds"], plain["backward"], tuple(plain["ready"]))
    except (OSError, ValueError, KeyError, TypeError):  # the file is absent or cut off
        return None


def cache_folder(wanted: str | None) -> Path | None:
    """Return `wanted`, or the folder of the user's cache for measured times; None if there is none."""
    return Path(wanted) if wanted is not None else user_cache("plan")


def measured_here(job: Job, processes: int, threads: int) -> Found:
    """Make the measurements of a job on processes that are started for it on this machine, each with some threads.

    Raises:
        UserError: one of the processes failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "job", Path(folder) / "found"
        given.write_bytes(pickle.dumps(job))
        common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"OMP_NUM_THREADS": str(threads), "LOCAL_WORLD_SIZE": str(processes)}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # or they would use the store of our own launcher
        command = [sys.executable, "-c", _PROCESS, str(given), str(out), str(threads)]
        environments = [{"RANK": str(r), "LOCAL_RANK": str(r)} | common for r in range(processes)]
        # Errors go into files: a process with a full pipe would stop, and all others would wait for it.
        errors = [Path(folder) / f"{rank}.err" for rank in range(processes)]
        started = [_start(command, *given_to) for given_to in zip(environments, errors, strict=True)]
        try:
            for process in started:
                process.wait()
        finally:
            for process in started:
                if process.poll() is None:  # it still runs only if this process was interrupted
                    process.kill()
                    process.wait()
        for process, path in zip(started, errors, strict=True):
            if process.returncode:
                last = " | ".join(path.read_text(errors="replace").strip().splitlines()[-2:])
                raise UserError(f"plan: a measuring process ended with status {process.returncode}: {last}")
        return pickle.loads(out.read_bytes())


def _start(command: Sequence[str], environment: dict[str, str], errors: Path) -> subprocess.Popen[bytes]:
    """Start a process with its errors in a file."""
    with errors.open("wb") as file:
        return subprocess.Popen(list(command), env=os.environ | environment, stderr=file, stdout=subprocess.DEVNULL)


def main(given: Path, out: Path, threads: int) -> None:
    """Run one process of `measured_here` on the job in the file `given`. The first rank writes the result to `out`."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    job = pickle.loads(given.read_bytes())
    with start(ParallelConfig(launcher=Launcher.torchrun)) as session:
        found = probe(job, session)
        if session.first:
            out.write_bytes(pickle.dumps(found))
