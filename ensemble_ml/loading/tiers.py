"""Fetch packed samples from where the plan places them.

A sample comes from the caches of this rank, from those of another rank, or from slow storage (`plan.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.loading.counters import Counters
from ensemble_ml.loading.items import Divisible, Items
from ensemble_ml.loading.plan import DISK, NOBODY, RAM, Plan
from ensemble_ml.loading.slab import Shape, Slab
from ensemble_ml.loading.threads import Reading

log = logging.getLogger(__name__)


class Others:
    """The samples that other ranks hold. This base class stands for a run of one rank, which has no others."""

    def get(self, owner: int, sample: int, scratch: memoryview) -> memoryview | None:
        """Return the bytes of a sample that `owner` holds, possibly in `scratch`; None if they cannot be had."""
        return None


class Tiers(Reading):
    """The access of one rank to all packed samples. Any thread may use it.

    Args:
        plan: Plan of the run, which assigns each sample to its holder.
        rank: This rank.
        items: The samples on slow storage.
        folder: Folder of the cache on local disk; required if the plan uses local disk.

    Raises:
        UserError: The plan uses local disk, but `folder` is None or cannot be used.
    """

    def __init__(self, plan: Plan, rank: int, items: Items, folder: Path | None = None):
        super().__init__(items.name)
        self.plan, self.rank, self.items = plan, rank, items
        self._stored = plan.on_storage
        self.counters = Counters()
        self.others = Others()
        self._copied = frozenset(plan.copies.of(rank)[0].tolist())
        self._lock = threading.Lock()
        self._busy: dict[int, threading.Event] = {}
        if plan.tiers.disk and folder is None:
            raise UserError("loading.disk: needs loading.folder=FOLDER on local disk")
        self.slabs = {RAM: Slab.in_memory(slab_shape(plan, items, rank, RAM))}
        if folder is not None and plan.tiers.disk:
            shape = slab_shape(plan, items, rank, DISK)
            try:
                # The names of all ranks are needed, because ranks on the same node share the folder and must not remove
                # each other's caches.
                names = {r: _cache_name(items, slab_key(plan, items, r, DISK)) for r in range(plan.ranks)}
                _remove_stale(folder, names.values(), plan.tiers.disk)
                path = folder / names[rank]
                self.slabs[DISK] = Slab.on_disk(path, shape, keep=getattr(items, "lasting", False))
            except BaseException:
                self.close()
                raise

    def fetch(self, sample: int, scratch: memoryview) -> memoryview:
        """Return a packed sample: in place if it comes whole from a cache on this node, else in `scratch`.

        Args:
            sample: Number of the sample.
            scratch: Memory of the sample's size.

        Raises:
            UserError: Slow storage does not deliver the sample.
        """
        owner = int(self.plan.placement.owner[sample])
        self.counters.add(samples=1)
        if owner == NOBODY:
            return self._read(sample, scratch)
        kept = int(self.plan.placement.kept[sample])
        # If only the head is held, the rest is read from slow storage at every use.
        if kept < len(scratch):
            scratch[:kept] = self._held(owner, sample, scratch[:kept])
            self._read(sample, scratch[kept:], kept)
            return scratch
        return self._held(owner, sample, scratch)

    def _held(self, owner: int, sample: int, scratch: memoryview) -> memoryview:
        """Return the bytes that `owner` holds of a sample, and count them by tier."""
        if owner == self.rank:
            mine = self.own(sample, scratch)
            if mine is not scratch:
                tier = int(self.plan.placement.tier[sample])
                self.counters.add(**{"ram" if tier == RAM else "disk": len(mine)})
            return mine
        if sample not in self._copied:
            return self._from(owner, sample, scratch)
        # The plan lets this rank keep a copy. The first use fetches and stores it; `_once` prevents two threads from
        # doing so at the same time.
        with self._once(sample):
            found = self.slabs[RAM].get(sample)
            if found is not None:
                self.counters.add(ram=len(found))
                return found
            found = self._from(owner, sample, scratch)
            self.slabs[RAM].put(sample, found)
            return found

    def _from(self, owner: int, sample: int, scratch: memoryview) -> memoryview:
        """Return what another rank holds of a sample. If that fails, read slow storage, and count a fallback."""
        found = self.others.get(owner, sample, scratch)
        if found is not None:
            self.counters.add(peers=len(found))
            return found
        self.counters.add(fallback=len(scratch))
        return self._read(sample, scratch)

    def own(self, sample: int, scratch: memoryview) -> memoryview:
        """Return the bytes that this rank holds of a sample, for any rank that needs it.

        The first call reads them from slow storage into `scratch` and puts them into a cache. Later calls return them
        in place. The rank that uses the sample counts the use, so it is not counted here.
        """
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
        """Let one thread at a time fetch a sample, so that slow storage is asked only once."""
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
        """Fill `out` with a sample, or with its bytes from `start` on, from slow storage, and return it."""
        whole = len(out) == int(self.plan.sizes[sample])
        with self.noted(sample):
            if whole:
                self.items.read(sample, out)
            else:
                assert isinstance(self.items, Divisible)
                self.items.read_from(start, sample, out)
        self.counters.add(storage=int(self._stored[sample]) if whole else len(out))
        return out

    def close(self) -> None:
        """Free memory and files."""
        for slab in self.slabs.values():
            slab.close()


def slab_shape(plan: Plan, items: Items, rank: int, tier: int) -> Shape:
    """Return the samples that `rank` holds in `tier` and their places, the same on every rank that asks."""
    held = plan.placement.held(rank, tier)
    offset = plan.placement.offset[held]
    if tier == RAM:
        copied, places = plan.copies.of(rank)
        held, offset = np.append(held, copied), np.append(offset, places)
        order = np.argsort(held)
        held, offset = held[order], offset[order]
    kept = plan.placement.kept[held]  # for a copy this is its whole size, since only whole samples are copied
    return Shape(held, offset, kept, slab_key(plan, items, rank, tier))


def slab_key(plan: Plan, items: Items, rank: int, tier: int) -> int:
    """Return a 63-bit number that identifies the slab of these items, plan, rank and tier."""
    said = f"{items.fingerprint()} {plan.hash} {rank} {tier}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "big") >> 1


def _cache_name(items: Items, key: int) -> str:
    """Return the file name of a cache, which begins with a hash of the data."""
    data = hashlib.sha256(items.fingerprint().encode()).hexdigest()[:8]
    return f"ensemble_ml-{data}-{key:016x}.cache"


def _remove_stale(folder: Path, names: Collection[str], room: int) -> None:
    """Remove caches in `folder` that no process uses and that do not belong to the ranks of this run.

    Caches of the same data under another plan are removed at once. Caches of other data may be of use to another loader
    of the next run; they are removed, the oldest first, only while less than `room` bytes are free.
    """
    mine = next(iter(names)).rsplit("-", 1)[0]
    found: list[Path] = []
    with suppress(OSError):  # a folder that cannot be read is reported when the slab is made
        found = sorted(folder.glob("ensemble_ml-*.cache"), key=_last_written) if folder.is_dir() else []
    for path in found:
        if path.name in names:
            continue
        with suppress(OSError), open(path, "rb") as file:  # locked, owned by another user, or already gone
            if not path.name.startswith(f"{mine}-") and shutil.disk_usage(folder).free >= room:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            log.info("loading: %s of an earlier run is removed", path)


def _last_written(path: Path) -> float:
    """Return the time of the last write, or 0 for a file that is already gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
