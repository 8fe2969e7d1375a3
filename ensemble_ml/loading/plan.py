"""Plan where every byte of a run comes from, before the first read.

The plan is a pure function of the seed, the number of ranks and the cache sizes, so all ranks compute the same one.

With each sample used once an epoch, a cache that holds K samples over all ranks can save at most K reads an epoch. No
policy can therefore read fewer samples from slow storage than

    F + (E - 1) (F - K)

    F    number of samples
    E    number of epochs
    K    number of samples that all ranks hold together

This bound is reached by holding any K samples for the whole run, each on exactly one rank. Nothing is ever evicted.
Only the rank that holds a sample reads it from slow storage, and only once; other ranks that need it ask the holder.
Where a sample can be read from any offset on, the space left at the end of each rank's memory holds the head of one
more sample. The bound is then reached to the byte, provided that enough samples remain to fill every such space. Memory
that is still free holds copies of other ranks' samples (`choose`), which saves transfers between ranks. A rank copies
samples in the order of their first use, and asks its peers for each copy only once.

NoPFS (Dryden et al. 2021, doi:10.1145/3458817.3476181) places samples for each rank separately, so several ranks may
hold the same one.

Axes: A uses, B samples of a global batch, F samples, N copies, P ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ensemble_ml.config import Assign
from ensemble_ml.errors import UserError
from ensemble_ml.loading.order import Order

STORAGE, RAM, DISK = 0, 1, 2  # tiers; STORAGE stands for a sample that no rank holds
NOBODY = -1  # in place of the owner of a sample that no rank holds


@dataclass(frozen=True)
class Room:
    """The cache capacity of each rank, in bytes of memory and of local disk.

    Raises:
        UserError: A capacity is negative.
    """

    ram: int
    disk: int = 0

    def __post_init__(self) -> None:
        for name in ("ram", "disk"):
            if getattr(self, name) < 0:
                raise UserError(f"loading: a capacity of {getattr(self, name)} bytes of {name}; 0 or more is needed")


@dataclass(frozen=True, eq=False)
class Placement:
    """The place of each sample in the caches: four arrays (F,).

    Attributes:
        owner: The rank that holds the sample; NOBODY where none does.
        tier: RAM or DISK; STORAGE where no rank holds it.
        offset: Byte at which the sample begins in its cache; -1 where no rank holds it.
        kept: Bytes of the sample that are held. This is less than its size where only the head is held.
    """

    owner: np.ndarray
    tier: np.ndarray
    offset: np.ndarray
    kept: np.ndarray

    def held(self, rank: int, tier: int) -> np.ndarray:
        """Return the samples that `rank` holds in `tier`, ascending."""
        return np.flatnonzero((self.owner == rank) & (self.tier == tier))


@dataclass(frozen=True, eq=False)
class Reads:
    """The uses of one rank in one epoch, in order: three arrays (A,).

    Attributes:
        step: Global step, counted over the whole run.
        position: Place in the global batch.
        sample: Number of the sample.
    """

    step: np.ndarray
    position: np.ndarray
    sample: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan of every read of a run.

    Args:
        order: Samples of every global batch.
        epochs: Number of epochs, E.
        sizes: (F,) bytes of each sample in a cache.
        tiers: Cache capacity of each rank.
        ranks: Number of ranks that share the global batch, P.
        assign: `fixed` gives each rank its own slice of the global batch. `locality` gives a sample to the rank that
            holds it, as long as every rank keeps its number of samples. The global batch holds the same samples either
            way.
        stored: (F,) bytes of each sample on slow storage; None where they equal `sizes`.
        heads: Whether a sample can be read from any offset on, so that a cache may hold its head alone.

    Raises:
        UserError: `sizes` has another length than the order, or there is no sample, epoch or rank.
    """

    order: Order
    epochs: int
    sizes: np.ndarray
    tiers: Room
    ranks: int = 1
    assign: Assign = Assign.fixed
    stored: np.ndarray | None = None
    heads: bool = False

    def __post_init__(self) -> None:
        assert not self.heads or self.stored is None, "heads need the same bytes in a cache as on slow storage"
        if len(self.sizes) != self.order.n:
            raise UserError(f"plan: {len(self.sizes)} sizes for {self.order.n} samples; give one for each sample")
        if self.ranks < 1 or self.epochs < 1 or self.order.n < 1:
            raise UserError(
                f"plan: {self.order.n} samples, {self.epochs} epochs, {self.ranks} ranks; 1 or more of each is needed"
            )

    @property
    def hash(self) -> str:
        """Return 16 hex digits that are equal on ranks that have planned the same run."""
        digest = hashlib.sha256(np.ascontiguousarray(self.sizes, "<i8").tobytes())
        order = (self.order.seed, self.order.n, self.order.batch_size)
        digest.update(np.ascontiguousarray(self.on_storage, "<i8").tobytes())
        settings = (order, self.epochs, self.tiers, self.ranks, self.assign.value, self.heads)
        digest.update(repr(settings).encode())
        return digest.hexdigest()[:16]

    @property
    def on_storage(self) -> np.ndarray:
        """Return the bytes of each sample on slow storage, (F,) int64."""
        return np.asarray(self.sizes if self.stored is None else self.stored, np.int64)

    @property
    def holds_all(self) -> bool:
        """Return whether every sample is held whole in the memory of some rank."""
        where = self.placement
        return bool(((where.tier == RAM) & (where.kept == self.sizes)).all())

    @cached_property
    def placement(self) -> Placement:
        """Return the place of each sample, which stays the same for the whole run."""
        return place(self.order, self.ranks, self.sizes, self.tiers, heads=self.heads)

    @cached_property
    def copies(self) -> Copies:
        """Return the samples of other ranks that each rank copies into the memory that its own samples leave free."""
        where, sizes = self.placement, np.asarray(self.sizes, np.int64)
        own = np.where(where.tier == RAM, where.offset + where.kept, 0)
        used = np.zeros(self.ranks, np.int64)
        held = where.owner != NOBODY
        np.maximum.at(used, where.owner[held], own[held])
        epochs = self.epochs if self.ranks > 1 else 0
        # Samples of which only a head is held are not copied, because every use reads slow storage anyway.
        whole = np.where(where.kept == sizes, where.owner, NOBODY)
        return choose(self.users, epochs, whole, sizes, used, self.tiers.ram)

    def reads(self, epoch: int, rank: int, *, start_step: int = 0) -> Reads:
        """Return the uses of a rank in an epoch (numbered from 0), from the global step `start_step` on."""
        samples, user = self.users(epoch)
        index = np.arange(len(samples))
        step = index // self.order.batch_size + epoch * self.order.steps_per_epoch
        mine = (user == rank) & (step >= start_step)
        return Reads(step[mine], index[mine] % self.order.batch_size, samples[mine])

    def users(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of an epoch (F,) in the order of the global batches, and the rank that uses each (F,)."""
        samples = self.order.epoch(epoch)
        index = np.arange(len(samples))
        return samples, self._ranks_of(samples, index // self.order.batch_size, index % self.order.batch_size)

    def run(self, rank: int, *, start_step: int = 0) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the samples of a rank for every global step from `start_step` on.

        Yields:
            Global step, positions in the global batch, and samples. Both arrays are empty where the rank has no sample.
        """
        for epoch in range(start_step // self.order.steps_per_epoch, self.epochs):
            reads = self.reads(epoch, rank, start_step=start_step)
            first = epoch * self.order.steps_per_epoch
            for step in range(max(first, start_step), first + self.order.steps_per_epoch):
                here = slice(*np.searchsorted(reads.step, [step, step + 1]))
                yield step, reads.position[here], reads.sample[here]

    def _ranks_of(self, samples: np.ndarray, step: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the rank that uses each sample of an epoch, (F,)."""
        fixed = shares(self.order, self.ranks, step, position)
        if self.assign is Assign.fixed or self.ranks == 1:
            return fixed
        # `locality` exchanges samples within a global batch only, so the batch stays the same. Each rank keeps as many
        # samples as in the fixed assignment, so the work stays balanced.
        owner = self.placement.owner[samples]
        out = np.empty_like(fixed)
        bounds = np.append(np.flatnonzero(np.diff(step, prepend=-1)), len(step))
        for first, last in pairwise(bounds.tolist()):
            room = np.bincount(fixed[first:last], minlength=self.ranks)
            out[first:last] = to_holders(owner[first:last], room)
        return out

    def explain(self) -> Traffic:
        """Count the bytes that the run will move, without running it."""
        return Traffic.of(self)


@dataclass(frozen=True)
class Traffic:
    """The bytes that a whole run moves over all ranks, by where they come from.

    Attributes:
        storage: Bytes read from slow storage. They exceed `bound` only if space at the ends of caches stays unused, or
            if samples take other sizes in a cache than on slow storage.
        ram: Bytes taken from the rank's own memory.
        disk: Bytes taken from the rank's own local disk.
        peers: Bytes taken from other ranks.
        bound: The fewest bytes that any policy with the same capacity reads from slow storage.
        held: Bytes on slow storage of the samples, or heads, that are held.
        total: Bytes on slow storage of all samples.
        epochs: Number of epochs.
        steps: Number of global steps in an epoch.
    """

    storage: int
    ram: int
    disk: int
    peers: int
    bound: int
    held: int
    total: int
    epochs: int
    steps: int

    @classmethod
    def of(cls, plan: Plan) -> Traffic:
        """Count the reads of `plan`."""
        where, stored = plan.placement, plan.on_storage
        saved = where.kept if plan.heads else np.where(where.owner != NOBODY, stored, 0)
        total, held = int(stored.sum()), int(saved.sum())
        room = plan.ranks * (plan.tiers.ram + plan.tiers.disk)
        moved = dict.fromkeys(("ram", "disk", "peers"), 0)
        copied_before = np.zeros(max(1, len(plan.copies.keys)), bool)  # copies that have been made
        for epoch in range(plan.epochs):
            samples, user = plan.users(epoch)
            owner, tier, size = where.owner[samples], where.tier[samples], where.kept[samples]
            mine = (owner == user) & (epoch > 0)  # the first use of what a rank holds fills its cache
            moved["ram"] += int(size[mine & (tier == RAM)].sum())
            moved["disk"] += int(size[mine & (tier == DISK)].sum())
            # The first use of a copy still comes from its owner; only later uses find it in memory.
            copied, copy = plan.copies.find(user, samples)
            again = copied & copied_before[copy]
            copied_before[copy[copied]] = True
            moved["ram"] += int(size[again].sum())
            moved["peers"] += int(size[(owner != NOBODY) & (owner != user) & ~again].sum())
        repeats = plan.epochs - 1
        storage, bound = total + repeats * (total - held), total + repeats * max(0, total - room)
        steps = plan.order.steps_per_epoch
        return cls(storage, **moved, bound=bound, held=held, total=total, epochs=plan.epochs, steps=steps)

    def seconds(
        self, *, storage_rate: float, compute: float, decode: float = 0.0, again: float | None = None
    ) -> tuple[float, str]:
        """Predict how long the run takes, and what limits it: storage, compute or decoding.

        An epoch takes as long as the slowest of the three, because the look-ahead is short compared with an epoch. If
        storage is the slowest, the last batch that it delivers must still be decoded and computed, so the time of one
        step is added.

        Args:
            storage_rate: Speed of slow storage over all ranks, in bytes per second.
            compute: Seconds per epoch that the slowest rank computes.
            decode: Seconds per epoch that the slowest rank decodes, with all its threads.
            again: The value of `decode` for each later epoch; None if it is the same.

        Returns:
            Seconds of the whole run, and the name of the limit that accounts for most of them.
        """
        seconds = {"storage": 0.0, "compute": 0.0, "decoding": 0.0}
        later, behind = decode if again is None else again, 0.0
        for count, read, decoding in ((1, self.total, decode), (self.epochs - 1, self.total - self.held, later)):
            limits = {"storage": read / storage_rate, "compute": compute, "decoding": decoding}
            slowest = max(limits, key=lambda name: limits[name])
            seconds[slowest] += count * limits[slowest]
            if slowest == "storage" and count:
                behind = (compute + decoding) / self.steps
        return sum(seconds.values()) + behind, max(seconds, key=lambda name: seconds[name])


def shares(order: Order, ranks: int, step: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the rank that uses each position of a global batch.

    A global batch is cut into slices in rank order, whose lengths differ by at most one. `step`, counted over the whole
    run, and `position`, in the global batch, have the same shape, as has the result.
    """
    last = (step + 1) % order.steps_per_epoch == 0
    length = np.where(last, order.n - (order.steps_per_epoch - 1) * order.batch_size, order.batch_size)
    return ((position + 1) * ranks - 1) // length


def to_holders(owner: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Assign each sample of one batch to the rank that holds it, while that rank has capacity.

    The remaining samples go to the ranks that still have capacity, in order.

    Args:
        owner: (B,) rank that holds each sample, NOBODY for none.
        room: (P,) number of samples that each rank takes; they sum to B.

    Returns:
        (B,) rank that uses each sample.
    """
    ranks = len(room)
    # Number the samples of each holder in batch order (`nth`), without a loop over samples. Those whose number is below
    # the holder's capacity stay with it.
    keys = np.where(owner == NOBODY, ranks, owner)
    by_owner = np.argsort(keys, kind="stable")
    sorted_keys = keys[by_owner]
    nth = np.arange(len(owner)) - np.searchsorted(sorted_keys, sorted_keys)
    stays = (sorted_keys < ranks) & (nth < np.append(room, 0)[sorted_keys])
    out = np.full(len(owner), NOBODY)
    out[by_owner[stays]] = sorted_keys[stays]
    left = room - np.bincount(out[out != NOBODY], minlength=ranks)
    out[out == NOBODY] = np.repeat(np.arange(ranks), left)
    return out


def place(order: Order, ranks: int, sizes: np.ndarray, tiers: Room, *, heads: bool = False) -> Placement:
    """Fill the caches without duplicates.

    Each rank holds the samples of its slices of the global batches of the first epoch (`shares`). Capacity that is left
    then goes to samples that no rank holds yet. Memory is filled before disk. `sizes` (F,) are in bytes, and a sample
    that is larger than the space left is skipped. With `heads`, the space left at the end of each memory holds the head
    of a sample that no rank holds.
    """
    samples, index = order.epoch(0), np.arange(order.n)
    first_user = shares(order, ranks, index // order.batch_size, index % order.batch_size)
    caches = _Caches(ranks, np.asarray(sizes, np.int64), tiers)
    # Group the samples by their first user in one sort, instead of a search for each rank.
    by_rank = np.argsort(first_user, kind="stable")
    bounds = np.searchsorted(first_user[by_rank], np.arange(ranks + 1))
    for rank in range(ranks):
        mine = samples[by_rank[bounds[rank] : bounds[rank + 1]]]
        caches.fill(mine, rank, RAM)
        caches.fill(caches.not_held(mine), rank, DISK)
    # Full caches are skipped, because searching all samples for each of a thousand ranks would take long.
    for rank, which in caches.with_room():
        caches.fill(caches.not_held(samples), rank, which)
    if heads:
        caches.fill_heads(samples, first_user)
    return caches.placement


class _Caches:
    """The caches of all ranks while they are filled. `placement` has the place of each sample that has one so far."""

    def __init__(self, ranks: int, sizes: np.ndarray, tiers: Room):
        count = len(sizes)
        self.placement = Placement(
            owner=np.full(count, NOBODY, np.int32),
            tier=np.full(count, STORAGE, np.uint8),
            offset=np.full(count, -1, np.int64),
            kept=np.zeros(count, np.int64),
        )
        self._ranks, self._sizes, self._smallest = ranks, sizes, int(sizes.min())
        capacities = (RAM, tiers.ram), (DISK, tiers.disk)
        self._free = {(rank, which): size for which, size in capacities for rank in range(ranks)}
        self._used = dict.fromkeys(self._free, 0)

    def not_held(self, samples: np.ndarray) -> np.ndarray:
        """Return those of `samples` that no rank holds, in the order given."""
        return samples[self.placement.owner[samples] == NOBODY]

    def with_room(self) -> list[tuple[int, int]]:
        """Return rank and tier of the caches that have room for the smallest sample."""
        return [where for where, room in self._free.items() if room and room >= self._smallest]

    def fill(self, wanted: np.ndarray, rank: int, which: int) -> None:
        """Place samples in a cache, in the order given, as long as they fit."""
        for _ in range(2):  # the second pass takes smaller samples that follow the first one that did not fit
            ends = np.cumsum(self._sizes[wanted])
            fits = int(np.searchsorted(ends, self._free[rank, which], side="right"))
            if fits:
                taken = wanted[:fits]
                begin = self._used[rank, which] + ends[:fits] - self._sizes[taken]
                self._put(taken, rank, which, begin, self._sizes[taken])
                self._used[rank, which] += int(ends[fits - 1])
                self._free[rank, which] -= int(ends[fits - 1])
            if self._free[rank, which] < self._smallest:
                return
            wanted = wanted[fits:]
            wanted = wanted[self._sizes[wanted] <= self._free[rank, which]]

    def fill_heads(self, samples: np.ndarray, first_user: np.ndarray) -> None:
        """Fill the ends of the memories with heads of samples that no rank holds, one for each rank.

        A rank prefers a sample that it uses first itself. It then reads the head from storage for its own use.
        `samples` (F,) are in the order of the first epoch, and `first_user` (F,) are the ranks that use them first.
        """
        left = np.flatnonzero(self.placement.owner[samples] == NOBODY)
        # The candidates are the first such sample of every rank, and enough others for ranks that have none.
        own = np.unique(first_user[left], return_index=True)[1]
        left = left[np.union1d(own, np.arange(min(self._ranks, len(left))))]
        # The largest space comes first, because it saves the most bytes.
        for rank in sorted(range(self._ranks), key=lambda rank: -self._free[rank, RAM]):
            room = self._free[rank, RAM]
            if room and len(left):
                first = np.argmax(first_user[left] == rank)
                one, left = samples[left[first]], np.delete(left, first)
                self._put(one, rank, RAM, self._used[rank, RAM], min(room, self._sizes[one]))

    def _put(self, samples: Any, rank: int, which: int, offset: Any, kept: Any) -> None:
        """Record that a rank holds samples in a tier, at `offset`, with `kept` bytes of each."""
        held = self.placement
        held.owner[samples], held.tier[samples] = rank, which
        held.offset[samples], held.kept[samples] = offset, kept


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies of other ranks' samples that all ranks keep.

    Attributes:
        keys: (N,) rank * F + sample of each copy, ascending.
        offset: (N,) byte at which each copy begins in the memory of its rank.
        count: Number of samples, F.
    """

    keys: np.ndarray
    offset: np.ndarray
    count: int

    def of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples that `rank` copies, (n,) ascending, and their offsets, (n,)."""
        here = slice(*np.searchsorted(self.keys, [rank * self.count, (rank + 1) * self.count]))
        return self.keys[here] - rank * self.count, self.offset[here]

    def find(self, user: np.ndarray, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the uses, given by rank (A,) and sample (A,), whose rank keeps a copy of the sample.

        Returns:
            (A,) bool, whether the user keeps a copy, and (A,) the place of the copy in `keys` (0 where there is none).
        """
        wanted = user.astype(np.int64) * self.count + sample
        place = np.searchsorted(self.keys, wanted)
        place[place == len(self.keys)] = 0
        found = self.keys[place] == wanted if len(self.keys) else np.zeros(len(wanted), bool)
        return found, np.where(found, place, 0)


def choose(
    users: Callable[[int], tuple[np.ndarray, np.ndarray]],
    epochs: int,
    owner: np.ndarray,
    sizes: np.ndarray,
    used: np.ndarray,
    room: int,
) -> Copies:
    """Fill the memory that is left on each rank with samples of other ranks, in the order of their first use.

    Args:
        users: Function from an epoch to its samples (F,) in the order of use, and the rank that uses each (F,).
        epochs: Number of epochs.
        owner: (F,) rank that holds each sample; `NOBODY` also for samples that must not be copied.
        sizes: (F,) bytes of each sample.
        used: (P,) bytes of each rank's memory that its own samples take.
        room: Bytes of memory of each rank.
    """
    count, sizes = len(owner), np.asarray(sizes, np.int64)
    end, keys, offsets = used.astype(np.int64).copy(), np.empty(0, np.int64), np.empty(0, np.int64)
    for epoch in range(epochs):
        if not len(sizes) or (room - end).max() < sizes.min():
            break
        samples, user = users(epoch)
        other = (owner[samples] != NOBODY) & (owner[samples] != user)
        samples, user = samples[other], user[other]
        key = user.astype(np.int64) * count + samples
        new = ~np.isin(key, keys)
        # Sort by rank and keep the order of use within a rank. A cumulative sum then gives the offset of each copy
        # without a loop over samples.
        order = np.argsort(user[new], kind="stable")
        samples, user, key = samples[new][order], user[new][order], key[new][order]
        total = np.cumsum(sizes[samples])
        first = np.searchsorted(user, user)  # index of the first use of the same rank
        start = end[user] + total - sizes[samples] - (total - sizes[samples])[first]
        fits = start + sizes[samples] <= room  # a prefix of each rank's uses, because offsets ascend
        keys, offsets = np.append(keys, key[fits]), np.append(offsets, start[fits])
        np.maximum.at(end, user[fits], (start + sizes[samples])[fits])
    order = np.argsort(keys)
    return Copies(keys[order], offsets[order], count)
