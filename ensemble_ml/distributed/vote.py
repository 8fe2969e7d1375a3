"""A vote of all ranks on the sign of each element: p bits an element are sent, and one bit comes back.

    code  = clamp(floor(u / delta), -2^(p-1), 2^(p-1) - 1)
    vote  = 2 code + 1
    delta = c_p mean|u|  (the scale `l1`), or 2^(1-p) max|u|  (`linf`)

    u      the update that a rank proposes, before its sign is taken
    p      bits of a code
    c_p    a constant for each p (`_STEP`)

Each rank sends slice r of its codes to rank r (all_to_all). Rank r adds the votes, takes the sign and sends this one
bit to all ranks (all_gather). This puts (p + 1) / 8 bytes an element on the wire. Precision does not fall with the
number of ranks. p = 1 is a vote of signs, which carry-save adders count on packed words, 64 elements an operation.
Ties and exact zeros fall by a mask that alternates with element and step and is the same on every rank.

The method follows Lion Cub (Ishikawa et al. 2024, arXiv:2411.16462), with the vote in place of their sum of scaled
int8.
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

# c_p = delta / mean|u| of the uniform quantiser with the least squared error; a compromise between the values for a
# normal and for a Laplace distribution.
_STEP = {2: 1.38, 4: 0.52, 8: 0.052}
_TINY = 2.0**-126  # the smallest normal number of float32
_PIECE = 1 << 22  # elements of a piece, which is packed while the piece before travels


def sign_allreduce(
    u: Tensor,
    bits: int,
    group: Communicator,
    step: int,
    *,
    scale: VoteScale = VoteScale.l1,
    out: Tensor | None = None,
) -> Tensor:
    """Vote on the sign of each element of `u` over the ranks of `group`.

    Each rank sends `bits` (1, 2, 4 or 8) bits for each element of `u`: float32, any shape, the same on every rank.
    `scale` is that of delta; `sign` sends one bit, whatever `bits` is. `step` decides how ties fall. `out` is (n,)
    float32 memory for the result, n at least `room(u.numel(), ranks)`; None allocates it. Return +1 or -1 in the shape
    of `u`, the same on every rank.
    """
    flat, size = u.detach().flatten(), room(u.numel(), group.size)
    out = flat.new_empty(size) if out is None else out[:size]
    bits = 1 if scale is VoteScale.sign else bits
    factor = None
    if bits > 1:
        magnitude = flat.abs().mean() if scale is VoteScale.l1 else flat.abs().amax()
        factor = inverse(magnitude * unit(bits, scale))
    # Large tensors go in pieces: each is packed while the ballots of the piece before travel.
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
    """Return the number of elements after padding to whole words in equal slices, not empty, for all ranks."""
    return ranks * max(1, -(-words(elements) // ranks)) * WORD


def _cast_signs(flat: Tensor, ranks: int, step: int) -> Tensor:
    """Return ballots of one bit, words (ranks, w), from any number of floats, which are left unchanged.

    Elements that pad the last word of `flat` count as exact zeros. Words that pad the slices are 0.
    """
    whole = len(flat) // WORD
    packed = torch.zeros(room(len(flat), ranks) // WORD, dtype=torch.int64, device=flat.device)
    packed[:whole] = pack_signs(flat[: whole * WORD], step)
    if whole * WORD < len(flat):
        rest = flat[whole * WORD :]
        packed[whole : whole + 1] = pack_signs(torch.nn.functional.pad(rest, (0, WORD - len(rest))), step)
    return packed.view(ranks, -1)


def unit(bits: int, scale: VoteScale) -> float:
    """Return delta as a multiple of mean|u| (`l1`) or max|u| (`linf`)."""
    return _STEP[bits] if scale is VoteScale.l1 else 2.0 ** (1 - bits)


def inverse(delta: Tensor) -> Tensor:
    """Return 1 / delta, or 0 if delta is below the smallest normal number.

    Below it 1 / delta may be infinite, and zero times infinity is NaN. With 0 all elements count as zero.
    """
    return torch.where(delta >= torch.finfo(delta.dtype).tiny, 1 / delta, 0.0)


def cast(flat: Tensor, bits: int, ranks: int, step: int) -> Tensor:
    """Return this rank's ballots: words (ranks, bits * w), one row for each rank that counts votes.

    `flat` (ranks * 64 * w,) holds floats in units of delta, which are overwritten if `bits` is above 1. `step` decides
    how exact zeros fall.
    """
    if bits == 1:
        return pack_signs(flat, step).view(ranks, -1)
    half = 2 ** (bits - 1)
    # The floor of an exact zero is 0, and that of a tiny negative number is -1. Subtracting a tiny number from every
    # second element makes half of the zeros vote each way. Without it, all zeros would vote +1.
    below = (0.0, _TINY) if tie_bit(step) else (_TINY, 0.0)
    codes = subtract_alternating(flat, *below).floor_().add_(half).clamp_(0, 2 * half - 1).to(torch.uint8)
    return pack_codes(codes.view(ranks, -1), bits)


def send(ballots: Tensor, group: Communicator) -> tuple[Tensor, Pending]:
    """Start to send row r of `ballots` to rank r.

    Return the memory for the rows received, (ranks, words), in rank order, and the pending collective.
    """
    received, sizes = torch.empty_like(ballots), [ballots.shape[1]] * group.size
    return received, group.all_to_all_single(received.view(-1), ballots.reshape(-1), sizes, sizes, async_op=True)


def _tell(winner: Tensor, group: Communicator) -> tuple[Tensor, Pending]:
    """Start to send this rank's words (w,) to all ranks.

    Return the memory for the words of all ranks, (ranks * w,), and the pending collective.

    On a CPU this is an all_to_all of copies, whose messages all leave at once. Gloo's all_gather goes round a ring, and
    each of its ranks - 1 rounds waits for a processor that the backward pass keeps busy.
    """
    everywhere = winner.new_empty(group.size * len(winner))
    if winner.is_cuda:
        return everywhere, group.all_gather(everywhere, winner, async_op=True)
    sizes = [len(winner)] * group.size
    return everywhere, group.all_to_all_single(everywhere, winner.repeat(group.size), sizes, sizes, async_op=True)


# Receives the outcome of a vote: every rank's header (ranks, h) and the winning words of all slices.
Take = Callable[[Tensor, Tensor], object]


@dataclass
class _Flight:
    """The messages of one vote that are under way.

    Attributes:
        pending: the collective that moves `words`.
        words: the ballots that this rank counts, (ranks, bits * w), or the winning words of all ranks, (ranks * w,).
        heads: (ranks, h) headers that came with the ballots.
    """

    pending: Pending
    words: Tensor
    heads: Tensor
    take: Take


class Rounds:
    """The votes of one step, in the same order on all ranks.

    They form a pipeline, in which ballots travel while earlier ones are counted:

        cast 1 | cast 2, count 1 | cast 3, count 2, take 1 | ... | count n, take n - 1 | take n

    Args:
        groups: first the group whose ranks vote. The ranks of each further group then pass each other the winning
            words, in the order of the groups.
        voters: the ballots of the first `voters` ranks count; None counts all.
    """

    def __init__(self, groups: Sequence[Communicator], bits: int, step: int, voters: int | None = None):
        self._groups, self._bits, self._step, self._voters = groups, bits, step, voters
        self._sent: _Flight | None = None
        self._told: _Flight | None = None

    def cast(self, ballots: Tensor, head: int, take: Take) -> None:
        """Send row r of `ballots` (ranks, head + words) to rank r, and advance the earlier votes.

        Each row begins with a header of `head` words. `take` receives the outcome once it has arrived, in a later call
        of `cast` or `finish`.
        """
        received, pending = send(ballots, self._groups[0])
        self._advance(_Flight(pending, received[:, head:], received[:, :head], take))

    def finish(self) -> None:
        """Finish all votes that are under way; all outcomes have then been taken."""
        self._advance(None)
        self._advance(None)

    def _advance(self, sent: _Flight | None) -> None:
        """Move every vote one stage on: count the ballots sent before, and take the winners counted before."""
        counted = None
        if (last := self._sent) is not None:
            last.pending.wait()
            ballots = last.words[: self._voters].contiguous()
            everywhere, pending = _tell(count(ballots, self._bits, self._step), self._groups[0])
            counted = _Flight(pending, everywhere, last.heads, last.take)
        # The counted words are already on their way to all ranks here, so taking an earlier outcome overlaps with them.
        if (told := self._told) is not None:
            told.pending.wait()
            winner = told.words
            for group in self._groups[1:]:
                winner, pending = _tell(winner, group)
                pending.wait()
            told.take(told.heads, winner)
        self._sent, self._told = sent, counted


def count(ballots: Tensor, bits: int, step: int) -> Tensor:
    """Return the winning bits, (w,) words, of ballots (ranks, bits * w). `step` decides how ties fall."""
    if bits == 1 and triton_vote.usable(ballots.device):
        return triton_vote.majority(ballots, tie_word(step))
    if bits == 1:
        return majority(list(ballots.unbind()), step)
    ranks = len(ballots)
    codes = unpack_codes(ballots, bits)
    total = codes[0].to(torch.int16 if ranks * 255 < 2**15 else torch.int32)
    for row in codes[1:]:
        total += row
    # A code c is sent as c + 2^(p-1), so the votes 2 c + 1 of all ranks add up to 2 total - balance. The winning bit is
    # 1 if that is positive, or if it is zero and the tie falls to 1. A tie passes the limit `won`, but not `lost`.
    balance = ranks * (2**bits - 1)
    won, lost = (balance + 1) // 2 - 1, balance // 2
    return pack_above(total, won, lost) if tie_bit(step) else pack_above(total, lost, won)


def majority(planes: Sequence[Tensor], step: int) -> Tensor:
    """Return the bits that more than half of the planes (w,) hold, as (w,) words. Ties fall by the mask of `step`."""
    ranks = len(planes)
    counter = _add_up(planes)
    more = torch.zeros_like(planes[0])
    equal = torch.full_like(planes[0], -1)
    # Compare the bitwise counts with ranks // 2, from the highest binary digit down, for 64 elements at a time: `more`
    # marks counts that are already larger, `equal` those that agree so far.
    for weight in reversed(range(max(len(counter), (ranks // 2).bit_length()))):
        digit = counter[weight] if weight < len(counter) else torch.zeros_like(more)
        if ranks // 2 >> weight & 1:
            equal &= digit
        else:
            more |= equal & digit
            equal &= ~digit
    return more if ranks % 2 else more | (equal & tie_word(step))


def _add_up(planes: Sequence[Tensor]) -> list[Tensor]:
    """Count for each bit how many planes hold it, with full adders that turn three planes into two.

    Return the binary digits of the counts as planes, lowest digit first.
    """
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
