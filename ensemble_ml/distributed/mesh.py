"""The communicators of one rank, looked up by role, such as `mesh.lat` or `mesh.model`.

A role is a set of mesh axes. Its group consists of the ranks that differ along these axes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ensemble_ml.distributed.communicator import Communicator, NullCommunicator, TorchCommunicator
from ensemble_ml.distributed.topology import AXES, Topology

# Every set of axes that some part of a job communicates over. All communicators are made at the start, in this order on
# every rank: ranks that make them in different orders would wait for each other forever.
ROLES: tuple[tuple[str, ...], ...] = (
    AXES, ("data",), ("lat",), ("lon",), ("lat", "lon"), ("data", "lat", "lon"), ("trainer",),
)  # fmt: skip


@dataclass(frozen=True)
class Mesh:
    """A topology and the communicator of each role. `Mesh()` describes a job of one rank.

    Callers look a communicator up by its role and never ask how many ranks there are: a role without other ranks has a
    null communicator.
    """

    topology: Topology = Topology()  # noqa: RUF009 - frozen
    groups: dict[tuple[str, ...], Communicator] = field(default_factory=dict)
    _one: Communicator = field(default_factory=NullCommunicator, init=False, repr=False, compare=False)

    def along(self, *axes: str) -> Communicator:
        """Return the communicator of the ranks that differ from this one along `axes` only.

        `axes` must be one of `ROLES`. For other axes the result is a null communicator, whatever the topology.
        """
        return self.groups.get(axes) or self._one

    def __deepcopy__(self, _: object) -> Mesh:
        # A process group cannot be copied. A copy of a model communicates with the same ranks as the original.
        return self

    @property
    def world(self) -> Communicator:
        """Return the communicator of all ranks."""
        return self.along(*AXES)

    @property
    def data(self) -> Communicator:
        """Return the communicator of the ranks that hold the same shard of different samples."""
        return self.along("data")

    @property
    def lat(self) -> Communicator:
        """Return the communicator of the ranks that hold the same columns of one sample, from north to south."""
        return self.along("lat")

    @property
    def lon(self) -> Communicator:
        """Return the communicator of the ranks that hold the same rows of one sample, ordered eastwards."""
        return self.along("lon")

    @property
    def spatial(self) -> Communicator:
        """Return the communicator of the ranks that share one sample."""
        return self.along("lat", "lon")

    @property
    def model(self) -> Communicator:
        """Return the communicator of the ranks that train one set of weights."""
        return self.along("data", "lat", "lon")

    @property
    def trainers(self) -> Communicator:
        """Return the communicator of the ranks at the same place of each model."""
        return self.along("trainer")

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent over all of its communicators."""
        return sum(group.bytes_sent for group in self._each)

    @property
    def seconds_waited(self) -> float:
        """Return the seconds that this rank has waited in collectives of all of its communicators."""
        return sum(group.seconds_waited for group in self._each)

    @property
    def _each(self) -> list[Communicator]:
        # Two roles over the same ranks share a communicator, which must be counted once.
        return list({id(group): group for group in self.groups.values()}.values())


Members = tuple[tuple[int, ...], ...]  # the ranks of each group of a role


def make_mesh(topology: Topology, known: dict[Members, Communicator] | None = None) -> Mesh:
    """Make the communicators of a topology over the initialised process group.

    All ranks of the job call this with the same degrees. A group of one rank gets a null communicator and costs
    nothing. `known` holds communicators that exist already, by the members of all groups of a role; they are used
    again, and new ones are added to it.
    """
    groups: dict[tuple[str, ...], Communicator] = {}
    same = {} if known is None else known
    for axes in ROLES:
        members = tuple(topology.groups(*axes))
        if len(members[0]) == 1:
            groups[axes] = NullCommunicator()
            continue
        if members not in same:  # two roles over the same ranks share a communicator
            # torch requires every rank to take part in making every group, in the same order.
            made = [(ranks, new_group(ranks)) for ranks in members]
            same[members] = TorchCommunicator(next(group for ranks, group in made if topology.rank in ranks))
        groups[axes] = same[members]
    return Mesh(topology, groups)


def dissolve(groups: Iterable[Communicator], world: Communicator) -> None:
    """Destroy communicators that are no longer used, with their threads and connections; duplicates once.

    All ranks of the job call this. `world` is a communicator of all ranks, which is not among `groups`.
    """
    # Without the barrier, one rank could close a connection on which another still receives.
    world.barrier()
    for group in {id(group): group for group in groups}.values():
        if isinstance(group, TorchCommunicator):
            group.close()


# The timeout of collectives; empty until a job has begun. It is global because process groups belong to the process.
_patience: list[timedelta] = []


def be_patient(seconds: float) -> None:
    """Set the timeout of collectives for groups made from now on. Torch's own default differs between backends."""
    _patience[:] = [timedelta(seconds=seconds)]


def patience() -> float:
    """Return the timeout of collectives, in seconds; infinite before a job has begun."""
    return _patience[0].total_seconds() if _patience else float("inf")


def new_group(ranks: Sequence[int]) -> Any:
    """Make a process group of `ranks`. All ranks of the job call this, members or not."""
    return dist.new_group(list(ranks), timeout=_patience[0] if _patience else None)
