"""A convolution of a rank's shard that is computed while its halo travels.

In the forward pass the strips are sent first. The whole shard is then convolved with zeros in place of the halo, and
the few outer rows (or columns) of the result that depend on the halo are computed again once it has arrived. So most of
the work is one call at the usual shape. To convolve the interior alone, it and its result would have to be copied. In
the backward pass the gradient of the input comes first, and its halo travels back to the neighbours while the gradient
of the weights is computed.

If both axes are split, rows go first because corners travel with the columns, and only the exchange of columns is
hidden. If only longitude is split and rows come from across the poles, these rows travel together with the columns. The
forward pass then waits for both, because otherwise all four sides would have to be computed again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.distributed.halo import Filling, Folding, at_once, begin_padding, check, halo
from ensemble_ml.distributed.strips import Across, Side


@dataclass(eq=False)
class Overlap:
    """A switch that is shared by all layers of a model: whether convolutions compute while their halos travel."""

    on: bool = False

    def __deepcopy__(self, _: object) -> Overlap:
        return self  # a copy of a model follows the same switch


@dataclass(frozen=True)
class Window:
    """The stride, padding (with zeros, on axes without a halo), dilation and groups of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def of(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the stock convolution."""
        function = F.conv3d if x.ndim == 5 else F.conv2d
        return function(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


def halo_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, rows: Side | None, columns: Side | None,
    across: Across | None = None, *, overlap: bool = False,
) -> Tensor:  # fmt: skip
    """Return this rank's shard of the convolution of a whole field: `window` on `halo(x, rows, columns, across)`.

    `x` (B, C, ...) is the shard, `weight` (O, C / groups, ...) the kernel of a stock convolution in two or three
    dimensions. With `overlap`, compute while the halo travels, where that is possible.

    Raises:
        UserError: this rank's shard is thinner than a neighbour's halo, or than the rows that a pole mirrors.
    """
    sides = check(x, rows, columns)
    split = any(side.meets and side.comm.size > 1 for side in sides)
    if not (overlap and split) or any(side.crops_somewhere for side in sides):
        return window.of(halo(x, rows, columns, across), weight, bias)
    # Inside the custom function autocast is off, so its casts are made here. The backward pass needs input, weight and
    # gradient of one type.
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        x, weight, bias = _lowered(x, low), _lowered(weight, low), None if bias is None else _lowered(bias, low)
    return _HaloConv.apply(x, weight, bias, window, rows, columns, across)


def _lowered(x: Tensor, low: torch.dtype) -> Tensor:
    return x if x.dtype is torch.float64 else x.to(low)  # as autocast does


class _HaloConv(torch.autograd.Function):
    """The autograd function of `halo_conv`, which computes while halos travel, in both passes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, rows: Side | None,
        columns: Side | None, across: Across | None,
    ) -> Tensor:  # fmt: skip
        with torch.autocast(x.device.type, enabled=False):
            padded, out = _forward(x, weight, bias, window, rows, columns, across)
        ctx.save_for_backward(padded, weight)
        ctx.rest = window, rows, columns, across, None if bias is None else list(bias.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight = ctx.saved_tensors
        window, rows, columns, across, bias = ctx.rest

        def gradients(*wanted: bool) -> tuple[Tensor | None, ...]:
            return torch.ops.aten.convolution_backward(
                grad, padded, weight, bias, window.stride, window.padding, window.dilation, False,
                [0] * (padded.ndim - 2), window.groups, wanted,
            )  # fmt: skip

        found, then = None, None
        if ctx.needs_input_grad[0]:
            found = gradients(True, False, False)[0]
            assert found is not None
            then = Folding(found, rows, columns, across, own=True)
        # The halo of the input's gradient is on its way to the neighbours while these are computed.
        others = gradients(False, ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2])[1:]
        if then is not None:
            found = then.finish()
        return found, *others, None, None, None, None


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, rows: Side | None, columns: Side | None,
    across: Across | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the convolution and return the padded shard, which the backward pass needs, and the result."""
    padded, filling = begin_padding(x, rows, columns, across)
    if at_once(rows, columns):
        for one in filling:
            one.finish()
        return padded, window.of(padded, weight, bias)
    # Only the last exchange with another rank is hidden; those before it are completed first, because it carries their
    # corners.
    late = max(i for i, one in enumerate(filling) if one.side.meets and one.side.comm.size > 1)
    for one in filling[:late]:
        one.begin()
        one.finish()
    travelling, side = filling[late], filling[late].side
    travelling.begin()
    travelling.finish_ends()
    for is_first, neighbour in zip((True, False), side.neighbours(), strict=True):
        if neighbour is not None:
            # Uninitialised memory may hold numbers that are slow to multiply, such as subnormal ones.
            side.beyond(travelling.padded, is_first).zero_()
    _fill(padded, filling[late + 1 :])
    out = window.of(padded, weight, bias)
    travelling.finish_strips()
    _fill(padded, filling[late + 1 :])
    # Compute the outer results again, now that the halo is there.
    for first, last in _outer(padded, out, weight, window, side):
        step, reach = window.stride[side.dim - 2], _reach(weight, window, side)
        piece = padded.narrow(side.dim, first * step, (last - 1 - first) * step + reach)
        out.narrow(side.dim, first, last - first).copy_(window.of(piece, weight, bias))
    return padded, out


def _fill(padded: Tensor, local: list[Filling]) -> None:
    """Pad axes that are not split. This runs before and after the halo arrives, because corners depend on the halo."""
    for one in local:
        again = Filling(padded, one.side, None, None)
        again.begin()
        again.finish()


def _reach(weight: Tensor, window: Window, side: Side) -> int:
    """Return how many points of the input one result depends on along an axis."""
    return window.dilation[side.dim - 2] * (weight.shape[side.dim] - 1) + 1


def _outer(padded: Tensor, out: Tensor, weight: Tensor, window: Window, side: Side) -> list[tuple[int, int]]:
    """Return (first, last + 1) of the results on each side that depend on the neighbours' points."""
    (left, right), (before, after) = side.pads, side.neighbours()
    step, total = window.stride[side.dim - 2], out.shape[side.dim]
    begin = min(-(-left // step), total) if before is not None else 0
    end = total
    if after is not None and right:
        # The first input position from which a kernel reaches into the halo.
        seen = padded.shape[side.dim] - right - _reach(weight, window, side) + 1
        end = max(begin, -(-max(seen, 0) // step))
    return [(a, b) for a, b in ((0, begin), (end, total)) if a < b]


def choose_overlap(switch: Overlap, step: Callable[[], Any], group: Communicator) -> dict[str, float]:
    """Time `step` with and without overlap, and set `switch` to the faster way, the same on all ranks.

    The slowest rank's median counts. Every rank calls `step` four times each way, and the first time is not counted.
    Return the seconds of both ways, as "off" and "on".
    """
    times: dict[bool, list[float]] = {False: [], True: []}
    # Both ways alternate, so that a slow change of the machine's speed affects both alike.
    for _ in range(4):
        for on in times:
            switch.on = on
            group.barrier()
            began = time.perf_counter()
            step()
            times[on].append(time.perf_counter() - began)
    found = torch.tensor([statistics.median(times[on][1:]) for on in (False, True)], dtype=torch.float64)
    group.all_reduce(found, op="max")
    off, on = found.tolist()
    switch.on = on < off
    return {"off": off, "on": on}
