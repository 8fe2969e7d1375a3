"""Fake communicators for dry runs: they answer at once, and record what a real communicator would have sent.

The same model, halo exchange and loss run on them as in a job of many ranks. So no list of messages is kept by hand,
and the local work of a rank can be timed alone. A fake communicator makes its answer from the values of this rank, or
of zeros if the shapes differ. Results are therefore meaningless, but shapes, bytes and times are right. Tensors may be
fake (without memory or work).
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
    """A part of a step in which something is sent. Activations that are recomputed count as `backward`."""

    forward = "forward"
    backward = "backward"
    update = "update"


@dataclass(frozen=True)
class Message:
    """The record of one collective.

    Attributes:
        axes: the axes of the mesh that it goes along.
        kind: name of the collective.
        ranks: number of ranks.
        sent: bytes that leave this rank.
        received: bytes that reach this rank.
        phase: part of the step.
        wave: halo exchanges with the same number are under way at the same time.
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
        """Return the bytes that this rank sends, as its communicators count them."""
        return sum(message.sent for message in self.messages)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count everything that is sent in this context as part of `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def note(self, axes: tuple[str, ...], kind: str, ranks: int, sent: int, received: int) -> None:
        """Record a collective."""
        self.messages.append(Message(axes, kind, ranks, sent, received, self.phase, self.wave))


class Awaited:
    """A collective that is complete at once, in place of one that would be complete after `wait`."""

    def __init__(self, traffic: Traffic):
        self._traffic = traffic

    def wait(self) -> None:
        """Begin a new wave: messages sent from now on are sent after this one has arrived."""
        self._traffic.wave += 1


class Echo:
    """A communicator of `size` ranks of which only one exists."""

    def __init__(self, traffic: Traffic, axes: tuple[str, ...], rank: int, size: int):
        self.rank, self.size, self.bytes_sent, self.seconds_waited = rank, size, 0, 0.0
        self._traffic, self._axes = traffic, axes

    def all_reduce(self, x: Tensor, *, op: str = "sum", async_op: bool = False) -> Pending:
        """Record an all-reduce, and answer as if every rank held this `x`."""
        self._sent("all_reduce", 2 * bytes_of(x) * (self.size - 1) // self.size)
        if op == "sum":
            x.mul_(self.size)
        return Done()

    def reduce_scatter(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Record a reduce-scatter, and fill `out` with the first elements of `x`."""
        self._sent("reduce_scatter", bytes_of(x) * (self.size - 1) // self.size)
        out.copy_(x[: len(out)])
        return Done()

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Record an all-gather, and answer as if every rank had sent this `x`."""
        self._sent("all_gather", bytes_of(x) * (self.size - 1))
        out.view(self.size, -1).copy_(x.reshape(1, -1).expand(self.size, -1))
        return Done()

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], *, async_op: bool = False
    ) -> Pending:
        """Record an exchange, and answer with `x` itself, or with zeros where the slices' lengths differ."""
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
        """Record a broadcast, and leave `x` as it is."""
        own = self.rank == source
        self._sent("broadcast", bytes_of(x) * own, bytes_of(x) * (not own))
        return Done()

    def barrier(self) -> None:
        """Return at once, and record nothing."""

    def _sent(self, kind: str, sent: int, received: int | None = None) -> None:
        self.bytes_sent += sent
        self._traffic.note(self._axes, kind, self.size, sent, sent if received is None else received)


def echo_mesh(topology: Topology, traffic: Traffic) -> Mesh:
    """Return the mesh of one rank of `topology`, with fake communicators that record in `traffic`."""
    groups: dict[tuple[str, ...], Communicator] = {}
    for axes in ROLES:
        members = topology.group(*axes)
        one = len(members) == 1
        echo = Echo(traffic, axes, members.index(topology.rank), len(members))
        groups[axes] = NullCommunicator() if one else echo
    return Mesh(topology, groups)
