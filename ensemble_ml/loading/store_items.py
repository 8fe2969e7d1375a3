"""Start dates of a tensor store as samples of a loader: only the chunks that are used travel, packed as on disk.

Axes: M member, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.loading.items import ArrayShape
from ensemble_ml.store.read import TensorStore
from ensemble_ml.store.schema import ArraySpec, Kind
from ensemble_ml.store.shard import ShardFile, chunk_spans, read_chunks, runs
from ensemble_ml.store.source import Part, Selection

_THREADS = 8  # that read indexes: a request of slow storage is mostly waiting


@dataclass(frozen=True, eq=False)
class Piece:
    """What a sample needs of one shard: its size, the bytes of its index, and runs of (offset, size) in file order."""

    path: str
    size: int
    index: np.ndarray
    runs: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        """Packed bytes of the runs."""
        return sum(size for _, size in self.runs)


class StoreItems:
    """Samples of a store (implements `ensemble_ml.loading.items.Items`): one start date each.

    A sample becomes `forecast_pressure` (M, T, V, Z, Y, X), `forecast_surface` (M, T, S, Y, X), and the same for every
    other part with M = 1; float32, NaN where absent. Parts without a variable of a kind have no such array.

    Args:
        store: where they lie.
        parts: what a sample holds; None takes the forecast and, where the store has it, the truth.
        selection: members, leads, variables, levels and rows; None takes all.
        dates: indices of start dates; None takes all.

    Opening reads the index of every shard and the factors of every field, which are kept in memory: 16 bytes a chunk
    and 8 to 16 bytes a field.

    Raises:
        UserError: the store lacks something selected, or a shard is damaged.
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
            raise UserError(f"{store.path}: no start date is left; choose others")
        self.arrays = self._shapes()
        with ThreadPoolExecutor(_THREADS) as pool:
            self.store.keep_factors(self.parts, self.dates.tolist(), pool)
            self._pieces = list(pool.map(self._plan, self.dates.tolist()))
        self.sizes = np.array([sum(piece.bytes for piece in pieces) for pieces in self._pieces], np.int64)

    def _shapes(self) -> dict[str, ArrayShape]:
        lay, chosen = self.store.layout, self.selection

        def count(wanted: Sequence[Any] | None, stored: Sequence[Any]) -> int:
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
        pieces = []
        for part in self.parts:
            for spec, path, numbers in self.store.chunks(part, date, self.selection):
                shard = ShardFile(path)
                try:
                    _, spans = chunk_spans(shard, spec, numbers)
                    tail = int(np.prod(spec.chunks)) * 16 + 4
                    index = shard.read(shard.size - tail, tail)
                finally:
                    shard.close()
                size = shard.size
                joined = [(int(spans[a, 0]), int(spans[b - 1].sum() - spans[a, 0])) for a, b in runs(spans, size)]
                pieces.append(Piece(path, size, index, tuple(joined)))
        return tuple(pieces)

    def read(self, sample: int, out: memoryview) -> None:
        """Fill `out` with the runs of all shards of a sample, one behind the other."""
        self.read_from(0, sample, out)

    def read_from(self, start: int, sample: int, out: memoryview) -> None:
        """Fill `out` with what `read` would give from byte `start` on.

        Raises:
            UserError: a file is missing or cut short, or the store was replaced.
        """
        done, skip = 0, start
        for piece in self._pieces[sample]:
            if skip >= piece.bytes or done == len(out):
                skip -= min(skip, piece.bytes)
                continue
            shard = ShardFile(piece.path)
            try:
                for offset, size in piece.runs:
                    wanted = min(size - skip, len(out) - done)
                    if wanted > 0:
                        shard.read_into(offset + skip, out[done : done + wanted])
                        done += wanted
                    skip = max(0, skip - size)
            finally:
                shard.close()
        self.store.check_same()

    def shards(self, sample: int, packed: memoryview) -> dict[str, PackedShard]:
        """The shards of a sample by path, over its packed runs."""
        data, start, found = np.frombuffer(packed, np.uint8), 0, {}
        for piece in self._pieces[sample]:
            found[piece.path] = PackedShard(piece, data[start : start + piece.bytes])
            start += piece.bytes
        return found

    def decode(self, sample: int, packed: memoryview, out: Mapping[str, np.ndarray]) -> None:
        """Decode the packed runs of a sample into `out`, as `TensorStore.read` would from its files."""
        self.fill(self.store.through(self.shards(sample, packed).__getitem__), sample, out)

    def fill(self, store: TensorStore, sample: int, out: Mapping[str, np.ndarray]) -> None:
        """Read a sample's arrays from `store`: this one over other bytes."""
        for part in self.parts:
            kinds = {kind: f"{part.value}_{kind.value}" for kind in Kind}
            place = {kind: out[name] for kind, name in kinds.items() if name in out}
            store.read(part, int(self.dates[sample]), self.selection, place)

    def chunks(self, sample: int) -> Iterator[tuple[ArraySpec, str, np.ndarray]]:
        """Array, path of the shard and numbers of the chunks of each shard of a sample, as in `TensorStore.chunks`."""
        for part in self.parts:
            yield from self.store.chunks(part, int(self.dates[sample]), self.selection)

    def opened(self) -> OpenedItems:
        """The same samples for a cache that has room to hold them decompressed."""
        return OpenedItems(self)

    def name(self, sample: int) -> str:
        """Path of the sample's largest shard."""
        return max(self._pieces[sample], key=lambda piece: piece.bytes).path

    lasting = True  # for every byte

    def fingerprint(self) -> str:
        """A hash of the store and of what is taken from it."""
        said = repr((self.store.fingerprint(), [part.value for part in self.parts], self.selection))
        return hashlib.sha256(said.encode() + np.ascontiguousarray(self.dates, "<i8").tobytes()).hexdigest()[:16]


class PackedShard:
    """A shard of which only some runs and the index are in memory (implements `ensemble_ml.store.shard.Shard`)."""

    def __init__(self, piece: Piece, data: np.ndarray):
        self.path, self.size = piece.path, piece.size
        self._index, self._data = piece.index, data
        self._offsets = np.array([offset for offset, _ in piece.runs], np.int64)
        self._starts = np.cumsum([0, *(size for _, size in piece.runs)])

    def read(self, start: int, size: int) -> np.ndarray:
        """Bytes (size,) of the file from `start` on, where they are of a run or the index."""
        if start == self.size - len(self._index):
            return self._index
        run = int(np.searchsorted(self._offsets, start, side="right")) - 1
        first = int(self._starts[run]) + start - int(self._offsets[run])
        assert run >= 0 and first + size <= self._starts[run + 1], "a read that was not planned"
        return self._data[first : first + size]

    def close(self) -> None:
        """Nothing was opened."""


class OpenedItems:
    """Samples of a store whose chunks are kept decompressed (implements `ensemble_ml.loading.items.Items`).

    They lie one behind the other as stored integers (Z, rows, X), in the order of their files and without the rows
    that fill up the last block: decoding is then a product and a sum a value. `stored` (F,) are the bytes on slow
    storage, `sizes` (F,) those kept.
    """

    def __init__(self, packed: StoreItems):
        self.packed, self.arrays, self.stored = packed, packed.arrays, packed.sizes
        self._scratch = threading.local()
        nothing = memoryview(b"")
        self._places = [self._place(sample, packed.shards(sample, nothing)) for sample in range(len(self.stored))]
        self.sizes = np.array([sum(one.size for one in places) for places in self._places], np.int64)

    def _place(self, sample: int, shards: Mapping[str, PackedShard]) -> tuple[Places, ...]:
        return tuple(
            Places.of(spec, path, chunk_spans(shards[path], spec, numbers))
            for spec, path, numbers in self.packed.chunks(sample)
        )

    def read(self, sample: int, out: memoryview) -> None:
        """Fill `out` with the chunks of a sample, decompressed.

        Raises:
            UserError: a file is missing, or a checksum does not fit.
        """
        size = int(self.stored[sample])
        held: bytearray = getattr(self._scratch, "held", bytearray())
        if len(held) < size:
            held = self._scratch.held = bytearray(size)
        data = memoryview(held)[:size]
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
        """Turn the integers of a sample into values, as `TensorStore.read` would from its files."""
        start, held = 0, {}
        for places in self._places[sample]:
            held[places.path] = places.views(np.frombuffer(opened[start : start + places.size], np.uint8))
            start += places.size

        def given(path: str, _: ArraySpec, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray | None]]:
            views = held[path]
            return ((number, views.get(number)) for number in numbers.tolist())

        self.packed.fill(self.packed.store.over(given), sample, out)

    def name(self, sample: int) -> str:
        """Path of the sample's largest shard."""
        return self.packed.name(sample)

    lasting = True  # for every byte

    def fingerprint(self) -> str:
        """That of the packed samples: they are the same data."""
        return self.packed.fingerprint()


@dataclass(frozen=True, eq=False)
class Places:
    """Where the chunks of one shard lie once they are opened: their `numbers`, in the order in which they lie."""

    spec: ArraySpec
    path: str
    numbers: np.ndarray

    @classmethod
    def of(cls, spec: ArraySpec, path: str, found: tuple[np.ndarray, np.ndarray]) -> Places:
        """Those that are there, of what `chunk_spans` says."""
        numbers, spans = found
        return cls(spec, path, numbers[: len(spans)].astype(np.int32))

    @property
    def rows(self) -> np.ndarray:
        """Rows of each chunk that are of the grid."""
        spec = self.spec
        return np.minimum(spec.rows, spec.grid[0] - self.numbers % spec.blocks * spec.rows)

    @property
    def size(self) -> int:
        """Bytes of all."""
        levels, _, columns = self.spec.chunk
        return int(self.rows.sum()) * levels * columns * self.spec.dtype.itemsize

    def views(self, data: np.ndarray) -> dict[int, np.ndarray]:
        """Each chunk (Z, rows, X) in `data`, by its number."""
        levels, _, columns = self.spec.chunk
        flat, found, start = data.view(self.spec.dtype), {}, 0
        for number, rows in zip(self.numbers.tolist(), self.rows.tolist(), strict=True):
            stop = start + levels * rows * columns
            found[number] = flat[start:stop].reshape(levels, rows, columns)
            start = stop
        return found


def _positions(dates: Any, count: int) -> np.ndarray:
    """Positions of start dates, of which a mask may be given.

    Raises:
        UserError: they are no whole numbers, or not among `count`.
    """
    if dates is None:
        return np.arange(count)
    found = np.asarray(dates)
    if found.dtype == bool and found.shape == (count,):
        found = np.flatnonzero(found)
    if found.size and (found.ndim != 1 or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= count):
        raise UserError(f"dates={dates}: positions of start dates from 0 to {count - 1}, or a mask of them, are needed")
    return found
