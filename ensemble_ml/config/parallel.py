"""Settings of a run with several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ensemble_ml.config.base import at_least, opt, require


class Backend(Enum):
    """The library that moves tensors between ranks."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class Launcher(Enum):
    """The launcher from whose environment variables a process reads its rank."""

    auto = "auto"
    none = "none"
    torchrun = "torchrun"
    slurm = "slurm"
    openmpi = "openmpi"
    mpich = "mpich"


@dataclass
class ParallelConfig:
    """The division of a job among its ranks, whose number is the product trainer * data * lat * lon."""

    trainer: int = opt(1, "number of models that the job trains and that compete with each other (tournament.every)")
    data: Any = opt("auto", "ranks, or spatial groups of ranks, that share a batch; auto takes what lat, lon and trainer leave")
    lat: Any = opt(1, "ranks that share the latitudes of a sample; auto lets the planner choose before training")
    lon: Any = opt(1, "ranks that share the longitudes of a sample; auto lets the planner choose before training")
    shard: Any = opt(1, "ranks that share the weights, gradients and momenta of the U-Net in training (FSDP2); it must divide data * lat * lon; auto takes the fewest with which the planner expects a step to fit into memory")
    overlap: Any = opt(False, "true | false | auto: convolutions compute while halos travel; auto times a step both ways before training, and is false for predict")
    backend: Backend = opt(Backend.auto, "auto | gloo | nccl; auto takes nccl where every rank of a node has a GPU of its own")
    launcher: Launcher = opt(Launcher.auto, "auto | none | torchrun | slurm | openmpi | mpich: the launcher whose variables are read; auto finds it; none ignores all of them and runs one rank")
    timeout: float = opt(300.0, "seconds that a rank waits for the others in an exchange; at the start of the job it waits at least 120")
    silence: float = opt(15.0, "seconds without a heartbeat after which a rank is taken for dead")

    def __post_init__(self) -> None:
        at_least(self, 1, "trainer", group="parallel.")
        for key in ("data", "lat", "lon", "shard"):
            value = getattr(self, key)
            good = value == "auto" or (type(value) is int and value >= 1)
            require(f"parallel.{key}", value, good, "auto or a number from 1 up is allowed")
        require("parallel.shard", self.shard, self.shard != "auto" or not self.planned, "the planner needs a number here to choose lat and lon; give one, or give numbers for lat and lon")
        require("parallel.overlap", self.overlap, isinstance(self.overlap, bool) or self.overlap == "auto", "true, false or auto is allowed")
        require("parallel.timeout", self.timeout, self.timeout > 0, "must be above 0")
        at_least(self, 2, "silence", group="parallel.")

    @property
    def planned(self) -> bool:
        """Return whether the planner has to choose the partition of the grid before the run can start."""
        return "auto" in (self.lat, self.lon)
