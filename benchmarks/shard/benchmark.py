"""Measure networks whose weights several ranks share, and pretraining on members that stand for the truth.

    ensemble-ml benchmark benchmark=shard [shard.store=STORE] [only=[exactness,memory,steps,plan,pretraining,gpu]]

Ranks are processes of one thread over the loopback, whose times say nothing about networks: gloo makes a reduce-scatter
of one all-reduce for each rank.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from benchmarks.common.hosts import Hosts
from benchmarks.common.jobs import hand_out
from benchmarks.common.results import LOST, Figure, times_as_long
from benchmarks.common.sections import Bench, benchmark
from benchmarks.common.turns import take_turns
from benchmarks.shard.pretraining import pretraining
from benchmarks.shard.worker import DDP, ONE_UNIT, OURS, RECOMPUTE
from benchmarks.spatial.network import network, training_loss
from benchmarks.step.benchmark import benchmark_spec, random_batch
from ensemble_ml.config import DataConfig, ParallelConfig, PlanSettings, Precision, TrainConfig
from ensemble_ml.distributed import Topology, solo
from ensemble_ml.distributed.costs import Link, Links
from ensemble_ml.models import Speed
from ensemble_ml.models.speed import settle
from ensemble_ml.optim import Lion
from ensemble_ml.training.plan import Planner, number_text
from ensemble_ml.training.rehearsal import trace
from ensemble_ml.training.scaling import simulated

_EXACT = 1e-12
_SURE_STEP = 1e-6  # of a step; AdamW divides by |gradient| + 1e-8, which repeats relative errors of tiny gradients
_MESHES = [
    ({"data": 2}, 2), ({"lat": 2}, 2), ({"data": 3}, 3), ({"data": 4}, 4), ({"data": 4}, 2), ({"lat": 2, "lon": 2}, 4),
]  # fmt: skip
# What an H200 was measured to compute in convolutions of ours, and a link of 400 Gbit/s for each device.
_GFLOPS, _ALPHA, _BETA = 1.12e5, 2e-5, 2e-11
_ROOM = 0.95 * 150.0  # GB, of the 139 GiB of an H200
_LARGE = {"hidden": 1152, "max_hidden": 9216, "blocks": 2, "depth": 3, "linear": False, "recompute": True}


def _job(bench: Bench, work: str, degrees: dict[str, int], **settings: Any) -> Any:
    """Run a job of as many ranks as the degrees say, and return the result of rank 0."""
    job = {"work": work, "repeats": bench.config.repeats, **degrees, **settings}
    return hand_out(Hosts(prod(degrees.values())), "benchmarks.shard.worker", job, bench.folder, seconds=1200)


def _exactness(bench: Bench) -> None:
    """Compare sharded weights with those of one process, in output, gradients and a step."""
    rows: list[dict[str, Any]] = []
    for degrees, shards in _MESHES[:1] if bench.tiny else _MESHES:
        found = _job(bench, "exactness", degrees, shards=shards)
        mesh = " x ".join(f"{axis} {count}" for axis, count in degrees.items())
        for recompute, errors in zip(RECOMPUTE, found, strict=True):
            rows.append({"ranks": mesh, "shards": shards, "recomputed": recompute} | errors)
    bench.tables["Sharded weights against one process, float64: largest errors"] = [
        {k: f"{v:.1e}" if type(v) is float else v for k, v in row.items()} for row in rows
    ]
    for name in rows[0].keys() - {"ranks", "shards", "recomputed"}:
        step = name.startswith("step")
        words = f"sharded = one process, float64, {len(rows)} meshes: largest error, {name}"
        target = _SURE_STEP if step else _EXACT
        bench.claim(words, max(row[name] for row in rows), "steps" if step else "relative", target, at_most=True)


def _memory(bench: Bench) -> None:
    """Compare the plan's memory of a step with the measured peak."""
    off = []
    for hidden in bench.config.shard.hidden:
        for recompute, found in zip(
            RECOMPUTE, _job(bench, "memory", {"data": 2}, **_network(bench, hidden)), strict=True
        ):
            words = f"hidden {hidden}, {'recomputed, ' if recompute else ''}two shards: peak of a step"
            for kind, value in found.items():
                bench.figures[f"{words}, {kind}"] = Figure.of([value / 2**20], "MiB")
            off.append(100 * abs(found["planned"] / found["measured"] - 1))
    bench.claim(f"peak memory of a step, {len(off)} networks: the plan is off by", max(off), "%", 5.0, at_most=True)


def _network(bench: Bench, hidden: int) -> dict[str, Any]:
    """Return shape and settings of a network that is measured."""
    return {"shape": bench.config.shard.shape, "config": {"hidden": hidden, "max_hidden": 4 * hidden, "linear": False}}


def _steps(bench: Bench) -> None:
    """Time the steps of ours and of other ways to hold the weights, and count the bytes of a rank."""
    hidden = bench.config.shard.hidden[-1]
    for ranks in bench.config.shard.ranks:
        found = _job(bench, "steps", {"data": ranks}, **_network(bench, hidden))
        where = f"hidden {hidden}, {ranks} ranks"
        for name, seconds in found["seconds"].items():
            bench.figures[f"step, {where}: {name}"] = Figure.of([1e3 * s for s in seconds], "ms")
            for kind, words in (
                ("held", "weights, gradients and momenta of a rank"),
                ("peak", "peak of a step beyond"),
            ):
                bench.figures[f"{words}, {where}: {name}"] = Figure.of([found[kind][name] / 2**20], "MiB")
        share = found["held"][OURS] / found["held"][DDP]
        bench.claim(f"{where}: bytes of a rank, of all, times the ranks", share * ranks, "times", 1.05, at_most=True)
        total = {name: found["held"][name] + found["peak"][name] for name in found["held"]}
        for name in (DDP, ONE_UNIT):
            bench.claim(
                f"{where}: memory of a rank over {name}'s", total[OURS] / total[name], "times", 1.0, at_most=True
            )
        for name in found["seconds"].keys() - {OURS}:
            times = times_as_long(found["seconds"][OURS], found["seconds"][name])
            bench.figures[f"{where}, the loopback: time of a step {OURS} over {name}"] = times
            if times.median > 1:
                bench.notes.append(f"{LOST}{where}, the loopback: a step {name} is {times.median:.2f} times as fast.")


def _plan(bench: Bench) -> None:
    """Compute what 15 billion weights on half a degree need of a rank, and how they scale, by the plan of a run."""
    config = _LARGE if not bench.tiny else _LARGE | {"hidden": 16, "max_hidden": 32}
    spec = benchmark_spec(7, 361, 720, **config)
    parallel = ParallelConfig(shard=8, lat=8, lon=1)
    run = TrainConfig(run="plan", data=DataConfig(store="none"), parallel=parallel, batch_size=1)
    run.model.precision = Precision.bfloat16
    found = trace(run, spec, Topology(lat=8), 1, Speed(Precision.bfloat16), gloo=False)
    needed = (found.activations + found.resident + found.state) / 1e9
    words = f"{number_text(found.weights)} weights, 7 x 361 x 720, bfloat16, recomputed: a rank of 8"
    bench.claim(f"{words} needs, as planned", needed, "GB", _ROOM, at_most=True)
    # Memory was looked at above, as of a GPU; here it would be that of processors and gloo.
    settings = PlanSettings(gflops=_GFLOPS, alpha=_ALPHA, beta=_BETA, memory_gb=1e4, devices=1024)
    planner = Planner(run, spec, settings, solo(), 8)
    links: Links = {(): Link(_ALPHA, _BETA)}
    points = [p for p in simulated(planner, planner.candidates(), {}, links) if p.kind == "weak"]
    each = points[0].cost.seconds
    bench.tables["Scaling on paper, a date for each 8 devices"] = [
        {"devices": p.devices, "dates a step": p.batch}
        | {f"{name} ms": f"{1e3 * getattr(p.cost, name):.0f}" for name in ("compute", "halo", "norm", "exposed")}
        | {"efficiency": f"{each / p.cost.seconds:.1%}"}
        for p in points
    ]
    last = points[-1]
    words = f"{words} to {last.devices} devices, a date for each 8, on paper: efficiency"
    bench.claim(words, 100 * each / last.cost.seconds, "%", 90.0)
    bench.notes.append(
        f"On paper: {_GFLOPS / 1e3:.0f} TFLOP/s a device, {1e6 * _ALPHA:.0f} us a message, {1e-9 / _BETA:.0f} GB/s;"
        " weights are gathered and gradients summed as if nothing were computed meanwhile (the column norm)."
    )


def _gpu(bench: Bench) -> None:
    """Train a step of a billion weights on a GPU."""
    if not torch.cuda.is_available():
        bench.notes.append("No GPU here: a step of a billion weights at 8 x 361 x 720 was left out.")
        return
    torch.cuda.reset_peak_memory_stats()
    weights, seconds = large_step("cuda", (8, 361, 720), bench.config.repeats, hidden=320, max_hidden=2560)
    where = f"{number_text(weights)} weights at 8 x 361 x 720 on one {torch.cuda.get_device_name()}, bfloat16"
    bench.figures[f"{where}: a step"] = Figure.of(seconds, "s")
    bench.figures[f"{where}: peak"] = Figure.of([torch.cuda.max_memory_allocated() / 1e9], "GB")
    bench.claim(f"{where}: a billion weights or more are trained", weights / 1e9, "billion", 1.0)


def large_step(device: str, shape: tuple[int, int, int], repeats: int, **config: Any) -> tuple[int, list[float]]:
    """Time the steps of a network whose blocks are recomputed, in bfloat16.

    Args:
        device: the device.
        shape: levels, rows and columns.
        repeats: number of steps that count.
        **config: settings of the network.

    Returns:
        How many weights it has, and seconds.
    """
    spec = benchmark_spec(*shape, linear=False, recompute=True, **config)
    model, batch = network(spec, "bfloat16").to(device), random_batch(spec, 1).to(torch.device(device))
    optimizer = Lion(model.parameters(), lr=1e-5)

    def step() -> None:
        """Run a training step."""
        optimizer.zero_grad(set_to_none=True)
        training_loss(model, batch).backward()
        optimizer.step()

    seconds = take_turns({"step": step}, repeats, around=lambda: settle(torch.device(device)))["step"]
    return sum(p.numel() for p in model.parameters()), seconds


run = benchmark(
    "Large networks",
    {
        "exactness": _exactness,
        "memory": _memory,
        "steps": _steps,
        "plan": _plan,
        "pretraining": pretraining,
        "gpu": _gpu,
    },
)
