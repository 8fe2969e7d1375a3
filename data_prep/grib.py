"""Readers of GRIB files, editions 1 and 2: one pass makes an index, and values are then read by byte offset.

NumPy unpacks simple packing (data representation template 5.0). Integers of up to 16 bits stay packed, so they reach
the tensor store with their reference and scales and without rounding. Those of up to 24 bits become float32. Points
that a bitmap hides become a mask. ecCodes decodes all other packings (CCSDS, JPEG 2000, second order) to float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from data_prep.file_index import FileIndex, Table
from data_prep.grib_io import OpenFile, RemoteGrib, Scratch, Stamp, descriptors, remote_grib
from data_prep.grib_keys import Kind, Place, Scan, ask, bitmap, eccodes_module, opened, packed_size, place_of, unpack
from data_prep.grib_sections import Content, Header, frames, headers, single_field, without_values
from data_prep.records import IS_STATIC, IS_SURFACE, NO_MESSAGE, RECORD, Origin, RawField, field_of
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS
from ensemble_ml.grid import Grid
from ensemble_ml.store.packing import grib_factors
from ensemble_ml.store.remote import is_remote

_kinds: dict[bytes, Kind] = {}  # shared by all files of a process: an archive repeats its headers in every file
_scratch = Scratch()
_HOLE = -1e30  # the number that ecCodes returns for a point without a value
_HEADING = 100  # bytes: the heading of a bulletin or the padding of a record between two messages
_LARGEST = float(np.finfo(np.float32).max)
_NO_FINITE = "its packing constants give no finite values; the file is damaged, fetch it again"
_SCALES = ("bitsPerValue", "binaryScaleFactor", "decimalScaleFactor")


class GribFile:
    """A GRIB file as a reader (see `data_prep.records.Reader`). Its table is taken from `index` if that has one.

    Raises:
        UserError: the file is missing, empty, truncated, damaged, or changes while it is read; its fields are on
            several grids, or on one that is neither regular nor Gaussian.
    """

    keyed = True

    def __init__(self, path: str, index: FileIndex | None = None):
        self.path = path
        descriptors.close(path)  # the path may have been given to another file
        self.stamp = Stamp.of_archive(path)
        if not self.stamp.size:
            raise UserError(f"{path}: is empty; give a GRIB, NetCDF or Zarr archive")
        table = index.load(path, self.stamp) if index else None
        if table is None:
            table = self._scanned(index)
        self.records, self.skipped, self.methods = table.records, table.skipped, table.methods
        self.origins = table.origins
        self._scans = table.scans
        grids = [place_of(scan).grid for scan in table.scans]
        self.grid: Grid | None = grids[0] if grids else None

    def _scanned(self, index: FileIndex | None) -> Table:
        """Scan the file, unless another reader scans it at the same time; then return the table that it saved."""
        if index is None:
            return _Indexer(self.path, self.stamp).table()
        with index.alone(self.path):
            table = index.load(self.path, self.stamp)  # another reader may have saved it meanwhile
            if table is None:
                table = _Indexer(self.path, self.stamp).table()
                index.save(self.path, self.stamp, table)
        return table

    def fields(
        self, records: np.ndarray, rows: slice | None = None, into: Sequence[np.ndarray] | None = None
    ) -> Iterator[RawField]:
        """Yield the values of `records` (see `data_prep.records.Reader`).

        Raises:
            UserError: a message is damaged or has NaN or infinite values, the file cannot be read or changed since it
                was indexed, or ecCodes cannot decode a message.
        """
        places = [place_of(scan) for scan in self._scans]
        with _opened(self.path, self.stamp) as file:
            self.stamp.check(self.path, file.stamp)
            if isinstance(file, RemoteGrib):
                file.ahead(records["offset"], records["length"])
            for number, record in enumerate(records):
                place = places[record["place"]]
                message = _Message(self.path, file, record, place, rows or slice(0, place.grid.shape[0]))
                field = message.packed(into[number] if into else None) if record["simple"] else message.decoded()
                # A file that is written while it is read may give mixed values, so it is checked after each read.
                self.stamp.check(self.path, file.stamp)
                yield field

    def empty(self, records: np.ndarray, index: FileIndex) -> np.ndarray:
        """Return which of `records` have no value at any point (see `data_prep.records.Reader`).

        Only messages without a positive number of values, or with zero bits for each value, are read: the others have
        at least one value.
        """
        doubtful = records["masked"] & ((records["bits"] == 0) | (records["stated"] <= 0))
        found = np.zeros(len(records), bool)
        found[doubtful] = [field.nothing for field in self.fields(records[doubtful])]
        return found


class _Message:
    """A message of an open file, with the band of rows to read from it."""

    def __init__(self, path: str, file: OpenFile | RemoteGrib, record: np.void, place: Place, rows: slice):
        self.path, self.file, self.record, self.place, self.rows = path, file, record, place, rows
        self.points = place.scan.points
        self.bits = int(record["bits"])

    def packed(self, out: np.ndarray | None) -> RawField:
        """Return the integers of simple packing, in `out` if it is given; float32 values if they have over 16 bits."""
        reference, scale, decimal = (float(self.record[name]) for name in ("reference", "scale", "decimal"))
        shape = self.rows.stop - self.rows.start, self.place.grid.shape[1]
        if self.bits > 16:
            wide, mask = self._integers(np.empty(shape, np.uint32))
            values = ((wide * scale + reference) * decimal).astype(np.float32)
            return RawField(_masked(values, mask), mask=mask, step=scale * decimal)
        if out is None and self.bits == 16 and not self.record["bitmap"] and self.place.straight:
            return RawField(self._as_it_lies(shape), reference, scale, decimal)
        integers, mask = self._integers(np.empty(shape, np.uint16) if out is None else out)
        return RawField(integers, reference, scale, decimal, mask)

    def _as_it_lies(self, shape: tuple[int, int]) -> np.ndarray:
        """Return the wanted rows of 16-bit integers in the file's byte order, as a view of the bytes that were read."""
        octets = np.empty(2 * shape[0] * shape[1], np.uint8)
        start = int(self.record["offset"]) + int(self.record["data"]) + packed_size(self.rows.start * shape[1], 16)
        self.file.read_into(octets, start)
        return octets.view(">u2").reshape(shape)

    def _integers(self, out: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the integers of the wanted rows in `out`, and the mask of points without a value, or None."""
        if self.record["bitmap"]:
            return self._under_bitmap(out)
        if not self.bits:
            out[...] = 0
            return out, None
        count, start = self.points, 0
        if self.place.by_rows and self.bits % 8 == 0:  # only the wanted rows are read
            first, last = self.place.stretch(self.rows)
            count, start = (last - first) * out.shape[1], packed_size(first * out.shape[1], self.bits)
        octets = self._read(int(self.record["data"]) + start, packed_size(count, self.bits))
        self._place(unpack(octets, self.bits, count), out)
        return out, None

    def _place(self, values: np.ndarray, out: np.ndarray) -> None:
        """Write a message's values into the wanted rows; `values` are those of the whole grid or of these rows."""
        if out.shape == self.place.grid.shape or (values.size == out.size and self.place.by_rows):
            self.place.put(values, out)
        else:
            out[...] = self.place.put(values, np.empty(self.place.grid.shape, values.dtype))[self.rows]

    def _under_bitmap(self, out: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return what `_integers` returns, for a message with a bitmap.

        The bitmap decides which points have one of the packed integers, so the integers of all rows are read.
        """
        first, data = int(self.record["bitmap"]), int(self.record["data"])
        octets = self._read(first, int(self.record["length"]) - 4 - first)
        there = bitmap(octets, self.points)
        count = int(there.sum())
        packed = octets[data - first :]
        stated = int(self.record["stated"])
        left = 0 if stated < 0 else (stated - count) * max(self.bits, 1)
        # A bitmap that does not fit the number of values would shift every value to another point.
        if packed_size(count, self.bits) > len(packed) or not 0 <= left <= int(self.record["spare"]):
            raise UserError(f"{self._where()}: its bitmap has {count} points, but not as many values; fetch it again")
        values = np.zeros(self.points, out.dtype)
        if self.bits and count:
            values[there] = unpack(packed[: packed_size(count, self.bits)], self.bits, count)
        self._place(values, out)
        if count == self.points:
            return out, None
        mask = np.empty(out.shape, bool)
        self._place(~there, mask)
        return out, mask if mask.any() else None

    def decoded(self) -> RawField:
        """Return the values as ecCodes decodes them, in the registry's units."""
        length = int(self.record["length"])
        message = single_field(self._read(0, length).tobytes(), 0, length, int(self.record["data"]))
        codes = eccodes_module()
        hidden = None
        with opened(message, self._where()) as handle:
            if self.record["masked"]:
                codes.codes_set(handle, "missingValue", _HOLE)  # 9999 may be a value
            values = codes.codes_get_array(handle, "values")
            step = _step(handle)
        if self.record["masked"]:
            hidden = values == _HOLE
            values[hidden] = 0
        if len(values) != self.points:
            raise UserError(f"{self._where()}: ecCodes finds {len(values)} values for {self.points} points")
        # Missing values are hidden by a bitmap, so any NaN that is left is an error in the file.
        if bad := int((~np.isfinite(values)).sum()):
            raise UserError(
                f"{self._where()}: {bad} of {self.points} values are NaN or infinite; hide them by a bitmap, or leave"
                " it out"
            )
        if not math.isfinite(step):
            raise UserError(f"{self._where()}: {_NO_FINITE}")
        factor, shift = float(self.record["decimal"]), float(self.record["reference"])
        step *= factor
        if (factor, shift) != (1.0, 0.0):  # without a conversion, even the sign of a zero must be kept
            values = values * factor + shift
        shape = self.rows.stop - self.rows.start, self.place.grid.shape[1]
        out = np.empty(shape, np.float32)
        self._place(values.astype(np.float32), out)
        if hidden is None or not hidden.any():
            return RawField(out, step=step)
        mask = np.empty(shape, bool)
        self._place(hidden, mask)
        return RawField(_masked(out, mask), mask=mask if mask.any() else None, step=step)

    def _read(self, start: int, size: int) -> np.ndarray:
        """Read bytes of the message, counted from its beginning, into the thread's scratch buffer."""
        buffer = _scratch.take(size)
        self.file.read_into(buffer, int(self.record["offset"]) + start)
        return buffer

    def _where(self) -> str:
        """Return the file, the position and the variable of the message for error messages."""
        return f"{self.path}: message at byte {self.record['offset']}, {field_of(self.record).name}"


def _opened(path: str, stamp: Stamp) -> AbstractContextManager[OpenFile | RemoteGrib]:
    """Open a file, or the file behind a URL, for the duration of a `with` block."""
    return remote_grib(path, stamp) if is_remote(path) else descriptors.opened(path)


def _masked(values: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Set points without a value to NaN, in place, and return the values."""
    if mask is not None:
        values[mask] = np.nan
    return values


class _Indexer:
    """A single pass over a file that reads headers but no values."""

    def __init__(self, path: str, stamp: Stamp):
        self.path, self.stamp = path, stamp
        self.skipped: dict[str, int] = {}
        self.methods: dict[str, str] = {}
        self.scans: dict[Scan, int] = {}
        self.origins: dict[Origin, int] = {}

    def table(self) -> Table:
        """Scan the file and return the table of its messages."""
        rows, end = [], 0
        with _opened(self.path, self.stamp) as file:
            self.stamp.check(self.path, file.stamp)
            content = file.content()
            try:
                for number, (offset, length) in enumerate(frames(self.path, content), 1):
                    self._note_gap(end, offset)
                    end = offset + length
                    try:
                        for head in headers(content, offset, length):
                            row = self._row(content, offset, length, head)
                            if row is not None:
                                rows.append((*row, offset, length))
                    except UserError as error:
                        raise UserError(f"{self.path}: message {number} at byte {offset}: {error}") from error
                if content[end:].strip(b"\0"):  # zeros after the last message are padding
                    self._note_gap(end, len(content))
            # A file that is still being written looks damaged; the error must then say that it changed.
            finally:
                self.stamp.check(self.path, file.stamp)
        try:
            records = _records(rows, self.scans, self.origins)
            return Table(records, tuple(self.scans), self.skipped, self.methods, tuple(self.origins))
        except OverflowError as error:  # a level, step or member that no forecast has
            raise UserError(
                f"{self.path}: a header states a number out of range ({error}); fetch the file anew"
            ) from error

    def _note_gap(self, end: int, start: int) -> None:
        """Note bytes that are no message and too many for the heading of a bulletin: a message may be damaged there."""
        if start - end > _HEADING:
            self.skipped[f"{start - end} bytes from byte {end} on {NO_MESSAGE}"] = 1

    def _row(self, content: Content, offset: int, length: int, head: Header) -> tuple[Kind, Header] | None:
        """Return the kind and the header of one message, or None if it is no field that is read.

        ecCodes is asked only for the first message with a header key, unless it reads the header in another way than
        the program (see `data_prep.grib_sections`).
        """
        kind = _kinds.get(head.key)
        if kind is None:
            message, shift = without_values(content, offset, length, head)
            kind, said = ask(message, replace(head, data=head.data - shift))
            said = replace(said, data=said.data + shift)
            # If ecCodes reads the header in another way than the program, it has to be asked for every such message.
            if said == head:
                _kinds[head.key] = kind
            head = said
        if kind.row is None or kind.scan is None:
            self.skipped[kind.name] = self.skipped.get(kind.name, 0) + 1
            return None
        self._check(kind, head)
        self.origins.setdefault(kind.origin, len(self.origins))
        if kind.method:
            self.methods[FIELDS[kind.row["field"]].name] = kind.method
        return kind, head

    def _check(self, kind: Kind, head: Header) -> None:
        """Raise a UserError for a message whose level, sizes, bitmap, packing constants or grid make no sense.

        It would otherwise give wrong values, or fail only in the middle of a build.
        """
        assert kind.row is not None and kind.scan is not None
        place = place_of(kind.scan)
        level = kind.row["level"] if head.level is None else head.level
        if level < 1 and not (IS_SURFACE | IS_STATIC)[kind.row["field"]]:
            raise UserError(f"level {level} hPa: is none; the file is damaged, fetch it again")
        points = kind.scan.points
        needed = packed_size(points if not head.bitmap else head.count or 0, kind.row["bits"])
        if kind.row["simple"] and needed > head.room:
            raise UserError(f"{needed} bytes of values are needed, {head.room} are there; fetch the file again")
        if kind.row["simple"] and not head.bitmap and head.count is not None and kind.row["bits"]:
            spare = (head.count - points) * kind.row["bits"]
            if not 0 <= spare <= head.spare:
                raise UserError(
                    f"{head.count} values are packed for {points} points; the file is damaged, fetch it again"
                )
        if kind.row["simple"] and head.bitmap and not head.bitmap_bits[0] <= points <= head.bitmap_bits[1]:
            raise UserError(f"its bitmap has {head.bitmap_bits[1]} points, its grid {points}; fetch the file again")
        if kind.row["simple"] and not _finite(kind, head):
            raise UserError(_NO_FINITE)
        if kind.scan in self.scans:
            return
        if self.scans:
            grid = place_of(next(iter(self.scans))).grid
            if not place.grid.same_as(grid):
                raise UserError(
                    f"grid {place.grid.describe()} differs from the file's first, {grid.describe()}; "
                    "put fields on different grids into different archives"
                )
        self.scans[kind.scan] = len(self.scans)


def _step(handle: int) -> float:
    """Return the packing step of an open message; 0 if it has no scales (IEEE floats) or is constant."""
    codes = eccodes_module()
    if not all(codes.codes_is_defined(handle, key) for key in _SCALES):
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # scales of a damaged header
        scale, decimal = grib_factors(*(codes.codes_get(handle, key) for key in _SCALES))
        return float(np.multiply(scale, decimal))


def _finite(kind: Kind, head: Header) -> bool:
    """Return whether every value that simple packing can hold is finite in float32."""
    assert kind.row is not None
    bits = kind.row["bits"]
    decimal = grib_factors(bits, 0, kind.decimal_scale)[1]
    span = math.ldexp(1.0, min(head.binary_scale + bits, 1000)) if bits else 0.0
    largest = (abs(head.reference) + span) * decimal * abs(kind.factor)
    return decimal > 0 and largest < _LARGEST


def _records(
    rows: list[tuple[Kind, Header, int, int]], scans: dict[Scan, int], origins: dict[Origin, int]
) -> np.ndarray:
    """Return the table of a file's messages, (N,) RECORD.

    The columns that depend on the kind of message are filled once for each kind, and the others column by column,
    because a file may have millions of messages.
    """
    if not rows:
        return np.zeros(0, RECORD)
    kinds = {id(kind): kind for kind, *_ in rows}
    number = {key: place for place, key in enumerate(kinds)}
    common = np.zeros(len(kinds), RECORD)
    for record, kind in zip(common, kinds.values(), strict=True):
        assert kind.row is not None and kind.scan is not None
        for name, value in kind.row.items():
            record[name] = value
        record["place"], record["origin"] = scans[kind.scan], origins[kind.origin]
        record["decimal"], record["reference"] = kind.factor, kind.shift
        if record["simple"]:
            record["scale"], decimal = grib_factors(int(record["bits"]), 0, kind.decimal_scale)
            # A change of units by a shift becomes part of the reference, which `decimal` then multiplies.
            record["decimal"], record["reference"] = decimal * kind.factor, kind.shift / (decimal * kind.factor)
    records = common[[number[id(kind)] for kind, *_ in rows]]
    heads = [head for _, head, _, _ in rows]
    for name in ("init", "data", "bitmap", "spare"):
        records[name] = [getattr(head, name) for head in heads]
    records["offset"], records["length"] = [row[2] for row in rows], [row[3] for row in rows]
    for name, column in _understood(heads).items():
        records[name] = np.where(column < 0, records[name], column)
    # ECMWF's parameters of gusts state their hours, but no interval begins before the forecast.
    hours = np.array([kind.hours for kind, *_ in rows])
    implied = (hours > 0) & ~records["bounded"] & (records["lead"] > 0)
    records["lead_start"] = np.where(implied, np.maximum(records["lead"] - hours, 0), records["lead_start"])
    records["bounded"] |= implied
    points = np.array([scan.points for scan in scans])[records["place"]]
    counts = np.array([-1 if head.count is None else head.count for head in heads])
    records["stated"] = counts
    simple = records["simple"]
    # For other packings the count may not be a number of points. In edition 1 it is the number of bits divided by a
    # width that is not that of the values.
    records["masked"] |= (records["bitmap"] > 0) & ((counts != points) | ~simple)
    records["reference"] += np.where(simple, [head.reference for head in heads], 0.0)
    records["scale"] = np.ldexp(records["scale"], np.where(simple, [head.binary_scale for head in heads], 0))
    return records


def _understood(heads: list[Header]) -> dict[str, np.ndarray]:
    """Return the columns that headers state themselves, with -1 where the kind of message states the value."""
    steps = [(-1, -1) if head.steps is None else head.steps for head in heads]
    return {
        "level": np.array([-1 if head.level is None else head.level for head in heads]),
        "member": np.array([-1 if head.member is None else head.member for head in heads]),
        "lead_start": np.array([first for first, _ in steps]),
        "lead": np.array([last for _, last in steps]),
    }
