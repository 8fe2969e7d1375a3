"""Settings of the tasks that make and show archives and tensor stores: `simulate`, `prepare` and `inspect`.

What other tasks also state of the variables of archives (names, units, intervals) is documented and checked here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from enum import Enum
from itertools import pairwise
from typing import Any

from ensemble_ml.config.base import MISSING, at_least, check_periods, check_region, is_number, opt, require
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field, resolve
from ensemble_ml.units import rate_conversion, unit_conversion

FROM_START = "start"  # sums from the start of the forecast
_INTERVALS = "intervals", "truth_intervals"

# Documentation of settings that several tasks take.
NAMES = "how the archive calls variables, by our names, e.g. 'names={t2m: temperature_2m}'; null recognises usual names"
INTERVALS = "hours that sums cover where NetCDF or Zarr states no interval, by our names, e.g. 'intervals={tp: 6}'; start: sums from the start of the forecast"
TRUTH_INTERVALS = "the same for the truth, e.g. 'truth_intervals={tp: 1}'"
UNITS = "units of variables where NetCDF or Zarr states none, by our names, e.g. 'units={tp: mm}'"


class Executor(Enum):
    """The workers that build the init times of a store."""

    threads = "threads"
    processes = "processes"
    distributed = "distributed"
    slurm = "slurm"


class OutputFormat(Enum):
    """The format in which a task prints its results."""

    text = "text"
    json = "json"


class Packing(Enum):
    """The format of values in a tensor store."""

    uint16 = "uint16"
    float32 = "float32"


class Control(Enum):
    """The treatment of an unperturbed member: apart from the members, or one of them."""

    apart = "apart"
    include = "include"


class Gaps(Enum):
    """The treatment of init times for which the archive or the truth lacks fields that others have."""

    error = "error"
    skip = "skip"
    mask = "mask"


@dataclass
class SimulateConfig:
    """Make the embedded archive: a simulated ensemble and its truth as GRIB in ENS-10's layout."""

    size: str = opt("quickstart", "name of the size; chosen with simulate=tiny | quickstart | full | fresh | fine")
    output: str = opt(MISSING, "folder to write the archive to; an unfinished one is resumed")
    seed: int = opt(0, "seed of spin-ups, analysis errors and perturbations")
    members: int = opt(10, "ensemble size")
    truth_truncation: int = opt(31, "spectral truncation of the nature run")
    forecast_truncation: int = opt(21, "spectral truncation of the forecast model, at most that of the nature run")
    truth_minutes: int = opt(40, "time step of the nature run")
    forecast_minutes: int = opt(60, "time step of the forecast model")
    rows: int = opt(33, "latitudes of the archive, both poles included")
    columns: int = opt(64, "longitudes of the archive")
    levels: list[int] = opt(lambda: [300, 500, 700, 850], "pressure levels, hPa; the check of realism needs 500 and 850")
    first_year: int = opt(2001, "first model year; each year is a spin-up of its own")
    train_years: int = opt(1, "model years for training")
    validation_years: int = opt(1, "model years for validation")
    test_years: int = opt(1, "model years for test")
    windows: list[str] = opt(lambda: ["01-07"], "first init time of each window of a year, MM-DD")
    train_dates: int = opt(60, "init times, 48 h apart, of a window of a training year")
    validation_dates: int = opt(14, "the same for validation: the middle of the window")
    test_dates: int = opt(26, "the same for test")
    warm_up_cycles: int = opt(2, "breeding cycles before a window, not written")
    spin_up_days: int = opt(45, "days from rest to the first cycle of a year")
    norm: float = opt(0.35, "root mean square of analysis error and perturbations, K at sigma 0.835")
    inflation: float = opt(1.0, "size of the members' perturbations over that of the analysis error")
    workers: int = opt(0, "processes, a model year each; 0 takes one a core")
    parts: str | None = opt(None, "i/n: run the i-th of n shares of the model years, on this or another machine; the last share to finish assembles the archive")

    def __post_init__(self) -> None:
        require("members", self.members, self.members >= 2, "at least 2 are needed for breeding")
        require("members", self.members, self.members <= 255, "at most 255: GRIB edition 1 has an octet for the number")
        require("parts", self.parts, self.parts is None or _part(self.parts) is not None, "write i/n with 1 <= i <= n, e.g. parts=3/20")
        truncations = self.truth_truncation in (21, 31, 42, 63) and self.forecast_truncation in (21, 31, 42, 63)
        given = f"{self.truth_truncation}/{self.forecast_truncation}"
        require("truth_truncation/forecast_truncation", given, truncations, "21, 31, 42 and 63 are allowed")
        require("forecast_truncation", self.forecast_truncation, self.forecast_truncation <= self.truth_truncation, f"at most truth_truncation={self.truth_truncation}")
        for key in ("truth_minutes", "forecast_minutes"):
            require(key, getattr(self, key), getattr(self, key) in (20, 30, 40, 60, 80), "20, 30, 40, 60 or 80 minutes are allowed")
        require("rows", self.rows, self.rows >= 9 and self.rows % 2 == 1, "an odd number from 9 up, so that poles and equator are rows")
        require("columns", self.columns, self.columns >= 16 and self.columns % 16 == 0, "must be divisible by 16")
        require("levels", self.levels, {500, 850} <= set(self.levels) and all(50 <= level <= 1000 for level in self.levels), "levels of 50-1000 hPa, with 500 and 850 among them")
        require("levels", self.levels, len(set(self.levels)) == len(self.levels), "give each once")
        at_least(self, 0, "train_years", "validation_years", "test_years", "warm_up_cycles", "workers", "seed")
        at_least(self, 1, "train_dates", "validation_dates", "test_dates")
        years = self.train_years + self.validation_years + self.test_years
        known = self.first_year >= 1000 and self.first_year + years <= 2262
        require("first_year", self.first_year, known, "give years from 1000 to 2261")
        require("train_years", self.train_years, years >= 1, "one model year at least is needed")
        for window in self.windows:
            require("windows", window, _day(window) is not None, "write month and day, 01-07")
        require("windows", self.windows, bool(self.windows) and sorted(self.windows) == list(self.windows), "give one at least, in order")
        # In days: the warm-up cycles and the init times, 48 h apart, and before them the days that seed perturbations.
        days = [day.toordinal() for window in self.windows if (day := _day(window)) is not None]
        most = max(self.train_dates, self.validation_dates, self.test_dates)
        needed = 2 * (self.warm_up_cycles + most) + self.members + 5
        gaps = [later - earlier for earlier, later in pairwise(days)]
        require("windows", self.windows, all(gap >= needed for gap in gaps), f"windows of {needed} days with their warm-up overlap; space them further or take fewer dates")
        # With several years, the last window has to end before the first window of the next year, and in its own
        # calendar year, because the splits are distinguished by years.
        several = years > 1
        written = 2 * most + 2
        short = several and days[0] + 365 - days[-1] < written
        require("windows", self.windows, not short, f"the last window, {written} days, runs into the first of the next year, which is a run of its own; begin it earlier or take fewer dates")
        ends = days[-1] + 2 * most - 2
        within = not several or date.fromordinal(ends).year == date.fromordinal(days[-1]).year
        require("windows", self.windows, within, "the last window runs into the next year, and the splits are distinguished by years; begin it earlier or take fewer dates")
        require("spin_up_days", self.spin_up_days, self.spin_up_days >= self.members + 5, f"at least {self.members + 5}: their last days seed the perturbations")
        require("norm", self.norm, self.norm > 0, "must be above 0 K")
        require("inflation", self.inflation, self.inflation > 0, "must be above 0")

    @property
    def share(self) -> tuple[int, int]:
        """Return which share of the model years this process runs: (number from 0, number of shares)."""
        return _part(self.parts) or (0, 1)


@dataclass
class PrepareConfig:
    """Turn an archive (GRIB, NetCDF, Zarr) into a tensor store."""

    input: Any = opt(MISSING, "forecast archive: a file, a folder, a glob, or a list of them", paths=True)
    truth: Any = opt(None, "truth archive on the same grid, or null", paths=True)
    static: str | None = opt(None, "file with orography and land mask, or null")
    output: str = opt(MISSING, "tensor store to make (a folder ending in .zarr)")
    variables: list[str] | None = opt(None, "variables to keep; null keeps all that the registry knows")
    names: Any = opt(None, NAMES)
    units: Any = opt(None, UNITS)
    intervals: Any = opt(None, INTERVALS)
    truth_intervals: Any = opt(None, TRUTH_INTERVALS)
    levels: list[int] | None = opt(None, "pressure levels to keep, hPa; null keeps all")
    leads: list[int] | None = opt(None, "lead times to keep, hours; null keeps all")
    dates: list[str] | None = opt(None, "init times to keep: years, ISO dates or start/end ranges; null keeps all")
    region: list[float] | None = opt(None, "[north, west, south, east] to cut out, degrees; may cross any meridian")
    coarsen: Any = opt(None, "N times the spacing (or [rows, columns]) by exact cell areas; null keeps the grid")
    regrid: Any = opt(None, "conservative regridding: spacing in degrees, or a store or file whose grid is wanted")
    truth_regrid: bool = opt(False, "bring truth and static fields on other grids to the forecast's, conservatively")
    packing: Packing = opt(Packing.uint16, "uint16 | float32")
    gaps: Gaps = opt(Gaps.error, "error | skip | mask: init times with missing fields end the run, are left out, or kept with these fields absent; the last two also look for fields that are all NaN in NetCDF and Zarr")
    index: str | None = opt("", "folder for the tables of fields of each file, so that no file is scanned again; empty: .NAME.index beside the output; null keeps none")
    climate_days: int = opt(0, "also keep the model climate, for the extreme forecast index: quantiles of the members of other years within this many days of each init time (9 is usual); 0 keeps none")
    control: Control = opt(Control.apart, "apart | include: whether an unperturbed member counts as a member")
    overwrite: bool = opt(False, "replace an existing store, once the new one is complete")
    restart: bool = opt(False, "throw away an unfinished build of the same output, and start anew")
    executor: Executor = opt(Executor.threads, "threads | processes | distributed | slurm: who builds the init times")
    workers: int = opt(0, "threads, processes or SLURM jobs; 0 means a thread or process for every core")
    scheduler: str | None = opt(None, "executor=distributed: address of a dask.distributed scheduler (tcp://host:8786)")
    parts: str | None = opt(None, "i/n: build the i-th of n shares of the init times; the last to finish completes the store")
    finalise: bool = opt(False, "build nothing; complete the store from the init times that are built")

    def __post_init__(self) -> None:
        check_region(self.region)
        # An empty list of levels is allowed: it leaves out all variables on levels.
        for key in ("variables", "leads", "dates"):
            require(key, "[]", getattr(self, key) != [], "chooses nothing; null keeps all")
        self.variables = _our_names(self.variables)
        check_overrides(self)
        require("climate_days", self.climate_days, 0 <= self.climate_days <= 180, "must be 0 (none) to 180")
        at_least(self, 0, "workers")
        check_periods("dates", self.dates)
        require("workers", self.workers, self.workers >= 1 or self.executor is not Executor.slurm, "give the number of SLURM jobs")
        require("scheduler", self.scheduler, (self.scheduler is None) == (self.executor is not Executor.distributed), "belongs to executor=distributed, which needs it")
        require("parts", self.parts, self.parts is None or _part(self.parts) is not None, "write i/n with 1 <= i <= n, e.g. parts=3/20")
        alone = not self.restart or self.parts is None
        require("restart", self.restart, alone, "with parts= each share would throw the others' away: remove OUTPUT.building instead")
        require("restart", self.restart, not (self.restart and self.finalise), "with finalise=true it would throw away the init times that are to be completed: leave one of them out")
        self._check_grid()

    @property
    def share(self) -> tuple[int, int]:
        """Return which part of the init times this process builds: (number from 0, number of parts)."""
        return _part(self.parts) or (0, 1)

    def _check_grid(self) -> None:
        """Raise a UserError if `coarsen` or `regrid` does not have one of its forms, or if both are given."""
        require("coarsen", self.coarsen, self.coarsen is None or _factors(self.coarsen), "give a whole number from 1, or [rows, columns]")
        good = self.regrid is None or isinstance(self.regrid, str) or (is_number(self.regrid) and 0 < self.regrid <= 45)
        require("regrid", self.regrid, good, "give a spacing in degrees, at most 45, or the path of a store or file")
        require("regrid", self.regrid, self.regrid is None or self.coarsen is None, "coarsen and regrid exclude each other")


@dataclass
class InspectConfig:
    """Show what a tensor store holds, what prepare would take of an archive, or what a trained model is."""

    store: Any = opt(MISSING, "tensor store, finished or still being built; or an archive (files, a folder, a glob), a run or a checkpoint; may be given without the key", paths=True)
    verify: bool = opt(False, "of a tensor store: check the sha256 of every file; reads the whole store")
    complete: bool = opt(False, "of a tensor store: end with status 2 unless every init time of its plan is built, and none was left out for gaps: a check for workflows before training")
    speed: bool = opt(True, "of a tensor store: read the forecast of an init time drawn at random, and time it")
    format: OutputFormat = opt(OutputFormat.text, "text | json: a page to read, or one JSON object")


def check_overrides(config: Any) -> None:
    """Check what a task states of variables, and replace its keys by the registry's names.

    Args:
        config: an instance with `names`, `units`, `intervals` and perhaps `truth_intervals`, which are replaced.

    Raises:
        UserError: a variable is not known, or its units cannot be converted; an interval is neither whole hours above 0
            nor `start`, or belongs to a variable that is no sum; two variables have the same name in the archive; or
            one is stated twice.
    """
    examples = {"names": "{t2m: temperature_2m}", "units": "{tp: mm}", **dict.fromkeys(_INTERVALS, "{tp: 6}")}
    for key, example in examples.items():
        if not hasattr(config, key):
            continue
        stated = getattr(config, key) or {}
        whole = isinstance(stated, dict) and all(value not in (None, "") for value in stated.values())
        require(key, stated, whole, f"give them by our names, {example}")
        # Users may give any known name of a variable. Here it becomes the name of the registry.
        by_our_names = {}
        for ours, theirs in stated.items():
            try:
                name = resolve(str(ours)).name
            except UserError as error:
                raise UserError(f"{key}={{{ours}: {theirs}}}: {error}") from error
            require(key, stated, name not in by_our_names, f"states {name} twice, as {ours}, too; state it once")
            by_our_names[name] = theirs if key in _INTERVALS else str(theirs)
        setattr(config, key, by_our_names)
    for ours, units in config.units.items():
        if field(ours).accumulated and rate_conversion(units, field(ours).units) is not None:
            continue  # those of its mean rate
        try:
            unit_conversion(units, field(ours).units)
        except UserError as error:
            raise UserError(f"units={{{ours}: {units}}}: {error}") from error
    for key in _INTERVALS:
        for ours, hours in getattr(config, key, {}).items():
            whole = type(hours) is int and hours > 0
            require(key, f"{{{ours}: {hours}}}", whole or hours == FROM_START, f"give whole hours, or {FROM_START}")
            require(key, f"{{{ours}: {hours}}}", field(ours).accumulated, f"{ours} is no sum; leave it out")
    theirs = list(config.names.values())
    twice = [name for name in theirs if theirs.count(name) > 1]
    require("names", config.names, not twice, "a variable of the archive stands for two of ours; name it once")


def _our_names(variables: list[str] | None) -> list[str] | None:
    """Return variables by their names in the registry. Unknown names stay; opening the archive refuses them."""
    if variables is None:
        return None
    names = []
    for name in variables:
        try:
            names.append(resolve(str(name)).name)
        except UserError:
            names.append(name)
    return names


def _day(window: str) -> date | None:
    """Return the day MM-DD in a year without 29 February, or None if the text is no such day."""
    if not re.fullmatch(r"\d\d-\d\d", str(window)):
        return None
    try:
        return date.fromisoformat(f"2001-{window}")
    except ValueError:
        return None


def _part(text: str | None) -> tuple[int, int] | None:
    """Return the (number from 0, count) of a share i/n, or None if the text does not have this form."""
    found = re.fullmatch(r"(\d+)/(\d+)", str(text))
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    return (number - 1, count) if 1 <= number <= count else None


def _factors(value: Any) -> bool:
    """Return whether a value is one whole number from 1, or a list of two."""
    factors = value if isinstance(value, list) else [value, value]
    return len(factors) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in factors)
