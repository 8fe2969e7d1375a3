"""Ranks simulated in one process: threads that meet at a barrier and hand tensors to each other.

This is for tests, and for trainings that measure what an exchange does to the weights. Every rank runs the same code as
a process would, and gets the same numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from ensemble_ml.distributed.communicator import Communicator, Done, NullCommunicator, Pending
from ensemble_ml.distributed.hub import Hub, LocalLink
from ensemble_ml.distributed.mesh import ROLES, Mesh
from ensemble_ml.distributed.topology import Topology

T = TypeVar("T")

_PATIENCE = 600.0  # seconds that ranks wait for each other


class Room:
    """A place where the simulated ranks exchange values."""

    def __init__(self, size: int):
        self.size, self.given = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        self.given[rank] = value
        self.barrier.wait()
        found = list(self.given)
        # Without a second barrier, a fast rank could overwrite its value before all others have read it.
        self.barrier.wait()
        return found


class SimulatedCommunicator:
    """A communicator of simulated ranks, whose collectives follow their definitions."""

    def __init__(self, room: Room, rank: int):
        self.room, self.rank, self.size, self.bytes_sent, self.seconds_waited = room, rank, room.size, 0, 0.0

    def all_reduce(self, x: Tensor, *, op: str = "sum", async_op: bool = False) -> Pending:
        """Do as `Communicator.all_reduce`; sums are taken in rank order."""
        self.bytes_sent += 2 * x.numel() * x.element_size() * (self.size - 1) // self.size
        stacked = torch.stack(self.room.swap(self.rank, x.clone()))
        x.copy_({"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op])
        return Done()

    def reduce_scatter(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Do as `Communicator.reduce_scatter`."""
        self.bytes_sent += x.numel() * x.element_size() * (self.size - 1) // self.size
        out.copy_(torch.stack(self.room.swap(self.rank, x.clone())).sum(0).view(self.size, -1)[self.rank])
        return Done()

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Do as `Communicator.all_gather`."""
        self.bytes_sent += x.numel() * x.element_size() * (self.size - 1)
        out.copy_(torch.cat(self.room.swap(self.rank, x.clone())))
        return Done()

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], *, async_op: bool = False
    ) -> Pending:
        """Do as `Communicator.all_to_all_single`."""
        self.bytes_sent += (sum(sent) - sent[self.rank]) * x.element_size()
        parts = [given[self.rank] for given in self.room.swap(self.rank, x.clone().split(list(sent)))]
        assert [len(p) for p in parts] == list(received)
        out.copy_(torch.cat(parts))
        return Done()

    def broadcast(self, x: Tensor, *, source: int = 0, async_op: bool = False) -> Pending:
        """Do as `Communicator.broadcast`."""
        x.copy_(self.room.swap(self.rank, x.clone())[source])
        return Done()

    def barrier(self) -> None:
        """Return once every rank has called."""
        self.room.barrier.wait()


def join_simulated(group: Communicator, make: Callable[[], Hub]) -> LocalLink:
    """Connect a simulated rank with the hub of its votes (a `Join` of `ensemble_ml.distributed.quorum`)."""
    assert isinstance(group, SimulatedCommunicator)
    hub = group.room.swap(group.rank, make() if group.rank == 0 else None)[0]
    return LocalLink(hub, group.rank, owner=group.rank == 0)


def on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """Run `work(communicator)` on `size` simulated ranks and return the results in rank order.

    If ranks fail, the error of the lowest rank that failed by itself is raised.
    """
    room = Room(size)
    return _together([room], lambda rank: work(SimulatedCommunicator(room, rank)), size)


def on_mesh(work: Callable[[Mesh], T], **degrees: int) -> list[T]:
    """Run `work(mesh)` on the simulated ranks of a mesh and return the results in rank order.

    Args:
        work: what each rank does; its threads share all that is global in the process.
        **degrees: degrees of the mesh, as of `Topology`.

    Raises:
        BaseException: The error of the lowest rank that failed by itself.
    """
    size, rooms = Topology(**degrees).size, dict[tuple[int, ...], Room]()

    def mesh(rank: int) -> Mesh:
        """Return the mesh of a rank; roles over the same ranks share a communicator, as between processes."""
        topology, groups, same = Topology(**degrees, rank=rank), {}, dict[Any, Communicator]()
        for axes in ROLES:
            members = next(tuple(group) for group in topology.groups(*axes) if rank in group)
            if len(members) > 1 and members not in same:
                room = rooms.setdefault(members, Room(len(members)))
                same[members] = SimulatedCommunicator(room, members.index(rank))
            groups[axes] = same.get(members) or NullCommunicator()
        return Mesh(topology, groups)

    meshes = [mesh(rank) for rank in range(size)]
    return _together(rooms.values(), lambda rank: work(meshes[rank]), size)


def _together(rooms: Collection[Room], work: Callable[[int], T], size: int) -> list[T]:
    """Run `work(rank)` in a thread for each rank; a rank that fails leaves nobody waiting in one of the rooms."""

    def guarded(rank: int) -> T:
        try:
            return work(rank)
        except BaseException:
            for room in rooms:
                room.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        started = [pool.submit(guarded, rank) for rank in range(size)]
    errors = [error for future in started if (error := future.exception()) is not None]
    # Ranks that only waited for the failed one have a BrokenBarrierError; the cause comes first.
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in started]
