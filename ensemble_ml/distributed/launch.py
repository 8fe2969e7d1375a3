"""A job of several ranks, from its first hello to its end: nobody is left waiting for a rank that is gone.

    with start(config.parallel) as session:      # session.mesh, session.topology
        session.step = 17                        # told where something fails

Rank 0 serves a small key-value store (torch's TCPStore), which the process group is initialised through. A rank that
raises writes who it is, its step and the cause there, and leaves; a watch thread in every rank reads that within half a
second, prints it, and ends its process, also out of a collective that would wait for ever. A rank that dies without a
word (killed, out of memory) is told from a slow one by its heartbeat, which a thread of its own keeps up. A second
thread of every other rank sees when rank 0 no longer answers, which the first may then wait for without end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from ensemble_ml.config import Backend, Launcher, ParallelConfig
from ensemble_ml.distributed.mesh import Mesh, be_patient, make_mesh
from ensemble_ml.distributed.topology import Topology, make_topology
from ensemble_ml.distributed.world import World, read_world
from ensemble_ml.errors import Stopped, UserError

log = logging.getLogger(__name__)

T = TypeVar("T")

STATUS_ABORTED = 70  # left because another rank failed
_PERIOD = 0.5  # seconds between looks at the store
_SOON = 0.05  # the same for who waits for the last to leave
_GRACE = 3.0  # seconds beyond `silence` that rank 0 has to answer, and that a failed exchange waits for the cause
_LAST = 3.0  # launchers end the others at the first status that is not 0: rank 0, which has one, comes last
_FAREWELL = 2 * _PERIOD + 0.5  # the store dies with rank 0: the others read first
_MEETING = timedelta(seconds=120)


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
        self._watch: _Watch | None = None
        self._store: Any = None
        self._once = 0

    def share_out(self, topology: Topology) -> None:
        """Take another mesh over the same ranks; all of them call this with the same degrees."""
        self.topology = topology.at(self.world.rank)
        self.mesh = make_mesh(self.topology) if self.world.size > 1 else Mesh(self.topology)

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
        while not self._store.check([key]):  # not in a collective, whose patience has an end
            time.sleep(0.02)
        size = int(self._store.get(key))
        if self.first:
            message = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
        else:
            message = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.mesh.world.broadcast(message)
        return pickle.loads(message.cpu().numpy().tobytes())

    def __enter__(self) -> Self:
        if self.world.size == 1:
            return self
        host, port = self.world.host, self.world.port
        try:
            host, port, server = _meet(self.world)
            store = server or dist.TCPStore(host, port, self.world.size, False, _MEETING, wait_for_workers=False)
            self._watch = _Watch(self, host, port)
            _check_agreement(store, self.topology)
            wanted = self.config.backend
            apart = wanted is not Backend.gloo and _gpus_apart(store, self.world, self.device)
            backend = _backend(wanted, self.world, apart)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # where host memory goes through the GPU, it goes through ours
            be_patient(self.config.timeout)
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
        except BaseException as error:
            self._fail(error)
            if isinstance(error, dist.DistError):
                raise UserError(
                    f"rank {self.world.rank}: cannot meet the others at {host}:{port}: {error}; where the port is"
                    " taken, set MASTER_PORT to a free one on all ranks"
                ) from error
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._watch is None:
            return
        if error is not None and not isinstance(error, Stopped):  # all ranks stop at one step
            self._fail(error)
            return
        self._watch.leave()
        dist.destroy_process_group()
        if isinstance(error, Stopped) and error.requeue and self.first:
            time.sleep(_LAST)

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


class _Watch:
    """The thread that keeps up this rank's heartbeat and looks for word of a failure; rank 0 counts heartbeats too, and
    on other ranks a second thread counts its answers."""

    def __init__(self, session: Session, host: str, port: int):
        self._session, self._rank, self._size = session, session.world.rank, session.world.size
        self._silence = session.config.silence
        # A connection of its own: one that waits in a collective's set-up would hold the heartbeat up.
        self._store = dist.TCPStore(host, port, self._size, False, _MEETING, wait_for_workers=False)
        self._store.set(f"beat/{self._rank}", "0 0")
        self._seen: dict[int, tuple[str, float]] = {}
        self._looked = time.monotonic()
        self._end, self._leaving, self._reported = threading.Event(), False, False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._answered, self._gone = self._looked, threading.Event()
        self._thread.start()
        if self._rank > 0:
            threading.Thread(target=self._find_frozen, name="answers", daemon=True).start()

    def report(self, error: BaseException) -> None:
        """Write the cause; what may be the echo of another rank's failure waits for `fail`."""
        if _echo(error):
            return
        with contextlib.suppress(dist.DistError):
            if self._told() is None:
                self._reported = True
                self._tell(self._rank, error)

    def fail(self, error: BaseException) -> None:
        """Write the cause, unless another rank's failure is behind it; that one is printed, and this process ends."""
        if _echo(error):
            until = time.monotonic() + self._silence + _GRACE
            while time.monotonic() < until:  # the watch thread ends the process as soon as the cause is known
                time.sleep(_PERIOD)
        self._end.set()
        self._thread.join(timeout=5)
        try:
            told = self._told()
            if told is None:
                self._tell(self._rank, error)
            elif told["rank"] != self._rank:
                self._leave(told)
            if self._rank == 0:
                time.sleep(_FAREWELL)
        except dist.DistError:
            pass  # the store is gone, and with it rank 0: nobody is left to be told
        self._gone.set()

    def leave(self) -> None:
        """Clean end: rank 0, which serves the store, leaves last; the others may be at work for as long as they like
        (forecasts are shared out), and are watched meanwhile."""
        self._leaving = True
        self._end.set()
        self._thread.join()
        self._gone.set()

    def _run(self) -> None:
        beat = 0
        while not self._end.wait(_PERIOD) or self._leaving:
            beat += 1
            try:
                self._store.set(f"beat/{self._rank}", f"{beat} {self._session.step}")
                if self._rank == 0:
                    self._find_silent()
                told = self._told()
                self._answered = time.monotonic()
                if self._leaving and told is None and self._all_done():
                    return
            except dist.DistError:
                if self._reported:  # the others have left for it, and this rank's own error is on its way up
                    return
                if self._leaving or not self._end.is_set():
                    self._leave_rank_0()
                return
            if told is not None and told["rank"] != self._rank:
                self._leave(told)
            if self._leaving:
                time.sleep(_SOON)

    def _find_frozen(self) -> None:
        """Leave where rank 0 does not answer though its host keeps the connection: stopped, or without its disk."""
        looked = time.monotonic()
        while not self._gone.wait(_PERIOD):
            now = time.monotonic()
            if now - looked > self._silence / 2:  # the whole job was suspended
                self._answered = now
            looked = now
            if now - self._answered > self._silence + _GRACE:
                self._leave_rank_0()

    def _leave_rank_0(self) -> None:
        self._leave({"rank": 0, "host": "", "step": self._session.step, "cause": "no longer answers"})

    def _all_done(self) -> bool:
        """Say that this rank has come to its end; whether it may go."""
        self._store.set(f"done/{self._rank}", "1")
        return self._rank > 0 or self._store.check([f"done/{rank}" for rank in range(self._size)])

    def _leave(self, told: dict[str, Any]) -> None:
        _leave(told, wait=_FAREWELL if self._rank == 0 else 0.0)

    def _told(self) -> dict[str, Any] | None:
        return json.loads(self._store.get("failed")) if self._store.check(["failed"]) else None

    def _tell(self, rank: int, error: BaseException | str, step: int | None = None) -> None:
        cause = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        host = self._store.get(f"host/{rank}").decode() if self._store.check([f"host/{rank}"]) else ""
        told = {
            "rank": rank,
            "host": host if rank != self._rank else socket.gethostname(),
            "step": self._session.step if step is None else step,
            "cause": " ".join(cause.split())[:500],
        }
        self._store.compare_set("failed", "", json.dumps(told))  # the first to write is the cause

    def _find_silent(self) -> None:
        """Rank 0: write the failure of a rank whose heartbeat has stopped."""
        if self._store.check(["failed"]):
            return
        now = time.monotonic()
        slept, self._looked = now - self._looked > self._silence / 2, now
        if slept:  # the whole job was suspended: nobody can have beaten meanwhile
            self._seen.clear()
        for rank in range(1, self._size):
            if not self._store.check([f"beat/{rank}"]) or self._store.check([f"done/{rank}"]):
                continue
            beat = self._store.get(f"beat/{rank}").decode()
            if self._seen.get(rank, ("", 0.0))[0] != beat:
                self._seen[rank] = beat, now
            elif now - self._seen[rank][1] > self._silence:
                silent = f"no heartbeat for {self._silence:g} s: killed, out of memory, or its host is gone"
                self._tell(rank, silent, int(beat.split()[1]))
                return


def _echo(error: BaseException) -> bool:
    """Whether an error may only be the echo of another rank's: a connection that its partner closed."""
    return isinstance(error, dist.DistError | ConnectionError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error).lower() or "nccl" in str(error).lower())
    )


def _leave(told: dict[str, Any], wait: float = 0.0) -> None:
    """Print the cause and end this process, wherever its main thread stands."""
    where = f" ({told['host']})" if told["host"] else ""
    text = f"ensemble-ml: rank {told['rank']}{where} failed at step {told['step']}: {told['cause']}; this rank leaves"
    sys.stdout.flush()
    os.write(2, f"{text}\n".encode())  # one write: lines of several ranks do not mix
    time.sleep(wait)
    os._exit(STATUS_ABORTED)


def _device(world: World) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def _gpus_apart(store: Any, world: World, device: torch.device) -> bool:
    """Whether each rank has a GPU of its own: as many as ranks on each host, or one that its launcher lets it see."""
    gpu = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "none"
    store.set(f"gpu/{world.rank}", gpu)
    if world.rank == 0:  # one asks for all, or a large job would begin with a question for each pair of ranks
        every = {store.get(f"gpu/{rank}") for rank in range(world.size)}
        store.set("gpus apart", str(len(every) == world.size and b"none" not in every))
    return bool(store.get("gpus apart") == b"True")


def _backend(wanted: Backend, world: World, gpus_apart: bool) -> str:
    """The library: NCCL needs a GPU for each rank.

    Raises:
        UserError: NCCL is asked for and cannot be had.
    """
    enough = gpus_apart and dist.is_nccl_available()
    if wanted is Backend.nccl and not enough:
        raise UserError(
            f"parallel.backend=nccl: {world.local_size} ranks on this host and {torch.cuda.device_count()} GPUs to see;"
            " one GPU holds one rank;"
            " start fewer ranks, or use parallel.backend=gloo"
        )
    if wanted is Backend.auto:
        return "nccl" if enough else "gloo"
    return wanted.value


def _check_agreement(store: Any, topology: Topology) -> None:
    """Every rank must have made the same mesh.

    Raises:
        UserError: this rank's degrees differ from those of rank 0.
    """
    store.set(f"host/{topology.rank}", socket.gethostname())
    if topology.rank == 0:
        store.set("mesh", str(topology))
    first = store.get("mesh").decode()
    if first != str(topology):
        raise UserError(
            f"rank {topology.rank}: its mesh is {topology}, rank 0 has {first}; give every rank the same settings"
        )


def _meet(world: World) -> tuple[str, int, Any]:
    """Host and port of the key-value store, and on rank 0 the store itself.

    Raises:
        UserError: nothing says where rank 0 is.
    """
    agent = "TORCHELASTIC_USE_AGENT_STORE" in os.environ and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    if world.host is not None and world.port is not None:
        # torchrun's agent holds MASTER_PORT itself; its store tells the port of ours.
        if agent and world.launcher is Launcher.torchrun:
            return _meet_through_agent(world)
        return world.host, world.port, _serve(world, world.port) if world.rank == 0 else None
    if world.launcher in (Launcher.openmpi, Launcher.mpich):
        return _meet_through_mpi(world)
    raise UserError(
        f"{world.launcher.value}: rank {world.rank} of {world.size} does not know where rank 0 is; set MASTER_ADDR and"
        " MASTER_PORT to a host and a free port"
    )


def _serve(world: World, port: int) -> Any:
    return dist.TCPStore("0.0.0.0", port, world.size, True, _MEETING, wait_for_workers=False)


def _meet_through_agent(world: World) -> tuple[str, int, Any]:
    agent = dist.TCPStore(world.host, world.port, world.size, False, _MEETING, wait_for_workers=False)  # type: ignore[arg-type]
    key = f"ensemble_ml/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if world.rank:
        host, _, port = agent.get(key).decode().rpartition(":")
        return host, int(port), None
    server = _serve(world, 0)
    agent.set(key, f"{world.host}:{server.port}")
    return str(world.host), server.port, server


def _meet_through_mpi(world: World) -> tuple[str, int, Any]:
    try:
        import mpi4py
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(
            "mpiexec: MASTER_ADDR and MASTER_PORT are not set; set them to rank 0's host and a free port, or pip"
            " install 'ensemble-ml[mpi]', which lets the ranks tell each other"
        ) from error
    server = _serve(world, 0) if world.rank == 0 else None
    host, port = MPI.COMM_WORLD.bcast(None if server is None else (socket.gethostname(), server.port))
    host = "127.0.0.1" if host == socket.gethostname() else host  # a laptop's own name may lead nowhere
    if mpi4py.rc.finalize is not False:
        # MPI has done its part; left to the end, its farewell would wait for a rank that failed.
        MPI.Finalize()
    return host, port, server
