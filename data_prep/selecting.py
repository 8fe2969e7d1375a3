"""Select from the coordinates of an archive, and describe the part of it that a build needs (`Wanted`).

Of a variable with very many fields in a NetCDF file, Zarr store or Dataset, only this part is listed.

WeatherBench 2's IFS ENS has 350 million fields. A table with a row for each would need 40 GB, and a build of two leads
of six variables needs one field in 150. Variables of fewer than a million fields are listed whole, so that messages can
name all that an archive has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_prep.notices import notice_log
from data_prep.records import CONTROL, FIELD_INDEX, IS_SURFACE, MEMBER
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, Field, field
from ensemble_ml.grid import Grid
from ensemble_ml.store.source import Layout, Selection, select_dates

log = notice_log(__name__)
MANY = 1_000_000  # a variable with so many fields or more is listed in part only
_MOST = 60_000_000  # most fields of a variable that are listed: 7 GB
_AROUND = np.timedelta64(48, "h")  # a truth's sums and means need times before and after those of the forecast


def control_as_member(records: np.ndarray, path: str) -> np.ndarray:
    """Return a copy of the records in which the control is a member under its own number. Warn if there is no control.

    Raises:
        UserError: a perturbed member has the control's number.
    """
    numbers = [set(np.unique(records["member"][records["kind"] == kind]).tolist()) for kind in (MEMBER, CONTROL)]
    if not numbers[1]:
        log.warning("control=include: %s holds no control", path)
    if numbers[0] & numbers[1]:
        number = min(numbers[0] & numbers[1])
        raise UserError(f"control=include: {path} has a perturbed member {number} beside it; use control=apart")
    records = records.copy()
    records["kind"] = MEMBER
    return records


def chosen(
    records: np.ndarray,
    path: str,
    variables: Sequence[str] | None,
    levels: Sequence[int] | None,
    dates: Sequence[str] | None,
) -> np.ndarray:
    """Return which records have the variables, levels and init times asked for, (N,) bool.

    None asks for all. `levels` are in hPa, and do not apply to surface variables. `dates` are init times, as
    `select_dates` takes them.

    Raises:
        UserError: a variable is unknown, a date cannot be parsed, or the archive lacks a variable, level or date.
    """
    keep = np.ones(len(records), bool)
    if variables is not None:
        wanted = [FIELD_INDEX[field(name).name] for name in variables]
        there = np.unique(records["field"]).tolist()
        for index in wanted:
            if index not in there:
                has = ", ".join(FIELDS[one].name for one in there) or "none at all"
                raise UserError(f"variables={FIELDS[index].name}: {path} has none of it; it has {has}")
        keep &= np.isin(records["field"], wanted)
    if levels is not None:
        there = np.unique(records["level"][~IS_SURFACE[records["field"]]]).tolist()
        _require("levels", levels, there, path)
        keep &= np.isin(records["level"], levels) | IS_SURFACE[records["field"]]
    if dates is not None:
        starts = np.unique(records["init"])
        keep &= np.isin(records["init"], starts[select_dates(starts, dates)])
    return keep


def without_members(records: np.ndarray, keep: np.ndarray, path: str) -> np.ndarray:
    """Return which records of a control are at a lead or level, or of a variable, that no member has, (N,) bool.

    A store would otherwise have positions that no member fills. A line in the log names what is left out. Only the
    records that `keep` (N,) marks are considered.
    """
    alone, member = np.zeros(len(records), bool), keep & (records["kind"] == MEMBER)
    others = np.flatnonzero(keep & ~member)
    if not len(others) or not member.any():
        return alone
    upper, anything = ~IS_SURFACE[records["field"]], np.True_
    # Variables come first, so that the log does not also name the levels and leads of a variable that is left out.
    for name, axis, kind in (("variables", "field", anything), ("levels", "level", upper), ("leads", "lead", anything)):
        known = np.unique(records[axis][member & kind])
        mine = others[(kind & ~alone)[others] & ~np.isin(records[axis][others], known)]
        if len(mine):
            found = np.unique(records[axis][mine]).tolist()
            shown = ", ".join(FIELDS[one].name if axis == "field" else str(one) for one in found)
            log.info("%s: the control has %s %s, and no member: left out", path, name, shown)
            alone[mine] = True
    return alone


def layout_of(records: np.ndarray, grid: Grid, path: str, leads: Sequence[int] | None) -> Layout:
    """Return the coordinates that the records span, at the `leads` (hours) alone if they are given.

    Raises:
        UserError: there is no member, a lead that is asked for is missing, or an init time is outside 1678 to 2261.
    """
    there = np.unique(records["lead"]).tolist()
    if leads is not None:
        _require("leads", leads, there, path)
        there = sorted(set(leads))
        records = records[np.isin(records["lead"], there)]
    members = records[records["kind"] == MEMBER]
    if not len(members):
        control = "prepare with control=include counts the control as one"
        remedy = control if len(records) else "choose other variables or levels"
        raise UserError(f"{path}: no member of an ensemble is left; {remedy}")
    years = records["init"].astype("datetime64[Y]").astype(int) + 1970
    if years.min() < 1678 or years.max() > 2261:  # the range of datetime64[ns]
        far = records["init"][(years < 1678) | (years > 2261)][0]
        raise UserError(f"{path}: init time {str(far)[:13]}: only those from 1678 to 2261 can be kept; leave it out")
    found = np.unique(records["field"]).tolist()
    upper = records["level"][~IS_SURFACE[records["field"]]]
    return Layout(
        np.unique(records["init"]).astype("datetime64[ns]"),
        tuple(np.unique(members["member"]).tolist()),
        tuple(there),
        tuple(FIELDS[index].name for index in found if not FIELDS[index].surface),
        tuple(np.unique(upper).tolist()),
        tuple(FIELDS[index].name for index in found if FIELDS[index].surface),
        grid,
    )


def positions(values: np.ndarray, axis: Sequence[int]) -> np.ndarray:
    """Return the position of each value on an ascending axis, -1 if it is not there."""
    if not len(axis):
        return np.full(len(values), -1)
    ticks = np.asarray(axis)
    found = np.minimum(np.searchsorted(ticks, values), len(ticks) - 1)
    return np.where(ticks[found] == values, found, -1)


def narrow(layout: Layout, selection: Selection, path: str) -> Layout:
    """Return the selected coordinates of `layout`, in the selection's order. All rows of the grid are kept.

    Raises:
        UserError: something selected is not in the layout, or a value is selected twice.
    """
    picked: dict[str, tuple[Any, ...]] = {}
    for name in ("realization", "lead_hours", "variables", "levels", "surface"):
        axis, wanted = getattr(layout, name), getattr(selection, name)
        if wanted is not None:
            _require(name, wanted, axis, path)
            if len(set(wanted)) < len(wanted):
                raise UserError(f"{name}={list(wanted)}: holds a value twice; give each once")
        picked[name] = axis if wanted is None else tuple(wanted)
    return Layout(layout.init_time, grid=layout.grid, **picked)


def slices_of(layout: Layout) -> Iterator[Selection]:
    """Yield selections of one lead and one variable, with all members and levels, that together are the layout."""
    for lead in layout.lead_hours:
        for name in layout.names:
            yield Selection.one(lead, name, surface=name in layout.surface)


def translation(old: Layout, new: Layout, *, members: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return where each position on the axes of `old` lies in `new`, -1 if it does not.

    Without `members`, the blocks have a member axis of length one.

    Returns:
        The axes of the pressure block (M, T, V, Z) and those of the surface block (M, T, S).
    """
    upper = [places(old.realization, new.realization) if members else np.zeros(1, int)]
    upper += [places(getattr(old, name), getattr(new, name)) for name in ("lead_hours", "variables", "levels")]
    return upper, [*upper[:2], places(old.surface, new.surface)]


def places(old: Sequence[Any], new: Sequence[Any]) -> np.ndarray:
    """Return the position of each value of `old` in `new`, -1 if it is not there; of any type, in any order."""
    place = {value: number for number, value in enumerate(new)}
    return np.array([place.get(value, -1) for value in old], int)


def _require(name: str, wanted: Sequence[Any], there: Sequence[Any], path: str) -> None:
    """Raise a UserError for a value that an axis does not have; the message lists those that it has."""
    for value in wanted:
        if value not in there:
            has = ", ".join(map(str, there)) or "none at all"
            raise UserError(f"{name}={value}: {path} has none of it; it has {has}")


@dataclass(frozen=True)
class Wanted:
    """The variables, levels, leads and times that a build needs; None stands for all.

    Attributes:
        variables: short names, with those of components.
        levels: pressure levels, hPa.
        leads: leads, hours. They do not restrict values over an interval (sums, gusts), which may need the lead before.
        dates: init times, as `select_dates` takes them.
        period: first and last init time of a truth's fields.
    """

    variables: frozenset[str] | None = None
    levels: tuple[int, ...] | None = None
    leads: tuple[int, ...] | None = None
    dates: tuple[str, ...] | None = None
    period: tuple[np.datetime64, np.datetime64] | None = None

    @classmethod
    def of(
        cls,
        variables: Iterable[str] | None,
        levels: Sequence[int] | None,
        leads: Sequence[int] | None,
        dates: Sequence[str] | None,
        derive: Iterable[str] = (),
    ) -> Wanted:
        """Return what the settings of a build ask for, with the variables from which those in `derive` are derived.

        Raises:
            UserError: a name is not in the registry.
        """
        names = None if variables is None else with_components((*variables, *derive))
        return cls(
            names,
            None if levels is None else tuple(levels),
            None if leads is None else tuple(leads),
            None if dates is None else tuple(dates),
        )

    @classmethod
    def of_truth(cls, names: Iterable[str], levels: Sequence[int], init_time: np.ndarray, last_lead: int) -> Wanted:
        """Return what the truth of a forecast needs.

        The forecast has the variables `names`, the `levels` (hPa), the init times (D,), and a last lead in hours.
        """
        period = init_time.min() - _AROUND, init_time.max() + np.timedelta64(last_lead, "h") + _AROUND
        return cls(with_components(names), tuple(levels) or None, period=period)

    def lists(self, of: Field, count: int) -> bool:
        """Return whether a variable with `count` fields is listed at all."""
        return of.static or self.variables is None or of.name in self.variables or count < MANY

    def places(self, of: Field, ticks: Mapping[str, np.ndarray], name: str, *, over_time: bool) -> np.ndarray:
        """Return the positions of the N fields that are listed along the four leading axes of a variable, (4, N).

        `ticks` holds the coordinate values of "init", "member", "lead" and "level", in this order. `over_time` is true
        for values over an interval.

        Raises:
            UserError: more than 60 million fields would be listed.
        """
        shape = [len(values) for values in ticks.values()]
        if math.prod(shape) < MANY:
            return np.indices(shape).reshape(len(shape), -1)
        keep = {role: np.ones(len(values), bool) for role, values in ticks.items()}
        if self.levels is not None and not of.surface:
            keep["level"] = np.isin(ticks["level"], self.levels)
        if self.leads is not None and not over_time:
            keep["lead"] = np.isin(ticks["lead"], self.leads)
        init = ticks["init"]
        if self.dates is not None:
            keep["init"] = _of_dates(init, self.dates)
        if self.period is not None:
            keep["init"] &= (init >= self.period[0]) & (init <= self.period[1])
        kept = [np.flatnonzero(one) for one in keep.values()]
        count = math.prod(map(len, kept))
        if count > _MOST:
            raise UserError(
                f"{name}: {count} fields are more than can be listed; prepare takes a part, by variables=, levels=,"
                " leads= and dates="
            )
        return np.stack([axis.ravel() for axis in np.meshgrid(*kept, indexing="ij")])


ALL = Wanted()


def with_components(names: Iterable[str]) -> frozenset[str]:
    """Return variables together with those from which they can be derived.

    Raises:
        UserError: a name is not in the registry.
    """
    return frozenset(one for name in names for one in (field(name).name, *(field(name).components or ())))


def _of_dates(init: np.ndarray, dates: Sequence[str]) -> np.ndarray:
    """Return which init times lie in `dates`, (D,) bool; True for all if a period of `dates` matches none of them."""
    keep = np.zeros(len(init), bool)
    try:
        keep[select_dates(init, dates)] = True
    except UserError:
        keep[:] = True
    return keep
