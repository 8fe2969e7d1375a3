"""Measure the memory of a loader that runs for many epochs.

For every epoch, this is the memory of the process beyond that before the loader was made: private and file pages, and
the shared memory of its cache, which counts whether it is mapped or not.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from benchmarks.common import process
from benchmarks.common.status import process_bytes
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.machine import cores

_SAMPLE = 1 << 20


class Arrays:
    """Samples of a mebibyte, which are made when they are read."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.full(_SAMPLE // 4, sample, np.float32)


def taken(loader: ClairvoyantLoader | None = None) -> int:
    """Return the bytes of this process and of the loader's cache, which is shared memory and counts once.

    Args:
        loader: the loader, or None before there is one.
    """
    resident = process_bytes("VmRSS")
    if loader is None:
        return resident
    return resident - _mapped_cache() + sum(os.fstat(s.fd).st_blocks * 512 for s in loader.tiers.slabs.values())


def _mapped_cache() -> int:
    """Return the resident bytes of mapped caches, which are counted both for the process and for the cache."""
    found, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0]:
                inside = "memfd:ensemble_ml" in line
            elif inside and line.startswith("Rss:"):
                found += int(line.split()[1]) * 1024
    return found


def run(ram: int, epochs: int) -> dict[str, Any]:
    """Return the largest memory in each epoch and the loader's own budget.

    The dataset is a quarter larger than the cache.

    Args:
        ram: bytes of the cache.
        epochs: number of epochs.
    """
    data = Arrays(5 * ram // (4 * _SAMPLE))
    with ClairvoyantLoader(Arrays(16), 4, 2, 0, ram=8 * _SAMPLE) as loader:  # warms up threads, allocators and code
        for _ in loader:
            pass
    before, found = taken(), [0] * epochs
    with ClairvoyantLoader(data, 4, epochs, 0, ram=ram) as loader:
        for batch in loader:
            epoch = batch.step // loader.plan.order.steps_per_epoch
            if batch.step % 16 == 0 or (batch.step + 1) % loader.plan.order.steps_per_epoch == 0:
                found[epoch] = max(found[epoch], taken(loader) - before)
        return {"taken": found, "budget": loader.memory}


def measure(ram: int, epochs: int) -> tuple[list[int], int]:
    """Return the result of `run` from a new process.

    Args:
        ram: bytes of the cache.
        epochs: number of epochs.
    """
    found = process.run("loading.memory", "run", cores=cores(), ram=ram, epochs=epochs)
    return found["taken"], found["budget"]
