"""Padding: the values that a convolution reads beyond the edges of a grid on the sphere.

Padding is a separate step, and convolutions pad nothing in Y and X. So a partitioned model can replace this step by a
halo exchange.

Longitude wraps only if the points close the circle. Beyond a pole, the rule `cross` continues a field with the row on
the other side of the pole, rolled by half the circle; `replicate` repeats the outermost row; `zero` puts zeros there.
At any other edge the outermost row or column is repeated.

Mirror rule. On a level with rows 2^l apart, the row beyond the pole would stand one spacing north of row 0. Mirrored at
the pole, it lies near row 0 or row 1 (a pooled row stands at the mean of the rows it holds). The mirror starts at the
nearer of these two, or at row 0 if they are equally near. Therefore:

- a row on the pole itself is left out at the finest level;
- a pooled row that lies only partly on the pole is used, although it stands one fine row from where it should;
- a last pooled row that holds only the pole (33 rows: row 16 of 17, row 8 of 9, ...) is left out again.

Axes: B initialisation time, C channel, Y latitude from north to south, X longitude eastwards, Z level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ensemble_ml.config import Pole
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Edge, Grid


class Beyond(Enum):
    """The kinds of values beyond an edge."""

    MIRROR = "mirror"
    REPLICATE = "replicate"
    ZERO = "zero"


@dataclass(frozen=True)
class EdgeRule:
    """A rule for the rows beyond an edge. A mirror leaves out the `skip` outermost rows."""

    beyond: Beyond
    skip: int = 0

    def source(self, distance: int) -> int:
        """Return which row of the grid, counted inwards from the edge, gives the values of a row beyond the edge.

        The row beyond stands at a distance of 1, 2, ... rows.
        """
        return self.skip + distance - 1 if self.beyond is Beyond.MIRROR else 0


@dataclass(frozen=True)
class Geometry:
    """The rows, columns and edges of one level of the U-Net."""

    rows: int
    columns: int
    wraps: bool
    north: EdgeRule
    south: EdgeRule


def geometries(grid: Grid, pole: Pole, depth: int) -> tuple[Geometry, ...]:
    """Return the geometry of the grid and of its `depth` poolings by two, finest first: `depth` + 1 of them.

    Raises:
        UserError: the number of longitudes cannot be halved as often as `pole` and `depth` need.
    """
    _check_longitudes(grid, pole, depth)
    positions = np.arange(grid.shape[0], dtype=np.float64)
    poles = _pole_position(grid.north, 0.0, -1), _pole_position(grid.south, positions[-1], 1)
    columns, found = grid.shape[1], []
    for level in range(depth + 1):
        north = _edge_rule(grid.north, pole, positions, poles[0], 2.0**level)
        south = _edge_rule(grid.south, pole, -positions[::-1], -poles[1], 2.0**level)
        found.append(Geometry(len(positions), columns, grid.wraps, north, south))
        positions = _pooled(positions)
        columns = -(-columns // 2)
    return tuple(found)


def _pole_position(edge: Edge, row: float, outwards: int) -> float:
    """Return where the pole is, in rows of the finest level."""
    return row + 0.5 * outwards if edge is Edge.POLE_BETWEEN else row


def _pooled(positions: np.ndarray) -> np.ndarray:
    """Return the positions of pooled rows."""
    # The mean runs over rows that exist: an odd last row keeps its position.
    return np.array([positions[i : i + 2].mean() for i in range(0, len(positions), 2)])


def _edge_rule(edge: Edge, pole: Pole, positions: np.ndarray, pole_at: float, spacing: float) -> EdgeRule:
    """Return the rule of an edge; `positions` ascend inwards from it."""
    if edge is Edge.OPEN or pole is Pole.replicate:
        return EdgeRule(Beyond.REPLICATE)
    if pole is Pole.zero:
        return EdgeRule(Beyond.ZERO)
    wanted = 2 * pole_at - (positions[0] - spacing)  # position of the row beyond, mirrored at the pole
    skip = int(np.argmin(np.abs(positions[:2] - wanted)))  # of two equally near rows, argmin takes row 0
    return EdgeRule(Beyond.MIRROR, skip)


def deepest(grid: Grid, pole: Pole) -> int | None:
    """Return how many poolings by two the longitudes allow, or None if they allow any number."""
    if not grid.wraps:
        return None
    columns = grid.shape[1]
    # The number of factors of two in the number of columns. Crossing a pole rolls a row by half the circle, so one
    # factor must be left at the coarsest level.
    twos = (columns & -columns).bit_length() - 1
    return max(0, twos - 1) if _crosses(grid, pole) else twos


def _crosses(grid: Grid, pole: Pole) -> bool:
    """Return True if fields are continued beyond a pole with the row on its other side."""
    return pole is Pole.cross and (grid.north is not Edge.OPEN or grid.south is not Edge.OPEN)


def _check_longitudes(grid: Grid, pole: Pole, depth: int) -> None:
    """Raise a UserError if the longitudes do not allow the rule for the poles, or so many poolings."""
    columns, crosses, fits = grid.shape[1], _crosses(grid, pole), deepest(grid, pole)
    if fits is None:
        return
    if crosses and columns % 2:
        raise UserError(
            f"model.pole=cross: {columns} longitudes are an odd number, so no point lies opposite another;"
            " use model.pole=replicate or zero"
        )
    if depth > fits:
        need = f"a multiple of 2^depth={2**depth} is needed"
        if crosses:
            need = f"model.pole=cross needs a multiple of 2^(depth+1)={2 ** (depth + 1)}"
        raise UserError(
            f"model.depth={depth}: {columns} longitudes wrap, and {need}; use model.depth={fits} or less, or auto"
        )


class Padder(nn.Module):
    """A layer that pads (B, C, Y, X, Z) by one row and one column on each side; Z is left alone.

    Args:
        geometry: rows, columns and edges.
        sign: (C, Z) factor of values continued across a pole, value -> sign * value + offset; None for 1. It is -1 for
            a component of a vector.
        offset: (C, Z), not zero where a vector component is standardised by a mean (`Features.pole_rule`); None for 0.
    """

    sign: Tensor | None
    offset: Tensor | None

    def __init__(self, geometry: Geometry, sign: Tensor | None = None, offset: Tensor | None = None):
        super().__init__()
        self.geometry = geometry
        self.register_buffer("sign", sign)
        self.register_buffer("offset", offset)

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        """Pad: (B, C, Y, X, Z) -> (B, C, Y + 2, X + 2, Z)."""
        return _Pad.apply(x_BCYXZ, self.geometry, self.sign, self.offset)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        g = self.geometry
        return f"{g.rows} x {g.columns}, wraps={g.wraps}, north={g.north}, south={g.south}"


class _Pad(torch.autograd.Function):
    """A copy into a larger tensor, whose borders are then filled.

    `torch.cat` and `F.pad` took 5 to 100 times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, geometry: Geometry, sign: Tensor | None, offset: Tensor | None) -> Tensor:
        """Return the padded tensor."""
        ctx.geometry, ctx.sign = geometry, sign
        batch, channels, rows, columns, levels = x.shape
        padded = empty_in_order_of(x, (batch, channels, rows + 2, columns + 2, levels))
        padded[:, :, 1:-1, 1:-1] = x
        for row, target, rule in ((0, 0, geometry.north), (-1, -1, geometry.south)):
            padded[:, :, target, 1:-1] = _beyond(x, row, rule, sign, offset)
        # Columns come after rows, so that the corners are filled without a step of their own.
        wraps = geometry.wraps
        padded[:, :, :, 0] = padded[:, :, :, -2 if wraps else 1]
        padded[:, :, :, -1] = padded[:, :, :, 1 if wraps else -2]
        return padded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        geometry = ctx.geometry
        # The adjoint runs in the reverse order of the forward pass: first the columns, then the rows.
        inner = _fold_columns(grad[:, :, 1:-1], geometry.wraps)
        for row, outer, rule in ((0, grad[:, :, :1], geometry.north), (-1, grad[:, :, -1:], geometry.south)):
            if rule.beyond is not Beyond.ZERO:
                _add_back(inner, _fold_columns(outer, geometry.wraps)[:, :, 0], row, rule, ctx.sign)
        return inner, None, None, None


def empty_in_order_of(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an empty tensor like `x`, of another shape, with channels last in memory if those of `x` are.

    It has four or five axes.
    """
    # With another order of axes in memory, the convolution that follows would copy its input.
    if x.ndim == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return x.new_empty(shape[0], *shape[2:], shape[1]).permute(0, 4, 1, 2, 3)
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.new_empty(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
    return x.new_empty(shape)


def _source_row(row: int, rule: EdgeRule, rows: int) -> int:
    """Return which row gives the values beyond the first (`row` = 0) or the last row (`row` = -1)."""
    # A grid of one row has no second row that a mirror could use.
    source = min(rule.source(1), rows - 1)
    return source if row == 0 else rows - 1 - source


def _beyond(x: Tensor, row: int, rule: EdgeRule, sign: Tensor | None, offset: Tensor | None) -> Tensor:
    """Return the values beyond the first (`row` = 0) or the last row (`row` = -1): (B, C, X, Z), or a scalar zero."""
    if rule.beyond is Beyond.ZERO:
        return x.new_zeros(())
    values = x[:, :, _source_row(row, rule, x.shape[2])]
    if rule.beyond is Beyond.REPLICATE:
        return values
    # The point beyond the pole lies on the opposite meridian, which is half the columns away.
    values = values.roll(values.shape[2] // 2, 2)
    if sign is not None:
        values = values * sign[:, None].to(x.dtype)
    return values if offset is None else values + offset[:, None].to(x.dtype)


def _fold_columns(grad: Tensor, wraps: bool) -> Tensor:
    """Apply the adjoint of padding the columns."""
    inner = grad[:, :, :, 1:-1].clone()  # keeps the order of axes in memory
    inner[:, :, :, -1 if wraps else 0] += grad[:, :, :, 0]
    inner[:, :, :, 0 if wraps else -1] += grad[:, :, :, -1]
    return inner


def _add_back(inner: Tensor, outer: Tensor, row: int, rule: EdgeRule, sign: Tensor | None) -> None:
    """Apply the adjoint of `_beyond` and add the result to `inner` in place."""
    if rule.beyond is Beyond.MIRROR:
        outer = outer if sign is None else outer * sign[:, None].to(outer.dtype)
        outer = outer.roll(-(outer.shape[2] // 2), 2)
    inner[:, :, _source_row(row, rule, inner.shape[2])] += outer
