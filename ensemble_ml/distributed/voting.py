"""Exchanges that vote on Lion's signs: our own, and two published ones to compare it with.

Every rank forms Lion's update u (Chen et al. 2023, arXiv:2302.06675) from its own gradient and momentum, and the ranks
vote on the sign of u:

    u = beta1 m + (1 - beta1) g

    m      this rank's momentum
    g      this rank's gradient
    beta1  first beta of the optimizer

So momenta drift apart by the noise of the ranks' batches, unless they are averaged from time to time (`MomentumPlan`).

A ballot begins with a header of a few words: whether this rank's numbers are finite, and which parameters it used. So
all ranks have these facts together with the votes, and leave out the same steps.

`clip` bounds the norm of the rank's own gradient, which serves as an estimate of the whole batch's. With
`clip_by=total` it is the norm over all parameters, and the votes wait for the end of the backward pass. With
`clip_by=bucket` each bucket is clipped to its share sqrt(elements / all elements) of `clip`. If ranks share a sample,
or average before they vote, no rank has a gradient of its own before a bucket is averaged, so only `bucket` works.

Momenta can be averaged after every K steps, after intervals that double, or selectively: for the layers whose variance
over ranks is largest relative to their mean square, within a budget of bytes. The variances are estimated from up to
`SAMPLED` elements of each layer, the same on every rank. All ranks gather these, so all choose the same layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ensemble_ml.config import ClipBy, MomentumSync, VoteScale
from ensemble_ml.distributed.communicator import Communicator, NullCommunicator, gathered
from ensemble_ml.distributed.exchange import Bucket, BucketExchange, Reduction
from ensemble_ml.distributed.pack import WORD, unpack_signs, words
from ensemble_ml.distributed.vote import Rounds, Take, cast, inverse, send, unit
from ensemble_ml.errors import UserError
from ensemble_ml.models.inputs import integers
from ensemble_ml.optim.exchange import total_norm
from ensemble_ml.optim.lion import Lion

SAMPLED = 256  # elements of a layer from which its variance is estimated


class Vote(BucketExchange):
    """An exchange with one vote a bucket. For each element, `bits` go out and one bit comes back.

    Args:
        bits: 1, 2, 4 or 8 bits an element that a rank sends.
        scale: what delta (see `vote`) is a multiple of: mean|u| (`l1`) or max|u| (`linf`); `sign` sends one bit,
            whatever `bits` is.
        inner: ranks that average in full precision first (those of a node, or of one sample); None for none. They then
            share the work: each sends its slice of the ballot, and they pass each other the winning bits.
        clip_by: how `clip` is applied; see the head of the file.
        plan: when momenta are averaged; None for never.

    Raises:
        UserError: `clip` bounds the total norm, but ranks average first.
    """

    def __init__(
        self,
        group: Communicator,
        *,
        bits: int = 1,
        scale: VoteScale = VoteScale.l1,
        inner: Communicator | None = None,
        clip_by: ClipBy = ClipBy.total,
        plan: MomentumPlan | None = None,
        **settings: object,
    ):
        super().__init__(group, **settings)  # type: ignore[arg-type]
        self.bits = 1 if scale is VoteScale.sign else bits
        self.scale, self.clip_by = scale, clip_by
        self.inner = inner or NullCommunicator()
        if self.clip and clip_by is ClipBy.total and self.inner.size > 1:
            raise UserError(
                f"optim.clip={self.clip:g}: {self.inner.size} ranks form one gradient before they vote, a bucket at a"
                " time; use optim.clip_by=bucket, or optim.clip=0"
            )
        self.plan = plan or MomentumPlan()
        self._headers: list[Tensor] = []

    @property
    def _groups(self) -> tuple[Communicator, ...]:
        return self.inner, self.group

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far, in votes and in averages before them."""
        return self.group.bytes_sent + self.inner.bytes_sent

    @property
    def seconds_waited(self) -> float:
        """Return the seconds that this rank has waited, in votes and in averages before them."""
        return self.group.seconds_waited + self.inner.seconds_waited

    @property
    def voters(self) -> int:
        """Return how many ranks of `group`, from the first on, have ballots that count.

        In a short batch some ranks have no sample. Their ballots would consist of momentum alone and could outvote the
        gradients of the others.
        """
        return self.group.size if self.with_samples is None else -(-self.with_samples // self.inner.size)

    @property
    def abstains(self) -> bool:
        """Return whether this rank's ballots do not count in this step."""
        return self.group.rank >= self.voters

    def attach(self, optimizer: Optimizer) -> None:
        """Serve the parameters of `optimizer`, or raise a UserError if it is not Lion."""
        if not isinstance(optimizer, Lion):
            raise UserError(f"{type(self).__name__}: ranks vote on signs, which only Lion takes; use optim=lion")
        super().attach(optimizer)
        self._lion = optimizer

    def _prepare(self) -> None:
        """Allocate one buffer for each bucket, long enough to be cut into equal slices of whole words for all ranks."""
        self._beta = {p: group["betas"][0] for group in self._lion.param_groups for p in group["params"]}
        multiple = WORD * self.group.size * self.inner.size
        sizes = [-(-b.elements // multiple) * multiple for b in self.buckets]
        self._flats = [torch.zeros(size, device=self.params[0].device) for size in sizes]
        self._views = [b.views(flat, self.params) for b, flat in zip(self.buckets, self._flats, strict=True)]
        self._signs: dict[Tensor, Tensor] = {}
        for bucket, views in zip(self.buckets, self._views, strict=True):
            self._signs |= {self.params[s.index]: v for s, v in zip(bucket.slots, views, strict=True)}
        self._elements = sum(p.numel() for p in self.params)
        self._wait = bool(self.clip) and self.clip_by is ClipBy.total

    def begin(self, step: int) -> None:
        """Prepare for the backward pass of `step`."""
        super().begin(step)
        assert self._arrivals is not None
        self._arrivals.defer = self._wait or not self.overlap
        self._headers = []
        self._squares: list[Tensor] = []
        self._rounds = Rounds([self.group, self.inner], self.bits, step, self.voters)

    def signs(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the winning signs of some parameters, as views of the buckets."""
        return [self._signs[p] for p in params]

    def after_step(self) -> dict[str, Any]:
        """Average momenta where the plan says so, and return a record for the log; empty if none were due."""
        done = self.plan.follow(self.momenta, self.group, self.step)
        if done is None:
            return {}
        return {"layers": done.layers, "bytes": done.bytes_sent, "variance": [float(f"{v:.3g}") for v in done.variance]}

    @property
    def momenta(self) -> list[Tensor]:
        """Return this rank's momentum of each parameter."""
        return [self._lion.momentum(p) for p in self.params]

    def local_state(self) -> dict[str, Tensor]:
        """Return the momenta of this rank."""
        return {f"momentum.{i}": m for i, m in enumerate(self.momenta)}

    def _before_flush(self) -> None:
        """Scale and clip the whole gradient, if `clip_by=total` asks for it."""
        if self._wait:
            self._scale(self.params)
            norm = total_norm(self.params)
            torch.nn.utils.clip_grads_with_norm_(self.params, self.clip, norm)
            self._squares.append(norm.square())

    def _exchange(self, number: int) -> None:
        """Form the updates u of a bucket and vote on them."""
        bucket, flat, views = self.buckets[number], self._flats[number], self._views[number]
        used = [g is not None for g in self._grads(bucket)]
        if self.inner.size > 1:
            used = self._average_inside(bucket, flat, views, used)
        if not self._wait:
            self._scale([self.params[slot.index] for slot in bucket.slots])
        self._clip_bucket(bucket)
        magnitude = self._fill(bucket, views, flat)
        self._vote(flat, self._header(magnitude, used), views, magnitude, partial(self._take, number, used))

    def _take(self, number: int, used: Sequence[bool], everyone: Tensor, winner: Tensor) -> None:
        """Store the outcome of a bucket: every rank's header (ranks, h), and the winning words as signs."""
        self._headers.append(everyone)
        self._mark_used(self.buckets[number], everyone, used)
        unpack_signs(winner, self._flats[number])

    def _drain(self) -> None:
        self._rounds.finish()

    def _average_inside(self, bucket: Bucket, flat: Tensor, views: list[Tensor], used: Sequence[bool]) -> list[bool]:
        """Replace gradients by the inner ranks' mean, or by their sum scaled to the whole batch.

        Return for each parameter of the bucket whether any inner rank used it.
        """
        for view, grad in zip(views, self._grads(bucket), strict=True):
            view.copy_(grad) if grad is not None else view.zero_()
        # Which parameters were used, and the inner ranks' share of the batch, travel behind the gradients.
        counts = torch.tensor([float(u) for u in used], device=flat.device)
        share = torch.tensor([self.share or 0.0], device=flat.device)
        joined = torch.cat([flat[: bucket.elements], counts, share])
        self.inner.all_reduce(joined, async_op=True).wait()
        flat[: bucket.elements] = joined[: bucket.elements]
        *used_by, of_batch = joined[bucket.elements :].tolist()
        found = [bool(ranks) for ranks in used_by]
        flat *= 1 / self.inner.size if self.reduction is Reduction.mean else self._whole(of_batch)
        for slot, view, there in zip(bucket.slots, views, found, strict=True):
            if there:
                self._put(slot.index, view)
        return found

    def _scale(self, params: Sequence[Tensor]) -> None:
        """Scale sums of gradients over a share of the batch to the size of the whole batch's; without a share, to zero.

        If ranks average before they vote, `_average_inside` has done this already.
        """
        if self.reduction is Reduction.sum and self.inner.size == 1:
            whole = self._whole(self.share or 0.0)
            for p in params:
                if p.grad is not None:
                    p.grad *= whole

    def _whole(self, share: float) -> float:
        """Return the factor that scales a sum over `share` of the batch to one over the whole batch; 0 for no share.

        If `self.share` is None, all voters have equal shares, and the factor is their number.
        """
        if self.share is None:
            return float(self.group.size)
        return 1 / share if share else 0.0

    def _clip_bucket(self, bucket: Bucket) -> None:
        """Clip the gradients of one bucket to its share of `clip`, and keep the squared norm for the log."""
        if not self.clip or self.clip_by is ClipBy.total:
            return
        params = [self.params[s.index] for s in bucket.slots]
        norm, elements = total_norm(params), sum(s.elements for s in bucket.slots)
        torch.nn.utils.clip_grads_with_norm_(params, self.clip * (elements / self._elements) ** 0.5, norm)
        self._squares.append(norm.square())

    def _fill(self, bucket: Bucket, views: list[Tensor], flat: Tensor) -> Tensor:
        """Write u of each parameter of a bucket into its view.

        Return the sum of magnitudes of each parameter, (slots,); for one bit the sum of u, ().
        """
        flat[bucket.elements :].zero_()
        for slot, view in zip(bucket.slots, views, strict=True):
            p = self.params[slot.index]
            beta = self._beta[p]
            torch.mul(self._lion.momentum(p), beta, out=view)
            if p.grad is not None:
                view.add_(p.grad, alpha=1 - beta)
        # The padding between parameters must be zero again: the buffer held the signs of the step before.
        for slot in bucket.slots:
            end = slot.start + slot.elements
            flat[end : slot.start + words(slot.elements) * WORD].zero_()
        # One bit needs no magnitudes. The result only shows whether all numbers are finite, and a plain sum takes a
        # quarter of the time.
        return flat.sum() if self.bits == 1 else torch.stack(list(torch._foreach_norm(views, 1)))

    def _header(self, magnitude: Tensor, used: Sequence[bool]) -> Tensor:
        """Return the header (h,) of a ballot: whether a number is not finite, then whether each parameter was used.

        Each parameter has one bit: whether this rank, or one of its inner ranks, used it.
        """
        bits = sum(int(u) << i for i, u in enumerate(used))
        # 63 bits a word, since words are signed.
        packed = [bits >> (63 * i) & (2**63 - 1) for i in range(-(-len(used) // 63))]
        sick = (~torch.isfinite(magnitude.sum())).long()
        return torch.cat([sick.view(1), integers(packed, magnitude.device)])

    def _vote(self, flat: Tensor, header: Tensor, views: list[Tensor], magnitude: Tensor, take: Take) -> None:
        """Vote on a bucket. `take` receives the outcome, possibly only in a later call or in `_drain`."""
        if self.bits > 1:
            self._to_units(views, magnitude)
        ballots = cast(flat.view(self.inner.size, -1)[self.inner.rank], self.bits, self.group.size, self.step)
        self._rounds.cast(torch.cat([header.expand(self.group.size, -1), ballots], 1), len(header), take)

    def _to_units(self, views: list[Tensor], magnitude: Tensor) -> None:
        """Divide the views by delta (see `vote`), so that codes are their floors."""
        if self.scale is VoteScale.linf:
            magnitude = torch.stack(list(torch._foreach_norm(views, float("inf"))))
        else:
            magnitude = magnitude / integers([max(v.numel(), 1) for v in views], magnitude.device)
        delta = magnitude * unit(self.bits, self.scale)
        torch._foreach_mul_(views, list(inverse(delta).unbind()))

    def _mark_used(self, bucket: Bucket, everyone: Tensor, used: Sequence[bool]) -> None:
        """Give a zero gradient to parameters that only other ranks used, so that the optimizer steps them here, too."""
        if all(used):
            return
        rows = everyone[:, 1:].tolist()
        for i, slot in enumerate(bucket.slots):
            p = self.params[slot.index]
            if p.grad is None and any(row[i // 63] >> (i % 63) & 1 for row in rows):
                p.grad = torch.zeros_like(p)

    def _conclude(self) -> tuple[float, tuple[int, ...]]:
        sick = torch.stack([h[:, 0] for h in self._headers]).sum(0)
        # A ballot stands for all inner ranks, which have consecutive numbers (see `choice.consecutive_groups`).
        rows = torch.nonzero(sick).flatten().tolist()
        culprits = tuple(rank for row in rows for rank in range(row * self.inner.size, (row + 1) * self.inner.size))
        norm = torch.stack(self._squares).sum().sqrt() if self._squares else total_norm(self.params)
        return float(norm), culprits


class LionCub(Vote):
    """The Lion Cub exchange as published (arXiv:2411.16462): after the backward pass, with everything in one buffer.

    With eight bits, codes are limited to floor(127 / ranks) steps on either side, so that an int8 all-reduce cannot
    overflow. No step is left beyond 127 ranks. With one bit, signs go through all_to_all, are unpacked and added as
    integers, and go back through all_gather.

    Args:
        bits: 1 or 8 bits an element that a rank sends.
        settings: passed to `Vote`; there is never an overlap with the backward pass.

    Raises:
        UserError: `bits` is 8, the scale is not `sign`, and there are more than 127 ranks.
    """

    def __init__(self, group: Communicator, *, bits: int = 8, **settings: object):
        super().__init__(group, bits=bits, **(settings | {"overlap": False}))  # type: ignore[arg-type]
        self.levels = 127 // group.size
        if self.bits == 8 and not self.levels:
            raise UserError(f"optim.exchange=lion_cub: 8 bits have no level for {group.size} ranks; use exchange=vote")

    def _vote(self, flat: Tensor, header: Tensor, views: list[Tensor], magnitude: Tensor, take: Take) -> None:
        if self.bits == 1:
            ballots = cast(flat, 1, self.group.size, self.step)
            received, pending = send(torch.cat([header.expand(self.group.size, -1), ballots], 1), self.group)
            pending.wait()
            total = _add_signs(received[: self.voters, len(header) :].contiguous())
            take(received[:, : len(header)], gathered(cast(total, 1, 1, self.step)[0], self.group))
            return
        self._to_units(views, magnitude)
        codes = flat.mul_(self.levels / 2.0**7).round_().clamp_(-self.levels, self.levels).to(torch.int8)
        if self.abstains:
            codes.zero_()
        self.group.all_reduce(codes, async_op=True).wait()
        take(gathered(header, self.group).view(self.group.size, -1), cast(codes.float(), 1, 1, self.step)[0])


class DistributedLion(Vote):
    """The Distributed Lion exchange by majority vote (arXiv:2404.00438).

    After the backward pass, every rank gathers the bits of all ranks and counts all votes itself.
    """

    def __init__(self, group: Communicator, **settings: object):
        super().__init__(group, **(settings | {"overlap": False, "bits": 1}))  # type: ignore[arg-type]

    def _vote(self, flat: Tensor, header: Tensor, views: list[Tensor], magnitude: Tensor, take: Take) -> None:
        ballot = torch.cat([header, cast(flat, 1, 1, self.step)[0]])
        rows = gathered(ballot, self.group).view(self.group.size, -1)
        total = _add_signs(rows[: self.voters, len(header) :].contiguous())
        take(rows[:, : len(header)], cast(total, 1, 1, self.step)[0])


def _add_signs(ballots: Tensor) -> Tensor:
    """Return the sum over ranks of the signs in packed words (ranks, w), as float (64 w,)."""
    kind = torch.int8 if len(ballots) < 128 else torch.int16
    total = torch.zeros(ballots.shape[1] * WORD, dtype=kind, device=ballots.device)
    for row in ballots:
        total += unpack_signs(row.contiguous(), torch.empty_like(total))
    return total.float()


@dataclass(frozen=True)
class MomentumPlan:
    """The schedule by which momenta are averaged.

    Attributes:
        policy: never, at a fixed interval, at growing intervals, or selected layers at a fixed interval.
        every: steps between averagings; the first interval if they grow.
        budget: bytes that a rank may send in one selective averaging, besides the sampled elements.
    """

    policy: MomentumSync = MomentumSync.never
    every: int = 100
    budget: float = 1e6

    def due(self, step: int) -> bool:
        """Return whether momenta are averaged after `step` (counted from 0)."""
        if self.policy is MomentumSync.never or (step + 1) % self.every:
            return False
        turn = (step + 1) // self.every + 1
        # With growing intervals, averagings come after 1, 3, 7, 15, ... times `every` steps.
        return self.policy is not MomentumSync.growing or turn & (turn - 1) == 0

    def follow(self, momenta: Sequence[Tensor], group: Communicator, step: int) -> Synchronised | None:
        """Average the momenta that are due after `step`; return a record of it, or None."""
        if group.size == 1 or not self.due(step):
            return None
        before = group.bytes_sent
        if self.policy is not MomentumSync.selective:
            average(momenta, group)
            return Synchronised(tuple(range(len(momenta))), group.bytes_sent - before)
        variance = relative_variance(momenta, group, step)
        sizes = [m.numel() * m.element_size() * 2 * (group.size - 1) / group.size for m in momenta]
        layers = choose(variance, sizes, self.budget)
        average([momenta[i] for i in layers], group)
        return Synchronised(layers, group.bytes_sent - before, tuple(variance))


@dataclass(frozen=True)
class Synchronised:
    """The record of one averaging: its layers, the bytes sent, and the relative variance of every layer if measured."""

    layers: tuple[int, ...]
    bytes_sent: int
    variance: tuple[float, ...] = ()


def average(momenta: Sequence[Tensor], group: Communicator) -> None:
    """Replace tensors by their mean over the ranks of `group`, in one all-reduce."""
    if group.size == 1 or not momenta:
        return
    # Elements are taken in their order in memory, which is the same on all ranks.
    flat = torch.cat([m.as_strided((m.numel(),), (1,)) for m in momenta])
    group.all_reduce(flat)
    flat /= group.size
    for m, part in zip(momenta, flat.split([m.numel() for m in momenta]), strict=True):
        m.as_strided((m.numel(),), (1,)).copy_(part)


def relative_variance(momenta: Sequence[Tensor], group: Communicator, step: int) -> list[float]:
    """Estimate for each tensor the variance over ranks (ddof = 1) divided by the mean square.

    It is 0 if the momenta agree, about 1 if they are unrelated, and P / (P - 1) at most for P ranks. The estimate is
    from up to `SAMPLED` elements of each tensor, at positions that `step` shifts, and is the same on all ranks.
    """
    samples = [m.as_strided((m.numel(),), (1,))[positions(m.numel(), step).to(m.device)] for m in momenta]
    own = torch.cat(samples).float()
    layers = gathered(own, group).view(group.size, -1).split([len(s) for s in samples], dim=1)
    found = []
    for values in layers:
        square = values.square().mean()
        found.append(float(values.var(0).mean() / square) if square > 0 else 0.0)
    return found


def positions(elements: int, step: int) -> Tensor:
    """Return the positions of the sampled elements, (n,) int64: evenly spaced, and shifted from step to step."""
    count = min(elements, SAMPLED)
    return (torch.arange(count) * (elements // max(1, count)) + step * 7919) % max(1, elements)


def choose(variance: Sequence[float], sizes: Sequence[float], budget: float) -> tuple[int, ...]:
    """Choose layers by decreasing variance, each if it fits into what is left of `budget` bytes.

    Layers without variance are left out. The result is in ascending order.
    """
    taken = []
    for i in sorted(range(len(sizes)), key=lambda i: (-variance[i], i)):
        if variance[i] > 0 and sizes[i] <= budget:
            taken.append(i)
            budget -= sizes[i]
    return tuple(sorted(taken))
