"""Measure the peak of the memory that torch's allocator of a processor gives in a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes that torch's allocator gave at once in a call, beyond those from before it.

    Threads of gloo let go of some copies that a collective made, and torch's profiler does not see them do it. Such a
    copy counts as long as the operation that made it.

    Args:
        call: what allocates. If it sends something, it waits for that at once.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    tree = found.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    changes: list[tuple[int, int]] = []
    alive: dict[int, Any] = {}
    for event in sorted(_allocations(tree), key=lambda e: e.start_time_ns):
        where, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        changes.append((event.start_time_ns, size))
        before = alive.pop(where, None)
        if size > 0:
            alive[where] = event
            if before is not None:  # another thread let go of it, since its place was given again
                changes.append((_end(before), -before.extra_fields.alloc_size))
    changes += [(_end(event), -event.extra_fields.alloc_size) for event in alive.values() if _sender(event)]
    now = most = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        now += size
        most = max(most, now)
    return most


def _allocations(events: list[Any]) -> Iterator[Any]:
    """Yield the allocations and releases among events and those inside them."""
    for event in events:
        if event.name == "[memory]":
            yield event
        yield from _allocations(event.children)


def _sender(event: Any) -> Any:
    """Return the collective that an event happened in; None if there is none."""
    while event is not None and not event.name.startswith("c10d::"):
        event = event.parent
    return event


def _end(event: Any) -> int:
    """Return when a copy that a collective made is not needed any more, in ns."""
    sender = _sender(event)
    return int((sender or event).end_time_ns)
