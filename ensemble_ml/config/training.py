"""Settings of a training run: data, loading, ranks, optimizer and exchange, tournaments, checkpoints and logs.

`compact`, which cuts a trained model down so that it predicts faster, has a few of its own. All others are those of the
checkpoint.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any

from ensemble_ml.config.base import MISSING, at_least, check_periods, is_number, opt, part, require
from ensemble_ml.config.model import ModelConfig
from ensemble_ml.errors import UserError

# Settings that may differ between the trainers of a job.
VARIED = ("optim.lr", "optim.final_lr", "optim.warmup", "spread_weight")

# The bytes of the units of sizes, and the form of a size, such as 4GB or 512MiB.
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", re.IGNORECASE)

# Settings that take effect only if ranks vote. Older runs accepted them in any case (see `training.agreement`).
OF_VOTES = tuple(f"optim.{key}" for key in ("bits", "scale", "hierarchical", "momentum_sync", "momentum_kept"))


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


class Assign(Enum):
    """The rule that assigns the samples of the global batch to ranks."""

    fixed = "fixed"
    locality = "locality"


class LoaderName(Enum):
    """The loader: it reads by a plan of the run, or each batch as it comes."""

    clairvoyant = "clairvoyant"
    torch = "torch"


@dataclass
class LoadingConfig:
    """The loading of batches."""

    name: LoaderName = opt(LoaderName.clairvoyant, "clairvoyant: read by plan, each byte from slow storage as rarely as possible | torch: torch's DataLoader")
    ram: Any = opt(None, "clairvoyant: memory for loading on each rank, packed cache and look-ahead together, as 4GB or 512MiB; null takes half of what is free, shared by the ranks of a host")
    disk: Any = opt(0, "clairvoyant: space for packed fields on local disk, for each rank")
    folder: str | None = opt(None, "clairvoyant: folder on local disk; needed where disk > 0")
    ahead: int = opt(3, "batches read ahead; torch: divided among the workers, at least one for each, and none without workers")
    threads: int = opt(2, "clairvoyant: threads that read and decode")
    assign: Assign = opt(Assign.fixed, "fixed: each rank gets its slice of the global batch | locality: a rank gets the samples that it holds, as far as slices stay equally long")
    workers: int = opt(0, "torch: worker processes; 0 reads in the training thread")
    timeline: str | None = opt(None, "clairvoyant: write a picture of reads, waits and compute to this file (.png, .svg, .pdf); 'run' puts it into the run folder")
    bandwidth: float | None = opt(None, "for `plan`: bandwidth of slow storage, MB/s over all ranks; null measures it while reading the store")
    host: str | None = opt(None, "clairvoyant: name under which other nodes reach this one; null takes the host name")
    node: str | None = opt(None, "clairvoyant: name that ranks share only where they share memory; null takes host name and device of /dev/shm")

    def __post_init__(self) -> None:
        at_least(self, 1, "ahead", "threads", group="loading.")
        at_least(self, 0, "workers", group="loading.")
        require("loading.bandwidth", self.bandwidth, self.bandwidth is None or self.bandwidth > 0, "must be above 0")
        parse_bytes("loading.ram", self.ram)
        disk = self.disk_bytes
        require("loading.disk", self.disk, not disk or self.folder is not None, "needs loading.folder=FOLDER on local disk")
        picture = self.timeline in (None, "run") or str(self.timeline).endswith((".png", ".svg", ".pdf"))
        require("loading.timeline", self.timeline, picture, "is written as .png, .svg or .pdf, or 'run'")
        good = self.name is LoaderName.clairvoyant or self.assign is Assign.fixed
        require("loading.assign", self.assign.value, good, "loading=torch holds nothing, so only fixed is allowed")

    @property
    def ram_bytes(self) -> int | None:
        """Return `ram` in bytes, or None if the program is to choose it."""
        return parse_bytes("loading.ram", self.ram)

    @property
    def disk_bytes(self) -> int:
        """Return `disk` in bytes, zero if it is not set."""
        return parse_bytes("loading.disk", self.disk) or 0


class Backend(Enum):
    """The library that moves tensors between ranks."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class Launcher(Enum):
    """The launcher from whose environment variables a process reads its rank."""

    auto = "auto"
    none = "none"
    torchrun = "torchrun"
    slurm = "slurm"
    openmpi = "openmpi"
    mpich = "mpich"


@dataclass
class ParallelConfig:
    """The division of a job among its ranks, whose number is the product trainer * data * lat * lon."""

    trainer: int = opt(1, "number of models that the job trains and that compete with each other (tournament.every)")
    data: Any = opt("auto", "ranks, or spatial groups of ranks, that share a batch; auto takes what lat, lon and trainer leave")
    lat: Any = opt(1, "ranks that share the latitudes of a sample; auto lets the planner choose before training")
    lon: Any = opt(1, "ranks that share the longitudes of a sample; auto lets the planner choose before training")
    shard: Any = opt(1, "ranks that share the weights, gradients and momenta of the U-Net in training (FSDP2); it must divide data * lat * lon; auto takes the fewest with which the planner expects a step to fit into memory")
    overlap: Any = opt(False, "true | false | auto: convolutions compute while halos travel; auto times a step both ways before training, and is false for predict")
    backend: Backend = opt(Backend.auto, "auto | gloo | nccl; auto takes nccl where every rank of a node has a GPU of its own")
    launcher: Launcher = opt(Launcher.auto, "auto | none | torchrun | slurm | openmpi | mpich: the launcher whose variables are read; auto finds it; none ignores all of them and runs one rank")
    timeout: float = opt(300.0, "seconds that a rank waits for the others in an exchange; at the start of the job it waits at least 120")
    silence: float = opt(15.0, "seconds without a heartbeat after which a rank is taken for dead")

    def __post_init__(self) -> None:
        at_least(self, 1, "trainer", group="parallel.")
        for key in ("data", "lat", "lon", "shard"):
            value = getattr(self, key)
            good = value == "auto" or (type(value) is int and value >= 1)
            require(f"parallel.{key}", value, good, "auto or a number from 1 up is allowed")
        require("parallel.shard", self.shard, self.shard != "auto" or not self.planned, "the planner needs a number here to choose lat and lon; give one, or give numbers for lat and lon")
        require("parallel.overlap", self.overlap, isinstance(self.overlap, bool) or self.overlap == "auto", "true, false or auto is allowed")
        require("parallel.timeout", self.timeout, 0 < self.timeout <= 1e9, "must be above 0 and at most 1e9 (32 years)")
        at_least(self, 2, "silence", group="parallel.")

    @property
    def planned(self) -> bool:
        """Return whether the planner has to choose the partition of the grid before the run can start."""
        return "auto" in (self.lat, self.lon)


class OptimName(Enum):
    """The optimizer."""

    lion = "lion"
    adamw = "adamw"


class ExchangeName(Enum):
    """The way in which ranks combine gradients or updates in a step, and the form in which they send them."""

    none = "none"
    allreduce = "allreduce"
    fp16 = "fp16"
    bf16 = "bf16"
    powersgd = "powersgd"
    vote = "vote"
    lion_cub = "lion_cub"
    distributed_lion = "distributed_lion"


class VoteScale(Enum):
    """The unit of voted codes: from the mean magnitude, from the largest one, or none (the sign alone)."""

    l1 = "l1"
    linf = "linf"
    sign = "sign"


class MomentumSync(Enum):
    """The schedule by which ranks average their momenta."""

    never = "never"
    every = "every"
    growing = "growing"
    selective = "selective"


class Nonfinite(Enum):
    """The reaction to gradients that are not finite."""

    stop = "stop"
    skip = "skip"


class ClipBy(Enum):
    """The part of the gradient whose norm `clip` bounds."""

    total = "total"
    bucket = "bucket"


class MomentumKept(Enum):
    """The form in which a checkpoint holds momenta that differ between ranks."""

    ranks = "ranks"
    mean = "mean"


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
    clip_by: ClipBy = opt(ClipBy.total, "total | bucket: bound the norm of the whole gradient, or of each bucket by its share of clip, so that votes need not wait for the end of backward (only for exchanges that vote)")
    nonfinite: Nonfinite = opt(Nonfinite.stop, "stop | skip: end the run at gradients that are not finite, or leave out the step on all ranks")
    exchange: ExchangeName = opt(ExchangeName.allreduce, "none | allreduce | fp16 | bf16 | powersgd | vote | lion_cub | distributed_lion: what ranks exchange; one rank exchanges nothing")
    bits: int = opt(1, "bits an element that a rank sends: vote 1, 2, 4 or 8; lion_cub 1 or 8")
    scale: VoteScale = opt(VoteScale.l1, "l1 | linf | sign: what the codes of a vote are multiples of")
    bucket_mb: float = opt(16.0, "parameters of a bucket in float32, 1e6 bytes; a bucket is exchanged while backward goes on (powersgd, lion_cub and distributed_lion exchange all in one after it)")
    rank: int = opt(4, "rank of powersgd's factors")
    hierarchical: bool = opt(False, "average in full precision inside a node and vote between nodes")
    momentum_sync: MomentumSync = opt(MomentumSync.never, "never | every | growing | selective: when the momenta of voting ranks are averaged")
    momentum_every: int = opt(100, "steps between averagings; the first interval where they grow")
    momentum_mb: float = opt(1.0, "1e6 bytes that a rank may send in a selective averaging; a layer that needs more is never averaged")
    momentum_kept: MomentumKept = opt(MomentumKept.ranks, "ranks | mean: checkpoints hold the momentum of each rank, or average it first, except checkpoints that a stop or the clock asks for")
    quorum: str = opt("all", "all | auto | number: ballots that end a vote; a late rank abstains in it and follows (auto: three quarters of the ranks)")
    bound: int = opt(10, "votes after which all ranks wait for each other, where quorum is not all")
    replay: str | None = opt(None, "votes.jsonl of a run with quorum, whose votes are repeated", paths=True)

    @property
    def waits(self) -> bool:
        """Return whether every step waits for all ranks."""
        return self.quorum == "all"

    @property
    def votes(self) -> bool:
        """Return whether ranks vote on the signs of the update."""
        return self.exchange in (ExchangeName.vote, ExchangeName.lion_cub, ExchangeName.distributed_lion)

    def __post_init__(self) -> None:
        self.quorum = str(self.quorum)  # YAML reads `quorum: 3` as a number
        require("optim.lr", self.lr, self.lr > 0, "must be above 0")
        for key in ("beta1", "beta2"):
            require(f"optim.{key}", getattr(self, key), 0 <= getattr(self, key) < 1, "must be in [0, 1)")
        at_least(self, 0, "warmup", "weight_decay", "clip", group="optim.")
        require("optim.final_lr", self.final_lr, 0 <= self.final_lr <= 1, "must be in [0, 1]")
        require("optim.bits", self.bits, self.bits in (1, 2, 4, 8), "1, 2, 4 or 8 bits are allowed")
        cub = self.exchange is not ExchangeName.lion_cub or self.bits in (1, 8)
        require("optim.bits", self.bits, cub, "lion_cub takes 1 or 8 bits; exchange=vote takes 1, 2, 4 or 8")
        require("optim.exchange", self.exchange.value, not self.votes or self.name is OptimName.lion, "ranks vote on signs, which only optim=lion takes")
        by = self.clip_by is ClipBy.total or self.votes
        require("optim.clip_by", self.clip_by.value, by, f"exchange={self.exchange.value} averages gradients, so clip holds their total; use clip_by=total, or exchange=vote")
        ballots = self.votes and self.exchange is not ExchangeName.distributed_lion
        # A setting that the chosen exchange ignores has to keep its default. Otherwise a user would think that it has
        # an effect.
        for key, usual, taken in (
            ("bits", 1, ballots), ("scale", VoteScale.l1, ballots), ("hierarchical", False, self.votes),
            ("momentum_sync", MomentumSync.never, self.votes), ("momentum_kept", MomentumKept.ranks, self.votes),
            ("quorum", "all", self.exchange is ExchangeName.vote),
        ):  # fmt: skip
            value = getattr(self, key)
            require(f"optim.{key}", getattr(value, "value", value), taken or value == usual, f"exchange={self.exchange.value} ignores it; leave it out, or use exchange=vote")
        require("optim.bucket_mb", self.bucket_mb, self.bucket_mb > 0, "must be above 0")
        at_least(self, 1, "rank", "momentum_every", group="optim.")
        require("optim.momentum_mb", self.momentum_mb, self.momentum_mb > 0, "must be above 0")
        number = self.quorum in ("all", "auto") or (self.quorum.isdecimal() and int(self.quorum) > 0)
        require("optim.quorum", self.quorum, number, "all, auto, or a number of ranks above 0")
        at_least(self, 1, "bound", group="optim.")
        require("optim.bound", self.bound, self.bound == 10 or not self.waits, "quorum=all waits in every vote; leave it out, or give optim.quorum=auto")
        require("optim.replay", self.replay, self.replay is None or not self.waits, "quorum=all has nothing to repeat; give the quorum of that run")
        alone = self.waits or (not self.hierarchical and self.momentum_sync is MomentumSync.never)
        require("optim.quorum", self.quorum, alone, "votes that do not wait take neither hierarchical nor momentum_sync, for which all ranks would wait; leave these out, or use quorum=all")


class TournamentData(Enum):
    """The init times from which a trainer takes its samples."""

    shared = "shared"
    parted = "parted"


class TournamentKeep(Enum):
    """The rule by which worse trainers take the weights of better ones."""

    pairs = "pairs"
    truncation = "truncation"


@dataclass
class TournamentConfig:
    """Competition between the models that one job trains (`parallel.trainer`)."""

    every: int = opt(0, "steps between tournaments, a multiple of validate_every; needed where parallel.trainer is 2 or more")
    data: TournamentData = opt(TournamentData.shared, "shared | parted: every trainer takes samples from all training init times, or from a part of its own; fits see all of them in any case")
    keep: TournamentKeep = opt(TournamentKeep.pairs, "pairs | truncation: in random pairs the worse takes the weights of the better, or the worst quarter takes those of the best quarter")
    vary: Any = opt(None, "settings that differ between trainers, each with a value a trainer, as {optim.lr: [1e-4, 1e-3]}; a winner's value goes with its weights")
    soup: bool = opt(True, "at the end, the mean of the trainers' weights is validated too, and kept if it is the best")

    def __post_init__(self) -> None:
        at_least(self, 0, "every", group="tournament.")
        require("tournament.vary", self.vary, self.vary is None or isinstance(self.vary, dict), "give a list of values by setting, {optim.lr: [1e-4, 1e-3]}")
        self.vary = {str(key): values for key, values in (self.vary or {}).items()} or None
        for key, values in (self.vary or {}).items():
            name = f"tournament.vary.{key}"
            allowed = f"changes the shape of the model, its fits or the steps of all; {', '.join(VARIED)} may differ between trainers"
            require(name, values, key in VARIED, allowed)
            numbers = isinstance(values, list) and all(is_number(value) and math.isfinite(value) for value in values)
            require(name, values, numbers, "give a list of numbers, one a trainer")


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


class Objective(Enum):
    """The quantity whose distribution a model predicts."""

    truth = "truth"
    members = "members"


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

    def without_effect(self) -> list[str]:
        """Return a line for each setting that differs from its default, but has no effect because of another one.

        Such settings of exchanges that change results are refused.
        """
        optim, ours = self.optim, self.loading.name is LoaderName.clairvoyant
        given = {
            "patience": bool(self.data.validation) or "it counts validations; give data.validation",
            "distill": bool(self.teacher) or not self.distill or "it weighs a teacher's forecasts; give teacher",
            "model.bank_templates": bool(self.model.bank) or "model.bank=0",
            "model.departures": self.model.name != "unet3d" or "model.name=unet3d takes these inputs before the U-Net",
            "optim.rank": optim.exchange is ExchangeName.powersgd or f"optim.exchange={optim.exchange.value}",
            "optim.clip_by": optim.clip > 0 or "optim.clip=0",
            "optim.momentum_every": optim.momentum_sync is not MomentumSync.never or "optim.momentum_sync=never",
            "optim.momentum_mb": optim.momentum_sync is MomentumSync.selective or f"optim.momentum_sync={optim.momentum_sync.value}",
            "loading.folder": self.loading.disk_bytes > 0 or "loading.disk=0",
            "loading.workers": not ours or "loading=clairvoyant reads by loading.threads",
        }
        given |= {f"loading.{key}": ours or "loading=torch plans nothing" for key in ("ram", "disk", "threads", "timeline")}
        given |= {f"tournament.{key}": self.parallel.trainer > 1 or "parallel.trainer=1" for key in ("data", "keep", "soup")}
        lines, usual = [], TrainConfig()
        for key, why in given.items():
            value, default = attrgetter(key)(self), attrgetter(key)(usual)
            if why is not True and value != default:
                lines.append(f"{key}={getattr(value, 'value', value)}: has no effect here: {why}")
        return lines

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
                whole = key != "optim.warmup" or isinstance(value, int)
                require(f"tournament.vary.{key}", value, whole, "give a whole number of steps")
                replace(self.optim, **({key.removeprefix("optim."): value} if key.startswith("optim.") else {}))


@dataclass
class CompactData:
    """The data on which a model is compacted."""

    store: str = opt(MISSING, "tensor store on which the checkpoint was trained")


@dataclass
class CompactConfig:
    """Cut channels and hidden units out of a trained model, so that it predicts faster, and train what is left."""

    checkpoint: str = opt(MISSING, "a run (its best checkpoint is taken), or the folder of a checkpoint, e.g. runs/NAME/checkpoints/last")
    run: str = opt(MISSING, "name of the new run: results go to OUTPUT/RUN")
    output: str = opt("runs", "folder of all runs")
    speedup: float = opt(2.0, "how many times as fast a forward pass has to become, measured on this machine")
    limit: float = opt(1.0, "percent by which the CRPS of the validation dates may rise; more is a warning")
    steps: int | None = opt(None, "optimizer steps after the cut; null takes a quarter of the checkpoint's, 0 takes none")
    distill: float = opt(1.0, "weight of the distance to the forecasts of the checkpoint in these steps; 0 leaves it out")
    threads: int = opt(0, "CPU threads; 0 takes all cores")
    resume: bool = opt(False, "go on with the steps of a run that was stopped")
    data: CompactData = part(CompactData, "store")

    def __post_init__(self) -> None:
        require("speedup", self.speedup, self.speedup > 1, "must be above 1")
        at_least(self, 0, "limit", "steps", "distill", "threads")


def parse_bytes(key: str, value: Any) -> int | None:
    """Return a size such as 4GB, 512MiB or a plain number in bytes; None stays None. Refuse any other text."""
    if value is None:
        return None
    found = _SIZE.fullmatch(str(value).strip())
    if not found:
        raise UserError(f"{key}={value}: give bytes, or a number with KB, MB, GB, TB (powers of ten) or KiB ... TiB")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])
