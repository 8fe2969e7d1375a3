"""Divide what a training run reads of a store into units: one for each member of an init time, and one for its targets.

A unit is read, kept, sent and counted as a whole. The unit of a member holds the chunks of all leads, variables and
rows that this rank needs, as they lie on disk. The unit of the targets holds the chunks of the truth and of the full
ensemble's spread, as far as targets come from them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ensemble_ml.loading.batches import Draw, target_parts
from ensemble_ml.loading.reader import Reader
from ensemble_ml.store.read import TensorStore
from ensemble_ml.store.schema import ArraySpec
from ensemble_ml.store.shard import Shard, ShardFile, chunk_spans, runs
from ensemble_ml.store.source import Part

_THREADS = 8  # threads that read indexes; a request to slow storage mostly waits


@dataclass(frozen=True)
class Run:
    """A contiguous range of bytes in a shard."""

    shard: int  # index into the shards of the date
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class _Date:
    """The shards of one init time (path, size and index of each), and the runs of each of its units."""

    shards: tuple[tuple[str, int, np.ndarray], ...]
    runs: tuple[tuple[Run, ...], ...]


class Units:
    """The units that `reader` needs of the init times `dates`, indices (D,) in ascending order.

    Unit `slot * (N + 1) + member` belongs to a member of the date at position `slot`, where N is the number of members
    of the full ensemble. The last one of each date, with `member` = N, holds the targets. `sizes` (U,) holds the number
    of packed bytes of each unit.

    The constructor reads the index of every shard and the packing factors of every field of these dates, and keeps both
    in memory.

    Raises:
        UserError: The store lacks something that the model reads, was replaced, or has a damaged or unreadable file.
    """

    def __init__(self, reader: Reader, dates: np.ndarray):
        assert isinstance(reader.source, TensorStore), "only a tensor store lies in chunks"
        self.reader, self.store, self.dates = reader, reader.source, np.asarray(dates)
        self.each = reader.full_size + 1
        self._parts = (Part.FORECAST, *(part for part, _ in target_parts(reader)))
        with ThreadPoolExecutor(_THREADS) as pool:
            self.store.keep_factors(self._parts, self.dates.tolist(), pool)
            self._found = list(pool.map(self._date, self.dates.tolist()))
        self.sizes = np.array([sum(run.size for run in unit) for date in self._found for unit in date.runs], np.int64)

    def of(self, draw: Draw) -> np.ndarray:
        """Return the numbers of the units of a sample: those of its members, then that of its targets."""
        slot = int(np.searchsorted(self.dates, draw.date))
        return slot * self.each + np.append(draw.read, self.each - 1)

    def read(self, unit: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a unit from slow storage. Any thread may call it.

        Raises:
            UserError: A file is missing, cut short or unreadable, or the store was replaced.
        """
        date = self._found[unit // self.each]
        start, shard, opened = 0, None, -1
        try:
            for run in date.runs[unit % self.each]:
                # Runs are in the order of their shards, so each file is opened once.
                if run.shard != opened:
                    if shard is not None:
                        shard.close()
                    shard, opened = ShardFile(date.shards[run.shard][0]), run.shard
                assert shard is not None
                shard.read_into(run.offset, out[start : start + run.size])
                start += run.size
        finally:
            if shard is not None:
                shard.close()
        self.store.check_same()

    def over(self, draw: Draw, packed: Sequence[np.ndarray]) -> Reader:
        """Return a reader of one sample whose units are in memory.

        Args:
            draw: The sample.
            packed: Bytes of its units, in the order of `of`.
        """
        units = self.of(draw)
        date = self._found[int(units[0]) // self.each]
        pieces: list[list[tuple[int, np.ndarray]]] = [[] for _ in date.shards]
        for unit, data in zip(units.tolist(), packed, strict=True):
            start = 0
            for run in date.runs[unit % self.each]:
                pieces[run.shard].append((run.offset, data[start : start + run.size]))
                start += run.size
        shards = {known[0]: Pieces(*known, some) for known, some in zip(date.shards, pieces, strict=True)}
        return self.reader.over(self.store.through(shards.__getitem__))

    def name(self, unit: int) -> str:
        """Return the path of the shard that holds the longest run of a unit, for messages.

        An empty unit has the path of the first shard of its date.
        """
        date = self._found[unit // self.each]
        largest = max(date.runs[unit % self.each], key=lambda run: run.size, default=Run(0, 0, 0))
        return date.shards[largest.shard][0]

    def _date(self, date: int) -> _Date:
        """Find the byte ranges of all units of an init time."""
        shards: list[tuple[str, int, np.ndarray]] = []
        members: list[list[Run]] = [[] for _ in range(self.each)]
        for part in self._parts:
            for spec, path, numbers in self.store.chunks(part, date, self.reader.selection(part)):
                shard = ShardFile(path)
                try:
                    # The index of a shard has 16 bytes for each chunk, and a crc32c. It is kept, so that decoding needs
                    # no request for it.
                    tail = int(np.prod(spec.chunks)) * 16 + 4
                    index = shard.read(shard.size - tail, tail)
                    view = Pieces(path, shard.size, index, [])
                finally:
                    shard.close()
                for member, wanted in _by_member(spec, numbers, part, self.each - 1):
                    _, spans = chunk_spans(view, spec, wanted)
                    for a, b in runs(spans, view.size):
                        start = int(spans[a, 0])
                        members[member].append(Run(len(shards), start, int(spans[b - 1].sum()) - start))
                shards.append((path, view.size, index))
        return _Date(tuple(shards), tuple(map(tuple, members)))


def _by_member(spec: ArraySpec, numbers: np.ndarray, part: Part, last: int) -> list[tuple[int, np.ndarray]]:
    """Group the chunks `numbers` of a shard by the unit to which they belong."""
    if part is not Part.FORECAST:
        return [(last, numbers)]
    member = np.unravel_index(numbers, spec.chunks)[0]
    return [(m, numbers[member == m]) for m in range(spec.chunks[0])]


class Pieces(Shard):
    """A shard of which the index and some runs are in memory, given as (offset, bytes)."""

    def __init__(self, path: str, size: int, index: np.ndarray, pieces: list[tuple[int, np.ndarray]]):
        self.path, self.size, self._index = path, size, index
        self._pieces = sorted(pieces, key=lambda piece: piece[0])
        self._offsets = [offset for offset, _ in self._pieces]

    def read(self, start: int, size: int) -> np.ndarray:
        """Return `size` bytes of the file from `start` on, (size,) uint8; without a copy if one run holds them all."""
        # `read_chunks` first reads the index, which is in memory.
        if start == self.size - len(self._index):
            return self._index
        first = bisect_right(self._offsets, start) - 1
        found: list[np.ndarray] = []
        while size:
            assert 0 <= first < len(self._pieces), "a read that was not planned"
            offset, data = self._pieces[first]
            part = data[start - offset : start - offset + size]
            assert len(part) and start >= offset, "a read that was not planned"
            found.append(part)
            start, size, first = start + len(part), size - len(part), first + 1
        return found[0] if len(found) == 1 else np.concatenate(found)

    def close(self) -> None:
        """Do nothing: no file was opened."""
