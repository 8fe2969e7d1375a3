"""The rendezvous of the ranks of a job: host and port of the key-value store that rank 0 serves.

Most launchers give both in variables (MASTER_ADDR, MASTER_PORT), torchrun in a store of its agent, mpiexec through MPI
itself. A process may train several times, for example in a sweep. The ranks then meet once, and each session has its
own keys.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ensemble_ml.config import Launcher
from ensemble_ml.distributed.world import World
from ensemble_ml.errors import UserError

MEETING = timedelta(seconds=120)  # the least time that ranks wait for each other
_LOOK = 0.05  # seconds between attempts to reach rank 0


@dataclass(eq=False)
class Meeting:
    """The host and port of the key-value store, and how many sessions of this process have used it.

    Attributes:
        server: the store itself on rank 0, None elsewhere.
        sessions: number of sessions so far, this one included.
        job: a name of the job, so that two jobs on the same port do not read each other's keys.
    """

    host: str
    port: int
    server: Any = None
    sessions: int = 0
    job: str = ""
    patience: timedelta = MEETING

    def connect(self, size: int) -> Any:
        """Open a new connection to the store of `size` ranks, which sees the keys of the current session only.

        Raises:
            DistNetworkError: nothing listens at the port in time.
        """
        _reached(self.host, self.port, self.patience)
        store = dist.TCPStore(self.host, self.port, size, False, self.patience, wait_for_workers=False)
        return dist.PrefixStore(f"{self.job} session {self.sessions}", store)


# Meetings outlive a session: the port that follows from SLURM's variables can be bound once, and MPI can be asked once.
_meetings: dict[World, Meeting] = {}


def meet(world: World, patience: timedelta = MEETING) -> Meeting:
    """Return the meeting point of the ranks, for one more session.

    Raises:
        UserError: nothing gives rank 0's address, or mpi4py is missing or belongs to another MPI than the launcher.
        DistError: rank 0 cannot listen at the port, or the store of torchrun's agent does not answer.
    """
    if world not in _meetings:
        _meetings[world] = Meeting(*_arranged(world, patience), job=world.job)
    meeting = _meetings[world]
    meeting.patience = patience
    meeting.sessions += 1
    return meeting


def met() -> bool:
    """Return whether this process has met other ranks. A failure here would end them, too."""
    return bool(_meetings)


def first_host() -> str:
    """Return the host name by which this process has reached rank 0; "localhost" if it has met no rank."""
    return [*_meetings.values()][-1].host if _meetings else "localhost"


def _arranged(world: World, patience: timedelta) -> tuple[str, int, Any]:
    """Return (host, port, store) by the way that the launcher offers; the store is None except on rank 0."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world.host is not None and world.port is not None:
        # torchrun's agent occupies MASTER_PORT itself, so the port of our store is passed through the agent's store.
        if agent and world.launcher is Launcher.torchrun:
            return _meet_through_agent(world, patience)
        return world.host, world.port, _serve(world, world.port, patience) if world.rank == 0 else None
    if world.launcher in (Launcher.openmpi, Launcher.mpich):
        return _meet_through_mpi(world, patience)
    raise UserError(
        f"{world.launcher.value}: rank {world.rank} of {world.size} does not know where rank 0 is; set MASTER_ADDR and"
        " MASTER_PORT to a host and a free port"
    )


def _reached(host: str, port: int, patience: timedelta) -> None:
    """Return when the port accepts connections; raise a DistNetworkError if it does not in time.

    Connecting a store at once would block in native code, where Python cannot handle signals.
    """
    latest = time.monotonic() + patience.total_seconds()
    while time.monotonic() < latest:
        with suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(_LOOK)
    raise dist.DistNetworkError(f"nobody listens there for {patience.total_seconds():.0f} s")


def _serve(world: World, port: int, patience: timedelta) -> Any:
    """Start the store on this rank, for connections from all hosts."""
    return dist.TCPStore("0.0.0.0", port, world.size, True, patience, wait_for_workers=False)


def _meet_through_agent(world: World, patience: timedelta) -> tuple[str, int, Any]:
    """Start a store on rank 0, and pass its address to the other ranks through the store of torchrun's agent."""
    agent = dist.TCPStore(world.host, world.port, world.size, False, patience, wait_for_workers=False)  # type: ignore[arg-type]
    # The agent's store survives a restart of the ranks, so each restart needs a key of its own.
    key = f"ensemble_ml/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if world.rank:
        host, _, port = agent.get(key).decode().rpartition(":")
        return host, int(port), None
    server = _serve(world, 0, patience)
    agent.set(key, f"{world.host}:{server.port}")
    return str(world.host), server.port, server


def _meet_through_mpi(world: World, patience: timedelta) -> tuple[str, int, Any]:
    """Start a store on rank 0, and broadcast its address to the other ranks through MPI.

    Raise a UserError if mpi4py is missing, or belongs to another MPI than the launcher.
    """
    try:
        import mpi4py
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(
            "mpiexec: MASTER_ADDR and MASTER_PORT are not set; set them to rank 0's host and a free port, or pip"
            " install 'ensemble-ml[mpi]', which lets the ranks tell each other"
        ) from error
    everyone = MPI.COMM_WORLD
    if (everyone.rank, everyone.size) != (world.rank, world.size):
        library = MPI.Get_library_version().splitlines()[0].strip(" \0")
        raise UserError(
            f"mpiexec: {world.launcher.value} started rank {world.rank} of {world.size}, but mpi4py uses {library},"
            f" which sees rank {everyone.rank} of {everyone.size}; use the mpiexec of that library, an mpi4py of this"
            " mpiexec's, or set MASTER_ADDR and MASTER_PORT to rank 0's host and a free port"
        )
    server = _serve(world, 0, patience) if world.rank == 0 else None
    host, port = everyone.bcast(None if server is None else (socket.gethostname(), server.port))
    # On a laptop, the machine's own name may not resolve to an address.
    host = "127.0.0.1" if host == socket.gethostname() else host
    if mpi4py.rc.finalize is not False:
        # MPI is not needed any more. If it were finalised at exit, it would wait for a rank that failed.
        MPI.Finalize()
    return host, port, server
