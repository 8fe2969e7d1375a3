"""Read forecasts back from folders of CF NetCDF files, one file a date, as `predict` writes them.

A field NAME is scored through NAME_location and NAME_scale, the parameters of the distribution that the attribute
`distribution_family` names. If a file has only NAME_mean and NAME_stddev, the field is scored as a normal distribution.
A missing mean or standard deviation is computed from the distribution. NAME_ensemble_spread is the predicted spread of
the full ensemble. `forecast_files` reads the single file.

Axes: M member, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.grid import TOLERANCE, Grid
from ensemble_ml.verification.baselines import CORRECTIONS
from ensemble_ml.verification.families import moments
from ensemble_ml.verification.forecast_files import PARTS, READ, ForecastFile, open_file


@dataclass(frozen=True, eq=False)
class Predicted:
    """The prediction of one variable, lead and initialisation time.

    All fields are (Z, Y, X) float64 in the units of the variable, or None where the forecast lacks them.
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
        path: The folder.
        files: Path by init time.
        names: Names of the variables that every file holds.
        made_of: Members that each forecast was made from, by init time; empty where a file does not state them.
        training_dates: Init times that the model was trained on.
        untold_dates: Number of files that do not state their training dates.
        validation_dates: Init times that chose the checkpoint.
        earlier_dates: Init times that trained or chose the weights from which training began.
        checkpoints: sha256 of the checkpoints that made the files.
        origins: What each file says that it was made from, by file name.
        lead_hours: Leads that all files have, in hours.
        uneven_leads: Leads that only some files have, in hours.
        uneven_members: Variables whose members only some files have.
        variables: Levels in hPa by name; (None,) at the surface.
        grid: Grid of the forecasts.
    """

    label: str
    path: str
    files: dict[np.datetime64, Path]
    names: frozenset[str]
    made_of: dict[np.datetime64, tuple[str, ...]]
    training_dates: np.ndarray
    untold_dates: int
    validation_dates: np.ndarray
    earlier_dates: np.ndarray
    checkpoints: tuple[str, ...]
    origins: dict[str, dict[str, str]]
    lead_hours: tuple[int, ...]
    uneven_leads: tuple[int, ...]
    uneven_members: tuple[str, ...]
    variables: dict[str, tuple[int | None, ...]]
    grid: Grid
    _open: dict[Path, ForecastFile] = field(default_factory=dict)

    @property
    def silent(self) -> bool:
        """Return whether any file does not state the members that it was made from."""
        return not all(self.made_of.values())

    @property
    def members_in(self) -> tuple[str, ...]:
        """Return the members of the date with the most members; none if any file does not state them.

        Other dates may lack some of the members that were asked for.
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

    def predicted(self, init_time: np.datetime64, name: str, lead: int, levels: tuple[int | None, ...]) -> Predicted:
        """Read the prediction of one variable at one lead.

        Args:
            init_time: Initialisation time.
            name: Short name of the variable.
            lead: Lead time in hours.
            levels: Levels in hPa; (None,) at the surface.

        Returns:
            Fields (Z, Y, X) in the registry's units.

        Raises:
            UserError: The file lacks the lead or cannot be read, or a scale or spread is below zero.
        """
        path = self.files[init_time]
        file = self._file(path)
        # `self.names` holds what every file has. A part that only this file has would be scored on some dates only.
        there = {part: f"{name}_{part}" in self.names for part in PARTS}
        parts = {part: file.values(name, part, lead, levels) if there[part] else None for part in PARTS}
        location, scale, family = parts["location"], parts["scale"], registered(name).family
        if location is None or scale is None:
            location, scale, family = parts["mean"], parts["stddev"], Family.NORMAL
        else:
            family = file.family(f"{name}_location", family)
        mean, stddev = parts["mean"], parts["stddev"]
        if location is not None and scale is not None and (mean is None or stddev is None):
            of_law = moments(family, location, scale)
            mean, stddev = of_law[0] if mean is None else mean, of_law[1] if stddev is None else stddev
        return Predicted(family, location, scale, mean, stddev, parts["ensemble_spread"])

    def has_members(self, name: str) -> bool:
        """Return whether all files hold members of a variable.

        Args:
            name: Short name of the variable.
        """
        return f"{name}_member" in self.names

    def members(self, init_time: np.datetime64, name: str, lead: int, levels: tuple[int | None, ...]) -> np.ndarray:
        """Read the members of one variable at one lead.

        Args:
            init_time: Initialisation time.
            name: Short name of the variable.
            lead: Lead time in hours.
            levels: Levels in hPa; (None,) at the surface.

        Returns:
            (M, Z, Y, X) float64 in the registry's units.

        Raises:
            UserError: The file lacks the lead or the members, or cannot be read.
        """
        return self._file(self.files[init_time]).values(name, "member", lead, levels, leading="realization")

    def intervals(self, name: str) -> dict[int, tuple[int, int]]:
        """Return the first and the last hour of a sum or maximum, by lead in hours.

        Args:
            name: Short name of the variable.

        Returns:
            The hours as the file of the earliest date states them; empty if it does not.
        """
        return self._file(self.files[min(self.files)]).intervals(name)

    def fields(self) -> list[tuple[str, int | None]]:
        """Return the name and the level of every field."""
        return [(name, level) for name, levels in self.variables.items() for level in levels]

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, path: Path) -> ForecastFile:
        """Return the open file of a path, opening it at most once."""
        if path not in self._open:  # xarray keeps no more than 128 file handles open and closes the oldest itself
            self._open[path] = open_file(path)
        return self._open[path]


_REGRESSIONS = ("spread_regression", "start_regression", "held_out_regression")
_BASELINES = ("raw", "size_corrected", "ecc", *_REGRESSIONS, *CORRECTIONS)
# Names of raw ensembles and baselines. A folder with such a name is labelled by its path instead.
_RESERVED = re.compile(rf"climatology|({'|'.join(_BASELINES)})_\d+")
# Attributes with dates that the model has seen. A file that lacks one counts as having no such dates.
_SEEN = ("training_dates", "validation_dates", "earlier_dates")


def open_forecasts(folders: list[str]) -> list[ForecastSet]:
    """Open one or more folders of forecasts.

    Each set is labelled by its folder's name. If two folders have the same name, or the name of a baseline, the path is
    the label.

    Args:
        folders: Paths of folders or of single files.

    Returns:
        The sets in the order of the folders.

    Raises:
        UserError: No folder is given, a folder is missing or holds no forecast, a file is damaged, or a folder is given
            twice.
    """
    if not folders:
        raise UserError("forecast: no folder given; give one of forecasts, or a list of them")
    sets = [_open_folder(Path(folder)) for folder in folders]
    labels = [one.label for one in sets]
    # The path replaces a label that would be ambiguous. The absolute path is taken if the path itself is reserved.
    for one in sets:
        if labels.count(one.label) > 1 or _RESERVED.fullmatch(one.label):
            one.label = str(Path(one.path).resolve()) if _RESERVED.fullmatch(one.path) else one.path
    if len({one.label for one in sets}) < len(sets):
        raise UserError(f"forecast={', '.join(map(str, folders))}: a folder is named twice; name each once")
    return sets


def _open_folder(folder: Path) -> ForecastSet:
    """Read the headers of all files of a folder and check that they belong together.

    Raises:
        UserError: The folder holds no forecast, a file differs in its axes or variables, a date occurs twice, or no
            lead is in all files.
    """
    if not folder.exists():
        raise UserError(f"forecast={folder}: no such folder; make forecasts with ensemble-ml predict")
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.nc"))
    if not paths:
        raise UserError(f"forecast={folder}: holds no NetCDF file; make forecasts with ensemble-ml predict")
    files: dict[np.datetime64, Path] = {}
    made_of: dict[np.datetime64, tuple[str, ...]] = {}
    checkpoints: set[str] = set()
    origins: dict[str, dict[str, str]] = {}
    untold = 0
    # Each file is opened, read and closed again, so that thousands of files do not exhaust the file handles.
    axes: dict[str, np.ndarray] = {}
    known: dict[str, set[np.datetime64]] = {name: set() for name in _SEEN}  # of all checkpoints
    leads: dict[Path, list[int]] = {}
    held: dict[Path, set[str]] = {}
    for path in paths:
        with open_file(path) as file:
            start, found = file.start, file.axes
            made_of[start] = file.members_in
            origins[path.name] = file.origin
            if file.checkpoint:
                checkpoints.add(file.checkpoint)
            untold += not len(file.dates("training_dates"))
            for name, dates in known.items():
                dates |= set(file.dates(name))
            leads[path], held[path] = file.lead_hours, file.names
        # All files must have the same axes in space, or points of different places would be averaged.
        axes = axes or found
        for name in axes | found:
            if name not in axes or name not in found or not _alike(axes[name], found[name]):
                raise UserError(f"{path}: other {name} than {paths[0].name}; keep forecasts of one kind in a folder")
        if start in files:
            raise UserError(f"{path}: init time {str(start)[:13]} is also that of {files[start].name}; keep one")
        files[start] = path
    names, uneven = _names(held)
    shared = set(leads[paths[0]]).intersection(*leads.values())
    if not shared:
        raise UserError(
            f"{folder}: no lead is in all of its {len(paths)} files; keep forecasts of one kind in a folder"
        )
    with open_file(paths[0]) as first:
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
            origins=origins,
            lead_hours=tuple(lead for lead in leads[paths[0]] if lead in shared),
            uneven_members=tuple(sorted(name.removesuffix("_member") for name in uneven)),
            uneven_leads=tuple(sorted(set().union(*leads.values()) - shared)),
            variables=first.fields,
            grid=first.grid[0],
        )


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two axes are equal up to rounding."""
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=0, atol=TOLERANCE))


def _names(held: dict[Path, set[str]]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that all files hold, and the names of members that only some files hold.

    Raises:
        UserError: A file lacks anything else that another one holds.
    """
    names, common = (frozenset(how(*held.values())) for how in (set.union, set.intersection))
    uneven = frozenset(name for name in names - common if name.endswith("_member"))
    # Members are dropped if some files lack them. Any other part that some files lack is an error, because its scores
    # would be over other dates.
    for path, some in held.items():
        if lacking := sorted(names - uneven - some, key=_place):
            raise UserError(f"{path}: lacks {lacking[0]}, which other files hold; make it again")
    return names - uneven, uneven


def _place(name: str) -> tuple[int, str]:
    """Return a sort key that orders names by their part, such as location before scale."""
    return [name.endswith(part) for part in READ].index(True), name
