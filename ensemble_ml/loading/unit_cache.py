"""Hold the packed units of one rank as its plan says.

A unit is one member, or the targets, of an init time (`unit_plan.py`). A use is one reading of a unit by the ranks at
one coordinate of the mesh's data axis (`batches.Turn`). A turn is one slot of the schedule: a global training batch, or
a round of validation batches that are read at the same time (`batches.py`).

A unit comes from the caches of this rank, from another rank, or from slow storage.

A unit that is to enter a cache first stays in other memory (`_coming`) until all ranks have passed the turn that reads
it. Then it is written to the cache, in the order of the plan, over units that the plan drops. So no page is overwritten
while another rank reads it. A unit that no cache keeps is released when the last of its users has received it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from ensemble_ml.loading.arena import Arena, Extents
from ensemble_ml.loading.counters import Counters, Timeline
from ensemble_ml.loading.plan import DISK, RAM
from ensemble_ml.loading.threads import Reading
from ensemble_ml.loading.unit_plan import UnitPlan, Units


class Others:
    """The units that other ranks hold. This base class stands for a run of one rank, which has no others."""

    def get(self, holder: int, use: int) -> np.ndarray | None:
        """Return the unit that a use needs, from its holder; None where it cannot be had."""
        return None


class UnitCache(Reading):
    """The units that one rank reads, holds and serves. Any thread may call it.

    Args:
        plan: Plan of every use.
        rank: This rank.
        units: The units on slow storage.
        folder: Folder of the cache on local disk; required where the plan gives it capacity.
        timeline: Record of what the threads do and when.

    Raises:
        UserError: The folder cannot be used.
    """

    def __init__(self, plan: UnitPlan, rank: int, units: Units, *, folder: str | Path | None, timeline: Timeline):
        super().__init__(units.name)
        self.plan, self.rank, self.units = plan, rank, units
        self.counters = Counters()
        self.others = Others()
        self.timeline = timeline
        held = plan.held(rank)
        self.arenas = {RAM: Arena(held[RAM])}
        if plan.room.disk:
            try:
                self.arenas[DISK] = Arena(held[DISK], folder)
            except BaseException:
                self.arenas[RAM].close()
                raise
        self._turn = plan.trace.turn.tolist()
        owner = plan.home[plan.trace.unit] if len(plan.trace.unit) else plan.trace.unit
        self._kept = np.flatnonzero(plan.keep & (owner == rank)).tolist()
        self._next = 0  # index into `_kept`: uses before it have been written or skipped
        self._passed = -1
        self._coming: dict[int, Future[np.ndarray]] = {}
        # use that no cache keeps -> number of users that have not received it yet
        self._waited_for: dict[int, int] = {}
        self._resident: dict[int, tuple[int, Extents]] = {}
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def obtain(self, use: int) -> np.ndarray:
        """Return the packed unit that a use of this rank needs.

        Raises:
            UserError: Slow storage does not deliver it.
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
        """Read a unit from slow storage although the plan has another source, and count its bytes as a fallback.

        This happens if its holder has failed or is late, or if the holder's cache did not get it (a full disk, a failed
        or late read). If a sample turns out damaged, all of its units are read in this way, whatever their source was.

        Raises:
            UserError: Slow storage does not deliver it.
        """
        self.counters.add(fallback=int(self.plan.sizes[unit]))
        return self._read(unit)

    def own(self, use: int) -> np.ndarray:
        """Return the unit that a use of any rank needs, where this rank is its holder.

        Raises:
            UserError: Slow storage does not deliver it.
        """
        return self._own(use)[0]

    def _own(self, use: int) -> tuple[np.ndarray, bool]:
        """Return the unit, and whether it came from the place that the plan names.

        The second value is False where the plan names a cache, but the cache does not hold the unit, because the disk
        was full or the read that should bring it in failed or came late. The unit is then read again.
        """
        brought = int(self.plan.source[use])
        unit = int(self.plan.trace.unit[use])
        # Several threads may want the same unit. The first one puts a future into `_coming` and reads; the others wait
        # for it.
        promise: Future[np.ndarray] | None = None
        with self._lock:
            coming = self._coming.get(brought)
            place = self._resident.get(brought) if coming is None else None
            mine = coming is None and place is None
            if mine and self._turn[brought] <= self._passed and brought != use:
                brought = -1  # the plan has it in a cache, but it was not kept (full disk; failed or late read)
            elif mine and self._shared(brought):
                promise = self._coming[brought] = Future()
        if place is not None:
            return self.arenas[place[0]].get(place[1]), True
        if coming is not None:
            data = coming.result()
        else:
            data = self.again(unit) if brought < 0 else self._bring(unit, promise)
        if brought == use and not self.plan.keep[use]:
            self._answered(use)
        return data, brought >= 0

    def _answered(self, use: int) -> None:
        """Count that one more user has received a unit that no cache keeps, and release the unit after the last one.

        Without this, all units of a validation would stay in memory until its end: over several ranks, its turns count
        as passed only at a later training step.
        """
        with self._lock:
            left = self._waited_for.get(use, len(self.plan.users(use))) - 1
            self._waited_for[use] = left
            if left <= 0:
                del self._waited_for[use]
                self._coming.pop(use, None)

    def _shared(self, use: int) -> bool:
        """Return whether a cache or another rank also needs the unit that a use reads."""
        users = self.plan.users(use)
        return bool(self.plan.keep[use]) or len(users) > 1 or self.rank not in users

    def _bring(self, unit: int, coming: Future[np.ndarray] | None) -> np.ndarray:
        """Read a unit and give it, or the error, to all threads that wait for `coming`; None if there are none."""
        # `_coming` may have lost it by now, if all ranks have passed the turn.
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
        """Read a unit from slow storage into new memory."""
        data = np.empty(int(self.plan.sizes[unit]), np.uint8)
        with self.noted(unit), self.timeline.span("read"):
            self.units.read(unit, data.data)
        self.counters.add(storage=len(data))
        return data

    def where(self, use: int) -> tuple[int, Extents] | None:
        """Return tier and place of the unit of a use, or None where no cache of this rank holds it yet."""
        with self._lock:
            return self._resident.get(int(self.plan.source[use]))

    def passed(self, turn: int) -> None:
        """Bring the caches up to date to `turn`.

        The caller must know that all ranks have received their units of all turns up to it. If another thread is
        bringing them up to date, this call does nothing; the next call catches up.
        """
        if turn <= self._passed or not self._writing.acquire(blocking=False):
            return
        try:
            while self._next < len(self._kept) and self._turn[self._kept[self._next]] <= turn:
                self._keep(self._kept[self._next])
                self._next += 1
            with self._lock:
                self._passed = turn
                # All ranks have passed these turns, so their units need not stay in memory outside the caches.
                for use in [use for use in self._coming if self._turn[use] <= turn]:
                    del self._coming[use]
                for use in [use for use in self._waited_for if self._turn[use] <= turn]:
                    del self._waited_for[use]
        finally:
            self._writing.release()

    def _keep(self, use: int) -> None:
        """Drop what the plan drops at a use, and write the unit that the use has read into its tier."""
        with self._lock:
            gone = [self._resident.pop(old) for old in self.plan.dropped(use) if old in self._resident]
            coming = self._coming.get(use)
        # All ranks have passed the turn, so no rank reads the pages that are freed here.
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
                del self._coming[use]  # else all units of a validation would be in memory twice

    def close(self) -> None:
        """Free memory and files."""
        for arena in self.arenas.values():
            arena.close()
