"""The identity of this process in a job: its rank, the number of ranks, and the address of rank 0.

They are read from environment variables that the launcher sets:

    torchrun    RANK, WORLD_SIZE, LOCAL_RANK, ...
    srun        SLURM_PROCID, SLURM_STEP_NUM_TASKS, ...
    Open MPI    OMPI_COMM_WORLD_*
    MPICH       PMI_RANK, PMI_SIZE (also its derivatives)

MASTER_ADDR and MASTER_PORT give the address under any launcher. If they are not set, SLURM's node list gives the host,
and its numbers of job and step give the port.

If torchrun's agent started the process, only torchrun's variables count, because the agent may itself run under srun.
If two other launchers disagree, the user has to decide (`parallel.launcher`).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import SystemRandom
from typing import NamedTuple

from ensemble_ml.config import Launcher
from ensemble_ml.errors import UserError


@dataclass(frozen=True)
class World:
    """The identity of a process among `size` ranks.

    Attributes:
        local_rank: number of this rank on its node; equal to `rank` if the launcher does not give it.
        local_size: number of ranks on this node. If the launcher does not give it, it is `size` until the ranks are
            connected and have counted themselves.
        host: host of rank 0; None if no variable gives it.
        port: port on which rank 0 listens; None if no variable gives it.
        job: the launcher's name for this job, as far as it gives one; not unique for every launcher.
        counted: whether the launcher gave `local_size`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = Launcher.none
    host: str | None = None
    port: int | None = None
    job: str = ""
    counted: bool = True


class _Names(NamedTuple):
    """The names of a launcher's variables."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_NAMES = {
    Launcher.torchrun: _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher.slurm: _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    Launcher.openmpi: _Names(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    Launcher.mpich: _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


# Variables that name the job. Only those of the launcher in charge are used: under torchrun, each rank may have been
# started by an `srun` of its own, so SLURM's names may differ between ranks.
_JOB = {
    Launcher.torchrun: ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    Launcher.slurm: ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    Launcher.openmpi: ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    Launcher.mpich: (),
}


def read_world(env: Mapping[str, str], wanted: Launcher = Launcher.auto) -> World:
    """Read the launcher's variables. A process without any is a job of one rank.

    `wanted` is the launcher whose variables are read; `auto` finds it, `none` gives one rank.

    Raises:
        UserError: a variable is missing or not a number, a rank lies outside its world, a port is invalid, or two
            launchers disagree.
    """
    if wanted is Launcher.none:
        return World()
    if wanted is not Launcher.auto:
        found = _read(env, wanted)
        if found is None:
            names, remedy = _NAMES[wanted], "use parallel.launcher=auto"
            lacking = next(name for name in (names.rank, names.size) if name not in env)
            if wanted is Launcher.slurm and lacking == names.size:
                # SLURM's rank without the step's size: the process is the batch script itself.
                remedy = "start the ranks with srun, or " + remedy
            raise UserError(f"parallel.launcher={wanted.value}: {lacking} is not set; {remedy}")
        return found
    if "TORCHELASTIC_RUN_ID" in env:
        return _read(env, Launcher.torchrun) or World()
    worlds = [world for launcher in _NAMES if (world := _read(env, launcher)) is not None]
    for other in worlds[1:]:
        if (other.rank, other.size) != (worlds[0].rank, worlds[0].size):
            choices = " or ".join(f"parallel.launcher={world.launcher.value}" for world in (worlds[0], other))
            raise UserError(f"{_rank_and_size(worlds[0])}, but {_rank_and_size(other)}; choose one with {choices}")
    return worlds[0] if worlds else World()


def _rank_and_size(world: World) -> str:
    """Return a launcher's rank and size as "NAME=value" pairs, for messages."""
    names = _NAMES[world.launcher]
    return f"{names.rank}={world.rank} {names.size}={world.size}"


def _read(env: Mapping[str, str], launcher: Launcher) -> World | None:
    """Return the identity that one launcher's variables give, or None if they are not set."""
    names = _NAMES[launcher]
    if launcher is Launcher.slurm and names.size not in env:
        return None  # this is the batch script itself, outside srun; its SLURM_PROCID is not a rank
    if names.rank not in env and names.size not in env:
        return None
    for name, other in ((names.rank, names.size), (names.size, names.rank)):
        if name not in env:
            raise UserError(f"{other}={env[other]}: {name} is not set beside it; set both or neither")
    # Cray's MPICH has other names for the ranks of a node.
    if launcher is Launcher.mpich and names.local_size not in env and "PMI_LOCAL_SIZE" in env:
        names = _Names(names.rank, names.size, "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    rank, size = _number(env, names.rank), _number(env, names.size)
    if not 0 <= rank < size:
        raise UserError(f"{names.rank}={rank}: must lie from 0 to {names.size}-1={size - 1}")
    local_rank = _number(env, names.local_rank, rank)
    local_size = _tasks_here(env) if launcher is Launcher.slurm else None
    counted = local_size is not None or names.local_size in env
    local_size = local_size or _number(env, names.local_size, size)
    if local_size < 1:
        raise UserError(f"{names.local_size}={local_size}: must be 1 or more")
    host, port = _meeting(env, launcher)
    job = "/".join(env.get(name, "") for name in _JOB[launcher])
    return World(rank, size, local_rank, local_size, launcher, host, port, job, counted)


def _tasks_here(env: Mapping[str, str]) -> int | None:
    """Return the number of tasks of this job step on this node, or None if SLURM does not give it.

    SLURM_STEP_TASKS_PER_NODE is read because SLURM_NTASKS_PER_NODE need not be set. `4(x2),3` means 4, 4 and 3 tasks.
    """
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    node = _number(env, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else None


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\d+", text.strip()):
        raise UserError(f"{name}={text}: must be a whole number")
    return int(text)


def _meeting(env: Mapping[str, str], launcher: Launcher) -> tuple[str | None, int | None]:
    """Return host and port of rank 0, each None if the variables do not give it."""
    host = env.get("MASTER_ADDR")
    port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else None
    if port is not None and not 1 <= port <= 65535:
        raise UserError(f"MASTER_PORT={port}: must lie from 1 to 65535; set it to a free port of rank 0's host")
    if launcher is Launcher.slurm:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if host is None and nodes:
            host = first_host(nodes)
        if port is None and "SLURM_JOB_ID" in env:
            # Each job step gets its own port, so that two steps of one job can run on one node.
            step = env.get("SLURM_STEP_ID", "0")
            port = 20000 + (_number(env, "SLURM_JOB_ID") * 16 + int(step if step.isdigit() else 0)) % 12000
    return host, port


def first_host(nodes: str) -> str:
    """Return the first name of a SLURM node list.

    `gpu[007-012,020]` gives gpu007, `a1,b2` gives a1, `r[0-1]n[3-4]` gives r0n3.
    """
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else nodes)


def free_port() -> int:
    """Return a port of this machine that is free now, for programs that are started on this machine.

    It lies below those that the kernel hands out, or another program's connection might take it before it is in use.
    """
    with socket.socket() as probe:
        for port in SystemRandom().sample(range(20_000, 32_000), 50):
            with suppress(OSError):
                probe.bind(("", port))
                return port
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
