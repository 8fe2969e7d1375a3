"""Offer the init times of a tensor store as samples of a loader.

Only the chunks that are used are read and moved, packed as they lie on disk. `OpenedItems` decompresses them before a
cache holds them.

Axes: F sample, M member, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.loading.items import ArrayShape
from ensemble_ml.loading.threads import Scratch
from ensemble_ml.store.read import TensorStore
from ensemble_ml.store.schema import ArraySpec, Kind
from ensemble_ml.store.shard import Shard, ShardFile, chunk_spans, read_chunks, runs
from ensemble_ml.store.source import Part, Selection

INDEX_THREADS = 8  # threads that read indexes; a request to slow storage mostly waits


@dataclass(frozen=True, eq=False)
class Piece:
    """The part of one shard that a sample needs.

    Attributes:
        path: Path of the shard.
        size: Bytes of the whole file.
        index: Bytes of its index.
        runs: (offset, size) of each range of bytes, in file order.
    """

    path: str
    size: int
    index: np.ndarray
    runs: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        """Return the packed bytes of all runs."""
        return sum(size for _, size in self.runs)


class StoreItems:
    """The init times of a store as samples (implements `ensemble_ml.loading.items.Items`).

    A sample becomes the arrays `forecast_pressure` (M, T, V, Z, Y, X) and `forecast_surface` (M, T, S, Y, X), and the
    same for every other part with M = 1. They are float32, NaN where absent. A kind without a variable has no array.

    Opening reads the index of every shard and the packing factors of every field. Both stay in memory: 16 bytes for
    each chunk, and 8 to 16 bytes for each field.

    Args:
        store: The opened store.
        parts: Parts that a sample holds; None takes the forecast and, where the store has it, the truth.
        selection: Members, leads, variables, levels and rows; None takes all.
        dates: Indices of init times, or a mask of them; None takes all.

    Raises:
        UserError: The store lacks something selected, a shard is damaged, or `dates` are empty or out of range.
    """

    def __init__(
        self,
        store: TensorStore,
        *,
        parts: Sequence[Part] | None = None,
        selection: Selection | None = None,
        dates: Sequence[int] | None = None,
    ):
        self.store, self.selection = store, selection or Selection()
        self.parts = tuple(parts or [part for part in (Part.FORECAST, Part.TRUTH) if store.has(part)])
        self.dates = _positions(dates, len(store.layout.init_time))
        if not len(self.dates):
            raise UserError(f"{store.path}: no init time is left; choose others")
        self.arrays = self._shapes()
        with ThreadPoolExecutor(INDEX_THREADS) as pool:
            self.store.keep_factors(self.parts, self.dates.tolist(), pool)
            self._pieces = list(pool.map(self._plan, self.dates.tolist()))
        self.sizes = np.array([sum(piece.bytes for piece in pieces) for pieces in self._pieces], np.int64)

    def _shapes(self) -> dict[str, ArrayShape]:
        """Return the shapes of a sample's arrays."""
        lay, chosen = self.store.layout, self.selection

        def count(wanted: Sequence[Any] | None, stored: Sequence[Any]) -> int:
            """Return how many values are wanted."""
            return len(stored if wanted is None else wanted)

        rows = chosen.rows or (0, lay.grid.shape[0])
        points = rows[1] - rows[0], lay.grid.shape[1]
        upper = count(chosen.variables, lay.variables), count(chosen.levels, lay.levels)
        ground = (count(chosen.surface, lay.surface),)
        found = {}
        for part in self.parts:
            members = count(chosen.realization, lay.realization) if part is Part.FORECAST else 1
            for kind, axes in (("pressure", upper), ("surface", ground)):
                shape = (members, count(chosen.lead_hours, lay.lead_hours), *axes, *points)
                if min(shape) > 0:
                    found[f"{part.value}_{kind}"] = ArrayShape(shape, np.dtype(np.float32))
        return found

    def _plan(self, date: int) -> tuple[Piece, ...]:
        """Find the byte ranges that an init time needs in its shards."""
        pieces = []
        for part in self.parts:
            for spec, path, numbers in self.store.chunks(part, date, self.selection):
                shard = indexed(path, spec)
                _, spans = chunk_spans(shard, spec, numbers)
                joined = [(int(spans[a, 0]), int(spans[b - 1].sum() - spans[a, 0])) for a, b in runs(spans, shard.size)]
                pieces.append(Piece(path, shard.size, shard.index, tuple(joined)))
        return tuple(pieces)

    def read(self, sample: int, out: memoryview) -> None:
        """Fill `out` with the runs of bytes of all shards of a sample, one after another."""
        self.read_from(0, sample, out)

    def read_from(self, start: int, sample: int, out: memoryview) -> None:
        """Fill `out` with the bytes that `read` would give from byte `start` on.

        Raises:
            UserError: A file is missing or cut short, or the store was replaced.
        """
        done, skip = 0, start
        for piece in self._pieces[sample]:
            # Skip shards that lie wholly before `start`, without opening them.
            if skip >= piece.bytes or done == len(out):
                skip -= min(skip, piece.bytes)
                continue
            with closing(ShardFile(piece.path)) as shard:
                for offset, size in piece.runs:
                    wanted = min(size - skip, len(out) - done)
                    if wanted > 0:
                        shard.read_into(offset + skip, out[done : done + wanted])
                        done += wanted
                    skip = max(0, skip - size)
        self.store.check_same()

    def shards(self, sample: int, packed: memoryview) -> dict[str, MemoryShard]:
        """Return the shards of a sample by path, as views of its packed bytes."""
        data, start, found = np.frombuffer(packed, np.uint8), 0, {}
        for piece in self._pieces[sample]:
            pieces = []
            for offset, size in piece.runs:
                pieces.append((offset, data[start : start + size]))
                start += size
            found[piece.path] = MemoryShard(piece.path, piece.size, piece.index, pieces)
        return found

    def decode(self, sample: int, packed: memoryview, out: Mapping[str, np.ndarray]) -> None:
        """Decode the packed bytes of a sample into `out`, with the same result as `TensorStore.read`."""
        self.fill(self.store.through(self.shards(sample, packed).__getitem__), sample, out)

    def fill(self, store: TensorStore, sample: int, out: Mapping[str, np.ndarray]) -> None:
        """Read the arrays of a sample into `out`, by name. `store` is this store with chunks in memory, not on disk."""
        for part in self.parts:
            kinds = {kind: f"{part.value}_{kind.value}" for kind in Kind}
            place = {kind: out[name] for kind, name in kinds.items() if name in out}
            store.read(part, int(self.dates[sample]), self.selection, place)

    def chunks(self, sample: int) -> Iterator[tuple[ArraySpec, str, np.ndarray]]:
        """Yield array, path and numbers of chunks for each shard of a sample, as `TensorStore.chunks` does."""
        for part in self.parts:
            yield from self.store.chunks(part, int(self.dates[sample]), self.selection)

    def opened(self) -> OpenedItems:
        """Return the same samples for a cache that holds them decompressed."""
        return OpenedItems(self)

    def name(self, sample: int) -> str:
        """Return the path of the shard from which the sample takes most bytes."""
        return max(self._pieces[sample], key=lambda piece: piece.bytes).path

    lasting = True  # equal fingerprints mean equal bytes, so a later run may use a cache on disk

    def fingerprint(self) -> str:
        """Return a hash of the contents of the store and of what is selected from it."""
        said = repr((self.store.fingerprint(), [part.value for part in self.parts], self.selection))
        return hashlib.sha256(said.encode() + np.ascontiguousarray(self.dates, "<i8").tobytes()).hexdigest()[:16]


def _positions(dates: Any, count: int) -> np.ndarray:
    """Return positions of init times: all (None), those of a mask, or as given, each one of 0 to `count` - 1."""
    if dates is None:
        return np.arange(count)
    found = np.asarray(dates)
    if found.dtype == bool and found.shape == (count,):
        found = np.flatnonzero(found)
    if found.size and (found.ndim != 1 or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= count):
        raise UserError(f"dates={dates}: positions of init times from 0 to {count - 1}, or a mask of them, are needed")
    return found


def indexed(path: str, spec: ArraySpec) -> MemoryShard:
    """Read the index of a shard, and return it as a shard of which nothing else can be read.

    The index stays in memory, so that later reads need not request it. It has 16 bytes for each chunk, and a crc32c.
    """
    with closing(ShardFile(path)) as shard:
        # A file that is shorter than its index is kept as it is, and `chunk_spans` raises the error.
        start = max(0, shard.size - int(np.prod(spec.chunks)) * 16 - 4)
        return MemoryShard(path, shard.size, shard.read(start, shard.size - start), [])


class MemoryShard(Shard):
    """A shard of which the index and some runs are in memory, given as (offset, bytes)."""

    def __init__(self, path: str, size: int, index: np.ndarray, pieces: list[tuple[int, np.ndarray]]):
        self.path, self.size, self.index = path, size, index
        self._pieces = sorted(pieces, key=lambda piece: piece[0])
        self._offsets = [offset for offset, _ in self._pieces]

    def read(self, start: int, size: int) -> np.ndarray:
        """Return `size` bytes of the file from `start` on, (size,) uint8; without a copy if one run holds them all."""
        # `read_chunks` first reads the index, which is in memory.
        if start == self.size - len(self.index):
            return self.index
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


class OpenedItems:
    """The samples of a store whose chunks are kept decompressed (implements `ensemble_ml.loading.items.Items`).

    The chunks (Z, rows, X) lie one after another in the order of their files, as packed integers or, in a store that is
    not packed, as float32. Rows beyond the grid, which fill up its last block on disk, are left out. So decoding an
    integer takes one multiplication and one addition.

    `stored` (F,) holds the bytes of each sample on slow storage, `sizes` (F,) those in a cache.
    """

    def __init__(self, packed: StoreItems):
        self.packed, self.arrays, self.stored = packed, packed.arrays, packed.sizes
        self._scratch = Scratch()
        nothing = memoryview(b"")
        self._places = [self._place(sample, packed.shards(sample, nothing)) for sample in range(len(self.stored))]
        self.sizes = np.array([sum(one.size for one in places) for places in self._places], np.int64)

    def _place(self, sample: int, shards: Mapping[str, MemoryShard]) -> tuple[Places, ...]:
        """Return where the chunks of a sample lie once they are decompressed."""
        return tuple(
            Places.of(spec, path, chunk_spans(shards[path], spec, numbers))
            for spec, path, numbers in self.packed.chunks(sample)
        )

    def read(self, sample: int, out: memoryview) -> None:
        """Fill `out` with the decompressed chunks of a sample.

        Raises:
            UserError: A file is missing, or a checksum does not fit.
        """
        data = self._scratch.take(int(self.stored[sample]))
        self.packed.read(sample, data)
        shards, start = self.packed.shards(sample, data), 0
        for places in self._places[sample]:
            views = places.views(np.frombuffer(out[start : start + places.size], np.uint8))
            for number, chunk in read_chunks(places.path, places.spec, places.numbers, shards.__getitem__):
                assert chunk is not None
                view = views[number]
                view[...] = chunk[:, : view.shape[1]]
            start += places.size

    def decode(self, sample: int, opened: memoryview, out: Mapping[str, np.ndarray]) -> None:
        """Turn the decompressed chunks of a sample into values, with the same result as `TensorStore.read`."""
        start, held = 0, {}
        for places in self._places[sample]:
            held[places.path] = places.views(np.frombuffer(opened[start : start + places.size], np.uint8))
            start += places.size

        def given(path: str, _: ArraySpec, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray | None]]:
            """Yield the decompressed chunks instead of those of the file."""
            views = held[path]
            return ((number, views.get(number)) for number in numbers.tolist())

        self.packed.fill(self.packed.store.over(given), sample, out)

    def name(self, sample: int) -> str:
        """Return the path of the shard from which the sample takes most bytes."""
        return self.packed.name(sample)

    lasting = True  # equal fingerprints mean equal bytes, so a later run may use a cache on disk

    def fingerprint(self) -> str:
        """Return the fingerprint of the packed samples, which are the same data."""
        return self.packed.fingerprint()


@dataclass(frozen=True, eq=False)
class Places:
    """The decompressed chunks of one shard: their `numbers`, in the order in which they lie in memory."""

    spec: ArraySpec
    path: str
    numbers: np.ndarray

    @classmethod
    def of(cls, spec: ArraySpec, path: str, found: tuple[np.ndarray, np.ndarray]) -> Places:
        """Make the places of the chunks that exist from the result of `chunk_spans`."""
        numbers, spans = found
        return cls(spec, path, numbers[: len(spans)].astype(np.int32))

    @property
    def rows(self) -> np.ndarray:
        """Return the number of grid rows in each chunk; the last block of the grid may have fewer."""
        spec = self.spec
        return np.minimum(spec.rows, spec.grid[0] - self.numbers % spec.blocks * spec.rows)

    @property
    def size(self) -> int:
        """Return the bytes of all chunks."""
        levels, _, columns = self.spec.chunk
        return int(self.rows.sum()) * levels * columns * self.spec.dtype.itemsize

    def views(self, data: np.ndarray) -> dict[int, np.ndarray]:
        """Return each chunk (Z, rows, X) as a view into `data`, by its number."""
        levels, _, columns = self.spec.chunk
        flat, found, start = data.view(self.spec.dtype), {}, 0
        for number, rows in zip(self.numbers.tolist(), self.rows.tolist(), strict=True):
            stop = start + levels * rows * columns
            found[number] = flat[start:stop].reshape(levels, rows, columns)
            start = stop
        return found
