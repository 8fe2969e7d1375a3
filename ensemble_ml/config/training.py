"""Settings of a training run: its data, its length, its checkpoints and its logs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ensemble_ml.config.base import MISSING, at_least, check_periods, opt, part, require
from ensemble_ml.config.loading import LoadingConfig
from ensemble_ml.config.model import ModelConfig
from ensemble_ml.config.optim import ExchangeName, OptimConfig
from ensemble_ml.config.parallel import ParallelConfig
from ensemble_ml.config.tournament import TournamentConfig


class Objective(Enum):
    """The quantity whose distribution a model predicts."""

    truth = "truth"
    members = "members"


@dataclass
class DataConfig:
    """The part of a store that a run uses, and the split of its init times."""

    store: str = opt(MISSING, "tensor store made by prepare")
    train: list[str] = opt(list, "init times to train on: years, ISO dates or start/end ranges")
    validation: list[str] = opt(list, "init times that choose the best checkpoint; may be empty")
    hours: list[int] | None = opt(None, "hours of the day, UTC: only init times at these hours are used; null uses all")
    variables: list[str] | None = opt(None, "pressure-level variables; null takes all of the store, except those without truth if others have one")
    surface: list[str] | None = opt(None, "surface variables; null takes all of the store, except those without truth if others have one")
    levels: list[int] | None = opt(None, "pressure levels, hPa; null takes all")
    leads_in: list[int] | None = opt(None, "lead times stacked as input, hours; null takes all stored")
    leads_out: list[int] | None = opt(None, "lead times predicted, hours; null takes all above zero, or zero where it is the only one")
    members: list[int] = opt(lambda: [1, 2, 3, 5, 8, 10], "sizes of the random member subsets drawn in training")
    validation_members: int = opt(5, "number of members used in validation, counted from the first")

    def __post_init__(self) -> None:
        require("data.members", self.members, bool(self.members) and min(self.members) >= 1, "sizes from 1 up are allowed")
        at_least(self, 1, "validation_members", group="data.")
        hours = self.hours is None or (bool(self.hours) and all(0 <= hour < 24 for hour in self.hours))
        require("data.hours", self.hours, hours, "hours from 0 to 23 are allowed, or null")
        check_periods("data.train", self.train)
        check_periods("data.validation", self.validation)


@dataclass
class TrackingConfig:
    """The logs that a run writes."""

    tensorboard: bool = opt(True, "write TensorBoard files where the package is installed")
    log_every: int = opt(10, "steps between lines of the log")
    mllog: bool = opt(False, "also write OUTPUT/RUN/mllog.txt, the log of MLPerf HPC, from which time to solution is read")
    org: str | None = opt(None, "mllog: who runs it")
    platform: str | None = opt(None, "mllog: the machine")
    cache_clear: bool = opt(False, "mllog: state in the log that no cache holds data or fits of an earlier run; this is not checked")

    def __post_init__(self) -> None:
        at_least(self, 1, "log_every", group="tracking.")
        lacking = [name for name in ("org", "platform") if not getattr(self, name)]
        require("tracking.mllog", self.mllog, not self.mllog or not lacking, f"the log must state {' and '.join(lacking)}: give tracking.{'=... tracking.'.join(lacking)}=...")


@dataclass
class TrainConfig:
    """Train a model on a tensor store."""

    run: str = opt(MISSING, "name of the run: results go to OUTPUT/RUN")
    output: str = opt("runs", "folder of all runs")
    seed: int = opt(0, "seed of the initial weights, the fits before the first step, the order of init times and the member subsets")
    objective: Objective = opt(Objective.truth, "truth | members: what is predicted, the truth or a member that the model does not get as input; members is for pretraining on init times without a truth")
    steps: int = opt(1000, "optimizer steps; 0 trains no weights, so that the model is what the fits before the first step give")
    batch_size: int = opt(4, "init times in a step, over all ranks; if there are fewer than parallel.data, some ranks compute nothing")
    validate_every: int = opt(100, "steps between validations")
    patience: int = opt(0, "validations in a row without a better score after which training ends; 0 trains all `steps`")
    until: float = opt(0.0, "training ends when crps_ratio in validation is at most this value, to measure time to solution; 0 trains all `steps`")
    checkpoint_every: int = opt(100, "steps between writings of checkpoints/last")
    checkpoint_minutes: float = opt(15.0, "longest time between writings of checkpoints/last, minutes; 0 sets no limit")
    max_minutes: float = opt(0.0, "minutes for the whole run; the fits before the first step may take 70 % of them and are cut short beyond that, and `steps` is reduced to what fits into the rest, at least one; 0 sets no limit")
    spread_weight: float = opt(1.0, "weight of the spread loss relative to the CRPS")
    average: float = opt(0.0, "decay of a running average of the weights that validation and checkpoints/best use; 0 turns it off")
    threads: int = opt(0, "CPU threads of a rank; 0 divides the cores of a host among its ranks. A resumed run is equal bit for bit only with the same number")
    resume: Any = opt(False, "go on from checkpoints/last of the same run; auto does so where SLURM has requeued the job")
    init_from: str | None = opt(None, "start from the weights of this checkpoint, or of the best one of a run, with a new schedule")
    teacher: str | None = opt(None, "checkpoint or run of a model with the same fields; its forecasts are learned in addition to the truth (distillation)")
    distill: float = opt(1.0, "weight of the distance to the teacher's forecasts, relative to the CRPS and spread losses")
    data: DataConfig = part(DataConfig, "dates, variables, levels, leads, members")
    model: ModelConfig = part(ModelConfig, "network")
    optim: OptimConfig = part(OptimConfig, "optimizer")
    loading: LoadingConfig = part(LoadingConfig, "batches")
    tracking: TrackingConfig = part(TrackingConfig, "logs")
    parallel: ParallelConfig = part(ParallelConfig, "ranks")
    tournament: TournamentConfig = part(TournamentConfig, "competing models")

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "validate_every", "checkpoint_every")
        at_least(self, 0, "patience", "checkpoint_minutes", "max_minutes", "spread_weight", "steps", "threads", "seed", "until", "distill")
        require("optim.quorum", self.optim.quorum, self.optim.waits or not self.parallel.planned, "the planner may split a sample over ranks, which then wait for each other; give numbers for parallel.lat and parallel.lon")
        whole = self.parallel.shard == 1
        require("parallel.shard", self.parallel.shard, whole or self.optim.exchange is ExchangeName.allreduce, f"optim.exchange={self.optim.exchange.value} needs all weights on each rank (in a vote each rank has a momentum of its own); use exchange=allreduce, or leave shard out")
        require("parallel.shard", self.parallel.shard, whole or self.model.name == "unet3d", f"model.name={self.model.name} trains on one rank; leave it out")
        require("parallel.shard", self.parallel.shard, whole or not self.model.bank, "a bank is shared by all kernels, so no rank can hold a part of the blocks; give one of parallel.shard and model.bank")
        require("parallel.shard", self.parallel.shard, whole or self.parallel.trainer == 1, "trainers that compete hand whole weights to each other; give one of parallel.shard and parallel.trainer")
        members = self.objective is Objective.members
        require("objective", self.objective.value, not members or self.model.postprocess, "with model.postprocess=false the model predicts no distribution, so there is nothing to learn from members; leave it out")
        require("objective", self.objective.value, not members or self.model.name != "emos", "model.name=emos is fitted to a truth and has no weights to go on from; give another model")
        require("seed", self.seed, self.seed < 2**63, "must be below 2^63")
        require("average", self.average, 0 <= self.average < 1, "must be in [0, 1)")
        require("resume", self.resume, isinstance(self.resume, bool) or self.resume == "auto", "true, false and auto are allowed")
        require("until", self.until, not self.until or bool(self.data.validation), "needs data.validation, where that score is measured")
        both = self.resume is True and self.init_from
        require("resume", self.resume, not both, "resume=true and init_from exclude each other; resume=auto is allowed with init_from")
        require("run", self.run, self.run == MISSING or bool(re.fullmatch(r"(?!\.+$)[\w.\-]+", self.run)), "letters, digits, '.', '_' and '-' are allowed, and not dots alone")
        self._check_trainers()

    def _check_trainers(self) -> None:
        """Raise a UserError if settings do not go with the number of models that the job trains."""
        trainers, every, near = self.parallel.trainer, self.tournament.every, self.validate_every
        if trainers == 1:
            require("tournament.every", every, not every, "one trainer has nobody to compete with; give parallel.trainer=2 or more")
            require("tournament.vary", self.tournament.vary, not self.tournament.vary, "one trainer has one value; give parallel.trainer=2 or more")
            return
        require("parallel.trainer", trainers, every > 0, f"trainers compete in tournaments; give tournament.every, such as {5 * near} steps, or start a job for each model")
        nearest = max(near, round(every / near) * near)
        require("tournament.every", every, every % near == 0, f"trainers compete by their scores, so it must be a multiple of validate_every={near}; the nearest is {nearest}")
        require("data.validation", self.data.validation, bool(self.data.validation), "trainers compete by their scores on these init times; give some")
        alone = {"patience": self.patience, "until": self.until, "max_minutes": self.max_minutes}
        for key, value in alone.items():
            require(key, value, not value, f"parallel.trainer={trainers} models take the same number of steps; give steps, and leave it out")
        require("tracking.mllog", self.tracking.mllog, not self.tracking.mllog, "an MLPerf log describes one model; give parallel.trainer=1")
        require("optim.quorum", self.optim.quorum, self.optim.waits, "the votes of a job are counted by one hub and train one model; use quorum=all or parallel.trainer=1")
        require("parallel.trainer", trainers, not self.parallel.planned, "the planner works for one model only; give numbers for parallel.lat and parallel.lon")
        for key, values in (self.tournament.vary or {}).items():
            require(f"tournament.vary.{key}", values, len(values) == trainers, f"give {trainers} values, one for each trainer (parallel.trainer)")
            for value in values:  # each value must be valid for the setting that it varies
                require(f"tournament.vary.{key}", value, key != "spread_weight" or value >= 0, "must be 0 or more")
                replace(self.optim, **({key.removeprefix("optim."): value} if key.startswith("optim.") else {}))
