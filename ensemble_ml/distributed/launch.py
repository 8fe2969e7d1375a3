"""A job of several ranks, from its first hello to its end: nobody is left waiting for a rank that is gone.

    with start(config.parallel) as session:      # session.mesh, session.topology
        session.step = 17                        # told where something fails

Rank 0 serves a small key-value store (torch's TCPStore, `meeting.py`), which the process group is initialised through
and in which the ranks watch over each other (`watch.py`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from ensemble_ml.config import Backend, ParallelConfig
from ensemble_ml.distributed.meeting import MEETING, meet
from ensemble_ml.distributed.mesh import Mesh, be_patient, dissolve, make_mesh
from ensemble_ml.distributed.topology import Topology, make_topology
from ensemble_ml.distributed.watch import LAST, Watch
from ensemble_ml.distributed.world import World, read_world
from ensemble_ml.errors import Stopped, UserError
from ensemble_ml.models.speed import device_name

T = TypeVar("T")
_log = logging.getLogger("ensemble_ml")
_LOOK, _RARELY = 0.02, 0.5  # seconds between looks at the store, at first and in the end: rank 0 serves it to all ranks


def start(config: ParallelConfig, env: dict[str, str] | None = None) -> Session:
    """Read the launcher's variables, meet the other ranks and make the mesh; one rank meets nobody.

    Raises:
        UserError: the variables disagree, the degrees do not fit the number of ranks, or a rank does not come.
    """
    world = read_world(dict(os.environ) if env is None else env, config.launcher)
    topology = make_topology(config, rank=world.rank, size=world.size)
    return Session(world, topology, config)


def solo() -> Session:
    """One rank alone, whatever the variables say."""
    return Session(World(), Topology(), ParallelConfig())


class Session:
    """One rank's part in a job, as a context manager."""

    def __init__(self, world: World, topology: Topology, config: ParallelConfig):
        self.world, self.topology, self.config = world, topology, config
        self.mesh = Mesh(topology)
        self.step = 0
        self.device = _device(world)
        self._watch: Watch | None = None
        self._level: int | None = None  # of the log before
        self._store: Any = None
        self._once = 0

    def share_out(self, topology: Topology) -> None:
        """Take another mesh over the same ranks, in place of the one before, which is destroyed; all of them call this
        with the same degrees."""
        before = self.mesh
        self.topology = topology.at(self.world.rank)
        self.mesh = make_mesh(self.topology) if self.world.size > 1 else Mesh(self.topology)
        dissolve(before.groups.values(), self.mesh.world)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and says things."""
        return self.topology.rank == 0

    def once(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on rank 0, on every rank; it may take any time."""
        if self.world.size == 1:
            return compute()
        self._once += 1
        key = f"once/{self._once}"
        payload = b""
        if self.first:
            payload = pickle.dumps(compute())
            self._store.set(key, str(len(payload)))
        _until(lambda: self._store.check([key]))  # not in a collective, whose patience has an end
        size = int(self._store.get(key))
        if self.first:
            message = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
        else:
            message = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.mesh.world.broadcast(message)
        return pickle.loads(message.cpu().numpy().tobytes())

    def agree(self, what: Mapping[str, Any], remedy: str = "give every rank the same") -> None:
        """Let all ranks come with the same values, by name; every rank calls this.

        Raises:
            UserError: this rank's differ from those of rank 0; names the first, and the `remedy`.
        """
        if self.world.size == 1:
            return
        self._once += 1
        key, mine = f"once/{self._once}", {name: str(value) for name, value in what.items()}
        if self.first:
            self._store.set(key, json.dumps(mine))
        _until(lambda: self._store.check([key]))
        theirs = json.loads(self._store.get(key))
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                raise UserError(
                    f"rank {self.topology.rank}: {name}={mine.get(name)}, on rank 0 {name}={theirs.get(name)}; {remedy}"
                )

    def on_one_host(self, ranks: Sequence[int]) -> bool:
        """Whether all of `ranks` run where this one does."""
        own = socket.gethostname().encode()
        return self.world.size == 1 or all(self._store.get(f"host/{rank}") == own for rank in ranks)

    def meet(self) -> None:
        """Return when all ranks have come here; like `once`, it may take any time."""
        if self.world.size == 1:
            return
        self._once += 1
        key = f"once/{self._once}"
        self._store.add(key, 1)
        _until(lambda: self._store.add(key, 0) == self.world.size)

    def __enter__(self) -> Self:
        if self.world.size == 1:
            if self.config.backend is Backend.nccl:
                _backend(Backend.nccl, self.world, self.device.type == "cuda")
            _tell_where([device_name(self.device)], self.device, "one rank")
            return self
        host, port = self.world.host, self.world.port
        across = False  # whether hosts are being joined by gloo, which reaches each by what its own name leads to there
        try:
            # Where ranks may be late for an exchange they may be late at the start, too.
            patience = max(MEETING, timedelta(seconds=self.config.timeout))
            meeting = meet(self.world, patience)
            host, port = meeting.host, meeting.port
            store, own = meeting.connect(self.world.size), meeting.connect(self.world.size)
            _come(store, self.world)
            self._watch = Watch(own, self.world.rank, self.world.size, self.config.silence, lambda: self.step)
            _all_come(store, self.world, patience)
            _check_agreement(store, self.topology)
            kinds = _devices(store, self.world, self.device)
            if not self.world.counted:  # as if all shared one node's cores and memory
                self.world = replace(self.world, local_size=kinds["hosts"][socket.gethostname()])
            backend = _backend(self.config.backend, self.world, kinds["apart"], kinds["shared"])
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # where host memory goes through the GPU, it goes through ours
            be_patient(self.config.timeout)
            across = backend == "gloo" and len(kinds["hosts"]) > 1
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=self.world.rank,
                world_size=self.world.size,
                timeout=timedelta(seconds=self.config.timeout),
                device_id=self.device if backend == "nccl" else None,
            )
            self._store = store
            self.mesh = make_mesh(self.topology)
            across = False
            if self.first:
                hosts = len(kinds["hosts"])
                who = f"{self.world.size} ranks on {hosts} host{'s' * (hosts > 1)}"
                _tell_where(kinds["names"], self.device, who, f", {backend}")
        except BaseException as error:
            self._fail(error)
            if across and isinstance(error, RuntimeError):
                raise UserError(_unreached(self.world.rank, error)) from error
            if isinstance(error, dist.DistError):
                raise UserError(
                    f"rank {self.world.rank}: cannot meet the others at {host}:{port}: {error}; where the port is"
                    " taken, set MASTER_PORT to a free one on all ranks"
                ) from error
            raise
        if not self.first:  # what all would say, one says; warnings come from all
            self._level = _log.level
            _log.setLevel(logging.WARNING)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._level is not None:
            _log.setLevel(self._level)
        if self._watch is None:
            return
        if error is not None and not (isinstance(error, Stopped) and error.together):
            self._fail(error)
        else:
            self._watch.leave()
            dist.destroy_process_group()
        if isinstance(error, Stopped) and error.requeue and self.first:
            time.sleep(LAST)

    def report(self, error: BaseException) -> None:
        """Tell the others of a failure at once, before this rank has let go of what it holds, which may take long; the
        error has to be raised on. What all ranks may meet at the same step (a user's mistake, gradients that are not
        finite, an interruption) waits for the end of the session, so that each says it itself."""
        if self._watch is not None and not isinstance(error, UserError | KeyboardInterrupt):
            self._watch.report(error)

    def _fail(self, error: BaseException) -> None:
        """Tell the others; where the failure only echoes another rank's, that rank is named and this one leaves."""
        if self._watch is not None:
            self._watch.fail(error)


def _device(world: World) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def _devices(store: Any, world: World, device: torch.device) -> dict[str, Any]:
    """What the ranks compute on: `apart`, whether each has a GPU of its own (as many as ranks on each host, or one that
    its launcher lets it see), a host and its ranks where one GPU is `shared`, their `names`, and how many ranks each of
    the `hosts` has.

    Raises:
        UserError: some ranks have a GPU and others have none, which would compute at the speed of these.
    """
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"gpu/{world.rank}", json.dumps([socket.gethostname(), gpu, device_name(device)]))
    if world.rank == 0:  # one asks for all, or a large job would begin with a question for each pair of ranks
        every = [json.loads(store.get(f"gpu/{rank}")) for rank in range(world.size)]
        without = [rank for rank, (_, own, _) in enumerate(every) if not own]
        holders: dict[tuple[str, str], list[int]] = {}
        for rank, (host, own, _) in enumerate(every):
            holders.setdefault((host, own), []).append(rank)
        apart = len(holders) == world.size and not without
        shared = next(((host, ranks) for (host, own), ranks in holders.items() if own and len(ranks) > 1), None)
        names = sorted({name for _, own, name in every if own} or {name for *_, name in every})
        lacking = without if len(without) < world.size else []
        hosts = Counter(host for host, *_ in every)
        told = {"apart": apart, "shared": shared, "names": names, "hosts": hosts, "lacking": lacking}
        store.set("gpus", json.dumps(told))
    found: dict[str, Any] = json.loads(store.get("gpus"))
    if found["lacking"]:
        some = ", ".join(map(str, found["lacking"][:8]))
        raise UserError(
            f"ranks without a GPU: {some}; the others have {', '.join(found['names'])}; give every task one"
            " (SLURM: --gpus-per-node), or none (CUDA_VISIBLE_DEVICES=)"
        )
    return found


def _unreached(rank: int, error: RuntimeError) -> str:
    """What to do where gloo does not reach the ranks of other hosts."""
    name, address = socket.gethostname(), "no address"
    with suppress(OSError):
        address = socket.gethostbyname(name)
    return (
        f"rank {rank}: gloo does not reach the ranks of other hosts ({' '.join(str(error).split())[:200]}); it tells"
        f" them the address of this host's own name, {name}, which is {address} here; set GLOO_SOCKET_IFNAME (now"
        f" {os.environ.get('GLOO_SOCKET_IFNAME', 'not set')}) to the network interface that joins the hosts, as eth0,"
        " on all ranks"
    )


def _tell_where(names: Sequence[str], device: torch.device, who: str, how: str = "") -> None:
    """Say what computes, where that is a GPU, or several ranks, or a GPU might have been meant."""
    blind = device.type == "cpu" and torch.version.cuda is not None
    if device.type == "cuda" or how or blind:
        none = "; this torch is for GPUs, and sees none" if blind else ""
        _log.info("%s: %s%s%s", who, ", ".join(names), how, none)


def _backend(wanted: Backend, world: World, gpus_apart: bool, shared: tuple[str, list[int]] | None = None) -> str:
    """The library: NCCL needs a GPU for each rank.

    Raises:
        UserError: NCCL is asked for and cannot be had.
    """
    enough = gpus_apart and dist.is_nccl_available()
    if wanted is Backend.nccl and not enough:
        if gpus_apart:
            raise UserError("parallel.backend=nccl: this torch has no NCCL; use one that has, or parallel.backend=gloo")
        seen = f"{world.local_size} ranks on this host and {torch.cuda.device_count()} GPUs to see"
        if shared is not None:
            host, ranks = shared
            seen = f"ranks {', '.join(map(str, ranks))} share a GPU of {host}"
        raise UserError(
            f"parallel.backend=nccl: {seen}; one GPU holds one rank; start fewer ranks, or use parallel.backend=gloo"
        )
    if wanted is Backend.auto:
        return "nccl" if enough else "gloo"
    return wanted.value


def _until(done: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Look again and again until `done`; whether that was within `seconds`.

    Signals are heard meanwhile, as they are not within a call of the store.
    """
    latest, wait = time.monotonic() + seconds, _LOOK
    while not done():
        if time.monotonic() > latest:
            return False
        time.sleep(wait)
        wait = min(1.2 * wait, _RARELY)
    return True


def _come(store: Any, world: World) -> None:
    """Say that this rank is here.

    Raises:
        UserError: all are here already. They are another job's, and must not hear of this one's failure.
    """
    if store.add("come", 1) > world.size:
        raise UserError(
            f"rank {world.rank}: {world.size} ranks have met at {world.host}:{world.port} already, of another job; set"
            " MASTER_PORT to a free port on all ranks"
        )
    store.set(f"host/{world.rank}", socket.gethostname())


def _all_come(store: Any, world: World, patience: timedelta) -> None:
    """Wait for the other ranks.

    Raises:
        UserError: some do not come; says which.
    """
    if not _until(lambda: store.add("come", 0) >= world.size, patience.total_seconds()):
        absent = [rank for rank in range(world.size) if not store.check([f"host/{rank}"])]
        raise UserError(
            f"rank {world.rank}: {len(absent)} of {world.size} ranks (first {absent[:5]}) have not come in"
            f" {patience.total_seconds():.0f} s; start all of them, and look at what those say"
        )


def _check_agreement(store: Any, topology: Topology) -> None:
    """Every rank must have made the same mesh.

    Raises:
        UserError: this rank's degrees differ from those of rank 0.
    """
    if topology.rank == 0:
        store.set("mesh", str(topology))
    first = store.get("mesh").decode()
    if first != str(topology):
        raise UserError(
            f"rank {topology.rank}: its mesh is {topology}, rank 0 has {first}; give every rank the same settings"
        )
