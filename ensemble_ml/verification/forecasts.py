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

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.grid import TOLERANCE, Grid
from ensemble_ml.verification.baselines import CORRECTIONS
from ensemble_ml.verification.families import moments
from ensemble_ml.verification.forecast_files import PARTS, READ, ForecastFile, open_file


@dataclass(frozen=True, eq=False)
class Predicted:
    """What a forecast says of one variable, lead and start date; (Z, Y, X) float64, None where it says nothing."""

    family: Family
    location: np.ndarray | None
    scale: np.ndarray | None
    mean: np.ndarray | None
    stddev: np.ndarray | None
    spread: np.ndarray | None


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
    _open: dict[Path, ForecastFile] = field(default_factory=dict)

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
        file = self._file(path)
        there = {part: f"{name}_{part}" in self.names for part in PARTS}  # or they would be scored on some dates only
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
        """Whether the files hold members of a variable."""
        return f"{name}_member" in self.names

    def members(self, init_time: np.datetime64, name: str, lead: int, levels: tuple[int | None, ...]) -> np.ndarray:
        """Members (M, Z, Y, X) float64 of one variable at one lead.

        Raises:
            UserError: the file lacks the lead or the members, or cannot be read.
        """
        return self._file(self.files[init_time]).values(name, "member", lead, levels, leading="realization")

    def intervals(self, name: str) -> dict[int, tuple[int, int]]:
        """First and last hour that a variable is the sum or maximum over, by lead; empty where files do not say."""
        return self._file(self.files[min(self.files)]).intervals(name)

    def fields(self) -> list[tuple[str, int | None]]:
        """Names and levels of all fields."""
        return [(name, level) for name, levels in self.variables.items() for level in levels]

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, path: Path) -> ForecastFile:
        if path not in self._open:  # xarray itself keeps no more than 128 files open
            self._open[path] = open_file(path)
        return self._open[path]


_REGRESSIONS = ("spread_regression", "start_regression", "held_out_regression")
_BASELINES = ("raw", "size_corrected", "ecc", *_REGRESSIONS, *CORRECTIONS)
_RESERVED = re.compile(rf"climatology|({'|'.join(_BASELINES)})_\d+")  # a folder of that name goes by its path
_SEEN = ("training_dates", "validation_dates", "earlier_dates")  # attributes; files that lack one have no such dates


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
        with open_file(path) as file:
            start, found = file.start, file.axes
            made_of[start] = file.members_in
            if file.checkpoint:
                checkpoints.add(file.checkpoint)
            untold += not len(file.dates("training_dates"))
            for name, dates in known.items():
                dates |= set(file.dates(name))
            leads[path], held[path] = file.lead_hours, file.names
        axes = axes or found
        for name in axes | found:
            if name not in axes or name not in found or not _alike(axes[name], found[name]):
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
            variables=first.fields,
            grid=first.grid[0],
        )


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two axes are the same but for their rounding."""
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=0, atol=TOLERANCE))


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
