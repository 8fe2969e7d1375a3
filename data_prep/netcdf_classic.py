"""The length that a classic NetCDF file must have: the library reads zeros beyond the end of a truncated file.

The grammar of the header is that of "The NetCDF Classic Format Specification" (Unidata): CDF-1, CDF-2 (offsets of 64
bits) and CDF-5 (also counts of 64 bits). NetCDF-4 files are HDF5, which notices truncation itself.
"""

from __future__ import annotations

import math
import os
import struct
from typing import BinaryIO

from ensemble_ml.errors import UserError

_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}  # octets of a value for each type
_STREAMING = {4: 2**32 - 1, 8: 2**64 - 1}  # these counts of records stand for an unknown number


def check_whole(path: str) -> None:
    """Refuse a classic NetCDF file that is shorter than its header states. Unknown versions of the format pass.

    Args:
        path: a file that begins with the letters CDF.

    Raises:
        UserError: the file is cut short, or its header is damaged.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        try:
            version = file.read(4)[3]
            if version not in (1, 2, 5):
                return
            needed = _Header(file, version, size).needed()
        except (struct.error, KeyError, IndexError) as error:
            raise UserError(f"{path}: its NetCDF header is damaged or cut short; fetch it again") from error
    if size < needed:
        raise UserError(f"{path}: is cut short: its header announces {needed} bytes, but it has {size}; fetch it again")


class _Header:
    """The part of a header that determines the file's length: dimensions, and each variable's shape, type and place."""

    def __init__(self, file: BinaryIO, version: int, size: int):
        self._file, self._size = file, size
        self._count = 8 if version == 5 else 4  # octets of a count
        self._offset = 4 if version == 1 else 8
        self._records = self._number(self._count)
        self._dimensions = [self._dimension() for _ in range(self._elements())]
        self._skip_attributes()
        self._variables = [self._variable() for _ in range(self._elements())]

    def needed(self) -> int:
        """Return the number of octets up to the last value; the padding at the end may be missing."""
        fixed = [begin + size for begin, size, records in self._variables if not records]
        varying = [(begin, size) for begin, size, records in self._variables if records]
        records = 0 if self._records == _STREAMING[self._count] else self._records
        # A record holds each variable padded to four octets, except if the file has only one such variable.
        step = varying[0][1] if len(varying) == 1 else sum(-(-size // 4) * 4 for _, size in varying)
        last = [begin + (records - 1) * step + size for begin, size in varying] if records else []
        return max([*fixed, *last], default=0)

    def _dimension(self) -> int:
        """Return the length of the next dimension, 0 for the record dimension."""
        self._skip_text()
        return self._number(self._count)

    def _variable(self) -> tuple[int, int, bool]:
        """Return where a variable's values begin, their octets (those of one record), and whether it has records."""
        self._skip_text()
        extents = [self._dimensions[self._number(self._count)] for _ in range(self._number(self._count))]
        self._skip_attributes()
        width = _SIZES[self._number(4)]
        self._number(self._count)  # the stated size, which is not reliable because it may exceed 32 bits
        begin = self._number(self._offset)
        records = bool(extents) and extents[0] == 0
        return begin, width * math.prod(extents[1:] if records else extents), records

    def _elements(self) -> int:
        """Return the length of a list, after its tag; both are zero for an absent list."""
        self._number(4)
        return self._number(self._count)

    def _skip_attributes(self) -> None:
        """Skip a list of attributes."""
        for _ in range(self._elements()):
            self._skip_text()
            width = _SIZES[self._number(4)]
            self._skip(width * self._number(self._count))

    def _skip_text(self) -> None:
        """Skip a name with its length."""
        self._skip(self._number(self._count))

    def _skip(self, octets: int) -> None:
        """Skip a number of octets, padded to a multiple of four."""
        # A damaged length may exceed what `seek` takes. Beyond the end of the file, the next read fails as well.
        self._file.seek(min(-(-octets // 4) * 4, self._size), os.SEEK_CUR)

    def _number(self, octets: int) -> int:
        """Return the next big-endian number of four or eight octets."""
        return int(struct.unpack(">I" if octets == 4 else ">Q", self._file.read(octets))[0])
