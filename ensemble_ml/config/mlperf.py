"""Settings of the benchmark of time to solution (`benchmark=mlperf`)."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble_ml.config.base import at_least, opt, require


@dataclass
class MlperfConfig:
    """Time to a target score, by the rules of MLPerf HPC."""

    store: str | None = opt(None, "tensor store, with init times in 2001 and 2002; it is copied, and stays as it is")
    until: float = opt(0.75, "target: validation crps_ratio; one that the start misses and every seed reaches")
    seeds: int = opt(5, "runs, each in a process of its own")
    steps: int = opt(200, "steps of a run that does not reach the target")
    validate_every: int = opt(5, "steps between validations: one more is how late a target may be noticed")
    train: list[str] = opt(list, "further settings of the training, as KEY=VALUE")
    storage_mb_s: float = opt(20.0, "section loading: MB/s of the slow storage")
    hosts: int = opt(4, "section exchange: hosts")
    rate: str | None = opt("100mbit", "section exchange: rate of the links as tc writes it; null uses the loopback")

    def __post_init__(self) -> None:
        at_least(self, 1, "seeds", "steps", "validate_every", group="mlperf.")
        at_least(self, 2, "hosts", group="mlperf.")
        require("mlperf.until", self.until, 0 < self.until < 1, "must be between 0 and 1, which is the raw ensemble's score")
        require("mlperf.storage_mb_s", self.storage_mb_s, self.storage_mb_s > 0, "must be above 0")
