"""The rows and columns of the grid that a rank holds, at every level of the U-Net."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ensemble_ml.distributed.topology import Topology, bands
from ensemble_ml.errors import UserError

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shard:
    """The part of a grid that belongs to one rank of a topology.

    Shards are whole blocks of 2^depth rows and columns, so that pooling and upsampling by two never cross a border.
    Only the last block along an axis may be smaller.

    Attributes:
        topology: the mesh, seen from this rank.
        rows: (first, last + 1) row of every rank along latitude.
        columns: (first, last + 1) column of every rank along longitude.
    """

    topology: Topology
    rows: Bounds
    columns: Bounds

    @property
    def own_rows(self) -> tuple[int, int]:
        """Return (first, last + 1) row of this rank."""
        return self.rows[self.topology.place.lat]

    @property
    def own_columns(self) -> tuple[int, int]:
        """Return (first, last + 1) column of this rank."""
        return self.columns[self.topology.place.lon]

    @property
    def shape(self) -> tuple[int, int]:
        """Return (Y, X), the rows and columns of this rank."""
        (top, bottom), (left, right) = self.own_rows, self.own_columns
        return bottom - top, right - left

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's shard of a whole field (..., Y, X), as a view."""
        (top, bottom), (left, right) = self.own_rows, self.own_columns
        return x[..., top:bottom, left:right]

    def pooled(self, level: int) -> Shard:
        """Return the shard after `level` poolings by two. An odd last row or column makes a block of its own."""
        step = 2**level

        def smaller(parts: Bounds) -> Bounds:
            return tuple((first // step, -(-last // step)) for first, last in parts)

        return Shard(self.topology, smaller(self.rows), smaller(self.columns))


def make_shard(topology: Topology, shape: tuple[int, int], depth: int) -> Shard:
    """Partition a grid over the ranks of a topology.

    Args:
        topology: the mesh, seen from this rank.
        shape: (Y, X) of the grid.
        depth: number of poolings by two.

    Raises:
        UserError: there are more ranks along latitude than blocks of 2^depth rows, or more along longitude than whole
            blocks of 2^depth columns. One rank is always allowed.
    """
    rows = bands(shape[0], topology.lat, 2**depth)
    # `bands` may leave one rank only the short last block. For columns this is refused.
    columns = shape[1] // 2**depth if shape[1] >= 2**depth else 1
    if topology.lon > columns:
        raise UserError(
            f"parallel.lon={topology.lon}: {shape[1]} columns make {columns} blocks of {2**depth}; use at most"
            f" {columns}, or a smaller model.depth"
        )
    return Shard(topology, rows, bands(shape[1], topology.lon, 2**depth))


def mark_own(p: Tensor, shard: Shard) -> None:
    """Mark `p` (..., Y, X) as a parameter of which each rank uses only the grid points of its own shard.

    Copies of `p` do not carry the mark.
    """
    p.own_part = shard  # type: ignore[attr-defined]


def own_part(p: Tensor) -> Shard | None:
    """Return the shard by which `mark_own` marked a parameter, or None."""
    return getattr(p, "own_part", None)
