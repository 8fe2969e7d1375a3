"""Simulate many ranks without processes: our plan beside the rule of NoPFS, on the same order of samples.

With NoPFS (Dryden et al. 2021, doi:10.1145/3458817.3476181, section 5) each rank keeps the samples that it will itself
use most often in the whole run, whatever the others keep. In this simulation a sample is read from slow storage until
the first of its holders has used it. From then on all ranks get it from a holder. That favours NoPFS, because nothing
is lost to timing.

Axes: E epochs, F samples, P ranks.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble_ml.config import Assign
from ensemble_ml.loading.order import Order
from ensemble_ml.loading.plan import NOBODY, Plan, Room


@dataclass(frozen=True)
class Job:
    """A run of P ranks, in samples. `cache` is the share of the dataset that all ranks hold together."""

    samples: int
    epochs: int
    ranks: int
    cache: float

    def plan(self, assign: Assign = Assign.fixed) -> Plan:
        """Return our loader's plan of the run, with samples of one byte and four samples a step for each rank.

        Args:
            assign: how samples are assigned to ranks.
        """
        room = Room(int(self.cache * self.samples / self.ranks))
        order = Order(0, self.samples, 4 * self.ranks)
        return Plan(order, self.epochs, np.ones(self.samples, np.int64), room, self.ranks, assign)


@dataclass(frozen=True)
class Simulated:
    """The reads of a simulated run.

    Attributes:
        storage: (E,) reads of slow storage in each epoch, as shares of the dataset.
        local: share of uses from a rank's own memory.
        duplicates: copies beyond the first, as a share of the dataset.
    """

    storage: np.ndarray
    local: float
    duplicates: float

    @property
    def reads(self) -> float:
        """Return the number of datasets read in the whole run."""
        return float(self.storage.sum())

    def seconds(self, storage: float, compute: float) -> float:
        """Return the length of the run.

        Args:
            storage: seconds that storage needs for the dataset.
            compute: seconds of computation in an epoch.
        """
        return float(np.maximum(self.storage * storage, compute).sum())


def nopfs(job: Job) -> Simulated:
    """Simulate the rule of NoPFS: each rank keeps what it uses most often, and among equals what it uses first.

    Args:
        job: the run.
    """
    plan = job.plan()
    users = np.empty((job.epochs, job.samples), np.int32)
    for epoch in range(job.epochs):
        samples, user = plan.users(epoch)
        users[epoch, samples] = user
    room = plan.tiers.ram
    holders = np.zeros(job.samples, np.int64)
    available = np.full(job.samples, job.epochs)  # epoch in which a holder first uses it
    local = 0
    for rank in range(job.ranks):
        mine = users == rank
        count, first = mine.sum(0), mine.argmax(0)
        kept = np.lexsort((first, -count))[:room]
        kept = kept[count[kept] > 0]
        holders[kept] += 1
        available[kept] = np.minimum(available[kept], first[kept])
        local += int((count[kept] - 1).sum())  # the first use fills the cache
    storage = np.array([(available >= epoch).mean() for epoch in range(job.epochs)])
    extra = np.maximum(holders - 1, 0).sum() / job.samples
    return Simulated(storage, local / (job.epochs * job.samples), float(extra))


def ours(job: Job, assign: Assign) -> Simulated:
    """Return the reads of our plan, from the same code as in a loader.

    Args:
        job: the run.
        assign: how samples are assigned to ranks.
    """
    plan = job.plan(assign)
    told = plan.explain()
    storage = np.full(job.epochs, 1 - told.held / told.total)
    storage[0] = 1.0
    assert round(storage.sum() * told.total) == told.storage
    return Simulated(storage, told.ram / (job.epochs * job.samples), 0.0)


def planning(samples: int, epochs: int, ranks: int) -> tuple[float, float]:
    """Return the seconds in which one rank plans all its reads and their sources, and the peak memory in GB.

    Args:
        samples: number of samples.
        epochs: number of epochs.
        ranks: number of ranks.
    """
    began = time.perf_counter()
    room = Room(samples // (2 * ranks) * 10**6)
    plan = Plan(Order(0, samples, 8 * ranks), epochs, np.full(samples, 10**6), room, ranks)
    rank, used, held = ranks // 3, 0, 0
    for epoch in range(epochs):
        reads = plan.reads(epoch, rank)
        used += len(reads.sample)
        held += int((plan.placement.owner[reads.sample] != NOBODY).sum())
    assert held < used
    return time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def table(samples: int, epochs: int, ranks: tuple[int, ...], caches: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return one row for each number of ranks and cache size.

    Storage takes ten times as long for an epoch as the computation.

    Args:
        samples: number of samples.
        epochs: number of epochs.
        ranks: numbers of ranks.
        caches: sizes of the cache, as shares of the dataset.
    """
    rows = []
    for count in ranks:
        for cache in caches:
            job = Job(samples, epochs, count, cache)
            theirs, fixed, local = nopfs(job), ours(job, Assign.fixed), ours(job, Assign.locality)
            rows.append(
                {
                    "ranks": count, "cache": cache, "NoPFS: datasets read": round(theirs.reads, 3),
                    "ours: datasets read": round(fixed.reads, 3), "NoPFS: held twice": round(theirs.duplicates, 3),
                    "NoPFS: from own memory": round(theirs.local, 3),
                    "ours, fixed: from own memory": round(fixed.local, 3),
                    "ours, locality: from own memory": round(local.local, 3),
                    "time, NoPFS over ours": round(theirs.seconds(10.0, 1.0) / fixed.seconds(10.0, 1.0), 3),
                }
            )  # fmt: skip
    return rows
