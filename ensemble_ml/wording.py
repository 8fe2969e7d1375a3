"""Dates, durations and lists as messages and files show them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def hour_text(time: np.datetime64) -> str:
    """A start or valid time, e.g. 2001-01-31T12."""
    return str(time.astype("datetime64[h]"))


def shortened(values: Sequence[object], most: int = 6) -> str:
    """The first ones, and how many more there are."""
    text = ", ".join(map(str, values[:most]))
    return text + (f" and {len(values) - most} more" if len(values) > most else "")


def duration(seconds: float) -> str:
    """Return a time to read, e.g. 40 s, 3 min, 5 h."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
