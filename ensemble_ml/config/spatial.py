"""Settings of the benchmark of the spatial partition (`benchmark=spatial`)."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble_ml.config.base import at_least, opt, require


@dataclass
class SpatialConfig:
    """One sample over several ranks, against one process and against its peers."""

    rates: list[str] = opt(lambda: ["1gbit", "100mbit"], "rates of the links, as tc writes them; [] leaves the sections that need links out")
    hosts: list[int] = opt(lambda: [2, 4], "numbers of hosts joined by links")
    shape: list[int] = opt(lambda: [8, 128, 256], "levels, rows and columns of the U-Net that is timed")
    precisions: list[str] = opt(lambda: ["float32", "bfloat16"], "arithmetic of the convolutions that are timed")
    physicsnemo: str | None = opt(None, "folder with PhysicsNeMo and what it wants, as `pip install --target` leaves it; null leaves it out")

    def __post_init__(self) -> None:
        require("spatial.shape", self.shape, len(self.shape) == 3, "give levels, rows and columns")
        at_least(self, 1, "shape", group="spatial.")
        require("spatial.hosts", self.hosts, all(n in (2, 4) for n in self.hosts), "2 and 4 are allowed")
        good = all(p in ("float32", "bfloat16", "float64") for p in self.precisions)
        require("spatial.precisions", self.precisions, good, "float32, bfloat16 and float64 are allowed")
