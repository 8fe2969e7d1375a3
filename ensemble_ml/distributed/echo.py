"""A rank without its neighbours: communicators that answer at once, and write down what a real one would have sent.

The same model, halo exchange and loss run on it as on a job of many ranks, so what they would send is counted and not
listed by hand, and their local work can be timed alone. Other ranks answer as if they had sent what this one sends, or
zeros where shapes differ: results mean nothing, shapes, bytes and times do. Tensors may be fake (no memory, no work).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from ensemble_ml.distributed.communicator import Communicator, Done, NullCommunicator, Pending, bytes_of
from ensemble_ml.distributed.mesh import ROLES, Mesh
from ensemble_ml.distributed.topology import Topology


class Phase(Enum):
    """When in a step something is sent; checkpointed activations are computed again in `backward`."""

    forward = "forward"
    backward = "backward"
    update = "update"


@dataclass(frozen=True)
class Message:
    """One collective: over which axes of the mesh, by which function, and the bytes that leave and reach this rank.

    Exchanges of halos with the same `wave` are on their way at the same time.
    """

    axes: tuple[str, ...]
    kind: str
    ranks: int
    sent: int
    received: int
    phase: Phase
    wave: int = 0


@dataclass
class Traffic:
    """The collectives of a step, in their order."""

    messages: list[Message] = field(default_factory=list)
    phase: Phase = Phase.forward
    wave: int = 0

    @property
    def sent(self) -> int:
        """Bytes that this rank sends, as its communicators count them."""
        return sum(message.sent for message in self.messages)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """What is sent in here belongs to `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def note(self, axes: tuple[str, ...], kind: str, ranks: int, sent: int, received: int) -> None:
        """Write a collective down."""
        self.messages.append(Message(axes, kind, ranks, sent, received, self.phase, self.wave))


class Awaited:
    """A collective that is complete, but whose time passes when it is waited for."""

    def __init__(self, traffic: Traffic):
        self._traffic = traffic

    def wait(self) -> None:
        """Return; what is sent from now on is sent after it."""
        self._traffic.wave += 1


class Echo:
    """A communicator of `size` ranks of which only one exists."""

    def __init__(self, traffic: Traffic, axes: tuple[str, ...], rank: int, size: int):
        self.rank, self.size, self.bytes_sent, self.seconds_waited = rank, size, 0, 0.0
        self._traffic, self._axes = traffic, axes

    def all_reduce(self, x: Tensor, *, op: str = "sum", async_op: bool = False) -> Pending:
        self._sent("all_reduce", 2 * bytes_of(x) * (self.size - 1) // self.size)
        if op == "sum":
            x.mul_(self.size)
        return Done()

    def reduce_scatter(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        self._sent("reduce_scatter", bytes_of(x) * (self.size - 1) // self.size)
        out.copy_(x[: len(out)])
        return Done()

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        self._sent("all_gather", bytes_of(x) * (self.size - 1))
        out.view(self.size, -1).copy_(x.reshape(1, -1).expand(self.size, -1))
        return Done()

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], *, async_op: bool = False
    ) -> Pending:
        width = x.element_size()
        self._sent("all_to_all", (sum(sent) - sent[self.rank]) * width, (sum(received) - received[self.rank]) * width)
        if list(received) == list(sent):
            out.copy_(x)
        else:
            out.zero_()
        found = Awaited(self._traffic)
        if not async_op:
            found.wait()
        return found

    def broadcast(self, x: Tensor, *, source: int = 0, async_op: bool = False) -> Pending:
        own = self.rank == source
        self._sent("broadcast", bytes_of(x) * own, bytes_of(x) * (not own))
        return Done()

    def barrier(self) -> None:
        pass

    def _sent(self, kind: str, sent: int, received: int | None = None) -> None:
        self.bytes_sent += sent
        self._traffic.note(self._axes, kind, self.size, sent, sent if received is None else received)


def echo_mesh(topology: Topology, traffic: Traffic) -> Mesh:
    """The mesh of one rank of `topology`, all others being echoes."""
    groups: dict[tuple[str, ...], Communicator] = {}
    for axes in ROLES:
        members = topology.group(*axes)
        one = len(members) == 1
        echo = Echo(traffic, axes, members.index(topology.rank), len(members))
        groups[axes] = NullCommunicator() if one else echo
    return Mesh(topology, groups)
