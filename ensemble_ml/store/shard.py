"""One shard file: the inner chunks of one start date, one after another, and their index at the end.

The bytes are those of Zarr's `sharding_indexed` codec (Zarr v3 core and sharding specifications): little-endian chunks
through blosc (bitshuffle, lz4) and crc32c, then (offset, size) of each chunk as uint64, both all ones for a chunk that
is left out because it holds nothing but the fill value, then the crc32c of the index. zarr-python reads them; here
they are written and read without it, because one `preadv` and one decompression a chunk is all that is needed.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import google_crc32c
import numpy as np
from numcodecs import blosc

from ensemble_ml.errors import UserError
from ensemble_ml.store.schema import ArraySpec

LEVEL = 5  # of lz4; higher ones save 1 % and cost a third of the speed
ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)
CHECKSUM = 4  # bytes of a crc32c
_LARGEST_READ = 2 << 20  # bytes of one request: larger ones gain nothing, and their buffers leave the cache


def with_checksum(data: bytes) -> bytes:
    """`data` and its crc32c."""
    return data + checksum(data)


def checksum(data: bytes) -> bytes:
    """The crc32c of `data` as it lies on disk."""
    return google_crc32c.value(data).to_bytes(CHECKSUM, "little")


def unread(path: str | Path, error: OSError) -> UserError:
    """What to say of a file that the system does not give: another copy helps only where it is gone or spoilt."""
    why = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.EIO):
        return damaged(path, why)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(f"{path}: cannot be opened ({why}); allow more (`ulimit -n`)")
    return UserError(f"{path}: cannot be read ({why}); see that it may be, and that its file system is there")


class ShardFile:
    """The bytes of one shard, on disk.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: str):
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unread(path, error) from error
        self.size = os.fstat(self._descriptor).st_size

    def read(self, start: int, size: int) -> np.ndarray:
        """Bytes (size,) from `start` on.

        Raises:
            UserError: they are not there.
        """
        data = np.empty(size, np.uint8)
        self.read_into(start, data.data)
        return data

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on; raises as `read` does."""
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._descriptor, [out[done:]], start + done)
            except OSError as error:
                raise unread(self.path, error) from error
            if count == 0:
                raise damaged(self.path, "it is cut short")
            done += count

    def close(self) -> None:
        """Give back the file."""
        os.close(self._descriptor)


class Shard(Protocol):
    """The bytes of one shard, wherever they lie."""

    path: str
    size: int

    def read(self, start: int, size: int) -> np.ndarray:
        """Bytes (size,) from `start` on."""

    def close(self) -> None:
        """Give back what was opened."""


def read_chunks(
    path: str, spec: ArraySpec, numbers: np.ndarray, open_shard: Callable[[str], Shard] = ShardFile
) -> Iterator[tuple[int, np.ndarray | None]]:
    """Read the chunks `numbers` (flat, in the order of `spec.chunks`) and yield each with its values (Z, rows, X).

    Values are None for a chunk that was left out. The array yielded is used again for the next chunk.

    Raises:
        UserError: the file is missing, cut short, or its checksums do not fit.
    """
    shard = open_shard(path)
    try:
        numbers, spans = chunk_spans(shard, spec, numbers)
        for number in numbers[len(spans) :]:
            yield int(number), None
        yield from _read_runs(shard, spec, numbers, spans)
    finally:
        shard.close()


def chunk_spans(shard: Shard, spec: ArraySpec, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the chunks `numbers` lie: the same numbers in the order of the file, and (offset, size) of each.

    Chunks that were left out come last, and have no span.

    Raises:
        UserError: the index is damaged.
    """
    index = _read_index(shard, int(np.prod(spec.chunks)))
    there = index[numbers, 0] != ABSENT
    wanted = numbers[there]
    wanted = wanted[np.argsort(index[wanted, 0], kind="stable")]
    return np.concatenate([wanted, numbers[~there]]), index[wanted].astype(np.int64)


def _read_runs(
    shard: Shard, spec: ArraySpec, numbers: np.ndarray, spans: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    chunk = np.empty(spec.chunk, spec.dtype)
    places, wanted = spans.tolist(), numbers.tolist()  # plain numbers: there are many small chunks
    for first, last in runs(spans):
        start = places[first][0]
        data = shard.read(start, sum(places[last - 1]) - start)
        for position in range(first, last):
            offset, size = places[position]
            _decompress(data[offset - start : offset - start + size], chunk, shard.path)
            yield wanted[position], chunk


def runs(spans: np.ndarray, most: int = _LARGEST_READ) -> Iterator[tuple[int, int]]:
    """Group chunks (N, 2) that lie one behind the other into runs (first, last) of at most `most` bytes."""
    first, starts, ends = 0, spans[:, 0].tolist(), spans.sum(1).tolist()
    for position in range(1, len(starts) + 1):
        if position < len(starts):
            follows = starts[position] == ends[position - 1]
            if follows and ends[position] - starts[first] <= most:
                continue
        if position > first:
            yield first, position
        first = position


def _read_index(shard: Shard, chunks: int) -> np.ndarray:
    size = chunks * 16 + CHECKSUM
    start, path = shard.size - size, shard.path
    if start < 0:
        raise damaged(path, "it is cut short")
    data = shard.read(start, size)
    _verify(data, path)
    index = np.frombuffer(data[:-CHECKSUM], "<u8").reshape(-1, 2)
    ends = index.sum(1)[index[:, 0] != ABSENT]
    if len(ends) and int(ends.max()) > start:
        raise damaged(path, "its index points beyond its end")
    return index


def _decompress(data: np.ndarray, chunk: np.ndarray, path: str) -> None:
    _verify(data, path)
    try:
        blosc.decompress(data[:-CHECKSUM], chunk)
    except (RuntimeError, ValueError) as error:
        raise damaged(path, str(error)) from error


def _verify(data: np.ndarray, path: str) -> None:
    if google_crc32c.value(data[:-CHECKSUM]) != int.from_bytes(data[-CHECKSUM:].tobytes(), "little"):
        raise damaged(path, "a checksum does not fit")


def damaged(path: str | Path, reason: str) -> UserError:
    """The error for a file of a store that cannot be read."""
    return UserError(f"{path}: damaged file of a tensor store ({reason}); copy it anew or prepare the store again")


def digest_shard(path: Path, chunks: int) -> str:
    """sha256 over the crc32c of every chunk and the index: as strict as one over all bytes, which would halve a build.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    digest, shard = hashlib.sha256(), ShardFile(str(path))
    try:
        index = _read_index(shard, chunks)
        spans = index[index[:, 0] != ABSENT].astype(np.int64)
        end, tail = int(spans[:, 1].sum()), chunks * 16 + CHECKSUM
        if end + tail != shard.size:
            raise damaged(path, "bytes of it belong to no chunk")
        for offset, size in spans[np.argsort(spans[:, 0])].tolist():
            data = shard.read(offset, size)
            _verify(data, str(path))
            digest.update(data[-CHECKSUM:].tobytes())
        digest.update(shard.read(end, tail).tobytes())
    finally:
        shard.close()
    return digest.hexdigest()
