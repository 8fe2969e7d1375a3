"""Coordinates of an archive, and their reduction to what a caller selects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from data_prep.notices import notice_log
from data_prep.records import CONTROL, FIELD_INDEX, IS_SURFACE, MEMBER
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, field
from ensemble_ml.grid import Grid
from ensemble_ml.store.source import Layout, Selection, select_dates

log = notice_log(__name__)


def control_as_member(records: np.ndarray, path: str) -> np.ndarray:
    """Return a copy of the records in which the control is a member under its own number. Warn if there is no control.

    Args:
        records: (N,) table of fields.
        path: the archive, for messages.

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

    Args:
        records: (N,) table of fields.
        path: the archive, for error messages.
        variables: names of variables; None for all.
        levels: pressure levels, hPa; None for all. They do not apply to surface variables.
        dates: init times, as `select_dates` takes them; None for all.

    Raises:
        UserError: a variable is unknown, a date cannot be parsed, or the archive lacks a variable, level or date.
    """
    keep = np.ones(len(records), bool)
    if variables is not None:
        wanted = [FIELD_INDEX[field(name).name] for name in variables]
        there = np.unique(records["field"]).tolist()
        for index in wanted:
            if index not in there:
                has = ", ".join(FIELDS[one].name for one in there)
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

    A store would otherwise have positions that no member fills. A line in the log names what is left out.

    Args:
        records: (N,) table of fields.
        keep: (N,) bool, the records to consider.
        path: the archive, for the log.
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
    """Return the coordinates that the records span.

    Args:
        records: (N,) table of fields.
        grid: the grid of the fields.
        path: the archive, for error messages.
        leads: lead times in hours to keep; None for all.

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
    """Yield selections of one lead and one variable that together are the whole layout.

    Each has all members and levels.
    """
    for lead in layout.lead_hours:
        for name in layout.names:
            yield Selection.one(lead, name, surface=name in layout.surface)


def translation(old: Layout, new: Layout, *, members: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return where each position on the axes of `old` lies in `new`, -1 if it does not.

    Args:
        old: coordinates of the archive.
        new: selected coordinates.
        members: whether the blocks have the members of the layouts, or a member axis of length one.

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
