"""Access to GRIB files by byte offset: shared descriptors, small windows for headers, and detection of changed files.

`os.preadv` reads at a given offset and uses no file position that threads could disturb. So no lock is held while bytes
are read.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.store.remote import is_remote, open_remote
from ensemble_ml.store.sources import stamp

_OPEN_FILES = 128  # descriptors kept at most; an archive may have more files than a process may hold open
_WINDOW = 1024  # holds the end of one message and the header of the next
_SEARCHED = 1 << 16  # bytes that are searched at once


@dataclass(frozen=True)
class Stamp:
    """The size and modification time of a file, by which changes are noticed.

    `mtime_ns` is in ns; for a URL it is a checksum of its ETag or date (see `ensemble_ml.store.sources.stamp`).
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
        """Refuse a file that has changed since this stamp was taken.

        Args:
            path: the file.
            now: its stamp now.

        Raises:
            UserError: the stamps differ.
        """
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

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[OpenFile]:
        """Open a file for the duration of a `with` block, or use its open descriptor.

        Yields:
            The file.

        Raises:
            UserError: the file cannot be opened.
        """
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
    """Open a file and return its descriptor.

    Raises:
        UserError: it is missing, or may not be read.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error


class OpenFile:
    """A file of this machine that is open.

    Args:
        descriptor: its descriptor.
        path: its path, for error messages.
    """

    def __init__(self, descriptor: int, path: str):
        self._descriptor, self.path = descriptor, path

    @property
    def stamp(self) -> Stamp:
        """Return the file's stamp now."""
        return Stamp.of(self._descriptor)

    def read_into(self, buffer: np.ndarray, start: int) -> None:
        """Fill a buffer with bytes of the file.

        Args:
            buffer: (N,) uint8.
            start: offset of the first byte.

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
    """A file as a sequence of bytes. Only the stretches that are accessed are read.

    Args:
        size: size of the file in bytes.
    """

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
