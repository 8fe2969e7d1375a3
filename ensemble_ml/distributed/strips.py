"""How one axis is padded, and the strips that ranks give each other for it.

An exchange has two halves: `post` packs what goes out and starts one all_to_all_single, `wait` waits for it and gives
what came in. What lies between runs while the strips travel.
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
    """How one axis is padded: the widths, those of the last rank, and what lies beyond the ends of the whole axis.

    `periodic` axes have no ends. `first` and `last` are the rules of the two ends of others.
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
        """(left, right) of a rank, negative where it crops."""
        end = rank == self.comm.size - 1 and self.right_last is not None
        return self.left, int(self.right_last) if end and self.right_last is not None else self.right

    @property
    def pads(self) -> tuple[int, int]:
        """This rank's widths without cropping."""
        left, right = self.widths(self.comm.rank)
        return max(left, 0), max(right, 0)

    @property
    def crops(self) -> bool:
        """Whether this rank cuts something off."""
        return min(self.widths(self.comm.rank)) < 0

    @property
    def crops_somewhere(self) -> bool:
        """Whether any rank of the axis cuts something off."""
        return min(self.left, self.right, self.right if self.right_last is None else self.right_last) < 0

    @property
    def active(self) -> bool:
        """Whether any rank of the axis has a halo: then all join the exchange, also those that only give."""
        return max(self.left, self.right, self.right_last or 0) > 0

    @property
    def meets(self) -> bool:
        """Whether strips go between neighbours (or round the circle of one rank)."""
        return self.active and (self.comm.size > 1 or self.periodic)

    def neighbours(self) -> tuple[int | None, int | None]:
        """The ranks before and after this one; None at an end."""
        rank, size = self.comm.rank, self.comm.size
        if self.periodic:
            return (rank - 1) % size, (rank + 1) % size
        return (rank - 1 if rank else None), (rank + 1 if rank < size - 1 else None)

    def ends(self) -> Iterator[tuple[bool, EdgeRule, int]]:
        """The ends of the whole axis that this rank holds: (is it the first?, rule, width)."""
        before, after = self.neighbours()
        for is_first, other, rule, width in (
            (True, before, self.first, self.pads[0]),
            (False, after, self.last, self.pads[1]),
        ):
            if other is None and width:
                yield is_first, rule, width

    def inside(self, padded: Tensor) -> Tensor:
        """A padded tensor without its padding along this axis."""
        left, right = self.pads
        return padded.narrow(self.dim, left, padded.shape[self.dim] - left - right)

    def beyond(self, padded: Tensor, is_first: bool) -> Tensor:
        """The padding on one side."""
        width = self.pads[not is_first]
        return padded.narrow(self.dim, 0 if is_first else padded.shape[self.dim] - width, width)

    def outermost(self, inner: Tensor, is_first: bool, skip: int, width: int) -> Tensor:
        """`width` rows of the inside, `skip` away from an end."""
        length = inner.shape[self.dim]
        return inner.narrow(self.dim, skip if is_first else length - skip - width, width)

    def check_thickness(self, length: int) -> None:
        """Raise a UserError where this rank's part is thinner than the halo that a neighbour or a pole needs of it."""
        before, after = self.neighbours()
        needs = [self.widths(before)[1] if before is not None else 0, self.widths(after)[0] if after is not None else 0]
        alone = self.comm.size == 1 and length == 1  # a single row mirrors itself
        needs += [width + rule.skip * (not alone) for _, rule, width in self.ends() if rule.beyond is Beyond.MIRROR]
        if max(needs) <= length:
            return
        if self.comm.size == 1:
            raise UserError(
                f"halo: axis {self.dim} has {length} points, and what lies beyond its ends is made of {max(needs)};"
                " take a smaller kernel or a larger grid"
            )
        raise UserError(
            f"halo: axis {self.dim} of rank {self.comm.rank} of {self.comm.size} has {length} points, a neighbour"
            f" needs {max(needs)} of them; split this axis over fewer ranks (parallel.lat, parallel.lon)"
        )


@dataclass(frozen=True)
class Across:
    """How rows are continued across a pole: `parts` are the columns of every rank, (first, last + 1) each.

    `sign` and `offset` (C, ...) act on channels and on axes after the columns: value -> sign * value + offset.
    """

    parts: tuple[tuple[int, int], ...]
    sign: Tensor | None = None
    offset: Tensor | None = None

    def turned(self, values: Tensor) -> Tensor:
        """`values` with the sign alone, as gradients want it."""
        return values if self.sign is None else values * _by_channel(self.sign, values)

    def continued(self, values: Tensor) -> Tensor:
        """`values` as they are beyond the pole."""
        values = self.turned(values)
        return values if self.offset is None else values + _by_channel(self.offset, values)


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """(C, Z) over (B, C, Y, X, Z); (C,) over (B, C, Y, X)."""
    return values.reshape(values.shape[0], 1, 1, *values.shape[1:]).to(like.dtype)


class Swap:
    """Strips that ranks swap: each gives `out` (rank, view) and gets what `shapes` (rank, shape) announce.

    Strips of one pair of ranks are matched in the order in which both list them.
    """

    def __init__(
        self, comm: Communicator, out: Sequence[tuple[int, Tensor]], shapes: Sequence[tuple[int, torch.Size]],
        like: Tensor,
    ):  # fmt: skip
        self._comm, self._out, self._shapes, self._like = comm, out, shapes, like
        self._joint: tuple[Swap, int] | None = None
        self._found: list[Tensor] | None = None

    def post(self) -> Swap:
        """Send; what is given may change from then on, but where one rank swaps with itself: it is found as it is."""
        if self._comm.size == 1:
            self._found, self._out = [view for _, view in self._out], []
            return self
        sent, received = [0] * self._comm.size, [0] * self._comm.size
        for rank, view in self._out:
            sent[rank] += view.numel()
        for rank, shape in self._shapes:
            received[rank] += shape.numel()
        # Channels last on every rank, whatever the memory order: ranks may not agree on that of a thin part.
        flat = [view.movedim(1, -1).reshape(-1) for _, view in sorted(self._out, key=lambda item: item[0])]
        self._buffer = self._like.new_empty(sum(received))
        self._message = torch.cat(flat) if flat else self._like.new_empty(0)
        self._pending = self._comm.all_to_all_single(self._buffer, self._message, received, sent, async_op=True)
        self._out = []
        return self

    def post_with(self, other: Swap) -> None:
        """Send both as one message of the communicator that they share."""
        joint = Swap(self._comm, [*self._out, *other._out], [*self._shapes, *other._shapes], self._like).post()
        self._out, other._out = [], []
        self._joint, other._joint = (joint, 0), (joint, len(self._shapes))

    def wait(self) -> list[Tensor]:
        """What came in, in the order of `shapes`."""
        if self._joint is not None:
            joint, start = self._joint
            return joint.wait()[start : start + len(self._shapes)]
        if self._found is None:
            self._pending.wait()
            self._found = self._unpacked()
        return self._found

    def _unpacked(self) -> list[Tensor]:
        order = sorted(range(len(self._shapes)), key=lambda i: self._shapes[i][0])
        pieces = dict(zip(order, self._buffer.split([self._shapes[i][1].numel() for i in order]), strict=True))
        return [_shaped(pieces[i], shape) for i, (_, shape) in enumerate(self._shapes)]


def _shaped(flat: Tensor, shape: torch.Size) -> Tensor:
    return flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


class Strip(NamedTuple):
    """Points of a padded axis that come from, or go to, a rank."""

    rank: int
    start: int
    width: int

    def of(self, padded: Tensor, dim: int, cut: int = 0) -> Tensor:
        """The view of them in a tensor that lacks the first `cut` points."""
        return padded.narrow(dim, self.start - cut, self.width)


def strips(length: int, side: Side) -> tuple[list[Strip], list[Strip]]:
    """What goes out and what comes in, in the order of the message: first what lies before the receiver, then what
    lies after it; `length` is that of this rank's own part."""
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
    """Each strip's columns half the circle away, from whichever ranks hold them.

    Given are strips of the own columns, found are such strips, or `wide` ones: with the columns that pad them on both
    sides. `back` is the adjoint: given are what was found, found the sums of what belongs to the own columns.
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
        """Send what others want, in one message with another swap where one is given."""
        if self._swap is not None and together is not None:
            self._swap.post_with(together)
        elif self._swap is not None:
            self._swap.post()

    def wait(self) -> list[Tensor]:
        """The strips, rolled by half the circle."""
        if self._swap is None:
            return [strip.roll(strip.shape[self._dim] // 2, self._dim) for strip in self._given]
        found = [strip.new_zeros(self._shape(strip, self._width)) for strip in self._given]
        for (_, i, start, length), values in zip(self._into, self._swap.wait(), strict=True):
            found[i].narrow(self._dim, start, length).add_(values)
        return found

    def _shape(self, strip: Tensor, columns: int) -> torch.Size:
        return torch.Size([*strip.shape[: self._dim], columns, *strip.shape[self._dim + 1 :]])


def _pieces(
    parts: Sequence[tuple[int, int]], source: int, target: int, reach: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """(start at the source, start at the target, length) of the columns that `target` wants of `source`: those half the
    circle away from its own, and `reach` more before and after them."""
    total = parts[-1][1]
    first, last = parts[target][0] - reach[0], parts[target][1] + reach[1]
    own = parts[source]
    found = []
    for turn in (0, total):  # the wanted columns, in [half - reach, total + half + reach), may pass the circle's end
        wanted = first + total // 2 - turn, last + total // 2 - turn
        start, stop = max(wanted[0], own[0]), min(wanted[1], own[1])
        if start < stop:
            found.append((start - own[0], start - wanted[0], stop - start))
    return found
