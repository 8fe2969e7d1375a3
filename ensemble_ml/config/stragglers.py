"""Settings of the benchmark of ranks that do not wait (`benchmark=stragglers`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ensemble_ml.config.base import at_least, opt, require


@dataclass
class StragglersConfig:
    """Votes that a quorum ends, against exchanges that wait."""

    ranks: int = opt(4, "hosts")
    rate: str | None = opt("none", "rate of the links as tc writes it; none is unshaped, null uses the loopback")
    steps: int = opt(30, "steps of a run; a multiple of bound")
    step: float = opt(0.05, "seconds of a gradient, asleep")
    late: float = opt(0.5, "seconds by which the late rank of a step is late")
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
        require("stragglers.group", self.group, power, f"stragglers.ranks={self.ranks} is no power of it")
        for key in ("steps", "quality_steps"):
            value = getattr(self, key)
            require(f"stragglers.{key}", value, value % self.bound == 0, f"must be a multiple of stragglers.bound={self.bound}")
