"""Read, write and keep shard files: the chunks of one init time, one after another, and their index at the end.

The bytes follow Zarr's `sharding_indexed` codec (Zarr v3 core and sharding specifications):

- each chunk is little-endian, compressed by blosc (bitshuffle, lz4), and followed by its crc32c;
- the index holds (offset, size) of each chunk as uint64, both all ones for a chunk that is left out because it holds
  only the fill value;
- the crc32c of the index ends the file.

zarr-python can read these files. Here they are read and written without it, which is faster: one `preadv` for a run of
chunks and one decompression for each chunk are enough.

`KeptShards` keeps bytes that were read, for passes that read the same dates again and again. Each pass reads other
members of a date, so the cache holds fixed blocks of a file and not the ranges that were asked for. All passes read the
dates in the same order, so the first blocks stay: an evicted block would be needed again before the later block that
replaced it. If K of F bytes can be kept, P passes read F + (P - 1)(F - K) bytes, and no other policy reads less.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import google_crc32c
import numpy as np
from numcodecs import blosc

from ensemble_ml.errors import UserError
from ensemble_ml.store.schema import ArraySpec

LEVEL = 5  # compression level of lz4; higher levels save 1 % and cost a third of the speed
ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)  # offset and size of a chunk that was left out
CHECKSUM = 4  # bytes of a crc32c
_LARGEST_READ = 2 << 20  # bytes of a read of several chunks; more is no faster and does not fit into the CPU cache
_AT_ONCE = 512  # buffers of one `writev`; Linux allows 1024
_RESERVED = 64 << 20  # bytes of disk reserved at a time
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
# Only Linux has this. os.posix_fallocate would write zeros if the file system cannot reserve space.
_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_BLOCK = 1 << 16  # bytes; while memory is left, a request is extended to whole blocks, by less than two blocks
Encoded = tuple[bytes, bytes]  # a compressed chunk and its checksum


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
    """Read the chunks of a shard, opened by `open_shard`.

    `numbers` are positions of chunks among all chunks of the shard, an array of shape `spec.chunks` that is flattened.

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
    """Find where the chunks with `numbers` lie in a shard.

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
        follows = position < len(starts) and starts[position] == ends[position - 1]
        if not follows or ends[position] - starts[first] > most:
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


def digest_shard(path: Path, chunks: int) -> str:
    """Return the sha256 of the crc32c of every chunk, in the order of the file, and of the whole index with its crc32c.

    Every crc32c is checked against its chunk. A sha256 of all bytes would halve the speed of a build.

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
        """Append encoded chunks in as few system calls as possible; None leaves a chunk out.

        Hundreds of small calls would each wait for the interpreter lock. Each chunk comes with its number (see
        `read_chunks`).
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
        """Write the index, wait until all is on disk, rename the draft, and return its size in bytes and its digest.

        Without the wait, a machine that loses power could keep the name and lose the bytes. `digest_shard` computes the
        same digest.
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


def checksum(data: bytes) -> bytes:
    """Return the crc32c of `data` as it lies on disk."""
    return google_crc32c.value(data).to_bytes(CHECKSUM, "little")


class KeptShards:
    """A function that opens shards whose bytes stay in memory (`TensorStore.through`). Only one thread may use it.

    Args:
        check: Called after bytes were read from a file. It raises an error if the store has been replaced.
        most: Limit of the bytes that are kept.
    """

    def __init__(self, check: Callable[[], None], most: int):
        self.check, self.left = check, most
        self.sizes: dict[str, int] = {}
        self.blocks: dict[tuple[str, int], np.ndarray] = {}

    def __call__(self, path: str) -> _KeptShard:
        """Open a shard; raise a UserError if its file cannot be opened."""
        return _KeptShard(self, path)


class _KeptShard:
    """The bytes of one shard (implements `Shard`). The file is opened only when bytes are not in memory."""

    def __init__(self, of: KeptShards, path: str):
        self._of, self.path = of, path
        self._file: ShardFile | None = None
        if path not in of.sizes:
            of.sizes[path] = self._opened().size
        self.size = of.sizes[path]

    def read(self, start: int, size: int) -> np.ndarray:
        """Read `size` bytes from `start` on, (size,) uint8. Unreadable bytes or another store raise a UserError."""
        end = start + size
        if end > self.size:
            raise damaged(self.path, "it is cut short")
        found = np.empty(size, np.uint8)
        for first, data in self._pieces(start, end):
            low, high = max(start, first), min(end, first + len(data))
            found[low - start : high - start] = data[low - first : high - first]
        return found

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield pieces of the file that cover `start` to `end`, each with the position of its first byte."""
        blocks, number = self._of.blocks, start // _BLOCK
        while number * _BLOCK < end:
            after = number + 1
            if (block := blocks.get((self.path, number))) is not None:
                yield number * _BLOCK, block
            else:
                # The blocks after it that are not in memory are read by the same request.
                while after * _BLOCK < end and (self.path, after) not in blocks:
                    after += 1
                yield self._from_file(range(number, after), start, end)
            number = after

    def _from_file(self, numbers: range, start: int, end: int) -> tuple[int, np.ndarray]:
        """Read blocks and keep them; if they exceed the limit, read and return only `start` to `end`, and keep nothing.

        Returns:
            The position of the first byte, and the bytes.
        """
        first, last = numbers.start * _BLOCK, min(numbers.stop * _BLOCK, self.size)
        keep = last - first <= self._of.left
        if not keep:
            first, last = max(first, start), min(last, end)
        data = self._opened().read(first, last - first)
        self._of.check()
        if keep:
            self._of.left -= len(data)
            pieces = np.split(data, range(_BLOCK, len(data), _BLOCK))
            self._of.blocks |= {(self.path, number): piece for number, piece in zip(numbers, pieces, strict=True)}
        return first, data

    def _opened(self) -> ShardFile:
        """Return the file, opened once."""
        self._file = self._file or ShardFile(self.path)
        return self._file

    def close(self) -> None:
        """Close the file if it was opened."""
        if self._file is not None:
            self._file.close()
            self._file = None


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


def damaged(path: str | Path, reason: str) -> UserError:
    """Make the error for a damaged file of a store."""
    return UserError(f"{path}: damaged file of a tensor store ({reason}); copy it anew or prepare the store again")
