"""Write one shard (see `ensemble_ml.store.shard`), chunk by chunk as they come."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np
from numcodecs import blosc

from ensemble_ml.store.schema import ArraySpec
from ensemble_ml.store.shard import ABSENT, LEVEL, checksum, with_checksum

Encoded = tuple[bytes, bytes]  # a compressed chunk and its checksum


class ShardWriter:
    """Writes a shard chunk by chunk under a draft's name, and renames it when it is closed.

    Chunks may come in any order; they lie in the file in that order, so a builder that repeats it repeats the file.
    """

    def __init__(self, path: Path, spec: ArraySpec):
        self.path, self._draft = path, path.with_name(f".{path.name}")
        self._index = np.full((int(np.prod(spec.chunks)), 2), ABSENT, "<u8")
        self._chunks, self._offset, self._digest = spec.chunks, 0, hashlib.sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._draft, "wb", buffering=1 << 20)  # noqa: SIM115 - open until `close`

    def append(self, chunk: tuple[int, int, int, int], data: Encoded | None) -> None:
        """Add what `encode` made of the chunk at (member, lead, variable, block)."""
        if data is None:
            return
        size = sum(map(len, data))
        self._index[np.ravel_multi_index(chunk, self._chunks)] = self._offset, size
        self._offset += size
        self._file.writelines(data)
        self._digest.update(data[1])

    def close(self) -> tuple[int, str]:
        """Write the index and give the shard its name; return its bytes and its digest (see `shard.digest_shard`)."""
        tail = with_checksum(self._index.tobytes())
        with self._file:
            self._file.write(tail)
        self._draft.rename(self.path)
        self._digest.update(tail)
        return self._offset + len(tail), self._digest.hexdigest()

    def abort(self) -> None:
        """Remove the draft; harmless after `close`."""
        with suppress(OSError):  # a full disk refuses what is still buffered
            self._file.close()
        self._draft.unlink(missing_ok=True)


def encode(chunk: np.ndarray) -> Encoded:
    """Compress one chunk (Z, rows, X); return it and its checksum. Lets other threads run."""
    data = blosc.compress(chunk, b"lz4", LEVEL, blosc.BITSHUFFLE)
    return data, checksum(data)
