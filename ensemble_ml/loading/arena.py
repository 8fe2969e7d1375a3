"""Allocate pages of a file, in memory or on local disk, for packed cache units that come and go.

In memory the file is a memfd, which other processes of the same user open by its path under /proc. On disk it has no
name. In both cases the kernel frees it when the last process that holds it ends, even by a crash, so there is nothing
to clean up.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from ensemble_ml.errors import UserError

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
Sizes = TypeVar("Sizes", int, np.ndarray)
Extents = tuple[tuple[int, int], ...]  # (offset, bytes) of the pieces of a unit, in order


def whole_pages(size: Sizes) -> Sizes:
    """Return numbers of bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class Arena:
    """A file of `size` bytes, in whole pages, that is allocated in pieces.

    A unit may be split into several pieces, so it fits as long as enough pages are free anywhere. Only one thread at a
    time may allocate or free; any thread may read.

    Args:
        size: Bytes of the file, rounded up to whole pages.
        folder: Folder on local disk; None makes a file in memory.

    Raises:
        UserError: The folder cannot be written.
        OSError: The file cannot be made so large, or cannot be mapped.
    """

    def __init__(self, size: int, folder: str | Path | None = None):
        self.size = whole_pages(size)
        self.fd = memory_file() if folder is None else _on_disk(Path(folder))
        try:
            os.ftruncate(self.fd, self.size)
            # The file is mapped for reading only; `put` writes with `pwrite`. A write into mapped memory would kill the
            # process where the disk is full.
            self._map = mmap.mmap(self.fd, self.size, access=mmap.ACCESS_READ) if self.size else None
        except BaseException:
            os.close(self.fd)
            raise
        self._all = np.frombuffer(self._map, np.uint8) if self._map is not None else np.empty(0, np.uint8)
        self._free: list[tuple[int, int]] = [(0, self.size)] if self.size else []

    @property
    def address(self) -> str:
        """Return the path under which other processes of the same user can open the file."""
        return address_of(self.fd)

    @property
    def free(self) -> int:
        """Return the number of bytes that are free."""
        return sum(size for _, size in self._free)

    def put(self, data: np.ndarray) -> Extents | None:
        """Store the bytes of a unit, (bytes,) uint8.

        Returns:
            Their pieces, or None where the disk is full or faulty, or too few pages are free. The unit is then read
            again when it is needed.

        Raises:
            OSError: The file cannot be written for another reason.
        """
        taken = self._take(whole_pages(len(data)))
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
            # A full or faulty disk is no reason to end a run.
            self.give_back(tuple(taken))
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            log.warning("loading: a cache unit of %d bytes cannot be cached: %s", len(data), error.strerror)
            return None
        return tuple(found)

    def get(self, extents: Extents) -> np.ndarray:
        """Return the bytes of a unit, (bytes,) uint8: a view where it is one piece, else a copy.

        A view holds these bytes only until the pages of the unit are given back.
        """
        if len(extents) == 1:
            return self._all[extents[0][0] : sum(extents[0])]
        return np.concatenate([np.empty(0, np.uint8), *(self._all[a : a + size] for a, size in extents)])

    def give_back(self, extents: Extents) -> None:
        """Free the pages of a unit, and merge adjacent free pieces."""
        free = sorted([*self._free, *((a, whole_pages(size)) for a, size in extents)])
        joined: list[tuple[int, int]] = []
        for offset, size in free:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((offset, size))
        self._free = joined

    def _take(self, size: int) -> list[tuple[int, int]] | None:
        """Allocate `size` bytes of pages: in the first free piece that is large enough, else in several pieces."""
        # One piece is preferred, because `get` can then return the unit in place.
        for place, (offset, length) in enumerate(self._free):
            if length >= size:
                self._free[place : place + 1] = [(offset + size, length - size)] if length > size else []
                return [(offset, size)] if size else []
        if self.free < size:
            return None
        found = []
        while size:
            offset, length = self._free.pop(0)
            part = min(length, size)
            if part < length:
                self._free.insert(0, (offset + part, length - part))
            found.append((offset, part))
            size -= part
        return found

    def close(self) -> None:
        """Free the file. Calling it again does nothing."""
        if self.fd >= 0:
            self._all = np.empty(0, np.uint8)
            if self._map is not None:
                with suppress(BufferError):  # a unit is still in use, and keeps the memory until it is released
                    self._map.close()
            os.close(self.fd)
            self.fd = -1


def read_extents(fd: int, extents: Extents) -> np.ndarray:
    """Copy a unit, (bytes,) uint8, out of the arena of another process, which `fd` has open.

    Raises:
        OSError: It cannot be read, or is shorter than its pieces.
    """
    out = np.empty(sum(size for _, size in extents), np.uint8)
    done = 0
    for offset, size in extents:
        end = done + size
        while done < end:  # one call reads at most 2 GiB
            count = os.preadv(fd, [out[done:end].data], offset + size - (end - done))
            if not count:
                raise OSError(errno.EIO, "memory of another rank is shorter than expected")
            done += count
    return out


def memory_file() -> int:
    """Make an empty file in memory, which the kernel frees when the last process that holds it ends."""
    return os.memfd_create("ensemble_ml", os.MFD_CLOEXEC)


def address_of(fd: int) -> str:
    """Return the path under which other processes of the same user can open a file of this process."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def _on_disk(folder: Path) -> int:
    """Make a file without a name in `folder`."""
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
    """Write all of `data` at `offset`, in several system calls if one writes less. Raise OSError if it fails."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
