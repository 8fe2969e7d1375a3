"""Archives of GRIB, NetCDF or Zarr that are read in place, with the same interface as a tensor store.

Fields are decoded when they are asked for. The leads, variables and levels of an archive are the union over its init
times and members. If no init time and no member has a field at a lead, the field is taken to be absent there on
purpose, and reads as NaN. A field that some have and others lack is a gap (see `data_prep.gaps`).

Axes: D init time, M member, T lead, V pressure variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from data_prep.catalogue import Catalogue, units_setting
from data_prep.file_index import FileIndex
from data_prep.files import FORECAST
from data_prep.gathered import Allocate, Gathered, Target, zeros
from data_prep.geometry import READ_WITH, GridChange, ReducedGrid
from data_prep.identity import NO_OVERRIDES, Overrides
from data_prep.intervals import (
    NO_INTERVAL,
    NONE,
    Combine,
    at_lead_zero_alone,
    beside,
    cut,
    from_start,
    intervals,
    lead_bounds,
    not_at_lead_zero,
    uncut,
    with_derived,
)
from data_prep.notices import notice_log
from data_prep.records import CONTROL, IS_ACCUMULATED, IS_SURFACE, MEMBER, identities
from data_prep.selecting import (
    Wanted,
    chosen,
    control_as_member,
    layout_of,
    narrow,
    positions,
    translation,
    without_members,
)
from ensemble_ml.config import Control
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, resolve
from ensemble_ml.store.fuse import Members, fuse
from ensemble_ml.store.source import Fields, Layout, Part, Selection

log = notice_log(__name__)

# In place of the row of a sum to subtract: nothing is subtracted, or the archive lacks that sum.
_NOTHING, _ABSENT = -1, -2


class ArchiveSource:
    """A forecast archive with the interface of a store (it implements `ensemble_ml.store.source.Source`).

    `layout` and `lead_bounds` are those of a tensor store. `left_out` names the variables that have only sums from the
    start, at lead 0. `cut` describes the sums, means and maxima of which `leads` skips intervals of the archive (see
    `data_prep.intervals.cut`). `masked` names the variables that may have points without a value.

    The arguments are those of `open_archive`, with the table of the archive's fields in place of the files.

    Raises:
        UserError: the archive lacks something that is selected, or has no member; a perturbed member has the number of
            a control that is included; or the intervals of a variable do not go together.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        control: Control = Control.apart,
        variables: Sequence[str] | None = None,
        levels: Sequence[int] | None = None,
        leads: Sequence[int] | None = None,
        dates: Sequence[str] | None = None,
        derive: Sequence[str] = (),
        cuts: Mapping[str, Collection[int]] | None = None,
    ):
        self.catalogue, self.path = catalogue, catalogue.path
        wanted = (*(variables or ()), *derive)
        records, rows, partners = with_derived(from_start(identities(catalogue.records)), wanted)
        if control is Control.include:
            records = control_as_member(records, self.path)
        keep = chosen(records, self.path, variables, levels, dates)
        self.left_out = self._check_sums(records[keep], variables)
        # Sums at lead 0, and sums that do not end at a cut, must not define the intervals of the archive.
        keep &= not_at_lead_zero(records) & ~uncut(records, cuts or {})
        self._intervals = intervals(records[keep])
        keep &= ~beside(records, self._intervals)
        keep &= ~without_members(records, keep, self.path)
        order = np.flatnonzero(keep)
        # The records of one init time have to be contiguous, so that `_here` finds them without a search.
        order = order[np.argsort(records["init"][order], kind="stable")]
        self._records = records[order]
        self._rows, self._partners = rows[order].astype(np.int32), partners[order].astype(np.int32)
        self.layout = layout_of(self._records, catalogue.grid, self.path, leads)
        for name in variables or ():
            if name not in self.layout.names:
                raise UserError(f"variables={name}: {self.path} has none of it at leads={list(leads or ())} h")
        self.lead_bounds = lead_bounds(self.layout.names, self.layout.lead_hours, self._intervals)
        self.cut = cut(self.layout.lead_hours, self._intervals)
        masked = {FIELDS[index].name for index in np.unique(self._records["field"][self._records["masked"]])}
        self.masked = tuple(name for name in self.layout.names if name in masked)
        self._place()
        self._subtrahend = self._find_subtrahends()

    def _check_sums(self, records: np.ndarray, variables: Sequence[str] | None) -> tuple[str, ...]:
        """Return the variables that have only sums at lead 0. Refuse them if asked for, or if there are no others."""
        alone = at_lead_zero_alone(records)
        if alone and variables is not None:
            raise UserError(f"variables={alone[0]}: {self.path} has {NO_INTERVAL}")
        if alone and not not_at_lead_zero(records).any():
            raise UserError(f"{self.path}: {', '.join(alone)}: there are {NO_INTERVAL}")
        return alone

    def _place(self) -> None:
        """Set the position of every record in the blocks, (N, 4), with -1 on an axis that does not contain it.

        The four columns are member, lead, variable and level. The member of a control and the level of a surface
        variable are 0.
        """
        lay, records = self.layout, self._records
        self._first = np.append(np.searchsorted(records["init"], lay.init_time), len(records))
        axis = {name: place for group in (lay.variables, lay.surface) for place, name in enumerate(group)}
        of_field = np.array([axis.get(field.name, -1) for field in FIELDS])
        self._surface = IS_SURFACE[records["field"]]
        self._places = np.empty((len(records), 4), np.int16)
        self._places[:, 0] = np.where(records["kind"] == MEMBER, positions(records["member"], lay.realization), 0)
        self._places[:, 1] = positions(records["lead"], lay.lead_hours)
        self._places[:, 2] = of_field[records["field"]]
        self._places[:, 3] = np.where(self._surface, 0, positions(records["level"], lay.levels))

    def _find_subtrahends(self) -> np.ndarray:
        """Return the catalogue's row of the sum to subtract from each record, (N,).

        It is _NOTHING if no sum is to be subtracted, and _ABSENT if the archive lacks that sum, or if the record covers
        other hours than those of its lead. A sum from the start of the forecast is brought to the interval of its lead
        by subtracting the sum up to the lead before (see `data_prep.intervals`).
        """
        found = np.full(len(self._records), _NOTHING, np.int32)
        for index, by_lead in self._intervals.items():
            mine = np.flatnonzero(self._records["field"] == index)
            keys = self._records[["init", "kind", "member", "lead_start", "lead"]][mine].tolist()
            row_of = dict(zip(keys, self._rows[mine].tolist(), strict=True))
            for i, (*same, start, lead) in zip(mine.tolist(), keys, strict=True):
                if lead not in by_lead:
                    continue
                interval = by_lead[lead]
                if start == interval.origin and interval.previous is not None:
                    found[i] = row_of.get((*same, start, interval.previous), _ABSENT)
                elif start != interval.start:  # a control's sum over other hours than the members'
                    found[i] = _ABSENT
        return found

    def lost(self, part: Part) -> tuple[np.ndarray, np.ndarray]:
        """Return which fields have records but cannot be made, bool (T, V, Z) and (T, S).

        The sum to subtract is missing, or the hours differ. Such a field is a gap even if no init time has it.
        """
        lay = self.layout
        pressure = np.zeros((len(lay.lead_hours), len(lay.variables), len(lay.levels)), bool)
        surface = np.zeros((len(lay.lead_hours), len(lay.surface)), bool)
        kind = CONTROL if part is Part.CONTROL else MEMBER
        here = (self._subtrahend == _ABSENT) & (self._records["kind"] == kind) & (self._places[:, 1] >= 0)
        pressure[tuple(self._places[here & ~self._surface, 1:].T)] = True
        surface[tuple(self._places[here & self._surface, 1:3].T)] = True
        return pressure, surface

    def rows(self) -> np.ndarray:
        """Return the rows of the catalogue that are read for any field, (N,), ascending."""
        used = self._places[:, 1] >= 0
        rows = np.concatenate([self._rows[used], self._partners[used], self._subtrahend[used]])
        return np.unique(rows[rows >= 0])

    def rows_of(self, part: Part, date: int) -> np.ndarray:
        """Return the rows of the catalogue from which one init time of the forecast or the control is read, (N,)."""
        return np.array([row for target in self._targets(part, date, self.layout) for row in target.rows], int)

    def without(self, dates: Sequence[int]) -> ArchiveSource:
        """Return the same archive without the init times at some positions."""
        lay = self.layout
        keep = ~np.isin(self._records["init"].astype("datetime64[ns]"), lay.init_time[list(dates)])
        # The table is cut down instead of being made again, so that no file has to be read again.
        other = copy.copy(self)
        for name in ("_rows", "_records", "_subtrahend", "_partners"):
            setattr(other, name, getattr(self, name)[keep])
        other.layout = replace(lay, init_time=np.delete(lay.init_time, list(dates)))
        other._place()
        return other

    def has(self, part: Part) -> bool:
        """Return whether any field of `part` is present.

        An archive of a forecast has no truth. Mean and spread need two members.
        """
        kinds = self._records["kind"]
        if part is Part.TRUTH:
            return False
        if part in (Part.MEAN, Part.SPREAD):
            return len(self.layout.realization) > 1
        return bool((kinds == (CONTROL if part is Part.CONTROL else MEMBER)).any())

    def _here(self, part: Part, date: int) -> np.ndarray:
        """Return the positions of the records that make the forecast or the control of one init time."""
        here = np.arange(self._first[date], self._first[date + 1])
        here = here[self._records["kind"][here] == (CONTROL if part is Part.CONTROL else MEMBER)]
        return here[(self._places[here, 1] >= 0) & (self._subtrahend[here] != _ABSENT)]

    def _targets(self, part: Part, date: int, narrowed: Layout) -> list[Target]:
        """Return a target for each field of an init time that `narrowed` keeps, with its position there."""
        here = self._here(part, date)
        axes = translation(self.layout, narrowed, members=part is Part.FORECAST)
        targets = []
        for surface in (False, True):
            mine = here[self._surface[here] == surface]
            place = np.stack([axis[self._places[mine, number]] for number, axis in enumerate(axes[surface])], axis=1)
            kept = (place >= 0).all(1)
            columns = place, self._rows[mine], self._subtrahend[mine], self._partners[mine]
            for at, row, less, partner in zip(*(column[kept].tolist() for column in columns), strict=True):
                rows, combine = ((row,), Combine.ONE) if less == _NOTHING else ((row, less), Combine.DIFFERENCE)
                if partner != NONE:
                    rows, combine = (row, partner), Combine.SPEED
                targets.append(Target(surface, tuple(at), rows, combine))
        return targets

    def gather(
        self,
        part: Part,
        date: int,
        selection: Selection = Selection(),  # noqa: B008 - frozen
        allocate: Allocate = zeros,
    ) -> Gathered:
        """Read one init time of the forecast or the control into blocks (see `data_prep.gathered.Gathered`).

        The cost is that of the fields selected, so an init time may be gathered in pieces (see
        `data_prep.selecting.slices_of`).

        Raises:
            UserError: something selected is not in the archive, or a field cannot be decoded or holds NaN.
        """
        narrowed = narrow(self.layout, selection, self.path)
        count = len(narrowed.realization) if part is Part.FORECAST else 1
        return self.catalogue.gather(self._targets(part, date, narrowed), narrowed, count, selection.rows, allocate)

    def read(self, part: Part, date: int, selection: Selection = Selection()) -> Fields:  # noqa: B008 - frozen
        """Read one init time of the forecast, the control, or the mean or spread of the members (see `Source.read`)."""
        if not self.has(part):
            raise UserError(f"{self.path}: has no {part.value}")
        if part in (Part.MEAN, Part.SPREAD):
            return self._moments(part, date, selection)
        return Fields(*self.gather(part, date, selection).decoded())

    def _moments(self, part: Part, date: int, selection: Selection) -> Fields:
        """Return the mean or spread of all members, computed one lead at a time to bound the memory."""
        leads = selection.lead_hours or self.layout.lead_hours
        blocks = []
        for lead in leads:
            one = Selection(None, (lead,), selection.variables, selection.levels, selection.surface, selection.rows)
            both = self.gather(Part.FORECAST, date, one).decoded()
            blocks.append([_moment(values, part) for values in both])
        pressure, surface = (np.concatenate(list(kind), axis=1) for kind in zip(*blocks, strict=True))
        return Fields(pressure, surface)

    def present(self, part: Part, date: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which fields are there, bool (M, T, V, Z) and (M, T, S).

        M is 1 for the control, the mean and the spread. Mean and spread are there if at least two members are.
        """
        lay = self.layout
        derived = part in (Part.MEAN, Part.SPREAD)
        count = len(lay.realization) if derived or part is Part.FORECAST else 1
        leads = len(lay.lead_hours)
        pressure = np.zeros((count, leads, len(lay.variables), len(lay.levels)), bool)
        surface = np.zeros((count, leads, len(lay.surface)), bool)
        if self.has(part):
            here = self._here(Part.FORECAST if derived else part, date)
            flat = self._surface[here]
            pressure[tuple(self._places[here[~flat]].T)] = True
            surface[tuple(self._places[here[flat], :3].T)] = True
        if derived:
            return pressure.sum(0, keepdims=True) >= 2, surface.sum(0, keepdims=True) >= 2
        return pressure, surface

    def static(self) -> dict[str, np.ndarray]:
        """Return the static fields that came with the archive, (Y, X) float32 in the registry's units."""
        return self.catalogue.static()

    def fingerprint(self) -> str:
        """Return `Catalogue.fingerprint` over all fields of the archive, whether they are selected or not."""
        return self.catalogue.fingerprint()

    def date_fingerprint(self, date: int) -> str:
        """Return the `fingerprint` of only those fields from which one init time of the forecast is read."""
        return self.catalogue.fingerprint(self.rows_of(Part.FORECAST, date))


def open_archive(
    paths: Any,
    *,
    control: Control = Control.apart,
    variables: Sequence[str] | None = None,
    levels: Sequence[int] | None = None,
    leads: Sequence[int] | None = None,
    dates: Sequence[str] | None = None,
    change: GridChange | None = None,
    index: FileIndex | None = None,
    derive: Sequence[str] = (),
    cuts: Mapping[str, Collection[int]] | None = None,
    overrides: Overrides = NO_OVERRIDES,
    several_grids: bool = False,
) -> ArchiveSource:
    """Open a forecast archive of GRIB, NetCDF or Zarr: a file, a folder, a glob pattern, or a list of them.

    Args:
        paths: files, folders, globs, URLs or open Datasets; of a folder with archive.json, its sub-folder
            ensemble/ is read.
        control: whether an unperturbed member counts as a member.
        variables: names of the variables to keep; None keeps all. Wind speed (ws, ws10), if it is named, is derived for
            each member from its components, unless the archive has it.
        levels: pressure levels to keep, hPa; None keeps all.
        leads: leads to keep, hours; None keeps all.
        dates: init times to keep, each a year, a date, a time, or a range of these; None keeps all.
        change: the grid on which fields are wanted; None keeps their own.
        index: keeps the tables of GRIB files, and which fields are all NaN. These are searched for only if its `look`
            is true. None keeps nothing, and does not search.
        derive: variables to derive if their components are present (see `data_prep.intervals.DERIVED`).
        cuts: by variable, the hours after the init time at which its sums must end; sums that end at other hours are
            ignored. For other variables, each sum covers the hours since the archive's lead before, even if `leads`
            does not keep that lead.
        overrides: what the user states of NetCDF and Zarr variables.
        several_grids: whether to open an archive whose files are on several grids, to describe it. Its values can only
            be read if `change` regrids all to one grid.

    Raises:
        UserError: a file is missing or damaged; grids differ or cannot be changed as asked; a variable that is asked
            for has no units; a field exists twice; or as `ArchiveSource` raises it.
    """
    variables = None if variables is None else [resolve(name).name for name in variables]
    several_grids |= change is not None and change.regrid is not None
    wanted = Wanted.of(variables, levels, leads, dates, derive)
    catalogue = Catalogue(
        paths, role=FORECAST, index=index, overrides=overrides, several_grids=several_grids, wanted=wanted
    )
    _check_catalogue(catalogue, variables or (), several_grids)
    if change is not None:
        catalogue.onto(change.of(catalogue.grid))
    kept = {"variables": variables, "levels": levels, "leads": leads, "dates": dates}
    source = catalogue.without_empty(
        lambda: ArchiveSource(catalogue, control=control, derive=derive, cuts=cuts, **kept),  # type: ignore[arg-type]
        index,
    )
    _warn_unstated_leads(source)
    _warn_unstated_sums(source)
    if source.left_out:
        log.info("%s: %s left out: there are %s", source.path, ", ".join(source.left_out), NO_INTERVAL)
    return source


def _check_catalogue(catalogue: Catalogue, variables: Sequence[str], several_grids: bool) -> None:
    """Raise a UserError if a selected variable has no units in its file, or if the grid is reduced."""
    present = {FIELDS[index].name for index in np.unique(catalogue.records["field"]).tolist()}
    asked = set(variables) - present
    lacking = {theirs: ours for theirs, ours in catalogue.without_units.items() if ours in asked}
    if lacking:
        shown, has = ", ".join(sorted(lacking)), "has" if len(lacking) == 1 else "have"
        names = ", ".join(sorted(set(lacking.values())))
        said = units_setting(lacking.values())
        raise UserError(f"variables=[{names}]: {catalogue.path}: {shown} {has} no units; {said}")
    if isinstance(catalogue.grid, ReducedGrid) and not several_grids:
        raise UserError(f"{catalogue.path}: {catalogue.grid.describe()} {READ_WITH}")


def _warn_unstated_leads(source: ArchiveSource) -> None:
    """Warn if files other than GRIB have lead 0 alone. They may state no lead, and times may be valid times."""
    # GRIB always states whether a field is a forecast, so only NetCDF and Zarr leave a doubt.
    leads = source.catalogue.records["lead"]  # also those that were not asked for
    if not leads.any() and not all(reader.keyed for reader in source.catalogue.readers):
        text = "%s: no field states a lead, so all get lead 0. This is right for a truth. Forecasts need a coordinate"
        log.warning(f"{text} of leads, or forecast_reference_time", source.path)


def _warn_unstated_sums(source: ArchiveSource) -> None:
    """Warn of sums whose interval no file states: they are taken as sums from the start of the forecast."""
    records = source.catalogue.records
    open_sums = IS_ACCUMULATED[records["field"]] & ~records["bounded"] & (records["lead"] > 0)
    names = [FIELDS[index].name for index in np.unique(records["field"][open_sums]).tolist()]
    names = [name for name in names if name in source.layout.names]
    if names:
        text = "%s: no file states the interval of %s, so they are read as sums from the start of the forecast"
        log.warning(f"{text}. If that is wrong, give intervals={{%s: 6}}", source.path, ", ".join(names), names[0])


def _moment(values: np.ndarray, part: Part) -> np.ndarray:
    """Return the mean or spread, (1, T, ..., Y, X) float32, of members (M, T, ..., Y, X), which are NaN where absent.

    It is NaN if fewer than two members have the field, and at points where one of them has no value.
    """
    out = np.empty((1, *values.shape[1:]), np.float32)
    for cell in np.ndindex(*values.shape[1:-2]):
        members = values[:, *cell][:, None]
        fused = fuse(Members.plain(members, np.isfinite(members).any((2, 3))))
        out[0, *cell] = (fused.mean if part is Part.MEAN else fused.spread)[0]
    return out
