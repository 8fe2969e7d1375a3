"""The one face of communication: a group of ranks, or the null communicator of one rank, which runs the same code.

Every collective fills tensors that the caller made, returns a `Pending`, and counts the seconds that its caller waits
for it (not those of a GPU's own queue, which NCCL waits in), and the bytes that this rank sends:

    all_reduce          2 n (P-1)/P     a ring: reduce-scatter, then all-gather, n bytes in
    reduce_scatter      n (P-1)/P       n bytes in
    all_gather          n (P-1)         n bytes in
    all_to_all_single   what goes to other ranks
    broadcast           n at its source, 0 elsewhere

That is what an algorithm without waste puts on the wire; headers of the transport are not counted. Under gloo, CUDA
tensors travel through host memory; under NCCL, those in host memory through the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return once the result is in its tensor (on a GPU: ordered before later kernels of the current stream)."""


class Communicator(Protocol):
    """A group of ranks; all of them call the same collectives in the same order.

    Collectives return at once where `async_op` is set; their tensors must then be left alone until `wait`.
    """

    rank: int
    size: int
    bytes_sent: int
    seconds_waited: float

    def all_reduce(self, x: Tensor, *, op: str = "sum", async_op: bool = False) -> Pending:
        """Replace `x` by its sum (max, min) over ranks."""

    def reduce_scatter(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Fill `out` (n,) with this rank's part of the sum of `x` (P n,)."""

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Fill `out` (P n,) with each rank's `x` (n,), in rank order."""

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], *, async_op: bool = False
    ) -> Pending:
        """Send `sent[r]` elements of `x` to rank r, and fill `out` with `received[r]` elements from it; both 1-D."""

    def broadcast(self, x: Tensor, *, source: int = 0, async_op: bool = False) -> Pending:
        """Replace `x` by that of rank `source` of the group."""

    def barrier(self) -> None:
        """Return once every rank has called."""


class Done:
    """A collective that is complete."""

    def wait(self) -> None:
        """Return."""


class NullCommunicator:
    """One rank."""

    def __init__(self) -> None:
        self.rank, self.size, self.bytes_sent, self.seconds_waited = 0, 1, 0, 0.0

    def all_reduce(self, x: Tensor, *, op: str = "sum", async_op: bool = False) -> Pending:
        return Done()

    def reduce_scatter(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        out.copy_(x)
        return Done()

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        out.copy_(x)
        return Done()

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], *, async_op: bool = False
    ) -> Pending:
        out.copy_(x)
        return Done()

    def broadcast(self, x: Tensor, *, source: int = 0, async_op: bool = False) -> Pending:
        return Done()

    def barrier(self) -> None:
        pass


class TorchCommunicator:
    """A process group of torch.distributed (gloo or NCCL)."""

    def __init__(self, group: Any):
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent, self.seconds_waited = 0, 0.0
        self._home = "cpu" if dist.get_backend(group) == "gloo" else "cuda"

    def all_reduce(self, x: Tensor, *, op: str = "sum", async_op: bool = False) -> Pending:
        self.bytes_sent += 2 * bytes_of(x) * (self.size - 1) // self.size
        return self._run(lambda t: dist.all_reduce(t, _OPS[op], self._group, async_op=True), x, x, async_op)

    def reduce_scatter(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        self.bytes_sent += bytes_of(x) * (self.size - 1) // self.size

        def call(to: Tensor, given: Tensor) -> Any:
            return dist.reduce_scatter_tensor(to, given, group=self._group, async_op=True)

        return self._run(call, out, x, async_op)

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        self.bytes_sent += bytes_of(x) * (self.size - 1)

        def call(to: Tensor, given: Tensor) -> Any:
            return dist.all_gather_into_tensor(to, given, self._group, async_op=True)

        return self._run(call, out, x, async_op)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], *, async_op: bool = False
    ) -> Pending:
        self.bytes_sent += (sum(sent) - sent[self.rank]) * x.element_size()

        def call(to: Tensor, given: Tensor) -> Any:
            return dist.all_to_all_single(to, given, list(received), list(sent), self._group, async_op=True)

        return self._run(call, out, x, async_op)

    def broadcast(self, x: Tensor, *, source: int = 0, async_op: bool = False) -> Pending:
        self.bytes_sent += bytes_of(x) * (self.size > 1 and self.rank == source)
        first = dist.get_global_rank(self._group, source)
        return self._run(lambda t: dist.broadcast(t, first, self._group, async_op=True), x, x, async_op)

    def barrier(self) -> None:
        start = time.perf_counter()
        dist.barrier(self._group)
        self.seconds_waited += time.perf_counter() - start

    def close(self) -> None:
        """Destroy the process group; nobody may be in one of its collectives any more."""
        dist.destroy_process_group(self._group)

    def _run(self, call: Callable[..., Any], out: Tensor, x: Tensor, async_op: bool) -> Pending:
        """Call a collective on `x` (in place where it is `out`), by way of the memory that the backend needs."""
        staged = x.device.type != self._home
        given = x.contiguous()  # what is sent lies in the order of its axes, whatever x's order in memory
        given = given.to(self._home) if staged else given
        if out is x:
            to = given
        else:
            own = not staged and out.is_contiguous()
            to = out if own else torch.empty(out.shape, dtype=out.dtype, device=given.device)
        work = call(to) if out is x else call(to, given)
        pending = _Work(self, work, given, to, out)
        if async_op:
            return pending
        pending.wait()
        return Done()


class _Work:
    """Keeps the tensors of a collective alive until it is complete, and brings the result to where it is wanted."""

    def __init__(self, comm: TorchCommunicator, work: Any, given: Tensor, to: Tensor, out: Tensor):
        self._comm, self._work, self._given, self._to, self._out = comm, work, given, to, out

    def wait(self) -> None:
        if self._work is None:
            return
        start = time.perf_counter()
        self._work.wait()
        self._comm.seconds_waited += time.perf_counter() - start
        self._work = None
        if self._to is not self._out:
            self._out.copy_(self._to)


def bytes_of(x: Tensor) -> int:
    """Bytes of its elements."""
    return x.numel() * x.element_size()
