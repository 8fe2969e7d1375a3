"""Settings of the benchmark of loaders (`benchmark=loading`)."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble_ml.config.base import opt, require


@dataclass
class RaceConfig:
    """Loaders over emulated slow storage."""

    caches: list[float] = opt(lambda: [0.1, 0.25, 0.5, 1.0, 2.0], "capacity for cached bytes over all ranks, as shares of the raw dataset")
    workers: list[int] = opt(lambda: [0, 1, 2, 4], "workers that each competitor is tried with; its fastest number is raced")
    rivals: list[str] = opt(lambda: ["dataloader", "streaming", "insitubatch"], "competitors to race: dataloader, streaming, insitubatch; those that do not install are reported")
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
        require("race.budget_mb", self.budget_mb, self.budget_mb >= 64, "must be 64 or more, else the interpreter's own noise counts")
