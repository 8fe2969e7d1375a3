"""Run the background threads of the loaders: start and end them, hand out tasks, keep errors, and note what they read.

`Workers` is the base of the loaders' engines, and `Reading` that of their sources. `Scratch` is memory of each thread.
`read_ahead` makes items of any kind in a thread before they are used.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ensemble_ml.errors import UserError

log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that a loader's end may wait for storage; a job that must stop has half a minute in all
_STALL = 30.0  # seconds of waiting after which the log names what has been read for longest
T = TypeVar("T")


class Workers:
    """A group of threads that carry out the tasks of a loader; the base of `clairvoyant.Engine` and `planned.Engine`.

    A subclass defines `_list_tasks` and `_work`, and starts the threads by `_start`. What threads share, they
    change under the lock of `_change`, and then they notify the threads that wait for it.

    Args:
        source: Source from which the threads read.
    """

    def __init__(self, source: Reading):
        self._source = source
        self._change = threading.Condition()
        self._ended, self._stopped = False, False
        self._error: BaseException | None = None
        self._tasks, self._take = self._list_tasks(), threading.Lock()
        self._workers: list[threading.Thread] = []
        self._left: bool | None = None  # whether threads still run after `close`; None before it

    def _list_tasks(self) -> Iterator[tuple[Any, ...]]:
        """Yield the tasks, and wait while enough batches are ahead.

        This must be a generator: the constructor calls it before the subclass has set its own attributes.
        """
        raise NotImplementedError

    def _work(self) -> None:
        """Carry out tasks until they end."""
        raise NotImplementedError

    def _start(self, count: int) -> None:
        """Start the threads. An error of one of them is kept for the user's thread."""

        def run() -> None:
            """Work, and keep the first error."""
            try:
                self._work()
            except BaseException as error:
                with self._change:
                    self._error = self._error or error
                    self._change.notify_all()

        self._workers = start(count, run)

    def _next_task(self) -> Any:
        """Return the next task, or None after the last one."""
        # Only one thread at a time advances the generator of tasks. It may wait there for a free buffer.
        with self._take:
            return next(self._tasks, None)

    def _end_tasks(self) -> None:
        """Note that no task is left."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _wait(self) -> None:
        """Wait for a change. If none comes within `_STALL` seconds, log what has been read for longest, and return.

        Raises:
            UserError: the threads were closed.
        """
        if self._stopped:
            raise UserError("loading: no batch after close; make another loader")
        if not self._change.wait(_STALL) and (slow := self._source.slowest()):
            log.warning("loading: %s has been read for %.0f s without an answer", *slow)

    def close(self) -> bool:
        """End the threads, and return False if some still wait for storage. Further calls return the same."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        if self._left is None:
            self._left = not ended(self._workers, self._source.slowest)
        return not self._left


def start(count: int, work: Callable[[], None]) -> list[threading.Thread]:
    """Run `work` on `count` daemon threads, which end with the process.

    Where the system allows it, the threads belong to the scheduler's batch class, so a thread that wakes up does not
    take the core from another thread. When the user requests a batch, the buffer of the last one is freed, which wakes
    a thread. In the normal class that thread, and those that it woke in turn, repeatedly kept the user's thread from
    its core for 4 ms. On Linux 6.18, with two ranks of four threads on two cores, this took 2 to 3 % of a step of 40
    ms, although the batch was ready. With the batch class it took 0.5 %. The threads' share of the cores is the same in
    both classes.
    """

    def run() -> None:
        """Enter the batch class where the system allows it, then work."""
        with suppress(AttributeError, OSError):  # another system, or a container that forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        work()

    threads = [threading.Thread(target=run, name=f"loading-{number}", daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def ended(threads: Iterable[threading.Thread], slowest: Callable[[], tuple[str, float] | None] = lambda: None) -> bool:
    """Wait for threads that were asked to stop, for at most `PATIENCE` seconds.

    A thread may be unable to stop because storage does not answer. It then ends with the process, and the memory to
    which it writes must stay until then. `slowest` returns what has been read for longest, and for how many seconds;
    None if nothing is being read.

    Returns:
        Whether all threads have ended.
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


class Reading:
    """A source whose reads of storage are noted while they are under way; the base of `Tiers` and `UnitCache`.

    `name` returns the name of a sample or unit, given by its number, for messages.
    """

    def __init__(self, name: Callable[[int], str]):
        self._name = name
        self._under_way: dict[int, tuple[int, float]] = {}  # thread -> what it reads and since when

    @contextmanager
    def noted(self, number: int) -> Iterator[None]:
        """Note that this thread reads a sample or unit within this context."""
        me = threading.get_ident()
        self._under_way[me] = number, time.monotonic()
        try:
            yield
        finally:
            del self._under_way[me]

    def slowest(self) -> tuple[str, float] | None:
        """Return name and seconds of the read that has lasted longest so far; None if none is under way."""
        under_way = sorted(self._under_way.copy().values(), key=lambda read: read[1])
        return (self._name(under_way[0][0]), time.monotonic() - under_way[0][1]) if under_way else None


class Scratch(threading.local):
    """A buffer for each thread, which is enlarged where it is too small."""

    held = bytearray()

    def take(self, size: int) -> memoryview:
        """Return `size` bytes, which belong to this thread until it calls again."""
        if len(self.held) < size:
            self.held = bytearray(size)
        return memoryview(self.held)[:size]


def read_ahead(items: Iterable[T], depth: int) -> Iterator[T]:
    """Yield `items` in order, while a thread makes the next ones.

    An error in the thread is raised here. If the loop is left early, this function waits for the end of the thread.

    Args:
        items: Items to yield.
        depth: Number of items that the queue holds; while it is full, the thread makes one more. 0 makes each item when
            it is requested, without a thread.
    """
    if depth < 1:
        yield from items
        return
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stop = threading.Event()
    thread = threading.Thread(target=_fill, args=(items, ready, stop), name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            good, item = ready.get()
            if not good:
                if item is not None:
                    raise item
                return
            yield item
    finally:
        # This also runs if the user leaves the loop. Without `stop` the thread would wait at a full queue forever.
        stop.set()
        thread.join()


def _fill(items: Iterable[Any], ready: queue.Queue[tuple[bool, Any]], stop: threading.Event) -> None:
    """Put the items, then an end mark or the error, into the queue until `stop` is set."""

    def put(good: bool, item: Any) -> None:
        """Put an item into the queue, waiting while it is full, unless `stop` is set."""
        while not stop.is_set():
            try:
                # The wait is short, so that the thread ends soon after `stop` is set.
                return ready.put((good, item), timeout=0.1)
            except queue.Full:
                continue

    try:
        for item in items:
            put(True, item)
            if stop.is_set():
                return
        put(False, None)
    except BaseException as error:
        put(False, error)
