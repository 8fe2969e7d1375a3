"""Divide what a training run reads into packed units, and plan which rank reads, holds and drops each of them.

A unit is one member, or the targets, of an init time. It is read, kept, sent and counted as a whole. The unit of a
member holds the chunks of all leads, variables and rows that this rank needs, as they lie on disk. The unit of the
targets holds the chunks of the truth and of the full ensemble's spread, as far as targets come from them.

A run trains on random subsets of the members of each init time, and reads its validation dates again and again. Units
are therefore used at irregular times. All future uses are known in advance, so Belady's rule (1966,
doi:10.1147/sj.52.0078) gives the fewest misses: evict the unit whose next use is farthest in the future. With bypass, a
new unit enters the cache only if its next use comes before that of the units that it would evict. For units of equal
size this reads the fewest bytes from slow storage that a cache of the given size allows; packed members are nearly of
equal size. If every unit is used exactly once an epoch, a cache that never changes reads as few and needs no rewriting.

Every init time has a home: the only rank whose caches may hold its units, so no unit is held twice. The caches of each
rank are planned separately.

The plan is a pure function of the trace, so it is the same on every rank.

Axes: A uses, U units, P ranks.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from ensemble_ml.loading.arena import whole_pages
from ensemble_ml.loading.batches import Draw, Turn, target_parts
from ensemble_ml.loading.plan import DISK, RAM, STORAGE, Room
from ensemble_ml.loading.reader import Reader
from ensemble_ml.loading.store_items import INDEX_THREADS, MemoryShard, indexed
from ensemble_ml.store.read import TensorStore
from ensemble_ml.store.schema import ArraySpec
from ensemble_ml.store.shard import ShardFile, chunk_spans, runs
from ensemble_ml.store.source import Part

_MOST = 3_000_000  # number of uses beyond which Belady's rule would take longer than half a minute
NEVER = np.iinfo(np.int64).max  # in place of the next use of a unit that is not used again


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
        with ThreadPoolExecutor(INDEX_THREADS) as pool:
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
        date, start = self._found[unit // self.each], 0
        # Runs are in the order of their shards, so each file is opened once.
        for number, of_shard in groupby(date.runs[unit % self.each], key=lambda run: run.shard):
            with closing(ShardFile(date.shards[number][0])) as shard:
                for run in of_shard:
                    shard.read_into(run.offset, out[start : start + run.size])
                    start += run.size
        self.store.check_same()

    def over(self, draw: Draw, packed: Sequence[np.ndarray]) -> Reader:
        """Return a reader of one sample, whose units are in memory: `packed`, in the order of `of`."""
        units = self.of(draw)
        date = self._found[int(units[0]) // self.each]
        pieces: list[list[tuple[int, np.ndarray]]] = [[] for _ in date.shards]
        for unit, data in zip(units.tolist(), packed, strict=True):
            start = 0
            for run in date.runs[unit % self.each]:
                pieces[run.shard].append((run.offset, data[start : start + run.size]))
                start += run.size
        shards = {known[0]: MemoryShard(*known, some) for known, some in zip(date.shards, pieces, strict=True)}
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
                shard = indexed(path, spec)
                for member, wanted in _by_member(spec, numbers, part, self.each - 1):
                    _, spans = chunk_spans(shard, spec, wanted)
                    for a, b in runs(spans, shard.size):
                        start = int(spans[a, 0])
                        members[member].append(Run(len(shards), start, int(spans[b - 1].sum()) - start))
                shards.append((path, shard.size, shard.index))
        return _Date(tuple(shards), tuple(map(tuple, members)))


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


def _by_member(spec: ArraySpec, numbers: np.ndarray, part: Part, last: int) -> list[tuple[int, np.ndarray]]:
    """Group the chunks `numbers` of a shard by the unit of the date; `last` is the unit of the targets."""
    if part is not Part.FORECAST:
        return [(last, numbers)]
    member = np.unravel_index(numbers, spec.chunks)[0]
    return [(m, numbers[member == m]) for m in range(spec.chunks[0])]


@dataclass(frozen=True, eq=False)
class Trace:
    """The uses of a run in the order of the global batches: three arrays (A,).

    Attributes:
        turn: Position of the turn in the schedule.
        unit: Number of the unit.
        user: Data coordinate (`batches.Turn`) that uses it.
    """

    turn: np.ndarray
    unit: np.ndarray
    user: np.ndarray

    @classmethod
    def of(cls, turns: Iterable[Turn], units: Units) -> Trace:
        """List the uses of all turns."""
        found: tuple[list[int], list[int], list[int]] = ([], [], [])
        for number, turn in enumerate(turns):
            for user in range(len(turn.shares)):
                for draw in turn.read_by(user):
                    used = units.of(draw).tolist()
                    for column, values in zip(found, ([number] * len(used), used, [user] * len(used)), strict=True):
                        column.extend(values)
        return cls(*(np.array(column, np.int64) for column in found))

    @property
    def regular(self) -> bool:
        """Return whether the trace consists of rounds in each of which every unit is used exactly once.

        A cache that never changes then reads as few bytes as any other.
        """
        distinct = len(np.unique(self.unit))
        if not distinct or len(self.unit) % distinct:
            return False
        # A round has as many uses as there are units.
        rounds = np.sort(self.unit.reshape(-1, distinct), 1)
        return bool((rounds == rounds[0]).all())


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """A plan of every use: where the unit comes from, and what the caches keep and drop.

    Args:
        trace: Uses of the run, from the step at which it starts.
        sizes: (U,) bytes of each unit.
        home: (U,) the only rank that may hold each unit.
        room: Cache capacity of each rank.
        columns: Number of ranks of one data coordinate that read the same rows (the ranks along longitude). Their
            numbers are `user * columns + column`.
        ranks: Number of ranks, P.
    """

    trace: Trace
    sizes: np.ndarray
    home: np.ndarray
    room: Room
    columns: int = 1
    ranks: int = 1

    @property
    def hash(self) -> str:
        """Return 16 hex digits that are equal on ranks that have planned the same run."""
        digest = hashlib.sha256(repr((self.room, self.columns, self.ranks)).encode())
        for array in (self.trace.turn, self.trace.unit, self.trace.user, self.sizes, self.home):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def exact(self) -> bool:
        """Return whether the plan reads as few bytes as possible (exactly so if all units have one size).

        If it is False, there are too many uses, and the caches hold the units that are used most for the whole run.
        """
        return len(self.trace.unit) <= _MOST or self.trace.regular

    @cached_property
    def _fate(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, list[int]]]:
        """Compute the arrays (A,) `source`, `tier` and `keep`, and what is `dropped` at each use."""
        count = len(self.trace.unit)
        source, tier = np.arange(count), np.full(count, STORAGE, np.uint8)
        keep = np.zeros(count, bool)
        dropped: dict[int, list[int]] = {}
        owner = self.home[self.trace.unit] if count else np.zeros(0, np.int64)
        static = self.trace.regular or count > _MOST
        pages = whole_pages(np.asarray(self.sizes))  # a cache allocates whole pages
        room = self.room.ram + self.room.disk
        # The homes hold disjoint sets of units, so each cache is planned by itself.
        for rank in range(self.ranks):
            uses = np.flatnonzero(owner == rank)
            chunks = self.trace.unit[uses]
            found = _hold(chunks, pages, room) if static else decide(chunks, pages, room)
            _replay(uses, chunks, pages, self.room, found, source, tier, keep, dropped)
        return source, tier, keep, dropped

    @property
    def source(self) -> np.ndarray:
        """Return the use that brings in the unit of each use, (A,): the use itself where slow storage is read."""
        return self._fate[0]

    @property
    def tier(self) -> np.ndarray:
        """Return the tier in which each use finds its unit or puts what it has read, (A,); STORAGE if none keeps it."""
        return self._fate[1]

    @property
    def keep(self) -> np.ndarray:
        """Return, for each use, whether it reads a unit that then stays in a cache, (A,) bool."""
        return self._fate[2]

    @property
    def hit(self) -> np.ndarray:
        """Return whether a cache holds the unit of each use, (A,) bool."""
        return self.source != np.arange(len(self.source))

    def dropped(self, use: int) -> Sequence[int]:
        """Return the units that the home drops before it keeps that of `use`, each by the use that brought it in."""
        return self._fate[3].get(use, ())

    @cached_property
    def holder(self) -> np.ndarray:
        """Return the rank that reads or holds the unit of each use, (A,).

        A unit in a cache, or one that a cache will keep, belongs to its home. Other units are read by the ranks that
        use them, spread over their columns.
        """
        spread = self.trace.user * self.columns + self.trace.unit % self.columns
        return np.where(self.hit | self.keep, self.home[self.trace.unit], spread)

    def users(self, use: int) -> range:
        """Return the ranks that need the unit of a use."""
        first = int(self.trace.user[use]) * self.columns
        return range(first, first + self.columns)

    def traffic(self, rank: int | None = None) -> dict[str, int]:
        """Count the bytes that a rank, or all ranks together (None), take from each tier.

        Returns:
            Bytes by name: `storage` (also those read for other ranks), `ram`, `disk`, `peers`, and `used`, the sum of
            all uses.
        """
        size, hit = self.sizes[self.trace.unit], self.hit
        ranks = range(self.ranks) if rank is None else [rank]
        found = dict.fromkeys(("storage", "ram", "disk", "peers", "used"), 0)
        for one in ranks:
            mine = self.trace.user == one // self.columns
            here = self.holder == one
            found["storage"] += int(size[here & ~hit].sum())
            found["ram"] += int(size[mine & here & hit & (self.tier == RAM)].sum())
            found["disk"] += int(size[mine & here & hit & (self.tier == DISK)].sum())
            found["peers"] += int(size[mine & ~here].sum())
            found["used"] += int(size[mine].sum())
        return found

    def held(self, rank: int) -> dict[int, int]:
        """Return the most bytes that a rank holds in each tier at any time, in whole pages."""
        pages = whole_pages(np.asarray(self.sizes)).tolist()
        unit, tier = self.trace.unit.tolist(), self.tier.tolist()
        now, most = {RAM: 0, DISK: 0}, {RAM: 0, DISK: 0}
        for use in np.flatnonzero(self.keep & (self.home[self.trace.unit] == rank)).tolist():
            for gone in self.dropped(use):
                now[tier[gone]] -= pages[unit[gone]]
            now[tier[use]] += pages[unit[use]]
            most = {one: max(most[one], now[one]) for one in now}
        return most


@dataclass(frozen=True, eq=False)
class Decisions:
    """The decisions of a cache over A uses, which are numbered from 0.

    Attributes:
        hit: (A,) bool, whether the cache holds the unit of the use when it begins.
        keep: (A,) bool, whether the cache holds the unit of the use after it.
        dropped: Pairs (use, unit): the unit leaves the cache when that use begins; A stands for the end of the trace.
    """

    hit: np.ndarray
    keep: np.ndarray
    dropped: tuple[tuple[int, int], ...]


def decide(chunks: np.ndarray, sizes: np.ndarray, capacity: int) -> Decisions:
    """Run Belady's rule with bypass over A uses in order of time.

    `chunks` (A,) are the units that are used. `sizes` (U,) and `capacity` are in bytes.
    """
    following = next_uses(chunks).tolist()
    hit, keep = np.zeros(len(chunks), bool), np.zeros(len(chunks), bool)
    resident: dict[int, int] = {}  # unit -> its next use
    farthest: list[tuple[int, int]] = []  # heap of (-next use, unit); some entries are out of date
    room, dropped = int(capacity), []
    size_of = np.asarray(sizes).tolist()
    for use, (chunk, soon) in enumerate(zip(chunks.tolist(), following, strict=True)):
        # A unit that is not in the cache enters it only if it is used again and is not larger than the whole cache.
        if chunk in resident:
            hit[use] = True
        elif soon == NEVER or size_of[chunk] > capacity:
            continue
        else:
            # Bypass: only units whose next use is later than that of the new one are evicted. If they do not free
            # enough space, nothing is evicted and their heap entries are restored.
            victims, gained = _victims(resident, farthest, size_of, size_of[chunk] - room, soon)
            if gained < size_of[chunk] - room:
                for victim in victims:
                    heapq.heappush(farthest, (-resident[victim], victim))
                continue
            for victim in victims:
                del resident[victim]
                dropped.append((use, victim))
            room += gained - size_of[chunk]
        # After its last use a unit leaves the cache at once, so the next use can have its space.
        if soon == NEVER:
            del resident[chunk]
            room += size_of[chunk]
            dropped.append((use + 1, chunk))
            continue
        keep[use] = True
        resident[chunk] = soon
        heapq.heappush(farthest, (-soon, chunk))
    return Decisions(hit, keep, tuple(dropped))


def _victims(
    resident: dict[int, int], farthest: list[tuple[int, int]], sizes: list[int], needed: int, soon: int
) -> tuple[list[int], int]:
    """Pop the units to evict, those with the farthest next use first.

    Only units whose next use is later than `soon` are popped, and only until `needed` bytes are gained. Heap entries
    whose unit has been evicted or used since they were pushed are discarded on the way.
    """
    victims: list[int] = []
    gained = 0
    while gained < needed and farthest:
        later, chunk = farthest[0]
        if resident.get(chunk) != -later:
            heapq.heappop(farthest)
            continue
        if -later <= soon:
            break
        heapq.heappop(farthest)
        victims.append(chunk)
        gained += sizes[chunk]
    return victims, gained


def _hold(chunks: np.ndarray, sizes: np.ndarray, room: int) -> Decisions:
    """Choose the units that are used most, earlier ones first among equals, and hold them for the whole run."""
    distinct, first, count = np.unique(chunks, return_index=True, return_counts=True)
    # A unit that is used k times saves k - 1 reads, so the units used most come first.
    order = np.lexsort((first, -count))
    chosen = distinct[order]
    held = np.zeros(len(sizes), bool)
    for _ in range(2):  # the second pass takes smaller units behind the first one that did not fit
        fits = int(np.searchsorted(np.cumsum(sizes[chosen]), room, side="right"))
        held[chosen[:fits]] = True
        room -= int(sizes[chosen[:fits]].sum())
        chosen = chosen[fits:][sizes[chosen[fits:]] <= room]
    new = np.zeros(len(chunks), bool)
    new[first] = True
    # A unit need not stay after its last use.
    stays = held[chunks] & (next_uses(chunks) < NEVER)
    return Decisions(held[chunks] & ~new, stays, ())


def next_uses(chunks: np.ndarray) -> np.ndarray:
    """Return, for each of A uses in order of time, the position of the next use of the same unit.

    `chunks` (A,) are the units that are used. The positions are (A,) int64; NEVER where a unit is not used again.
    """
    # A stable sort puts all uses of one unit side by side and keeps them in order of time, so each is followed by its
    # successor.
    order = np.argsort(chunks, kind="stable")
    same = chunks[order][1:] == chunks[order][:-1]
    following = np.full(len(chunks), NEVER)
    following[order[:-1][same]] = order[1:][same]
    return following


def _replay(
    uses: np.ndarray,
    chunks: np.ndarray,
    pages: np.ndarray,
    room: Room,
    found: Decisions,
    source: np.ndarray,
    tier: np.ndarray,
    keep: np.ndarray,
    dropped: dict[int, list[int]],
) -> None:
    """Assign each unit that one rank keeps to a tier, memory first, and write the result into the arrays (A,).

    The decisions were made for the capacity of both tiers together. A unit that then fits into neither tier alone is
    not kept. A drop is recorded at the next use that keeps a unit, because the space is not needed before.
    """
    free = {RAM: room.ram, DISK: room.disk}
    brought: dict[int, int] = {}  # unit -> the use that brought it in
    drops, gone, waiting = list(found.dropped), 0, []
    for here, (use, unit) in enumerate(zip(uses.tolist(), chunks.tolist(), strict=True)):
        # First free the space of all units that leave the cache before this use.
        while gone < len(drops) and drops[gone][0] <= here:
            dropped_unit = drops[gone][1]
            was = brought.pop(dropped_unit, None)
            gone += 1
            if was is not None:
                free[int(tier[was])] += int(pages[dropped_unit])
                waiting.append(was)
        if found.hit[here] and unit in brought:
            source[use], tier[use] = brought[unit], tier[brought[unit]]
            continue
        if not found.keep[here]:
            continue
        where = next((one for one in (RAM, DISK) if free[one] >= pages[unit]), None)
        if where is None:
            continue
        free[where] -= int(pages[unit])
        brought[unit], tier[use], keep[use] = use, where, True
        if waiting:
            dropped[use], waiting = waiting, []
