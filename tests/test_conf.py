"""Every file of conf/ composes over the schema and builds what it configures."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from stores import make_store

from data_prep.simulate.archive import model_years
from ensemble_ml import cli
from ensemble_ml.config import SCHEMAS, BenchmarkConfig, SimulateConfig, TrainConfig
from ensemble_ml.models import Climate, ModelSpec, build_model
from ensemble_ml.optim import build
from ensemble_ml.tasks import benchmark_names
from ensemble_ml.training import load_checkpoint

CONF = cli.conf_folder()
GIVEN = {
    "simulate": ["output=a"],
    "prepare": ["input=a", "output=b.zarr"],
    "inspect": ["store=a.zarr"],
    "train": ["run=a", "data.store=b.zarr"],
    "plan": ["data.store=b.zarr"],
    "compact": ["checkpoint=a", "data.store=b.zarr", "run=c"],
    "predict": ["checkpoint=a", "input=b", "output=c"],
    "export": ["checkpoint=a", "output=c"],
    "evaluate": ["forecast=a", "ensemble=b", "output=c"],
    "benchmark": ["benchmark=step"],
}
FILES = sorted(p.relative_to(CONF) for p in CONF.rglob("*.yaml") if "hydra" not in p.parts)


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
    assert type(config) is SCHEMAS[task]
    if isinstance(config, TrainConfig):
        builds(config)
        assert not config.without_effect()
    if isinstance(config, SimulateConfig) and len(path.parts) > 1:
        assert config.size == path.stem


def builds(config: TrainConfig) -> None:
    columns = 2 ** (config.model.usual_depth + 1)
    spec = ModelSpec(
        config.model, ("t", "z"), (500, 850), ("t2m",), (0, 48), (48,),
        latitude=tuple(np.linspace(90, -90, 17)), longitude=tuple(np.arange(columns) * 360 / columns),
    )  # fmt: skip
    assert spec.config.depth == config.model.usual_depth
    model = build_model(spec, Climate.default(spec))
    optimizer, rate = build(config.optim, model.parameters(), config.steps)
    assert optimizer.param_groups and 0 < rate(config.optim.warmup) <= config.optim.lr


def test_a_group_file_changes_what_it_says():
    config = cli.build_config("train", cli.compose_config("train", [*GIVEN["train"], "model=small", "optim=adamw"]))
    assert config.model.hidden == 16
    assert config.optim.name.value == "adamw"


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ("patience=3", "data.validation=[2002]"),
        ("distill=0.5", "teacher=runs/large"),
        ("model.bank_templates=3", "model.bank=0.5"),
        ("model.departures=true", "model=drn"),
        ("optim.rank=8", "optim.exchange=powersgd"),
        ("optim.momentum_every=50", "optim.momentum_sync=every optim.exchange=vote"),
        ("optim.momentum_mb=2", "optim.momentum_sync=selective optim.exchange=vote"),
        ("loading.workers=4", "loading=torch"),
        ("loading.threads=4", "loading=clairvoyant"),
        ("loading.folder=/tmp", "loading.disk=1GB"),
        ("tournament.keep=truncation", "parallel.trainer=2 tournament.every=100 data.validation=[2002]"),
    ],
)
def test_a_setting_that_another_one_leaves_without_effect_is_told(given, needed):
    def told(*words):
        return cli.build_config("train", cli.compose_config("train", [*GIVEN["train"], given, *words])).without_effect()

    [line] = told(*["loading=torch"] * (given == "loading.threads=4"))
    assert line.split("=")[0] == given.split("=")[0] and ": has no effect here: " in line
    assert not told(*needed.split())


def test_fresh_years_are_of_the_same_models_and_in_no_other_archive():
    full, fresh = (
        cli.build_config("simulate", cli.compose_config("simulate", [*GIVEN["simulate"], f"simulate={name}"]))
        for name in ("full", "fresh")
    )
    of_full, of_fresh = ({year.year: year for year in model_years(config)} for config in (full, fresh))
    assert of_fresh.keys().isdisjoint(of_full) and {year.split for year in of_fresh.values()} == {"test"}
    counted = ("size", "first_year", "train_years", "validation_years", "test_years")
    same = [{k: v for k, v in vars(config).items() if k not in counted} for config in (full, fresh)]
    assert same[0] == same[1]


def test_sweeps_on_slurm_compose(tmp_path):
    """The launcher's own settings, as Hydra hands them to it; nothing is submitted."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    cli.register_schemas()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        overrides = [*GIVEN["train"], "hydra/launcher=cluster", "hydra.launcher.tasks_per_node=4"]
        launcher = compose("train", overrides=overrides, return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.tasks_per_node, launcher.signal_delay_s, launcher.timeout_min) == (4, 300, 720)


@pytest.mark.slow
def test_a_sweep_in_jobs_of_its_own(tmp_path):
    """Submitit on this machine in place of SLURM: two runs, each in a process that it starts."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    store = make_store(tmp_path / "a.zarr", dates=4, members=3, shape=(8, 8)).path
    small = [
        "model.hidden=4",
        "model.points=16",
        "model.max_hidden=4",
        "model.depth=1",
        "model.precision=float32",
        "data.members=[2]",
    ]
    command = ["train", "-m", "hydra/launcher=submitit_local", "seed=0,1", "run='seed${seed}'", f"data.store={store}"]
    command += ["data.train=[2001]", "steps=2", "tracking.tensorboard=false", "threads=1", *small]
    path = os.pathsep.join([str(CONF.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "ensemble_ml", *command], cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0
    for seed in range(2):
        assert load_checkpoint(tmp_path / "runs" / f"seed{seed}" / "checkpoints" / "last").meta["step"] == 2


@pytest.mark.slow
def test_a_job_of_a_sweep_that_fails_says_so(tmp_path):
    """Its process ends with a status, so that SLURM sees it, and so does the sweep."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    command = ["inspect", "-m", "hydra/launcher=submitit_local", "store=a.zarr,nothing", "hydra.sweep.dir=sweep"]
    make_store(tmp_path / "a.zarr", dates=2, members=2, shape=(8, 8))
    path = os.pathsep.join([str(CONF.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "ensemble_ml", *command]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert done.stderr.count("ensemble-ml: store=nothing: no such file or folder") == 1
    assert "has not produced any output" in done.stderr  # submitit's word for a process that failed
    assert len(list((tmp_path / "sweep" / ".submitit").glob("*/*_result.pkl"))) == 1


def test_help_names_every_benchmark():
    [known] = [field.metadata["doc"] for field in dataclasses.fields(BenchmarkConfig) if field.name == "benchmark"]
    assert known.split(" | ") == benchmark_names()
