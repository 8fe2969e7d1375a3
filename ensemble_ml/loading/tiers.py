"""Packed samples from wherever the plan says: this rank's caches, those of others, or slow storage."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.loading.counters import Counters
from ensemble_ml.loading.items import Divisible, Items
from ensemble_ml.loading.plan import DISK, NOBODY, RAM, Plan
from ensemble_ml.loading.slab import Shape, Slab

log = logging.getLogger(__name__)


class Others(Protocol):
    """The way to samples that other ranks hold."""

    def get(self, owner: int, sample: int, scratch: memoryview) -> memoryview | None:
        """The sample that `owner` holds, maybe in `scratch`; None where it cannot be had there."""


class Alone:
    """No other rank."""

    def get(self, owner: int, sample: int, scratch: memoryview) -> memoryview | None:
        """Nothing can be had."""
        return None


class Tiers:
    """All packed samples, as one rank sees them; any thread may ask.

    Args:
        plan: who holds what.
        rank: which of its ranks this is.
        items: the samples on slow storage.
        folder: of the cache on local disk; needed where the plan gives it room.

    Raises:
        UserError: the folder is missing or cannot be used.
    """

    def __init__(self, plan: Plan, rank: int, items: Items, folder: Path | None = None):
        self.plan, self.rank, self.items = plan, rank, items
        self._stored = plan.on_storage
        self.counters = Counters()
        self.others: Others = Alone()
        self._copied = frozenset(plan.copies.of(rank)[0].tolist())
        self._lock = threading.Lock()
        self._busy: dict[int, threading.Event] = {}
        self._reading: dict[int, tuple[int, float]] = {}  # thread -> sample and since when
        self.slabs = {RAM: Slab.in_memory(slab_shape(plan, items, rank, RAM))}
        if plan.tiers.disk:
            if folder is None:
                raise UserError("loading.disk: needs loading.folder=FOLDER on local disk")
            shape = slab_shape(plan, items, rank, DISK)
            try:
                names = {r: _cache_name(items, slab_key(plan, items, r, DISK)) for r in range(plan.ranks)}
                _remove_stale(folder, names.values(), plan.tiers.disk)
                path = folder / names[rank]
                self.slabs[DISK] = Slab.on_disk(path, shape, keep=getattr(items, "lasting", False))
            except BaseException:
                self.close()
                raise

    def fetch(self, sample: int, scratch: memoryview) -> memoryview:
        """The packed sample: in place where it is held on this node, else in `scratch`, which must have its size.

        Raises:
            UserError: slow storage does not give it.
        """
        owner = int(self.plan.placement.owner[sample])
        self.counters.add(samples=1)
        if owner == NOBODY:
            return self._read(sample, scratch)
        kept = int(self.plan.placement.kept[sample])
        if kept < len(scratch):
            head = self._held(owner, sample, scratch[:kept])
            scratch[:kept] = head
            self._read(sample, scratch[kept:], kept)
            return scratch
        return self._held(owner, sample, scratch)

    def _held(self, owner: int, sample: int, scratch: memoryview) -> memoryview:
        """What `owner` holds of a sample."""
        if owner == self.rank:
            mine = self.own(sample, scratch)
            if mine is not scratch:
                tier = int(self.plan.placement.tier[sample])
                self.counters.add(**{"ram" if tier == RAM else "disk": len(mine)})
            return mine
        if sample not in self._copied:
            return self._from(owner, sample, scratch)
        with self._once(sample):
            found = self.slabs[RAM].get(sample)
            if found is not None:
                self.counters.add(ram=len(found))
                return found
            found = self._from(owner, sample, scratch)
            self.slabs[RAM].put(sample, found)
            return found

    def _from(self, owner: int, sample: int, scratch: memoryview) -> memoryview:
        """A sample that another rank holds; from slow storage where that fails."""
        found = self.others.get(owner, sample, scratch)
        if found is not None:
            self.counters.add(peers=len(found))
            return found
        self.counters.add(fallback=len(scratch))
        return self._read(sample, scratch)

    def own(self, sample: int, scratch: memoryview) -> memoryview:
        """What this rank holds of a sample, for whichever rank needs it: in place; or in `scratch`, where it had to be
        read from slow storage, as the first time. Uses are counted by the rank that has them."""
        slab = self.slabs[int(self.plan.placement.tier[sample])]
        with self._once(sample):
            found = slab.get(sample)
            if found is not None:
                return found
            self._read(sample, scratch)
            slab.put(sample, scratch)
            return scratch

    @contextmanager
    def _once(self, sample: int) -> Iterator[None]:
        """Let one thread at a time fetch a sample, so that slow storage is asked once."""
        while True:
            with self._lock:
                event = self._busy.get(sample)
                if event is None:
                    self._busy[sample] = threading.Event()
                    break
            event.wait()
        try:
            yield
        finally:
            with self._lock:
                self._busy.pop(sample).set()

    def _read(self, sample: int, out: memoryview, start: int = 0) -> memoryview:
        me, whole = threading.get_ident(), len(out) == int(self.plan.sizes[sample])
        self._reading[me] = sample, time.monotonic()
        try:
            if whole:
                self.items.read(sample, out)
            else:
                assert isinstance(self.items, Divisible)
                self.items.read_from(start, sample, out)
        finally:
            del self._reading[me]
        self.counters.add(storage=int(self._stored[sample]) if whole else len(out))
        return out

    def slowest(self) -> tuple[str, float] | None:
        """What slow storage has been asked for longest and has not given, and for how many seconds."""
        under_way = sorted(self._reading.copy().values(), key=lambda read: read[1])
        return (self.items.name(under_way[0][0]), time.monotonic() - under_way[0][1]) if under_way else None

    def close(self) -> None:
        """Give back memory and files."""
        for slab in self.slabs.values():
            slab.close()


def slab_shape(plan: Plan, items: Items, rank: int, tier: int) -> Shape:
    """What `rank` holds in `tier`; the same on every rank that asks."""
    held = plan.placement.held(rank, tier)
    offset = plan.placement.offset[held]
    if tier == RAM:
        copied, places = plan.copies.of(rank)
        held, offset = np.append(held, copied), np.append(offset, places)
        order = np.argsort(held)
        held, offset = held[order], offset[order]
    kept = plan.placement.kept[held]  # of copies, which are made of whole samples alone, all bytes
    return Shape(held, offset, kept, slab_key(plan, items, rank, tier))


def slab_key(plan: Plan, items: Items, rank: int, tier: int) -> int:
    """What names a rank's slab of these items under this plan."""
    said = f"{items.fingerprint()} {plan.hash} {rank} {tier}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "big") >> 1


def _cache_name(items: Items, key: int) -> str:
    data = hashlib.sha256(items.fingerprint().encode()).hexdigest()[:8]
    return f"ensemble_ml-{data}-{key:016x}.cache"


def _remove_stale(folder: Path, names: Collection[str], room: int) -> None:
    """Remove caches in `folder` that no process uses and that are not of this run's ranks.

    Those of the same data under another plan go at once; those of other data, which another loader of the next run may
    want, where less than `room` bytes are free, the oldest first.
    """
    mine = next(iter(names)).rsplit("-", 1)[0]
    found: list[Path] = []
    with suppress(OSError):  # a folder that cannot be entered is told where the slab is made
        found = sorted(folder.glob("ensemble_ml-*.cache"), key=_last_written) if folder.is_dir() else []
    for path in found:
        if path.name in names:
            continue
        with suppress(OSError), open(path, "rb") as file:  # in use, somebody else's, or gone meanwhile
            if not path.name.startswith(f"{mine}-") and shutil.disk_usage(folder).free >= room:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            log.info("loading: %s of an earlier run is removed", path)


def _last_written(path: Path) -> float:
    """When it was last written; 0 for one that is gone meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
