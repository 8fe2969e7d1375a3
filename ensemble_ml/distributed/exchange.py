"""Exchange gradients over ranks, one bucket at a time, while the backward pass goes on.

On a CPU, a thread of the exchange carries out the buckets one after the other, over a communicator that nothing else
uses. On a GPU, the hooks of the backward pass enqueue them, so that one thread enqueues all communication in one
order; `finish` waits for them.

A parameter that no rank used is left unchanged. If only some ranks used it, its gradient counts as zero on the others.

Hooks (`Arrivals`) detect when all gradients of a bucket are complete. Buckets go in the reverse order of the
parameters, which is roughly the order in which the backward pass finishes them. Small parameters from all over the
network come last (`late` in a group of the optimizer). Some of them are finished at the very end, so in the first
bucket they would delay it and all others.

Buckets never change. DistributedDataParallel rebuilds its buckets after the first step, so a resumed run would not be
bit-equal to an uninterrupted one. Each parameter starts at a multiple of 64 elements, the length of a word of signs.
Its elements keep their order in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ensemble_ml.distributed.communicator import Communicator, Pending, check_same_model
from ensemble_ml.distributed.pack import WORD, words
from ensemble_ml.distributed.sharding import local, place_among_shards, shards_of
from ensemble_ml.distributed.topology import own_part
from ensemble_ml.optim.exchange import Exchange, Outcome, total_norm

# Prefix of tensors that belong to one rank. If the number of ranks changes, their sum is preserved, not their mean.
ADDS_UP = "error."


class Reduction(Enum):
    """A rule by which the ranks' gradients make the gradient of the whole batch."""

    sum = "sum"
    mean = "mean"


class BucketExchange(Exchange):
    """The base class of all exchanges over ranks: buckets, hooks and the thread.

    Args:
        group: the ranks that exchange. Nothing else may use this communicator.
        reduction: whether the batch's gradient is the sum or the mean of the ranks' gradients.
        clip: largest norm of the gradient, 0 for none; the subclasses say of which gradient.
        bucket_mb: size of a bucket in units of 1e6 bytes of float32 parameters.
        overlap: exchange during the backward pass; otherwise after it, in a single bucket.
    """

    def __init__(
        self,
        group: Communicator,
        *,
        reduction: Reduction = Reduction.mean,
        clip: float = 0.0,
        bucket_mb: float = 16.0,
        overlap: bool = True,
    ):
        super().__init__(clip)
        self.group, self.reduction, self.overlap = group, reduction, overlap
        self.sharded: list[Tensor] = []
        self._limit = bucket_mb * 1e6 / 4 if overlap else float("inf")
        self.buckets: tuple[Bucket, ...] = ()
        self.step = 0
        self._arrivals: Arrivals | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._failed = False

    def attach(self, optimizer: Optimizer) -> None:
        """Serve the parameters of `optimizer`. Buckets and hooks are made later, by `ready`."""
        super().attach(optimizer)
        self.close()

    def ready(self) -> None:
        """Make buckets and hooks, once. Raise a UserError if the models of the ranks differ.

        This does not happen in `attach`, because the memory format of the parameters may be chosen after it.
        """
        if self._arrivals is not None:
            return
        self._set_apart()
        check_same_model(self.params, *self._groups)
        last = {id(p) for group in self.optimizer.param_groups if group.get("late") for p in group["params"]}
        late = {i for i, p in enumerate(self.params) if id(p) in last}
        self.buckets = make_buckets(self.params, self._limit, late)
        self._prepare()
        self._arrivals = Arrivals(self.params, self.buckets, self._full)
        if not self.params[0].is_cuda:
            self._thread = ThreadPoolExecutor(1, "exchange")

    def begin(self, step: int) -> None:
        """Prepare for the backward pass of `step`."""
        self.ready()
        assert self._arrivals is not None
        # Jobs of an abandoned step may still run. Their messages must not mix with those of this step.
        wait(self._jobs)
        self._failed = False
        self._arrivals.defer = not self.overlap
        self.step = step
        self._sent, self._waited = self.bytes_sent, self.seconds_waited
        self._jobs = []
        self._arrivals.begin()

    @property
    def _groups(self) -> tuple[Communicator, ...]:
        """Return the communicators that together join all ranks, from neighbours outwards."""
        return (self.group,)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far."""
        return self.group.bytes_sent

    @property
    def seconds_waited(self) -> float:
        """Return the seconds that this rank has waited in the exchange's collectives so far."""
        return self.group.seconds_waited

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let gradients of the backward passes in this context accumulate for a later one."""
        assert self._arrivals is not None
        with self._arrivals.hold():
            yield

    def finish(self) -> Outcome:
        """Exchange the buckets that are left, wait for all of them, and return the outcome."""
        assert self._arrivals is not None
        self.checked = True  # the outcome tells all ranks of a gradient that is not finite
        self._before_flush()
        self._arrivals.flush()
        start = time.perf_counter()
        wait(self._jobs)
        for job in self._jobs:
            job.result()
        # On a GPU the collectives were only enqueued during the backward pass.
        if self._thread is None:
            with torch.no_grad():
                self._drain()
        waited = time.perf_counter() - start
        # A thread's waiting was hidden by the backward pass, or is part of the time above. Without a thread, the
        # backward pass itself waited, so all waiting since the beginning of the step counts.
        before = self._waited if self._thread is None else self.seconds_waited
        norm, culprits = self._conclude()
        waited += self.seconds_waited - before
        return Outcome(norm, culprits, waited, self.bytes_sent - self._sent)

    def close(self) -> None:
        """Remove the hooks and end the thread."""
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _full(self, number: int) -> None:
        """Exchange a bucket whose gradients are complete, or hand it to the thread."""
        if self._thread is None:
            self._carry_out(number)
        else:
            self._jobs.append(self._thread.submit(self._carry_out, number))

    @torch.no_grad()
    def _carry_out(self, number: int) -> None:
        """Exchange one bucket, unless an earlier one has failed."""
        # After a failure the ranks are out of step, so no later bucket is exchanged.
        if self._failed:
            return
        try:
            self._exchange(number)
            if number == len(self.buckets) - 1 and self._thread is not None:
                self._drain()
        except BaseException:
            self._failed = True
            raise

    @torch.no_grad()
    def alone(self, number: int) -> None:
        """Exchange one bucket from beginning to end, to find out what it sends and how long it takes."""
        self._exchange(number)
        self._drain()
        if (self.apart or self.sharded) and number == len(self.buckets) - 1:
            self._conclude()

    def _set_apart(self) -> None:
        """Move the parameters that need not be exchanged from `params` to `apart`."""

    def _prepare(self) -> None:
        """Allocate what lasts from step to step."""

    def _before_flush(self) -> None:
        """Do what has to wait for the end of the backward pass, before the last buckets are exchanged."""

    def _exchange(self, number: int) -> None:
        """Exchange one bucket, or begin to. The thread calls this, in the order of the buckets."""
        raise NotImplementedError

    def _drain(self) -> None:
        """Complete what `_exchange` has begun. The thread calls this, or `finish` if there is none."""

    def _conclude(self) -> tuple[float, tuple[int, ...]]:
        """Return the norm of the gradient, and the ranks whose gradients were not finite."""
        raise NotImplementedError

    def _grads(self, bucket: Bucket) -> list[Tensor | None]:
        return [self.params[slot.index].grad for slot in bucket.slots]

    def _put(self, index: int, values: Tensor) -> None:
        """Set the gradient of a parameter, also where this rank had none."""
        p = self.params[index]
        p.grad = torch.empty_like(p) if p.grad is None else p.grad
        p.grad.copy_(values.view(p.shape))


class GradientAverage(BucketExchange):
    """An exchange that sums or averages gradients by all-reduce, in float32 or a shorter type.

    Any optimizer can use the result.

    `clip` bounds the norm of the result, so only the clipping waits for the end of the backward pass. All ranks learn
    which ranks' gradients are not finite: each bucket ends with a flag of each rank.

    If all ranks share one sample, parameters of single grid points stay with the rank that holds the point. Summing
    them with the zeros of the other ranks would be most of the traffic.

    The gradients of sharded weights (`sharding`) are sums over the ranks when the backward pass ends. Here they are not
    exchanged, only divided for a mean, and clipped.

    Args:
        dtype: the type in which gradients are summed; float32 leaves float64 gradients as they are.
    """

    def __init__(self, group: Communicator, *, dtype: torch.dtype = torch.float32, **settings: object):
        super().__init__(group, **settings)  # type: ignore[arg-type]
        self.dtype = dtype

    def _set_apart(self) -> None:
        def alone(p: Tensor) -> bool:
            shard = own_part(p)
            return shard is not None and shard.topology.spatial == self.group.size

        self.sharded = [p for p in self.params if shards_of(p) is not None]
        self.apart += [p for p in self.params if alone(p)]
        self.params = [p for p in self.params if not alone(p) and shards_of(p) is None]

    @torch.no_grad()
    def complete(self, p: Tensor, held: Sequence[Tensor]) -> None:
        """Give all ranks the whole of each tensor of `held`. Before, only a rank's own shard of it is up to date.

        Each rank sets what lies outside its own shard to zero, so a sum over the ranks gives the whole tensor.
        """
        shard = own_part(p)
        assert shard is not None
        for tensor in held:
            own = shard.cut(tensor).clone()
            shard.cut(tensor.zero_()).copy_(own)
            self.group.all_reduce(tensor)

    def _prepare(self) -> None:
        """Allocate one buffer for each bucket."""
        self._under_way: list[tuple[int, Pending, Tensor]] = []  # number of a bucket, its collective, and the sums
        # After the gradients of a bucket come one number for each parameter (how many ranks used it) and one for each
        # rank (1 if its gradients are not finite).
        self._flats, self._views = [], []
        for bucket in self.buckets:
            extra = len(bucket.slots) + self.group.size
            flat = torch.zeros(bucket.elements + extra, device=self.params[0].device, dtype=self._wide)
            self._flats.append(flat)
            self._views.append(bucket.views(flat, self.params))

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.params[0].dtype is torch.float64 else torch.float32

    def begin(self, step: int) -> None:
        """Prepare for the backward pass of `step`, and wait for collectives of an abandoned step."""
        super().begin(step)
        # On a GPU, an abandoned step may have left collectives that nobody waited for.
        for _, pending, _ in self._under_way:
            pending.wait()
        self._under_way.clear()

    def _exchange(self, number: int) -> None:
        """Copy the gradients of a bucket into one buffer and start their sum over the ranks."""
        bucket, flat, views = self.buckets[number], self._flats[number], self._views[number]
        grads = self._grads(bucket)
        tail = flat[bucket.elements :].zero_()
        for view, grad in zip(views, grads, strict=True):
            view.copy_(grad) if grad is not None else view.zero_()
        if all(g is not None for g in grads):
            tail[: len(grads)].fill_(1.0)  # avoids a copy from the host, for which a GPU would have to stop
        else:
            tail[: len(grads)] = torch.tensor([float(g is not None) for g in grads], dtype=flat.dtype)
        if self.reduction is Reduction.mean:
            flat[: bucket.elements] /= self.group.size
        # Each rank has its own flag, 0 or 1. So the sums of flags are finite and show which ranks' gradients are not.
        tail[len(grads) + self.group.rank] = (~torch.isfinite(flat[: bucket.elements].sum())).to(flat.dtype)
        sums = flat if self.dtype in (flat.dtype, torch.float32) else flat.to(self.dtype)
        self._under_way.append((number, self.group.all_reduce(sums, async_op=True), sums))
        # The thread may wait for the result. Hooks may not, since they run inside the backward pass.
        if self._thread is not None:
            self._drain()

    def _drain(self) -> None:
        """Wait for the sums, and make them the gradients of the parameters."""
        while self._under_way:
            number, pending, sums = self._under_way.pop(0)
            pending.wait()
            bucket, flat = self.buckets[number], self._flats[number]
            if sums is not flat:
                flat.copy_(sums)
            counts = flat[bucket.elements : bucket.elements + len(bucket.slots)].tolist()
            for slot, view, used in zip(bucket.slots, self._views[number], counts, strict=True):
                p = self.params[slot.index]
                # The buffer itself becomes the gradient, which saves a copy. The next step overwrites it.
                if used and view.dtype == p.dtype:
                    p.grad = view
                elif used:
                    p.grad = view.to(p.dtype)

    def _health(self) -> Tensor:
        """Return (ranks,) numbers that are above zero for ranks whose gradients are not finite."""
        return torch.stack([flat[-self.group.size :] for flat in self._flats]).sum(0)

    def _conclude(self) -> tuple[float, tuple[int, ...]]:
        """Clip the gradients, and return their norm and the ranks whose gradients were not finite."""
        health = self._health()
        norm = total_norm(self.params)
        if self.apart or self.sharded:
            norm, sick = self._with_apart(norm)
            health = health + sick
        culprits = tuple(torch.nonzero(health).flatten().tolist())
        if self.clip and not culprits:
            torch.nn.utils.clip_grads_with_norm_([*self.params, *self.apart], self.clip, norm)
            for p in self.sharded:
                local(p.grad).mul_((self.clip / (norm + 1e-6)).clamp(max=1.0))  # as torch does
        # No rank reported a gradient that is not finite, but a sum of them is not. All ranks see the same norm.
        if not culprits and not torch.isfinite(norm):
            culprits = tuple(range(self.group.size))
        return float(norm), culprits

    @torch.no_grad()
    def _with_apart(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Divide gradients that are not exchanged by the number of ranks for a mean, and include them in the norm.

        Return the norm of the whole gradient, and (ranks,) numbers that are above zero for ranks whose gradients are
        not finite.
        """
        if self.reduction is Reduction.mean:
            for p in (*self.apart, *self.sharded):
                if p.grad is not None:
                    p.grad /= self.group.size
        words = norm.new_zeros(1 + self.group.size)
        square = total_norm(self.apart).to(norm.dtype) ** 2
        words[1 + self.group.rank] = (~torch.isfinite(square)).to(words.dtype)
        words[0] = square
        # A sharded gradient is a sum over all ranks. If it is not finite, the norm is not either, but no rank is named.
        for p in self.sharded:
            words[0] += local(p.grad).square().sum(dtype=words.dtype) / place_among_shards(p)[3]
        self.group.all_reduce(words)
        return torch.sqrt(norm**2 + words[0]), words[1:]


@dataclass(frozen=True)
class Slot:
    """The place of a parameter in a bucket: its index, the element at which it starts, and how many elements it has."""

    index: int
    start: int
    elements: int


@dataclass(frozen=True)
class Bucket:
    """A set of parameters that are exchanged together. `elements` is a multiple of 64."""

    slots: tuple[Slot, ...]
    elements: int

    def views(self, flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of `flat` as views in the shapes of the parameters, in their memory formats."""
        return [_like(flat[s.start : s.start + s.elements], params[s.index]) for s in self.slots]


def make_buckets(params: Sequence[Tensor], limit: float, late: Collection[int] = ()) -> tuple[Bucket, ...]:
    """Distribute parameters over buckets of at most `limit` elements. A larger parameter gets a bucket of its own.

    `limit` includes the padding of each parameter to a multiple of 64. Parameters whose index is in `late` come last.
    The buckets are in the order in which they are exchanged.
    """
    made: list[Bucket] = []
    slots: list[Slot] = []
    start = 0
    for index in sorted(reversed(range(len(params))), key=lambda i: i in late):
        size = words(params[index].numel()) * WORD
        if slots and start + size > limit:
            made.append(Bucket(tuple(slots), start))
            slots, start = [], 0
        slots.append(Slot(index, start, params[index].numel()))
        start += size
    if slots:
        made.append(Bucket(tuple(slots), start))
    return tuple(made)


def _like(flat: Tensor, p: Tensor) -> Tensor:
    """Return a view of `flat` with the shape of `p`, and with its strides if its memory has no gaps."""
    # `empty_like` keeps the strides of a tensor without gaps, so equal strides mean that there are none.
    dense = torch.empty_like(p).stride() == p.stride()
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset()) if dense else flat.view(p.shape)


class Arrivals:
    """A set of hooks that call `full(number)` for each bucket, in the order 0, 1, 2, ... on every rank.

    A bucket waits for those before it, but not for parameters that are frozen when the step begins. `flush` hands on
    the buckets that the backward pass leaves incomplete (parameters that it did not use, or a rank without a sample),
    so every rank joins every exchange. With `defer`, all buckets wait for `flush`.
    """

    def __init__(self, params: Sequence[Tensor], buckets: Sequence[Bucket], full: Callable[[int], None]):
        self._params, self._full, self._sizes = params, full, [len(b.slots) for b in buckets]
        self._home = {slot.index: i for i, b in enumerate(buckets) for slot in b.slots}
        self._held, self.defer = False, False
        self._hooks: dict[int, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Expect a new set of gradients."""
        self._missing: list[set[int]] = [set() for _ in self._sizes]
        for i, p in enumerate(self._params):
            if p.requires_grad:
                self._missing[self._home[i]].add(i)
                # A parameter may have been frozen until now and have no hook yet.
                if i not in self._hooks:
                    self._hooks[i] = p.register_post_accumulate_grad_hook(lambda _, i=i: self._arrived(i))  # type: ignore[misc]
        self._next = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let gradients accumulate without handing on buckets, within this context."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def flush(self) -> None:
        """Hand on all buckets that are left."""
        while self._next < len(self._sizes):
            self._hand_on()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()

    def _arrived(self, index: int) -> None:
        """Note that a gradient is complete, and hand on the buckets that it completes, except in `hold` or `defer`."""
        if self._held or self.defer:
            return
        bucket = self._home[index]
        if bucket < self._next:
            raise RuntimeError(
                f"parameter {index}: a second gradient in one step, after its bucket was exchanged; run all backward"
                " passes but the last inside exchange.hold()"
            )
        # A bucket may be complete before an earlier one. It is handed on once all before it are complete, so that every
        # rank exchanges the buckets in the same order.
        self._missing[bucket].discard(index)
        while self._next < len(self._sizes) and not self._missing[self._next]:
            self._hand_on()

    def _hand_on(self) -> None:
        self._next += 1
        self._full(self._next - 1)
