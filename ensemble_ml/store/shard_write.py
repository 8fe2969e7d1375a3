"""Write one shard (see `ensemble_ml.store.shard`), chunk by chunk as they come."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numcodecs import blosc

from ensemble_ml.store.schema import ArraySpec
from ensemble_ml.store.shard import ABSENT, LEVEL, checksum

_AT_ONCE = 512  # buffers of one `writev`; Linux allows 1024
_RESERVED = 64 << 20  # bytes of disk reserved at a time
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
# Only Linux has this. os.posix_fallocate would write zeros if the file system cannot reserve space.
_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

Encoded = tuple[bytes, bytes]  # a compressed chunk and its checksum


class ShardWriter:
    """A shard that is written chunk by chunk under a draft name and renamed when it is closed.

    Chunks lie in the file in the order in which they are appended. Any order is allowed.
    All methods raise an OSError if the system cannot write.

    Args:
        path: Path of the shard.
        spec: Array to which it belongs.
    """

    def __init__(self, path: Path, spec: ArraySpec):
        self.path, self._draft = path, path.with_name(f".{path.name}")
        self._index = np.full((int(np.prod(spec.chunks)), 2), ABSENT, "<u8")
        self._offset, self._digest = 0, hashlib.sha256()
        self._reserved, self._most = 0, self._index.size // 2 * int(np.prod(spec.chunk)) * spec.dtype.itemsize
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def append(self, chunks: Iterable[tuple[int, Encoded | None]]) -> None:
        """Append encoded chunks in as few system calls as possible.

        Hundreds of small calls would each wait for the interpreter lock.

        Args:
            chunks: Chunk number (see `shard.read_chunks`) and result of `encode` for each chunk; None leaves it out.
        """
        parts: list[bytes] = []
        for number, data in chunks:
            if data is not None:
                size = len(data[0]) + len(data[1])
                self._index[number] = self._offset, size
                self._offset += size
                self._digest.update(data[1])
                parts += data
        self._write(parts)

    def _reserve(self) -> None:
        """Reserve disk space for the next chunks.

        Writing into reserved space takes a fraction of the time, because the blocks are allocated at once. The result
        is not checked: if there is no space, writing fails.
        """
        while _fallocate is not None and self._reserved < min(self._offset, self._most):
            step = min(_RESERVED, self._most - self._reserved)
            _fallocate(self._file, _KEEP_SIZE, self._reserved, step)
            self._reserved += step

    def _write(self, parts: list[bytes]) -> None:
        """Write all parts; the system may write only some of the bytes in one call."""
        self._reserve()
        left = [memoryview(part) for part in parts]
        while left:
            # Drop the buffers that were written, and cut the one that was written in part.
            done = os.writev(self._file, left[:_AT_ONCE])
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left and done:
                left[0] = left[0][done:]

    def close(self) -> tuple[int, str]:
        """Write the index, wait until all is on disk, and rename the draft.

        Without the wait, a machine that loses power could keep the name and lose the bytes.

        Returns:
            Size of the shard in bytes, and its digest (see `shard.digest_shard`).
        """
        index = self._index.tobytes()
        tail = index + checksum(index)
        self._write([tail])
        os.ftruncate(self._file, self._offset + len(tail))  # frees what was reserved beyond the end
        os.fsync(self._file)
        self._close()
        self._draft.rename(self.path)
        self._digest.update(tail)
        return self._offset + len(tail), self._digest.hexdigest()

    def _close(self) -> None:
        """Close the file if it is open."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def abort(self) -> None:
        """Remove the draft. After `close` it does nothing."""
        self._close()
        self._draft.unlink(missing_ok=True)


def encode(chunk: np.ndarray) -> Encoded:
    """Compress one chunk (Z, rows, X), and return it with its checksum. Other threads can run meanwhile."""
    data = blosc.compress(chunk, b"lz4", LEVEL, blosc.BITSHUFFLE)
    return data, checksum(data)
