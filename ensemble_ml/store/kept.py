"""Keep the bytes that were read from shards in memory, for passes that read the same dates again and again.

Each pass reads other members of a date, so the cache holds fixed blocks of a file and not the ranges that were asked
for. All passes read the dates in the same order, so the first blocks stay: an evicted block would be needed again
before the later block that replaced it. If K of F bytes can be kept, P passes read F + (P - 1)(F - K) bytes, and no
other policy reads less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ensemble_ml.store.shard import ShardFile, damaged

_BLOCK = 1 << 16  # bytes; while memory is left, a request is extended to whole blocks, by less than two blocks


class KeptShards:
    """A function that opens shards whose bytes stay in memory (`TensorStore.through`). Only one thread may use it.

    Args:
        check: called after bytes were read from a file. It raises an error if the store has been replaced.
        most: limit of the bytes that are kept.
    """

    def __init__(self, check: Callable[[], None], most: int):
        self.check, self.left = check, most
        self.sizes: dict[str, int] = {}
        self.blocks: dict[tuple[str, int], np.ndarray] = {}

    def __call__(self, path: str) -> _KeptShard:
        """Open a shard.

        Raises:
            UserError: The file cannot be opened.
        """
        return _KeptShard(self, path)


class _KeptShard:
    """The bytes of one shard (implements `shard.Shard`). The file is opened only when bytes are not in memory."""

    def __init__(self, of: KeptShards, path: str):
        self._of, self.path = of, path
        self._file: ShardFile | None = None
        if path not in of.sizes:
            of.sizes[path] = self._opened().size
        self.size = of.sizes[path]

    def read(self, start: int, size: int) -> np.ndarray:
        """Read `size` bytes from `start` on, (size,) uint8.

        Raises:
            UserError: The file ends before them or cannot be read, or the store has been replaced.
        """
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
