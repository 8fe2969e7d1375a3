"""The start and the end of a job of several ranks. No rank is left waiting for a rank that is gone.

    with start(config.parallel) as session:      # session.mesh, session.topology
        session.step = 17                        # named in the report of a failure

Rank 0 serves a small key-value store (torch's TCPStore, see `meeting.py`). Through this store the process group is
initialised, and each rank notices the failure of others (see `watch.py`).
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
# First and longest interval between polls of the store, in seconds. Intervals grow, because rank 0 serves all ranks.
_LOOK, _RARELY = 0.02, 0.5
_LEFT = "left"  # the key that a trainer sets in the store when it stops
_STOPPED = "stopped"  # the key that a rank sets when it leaves because of a signal: whether it asks to be requeued


def start(config: ParallelConfig, env: dict[str, str] | None = None) -> Session:
    """Read the launcher's variables and return the session of this rank. Entering the session joins the other ranks.

    `env` holds environment variables; None stands for those of this process.

    Raises:
        UserError: the variables disagree, or the degrees do not fit the number of ranks. Entering the session raises it
            if a rank does not come or cannot be reached, or if the ranks' settings or devices do not fit together.
    """
    world = read_world(dict(os.environ) if env is None else env, config.launcher)
    topology = make_topology(config, rank=world.rank, size=world.size)
    return Session(world, topology, config)


def solo() -> Session:
    """Return the session of a single rank, whatever the launcher's variables say."""
    return Session(World(), Topology(), ParallelConfig())


class Session:
    """One rank's part in a job, used as a context manager.

    Entering it joins the other ranks and makes the mesh; leaving it ends the job cleanly, or reports a failure to the
    others.

    Attributes:
        step: number of the step that the rank is at, which failure reports name.
        device: the GPU of this rank, or the CPU.
        apart: whether each of several ranks has a GPU of its own.
    """

    def __init__(self, world: World, topology: Topology, config: ParallelConfig):
        self.world, self.topology, self.config = world, topology, config
        self.mesh = Mesh(topology)
        self.step = 0
        self.device = _device(world)
        self.apart = False
        self._watch: Watch | None = None
        self._level: int | None = None  # the log level to restore at the end
        self._store: Any = None
        self._once = self._own = 0

    def share_out(self, topology: Topology) -> None:
        """Replace the mesh and destroy its communicators. All ranks of the job call this with the same degrees."""
        before = self.mesh
        self.topology = topology.at(self.world.rank)
        self.mesh = make_mesh(self.topology) if self.world.size > 1 else Mesh(self.topology)
        dissolve(before.groups.values(), self.mesh.world)

    @property
    def first(self) -> bool:
        """Return True on the rank that writes files and logs messages, which is rank 0."""
        return self.topology.rank == 0

    @property
    def first_of_model(self) -> bool:
        """Return True on the first of the ranks that train one set of weights, which writes their checkpoints."""
        return self.topology.place[1:] == (0, 0, 0)

    def _key(self, model: bool) -> str:
        """Return the next key of the store for the ranks of the job, or for those of this rank's model."""
        if model:
            self._own += 1
            return f"model/{self.topology.place.trainer}/{self._own}"
        self._once += 1
        return f"once/{self._once}"

    def once(self, compute: Callable[[], T]) -> T:
        """Call `compute` on rank 0 and return its result on every rank. `compute` may take any time.

        All ranks call this. The result must be picklable.
        """
        if self.world.size == 1:
            return compute()
        key = self._key(model=False)
        if self.first:
            payload = pickle.dumps(compute())
            self._store.set(key, str(len(payload)))
            message = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
        else:
            # Ranks wait by polling the store: a collective would time out during a long computation.
            _until(lambda: self._store.check([key]))
            message = torch.empty(int(self._store.get(key)), dtype=torch.uint8, device=self.device)
        self.mesh.world.broadcast(message)
        return pickle.loads(message.cpu().numpy().tobytes())

    def agree(self, what: Mapping[str, Any], remedy: str = "give every rank the same", *, model: bool = False) -> None:
        """Check that all ranks hold the same values. Every rank that is compared calls this.

        Values of `what` are compared as strings; `remedy` is what the error message advises. With `model`, only the
        ranks of the same model are compared.

        Raises:
            UserError: a value differs from that of the first rank compared. The message names the first such value.
        """
        if self.world.size == 1:
            return
        key, mine = self._key(model), {name: str(value) for name, value in what.items()}
        first = self.topology.group("data", "lat", "lon")[0] if model else 0
        if self.topology.rank == first:
            self._store.set(key, json.dumps(mine))
        _until(lambda: self._store.check([key]))
        theirs = json.loads(self._store.get(key))
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                raise UserError(
                    f"rank {self.topology.rank}: {name}={mine.get(name)}, on rank {first} {name}={theirs.get(name)};"
                    f" {remedy}"
                )

    def on_one_host(self, ranks: Sequence[int]) -> bool:
        """Return whether all of `ranks` run on the host of this rank."""
        own = socket.gethostname().encode()
        return self.world.size == 1 or all(self._store.get(f"host/{rank}") == own for rank in ranks)

    def meet(self) -> None:
        """Return when all ranks have called this. Like `once`, it may take any time.

        Raises:
            Stopped: a rank was stopped by a signal of its own and will not come.
        """
        self._meet(self.world.size)

    def meet_model(self) -> None:
        """Return when all ranks of this rank's model have called this. It may take any time."""
        self._meet(self.mesh.model.size, model=True)

    def _meet(self, size: int, *, model: bool = False) -> None:
        """Return when `size` ranks have called this."""
        if size == 1:
            return
        key = self._key(model)
        self._store.add(key, 1)

        def here() -> bool:
            # This is asked first, because a rank may come and be stopped between the two requests.
            stopped = self._store.check([_STOPPED])
            if self._store.add(key, 0) == size:
                return True
            if stopped:
                requeue = self._store.get(_STOPPED) == b"1"
                raise Stopped(requeue, self.first, "another rank was stopped; the same command goes on")
            return False

        _until(here)

    def hear_trainers(self, what: str, text: str) -> list[str] | None:
        """Give the other trainers a text, and return the texts of all trainers, in order. This may take any time.

        All ranks call this; the text of the first rank of each model counts. No earlier call may have used the name
        `what`. The result is None if a trainer has left without giving its text.
        """
        keys = [f"{what}/{trainer}" for trainer in range(self.topology.trainer)]
        if self.first_of_model:
            self._store.set(keys[self.topology.place.trainer], text)
        # A trainer that has given its text waits here for the others. So a trainer leaves either before it gives its
        # text, or when all texts are there. In both cases every rank comes to the same result.
        _until(lambda: self._store.check(keys) or self._store.check([_LEFT]))
        return [self._store.get(key).decode() for key in keys] if self._store.check(keys) else None

    def leave(self, votes: float) -> None:
        """Tell the other trainers that this one stops, with the votes that asked for it."""
        if self.topology.trainer > 1 and self.first_of_model:
            self._store.set(_LEFT, str(votes))

    def left(self) -> float:
        """Return the votes with which a trainer has stopped, or zero."""
        if self.topology.trainer == 1 or not self._store.check([_LEFT]):
            return 0.0
        return float(self._store.get(_LEFT))

    def __enter__(self) -> Self:
        if self.world.size == 1:
            if self.config.backend is Backend.nccl:
                _backend(Backend.nccl, self.world, self.device.type == "cuda")
            _log_devices([device_name(self.device)], self.device, "one rank")
            return self
        host, port = self.world.host, self.world.port
        # True while gloo connects hosts. Gloo reaches a host by the address to which the host itself resolves its name.
        # That address may be unreachable from outside, so an error in this phase gets a message of its own.
        across = False
        try:
            # Users who raise the timeout of collectives expect late ranks, which may also be late at the start.
            patience = max(MEETING, timedelta(seconds=self.config.timeout))
            meeting = meet(self.world, patience)
            host, port = meeting.host, meeting.port
            store, own = meeting.connect(self.world.size), meeting.connect(self.world.size)
            _come(store, self.world, f"{host}:{port}")
            self._watch = Watch(own, self.world.rank, self.world.size, self.config.silence, lambda: self.step)
            _all_come(store, self.world, patience)
            _check_agreement(store, self.topology)
            kinds = _devices(store, self.world, self.device)
            # If the launcher did not give the number of ranks on this node, all ranks were assumed to be on it so far.
            if not self.world.counted:
                self.world = replace(self.world, local_size=kinds["hosts"][socket.gethostname()])
            self.apart = kinds["apart"]
            backend = _backend(self.config.backend, self.world, kinds["apart"], kinds["shared"])
            if self.device.type == "cuda":
                # NCCL stages tensors of host memory through the current device, which must be this rank's.
                torch.cuda.set_device(self.device)
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
                _log_devices(kinds["names"], self.device, who, f", {backend}")
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
        # All ranks would log the same messages, so only rank 0 logs them. Warnings come from every rank.
        if not self.first:
            self._level = _log.level
            _log.setLevel(logging.WARNING)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._level is not None:
            _log.setLevel(self._level)
        if self._watch is None:
            return
        if isinstance(error, Stopped):
            error.first = self.first  # a signal handler does not know the rank
        # If all ranks stop at the same step on purpose, that is a clean end. Every other error is reported.
        if error is not None and not (isinstance(error, Stopped) and error.together):
            self._fail(error)
        else:
            if isinstance(error, Stopped):
                with suppress(dist.DistError):  # where rank 0 is gone, the watch ends this process
                    self._store.set(_STOPPED, str(int(error.requeue)))
            self._watch.leave()
            dist.destroy_process_group()
        # Launchers end all ranks at the first exit status that is not 0. Rank 0 exits with such a status to ask for a
        # requeue, so it leaves last.
        if isinstance(error, Stopped) and error.requeue and self.first:
            time.sleep(LAST)

    def report(self, error: BaseException) -> None:
        """Report a failure to the other ranks at once. The caller must re-raise the error.

        This is for the time before this rank has released what it holds, which may take long. Some errors may occur on
        all ranks at the same step: a user's mistake, gradients that are not finite, an interruption. These wait for the
        end of the session, so that each rank reports its own.
        """
        if self._watch is not None and not isinstance(error, UserError | KeyboardInterrupt):
            self._watch.report(error)

    def _fail(self, error: BaseException) -> None:
        """Report the failure to the others. If it only follows from another rank's failure, name that rank and exit."""
        if self._watch is not None:
            self._watch.fail(error)


def _device(world: World) -> torch.device:
    """Return the GPU of this rank: its number on the node, modulo the number of GPUs. Without a GPU, return the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def _devices(store: Any, world: World, device: torch.device) -> dict[str, Any]:
    """Collect which devices the ranks compute on.

    Return plain values. `apart`: each rank has a GPU of its own. `shared`: a host and its ranks that share one GPU, or
    None. `names`: the kinds of devices. `hosts`: number of ranks on each host. `lacking`: ranks without a GPU among
    ranks with one. Raise a UserError if there are any, since the job would run at their speed.
    """
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"gpu/{world.rank}", json.dumps([socket.gethostname(), gpu, device_name(device)]))
    # Rank 0 alone reads all entries: if all ranks did, a large job would begin with a request for each pair of ranks.
    if world.rank == 0:
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
        summary = {"apart": apart, "shared": shared, "names": names, "hosts": hosts, "lacking": lacking}
        store.set("gpus", json.dumps(summary))
    found: dict[str, Any] = json.loads(store.get("gpus"))
    if found["lacking"]:
        some = ", ".join(map(str, found["lacking"][:8]))
        raise UserError(
            f"ranks without a GPU: {some}; the others have {', '.join(found['names'])}; give every task one"
            " (SLURM: --gpus-per-node), or none (CUDA_VISIBLE_DEVICES=)"
        )
    return found


def _unreached(rank: int, error: RuntimeError) -> str:
    """Return the message for a failed gloo connection between hosts, with the remedy."""
    name, address = socket.gethostname(), "no address"
    with suppress(OSError):
        address = socket.gethostbyname(name)
    return (
        f"rank {rank}: gloo does not reach the ranks of other hosts ({' '.join(str(error).split())[:200]}); it tells"
        f" them the address of this host's own name, {name}, which is {address} here; set GLOO_SOCKET_IFNAME (now"
        f" {os.environ.get('GLOO_SOCKET_IFNAME', 'not set')}) to the network interface that joins the hosts, as eth0,"
        " on all ranks"
    )


def _log_devices(names: Sequence[str], device: torch.device, who: str, how: str = "") -> None:
    """Log the devices, if there are GPUs, several ranks, or a torch for GPUs that sees none."""
    blind = device.type == "cpu" and torch.version.cuda is not None
    if device.type == "cuda" or how or blind:
        none = "; this torch is for GPUs, and sees none" if blind else ""
        _log.info("%s: %s%s%s", who, ", ".join(names), how, none)


def _backend(wanted: Backend, world: World, gpus_apart: bool, shared: tuple[str, list[int]] | None = None) -> str:
    """Return the name of the communication library; raise a UserError if NCCL was requested and cannot be used.

    NCCL needs one GPU for each rank.
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
    """Poll `done` with growing intervals. Return whether it became true within `seconds`.

    Python handles signals between polls, which it cannot do within a blocking call of the store.
    """
    latest, wait = time.monotonic() + seconds, _LOOK
    while not done():
        if time.monotonic() > latest:
            return False
        time.sleep(wait)
        wait = min(1.2 * wait, _RARELY)
    return True


def _come(store: Any, world: World, place: str) -> None:
    """Register this rank in the store at `place`, HOST:PORT.

    Raise a UserError if all ranks have registered already. They belong to another job, which must not receive this
    one's failure.
    """
    if store.add("come", 1) > world.size:
        raise UserError(
            f"rank {world.rank}: {world.size} ranks have met at {place} already, of another job; set"
            " MASTER_PORT to a free port on all ranks"
        )
    store.set(f"host/{world.rank}", socket.gethostname())


def _all_come(store: Any, world: World, patience: timedelta) -> None:
    """Wait for the other ranks to register, or raise a UserError that names those that do not come."""
    if not _until(lambda: store.add("come", 0) >= world.size, patience.total_seconds()):
        absent = [rank for rank in range(world.size) if not store.check([f"host/{rank}"])]
        raise UserError(
            f"rank {world.rank}: {len(absent)} of {world.size} ranks (first {absent[:5]}) have not come in"
            f" {patience.total_seconds():.0f} s; start all of them, and look at their messages"
        )


def _check_agreement(store: Any, topology: Topology) -> None:
    """Raise a UserError if the degrees of this rank's mesh differ from those of rank 0."""
    if topology.rank == 0:
        store.set("mesh", str(topology))
    first = store.get("mesh").decode()
    if first != str(topology):
        raise UserError(
            f"rank {topology.rank}: its mesh is {topology}, rank 0 has {first}; give every rank the same settings"
        )
