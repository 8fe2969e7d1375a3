"""Count what a loader has moved from each tier, and how long its user has waited."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Counters:
    """The counters of a loader. Bytes of samples are counted by where they came from, in the size that they have there.

    Attributes:
        storage: Bytes read from slow storage, fallbacks included.
        ram: Bytes taken from the rank's own memory.
        disk: Bytes taken from the rank's own local disk.
        peers: Bytes taken from other ranks.
        fallback: Bytes that the plan expected from a peer or a cache, and that were read from slow storage instead.
        samples: Number of uses of samples.
        waited: Seconds for which the user of the loader waited for batches.
        lock: Lock for the threads that add to them.
    """

    storage: int = 0
    ram: int = 0
    disk: int = 0
    peers: int = 0
    fallback: int = 0
    samples: int = 0
    waited: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **more: float) -> None:
        """Add to some of the counters.

        Args:
            **more: Amounts to add, by the name of the counter.
        """
        with self.lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def snapshot(self) -> dict[str, float]:
        """Return all counters by name."""
        with self.lock:
            return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "lock"}
