"""The modified 3D U-Net: convolutions over latitude, longitude and level, and pooling over latitude and longitude only.

"Modified" is how weights act across the planes of the network (`Vertical`):

    shared      one kernel for all planes
    affine      one kernel for all planes, with a scale and a shift of each plane's own
    separable   a horizontal kernel, then a vertical one
    full        a kernel for each plane

Beyond the top and the lowest plane the network sees zeros, because nothing continues there, and a convolution pads
zeros for free.

There are no normalisation layers. Inputs are standardised, every residual branch starts at zero, and a learned scale
and shift take the place of a norm. On a synthetic task this reached a lower loss than group norm, which in turn was
better than a norm over the channels of each point: a norm removes the amplitude, and a spread is an amplitude. Without
norms no point depends on a sum over the grid, so any partition of the grid is exact.

Pressure is the last axis, in channels-last memory (B, Y, X, Z, C), where a whole column is a matrix (see
`models.speed`).

Pooling and upsampling by two suit any size and any order of axes in memory. Both are written as sums over the four
cells of 2 x 2 blocks. Torch's 3D pooling does not support bfloat16 on a CPU, and its 2D pooling copied its input, its
output and both gradients to another order of axes. An odd last row or column has blocks of fewer cells, over which the
mean is taken.

Axes: B initialisation time, C channel, Y latitude, X longitude, Z plane (pressure levels from the top down, then the
surface).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ensemble_ml.config import Vertical
from ensemble_ml.models.bank import Bank
from ensemble_ml.models.padding import Geometry, Padder, empty_in_order_of

T = TypeVar("T", bound=nn.Module)


class UNet3d(nn.Module):
    """An encoder and a decoder over grids of decreasing size: (B, hidden, Y, X, Z) -> the same shape.

    Args:
        geometries: rows, columns and edges of each level, finest first (`padding.geometries`).
        planes: Z.
        widths: channels of each level.
        blocks: residual blocks of each level, in the encoder and again in the decoder.
        vertical: how weights act across planes.
        inner: channels inside each block, encoder first (`ModelConfig.channels`); None for those of its level.
        recompute: keep only the input of each block for the backward pass, and compute the rest again there.
        bank: size of a vector that all kernels share (`bank.Bank`), as a fraction of the size of all kernels; 0 gives
            each its own.
        templates: number of windows of that vector that each kernel combines.

    Raises:
        UserError: the bank has fewer numbers than the widest convolution has outputs.
    """

    bank: Bank | None

    def __init__(
        self, geometries: Sequence[Geometry], planes: int, widths: Sequence[int], blocks: int, vertical: Vertical,
        inner: Sequence[int] | None = None, *, recompute: bool = False, bank: float = 0, templates: int = 2,
    ):  # fmt: skip
        super().__init__()
        depth = len(geometries) - 1
        insides = iter(inner or ())

        def stage(level: int) -> nn.Sequential:
            """Build the residual blocks of one level."""
            given = widths[level], planes, vertical, geometries[level]
            return nn.Sequential(
                *(ResidualBlock(*given, next(insides, None), recompute=recompute) for _ in range(blocks))
            )

        self.encoder = nn.ModuleList(stage(level) for level in range(depth + 1))
        self.decoder = nn.ModuleList(stage(level) for level in range(depth))
        self.down = nn.ModuleList(PointLinear(widths[i], widths[i + 1]) for i in range(depth))
        self.up = nn.ModuleList(PointLinear(widths[i + 1], widths[i]) for i in range(depth))
        self.bank = Bank(self, bank, templates) if bank else None

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        """Run encoder and decoder: (B, hidden, Y, X, Z) -> the same shape."""
        if self.bank is None:
            return self._run(x_BCYXZ)
        with self.bank.laid():
            return self._run(x_BCYXZ)

    def _run(self, x_BCYXZ: Tensor) -> Tensor:
        skips = []
        for stage, down in zip(self.encoder, self.down, strict=False):
            x_BCYXZ = stage(x_BCYXZ)
            skips.append(x_BCYXZ)
            x_BCYXZ = down(pool(x_BCYXZ))
        x_BCYXZ = self.encoder[-1](x_BCYXZ)
        for level in reversed(range(len(self.decoder))):
            # The skip is added, not concatenated: the decoder then needs no wider convolutions.
            x_BCYXZ = self.decoder[level](add_upsampled(skips[level], self.up[level](x_BCYXZ)))
        return x_BCYXZ


class ResidualBlock(nn.Module):
    """A residual block: x + conv2(scale2(conv1(scale1(x)))). The last convolution starts at zero.

    Args:
        inner: channels between the two convolutions; None for as many as outside.
        recompute: keep only the input for the backward pass, and compute the rest again there.
    """

    def __init__(
        self, channels: int, planes: int, vertical: Vertical, geometry: Geometry, inner: int | None = None,
        *, recompute: bool = False,
    ):  # fmt: skip
        super().__init__()
        inner = inner or channels
        self.recompute = recompute
        pad = Padder(geometry)
        self.scale1 = Activation(channels)
        # No bias: `scale2` follows and has a shift.
        self.conv1 = Convolution(channels, inner, planes, vertical, pad, bias=False)
        self.scale2 = Activation(inner, planes if vertical is Vertical.affine else None)
        self.conv2 = Convolution(inner, channels, planes, vertical, pad, bias=True)
        self.conv2.start_at_zero()

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        """Apply the block to (B, C, Y, X, Z)."""
        if self.recompute and torch.is_grad_enabled():
            # Nothing in a block is random, so the state of the generators need not be kept.
            return checkpoint(self._sum, x_BCYXZ, use_reentrant=False, preserve_rng_state=False)
        return self._sum(x_BCYXZ)

    def _sum(self, x_BCYXZ: Tensor) -> Tensor:
        # Intermediate fields get no names. Without a backward pass, each is then freed as soon as the next one is made.
        return x_BCYXZ + self.conv2(self.scale2(self.conv1(self.scale1(x_BCYXZ))))


class Convolution(nn.Module):
    """A convolution over 3 x 3 points and three planes, with weights across planes as `vertical` says.

    Padding over (Y, X) is a separate step before it, in which a partitioned model exchanges halos.

    Args:
        planes: Z; a single plane has a kernel that is one plane deep.
        vertical: how weights act across planes.
        pad: the padding over (Y, X).
        bias: add a learned bias to each output channel.
    """

    def __init__(self, inputs: int, outputs: int, planes: int, vertical: Vertical, pad: Padder, *, bias: bool):
        super().__init__()
        self.pad = pad
        deep = self.deep = 3 if planes > 1 else 1  # planes that a kernel covers
        if vertical is Vertical.full:
            convs = [nn.Conv3d(inputs, outputs, (3, 3, deep), bias=bias) for _ in range(planes)]
            self.by_plane = nn.ModuleList(convs)
        elif vertical is Vertical.separable:
            self.across = nn.Conv3d(inputs, outputs, (3, 3, 1), bias=False)
            self.along = nn.Conv3d(outputs, outputs, (1, 1, deep), padding=(0, 0, deep // 2), bias=bias)
        else:
            self.conv = nn.Conv3d(inputs, outputs, (3, 3, deep), padding=(0, 0, deep // 2), bias=bias)
        self.vertical = vertical

    def start_at_zero(self) -> None:
        """Set the last kernel and its bias to zero, so that the output is zero until training changes it."""
        # Only the last kernel must be zero. If the earlier ones were zero too, no gradient would reach any of them.
        last = {Vertical.full: "by_plane", Vertical.separable: "along"}.get(self.vertical, "conv")
        zeroed(self.get_submodule(last))

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        """Pad and convolve: (B, inputs, Y, X, Z) -> (B, outputs, Y, X, Z)."""
        padded = self.pad(x_BCYXZ)
        if self.vertical is Vertical.full:
            half = self.deep // 2
            # Each plane has its own kernel here, so a kernel cannot slide over the planes. Zeros stand for the planes
            # beyond.
            padded = F.pad(padded, (half, half)) if half else padded
            parts = [conv(padded[..., z : z + self.deep]) for z, conv in enumerate(self.by_plane)]
            return torch.cat(parts, -1)
        if self.vertical is Vertical.separable:
            return self.along(self.across(padded))
        return self.conv(padded)


class PointLinear(nn.Linear):
    """A 1 x 1 x 1 convolution. In channels-last memory it is one matrix product."""

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        """Apply the layer to each point of (B, C, Y, X, Z)."""
        return super().forward(x_BCYXZ.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)


class Activation(nn.Module):
    """SiLU of a learned scale and shift of each channel, or of each plane and channel: silu(w x + b).

    Args:
        channels: C.
        planes: Z, if each plane has a scale and shift of its own; None if all planes share them.
    """

    def __init__(self, channels: int, planes: int | None = None):
        super().__init__()
        shape = (channels,) if planes is None else (planes, channels)
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        """Activate (B, C, Y, X, Z), in the dtype of the input."""
        x_BYXZC, dtype = x_BCYXZ.permute(0, 2, 3, 4, 1), x_BCYXZ.dtype
        # With channels last, weight and bias broadcast along the contiguous axis, so nothing is copied.
        return _ScaledSilu.apply(x_BYXZC, self.weight.to(dtype), self.bias.to(dtype)).permute(0, 4, 1, 2, 3)


class _ScaledSilu(torch.autograd.Function):
    """The function silu(w x + b), which keeps only x, w and b for its backward pass and computes w x + b again there.

    Autograd would keep w x + b as well: a third of what a convolution and its activation keep. The operations are those
    of autograd in the same order, so results are equal bit for bit.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return silu(w x + b) of x (B, Y, X, Z, C)."""
        ctx.save_for_backward(x, weight, bias)
        return F.silu(torch.addcmul(bias, x, weight), inplace=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias = ctx.saved_tensors
        grad = torch.ops.aten.silu_backward(grad, torch.addcmul(bias, x, weight))
        return grad * weight, (grad * x).sum_to_size(weight.shape), grad.sum_to_size(bias.shape)


def zeroed(layer: T) -> T:
    """Set all weights of a layer to zero, so that its output is zero until training changes it. Return the layer."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def pool(x_BCYXZ: Tensor) -> Tensor:
    """Return the mean over the cells of each 2 x 2 block, (B, C, ceil(Y/2), ceil(X/2), Z)."""
    return _Pool.apply(x_BCYXZ)


def add_upsampled(skip_BCYXZ: Tensor, small_BCYXZ: Tensor) -> Tensor:
    """Return `skip_BCYXZ` plus a field (B, C, ceil(Y/2), ceil(X/2), Z), upsampled by nearest neighbour."""
    return _AddUpsampled.apply(skip_BCYXZ, small_BCYXZ)


def _corners(large: Tensor, small: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of one cell of every block, for each of the four cells, with the part of `small` that has this cell.

    Blocks at an odd edge lack some cells. All blocks have the first one.
    """
    for i in (0, 1):
        for j in (0, 1):
            corner = large[:, :, i::2, j::2]
            yield corner, small[:, :, : corner.shape[2], : corner.shape[3]]


def _mean_of_sums(sums: Tensor, rows: int, columns: int) -> Tensor:
    """Divide sums over blocks by the number of cells in them, in place."""
    # All blocks are first divided by four. The last row or column of an odd size has blocks of half as many cells.
    sums.mul_(0.25)
    if rows % 2:
        sums[:, :, -1].mul_(2)
    if columns % 2:
        sums[:, :, :, -1].mul_(2)
    return sums


def _sums(large: Tensor) -> Tensor:
    """Return the sums over the cells of each block."""
    total = large[:, :, 0::2, 0::2].clone()  # keeps the order of axes in memory
    for corner, part in list(_corners(large, total))[1:]:
        part.add_(corner)
    return total


class _Pool(torch.autograd.Function):
    """The mean over blocks, with a backward pass that writes the gradient in the order of axes of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the mean over the cells of each block."""
        ctx.size = x.shape
        # Autograd would keep copies for the sums of slices, and give gradients in another order of axes.
        return _mean_of_sums(_sums(x), *x.shape[2:4])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # Each cell of a block gets the block's gradient, divided by the number of its cells.
        share = _mean_of_sums(grad.clone(), *ctx.size[2:4])
        found = empty_in_order_of(grad, ctx.size)
        for corner, part in _corners(found, share):
            corner.copy_(part)
        return found


class _AddUpsampled(torch.autograd.Function):
    """The sum of a field and an upsampled one, with its backward pass."""

    @staticmethod
    def forward(ctx: Any, skip: Tensor, small: Tensor) -> Tensor:
        """Return the sum."""
        found = skip.clone()
        for corner, part in _corners(found, small.to(skip.dtype)):
            corner.add_(part)
        ctx.dtype = small.dtype
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        # Upsampling copies a value to all cells of a block, so its adjoint is the sum over the block.
        return grad, _sums(grad).to(ctx.dtype)
