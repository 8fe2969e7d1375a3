"""Threads that work behind the user's back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that a loader's end may wait for storage: a job that is told to stop has half a minute


def start(count: int, work: Callable[[], None]) -> list[threading.Thread]:
    """Run `work` on `count` threads that end with the process.

    They are of the scheduler's batch class: one that is woken does not take the core from another thread. When the user
    asks for a batch he frees the buffer of the last one, which wakes a thread; of the normal class, that thread and
    those it woke kept him from his core for 4 ms again and again (Linux 6.18, two ranks of four threads on two cores:
    2 to 3 % of a step of 40 ms, though the batch was ready; so 0.5 %). Their share of the cores is the same.
    """

    def run() -> None:
        with suppress(AttributeError, OSError):  # another system, or a container that forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        work()

    threads = [threading.Thread(target=run, name=f"loading-{number}", daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def ended(threads: Iterable[threading.Thread], slowest: Callable[[], tuple[str, float] | None] = lambda: None) -> bool:
    """Wait for threads that have been told to stop; False where some do not, because storage does not answer: they
    end with the process, and what they write to has to stay until then.

    `slowest`: what has been read for longest, and for how many seconds, where that is known.
    """
    limit = time.monotonic() + PATIENCE
    left = []
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
        left += [thread] * thread.is_alive()
    if left:
        slow = slowest()
        why = f": {slow[0]} has been read for {slow[1]:.0f} s without an answer" if slow else ""
        log.warning("loading: %d threads are not waited for%s", len(left), why)
    return not left
