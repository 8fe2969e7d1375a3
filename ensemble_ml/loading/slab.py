"""Hold packed samples in memory or on local disk, where other processes of the same node can read them.

There is one file for each rank and tier. Its header has two words that identify it, and one for each sample that it
may hold. The samples follow, at the offsets that the plan assigns.

In memory the file is a memfd. Other processes of the same user open it by its path under /proc, and the kernel frees it
when the last process that holds it ends, even by a crash. On disk the file may be kept, and a run with the same plan
then finds it filled.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.loading.arena import address_of, memory_file, whole_pages, write_all

log = logging.getLogger(__name__)

_PIECE = 1 << 20  # bytes to checksum at once; google_crc32c holds the GIL meanwhile, so no other thread runs
_PATIENCE = 1.0  # seconds to wait for another run that briefly locks a cache to see whether it is in use
_MAGIC = 0x454D4C31  # "EML1"
_FILLED = 1 << 32  # in a header word; the low half is the sample's crc32c


@dataclass(frozen=True, eq=False)
class Shape:
    """The layout of a slab: which samples it holds and where.

    Attributes:
        samples: (N,) numbers of the samples, ascending.
        offset: (N,) first byte of each, counted from the end of the header.
        size: (N,) bytes that the slab holds of each; fewer than the sample has if only its head is held.
        key: 63 bits that identify plan and data. A file with another key is not this slab.
    """

    samples: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    key: int

    @property
    def header(self) -> int:
        """Return the size of the header in bytes, rounded up to whole pages."""
        return whole_pages(16 + 8 * len(self.samples))

    @property
    def bytes(self) -> int:
        """Return the number of bytes of the whole file."""
        return self.header + int((self.offset + self.size).max(initial=0))

    def find(self, sample: int) -> int:
        """Return the position of `sample` among the samples that the slab holds, or -1 if it is not one of them."""
        place = int(np.searchsorted(self.samples, sample))
        return place if place < len(self.samples) and self.samples[place] == sample else -1


class Slab:
    """The samples of one rank in one tier. Any thread may read and write.

    A reader never sees a half-written sample: its header word is set after its bytes, and holds their checksum.

    Raises:
        ValueError: The slab is opened for reading only, and the file is not the slab of this shape and key.
    """

    def __init__(self, fd: int, shape: Shape, *, writable: bool):
        self.fd, self.shape, self._writable = fd, shape, writable
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, shape.bytes, access=access)
        self._all = np.frombuffer(self._map, np.uint8)
        self._words = self._all[: shape.header].view(np.uint64)
        # A new file, or one of another plan, starts with an empty header. A file with the right key keeps its samples.
        if writable and self._words[:2].tolist() != [_MAGIC, shape.key]:
            self._words[:] = 0
            self._words[:2] = _MAGIC, shape.key
        if self._words[:2].tolist() != [_MAGIC, shape.key]:
            del self._words, self._all
            self._map.close()
            raise ValueError("not this slab")

    @classmethod
    def in_memory(cls, shape: Shape) -> Slab:
        """Make a slab that vanishes with the last process that has it open."""
        fd = memory_file()
        try:
            os.ftruncate(fd, shape.bytes)
            return cls(fd, shape, writable=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def on_disk(cls, path: Path, shape: Shape, *, keep: bool) -> Slab:
        """Open or make a slab in the file `path`.

        With `keep`, the file stays after the run, and samples that an earlier run with the same key wrote are used.
        Without it, the file is unlinked at once, so nothing of it remains however the process ends.

        Raises:
            UserError: Another process uses the file, or it cannot be made.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = _locked(path)
        except BlockingIOError as error:
            raise UserError(
                f"loading.disk={path.parent}: {path.name}: another run uses it; give another folder"
            ) from error
        except OSError as error:
            raise UserError(f"loading.disk={path.parent}: cannot be written ({error.strerror})") from error
        try:
            if not keep:
                os.unlink(path)
            if not keep or os.fstat(fd).st_size != shape.bytes:
                os.ftruncate(fd, 0)
                os.ftruncate(fd, shape.bytes)
            # The header is written through mapped memory, so its blocks must exist: on a full disk such a write would
            # kill the process.
            os.posix_fallocate(fd, 0, shape.header)
            return cls(fd, shape, writable=True)
        except OSError as error:
            os.close(fd)
            raise UserError(
                f"loading.disk={path.parent}: {path.name}: {error.strerror}; give another folder"
            ) from error

    @classmethod
    def of_peer(cls, path: str, shape: Shape) -> Slab:
        """Open the slab of another process on this node for reading.

        Raises:
            OSError: The file cannot be opened.
            ValueError: The file is not the slab of this shape and key.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(fd, shape, writable=False)
        except BaseException:
            os.close(fd)
            raise

    @property
    def address(self) -> str:
        """Return the path under which other processes of the same user can open the file."""
        return address_of(self.fd)

    def put(self, sample: int, data: memoryview) -> bool:
        """Store a sample; return False if the disk is full or fails, which the caller may ignore.

        The bytes are written with `pwrite`. A copy into the mapped memory would kill the process if the disk is full.

        Raises:
            OSError: The file cannot be written for another reason.
        """
        place = self.shape.find(sample)
        assert place >= 0 and len(data) == self.shape.size[place], (sample, len(data))
        try:
            write_all(self.fd, data, self.shape.header + int(self.shape.offset[place]))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            log.warning("loading: sample %d is not kept: %s", sample, error.strerror)
            return False
        # The header word is set last. A reader that sees it finds all bytes, and can check them by the checksum in it.
        self._words[2 + place] = _FILLED | checksum(data)
        return True

    def get(self, sample: int) -> memoryview | None:
        """Return a sample in place, valid until `close`.

        None stands for a sample that is not of this slab, is not stored yet, or whose bytes no longer fit its checksum.
        """
        place = self.shape.find(sample)
        word = int(self._words[2 + place]) if place >= 0 else 0
        if not word & _FILLED:
            return None
        start = self.shape.header + int(self.shape.offset[place])
        data = self._all[start : start + int(self.shape.size[place])]
        if checksum(data.data) == word & 0xFFFFFFFF:
            return data.data.toreadonly()
        log.warning("loading: cached sample %d is damaged and is read anew", sample)
        if self._writable:
            self._words[2 + place] = 0
        return None

    def close(self) -> None:
        """Close the file and release its memory. A second call does nothing."""
        if self.fd >= 0:
            del self._words, self._all
            with suppress(BufferError):  # a sample is still in use; the memory stays mapped until it is released
                self._map.close()
            os.close(self.fd)
            self.fd = -1


def _locked(path: Path) -> int:
    """Open the file `path` and lock it; raise BlockingIOError if another process holds the lock for long.

    Another run that removes stale caches may lock the file, or unlink it, at this moment. The loop tries again until
    the lock is on the file that stands at `path`.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(fd)
                raise
            time.sleep(_PATIENCE / 20)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def checksum(data: memoryview) -> int:
    """Return the crc32c of the bytes."""
    view, found = np.frombuffer(data, np.uint8), 0  # google_crc32c refuses writable memoryviews
    for start in range(0, len(view), _PIECE):
        found = google_crc32c.extend(found, view[start : start + _PIECE])
        time.sleep(0)  # lets other threads run
    return int(found)
