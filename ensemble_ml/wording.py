"""Format dates (by ISO 8601), durations and lists as messages and files show them, and read such dates."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from itertools import islice

import numpy as np

SHORT_TEXT = 500  # characters of `dates_text` to show in an attribute or on a page, because tools print these in full
_SERIES = re.compile(r"R(\d+)/([^/]+)/PT(\d+)([HMS])")  # ISO 8601: repetitions, start, duration
_UNITS = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9}  # ns
_MOST = 10**7  # dates of a series that is read; a damaged file may state any number
_SHORTEST = 3  # fewest dates of a series; two single dates are as short and easier to read
_REACH = 16  # how many of the next dates are tried as the second one of a series, because series may alternate


def date_text(time: np.datetime64) -> str:
    """Return an init time by ISO 8601, as short as it can be without loss, e.g. 2001-01-31T12 or 2001-01-31T12:30."""
    shorter = (time.astype(f"datetime64[{unit}]") for unit in "hms")
    return str(next((short for short in shorter if short == time), time))


def dates_text(dates: Iterable[np.datetime64 | str]) -> str:
    """Return a set of dates as a short text, from which `dates_of` reads exactly the same set.

    Regular series are written as repeating intervals of ISO 8601, other dates singly, all joined by blanks:
    `R60/2001-01-07T00/PT48H 2001-06-01T12` is 60 dates, every other day from 7 January 2001, and one more.
    """
    every = np.unique(np.array(list(dates), "datetime64[ns]")).astype(np.int64).tolist()
    # A long series with a few gaps is shortest if it is split at the gaps, which a reach of 1 does. Series that
    # alternate (Mondays and Thursdays) are shortest one by one, which needs a longer reach. So both are tried.
    return min((" ".join(_parts(every, reach)) for reach in (1, _REACH)), key=len)


def dates_of(text: str) -> np.ndarray:
    """Return the dates (datetime64[ns], sorted, each once) of a text by `dates_text`, or of a plain list of ISO dates.

    Raises:
        ValueError: A word of the text is neither a series nor a date, a date lies before 1678 or beyond 2262, or a
            series has more than ten million dates.
    """
    found: list[int] = []
    for word in text.split():
        series = _SERIES.fullmatch(word)
        start, count, step = (series[2], int(series[1]), int(series[3]) * _UNITS[series[4]]) if series else (word, 1, 1)
        first = int(np.datetime64(start, "ns").astype(np.int64))
        # Years that nanoseconds cannot count would wrap round.
        if first // _UNITS["S"] != int(np.datetime64(start, "s").astype(np.int64)):
            raise ValueError(f"{word}: lies outside of the years 1678 to 2262")
        if count > _MOST or first + step * count > np.iinfo(np.int64).max:
            raise ValueError(f"{word} goes on for too long")
        found += (first + step * number for number in range(count))
    return np.unique(np.array(found, np.int64)).astype("datetime64[ns]")


def _parts(dates: Sequence[int], reach: int) -> list[str]:
    """Return the texts of series and single dates that together contain each of `dates` (ns, sorted) once."""
    left, parts = set(dates), []
    for place, first in enumerate(dates):
        if first in left:
            after = (dates[later] for later in range(place + 1, len(dates)) if dates[later] in left)
            series = max((_series(first, second, left) for second in islice(after, reach)), key=len, default=[first])
            if len(series) < _SHORTEST:
                series = [first]
            parts.append(_series_text(series))
            left.difference_update(series)
    return parts


def _series(first: int, second: int, dates: Container[int]) -> list[int]:
    """Return the dates (ns) from `first` on, at the step to `second`, as far as `dates` hold all of them.

    If the step is not a whole number of seconds, only the first date is returned.
    """
    step, series = second - first, [first]
    while step % _UNITS["S"] == 0 and series[-1] + step in dates:
        series.append(series[-1] + step)
    return series


def _series_text(series: Sequence[int]) -> str:
    """Return a series as a repeating interval of ISO 8601, or a single date by itself."""
    first = date_text(np.datetime64(series[0], "ns"))
    if len(series) == 1:
        return first
    step = series[1] - series[0]
    unit = next(unit for unit, size in _UNITS.items() if step % size == 0)
    return f"R{len(series)}/{first}/PT{step // _UNITS[unit]}{unit}"


def shortened(values: Sequence[object], most: int = 6) -> str:
    """Return the first `most` values as a text, followed by the number of the others, if there are any."""
    text = ", ".join(map(str, values[:most]))
    return text + (f" and {len(values) - most} more" if len(values) > most else "")


def duration(seconds: float) -> str:
    """Return a time in seconds for people to read, e.g. 40 s, 3 min, 5 h."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
