"""The only schema of the configuration: plain dataclasses that check their values when they are made.

Hydra composes the files of `conf/` over these classes. `OmegaConf.to_object` then turns the result into instances, in
`compose.build_config`. Tasks get these instances, never a DictConfig.

OmegaConf cannot compose frozen classes or fields of the type Literal, and it returns tuples as lists, so the classes
have none of these. It finds the member of an Enum by its name, so members are named as users write them. `doc` in the
metadata of a field is the line that `--help` prints.
"""

from ensemble_ml.config.archives import (
    FROM_START,
    Control,
    Executor,
    Gaps,
    InspectConfig,
    OutputFormat,
    Packing,
    PrepareConfig,
    SimulateConfig,
    check_overrides,
)
from ensemble_ml.config.base import (
    MISSING,
    as_list,
    check_finite,
    is_dataset,
    require,
    setting_lines,
    shown_input,
    text_settings,
)
from ensemble_ml.config.benchmarks import (
    BankBenchmark,
    BenchmarkConfig,
    BenchmarkSize,
    CompactBenchmark,
    CompressionConfig,
    ContestConfig,
    MlperfConfig,
    PlanConfig,
    PlannerBenchmark,
    PlanSettings,
    RaceConfig,
    ShardConfig,
    SkillConfig,
    SpatialConfig,
    StragglersConfig,
)
from ensemble_ml.config.forecasts import EvaluateConfig, ExportConfig, PredictConfig
from ensemble_ml.config.model import ModelConfig, Pole, Precision, Standardise, Vertical
from ensemble_ml.config.training import (
    Assign,
    Backend,
    ClipBy,
    CompactConfig,
    CompactData,
    DataConfig,
    ExchangeName,
    Launcher,
    LoaderName,
    LoadingConfig,
    MomentumKept,
    MomentumSync,
    Nonfinite,
    Objective,
    OptimConfig,
    OptimName,
    ParallelConfig,
    TournamentConfig,
    TournamentData,
    TournamentKeep,
    TrackingConfig,
    TrainConfig,
    VoteScale,
)

# The schema of each task, by the word of the command line. `conf/` has a file of the same name with the defaults.
SCHEMAS: dict[str, type] = {
    "simulate": SimulateConfig,
    "prepare": PrepareConfig,
    "inspect": InspectConfig,
    "train": TrainConfig,
    "compact": CompactConfig,
    "plan": PlanConfig,
    "predict": PredictConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "benchmark": BenchmarkConfig,
}
