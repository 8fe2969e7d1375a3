"""Settings of the benchmark of forecast skill (`benchmark=skill`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ensemble_ml.config.base import at_least, check_periods, opt, require
from ensemble_ml.config.model import NETWORKS


@dataclass
class SkillConfig:
    """Our model and its rivals, trained and scored alike; nothing that is done already is done again."""

    store: str | None = opt(None, "tensor store with truth; null takes runs/full-data/store.zarr (made with simulate=full), or the quickstart's runs/quickstart-data/store.zarr")
    orography: str | None = opt(None, "file with the orography of the ensemble's model, to which the truth's corrects raw surface pressure and 2 m temperature; null takes the one that simulate left beside the store, if any")
    truth_orography: str | None = opt(None, "file with the truth's orography; null takes that of the store")
    train: list[str] | None = opt(None, "init times to train on; null takes all years but the last few")
    validation: list[str] | None = opt(None, "init times that choose; null takes the year before the test years")
    test: list[str] | None = opt(None, "init times to score; null takes the last quarter of the years, one at least")
    models: list[str] = opt(lambda: ["unet3d", "emos", "drn", "ens10_unet", "poet"], "who takes part; unet3d is ours")
    families: Any = opt(None, "distributions of ours that differ from the registry's, which the others keep; {q: censored_normal} where humidity is cut off at zero")
    seeds: int = opt(3, "trainings of each network in its best setting")
    trials: int = opt(4, "settings tried for each network, learning rates first, compared on the validation dates")
    patience: int = opt(10, "validations, 50 steps apart, without a better score after which a training ends")
    steps: int = opt(20000, "optimizer steps of a training, at most")
    members: int = opt(5, "size of the reduced ensemble that claims are made for")
    sizes: list[int] = opt(lambda: [1, 2, 3, 5, 10], "ensemble sizes that are forecast from, with the first seed")
    bootstrap: int = opt(1000, "draws of the bootstrap")
    block_days: int = opt(10, "length of the blocks of init times that it draws")
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
