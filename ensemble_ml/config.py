"""The only schema of the configuration: plain dataclasses that validate themselves when they are made.

Hydra composes the files of `conf/` over these classes; `OmegaConf.to_object` turns the result into them once, in `cli`.
Below that border nobody sees a DictConfig. Classes are not frozen and hold no Literal, tuple or Path, because
OmegaConf cannot compose those; members of an Enum are named as they are written, because it matches names. `doc` in a field's metadata is the line that `--help` prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from datetime import date
from enum import Enum
from itertools import pairwise
from typing import Any

from ensemble_ml.errors import UserError

MISSING = "???"  # OmegaConf's mark of a mandatory value


class Packing(Enum):
    """How values lie in a tensor store."""

    uint16 = "uint16"
    float32 = "float32"


class Control(Enum):
    """What becomes of an unperturbed member."""

    apart = "apart"
    include = "include"


class Vertical(Enum):
    """How the weights of the 3D U-Net act across pressure levels."""

    shared = "shared"
    affine = "affine"
    separable = "separable"
    full = "full"


class Pole(Enum):
    """What a convolution sees beyond a pole."""

    cross = "cross"
    replicate = "replicate"
    zero = "zero"


class Precision(Enum):
    """Arithmetic of the convolutions; `auto` times a step of each and takes the fastest that the hardware has."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


class OptimName(Enum):
    """Optimizers."""

    lion = "lion"
    adamw = "adamw"


def opt(default: Any, doc: str) -> Any:
    """A dataclass field with a default (or a factory of one) and the line that `--help` prints for it."""
    if (callable(default) and not isinstance(default, type | Enum)) or default in (list, dict):
        return field(default_factory=default, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


def part(cls: type, doc: str) -> Any:
    """A nested group of settings."""
    return field(default_factory=cls, metadata={"doc": doc})


def as_list(value: Any) -> list[str]:
    """Paths as a list: one string stays one path."""
    if value is None:
        return []
    return [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]


def require(key: str, value: Any, good: bool, allowed: str) -> None:
    """Raise a UserError in the one form that all settings use: `key=value: what is allowed`."""
    if not good:
        raise UserError(f"{key}={value}: {allowed}")


@dataclass
class SimulateConfig:
    """Make the embedded archive: a simulated ensemble and its truth as GRIB in ENS-10's layout."""

    size: str = opt("quickstart", "name of the size; chosen with simulate=tiny | quickstart | full")
    output: str = opt(MISSING, "folder to write the archive to; an unfinished one is resumed")
    seed: int = opt(0, "seed of spin-ups, analysis errors and perturbations")
    members: int = opt(10, "ensemble size")
    truth_truncation: int = opt(31, "spectral truncation of the nature run")
    forecast_truncation: int = opt(21, "spectral truncation of the forecast model, at most that of the nature run")
    truth_minutes: int = opt(40, "time step of the nature run")
    forecast_minutes: int = opt(60, "time step of the forecast model")
    rows: int = opt(33, "latitudes of the archive, both poles included")
    columns: int = opt(64, "longitudes of the archive")
    levels: list[int] = opt(lambda: [300, 500, 700, 850], "pressure levels, hPa; the realism gate needs 500 and 850")
    first_year: int = opt(2001, "first model year; each year is a spin-up of its own")
    train_years: int = opt(1, "model years for training")
    validation_years: int = opt(1, "model years for validation")
    test_years: int = opt(1, "model years for test")
    windows: list[str] = opt(lambda: ["01-07"], "first start date of each window of a year, MM-DD")
    train_dates: int = opt(60, "start dates, 48 h apart, of a window of a training year")
    validation_dates: int = opt(14, "the same for validation: the middle of the window")
    test_dates: int = opt(26, "the same for test")
    warm_up_cycles: int = opt(2, "breeding cycles before a window, not written")
    spin_up_days: int = opt(45, "days from rest to the first cycle of a year")
    norm: float = opt(0.35, "root mean square of analysis error and perturbations, K at sigma 0.835")
    inflation: float = opt(1.0, "size of the members' perturbations over that of the analysis error")
    workers: int = opt(0, "processes, a model year each; 0 takes one a core")

    def __post_init__(self) -> None:
        require("simulate.members", self.members, self.members >= 2, "at least 2 are needed for breeding")
        truncations = self.truth_truncation in (21, 31, 42) and self.forecast_truncation in (21, 31, 42)
        given = f"{self.truth_truncation}/{self.forecast_truncation}"
        require("simulate.truth_truncation/forecast_truncation", given, truncations, "21, 31 and 42 are allowed")
        require("simulate.forecast_truncation", self.forecast_truncation, self.forecast_truncation <= self.truth_truncation, f"at most truth_truncation={self.truth_truncation}")
        for key in ("truth_minutes", "forecast_minutes"):
            require(f"simulate.{key}", getattr(self, key), getattr(self, key) in (20, 30, 40, 60, 80), "20, 30, 40, 60 or 80 minutes are allowed")
        require("simulate.rows", self.rows, self.rows >= 9 and self.rows % 2 == 1, "an odd number from 9 up, so that poles and equator are rows")
        require("simulate.columns", self.columns, self.columns >= 16 and self.columns % 16 == 0, "must be divisible by 16")
        require("simulate.levels", self.levels, {500, 850} <= set(self.levels) and all(50 <= level <= 1000 for level in self.levels), "levels of 50-1000 hPa, with 500 and 850 among them")
        for key in ("train", "validation", "test"):
            require(f"simulate.{key}_years", getattr(self, f"{key}_years"), getattr(self, f"{key}_years") >= 0, "must be 0 or more")
            require(f"simulate.{key}_dates", getattr(self, f"{key}_dates"), getattr(self, f"{key}_dates") >= 1, "must be 1 or more")
        require("simulate.train_years", self.train_years, self.train_years + self.validation_years + self.test_years >= 1, "one model year at least is needed")
        for window in self.windows:
            require("simulate.windows", window, bool(re.fullmatch(r"(0[1-9]|1[0-2])-(0[1-9]|[12]\d)", window)), "write month and day, 01-07")
        require("simulate.windows", self.windows, bool(self.windows) and sorted(self.windows) == list(self.windows), "give one at least, in order")
        days = [date(2001, *map(int, window.split("-"))).toordinal() for window in self.windows]
        needed = 2 * (self.warm_up_cycles + max(self.train_dates, self.validation_dates, self.test_dates)) + self.members + 5
        gaps = [later - earlier for earlier, later in pairwise(days)]
        require("simulate.windows", self.windows, all(gap >= needed for gap in gaps), f"windows of {needed} days with their warm-up overlap; space them further or take fewer dates")
        require("simulate.spin_up_days", self.spin_up_days, self.spin_up_days >= self.members + 5, f"at least {self.members + 5}: their last days seed the perturbations")
        require("simulate.norm", self.norm, self.norm > 0, "must be above 0 K")
        require("simulate.inflation", self.inflation, self.inflation > 0, "must be above 0")


@dataclass
class PrepareConfig:
    """Turn an archive (GRIB, NetCDF, Zarr) into a tensor store."""

    input: Any = opt(MISSING, "forecast archive: a file, a folder, a glob, or a list of them")
    truth: Any = opt(None, "truth archive on the same grid, or null")
    static: str | None = opt(None, "file with orography and land mask, or null")
    output: str = opt(MISSING, "tensor store to make (a folder ending in .zarr)")
    variables: list[str] | None = opt(None, "variables to keep; null keeps all that the registry knows")
    levels: list[int] | None = opt(None, "pressure levels to keep, hPa; null keeps all")
    leads: list[int] | None = opt(None, "lead times to keep, hours; null keeps all")
    dates: list[str] | None = opt(None, "start dates to keep: years, ISO dates or start/end ranges; null keeps all")
    packing: Packing = opt(Packing.uint16, "uint16 | float32")
    control: Control = opt(Control.apart, "apart | include: whether an unperturbed member counts as a member")
    overwrite: bool = opt(False, "replace an existing store")


@dataclass
class DataConfig:
    """Which part of a store a run uses, and how start dates are split."""

    store: str = opt(MISSING, "tensor store made by prepare")
    train: list[str] = opt(list, "start dates to train on: years, ISO dates or start/end ranges")
    validation: list[str] = opt(list, "start dates that choose the best checkpoint; may be empty")
    variables: list[str] | None = opt(None, "pressure-level variables; null takes all of the store")
    surface: list[str] | None = opt(None, "surface variables; null takes all of the store")
    levels: list[int] | None = opt(None, "pressure levels, hPa; null takes all")
    leads_in: list[int] | None = opt(None, "lead times stacked as input, hours; null takes all stored")
    leads_out: list[int] | None = opt(None, "lead times predicted, hours; null takes all above zero, or zero where it is the only one")
    members: list[int] = opt(lambda: [1, 2, 3, 5, 8, 10], "sizes of the random member subsets drawn in training")
    validation_members: int = opt(5, "first members used in validation")

    def __post_init__(self) -> None:
        require("data.members", self.members, bool(self.members) and min(self.members) >= 1, "sizes from 1 up are allowed")
        require("data.validation_members", self.validation_members, self.validation_members >= 1, "must be 1 or more")
        for key in ("train", "validation"):
            for spec in getattr(self, key):
                check_period(f"data.{key}", str(spec))


@dataclass
class ModelConfig:
    """The 3D U-Net and its heads."""

    name: str = opt("unet3d", "unet3d")
    hidden: int = opt(32, "channels of the finest level; doubled at each pooling up to max_hidden")
    max_hidden: int = opt(128, "most channels of a level")
    depth: int = opt(3, "number of poolings L; latitude is processed in blocks of 2^L rows")
    blocks: int = opt(1, "residual blocks a level")
    vertical: Vertical = opt(Vertical.affine, "shared | affine | separable | full: how weights act across pressure levels")
    pole: Pole = opt(Pole.cross, "cross | replicate | zero: what a convolution sees beyond a pole")
    local_terms: bool = opt(True, "one learned correction a grid cell (locally connected), started from the training dates")
    spread: bool = opt(True, "head that predicts the full ensemble's spread")
    postprocess: bool = opt(True, "head that predicts the distribution of the truth; off where the store has none")
    one_member: bool = opt(False, "also give the network one single member")
    min_members: int = opt(1, "fewest members that predict accepts")
    precision: Precision = opt(Precision.auto, "auto | float32 | bfloat16 | float64")

    def __post_init__(self) -> None:
        require("model.name", self.name, self.name == "unet3d", "unet3d is allowed")
        require("model.depth", self.depth, 0 <= self.depth <= 6, "0 to 6 poolings are allowed")
        require("model.hidden", self.hidden, self.hidden >= 4 and self.hidden % 4 == 0, "a positive multiple of 4 is needed")
        require("model.blocks", self.blocks, self.blocks >= 1, "must be 1 or more")
        require("model.min_members", self.min_members, self.min_members >= 1, "must be 1 or more")
        require("model", "heads", self.spread or self.postprocess, "turn on model.spread or model.postprocess")


@dataclass
class OptimConfig:
    """Optimizer and schedule."""

    name: OptimName = opt(OptimName.lion, "lion | adamw")
    lr: float = opt(3e-4, "peak learning rate")
    beta1: float = opt(0.9, "weight of the momentum in the update")
    beta2: float = opt(0.99, "decay of the momentum (Lion) or of the second moment (AdamW)")
    weight_decay: float = opt(0.1, "decoupled decay")
    warmup: int = opt(50, "steps of linear warm-up")
    final_lr: float = opt(0.02, "share of the peak that the cosine schedule ends at")
    clip: float = opt(0.0, "largest norm of the gradient; 0 leaves it alone")

    def __post_init__(self) -> None:
        require("optim.lr", self.lr, self.lr > 0, "must be above 0")
        for key in ("beta1", "beta2"):
            require(f"optim.{key}", getattr(self, key), 0 <= getattr(self, key) < 1, "must be in [0, 1)")


@dataclass
class LoadingConfig:
    """How batches reach the model."""

    prefetch: int = opt(2, "batches read ahead by a thread; 0 reads in the training thread")
    cache_gb: float = opt(2.0, "memory for decoded start dates, 1e9 bytes; dates beyond it are read anew each time")

    def __post_init__(self) -> None:
        require("loading.prefetch", self.prefetch, self.prefetch >= 0, "must be 0 or more")
        require("loading.cache_gb", self.cache_gb, self.cache_gb >= 0, "must be 0 or more")


@dataclass
class TrackingConfig:
    """Logs."""

    tensorboard: bool = opt(True, "write TensorBoard files where the package is installed")
    log_every: int = opt(10, "steps between lines of the log")

    def __post_init__(self) -> None:
        require("tracking.log_every", self.log_every, self.log_every >= 1, "must be 1 or more")


@dataclass
class TrainConfig:
    """Train a model on a tensor store."""

    run: str = opt(MISSING, "name of the run: results go to OUTPUT/RUN")
    output: str = opt("runs", "folder of all runs")
    seed: int = opt(0, "seed of weights, order of dates and member subsets")
    steps: int = opt(1000, "optimizer steps")
    batch_size: int = opt(4, "start dates a step, over all ranks")
    validate_every: int = opt(100, "steps between validations")
    checkpoint_every: int = opt(100, "steps between writings of checkpoints/last")
    max_minutes: float = opt(0.0, "plan the length by time: scale `steps` down to what fits; 0 keeps `steps`")
    spread_weight: float = opt(1.0, "weight of the spread loss beside the CRPS")
    average: float = opt(0.0, "decay of a running average of the weights that validation and checkpoints/best use; 0 turns it off")
    threads: int = opt(0, "CPU threads; 0 takes all cores. Resumed runs need the same number to be equal bit for bit")
    resume: bool = opt(False, "go on from checkpoints/last of the same run")
    init_from: str | None = opt(None, "start from the weights of this checkpoint, with a new schedule")
    data: DataConfig = part(DataConfig, "dates, variables, levels, leads, members")
    model: ModelConfig = part(ModelConfig, "network")
    optim: OptimConfig = part(OptimConfig, "optimizer")
    loading: LoadingConfig = part(LoadingConfig, "batches")
    tracking: TrackingConfig = part(TrackingConfig, "logs")

    def __post_init__(self) -> None:
        for key in ("steps", "batch_size", "validate_every", "checkpoint_every"):
            require(key, getattr(self, key), getattr(self, key) >= 1, "must be 1 or more")
        require("average", self.average, 0 <= self.average < 1, "must be in [0, 1)")
        require("resume", self.resume, not (self.resume and self.init_from), "resume and init_from exclude each other")
        require("run", self.run, self.run == MISSING or bool(re.fullmatch(r"[\w.\-]+", self.run)), "letters, digits, '.', '_' and '-' are allowed")


@dataclass
class PredictConfig:
    """Make CF NetCDF forecasts from an archive or a store."""

    checkpoint: str = opt(MISSING, "checkpoint folder, e.g. runs/NAME/checkpoints/best")
    input: Any = opt(MISSING, "archive (GRIB, NetCDF, Zarr) or tensor store with the reduced ensemble")
    static: str | None = opt(None, "file with orography and land mask; null takes the checkpoint's")
    output: str = opt(MISSING, "folder for forecast_YYYYMMDDHH.nc")
    members_in: Any = opt(None, "how many first members to use, or a list of member numbers; null takes all")
    dates: list[str] | None = opt(None, "start dates: years, ISO dates or start/end ranges; null takes all")
    quantiles: list[float] = opt(lambda: [0.1, 0.25, 0.5, 0.75, 0.9], "quantiles to write")
    thresholds: Any = opt(None, "probabilities of exceeding, e.g. {tp: [0.001, 0.01]}; SI units")
    members_out: bool = opt(False, "also write coherent members remapped to the predicted distribution")
    region: list[float] | None = opt(None, "[north, west, south, east] of the output, degrees")
    points: Any = opt(None, "list of [latitude, longitude]: nearest grid points instead of fields")
    overwrite: bool = opt(False, "replace forecasts that exist")
    precision: Precision = opt(Precision.auto, "auto takes the checkpoint's")
    threads: int = opt(0, "CPU threads; 0 takes all cores")

    def __post_init__(self) -> None:
        self.thresholds = self.thresholds or {}  # Any and null: Hydra adds no key to a typed dictionary
        good = isinstance(self.thresholds, dict) and all(isinstance(v, list) for v in self.thresholds.values())
        require("thresholds", self.thresholds, good, "give lists of values by variable, {tp: [0.001, 0.01]}")
        for level in self.quantiles:
            require("quantiles", level, 0 < level < 1, "must lie between 0 and 1")
        if self.region is not None:
            require("region", self.region, len(self.region) == 4 and self.region[0] > self.region[2], "give [north, west, south, east]")
            require("region", self.region, self.points is None, "region and points exclude each other")


@dataclass
class EvaluateConfig:
    """Score forecasts beside the raw ensemble and statistical baselines."""

    forecast: Any = opt(MISSING, "folder of forecasts, or a list of folders")
    ensemble: Any = opt(MISSING, "archive or store with the full ensemble")
    truth: Any = opt(None, "archive or store with the truth; null scores spread alone")
    members_in: int = opt(5, "members of the raw reduced ensemble that forecasts are compared with")
    fit: list[str] | None = opt(None, "start dates that baselines are fitted on; null takes the forecast's training dates")
    output: str = opt(MISSING, "folder for scores.json and report.html")
    block_days: int = opt(10, "length of the blocks of start dates that the bootstrap draws")
    bootstrap: int = opt(1000, "draws of the bootstrap")
    confidence: float = opt(0.95, "level of the confidence intervals")
    seed: int = opt(0, "seed of the bootstrap")
    overwrite: bool = opt(False, "replace an existing report")

    def __post_init__(self) -> None:
        require("members_in", self.members_in, self.members_in >= 1, "must be 1 or more")
        require("confidence", self.confidence, 0 < self.confidence < 1, "must lie between 0 and 1")
        require("bootstrap", self.bootstrap, self.bootstrap >= 100, "at least 100 draws are needed")


@dataclass
class BenchmarkConfig:
    """Run one benchmark against its peers and write results.json."""

    benchmark: str = opt(MISSING, "name of the benchmark")
    output: str = opt("runs/benchmark", "results go to OUTPUT/NAME")
    repeats: int = opt(5, "counted runs of each entrant")
    run: str = opt("runs/quickstart", "for benchmark=quickstart: the folder that holds scores.json")

    def __post_init__(self) -> None:
        require("repeats", self.repeats, self.repeats >= 1, "must be 1 or more")


_PERIOD = re.compile(r"\d{4}(-\d{2}(-\d{2}(T\d{2}(:\d{2})?)?)?)?")


def check_period(key: str, spec: str) -> None:
    """Refuse a period that is not YYYY[-MM[-DD[THH]]] or two of these joined by `/`."""
    ends = spec.split("/")
    good = 1 <= len(ends) <= 2 and all(_PERIOD.fullmatch(end) for end in ends)
    require(key, spec, good, "write a year (2001), a date (2001-01-31, 2001-01-31T12) or a range (2001/2004)")


def setting_lines(cls: type, prefix: str = "") -> list[tuple[str, str, str]]:
    """List (key, default, doc) of a configuration class and its groups, for `--help`."""
    lines = []
    for item in fields(cls):
        nested = item.default_factory if isinstance(item.default_factory, type) else None
        if nested is not None and hasattr(nested, "__dataclass_fields__"):
            lines += setting_lines(nested, f"{prefix}{item.name}.")
            continue
        default = item.default if item.default_factory is not None and not callable(item.default_factory) else item.default_factory()
        lines.append((f"{prefix}{item.name}", _as_yaml(default), item.metadata.get("doc", "")))
    return lines


def _as_yaml(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)
