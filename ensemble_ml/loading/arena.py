"""Room for packed units that come and go: pages of a file in memory or on local disk.

In memory the file is a memfd, which other processes of the user open by its path under /proc; on disk it has no name.
Either way the kernel takes it back when its last holder dies, however it dies: there is nothing to clean up.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from ensemble_ml.errors import UserError

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
Extents = tuple[tuple[int, int], ...]  # (offset, bytes) of the pieces of a unit, in order


class Arena:
    """`size` bytes, whole pages, given out in pieces: any unit fits while there are pages enough.

    One thread gives out and takes back; any thread may read.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, size: int, folder: str | Path | None = None):
        self.size = -(-size // PAGE) * PAGE
        self.fd = memory_file() if folder is None else _on_disk(Path(folder))
        os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size, access=mmap.ACCESS_READ) if self.size else None
        self._all = np.frombuffer(self._map, np.uint8) if self._map is not None else np.empty(0, np.uint8)
        self._free: list[tuple[int, int]] = [(0, self.size)] if self.size else []

    @property
    def address(self) -> str:
        """Path under which other processes of the user can open it."""
        return address_of(self.fd)

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return sum(size for _, size in self._free)

    def put(self, data: np.ndarray) -> Extents | None:
        """Keep `data`; None where the disk is full or there are no pages left, which costs a read later, no more."""
        taken = self._take(-(-len(data) // PAGE) * PAGE)
        if taken is None:
            return None
        done, found = 0, []
        try:
            for offset, size in taken:
                part = data[done : done + size]
                write_all(self.fd, part.data, offset)
                found.append((offset, len(part)))
                done += len(part)
        except OSError as error:
            self.give_back(tuple(taken))
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            log.warning("loading: a unit of %d bytes is not kept: %s", len(data), error.strerror)
            return None
        return tuple(found)

    def get(self, extents: Extents) -> np.ndarray:
        """What was kept: in place where it is one piece."""
        if len(extents) == 1:
            return self._all[extents[0][0] : sum(extents[0])]
        return np.concatenate([np.empty(0, np.uint8), *(self._all[a : a + size] for a, size in extents)])

    def give_back(self, extents: Extents) -> None:
        """Take back the pages of a unit."""
        free = sorted([*self._free, *((a, -(-size // PAGE) * PAGE) for a, size in extents)])
        joined: list[tuple[int, int]] = []
        for offset, size in free:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((offset, size))
        self._free = joined

    def _take(self, size: int) -> list[tuple[int, int]] | None:
        """Pages of `size` bytes: the first piece that has them all, else several."""
        for place, (offset, there) in enumerate(self._free):
            if there >= size:
                self._free[place : place + 1] = [(offset + size, there - size)] if there > size else []
                return [(offset, size)] if size else []
        if self.free < size:
            return None
        found = []
        while size:
            offset, there = self._free.pop(0)
            part = min(there, size)
            if part < there:
                self._free.insert(0, (offset + part, there - part))
            found.append((offset, part))
            size -= part
        return found

    def close(self) -> None:
        """Give back the file; harmless when called again."""
        if self.fd >= 0:
            self._all = np.empty(0, np.uint8)
            if self._map is not None:
                with suppress(BufferError):  # a unit is still in somebody's hands, who keeps the memory until then
                    self._map.close()
            os.close(self.fd)
            self.fd = -1


def read_extents(fd: int, extents: Extents) -> np.ndarray:
    """A unit from another process's arena, copied.

    Raises:
        OSError: it cannot be read.
    """
    out = np.empty(sum(size for _, size in extents), np.uint8)
    done = 0
    for offset, size in extents:
        part = out[done : done + size].data
        if os.preadv(fd, [part], offset) != size:
            raise OSError(errno.EIO, "memory of a peer is cut short")
        done += size
    return out


def memory_file() -> int:
    """An empty file in memory, which the kernel takes back when its last holder dies."""
    return os.memfd_create("ensemble_ml", os.MFD_CLOEXEC)


def address_of(fd: int) -> str:
    """Path under which other processes of the user can open this process's file."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def _on_disk(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix="ensemble_ml-", dir=folder)
        os.unlink(name)
        return fd
    except OSError as error:
        raise UserError(
            f"loading.folder={folder}: cannot be written ({error.strerror}); give another folder"
        ) from error


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; a single write may stop early."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
