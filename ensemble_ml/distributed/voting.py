"""Exchanges that vote on Lion's signs: ours, and the published ones that it is compared with.

Every rank forms u = beta1 m + (1 - beta1) g from its own gradient and momentum, so momenta differ between ranks, unless
they are averaged now and then (`momentum`). A ballot begins with a few words that tell the others whether this rank's
numbers are finite and which parameters it used; so all ranks know it with the votes, and leave out the same steps.

`clip` bounds the norm of the rank's own gradient, as an estimate of the whole batch's: of all of it, and then the votes
wait for the end of backward; or of each bucket, to its share sqrt(elements / all elements) of `clip`. Where ranks share
a sample, or average before they vote, no rank has a gradient of its own before a bucket is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ensemble_ml.config import ClipBy, VoteScale
from ensemble_ml.distributed.buckets import Bucket
from ensemble_ml.distributed.communicator import Communicator, NullCommunicator
from ensemble_ml.distributed.exchange import BucketExchange, Reduction
from ensemble_ml.distributed.momentum import MomentumPlan, average
from ensemble_ml.distributed.pack import WORD, unpack_signs, words
from ensemble_ml.distributed.vote import Rounds, Take, cast, inverse, send, unit
from ensemble_ml.errors import UserError
from ensemble_ml.models.positions import integers
from ensemble_ml.optim.exchange import total_norm
from ensemble_ml.optim.lion import Lion


class Vote(BucketExchange):
    """One vote a bucket, `bits` out and one bit back.

    Args:
        group: ranks that vote.
        bits: 1, 2, 4 or 8 bits an element that a rank sends.
        scale: what codes are multiples of.
        inner: ranks that average in full precision first (of one node, or of one sample's parts) and then share the
            work: each sends its part of the ballot, and they pass the winning bits round.
        clip_by: see the head of the file.
        plan: when momenta are averaged.
        settings: of `BucketExchange`.
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
        self.scale = scale
        self.inner = inner or NullCommunicator()
        self.clip_by = clip_by
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
        return self.group.bytes_sent + self.inner.bytes_sent

    @property
    def seconds_waited(self) -> float:
        return self.group.seconds_waited + self.inner.seconds_waited

    @property
    def voters(self) -> int:
        """Ranks of `group`, the first ones, whose ballots count: in a short batch some have no sample, and what their
        momenta say would outvote the gradients of those that have."""
        return self.group.size if self.with_samples is None else -(-self.with_samples // self.inner.size)

    @property
    def abstains(self) -> bool:
        return self.group.rank >= self.voters

    @property
    def ranks(self) -> int:
        """All ranks that take part, inner ones too."""
        return self.group.size * self.inner.size

    def attach(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Lion):
            raise UserError(f"{type(self).__name__}: ranks vote on signs, which only Lion takes; use optim=lion")
        super().attach(optimizer)
        self._lion = optimizer

    def _prepare(self) -> None:
        optimizer = self._lion
        self._beta = {p: group["betas"][0] for group in optimizer.param_groups for p in group["params"]}
        multiple = WORD * self.ranks
        self._flats = [b.flat(self.params, multiple=multiple) for b in self.buckets]
        self._views = [b.views(flat, self.params) for b, flat in zip(self.buckets, self._flats, strict=True)]
        self._signs: dict[Tensor, Tensor] = {}
        for bucket, views in zip(self.buckets, self._views, strict=True):
            self._signs |= {self.params[s.index]: v for s, v in zip(bucket.slots, views, strict=True)}
        self._elements = sum(p.numel() for p in self.params)
        self._wait = bool(self.clip) and self.clip_by is ClipBy.total

    def begin(self, step: int) -> None:
        super().begin(step)
        assert self._arrivals is not None
        self._arrivals.defer = self._wait or not self.overlap
        self._headers = []
        self._squares: list[Tensor] = []
        self._rounds = Rounds([self.group, self.inner], self.bits, step, self.voters)

    def signs(self, params: Sequence[Tensor]) -> list[Tensor]:
        return [self._signs[p] for p in params]

    def after_step(self) -> dict[str, Any]:
        done = self.plan.follow(self.momenta, self.group, self.step)
        if done is None:
            return {}
        return {"layers": done.layers, "bytes": done.bytes_sent, "variance": [float(f"{v:.3g}") for v in done.variance]}

    @property
    def momenta(self) -> list[Tensor]:
        """This rank's momentum of each parameter."""
        return [self._lion.momentum(p) for p in self.params]

    def average_momenta(self) -> None:
        """Let all ranks have the mean momentum."""
        average(self.momenta, self.group)

    def local_state(self) -> dict[str, Tensor]:
        return {f"momentum.{i}": m for i, m in enumerate(self.momenta)}

    def _before_flush(self) -> None:
        if self._wait:
            self._scale(self.params)
            norm = total_norm(self.params)
            torch.nn.utils.clip_grads_with_norm_(self.params, self.clip, norm)
            self._squares.append(norm.square())

    def _exchange(self, number: int) -> None:
        bucket, flat, views = self.buckets[number], self._flats[number], self._views[number]
        used = [g is not None for g in self._grads(bucket)]
        if self.inner.size > 1:
            used = self._average_inside(bucket, flat, views, used)
        for slot, there in zip(bucket.slots, used, strict=True):
            p = self.params[slot.index]
            if p.grad is None and there:
                p.grad = torch.zeros_like(p)
        if not self._wait:
            self._scale([self.params[slot.index] for slot in bucket.slots])
        self._clip_bucket(bucket)
        magnitude = self._fill(bucket, views, flat)
        self._vote(flat, self._header(magnitude, used), views, magnitude, partial(self._take, number, used))

    def _take(self, number: int, used: Sequence[bool], everyone: Tensor, winner: Tensor) -> None:
        """Everyone's headers (P, h) and the winning words of a whole bucket."""
        self._headers.append(everyone)
        self._mark_used(self.buckets[number], everyone, used)
        unpack_signs(winner, self._flats[number])

    def _drain(self) -> None:
        self._rounds.finish()

    def _average_inside(self, bucket: Bucket, flat: Tensor, views: list[Tensor], used: Sequence[bool]) -> list[bool]:
        """Replace gradients by the inner ranks' mean, or by their sum as the whole batch's gradient would be."""
        for view, grad in zip(views, self._grads(bucket), strict=True):
            view.copy_(grad) if grad is not None else view.zero_()
        counts = torch.tensor([float(u) for u in used], device=flat.device)
        share = torch.tensor([self.share or 0.0], device=flat.device)
        joined = torch.cat([flat[: bucket.elements], counts, share])
        self.inner.all_reduce(joined, async_op=True).wait()
        flat[: bucket.elements] = joined[: bucket.elements]
        *used_by, of_batch = joined[bucket.elements :].tolist()
        found = [bool(ranks) for ranks in used_by]
        flat *= 1 / self.inner.size if self.reduction is Reduction.mean else self._whole(of_batch)
        for slot, view, there in zip(bucket.slots, views, found, strict=True):
            p = self.params[slot.index]
            if there:
                p.grad = torch.empty_like(p) if p.grad is None else p.grad
                p.grad.copy_(view)
        return found

    def _scale(self, params: Sequence[Tensor]) -> None:
        """Make a share of the batch's gradient an estimate of the whole, whatever the share; nothing stays nothing."""
        if self.reduction is Reduction.sum and self.inner.size == 1:
            whole = self._whole(self.share or 0.0)
            for p in params:
                if p.grad is not None:
                    p.grad *= whole

    def _whole(self, share: float) -> float:
        """What a sum over `share` of the batch is taken times to be as large as one over all of it."""
        if self.share is None:
            return float(self.group.size)
        return 1 / share if share else 0.0

    def _clip_bucket(self, bucket: Bucket) -> None:
        if not self.clip or self.clip_by is ClipBy.total:
            return
        params = [self.params[s.index] for s in bucket.slots]
        norm, elements = total_norm(params), sum(s.elements for s in bucket.slots)
        torch.nn.utils.clip_grads_with_norm_(params, self.clip * (elements / self._elements) ** 0.5, norm)
        self._squares.append(norm.square())

    def _fill(self, bucket: Bucket, views: list[Tensor], flat: Tensor) -> Tensor:
        """Put u of each parameter into its view; returns the sums of magnitudes, (slots,), or of u for one bit, ()."""
        flat[bucket.elements :].zero_()
        for slot, view in zip(bucket.slots, views, strict=True):
            p = self.params[slot.index]
            beta = self._beta[p]
            torch.mul(self._lion.momentum(p), beta, out=view)
            if p.grad is not None:
                view.add_(p.grad, alpha=1 - beta)
        # The words between parameters must stay zero: flat held signs.
        for slot in bucket.slots:
            end = slot.start + slot.elements
            flat[end : slot.start + words(slot.elements) * WORD].zero_()
        # One bit needs no magnitudes, only to know whether all is finite; the plain sum takes a quarter of the time.
        return flat.sum() if self.bits == 1 else torch.stack(list(torch._foreach_norm(views, 1)))

    def _header(self, magnitude: Tensor, used: Sequence[bool]) -> Tensor:
        """(h,) words: whether something is not finite, then a bit for each parameter that this rank used."""
        bits = sum(int(u) << i for i, u in enumerate(used))
        packed = [bits >> (63 * i) & (2**63 - 1) for i in range(-(-len(used) // 63))]
        sick = (~torch.isfinite(magnitude.sum())).long()
        return torch.cat([sick.view(1), integers(packed, magnitude.device)])

    def _vote(self, flat: Tensor, header: Tensor, views: list[Tensor], magnitude: Tensor, take: Take) -> None:
        """Vote on a bucket, and let `take` have the outcome; maybe only in a later call, or in `_drain`."""
        if self.bits > 1:
            self._to_units(views, magnitude)
        ballots = cast(flat.view(self.inner.size, -1)[self.inner.rank], self.bits, self.group.size, self.step)
        self._rounds.cast(torch.cat([header.expand(self.group.size, -1), ballots], 1), len(header), take)

    def _to_units(self, views: list[Tensor], magnitude: Tensor) -> None:
        sizes = integers([max(v.numel(), 1) for v in views], magnitude.device)
        if self.scale is VoteScale.linf:
            magnitude = torch.stack(list(torch._foreach_norm(views, float("inf"))))
        else:
            magnitude = magnitude / sizes
        delta = magnitude * unit(self.bits, self.scale)
        torch._foreach_mul_(views, list(inverse(delta).unbind()))

    def _mark_used(self, bucket: Bucket, everyone: Tensor, used: Sequence[bool]) -> None:
        """Give a zero gradient to parameters that only other ranks used, so that the optimizer steps them here too."""
        if all(used):
            return
        rows = everyone[:, 1:].tolist()
        for i, slot in enumerate(bucket.slots):
            p = self.params[slot.index]
            if p.grad is None and any(row[i // 63] >> (i % 63) & 1 for row in rows):
                p.grad = torch.zeros_like(p)

    def _conclude(self) -> tuple[float, tuple[int, ...]]:
        sick = torch.stack([h[:, 0] for h in self._headers]).sum(0)
        # A ballot is of all inner ranks, which are `inner.size` in a row (`choice._groups`).
        rows = torch.nonzero(sick).flatten().tolist()
        culprits = tuple(rank for row in rows for rank in range(row * self.inner.size, (row + 1) * self.inner.size))
        norm = torch.stack(self._squares).sum().sqrt() if self._squares else total_norm(self.params)
        return float(norm), culprits


class LionCub(Vote):
    """Lion Cub as published (arXiv:2411.16462): after backward, everything in one buffer.

    Eight bits: codes of at most floor(127 / ranks) steps to either side, so that an int8 all-reduce cannot overflow;
    none is left beyond 127 ranks. One bit: all_to_all, unpacked and added up as int8, all_gather.
    """

    def __init__(self, group: Communicator, *, bits: int = 8, **settings: object):
        super().__init__(group, bits=bits, **(settings | {"overlap": False}))  # type: ignore[arg-type]
        self.levels = 127 // group.size
        if bits == 8 and not self.levels:
            raise UserError(f"optim.exchange=lion_cub: 8 bits have no level for {group.size} ranks; use exchange=vote")

    def _vote(self, flat: Tensor, header: Tensor, views: list[Tensor], magnitude: Tensor, take: Take) -> None:
        if self.bits == 1:
            ballots = cast(flat, 1, self.group.size, self.step)
            received = send(torch.cat([header.expand(self.group.size, -1), ballots], 1), self.group)
            total = _add_signs(received[: self.voters, len(header) :].contiguous())
            winner = cast(total, 1, 1, self.step)[0]
            gathered = winner.new_empty(self.group.size * len(winner))
            self.group.all_gather(gathered, winner, async_op=True).wait()
            take(received[:, : len(header)], gathered)
            return
        self._to_units(views, magnitude)
        codes = flat.mul_(self.levels / 2.0**7).round_().clamp_(-self.levels, self.levels).to(torch.int8)
        if self.abstains:
            codes.zero_()
        self.group.all_reduce(codes, async_op=True).wait()
        everyone = header.new_empty(self.group.size * len(header))
        self.group.all_gather(everyone, header, async_op=True).wait()
        take(everyone.view(self.group.size, -1), cast(codes.float(), 1, 1, self.step)[0])


class DistributedLion(Vote):
    """Distributed Lion by majority vote (arXiv:2404.00438): after backward, every rank gathers every rank's bits."""

    def __init__(self, group: Communicator, **settings: object):
        super().__init__(group, **(settings | {"overlap": False, "bits": 1}))  # type: ignore[arg-type]

    def _vote(self, flat: Tensor, header: Tensor, views: list[Tensor], magnitude: Tensor, take: Take) -> None:
        ballot = torch.cat([header, cast(flat, 1, 1, self.step)[0]])
        everyone = ballot.new_empty(self.group.size * len(ballot))
        self.group.all_gather(everyone, ballot, async_op=True).wait()
        rows = everyone.view(self.group.size, -1)
        total = _add_signs(rows[: self.voters, len(header) :].contiguous())
        take(rows[:, : len(header)], cast(total, 1, 1, self.step)[0])


def _add_signs(ballots: Tensor) -> Tensor:
    """Sum over ranks of the signs in words (P, w), as float (64 w,)."""
    kind = torch.int8 if len(ballots) < 128 else torch.int16
    total = torch.zeros(ballots.shape[1] * WORD, dtype=kind, device=ballots.device)
    for row in ballots:
        total += unpack_signs(row.contiguous(), torch.empty_like(total))
    return total.float()
