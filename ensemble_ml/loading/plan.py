"""Where every byte of a run comes from, decided before the first read: a pure function of seed, ranks and cache sizes.

With each sample used once an epoch, a cache of K samples over all ranks cannot save more than K reads an epoch, so no
policy reads less than F + (E-1)(F-K) samples from slow storage (F samples, E epochs). Holding any K samples for good,
each on one rank, reaches that bound: there is nothing to evict. A sample that is held is read from slow storage by its
holder alone, once; another rank that needs it asks the holder. Where samples can be read from any place on, the end of
a cache holds the head of one more, and the bound is reached to the byte (if a sample is left for each end). NoPFS
(Dryden et al. 2021, doi:10.1145/3458817.3476181) places rank by rank instead, and holds duplicates.

Axes: F samples, P ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ensemble_ml.config import Assign
from ensemble_ml.errors import UserError
from ensemble_ml.loading.copies import NOBODY, Copies, choose
from ensemble_ml.loading.order import Order

STORAGE, RAM, DISK = 0, 1, 2  # tiers; STORAGE stands for a sample that nobody holds


@dataclass(frozen=True)
class Room:
    """Room for samples on each rank, in bytes."""

    ram: int
    disk: int = 0

    def __post_init__(self) -> None:
        for name in ("ram", "disk"):
            if getattr(self, name) < 0:
                raise UserError(f"loading: room in {name} of {getattr(self, name)} bytes; 0 or more is needed")


@dataclass(frozen=True, eq=False)
class Placement:
    """Which rank holds each sample (NOBODY: none), in which tier, at which offset there, and how many bytes of it.

    Arrays (F,); `kept` is less than a sample's size where only its head is held.
    """

    owner: np.ndarray
    tier: np.ndarray
    offset: np.ndarray
    kept: np.ndarray

    def held(self, rank: int, tier: int) -> np.ndarray:
        """Samples that `rank` holds in `tier`, ascending."""
        return np.flatnonzero((self.owner == rank) & (self.tier == tier))


@dataclass(frozen=True, eq=False)
class Reads:
    """What one rank uses in one epoch, in its order of use: arrays (N,).

    `step` counts over the whole run, `position` is the place in the global batch.
    """

    step: np.ndarray
    position: np.ndarray
    sample: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """The reads of a run.

    Args:
        order: samples of every global batch.
        epochs: E.
        sizes: (F,) bytes of each sample in a cache.
        tiers: room on each rank.
        ranks: P, those that share the global batch.
        assign: `fixed` gives each rank its own slice of the global batch; `locality` gives a sample to its holder where
            the slices stay as long as they were. The global batch holds the same samples either way.
        stored: (F,) bytes of each sample on slow storage; None where they are those of a cache.
        heads: whether a sample can be read from any place on, so that its head alone may be held.

    Raises:
        UserError: sizes do not fit the order, or nothing is to be read.
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
        assert not self.heads or self.stored is None, "a head is as many bytes in a cache as on slow storage"
        if len(self.sizes) != self.order.n:
            raise UserError(f"plan: {len(self.sizes)} sizes for {self.order.n} samples; one each is needed")
        if self.ranks < 1 or self.epochs < 1 or self.order.n < 1:
            raise UserError(
                f"plan: {self.order.n} samples, {self.epochs} epochs, {self.ranks} ranks; 1 or more of each"
            )

    @property
    def hash(self) -> str:
        """16 hex digits: ranks with equal hashes have planned the same run."""
        digest = hashlib.sha256(np.ascontiguousarray(self.sizes, "<i8").tobytes())
        order = (self.order.seed, self.order.n, self.order.batch_size)
        digest.update(np.ascontiguousarray(self.on_storage, "<i8").tobytes())
        said = (order, self.epochs, self.tiers, self.ranks, self.assign.value, self.heads)
        digest.update(repr(said).encode())
        return digest.hexdigest()[:16]

    @property
    def on_storage(self) -> np.ndarray:
        """(F,) bytes of each sample on slow storage."""
        return np.asarray(self.sizes if self.stored is None else self.stored, np.int64)

    @property
    def holds_all(self) -> bool:
        """Whether every sample has a place in memory."""
        where = self.placement
        return bool(((where.tier == RAM) & (where.kept == self.sizes)).all())

    @cached_property
    def placement(self) -> Placement:
        """Who holds what, for the whole run."""
        return place(self.order, self.ranks, self.sizes, self.tiers, heads=self.heads)

    @cached_property
    def copies(self) -> Copies:
        """Samples of other ranks that each rank keeps besides, in memory that its own leave free."""
        where, sizes = self.placement, np.asarray(self.sizes, np.int64)
        own = np.where(where.tier == RAM, where.offset + where.kept, 0)
        used = np.zeros(self.ranks, np.int64)
        held = where.owner != NOBODY
        np.maximum.at(used, where.owner[held], own[held])
        epochs = self.epochs if self.ranks > 1 else 0
        whole = np.where(where.kept == sizes, where.owner, NOBODY)
        return choose(self.users, epochs, whole, sizes, used, self.tiers.ram)

    def reads(self, epoch: int, rank: int, *, start_step: int = 0) -> Reads:
        """What `rank` uses in `epoch`, from the global step `start_step` on."""
        samples, user = self.users(epoch)
        index = np.arange(len(samples))
        step = index // self.order.batch_size + epoch * self.order.steps_per_epoch
        mine = (user == rank) & (step >= start_step)
        return Reads(step[mine], index[mine] % self.order.batch_size, samples[mine])

    def users(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples of `epoch` in the order of the global batches, and the rank that uses each: (F,) both."""
        samples = self.order.epoch(epoch)
        index = np.arange(len(samples))
        return samples, self._ranks_of(samples, index // self.order.batch_size, index % self.order.batch_size)

    def run(self, rank: int, *, start_step: int = 0) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (step, positions, samples) of `rank` for every global step from `start_step` on, empty ones too."""
        for epoch in range(start_step // self.order.steps_per_epoch, self.epochs):
            reads = self.reads(epoch, rank, start_step=start_step)
            first = epoch * self.order.steps_per_epoch
            for step in range(max(first, start_step), first + self.order.steps_per_epoch):
                here = slice(*np.searchsorted(reads.step, [step, step + 1]))
                yield step, reads.position[here], reads.sample[here]

    def _ranks_of(self, samples: np.ndarray, step: np.ndarray, position: np.ndarray) -> np.ndarray:
        fixed = shares(self.order, self.ranks, step, position)
        if self.assign is Assign.fixed or self.ranks == 1:
            return fixed
        owner = self.placement.owner[samples]
        out = np.empty_like(fixed)
        bounds = np.append(np.flatnonzero(np.diff(step, prepend=-1)), len(step))
        for first, last in pairwise(bounds.tolist()):
            room = np.bincount(fixed[first:last], minlength=self.ranks)
            out[first:last] = to_holders(owner[first:last], room)
        return out

    def explain(self) -> Traffic:
        """Count what the run moves, without running it."""
        return Traffic.of(self)


@dataclass(frozen=True)
class Traffic:
    """Bytes of a whole run over all ranks, by where they come from.

    `bound` is the least that any policy reads with as much room; `storage` is above it by what does not divide: the
    ends of caches that are smaller than a sample. `held` and `total` are bytes as they lie on slow storage.
    """

    storage: int
    ram: int
    disk: int
    peers: int
    bound: int
    held: int
    total: int
    epochs: int
    steps: int  # an epoch

    @classmethod
    def of(cls, plan: Plan) -> Traffic:
        """Count the reads of `plan`."""
        where, stored = plan.placement, plan.on_storage
        saved = where.kept if plan.heads else np.where(where.owner != NOBODY, stored, 0)
        total, held = int(stored.sum()), int(saved.sum())
        room = plan.ranks * (plan.tiers.ram + plan.tiers.disk)
        moved = dict.fromkeys(("ram", "disk", "peers"), 0)
        there = np.zeros(max(1, len(plan.copies.keys)), bool)  # copies that have been made
        for epoch in range(plan.epochs):
            samples, user = plan.users(epoch)
            owner, tier, size = where.owner[samples], where.tier[samples], where.kept[samples]
            mine = (owner == user) & (epoch > 0)  # the first use of what a rank holds fills its cache
            for name, chosen in (("ram", mine & (tier == RAM)), ("disk", mine & (tier == DISK))):
                moved[name] += int(size[chosen].sum())
            copied, copy = plan.copies.find(user, samples)
            again = copied & there[copy]
            there[copy[copied]] = True
            moved["ram"] += int(size[again].sum())
            moved["peers"] += int(size[(owner != NOBODY) & (owner != user) & ~again].sum())
        repeats = plan.epochs - 1
        storage, bound = total + repeats * (total - held), total + repeats * max(0, total - room)
        return cls(
            storage=storage,
            bound=bound,
            held=held,
            total=total,
            epochs=plan.epochs,
            steps=plan.order.steps_per_epoch,
            **moved,
        )

    def seconds(
        self, *, storage_rate: float, compute: float, decode: float = 0.0, again: float | None = None
    ) -> tuple[float, str]:
        """Predicted length of the run, and what limits most of it: storage, compute or decoding.

        An epoch takes as long as the slowest of the three, because look-ahead is short beside an epoch; the batch that
        storage gives last has then to be decoded and computed.

        Args:
            storage_rate: bytes a second of slow storage, over all ranks.
            compute: seconds an epoch that the slowest rank computes.
            decode: seconds an epoch that it decodes, with all its threads.
            again: the same of the epochs after the first, where they differ.
        """
        lasts = {"storage": 0.0, "compute": 0.0, "decoding": 0.0}
        later, behind = decode if again is None else again, 0.0
        for count, read, decoding in ((1, self.total, decode), (self.epochs - 1, self.total - self.held, later)):
            limits = {"storage": read / storage_rate, "compute": compute, "decoding": decoding}
            slowest = max(limits, key=lambda name: limits[name])
            lasts[slowest] += count * limits[slowest]
            if slowest == "storage" and count:
                behind = (compute + decoding) / self.steps
        return sum(lasts.values()) + behind, max(lasts, key=lambda name: lasts[name])


def shares(order: Order, ranks: int, step: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Rank of each position of a global batch: slices as even as can be, in rank order."""
    last = (step + 1) % order.steps_per_epoch == 0
    length = np.where(last, order.n - (order.steps_per_epoch - 1) * order.batch_size, order.batch_size)
    return ((position + 1) * ranks - 1) // length


def to_holders(owner: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Give each sample of one batch to its holder while `room` (P,) lasts, the others to ranks with room, in order.

    Args:
        owner: (B,) holder of each sample, NOBODY for none.
        room: samples that each rank takes; they sum to B.
    """
    ranks = len(room)
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
    """Fill the caches without duplicates: each rank with what it uses first, spare room with what is left over.

    A sample goes to RAM before disk. Samples larger than the room that is left are passed over; with `heads`, what is
    left of each RAM in the end holds the head of one that nobody has.
    """
    count = order.n
    owner, tier = np.full(count, NOBODY, np.int32), np.full(count, STORAGE, np.uint8)
    offset = np.full(count, -1, np.int64)
    samples = order.epoch(0)
    index = np.arange(count)
    first_user = shares(order, ranks, index // order.batch_size, index % order.batch_size)
    sizes = np.asarray(sizes, np.int64)
    smallest = int(sizes.min())
    free = {(rank, which): size for which, size in ((RAM, tiers.ram), (DISK, tiers.disk)) for rank in range(ranks)}
    used = dict.fromkeys(free, 0)

    def fill(wanted: np.ndarray, rank: int, which: int) -> None:
        """Take samples in the order given while they fit."""
        room = free[rank, which]
        for _ in range(2):  # once more for smaller ones behind the first that did not fit
            ends = np.cumsum(sizes[wanted])
            fits = int(np.searchsorted(ends, room, side="right"))
            taken = wanted[:fits]
            if fits:
                offset[taken] = used[rank, which] + ends[:fits] - sizes[taken]
                owner[taken], tier[taken] = rank, which
                used[rank, which] += int(ends[fits - 1])
                room -= int(ends[fits - 1])
            if room < smallest:
                break
            wanted = wanted[fits:]
            wanted = wanted[sizes[wanted] <= room]
            if not len(wanted):
                break
        free[rank, which] = room

    by_rank = np.argsort(first_user, kind="stable")
    bounds = np.searchsorted(first_user[by_rank], np.arange(ranks + 1))
    for rank in range(ranks):
        mine = samples[by_rank[bounds[rank] : bounds[rank + 1]]]
        fill(mine, rank, RAM)
        fill(mine[owner[mine] == NOBODY], rank, DISK)
    for (rank, which), room in list(free.items()):
        if room and room >= smallest:  # few are: to search all samples for each of a thousand ranks takes long
            fill(samples[owner[samples] == NOBODY], rank, which)
    kept = np.where(owner != NOBODY, sizes, 0)
    left = np.flatnonzero(owner[samples] == NOBODY) if heads else index[:0]
    own = np.unique(first_user[left], return_index=True)[1]  # each rank's first, and enough for those that have none
    left = left[np.union1d(own, index[: min(ranks, len(left))])]
    for rank in sorted(range(ranks), key=lambda rank: -free[rank, RAM]):
        room = free[rank, RAM]
        if room and len(left):
            first = np.argmax(first_user[left] == rank)
            one, left = samples[left[first]], np.delete(left, first)
            owner[one], tier[one], offset[one], kept[one] = rank, RAM, used[rank, RAM], min(room, sizes[one])
    return Placement(owner, tier, offset, kept)
