"""Room for packed samples in memory or on local disk, readable by other processes of the same node.

One file a rank and tier: a header with one word a sample that is held, then the samples at the offsets that the plan
gave them. In memory the file is a memfd: other processes of the user open it by its path under /proc, and when its last
holder dies, however it dies, the kernel gives it back. On disk it outlives the process, and a run with the same plan
finds it filled.
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
from ensemble_ml.loading.arena import PAGE, address_of, memory_file, write_all

log = logging.getLogger(__name__)

_PIECE = 1 << 20  # bytes of a checksum after which other threads have their turn: it does not let them in by itself
_PATIENCE = 1.0  # seconds that another run may take to see that a cache is in use
_MAGIC = 0x454D4C31  # "EML1"
_FILLED = 1 << 32  # in a header word; the low half is the sample's crc32c


@dataclass(frozen=True, eq=False)
class Shape:
    """Which samples a slab holds and where: `samples` (N,) ascending, `offset` and `size` (N,) in bytes."""

    samples: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    key: int  # 63 bits that name plan and data: a file with another key is not this slab

    @property
    def header(self) -> int:
        """Bytes before the first sample: whole pages."""
        return -(-(16 + 8 * len(self.samples)) // PAGE) * PAGE

    @property
    def bytes(self) -> int:
        """Bytes of the whole file."""
        return self.header + int((self.offset + self.size).max(initial=0))

    def find(self, sample: int) -> int:
        """Place of `sample` among those held, -1 where it is none of them."""
        place = int(np.searchsorted(self.samples, sample))
        return place if place < len(self.samples) and self.samples[place] == sample else -1


class Slab:
    """The samples of one rank in one tier; any thread may read and write.

    A reader never sees a sample that is half-written: its header word is set after its bytes, and holds their checksum.
    """

    def __init__(self, fd: int, shape: Shape, *, writable: bool):
        self.fd, self.shape, self._writable = fd, shape, writable
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, shape.bytes, access=access)
        self._all = np.frombuffer(self._map, np.uint8)
        self._words = self._all[: shape.header].view(np.uint64)
        if writable and self._words[:2].tolist() != [_MAGIC, shape.key]:
            self._words[:] = 0
            self._words[:2] = _MAGIC, shape.key
        if self._words[:2].tolist() != [_MAGIC, shape.key]:
            del self._words, self._all
            self._map.close()
            raise ValueError("not this slab")

    @classmethod
    def in_memory(cls, shape: Shape) -> Slab:
        """A new slab that vanishes with the process."""
        fd = memory_file()
        os.ftruncate(fd, shape.bytes)
        return cls(fd, shape, writable=True)

    @classmethod
    def on_disk(cls, path: Path, shape: Shape, *, keep: bool) -> Slab:
        """A slab in the file `path`; what an earlier run with the same key has left in it stays, if `keep`. Else the
        file loses its name at once: nothing is left of it, however the process ends.

        Raises:
            UserError: another process uses the file, or it cannot be made.
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
            os.posix_fallocate(fd, 0, shape.header)
            return cls(fd, shape, writable=True)
        except OSError as error:
            os.close(fd)
            raise UserError(
                f"loading.disk={path.parent}: {path.name}: {error.strerror}; give another folder"
            ) from error

    @classmethod
    def of_peer(cls, path: str, shape: Shape) -> Slab:
        """Another process's slab on this node, to read.

        Raises:
            OSError, ValueError: it is not there, or is another one.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(fd, shape, writable=False)
        except BaseException:
            os.close(fd)
            raise

    @property
    def address(self) -> str:
        """Path under which other processes of the user can open it."""
        return address_of(self.fd)

    def put(self, sample: int, data: memoryview) -> bool:
        """Keep `data`; False where the disk is full, which the caller may ignore.

        It is written, not copied into the mapped memory, which would kill the process where the disk is full.
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
        self._words[2 + place] = _FILLED | checksum(data)
        return True

    def get(self, sample: int) -> memoryview | None:
        """The sample in place, valid until `close`; None where it is not here yet, or no longer what was written."""
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
        """Give back the file; harmless when called again."""
        if self.fd >= 0:
            del self._words, self._all
            with suppress(BufferError):  # a sample is still in somebody's hands, who keeps the memory until then
                self._map.close()
            os.close(self.fd)
            self.fd = -1


def _locked(path: Path) -> int:
    """Open a file of that name and lock it; a run that clears away may hold it, or take its name, just then.

    Raises:
        BlockingIOError: another process has it for longer.
        OSError: it cannot be made.
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
    """crc32c of the bytes."""
    view, found = np.frombuffer(data, np.uint8), 0  # it refuses memoryviews that can be written to
    for start in range(0, len(view), _PIECE):
        found = google_crc32c.extend(found, view[start : start + _PIECE])
        time.sleep(0)
    return int(found)
