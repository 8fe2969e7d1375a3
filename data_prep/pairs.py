"""Combine a forecast, its truth and static fields into one source, which prepare, predict and evaluate open.

Axes: M member, T lead, V pressure variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.archive import ArchiveSource, open_archive
from data_prep.catalogue import Catalogue
from data_prep.file_index import FileIndex
from data_prep.files import TRUTH
from data_prep.geometry import Geometry, GridChange
from data_prep.identity import NO_OVERRIDES, Overrides
from data_prep.intervals import DERIVED
from data_prep.records import FIELD_INDEX
from data_prep.selecting import Wanted, places, translation
from data_prep.truth import ArchiveTruth, check_grid, period
from data_prep.xarray_files import XarrayFile
from ensemble_ml.config import Control, as_list, is_dataset
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.store import Fields, Layout, Part, Selection, Source, TensorStore, is_store, open_store
from ensemble_ml.store.source import fingerprint_at

_AXES = ("lead_hours", "variables", "levels", "surface")


class StoreTruth:
    """The truth of a tensor store at the init times and leads of a forecast; `ArchiveTruth` is that of an archive.

    Args:
        store: a tensor store with a truth.
        layout: the layout of the forecast, which gives the init times, leads, variables and levels.
        bounds: intervals of the forecast's sums and maxima by variable: [first, last] hour or None for each lead.

    Raises:
        UserError: the store has no truth, has another grid, or has sums or maxima over other intervals.
    """

    def __init__(self, store: TensorStore, layout: Layout, bounds: Mapping[str, Sequence[list[int] | None]]):
        if not store.has(Part.TRUTH):
            raise UserError(f"truth {store.path}: the store has no truth; prepare it with truth=ARCHIVE")
        check_grid(store.layout.grid, store.path, layout.grid)
        self.store, self.layout, self.path, self.masked = store, layout, store.path, store.masked
        own = store.layout
        # Positions of the forecast's init times and coordinates in the store, negative where the store lacks one.
        self._date = places(layout.init_time.tolist(), own.init_time.tolist())
        self._axes = translation(layout, own, members=False)
        for name in sorted(bounds.keys() & store.lead_bounds.keys()):
            for lead, pair in zip(layout.lead_hours, bounds[name], strict=True):
                there = dict(zip(own.lead_hours, store.lead_bounds[name], strict=True)).get(lead)
                if pair is not None and there is not None and list(pair) != list(there):
                    raise UserError(
                        f"truth {store.path}: {name} at {lead} h is over {there[0]}-{there[1]} h, the forecast's over"
                        f" {pair[0]}-{pair[1]} h; prepare both from the same lead times"
                    )

    def present(self, date: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which fields of an init time of the forecast exist, bool (1, T, V, Z) and (1, T, S)."""
        lay, there = self.layout, self._date[date]
        shape = 1, len(lay.lead_hours)
        pressure = np.zeros((*shape, len(lay.variables), len(lay.levels)), bool)
        surface = np.zeros((*shape, len(lay.surface)), bool)
        if there >= 0:
            found = self.store.present(Part.TRUTH, there)
            for block, values, axes in zip((pressure, surface), found, self._axes, strict=True):
                # Both sides are indexed only at coordinates that the store has.
                to = np.ix_(*(np.flatnonzero(axis >= 0) for axis in axes))
                block[to] = values[np.ix_(*(axis[axis >= 0] for axis in axes))]
        return pressure, surface

    def read(self, date: int, selection: Selection) -> Fields:
        """Read one init time of the forecast, with NaN where the store lacks a field."""
        wanted = {name: getattr(selection, name) for name in _AXES}
        wanted = {name: getattr(self.layout, name) if value is None else value for name, value in wanted.items()}
        own = self.store.layout
        # Only fields that the store has are read; all others stay NaN.
        common = {name: tuple(v for v in values if v in getattr(own, name)) for name, values in wanted.items()}
        first, last = selection.rows or (0, self.layout.grid.shape[0])
        shape = 1, len(wanted["lead_hours"])
        points = last - first, self.layout.grid.shape[1]
        pressure = np.full((*shape, len(wanted["variables"]), len(wanted["levels"]), *points), np.nan, np.float32)
        surface = np.full((*shape, len(wanted["surface"]), *points), np.nan, np.float32)
        if self._date[date] >= 0:
            found = self.store.read(Part.TRUTH, self._date[date], Selection(rows=selection.rows, **common))
            lead, variable, level, flat = ([wanted[name].index(v) for v in common[name]] for name in _AXES)
            pressure[np.ix_([0], lead, variable, level)] = found.pressure
            surface[np.ix_([0], lead, flat)] = found.surface
        return Fields(pressure, surface)

    def unverified(self) -> dict[str, str]:
        """Return sentences about the fields of the forecast for which the store has no truth, by variable."""
        lay, own, found = self.layout, self.store.layout, {}
        leads = [lead for lead in lay.lead_hours if lead not in own.lead_hours]
        levels = [level for level in lay.levels if level not in own.levels]
        for name in lay.names:
            lacking = [f"{lead} h" for lead in leads] + [f"{level} hPa" for level in levels if name in lay.variables]
            if name not in own.names or lacking:
                what = "the store has none of it" if name not in own.names else f"none of {', '.join(lacking)}"
                found[name] = f"truth {self.path}: {name} stays without truth: {what}"
        return found

    def apart(self) -> str:
        """Return the periods of forecast and truth in words if they share no init time; otherwise an empty text."""
        if (np.asarray(self._date) >= 0).any():
            return ""
        ours, theirs = (period(source.layout.init_time) for source in (self, self.store))
        return f"the forecast starts {ours}, and the store has truth for starts {theirs}"

    def fingerprint(self) -> str:
        """Return the fingerprint of the store."""
        return self.store.fingerprint()


class Pair:
    """A forecast with its truth and static fields (implements `ensemble_ml.store.source.Source`).

    If no truth is given, that of `forecast` is passed on; the same holds for static fields.

    Args:
        forecast: the source of the forecast.
        truth: the truth under the forecast's init times and leads, or None.
        static: static fields by name, (Y, X) float32, which replace those of the forecast; None for none.
    """

    def __init__(
        self, forecast: Source, truth: ArchiveTruth | StoreTruth | None, static: dict[str, np.ndarray] | None = None
    ):
        self.forecast, self.truth, self.path, self.layout = forecast, truth, forecast.path, forecast.layout
        self.lead_bounds: dict[str, list[list[int] | None]] = getattr(forecast, "lead_bounds", {})
        self._static = static

    @property
    def masked(self) -> tuple[str, ...]:
        """Return the variables that may have points without a value, in the forecast or in the truth."""
        of_truth = getattr(self.truth, "masked", ())
        return tuple(name for name in self.layout.names if name in (*self.forecast.masked, *of_truth))

    def unverified(self) -> dict[str, str]:
        """Return sentences about the fields of the forecast that its truth cannot verify at any date, by variable."""
        return self.truth.unverified() if self.truth is not None else {}

    def has(self, part: Part) -> bool:
        """Return whether any field of `part` is there."""
        if part is not Part.TRUTH or self.truth is None:
            return self.forecast.has(part)
        dates = range(len(self.layout.init_time))
        return any(there.any() for date in dates for there in self.truth.present(date))

    def read(self, part: Part, date: int, selection: Selection = Selection()) -> Fields:  # noqa: B008 - frozen
        """Read one init time (see `Source.read`)."""
        if part is Part.TRUTH and self.truth is not None:
            return self.truth.read(date, selection)
        return self.forecast.read(part, date, selection)

    def present(self, part: Part, date: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which fields are there, bool (M, T, V, Z) and (M, T, S)."""
        if part is Part.TRUTH and self.truth is not None:
            return self.truth.present(date)
        return self.forecast.present(part, date)

    def without(self, dates: Sequence[int]) -> Pair:
        """Return the same archives without some init times, given by their indices."""
        assert isinstance(self.forecast, ArchiveSource)
        truth = self.truth.without(dates) if isinstance(self.truth, ArchiveTruth) else self.truth
        return Pair(self.forecast.without(dates), truth, self._static)

    def static(self) -> dict[str, np.ndarray]:
        """Return the static fields by name, (Y, X) float32."""
        given = self._static or {}
        # The user may give fields because those of the archive are damaged, so the latter are not read then.
        if isinstance(self.forecast, ArchiveSource):
            return self.forecast.catalogue.static(without=given) | given
        return self.forecast.static() | given

    def fingerprint(self) -> str:
        """Return 16 hex digits over the forecast and, if one was given, the truth; given static fields do not count."""
        parts = [self.forecast.fingerprint()] + ([self.truth.fingerprint()] if self.truth else [])
        return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def date_fingerprint(self, date: int) -> str:
        """Return 16 hex digits over the data from which the forecast of one init time is read."""
        return fingerprint_at(self.forecast, date)


def open_source(
    path: Any,
    *,
    control: Control = Control.apart,
    grid: Grid | None = None,
    index: FileIndex | None = None,
    cuts: Mapping[str, Collection[int]] | None = None,
    overrides: Overrides = NO_OVERRIDES,
) -> Source:
    """Open a tensor store or a forecast archive.

    An archive also offers variables that can be derived from others (wind speed). A tensor store is returned as it is.

    Args:
        path: the store, or the files of the archive.
        control: whether an unperturbed member of an archive counts as a member.
        grid: the grid to which an archive is brought; None keeps its own.
        index: keeps the tables of files; None keeps none.
        cuts: for each variable, the hours at which its sums are cut (`data_prep.archive.open_archive`).
        overrides: what the user states of an archive's variables.

    Raises:
        UserError: the path is neither, or is damaged; or the control of a tensor store is to be included.
    """
    store = _store(path)
    if store is not None:
        if control is Control.include:
            raise UserError(f"control=include: {store.path} is a tensor store; prepare it with control=include")
        return store
    change = None if grid is None else GridChange(regrid=grid)
    return open_archive(
        path, control=control, change=change, index=index, derive=DERIVED, cuts=cuts, overrides=overrides
    )


def open_pair(
    forecast: Any,
    truth: Any = None,
    static: Any = None,
    *,
    control: Control = Control.apart,
    grid: Grid | None = None,
    index: FileIndex | None = None,
    cuts: Mapping[str, Collection[int]] | None = None,
    overrides: Overrides = NO_OVERRIDES,
) -> Pair:
    """Open a forecast with its truth and static fields.

    Args:
        forecast: an archive or a tensor store.
        truth: an archive or a tensor store; None takes the truth of the forecast, if it is a store that has one.
        static: a file with static fields; None takes those of the forecast.
        control: whether an unperturbed member of an archive counts as a member.
        grid: the grid to which archives are brought; None keeps their own. A tensor store always keeps its own.
        index: keeps the tables of GRIB files, and which fields of NetCDF and Zarr are all NaN; None keeps none.
            `data_prep.file_index.user_index` is for archives that are read in place.
        cuts: as in `open_source`, for the sums of the forecast.
        overrides: what the user states of variables, for all archives.

    Raises:
        UserError: something is missing or damaged; grids differ; the truth is an ensemble, or has no time of the
            forecast; or no file has a variable that `overrides` names.
    """
    source = open_source(forecast, control=control, grid=grid, index=index, cuts=cuts, overrides=overrides)
    return pair(source, truth, static, regrid=grid is not None, index=index, overrides=overrides)


def pair(
    source: Source,
    truth: Any,
    static: Any,
    *,
    regrid: bool = False,
    index: FileIndex | None = None,
    overrides: Overrides = NO_OVERRIDES,
) -> Pair:
    """Combine an open forecast with its truth and static fields, which are given by their paths.

    An archive on the grid of the forecast's files is brought to the target grid together with the forecast. An archive
    on another grid is brought there only if `regrid` is on; otherwise it has to be on the target grid.

    Raises:
        UserError: as in `open_pair`.
    """
    catalogues = [source.catalogue] if isinstance(source, ArchiveSource) else []
    fields: dict[str, np.ndarray] | None = None
    if as_list(static):
        of_static, fields = _open_static(static, source, regrid=regrid, index=index, overrides=overrides.of_static())
        catalogues.append(of_static)
    store = _store(truth)
    if as_list(truth) and store is None:
        lay = source.layout
        part = Wanted.of_truth(lay.names, lay.levels, lay.init_time, max(lay.lead_hours))
        catalogues.append(Catalogue(truth, role=TRUTH, index=index, overrides=overrides.of_truth(), wanted=part))
    # A name that no file has is a mistake that would otherwise not be noticed.
    _check_overrides(overrides, catalogues, source.path)
    if not as_list(truth):
        return Pair(source, None, fields)
    if store is not None:
        of_store = StoreTruth(store, source.layout, getattr(source, "lead_bounds", {}))
        _check_times(of_store)
        return Pair(source, of_store, fields)
    catalogue = catalogues[-1]
    _bring(catalogue, f"truth {catalogue.path}", source, regrid)
    wanted, bounds = _wanted(source), getattr(source, "lead_bounds", {})
    methods = {}
    if isinstance(source, ArchiveSource):
        methods = {name: source.catalogue.methods(name) for name in source.layout.names}
    aligned = catalogue.without_empty(lambda: ArchiveTruth(catalogue, source.layout, wanted, bounds, methods), index)
    _check_times(aligned)
    return Pair(source, aligned, fields)


def _check_times(truth: ArchiveTruth | StoreTruth) -> None:
    """Raise a UserError if a truth and the forecast have no time in common. The message states both periods."""
    periods = truth.apart()
    if periods:
        raise UserError(f"truth {truth.path}: {periods}; give the truth of those times, or none (truth=null)")


def open_orographies(
    forecast: str | None, truth: str | None, source: Source, *, regrid: bool = False, index: FileIndex | None = None
) -> tuple[np.ndarray, np.ndarray] | None:  # fmt: skip
    """Read the orography of a forecast's model and that of its truth's model, in m.

    Args:
        forecast: a file with the orography of the forecast's model; None returns None.
        truth: a file with the orography of the truth's model; None takes that of `source`.
        source: the forecast, whose grid the fields have to fit.
        regrid: whether fields on another grid are regridded.
        index: keeps the tables of files; None keeps none.

    Returns:
        Both fields, (Y, X) float32, or None.

    Raises:
        UserError: a file is missing or damaged, holds no static field, or has another grid; or one of the two does not
            exist.
    """
    if forecast is None:
        return None
    found = []
    for key, path in (("orography", forecast), ("truth_orography", truth)):
        if path is None:
            fields = source.static()
        else:
            _, fields = _open_static(path, source, regrid=regrid, index=index, overrides=NO_OVERRIDES)
        if "orog" not in fields:
            where = f"{key}={path}: holds no orography" if path else f"{key}: not given, and {source.path} has none"
            raise UserError(f"{where}; give a file with the height of the ground, or its geopotential")
        found.append(fields["orog"])
    return found[0], found[1]


def _open_static(
    paths: Any, source: Source, *, regrid: bool, index: FileIndex | None, overrides: Overrides
) -> tuple[Catalogue, dict[str, np.ndarray]]:
    """Open a file of static fields and read them, on the grid of `source`; raise a UserError if it has none."""
    catalogue = Catalogue(paths, role="static", index=index, overrides=overrides)
    _bring(catalogue, f"static={catalogue.path}", source, regrid)
    fields = catalogue.static()
    if not fields:
        known = ", ".join(name for name in FIELD_INDEX if name in ("orog", "lsm"))
        raise UserError(f"static={catalogue.path}: holds no static field; known are {known}")
    return catalogue, fields


def _check_overrides(overrides: Overrides, catalogues: Sequence[Catalogue], path: str) -> None:
    """Raise a UserError if no NetCDF file or Zarr store has a variable on which the user states something."""
    files = [file for one in catalogues for file in one.readers if isinstance(file, XarrayFile)]
    names = {name for file in files for name in file.names}
    read = {name for file in files for name in file.found}
    has = f"; they have {', '.join(sorted(names)[:20])}" if names else ": such statements are for NetCDF and Zarr"
    for ours, theirs in overrides.names.items():
        if theirs not in names:
            raise UserError(f"names={{{ours}: {theirs}}}: no file of {path} has a variable {theirs}{has}")
    of_forecast = {name for file in files if file.overrides.forecast for name in file.found}
    of_truth = {name for file in files if not file.overrides.forecast for name in file.found}
    for key, stated, those in (
        ("units", overrides.units, read),
        ("intervals", overrides.intervals, of_forecast),
        ("truth_intervals", overrides.truth_intervals, of_truth),
    ):
        for ours, words in stated.items():
            if ours not in those:
                where = "the truth" if key == "truth_intervals" else path
                raise UserError(f"{key}={{{ours}: {words}}}: no file of {where} has {ours} among what is read{has}")


def _bring(catalogue: Catalogue, name: str, source: Source, regrid: bool) -> None:
    """Bring an archive to the grid of `source`; raise a UserError if it does not cover that grid.

    Without `regrid`, the archive has to be on that grid, or on the grid of the files of `source`.
    """
    wanted = source.layout.grid
    way = source.catalogue.geometry if isinstance(source, ArchiveSource) else Geometry(wanted, wanted)
    # An archive on the forecast's own grid is cut, coarsened or regridded in the same way as the forecast.
    if regrid or catalogue.grid.same_as(way.source):
        catalogue.onto(Geometry(catalogue.grid, wanted, way.whole))
    check_grid(catalogue.grid, name, wanted)


def _store(path: Any) -> TensorStore | None:
    """Open the tensor store at a path; return None if there is none, and refuse one among several paths."""
    paths = as_list(path)
    stores = [one for one in paths if not is_dataset(one) and is_store(Path(one))]
    if stores and len(paths) > 1:
        raise UserError(f"{stores[0]}: is a tensor store among {len(paths)} paths; give it alone")
    return open_store(stores[0]) if stores else None


def _wanted(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Return which fields the forecast has for any date and member, bool (T, V, Z) and (T, S)."""
    dates = range(len(source.layout.init_time))
    there = [[one.any(0) for one in source.present(Part.FORECAST, date)] for date in dates]
    return np.any([one[0] for one in there], axis=0), np.any([one[1] for one in there], axis=0)
