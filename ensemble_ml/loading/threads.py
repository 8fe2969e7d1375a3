"""Threads that work behind the user's back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress


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
