"""Compute the model climate: what the ensemble forecasts at this time of the year in other years, point by point.

The model climate of an init time consists of quantiles over all members of certain other init times. These lie within
some days of its calendar date, in all other years, and begin at the same hour of the day (the climate of noon is not
that of midnight). The extreme forecast index (EFI) compares a forecast with these quantiles.

An init time counts to the year of the nearest anniversary of the calendar date. So late December counts to the same
year as the January after it, and neither is in the other's climate. The anniversary of 29 February is the 28th in other
years.

A store may hold the quantiles already (`prepare climate_days=9`). Otherwise they are computed on request, one lead and
variable at a time and in blocks of rows, so that memory is bounded. Members that were read are kept in as much memory
again, because the next init time needs most of them.

In a store that holds the quantiles, two arrays stand beside the fields: `climate_pressure` (D, T, V, Q, Z, Y, X) and
`climate_surface` (D, T, S, Q, Y, X). They are float32, NaN where other years have too few values. A chunk holds one
init time, lead and variable, and some or all rows. `write_climate` makes the arrays when all init times are there. The
store's fingerprint does not cover them, because they follow from its fields.

Axes: D init time, Q probability, N values (dates times members), T lead, V pressure variable, S surface variable, Z
level, Y latitude, X longitude.
"""

from __future__ import annotations

import calendar
import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from ensemble_ml.errors import UserError
from ensemble_ml.store.manifest import CLIMATE, make_manifest, read_manifest, write_manifest
from ensemble_ml.store.metadata import consolidate
from ensemble_ml.store.read import TensorStore
from ensemble_ml.store.schema import DAYS_KEY
from ensemble_ml.store.source import Fields, Part, Selection, Source, zero_by_nature

DAYS = 9  # half-width of the window in days
FEWEST_VALUES = 20  # members times dates at a point; quantiles of fewer values mean nothing
PROBABILITIES = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1)
MEMORY = 512 * 2**20  # bytes of values held at a time, where a block of 16 rows is not larger than that
_BLOCK = 16  # fewest rows of a chunk of the store; smaller blocks would read each chunk several times
_PROBABILITY = f"{CLIMATE}probability"
_CHUNK = 1 << 26  # bytes of a chunk at most, before compression
_THREADS = 4  # they share the memory that a model climate may take


class ModelClimate:
    """The model climate of a source's forecasts.

    Args:
        source: Tensor store or archive.
        days: Days from the calendar date within which an init time may lie.
        probabilities: Probabilities of the quantiles, ascending within [0, 1].
        memory: Bytes of values held at a time, and as many bytes of members kept for later.
        seasons: Cache of the init times of other years, by init time. Only climates of one source with equal `days` may
            share it.

    Raises:
        UserError: The source has init times of one year only, or the probabilities are not ascending within [0, 1].
    """

    def __init__(
        self,
        source: Source,
        *,
        days: int = DAYS,
        probabilities: Sequence[float] = PROBABILITIES,
        memory: int = MEMORY,
        seasons: dict[int, np.ndarray] | None = None,
    ):
        levels = np.asarray(probabilities, np.float64)
        if not len(levels) or levels[0] < 0 or levels[-1] > 1 or (np.diff(levels) <= 0).any():
            raise UserError(f"climate probabilities={list(probabilities)}: give ascending numbers from 0 to 1")
        self.source, self.days, self.probabilities, self._memory = source, days, levels, memory
        years = np.unique(source.layout.init_time.astype("datetime64[Y]"))
        if len(years) < 2:
            only = str(years[0]) if len(years) else "none"
            raise UserError(
                f"{source.path}: a model climate needs init times of two years or more; it has {only} alone"
            )
        held: Any = getattr(source, "forecast", source)  # the forecast store, where a truth is joined to it
        same = 0 < days == getattr(held, "climate_days", 0) and np.array_equal(levels, PROBABILITIES)
        self.stored = held if same else None  # the store that already holds these quantiles
        self._seasons: dict[int, np.ndarray] = {} if seasons is None else seasons
        self._kept: OrderedDict[tuple[int, int, str, tuple[int, int]], np.ndarray] = OrderedDict()

    def _near(self, date: int) -> np.ndarray:
        """Return the indices of the init times of other years in the season of `date`, possibly none."""
        if date not in self._seasons:
            times = self.source.layout.init_time
            self._seasons[date] = np.flatnonzero(same_season(times, times[date], self.days))
        return self._seasons[date]

    def dates(self, date: int) -> np.ndarray:
        """Return the indices of the init times that make the climate of the init time `date`.

        Raises:
            UserError: There is none in other years.
        """
        times, found = self.source.layout.init_time, self._near(date)
        if not len(found):
            raise UserError(
                f"{self.source.path}: no init time of another year lies within {self.days} days of "
                f"{np.datetime_as_string(times[date], 'D')}'s calendar date; widen the window of the model climate"
            )
        return found

    def enough(self, date: int) -> bool:
        """Return whether other years have `FEWEST_VALUES` members or more for the init time `date`."""
        return len(self._near(date)) * len(self.source.layout.realization) >= FEWEST_VALUES

    def quantiles(self, date: int, selection: Selection = Selection()) -> Fields:  # noqa: B008 - frozen
        """Return the quantiles for one init time.

        They are interpolated linearly between order statistics (type 7 of Hyndman & Fan 1996). Points with fewer than
        `FEWEST_VALUES` values are NaN. Unless the store holds the quantiles, sums at lead zero (`zero_by_nature`) are
        zero all the same.

        Args:
            date: Index of the init time.
            selection: Leads, variables, levels and rows; `selection.realization` is not used.

        Returns:
            Pressure (Q, T, V, Z, Y, X) and surface (Q, T, S, Y, X) float32.

        Raises:
            UserError: There is no init time of another year in the window, or something selected is not there or
                cannot be read.
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
        self.dates(date)
        for t, lead in enumerate(leads):
            self._position("lead (h)", lead, lay.lead_hours)
            for v, name in enumerate(names):
                self._position("variable", name, lay.variables)
                pressure[:, t, v] = self._compute(date, lead, name, rows, on_levels=True)[:, depth]
            for s, name in enumerate(ground):
                self._position("surface variable", name, lay.surface)
                surface[:, t, s] = self._compute(date, lead, name, rows, on_levels=False)[:, 0]
        return Fields(pressure, surface)

    def _position(self, what: str, value: object, there: Sequence[object]) -> int:
        """Return the index of `value`, or raise a UserError that lists the values that are there."""
        if value not in there:
            has = ", ".join(map(str, there)) or "none"
            raise UserError(f"{self.source.path}: has no {what} {value}; it holds {has}")
        return list(there).index(value)

    def _compute(self, date: int, lead: int, name: str, rows: slice, *, on_levels: bool) -> np.ndarray:
        """Return the quantiles (Q, Z, rows, X) of one lead and variable, on all levels."""
        lay = self.source.layout
        if self.stored is not None:
            return self.stored.climate(date, lead, name)[:, :, rows]
        levels, width = len(lay.levels) if on_levels else 1, lay.grid.shape[1]
        out = np.empty((len(self.probabilities), levels, rows.stop - rows.start, width), np.float32)
        if not on_levels and zero_by_nature(name, lead):
            out[...] = 0
            return out
        dates = self.dates(date)
        # A block has as many whole chunks of rows as the memory holds, at least one.
        bytes_a_row = len(dates) * len(lay.realization) * levels * width * out.itemsize
        step = max(_BLOCK, self._memory // bytes_a_row // _BLOCK * _BLOCK)
        for first in range(rows.start, rows.stop, step):
            band = first, min(first + step, rows.stop)
            members = [self._members(one, lead, name, band, on_levels=on_levels) for one in dates.tolist()]
            values = np.concatenate(members)  # (N, Z, rows, X)
            for level in range(levels):
                found = quantiles(values[:, level], self.probabilities, FEWEST_VALUES)
                out[:, level, band[0] - rows.start : band[1] - rows.start] = found
        return out

    def _members(self, date: int, lead: int, name: str, rows: tuple[int, int], *, on_levels: bool) -> np.ndarray:
        """Return the members of one init time (M, Z, rows, X), read now or kept from before.

        The members used longest ago are dropped once the memory is full.
        """
        key = date, lead, name, rows
        if key not in self._kept:
            chosen = replace(Selection.one(lead, name, surface=not on_levels), rows=rows)
            self._kept[key] = self.source.read(Part.FORECAST, date, chosen).one()
            while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > self._memory:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


def quantiles(values: np.ndarray, probabilities: np.ndarray, fewest: int = 1) -> np.ndarray:
    """Return quantiles over the first axis, (Q, ...) float32.

    They are interpolated linearly (type 7 of Hyndman & Fan 1996, doi:10.2307/2684934). With n values x in ascending
    order, counted from 0:

        h    = p (n - 1)
        q(p) = x[floor(h)] + (h - floor(h)) (x[floor(h) + 1] - x[floor(h)])

    Args:
        values: (N, ...) float32; NaN and infinite values are left out.
        probabilities: (Q,) p.
        fewest: Number of values below which a point is NaN.
    """
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan), axis=0)  # NaN are sorted to the end
    count = np.isfinite(ordered).sum(0)
    last = np.maximum(count - 1, 0)
    out = np.empty((len(probabilities), *values.shape[1:]), np.float32)
    for number, probability in enumerate(probabilities):
        place = probability * last
        below = np.floor(place).astype(np.intp)
        above = np.minimum(below + 1, last)
        low, high = (np.take_along_axis(ordered, at[None], 0)[0].astype(np.float64) for at in (below, above))
        out[number] = low + (high - low) * (place - below)
    out[:, count < max(fewest, 1)] = np.nan
    return out


def same_season(times: np.ndarray, date: np.datetime64, days: int) -> np.ndarray:
    """Return which of `times` (D,) belong to the season of `date` in another year, (D,) bool.

    Such a time lies within `days` of an anniversary of `date` in another year, at the same hour of the day.
    """
    day = times.astype("datetime64[D]")
    same_hour = times - day == date - date.astype("datetime64[D]")
    # Around New Year the nearest anniversary may be that of the year before or after.
    around = [np.array([_anniversary(date, int(year) + step) for year in _years(day)]) for step in (-1, 0, 1)]
    candidates = np.stack(around)
    distance = np.abs((day - candidates).astype(np.int64))
    nearest = distance.argmin(0)
    its_year = np.take_along_axis(_years(candidates), nearest[None], 0)[0]
    return same_hour & (distance.min(0) <= days) & (its_year != _years(np.array([date]).astype("datetime64[D]"))[0])


def _years(days: np.ndarray) -> np.ndarray:
    """Return the calendar years of days."""
    return days.astype("datetime64[Y]").astype(np.int64) + 1970


def _anniversary(date: np.datetime64, year: int) -> np.datetime64:
    """Return the calendar date of `date` in `year`; 28 February for 29 February in a common year."""
    month_day = np.datetime_as_string(date, "D")[5:]
    if month_day == "02-29" and not calendar.isleap(year):
        month_day = "02-28"
    return np.datetime64(f"{year:04d}-{month_day}", "D")


def write_climate(root: Path, days: int) -> None:
    """Add the model climate, whose window reaches `days` days to both sides, to the complete store at `root`.

    After an interruption, call `build.finish_store` again first, because the manifest may not fit the files.

    Raises:
        UserError: The store has init times of one year only, or is damaged.
        OSError: A file cannot be written.
    """
    store = TensorStore(root)
    known = {name: entry for name, entry in read_manifest(root).items() if not name.startswith(CLIMATE)}
    group = zarr.open_group(root, mode="r+", use_consolidated=False)
    arrays = _create(group, store)
    lay, threads = store.layout, min(_THREADS, os.cpu_count() or 1)
    # Neighbouring days of the year share members, which `ModelClimate` keeps in memory.
    order = np.argsort([str(time)[5:16] for time in lay.init_time], kind="stable").tolist()
    jobs = [(t, number, name) for t in range(len(lay.lead_hours)) for number, name in enumerate(lay.names)]

    seasons: dict[int, np.ndarray] = {}

    def run(job: tuple[int, int, str]) -> None:
        """Compute and write the climate of one lead and variable, for all init times."""
        t, number, name = job
        surface = number >= len(lay.variables)
        chosen = Selection.one(lay.lead_hours[t], name, surface=surface)
        climate = ModelClimate(store, days=days, memory=MEMORY // threads, seasons=seasons)
        rows, step = lay.grid.shape[0], arrays[surface].chunks[-2]
        for date in order:
            for first in range(0, rows, step) if climate.enough(date) else ():
                band = first, min(first + step, rows)
                found = climate.quantiles(date, replace(chosen, rows=band))
                values = found.surface[:, 0, 0] if surface else found.pressure[:, 0, 0]
                arrays[surface][date, t, number - surface * len(lay.variables), ..., slice(*band), :] = values

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, jobs))
    group.attrs[DAYS_KEY] = days
    consolidate(group)
    known.pop("zarr.json")  # its contents have changed, so it is hashed again
    write_manifest(root, make_manifest(root, known))


def _create(group: zarr.Group, store: TensorStore) -> dict[bool, zarr.Array]:
    """Create the arrays of the quantiles and of their probabilities.

    Return those of quantiles: True for surface variables, False for those on pressure levels, if there are any.
    """
    lay = store.layout
    start, quantiles = (len(lay.init_time), len(lay.lead_hours)), len(PROBABILITIES)
    kinds = (
        (False, "pressure", lay.variables, (len(lay.levels),), ("variable", _PROBABILITY, "level")),
        (True, "surface", lay.surface, (), ("surface_variable", _PROBABILITY)),
    )
    found: dict[bool, Any] = {}
    for surface, kind, names, levels, axes in kinds:
        if names:
            shape: tuple[int, ...] = (*start, len(names), quantiles, *levels, *lay.grid.shape)
            found[surface] = group.create_array(
                f"{CLIMATE}{kind}",
                shape=shape,
                chunks=(1, 1, 1, *shape[3:-2], _rows(shape), shape[-1]),
                dtype=np.float32,
                compressors=[BloscCodec(typesize=4, cname="lz4", clevel=5, shuffle="bitshuffle"), Crc32cCodec()],
                fill_value=np.nan,
                chunk_key_encoding={"name": "default", "separator": "."},
                dimension_names=("init_time", "lead_time", *axes, "latitude", "longitude"),
                attributes={"long_name": "quantiles of the members of other years at this time of the year"},
                overwrite=True,
            )
    group.create_array(
        _PROBABILITY, data=np.asarray(PROBABILITIES, np.float64), dimension_names=(_PROBABILITY,), overwrite=True,
        attributes={"long_name": "probability of a quantile of the model climate", "units": "1"},
    )  # fmt: skip
    return found


def _rows(shape: tuple[int, ...]) -> int:
    """Return the number of rows of a chunk: as many as fit in 64 MiB, at least one.

    Each thread holds a chunk in memory, and compressors limit the size of their input.
    """
    each = 4 * math.prod(shape[3:-2]) * shape[-1]
    return min(shape[-2], max(1, _CHUNK // each))
