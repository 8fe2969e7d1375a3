"""Forms of one thing that are raced by turns, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def take_turns(
    forms: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warm: int = 1,
    around: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of `repeats` calls of each form, after `warm` turns that make kernels, memory and connections.

    `around` is called before the clock starts and once more before it stops: a barrier, or a wait for a GPU.
    """
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(warm + repeats):
        for name, form in forms.items():
            around()
            began = time.perf_counter()
            form()
            around()
            if turn >= warm:
                seconds[name].append(time.perf_counter() - began)
    return seconds
