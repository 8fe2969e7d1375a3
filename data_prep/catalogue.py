"""All fields of an archive in one table, and the gathering of chosen ones into blocks.

Axes: M member, T lead, V pressure variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from threading import Lock
from typing import Any

import numpy as np

from data_prep.files import archive_files, open_readers
from data_prep.geometry import Geometry
from data_prep.records import IS_STATIC, KEYS, RECORD, RawField, Reader, describe, field_of
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.store.packing import PackedBlock, decode, error_bound, quantise
from ensemble_ml.store.source import Layout

log = logging.getLogger(__name__)

_OPEN_FILES = 128  # handles kept at most; an archive may have more files than a process may hold open


class Combine(Enum):
    """How the fields of the archive make the field that is wanted."""

    ONE = "one"
    DIFFERENCE = "difference"  # first less second, not below zero: an interval of a sum that runs from the start
    SUM = "sum"
    MAXIMUM = "maximum"


@dataclass(frozen=True)
class Target:
    """One wanted field: its place in the surface or the pressure block, and the rows of the table that make it."""

    surface: bool
    place: tuple[int, ...]
    rows: tuple[int, ...]
    combine: Combine = Combine.ONE


@dataclass(frozen=True, eq=False)
class Gathered:
    """Fields of one start date: packed integers where the archive has them, and float32 ones apart.

    `layout` holds the coordinates of the blocks (its members are those of the forecast, whatever the part);
    `pressure` (M, T, V, Z, Y, X) and `surface` (M, T, S, Y, X) uint16; `loose` (surface?, place) -> (Y, X) float32.
    """

    layout: Layout
    pressure: PackedBlock
    surface: PackedBlock
    loose: dict[tuple[bool, tuple[int, ...]], np.ndarray] = field(default_factory=dict)

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        """Float32 values of pressure and surface blocks, NaN where absent."""
        pressure, surface = decode(self.pressure), decode(self.surface)
        for (at_surface, place), values in self.loose.items():
            (surface if at_surface else pressure)[place] = values
        return pressure, surface

    def quantised(self, errors: dict[str, float]) -> tuple[PackedBlock, PackedBlock]:
        """Blocks of integers alone; the largest error made for each variable is kept in `errors`."""
        for (at_surface, place), values in self.loose.items():
            block = self.surface if at_surface else self.pressure
            one = quantise(values[None])
            block.values[place], block.present[place] = one.values[0], True
            for name in ("reference", "scale", "decimal"):
                getattr(block, name)[place] = getattr(one, name)[0]
            variable = (self.layout.surface if at_surface else self.layout.variables)[place[2]]
            errors[variable] = max(errors.get(variable, 0.0), float(error_bound(one)[0]))
        return self.pressure, self.surface

    def plain(self) -> tuple[PackedBlock, PackedBlock]:
        """Float32 blocks."""
        blocks = []
        for at_surface, values in enumerate(self.decoded()):
            present = (self.surface if at_surface else self.pressure).present.copy()
            for surface, place in self.loose:
                if surface == bool(at_surface):
                    present[place] = True
            blocks.append(PackedBlock.plain(values, present))
        return blocks[0], blocks[1]


class Catalogue:
    """The fields of an archive's files. `records` are sorted by their keys; `grid` is the one that all share.

    Raises:
        UserError: a file is damaged, grids differ, a field stands there twice, or no known field is left.
    """

    def __init__(self, paths: Any, *, role: str):
        self.files = archive_files(paths, role=role)
        self.path = _shown(paths)
        self.readers: list[Reader] = open_readers(self.files)
        self._open: dict[int, None] = {}  # readers that were used, the latest last
        self._lock = Lock()  # a file must not be closed by one thread while another reads it
        self.grid = _one_grid(self.readers)
        self.geometry = Geometry(self.grid, self.grid)
        tables = []
        for number, reader in enumerate(self.readers):
            reader.records["file"] = number
            tables.append(reader.records)
            reader.records = reader.records[:0]  # an archive has millions: one copy will do
        table = np.concatenate(tables) if tables else np.zeros(0, RECORD)
        _report_skipped(self.path, self.readers)
        if not len(table):
            raise UserError(f"{self.path}: holds no field that the registry knows")
        static = IS_STATIC[table["field"]]
        self.static_records = table[static]
        table = table[~static]  # sorted below, so that nothing depends on the order of files
        self.records = table[np.lexsort([table[name] for name in reversed(KEYS)])]
        _check_unique(self.records, self.files)

    def onto(self, grid: Grid) -> None:
        """Let all values come on `grid` from now on.

        Raises:
            UserError: the files' grid does not reach as far.
        """
        self.geometry, self.grid = Geometry(self.geometry.source, grid), grid

    def values(self, records: np.ndarray) -> Iterator[RawField]:
        """Yield `records` on the files' own grid, in their order, which had better be that of the files."""
        for number, group in groupby(records, key=lambda record: int(record["file"])):
            self._touch(number)
            yield from self.readers[number].fields(np.array(list(group), RECORD))

    def _touch(self, number: int) -> None:
        self._open.pop(number, None)
        self._open[number] = None
        if len(self._open) > _OPEN_FILES:
            oldest = next(iter(self._open))
            self._open.pop(oldest)
            self.readers[oldest].close()

    def gather(
        self, targets: Iterable[Target], layout: Layout, members: int, band: tuple[int, int] | None = None
    ) -> Gathered:
        """Read `targets` into blocks of `members` and the other axes of `layout`.

        Args:
            targets: what to read, and where it goes.
            layout: the coordinates of the blocks.
            members: length of the first axis.
            band: rows of latitude start, stop; None takes all.

        Raises:
            UserError: a field cannot be decoded, or holds NaN; or the grid lacks the rows.
        """
        rows, height = slice(*(band or (0, layout.grid.shape[0]))), layout.grid.shape[0]
        if not 0 <= rows.start < rows.stop <= height:
            raise UserError(f"{self.path}: has no rows {rows.start} to {rows.stop}; there are {height}, from 0")
        points = rows.stop - rows.start, layout.grid.shape[1]
        leads, levels = len(layout.lead_hours), len(layout.levels)
        out = Gathered(
            layout,
            PackedBlock.empty((members, leads, len(layout.variables), levels, *points)),
            PackedBlock.empty((members, leads, len(layout.surface), *points)),
        )
        with self._lock:
            self._fill(out, list(targets), rows)
        return out

    def _fill(self, out: Gathered, targets: list[Target], rows: slice) -> None:
        single = [target for target in targets if target.combine is Combine.ONE]
        chosen = self.records[[target.rows[0] for target in single]]
        order = np.lexsort((chosen["offset"], chosen["file"]))
        for index, raw in zip(order, self.values(chosen[order]), strict=True):
            _put(out, single[index], self.geometry.field(raw), rows)
        for target in targets:
            if target.combine is not Combine.ONE:
                out.loose[target.surface, target.place] = self.geometry.floats(self._combined(target))[rows]

    def _combined(self, target: Target) -> np.ndarray:
        parts = [raw.decode().astype(np.float64) for raw in self.values(self.records[list(target.rows)])]
        if target.combine is Combine.DIFFERENCE:
            # Packing rounds both sums, so that a dry interval may come out just below zero.
            return np.maximum(parts[0] - parts[1], 0).astype(np.float32)
        total = np.sum(parts, axis=0) if target.combine is Combine.SUM else np.max(parts, axis=0)
        return total.astype(np.float32)

    def static(self) -> dict[str, np.ndarray]:
        """Static fields by name, (Y, X) float32; where files repeat one, the first stands for all."""
        found: dict[str, np.ndarray] = {}
        for record in self.static_records:
            name = field_of(record).name
            if name not in found:
                raw = next(self.values(np.array([record], RECORD)))
                found[name] = self.geometry.field(raw).decode()
        return dict(sorted(found.items()))

    def fingerprint(self) -> str:
        """16 hex digits over file names, sizes and the keys and packing constants of all fields."""
        digest = hashlib.sha256()
        for path in self.files:
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            digest.update(f"{os.path.basename(path)} {size}\n".encode())
        for name in (*KEYS, "offset", "bits", "reference", "scale", "decimal"):
            digest.update(np.ascontiguousarray(self.records[name]).tobytes())
        return digest.hexdigest()[:16]


def _put(out: Gathered, target: Target, raw: RawField, rows: slice) -> None:
    if not raw.packed:
        out.loose[target.surface, target.place] = raw.values[rows]
        return
    block = out.surface if target.surface else out.pressure
    block.values[target.place] = raw.values[rows]
    block.reference[target.place], block.scale[target.place] = raw.reference, raw.scale
    block.decimal[target.place], block.present[target.place] = raw.decimal, True


def _shown(paths: Any) -> str:
    if isinstance(paths, list | tuple):
        return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    return str(paths)


def _one_grid(readers: list[Reader]) -> Grid:
    first: Reader | None = None
    for reader in readers:
        if reader.grid is None:
            continue
        if first is None or first.grid is None:
            first = reader
        elif not reader.grid.same_as(first.grid):
            raise UserError(
                f"{reader.path}: grid {reader.grid.describe()} differs from that of {first.path}, "
                f"{first.grid.describe()}; an archive has one grid"
            )
    if first is None or first.grid is None:
        skipped = sorted({name for reader in readers for name in reader.skipped})
        seen = f"; it has {', '.join(skipped[:5])}" if skipped else ""
        raise UserError(f"{readers[0].path}: holds no field that the registry knows{seen}")
    return first.grid


def _report_skipped(path: str, readers: list[Reader]) -> None:
    counts: dict[str, int] = {}
    for reader in readers:
        for name, count in reader.skipped.items():
            counts[name] = counts.get(name, 0) + count
    if counts:
        text = "%s: %d fields of variables that the registry does not know are left out: %s"
        log.info(text, path, sum(counts.values()), ", ".join(sorted(counts)[:8]))


def _check_unique(records: np.ndarray, files: list[str]) -> None:
    same = np.ones(max(len(records) - 1, 0), bool)
    for name in KEYS:
        same &= records[name][1:] == records[name][:-1]
    if same.any():
        first, second = records[np.flatnonzero(same)[0] :][:2]
        where = " and ".join(sorted({files[int(first["file"])], files[int(second["file"])]}))
        raise UserError(f"{describe(first)}: stands twice in {where}; give each field once")
