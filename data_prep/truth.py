"""The truth of a forecast: verifying fields at valid time, which is init time plus lead time.

A truth archive is a set of fields with valid times: analyses or short forecasts. Of several fields at one valid time,
the one with the shortest lead is taken. Sums and maxima over ranges of steps are combined from the intervals that the
truth states, so that they cover exactly the forecast's own interval.

Axes: D init time, T lead, V pressure variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce

import numpy as np

from data_prep.catalogue import Catalogue
from data_prep.gathered import Allocate, Gathered, Target, zeros
from data_prep.intervals import Combine, Tiles
from data_prep.notices import notice_log
from data_prep.records import FIELD_INDEX, IS_ACCUMULATED
from data_prep.selecting import narrow, translation
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, GUST, field
from ensemble_ml.grid import Grid
from ensemble_ml.store.source import Fields, Layout, Selection, hour_of_day
from ensemble_ml.wording import shortened

log = notice_log(__name__)

_MISSING = -1  # in place of a row
_FRESH = 24  # hours: a warning is logged if forecasts of longer leads serve as truth
_HOUR = np.timedelta64(1, "h")


class TruthRefused(UserError):
    """An error for some variables of a truth that cannot verify those of the forecast.

    Args:
        reason: the message without a remedy.
        others: the variables of the forecast that are not concerned.
    """

    def __init__(self, reason: str, others: list[str]):
        self.reason, self.others = reason, others
        keep = f"keep the others alone, 'variables=[{','.join(others)}]'"
        super().__init__(f"{reason}; or {keep if others else 'prepare without a truth, truth=null'}")

    def in_python(self) -> UserError:
        """Return the same error with a remedy for Python, not for the command line."""
        keep = f"keep the others alone, variables={self.others}"
        return UserError(f"{self.reason}; or {keep if self.others else 'prepare without a truth, truth=None'}")


class ArchiveTruth:
    """A truth archive aligned to a forecast.

    Args:
        catalogue: the fields of the truth archive.
        layout: coordinates of the forecast.
        wanted: fields that the forecast has for any init time, bool (T, V, Z) and (T, S).
        bounds: the forecast's intervals by variable: [first, last] hour or None for each lead.
        methods: by variable, the statistics over time that the forecast states: some of mean, maximum and minimum.

    Raises:
        UserError: the grids differ, or the truth is an ensemble.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        layout: Layout,
        wanted: tuple[np.ndarray, np.ndarray],
        bounds: dict[str, list[list[int] | None]],
        methods: Mapping[str, set[str]],
    ):
        self._methods = methods
        self.catalogue, self.path, self.layout, self.bounds = catalogue, catalogue.path, layout, bounds
        check_grid(catalogue.grid, catalogue.path, layout.grid)
        self.masked = tuple(name for name in layout.names if name in catalogue.masked)
        records = catalogue.records
        numbers = np.unique(records["member"].astype(np.int64) * 2 + records["kind"])
        if len(numbers) > 1:
            raise UserError(f"truth {self.path}: holds {len(numbers)} members; the truth is one field for each time")
        self._records, self._wanted = records, wanted
        self._valid = layout.init_time[:, None].astype("datetime64[s]") + np.array(layout.lead_hours) * _HOUR  # (D, T)
        self._tiles: dict[tuple[int, int], Tiles] = {}  # by position in FIELDS and level
        self._stale: set[str] = set()  # variables verified by forecasts of long leads, of which a warning was logged
        self._mixed: dict[str, str] = {}  # why variables cannot be combined from several intervals
        self._over_intervals: set[str] = set()  # instantaneous variables that the truth only has over intervals
        self._rows = self._align(lambda name: name)
        there = {FIELDS[index].name for index in np.unique(records["field"]).tolist()}
        derived = {name for name in layout.names if field(name).components and name not in there}
        self._partners = tuple(np.full(rows.shape, _MISSING) for rows in self._rows)
        # A derived variable has the row of its first component in `_rows` and that of its second in `_partners`.
        if derived:
            self._rows = self._align(lambda name: field(name).components[0] if name in derived else name)
            self._partners = self._align(lambda name: field(name).components[1] if name in derived else "")

    def _align(self, named: Callable[[str], str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the row of the table for each (D, T, V, Z) and (D, T, S), _MISSING if there is none.

        Variables over intervals are collected in `_tiles` as well, because several rows may make one of their fields.
        `named` maps a variable of the forecast to one of the truth, or to "" for none.
        """
        lay = self.layout
        pressure = np.full((*self._valid.shape, len(lay.variables), len(lay.levels)), _MISSING)
        surface = np.full((*self._valid.shape, len(lay.surface)), _MISSING)
        for v, name in enumerate(lay.variables):
            for z, level in enumerate(lay.levels):
                pressure[:, :, v, z] = self._lookup(named(name), level)
        for s, name in enumerate(lay.surface):
            surface[:, :, s] = self._lookup(named(name), 0)
        return pressure, surface

    def _lookup(self, name: str, level: int) -> np.ndarray:
        """Return the row that verifies one variable at each valid time (D, T), _MISSING if there is none."""
        if not name or self._other(name):
            return np.full(self._valid.shape, _MISSING)
        records = self._records
        mine = np.flatnonzero((records["field"] == FIELD_INDEX[name]) & (records["level"] == level))
        if not len(mine):
            return np.full(self._valid.shape, _MISSING)
        instants = mine[records["lead_start"][mine] == records["lead"][mine]]
        if name in self.bounds:
            self._tiles[FIELD_INDEX[name], level] = tiles = Tiles(records[mine], mine)
            if not tiles.stated and not field(name).accumulated:
                log.warning("truth %s: %s states no interval and is taken as it is at the valid time", self.path, name)
            # At a lead without an interval (the start of the forecast) the truth must be instantaneous, too.
            alone = np.array([pair is None for pair in self.bounds[name]])
            return np.where(alone, self._latest(name, instants), self._latest(name, mine))
        if not len(instants) and field(name).standard_name != GUST:
            self._over_intervals.add(name)
        elif not len(instants):
            text = "truth %s: %s is over intervals; the forecast states none, and is assumed to be over the same"
            log.warning(text, self.path, name)
            instants = mine
        return self._latest(name, instants)

    def _latest(self, name: str, mine: np.ndarray) -> np.ndarray:
        """Return the row with the shortest lead for each valid time, among rows of one field; _MISSING without any."""
        if not len(mine):
            return np.full(self._valid.shape, _MISSING)
        times = self._records["init"][mine] + self._records["lead"][mine] * _HOUR
        # Among equal valid times, the shortest lead comes first, where `searchsorted` finds it.
        order = np.lexsort((self._records["lead"][mine], times))
        mine, times = mine[order], times[order]
        found = np.minimum(np.searchsorted(times, self._valid), len(times) - 1)
        there = times[found] == self._valid
        longest = int(self._records["lead"][mine[found[there]]].max(initial=0))
        if longest > _FRESH and name not in self._stale:
            self._stale.add(name)
            text = (
                "truth %s: %s: some valid times are verified by forecasts of up to %d h; give analyses or shorter ones"
            )
            log.warning(text, self.path, name, longest)
        return np.where(there, mine[found], _MISSING)

    def _other(self, name: str) -> str:
        """Return how the truth's statistic over time differs from the forecast's; empty if it does not."""
        ours, theirs = self.catalogue.methods(name), self._methods.get(name, set())
        interval = name in self.bounds and bool(ours) and bool(theirs) and not ours & theirs
        return f"the truth is its {min(ours)} over time, the forecast its {min(theirs)}" if interval else ""

    def _targets(self, date: int, narrowed: Layout) -> list[Target]:
        """Return a target for each wanted field of an init time that the truth has, at its position in `narrowed`.

        Fields outside `narrowed` are left out.
        """
        targets = []
        axes = translation(self.layout, narrowed, members=False)
        for surface, wanted in enumerate(self._wanted):
            kept = [axis >= 0 for axis in axes[surface][1:]]
            for place in np.argwhere(wanted & reduce(np.logical_and.outer, kept)).tolist():
                name = (self.layout.surface if surface else self.layout.variables)[place[1]]
                interval = self.span(name, place[0])
                if interval is not None:
                    level = 0 if surface else self.layout.levels[place[2]]
                    chosen, combine = self._cover(name, level, date, interval)
                else:
                    chosen, combine = self._row_at(surface, (date, *place))
                if chosen:
                    moved = tuple(int(axis[at]) for axis, at in zip(axes[surface][1:], place, strict=True))
                    targets.append(Target(bool(surface), (0, *moved), chosen, combine))
        return targets

    def rows(self) -> np.ndarray:
        """Return the rows of the catalogue that are read for any init time, (N,), ascending."""
        dates = range(len(self.layout.init_time))
        return np.unique(np.concatenate([np.zeros(0, int), *(self.rows_of(date) for date in dates)]))

    def rows_of(self, date: int) -> np.ndarray:
        """Return the rows of the catalogue that are read for one init time, (N,)."""
        return np.array([row for target in self._targets(date, self.layout) for row in target.rows], int)

    def _by_intervals(self, name: str) -> bool:
        """Return whether the truth is combined from its intervals: always for sums, else only if it states them."""
        return bool(IS_ACCUMULATED[FIELD_INDEX[name]]) or any(tiles.stated for tiles in self._tiles_of(name))

    def _tiles_of(self, name: str) -> list[Tiles]:
        """Return the intervals of a variable at each of its levels."""
        return [tiles for (index, _), tiles in self._tiles.items() if index == FIELD_INDEX[name]]

    def _cover(self, name: str, level: int, date: int, interval: list[int]) -> tuple[tuple[int, ...], Combine]:
        """Return the rows that fill an interval of the forecast, and how to combine them.

        There are no rows if the truth lacks the variable or has another statistic over time, if its intervals do not
        fill the forecast's, or if it is not known how to combine them (`_mixed` then holds the reason). `interval` is
        the first and last hour after the init time.
        """
        tiles = self._tiles.get((FIELD_INDEX[name], level))
        if tiles is None:
            return (), Combine.ONE
        start = self.layout.init_time[date].astype("datetime64[s]")
        rows = tiles.cover(start + interval[0] * _HOUR, start + interval[1] * _HOUR)
        if len(rows) <= 1:
            return rows, Combine.ONE
        if field(name).accumulated:
            return rows, Combine.SUM
        if field(name).standard_name == GUST:
            return rows, Combine.MAXIMUM
        span = f"{interval[0]}-{interval[1]} h after the start"
        text = f"{len(rows)} of its intervals fill {span}, but it is not known whether they are means or extremes"
        self._mixed.setdefault(name, f"{text}; give it over that whole interval")
        return (), Combine.ONE

    def _row_at(self, surface: int, place: tuple[int, ...]) -> tuple[tuple[int, ...], Combine]:
        """Return the rows of a field that is not made from intervals, and how to combine them; none if missing."""
        row, partner = int(self._rows[surface][place]), int(self._partners[surface][place])
        name = (self.layout.surface if surface else self.layout.variables)[place[2]]
        if row == _MISSING:
            return (), Combine.ONE
        if not field(name).components or self._records["field"][row] == FIELD_INDEX[name]:
            return (row,), Combine.ONE
        return ((), Combine.ONE) if partner == _MISSING else ((row, partner), Combine.SPEED)

    def present(self, date: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which fields of an init time are present, bool (1, T, V, Z) and (1, T, S)."""
        pressure, surface = (np.zeros((1, *rows.shape[1:]), bool) for rows in self._rows)
        for target in self._targets(date, self.layout):
            (surface if target.surface else pressure)[target.place] = True
        return pressure, surface

    def gather(
        self,
        date: int,
        selection: Selection = Selection(),  # noqa: B008 - frozen
        allocate: Allocate = zeros,
    ) -> Gathered:
        """Read one init time into blocks (see `data_prep.gathered.Gathered`).

        Raises:
            UserError: something selected is not in the layout, or a field cannot be decoded or holds NaN.
        """
        narrowed = narrow(self.layout, selection, self.path)
        return self.catalogue.gather(self._targets(date, narrowed), narrowed, 1, selection.rows, allocate)

    def read(self, date: int, selection: Selection) -> Fields:
        """Read one init time, decoded (see `gather`)."""
        return Fields(*self.gather(date, selection).decoded())

    def fingerprint(self) -> str:
        """Return a hash of the archive's files and fields, 16 hex digits."""
        return self.catalogue.fingerprint()

    def without(self, dates: Sequence[int]) -> ArchiveTruth:
        """Return the same truth without some init times of the forecast, given by their positions."""
        layout = replace(self.layout, init_time=np.delete(self.layout.init_time, list(dates)))
        return ArchiveTruth(self.catalogue, layout, self._wanted, self.bounds, self._methods)

    def span(self, name: str, lead: int) -> list[int] | None:
        """Return the first and last hour of the interval that verifies a lead; None if one valid time verifies it.

        `lead` is the position of the lead.
        """
        by_lead = self.bounds.get(name)
        return by_lead[lead] if by_lead and self._by_intervals(name) else None

    @cached_property
    def presence(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the result of `present` for every init time."""
        return [self.present(date) for date in range(len(self.layout.init_time))]

    @cached_property
    def anywhere(self) -> list[np.ndarray]:
        """Return which fields are present for any init time, bool (1, T, V, Z) and (1, T, S)."""
        return [np.any([both[surface] for both in self.presence], axis=0) for surface in (False, True)]

    def apart(self) -> str:
        """Return the periods of forecast and truth in words if they share no valid time.

        The text is empty otherwise, and if the periods overlap and the truth has values over intervals.
        """
        ours = np.unique(self._valid)
        theirs = np.unique(self._records["init"] + self._records["lead"] * _HOUR)
        # Intervals may fill those of the forecast without ending at its valid times; `unmatched` reports on them.
        over_intervals = (self._records["lead_start"] < self._records["lead"]).any()
        overlap = len(ours) > 0 and ours.min() <= theirs.max() and theirs.min() <= ours.max()
        if len(np.intersect1d(ours, theirs)) or (overlap and over_intervals):
            return ""
        return f"the forecast is valid {period(ours)}, the truth {period(theirs)}"

    def unmatched(self) -> dict[str, str]:
        """Return why variables of the forecast cannot be verified for any init time, by variable.

        Raises:
            TruthRefused: intervals of the truth do not fill those of the forecast, or it is not known how to combine
                them.
        """
        found = self._reasons()
        over_intervals = {name: why for name, why in found.items() if self._tiles_of(name) and self._by_intervals(name)}
        if refused := self._mixed | over_intervals:
            reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
            others = [name for name in self.layout.names if name not in refused]
            raise TruthRefused(f"truth {self.path}: {reasons}", others)
        return found

    def _reasons(self) -> dict[str, str]:
        """Return why wanted variables are not present in the truth for any init time, by variable."""
        reasons = {}
        for surface, names in ((False, self.layout.variables), (True, self.layout.surface)):
            found = self.anywhere[surface][0]
            for number, name in enumerate(names):
                if self._wanted[surface][:, number].any() and not found[:, number].any():
                    if self._tiles_of(name) and self._by_intervals(name):
                        reasons[name] = self._mixed.get(name) or self._interval_reason(name)
                    elif name in self._over_intervals:
                        reasons[name] = "the truth has it over intervals, the forecast at one time"
                    else:
                        reasons[name] = self._other(name) or "the truth has none of it at the forecast's valid times"
        return reasons

    def unverified(self) -> dict[str, str]:
        """Return sentences on what cannot be verified for any init time, by variable."""
        found = {name: f"stays without truth: {why}" for name, why in self._reasons().items()}
        for surface, names in ((False, self.layout.variables), (True, self.layout.surface)):
            for number, name in enumerate(names):
                wanted, some = self._wanted[surface][:, number], self.anywhere[surface][0][:, number]
                if some.any() and (lacking := wanted & ~some).any():
                    leads = ", ".join(self._leads(wanted, lacking))
                    found[name] = f"stays without truth at these leads: {leads}"
        return {name: f"truth {self.path}: {name} {text}" for name, text in found.items()}

    def _leads(self, wanted: np.ndarray, lacking: np.ndarray) -> Iterator[str]:
        """Yield the leads at which fields are lacking, with their levels if others are present."""
        for hours, asked, lost in zip(self.layout.lead_hours, wanted, lacking, strict=True):
            if not lost.any():
                continue
            # This includes surface variables, which have a single value here.
            if (lost == asked).all():
                yield f"{hours} h"
            else:
                levels = ", ".join(str(self.layout.levels[place]) for place in np.flatnonzero(lost))
                yield f"{hours} h ({levels} hPa)"

    def _interval_reason(self, name: str) -> str:
        """Return why the truth's intervals of a variable cannot verify those of the forecast."""
        spans = sorted({(first, last) for first, last in (pair for pair in self.bounds[name] if pair)})
        needed = ", ".join(f"{first}-{last} h" for first, last in spans)
        if not any(tiles.stated for tiles in self._tiles_of(name)):
            return (
                f"its sums state no interval (a GRIB step range or time bounds), and those over {needed} after the "
                f"start are needed; for NetCDF or Zarr, state their hours: truth_intervals={{{name}: HOURS}}"
            )
        return f"its intervals do not fill {needed} after the start; give sums over these, or over parts of them"


def period(times: np.ndarray) -> str:
    """Return the first and last of some times as messages show them, with their hours of the day; "never" for none."""
    if not len(times):
        return "never"
    hours = [f"{hour:02}" for hour in np.unique(hour_of_day(times)).tolist()]
    return f"{str(times.min())[:10]} to {str(times.max())[:10]} ({shortened(hours, 4)} UTC)"


def check_grid(grid: Grid, path: str, wanted: Grid) -> None:
    """Check that a file is on the forecast's grid.

    Raises:
        UserError: the grids differ; the message names both.
    """
    if not grid.same_as(wanted):
        raise UserError(
            f"{path}: grid {grid.describe()} differs from the forecast's, {wanted.describe()}; "
            "give it on that grid, or bring it there conservatively (prepare: truth_regrid=true; "
            "predict and evaluate: regrid=true)"
        )
