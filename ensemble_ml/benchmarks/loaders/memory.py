"""Memory of a loader that runs for many epochs.

For every epoch, what the process takes beyond what it took before the loader was made: private and file pages, and the
shared memory of its cache, which counts whether it is mapped or not.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ensemble_ml.benchmarks.common import process
from ensemble_ml.benchmarks.common.status import process_bytes
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.machine import cores

_SAMPLE = 1 << 20


class Arrays:
    """Samples of a mebibyte, made as they are read."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.full(_SAMPLE // 4, sample, np.float32)


def taken(loader: ClairvoyantLoader | None = None) -> int:
    """Bytes of this process, and those of the loader's cache, which lie in shared memory and count once."""
    resident = process_bytes("VmRSS")
    if loader is None:
        return resident
    return resident - _mapped_cache() + sum(os.fstat(s.fd).st_blocks * 512 for s in loader.tiers.slabs.values())


def _mapped_cache() -> int:
    """Resident bytes of mapped caches: part of the process's, and of the cache's own."""
    found, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0]:
                inside = "memfd:ensemble_ml" in line
            elif inside and line.startswith("Rss:"):
                found += int(line.split()[1]) * 1024
    return found


def run(ram: int, epochs: int) -> dict[str, Any]:
    """Bytes taken at most in each epoch by a dataset a quarter larger than its cache; and the loader's own budget."""
    data = Arrays(5 * ram // (4 * _SAMPLE))
    with ClairvoyantLoader(Arrays(16), 4, 2, 0, ram=8 * _SAMPLE) as loader:  # threads, allocators and code are warm
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
    """The same of `run` in a process of its own."""
    found = process.run("loaders.memory", "run", cores=cores(), ram=ram, epochs=epochs)
    return found["taken"], found["budget"]
