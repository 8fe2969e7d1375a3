"""Measure one sample on several ranks: exactness, scaling, memory, and the partitioned convolutions of other packages.

    ensemble-ml benchmark benchmark=spatial [only=[exactness,networks,rivals,periodic,memory,scaling,links,gpu]]
        [repeats=5] [spatial.rates=[1gbit,100mbit]] [spatial.physicsnemo=FOLDER]

Each rank runs on one thread. The hosts of the section `links` are network namespaces joined by shaped links
(scripts/links.sh; needs root), and share the cores of this machine.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch

from benchmarks.common.hosts import Hosts, available, linked
from benchmarks.common.jobs import hand_out
from benchmarks.common.results import Figure, times_as_long
from benchmarks.common.sections import Bench, benchmark
from benchmarks.spatial.steps import GATHER, HALVES, ONE, OURS, OVERLAP
from ensemble_ml.config import BenchmarkSize

_EXACT = 1e-12
_SURE_STEP = 1e-6  # of a step; AdamW divides by |gradient| + 1e-8, which repeats relative errors of tiny gradients
_LINKED = {2: [(2, 1)], 4: [(4, 1), (2, 2)]}
_MESHES = {
    BenchmarkSize.full: [(1, 2), (2, 1), (2, 2), (3, 1), (4, 2)],
    BenchmarkSize.small: [(1, 2), (2, 1), (2, 2), (3, 1)],
    BenchmarkSize.tiny: [(1, 2)],
}


class SpatialBench(Bench):
    """The results of all sections, and a way to run jobs of lat x lon ranks."""

    @property
    def network(self) -> dict[str, Any]:
        """Return the shape and settings of the U-Net that is timed."""
        if self.tiny:
            return {"shape": [2, 16, 32], "config": {"hidden": 8, "max_hidden": 8, "depth": 1}}
        return {"shape": list(self.config.spatial.shape), "config": {}}

    def job(self, work: str, mesh: tuple[int, int], hosts: Hosts | None = None, **settings: Any) -> Any:
        """Run a job of lat x lon ranks, and return the result of rank 0.

        Args:
            work: name of the work in `spatial.worker`.
            mesh: ranks along latitude and longitude.
            hosts: the hosts; None takes the loopback.
            **settings: further settings of the job.
        """
        lat, lon = mesh
        hosts = hosts or Hosts(lat * lon)
        job = {"work": work, "lat": lat, "lon": lon, "repeats": self.config.repeats, **settings}
        return hand_out(hosts, "benchmarks.spatial.worker", job, self.folder, seconds=1200)


def _exactness(bench: SpatialBench) -> None:
    """Compare partitioned convolutions with those of one process, in output and gradients."""
    kernels = [3] if bench.tiny else list(range(1, 8))
    rows: list[dict[str, Any]] = []
    for mesh in _MESHES[bench.config.size]:
        rows += bench.job("convolutions", mesh, kernels=kernels)
    names = ("forward", "input gradient", "weight gradient")
    meshes = ", ".join(f"{lat}x{lon}" for lat, lon in _MESHES[bench.config.size])
    for name in names:
        words = f"largest error, {name}, {len(rows)} convolutions (kernel, stride, dilation, padding, pole; {meshes})"
        bench.claim(words, max(row[name] for row in rows), "relative", _EXACT, at_most=True)
    bench.tables["Largest errors by kernel and mesh"] = _worst(rows, ("kernel", "mesh"), names)
    bench.tables["Largest errors by padding"] = _worst(rows, ("longitude", "pole", "stride", "dilation"), names)
    (bench.folder / "exactness.json").write_text(json.dumps(rows, indent=1))


def _worst(rows: list[dict[str, Any]], keys: tuple[str, ...], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the largest errors of each group of rows that agree in `keys`."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    return [
        dict(zip(keys, key, strict=True))
        | {"cases": len(group)}
        | {name: f"{max(row[name] for row in group):.1e}" for name in names}
        for key, group in groups.items()
    ]


def _networks(bench: SpatialBench) -> None:
    """Compare the whole partitioned U-Net with that of one process."""
    _compare_networks(bench, "whole U-Net", _MESHES[bench.config.size], {})


def _compare_networks(bench: SpatialBench, what: str, meshes: list[tuple[int, int]], job: dict[str, Any]) -> None:
    """Compare networks on several meshes, and add a table and claims."""
    rows: list[dict[str, Any]] = []
    for mesh in meshes:
        rows += bench.job("networks", mesh, **job)
    bench.tables[f"The {what}"] = [{k: f"{v:.1e}" if type(v) is float else v for k, v in r.items()} for r in rows]
    for name in ("forward", "weight gradient"):
        words = f"largest error of the {what}, {name}"
        bench.claim(words, max(r[name] for r in rows), "relative", _EXACT, at_most=True)
    for kind in ("lion", "adamw"):
        worst = max(r[f"step of {kind}"] for r in rows)
        bench.claim(f"one step of {kind}, {what}, largest error", worst, "steps", _SURE_STEP, at_most=True)


def _rivals(bench: SpatialBench) -> None:
    """Compare with the partitioned convolutions of other packages: whether they are right, and how fast they are."""
    found = bench.job("rivals", (2, 1), physicsnemo=bench.config.spatial.physicsnemo, **bench.network)
    if not bench.config.spatial.physicsnemo:
        bench.notes.append("PhysicsNeMo was left out: give spatial.physicsnemo=FOLDER.")
    bench.tables["Split convolutions of others, two ranks: largest errors, or what was raised"] = found["rows"]
    for name, values in found["seconds"].items():
        bench.figures[f"one convolution, zero padding, two ranks: {name}"] = Figure.of([1e3 * v for v in values], "ms")
    seconds = found["seconds"]
    for name in seconds.keys() - {"ours"}:
        words = f"one convolution, zero padding, 2x1: convolutions a second over {name}, which is right there"
        bench.race(words, seconds[name], seconds["ours"], 1.0)


def _periodic(bench: SpatialBench) -> None:
    """Time our periodic convolution on one rank against plain padding."""
    _compare_periodic(bench, "one rank, periodic convolution", "one-rank periodic path")


def _compare_periodic(bench: SpatialBench, where: str, ours_there: str, **job: Any) -> None:
    """Time periodic convolutions, and claim that ours is not slower."""
    found = bench.job("periodic", (1, 1), **job, **bench.network)
    for name, values in found.items():
        bench.figures[f"{where}, {name}"] = Figure.of([1e3 * v for v in values], "ms")
    medians = {name: statistics.median(values) for name, values in found.items()}
    ours = medians.pop("ours")
    plain = min(medians.values())
    words = f"{ours_there} over F.pad(circular) and conv3d, forward and backward: slower by"
    bench.claim(words, 100 * (ours / plain - 1), "%", 2.0, at_most=True)


def _memory(bench: SpatialBench) -> None:
    """Measure the activation memory of each rank against its shard and halo."""
    for mesh in [(2, 1)] if bench.tiny else [(2, 1), (1, 2), (2, 2), (4, 1)]:
        found = bench.job("memory", mesh, **bench.network)
        name = f"{mesh[0]}x{mesh[1]}"
        for kind in ("peak", "share and halo"):
            values = [v / 2**20 for v in found[kind]]
            bench.figures[f"activations of a rank, {name}: {kind}"] = Figure.of(values, "MiB")
        bench.figures["activations of one process"] = Figure.of([v / 2**20 for v in found["one process"]], "MiB")
        excess = max(a / b for a, b in zip(found["peak"], found["share and halo"], strict=True))
        words = f"peak activation memory per rank, {name}, above share + halo"
        bench.claim(words, 100 * (excess - 1), "%", 10.0, at_most=True)


def _scaling(bench: SpatialBench) -> None:
    """Time a step on one and on two ranks."""
    entrants = [ONE, OURS, OVERLAP, HALVES, GATHER]
    for mesh in [(2, 1)] if bench.tiny else [(2, 1), (1, 2)]:
        for precision in ["float32"] if bench.tiny else bench.config.spatial.precisions:
            found = bench.job("steps", mesh, entrants=entrants, precision=precision, **bench.network)
            _tell_steps(bench, found, f"{mesh[0]}x{mesh[1]}, {precision}")
            seconds = found["seconds"]
            ours, name = _best(seconds)
            where = f"1 -> 2 ranks ({mesh[0]}x{mesh[1]}), {precision}"
            words = f"strong scaling of one sample, {where}: of the speed-up of two halves without communication"
            bench.figures[words] = Figure.of([100 * h / o for h, o in zip(seconds[HALVES], ours, strict=True)], "%")
            bench.claim(words, bench.figures[words].median, "%", 90.0)
            words = f"{where}: steps a second over gathering the rows"
            bench.race(words, seconds[GATHER], ours, 1.0)
            for one in (name, HALVES):
                bench.notes.append(f"{where}: speed-up {times_as_long(seconds[ONE], seconds[one]).median:.3f}, {one}.")


def _best(seconds: dict[str, list[float]]) -> tuple[list[float], str]:
    """Return our seconds with or without overlap, those with the lower median, as `parallel.overlap=auto` chooses."""
    name = min((OURS, OVERLAP), key=lambda name: statistics.median(seconds[name]))
    return seconds[name], name


def _gpu(bench: SpatialBench) -> None:
    """Repeat the comparisons with several ranks on one GPU."""
    if not torch.cuda.is_available():
        bench.notes.append("No GPU here: tensors on one, and its step in bfloat16, were left out.")
        return
    rows: list[dict[str, Any]] = []
    meshes = [(lat, lon) for lat, lon in _MESHES[bench.config.size] if lat * lon <= 4]
    for mesh in meshes:
        rows += bench.job("convolutions", mesh, kernels=list(range(1, 8)), device="cuda")
    for name in ("forward", "input gradient", "weight gradient"):
        words = f"largest error, {name}, several ranks on one GPU over gloo, {len(rows)} convolutions"
        bench.claim(words, max(row[name] for row in rows), "relative", _EXACT, at_most=True)
    _compare_networks(bench, "whole U-Net, several ranks on one GPU over gloo", meshes, {"device": "cuda"})
    where = f"one rank, {torch.cuda.get_device_name()}, bfloat16, periodic convolution"
    _compare_periodic(bench, where, f"{where},", device="cuda", precision="bfloat16")


def _tell_steps(bench: SpatialBench, found: dict[str, Any], where: str) -> None:
    """Add the figures of steps: seconds, core time, share of the halo exchange, and bytes."""
    for name, values in found["seconds"].items():
        bench.figures[f"step, {where}: {name}"] = Figure.of([1e3 * v for v in values], "ms")
        busy = [1e3 * v for v in found["core seconds"][name]]
        bench.figures[f"core time of a step and rank, {where}: {name}"] = Figure.of(busy, "ms")
    for name in (OURS, OVERLAP):
        if name in found["halo share"]:
            share = [100 * v for v in found["halo share"][name]]
            bench.figures[f"halo's share of a step, {where}: {name}"] = Figure.of(share, "%")
    bench.figures[f"bytes of halos a step, all ranks, {where}"] = Figure.of([found["formula"]], "bytes")
    words = f"bytes of halos counted, {where}: all ranks and steps off the surface formula by"
    bench.claim(words, found["off"], "bytes", 0.0, at_most=True)


def _links(bench: SpatialBench) -> None:
    """Time steps over links of several rates."""
    why = available() if bench.config.spatial.rates else "spatial.rates=[]"
    if why:
        bench.notes.append(f"The links were left out ({why}).")
        return
    for count in bench.config.spatial.hosts:
        for rate in bench.config.spatial.rates:
            with linked(count, rate) as hosts:
                slow = rate == "100mbit"  # a step that gathers takes a minute here, and precision matters little
                for mesh in _LINKED[count]:
                    for precision in ["float32"] if slow else bench.config.spatial.precisions:
                        _on_links(bench, hosts, mesh, precision, gathering=not slow)


def _on_links(bench: SpatialBench, hosts: Hosts, mesh: tuple[int, int], precision: str, *, gathering: bool) -> None:
    """Time steps of one mesh over links of one rate."""
    where = f"{hosts.count} hosts at {hosts.where}, {mesh[0]}x{mesh[1]}, {precision}"
    entrants = [OURS, OVERLAP] + [GATHER] * gathering
    found = bench.job("steps", mesh, hosts, entrants=entrants, precision=precision, **bench.network)
    _tell_steps(bench, found, where)
    seconds = found["seconds"]
    gain = times_as_long(seconds[OURS], seconds[OVERLAP]).median
    bench.notes.append(f"{where}: overlap makes a step {gain:.2f} times as fast.")
    if gathering:
        words = f"{where}: steps a second over gathering the rows, the best rival that is right"
        bench.race(words, seconds[GATHER], _best(seconds)[0], 3.0)


run = benchmark(
    "One sample over several ranks",
    {
        "exactness": _exactness,
        "networks": _networks,
        "rivals": _rivals,
        "periodic": _periodic,
        "memory": _memory,
        "scaling": _scaling,
        "links": _links,
        "gpu": _gpu,
    },
    SpatialBench,
)
