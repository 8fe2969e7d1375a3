"""Compare compressed Lion with fp32, fp16, PowerSGD, Distributed Lion and published Lion Cub, over emulated links.

    ensemble-ml benchmark benchmark=lion [only=[packing,simulation,communication,steps,replicas,quality]]
        [lion.store=STORE] [lion.rates=[100mbit,1gbit]] [repeats=5]

Hosts are network namespaces joined by shaped links (scripts/links.sh; needs root). If they cannot be made, or with
`lion.rates=[]`, ranks communicate over the loopback, and no claim about networks is made. All hosts share the cores of
this machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.hosts import Hosts, available, linked
from benchmarks.common.jobs import hand_out
from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, benchmark
from benchmarks.lion import packing, quality, simulation
from benchmarks.lion.worker import BALLOTS, DDP, ENTRANTS
from ensemble_ml.config import BenchmarkSize, require

_VOTE = "vote, 1 bit"
_RIVALS = [name for name in ENTRANTS if not name.startswith("vote")]
_SHAPES: dict[BenchmarkSize, dict[str, Any]] = {
    BenchmarkSize.full: {"shape": [4, 16, 32], "config": {"hidden": 64, "max_hidden": 256, "depth": 2}},
    BenchmarkSize.small: {"shape": [2, 16, 32], "config": {"hidden": 32, "max_hidden": 128, "depth": 2}},
    BenchmarkSize.tiny: {"shape": [2, 16, 32], "config": {"hidden": 8, "max_hidden": 8, "depth": 1}},
}


class LionBench(Bench):
    """The results of all sections, and a way to run jobs of voting ranks."""

    def job(self, hosts: Hosts, work: str, *, seconds: float, **settings: Any) -> Any:
        """Run a job on all hosts, and return the result of rank 0.

        Args:
            hosts: the hosts, one rank each.
            work: name of a function of `lion.worker`.
            seconds: time limit.
            **settings: further settings of the job.
        """
        job = {"work": work, "repeats": self.config.repeats, **settings}
        return hand_out(hosts, "benchmarks.lion.worker", job, self.folder, seconds=seconds)

    def on_links(self, section: Callable[[Hosts], None], ranks: int) -> None:
        """Run a section at each rate, or once over the loopback.

        Args:
            section: the section, which receives the hosts.
            ranks: number of hosts.
        """
        why = available() if self.config.lion.rates else "lion.rates=[]"
        if why:
            self.notes.append(f"Loopback instead of links ({why}): times say nothing of networks.")
            section(Hosts(ranks))
            return
        for rate in self.config.lion.rates:
            with linked(ranks, rate) as hosts:
                section(hosts)


def _packing(bench: LionBench) -> None:
    """Time packing, voting and unpacking without communication, against reading and writing the data once."""
    elements = bench.config.lion.elements
    times = packing.times(elements, bench.config.lion.ranks, bench.config.repeats)
    for name, values in times.items():
        bench.figures[f"{elements} elements: {name}"] = Figure.of(values, "ms")
    gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} cores"
    for how in ("", packing.KERNELS) if gpu else ("",):
        ratio = statistics.median(times[packing.WHOLE + how]) / statistics.median(times[packing.COPY + how])
        words = f"pack + vote + unpack of {elements} elements on {where}{how}, over reading and writing the data once"
        bench.claim(words, ratio, "times", 2.0 if gpu else 3.0, at_most=True)


def _simulation(bench: LionBench) -> None:
    """Measure how often a vote of up to 4096 simulated ranks finds the right sign."""
    most = {BenchmarkSize.full: 4096, BenchmarkSize.small: 512, BenchmarkSize.tiny: 64}[bench.config.size]
    for ranks in (r for r in (8, 64, 512, 4096) if r <= most):
        runs = [simulation.agreement(ranks, noise=3.0, elements=1024, seed=s) for s in range(bench.config.repeats)]
        for name in runs[0]:
            values = [100 * one[name] for one in runs]
            bench.figures[f"right signs by magnitude, {ranks} ranks, {name}"] = Figure.of(values, "%")
    bench.notes.append("Simulated ranks see a Laplace-distributed update with normal noise of three times its scale.")


def _communication(bench: LionBench) -> None:
    """Time votes and averages alone, without any computation of a model."""
    lion = bench.config.lion

    def section(hosts: Hosts) -> None:
        found = bench.job(hosts, "communication", seconds=1200, elements=lion.elements)
        where = hosts.where
        for name, values in found.items():
            bench.figures[f"communication alone, {where}: {name}"] = Figure.of([1e3 * v for v in values], "ms")
        _predictions(bench, hosts, found)
        if hosts.rate:
            seconds = {name: statistics.median(values) for name, values in found.items()}
            words = f"communication alone, {lion.elements} parameters, {hosts.count} hosts at {where}: a vote of packed"
            words += " ballots faster than fp32"
            bench.claim(words, seconds["fp32 all-reduce"] / seconds[BALLOTS], "times", 15.0)
            bench.notes.append(
                f"{where}: with packing and unpacking, which all hosts do on this machine's cores, a vote is"
                f" {seconds['fp32 all-reduce'] / seconds[_VOTE]:.1f} times as fast as fp32."
            )

    bench.on_links(section, lion.ranks)


def _predictions(bench: LionBench, hosts: Hosts, found: dict[str, list[float]]) -> None:
    """Predict the seconds of a vote from alpha, beta and the speed of packing.

    The numbers of ranks include the measured one, for comparison, and larger ones that could not be measured.
    """
    elements, where = bench.config.lion.elements, hosts.where
    costs = simulation.Costs.measured(found, elements, hosts.count)
    bench.notes.append(
        f"{where}: alpha {1e6 * costs.alpha:.0f} us a message, beta {1e9 * costs.beta:.3g} ns a byte, packing"
        f" {1e9 * costs.pack:.2f} ns an element. At many ranks every message costs alpha, so that the vote needs the"
        " hierarchy (optim.hierarchical) or fewer, larger buckets."
    )
    for ranks in (hosts.count, 8, 64, 512, 4096):
        predicted = {f"vote, {bits} bit{'s' * (bits > 1)}": costs.vote(elements, bits, ranks) for bits in (1, 2, 4, 8)}
        predicted["fp32 all-reduce"] = costs.average(elements, ranks)
        for name, seconds in predicted.items():
            bench.figures[f"predicted, {where}, {ranks} ranks: {name}"] = Figure.of([1e3 * seconds], "ms")


def _steps(bench: LionBench) -> None:
    """Time whole training steps of all entrants, and count the bytes they send."""

    def section(hosts: Hosts) -> None:
        shape, where = _SHAPES[bench.config.size], hosts.where
        found = bench.job(hosts, "steps", seconds=1800, entrants=[DDP, *ENTRANTS], **shape)
        for name, values in found.items():
            bench.figures[f"step, {where}: {name}"] = Figure.of([1e3 * v for v in values["seconds"]], "ms")
            bench.figures[f"bytes a step and rank, {where}: {name}"] = Figure.of(
                [v / 1e6 for v in values["bytes"]], "MB"
            )
        if hosts.rate:
            _step_claims(bench, hosts, found)

    bench.on_links(section, bench.config.lion.ranks)


def _step_claims(bench: LionBench, hosts: Hosts, found: dict[str, dict[str, list[float]]]) -> None:
    """Add the claims about bytes and steps a second at one rate."""
    rounds = {name: values["seconds"] for name, values in found.items()}
    sent = {name: statistics.median(values["bytes"]) for name, values in found.items()}
    where, count = hosts.where, hosts.count
    words = f"bytes a step by the kernel's counters, {count} ranks at {where}, p = 1: fewer than fp32 DDP"
    bench.claim(words, sent[DDP] / sent[_VOTE], "times", 28.0)
    if hosts.rate == "100mbit":
        words = f"end to end, {count} hosts at {where}: steps a second over fp32 Lion under DDP"
        bench.race(words, rounds[DDP], rounds[_VOTE], 5.0)
        for rival in _RIVALS:
            words = f"end to end, {count} hosts at {where}: steps a second over {rival}"
            bench.race(words, rounds[rival], rounds[_VOTE], 1.0)
    else:
        best = min((DDP, *_RIVALS), key=lambda rival: statistics.median(rounds[rival]))
        words = f"end to end, {count} hosts at {where}: steps a second over the best rival ({best})"
        bench.race(words, rounds[best], rounds[_VOTE], 1.0)


def _replicas(bench: LionBench) -> None:
    """Check that all replicas have equal weights, and that a resumed run equals an uninterrupted one."""
    steps = 200 if bench.config.size is BenchmarkSize.full else 20
    counts = (2, 3, 4) if bench.config.size is BenchmarkSize.full else (2,)
    good = {"replicas equal": True, "resumed equal": True, "exact zeros in gradients": True}
    for count in counts:
        found = bench.job(Hosts(count), "replicas", seconds=600, bits=[1, 2, 4, 8], steps=steps)
        for told in found.values():
            good = {name: value and told[name] for name, value in good.items()}
    ranks = ", ".join(map(str, counts))
    where = f"p = 1, 2, 4, 8, {ranks} ranks, {steps} steps, exact zeros, uneven buckets"
    held = good["exact zeros in gradients"]
    bench.claim(f"replicas equal bit for bit: {where}", float(good["replicas equal"] and held), "yes", 1)
    bench.claim(f"resume equal bit for bit: {where}", float(good["resumed equal"] and held), "yes", 1)


def _quality(bench: LionBench) -> None:
    """Train with each variant of compression, and compare the validation CRPS with that of uncompressed Lion."""
    lion = bench.config.lion
    if lion.store is None:
        bench.notes.append("The quality section was left out: give lion.store=STORE.")
        return
    names = list(quality.VARIANTS) if lion.variants is None else lion.variants
    for name in names:
        require("lion.variants", name, name in quality.VARIANTS, f"known are {', '.join(quality.VARIANTS)}")
    require("lion.variants", names, quality.REFERENCE in names, f"{quality.REFERENCE} is what others are compared with")
    store, folder = str(Path(lion.store).resolve()), (bench.folder / "runs").resolve()
    budget: dict[str, Any] = {"seeds": lion.seeds, "minutes": lion.minutes}
    if lion.quality_rate is None:
        trainer = quality.in_threads(store, ranks=lion.quality_ranks, steps=lion.quality_steps)
        found, left = quality.train_all(trainer, names, **budget)
        bench.notes.append(
            "Quality: ranks are threads of one process; seconds are a rank's work plus its bytes at 100 Mbit."
        )
    else:
        with linked(lion.quality_ranks, lion.quality_rate) as hosts:
            trainer = quality.on_hosts(hosts, store, folder, steps=lion.quality_steps)
            found, left = quality.train_all(trainer, names, **budget)
    if left:
        bench.notes.append(f"Not reached in {lion.minutes:g} minutes: {'; '.join(left)}.")
    quality.plot(found, bench.folder / "quality.png")
    _quality_claims(bench, found)


def _quality_claims(bench: LionBench, found: dict[str, list[quality.Training]]) -> None:
    """Add the figures and claims of the trainings."""
    reference = found[quality.REFERENCE]
    goal = max((statistics.fmean(t.losses[-5:]) for ts in found.values() for t in ts), default=0.0)
    for name, trainings in found.items():
        if not trainings:
            continue
        bench.figures[f"validation CRPS ratio: {name}"] = Figure.of([t.crps for t in trainings], "ratio")
        bench.figures[f"bytes a step: {name}"] = Figure.of([t.sent_mb for t in trainings], "MB")
        bench.figures[f"bytes of momentum: {name}"] = Figure.of([t.momentum_bytes / 1e6 for t in trainings], "MB")
        reached = [quality.seconds_to_loss(t, goal) for t in trainings]
        if all(value < float("inf") for value in reached):
            bench.figures[f"time to equal loss ({goal:.4f}): {name}"] = Figure.of(reached, "s")
        more = quality.excess(trainings, reference)
        if name != quality.REFERENCE and more:
            bench.figures[f"validation CRPS above uncompressed Lion: {name}"] = Figure.of(more, "%")
            if len(more) > 1:
                mean = Figure.of_mean(more, "%")
                told = f"95 % interval {mean.min:.3f} to {mean.max:.3f} %"
                bench.notes.append(f"{name}: CRPS above uncompressed Lion, {told}.")
    for name in (n for n in quality.PROMISED if n in found):
        more = quality.excess(found[name], reference)
        if more:
            words = f"validation CRPS of {name} above uncompressed Lion, the worst of {len(more)} seeds"
            bench.claim(words, max(more), "%", 0.5, at_most=True)


run = benchmark(
    "Compressed Lion and its peers",
    {
        "packing": _packing,
        "simulation": _simulation,
        "communication": _communication,
        "steps": _steps,
        "replicas": _replicas,
        "quality": _quality,
    },
    LionBench,
)
