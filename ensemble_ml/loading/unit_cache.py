"""Packed units of one rank as its plan says: from its caches, from other ranks, or from slow storage.

What a turn reads and a cache shall hold is at hand in memory (`_coming`) until all ranks have passed the turn; only
then is it written to the caches, in the order of the plan, over what the plan drops. So nobody's pages are written over
while they are read. What no cache holds is let go when the last of its users has had it.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import numpy as np

from ensemble_ml.loading.arena import Arena, Extents
from ensemble_ml.loading.counters import Counters
from ensemble_ml.loading.plan import DISK, RAM
from ensemble_ml.loading.timeline import Timeline
from ensemble_ml.loading.unit_plan import UnitPlan
from ensemble_ml.loading.units import Units

log = logging.getLogger(__name__)


class Others(Protocol):
    """The way to units that other ranks hold."""

    def get(self, holder: int, use: int) -> np.ndarray | None:
        """What a use needs, from its holder; None where it cannot be had there."""


class Alone:
    """No other rank."""

    def get(self, holder: int, use: int) -> np.ndarray | None:
        """Nothing can be had."""
        return None


class UnitCache:
    """The units that one rank reads, holds and gives; any thread may ask.

    Args:
        plan: the fate of every use.
        rank: which of its ranks this is.
        units: on slow storage.
        folder: of the cache on local disk; needed where the plan gives it room.

    Raises:
        UserError: the folder cannot be used.
    """

    def __init__(
        self,
        plan: UnitPlan,
        rank: int,
        units: Units,
        *,
        folder: str | Path | None = None,
        timeline: Timeline | None = None,
    ):
        self.plan, self.rank, self.units = plan, rank, units
        self.counters = Counters()
        self.others: Others = Alone()
        self.timeline = timeline or Timeline()
        held = plan.held(rank)
        self.arenas = {RAM: Arena(held[RAM])}
        if plan.room.disk:
            self.arenas[DISK] = Arena(held[DISK], folder)
        self._turn = plan.trace.turn.tolist()
        owner = plan.home[plan.trace.unit] if len(plan.trace.unit) else plan.trace.unit
        self._kept = np.flatnonzero(plan.keep & (owner == rank)).tolist()
        self._next = 0  # among `_kept`: what is before it has been written or dropped
        self._passed = -1
        self._coming: dict[int, Future[np.ndarray]] = {}
        self._waited_for: dict[int, int] = {}  # use that no cache holds -> users that have not had it
        self._resident: dict[int, tuple[int, Extents]] = {}
        self._reading: dict[int, tuple[int, float]] = {}  # thread -> unit and since when
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def obtain(self, use: int) -> np.ndarray:
        """The packed unit that a use of this rank needs.

        Raises:
            UserError: slow storage does not give it.
        """
        plan, unit = self.plan, int(self.plan.trace.unit[use])
        size = int(plan.sizes[unit])
        holder = int(plan.holder[use])
        if holder == self.rank:
            data, cached = self._own(use)
            if cached and plan.source[use] != use:
                self.counters.add(**{"ram" if plan.tier[use] == RAM else "disk": size})
            return data
        found = self.others.get(holder, use) if size else np.empty(0, np.uint8)
        if found is not None:
            self.counters.add(peers=size)
            return found
        return self.again(unit)

    def again(self, unit: int) -> np.ndarray:
        """A unit from slow storage that the plan has elsewhere: its holder is gone, or what it has is damaged."""
        self.counters.add(fallback=int(self.plan.sizes[unit]))
        return self._read(unit)

    def own(self, use: int) -> np.ndarray:
        """What a use of any rank needs, of which this one is the holder."""
        return self._own(use)[0]

    def _own(self, use: int) -> tuple[np.ndarray, bool]:
        """That, and whether it was held, or on its way: not so where a full disk has kept nothing."""
        brought = int(self.plan.source[use])
        unit = int(self.plan.trace.unit[use])
        with self._lock:
            coming = self._coming.get(brought)
            place = self._resident.get(brought) if coming is None else None
            mine = coming is None and place is None
            if mine and self._turn[brought] <= self._passed and brought != use:
                brought = -1  # it should be here and is not: the disk was full
            elif mine and self._shared(brought):
                self._coming[brought] = Future()
        if place is not None:
            return self.arenas[place[0]].get(place[1]), True
        if coming is not None:
            data = coming.result()
        else:
            data = self.again(unit) if brought < 0 else self._bring(brought, unit)
        if brought == use and not self.plan.keep[use]:
            self._answered(use)
        return data, brought >= 0

    def _answered(self, use: int) -> None:
        """One more of its users has what a use reads. Turns of a validation pass together, and it may be large."""
        with self._lock:
            left = self._waited_for.get(use, len(self.plan.users(use))) - 1
            self._waited_for[use] = left
            if left <= 0:
                del self._waited_for[use]
                self._coming.pop(use, None)

    def _shared(self, use: int) -> bool:
        """Whether what a use reads is wanted by somebody else too: a cache, or another rank."""
        users = self.plan.users(use)
        return bool(self.plan.keep[use]) or len(users) > 1 or self.rank not in users

    def _bring(self, use: int, unit: int) -> np.ndarray:
        coming = self._coming.get(use)
        try:
            data = self._read(unit)
        except BaseException as error:
            if coming is not None:
                coming.set_exception(error)
            raise
        if coming is not None:
            coming.set_result(data)
        return data

    def _read(self, unit: int) -> np.ndarray:
        me, began = threading.get_ident(), time.monotonic()
        data = np.empty(int(self.plan.sizes[unit]), np.uint8)
        self._reading[me] = unit, began
        try:
            with self.timeline.span("read"):
                self.units.read(unit, data.data)
        finally:
            del self._reading[me]
        self.counters.add(storage=len(data))
        return data

    def where(self, use: int) -> tuple[int, Extents] | None:
        """Tier and place of what a use needs, where a cache of this rank has it already."""
        with self._lock:
            return self._resident.get(int(self.plan.source[use]))

    def passed(self, turn: int) -> None:
        """All ranks have what they need of `turn` and those before it: bring the caches to where the plan is then."""
        if turn <= self._passed or not self._writing.acquire(blocking=False):
            return  # another thread is at it, and the next call does what has come since
        try:
            while self._next < len(self._kept) and self._turn[self._kept[self._next]] <= turn:
                self._keep(self._kept[self._next])
                self._next += 1
            with self._lock:
                self._passed = turn
                for use in [use for use in self._coming if self._turn[use] <= turn]:
                    del self._coming[use]
                for use in [use for use in self._waited_for if self._turn[use] <= turn]:
                    del self._waited_for[use]
        finally:
            self._writing.release()

    def _keep(self, use: int) -> None:
        with self._lock:
            gone = [self._resident.pop(old) for old in self.plan.dropped(use) if old in self._resident]
            coming = self._coming.get(use)
        for tier, extents in gone:
            self.arenas[tier].give_back(extents)
        if coming is None or not coming.done() or coming.exception() is not None:
            return
        tier = int(self.plan.tier[use])
        with self.timeline.span("keep"):
            kept = self.arenas[tier].put(coming.result())
        if kept is not None:
            with self._lock:
                self._resident[use] = tier, kept
                del self._coming[use]  # it would be there twice, and with it all of a validation

    def slowest(self) -> tuple[str, float] | None:
        """What slow storage has been asked for longest and has not given, and for how many seconds."""
        under_way = sorted(self._reading.copy().values(), key=lambda read: read[1])
        return (self.units.name(under_way[0][0]), time.monotonic() - under_way[0][1]) if under_way else None

    def close(self) -> None:
        """Give back memory and files."""
        for arena in self.arenas.values():
            arena.close()
