"""Which rows and columns of the grid a rank holds, at every level of the U-Net."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.nn import Module

from ensemble_ml.distributed.topology import Topology, bands
from ensemble_ml.errors import UserError

Bounds = tuple[tuple[int, int], ...]
M = TypeVar("M", bound=Module)


@dataclass(frozen=True)
class Shard:
    """The part of a grid that belongs to one rank of a topology.

    `rows` and `columns`: (first, last + 1) of every rank along latitude and longitude, in whole blocks of 2^depth, so
    that pooling and upsampling by two never cross a border.
    """

    topology: Topology
    rows: Bounds
    columns: Bounds

    @property
    def own_rows(self) -> tuple[int, int]:
        """(first, last + 1) row of this rank."""
        return self.rows[self.topology.place.lat]

    @property
    def own_columns(self) -> tuple[int, int]:
        """(first, last + 1) column of this rank."""
        return self.columns[self.topology.place.lon]

    @property
    def shape(self) -> tuple[int, int]:
        """(Y, X) of this rank."""
        (top, bottom), (left, right) = self.own_rows, self.own_columns
        return bottom - top, right - left

    def cut(self, x: Tensor) -> Tensor:
        """This rank's part of a whole field (..., Y, X)."""
        (top, bottom), (left, right) = self.own_rows, self.own_columns
        return x[..., top:bottom, left:right]

    def pooled(self, level: int) -> Shard:
        """The same after `level` poolings by two; an odd last row or column makes a block of its own."""
        step = 2**level

        def smaller(parts: Bounds) -> Bounds:
            return tuple((first // step, -(-last // step)) for first, last in parts)

        return Shard(self.topology, smaller(self.rows), smaller(self.columns))


def make_shard(topology: Topology, shape: tuple[int, int], depth: int) -> Shard:
    """Share a grid (Y, X) out over the ranks of a topology.

    Raises:
        UserError: more ranks along an axis than it has blocks of 2^depth points.
    """
    rows = bands(shape[0], topology.lat, 2**depth)
    columns = shape[1] // 2**depth if shape[1] >= 2**depth else 1
    if topology.lon > columns:
        raise UserError(
            f"parallel.lon={topology.lon}: {shape[1]} columns make {columns} blocks of {2**depth}; use at most"
            f" {columns}, or a smaller model.depth"
        )
    return Shard(topology, rows, bands(shape[1], topology.lon, 2**depth))


def mark_own(p: Tensor, shard: Shard) -> None:
    """Note that each rank of `shard` uses its own cells of `p` (..., Y, X) alone; copies of `p` know nothing of it."""
    p.own_part = shard  # type: ignore[attr-defined]


def own_part(p: Tensor) -> Shard | None:
    """What `mark_own` noted."""
    return getattr(p, "own_part", None)


def copied(model: M) -> M:
    """A deep copy whose parameters are marked as those of `model` are, so that its exchanges send what those would."""
    found = copy.deepcopy(model)
    for p, q in zip(model.parameters(), found.parameters(), strict=True):
        if (shard := own_part(p)) is not None:
            mark_own(q, shard)
    return found
