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
from ensemble_ml.store.shard import ABSENT, LEVEL, checksum, with_checksum

_AT_ONCE = 512  # buffers of one call to the system, which allows 1024
_RESERVED = 64 << 20  # bytes of disk asked for at a time
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)  # Linux; os.posix_fallocate writes where it cannot reserve
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

Encoded = tuple[bytes, bytes]  # a compressed chunk and its checksum


class ShardWriter:
    """Writes a shard chunk by chunk under a draft's name, and renames it when it is closed.

    Chunks may come in any order; they lie in the file in that order, so a builder that repeats it repeats the file.
    """

    def __init__(self, path: Path, spec: ArraySpec):
        self.path, self._draft = path, path.with_name(f".{path.name}")
        self._index = np.full((int(np.prod(spec.chunks)), 2), ABSENT, "<u8")
        self._offset, self._digest = 0, hashlib.sha256()
        self._reserved, self._most = 0, self._index.size // 2 * int(np.prod(spec.chunk)) * spec.dtype.itemsize
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def append(self, chunks: Iterable[tuple[int, Encoded | None]]) -> None:
        """Add what `encode` made of chunks, each with its number in the order of `spec.chunks`; None is left out.

        All go to the system in one call: hundreds of small ones would wait for the interpreter each time.
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
        """Have disk for what comes next: writing into it takes a fraction of the time (blocks are found at once).

        A wish, no more: where it is refused, writing tells whether there is room.
        """
        while _fallocate is not None and self._reserved < min(self._offset, self._most):
            step = min(_RESERVED, self._most - self._reserved)
            _fallocate(self._file, _KEEP_SIZE, self._reserved, step)
            self._reserved += step

    def _write(self, parts: list[bytes]) -> None:
        self._reserve()
        left = [memoryview(part) for part in parts]
        while left:
            done = os.writev(self._file, left[:_AT_ONCE])
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left and done:
                left[0] = left[0][done:]

    def close(self) -> tuple[int, str]:
        """Write the index, wait for the disk, and give the shard its name; return its bytes and its digest.

        Without the wait, a machine that loses power could keep the name and lose the bytes. See `shard.digest_shard`.
        """
        tail = with_checksum(self._index.tobytes())
        self._write([tail])
        os.ftruncate(self._file, self._offset + len(tail))  # gives back what was reserved beyond
        os.fsync(self._file)
        self._close()
        self._draft.rename(self.path)
        self._digest.update(tail)
        return self._offset + len(tail), self._digest.hexdigest()

    def _close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def abort(self) -> None:
        """Remove the draft; harmless after `close`."""
        self._close()
        self._draft.unlink(missing_ok=True)


def encode(chunk: np.ndarray) -> Encoded:
    """Compress one chunk (Z, rows, X); return it and its checksum. Lets other threads run."""
    data = blosc.compress(chunk, b"lz4", LEVEL, blosc.BITSHUFFLE)
    return data, checksum(data)
