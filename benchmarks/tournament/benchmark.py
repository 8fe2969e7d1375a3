"""Compare tournaments with their competitors: the published rule, trainers that never meet, and averages.

    ensemble-ml benchmark benchmark=tournament tournament.store=STORE [only=[quality,rates,nan,cost,storage,simulation]]

Quality, rates and NaN: trainings whose trainers are threads (`contest`). Cost: `ensemble-ml train` on hosts that are
network namespaces (scripts/links.sh; needs root), or processes that communicate over the loopback. Storage: our loader
on as many hosts, over emulated slow storage. Simulation: the tournaments alone, of many trainers.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.hosts import Hosts, available, linked, python
from benchmarks.common.jobs import hand_out
from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, benchmark
from benchmarks.lion import trials
from benchmarks.loading.storage import Storage
from benchmarks.stragglers.averaging import LocalSteps
from benchmarks.tournament.contest import Outcome, best, contest, ours, published, score_of
from ensemble_ml.config import (
    BenchmarkConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Precision,
    TournamentConfig,
    TournamentData,
    TournamentKeep,
    TrainConfig,
)
from ensemble_ml.training.assemble import Run
from ensemble_ml.training.tournament import sources
from ensemble_ml.training.tracking import read_log

log = logging.getLogger(__name__)

_RATES = (3e-5, 3e-4, 1e-3, 3e-3)
_PARTED = "tournament, parted dates"
_EXTRA = {"shared": TournamentData.shared, "parted": TournamentData.parted}


def _plain(bench: Bench, seed: int, **tournament: Any) -> TrainConfig:
    """Return the settings of a training of trainers with one sample a step each."""
    given = bench.config.tournament
    assert given.store is not None
    plain = trials.quickstart_config(given.store, seed=seed, steps=given.steps, optim={})
    model = ModelConfig(hidden=8, max_hidden=8, depth=1, points=0, precision=Precision.float32)
    return replace(
        plain, model=model, average=0.0, batch_size=1, validate_every=1, checkpoint_every=10**6,
        optim=OptimConfig(weight_decay=0.05, lr=1e-3), parallel=ParallelConfig(trainer=given.trainers),
        tournament=TournamentConfig(**{"every": given.every} | tournament),
    )  # fmt: skip


def _start(bench: Bench) -> Run:
    """Make the fits, which all trainings of a section have in common."""
    return trials.prepare(replace(_plain(bench, 0), parallel=ParallelConfig(), tournament=TournamentConfig()))


def _quality(bench: Bench) -> None:
    """Train with each scheme, and compare scores on validation dates that chose nothing."""
    start, scores, sent = _start(bench), dict[str, list[float]](), dict[str, list[int]]()
    for seed in range(bench.config.tournament.seeds):
        for name, score in _of_seed(bench, start, seed, sent):
            scores.setdefault(name, []).append(score)
            log.info("quality: %s, seed %d: score %.5f", name, seed, score)
    steps = bench.config.tournament.steps
    for name, values in scores.items():
        bench.figures[f"score after {steps} steps: {name}"] = Figure.of(values, "ratio")
    winner = min(scores, key=lambda name: float(np.mean(scores[name])))
    bench.notes.append(f"The best mean score of {len(scores[winner])} seeds: {winner}.")
    alone = "four alone, parted dates, the best"
    gain = float(np.mean([1 - a / b for a, b in zip(scores[_PARTED], scores[alone], strict=True)]))
    bench.claim("score of the tournament below the best of those that never met, parted dates", 100 * gain, "%", 0.0)
    ratio = float(np.median(np.divide(sent["ours"], sent["published"])))
    bench.claim("bytes of a tournament beside the published rule's", ratio, "times", 0.5, at_most=True)


def _of_seed(bench: Bench, start: Run, seed: int, sent: dict[str, list[int]]) -> Iterator[tuple[str, float]]:
    """Yield the name and the score of each scheme of the quality section."""
    given = bench.config.tournament
    for words, data in _EXTRA.items():
        config = _plain(bench, seed, data=data)
        alone = contest(start, config, None, soup=True)
        if data is TournamentData.shared:
            yield "one trainer", alone[0].score
        yield f"four alone, {words} dates, the best", best(alone).score
        yield f"four alone, {words} dates, mean of weights", alone[0].soup[1]
        found = contest(start, config, ours, soup=True)
        yield f"tournament, {words} dates", best(found).score
        yield f"tournament, {words} dates, mean of weights", found[0].soup[1]
        yield f"tournament, {words} dates, better of both", _better(found)
        if data is TournamentData.parted:
            theirs = contest(start, config, published)
            yield "published rule, parted dates", best(theirs).score
            for name, outcomes in (("ours", found), ("published", theirs)):
                sent.setdefault(name, []).extend(np.sum([one.sent for one in outcomes], 0).tolist())
    together = replace(
        _plain(bench, seed), batch_size=given.trainers, parallel=ParallelConfig(), tournament=TournamentConfig()
    )
    for name, make in (
        (f"local SGD, weights averaged every {given.every} steps", lambda group: LocalSteps(group, given.every)),
        (f"data parallel, {given.trainers} samples a step", None),
    ):
        weights = trials.train(together, start, given.trainers, make=make).weights
        yield name, score_of(start, weights, 1)


def _better(outcomes: list[Outcome]) -> float:
    """Return the score of the winner, or of the mean of weights where the tournament's dates prefer it."""
    one = best(outcomes)
    chosen, score = one.soup
    return score if chosen < one.chosen else one.score


def _rates(bench: Bench) -> None:
    """Let trainers differ in their learning rates, and count after two tournaments who has the best one."""
    start, given = _start(bench), bench.config.tournament
    rates = [_RATES[k % len(_RATES)] for k in range(given.trainers)]
    found, holders = [], []
    for seed in range(given.seeds):
        config = _plain(bench, seed, vary={"optim.lr": rates})
        alone = contest(start, config, None)
        right = min(range(given.trainers), key=lambda k: alone[k].chosen)
        history = [one.varied[1] for one in contest(start, config, ours)]
        holders.append(float(sum(rates[k] == rates[right] for k in history)))
        found.append(float(holders[-1] >= 2))
        log.info("rates: seed %d: best alone %g; after two tournaments %s", seed, rates[right], history)
    bench.figures["trainers with the best of the learning rates after two tournaments"] = Figure.of(holders, "trainers")
    words = "seeds in which two tournaments spread the learning rate that is best alone"
    bench.claim(words, sum(found), f"of {given.seeds}", float(given.seeds))


def _nan(bench: Bench) -> None:
    """Let the weights of one trainer be NaN before the first tournament, and count afterwards who has them."""
    start, given = _start(bench), bench.config.tournament
    after: dict[str, list[list[int]]] = {"ours": [], "published": []}
    for seed in range(given.seeds):
        config = replace(_plain(bench, seed, every=5), steps=16)
        for name, rule in (("ours", ours), ("published", published)):
            outcomes = contest(start, config, rule, poisoned=1)
            after[name].append([sum(not one.finite[k] for one in outcomes) for k in range(3)])
    for k in range(3):
        for name, counts in after.items():
            values = [float(one[k]) for one in counts]
            bench.figures[f"trainers with NaN after tournament {k + 1}, {name}"] = Figure.of(values, "trainers")
    most = max(one[0] for one in after["ours"])
    bench.claim("trainers with NaN after the next tournament", float(most), "trainers", 0.0, at_most=True)


@contextmanager
def _hosts(bench: Bench, count: int) -> Iterator[Hosts]:
    """Provide a host for each trainer, or processes on the loopback."""
    rate = bench.config.tournament.rate
    why = "tournament.rate=null" if rate is None else available()
    if why or rate is None:
        bench.notes.append(f"Loopback instead of hosts ({why}).")
        yield Hosts(count)
    else:
        with linked(count, rate) as hosts:
            yield hosts


def _cost(bench: Bench) -> None:
    """Time the tournaments of a real job within its run."""
    given = bench.config.tournament
    every, output = given.apart, bench.folder / "runs"
    shutil.rmtree(output, ignore_errors=True)
    settings = {
        "run": "cost", "output": output.resolve(), "data.store": given.store, "data.train": "[2001]",
        "data.validation": "[2002]", "model.hidden": 16, "model.max_hidden": 64, "model.points": 0,
        "model.precision": "float32", "batch_size": 1, "steps": 3 * every + 1,
        "validate_every": every, "checkpoint_every": every, "parallel.trainer": given.trainers,
        "tournament.every": every, "tournament.soup": False, "threads": 1, "tracking.tensorboard": False,
        "tracking.log_every": 1,
    }  # fmt: skip
    with _hosts(bench, given.trainers) as hosts:
        hosts.run(python("-m", "ensemble_ml", "train", *(f"{k}={v}" for k, v in settings.items())), seconds=3600)
        where = hosts.where
    logs = [read_log(path) for path in sorted((output / "cost").glob("trainer_*/log.jsonl"))]
    shares, seconds = [], []
    for k in range(3):
        held = [[line["tournament"] for line in lines if "tournament" in line][k] for lines in logs]
        # Who comes last waits for nobody: its wait is what hearing of the others costs. All others wait for it.
        seconds.append(min(one["waited"] for one in held) + max(one["swapped"] for one in held))
        between = [line for line in logs[0] if "loss" in line and k * every < line["step"] <= (k + 1) * every]
        shares.append(100 * seconds[-1] / sum(1 / line["samples_per_s"] for line in between))
    words = f"{given.trainers} trainers, {where}, every {every} steps"
    bench.figures[f"seconds of a tournament, {words}"] = Figure.of(seconds, "s")
    bench.figures[f"share of the run, {words}"] = Figure.of(shares, "%")
    bench.claim(f"a tournament's share of the run, {words}", max(shares), "%", 1.0, at_most=True)


def _storage(bench: Bench) -> None:
    """Read from slow storage with one trainer, with parts for each, and with all dates for each."""
    given = bench.config.tournament
    assert given.store is not None
    storage = Storage(Path(given.store).resolve(), (bench.folder / "storage").resolve(), given.mb_s)
    storage.build()
    job: dict[str, Any] = {
        "store": given.store, "step": given.step, "samples": given.samples, "quarter": given.trainers
    }  # fmt: skip
    rates: dict[str, list[float]] = {}
    reads: dict[str, list[float]] = {}
    for _ in range(bench.config.repeats):
        for name, count in (("one trainer", 1), ("parted", given.trainers), ("shared", given.trainers)):
            given_data = "shared" if count == 1 else name
            with _hosts(bench, count) if count > 1 else _alone() as hosts:
                storage.reset()
                found = hand_out(
                    hosts, "benchmarks.tournament.worker", job | {"trainers": count, "data": given_data},
                    bench.folder, seconds=3600, environment=storage.environment(),
                )  # fmt: skip
            rates.setdefault(name, []).append(found["rate"])
            reads.setdefault(name, []).append(found["read"] / found["bytes"])
    for name in rates:
        words = name if name == "one trainer" else f"{given.trainers} trainers, {name} dates"
        bench.figures[f"samples a second from slow storage, {words}"] = Figure.of(rates[name], "1/s")
        bench.figures[f"times that the bytes of all dates were read, {words}"] = Figure.of(reads[name], "times")
    one = [1 / rate for rate in rates["one trainer"]]
    words = f"{given.trainers} trainers over one, memory for 1/{given.trainers} of the bytes each: samples a second"
    bench.race(f"{words}, parted", one, [1 / rate for rate in rates["parted"]], float(given.trainers))
    bench.figures[f"{words}, shared"] = Figure.of(np.multiply(rates["shared"], one).tolist(), "times")
    bench.claim("times that parted trainers read each byte", max(reads["parted"]), "times", 1.0, at_most=True)


@contextmanager
def _alone() -> Iterator[Hosts]:
    """Provide this host alone."""
    yield Hosts(1)


def _simulation(bench: Bench) -> None:
    """Hold the tournaments alone: how many until all have the best of many settings, and until NaN is gone."""
    largest = bench.config.tournament.largest
    for count in sorted({4, 16, largest}):
        for keep in TournamentKeep:
            rounds = [float(_spread(count, keep, seed)) for seed in range(20)]
            bench.figures[f"{count} trainers, {keep.value}: tournaments until all have the best"] = Figure.of(
                rounds, "tournaments"
            )
        bad = [float(_still_bad(count, seed)) for seed in range(20)]
        bench.figures[f"{count} trainers, a quarter of them NaN: NaN after one tournament in pairs"] = Figure.of(
            bad, "trainers"
        )
    words = f"{largest} trainers in pairs: tournaments until all have the best, over the least possible"
    slowest = bench.figures[f"{largest} trainers, pairs: tournaments until all have the best"].median
    bench.claim(words, slowest / math.log2(largest), "times", 2.0, at_most=True)


def _spread(count: int, keep: TournamentKeep, seed: int) -> int:
    """Return after how many tournaments all trainers have the state of the best, if scores do not change."""
    state = np.random.default_rng([seed, count]).permutation(count)
    number = 0
    while state.any():
        number += 1
        state = state[sources(keep, state.tolist(), seed, number)]
    return number


def _still_bad(count: int, seed: int) -> int:
    """Return how many trainers are NaN after one tournament, of a quarter before."""
    scores = np.random.default_rng([seed, count]).random(count)
    scores[: count // 4] = math.nan
    return int(np.isnan(scores[sources(TournamentKeep.pairs, scores.tolist(), seed, 1)]).sum())


def _bench(config: BenchmarkConfig, folder: Path) -> Bench:
    """Leave out all sections but the simulation where there is no store."""
    if config.tournament.store is not None:
        return Bench(config, folder)
    note = "Only the simulation was run: give tournament.store=STORE for the other sections."
    return Bench(replace(config, only=["simulation"]), folder, notes=[note])


run = benchmark(
    "Trainers that compete",
    {
        "quality": _quality,
        "rates": _rates,
        "nan": _nan,
        "cost": _cost,
        "storage": _storage,
        "simulation": _simulation,
    },
    _bench,
)
