"""Start dates of a tensor store as samples of a loader: only the chunks that are used travel, packed as on disk.

Axes: M member, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.loading.items import ArrayShape
from ensemble_ml.store.read import TensorStore
from ensemble_ml.store.schema import Kind
from ensemble_ml.store.shard import ShardFile, chunk_spans, runs
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

    Opening reads the index of every shard, which is kept in memory: 16 bytes a chunk.

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
        self.dates = np.arange(len(store.layout.init_time)) if dates is None else np.asarray(dates)
        if not len(self.dates):
            raise UserError(f"{store.path}: no start date is left; choose others")
        self.arrays = self._shapes()
        with ThreadPoolExecutor(_THREADS) as pool:
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
        start = 0
        for piece in self._pieces[sample]:
            if not piece.runs:
                continue
            shard = ShardFile(piece.path)
            try:
                for offset, size in piece.runs:
                    shard.read_into(offset, out[start : start + size])
                    start += size
            finally:
                shard.close()

    def decode(self, sample: int, packed: memoryview, out: Mapping[str, np.ndarray]) -> None:
        """Decode the packed runs of a sample into `out`, as `TensorStore.read` would from its files."""
        data, start, open_shards = np.frombuffer(packed, np.uint8), 0, {}
        for piece in self._pieces[sample]:
            open_shards[piece.path] = PackedShard(piece, data[start : start + piece.bytes])
            start += piece.bytes
        store = self.store.through(open_shards.__getitem__)
        for part in self.parts:
            kinds = {kind: f"{part.value}_{kind.value}" for kind in Kind}
            place = {kind: out[name] for kind, name in kinds.items() if name in out}
            store.read(part, int(self.dates[sample]), self.selection, place)

    def name(self, sample: int) -> str:
        """Path of the sample's largest shard."""
        return max(self._pieces[sample], key=lambda piece: piece.bytes).path

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
