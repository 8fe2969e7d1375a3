"""Settings of the benchmark of large networks (`benchmark=shard`)."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble_ml.config.base import at_least, check_periods, opt, require


@dataclass
class ShardConfig:
    """Sharded weights against whole ones, and pretraining on members against training from scratch."""

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
