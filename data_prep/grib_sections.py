"""Boundaries of GRIB messages in a file, and the few header bytes that change from one message to the next.

ecCodes needs about 0.25 ms to open a message and return its keys. An archive has millions of messages, most of which
have the same header except for date, level, member, step and packing constants. So the bytes that change are read here.
The remaining bytes form a key under which the index remembers what ecCodes says about such messages. Octet numbers in
comments are those of the WMO Manual on Codes (WMO-No. 306, Volume I.2), which count from 1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

import numpy as np

from data_prep.grib_io import FileBytes
from ensemble_ml.errors import UserError

Content = bytes | FileBytes


@dataclass(frozen=True)
class Header:
    """The part of a header that differs between messages of one kind, and the `key` by which the kind is recognised.

    `key` holds the header bytes that are the same in all messages of the kind. `init` is the init time. In
    simple packing, an integer X decodes to (`reference` + X * 2^`binary_scale`) * 10^-D, where D is part of the key.
    `level` (hPa), `member` and `steps` (first and last hour) are None if they are left to ecCodes; the key then
    contains their bytes.
    """

    key: bytes
    init: np.datetime64
    reference: float
    binary_scale: int
    data: int  # offset of the packed values in the message
    bitmap: int = 0  # offset of the bitmap's bits in the message; 0 if it has none
    bitmap_bits: tuple[int, int] = (0, 0)  # fewest and most points of a grid that a bitmap of this size fits
    count: int | None = None  # number of packed values: stated (edition 2), or computed from their bits (edition 1)
    room: int = 0  # bytes of packed values
    spare: int = 0  # bits that may follow the last value: edition 1 may fill up to an even number of octets
    level: int | None = None
    member: int | None = None
    steps: tuple[int, int] | None = None


def frames(path: str, content: Content) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of each GRIB message in `content`.

    Raises:
        UserError: there is no message, or one is truncated or damaged.
    """
    position, number = 0, 0
    while (start := _find(content, position)) >= 0:
        length = _length(content, start)
        number += 1
        where = f"{path}: message {number} at byte {start}"
        if length is None or length < 20 or start + length > len(content):
            states = f"needs {length} bytes" if length and length >= 20 else "states no length"
            raise UserError(f"{where} {states}, {len(content) - start} are left: the file is truncated, fetch it again")
        if content[start + length - 4 : start + length] != b"7777":
            raise UserError(f"{where} does not end in 7777; the file is damaged, fetch it again")
        yield start, length
        position = start + length
    if not number:
        raise UserError(f"{path}: holds no GRIB message; give a GRIB, NetCDF or Zarr archive")


def _find(content: Content, position: int) -> int:
    """Return the position of the next "GRIB" from `position` on, -1 if there is none."""
    if content[position : position + 4] == b"GRIB":
        return position
    return content.find(b"GRIB", position)


def _length(content: Content, start: int) -> int | None:
    """Return the length that a message states; None if it is cut off, or of an edition other than 1 and 2."""
    if start + 16 > len(content):
        return None
    edition = _octet(content, start + 7)
    if edition == 2:
        return _integer(content, start + 8, 8)
    if edition != 1:
        return None
    length = _integer(content, start + 4, 3)
    return length if length < 0x800000 else _large_length(content, start, length)


def _large_length(content: Content, start: int, length: int) -> int | None:
    """Return the length of an edition 1 message that may be larger than 8 MiB.

    If section 4 states a length below 120, ECMWF's convention holds: `length` without its highest bit counts units of
    120 bytes. The message then has 120 times that count, less the stated length of section 4, plus 4 bytes. Otherwise
    `length` counts bytes. The result is None if the message is cut off.
    """
    position = start + 8
    flags = _octet(content, position + 7)
    sections = 1 + bool(flags & 128) + bool(flags & 64)
    for _ in range(sections):
        if position + 3 > len(content):
            return None
        position += _integer(content, position, 3)
    if position + 3 > len(content):
        return None
    surplus = _integer(content, position, 3)
    return (length & 0x7FFFFF) * 120 - surplus + 4 if surplus < 120 else length


def headers(content: Content, start: int = 0, length: int | None = None) -> list[Header]:
    """Read the header of each field of the message at `start` (edition 1 or 2), without its packed values.

    A message of edition 1 holds one field. One of edition 2 may repeat its sections from 2, 3 or 4 up to 7. Sections
    that it does not repeat are those of the field before.

    Without a `length`, the message is all that follows `start`.

    Raises:
        UserError: the message is damaged, has no valid date, or uses a bitmap whose bits are not in it.
    """
    end = start + (len(content) - start if length is None else length)
    try:
        if _octet(content, start + 7) == 1:
            return [_header1(content, start, end)]
        return [_header2(content, start, sections) for sections in _fields2(content, start, end)]
    except (IndexError, TypeError, struct.error, ValueError) as error:  # a section ends too early, or a date is invalid
        raise error if isinstance(error, UserError) else UserError(f"damaged sections ({error})") from error


def _header1(content: Content, start: int, end: int) -> Header:
    """Read the header of the edition 1 message from `start` to `end` of the file."""
    product = start + 8
    grid = product + _integer(content, product, 3)
    first = content[product:grid]
    bitmap = grid + (_integer(content, grid, 3) if first[7] & 128 else 0)
    data = bitmap + (_integer(content, bitmap, 3) if first[7] & 64 else 0)
    values = content[data : data + 11]
    if data + 11 > end - 4 or grid - product < 28:
        raise UserError("damaged sections (they are longer than the message)")
    if bitmap > grid:
        _check_lists(content[grid:bitmap])
    if first[12] > 100:  # 255 means that no year is stated: the message is a climate
        raise UserError(f"year {first[12]} of its century: does not exist; give forecasts, which start on a date")
    init = _time((first[24] - 1) * 100 + first[12], *first[13:17])
    level = int.from_bytes(first[10:12], "big") if first[9] == 100 else None
    steps = _steps1(first)
    member = first[49] if len(first) > 49 and (first[4], first[40]) == (98, 1) and first[49] else None
    # The key leaves out all that may change between messages of one kind: the date (octets 13-17 and 25), the level
    # (11-12), steps (19-20) and member (50) if they are understood, the bits of a bitmap, and the length, binary scale
    # and reference of section 4.
    key = b"".join(
        (
            first[:10],
            first[10:12] if level is None else b"",
            first[17:18],
            first[18:20] if steps is None else b"",
            first[20:24],
            first[25:49],
            first[49:50] if member is None else b"",
            first[50:],
            bytes((level is None, steps is None, member is None)),
            content[grid:bitmap],
            content[bitmap + 3 : bitmap + 6] if data > bitmap else b"",
            values[3:4],
            values[10:11],
        )
    )
    size, scale = int.from_bytes(values[:3], "big"), _signed(values, 4)
    large = _integer(content, start + 4, 3) >= 0x800000 and size < 120  # section 4's length then has another meaning
    most = end - 4 - data - 11
    room = most if large else size - 11
    if not 0 <= room <= most:
        raise UserError(f"damaged sections ({room} bytes of values; the message has space for {most})")
    count = max(room * 8 - (values[3] & 15), 0) // values[10] if values[10] else None
    at, bits = 0, 0
    if data > bitmap:
        at, bits = bitmap + 6 - start, (data - bitmap - 6) * 8 - _octet(content, bitmap + 3)
    reference, data = _ibm(values[6:10]), data + 11 - start
    return Header(key, init, reference, scale, data, at, (bits, bits), count, room, _SPARE, level, member, steps)


def _check_lists(grid: bytes) -> None:
    """Refuse a section 2 whose lists lie beyond its end: ecCodes reads on there and may crash."""
    vertical, place, rows = grid[3], grid[4], _integer(grid, 8, 2)
    listed = 4 * vertical if vertical else (0 if place == 255 else 2 * rows)  # vertical coordinates, or points by row
    if listed and place - 1 + listed > len(grid):
        raise UserError(f"damaged sections (section 2 of {len(grid)} bytes has no space for its lists)")


def _steps1(first: bytes) -> tuple[int, int] | None:
    """Return the first and last hour of a section 1; None if they are left to ecCodes.

    They are left to ecCodes for units other than hours, for step 0, for ranges that begin at 0 or do not ascend, and
    for time range indicators (code table 5) other than 0, 2 to 5 and 10.
    """
    unit, one, two, kind = first[17:21]
    if unit != 1:
        return None
    if kind in (0, 10):
        lead = one if kind == 0 else one * 256 + two
        return (lead, lead) if lead else None
    return (one, two) if kind in (2, 3, 4, 5) and 0 < one < two else None


Sections = dict[int, tuple[int, int]]  # number of a section -> where it begins and its length


def _fields2(content: Content, start: int, end: int) -> Iterator[Sections]:
    """Yield the sections 1 to 7 of each field of an edition 2 message."""
    position, sections, bitmap = start + 16, Sections(), None
    found, last = False, 0
    while content[position : position + 4] != b"7777":
        length, number = _integer(content, position, 4), _octet(content, position + 4)
        repeats = last == 7 and number in (2, 3, 4)
        if length < 5 or position + length > end - 4 or not (last < number <= 7 or repeats):
            raise UserError("damaged sections")
        # A field may refer to the bitmap of a field before it (code table 6.0). The reference is replaced by that
        # bitmap's place here, so that readers find the bits.
        if number == 6 and _octet(content, position + 5) == _BITMAP_BEFORE:
            if bitmap is None:
                raise UserError("its bitmap is that of a field before, and there is none; fetch the file again")
            span = bitmap
        else:
            span = position, length
        if number == 6 and _octet(content, span[0] + 5) == 0:
            bitmap = span
        sections = {one: place for one, place in sections.items() if one < number or not repeats} | {number: span}
        if number == 7:
            found = True
            yield sections
        position, last = position + length, number
    if position != end - 4 or not found or last != 7:
        raise UserError("damaged sections (they do not fill the message)")


def _header2(content: Content, start: int, sections: Sections) -> Header:
    """Read the header of one field of the edition 2 message at `start`, whose sections lie where `sections` states."""
    parts = [content[start + 6 : start + 8]]
    reference, scale, bitmap = 0.0, 0, 0
    init: np.datetime64 = np.datetime64("NaT", "s")
    level = member = count = steps = None
    points, bits = -1, (0, 0)
    for number, (position, length) in sorted(sections.items()):
        if number == 7:
            break
        section = content[position : position + (length if number < 6 else 6)]
        if number == 1:
            init = _time(_integer(section, 12, 2), *section[14:18])
            section = section[:12] + section[19:]
        elif number == 3:
            points = _integer(section, 6, 4)
            columns, rows = _integer(section, 30, 4), _integer(section, 34, 4)
            if _integer(section, 12, 2) == 0 and columns != _MISSING and columns * rows != points:
                raise UserError(f"damaged sections ({points} points on a grid of {rows} x {columns})")
        elif number == 4:
            section, level, member, steps = _product2(section, init)
        elif number == 5:
            count = _integer(section, 5, 4)
            section = section[:5] + bytes([count == points]) + section[9:]
            if length >= 21:  # templates with reference and scales; IEEE floats have neither
                reference, scale = struct.unpack(">f", section[8:12])[0], _signed(section, 12)
                section = section[:8] + section[14:]
        elif number == 6 and section[5] == 0:
            bitmap, bits = position + 6 - start, (0, (length - 6) * 8)
        elif number == 6 and section[5] != 255:
            raise UserError(f"bitmap {section[5]} is one that its centre predefines; write the bits into the message")
        parts.append(section)
    data, size = sections[7]
    return Header(
        b"".join(parts), init, float(reference), scale, data + 5 - start, bitmap, bits, count, size - 5, 0,
        level, member, steps,
    )  # fmt: skip


def _product2(section: bytes, init: np.datetime64) -> tuple[bytes, int | None, int | None, tuple[int, int] | None]:
    """Parse section 4, the product definition, of a message with an init time.

    Return the section for the key, in which constants replace the bytes that were understood; then the level in hPa,
    the member, and the first and last hour, each None if it is left to ecCodes.
    """
    template = _integer(section, 7, 2)
    if template not in _TAILS or len(section) < 34:
        return section, None, None, None
    level = member = steps = None
    out = bytearray(section)
    value = _integer(section, 24, 4)
    if (section[22], section[23], section[28]) == (100, 0, 255) and 0 < value <= 200000 and value % 100 == 0:
        level, out[24:28] = value // 100, b"LEVL"
    # Members 0 and 255 (the missing number) are left to ecCodes. The constant 254 differs from both, so that such
    # messages have other keys than those whose member is understood.
    if template in MEMBER_TEMPLATES and section[35] not in (0, 255):
        member, out[35] = section[35], 254
    first, tail = _integer(section, 18, 4), _TAILS[template]
    if section[17] == 1 and 0 < first < 10_000:
        if template in (0, 1, 60):
            steps, out[18:22] = (first, first), b"STEP"
        elif len(section) > tail + 19 and (section[tail + 7], section[tail + 14]) == (1, 1):
            length = _integer(section, tail + 15, 4)  # all ones if it is missing
            end = first + length
            # The end of the interval depends on the init time, so it would give each init time a key of its own. It is
            # left out only if it agrees with start and length; otherwise ecCodes is asked.
            if length < 10_000 and section[tail : tail + 7] == _octets_of(init + np.timedelta64(end, "h")):
                steps, out[18:22], out[tail : tail + 7] = (first, end), b"STEP", bytes(7)
    return bytes(out), level, member, steps


MEMBER_TEMPLATES = (1, 11, 60, 61)  # product definition templates that have a perturbation number
# Product definition templates that are understood here, each with the offset in section 4 at which the end of an
# interval is stated. Templates 0, 1 and 60 are for one time, so their offsets are not used.
_TAILS = {0: 34, 1: 37, 60: 44, 8: 34, 11: 37, 61: 44}
_BITMAP_BEFORE = 254  # the bitmap is the one that was defined before in the same message (code table 6.0)
_SPARE = 15  # most bits by which edition 1 fills up section 4 to an even number of octets
_MISSING = 0xFFFFFFFF  # stands for the row length of a reduced grid, which differs from row to row
_SOME_VALUES = 256  # bytes of values that ecCodes is given: some packings of edition 1 continue their header there


def without_values(content: Content, start: int, length: int, head: Header) -> tuple[bytes, int]:
    """Return the field of `head` as a message with only the first bytes of its values, from which ecCodes reads keys.

    A message of edition 1 stays whole if its values are few, or if they are packed as spherical harmonics or by second
    order packing.

    Returns:
        The message, and the number of bytes by which its values begin earlier than in the original message.

    Raises:
        UserError: no field of the message has its values where `head` says.
    """
    if _octet(content, start + 7) == 2:
        message = single_field(content, start, length, head.data, _SOME_VALUES)
        return message, head.data - (len(message) - 4 - min(head.room, _SOME_VALUES))
    section = start + head.data - 11
    if _octet(content, section + 3) & 0xC0:  # spherical or second order: even its keys need the values
        return content[start : start + length], 0
    kept = start + head.data + min(head.room, _SOME_VALUES)
    if kept >= start + length - 4:
        return content[start : start + length], 0
    cut = bytearray(content[start:kept] + b"7777")
    cut[4:7] = len(cut).to_bytes(3, "big")
    cut[section - start : section - start + 3] = (kept - section).to_bytes(3, "big")
    return bytes(cut), 0


def single_field(content: Content, start: int, length: int, data: int, most: int | None = None) -> bytes:
    """Return one field of a message as a message of its own.

    ecCodes reads further fields of a message only in its multi-field mode, which keeps state between calls and is
    therefore not safe with threads.

    The field is the one whose packed values begin at byte `data` of the message. `most` is the number of bytes of them
    to keep; None keeps all.

    Raises:
        UserError: no field has its values there.
    """
    if _octet(content, start + 7) == 1:
        return content[start : start + length]
    for sections in _fields2(content, start, start + length):
        first, size = sections[7]
        if first + 5 - start == data:
            break
    else:
        raise UserError(f"damaged sections (no values at byte {data})")
    kept = size if most is None else min(size, most + 5)
    parts = [content[place : place + extent] for number, (place, extent) in sorted(sections.items()) if number < 7]
    parts.append(kept.to_bytes(4, "big") + content[first + 4 : first + kept])
    whole = 16 + sum(map(len, parts)) + 4
    return b"".join((content[start : start + 8], whole.to_bytes(8, "big"), *parts, b"7777"))


def _octet(content: Content, place: int) -> int:
    """Return the octet at a position; an IndexError is raised beyond the end."""
    return content[place : place + 1][0]


def _integer(content: Content, start: int, size: int) -> int:
    """Return a big-endian unsigned integer of `size` octets; octets beyond the end of the content are left out."""
    return int.from_bytes(content[start : start + size], "big")


def _signed(content: Content, start: int) -> int:
    """Return a 16-bit integer as GRIB writes it: a sign bit and a magnitude, not two's complement."""
    value = _integer(content, start, 2)
    return -(value & 0x7FFF) if value & 0x8000 else value


def _ibm(four: bytes) -> float:
    """Return the value of an IBM System/360 single, exact in double precision.

    It has a sign bit, an exponent of 16 with excess 64, and a 24-bit fraction. Edition 1 writes reference values so.
    """
    sign, exponent = (-1.0 if four[0] & 0x80 else 1.0), four[0] & 0x7F
    return sign * int.from_bytes(four[1:], "big") * 16.0 ** (exponent - 70)


@lru_cache(4096)
def _octets_of(time: np.datetime64) -> bytes:
    """Return a time as section 4 writes the end of an interval: two octets for the year, then month to second."""
    moment = time.astype(datetime)
    return moment.year.to_bytes(2, "big") + bytes((*moment.timetuple()[1:6],))


@lru_cache(1024)
def _time(year: int, month: int, day: int, hour: int, minute: int) -> np.datetime64:
    """Return a time as datetime64[s]; a ValueError is raised if the numbers are not a valid date."""
    return np.datetime64(datetime(year, month, day, hour, minute), "s")
