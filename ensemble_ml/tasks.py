"""The tasks of the command line. Each has a function that runs it, and two texts for its help page.

A task imports its modules only when it runs. This makes `--help` quick, and a missing optional dependency affects only
the task that needs it.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from glob import has_magic
from pathlib import Path
from typing import Any

import ensemble_ml.config as schema
from ensemble_ml.folders import check_writable
from ensemble_ml.machine import imports_uncollected


@dataclass(frozen=True)
class Task:
    """A task of the command line.

    Attributes:
        run: the function that runs it with its settings, an instance of its schema (`config.SCHEMAS`).
        example: settings for the example on its help page.
        leaves: the files that it leaves, for the help page.
    """

    run: Callable[[Any], object]
    example: str
    leaves: str


def _of(module: str, function: str) -> Callable[[Any], object]:
    """Return a function that imports `module` when a task runs, and calls its function."""
    return lambda config: getattr(_imported(module), function)(config)


def _imported(module: str) -> Any:
    """Import a module of a task (see `imports_uncollected`)."""
    with imports_uncollected():
        return importlib.import_module(module)


def _inspect(config: schema.InspectConfig) -> object:
    """Run the task `inspect`: print what a store, an archive, a run or a checkpoint holds."""
    from ensemble_ml.store.contents import has_contents
    from ensemble_ml.store.remote import is_remote

    paths = schema.as_list(config.store)
    kinds = "a tensor store, an archive (a file, a folder or a glob), a run or a checkpoint"
    schema.require("store", "null" if config.store is None else "[]", bool(paths), f"names nothing; give {kinds}")
    if len(paths) == 1 and has_contents(paths[0]):
        from ensemble_ml.store.inspect import inspect

        return inspect(replace(config, store=paths[0]))
    there = len(paths) > 1 or os.path.exists(paths[0]) or has_magic(paths[0]) or is_remote(paths[0])
    schema.require("store", paths[0], there, f"no such file or folder; give {kinds}")
    for key in ("verify", "complete"):
        asked = getattr(config, key)
        schema.require(key, "true", not asked, f"is for tensor stores, and {paths[0]} is none; leave it out")
    found, text = _look_at(paths)
    print(json.dumps(found, indent=1, allow_nan=False) if config.format is schema.OutputFormat.json else text(found))
    return found


def _look_at(paths: list[str]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], str]]:
    """Describe a trained model or an archive. Also return the function that formats the description as a page."""
    # Only a folder can be a checkpoint. For anything else the import of torch, which takes seconds, is saved.
    if len(paths) == 1 and Path(paths[0]).is_dir():
        from ensemble_ml.inference.export import checkpoint_text, describe_checkpoint, holds_checkpoint

        if holds_checkpoint(paths[0]):
            return describe_checkpoint(paths[0]), checkpoint_text
    from data_prep.inspect import describe_archive
    from ensemble_ml.store.inspect import archive_text

    return describe_archive(paths), archive_text


def _predict(config: schema.PredictConfig) -> object:
    """Run the task `predict`, with the best checkpoint if the setting names a run."""
    with imports_uncollected():
        from ensemble_ml.api.inputs import open_input
        from ensemble_ml.inference import predict
        from ensemble_ml.training.checkpoint import find_checkpoint

    config = replace(config, checkpoint=str(find_checkpoint(config.checkpoint)))
    return predict(config, open_input(config))


def _evaluate(config: schema.EvaluateConfig) -> object:
    """Run the task `evaluate`."""
    with imports_uncollected():
        from ensemble_ml.api.inputs import open_ground, open_verified
        from ensemble_ml.verification import evaluate

    both = open_verified(config)
    return evaluate(config, both, both.unverified(), open_ground(config, both))


_ELSEWHERE = (
    "benchmarks are not part of an installed package; run `python -m ensemble_ml benchmark benchmark={}` in the folder "
    "of a checkout of the source"
)


def _benchmark(config: schema.BenchmarkConfig) -> object:
    """Run the benchmark that the settings name. A package without a checkout has none."""
    names = benchmark_names()
    schema.require("benchmark", config.benchmark, bool(names), _ELSEWHERE.format(config.benchmark))
    schema.require("benchmark", config.benchmark, config.benchmark in names, f"known are {', '.join(names)}")
    check_writable(config.output)
    return _imported(f"benchmarks.{config.benchmark}.benchmark").run(config)


TASKS: dict[str, Task] = {
    "simulate": Task(
        _of("data_prep.simulate", "simulate"),
        "simulate=quickstart output=archive",
        "OUTPUT/{ensemble,truth}/*.grib, OUTPUT/static.grib, OUTPUT/archive.json (with the realism of the ensemble)",
    ),
    "prepare": Task(
        _of("data_prep", "prepare"),
        "input=archive/ensemble truth=archive/truth static=archive/static.grib output=store.zarr",
        "OUTPUT, a tensor store: xr.open_dataset(OUTPUT, engine='ensemble_ml')",
    ),
    "inspect": Task(_inspect, "store.zarr verify=true", "nothing: it prints (format=json for one JSON object)"),
    "train": Task(
        _of("ensemble_ml.training", "train"),
        "experiment=quickstart data.store=store.zarr run=first",
        "runs/RUN/{config.yaml, log.jsonl, tensorboard, checkpoints/last}, and checkpoints/best where validation dates "
        "can be scored",
    ),
    "compact": Task(
        _of("ensemble_ml.training.compact", "compact"),
        "checkpoint=runs/first data.store=store.zarr run=first-fast speedup=2",
        "OUTPUT/RUN, a run as train leaves it",
    ),
    "plan": Task(
        _of("ensemble_ml.training.plan", "plan"),
        "experiment=quickstart run=plan data.store=store.zarr plan.ranks=8 plan.memory_gb=16",
        "what it prints, and OUTPUT/RUN/plan.json (and scaling.png and report.html where plan.simulate=true)",
    ),
    "predict": Task(
        _predict,
        "checkpoint=runs/first/checkpoints/best input=archive/ensemble members_in=5 output=forecast",
        "OUTPUT/forecast_YYYYMMDDHH.nc, one for each init time",
    ),
    "evaluate": Task(
        _evaluate,
        "forecast=forecast ensemble=store.zarr truth=store.zarr members_in=5 output=scores",
        "OUTPUT/{scores.json, lineage.json, report.html}",
    ),
    "export": Task(
        _of("ensemble_ml.inference", "export"),
        "checkpoint=runs/first/checkpoints/best scores=scores/scores.json output=model",
        "OUTPUT/{model.safetensors, checkpoint.json, MODEL_CARD.md}",
    ),
    "benchmark": Task(_benchmark, "benchmark=step", "OUTPUT/NAME/{results.json, report.html}"),
}


def benchmark_names() -> list[str]:
    """Return the names of the benchmarks of this checkout. A package that was installed from a wheel has none."""
    return sorted(path.parent.name for path in Path(__file__).parents[1].glob("benchmarks/*/benchmark.py"))
