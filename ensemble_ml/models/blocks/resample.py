"""Pooling and upsampling by two over latitude and longitude, for any size and any order of axes in memory.

Both are written as sums over the four cells of 2 x 2 blocks. Torch's 3D pooling does not support bfloat16 on a CPU, and
its 2D pooling copied its input, its output and both gradients to another order of axes. An odd last row or column has
blocks of fewer cells, over which the mean is taken.

Axes: B initialisation time, C channel, Y latitude, X longitude, Z plane.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ensemble_ml.models.padding import empty_in_order_of


def pool(x_BCYXZ: Tensor) -> Tensor:
    """Return the mean over the cells of each 2 x 2 block, (B, C, ceil(Y/2), ceil(X/2), Z).

    Args:
        x_BCYXZ: (B, C, Y, X, Z).
    """
    return _Pool.apply(x_BCYXZ)


def add_upsampled(skip_BCYXZ: Tensor, small_BCYXZ: Tensor) -> Tensor:
    """Upsample a field of half the size by nearest neighbour, and add it to `skip_BCYXZ`.

    Args:
        skip_BCYXZ: (B, C, Y, X, Z).
        small_BCYXZ: (B, C, ceil(Y/2), ceil(X/2), Z).

    Returns:
        The sum, in the shape and dtype of `skip_BCYXZ`.
    """
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
