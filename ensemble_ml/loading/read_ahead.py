"""Make items in a thread before they are used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


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
