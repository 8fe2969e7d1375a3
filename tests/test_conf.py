"""Every file of conf/ composes over the schema and builds what it configures."""

from pathlib import Path

import numpy as np
import pytest

from ensemble_ml import cli
from ensemble_ml.config import SimulateConfig, TrainConfig
from ensemble_ml.models import Climate, ModelSpec, build_model
from ensemble_ml.optim import build

CONF = cli.conf_folder()
GIVEN = {
    "simulate": ["output=a"],
    "prepare": ["input=a", "output=b.zarr"],
    "inspect": ["store=a.zarr"],
    "train": ["run=a", "data.store=b.zarr"],
    "predict": ["checkpoint=a", "input=b", "output=c"],
    "export": ["checkpoint=a", "output=c"],
    "evaluate": ["forecast=a", "ensemble=b", "output=c"],
    "benchmark": ["benchmark=step"],
}
FILES = sorted(p.relative_to(CONF) for p in CONF.rglob("*.yaml"))


def overrides_of(path: Path) -> tuple[str, list[str]]:
    """The task and the overrides that bring one file of conf/ into a configuration."""
    if len(path.parts) == 1:
        return path.stem, GIVEN[path.stem]
    task = "simulate" if path.parts[0] == "simulate" else "train"
    return task, [*GIVEN[task], f"{path.parts[0]}={path.stem}"]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_file_composes_and_builds(path):
    task, overrides = overrides_of(path)
    config = cli.build_config(task, cli.compose_config(task, overrides))
    assert type(config) is cli.TASKS[task].config
    if isinstance(config, TrainConfig):
        builds(config)
    if isinstance(config, SimulateConfig) and len(path.parts) > 1:
        assert config.size == path.stem


def builds(config: TrainConfig) -> None:
    columns = 2 ** (config.model.depth + 1)
    spec = ModelSpec(
        config.model, ("t", "z"), (500, 850), ("t2m",), (0, 48), (48,),
        latitude=tuple(np.linspace(90, -90, 17)), longitude=tuple(np.arange(columns) * 360 / columns),
    )  # fmt: skip
    model = build_model(spec, Climate.default(spec))
    optimizer, rate = build(config.optim, model.parameters(), config.steps)
    assert optimizer.param_groups and 0 < rate(config.optim.warmup) <= config.optim.lr


def test_a_group_file_changes_what_it_says():
    config = cli.build_config("train", cli.compose_config("train", [*GIVEN["train"], "model=small", "optim=adamw"]))
    assert config.model.hidden == 16
    assert config.optim.name.value == "adamw"
