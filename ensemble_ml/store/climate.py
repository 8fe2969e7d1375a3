"""The model climate: what the ensemble forecasts at this time of the year, from other years, point by point.

Quantiles over all members of the start dates within some days of the calendar date, in every year but the forecast's
own; the extreme forecast index (EFI) compares a forecast with them. A start date belongs to the year whose anniversary
of the calendar date is nearest, so that the end of December counts with the following January, and never for it. The
anniversary of 29 February is the 28th in other years.

Quantiles are computed when they are asked for, one lead and variable at a time and in blocks of rows, so that memory
is bounded; they are kept in a folder beside the store (NAME.climate), each in a file that appears by rename and is
keyed by the store's contents and the settings. A store that cannot be written beside computes them anew each time.

Axes: Q probability, N values (dates times members), T lead, V pressure variable, S surface variable, Z level,
Y latitude, X longitude.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.store.source import Fields, Part, Selection, Source, zero_by_nature

log = logging.getLogger(__name__)

DAYS = 9
PROBABILITIES = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1)
_MEMORY = 512 * 2**20  # bytes of values held at a time, where a block of 16 rows is not larger than that
_BLOCK = 16  # rows of a chunk of the store; fewer would be read again and again


class ModelClimate:
    """The model climate of a source's forecasts.

    Args:
        source: a tensor store (or an archive, whose quantiles are not kept).
        days: how far from the calendar date a start date may lie.
        probabilities: those of the quantiles, ascending within [0, 1].
        folder: where quantiles are kept; by default beside the store, and nowhere for an archive.
        memory: bytes of values held at a time.

    Raises:
        UserError: the source has start dates of one year only, or probabilities are not ascending within [0, 1].
    """

    def __init__(
        self,
        source: Source,
        *,
        days: int = DAYS,
        probabilities: Sequence[float] = PROBABILITIES,
        folder: str | Path | None = None,
        memory: int = _MEMORY,
    ):
        levels = np.asarray(probabilities, np.float64)
        if not len(levels) or levels[0] < 0 or levels[-1] > 1 or (np.diff(levels) <= 0).any():
            raise UserError(f"climate probabilities={list(probabilities)}: give ascending numbers from 0 to 1")
        self.source, self.days, self.probabilities, self._memory = source, days, levels, memory
        years = np.unique(source.layout.init_time.astype("datetime64[Y]"))
        if len(years) < 2:
            only = str(years[0]) if len(years) else "none"
            raise UserError(
                f"{source.path}: a model climate needs start dates of two years or more; it has {only} alone"
            )
        self._folder = self._own_folder(folder)

    def _own_folder(self, folder: str | Path | None) -> Path | None:
        if folder is None and not Path(self.source.path).joinpath("zarr.json").is_file():
            return None
        beside = Path(folder) if folder is not None else Path(str(Path(self.source.path).absolute()) + ".climate")
        settings = f"{self.source.fingerprint()} {self.days} {self.probabilities.tolist()}"
        return beside / hashlib.sha256(settings.encode()).hexdigest()[:16]

    def dates(self, date: int) -> np.ndarray:
        """Indices of the start dates that make the climate of the start date `date`.

        Raises:
            UserError: there is none in other years.
        """
        times = self.source.layout.init_time
        found = np.flatnonzero(same_season(times, times[date], self.days))
        if not len(found):
            raise UserError(
                f"{self.source.path}: no start date of another year lies within {self.days} days of "
                f"{np.datetime_as_string(times[date], 'D')}'s calendar date; widen the window of the model climate"
            )
        return found

    def quantiles(self, date: int, selection: Selection = Selection()) -> Fields:  # noqa: B008 - frozen
        """Quantiles for the start date `date`: pressure (Q, T, V, Z, Y, X) and surface (Q, T, S, Y, X) float32.

        NaN where no value is; `selection.realization` is not used. Interpolated linearly between order statistics
        (type 7 of Hyndman & Fan 1996).

        Raises:
            UserError: there is no start date of another year in the window, or something selected is not there.
        """
        lay = self.source.layout
        leads = lay.lead_hours if selection.lead_hours is None else selection.lead_hours
        names = lay.variables if selection.variables is None else selection.variables
        ground = lay.surface if selection.surface is None else selection.surface
        heights = lay.levels if selection.levels is None else selection.levels
        rows = slice(*(selection.rows or (0, lay.grid.shape[0])))
        depth = [self._position("level (hPa)", level, lay.levels) for level in heights] if names else []
        shape = len(self.probabilities), len(leads)
        points = rows.stop - rows.start, lay.grid.shape[1]
        pressure = np.empty((*shape, len(names), len(heights), *points), np.float32)
        surface = np.empty((*shape, len(ground), *points), np.float32)
        for t, lead in enumerate(leads):
            self._position("lead (h)", lead, lay.lead_hours)
            for v, name in enumerate(names):
                self._position("variable", name, lay.variables)
                pressure[:, t, v] = self._field(date, lead, name, on_levels=True)[:, depth, rows]
            for s, name in enumerate(ground):
                self._position("surface variable", name, lay.surface)
                surface[:, t, s] = self._field(date, lead, name, on_levels=False)[:, 0, rows]
        return Fields(pressure, surface)

    def _position(self, what: str, value: object, there: Sequence[object]) -> int:
        if value not in there:
            has = ", ".join(map(str, there)) or "none"
            raise UserError(f"{self.source.path}: has no {what} {value}; it holds {has}")
        return list(there).index(value)

    def _field(self, date: int, lead: int, name: str, *, on_levels: bool) -> np.ndarray:
        """Quantiles (Q, Z, Y, X) of one lead and variable, from the folder where they are."""
        stamp = np.datetime_as_string(self.source.layout.init_time[date], "h").replace("-", "").replace("T", "")
        path = None if self._folder is None else self._folder / f"{stamp}_{lead}h_{name}.npy"
        if path is not None:
            try:
                return np.load(path, mmap_mode="r", allow_pickle=False)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except (OSError, ValueError, EOFError):
                log.warning("%s: damaged, computed anew", path)
        values = self._compute(self.dates(date), lead, name, on_levels=on_levels)
        if path is not None:
            self._keep(path, values)
        return values

    def _keep(self, path: Path, values: np.ndarray) -> None:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "wb") as file:
                np.save(file, values, allow_pickle=False)
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            self._folder = None
            log.info("model climate: not kept, for %s cannot be written (%s)", path, error.strerror)

    def _compute(self, dates: np.ndarray, lead: int, name: str, *, on_levels: bool) -> np.ndarray:
        lay = self.source.layout
        levels = len(lay.levels) if on_levels else 1
        height, width = lay.grid.shape
        out = np.empty((len(self.probabilities), levels, height, width), np.float32)
        if not on_levels and zero_by_nature(name, lead):
            out[...] = 0
            return out
        step = self._rows(len(dates) * len(lay.realization) * levels * width * out.itemsize)
        for first in range(0, height, step):
            rows = (first, min(first + step, height))
            values = self._values(dates, lead, name, rows, on_levels=on_levels)
            for level in range(levels):
                out[:, level, rows[0] : rows[1]] = quantiles(values[:, level], self.probabilities)
        return out

    def _rows(self, bytes_a_row: int) -> int:
        return max(_BLOCK, self._memory // bytes_a_row // _BLOCK * _BLOCK)

    def _values(self, dates: np.ndarray, lead: int, name: str, rows: tuple[int, int], *, on_levels: bool) -> np.ndarray:
        """All members of `dates`, (N, Z, rows, X)."""
        pressure, ground = ((name,), ()) if on_levels else ((), (name,))
        chosen = Selection(None, (lead,), pressure, None if on_levels else (), ground, rows)
        lay, out = self.source.layout, None
        members = len(lay.realization)
        for number, date in enumerate(dates.tolist()):
            fields = self.source.read(Part.FORECAST, date, chosen)
            found = fields.pressure[:, 0, 0] if on_levels else fields.surface[:, 0, 0][:, None]
            if out is None:
                out = np.empty((members * len(dates), *found.shape[1:]), np.float32)
            out[members * number : members * (number + 1)] = found
        assert out is not None
        return out


def quantiles(values: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Quantiles over the first axis, NaN left out: (N, ...) float32 -> (Q, ...) float32; linear, type 7."""
    ordered = np.sort(values, axis=0)  # NaN go to the end
    count = np.isfinite(ordered).sum(0)
    last = np.maximum(count - 1, 0)
    out = np.empty((len(probabilities), *values.shape[1:]), np.float32)
    for number, probability in enumerate(probabilities):
        place = probability * last
        below = np.floor(place).astype(np.intp)
        above = np.minimum(below + 1, last)
        low, high = (np.take_along_axis(ordered, at[None], 0)[0].astype(np.float64) for at in (below, above))
        out[number] = low + (high - low) * (place - below)
    out[:, count == 0] = np.nan
    return out


def same_season(times: np.ndarray, date: np.datetime64, days: int) -> np.ndarray:
    """Which of `times` lie within `days` of the calendar date of `date` in another year than its own: (D,) bool."""
    day = times.astype("datetime64[D]")
    anniversaries = np.array([_anniversary(date, int(year)) for year in _years(day)])
    # The nearest anniversary may be that of the year before or after.
    around = [np.array([_anniversary(date, int(year) + step) for year in _years(day)]) for step in (-1, 1)]
    candidates = np.stack([around[0], anniversaries, around[1]])
    distance = np.abs((day - candidates).astype(np.int64))
    nearest = distance.argmin(0)
    its_year = np.take_along_axis(_years(candidates), nearest[None], 0)[0]
    return (distance.min(0) <= days) & (its_year != _years(np.array([date]).astype("datetime64[D]"))[0])


def _years(days: np.ndarray) -> np.ndarray:
    return days.astype("datetime64[Y]").astype(np.int64) + 1970


def _anniversary(date: np.datetime64, year: int) -> np.datetime64:
    month_day = np.datetime_as_string(date, "D")[5:]
    leap = (year % 4 == 0 and year % 100 != 0) or year % 400 == 0
    if month_day == "02-29" and not leap:
        month_day = "02-28"
    return np.datetime64(f"{year:04d}-{month_day}", "D")
