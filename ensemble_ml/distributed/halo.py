"""Exchange halos: pad a rank's shard with rows and columns of its neighbours, and apply the adjoint of this padding.

Axes of tensors: B init time, C channel, then the axes of the field. `rows` and `columns` name the axes that are split.

Every rank pads its shard by `left` and `right` points on each split axis. A negative width crops. The padding holds the
values that the whole field has there. These are points of a neighbour or, beyond the outer edges, the values that the
rule of the edge gives: zeros, the outermost row repeated, or the row on the other side of the pole, rolled by half the
circle (see `models.padding`). An ordinary operation without padding then gives exactly this rank's shard of the whole
result. For a convolution:

    left  = p
    right = d (k - 1) - p - s + 1      at the last rank: p

    k   kernel size
    s   stride
    p   padding
    d   dilation

The formulas hold if every shard starts at a multiple of s.

Axes are padded in sequence, rows first, so that corners need no exchange of their own. If every rank holds all rows,
the rows from across the poles bring their corners with them and travel together with the columns. One all_to_all_single
for each axis carries the strips of both sides. It cannot deadlock, even if two ranks are each other's neighbour on both
sides. The backward pass is the adjoint of the padding: it adds the gradient of each copied point to the point that was
copied.

The interior of the shard is copied while the strips travel. `overlap.halo_conv` also computes during that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ensemble_ml.distributed.strips import Across, Opposite, Side, Swap, strips
from ensemble_ml.models.padding import Beyond, empty_in_order_of


def halo(x: Tensor, rows: Side | None, columns: Side | None, across: Across | None = None) -> Tensor:
    """Pad this rank's shard of a field by the points that surround it in the whole field.

    All ranks of the split axes call this with the same widths and rules. The result is differentiable.

    `x` (B, C, ...) is the shard, with split axes `rows.dim` and `columns.dim`. An axis without a `Side` is not padded.
    A padding across a pole needs `across` and `columns`.

    Return the shard, longer by `left + right` along each axis, or shorter where that sum is negative.

    Raises:
        UserError: this rank's shard is thinner than a neighbour's halo, or than the rows that a pole mirrors.
    """
    sides = check(x, rows, columns)
    if any(side.active for side in sides):
        x = _Halo.apply(x, rows, columns, across)
    return cropped(x, sides)


def check(x: Tensor, rows: Side | None, columns: Side | None) -> list[Side]:
    """Check that the shard is thick enough (`Side.check_thickness`), and return the sides that are not None."""
    sides = [side for side in (rows, columns) if side is not None]
    for side in sides:
        side.check_thickness(x.shape[side.dim])
    return sides


def cropped(x: Tensor, sides: Sequence[Side]) -> Tensor:
    """Return `x` without the points that negative widths of `sides` cut off."""
    for side in sides:
        left, right = side.widths(side.comm.rank)
        if left < 0 or right < 0:
            start = max(-left, 0)
            x = x.narrow(side.dim, start, x.shape[side.dim] - start - max(-right, 0))
    return x


class _Halo(torch.autograd.Function):
    """The autograd function of `halo`, whose backward pass is the adjoint of the padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Side | None, columns: Side | None, across: Across | None) -> Tensor:
        ctx.sides = rows, columns, across
        padded, filling = begin_padding(x, rows, columns, across)
        for one in filling:
            one.begin()
            one.finish()
        return padded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return Folding(grad, *ctx.sides).finish(), None, None, None


def begin_padding(
    x: Tensor, rows: Side | None, columns: Side | None, across: Across | None
) -> tuple[Tensor, list[Filling]]:
    """Make the padded tensor, start the exchange, and copy the interior meanwhile.

    Return the padded tensor and the fillings that remain to be finished, in order. That of the rows has begun. That of
    the columns has begun only if both axes are exchanged at the same time.
    """
    pads = [(0, 0)] * x.ndim
    for side in (rows, columns):
        if side is not None:
            pads[side.dim] = side.pads
    padded = empty_in_order_of(x, [n + sum(pad) for n, pad in zip(x.shape, pads, strict=True)])
    inner = padded
    for dim, (left, _) in enumerate(pads):
        inner = inner.narrow(dim, left, x.shape[dim])
    filling = []
    # The strips are taken from `x` and not from `padded`, so that they can leave before the interior is copied.
    if rows is not None and columns is not None and at_once(rows, columns):
        filling = [Filling(padded, rows, columns, across), Filling(rows.inside(padded), columns, None, None)]
        for one in filling:
            one.prepare(x)
        filling[0].post(filling[1])
    else:
        if rows is not None:
            filling.append(Filling(padded if columns is None else columns.inside(padded), rows, columns, across))
            filling[0].begin(x)
        if columns is not None:
            filling.append(Filling(padded, columns, None, None))
    inner.copy_(x)
    return padded, filling


def at_once(rows: Side | None, columns: Side | None) -> bool:
    """Return whether both axes can be exchanged at the same time.

    This holds if columns are split and padded, every rank has all rows and crops none, and every row beyond the ends
    comes from across a pole. The corners then come from across the pole as well, so neighbours along the columns send
    only rows that this rank itself holds.
    """
    if rows is None or columns is None or rows.comm.size > 1 or columns.comm.size == 1 or rows.crops:
        return False
    ends = list(rows.ends())
    return columns.meets and bool(ends) and all(rule.beyond is Beyond.MIRROR for _, rule, _ in ends)


class Filling:
    """The filling of the padding along one axis.

    `padded` is the padded tensor, or a view of it without the padding of the other axis. `begin` sends the strips and
    `finish` receives them, so that other work can run in between.
    """

    def __init__(self, padded: Tensor, side: Side, columns: Side | None, across: Across | None):
        self.padded, self.side, self._columns, self._across = padded, side, columns, across
        self._begun = False

    def begin(self, inner: Tensor | None = None) -> None:
        """Send the strips that other ranks need of the interior (None: of `padded`), unless they have been sent."""
        if not self._begun:
            self.prepare(inner)
            self.post()

    def post(self, together: Filling | None = None) -> None:
        """Send the strips that `prepare` collected.

        The strips of the other axis, `together`, travel in one message with the rows from across the poles.
        """
        if self._mirrors:
            self._opposite.post(None if together is None else together._swap)
        if self.side.meets:
            self._swap.post()

    def prepare(self, inner: Tensor | None) -> None:
        """Collect the strips of the interior that other ranks need, and list what this rank will receive."""
        self._begun, side = True, self.side
        inner = side.inside(self.padded) if inner is None else inner
        self._mirrors = [(first, rule, width) for first, rule, width in side.ends() if rule.beyond is Beyond.MIRROR]
        if self._mirrors:
            assert self._across is not None and self._columns is not None
            given = [_mirrored(inner, side, *end) for end in self._mirrors]
            self._opposite = Opposite(given, self._columns, self._across, wide=at_once(side, self._columns))
        if side.meets:
            out, self._into = strips(inner.shape[side.dim], side)
            sent = [(part.rank, part.of(inner, side.dim, side.pads[0])) for part in out]
            shapes = [(part.rank, part.of(self.padded, side.dim).shape) for part in self._into]
            self._swap = Swap(side.comm, sent, shapes, self.padded)

    def finish(self) -> None:
        """Wait for the strips, and fill the padding at both ends of the axis."""
        self.finish_ends()
        self.finish_strips()

    def finish_ends(self) -> None:
        """Fill the points beyond the ends of the whole axis."""
        side, padded = self.side, self.padded
        for is_first, rule, _ in side.ends():
            # Rows from across a pole are filled below.
            target = side.beyond(padded, is_first)
            if rule.beyond is Beyond.ZERO:
                target.zero_()
            elif rule.beyond is Beyond.REPLICATE:
                target.copy_(side.outermost(side.inside(padded), is_first, 0, 1).expand_as(target))
        if self._mirrors:
            assert self._across is not None
            for (is_first, _, _), source in zip(self._mirrors, self._opposite.wait(), strict=True):
                side.beyond(padded, is_first).copy_(self._across.continued(source.flip(side.dim)))

    def finish_strips(self) -> None:
        """Wait for the strips of the neighbours, and fill the points that they hold."""
        if self.side.meets:
            for part, received in zip(self._into, self._swap.wait(), strict=True):
                part.of(self.padded, self.side.dim).copy_(received)


class Adjoint:
    """The adjoint of padding along one axis: it adds the halos of `grad` to the points that they were copied from.

    The resulting gradient is dense, as the gradient of a whole field is. It is the interior of `grad` itself if that is
    dense and `own` permits changes in place. Otherwise it is a copy, which is made while the strips travel. If `poles`
    is given, its rows from beyond the poles travel in the same message as the strips.
    """

    def __init__(
        self, grad: Tensor, side: Side, columns: Side | None, across: Across | None, *, own: bool = False,
        poles: Poles | None = None,
    ):  # fmt: skip
        self.side = side
        # The strips for other ranks are sent first, so that they travel during the local work.
        self._poles = Poles(grad, side, columns, across)
        self._poles.post()
        if side.meets:
            self._own, halos = strips(side.inside(grad).shape[side.dim], side)
            shapes = [(part.rank, part.of(grad, side.dim).shape) for part in self._own]
            self._swap = Swap(side.comm, [(part.rank, part.of(grad, side.dim)) for part in halos], shapes, grad)
            if poles is None:
                self._swap.post()
            else:
                poles.post(self._swap)
        inner = side.inside(grad)
        # A clone keeps the order of the axes in memory, such as channels last.
        self._inner = inner if own and _is_dense(inner) else inner.clone()
        for is_first, rule, _ in side.ends():
            if rule.beyond is Beyond.REPLICATE:
                # All padding rows are copies of the outermost row, so their gradients add up on it.
                beyond = side.beyond(grad, is_first).sum(side.dim, keepdim=True)
                side.outermost(self._inner, is_first, 0, 1).add_(beyond)

    def finish(self) -> Tensor:
        """Add what other ranks sent, and return the gradient of the tensor that was padded."""
        side, inner = self.side, self._inner
        if side.meets:
            for part, addend in zip(self._own, self._swap.wait(), strict=True):
                part.of(inner, side.dim, side.pads[0]).add_(addend)
        self._poles.give_back(inner)
        return inner


class Poles:
    """An exchange that returns the rows of `grad` beyond the poles to the rows that they mirror.

    Without ends at a pole it does nothing.
    """

    def __init__(self, grad: Tensor, rows: Side, columns: Side | None, across: Across | None):
        self._rows = rows
        self._ends = [end for end in rows.ends() if end[1].beyond is Beyond.MIRROR]
        if self._ends:
            assert across is not None and columns is not None
            gone = [across.turned(rows.beyond(grad, first).flip(rows.dim)) for first, _, _ in self._ends]
            self._opposite = Opposite(gone, columns, across, wide=at_once(rows, columns), back=True)

    def post(self, together: Swap | None = None) -> None:
        """Send the rows, in one message with the swap `together` if it is given."""
        if self._ends:
            self._opposite.post(together)

    def give_back(self, inner: Tensor) -> None:
        """Add the received gradients to the rows that they mirror."""
        if self._ends:
            for end, addend in zip(self._ends, self._opposite.wait(), strict=True):
                _mirrored(inner, self._rows, *end).add_(addend)


class Folding:
    """The adjoint of the padding of both axes: it turns the gradient of a padded shard into that of the shard.

    The constructor does all that is possible without waiting for a neighbour, and `finish` does the rest. Axes are
    folded in the reverse order of padding. If `own` is set, `grad` may be changed in place.
    """

    def __init__(
        self, grad: Tensor, rows: Side | None, columns: Side | None, across: Across | None, *, own: bool = False
    ):
        self._grad, self._own = grad, own
        self._begun: Adjoint | None = None
        self._poles: Poles | None = None
        self._rest: list[tuple[Side, Side | None, Across | None]] = []
        if columns is not None:
            self._rest.append((columns, None, None))
        if rows is not None and at_once(rows, columns):
            self._poles = Poles(grad, rows, columns, across)
            self._grad = rows.inside(grad)
        elif rows is not None:
            self._rest.append((rows, columns, across))
        while self._rest and self._begun is None:
            self._step(wait=False)

    def _step(self, *, wait: bool) -> None:
        """Fold the next axis. Unless `wait` is set, only begin to fold an axis whose neighbours have to answer."""
        side, columns, across = self._rest.pop(0)
        adjoint = Adjoint(self._grad, side, columns, across, own=self._own, poles=self._poles)
        # After the first axis the gradient belongs to this object, so it may be changed in place.
        self._own = True
        if wait or not (side.meets and side.comm.size > 1):
            self._grad = adjoint.finish()
        else:
            self._begun = adjoint

    def finish(self) -> Tensor:
        """Wait for the neighbours and return the gradient of the shard."""
        if self._begun is not None:
            self._grad = self._begun.finish()
        while self._rest:
            self._step(wait=True)
        if self._poles is not None:
            self._poles.give_back(self._grad)
        return self._grad


def _mirrored(inner: Tensor, side: Side, is_first: bool, rule: Any, width: int) -> Tensor:
    """Return the rows of the interior from which the padding beyond an end is mirrored."""
    # A grid of a single row has no row to skip, so that row mirrors itself.
    return side.outermost(inner, is_first, min(rule.skip, inner.shape[side.dim] - width), width)


def _is_dense(x: Tensor) -> bool:
    """Return whether `x` fills its memory without gaps, channels first or channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim, torch.contiguous_format)
    return x.is_contiguous() or x.is_contiguous(memory_format=last)
