"""Settings of the benchmark of shared kernels."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble_ml.config.base import at_least, opt


@dataclass
class BankBenchmark:
    """Kernels that share a bank against kernels of their own (`benchmark=bank`)."""

    store: str | None = opt(None, "quality: tensor store with init times in 2001 and 2002; null leaves the section out")
    seeds: int = opt(3, "quality: trainings of each competitor")
    steps: int = opt(160, "quality: steps of each training")
    ranks: int = opt(4, "links: hosts that vote, joined by links of 100 Mbit")

    def __post_init__(self) -> None:
        at_least(self, 1, "seeds", "steps", group="bank.")
        at_least(self, 2, "ranks", group="bank.")
