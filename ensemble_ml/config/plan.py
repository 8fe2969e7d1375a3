"""Settings of the planner, which chooses how the ranks of a run share its work."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble_ml.config.base import at_least, opt, part, require
from ensemble_ml.config.training import TrainConfig


@dataclass
class PlanSettings:
    """The ranks, memory and links to plan for, and which of their speeds are given or measured."""

    ranks: int = opt(0, "number of ranks to plan for; 0 takes those that were started, or for a single one as many as this machine has GPUs, or else cores")
    ranks_per_node: int = opt(0, "ranks on each node; 0 takes the launcher's number, or puts all ranks on one node if a single one was started")
    memory_gb: float = opt(0.0, "memory of a rank, 1e9 bytes; 0 takes its share of this machine's")
    alpha: float | None = opt(None, "latency of a message, seconds; null measures it between the ranks that were started, or between processes of this machine")
    beta: float | None = opt(None, "seconds that a byte takes: 8e-9 is 1 Gbit/s; null measures it")
    gflops: float = opt(0.0, "arithmetic of a rank, 1e9 operations a second; 0 measures a step at each shard's shape")
    bandwidth: float = opt(0.0, "memory bandwidth of a rank, 1e9 bytes a second, taken with gflops; 0 counts arithmetic alone")
    seconds: float = opt(60.0, "time limit of all measurements; shapes that are not measured by then are estimated from those that are")
    cache: str | None = opt(None, "folder of measured times; null takes the user's cache ($XDG_CACHE_HOME or ~/.cache)")
    why: bool = opt(False, "also print the partitions that do not fit, and why")
    simulate: bool = opt(False, "also predict strong and weak scaling, and plot it")
    devices: int = opt(2048, "most devices of the simulated scaling")

    def __post_init__(self) -> None:
        at_least(self, 0, "ranks", "ranks_per_node", "memory_gb", "gflops", "bandwidth", "seconds", "alpha", "beta", group="plan.")
        known = not self.bandwidth or self.gflops > 0
        require("plan.bandwidth", self.bandwidth, known, "give plan.gflops too, or neither; a step is measured then")
        both = (self.alpha is None) == (self.beta is None)
        require("plan.alpha", self.alpha, both, "give plan.alpha and plan.beta, or neither")
        at_least(self, 1, "devices", group="plan.")


@dataclass
class PlanConfig(TrainConfig):
    """Predict how a training run would share out its work and its reading, before it starts."""

    run: str = opt("plan", "name of the plan: results go to OUTPUT/RUN")
    plan: PlanSettings = part(PlanSettings, "ranks, memory, links")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "steps")


@dataclass
class PlannerBenchmark:
    """The planner's predictions against measured steps, over emulated links."""

    ranks: int = opt(4, "number of hosts, with one rank on each")
    rates: list[str] = opt(lambda: ["none", "1gbit", "100mbit"], "rates of the links, as tc writes them, or none for links without a limit; [] uses the loopback")
    hidden: list[int] | None = opt(None, "channels of the models to time; null takes those of the benchmark's size")
    batches: list[int] | None = opt(None, "batch sizes to time; null takes those of the benchmark's size")
    seconds: float = opt(40.0, "time for measuring the local part of a step, for each model and batch size")

    def __post_init__(self) -> None:
        at_least(self, 2, "ranks", group="planner.")
        at_least(self, 1, "hidden", "batches", group="planner.")
        require("planner.seconds", self.seconds, self.seconds > 0, "must be above 0")
