"""What a loader has moved, by tier, and how long its user waited."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Bytes of samples, as storage or caches hold them, by where they came from; `fallback`: a peer should have sent.

    `samples` counts uses; `waited` are the seconds in which a batch was asked for and not ready.
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
        """Add to some of the counters."""
        with self.lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def snapshot(self) -> dict[str, float]:
        """All counters by name."""
        with self.lock:
            return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "lock"}
