"""The interface of communication between ranks, over a process group or within a single rank.

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

The functions at the end use this interface. They collect values from several ranks (whole fields from shards, bytes,
extremes), and check by hashes of layout and weights that all ranks hold the same model.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ensemble_ml.distributed.topology import Shard
from ensemble_ml.errors import UserError

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

        `sent` counts the elements of `x` that go to each rank, `received` the elements of `out` that come from each.
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
        return self._run(lambda to, t: _REDUCE_SCATTER(to, t, group=self.group, async_op=True), out, x, async_op)

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        """Fill `out` (P n,) with every rank's `x` (n,), in rank order."""
        self.bytes_sent += bytes_of(x) * (self.size - 1)
        return self._run(lambda to, t: _ALL_GATHER(to, t, self.group, async_op=True), out, x, async_op)

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
        """Call a collective on `x`, in place if `out` is `x`, by way of the memory that the backend needs."""
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
        if not async_op:
            pending.wait()
        return pending


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


def gather(part: Tensor, shard: Shard, spatial: Communicator) -> Tensor | None:
    """Collect a whole field from the shards of a spatial group.

    `part` (..., y, x) is this rank's shard. Return the whole field (..., Y, X) on the group's first rank (`part` itself
    if there is no other), None on the others.
    """
    if spatial.size == 1:
        return part
    first, lead = spatial.rank == 0, part.shape[:-2]
    places = [(rows, columns) for rows in shard.rows for columns in shard.columns]  # in rank order
    sizes = [math.prod(lead) * (b - a) * (d - c) for (a, b), (c, d) in places]
    buffer = part.new_empty(sum(sizes) if first else 0)
    # One all_to_all_single, in which all ranks send to the first one only.
    sent = [part.numel()] + [0] * (spatial.size - 1)
    received = sizes if first else [0] * spatial.size
    spatial.all_to_all_single(buffer, part.reshape(-1), received, sent)
    if not first:
        return None
    whole = part.new_empty(*lead, shard.rows[-1][1], shard.columns[-1][1])
    for values, (rows, columns) in zip(buffer.split(sizes), places, strict=True):
        field = whole[..., slice(*rows), slice(*columns)]
        field.copy_(values.view(field.shape))
    return whole


def sharing_cores(world: Communicator, device: torch.device) -> int:
    """Return how many ranks have the same host and the same cores as this process, itself included.

    These are all ranks of a host, or fewer if ranks are bound to cores. Ranks that share only some cores do not count.
    """
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = f"{socket.gethostname()} {own}".encode()
    return gather_bytes(mine, world, device).count(mine)


def gathered(own: Tensor, group: Communicator) -> Tensor:
    """Return the elements (n,) that every rank gives, in rank order, (P n,) on all of them."""
    everyone = own.new_empty(group.size * len(own))
    group.all_gather(everyone, own)
    return everyone


def gather_bytes(data: bytes, group: Communicator, device: torch.device) -> list[bytes]:
    """Return the bytes that every rank of a group gives, in rank order, on all of them."""
    sizes = gathered(torch.tensor([len(data)], device=device), group)
    most = max(1, int(sizes.max()))
    # An all_gather needs the same length on every rank, so shorter inputs are padded.
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    whole = gathered(padded.to(device), group).cpu().numpy().reshape(group.size, most)
    return [row[:size].tobytes() for row, size in zip(whole, sizes.tolist(), strict=True)]


def agreed_extremes(low: Tensor, high: Tensor, spatial: Communicator) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest values over the ranks of a spatial group, element by element.

    `low` and `high`, of the same shape, are NaN where this rank has no value. The result is NaN where no rank has one.
    """
    # One all-reduce by maximum does for both: the smallest value is the negative of the largest negative.
    both = torch.stack([-low, high])
    both = torch.where(both.isnan(), -torch.inf, both)
    spatial.all_reduce(both, op="max")
    both = torch.where(both.isneginf().all(0), torch.nan, both)  # one alone is a true value that is infinite
    return -both[0], both[1]


def check_same_model(params: Sequence[Tensor], *groups: Communicator) -> None:
    """Compare layout (shapes, types, memory formats) and weights with those of the first of the ranks that are joined.

    The communicators `groups` together join these ranks: first that of consecutive ranks, then that of the ranks at the
    same place of each such group.

    Raises:
        UserError: raised on every rank. The message names the ranks that differ, numbered from 0 among those joined.
    """
    if all(group.size == 1 for group in groups):
        return
    everyone = torch.tensor([layout_hash(params), weights_hash(params)], device=params[0].device)
    for group in groups:
        everyone = gathered(everyone, group)
    layouts, weights = everyone.view(-1, 2).T.tolist()
    if others := [r for r, found in enumerate(layouts) if found != layouts[0]]:
        raise UserError(
            f"ranks {', '.join(map(str, others))}: their model differs from rank 0's in its layout (shapes, types or"
            " order of axes in memory); give every rank the same model, data and precision settings"
        )
    if others := [r for r, found in enumerate(weights) if found != weights[0]]:
        raise UserError(
            f"ranks {', '.join(map(str, others))}: their weights differ from rank 0's; start every rank from the same"
            " seed or checkpoint"
        )


def layout_hash(params: Sequence[Tensor]) -> int:
    """Return 63 bits that identify how the parameters lie in memory."""
    return _number(hashlib.sha256(repr([(p.shape, p.stride(), p.dtype) for p in params]).encode()))


@torch.no_grad()
def weights_hash(params: Sequence[Tensor]) -> int:
    """Return 63 bits that identify the values of the parameters."""
    found = hashlib.sha256()
    for p in params:
        found.update(p.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return _number(found)


def _number(found: hashlib._Hash) -> int:
    """Return the first 63 bits of a hash, which fit into an int64."""
    return int.from_bytes(found.digest()[:8], "little") >> 1
