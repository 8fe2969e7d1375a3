"""A vote of all ranks on the sign of each element, at p bits an element out and one bit back.

    code = clamp(floor(u / delta), -2^(p-1), 2^(p-1) - 1)         vote 2 code + 1         delta = c_p mean|u|  (L1)

A rank sends part r of its codes to rank r (all_to_all), which adds the votes up, takes the sign and sends that bit to
all (all_gather): (p + 1) / 8 bytes an element on the wire, and no loss of precision with more ranks. p = 1 is the sign,
counted bit-sliced: one plane of words a rank goes through carry-save adders, 64 elements an operation. Ties and exact
zeros fall by a mask that alternates with element and step and is the same on every rank.

After Ishikawa et al. 2024 (arXiv:2411.16462), with the vote in place of their sum of scaled int8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemble_ml.config import VoteScale
from ensemble_ml.distributed import triton_vote
from ensemble_ml.distributed.communicator import Communicator, Pending
from ensemble_ml.distributed.pack import (
    WORD,
    pack_above,
    pack_codes,
    pack_signs,
    subtract_alternating,
    tie_bit,
    tie_word,
    unpack_codes,
    unpack_signs,
    words,
)

# delta / mean|u| of the uniform quantiser with the least squared error, between a normal and a Laplace distribution.
_STEP = {2: 1.38, 4: 0.52, 8: 0.052}
_TINY = 2.0**-126
_PIECE = 1 << 22  # elements that are packed while those before travel


def sign_allreduce(
    u: Tensor,
    bits: int,
    group: Communicator,
    step: int,
    *,
    scale: VoteScale = VoteScale.l1,
    out: Tensor | None = None,
) -> Tensor:
    """Vote on the sign of each element of `u` over the ranks of `group`; returns +1 or -1 in u's shape.

    Args:
        u: float32, any shape, the same on every rank.
        bits: 1, 2, 4 or 8 bits an element that each rank casts.
        step: number of the step, for the ties.
        scale: what a code is a multiple of; `sign` casts one bit whatever `bits` says.
        out: memory that the result may use, (n,) float32 with n at least `room(u.numel(), ranks)`.
    """
    flat, size = u.detach().flatten(), room(u.numel(), group.size)
    out = flat.new_empty(size) if out is None else out[:size]
    bits = 1 if scale is VoteScale.sign else bits
    factor = None
    if bits > 1:
        magnitude = _magnitude(flat, scale)
        factor = inverse(magnitude * unit(bits, scale))
    rounds = Rounds([group], bits, step)
    piece = room(_PIECE, group.size)
    for start in range(0, size, piece):
        part, own = out[start : start + piece], flat[start : start + piece]
        if factor is None:
            ballots = _cast_signs(own, group.size, step)
        else:
            torch.mul(own, factor, out=part[: len(own)])
            part[len(own) :].zero_()
            ballots = cast(part, bits, group.size, step)
        rounds.cast(ballots, 0, lambda _, winner, part=part: unpack_signs(winner, part))  # type: ignore[misc]
    rounds.finish()
    return out[: u.numel()].view(u.shape)


def room(elements: int, ranks: int) -> int:
    """Elements of the whole words that `ranks` equal parts are made of."""
    return ranks * share(elements, ranks) * WORD


def _cast_signs(flat: Tensor, ranks: int, step: int) -> Tensor:
    """As `cast` with one bit, of any number of floats, which stay as they are; what is added to them stands for 0."""
    whole = len(flat) // WORD
    packed = torch.zeros(room(len(flat), ranks) // WORD, dtype=torch.int64, device=flat.device)
    packed[:whole] = pack_signs(flat[: whole * WORD], step)
    if whole * WORD < len(flat):
        packed[whole : whole + 1] = pack_signs(_padded(flat[whole * WORD :]), step)
    return packed.view(ranks, -1)


def _padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, WORD - len(x)))


def share(elements: int, ranks: int) -> int:
    """Words of each rank's part."""
    return max(1, -(-words(elements) // ranks))


def unit(bits: int, scale: VoteScale) -> float:
    """delta as a multiple of mean|u| (L1) or max|u| (L-infinity)."""
    return _STEP[bits] if scale is VoteScale.l1 else 2.0 ** (1 - bits)


def inverse(delta: Tensor) -> Tensor:
    """1 / delta; 0, so that all counts as zero, where delta is below the smallest normal number: there 1 / delta may be
    infinite, and an exact zero times that is no number."""
    return torch.where(delta >= torch.finfo(delta.dtype).tiny, 1 / delta, 0.0)


def _magnitude(u: Tensor, scale: VoteScale) -> Tensor:
    return u.abs().mean() if scale is VoteScale.l1 else u.abs().amax()


def cast(flat: Tensor, bits: int, ranks: int, step: int) -> Tensor:
    """This rank's ballots, words (ranks, bits w), from floats (ranks 64 w,) in units of delta, which it overwrites."""
    if bits == 1:
        return pack_signs(flat, step).view(ranks, -1)
    half = 2 ** (bits - 1)
    # floor of an exact zero is 0, and of the smallest number below it -1: so half of the zeros vote each way.
    below = (0.0, _TINY) if tie_bit(step) else (_TINY, 0.0)
    codes = subtract_alternating(flat, *below).floor_().add_(half).clamp_(0, 2 * half - 1).to(torch.uint8)
    return pack_codes(codes.view(ranks, -1), bits)


def send(ballots: Tensor, group: Communicator) -> Tensor:
    """Give row r to rank r; returns the rows that came, (ranks, words), in rank order."""
    received = torch.empty_like(ballots)
    sizes = [ballots.shape[1]] * group.size
    group.all_to_all_single(received.view(-1), ballots.reshape(-1), sizes, sizes, async_op=True).wait()
    return received


def tell(winner: Tensor, group: Communicator) -> Tensor:
    """Give this rank's words (w,) to all; returns everybody's, (ranks w,)."""
    everywhere, pending = _tell(winner, group)
    pending.wait()
    return everywhere


def _tell(winner: Tensor, group: Communicator) -> tuple[Tensor, Pending]:
    """As `tell`, under way.

    On a CPU as an all_to_all of copies, whose messages all leave at once: gloo's all_gather goes round a ring, and
    each of its ranks - 1 rounds waits for a processor that backward keeps busy.
    """
    everywhere = winner.new_empty(group.size * len(winner))
    if winner.is_cuda:
        return everywhere, group.all_gather(everywhere, winner, async_op=True)
    sizes = [len(winner)] * group.size
    return everywhere, group.all_to_all_single(everywhere, winner.repeat(group.size), sizes, sizes, async_op=True)


Take = Callable[[Tensor, Tensor], object]  # everyone's heads (ranks, h), and the winning words of all parts


@dataclass
class _Flight:
    """Words under way: ballots (ranks, w) to the ranks that count them, or winners (ranks w,) to all.

    `heads` (ranks, h) are what came with the ballots.
    """

    pending: Pending
    words: Tensor
    heads: Tensor
    take: Take


class Rounds:
    """Votes of one step, in one order on all ranks: ballots travel while those before are counted.

        cast 1 | cast 2, count 1 | cast 3, count 2, take 1 | ... | count n, take n - 1 | take n

    Args:
        groups: ranks that vote, then those, group by group, that pass each other what each of them won.
        bits: of an element in a ballot.
        step: for the ties.
        voters: the first ones, whose ballots count; None: all.
    """

    def __init__(self, groups: Sequence[Communicator], bits: int, step: int, voters: int | None = None):
        self._groups, self._bits, self._step, self._voters = groups, bits, step, voters
        self._sent: _Flight | None = None
        self._told: _Flight | None = None

    def cast(self, ballots: Tensor, head: int, take: Take) -> None:
        """Give row r of `ballots` (ranks, head + words) to rank r, and `take` the outcome when it is there."""
        received, sizes = torch.empty_like(ballots), [ballots.shape[1]] * len(ballots)
        pending = self._groups[0].all_to_all_single(received.view(-1), ballots.reshape(-1), sizes, sizes, async_op=True)
        self._advance(_Flight(pending, received[:, head:], received[:, :head], take))

    def finish(self) -> None:
        """Return when all outcomes are taken."""
        self._advance(None)
        self._advance(None)

    def _advance(self, sent: _Flight | None) -> None:
        counted = None
        if (last := self._sent) is not None:
            last.pending.wait()
            ballots = last.words[: self._voters].contiguous()
            everywhere, pending = _tell(count(ballots, self._bits, self._step), self._groups[0])
            counted = _Flight(pending, everywhere, last.heads, last.take)
        if (told := self._told) is not None:
            told.pending.wait()
            winner = told.words
            for group in self._groups[1:]:
                winner = tell(winner, group)
            told.take(told.heads, winner)
        self._sent, self._told = sent, counted


def count(ballots: Tensor, bits: int, step: int) -> Tensor:
    """The winning bits, (w,) words, of ballots (ranks, bits * w)."""
    if bits == 1 and triton_vote.usable(ballots.device):
        return triton_vote.majority(ballots, tie_word(step))
    if bits == 1:
        return majority(list(ballots.unbind()), step)
    ranks = len(ballots)
    codes = unpack_codes(ballots, bits)
    total = codes[0].to(torch.int16 if ranks * 255 < 2**15 else torch.int32)
    for row in codes[1:]:
        total += row
    # The votes' sum is 2 total - twice: 1 where it is positive, or zero and the tie falls so.
    twice = ranks * (2**bits - 1)
    won, lost = (twice + 1) // 2 - 1, twice // 2
    return pack_above(total, won, lost) if tie_bit(step) else pack_above(total, lost, won)


def majority(planes: Sequence[Tensor], step: int) -> Tensor:
    """The bits that more than half of the planes (w,) hold; ties as the mask of `step` says."""
    ranks = len(planes)
    counter = _add_up(planes)
    more = torch.zeros_like(planes[0])
    equal = torch.full_like(planes[0], -1)
    for weight in reversed(range(max(len(counter), (ranks // 2).bit_length()))):
        digit = counter[weight] if weight < len(counter) else torch.zeros_like(more)
        if ranks // 2 >> weight & 1:
            equal &= digit
        else:
            more |= equal & digit
            equal &= ~digit
    return more if ranks % 2 else more | (equal & tie_word(step))


def _add_up(planes: Sequence[Tensor]) -> list[Tensor]:
    """Binary digits, lowest first, of the number of planes that hold each bit: full adders, three planes to two."""
    counter: list[Tensor] = []
    column = list(planes)
    while column:
        carried = []
        while len(column) > 1:
            a, b = column.pop(), column.pop()
            half = a ^ b
            if column:
                c = column.pop()
                column.append(half ^ c)
                carried.append((a & b) | (half & c))
            else:
                column.append(half)
                carried.append(a & b)
        counter.append(column[0])
        column = carried
    return counter
