"""Where a rank stands: pure functions of (rank, degrees), without processes, devices or torch.

A job of P ranks is a mesh (trainer, data, lat, lon), longitude running fastest; so the ranks of one spatial group have
neighbouring numbers, and a launcher that fills nodes in order keeps a group inside a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from ensemble_ml.config import ParallelConfig
from ensemble_ml.errors import UserError

AXES = ("trainer", "data", "lat", "lon")


class Place(NamedTuple):
    """Coordinates of a rank in the mesh."""

    trainer: int
    data: int
    lat: int
    lon: int


@dataclass(frozen=True)
class Topology:
    """The mesh of a job and one rank's place in it.

    Raises:
        UserError: a degree below one, or a rank outside the mesh.
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
        """Degrees in the order of `AXES`."""
        return self.trainer, self.data, self.lat, self.lon

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.trainer * self.data * self.lat * self.lon

    @property
    def spatial(self) -> int:
        """Ranks that share one sample."""
        return self.lat * self.lon

    @property
    def place(self) -> Place:
        """Coordinates of this rank."""
        return place_of(self.shape, self.rank)

    def at(self, rank: int) -> Topology:
        """The same mesh seen from another rank."""
        return replace(self, rank=rank)

    def group(self, *axes: str) -> tuple[int, ...]:
        """Ranks that differ from this one along `axes` alone, itself among them, in rank order."""
        own = self.place
        every = zip(AXES, self.shape, own, strict=True)
        along = [range(degree) if axis in axes else (place,) for axis, degree, place in every]
        return tuple(rank_of(self.shape, Place(*place)) for place in product(*along))

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """All groups along `axes`, each once, in the same order on every rank."""
        across = [(0,) if axis in axes else range(n) for axis, n in zip(AXES, self.shape, strict=True)]
        for place in product(*across):
            yield self.at(rank_of(self.shape, Place(*place))).group(*axes)


def rank_of(shape: tuple[int, int, int, int], place: Place) -> int:
    """The rank at `place` of a mesh of `shape`."""
    rank = 0
    for degree, coordinate in zip(shape, place, strict=True):
        if not 0 <= coordinate < degree:
            raise UserError(f"{place}: outside the mesh {shape}")
        rank = rank * degree + coordinate
    return rank


def place_of(shape: tuple[int, int, int, int], rank: int) -> Place:
    """The coordinates of `rank` in a mesh of `shape`."""
    found = []
    for degree in reversed(shape):
        rank, coordinate = divmod(rank, degree)
        found.append(coordinate)
    return Place(*reversed(found))


def make_topology(config: ParallelConfig, *, rank: int, size: int) -> Topology:
    """The mesh that `config` makes of `size` ranks; `parallel.data=auto` takes what the other degrees leave.

    Where latitude or longitude are left to the planner, every rank has dates of its own until it has chosen.

    Raises:
        UserError: the degrees do not multiply to the number of ranks.
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


def bands(rows: int, parts: int, block: int) -> tuple[tuple[int, int], ...]:
    """(first, last + 1) row of each part: whole blocks of `block` rows, at most one block apart, the last block short.

    361 rows, 4 parts, blocks of 16: 96, 96, 96, 73. Larger parts come first, but no part is a short block alone where
    that can be helped: 17 rows, 3 parts, blocks of 4: 8, 4, 5.

    Raises:
        UserError: fewer blocks than parts.
    """
    blocks = -(-rows // block)
    if parts > blocks:
        raise UserError(
            f"parallel.lat={parts}: {rows} rows make {blocks} blocks of {block}; use at most {blocks}, or a smaller"
            " model.depth"
        )
    share, extra = divmod(blocks, parts)
    larger = set(range(extra))
    if share == 1 and extra and rows % block:
        larger = {*range(extra - 1), parts - 1}
    found, start = [], 0
    for part in range(parts):
        stop = start + (share + (part in larger)) * block
        found.append((start, min(stop, rows)))
        start = stop
    return tuple(found)
