"""Settings of the tasks that make and score forecasts, and export a checkpoint: `predict`, `evaluate` and `export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ensemble_ml.config.archives import INTERVALS, NAMES, TRUTH_INTERVALS, UNITS, Control, check_overrides
from ensemble_ml.config.base import MISSING, at_least, check_periods, check_region, is_number, opt, part, require
from ensemble_ml.config.model import Precision
from ensemble_ml.config.training import ParallelConfig


@dataclass
class PredictConfig:
    """Make CF NetCDF forecasts from an archive or a store."""

    checkpoint: str = opt(MISSING, "a run (its best checkpoint is taken), or the folder of a checkpoint, e.g. runs/NAME/checkpoints/last")
    input: Any = opt(MISSING, "archive (GRIB, NetCDF, Zarr) or tensor store with the reduced ensemble", paths=True)
    control: Control = opt(Control.apart, "apart | include: whether the control forecast of an archive counts as a member; give the choice that the store was prepared with")
    names: Any = opt(None, NAMES)
    units: Any = opt(None, UNITS)
    intervals: Any = opt(None, INTERVALS)
    static: str | None = opt(None, "file with orography and land mask; null takes those of the checkpoint")
    regrid: bool = opt(False, "bring an archive on another grid to the grid of the checkpoint, as prepare did: by a crop, or by conservative regridding")
    output: str = opt(MISSING, "folder for forecast_YYYYMMDDHH.nc")
    members_in: Any = opt(None, "how many members to use, from the first on, or a list of member numbers; null takes all")
    dates: list[str] | None = opt(None, "init times: years, ISO dates or start/end ranges; null takes all")
    quantiles: list[float] = opt(lambda: [0.1, 0.25, 0.5, 0.75, 0.9], "quantiles to write")
    thresholds: Any = opt(None, "thresholds whose probabilities of exceedance are written, in SI units, e.g. 'thresholds={tp: [0.001, 0.01]}'")
    members_out: bool = opt(False, "also write members with values from the predicted distribution; each keeps its rank among the members at every point")
    region: list[float] | None = opt(None, "[north, west, south, east] of the output, degrees")
    points: Any = opt(None, "list of [latitude, longitude]: nearest grid points instead of fields")
    overwrite: bool = opt(False, "replace forecasts that exist")
    resume: bool = opt(False, "go on where an earlier run was stopped, and keep the forecasts that it made with the same settings and input; overwrite=true replaces those made with others")
    precision: Precision = opt(Precision.auto, "auto takes the precision of the checkpoint")
    threads: int = opt(0, "CPU threads of a rank; 0 divides the cores of a host among its ranks")
    parallel: ParallelConfig = part(ParallelConfig, "ranks")

    def __post_init__(self) -> None:
        at_least(self, 0, "threads")
        check_periods("dates", self.dates)
        check_overrides(self)
        # The setting has the type Any and the default null, because Hydra cannot add keys to a typed dictionary.
        self.thresholds = self.thresholds or {}
        good = isinstance(self.thresholds, dict) and all(_numbers(v) for v in self.thresholds.values())
        require("thresholds", self.thresholds, good, "give lists of values by variable, {tp: [0.001, 0.01]}")
        for level in self.quantiles:
            require("quantiles", level, 0 < level < 1, "must lie between 0 and 1")
        if self.region is not None:
            check_region(self.region)
            require("region", self.region, self.points is None, "region and points exclude each other")


@dataclass
class ExportConfig:
    """Export a checkpoint to a folder that can be handed on: the weights and a model card."""

    checkpoint: str = opt(MISSING, "a run (its best checkpoint is taken), or the folder of a checkpoint, e.g. runs/NAME/checkpoints/last")
    output: str = opt(MISSING, "new folder; predict takes it as checkpoint=")
    scores: str | None = opt(None, "scores.json of evaluate, whose figures the model card repeats")
    overwrite: bool = opt(False, "replace an existing folder")


@dataclass
class EvaluateConfig:
    """Score forecasts, the raw ensemble and statistical baselines."""

    forecast: Any = opt(MISSING, "folder of forecasts, or a list of folders", paths=True)
    baselines: Any = opt(None, "folder of statistical forecasts (train model=emos) that are scored as further baselines, or a list of folders", paths=True)
    ensemble: Any = opt(MISSING, "archive or store with the full ensemble", paths=True)
    control: Control = opt(Control.apart, "apart | include: whether the control forecast of an archive counts as a member; give the choice that the store was prepared with")
    truth: Any = opt(None, "archive or store with the truth; null takes the truth in the ensemble's store, and scores only the spread if it has none", paths=True)
    names: Any = opt(None, NAMES)
    units: Any = opt(None, UNITS)
    intervals: Any = opt(None, INTERVALS)
    truth_intervals: Any = opt(None, TRUTH_INTERVALS)
    regrid: bool = opt(False, "bring archives on another grid to that of the forecasts, as prepare did")
    orography: str | None = opt(None, "file with the orography of the ensemble's model: surface pressure and 2 m temperature of the raw ensemble are brought from its surface height to that of the truth; null leaves them as they are, and the report says so")
    truth_orography: str | None = opt(None, "file with the orography of the truth; null takes the orography in the ensemble's store, if it has one")
    members_in: Any = opt(None, "how many members, from the first on, make up the raw reduced ensemble that forecasts are compared with; null takes as many as the first forecast was made from (5 if it does not state the number)")
    fit: list[str] | None = opt(None, "init times that baselines are fitted to; null takes the training dates of the forecast; those at other hours of the day than the forecasts' are left out if enough remain")
    output: str = opt(MISSING, "folder for scores.json and report.html")
    regions: Any = opt(None, "further regions to score, besides tropics, extratropics, land and sea, as [north, west, south, east], degrees: 'regions={alps: [48, 5, 44, 16]}'")
    climate_days: int = opt(9, "the model climate of the extreme forecast index is made of members of other years, within this many days of the same calendar day; 0 leaves the index out")
    block_days: int = opt(10, "length of the blocks of init times that the bootstrap draws")
    bootstrap: int = opt(1000, "draws of the bootstrap")
    confidence: float = opt(0.95, "level of the confidence intervals")
    seed: int = opt(0, "seed of the bootstrap")
    overwrite: bool = opt(False, "replace an existing report")

    def __post_init__(self) -> None:
        check_overrides(self)
        lone = self.truth_orography is not None and self.orography is None
        require("truth_orography", self.truth_orography, not lone, "needs orography= as well, the orography of the ensemble's model")
        self.regions = self.regions or {}
        require("regions", self.regions, isinstance(self.regions, dict), "give boxes by name, {alps: [48, 5, 44, 16]}")
        for name, box in self.regions.items():
            good = _numbers(box) and len(box) == 4 and 90 >= box[0] > box[2] >= -90
            require(f"regions.{name}", box, good, "give [north, west, south, east], degrees")
        check_periods("fit", self.fit)
        at_least(self, 0, "climate_days", "seed")
        number = self.members_in is None or type(self.members_in) is int
        require("members_in", self.members_in, number, "give the number of members of the raw ensemble, counted from the first; null takes as many as the forecast was made from")
        at_least(self, 1, "members_in", "block_days")
        require("confidence", self.confidence, 0 < self.confidence < 1, "must lie between 0 and 1")
        require("bootstrap", self.bootstrap, self.bootstrap >= 100, "at least 100 draws are needed")


def _numbers(values: Any) -> bool:
    """Return whether `values` is a list or tuple of numbers."""
    return isinstance(values, list | tuple) and all(is_number(v) for v in values)
