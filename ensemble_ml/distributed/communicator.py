"""The interface of communication between ranks, over a process group or within a single rank.

A single rank has a null communicator, so that it runs the same code.

Every collective but `barrier` fills tensors that the caller made and returns a `Pending`. A communicator adds up two
numbers over its collectives. `seconds_waited` is the time that the host waits for results; under NCCL, waiting inside
the GPU's own queue is not included. `bytes_sent` is what an algorithm without waste puts on the wire for this rank,
without the transport's headers:

    all_reduce          2 n (P-1)/P     a ring: reduce-scatter, then all-gather
    reduce_scatter      n (P-1)/P
    all_gather          n (P-1)
    all_to_all_single   the bytes that go to other ranks
    broadcast           n at its source, 0 elsewhere

    n   bytes of the input
    P   number of ranks in the group

Under gloo, CUDA tensors travel through host memory. Under NCCL, tensors in host memory travel through the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Before torch 2.13 these functions had other names, for which torch 2.13 warns.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return once the result is in its tensor. On a GPU, return once later kernels of the stream will see it."""


class Communicator(Protocol):
    """A group of ranks. All of its ranks call the same collectives in the same order.

    With `async_op`, collectives return at once, and their tensors must be left alone until `wait` has returned. P is
    the number of ranks in the shapes below.
    """

    rank: int
    size: int
    bytes_sent: int
    seconds_waited: float

    def all_reduce(self, x: Tensor, *, op: str = "sum", async_op: bool = False) -> Pending:
        """Replace `x` by its sum, maximum or minimum over the ranks (`op`: "sum", "max" or "min")."""

    def reduce_scatter(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Fill `out` (n,) with this rank's shard of the sum of `x` (P n,) over the ranks."""

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Fill `out` (P n,) with every rank's `x` (n,), in rank order."""

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], *, async_op: bool = False
    ) -> Pending:
        """Send a slice of `x` to each rank and fill `out` with the slices received, in rank order.

        Args:
            out: (sum of `received`,) the memory that is filled.
            x: (sum of `sent`,) the elements to send.
            received: number of elements that come from each rank.
            sent: number of elements that go to each rank.
            async_op: return before the collective is complete.
        """

    def broadcast(self, x: Tensor, *, source: int = 0, async_op: bool = False) -> Pending:
        """Replace `x` by the `x` of rank `source` of the group."""

    def barrier(self) -> None:
        """Return once every rank has called."""


class Done:
    """A collective that is already complete."""

    def wait(self) -> None:
        """Return at once."""


class NullCommunicator:
    """A group of one rank. Its collectives copy the input to the output and send nothing."""

    def __init__(self) -> None:
        self.rank, self.size, self.bytes_sent, self.seconds_waited = 0, 1, 0, 0.0

    def all_reduce(self, x: Tensor, *, op: str = "sum", async_op: bool = False) -> Pending:
        """Leave `x` as it is, since a reduction over one rank changes nothing."""
        return Done()

    def reduce_scatter(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Copy `x` to `out`."""
        out.copy_(x)
        return Done()

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Copy `x` to `out`."""
        out.copy_(x)
        return Done()

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], *, async_op: bool = False
    ) -> Pending:
        """Copy `x` to `out`, since the only rank sends to itself."""
        out.copy_(x)
        return Done()

    def broadcast(self, x: Tensor, *, source: int = 0, async_op: bool = False) -> Pending:
        """Leave `x` as it is."""
        return Done()

    def barrier(self) -> None:
        """Return at once."""


class TorchCommunicator:
    """A process group of torch.distributed, by gloo or NCCL."""

    def __init__(self, group: Any):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent, self.seconds_waited = 0, 0.0
        self._home = "cpu" if dist.get_backend(group) == "gloo" else "cuda"

    def all_reduce(self, x: Tensor, *, op: str = "sum", async_op: bool = False) -> Pending:
        """Replace `x` by its sum, maximum or minimum over the ranks, and count the bytes of a ring."""
        self.bytes_sent += 2 * bytes_of(x) * (self.size - 1) // self.size
        return self._run(lambda t: dist.all_reduce(t, _OPS[op], self.group, async_op=True), x, x, async_op)

    def reduce_scatter(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Fill `out` (n,) with this rank's shard of the sum of `x` (P n,) over the ranks."""
        self.bytes_sent += bytes_of(x) * (self.size - 1) // self.size

        def call(to: Tensor, given: Tensor) -> Any:
            return _REDUCE_SCATTER(to, given, group=self.group, async_op=True)

        return self._run(call, out, x, async_op)

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Fill `out` (P n,) with every rank's `x` (n,), in rank order."""
        self.bytes_sent += bytes_of(x) * (self.size - 1)

        def call(to: Tensor, given: Tensor) -> Any:
            return _ALL_GATHER(to, given, self.group, async_op=True)

        return self._run(call, out, x, async_op)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], *, async_op: bool = False
    ) -> Pending:
        """Send a slice of `x` to each rank and fill `out` with the slices received, in rank order."""
        self.bytes_sent += (sum(sent) - sent[self.rank]) * x.element_size()

        def call(to: Tensor, given: Tensor) -> Any:
            return dist.all_to_all_single(to, given, list(received), list(sent), self.group, async_op=True)

        return self._run(call, out, x, async_op)

    def broadcast(self, x: Tensor, *, source: int = 0, async_op: bool = False) -> Pending:
        """Replace `x` by the `x` of rank `source` of the group, and count bytes at the source alone."""
        self.bytes_sent += bytes_of(x) * (self.size > 1 and self.rank == source)
        first = dist.get_global_rank(self.group, source)
        return self._run(lambda t: dist.broadcast(t, first, self.group, async_op=True), x, x, async_op)

    def barrier(self) -> None:
        """Return once every rank has called, and count the time until then as waiting."""
        start = time.perf_counter()
        dist.barrier(self.group)
        self.seconds_waited += time.perf_counter() - start

    def close(self) -> None:
        """Destroy the process group. No rank may be in one of its collectives any more."""
        dist.destroy_process_group(self.group)

    def _run(self, call: Callable[..., Any], out: Tensor, x: Tensor, async_op: bool) -> Pending:
        """Call a collective on `x`, staging tensors through the memory that the backend needs.

        The collective works in place if `out` is `x`.
        """
        staged = x.device.type != self._home
        # Ranks may hold the same tensor in different memory formats, so elements are sent in the order of the axes.
        given = x.contiguous()
        given = given.to(self._home) if staged else given
        if out is x:
            to = given
        else:
            own = not staged and out.is_contiguous()
            to = out if own else torch.empty(out.shape, dtype=out.dtype, device=given.device)
        # Collectives always start asynchronously; a synchronous call waits for its own work below.
        work = call(to) if out is x else call(to, given)
        pending = _Work(self, work, given, to, out)
        if async_op:
            return pending
        pending.wait()
        return Done()


class _Work:
    """The handle of a collective of torch, which keeps its tensors alive and copies the result to its destination."""

    def __init__(self, comm: TorchCommunicator, work: Any, given: Tensor, to: Tensor, out: Tensor):
        self._comm, self._work, self._given, self._to, self._out = comm, work, given, to, out

    def wait(self) -> None:
        """Return once the result is in its destination."""
        if self._work is None:
            return
        start = time.perf_counter()
        self._work.wait()
        self._comm.seconds_waited += time.perf_counter() - start
        self._work = None
        if self._to is not self._out:
            self._out.copy_(self._to)


def bytes_of(x: Tensor) -> int:
    """Return the number of bytes of a tensor's elements."""
    return x.numel() * x.element_size()
