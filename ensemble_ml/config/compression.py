"""Settings of the benchmark of compressed Lion (`benchmark=lion`)."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble_ml.config.base import at_least, opt


@dataclass
class CompressionConfig:
    """Compressed Lion against its peers, over emulated links."""

    ranks: int = opt(4, "hosts")
    rates: list[str] = opt(lambda: ["100mbit", "1gbit"], "rates of the links, as tc writes them; [] uses the loopback, whose times say nothing of networks")
    elements: int = opt(1 << 24, "parameters where communication is timed alone")
    store: str | None = opt(None, "tensor store of the quality section, with init times in 2001 and 2002; null leaves the section out")
    quality_rate: str | None = opt(None, "rate of the links of the quality section, between processes; null trains over ranks that are threads of one process, whose wall times are predicted")
    quality_ranks: int = opt(4, "ranks of the quality section")
    quality_steps: int = opt(150, "steps of each training")
    variants: list[str] | None = opt(lambda: ["allreduce", "vote", "lion_cub"], "exchanges of the quality section, which compares them with allreduce (it must be among them); null takes all that it knows")
    seeds: int = opt(3, "trainings of allreduce, vote and lion_cub; the other exchanges are trained once")
    minutes: float = opt(60.0, "budget of the quality section; trainings that it does not reach are reported")

    def __post_init__(self) -> None:
        at_least(self, 2, "ranks", "quality_ranks", group="lion.")
        at_least(self, 64, "elements", group="lion.")
        at_least(self, 1, "seeds", "quality_steps", group="lion.")
        at_least(self, 0, "minutes", group="lion.")
