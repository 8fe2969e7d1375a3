"""Plan which rank reads, holds and drops each packed unit of a training run, before the first read.

A unit is one member, or the targets, of an init time (`units.py`). A run trains on random subsets of the members of
each init time, and reads its validation dates again and again. Units are therefore used at irregular times. For units
of equal size, Belady's rule with bypass (`replacement.py`) reads the fewest bytes from slow storage that a cache of the
given size allows; packed members are nearly of equal size. If every unit is used exactly once an epoch, a cache that
never changes reads as few and needs no rewriting.

Every init time has a home: the only rank whose caches may hold its units, so no unit is held twice. The caches of each
rank are planned separately.

The plan is a pure function of the trace, so it is the same on every rank.

Axes: A uses, U units, P ranks.
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

PAGE = mmap.PAGESIZE  # a cache allocates whole pages, so the plan counts in pages
_MOST = 3_000_000  # number of uses beyond which Belady's rule would take longer than half a minute


@dataclass(frozen=True, eq=False)
class Trace:
    """The uses of a run in the order of the global batches: three arrays (A,).

    Attributes:
        turn: Position of the turn in the schedule.
        unit: Number of the unit.
        user: Data coordinate (`schedule.Turn`) that uses it.
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
        """Compute what happens at each use.

        Returns:
            The use that brings in the unit (the use itself where the unit is read), the tier, whether the unit is kept
            (each (A,)), and the drops by use.
        """
        count = len(self.trace.unit)
        source, tier = np.arange(count), np.full(count, STORAGE, np.uint8)
        keep = np.zeros(count, bool)
        dropped: dict[int, list[int]] = {}
        owner = self.home[self.trace.unit] if count else np.zeros(0, np.int64)
        static = self.trace.regular or count > _MOST
        # The homes hold disjoint sets of units, so each cache is planned by itself.
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
        """Return the use that brings in what each use needs, (A,).

        It is the use itself where the unit comes from slow storage.
        """
        return self._fate[0]

    @property
    def tier(self) -> np.ndarray:
        """Return the tier of each use, (A,).

        It is the tier (RAM, DISK) in which the use finds its unit, or into which a unit that was read is put. It is
        STORAGE for a unit that is read and not kept.
        """
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
        """Return the units that the home drops before it keeps the unit that `use` has read.

        Each is given by the use that brought it in.
        """
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
        """Count the bytes that a rank takes from each tier.

        Args:
            rank: Rank to count for; None counts for all ranks.

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
