"""The memory and the messages of sharded weights in a dry run of one rank, without the other ranks.

Hooks on the blocks of the U-Net allocate and free what FSDP2 does (torch 2.13), in its order:

    forward    The shards of all ranks are gathered, and stay until the next block has gathered its own. Kernels are
               made from them, and freed after the block.
    backward   Kernels are made from the shards. The shards of the next block are gathered ahead. Gradients are copied
               into one buffer, which is freed when the next block needs its own. This rank keeps its part of their sum.

Kernels are contiguous, which FSDP2 asks for. Gloo copies what it sends.

With fake tensors nothing is really allocated; `models.ledger.Ledger` counts the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ensemble_ml.distributed.echo import Message, Traffic
from ensemble_ml.models.blocks.unet3d import ResidualBlock, UNet3d

SHARD_AXES = ("shard",)


def sums_of_copies(messages: Sequence[Message], copies: int) -> list[Message]:
    """Return the messages in which groups of ranks, each with all weights, add up their gradients.

    After a group has summed and scattered the gradients of a block, each of its ranks sums its part over the groups.

    Args:
        messages: the messages of a dry run of one group.
        copies: number of groups.
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

    Args:
        unet: the network, with weights of the type in which they are gathered.
        shards: ranks that share its weights.
        traffic: counts the messages.
        gloo: whether ranks exchange by gloo on processors, and not by NCCL on GPUs.
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
                p.register_post_accumulate_grad_hook(lambda p, unit=unit: self._arrived(p, unit))

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

    def _arrived(self, p: Tensor, unit: int) -> None:
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
