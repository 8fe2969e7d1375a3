"""Read forecasts from folders of CF NetCDF files, one file for each init time, as `predict` writes them.

A field NAME is scored through NAME_location and NAME_scale. These are parameters of the distribution that the attribute
`distribution_family` names, or of the registry's distribution if there is no such attribute. If a file has only
NAME_mean and NAME_stddev, the field is scored as a normal distribution. A missing mean or standard deviation is
computed from the distribution. NAME_ensemble_spread is the predicted spread of the full ensemble. `forecast_files`
reads the single files.

Axes: M member, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.grid import TOLERANCE, Grid
from ensemble_ml.verification.baselines import CORRECTIONS
from ensemble_ml.verification.families import moments
from ensemble_ml.verification.forecast_files import PARTS, READ, ForecastFile, open_file
from ensemble_ml.wording import date_text


@dataclass(frozen=True, eq=False)
class Predicted:
    """The prediction of one variable, lead and initialisation time.

    All arrays are (Z, Y, X) float64 in the registry's units of the variable. An array is None if the forecast does not
    have it and it cannot be computed. `spread` is the predicted spread of the full ensemble; all others describe the
    distribution of the variable.
    """

    family: Family
    location: np.ndarray | None
    scale: np.ndarray | None
    mean: np.ndarray | None
    stddev: np.ndarray | None
    spread: np.ndarray | None


@dataclass(eq=False)
class ForecastSet:
    """The forecasts of one folder, whose files are opened when they are first read.

    Attributes:
        label: Name in the report.
        path: The folder, or the single file.
        files: Path by init time.
        names: Full names, such as t2m_mean, of the variables that every file holds.
        made_of: Members that each forecast was made from, by init time; empty where a file does not state them.
        training_dates: Init times that the model was trained on.
        files_without_dates: Number of files that do not state the training dates of their model.
        validation_dates: Init times by which the checkpoint was chosen.
        earlier_dates: Init times by which the initial weights of the training were trained or chosen.
        checkpoints: sha256 of the checkpoints that made the files.
        origins: Attributes of each file that state its origin, by file name.
        thresholds: Thresholds of which any file holds probabilities, in the registry's units, by short name.
        lead_hours: Leads that all files have, in hours.
        uneven_leads: Leads that only some files have, in hours.
        uneven_members: Variables whose members only some files have.
        variables: Levels in hPa by short name of the variable; (None,) at the surface.
        spans: First and last hour of sums and maxima, by short name of the variable and lead in hours.
        grid: Grid of the forecasts, in canonical order.
    """

    label: str
    path: str
    files: dict[np.datetime64, Path]
    names: frozenset[str]
    made_of: dict[np.datetime64, tuple[str, ...]]
    training_dates: np.ndarray
    files_without_dates: int
    validation_dates: np.ndarray
    earlier_dates: np.ndarray
    checkpoints: tuple[str, ...]
    origins: dict[str, dict[str, str]]
    thresholds: dict[str, set[float]]
    lead_hours: tuple[int, ...]
    uneven_leads: tuple[int, ...]
    uneven_members: tuple[str, ...]
    variables: dict[str, tuple[int | None, ...]]
    spans: dict[str, dict[int, tuple[int, int]]]
    grid: Grid
    _open: dict[Path, ForecastFile] = field(default_factory=dict)

    @property
    def silent(self) -> bool:
        """Return whether at least one file does not state the members that it was made from."""
        return not all(self.made_of.values())

    @property
    def members_in(self) -> tuple[str, ...]:
        """Return the members that the forecast of the date with the most members was made from.

        The forecasts of other dates may be made from fewer members. The result is empty if at least one file does not
        state its members.
        """
        return () if self.silent else max(self.made_of.values(), key=len)

    @property
    def seen(self) -> frozenset[str]:
        """Return all members that any date was made from, as far as files state them."""
        return frozenset().union(*self.made_of.values())

    @property
    def mixed(self) -> bool:
        """Return whether members or checkpoints differ between dates."""
        return len(set(self.made_of.values())) > 1 or len(self.checkpoints) > 1

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the distinct `source` attributes, which name program, checkpoint, model and step of the forecasts."""
        return tuple(dict.fromkeys(one["source"] for one in self.origins.values() if "source" in one))

    def predicted(self, init_time: np.datetime64, name: str, lead: int, levels: tuple[int | None, ...]) -> Predicted:
        """Read the prediction of one variable at one lead, (Z, Y, X) in the registry's units.

        Levels are in hPa; (None,) at the surface.

        Raises:
            UserError: The file lacks the lead or cannot be read, its units or its distribution are not known, or a
                scale or spread is below zero.
        """
        file = self._file(self.files[init_time])
        # A part is either in all files or in none: `_names` refuses other folders.
        there = {part: f"{name}_{part}" in self.names for part in PARTS}
        parts = {part: file.values(name, part, lead, levels) if there[part] else None for part in PARTS}
        location, scale = parts["location"], parts["scale"]
        if location is None or scale is None:
            location, scale, family = parts["mean"], parts["stddev"], Family.NORMAL
        else:
            family = file.family(f"{name}_location", registered(name).family)
        mean, stddev = parts["mean"], parts["stddev"]
        if location is not None and scale is not None and (mean is None or stddev is None):
            expected, deviation = moments(family, location, scale)
            mean, stddev = expected if mean is None else mean, deviation if stddev is None else stddev
        return Predicted(family, location, scale, mean, stddev, parts["ensemble_spread"])

    def has_members(self, name: str) -> bool:
        """Return whether all files hold members of a variable."""
        return f"{name}_member" in self.names

    def members(self, init_time: np.datetime64, name: str, lead: int, levels: tuple[int | None, ...]) -> np.ndarray:
        """Read the members of one variable at one lead, (M, Z, Y, X) float64 in the registry's units.

        Arguments are those of `predicted`.

        Raises:
            UserError: The file lacks the lead or the members, its units are not known, or it cannot be read.
        """
        return self._file(self.files[init_time]).values(name, "member", lead, levels, leading="realization")

    def intervals(self, name: str) -> dict[int, tuple[int, int]]:
        """Return the first and the last hour of a sum or maximum, by lead in hours.

        They are empty if no file states them.
        """
        return self.spans.get(name, {})

    def fields(self) -> list[tuple[str, int | None]]:
        """Return the short name and the level in hPa of every field; None is the surface."""
        return [(name, level) for name, levels in self.variables.items() for level in levels]

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, path: Path) -> ForecastFile:
        """Return the open file of a path, opening it at most once."""
        if path not in self._open:  # xarray itself keeps at most 128 file handles open
            self._open[path] = open_file(path)
        return self._open[path]


_REGRESSIONS = ("spread_regression", "start_regression", "held_out_regression")
_BASELINES = ("raw", "size_corrected", "ecc", *_REGRESSIONS, *CORRECTIONS)
# Names of raw ensembles and baselines, also with blanks, as figures show them (`summary.short_name`). A folder with
# such a name is labelled by its path instead.
RESERVED = re.compile(rf"climatology|({'|'.join(_BASELINES)})_\d+".replace("_", "[_ ]"))
# Attributes with dates that the model has seen. A file without such an attribute counts as one without such dates.
_SEEN = ("training_dates", "validation_dates", "earlier_dates")


def open_forecasts(folders: list[str]) -> list[ForecastSet]:
    """Open one or more folders of forecasts, or single files, and return their sets in the same order.

    The label of a set is the name of its folder, or that of its file without suffix. If another set has the same name,
    or the name is that of a baseline, the label is the path.

    Raises:
        UserError: No folder is given, a folder is missing, holds no forecast or is given twice, a file is damaged, or
            the files of a folder do not belong together.
    """
    if not folders:
        raise UserError("forecast: no folder given; give one of forecasts, or a list of them")
    sets = [_open_folder(Path(folder)) for folder in folders]
    labels = [one.label for one in sets]
    # The path replaces an ambiguous label. If the path is itself a reserved name, the absolute path is taken.
    for one in sets:
        if labels.count(one.label) > 1 or RESERVED.fullmatch(one.label):
            one.label = str(Path(one.path).resolve()) if RESERVED.fullmatch(one.path) else one.path
    if len({one.label for one in sets}) < len(sets) or len({Path(one.path).resolve() for one in sets}) < len(sets):
        raise UserError(f"forecast={', '.join(map(str, folders))}: a folder is named twice; name each once")
    return sets


@dataclass(frozen=True, eq=False)
class _Headers:
    """The headers of one file, named as in `ForecastFile`, without the values of its fields.

    `seen` holds the init times that the model has seen, by attribute (`_SEEN`).
    """

    path: Path
    start: np.datetime64
    axes: dict[str, np.ndarray]
    members_in: tuple[str, ...]
    origin: dict[str, str]
    checkpoint: str | None
    seen: dict[str, set[np.datetime64]]
    lead_hours: list[int]
    names: set[str]
    thresholds: dict[str, list[float]]
    spans: dict[str, dict[int, tuple[int, int]]]

    @classmethod
    def read(cls, path: Path) -> _Headers:
        """Open a file, read its headers and close it."""
        with open_file(path) as file:
            return cls(
                path=path,
                start=file.start,
                axes=file.axes,
                members_in=file.members_in,
                origin=file.origin,
                checkpoint=file.checkpoint,
                seen={name: set(file.dates(name)) for name in _SEEN},
                lead_hours=file.lead_hours,
                names=file.names,
                thresholds=file.thresholds,
                spans={name: file.intervals(name) for name in file.fields},
            )


def _open_folder(folder: Path) -> ForecastSet:
    """Read the headers of all files of a folder, and raise a UserError if they do not belong together."""
    headers = _headers_of(_files_of(folder))
    every = list(headers.values())
    names, uneven = _names({one.path: one.names for one in every})
    leads = _shared_leads(folder, every)
    seen = {name: sorted({date for one in every for date in one.seen[name]}) for name in _SEEN}  # of all files
    with open_file(every[0].path) as first:
        return ForecastSet(
            label=folder.stem if folder.is_file() else folder.resolve().name,
            path=str(folder),
            files={start: one.path for start, one in headers.items()},
            names=names,
            made_of={start: one.members_in for start, one in headers.items()},
            training_dates=np.array(seen["training_dates"], "datetime64[ns]"),
            files_without_dates=sum(not one.seen["training_dates"] for one in every),
            validation_dates=np.array(seen["validation_dates"], "datetime64[ns]"),
            earlier_dates=np.array(seen["earlier_dates"], "datetime64[ns]"),
            checkpoints=tuple(sorted({one.checkpoint for one in every if one.checkpoint})),
            origins={one.path.name: one.origin for one in every},
            thresholds=_union([one.thresholds for one in every]),
            lead_hours=leads,
            uneven_members=tuple(sorted(name.removesuffix("_member") for name in uneven)),
            uneven_leads=tuple(sorted({lead for one in every for lead in one.lead_hours} - set(leads))),
            variables=first.fields,
            spans=_spans(every),
            grid=first.grid[0],
        )


def _union(found: list[dict[str, list[float]]]) -> dict[str, set[float]]:
    """Return the values that any file has, by name."""
    names = {name for one in found for name in one}
    return {name: {value for one in found for value in one.get(name, [])} for name in names}


def _files_of(folder: Path) -> list[Path]:
    """Return the NetCDF files of a folder, or `folder` itself if it is a file; raise a UserError if there is none."""
    if not folder.exists():
        raise UserError(f"forecast={folder}: no such folder; make forecasts with ensemble-ml predict")
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.nc"))
    if not paths:
        raise UserError(f"forecast={folder}: holds no NetCDF file; make forecasts with ensemble-ml predict")
    return paths


def _headers_of(paths: list[Path]) -> dict[np.datetime64, _Headers]:
    """Read the headers of files by init time, and raise a UserError if one has other axes or a date occurs twice."""
    found: dict[np.datetime64, _Headers] = {}
    # Each file is opened, read and closed again, so that thousands of files do not exhaust the file handles.
    for path in paths:
        one = _Headers.read(path)
        first = next(iter(found.values()), one)
        # All files must have the same axes in space, or points of different places would be averaged.
        for name in first.axes | one.axes:
            if name not in first.axes or name not in one.axes or not _alike(first.axes[name], one.axes[name]):
                raise UserError(f"{path}: other {name} than {paths[0].name}; keep forecasts of one kind in a folder")
        if one.start in found:
            other = found[one.start].path.name
            raise UserError(f"{path}: init time {date_text(one.start)} is also that of {other}; keep one")
        found[one.start] = replace(one, axes=first.axes)  # all files share one copy of the axes
    return found


def _shared_leads(folder: Path, headers: list[_Headers]) -> tuple[int, ...]:
    """Return the leads that all files have, in the order of the first one, or raise a UserError if there is none."""
    leads = tuple(lead for lead in headers[0].lead_hours if all(lead in one.lead_hours for one in headers))
    if not leads:
        raise UserError(
            f"{folder}: no lead is in all of its {len(headers)} files; keep forecasts of one kind in a folder"
        )
    return leads


def _spans(headers: list[_Headers]) -> dict[str, dict[int, tuple[int, int]]]:
    """Return the hours of sums and maxima that any file states; raise a UserError if two files state other ones."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    stated_by: dict[tuple[str, int], Path] = {}
    for one in headers:
        for name, lead, pair in ((name, *item) for name, pairs in one.spans.items() for item in pairs.items()):
            usual = found.setdefault(name, {}).setdefault(lead, pair)
            other = stated_by.setdefault((name, lead), one.path)
            if usual != pair:
                raise UserError(
                    f"{one.path}: {name} at {lead} h is over {pair[0]}-{pair[1]} h, in {other.name} over"
                    f" {usual[0]}-{usual[1]} h; keep forecasts of one kind in a folder"
                )
    return found


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two axes are equal, up to rounding if they are numbers."""
    if one.shape != other.shape or not {one.dtype.kind, other.dtype.kind} <= set("fiu"):
        return bool(np.array_equal(one, other))
    return bool(np.allclose(one, other, rtol=0, atol=TOLERANCE, equal_nan=True))


def _names(held: dict[Path, set[str]]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that all files hold, and the names of members that only some files hold.

    Raise a UserError if a file lacks a name, other than that of members, which another file holds.
    """
    names, common = (frozenset(how(*held.values())) for how in (set.union, set.intersection))
    uneven = frozenset(name for name in names - common if name.endswith("_member"))
    # Members that some files lack are not read. Any other part that some files lack is an error, because its scores
    # would be over other dates.
    for path, some in held.items():
        # The error names the missing part that comes first in `READ`, such as location before scale.
        if lacking := sorted(names - uneven - some, key=lambda n: ([n.endswith(part) for part in READ].index(True), n)):
            raise UserError(f"{path}: lacks {lacking[0]}, which other files hold; make it again")
    return names - uneven, uneven
