"""Settings of the tasks that make forecasts, export and score them, and measure the program."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ensemble_ml.config.archives import NAMES, UNITS, Control, check_overrides
from ensemble_ml.config.bank import BankBenchmark
from ensemble_ml.config.base import MISSING, at_least, check_periods, check_region, opt, part, require
from ensemble_ml.config.compact import CompactBenchmark
from ensemble_ml.config.compression import CompressionConfig
from ensemble_ml.config.mlperf import MlperfConfig
from ensemble_ml.config.model import Precision
from ensemble_ml.config.parallel import ParallelConfig
from ensemble_ml.config.plan import PlannerBenchmark
from ensemble_ml.config.race import RaceConfig
from ensemble_ml.config.shard import ShardConfig
from ensemble_ml.config.skill import SkillConfig
from ensemble_ml.config.spatial import SpatialConfig
from ensemble_ml.config.stragglers import StragglersConfig
from ensemble_ml.config.tournament import ContestConfig


def _numbers(values: Any) -> bool:
    """Return whether `values` is a list or tuple of numbers."""
    return isinstance(values, list | tuple) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


@dataclass
class PredictConfig:
    """Make CF NetCDF forecasts from an archive or a store."""

    checkpoint: str = opt(MISSING, "a run (its best checkpoint is taken), or the folder of a checkpoint, e.g. runs/NAME/checkpoints/last")
    input: Any = opt(MISSING, "archive (GRIB, NetCDF, Zarr) or tensor store with the reduced ensemble", paths=True)
    control: Control = opt(Control.apart, "control forecast of an archive: apart, or include as a member, as the store was prepared")
    names: Any = opt(None, NAMES)
    units: Any = opt(None, UNITS)
    static: str | None = opt(None, "file with orography and land mask; null takes the checkpoint's")
    regrid: bool = opt(False, "bring an archive on another grid to the checkpoint's, as prepare did: a crop or conservative means")
    output: str = opt(MISSING, "folder for forecast_YYYYMMDDHH.nc")
    members_in: Any = opt(None, "how many first members to use, or a list of member numbers; null takes all")
    dates: list[str] | None = opt(None, "init times: years, ISO dates or start/end ranges; null takes all")
    quantiles: list[float] = opt(lambda: [0.1, 0.25, 0.5, 0.75, 0.9], "quantiles to write")
    thresholds: Any = opt(None, "probabilities of exceeding, e.g. 'thresholds={tp: [0.001, 0.01]}'; SI units")
    members_out: bool = opt(False, "also write coherent members remapped to the predicted distribution")
    region: list[float] | None = opt(None, "[north, west, south, east] of the output, degrees")
    points: Any = opt(None, "list of [latitude, longitude]: nearest grid points instead of fields")
    overwrite: bool = opt(False, "replace forecasts that exist")
    resume: bool = opt(False, "go on where a run with the same settings was stopped: leave the forecasts that it has made; with overwrite=true, make those of other settings or input anew")
    precision: Precision = opt(Precision.auto, "auto takes the checkpoint's")
    threads: int = opt(0, "CPU threads; 0 takes all cores, each rank its share of a host's")
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
    """Make of a checkpoint a folder to hand on, with a model card beside the weights."""

    checkpoint: str = opt(MISSING, "a run (its best checkpoint is taken), or the folder of a checkpoint, e.g. runs/NAME/checkpoints/last")
    output: str = opt(MISSING, "new folder; predict takes it as checkpoint=")
    scores: str | None = opt(None, "scores.json of evaluate, whose figures the model card repeats")
    overwrite: bool = opt(False, "replace an existing folder")


@dataclass
class EvaluateConfig:
    """Score forecasts beside the raw ensemble and statistical baselines."""

    forecast: Any = opt(MISSING, "folder of forecasts, or a list of folders", paths=True)
    baselines: Any = opt(None, "folder, or a list of them, of forecasts by statistics (train model=emos) that stand among the baselines", paths=True)
    ensemble: Any = opt(MISSING, "archive or store with the full ensemble", paths=True)
    control: Control = opt(Control.apart, "control forecast of an archive: apart, or include as a member, as the store was prepared")
    truth: Any = opt(None, "archive or store with the truth; null takes that of the ensemble's store, and scores spread alone where it has none", paths=True)
    names: Any = opt(None, NAMES)
    units: Any = opt(None, UNITS)
    regrid: bool = opt(False, "bring archives on another grid to that of the forecasts, as prepare did")
    orography: str | None = opt(None, "file with the orography of the ensemble's model: raw surface pressure and 2 m temperature are brought from its ground to the truth's; null leaves them as they are, and the report says so")
    truth_orography: str | None = opt(None, "file with the truth's orography; null takes that of the ensemble's store, where it has one")
    members_in: Any = opt(None, "number of first members of the raw reduced ensemble that forecasts are compared with; null takes as many as the first forecast was made from (5 where it does not state it)")
    fit: list[str] | None = opt(None, "init times that baselines are fitted on; null takes the forecast's training dates, of the hours at which forecasts start where these are enough")
    output: str = opt(MISSING, "folder for scores.json and report.html")
    regions: Any = opt(None, "boxes to score apart, beside tropics, extratropics, land and sea: 'regions={alps: [48, 5, 44, 16]}', [north, west, south, east]")
    climate_days: int = opt(9, "model climate for the extreme forecast index: members of other years within so many days of the date; 0 leaves it out")
    block_days: int = opt(10, "length of the blocks of init times that the bootstrap draws")
    bootstrap: int = opt(1000, "draws of the bootstrap")
    confidence: float = opt(0.95, "level of the confidence intervals")
    seed: int = opt(0, "seed of the bootstrap")
    overwrite: bool = opt(False, "replace an existing report")

    def __post_init__(self) -> None:
        check_overrides(self)
        lone = self.truth_orography is not None and self.orography is None
        require("truth_orography", self.truth_orography, not lone, "needs orography=, that of the ensemble's model, too")
        self.regions = self.regions or {}
        require("regions", self.regions, isinstance(self.regions, dict), "give boxes by name, {alps: [48, 5, 44, 16]}")
        for name, box in self.regions.items():
            good = _numbers(box) and len(box) == 4 and 90 >= box[0] > box[2] >= -90
            require(f"regions.{name}", box, good, "give [north, west, south, east], degrees")
        check_periods("fit", self.fit)
        at_least(self, 0, "climate_days", "seed")
        number = self.members_in is None or type(self.members_in) is int
        require("members_in", self.members_in, number, "give a number, of first members of the raw ensemble; left out, it is that of the forecast's members")
        at_least(self, 1, "members_in", "block_days")
        require("confidence", self.confidence, 0 < self.confidence < 1, "must lie between 0 and 1")
        require("bootstrap", self.bootstrap, self.bootstrap >= 100, "at least 100 draws are needed")


class BenchmarkSize(Enum):
    """How much a benchmark works on: what its claims are made at, a part of it, or seconds."""

    full = "full"
    small = "small"
    tiny = "tiny"


@dataclass
class BenchmarkConfig:
    """Run one benchmark against its peers and write results.json."""

    benchmark: str = opt(MISSING, "bank | compact | lion | loading | mlperf | planner | prepare | quickstart | remote | shard | skill | spatial | stations | step | stragglers | tournament | verification | workflows")
    output: str = opt("runs/benchmark", "results go to OUTPUT/NAME")
    repeats: int = opt(5, "counted runs of each competitor")
    size: BenchmarkSize = opt(BenchmarkSize.full, "full | small | tiny: how much data; claims are made at full size")
    only: list[str] | None = opt(None, "sections to run, where a benchmark has several; null runs all")
    workspace: str | None = opt(None, "folder for the data that a benchmark makes for itself, kept and used again; null takes a temporary one")
    files: str | None = opt(None, "for benchmark=stations: folder with the real files, null takes $ENSEMBLE_ML_REAL_DATA; sections whose file is absent are skipped")
    run: str = opt("runs/quickstart", "for benchmark=quickstart: the folder that holds scores.json")

    bank: BankBenchmark = part(BankBenchmark, "for benchmark=bank: store, seeds, hosts")
    compact: CompactBenchmark = part(CompactBenchmark, "for benchmark=compact: store, seeds, speedup")
    lion: CompressionConfig = part(CompressionConfig, "for benchmark=lion: hosts, links, quality")
    skill: SkillConfig = part(SkillConfig, "for benchmark=skill")
    mlperf: MlperfConfig = part(MlperfConfig, "for benchmark=mlperf: store, target, hosts")
    planner: PlannerBenchmark = part(PlannerBenchmark, "for benchmark=planner: hosts, links, models")
    race: RaceConfig = part(RaceConfig, "for benchmark=loading")
    shard: ShardConfig = part(ShardConfig, "for benchmark=shard: ranks, networks, pretraining")
    spatial: SpatialConfig = part(SpatialConfig, "for benchmark=spatial: hosts, links, shape")
    stragglers: StragglersConfig = part(StragglersConfig, "for benchmark=stragglers: hosts, delays, quality")
    tournament: ContestConfig = part(ContestConfig, "for benchmark=tournament: hosts, quality, storage")

    def __post_init__(self) -> None:
        at_least(self, 1, "repeats")
