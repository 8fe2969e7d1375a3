"""GRIB files, editions 1 and 2: an index made in one pass, and exact values by offset.

Simple packing up to 16 bits is taken as integers with its reference and scales, and so reaches the tensor store without
a rounding; all else (CCSDS, JPEG, second order, 24 bits) is decoded by ecCodes to float32.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np

from data_prep.grib_keys import Kind, ask, eccodes_module, opened, places
from data_prep.grib_sections import Header, frames, header
from data_prep.records import RECORD, RawField, field_of
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.store.packing import grib_factors

_kinds: dict[bytes, Kind] = {}  # shared by all files of a process: an archive repeats its headers in every file


class GribFile:
    """One GRIB file (see `data_prep.records.Reader`).

    Raises:
        UserError: the file is missing, truncated, damaged, or on a grid that is not regular.
    """

    def __init__(self, path: str):
        self.path = path
        self.skipped: dict[str, int] = {}
        self.grid: Grid | None = None
        self._handle: int | None = None
        self.records = self._index()

    def _index(self) -> np.ndarray:
        if os.path.getsize(self.path) == 0:
            raise UserError(f"{self.path}: is empty; give a GRIB, NetCDF or Zarr archive")
        rows = []
        with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for number, (offset, length) in enumerate(frames(self.path, content), 1):
                try:
                    row = self._row(content, offset, length)
                except UserError as error:
                    raise UserError(f"{self.path}: message {number} at byte {offset}: {error}") from error
                if row is not None:
                    rows.append((*row, offset, length))
        return _table(rows)

    def _row(self, content: mmap.mmap, offset: int, length: int) -> tuple[Kind, Header] | None:
        head = header(content, offset)
        kind = _kinds.get(head.key)
        if kind is None:
            kind, said = ask(content[offset : offset + length], head)
            if said == head:  # else our reading of the header is not ecCodes', and ecCodes is asked every time
                _kinds[head.key] = kind
            head = said
        if kind.row is None:
            self.skipped[kind.name] = self.skipped.get(kind.name, 0) + 1
            return None
        self._check_grid(places[kind.row["place"]].grid)
        return kind, head

    def _check_grid(self, grid: Grid) -> None:
        if self.grid is None:
            self.grid = grid
        elif grid is not self.grid and not grid.same_as(self.grid):
            raise UserError(
                f"grid {grid.describe()} differs from the file's first, {self.grid.describe()}; "
                "put fields on different grids into different archives"
            )

    def fields(self, records: np.ndarray) -> Iterator[RawField]:
        """Yield the values of `records`, in their order.

        Raises:
            UserError: values are missing under a bitmap, or ecCodes cannot decode them.
        """
        for record in records:
            yield self._packed(record) if record["simple"] else self._decoded(record)

    def _packed(self, record: np.void) -> RawField:
        place = places[record["place"]]
        points, bits = place.grid.shape[0] * place.grid.shape[1], int(record["bits"])
        if bits:
            start, size = int(record["offset"]) + int(record["data"]), (points * bits + 7) // 8
            integers = unpack(self._bytes(start, size), bits, points)
        else:
            integers = np.zeros(points, np.uint16)
        reference, scale, decimal = (float(record[name]) for name in ("reference", "scale", "decimal"))
        return RawField(place.ordered(integers), reference, scale, decimal)

    def _decoded(self, record: np.void) -> RawField:
        message = self._bytes(int(record["offset"]), int(record["length"]))
        where = f"{self.path}: message at byte {record['offset']}, {field_of(record).name}"
        codes = eccodes_module()
        with opened(message, where) as handle:
            missing = codes.codes_get_long(handle, "numberOfMissing")
            if missing:
                raise UserError(
                    f"{where}: {missing} points are missing under a bitmap; leave the variable out with variables=[...]"
                )
            values = codes.codes_get_array(handle, "values")
        values = values * float(record["decimal"]) + float(record["reference"])
        return RawField(places[record["place"]].ordered(values.astype(np.float32)))

    def _bytes(self, start: int, size: int) -> bytes:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_RDONLY)
        content = os.pread(self._handle, size, start)
        if len(content) != size:
            raise UserError(
                f"{self.path}: was cut short at byte {start + len(content)} since it was indexed; try again"
            )
        return content

    def close(self) -> None:
        """Give back the file handle; a later read opens it anew."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def unpack(content: bytes, bits: int, points: int) -> np.ndarray:
    """Unsigned integers (points,) uint16 of `bits` 1 to 16 each, packed without gaps, most significant bit first."""
    if bits == 16:
        return np.frombuffer(content, ">u2", points).astype(np.uint16)
    octets = np.frombuffer(content, np.uint8)
    if bits == 8:
        return octets[:points].astype(np.uint16)
    # A value of up to 16 bits that starts at any bit of an octet lies within three octets.
    starts = np.arange(points, dtype=np.int64) * bits
    octets = np.concatenate([octets, np.zeros(2, np.uint8)]).astype(np.uint32)
    first = starts >> 3
    window = (octets[first] << 16) | (octets[first + 1] << 8) | octets[first + 2]
    return ((window >> (24 - bits - (starts & 7)).astype(np.uint32)) & ((1 << bits) - 1)).astype(np.uint16)


def _table(rows: list[tuple[Kind, Header, int, int]]) -> np.ndarray:
    if not rows:
        return np.zeros(0, RECORD)
    kinds = {id(kind): kind for kind, *_ in rows}
    number = {key: place for place, key in enumerate(kinds)}
    common = np.zeros(len(kinds), RECORD)
    for record, kind in zip(common, kinds.values(), strict=True):
        assert kind.row is not None
        for name, value in kind.row.items():
            record[name] = value
        record["decimal"], record["reference"] = kind.factor, kind.shift
        if record["simple"]:
            record["scale"], decimal = grib_factors(int(record["bits"]), 0, kind.decimal_scale)
            record["decimal"], record["reference"] = decimal * kind.factor, kind.shift / (decimal * kind.factor)
    records = common[[number[id(kind)] for kind, *_ in rows]]
    heads = [head for _, head, _, _ in rows]
    for name in ("init", "data"):
        records[name] = [getattr(head, name) for head in heads]
    records["offset"], records["length"] = [row[2] for row in rows], [row[3] for row in rows]
    simple = records["simple"]
    records["reference"] += np.where(simple, [head.reference for head in heads], 0.0)
    records["scale"] = np.ldexp(records["scale"], np.where(simple, [head.binary_scale for head in heads], 0))
    return records
