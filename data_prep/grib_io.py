"""Access to GRIB files by byte offset, on disk and behind a URL, and detection of changed files.

`os.preadv` reads at a given offset and uses no file position that threads could disturb. So no lock is held while bytes
are read.

Behind a URL, headers and values are read by ranges of bytes, many at a time. An index beside a file says where its
messages begin: ECMWF's `.index` (a line of JSON a message, with `_offset`) or NOAA's `.idx` (wgrib2's inventory:
number, offset, date, and so on, with colons between them). So the requests for many headers run at the same time.
Nothing else is taken from an index: the headers themselves say what the messages hold, as in local files. Without an
index, or with a wrong one, headers are read one after the other.
"""

from __future__ import annotations

import json
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.store.manifest import stamp
from ensemble_ml.store.remote import RemoteFile, fetch_text, is_remote, open_remote, url_of

_OPEN_FILES = 128  # descriptors kept at most; an archive may have more files than a process may hold open
_WINDOW = 1024  # bytes of a file on disk: the end of one message and the header of the next
_SEARCHED = 1 << 16  # bytes that are searched at once
_AT_ONCE = 1024  # bytes that are requested for a header behind a URL; most headers are shorter
_BEFORE = 4  # bytes before a header: the end of the message before it
_WHOLE = 1 << 16  # a file of at most so many bytes is read by one request
_HEADERS_AHEAD = 64  # most requests for headers under way
_VALUES_AHEAD = 32  # most requests for values under way
_BYTES_AHEAD = 64 << 20  # no further request is made while those under way have so many bytes together
_SUFFIX = re.compile(r"\.(grib2?|grb2?)$")  # `.index` stands in its place


@dataclass(frozen=True)
class Stamp:
    """The size and modification time of a file, by which changes are noticed.

    `mtime_ns` is in ns; for a URL it is a checksum of its ETag or date (see `ensemble_ml.store.manifest.stamp`).
    """

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | int) -> Stamp:
        """Return the stamp of a path or of an open descriptor."""
        status = os.stat(path)
        return cls(status.st_size, status.st_mtime_ns)

    @classmethod
    def of_archive(cls, path: str) -> Stamp:
        """Return the stamp of a file, or of all files of a Zarr folder together.

        Raises:
            UserError: the path does not exist, or the URL cannot be read.
        """
        found = stamp(path)
        if found is None and is_remote(path):
            open_remote(path)  # raises an error that says what is wrong
        if found is None:
            raise UserError(f"{path}: cannot be found any more; run again")
        return cls(*found)

    def check(self, path: str, now: Stamp) -> None:
        """Raise a UserError for a file whose stamp `now` differs: it has changed since this stamp was taken."""
        if now != self:
            size = f"{self.size} bytes, now {now.size}" if now.size != self.size else f"still {self.size} bytes"
            raise UserError(f"{path}: changed while it was read ({size}); wait until it is complete, and run again")


class Descriptors:
    """The open files of a process, by path. The most recently used stay open, and none is closed while it is used."""

    def __init__(self, most: int = _OPEN_FILES):
        self._most = most
        # An abandoned generator may be finalised in a thread that holds the lock already, so it has to be reentrant.
        self._lock = threading.RLock()
        self._open: dict[str, int] = {}  # the most recently used last
        self._users: dict[int, int] = {}

    @contextmanager
    def opened(self, path: str) -> Iterator[OpenFile]:
        """Open a file for the duration of a `with` block, or use its open descriptor."""
        with self._lock:
            descriptor = self._open.pop(path, -1)
            if descriptor < 0:
                descriptor = open_to_read(path)
            self._open[path] = descriptor
            self._users[descriptor] = self._users.get(descriptor, 0) + 1
            self._close_oldest()
        try:
            yield OpenFile(descriptor, path)
        finally:
            with self._lock:
                self._users[descriptor] -= 1

    def _close_oldest(self) -> None:
        """Close the least recently used files that nobody uses, down to the limit."""
        idle = [path for path, descriptor in self._open.items() if not self._users.get(descriptor)]
        for path in idle[: max(0, len(self._open) - self._most)]:
            self._close(path)

    def _close(self, path: str) -> None:
        """Close a file; the caller holds the lock."""
        descriptor = self._open.pop(path)
        self._users.pop(descriptor, None)
        os.close(descriptor)

    def close(self, path: str) -> None:
        """Close a file if nobody uses it, so that a later read opens it anew."""
        with self._lock:
            if path in self._open and not self._users.get(self._open[path]):
                self._close(path)


descriptors = Descriptors()
os.register_at_fork(after_in_child=lambda: descriptors.__init__())  # type: ignore[misc]  # the lock may be held


def open_to_read(path: str) -> int:
    """Open a file and return its descriptor; refuse one that is missing, or may not be read."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error


class OpenFile:
    """A file of this machine that is open."""

    def __init__(self, descriptor: int, path: str):
        self._descriptor, self.path = descriptor, path

    @property
    def stamp(self) -> Stamp:
        """Return the file's stamp now."""
        return Stamp.of(self._descriptor)

    def read_into(self, buffer: np.ndarray, start: int) -> None:
        """Fill a buffer (N,) uint8 with bytes of the file from `start` on.

        Raises:
            UserError: the file ends before N bytes, or cannot be read.
        """
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[filled:].data], start + filled)
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read at byte {start + filled} ({error.strerror})") from error
            if not count:
                text = f"{self.path}: was cut short at byte {start + filled} since it was indexed; fetch it again"
                raise UserError(text)
            filled += count

    def content(self) -> FileBytes:
        """Return the file as a sequence of bytes."""
        return Windows(self)


class Scratch(threading.local):
    """A buffer for each thread, so that reading does not allocate memory for every message."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """Return a buffer (size,) uint8, which is the caller's until the next call of this thread."""
        if len(self._buffer) < size:
            self._buffer = np.empty(size + size // 8, np.uint8)
        return self._buffer[:size]


class FileBytes(ABC):
    """A file as a sequence of bytes. Only the stretches that are accessed are read."""

    def __init__(self, size: int):
        self._size = size

    @abstractmethod
    def stretch(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, which lie in the file and are at least one."""

    def __len__(self) -> int:
        """Return the size of the file in bytes."""
        return self._size

    def __getitem__(self, key: slice) -> bytes:
        """Return the bytes of a slice."""
        start, stop = key.start or 0, self._size if key.stop is None else min(key.stop, self._size)
        return self.stretch(start, stop) if stop > start else b""

    def find(self, needle: bytes, start: int) -> int:
        """Return the position of `needle` from `start` on, -1 if it is not there."""
        while start < self._size:
            found = self[start : start + _SEARCHED].find(needle)
            if found >= 0:
                return start + found
            start += _SEARCHED - len(needle) + 1
        return -1


class Windows(FileBytes):
    """A file of this machine as a sequence of bytes.

    The two latest windows are kept: one holds the end of a message and the header of the next, the other the header of
    that message.
    """

    def __init__(self, file: OpenFile):
        super().__init__(file.stamp.size)
        self._file = file
        self._now, self._last = (0, b""), (0, b"")

    def stretch(self, start: int, stop: int) -> bytes:
        """Return bytes from one of the two windows, or read a new window that begins with them."""
        for first, content in (self._now, self._last):
            if first <= start and stop <= first + len(content):
                return content[start - first : stop - first]
        size = min(max(stop - start, _WINDOW), self._size - start)
        buffer = np.empty(size, np.uint8)
        self._file.read_into(buffer, start)
        self._last, self._now = self._now, (start, buffer.tobytes())
        return self._now[1][: stop - start]


class RemoteGrib:
    """A GRIB file behind a URL, with the methods of `OpenFile`, and `ahead` besides."""

    def __init__(self, file: RemoteFile):
        self._file = file
        self._ahead = _Ahead(file, _VALUES_AHEAD)
        self._headers: list[RemoteHeaders] = []

    @property
    def stamp(self) -> Stamp:
        """Return the stamp with which the file was opened: each read raises an error if the file has changed since."""
        return Stamp(self._file.size, self._file.tag)

    def ahead(self, offsets: np.ndarray, lengths: np.ndarray) -> None:
        """Announce the offsets and lengths (N,) of messages in the order in which they will be read, to ask early."""
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


def remote_grib(path: str, stamp: Stamp) -> AbstractContextManager[RemoteGrib]:
    """Open the file behind a URL, which had this stamp when it was indexed, for the duration of a `with` block."""
    return closing(RemoteGrib(RemoteFile(url_of(path), stamp.size, stamp.mtime_ns)))


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

        If the range was not announced, at least `least` bytes are read from `start` on.
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

    Like `Windows`, it keeps the two stretches that were read last.
    """

    def __init__(self, file: RemoteFile):
        super().__init__(file.size)
        self._ahead = _Ahead(file, _HEADERS_AHEAD)
        small = file.size <= _WHOLE
        self._ahead.announce([(0, file.size)] if small else _around(_offsets(file.url), file.size))

    def stretch(self, start: int, stop: int) -> bytes:
        """Return bytes of the file; where they were not announced, at least `_AT_ONCE` bytes are read."""
        first, content = self._ahead.find(start, stop, least=_AT_ONCE)
        return content[start - first : stop - first]


def _around(offsets: list[int], size: int) -> list[tuple[int, int]]:
    """Return the stretches around the beginnings of messages and the end of the file, without those inside another."""
    spans = [(max(0, offset - _BEFORE), min(offset + _AT_ONCE, size)) for offset in (*offsets, size)]
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
