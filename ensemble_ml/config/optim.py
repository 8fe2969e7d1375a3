"""Settings of the optimizer, and of the exchange between ranks in each step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ensemble_ml.config.base import at_least, opt, require


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


# Settings that take effect only if ranks vote. Older runs accepted them in any case (see `training.agreement`).
OF_VOTES = tuple(f"optim.{key}" for key in ("bits", "scale", "hierarchical", "momentum_sync", "momentum_kept"))


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
