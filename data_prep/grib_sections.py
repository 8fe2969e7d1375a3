"""Where messages begin and end in a GRIB file, and the few header bytes that change from one message to the next.

ecCodes needs about 0.25 ms to open a message and ask for its keys; an archive has millions of them, most with the same
header but for date and packing constants. So the bytes that change are read here, and the rest is a key under which the
index remembers what ecCodes said about it. Octet numbers in comments are those of the WMO Manual on Codes, from 1.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ensemble_ml.errors import UserError

Content = bytes | mmap.mmap


@dataclass(frozen=True)
class Header:
    """What differs between messages of one kind. `key` holds all other header bytes."""

    key: bytes
    init: np.datetime64
    reference: float
    binary_scale: int
    data: int  # offset of the packed values in the message


def frames(path: str, content: Content) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of each GRIB message in `content`.

    Raises:
        UserError: no message, or one that is cut short or damaged.
    """
    position, found = 0, 0
    while (start := _find(content, position)) >= 0:
        length = _length(content, start)
        found += 1
        where = f"{path}: message {found} at byte {start}"
        if length is None or start + length > len(content):
            states = "states no length" if length is None else f"needs {length} bytes"
            raise UserError(f"{where} {states}, {len(content) - start} are left: the file is truncated, fetch it again")
        if content[start + length - 4 : start + length] != b"7777":
            raise UserError(f"{where} does not end in 7777; the file is damaged, fetch it again")
        yield start, length
        position = start + length
    if not found:
        raise UserError(f"{path}: holds no GRIB message; give a GRIB, NetCDF or Zarr archive")


def _find(content: Content, position: int) -> int:
    if content[position : position + 4] == b"GRIB":
        return position
    return content.find(b"GRIB", position)


def _length(content: Content, start: int) -> int | None:
    if start + 16 > len(content):
        return None
    edition = content[start + 7]
    if edition == 2:
        return _integer(content, start + 8, 8)
    if edition != 1:
        return None
    length = _integer(content, start + 4, 3)
    return length if length < 0x800000 else _large_length(content, start, length)


def _large_length(content: Content, start: int, length: int) -> int | None:
    """Length of an edition 1 message above 8 MiB: units of 120 bytes, less what section 4 says (ECMWF's convention)."""
    position = start + 8
    flags = content[position + 7]
    sections = 1 + bool(flags & 128) + bool(flags & 64)
    for _ in range(sections):
        if position + 3 > len(content):
            return None
        position += _integer(content, position, 3)
    if position + 3 > len(content):
        return None
    surplus = _integer(content, position, 3)
    return (length & 0x7FFFFF) * 120 - surplus + 4 if surplus < 120 else length


def header(content: Content, start: int = 0) -> Header:
    """Read the header of the message at `start` (edition 1 or 2); the packed values themselves are not touched.

    Raises:
        UserError: sections do not fit into the message, or it holds several fields.
    """
    try:
        return _header1(content, start) if content[start + 7] == 1 else _header2(content, start)
    except (IndexError, struct.error, ValueError) as error:
        raise UserError(f"damaged sections ({error})") from error


def _header1(content: Content, start: int) -> Header:
    product = start + 8
    grid = product + _integer(content, product, 3)
    flags = content[product + 7]
    bitmap = grid + (_integer(content, grid, 3) if flags & 128 else 0)
    data = bitmap + (_integer(content, bitmap, 3) if flags & 64 else 0)
    century, (year, month, day, hour, minute) = content[product + 24], content[product + 12 : product + 17]
    init = _time((century - 1) * 100 + year, month, day, hour, minute)
    # Left out of the key: the date (octets 13-17 and 25), a bitmap's bits, binary scale and reference (section 4).
    key = b"".join(
        (
            content[product : product + 12],
            content[product + 17 : product + 24],
            content[product + 25 : bitmap],
            content[data : data + 4],
            content[data + 10 : data + 11],
        )
    )
    reference, scale = _ibm(content[data + 6 : data + 10]), _signed(content, data + 4)
    return Header(key, init, reference, scale, data + 11 - start)


def _header2(content: Content, start: int) -> Header:
    parts = [content[start + 6 : start + 8]]
    position, reference, scale, data = start + 16, 0.0, 0, 0
    init: np.datetime64 = np.datetime64("NaT", "s")
    while content[position : position + 4] != b"7777":
        length, number = _integer(content, position, 4), content[position + 4]
        if length < 5 or (data and number < 8):
            raise UserError("several fields in one message: split it with grib_copy" if data else "damaged sections")
        if number == 7:
            data = position + 5
        else:
            section = content[position : position + (length if number < 6 else 6)]
            if number == 1:
                init = _time(_integer(section, 12, 2), *section[14:18])
                section = section[:12] + section[19:]
            elif number == 5 and length >= 21:  # templates with reference and scales; IEEE floats have neither
                reference, scale = struct.unpack(">f", section[11:15])[0], _signed(section, 15)
                section = section[:11] + section[17:]
            parts.append(section)
        position += length
    return Header(b"".join(parts), init, float(reference), scale, data - start)


def _integer(content: Content, start: int, size: int) -> int:
    return int.from_bytes(content[start : start + size], "big")


def _signed(content: Content, start: int) -> int:
    """A 16-bit integer as GRIB writes it: a sign bit and a magnitude."""
    value = _integer(content, start, 2)
    return -(value & 0x7FFF) if value & 0x8000 else value


def _ibm(four: bytes) -> float:
    """A System/360 single: sign, exponent of 16 with excess 64, 24-bit fraction; exact in double precision."""
    sign, exponent = (-1.0 if four[0] & 0x80 else 1.0), four[0] & 0x7F
    return sign * int.from_bytes(four[1:], "big") * 16.0 ** (exponent - 70)


def _time(year: int, month: int, day: int, hour: int, minute: int) -> np.datetime64:
    return np.datetime64(f"{year:04d}-{month:02d}-{day:02d}T{hour:02d}:{minute:02d}:00").astype("datetime64[s]")
