"""Read forecasts back: folders of CF NetCDF files, one a start date, as `predict` writes them.

A field NAME is scored through NAME_location and NAME_scale (parameters of the law that the attribute
`distribution_family` names), or through NAME_mean and NAME_stddev as a normal law where a file has only these; a mean
and standard deviation that it lacks are those of the law. Its predicted spread of the full ensemble is
NAME_ensemble_spread. What a single file says of itself is read by `forecast_files`. Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xarray as xr

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.grid import Grid
from ensemble_ml.verification.baselines import CORRECTIONS
from ensemble_ml.verification.families import moments
from ensemble_ml.verification.forecast_files import (
    KNOWN,
    PARTS,
    READ,
    conversion,
    dates_of,
    family_of,
    grid_of,
    hours_of,
    lead_hours,
    levels_of,
    numbers_of,
    open_file,
    reference_time,
    variables_of,
)


@dataclass(frozen=True, eq=False)
class Predicted:
    """What a forecast says of one variable, lead and start date; (Z, Y, X) float64, None where it says nothing."""

    family: Family
    location: np.ndarray | None
    scale: np.ndarray | None
    mean: np.ndarray | None
    stddev: np.ndarray | None
    spread: np.ndarray | None


@dataclass(frozen=True, eq=False)
class _File:
    """An open file and where its leads and levels are."""

    data: xr.Dataset
    hours: list[int]
    levels: list[int]
    time: str  # the dimension of leads


@dataclass(eq=False)
class ForecastSet:
    """The forecasts of one folder."""

    label: str
    path: str
    files: dict[np.datetime64, Path]
    names: frozenset[str]
    made_of: dict[np.datetime64, tuple[str, ...]]  # members, by start date; none where a file does not say
    training_dates: np.ndarray
    untold_dates: int  # files that do not state their training dates
    validation_dates: np.ndarray  # they chose the checkpoint
    earlier_dates: np.ndarray  # they trained or chose the weights that training began from
    checkpoints: tuple[str, ...]  # sha256 of those that made the files
    lead_hours: tuple[int, ...]  # of all files
    uneven_leads: tuple[int, ...]  # those that some files lack
    uneven_members: tuple[str, ...]  # variables of which some files lack members
    variables: dict[str, tuple[int | None, ...]]  # name -> levels; (None,) at the surface
    grid: Grid
    _rows: np.ndarray
    _columns: np.ndarray
    _open: dict[Path, _File] = field(default_factory=dict)

    @property
    def silent(self) -> bool:
        """Whether any of its files does not say which members it was made from."""
        return not all(self.made_of.values())

    @property
    def members_in(self) -> tuple[str, ...]:
        """Members of the date with the most: others may lack some of those that were asked for; none where `silent`."""
        return () if self.silent else max(self.made_of.values(), key=len)

    @property
    def seen(self) -> frozenset[str]:
        """Members that any of its dates was made from, of those that say so."""
        return frozenset().union(*self.made_of.values())

    @property
    def mixed(self) -> bool:
        """Whether members or checkpoints differ between its dates."""
        return len(set(self.made_of.values())) > 1 or len(self.checkpoints) > 1

    def predicted(self, init_time: np.datetime64, name: str, lead: int, levels: tuple[int | None, ...]) -> Predicted:
        """Read one variable at one lead.

        Raises:
            UserError: the file lacks the lead, or cannot be read; or a scale or spread is below zero.
        """
        path = self.files[init_time]
        file, step = self._file(path), self._step(init_time, lead)
        parts = {part: self._field(file, name, part, step, levels) for part in PARTS}
        for part in ("scale", "stddev", "ensemble_spread"):
            if (values := parts[part]) is not None and (values < 0).any():
                raise UserError(f"{path}: {name}_{part} is below zero at {int((values < 0).sum())} of its points")
        location, scale, family = parts["location"], parts["scale"], registered(name).family
        if location is None or scale is None:
            location, scale, family = parts["mean"], parts["stddev"], Family.NORMAL
        else:
            family = family_of(file.data[f"{name}_location"], family)
        mean, stddev = parts["mean"], parts["stddev"]
        if location is not None and scale is not None and (mean is None or stddev is None):
            of_law = moments(family, location, scale)
            mean, stddev = of_law[0] if mean is None else mean, of_law[1] if stddev is None else stddev
        return Predicted(family, location, scale, mean, stddev, parts["ensemble_spread"])

    def has_members(self, name: str) -> bool:
        """Whether the files hold members of a variable."""
        return f"{name}_member" in self.names

    def members(self, init_time: np.datetime64, name: str, lead: int, levels: tuple[int | None, ...]) -> np.ndarray:
        """Members (M, Z, Y, X) float64 of one variable at one lead.

        Raises:
            UserError: the file lacks the lead or the members, or cannot be read.
        """
        file = self._file(self.files[init_time])
        step = self._step(init_time, lead)
        found = self._field(file, name, "member", step, levels, leading="realization")
        assert found is not None
        return found

    def fields(self) -> list[tuple[str, int | None]]:
        """Names and levels of all fields."""
        return [(name, level) for name, levels in self.variables.items() for level in levels]

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.data.close()
        self._open.clear()

    def _file(self, path: Path) -> _File:
        # Only headers stay in memory, and xarray itself keeps no more than 128 files open.
        if path not in self._open:
            data = open_file(path)
            time = str(data["time"].dims[0]) if data["time"].dims else "time"
            self._open[path] = _File(data, lead_hours(data, path), levels_of(data), time)
        return self._open[path]

    def _step(self, init_time: np.datetime64, lead: int) -> int:
        path = self.files[init_time]
        file = self._file(path)
        if lead not in file.hours:
            hours = ", ".join(map(str, file.hours))
            raise UserError(f"{path}: no lead of {lead} h; it has {hours}. Make the forecast again")
        return file.hours.index(lead)

    def intervals(self, name: str) -> dict[int, tuple[int, int]]:
        """First and last hour that a variable is the sum or maximum over, by lead; empty where files do not say."""
        path = self.files[min(self.files)]
        file = self._file(path)
        for array in (file.data[f"{name}_{part}"] for part in PARTS if f"{name}_{part}" in self.names):
            methods = str(array.attrs.get("cell_methods", ""))
            if spans := _SPANS.search(methods):  # of all leads that were forecast; each ends at its own
                every = (span.removesuffix(" h").split("-") for span in spans[1].split(", "))
                return {int(last): (int(first), int(last)) for first, last in every}
            if _OVER_TIME.search(methods) and (bounds := file.data["time"].attrs.get("bounds")) in file.data:
                stated = hours_of(np.atleast_2d(file.data[bounds].values), file.data, path)
                return {last: (first, last) for first, last in stated}
        return {}

    def _field(
        self, file: _File, variable: str, part: str, step: int, levels: tuple[int | None, ...], leading: str = ""
    ) -> np.ndarray | None:
        """(Z, Y, X) in the registry's units, with a `leading` axis before these if asked."""
        name = f"{variable}_{part}"
        if name not in self.names:
            return None  # or it would be scored on some dates only
        data = file.data
        if name not in data:
            raise UserError(f"{data.encoding.get('source')}: lacks {name}, which other files hold; make it again")
        found = data[name].variable
        found = found.isel({file.time: step}) if file.time in found.dims else found
        if "level" in found.dims:
            found = found.isel(level=[file.levels.index(level) for level in levels if level is not None])
        elif leading:
            found = found.set_dims(("level", *found.dims))
        order = [axis for axis in (leading, "level", "latitude", "longitude") if axis in found.dims]
        if more := [str(axis) for axis in found.dims if axis not in order]:
            raise UserError(f"{data.encoding.get('source')}: {name}: has a dimension {more[0]}; take one value of it")
        found = found.transpose(*order)
        try:
            values = np.asarray(found.values, np.float64)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{data.encoding.get('source')}: {name} cannot be read ({error}); make it again") from error
        factor, shift = conversion(data[name], variable)
        if (factor, shift) != (1.0, 0.0):
            values = factor * values + (0.0 if part in _DIFFERENCES else shift)
        return np.atleast_3d(values.T).T[..., self._rows[:, None], self._columns]


_REGRESSIONS = ("spread_regression", "start_regression", "held_out_regression")
_BASELINES = ("raw", "size_corrected", "ecc", *_REGRESSIONS, *CORRECTIONS)
_RESERVED = re.compile(rf"climatology|({'|'.join(_BASELINES)})_\d+")  # a folder of that name goes by its path
_SEEN = ("training_dates", "validation_dates", "earlier_dates")  # attributes; files that lack one have no such dates
_DIFFERENCES = ("scale", "stddev", "ensemble_spread")
_SPANS = re.compile(r"\(comment: over lead times ([^)]*)\)")  # as `inference.contents` writes it
_OVER_TIME = re.compile(r"time: (sum|maximum)")


def open_forecasts(folders: list[str]) -> list[ForecastSet]:
    """Open one or more folders of forecasts; each is known by its folder's name.

    Raises:
        UserError: a folder is missing or holds no forecast, a file is damaged, or two folders have the same name.
    """
    if not folders:
        raise UserError("forecast: no folder given; give one of forecasts, or a list of them")
    sets = [_open_folder(Path(folder)) for folder in folders]
    labels = [one.label for one in sets]
    for one in sets:
        if labels.count(one.label) > 1 or _RESERVED.fullmatch(one.label):
            one.label = str(Path(one.path).resolve()) if _RESERVED.fullmatch(one.path) else one.path
    if len({one.label for one in sets}) < len(sets):
        raise UserError(f"forecast={', '.join(map(str, folders))}: a folder is named twice; name each once")
    return sets


def _open_folder(folder: Path) -> ForecastSet:
    if not folder.exists():
        raise UserError(f"forecast={folder}: no such folder; make forecasts with ensemble-ml predict")
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.nc"))
    if not paths:
        raise UserError(f"forecast={folder}: holds no NetCDF file; make forecasts with ensemble-ml predict")
    files: dict[np.datetime64, Path] = {}
    made_of: dict[np.datetime64, tuple[str, ...]] = {}
    checkpoints: set[str] = set()
    untold = 0
    axes: dict[str, np.ndarray] = {}
    known: dict[str, set[np.datetime64]] = {name: set() for name in _SEEN}  # of all checkpoints
    leads: dict[Path, list[int]] = {}
    held: dict[Path, set[str]] = {}
    for path in paths:
        with open_file(path) as data:
            start = reference_time(data, path)
            made_of[start] = numbers_of(data)
            checkpoints.add(str(data.attrs.get("checkpoint_sha256")))
            untold += not str(data.attrs.get("training_dates", "")).strip()
            for name, dates in known.items():
                dates |= set(dates_of(data, path, name))
            leads[path] = lead_hours(data, path)
            held[path] = {str(name) for name in data.data_vars if name in KNOWN}
            found = {name: data[name].values for name in ("latitude", "longitude") if name in data.dims}
            found |= {"level": np.atleast_1d(data["level"].values)} if "level" in data.coords else {}
        axes = axes or found
        for name in axes | found:
            if name not in axes or name not in found or not np.array_equal(axes[name], found[name]):
                raise UserError(f"{path}: other {name} than {paths[0].name}; keep forecasts of one kind in a folder")
        if start in files:
            raise UserError(f"{path}: start date {str(start)[:13]} is also that of {files[start].name}; keep one")
        files[start] = path
    names, uneven = _names(held)
    shared = set(leads[paths[0]]).intersection(*leads.values())
    if not shared:
        raise UserError(
            f"{folder}: no lead is in all of its {len(paths)} files; keep forecasts of one kind in a folder"
        )
    with open_file(paths[0]) as first:
        grid, rows, columns = grid_of(first, paths[0])
        return ForecastSet(
            label=folder.stem if folder.is_file() else folder.resolve().name,
            path=str(folder),
            files=files,
            names=names,
            made_of=made_of,
            training_dates=np.array(sorted(known["training_dates"]), "datetime64[ns]"),
            untold_dates=untold,
            validation_dates=np.array(sorted(known["validation_dates"]), "datetime64[ns]"),
            earlier_dates=np.array(sorted(known["earlier_dates"]), "datetime64[ns]"),
            checkpoints=tuple(sorted(checkpoints)),
            lead_hours=tuple(lead for lead in leads[paths[0]] if lead in shared),
            uneven_members=tuple(sorted(name.removesuffix("_member") for name in uneven)),
            uneven_leads=tuple(sorted(set().union(*leads.values()) - shared)),
            variables=variables_of(first),
            grid=grid,
            _rows=rows,
            _columns=columns,
        )


def _names(held: dict[Path, set[str]]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of what all files hold, and of members that some lack.

    Raises:
        UserError: a file lacks anything else that another holds.
    """
    names, common = (frozenset(how(*held.values())) for how in (set.union, set.intersection))
    uneven = frozenset(name for name in names - common if name.endswith("_member"))
    for path, some in held.items():
        if lacking := sorted(names - uneven - some, key=_place):
            raise UserError(f"{path}: lacks {lacking[0]}, which other files hold; make it again")
    return names - uneven, uneven


def _place(name: str) -> tuple[int, str]:
    return [name.endswith(part) for part in READ].index(True), name
