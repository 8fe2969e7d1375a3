"""The rank layout of a job and the shards of the grid: pure functions of (rank, degrees), without processes or devices.

A job of P ranks is a mesh with the axes (trainer, data, lat, lon). Longitude varies fastest, so the ranks that share a
sample have consecutive numbers. A launcher that fills nodes in order keeps them on one node if their number divides the
number of ranks of a node.

A shard is the rows and columns of the grid that a rank holds, at every level of the U-Net. Parameters of which each
rank uses only the points of its shard carry a mark (`mark_own`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from torch import Tensor

from ensemble_ml.config import ParallelConfig
from ensemble_ml.errors import UserError

AXES = ("trainer", "data", "lat", "lon")
Bounds = tuple[tuple[int, int], ...]  # (first, last + 1) row or column of each shard along an axis


class Place(NamedTuple):
    """The coordinates of a rank in the mesh."""

    trainer: int
    data: int
    lat: int
    lon: int


@dataclass(frozen=True)
class Topology:
    """The mesh of a job, seen from one rank.

    Each field but `rank` is the degree of an axis, that is the number of ranks along it: competing models (`trainer`),
    shards of the batch (`data`), shards of latitude (`lat`) and of longitude (`lon`).

    Raises:
        UserError: a degree is below one, or the rank lies outside the mesh.
    """

    trainer: int = 1
    data: int = 1
    lat: int = 1
    lon: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for axis, degree in zip(AXES, self.shape, strict=True):
            if degree < 1:
                raise UserError(f"parallel.{axis}={degree}: must be 1 or more")
        if not 0 <= self.rank < self.size:
            raise UserError(f"rank {self.rank}: outside the mesh {self}, whose ranks are 0 to {self.size - 1}")

    def __str__(self) -> str:
        return " x ".join(f"{axis}={degree}" for axis, degree in zip(AXES, self.shape, strict=True))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the degrees in the order of `AXES`."""
        return self.trainer, self.data, self.lat, self.lon

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.trainer * self.data * self.lat * self.lon

    @property
    def spatial(self) -> int:
        """Return the number of ranks that share one sample."""
        return self.lat * self.lon

    @property
    def place(self) -> Place:
        """Return the coordinates of this rank."""
        return place_of(self.shape, self.rank)

    def at(self, rank: int) -> Topology:
        """Return the same mesh, seen from another rank."""
        return replace(self, rank=rank)

    def group(self, *axes: str) -> tuple[int, ...]:
        """Return, ascending, this rank and all ranks whose coordinates differ from its own only along `axes`."""
        own = self.place
        every = zip(AXES, self.shape, own, strict=True)
        along = [range(degree) if axis in axes else (place,) for axis, degree, place in every]
        return tuple(rank_of(self.shape, Place(*place)) for place in product(*along))

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Yield every group along `axes` once, in the same order on every rank."""
        # One member of each group stands for it: the one whose coordinates along `axes` are zero.
        across = [(0,) if axis in axes else range(n) for axis, n in zip(AXES, self.shape, strict=True)]
        for place in product(*across):
            yield self.at(rank_of(self.shape, Place(*place))).group(*axes)


def make_topology(config: ParallelConfig, *, rank: int, size: int) -> Topology:
    """Build the mesh that `config` asks for, over `size` ranks.

    With `parallel.data=auto`, the data degree is `size` divided by the product of the others. If the planner is to
    choose latitude or longitude, all ranks lie along the data axis until it has chosen. The topology is seen from
    `rank`.

    Raises:
        UserError: the product of the degrees is not the number of ranks or, with `data=auto`, does not divide it.
    """
    if config.planned:
        return Topology(data=size, rank=rank)
    fixed = config.trainer * config.lat * config.lon
    if config.data == "auto":
        if size % fixed:
            raise UserError(
                f"parallel.lat={config.lat} parallel.lon={config.lon} parallel.trainer={config.trainer}: their product"
                f" {fixed} does not divide {size} ranks; start a multiple of {fixed} ranks, or choose factors of {size}"
            )
        return Topology(config.trainer, size // fixed, config.lat, config.lon, rank)
    wanted = fixed * int(config.data)
    if wanted != size:
        raise UserError(
            f"parallel.data={config.data}: trainer={config.trainer} x data={config.data} x lat={config.lat} x"
            f" lon={config.lon} needs {wanted} ranks, {size} were started; start {wanted}, or set parallel.data=auto"
        )
    return Topology(config.trainer, int(config.data), config.lat, config.lon, rank)


def rank_of(shape: tuple[int, int, int, int], place: Place) -> int:
    """Return the rank at `place` in a mesh of `shape`; raise a UserError if a coordinate lies outside the mesh."""
    rank = 0
    for degree, coordinate in zip(shape, place, strict=True):
        if not 0 <= coordinate < degree:
            raise UserError(f"{place}: outside the mesh {shape}")
        rank = rank * degree + coordinate
    return rank


def place_of(shape: tuple[int, int, int, int], rank: int) -> Place:
    """Return the coordinates of `rank` in a mesh of `shape`."""
    found = []
    # The last axis varies fastest, so its coordinate is found first, as the remainder of a division by its degree.
    for degree in reversed(shape):
        rank, coordinate = divmod(rank, degree)
        found.append(coordinate)
    return Place(*reversed(found))


@dataclass(frozen=True)
class Shard:
    """The part of a grid that belongs to one rank of a topology.

    Shards are whole blocks of 2^depth rows and columns, so that pooling and upsampling by two never cross a border.
    Only the last block along an axis may be smaller.

    Attributes:
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

    `shape` is (Y, X) of the grid, and `depth` the number of poolings by two.

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


def bands(rows: int, parts: int, block: int) -> tuple[tuple[int, int], ...]:
    """Split rows into contiguous shards made of whole blocks, so that pooling never crosses a border.

    Shard sizes differ by at most one block, and the last block may be short. 361 rows, 4 parts, blocks of 16: 96, 96,
    96, 73. Larger shards come first, but no shard consists of the short block alone if that can be avoided: 17 rows, 3
    parts, blocks of 4: 8, 4, 5.

    A U-Net with `depth` poolings needs blocks of 2^depth rows (or columns). Return (first, last + 1) row of each shard,
    from the first to the last.

    Raises:
        UserError: there are fewer blocks than shards.
    """
    blocks = -(-rows // block)
    if parts > blocks:
        raise UserError(
            f"parallel.lat={parts}: {rows} rows make {blocks} blocks of {block}; use at most {blocks}, or a smaller"
            " model.depth"
        )
    share, extra = divmod(blocks, parts)
    larger = set(range(extra))
    # If smaller shards have one block, the last one would be the short block alone. It gets one of the extra blocks.
    if share == 1 and extra and rows % block:
        larger = {*range(extra - 1), parts - 1}
    found, start = [], 0
    for part in range(parts):
        stop = start + (share + (part in larger)) * block
        found.append((start, min(stop, rows)))
        start = stop
    return tuple(found)


def mark_own(p: Tensor, shard: Shard) -> None:
    """Mark `p` (..., Y, X), but none of its copies, as a parameter of which each rank uses only its shard's points."""
    p.own_part = shard  # type: ignore[attr-defined]


def own_part(p: Tensor) -> Shard | None:
    """Return the shard by which `mark_own` marked a parameter, or None."""
    return getattr(p, "own_part", None)
