"""Settings of tournaments between the trainers of a job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ensemble_ml.config.base import at_least, opt, require

VARIED = ("optim.lr", "optim.final_lr", "optim.warmup", "spread_weight")


class TournamentData(Enum):
    """Which init times a trainer takes its samples from."""

    shared = "shared"
    parted = "parted"


class TournamentKeep(Enum):
    """Who takes whose weights."""

    pairs = "pairs"
    truncation = "truncation"


@dataclass
class TournamentConfig:
    """Competition between the models that one job trains (`parallel.trainer`)."""

    every: int = opt(0, "steps between tournaments, a multiple of validate_every; needed where parallel.trainer is 2 or more")
    data: TournamentData = opt(TournamentData.shared, "shared | parted: every trainer takes samples from all training init times, or from a part of its own; fits see all of them in any case")
    keep: TournamentKeep = opt(TournamentKeep.pairs, "pairs | truncation: in random pairs the worse takes the weights of the better, or the worst quarter takes those of the best quarter")
    vary: dict[str, Any] = opt(dict, "settings that differ between trainers, each with a value a trainer, as {optim.lr: [1e-4, 1e-3]}; a winner's value goes with its weights")
    soup: bool = opt(True, "at the end, the mean of the trainers' weights is validated too, and kept if it is the best")

    def __post_init__(self) -> None:
        at_least(self, 0, "every", group="tournament.")
        for key, values in self.vary.items():
            name = f"tournament.vary.{key}"
            allowed = f"changes the shape of the model, its fits or the steps of all; {', '.join(VARIED)} may differ between trainers"
            require(name, values, key in VARIED, allowed)
            numbers = isinstance(values, list) and all(_is_number(value) for value in values)
            require(name, values, numbers, "give a list of numbers, one a trainer")


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
