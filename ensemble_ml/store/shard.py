"""Read one shard file: the chunks of one init time, one after another, and their index at the end.

The bytes follow Zarr's `sharding_indexed` codec (Zarr v3 core and sharding specifications):

- each chunk is little-endian, compressed by blosc (bitshuffle, lz4), and followed by its crc32c;
- the index holds (offset, size) of each chunk as uint64, both all ones for a chunk that is left out because it holds
  only the fill value;
- the crc32c of the index ends the file.

zarr-python can read these files. Here they are read and written without it, which is faster: one `preadv` for a run of
chunks and one decompression for each chunk are enough.
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

LEVEL = 5  # compression level of lz4; higher levels save 1 % and cost a third of the speed
ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)
CHECKSUM = 4  # bytes of a crc32c
_LARGEST_READ = 2 << 20  # bytes of a read of several chunks; more is no faster and does not fit into the CPU cache


def checksum(data: bytes) -> bytes:
    """Return the crc32c of `data` as it lies on disk."""
    return google_crc32c.value(data).to_bytes(CHECKSUM, "little")


def unread(path: str | Path, error: OSError) -> UserError:
    """Make the error for a file that the system cannot read.

    Another copy helps only if the file is missing or damaged, so the remedy depends on the cause.
    """
    why = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.EIO):
        return damaged(path, why)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(f"{path}: cannot be opened ({why}); allow more (`ulimit -n`)")
    return UserError(f"{path}: cannot be read ({why}); check its permissions and its file system")


class ShardFile:
    """The bytes of one shard on disk.

    Raises:
        UserError: The file cannot be opened.
    """

    def __init__(self, path: str):
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unread(path, error) from error
        self.size = os.fstat(self._descriptor).st_size

    def read(self, start: int, size: int) -> np.ndarray:
        """Read `size` bytes from `start` on, (size,) uint8.

        Raises:
            UserError: The file is cut short or cannot be read.
        """
        data = np.empty(size, np.uint8)
        self.read_into(start, data.data)
        return data

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on.

        Raises:
            UserError: The file is cut short or cannot be read.
        """
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
        """Close the file."""
        os.close(self._descriptor)


class Shard(Protocol):
    """The interface of the bytes of one shard, wherever they lie."""

    path: str
    size: int

    def read(self, start: int, size: int) -> np.ndarray:
        """Read `size` bytes from `start` on, (size,) uint8."""

    def close(self) -> None:
        """Close what was opened."""


def read_chunks(
    path: str, spec: ArraySpec, numbers: np.ndarray, open_shard: Callable[[str], Shard] = ShardFile
) -> Iterator[tuple[int, np.ndarray | None]]:
    """Read chunks of a shard.

    Args:
        path: Path of the shard.
        spec: Array to which it belongs.
        numbers: Chunk numbers, which count all chunks of the shard in the order of `spec.chunks`.
        open_shard: Function that opens the shard.

    Yields:
        Number and values (Z, rows, X) of each chunk; first, with None, those that were left out, then the others in the
        order of the file. The array is reused for the next chunk.

    Raises:
        UserError: The file is missing, damaged or cannot be read.
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
    """Find where chunks lie in a shard.

    Args:
        shard: The shard.
        spec: Array to which it belongs.
        numbers: Chunk numbers.

    Returns:
        The same numbers in the order of the file, and the spans (N, 2): offset and size in bytes. Chunks that were left
        out come last and have no span.

    Raises:
        UserError: The index is damaged or cannot be read.
    """
    index = _read_index(shard, int(np.prod(spec.chunks)))
    there = index[numbers, 0] != ABSENT
    wanted = numbers[there]
    # Reading in the order of the file lets adjacent chunks share a request.
    wanted = wanted[np.argsort(index[wanted, 0], kind="stable")]
    return np.concatenate([wanted, numbers[~there]]), index[wanted].astype(np.int64)


def _read_runs(
    shard: Shard, spec: ArraySpec, numbers: np.ndarray, spans: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """Read chunks run by run, and yield each one decompressed."""
    chunk = np.empty(spec.chunk, spec.dtype)
    places, wanted = spans.tolist(), numbers.tolist()  # Python numbers are faster, and there are many small chunks
    for first, last in runs(spans):
        start = places[first][0]
        data = shard.read(start, sum(places[last - 1]) - start)
        for position in range(first, last):
            offset, size = places[position]
            _decompress(data[offset - start : offset - start + size], chunk, shard.path)
            yield wanted[position], chunk


def runs(spans: np.ndarray, most: int = _LARGEST_READ) -> Iterator[tuple[int, int]]:
    """Group adjacent chunks into runs, each of which is read in one call.

    Args:
        spans: (N, 2) offset and size of each chunk, in the order of the file.
        most: Limit of the bytes of a run; a single chunk may have more.

    Yields:
        Positions (first, last + 1) of each run.
    """
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
    """Read and check the index of a shard, (chunks, 2)."""
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
    """Check the crc32c of one encoded chunk, and decompress it into `chunk`."""
    _verify(data, path)
    try:
        blosc.decompress(data[:-CHECKSUM], chunk)
    except (RuntimeError, ValueError) as error:
        raise damaged(path, str(error)) from error


def _verify(data: np.ndarray, path: str) -> None:
    """Raise a UserError if the bytes do not fit the crc32c at their end."""
    if google_crc32c.value(data[:-CHECKSUM]) != int.from_bytes(data[-CHECKSUM:].tobytes(), "little"):
        raise damaged(path, "a checksum does not fit")


def damaged(path: str | Path, reason: str) -> UserError:
    """Make the error for a damaged file of a store."""
    return UserError(f"{path}: damaged file of a tensor store ({reason}); copy it anew or prepare the store again")


def digest_shard(path: Path, chunks: int) -> str:
    """Return the sha256 of the crc32c of every chunk, in the order of the file, and of the whole index with its crc32c.

    Every crc32c is checked against its chunk. A sha256 of all bytes would halve the speed of a build.

    Args:
        path: Path of the shard.
        chunks: Number of chunks in its index.

    Raises:
        UserError: The file cannot be read, or is damaged.
    """
    digest, shard = hashlib.sha256(), ShardFile(str(path))
    try:
        index = _read_index(shard, chunks)
        spans = index[index[:, 0] != ABSENT].astype(np.int64)
        end, tail = int(spans[:, 1].sum()), chunks * 16 + CHECKSUM
        # A digest of the chunks alone would miss bytes that no chunk covers.
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
