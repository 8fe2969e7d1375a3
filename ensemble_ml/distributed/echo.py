"""Fake communicators for dry runs: they answer at once, and record what a real communicator would have sent.

The same model, halo exchange, loss and exchange of gradients run on them as in a job of many ranks. So no list of
messages is kept by hand, and the local work of a rank can be timed alone. A fake communicator makes its answer from the
values of this rank, or of zeros if the shapes differ. Results are therefore meaningless, but shapes, bytes and times
are right. Tensors may be fake (without memory or work).

Weights that are sharded over ranks take memory and messages in a dry run, too. Hooks on the blocks of the U-Net
(`EchoShards`) allocate and free what FSDP2 does (torch 2.13), in its order:

    forward    The shards of all ranks are gathered, and stay until the next block has gathered its own. Kernels are
               made from them, and freed after the block.
    backward   Kernels are made from the shards. The shards of the next block are gathered ahead. Gradients are copied
               into one buffer, which is freed when the next block needs its own. This rank keeps its part of their sum.

Kernels are contiguous, which FSDP2 asks for. Gloo copies what it sends.

With fake tensors nothing is really allocated; `models.ledger.Ledger` counts the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby

import torch
from torch import Tensor, nn

from ensemble_ml.config import ClipBy, OptimConfig
from ensemble_ml.distributed.choice import Connect, make_exchange
from ensemble_ml.distributed.communicator import Communicator, Done, NullCommunicator, Pending, bytes_of
from ensemble_ml.distributed.exchange import BucketExchange
from ensemble_ml.distributed.mesh import ROLES, Mesh
from ensemble_ml.distributed.topology import Shard, Topology, mark_own
from ensemble_ml.distributed.voting import Vote
from ensemble_ml.models.unet3d import ResidualBlock, UNet3d
from ensemble_ml.optim import build

MODEL_AXES = ("data", "lat", "lon")  # of messages among the ranks that train one set of weights
SHARD_AXES = ("shard",)  # of messages among the ranks that share weights; the mesh has no such axis


class Phase(Enum):
    """A part of a step in which something is sent. Activations that are recomputed count as `backward`."""

    forward = "forward"
    backward = "backward"
    update = "update"


@dataclass(frozen=True)
class Message:
    """The record of one collective along some axes of the mesh, with the bytes that leave and reach this rank.

    Halo exchanges with the same `wave` are under way at the same time.
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


class Awaited:
    """A collective that is complete at once, in place of one that would be complete after `wait`."""

    def __init__(self, traffic: Traffic):
        self._traffic = traffic

    def wait(self) -> None:
        """Begin a new wave: messages sent from now on are sent after this one has arrived."""
        self._traffic.wave += 1


def echo_mesh(topology: Topology, traffic: Traffic) -> Mesh:
    """Return the mesh of one rank of `topology`, with fake communicators that record in `traffic`."""
    groups: dict[tuple[str, ...], Communicator] = {}
    for axes in ROLES:
        members = topology.group(*axes)
        groups[axes] = NullCommunicator()
        if len(members) > 1:
            groups[axes] = Echo(traffic, axes, members.index(topology.rank), len(members))
    return Mesh(topology, groups)


def echoes(traffic: Traffic) -> Connect:
    """Return a function that makes fake communicators, which record in `traffic` what is sent."""

    def connect(ranks: tuple[int, ...], topology: Topology) -> Communicator | None:
        if topology.rank not in ranks:
            return None
        return Echo(traffic, MODEL_AXES, ranks.index(topology.rank), len(ranks))

    return connect


def without_quorum(config: OptimConfig) -> OptimConfig:
    """Return the settings with votes of all ranks in the place of those that a quorum ends.

    They cost a rank as much, and need no hub, which would wait for ranks that are only planned.
    """
    return replace(config, quorum="all", bound=10, replay=None)


def check_exchange(config: OptimConfig, topology: Topology, local_size: int) -> None:
    """Raise a UserError if the settings do not fit the ranks."""
    exchange = make_exchange(config, topology, local_size=local_size, connect=echoes(Traffic()))
    if isinstance(exchange, BucketExchange):
        exchange.close()


def exchange_traffic(
    config: OptimConfig,
    shapes: Sequence[torch.Size],
    topology: Topology,
    local_size: int,
    parts: Sequence[Shard | None] | None = None,
    late: Sequence[bool] | None = None,
) -> tuple[list[list[Message]], bool]:
    """Find the messages that exchange the gradients of parameters of `shapes`.

    `parts` is what `topology.own_part` returns for each parameter; None if all ranks use all parameters whole. `late`
    says for each parameter whether it belongs to the last buckets (see `distributed.exchange`); None if none does.

    Returns:
        The messages of each bucket (none for an exchange without buckets), and whether the backward pass hides them.

    Raises:
        UserError: the settings do not fit the ranks.
    """
    traffic = Traffic(phase=Phase.update)
    exchange = make_exchange(without_quorum(config), topology, local_size=local_size, connect=echoes(traffic))
    if not isinstance(exchange, BucketExchange):
        return [], False
    params: list[Tensor] = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    for p, part in zip(params, parts or [], strict=False):
        if part is not None:
            mark_own(p, part)
    flags = list(late or [False] * len(params))
    runs = groupby(zip(flags, params, strict=True), key=lambda pair: pair[0])
    build(config, [{"params": [p for _, p in some], "late": flag} for flag, some in runs], 1, exchange)
    for p in params:
        p.grad = torch.zeros_like(p)
    exchange.ready()  # here the ranks compare their models, which must not count as traffic of a step
    exchange.begin(0)
    sent = []
    for number in range(len(exchange.buckets)):
        before = len(traffic.messages)
        exchange.alone(number)
        sent.append(traffic.messages[before:])
    exchange.close()
    waits = bool(config.clip) and isinstance(exchange, Vote) and config.clip_by is ClipBy.total
    return sent, exchange.overlap and not waits


def sums_of_copies(messages: Sequence[Message], copies: int) -> list[Message]:
    """Return the messages in which groups of ranks, each with all weights, add up their gradients.

    After a group has summed and scattered the gradients of a block, each of its ranks sums its part over the groups.

    `messages` are those of a dry run of one of the `copies` groups.
    """
    found = []
    for message in messages:
        if copies > 1 and message.axes == SHARD_AXES and message.kind == "reduce_scatter":
            part = message.sent // (message.ranks - 1)
            sent = 2 * part * (copies - 1) // copies
            found.append(replace(message, axes=("copies",), kind="all_reduce", ranks=copies, sent=sent, received=sent))
    return found


@dataclass(eq=False)
class EchoShards:
    """The hooks of all blocks of a U-Net, as on one of `shards` ranks.

    The weights of `unet` must have the type in which they are gathered. With `gloo`, ranks exchange by gloo on
    processors, and not by NCCL on GPUs.
    """

    unet: UNet3d
    shards: int
    traffic: Traffic
    gloo: bool = True
    # Shards of all ranks, by unit: a block, or the rest of the network.
    _gathered: dict[int, Tensor] = field(default_factory=dict)
    _kernels: dict[int, Tensor] = field(default_factory=dict)
    _sums: list[Tensor] = field(default_factory=list)
    _buffer: Tensor | None = None

    def __post_init__(self) -> None:
        blocks: list[nn.Module] = [m for m in self.unet.modules() if isinstance(m, ResidualBlock)]
        inside = {id(p) for block in blocks for p in block.parameters()}
        # The last unit is the network itself, with what lies outside its blocks.
        self._params = [list(block.parameters()) for block in blocks]
        self._params.append([p for p in self.unet.parameters() if id(p) not in inside])
        self._missing = [len(some) for some in self._params]
        self._order: list[int] = []
        for unit, module in enumerate([*blocks, self.unet]):
            module.register_forward_pre_hook(lambda *_, unit=unit: self._enter(unit))
            module.register_forward_hook(lambda module, given, found, unit=unit: self._leave(unit, found))
            for p in self._params[unit]:
                p.register_post_accumulate_grad_hook(lambda _, unit=unit: self._arrived(unit))

    @property
    def elements(self) -> int:
        """Return how many weights are sharded."""
        return sum(self._elements(unit) for unit in range(len(self._params)))

    @property
    def held(self) -> int:
        """Return how many sharded weights the first rank holds. It has the most, because whole rows are shared out."""
        return sum(-(-len(p) // self.shards) * (p.numel() // len(p)) for some in self._params for p in some)

    def _elements(self, unit: int) -> int:
        return sum(p.numel() for p in self._params[unit])

    def _new(self, unit: int, dtype: torch.dtype | None = None) -> Tensor:
        like = self._params[unit][0]
        return torch.empty(self._elements(unit), dtype=dtype or like.dtype, device=like.device)

    def _note(self, kind: str, whole: Tensor) -> None:
        """Count the message of a collective. For gloo, also allocate and free a copy of its data."""
        if self.gloo:
            torch.empty_like(whole)
        sent = whole.nbytes * (self.shards - 1) // self.shards
        self.traffic.note(SHARD_AXES, kind, self.shards, sent, sent)

    def _gather(self, unit: int) -> None:
        if unit not in self._gathered:
            self._gathered[unit] = self._new(unit)
            self._note("all_gather", self._gathered[unit])

    def _enter(self, unit: int) -> None:
        """Gather a unit for the forward pass."""
        before = list(self._gathered)
        self._gather(unit)
        for other in before:
            del self._gathered[other]
        self._kernels[unit] = self._new(unit)

    def _leave(self, unit: int, output: Tensor) -> None:
        # FSDP2 also hooks the output. A backward hook of the module would keep the output's gradient until that of the
        # input is computed.
        output.register_hook(lambda _: self._turn(unit))
        self._kernels.pop(unit)
        self._order.append(unit)

    def _turn(self, unit: int) -> None:
        """Gather a unit for the backward pass, and the one that comes after it."""
        if len(self._order) == len(self._params):  # the backward pass begins: free what the forward pass left
            self._gathered.clear()
        self._gather(unit)
        self._kernels[unit] = self._new(unit)
        del self._gathered[unit]
        self._order.remove(unit)
        if self._order:
            self._gather(self._order[-1])

    def _arrived(self, unit: int) -> None:
        """Sum and scatter the gradients of a unit once all are there."""
        self._missing[unit] -= 1
        if self._missing[unit]:
            return
        self._kernels.pop(unit)
        self._buffer = None
        wide = torch.promote_types(self._params[unit][0].dtype, torch.float32)
        self._buffer = self._new(unit, wide)
        for p in self._params[unit]:
            p.grad = None
        self._sums.append(self._buffer.new_empty(self._elements(unit) // self.shards))
        self._note("reduce_scatter", self._buffer)
