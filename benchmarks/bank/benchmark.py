"""Compare a U-Net whose kernels share one bank of weights with networks whose kernels are their own.

    ensemble-ml benchmark benchmark=bank bank.store=STORE [only=[quality,step,links]]

Quality: the U-Net alone, without the fits, which hide what it gains. Every competitor trains on the same dates in the
same order, and is scored by the CRPS ratio of the validation dates after its last step:

    dense             hidden 16, max_hidden 64
    bank              the same network, all kernels of a tenth of the numbers
    bank of 1 %       the same, of a hundredth
    12 / 12, 16 / 16  dense networks of about as many weights as the bank: hidden / max_hidden
    none              the statistical start, which no network changes

Step: a training step with a bank and without, by turns. Links: steps and bytes of hosts that vote, with a bank and
without, by turns of whole jobs; bytes by the kernel's counters. Both leave out the terms of single cells, which no bank
shares.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.hosts import Hosts, available, linked
from benchmarks.common.jobs import hand_out
from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, benchmark
from benchmarks.common.turns import take_turns
from benchmarks.lion.trials import NO_FITS, network_alone
from benchmarks.step.benchmark import benchmark_spec, random_batch, training_step
from ensemble_ml.config import Precision
from ensemble_ml.models import Climate, EnsembleModel, Speed
from ensemble_ml.training import train
from ensemble_ml.training.checkpoint import load_meta
from ensemble_ml.training.tracking import read_log

log = logging.getLogger(__name__)

_BANK, _VOTE = 0.1, "vote, 1 bit"
_ENTRANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "bank": {"bank": _BANK},
    "bank of 1 %": {"bank": 0.01},
    "12 / 12": {"hidden": 12, "max_hidden": 12},
    "16 / 16": {"max_hidden": 16},
}
_SINGLE = ("bank of 1 %",)  # one seed shows that it trains


def _quality(bench: Bench) -> None:
    """Train all competitors with each seed, and compare their scores."""
    given = bench.config.bank
    if given.store is None:
        bench.notes.append("bank.store was not given: the section quality was left out.")
        return
    scores: dict[str, list[float]] = {"none": []}
    for seed in range(given.seeds):
        for name, model in _ENTRANTS.items():
            if seed and name in _SINGLE:
                continue
            folder = _trained(bench, given.store, seed, name, model)
            scores.setdefault(name, []).append(load_meta(folder / "checkpoints" / "last")["scores"]["crps_ratio"])
            log.info("quality: seed %d, %s: crps_ratio %.4f", seed, name, scores[name][-1])
            if name == "dense":
                first = next(line for line in read_log(folder / "log.jsonl") if "validation" in line)
                scores["none"].append(first["validation"]["crps_ratio"])
    for name, values in scores.items():
        bench.figures[f"crps_ratio, {name}"] = Figure.of(values, "ratio")
    none, dense, ours = (scores[name] for name in ("none", "dense", "bank"))
    lost = [100 * (b / a - 1) for a, b in zip(dense, ours, strict=True)]
    kept = [100 * (n - b) / (n - a) for n, a, b in zip(none, dense, ours, strict=True)]
    bench.figures["CRPS of a bank of a tenth above dense"] = Figure.of(lost, "%")
    bench.claim("CRPS that a bank of a tenth loses, mean of the seeds", statistics.mean(lost), "%", 2.0, at_most=True)
    bench.claim("share of the network's gain that it keeps, mean of the seeds", statistics.mean(kept), "%", 80.0)
    small = min((name for name in _ENTRANTS if "/" in name), key=lambda name: statistics.mean(scores[name]))
    ahead = [100 * (b / a - 1) for a, b in zip(ours, scores[small], strict=True)]
    words = f"CRPS of the best dense network of as many weights ({small}) above the bank's"
    bench.figures[words] = Figure.of(ahead, "%")
    bench.claim(f"{words}, the least of the seeds", min(ahead), "%", 0.0)
    tiny = 100 * (1 - scores["bank of 1 %"][0] / none[0])
    bench.claim("CRPS of a bank of a hundredth below the statistical start", tiny, "%", 1.0)


def _trained(bench: Bench, store: str, seed: int, name: str, model: dict[str, Any]) -> Path:
    """Train one competitor, unless that is done, and return the folder of its run."""
    given = bench.config.bank
    run = f"seed{seed}-{name.replace(' ', '')}".replace("/", "-").replace("%", "pct")
    settings = network_alone(store, bench.folder / "runs", run, seed=seed, steps=given.steps, **model)
    folder = Path(settings.output) / settings.run
    done = folder / "checkpoints" / "last"
    return folder if done.exists() and load_meta(done)["step"] == given.steps else train(settings)


def _step(bench: Bench) -> None:
    """Time a training step with a bank and without, by turns."""
    shape = (2, 16, 32) if bench.tiny else (4, 33, 64)
    entrants: dict[str, Callable[[], object]] = {}
    sizes = {}
    for name, share in (("dense", 0.0), ("bank", _BANK)):
        spec = benchmark_spec(*shape, hidden=16, max_hidden=64, bank=share, **NO_FITS)
        torch.manual_seed(0)
        model = EnsembleModel(spec, Climate.default(spec))
        Speed(Precision.float32, True).apply(model)
        entrants[name] = training_step(model, random_batch(spec, 4))
        sizes[name] = sum(p.numel() for p in model.unet.parameters())
    times = take_turns(entrants, bench.config.repeats)
    ratios = [b / d for b, d in zip(times["bank"], times["dense"], strict=True)]
    bench.figures["training step, bank over dense"] = Figure.of(ratios, "times")
    bench.claim("training step with a bank over one without", statistics.median(ratios), "times", 1.1, at_most=True)
    bench.figures["weights of the U-Net, dense over bank"] = Figure.of([sizes["dense"] / sizes["bank"]], "times")


def _links(bench: Bench) -> None:
    """Time steps of hosts that vote, and count the bytes that they send."""
    why, ranks = available(), bench.config.bank.ranks
    if why:
        bench.notes.append(f"Loopback instead of links of 100 Mbit ({why}): times say nothing of networks.")
        _vote(bench, Hosts(ranks))
        return
    with linked(ranks, "100mbit") as hosts:
        _vote(bench, hosts)


def _vote(bench: Bench, hosts: Hosts) -> None:
    """Run the job with a bank and without, in turn."""
    shape = [2, 16, 32] if bench.tiny else [4, 33, 64]
    seconds: dict[str, list[float]] = {"dense": [], "bank": []}
    sent: dict[str, list[float]] = {"dense": [], "bank": []}
    for _ in range(2):
        for name, share in (("dense", 0.0), ("bank", _BANK)):
            config = {"hidden": 32, "max_hidden": 128, "bank": share, **NO_FITS}
            job = {
                "work": "steps",
                "repeats": bench.config.repeats,
                "entrants": [_VOTE],
                "shape": shape,
                "config": config,
            }
            found = hand_out(hosts, "benchmarks.lion.worker", job, bench.folder, seconds=1800)[_VOTE]
            seconds[name] += found["seconds"]
            sent[name] += found["bytes"]
    for name in seconds:
        bench.figures[f"step, {hosts.where}: {name}"] = Figure.of([1e3 * s for s in seconds[name]], "ms")
        bench.figures[f"bytes a step and rank, {hosts.where}: {name}"] = Figure.of([b / 1e6 for b in sent[name]], "MB")
    fewer = statistics.median(sent["dense"]) / statistics.median(sent["bank"])
    bench.claim(
        f"{hosts.count} hosts at {hosts.where} that vote: bytes a step of dense over a bank's", fewer, "times", 9.0
    )
    if hosts.rate:
        words = f"{hosts.count} hosts at {hosts.where} that vote: steps a second over dense"
        bench.race(words, seconds["dense"], seconds["bank"], 2.0)


run = benchmark("One bank of weights for all kernels", {"step": _step, "links": _links, "quality": _quality})
