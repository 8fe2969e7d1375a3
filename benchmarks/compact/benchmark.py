"""Compare a compacted model with the whole one, and with other ways to a smaller network.

    ensemble-ml benchmark benchmark=compact compact.store=STORE [compact.checkpoint=RUN] [only=[quality,speed,predict]]

Quality: the U-Net alone, without the fits, which hide what it gains. Every competitor trains on the same dates in the
same order, and is scored by CRPS and spread on the validation dates after its last step:

    whole             hidden 16, max_hidden 64
    compacted         cut out of the whole network, then a quarter of the steps
    same              the widths of the compacted network, from scratch, for the processor time of both trainings above
    flat              hidden 16, max_hidden 16, from scratch
    separable         vertical=separable, from scratch
    none              the statistical start, which no network changes

Speed: forward passes of one init time with the default network of `train`, on random weights, in both precisions. All
channels of a group are worth the same there, so it shows what speed there is to be had. Predict: `ensemble-ml predict`
as a whole, before and after the compaction of a checkpoint.

Milliseconds are processor time of one thread, and the least of the turns counts.
"""

from __future__ import annotations

import logging
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, benchmark
from benchmarks.lion.trials import network_alone
from benchmarks.step.benchmark import benchmark_spec, random_batch
from ensemble_ml.api.inputs import open_input
from ensemble_ml.config import (
    BenchmarkConfig,
    CompactConfig,
    CompactData,
    Precision,
    PredictConfig,
    TrainConfig,
    Vertical,
)
from ensemble_ml.errors import UserError
from ensemble_ml.inference import predict
from ensemble_ml.loading import Reader, fixed_batches
from ensemble_ml.models import Climate, EnsembleModel, ModelSpec, Speed, build_model
from ensemble_ml.models.compact import POINTS, groups
from ensemble_ml.models.speed import has_bfloat16
from ensemble_ml.store import open_store
from ensemble_ml.training import load_model, train
from ensemble_ml.training.checkpoint import load_meta, load_spec
from ensemble_ml.training.compact import Clock, compact, reach, without_network
from ensemble_ml.training.importance import Importance
from ensemble_ml.training.tracking import read_log

log = logging.getLogger(__name__)

_SECONDS = "seconds"  # file of a run with the processor time that it took


def _quality(bench: Bench) -> None:
    """Train all competitors with each seed, and compare their scores and the milliseconds of their passes."""
    given = bench.config.compact
    if given.store is None:
        return
    every: dict[str, dict[str, list[float]]] = {"crps_ratio": {}, "spread_ratio": {}}
    for seed in range(given.seeds):
        runs = _trained(bench, seed)
        start = next(line for line in read_log(runs["whole"] / "log.jsonl") if "validation" in line)
        last = {name: load_meta(folder / "checkpoints" / "last")["scores"] for name, folder in runs.items()}
        for name, found in (last | {"none": start["validation"]}).items():
            for score, values in every.items():
                values.setdefault(name, []).append(found[score])
            log.info("quality: seed %d, %s: crps_ratio %.4f", seed, name, found["crps_ratio"])
        if seed == 0:
            _passes(bench, runs)
    for score, by_name in every.items():
        bench.figures |= {f"{score}, {name}": Figure.of(values, "ratio") for name, values in by_name.items()}
    scores = every["crps_ratio"]
    none, whole, ours = (scores[name] for name in ("none", "whole", "compacted"))
    loss = [100 * (b / a - 1) for a, b in zip(whole, ours, strict=True)]
    kept = [100 * (n - b) / (n - a) for n, a, b in zip(none, whole, ours, strict=True)]
    bench.figures["share of the gain of the whole network over none that the compacted one keeps"] = Figure.of(
        kept, "%"
    )
    bench.claim("CRPS that compaction loses, mean of the seeds", statistics.mean(loss), "%", 1.0, at_most=True)
    bench.claim(
        "share of the network's gain that compaction keeps, mean of the seeds", statistics.mean(kept), "%", 80.0
    )
    for name in bench.config.compact.rivals:
        ahead = [100 * (b / a - 1) for a, b in zip(ours, scores[name], strict=True)]
        bench.figures[f"CRPS of {name} from scratch above the compacted one's"] = Figure.of(ahead, "%")
        if len(ahead) > 1:
            words = f"CRPS of {name} from scratch above the compacted one's, lower end of the 95 % interval"
            bench.claim(words, Figure.of_mean(ahead, "%").min, "%", 0.0)


def _settings(bench: Bench, seed: int, name: str, **model: Any) -> TrainConfig:
    """Return the settings of a training of the U-Net alone."""
    given = bench.config.compact
    assert given.store is not None
    run = f"seed{seed}-{name}"
    return network_alone(given.store, bench.folder / "runs", run, seed=seed, steps=given.steps, **model)


def _trained(bench: Bench, seed: int) -> dict[str, Path]:
    """Train all competitors with a seed, and return the folders of their runs. Runs that are there already are kept."""
    given, runs = bench.config.compact, dict[str, Path]()
    assert given.store is not None
    if seed == 0:
        _once(replace(_settings(bench, seed, "fits"), steps=0))  # which all seeds have in common
    plain = _settings(bench, seed, "whole")
    runs["whole"] = _once(plain)
    name = f"seed{seed}-compacted"
    runs["compacted"] = Path(plain.output) / name
    if not _whole(runs["compacted"]):
        shutil.rmtree(runs["compacted"], ignore_errors=True)
        data = CompactData(given.store)
        config = CompactConfig(str(runs["whole"]), name, plain.output, given.speedup, threads=1, data=data)
        _timed(runs["compacted"], partial(compact, config))
    small = load_spec(runs["compacted"] / "checkpoints" / "last").config
    sizes = {"widths": small.widths, "inner": small.inner}
    bench.notes.append(f"Seed {seed}: channels {small.widths}, inside blocks {small.inner}.")
    rivals: dict[str, dict[str, Any]] = {
        "flat": {"max_hidden": 16}, "same": sizes, "separable": {"vertical": Vertical.separable}
    }  # fmt: skip
    for name in given.rivals:
        settings = _settings(bench, seed, name, **rivals[name])
        if name == "same":
            settings = replace(settings, steps=_steps_of_both(bench, runs))
            bench.notes.append(f"Seed {seed}: the same widths had {settings.steps} steps.")
        runs[name] = _once(settings)
    return runs


def _steps_of_both(bench: Bench, runs: Mapping[str, Path]) -> int:
    """Return how many steps of the compacted network take as long as all that made it.

    Its steps are taken to be as much faster as its forward pass is.
    """
    both = sum(_seconds(runs[name]) for name in ("whole", "compacted"))
    before, after = load_meta(runs["compacted"] / "checkpoints" / "last")["compacted"]["ms"]
    return int(bench.config.compact.steps * both / _seconds(runs["whole"]) * before / after)


def _once(settings: TrainConfig) -> Path:
    """Train, unless the run is there, and return its folder."""
    folder = Path(settings.output) / settings.run
    if not _whole(folder):
        shutil.rmtree(folder, ignore_errors=True)
        _timed(folder, partial(train, settings))
    return folder


def _seconds(folder: Path) -> float:
    """Return the seconds of processor time that a run took."""
    return float((folder / _SECONDS).read_text())


def _whole(folder: Path) -> bool:
    """Return whether a run has come to its end."""
    return (folder / _SECONDS).exists()


def _timed(folder: Path, call: Callable[[], object]) -> None:
    """Make a run, and write into its folder how many seconds of processor time that took."""
    began = time.process_time()
    call()
    (folder / _SECONDS).write_text(str(time.process_time() - began))


def _passes(bench: Bench, runs: Mapping[str, Path]) -> None:
    """Time forward passes of trained models by turns."""
    assert bench.config.compact.store is not None
    models = {name: load_model(folder / "checkpoints" / "last")[0] for name, folder in runs.items()}
    reader = Reader(open_store(bench.config.compact.store), models["whole"].spec)
    inputs = next(iter(fixed_batches(reader, [0], range(min(5, reader.full_size))))).inputs
    bare = models["whole"]
    assert isinstance(bare, EnsembleModel)
    for model in models.values():
        Speed(Precision.float32, True).apply(model)
    _by_turns(bench, "at the quickstart's size, fits off, float32", models | {"none": without_network(bare)}, inputs)


def _by_turns(bench: Bench, where: str, models: Mapping[str, torch.nn.Module], inputs: Any) -> dict[str, list[float]]:
    """Time forward passes of models by turns, and keep the figures."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(2 + bench.config.repeats):
        for name, model in models.items():
            began = time.process_time()
            with torch.no_grad():
                model(inputs)
            if turn >= 2:
                found[name].append(1e3 * (time.process_time() - began))
    for name, values in found.items():
        bench.figures[f"forward pass {where}, {name}"] = Figure.of(values, "ms")
    return found


def _speed(bench: Bench) -> None:
    """Cut networks to half their time at two sizes, in both precisions."""
    cases: list[tuple[tuple[int, int, int], dict[str, int]]] = [
        ((8, 64, 128), {"points": 2048}),
        ((4, 33, 64), {"hidden": 16, "max_hidden": 64}),
    ]
    if bench.tiny:
        cases = [((2, 16, 32), {"points": 64, "depth": 2})]
    for shape, size in cases:
        for precision in [Precision.float32] + [Precision.bfloat16] * has_bfloat16(torch.device("cpu")):
            where = f"at {' x '.join(map(str, shape))}, hidden {size.get('hidden', 32)}, {precision.value}"
            _halve(bench, where, benchmark_spec(*shape, **size), Speed(precision, True))


def _halve(bench: Bench, where: str, spec: ModelSpec, speed: Speed) -> None:
    """Cut a network to half its time, and time it beside its competitors."""

    def made(**changes: Any) -> EnsembleModel:
        """Return a network at this speed."""
        own = replace(spec, config=replace(spec.config, **changes))
        model = build_model(own, Climate.default(own))
        assert isinstance(model, EnsembleModel)
        speed.apply(model)
        return model.eval()

    whole, inputs = made(), random_batch(spec, 1)
    every = groups(whole.spec, whole.state_dict())
    terms = {name: torch.full((group.size,), 1 / group.size) for name, group in every.items()}
    moments = torch.eye(every[POINTS].size + 1, dtype=torch.float64)
    clock, importance = Clock(whole, inputs), Importance(terms, moments)
    try:
        small, _ = reach(clock, importance, 1.2 if bench.tiny else 2.0, speed.precision)
    except UserError as error:  # what is reached at another attempt is told, and the claim does not hold
        bench.notes.append(f"{where}: {error}.")
        small, _ = reach(clock, importance, 1.5, speed.precision)
    widths, inner = small.spec.config.channels()
    bench.notes.append(f"{where}: channels {widths}, inside blocks {inner}, hidden units {small.spec.config.points}.")
    entrants = {
        "whole": whole, "compacted": small, "flat": made(max_hidden=spec.config.hidden),
        "separable": made(vertical=Vertical.separable), "none": without_network(whole),
    }  # fmt: skip
    found = _by_turns(bench, where, entrants, inputs)
    ratio = min(found["whole"]) / min(found["compacted"])
    bench.claim(f"speedup of the forward pass {where}", ratio, "times", 2.0)


def _predict(bench: Bench) -> None:
    """Compact a checkpoint without any step after it, and time predictions by turns."""
    given = bench.config.compact
    if given.store is None or given.checkpoint is None:
        return
    output = bench.folder / "predict"
    shutil.rmtree(output, ignore_errors=True)
    speedup, data = 1.2 if bench.tiny else 1.7, CompactData(given.store)
    small = compact(CompactConfig(given.checkpoint, "small", str(output), speedup, steps=0, threads=1, data=data))
    times: dict[str, list[float]] = {"whole": [], "compacted": []}
    for turn in range(1 + bench.config.repeats):
        for name, folder in (("whole", Path(given.checkpoint)), ("compacted", small)):
            config = PredictConfig(
                str(folder / "checkpoints" / "best"), given.store, output=str(output / "forecast"), members_in=5,
                dates=["2002"], overwrite=True, threads=1,
            )  # fmt: skip
            began = time.process_time()
            predict(config, open_input(config))
            if turn:
                times[name].append(time.process_time() - began)
    for name, values in times.items():
        bench.figures[f"predict as a whole, {name}"] = Figure.of(values, "s")
    bench.claim("speedup of predict as a whole", min(times["whole"]) / min(times["compacted"]), "times", 1.5)


def _bench(config: BenchmarkConfig, folder: Path) -> Bench:
    """Compute on one thread, and note which sections are left out."""
    torch.set_num_threads(1)
    lacking = [name for name in ("store", "checkpoint") if getattr(config.compact, name) is None]
    return Bench(
        config, folder, notes=[f"compact.{name} was not given: its sections were left out." for name in lacking]
    )


run = benchmark("Compacted networks", {"quality": _quality, "speed": _speed, "predict": _predict}, _bench)
