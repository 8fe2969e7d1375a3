"""The communicators of one rank, looked up by role."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

from ensemble_ml.distributed.communicator import Communicator, NullCommunicator, TorchCommunicator
from ensemble_ml.distributed.topology import AXES, Topology

# Every set of axes that some part of a job communicates over. Made eagerly and in this order on every rank, because
# ranks that make communicators in different orders wait for each other for ever.
ROLES: tuple[tuple[str, ...], ...] = (AXES, ("data",), ("lat",), ("lon",), ("lat", "lon"), ("data", "lat", "lon"))


@dataclass(frozen=True)
class Mesh:
    """A topology and the communicator of each role; `Mesh()` is one rank."""

    topology: Topology = Topology()  # noqa: RUF009 - frozen
    groups: dict[tuple[str, ...], Communicator] = field(default_factory=dict)

    def along(self, *axes: str) -> Communicator:
        """The ranks that differ from this one along `axes` alone."""
        return self.groups.get(axes) or self._one

    def __deepcopy__(self, _: object) -> Mesh:
        return self  # communicators are not copied: a copy of a model talks to the same ranks

    @cached_property
    def _one(self) -> Communicator:
        return NullCommunicator()

    @property
    def world(self) -> Communicator:
        """All ranks."""
        return self.along(*AXES)

    @property
    def data(self) -> Communicator:
        """Ranks that hold the same part of different samples."""
        return self.along("data")

    @property
    def lat(self) -> Communicator:
        """Ranks that hold the same columns of one sample, from north to south."""
        return self.along("lat")

    @property
    def lon(self) -> Communicator:
        """Ranks that hold the same rows of one sample, eastwards."""
        return self.along("lon")

    @property
    def spatial(self) -> Communicator:
        """Ranks that share one sample."""
        return self.along("lat", "lon")

    @property
    def model(self) -> Communicator:
        """Ranks that train one set of weights."""
        return self.along("data", "lat", "lon")

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent over all of its communicators."""
        return sum(group.bytes_sent for group in self._each)

    @property
    def seconds_waited(self) -> float:
        """Seconds that this rank has waited in collectives of all of its communicators."""
        return sum(group.seconds_waited for group in self._each)

    @property
    def _each(self) -> list[Communicator]:
        return list({id(group): group for group in self.groups.values()}.values())


Members = tuple[tuple[int, ...], ...]


def make_mesh(topology: Topology, known: dict[Members, Communicator] | None = None) -> Mesh:
    """Make the communicators of a topology over the initialised process group; groups of one rank cost nothing.

    `known` communicators, by the members of all groups of a role, are used again, and new ones added to them.
    """
    groups: dict[tuple[str, ...], Communicator] = {}
    same = {} if known is None else known
    for axes in ROLES:
        members = tuple(topology.groups(*axes))
        if len(members[0]) == 1:
            groups[axes] = NullCommunicator()
            continue
        if members not in same:  # two roles over the same ranks share a communicator
            same[members] = TorchCommunicator(_own_group(members, topology.rank))
        groups[axes] = same[members]
    return Mesh(topology, groups)


def dissolve(groups: Iterable[Communicator], world: Communicator) -> None:
    """Destroy communicators that nothing uses any more, with their threads and connections; all ranks of the job call
    this, which `world` joins."""
    world.barrier()  # or one would hang up while another still hears
    for group in {id(group): group for group in groups}.values():
        if isinstance(group, TorchCommunicator):
            group.close()


_patience: list[timedelta] = []  # of exchanges, once a job has begun; process groups belong to the process


def be_patient(seconds: float) -> None:
    """How long exchanges of groups made from now on wait for a rank; torch's own default differs by backend."""
    _patience[:] = [timedelta(seconds=seconds)]


def new_group(ranks: Sequence[int]) -> Any:
    """A process group of `ranks`; all ranks of the job call this."""
    return dist.new_group(list(ranks), timeout=_patience[0] if _patience else None)


def _own_group(members: tuple[tuple[int, ...], ...], rank: int) -> object:
    own = None
    for ranks in members:
        group = new_group(ranks)
        if rank in ranks:
            own = group
    return own
