"""Define how a tensor store lies on disk: names, axes, chunks and shards of its arrays.

Writer and reader both use these definitions, so the layout is defined only once.

A store is one Zarr v3 group. Each part has an array for variables on pressure levels and one for surface variables
(`forecast_pressure`, `forecast_surface`, `truth_pressure` ...). Beside a packed array stand `..._reference`,
`..._scale` and `..._decimal`, with one number for each field. Beside every array stands `..._present`, which says which
fields the store holds. If some points of a packed array have no value (a bitmap in GRIB), `..._mask` is 1 there, in
chunks like those of the values. Float32 arrays hold NaN at such points.

All arrays stand directly in the root group, so that `xarray.open_zarr(STORE)` shows them with their coordinates. Only
the statistics have a group of their own.

Axes: D init time, M member, T lead, V variable (of either kind), Z level (1 at the surface), Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from ensemble_ml.config import Packing
from ensemble_ml.store.source import Layout, Part

FORMAT = 2  # version of the format; it increases when older readers would misread the arrays
FORMAT_KEY = "ensemble_ml_store"  # attribute of the root group that holds the number and marks the folder as a store
PLAN_KEY = "plan"  # attribute of the root group: hash of the plan from which the store was built
DAYS_KEY = "climate_days"  # attribute of the root group: half-width of the model climate's window, if there is one
MANIFEST = "manifest.json"
SOURCES_FILE = "sources.json"
STATISTICS = "statistics"
FACTORS = ("reference", "scale", "decimal")
WRITTEN = (Part.FORECAST, Part.CONTROL, Part.TRUTH)
DERIVED = (Part.MEAN, Part.SPREAD)

_ROWS = 16  # rows of latitude in a chunk, so that a rank that holds some rows reads few others
_SMALLEST = 64 * 1024  # bytes of a decoded chunk; smaller ones take longer to request than to transfer


class Kind(Enum):
    """The two kinds of variables: on pressure levels, and at the surface."""

    PRESSURE = "pressure"
    SURFACE = "surface"


@dataclass(frozen=True)
class ArraySpec:
    """The shape of one array of fields. In memory, one init time of the array is always (M, T, V, Z, Y, X)."""

    part: Part
    kind: Kind
    dtype: np.dtype
    dates: int  # number of init times
    fields: tuple[int, int, int, int]  # M, T, V, Z
    grid: tuple[int, int]  # Y, X
    rows: int  # rows of a chunk

    @property
    def name(self) -> str:
        """Return the name of the array in the root group."""
        suffix = "_mask" if self.dtype == np.uint8 else ""
        return f"{self.part.value}_{self.kind.value}{suffix}"

    @property
    def mask(self) -> ArraySpec:
        """Return the array beside this one that marks points without a value."""
        return replace(self, dtype=np.dtype(np.uint8))

    @property
    def packed(self) -> bool:
        """Return whether the array holds packed integers."""
        return self.dtype == np.uint16

    @property
    def fill(self) -> float:
        """Return the value of a chunk that is left out: NaN for float32, 0 for integers."""
        return np.nan if self.dtype == np.float32 else 0

    @property
    def blocks(self) -> int:
        """Return the number of chunks along latitude."""
        return -(-self.grid[0] // self.rows)

    @property
    def chunk(self) -> tuple[int, int, int]:
        """Return the shape of one chunk in memory, (Z, rows, X).

        The chunk with the last rows of the grid is padded to the same shape.
        """
        return self.fields[3], self.rows, self.grid[1]

    @property
    def chunks(self) -> tuple[int, int, int, int]:
        """Return the number of chunks of one shard along (M, T, V, Y). Chunks are numbered in this order."""
        return (*self.fields[:3], self.blocks)

    @property
    def on_disk(self) -> tuple[int, ...]:
        """Return the shape of the array on disk, without the axes that a part or kind does not have."""
        return (self.dates, *self._drop(self.fields), *self.grid)

    @property
    def chunk_on_disk(self) -> tuple[int, ...]:
        """Return the shape of an inner chunk on disk."""
        return (1, *self._drop((1, 1, 1, self.fields[3])), self.rows, self.grid[1])

    @property
    def shard_on_disk(self) -> tuple[int, ...]:
        """Return the shape of a shard on disk, which holds one init time."""
        return (1, *self._drop(self.fields), self.rows * self.blocks, self.grid[1])

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Return the names of the axes on disk."""
        variable = "variable" if self.kind is Kind.PRESSURE else "surface_variable"
        return ("init_time", *self._drop(("realization", "lead_time", variable, "level")), "latitude", "longitude")

    def shard(self, date: int) -> str:
        """Return the path of the shard of one init time, relative to the store."""
        return f"{self.name}/c." + ".".join(map(str, (date, *[0] * (len(self.on_disk) - 1))))

    @property
    def factors_on_disk(self) -> tuple[int, ...]:
        """Return the shape on disk of one number for each field of an init time."""
        return self._drop(self.fields)

    def _drop(self, axes: tuple) -> tuple:
        """Drop the entries of the member axis and the level axis where the part or kind does not have them."""
        member = axes[:1] if self.part is Part.FORECAST else ()
        return (*member, *axes[1:3], *(axes[3:] if self.kind is Kind.PRESSURE else ()))


def array_specs(layout: Layout, part: Part, packing: Packing) -> list[ArraySpec]:
    """Return the arrays of one part. `packing` is how forecast, control and truth are stored.

    A kind that has no variables, levels, leads or members has no array. Mean and spread are always float32.
    """
    dtype = np.dtype(np.uint16 if packing is Packing.uint16 and part in WRITTEN else np.float32)
    members = len(layout.realization) if part is Part.FORECAST else 1
    specs = []
    for kind, names in ((Kind.PRESSURE, layout.variables), (Kind.SURFACE, layout.surface)):
        levels = len(layout.levels) if kind is Kind.PRESSURE else 1
        fields = (members, len(layout.lead_hours), len(names), levels)
        if min(fields) > 0:
            rows = chunk_rows(levels, layout.grid.shape, dtype.itemsize)
            specs.append(ArraySpec(part, kind, dtype, len(layout.init_time), fields, layout.grid.shape, rows))
    return specs


def chunk_rows(levels: int, grid: tuple[int, int], itemsize: int) -> int:
    """Return the number of rows in a chunk: 16, doubled until the chunk has 64 KiB or holds the whole grid."""
    rows = _ROWS
    while rows < grid[0] and levels * rows * grid[1] * itemsize < _SMALLEST:
        rows *= 2
    return min(rows, grid[0])


def describe_field(layout: Layout, part: Part, date: int, kind: Kind, index: tuple[int, ...]) -> str:
    """Name one field for a message. `index` is (member, lead, variable[, level]), `date` that of the init time."""
    names = layout.variables if kind is Kind.PRESSURE else layout.surface
    member, lead, variable, *level = index
    words = [part.value, f"{np.datetime_as_string(layout.init_time[date], 'h')}", f"variable {names[variable]}"]
    if kind is Kind.PRESSURE:
        words.append(f"level {layout.levels[level[0]]} hPa")
    words.append(f"lead {layout.lead_hours[lead]} h")
    if part is Part.FORECAST:
        words.append(f"member {layout.realization[member]}")
    return ", ".join(words)


def shard_chunks(specs: Iterable[ArraySpec]) -> dict[str, int]:
    """Return the number of chunks of every shard that the arrays and their masks may have, by the path of the shard."""
    every = [one for spec in specs for one in (spec, spec.mask)]
    return {spec.shard(date): int(np.prod(spec.chunks)) for spec in every for date in range(spec.dates)}
