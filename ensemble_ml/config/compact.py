"""Settings of `compact`, which cuts a trained model down so that it predicts faster, and of its benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble_ml.config.base import MISSING, at_least, opt, part, require

_RIVALS = "flat", "same", "separable"


@dataclass
class CompactData:
    """The data on which a model is compacted."""

    store: str = opt(MISSING, "tensor store on which the checkpoint was trained")


@dataclass
class CompactConfig:
    """Cut channels and hidden units out of a trained model, so that it predicts faster, and train what is left."""

    checkpoint: str = opt(MISSING, "a run (its best checkpoint is taken), or the folder of a checkpoint, e.g. runs/NAME/checkpoints/last")
    run: str = opt(MISSING, "name of the new run: results go to OUTPUT/RUN")
    output: str = opt("runs", "folder of all runs")
    speedup: float = opt(2.0, "how many times as fast a forward pass has to become, measured on this machine")
    limit: float = opt(1.0, "percent by which the CRPS of the validation dates may rise; more is a warning")
    steps: int | None = opt(None, "optimizer steps after the cut; null takes a quarter of the checkpoint's, 0 takes none")
    distill: float = opt(1.0, "weight of the distance to the forecasts of the checkpoint in these steps; 0 leaves it out")
    threads: int = opt(0, "CPU threads; 0 takes all cores")
    resume: bool = opt(False, "go on with the steps of a run that was stopped")
    data: CompactData = part(CompactData, "store")

    def __post_init__(self) -> None:
        require("speedup", self.speedup, self.speedup > 1, "must be above 1")
        at_least(self, 0, "limit", "steps", "distill", "threads")


@dataclass
class CompactBenchmark:
    """Compaction against its competitors (`benchmark=compact`)."""

    store: str | None = opt(None, "quality, predict: tensor store with init times in 2001 and 2002; null leaves these sections out")
    seeds: int = opt(3, "quality: trainings of each competitor")
    steps: int = opt(160, "quality: steps of each training; compaction adds a quarter of them")
    rivals: list[str] = opt(lambda: list(_RIVALS), f"quality: {' | '.join(_RIVALS)}: which competitors are trained from scratch")
    speedup: float = opt(1.6, "quality: speedup by compaction, of a network without the fits before it")
    checkpoint: str | None = opt(None, "predict: a run, fits included, whose prediction is timed before and after; null leaves the section out")

    def __post_init__(self) -> None:
        at_least(self, 1, "seeds", "steps", group="compact.")
        for name in self.rivals:
            require("compact.rivals", name, name in _RIVALS, f"{', '.join(_RIVALS)} are allowed")
        require("compact.speedup", self.speedup, self.speedup > 1, "must be above 1")
