"""Who reads, holds and drops each packed unit of a training run, decided before the first read.

A run shows a random subset of members of each start date, and its validation dates again and again, so units are used
at irregular times: Belady's rule with bypass (`replacement.py`) reads the least from slow storage that a cache of the
given size can. Where every unit is used once an epoch, holding any of them for good is as good and moves nothing.
Every start date has a home among the ranks, and only the home keeps its units, so none is held twice; the homes decide
apart, each for the units that it may keep.

A pure function of the trace, the same on every rank. Axes: A uses, U units, P ranks.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ensemble_ml.loading.plan import DISK, RAM, STORAGE, Room
from ensemble_ml.loading.replacement import Decisions, decide, next_uses
from ensemble_ml.loading.schedule import Turn
from ensemble_ml.loading.units import Units

PAGE = mmap.PAGESIZE  # what a cache gives out: the plan counts in these
_MOST = 3_000_000  # uses beyond which the exact rule would take longer than half a minute


@dataclass(frozen=True, eq=False)
class Trace:
    """Uses in the order of the global batches: the turn, the unit, and the data coordinate that uses it; (A,) each."""

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
        """Whether every unit comes once in each round: then no cache does better than one that never changes."""
        distinct = len(np.unique(self.unit))
        if not distinct or len(self.unit) % distinct:
            return False
        rounds = np.sort(self.unit.reshape(-1, distinct), 1)
        return bool((rounds == rounds[0]).all())


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """The fate of every use.

    Args:
        trace: of the run, from where it starts.
        sizes: (U,) bytes of each unit.
        home: (U,) the rank that may hold each unit.
        room: bytes of cache on each rank.
        columns: ranks of one data coordinate that read the same rows (those along longitude); rank
            `user * columns + column` of P.
        ranks: P.
    """

    trace: Trace
    sizes: np.ndarray
    home: np.ndarray
    room: Room
    columns: int = 1
    ranks: int = 1

    @property
    def hash(self) -> str:
        """16 hex digits: ranks with equal hashes have planned the same run."""
        digest = hashlib.sha256(repr((self.room, self.columns, self.ranks)).encode())
        for array in (self.trace.turn, self.trace.unit, self.trace.user, self.sizes, self.home):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def exact(self) -> bool:
        """Whether the least possible is read; too long a run holds what it uses most, unchanged."""
        return len(self.trace.unit) <= _MOST or self.trace.regular

    @cached_property
    def _fate(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, list[int]]]:
        """Of each use: the use that read it in (itself where it is read), the tier, whether it is kept; and drops."""
        count = len(self.trace.unit)
        source, tier = np.arange(count), np.full(count, STORAGE, np.uint8)
        keep = np.zeros(count, bool)
        dropped: dict[int, list[int]] = {}
        owner = self.home[self.trace.unit] if count else np.zeros(0, np.int64)
        static = self.trace.regular or count > _MOST
        for rank in range(self.ranks):
            uses = np.flatnonzero(owner == rank)
            chunks = self.trace.unit[uses]
            pages = -(-np.asarray(self.sizes) // PAGE) * PAGE
            room = self.room.ram + self.room.disk
            found = _hold(chunks, pages, room) if static else decide(chunks, pages, room)
            _replay(uses, chunks, pages, self.room, found, source, tier, keep, dropped)
        return source, tier, keep, dropped

    @property
    def source(self) -> np.ndarray:
        """(A,) the use that brings in what this use needs: itself where it comes from slow storage."""
        return self._fate[0]

    @property
    def tier(self) -> np.ndarray:
        """(A,) STORAGE, or the tier (RAM, DISK) that the use finds its unit in; of one that is kept, where it goes."""
        return self._fate[1]

    @property
    def keep(self) -> np.ndarray:
        """(A,) whether what is read stays in a cache."""
        return self._fate[2]

    @property
    def hit(self) -> np.ndarray:
        """(A,) whether a cache has it."""
        return self.source != np.arange(len(self.source))

    def dropped(self, use: int) -> Sequence[int]:
        """What the home drops before it keeps what `use` has read: the uses that had brought them in."""
        return self._fate[3].get(use, ())

    @cached_property
    def holder(self) -> np.ndarray:
        """(A,) the rank that reads the unit, or has it."""
        spread = self.trace.user * self.columns + self.trace.unit % self.columns
        return np.where(self.hit | self.keep, self.home[self.trace.unit], spread)

    def users(self, use: int) -> range:
        """The ranks that use it."""
        first = int(self.trace.user[use]) * self.columns
        return range(first, first + self.columns)

    def traffic(self, rank: int | None = None) -> dict[str, int]:
        """Bytes that a rank (None: all) takes from each tier: storage, ram, disk, peers; and `used`, their sum."""
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
        """The most bytes that a rank holds in each tier at a time, in whole pages."""
        pages = (-(-np.asarray(self.sizes) // PAGE) * PAGE).tolist()
        unit, tier = self.trace.unit.tolist(), self.tier.tolist()
        now, most = {RAM: 0, DISK: 0}, {RAM: 0, DISK: 0}
        for use in np.flatnonzero(self.keep & (self.home[self.trace.unit] == rank)).tolist():
            for gone in self.dropped(use):
                now[tier[gone]] -= pages[unit[gone]]
            now[tier[use]] += pages[unit[use]]
            most = {one: max(most[one], now[one]) for one in now}
        return most


def _hold(chunks: np.ndarray, sizes: np.ndarray, room: int) -> Decisions:
    """Hold what is used most, and of that what comes first, for good."""
    distinct, first, count = np.unique(chunks, return_index=True, return_counts=True)
    order = np.lexsort((first, -count))
    chosen = distinct[order]
    held = np.zeros(len(sizes), bool)
    for _ in range(2):  # once more for smaller ones behind the first that did not fit
        fits = int(np.searchsorted(np.cumsum(sizes[chosen]), room, side="right"))
        held[chosen[:fits]] = True
        room -= int(sizes[chosen[:fits]].sum())
        chosen = chosen[fits:][sizes[chosen[fits:]] <= room]
    new = np.zeros(len(chunks), bool)
    new[first] = True
    stays = held[chunks] & (next_uses(chunks) < np.iinfo(np.int64).max)
    return Decisions(held[chunks] & ~new, stays, ())


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
    """Give each unit that one home keeps its tier, memory first, and write its fate into the arrays (A,).

    A unit that fits into both tiers together but into neither is not kept; drops are told at the next thing kept.
    """
    free = {RAM: room.ram, DISK: room.disk}
    brought: dict[int, int] = {}  # unit -> the use that brought it in
    drops, gone, waiting = list(found.dropped), 0, []
    for here, (use, unit) in enumerate(zip(uses.tolist(), chunks.tolist(), strict=True)):
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
