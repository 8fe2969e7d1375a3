"""Settings of the tasks that measure: `benchmark`, which times the program and its parts, and the planner `plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ensemble_ml.config.base import MISSING, at_least, check_periods, opt, part, require
from ensemble_ml.config.model import NETWORKS
from ensemble_ml.config.training import TrainConfig

_RIVALS = "flat", "same", "separable"  # competitors of compaction


@dataclass
class ContestConfig:
    """Tournaments against their competitors (`benchmark=tournament`)."""

    trainers: int = opt(4, "trainers; in the cost section each on a host of its own")
    rate: str | None = opt("none", "cost, storage: rate of the links as tc writes it; none is unshaped, null uses the loopback")
    store: str | None = opt(None, "tensor store with init times in 2001 and 2002; null leaves out all sections but simulation")
    seeds: int = opt(3, "seeds of the quality, rates and nan sections")
    steps: int = opt(150, "quality: steps of each training, a multiple of every")
    every: int = opt(25, "quality: steps between tournaments, and between averages of local SGD")
    apart: int = opt(100, "cost: steps between tournaments, of which there are three")
    samples: int = opt(480, "storage: samples that each competitor reads in all")
    mb_s: float = opt(20.0, "storage: bandwidth of the emulated slow storage, shared by all trainers")
    step: float = opt(0.1, "storage: seconds that a step sleeps")
    largest: int = opt(64, "simulation: trainers")

    def __post_init__(self) -> None:
        at_least(self, 2, "trainers", "largest", group="tournament.")
        at_least(self, 1, "seeds", "steps", "every", "apart", "samples", group="tournament.")
        require("tournament.steps", self.steps, self.steps % self.every == 0 and self.steps > 2 * self.every, f"must be a multiple of tournament.every={self.every}, and at least three times as many")


@dataclass
class CompactBenchmark:
    """Compaction against its competitors (`benchmark=compact`)."""

    store: str | None = opt(None, "quality, predict: tensor store with init times in 2001 and 2002; null leaves these sections out")
    seeds: int = opt(3, "quality: trainings of each competitor")
    steps: int = opt(160, "quality: steps of each training; compaction adds a quarter of them")
    rivals: list[str] = opt(lambda: list(_RIVALS), f"quality: {' | '.join(_RIVALS)}: which competitors are trained from scratch")
    speedup: float = opt(1.6, "quality: speedup by compaction, of a network without the fits before it")
    checkpoint: str | None = opt(None, "predict: a run, fits included, whose prediction is timed before and after; null leaves the section out")

    def __post_init__(self) -> None:
        at_least(self, 1, "seeds", "steps", group="compact.")
        for name in self.rivals:
            require("compact.rivals", name, name in _RIVALS, f"{', '.join(_RIVALS)} are allowed")
        require("compact.speedup", self.speedup, self.speedup > 1, "must be above 1")


@dataclass
class PlannerBenchmark:
    """The planner's predictions against measured steps, over emulated links (`benchmark=planner`)."""

    ranks: int = opt(4, "number of hosts, with one rank on each")
    rates: list[str] = opt(lambda: ["none", "1gbit", "100mbit"], "rates of the links, as tc writes them, or none for links without a limit; [] uses the loopback")
    hidden: list[int] | None = opt(None, "channels of the models to time; null takes those of the benchmark's size")
    batches: list[int] | None = opt(None, "batch sizes to time; null takes those of the benchmark's size")
    seconds: float = opt(40.0, "time for measuring the local part of a step, for each model and batch size")

    def __post_init__(self) -> None:
        at_least(self, 2, "ranks", group="planner.")
        at_least(self, 1, "hidden", "batches", group="planner.")
        require("planner.seconds", self.seconds, self.seconds > 0, "must be above 0")


@dataclass
class ShardConfig:
    """Sharded against whole weights, and pretraining on members against training from scratch (`benchmark=shard`)."""

    ranks: list[int] = opt(lambda: [2, 4], "numbers of ranks whose steps are timed")
    shape: list[int] = opt(lambda: [4, 33, 64], "levels, rows and columns of the network whose steps are timed")
    hidden: list[int] = opt(lambda: [32, 64, 128], "channels of the networks whose memory is measured; the last one's steps are timed")
    store: str | None = opt(None, "tensor store with a truth, for the section pretraining; null leaves that out")
    train: list[str] = opt(lambda: ["2001"], "init times to pretrain on, and to take labelled ones from")
    validation: list[str] = opt(lambda: ["2002"], "init times that choose the best checkpoint")
    test: list[str] = opt(lambda: ["2003"], "init times to score")
    levels: list[int] | None = opt(None, "pressure levels of these trainings, hPa; null takes all")
    leads: list[int] | None = opt(None, "lead times that they predict, hours; null takes all")
    channels: list[int] = opt(lambda: [16, 64], "channels of the network of these trainings, first and most")
    batch_size: int = opt(4, "init times a step of these trainings")
    validate_every: int = opt(20, "steps between their validations")
    labelled: list[int] = opt(lambda: [8, 16, 60], "numbers of init times whose truth is used")
    steps: list[int] = opt(lambda: [80, 80], "steps on members, and on the truth after them; an autoencoder, and training from scratch, get the same processor time")
    seeds: int = opt(3, "trainings of each kind")
    fits: bool = opt(False, "let the trainings make the statistical corrections before the first step, too")

    def __post_init__(self) -> None:
        at_least(self, 2, "ranks", group="shard.")
        at_least(self, 1, "hidden", "labelled", "steps", "seeds", "shape", "channels", "batch_size", "validate_every", group="shard.")
        require("shard.hidden", self.hidden, bool(self.hidden), "give one number or more")
        require("shard.shape", self.shape, len(self.shape) == 3, "give levels, rows and columns")
        require("shard.channels", self.channels, len(self.channels) == 2, "give the first number and the largest")
        require("shard.steps", self.steps, len(self.steps) == 2, "give the steps on members, and those on the truth")
        for key in ("train", "validation", "test"):
            check_periods(f"shard.{key}", getattr(self, key))


@dataclass
class BankBenchmark:
    """Kernels that share a bank against kernels of their own (`benchmark=bank`)."""

    store: str | None = opt(None, "quality: tensor store with init times in 2001 and 2002; null leaves the section out")
    seeds: int = opt(3, "quality: trainings of each competitor")
    steps: int = opt(160, "quality: steps of each training")
    ranks: int = opt(4, "links: number of hosts that vote, joined by links of 100 Mbit/s")

    def __post_init__(self) -> None:
        at_least(self, 1, "seeds", "steps", group="bank.")
        at_least(self, 2, "ranks", group="bank.")


@dataclass
class CompressionConfig:
    """Compressed Lion against its peers, over emulated links (`benchmark=lion`)."""

    ranks: int = opt(4, "number of hosts, with one rank on each")
    rates: list[str] = opt(lambda: ["100mbit", "1gbit"], "rates of the links, as tc writes them; [] uses the loopback, whose times say nothing of networks")
    elements: int = opt(1 << 24, "number of parameters in the section that times communication alone")
    store: str | None = opt(None, "tensor store of the quality section, with init times in 2001 and 2002; null leaves the section out")
    quality_rate: str | None = opt(None, "rate of the links between the processes of the quality section; null trains ranks that are threads of one process, and predicts their wall time")
    quality_ranks: int = opt(4, "ranks of the quality section")
    quality_steps: int = opt(150, "steps of each training")
    variants: list[str] | None = opt(lambda: ["allreduce", "vote", "lion_cub"], "exchanges of the quality section, which are compared with allreduce; allreduce must be among them; null takes all exchanges of the section")
    seeds: int = opt(3, "trainings of allreduce, and of vote and lion_cub under either assignment of samples; the other exchanges are trained once")
    minutes: float = opt(60.0, "time budget of the quality section; trainings that do not begin within it are left out and reported")

    def __post_init__(self) -> None:
        at_least(self, 2, "ranks", "quality_ranks", group="lion.")
        at_least(self, 64, "elements", group="lion.")
        at_least(self, 1, "seeds", "quality_steps", group="lion.")
        at_least(self, 0, "minutes", group="lion.")


@dataclass
class MlperfConfig:
    """Time to a target score, by the rules of MLPerf HPC (`benchmark=mlperf`)."""

    store: str | None = opt(None, "tensor store, with init times in 2001 and 2002; it is copied, and stays as it is")
    until: float = opt(0.75, "target, a validation crps_ratio; choose one that the untrained model misses and that every seed reaches")
    seeds: int = opt(5, "runs, each in a process of its own")
    steps: int = opt(200, "number of steps after which a run ends that has not reached the target")
    validate_every: int = opt(5, "steps between validations; a target is noticed at the first validation after it is reached")
    train: list[str] = opt(list, "further settings of the training, as KEY=VALUE")
    storage_mb_s: float = opt(20.0, "section loading: MB/s of the slow storage")
    hosts: int = opt(4, "section exchange: number of hosts")
    rate: str | None = opt("100mbit", "section exchange: rate of the links as tc writes it; null uses the loopback")

    def __post_init__(self) -> None:
        at_least(self, 1, "seeds", "steps", "validate_every", group="mlperf.")
        at_least(self, 2, "hosts", group="mlperf.")
        require("mlperf.until", self.until, 0 < self.until < 1, "must be between 0 and 1, which is the raw ensemble's score")
        require("mlperf.storage_mb_s", self.storage_mb_s, self.storage_mb_s > 0, "must be above 0")


@dataclass
class RaceConfig:
    """Loaders over emulated slow storage (`benchmark=loading`)."""

    caches: list[float] = opt(lambda: [0.1, 0.25, 0.5, 1.0, 2.0], "capacity for cached bytes over all ranks, as shares of the raw dataset")
    workers: list[int] = opt(lambda: [0, 1, 2, 4], "workers that each competitor is tried with; its fastest number is raced")
    rivals: list[str] = opt(lambda: ["dataloader", "streaming", "insitubatch"], "competitors to race: dataloader, streaming, insitubatch; those that cannot be installed are reported")
    ranks: int = opt(2, "ranks of the race")
    epochs: int | None = opt(None, "epochs of the race; null takes 10 (3 at size=tiny)")
    rate: str = opt("1gbit", "rate of the links of the hosts section, as tc writes it")
    budget_mb: float = opt(256.0, "memory that the memory section gives to a loader")

    def __post_init__(self) -> None:
        require("race.caches", self.caches, len(self.caches) > 0 and min(self.caches) >= 0, "must be 0 or more each")
        require("race.workers", self.workers, len(self.workers) > 0 and min(self.workers) >= 0, "must be 0 or more each")
        known = ("dataloader", "streaming", "insitubatch")
        for name in self.rivals:
            require("race.rivals", name, name in known, f"allowed are {', '.join(known)}")
        require("race.ranks", self.ranks, self.ranks in (1, 2, 4, 8), "must be 1, 2, 4 or 8, which share batches of 8 evenly")
        require("race.epochs", self.epochs, self.epochs is None or self.epochs >= 1, "must be 1 or more")
        require("race.budget_mb", self.budget_mb, self.budget_mb >= 64, "must be 64 or more: with less, the fluctuations of the interpreter's own memory would decide")


@dataclass
class SkillConfig:
    """Our model and its baselines, trained and scored alike (`benchmark=skill`). Existing results are used again."""

    store: str | None = opt(None, "tensor store with truth; null takes runs/full-data/store.zarr (made with simulate=full), or the quickstart's runs/quickstart-data/store.zarr")
    orography: str | None = opt(None, "file with the orography of the ensemble's model; raw surface pressure and 2 m temperature are corrected for its difference from the truth's; null takes the file that simulate left beside the store, if there is one")
    truth_orography: str | None = opt(None, "file with the truth's orography; null takes that of the store")
    train: list[str] | None = opt(None, "init times to train on; null takes all years before that of validation")
    validation: list[str] | None = opt(None, "init times of validation, by which settings are chosen and trainings end; null takes the year before the test years")
    test: list[str] | None = opt(None, "init times to score; null takes the last quarter of the years, rounded up")
    models: list[str] = opt(lambda: ["unet3d", "emos", "drn", "ens10_unet", "poet"], "models that take part; unet3d is ours and must be among them")
    families: Any = opt(None, "distributions of our model that differ from those of the registry, such as {q: censored_normal} where humidity is cut off at zero; its rivals keep those of the registry")
    seeds: int = opt(3, "trainings of each network in its best setting")
    trials: int = opt(4, "settings tried for each network, learning rates first, compared on the validation dates")
    patience: int = opt(10, "number of validations without a better score after which a training ends; they are 50 steps apart, or fewer in short trainings")
    steps: int = opt(20000, "optimizer steps of a training, at most")
    members: int = opt(5, "size of the reduced ensemble that claims are made for")
    sizes: list[int] = opt(lambda: [1, 2, 3, 5, 10], "sizes of the reduced ensembles from which forecasts are made, with the first seed")
    bootstrap: int = opt(1000, "draws of the bootstrap")
    block_days: int = opt(10, "length in days of the blocks of init times that the bootstrap draws")
    threads: int = opt(0, "CPU threads; 0 takes all cores")

    def __post_init__(self) -> None:
        at_least(self, 1, "seeds", "trials", "patience", "steps", "sizes", "block_days", group="skill.")
        at_least(self, 0, "threads", group="skill.")
        at_least(self, 100, "bootstrap", group="skill.")
        require("skill.members", self.members, self.members >= 2, "must be 2 or more: one member has no spread")
        unknown = [name for name in self.models if name not in NETWORKS]
        good = not unknown and "unet3d" in self.models and len(self.models) > 1
        require("skill.models", self.models, good, f"unet3d and others of {', '.join(NETWORKS)}")
        require("skill.sizes", self.sizes, self.members in self.sizes, f"must hold skill.members={self.members}")
        for key in ("train", "validation", "test"):
            check_periods(f"skill.{key}", getattr(self, key))


@dataclass
class SpatialConfig:
    """One sample over several ranks, against one process and against its peers (`benchmark=spatial`)."""

    rates: list[str] = opt(lambda: ["1gbit", "100mbit"], "rates of the links, as tc writes them; [] leaves the sections that need links out")
    hosts: list[int] = opt(lambda: [2, 4], "numbers of hosts joined by links")
    shape: list[int] = opt(lambda: [8, 128, 256], "levels, rows and columns of the U-Net that is timed")
    precisions: list[str] = opt(lambda: ["float32", "bfloat16"], "arithmetic of the convolutions that are timed")
    physicsnemo: str | None = opt(None, "folder with PhysicsNeMo and its dependencies, as `pip install --target` leaves it; null leaves PhysicsNeMo out")

    def __post_init__(self) -> None:
        require("spatial.shape", self.shape, len(self.shape) == 3, "give levels, rows and columns")
        at_least(self, 1, "shape", group="spatial.")
        require("spatial.hosts", self.hosts, all(n in (2, 4) for n in self.hosts), "2 and 4 are allowed")
        good = all(p in ("float32", "bfloat16", "float64") for p in self.precisions)
        require("spatial.precisions", self.precisions, good, "float32, bfloat16 and float64 are allowed")


@dataclass
class StragglersConfig:
    """Votes that a quorum ends, against exchanges that wait (`benchmark=stragglers`)."""

    ranks: int = opt(4, "number of hosts, with one rank on each")
    rate: str | None = opt("none", "rate of the links as tc writes it; none is unshaped, null uses the loopback")
    steps: int = opt(30, "steps of a run; a multiple of bound")
    step: float = opt(0.05, "seconds that a gradient takes; ranks sleep for that time")
    late: float = opt(0.5, "further seconds that the one late rank of each step takes")
    bound: int = opt(10, "votes, or steps of local SGD, after which all ranks meet")
    group: int = opt(2, "hosts that average in each step of WAGMA-SGD; ranks is a power of it")
    elements: int = opt(1_000_000, "parameters")
    store: str | None = opt(None, "tensor store of the quality section, with init times in 2001 and 2002; null leaves the section out")
    seeds: int = opt(3, "trainings of each exchange in the quality section")
    quality_steps: int = opt(150, "steps of each training; a multiple of bound")

    def __post_init__(self) -> None:
        at_least(self, 3, "ranks", group="stragglers.")
        at_least(self, 1, "steps", "bound", "elements", "seeds", "quality_steps", group="stragglers.")
        at_least(self, 0, "step", "late", group="stragglers.")
        at_least(self, 2, "group", group="stragglers.")
        power = self.ranks == self.group ** round(math.log(self.ranks, self.group))
        require("stragglers.group", self.group, power, f"stragglers.ranks={self.ranks} is not a power of it")
        for key in ("steps", "quality_steps"):
            value = getattr(self, key)
            require(f"stragglers.{key}", value, value % self.bound == 0, f"must be a multiple of stragglers.bound={self.bound}")


class BenchmarkSize(Enum):
    """The amount of data of a benchmark: that of its claims, a part of it, or as little as takes seconds."""

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


@dataclass
class PlanSettings:
    """The ranks, memory and links to plan for, and which of their speeds are given or measured."""

    ranks: int = opt(0, "number of ranks to plan for; 0 takes those that were started, or for a single one as many as this machine has GPUs, or else cores")
    ranks_per_node: int = opt(0, "ranks on each node; 0 takes the launcher's number, or puts all ranks on one node if a single one was started")
    memory_gb: float = opt(0.0, "memory of a rank, 1e9 bytes; 0 takes its share of this machine's")
    alpha: float | None = opt(None, "latency of a message, seconds; null measures it between the ranks that were started, or between processes of this machine")
    beta: float | None = opt(None, "seconds that a byte takes: 8e-9 is 1 Gbit/s; null measures it")
    gflops: float = opt(0.0, "arithmetic of a rank, 1e9 operations a second; 0 measures a step at each shard's shape")
    bandwidth: float = opt(0.0, "memory bandwidth of a rank, 1e9 bytes a second, taken with gflops; 0 counts arithmetic alone")
    seconds: float = opt(60.0, "time limit of all measurements; shapes that are not measured by then are estimated from those that are")
    cache: str | None = opt(None, "folder of measured times; null takes the user's cache ($XDG_CACHE_HOME or ~/.cache)")
    why: bool = opt(False, "also print the partitions that do not fit, and why")
    simulate: bool = opt(False, "also predict strong and weak scaling, and plot it")
    devices: int = opt(2048, "most devices of the simulated scaling")

    def __post_init__(self) -> None:
        at_least(self, 0, "ranks", "ranks_per_node", "memory_gb", "gflops", "bandwidth", "seconds", "alpha", "beta", group="plan.")
        known = not self.bandwidth or self.gflops > 0
        require("plan.bandwidth", self.bandwidth, known, "give plan.gflops too, or neither; a step is measured then")
        both = (self.alpha is None) == (self.beta is None)
        require("plan.alpha", self.alpha, both, "give plan.alpha and plan.beta, or neither")
        at_least(self, 1, "devices", group="plan.")


@dataclass
class PlanConfig(TrainConfig):
    """Predict how a training run would share out its work and its reading, before it starts."""

    run: str = opt("plan", "name of the plan: results go to OUTPUT/RUN")
    plan: PlanSettings = part(PlanSettings, "ranks, memory, links")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "steps")
