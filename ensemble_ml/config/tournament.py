"""Settings of tournaments between the trainers of a job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ensemble_ml.config.base import at_least, opt, require

VARIED = ("optim.lr", "optim.final_lr", "optim.warmup", "spread_weight")


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
            numbers = isinstance(values, list) and all(_is_number(value) for value in values)
            require(name, values, numbers, "give a list of numbers, one a trainer")


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


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
