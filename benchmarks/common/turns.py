"""Race several forms of one thing by turns, so that other load on the machine affects all of them alike."""

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
    """Return the seconds of `repeats` calls of each form.

    Args:
        forms: the forms by name.
        repeats: number of calls that count.
        warm: number of turns before these, in which kernels, memory and connections are made.
        around: called before the clock starts and again before it stops: a barrier, or a wait for a GPU.
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
