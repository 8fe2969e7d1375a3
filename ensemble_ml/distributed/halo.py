"""Halo exchange: rows and columns of the neighbours around a rank's part of a field, and its adjoint.

Axes of tensors: B date, C channel, then the others; `rows` and `columns` say which of them are split.

Every rank pads its part by `left` and `right` (negative: crop) on each split axis, with what lies there in the whole
field: a neighbour's points, or at the outer edges what the edge's rule says (zeros, the outermost row repeated, or the
row on the other side of the pole, rolled by half the circle: `models.padding`). A stock operation without padding then
gives exactly its part of the whole result:

    convolution(k, stride s, padding p, dilation d)     left = p     right = d (k - 1) - p - s + 1, at the last rank p

where every part starts at a multiple of s. Axes go in sequence, rows first, so corners come free. One
all_to_all_single an axis carries both sides: no order of sends and receives to get wrong, also where two ranks are each
other's neighbour on both sides. Its backward is the adjoint: what was copied out is added back in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    def active(self) -> bool:
        """Whether any rank of the axis has a halo: then all join the exchange, also those that only give."""
        return max(self.left, self.right, self.right_last or 0) > 0

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


@dataclass(frozen=True)
class Across:
    """How rows are continued across a pole: `parts` are the columns of every rank, (first, last + 1) each.

    `sign` and `offset` (C, ...) act on channels and on axes after the columns: value -> sign * value + offset.
    """

    parts: tuple[tuple[int, int], ...]
    sign: Tensor | None = None
    offset: Tensor | None = None


def halo(x: Tensor, rows: Side | None, columns: Side | None, across: Across | None = None) -> Tensor:
    """Pad this rank's part of a field by what surrounds it in the whole field.

    Args:
        x: (B, C, ...) with split axes `rows.dim` and `columns.dim`; all ranks call with the same widths and rules.
        rows: latitude; None leaves it alone. Its ends may cross a pole, which needs `across` and `columns`.
        columns: longitude; None leaves it alone.

    Raises:
        UserError: this rank's part is thinner than the halo that a neighbour needs of it.
    """
    sides = [side for side in (rows, columns) if side is not None]
    for side in sides:
        _check_thickness(side, x.shape[side.dim])
    if any(side.active for side in sides):
        x = _Halo.apply(x, rows, columns, across)
    for side in sides:
        left, right = side.widths(side.comm.rank)
        if left < 0 or right < 0:
            start = max(-left, 0)
            x = x.narrow(side.dim, start, x.shape[side.dim] - start - max(-right, 0))
    return x


def _check_thickness(side: Side, length: int) -> None:
    before, after = side.neighbours()
    needs = [side.widths(before)[1] if before is not None else 0, side.widths(after)[0] if after is not None else 0]
    alone = side.comm.size == 1  # then a single row may mirror itself
    needs += [width + rule.skip * (not alone) for _, rule, width in side.ends() if rule.beyond is Beyond.MIRROR]
    if max(needs) > length:
        raise UserError(
            f"halo: axis {side.dim} of rank {side.comm.rank} of {side.comm.size} has {length} points, a neighbour"
            f" needs {max(needs)} of them; split this axis over fewer ranks (parallel.lat, parallel.lon)"
        )


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Side | None, columns: Side | None, across: Across | None) -> Tensor:
        ctx.sides = rows, columns, across
        pads = [(0, 0)] * x.ndim
        for side in (rows, columns):
            if side is not None:
                pads[side.dim] = side.pads
        padded = _empty_like(x, [n + sum(pad) for n, pad in zip(x.shape, pads, strict=True)])
        inner = padded
        for dim, (left, _) in enumerate(pads):
            inner = inner.narrow(dim, left, x.shape[dim])
        inner.copy_(x)
        if rows is not None:
            view = padded if columns is None else _inside(padded, columns)
            _fill(view, rows)
            _fill_ends(view, rows, columns, across)
        if columns is not None:
            _fill(padded, columns)
            _fill_ends(padded, columns, None, None)
        return padded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, columns, across = ctx.sides
        if columns is not None:
            inner = _inside(grad, columns).clone()
            cut = columns.pads[0]
            _add_back(inner, grad, columns, cut=cut)
            _add_back_ends(inner, grad, columns, None, None, cut=cut)
            grad = inner
        elif rows is not None:
            grad = grad.clone()
        if rows is not None:
            _add_back(grad, grad, rows, cut=0)
            _add_back_ends(grad, grad, rows, columns, across, cut=0)
            grad = _inside(grad, rows)
        return grad, None, None, None


def _empty_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor in the memory order of `x`."""
    if x.ndim == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return x.new_empty(shape[0], *shape[2:], shape[1]).permute(0, 4, 1, 2, 3)
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.new_empty(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
    return x.new_empty(shape)


def _inside(padded: Tensor, side: Side) -> Tensor:
    left, right = side.pads
    return padded.narrow(side.dim, left, padded.shape[side.dim] - left - right)


def _parts(length: int, side: Side) -> tuple[list[_Part], list[_Part]]:
    """What goes out and what comes in, in the order of the message: first what lies before the receiver, then what
    lies after it; `length` is that of this rank's own part."""
    left, right = side.pads
    before, after = side.neighbours()
    out, into = [], []
    if after is not None and (width := max(side.widths(after)[0], 0)):
        out.append(_Part(after, left + length - width, width))
    if before is not None and (width := max(side.widths(before)[1], 0)):
        out.append(_Part(before, left, width))
    if before is not None and left:
        into.append(_Part(before, 0, left))
    if after is not None and right:
        into.append(_Part(after, left + length, right))
    return out, into


class _Part(NamedTuple):
    """Points of the padded axis that come from, or go to, a rank."""

    rank: int
    start: int
    width: int

    def of(self, padded: Tensor, dim: int, cut: int = 0) -> Tensor:
        return padded.narrow(dim, self.start - cut, self.width)


def _length(padded: Tensor, side: Side) -> int:
    return padded.shape[side.dim] - sum(side.pads)


def _fill(padded: Tensor, side: Side) -> None:
    if not side.active or (side.comm.size == 1 and not side.periodic):
        return
    out, into = _parts(_length(padded, side), side)
    views = [(part.rank, part.of(padded, side.dim)) for part in into]
    found = _exchange(side.comm, [(part.rank, part.of(padded, side.dim)) for part in out], views, padded)
    for (_, view), received in zip(views, found, strict=True):
        view.copy_(received)


def _add_back(inner: Tensor, grad: Tensor, side: Side, *, cut: int) -> None:
    """Adjoint of `_fill`: halos of `grad` go back to where they came from, and are added to `inner`, which lacks the
    first `cut` points."""
    if not side.active or (side.comm.size == 1 and not side.periodic):
        return
    own, halos = _parts(_length(grad, side), side)
    views = [(part.rank, part.of(inner, side.dim, cut)) for part in own]
    found = _exchange(side.comm, [(part.rank, part.of(grad, side.dim)) for part in halos], views, grad)
    for (_, view), addend in zip(views, found, strict=True):
        view.add_(addend)


def _exchange(
    comm: Communicator, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]], like: Tensor
) -> list[Tensor]:
    """Send the views of `out`, and return what belongs into the views of `into`, in their order."""
    sent, received = [0] * comm.size, [0] * comm.size
    for rank, view in out:
        sent[rank] += view.numel()
    for rank, view in into:
        received[rank] += view.numel()
    # Channels last on every rank, whatever the memory order: ranks may not agree on that of a thin part.
    flat = [view.movedim(1, -1).reshape(-1) for _, view in sorted(out, key=lambda item: item[0])]
    message = torch.cat(flat) if flat else like.new_empty(0)
    buffer = like.new_empty(sum(received))
    comm.all_to_all_single(buffer, message, received, sent)
    order = sorted(range(len(into)), key=lambda i: into[i][0])
    pieces = dict(zip(order, buffer.split([into[i][1].numel() for i in order]), strict=True))
    return [_shaped(pieces[i], view) for i, (_, view) in enumerate(into)]


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    return flat.view(like.movedim(1, -1).shape).movedim(-1, 1)


def _fill_ends(padded: Tensor, side: Side, columns: Side | None, across: Across | None) -> None:
    """Fill what lies beyond the ends of the whole axis."""
    mirrors = []
    for is_first, rule, width in side.ends():
        target = _beyond(padded, side, is_first)
        if rule.beyond is Beyond.ZERO:
            target.zero_()
        elif rule.beyond is Beyond.REPLICATE:
            target.copy_(_edge(padded, side, is_first, 0, 1).expand_as(target))
        else:
            mirrors.append((target, _mirrored(padded, side, is_first, rule.skip, width)))
    if mirrors:
        assert across is not None and columns is not None
        rolled = _opposite([source for _, source in mirrors], columns, across)
        for (target, _), source in zip(mirrors, rolled, strict=True):
            value = source.flip(side.dim)
            if across.sign is not None:
                value = value * _by_channel(across.sign, value)
            target.copy_(value if across.offset is None else value + _by_channel(across.offset, value))


def _add_back_ends(
    inner: Tensor, grad: Tensor, side: Side, columns: Side | None, across: Across | None, *, cut: int
) -> None:
    """Adjoint of `_fill_ends`, added to `inner`, which lacks the first `cut` points."""
    mirrors = []
    for is_first, rule, width in side.ends():
        beyond = _beyond(grad, side, is_first)
        if rule.beyond is Beyond.REPLICATE:
            left = side.pads[0]
            at = left if is_first else left + _length(grad, side) - 1
            inner.narrow(side.dim, at - cut, 1).add_(beyond.sum(side.dim, keepdim=True))
        elif rule.beyond is Beyond.MIRROR:
            mirrors.append((_mirrored(inner, side, is_first, rule.skip, width), beyond))
    if mirrors:
        assert across is not None and columns is not None
        gone = [beyond.flip(side.dim) for _, beyond in mirrors]
        if across.sign is not None:
            gone = [g * _by_channel(across.sign, g) for g in gone]
        for (place, _), addend in zip(mirrors, _opposite(gone, columns, across), strict=True):
            place.add_(addend)


def _beyond(padded: Tensor, side: Side, is_first: bool) -> Tensor:
    left, right = side.pads
    return (
        padded.narrow(side.dim, 0, left) if is_first else padded.narrow(side.dim, padded.shape[side.dim] - right, right)
    )


def _edge(padded: Tensor, side: Side, is_first: bool, skip: int, width: int) -> Tensor:
    """`width` rows of the inside, `skip` away from an end."""
    left, right = side.pads
    start = left + skip if is_first else padded.shape[side.dim] - right - skip - width
    return padded.narrow(side.dim, start, width)


def _mirrored(padded: Tensor, side: Side, is_first: bool, skip: int, width: int) -> Tensor:
    return _edge(
        padded, side, is_first, min(skip, _length(padded, side) - width), width
    )  # one row alone mirrors itself


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """(C, Z) over (B, C, Y, X, Z); (C,) over (B, C, Y, X)."""
    return values.reshape(values.shape[0], 1, 1, *values.shape[1:]).to(like.dtype)


def _opposite(strips: Sequence[Tensor], columns: Side, across: Across) -> list[Tensor]:
    """Each strip's columns half the circle away, from whichever ranks hold them.

    Half the circle there and half the circle back are the same way, so the adjoint is the same exchange.
    """
    comm, dim = columns.comm, columns.dim
    if comm.size == 1:
        return [strip.roll(strip.shape[dim] // 2, dim) for strip in strips]
    found = [torch.empty_like(strip) for strip in strips]
    out, into = [], []
    for rank in range(comm.size):
        for start, _, length in _pieces(across.parts, comm.rank, rank):
            out += [(rank, strip.narrow(dim, start, length)) for strip in strips]
        for _, start, length in _pieces(across.parts, rank, comm.rank):
            into += [(rank, strip.narrow(dim, start, length)) for strip in found]
    for (_, view), received in zip(into, _exchange(comm, out, into, strips[0]), strict=True):
        view.copy_(received)
    return found


def _pieces(parts: Sequence[tuple[int, int]], source: int, target: int) -> list[tuple[int, int, int]]:
    """(start at the source, start at the target, length) of the columns that `target` wants of `source`."""
    total = parts[-1][1]
    first, last = parts[target]
    own = parts[source]
    found = []
    for turn in (0, total):  # the wanted columns, in [half, total + half), may pass the end of the circle
        wanted = first + total // 2 - turn, last + total // 2 - turn
        start, stop = max(wanted[0], own[0]), min(wanted[1], own[1])
        if start < stop:
            found.append((start - own[0], start - wanted[0], stop - start))
    return found
