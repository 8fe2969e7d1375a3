"""The padding of one axis, and the strips that ranks exchange for it.

An exchange has two halves: `post` packs the outgoing strips and starts one all_to_all_single; `wait` completes it and
returns the strips received. Whatever runs between the two overlaps with the transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ensemble_ml.distributed.communicator import Communicator, NullCommunicator
from ensemble_ml.errors import UserError
from ensemble_ml.models.padding import Beyond, EdgeRule

_ZERO = EdgeRule(Beyond.ZERO)


@dataclass(frozen=True)
class Side:
    """The padding of one axis: its widths, and what lies beyond the ends of the whole axis.

    Attributes:
        left: number of points added before the shard; a negative number crops.
        right: number of points added after the shard; a negative number crops.
        right_last: `right` of the last rank; None if it is the same.
        periodic: the axis closes in a circle and has no ends.
        first: rule of the first end, if the axis has ends.
        last: rule of the last end, if the axis has ends.
    """

    dim: int
    left: int
    right: int
    right_last: int | None = None
    periodic: bool = False
    first: EdgeRule = _ZERO
    last: EdgeRule = _ZERO
    comm: Communicator = field(default_factory=NullCommunicator)

    def widths(self, rank: int) -> tuple[int, int]:
        """Return (left, right) of a rank, negative where it crops."""
        if self.right_last is not None and rank == self.comm.size - 1:
            return self.left, self.right_last
        return self.left, self.right

    @property
    def pads(self) -> tuple[int, int]:
        """Return this rank's widths, with zero in place of cropping."""
        left, right = self.widths(self.comm.rank)
        return max(left, 0), max(right, 0)

    @property
    def crops(self) -> bool:
        """Return whether this rank cuts something off."""
        return min(self.widths(self.comm.rank)) < 0

    @property
    def crops_somewhere(self) -> bool:
        """Return whether any rank of the axis cuts something off."""
        return min(self.left, self.right, self.right if self.right_last is None else self.right_last) < 0

    @property
    def active(self) -> bool:
        """Return whether any rank of the axis is padded. If so, all ranks join the exchange."""
        return max(self.left, self.right, self.right_last or 0) > 0

    @property
    def meets(self) -> bool:
        """Return whether there are strips: between neighbours, or round the circle on a single rank."""
        return self.active and (self.comm.size > 1 or self.periodic)

    def neighbours(self) -> tuple[int | None, int | None]:
        """Return the ranks before and after this one; None at an end of the axis."""
        rank, size = self.comm.rank, self.comm.size
        if self.periodic:
            return (rank - 1) % size, (rank + 1) % size
        return (rank - 1 if rank else None), (rank + 1 if rank < size - 1 else None)

    def ends(self) -> Iterator[tuple[bool, EdgeRule, int]]:
        """Yield (is_first, rule, width) of each end of the whole axis that this rank holds and pads."""
        (before, after), (left, right) = self.neighbours(), self.pads
        if before is None and left:
            yield True, self.first, left
        if after is None and right:
            yield False, self.last, right

    def inside(self, padded: Tensor) -> Tensor:
        """Return the view of a padded tensor without its padding along this axis."""
        left, right = self.pads
        return padded.narrow(self.dim, left, padded.shape[self.dim] - left - right)

    def beyond(self, padded: Tensor, is_first: bool) -> Tensor:
        """Return the view of the padding on one side."""
        width = self.pads[not is_first]
        return padded.narrow(self.dim, 0 if is_first else padded.shape[self.dim] - width, width)

    def outermost(self, inner: Tensor, is_first: bool, skip: int, width: int) -> Tensor:
        """Return the view of `width` rows of the interior, `skip` rows away from an end."""
        length = inner.shape[self.dim]
        return inner.narrow(self.dim, skip if is_first else length - skip - width, width)

    def check_thickness(self, length: int) -> None:
        """Raise a UserError if a shard of `length` points is too thin for neighbours' halos or the mirror at a pole."""
        before, after = self.neighbours()
        needs = [self.widths(before)[1] if before is not None else 0, self.widths(after)[0] if after is not None else 0]
        alone = self.comm.size == 1 and length == 1  # a single row mirrors itself
        needs += [width + rule.skip * (not alone) for _, rule, width in self.ends() if rule.beyond is Beyond.MIRROR]
        if max(needs) <= length:
            return
        if self.comm.size == 1:
            raise UserError(
                f"halo: axis {self.dim} has {length} points, and the padding at its ends is made of {max(needs)}; take"
                " a smaller kernel or a larger grid"
            )
        raise UserError(
            f"halo: axis {self.dim} of rank {self.comm.rank} of {self.comm.size} has {length} points, a neighbour"
            f" needs {max(needs)} of them; split this axis over fewer ranks (parallel.lat, parallel.lon)"
        )


@dataclass(frozen=True)
class Across:
    """The continuation of rows across a pole.

    Wind components change sign there. In standardised units this is an affine map of the values: value -> sign * value
    + offset.

    Attributes:
        parts: columns of every rank, (first, last + 1) each.
        sign: (C, ...) factor by channel and by the axes after the columns; None for 1.
        offset: (C, ...) constant by channel and by the axes after the columns; None for 0.
    """

    parts: tuple[tuple[int, int], ...]
    sign: Tensor | None = None
    offset: Tensor | None = None

    def turned(self, values: Tensor) -> Tensor:
        """Return `values` with the sign applied, without the offset. This is the map that gradients need."""
        return values if self.sign is None else values * _by_channel(self.sign, values)

    def continued(self, values: Tensor) -> Tensor:
        """Return `values` as they are beyond the pole."""
        values = self.turned(values)
        return values if self.offset is None else values + _by_channel(self.offset, values)


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (C, Z) to act on (B, C, Y, X, Z), or (C,) to act on (B, C, Y, X)."""
    return values.reshape(values.shape[0], 1, 1, *values.shape[1:]).to(like.dtype)


class Swap:
    """An exchange of strips between ranks.

    Each rank sends the views `out`, given as (rank, view), and receives strips of the `shapes`, given as (rank, shape).
    Strips of one pair of ranks are matched in the order in which both list them. Views are (B, C, Y, X, ...), and the
    results have the type and device of `like`.
    """

    def __init__(
        self, comm: Communicator, out: Sequence[tuple[int, Tensor]], shapes: Sequence[tuple[int, torch.Size]],
        like: Tensor,
    ):  # fmt: skip
        self._comm, self._out, self._shapes, self._like = comm, out, shapes, like
        self._joint: tuple[Swap, int] | None = None
        self._found: list[Tensor] | None = None

    def post(self) -> Swap:
        """Send the strips and return this exchange.

        The tensors that were sent may change afterwards. The exception is a group of one rank: it swaps with itself,
        and the views themselves are the result.
        """
        if self._comm.size == 1:
            self._found, self._out = [view for _, view in self._out], []
            return self
        sent, received = [0] * self._comm.size, [0] * self._comm.size
        for rank, view in self._out:
            sent[rank] += view.numel()
        for rank, shape in self._shapes:
            received[rank] += shape.numel()
        # Strips are sent channels last on every rank, whatever their order in memory: ranks may not agree on the
        # memory format of a thin shard.
        flat = [view.movedim(1, -1).reshape(-1) for _, view in sorted(self._out, key=lambda item: item[0])]
        self._buffer = self._like.new_empty(sum(received))
        self._message = torch.cat(flat) if flat else self._like.new_empty(0)
        self._pending = self._comm.all_to_all_single(self._buffer, self._message, received, sent, async_op=True)
        self._out = []
        return self

    def post_with(self, other: Swap) -> None:
        """Send this exchange and `other` as one message. Both must have the same communicator and the same type."""
        joint = Swap(self._comm, [*self._out, *other._out], [*self._shapes, *other._shapes], self._like).post()
        self._out, other._out = [], []
        self._joint, other._joint = (joint, 0), (joint, len(self._shapes))

    def wait(self) -> list[Tensor]:
        """Return the strips received, in the order of `shapes`."""
        if self._joint is not None:
            joint, start = self._joint
            return joint.wait()[start : start + len(self._shapes)]
        if self._found is None:
            self._pending.wait()
            self._found = self._unpacked()
        return self._found

    def _unpacked(self) -> list[Tensor]:
        """Cut the received buffer, which is sorted by rank, into strips in the order of `shapes`."""
        order = sorted(range(len(self._shapes)), key=lambda i: self._shapes[i][0])
        pieces = dict(zip(order, self._buffer.split([self._shapes[i][1].numel() for i in order]), strict=True))
        # Strips are sent channels last; their shapes are (B, C, ...).
        shapes = [shape for _, shape in self._shapes]
        return [pieces[i].view(s[0], *s[2:], s[1]).movedim(-1, 1) for i, s in enumerate(shapes)]


class Strip(NamedTuple):
    """The points of a padded axis that come from, or go to, a rank."""

    rank: int
    start: int
    width: int

    def of(self, padded: Tensor, dim: int, cut: int = 0) -> Tensor:
        """Return the view of these points in a tensor that lacks the first `cut` points."""
        return padded.narrow(dim, self.start - cut, self.width)


def strips(length: int, side: Side) -> tuple[list[Strip], list[Strip]]:
    """List the strips of an axis that this rank sends and receives.

    `length` is that of this rank's shard along the axis. Both lists, (strips to send, strips to receive) in points of
    the padded axis, are in the order of the message: first the strip that lies before the receiver, then the one after
    it. Two ranks that are each other's neighbour on both sides rely on this order.
    """
    left, right = side.pads
    before, after = side.neighbours()
    out, into = [], []
    if after is not None and (width := max(side.widths(after)[0], 0)):
        out.append(Strip(after, left + length - width, width))
    if before is not None and (width := max(side.widths(before)[1], 0)):
        out.append(Strip(before, left, width))
    if before is not None and left:
        into.append(Strip(before, 0, left))
    if after is not None and right:
        into.append(Strip(after, left + length, right))
    return out, into


class Opposite:
    """The exchange of rows across a pole: it fetches columns half the circle away, from the ranks that hold them.

    The input strips `given` have this rank's own columns. The results have the same columns or, with `wide`, also those
    that pad the shard on both sides. With `back` it is the adjoint exchange, for gradients: the inputs have the shape
    of the results, and each output column is the sum of the values that were copied from it.
    """

    def __init__(
        self, given: Sequence[Tensor], columns: Side, across: Across, *, wide: bool = False, back: bool = False
    ):
        comm, self._dim = columns.comm, columns.dim
        self._given: Sequence[Tensor] = given
        self._swap: Swap | None = None
        if comm.size == 1:
            assert not wide, "one rank has no corners to ask for"
            return

        def reach(rank: int) -> tuple[int, int]:
            left, right = columns.widths(rank) if wide else (0, 0)
            return max(left, 0), max(right, 0)

        out, self._into = [], []
        for rank in range(comm.size):
            ours = _pieces(across.parts, comm.rank, rank, reach(rank))
            theirs = [(mine, there, n) for there, mine, n in _pieces(across.parts, rank, comm.rank, reach(comm.rank))]
            for start, _, length in theirs if back else ours:
                out += [(rank, strip.narrow(self._dim, start, length)) for strip in given]
            for start, _, length in ours if back else theirs:
                self._into += [(rank, i, start, length) for i in range(len(given))]
        first, last = across.parts[comm.rank]
        self._width = last - first + (0 if back else sum(reach(comm.rank)))
        shapes = [(rank, self._shape(given[i], length)) for rank, i, _, length in self._into]
        self._swap = Swap(comm, out, shapes, given[0])

    def post(self, together: Swap | None = None) -> None:
        """Send what others need, in one message with another swap if one is given."""
        if self._swap is not None and together is not None:
            self._swap.post_with(together)
        elif self._swap is not None:
            self._swap.post()

    def wait(self) -> list[Tensor]:
        """Return the strips, rolled by half the circle."""
        if self._swap is None:
            return [strip.roll(strip.shape[self._dim] // 2, self._dim) for strip in self._given]
        found = [strip.new_zeros(self._shape(strip, self._width)) for strip in self._given]
        for (_, i, start, length), values in zip(self._into, self._swap.wait(), strict=True):
            # In the adjoint of wide strips, several ranks contribute to one column, so values are added.
            found[i].narrow(self._dim, start, length).add_(values)
        return found

    def _shape(self, strip: Tensor, columns: int) -> torch.Size:
        return torch.Size([*strip.shape[: self._dim], columns, *strip.shape[self._dim + 1 :]])


def _pieces(
    parts: Sequence[tuple[int, int]], source: int, target: int, reach: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """List the columns that rank `target` needs from rank `source`.

    These are the columns half the circle away from the target's own, and `reach` more before and after them.

    Return (start at the source, start at the target, length) of each run of columns. Starts count from the first column
    of the source and from the first column that the target needs.
    """
    total = parts[-1][1]
    first, last = parts[target][0] - reach[0], parts[target][1] + reach[1]
    own = parts[source]
    found = []
    # The needed columns lie in [half - reach, total + half + reach), so they may run past the end of the circle.
    for turn in (0, total):
        wanted = first + total // 2 - turn, last + total // 2 - turn
        start, stop = max(wanted[0], own[0]), min(wanted[1], own[1])
        if start < stop:
            found.append((start - own[0], start - wanted[0], stop - start))
    return found
