"""GRIB files behind a URL: headers and values are read by ranges of bytes, many at a time.

An index beside a file says where its messages begin: ECMWF's `.index` (a line of JSON a message, with `_offset`) or
NOAA's `.idx` (wgrib2's inventory: number, offset, date, and so on, with colons between them). So the requests for
many headers run at the same time. Nothing else is taken from an index: the headers themselves say what the messages
hold, as in local files. Without an index, or with a wrong one, headers are read one after the other.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from data_prep.grib_io import FileBytes, Stamp
from ensemble_ml.store.remote import RemoteFile, fetch_text, url_of

_WINDOW = 1024  # bytes; most headers are shorter
_BEFORE = 4  # bytes before a header: the end of the message before it
_WHOLE = 1 << 16  # a file of at most so many bytes is read by one request
_HEADERS_AHEAD = 64  # most requests for headers under way
_VALUES_AHEAD = 32  # most requests for values under way
_BYTES_AHEAD = 64 << 20  # no further request is made while those under way have so many bytes together
_SUFFIX = re.compile(r"\.(grib2?|grb2?)$")


class RemoteGrib:
    """A GRIB file behind a URL, with the methods of `data_prep.grib_io.OpenFile`.

    Args:
        file: the file.
    """

    def __init__(self, file: RemoteFile):
        self._file = file
        self._ahead = _Ahead(file, _VALUES_AHEAD)
        self._headers: list[RemoteHeaders] = []

    @property
    def stamp(self) -> Stamp:
        """Return the stamp with which the file was opened: each read raises an error if the file has changed since."""
        return Stamp(self._file.size, self._file.tag)

    def ahead(self, offsets: np.ndarray, lengths: np.ndarray) -> None:
        """Announce the messages that will be read, in their order, so that they are requested in advance.

        Args:
            offsets: (N,) where they begin.
            lengths: (N,) their lengths.
        """
        spans = zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True)
        self._ahead.announce(dict.fromkeys(spans))  # a message may hold several fields

    def read_into(self, buffer: np.ndarray, start: int) -> None:
        """Fill a buffer (N,) uint8 with bytes of the file from `start` on.

        Raises:
            UserError: they cannot be read, or the file has changed.
        """
        end = start + len(buffer)
        first, content = self._ahead.find(start, end)
        buffer[:] = np.frombuffer(content, np.uint8)[start - first : end - first]

    def content(self) -> FileBytes:
        """Return the file as a sequence of bytes."""
        self._headers.append(RemoteHeaders(self._file))
        return self._headers[-1]

    def close(self) -> None:
        """Cancel the requests that are still under way."""
        for ahead in (self._ahead, *(headers._ahead for headers in self._headers)):
            ahead.close()


@contextmanager
def remote_grib(path: str, stamp: Stamp) -> Iterator[RemoteGrib]:
    """Open the file behind a URL for the duration of a `with` block.

    Args:
        path: the URL.
        stamp: its size and tag when it was indexed.
    """
    grib = RemoteGrib(RemoteFile(url_of(path), stamp.size, stamp.mtime_ns))
    try:
        yield grib
    finally:
        grib.close()


class _Ahead:
    """Ranges of bytes of a file that are requested before they are needed."""

    def __init__(self, file: RemoteFile, most: int):
        self._file, self._most = file, most
        self._coming: Iterator[tuple[int, int]] = iter(())
        self._asked: deque[tuple[int, int, Future[bytes]]] = deque()
        self._last = self._now = 0, b""

    def announce(self, spans: Iterable[tuple[int, int]]) -> None:
        """Set the ranges (first, end) that will be needed, in this order, and cancel the requests for earlier ones."""
        self.close()
        self._coming = iter(spans)

    def find(self, start: int, end: int, least: int = 0) -> tuple[int, bytes]:
        """Return the position and the bytes of a stretch of the file that holds the bytes from `start` to `end`.

        Args:
            start: position of the first byte.
            end: position after the last.
            least: bytes to read from `start` on at least, if the range was not announced.

        Raises:
            UserError: they cannot be read, or the file has changed.
        """
        for first, content in (self._now, self._last):
            if first <= start and end <= first + len(content):
                return first, content
        self._last = self._now
        self._fill()
        while self._asked and self._asked[0][1] <= start:
            self._asked.popleft()[2].cancel()
            self._fill()
        if self._asked and self._asked[0][0] <= start and end <= self._asked[0][1]:
            first, _, asked = self._asked.popleft()
        else:
            first, asked = start, self._file.ask(start, min(max(end, start + least), self._file.size))
        self._fill()
        self._now = first, self._file.answer(asked)
        return self._now

    def _fill(self) -> None:
        """Request the next ranges, as many as may be under way."""
        while len(self._asked) < self._most and sum(end - first for first, end, _ in self._asked) < _BYTES_AHEAD:
            span = next(self._coming, None)
            if span is None:
                return
            self._asked.append((*span, self._file.ask(*span)))

    def close(self) -> None:
        """Cancel all requests, and forget the ranges that were announced."""
        for *_, asked in self._asked:
            asked.cancel()
        self._asked.clear()
        self._coming = iter(())


class RemoteHeaders(FileBytes):
    """A file behind a URL as a sequence of bytes, whose headers of messages are requested in advance.

    Like `data_prep.grib_io.Windows`, it keeps the two stretches that were read last.

    Args:
        file: the file.
    """

    def __init__(self, file: RemoteFile):
        super().__init__(file.size)
        self._ahead = _Ahead(file, _HEADERS_AHEAD)
        small = file.size <= _WHOLE
        self._ahead.announce([(0, file.size)] if small else _around(_offsets(file.url), file.size))

    def stretch(self, start: int, stop: int) -> bytes:
        """Return bytes of the file; where they were not announced, at least `_WINDOW` bytes are read."""
        first, content = self._ahead.find(start, stop, least=_WINDOW)
        return content[start - first : stop - first]


def _around(offsets: list[int], size: int) -> list[tuple[int, int]]:
    """Return the stretches around the beginnings of messages and the end of the file, without those inside another."""
    spans = [(max(0, offset - _BEFORE), min(offset + _WINDOW, size)) for offset in (*offsets, size)]
    return [span for before, span in pairwise([(0, 0), *spans]) if span[1] > before[1]]


def _offsets(url: str) -> list[int]:
    """Return where the messages of a file begin, by the index beside it; nothing if there is none, or a damaged one."""
    places = [_SUFFIX.sub(".index", url)] if _SUFFIX.search(url) else []
    for place in (*places, f"{url}.idx"):
        text = fetch_text(place)
        if text is not None:
            try:
                lines = [line for line in text.splitlines() if line.strip()]
                if place.endswith(".index"):
                    return sorted({int(json.loads(line)["_offset"]) for line in lines})
                return sorted({int(line.split(":")[1]) for line in lines})
            except (ValueError, KeyError, TypeError, IndexError):
                return []
    return []
