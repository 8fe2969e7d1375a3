"""The only schema of the configuration: plain dataclasses that check their values when they are made.

Hydra composes the files of `conf/` over these classes. `OmegaConf.to_object` then turns the result into instances,
once, in `cli`. No code below that border sees a DictConfig.

OmegaConf cannot compose frozen classes, nor fields of the types Literal, tuple or Path, so the classes have none of
these. It finds the member of an Enum by its name, so members are named as users write them. `doc` in the metadata of a
field is the line that `--help` prints.
"""

from ensemble_ml.config.archives import (
    Control,
    Executor,
    Gaps,
    InspectConfig,
    OutputFormat,
    Packing,
    PrepareConfig,
    SimulateConfig,
)
from ensemble_ml.config.bank import BankBenchmark
from ensemble_ml.config.base import (
    MISSING,
    as_list,
    check_finite,
    check_period,
    is_dataset,
    opt,
    part,
    require,
    setting_lines,
    shown_input,
    text_settings,
)
from ensemble_ml.config.compact import CompactBenchmark, CompactConfig, CompactData
from ensemble_ml.config.compression import CompressionConfig
from ensemble_ml.config.forecasts import BenchmarkConfig, BenchmarkSize, EvaluateConfig, ExportConfig, PredictConfig
from ensemble_ml.config.loading import Assign, LoaderName, LoadingConfig, parse_bytes
from ensemble_ml.config.mlperf import MlperfConfig
from ensemble_ml.config.model import ModelConfig, Pole, Precision, Standardise, Vertical
from ensemble_ml.config.optim import (
    ClipBy,
    ExchangeName,
    MomentumKept,
    MomentumSync,
    Nonfinite,
    OptimConfig,
    OptimName,
    VoteScale,
)
from ensemble_ml.config.parallel import Backend, Launcher, ParallelConfig
from ensemble_ml.config.plan import PlanConfig, PlannerBenchmark, PlanSettings
from ensemble_ml.config.race import RaceConfig
from ensemble_ml.config.shard import ShardConfig
from ensemble_ml.config.skill import SkillConfig
from ensemble_ml.config.spatial import SpatialConfig
from ensemble_ml.config.stragglers import StragglersConfig
from ensemble_ml.config.tournament import ContestConfig, TournamentConfig, TournamentData, TournamentKeep
from ensemble_ml.config.training import DataConfig, Objective, TrackingConfig, TrainConfig

__all__ = [
    "Control",
    "Executor",
    "Gaps",
    "Packing",
    "InspectConfig",
    "OutputFormat",
    "PrepareConfig",
    "SimulateConfig",
    "MISSING",
    "as_list",
    "check_finite",
    "check_period",
    "is_dataset",
    "opt",
    "part",
    "require",
    "setting_lines",
    "shown_input",
    "text_settings",
    "CompressionConfig",
    "BenchmarkConfig",
    "BenchmarkSize",
    "BankBenchmark",
    "CompactBenchmark",
    "CompactConfig",
    "CompactData",
    "ShardConfig",
    "SkillConfig",
    "RaceConfig",
    "SpatialConfig",
    "MlperfConfig",
    "StragglersConfig",
    "ContestConfig",
    "TournamentConfig",
    "TournamentData",
    "TournamentKeep",
    "EvaluateConfig",
    "ExportConfig",
    "PredictConfig",
    "ModelConfig",
    "Pole",
    "Precision",
    "Standardise",
    "Vertical",
    "Backend",
    "Launcher",
    "ParallelConfig",
    "PlanConfig",
    "PlanSettings",
    "PlannerBenchmark",
    "Assign",
    "ClipBy",
    "ExchangeName",
    "MomentumKept",
    "MomentumSync",
    "Nonfinite",
    "Objective",
    "OptimConfig",
    "OptimName",
    "VoteScale",
    "DataConfig",
    "LoaderName",
    "LoadingConfig",
    "parse_bytes",
    "TrackingConfig",
    "TrainConfig",
]
