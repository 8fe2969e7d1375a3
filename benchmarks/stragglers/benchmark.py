"""Compare votes that a quorum ends with exchanges that wait for every rank, where ranks are late.

    ensemble-ml benchmark benchmark=stragglers [only=[speed,quality]] [stragglers.store=STORE] [repeats=5]

Speed: hosts are network namespaces (scripts/links.sh; needs root), or processes that communicate over the loopback.
Steps are sleeps with a small backward pass, so the load of the machine hardly matters. `clock` says who is
late; all entrants meet the same stragglers, and take turns.

Quality: whole trainings whose ranks are threads. Who is in each vote follows from such stragglers by simulated time.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.hosts import Hosts, available, linked
from benchmarks.common.jobs import hand_out
from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, run_sections
from benchmarks.lion import trials
from benchmarks.stragglers.clock import KINDS, Pace, votes
from benchmarks.stragglers.local import LocalSteps
from benchmarks.stragglers.worker import ALLREDUCE, DDP, HUB, LOCAL, QUORUM, VOTE
from ensemble_ml.config import BenchmarkConfig, ExchangeName, ModelConfig, OptimConfig, Precision
from ensemble_ml.distributed import Communicator
from ensemble_ml.distributed.choice import quorum_vote
from ensemble_ml.distributed.quorum import quorum_of
from ensemble_ml.distributed.simulated import join_simulated
from ensemble_ml.optim import Exchange

log = logging.getLogger(__name__)

_WORDS = {"random": "one rank of all late in each step", "slow": "one rank twice as slow", "none": "no straggler"}


def run(config: BenchmarkConfig) -> Path:
    """Run all sections, or those of `only`, and write results.json and report.html.

    Args:
        config: the settings of the benchmark.

    Returns:
        The path of results.json.

    Raises:
        UserError: `only` names an unknown section, or a rank failed.
    """
    folder = Path(config.output) / "stragglers"
    folder.mkdir(parents=True, exist_ok=True)
    return run_sections(Bench(config, folder), SECTIONS).publish(folder, "Ranks that do not wait")


def _speed(bench: Bench) -> None:
    """Time all entrants under each kind of straggler."""
    given = bench.config.stragglers
    ballots = quorum_of("auto", given.ranks)
    settings = ("steps", "step", "late", "bound", "elements")
    job: dict[str, Any] = {key: getattr(given, key) for key in settings} | {"quorum": ballots}
    job |= {"repeats": bench.config.repeats, "entrants": [ALLREDUCE, DDP, VOTE, HUB, LOCAL, QUORUM], "kinds": KINDS}
    why = "stragglers.rate=null" if given.rate is None else available()
    with ExitStack() as stack:
        if why:
            bench.notes.append(f"Loopback instead of hosts ({why}).")
        hosts = (
            Hosts(given.ranks) if why or given.rate is None else stack.enter_context(linked(given.ranks, given.rate))
        )
        found = hand_out(hosts, "benchmarks.stragglers.worker", job, bench.folder, seconds=3600)
        where = f"{given.ranks} hosts, {hosts.where}"
    for name, values in found.items():
        kind, entrant = name.split(": ")
        words = f"{_WORDS[kind]}, {where}: {entrant}"
        bench.figures[f"steps a second, {words}"] = Figure.of(values["steps"], "1/s")
        bench.figures[f"samples a second, {words}"] = Figure.of(values["samples"], "1/s")
    same = all(min(values["equal"]) for name, values in found.items() if name.split(": ")[1] in (VOTE, HUB, QUORUM))
    bench.claim("replicas equal bit for bit after every run of a vote", float(same), "yes", 1)
    share = f"{ballots} of {given.ranks}"
    _race(bench, found, "random", "steps", f"a vote of {share}: steps a second over the vote of all", VOTE, 2.0)
    _race(bench, found, "random", "steps", f"a vote of {share}: steps a second over all-reduce", ALLREDUCE, 2.0)
    _race(bench, found, "random", "steps", f"a vote of {share}: steps a second over local SGD", LOCAL, 1.0)
    _race(bench, found, "slow", "samples", f"a vote of {share}: samples a second over the vote of all", VOTE, 1.15)
    _race(bench, found, "slow", "samples", f"a vote of {share}: samples a second over local SGD", LOCAL, 1.0)
    waiting, hub = (found[f"none: {name}"]["steps"] for name in (VOTE, HUB))
    more = 100 * (statistics.median(a / b for a, b in zip(waiting, hub, strict=True)) - 1)
    bench.claim(
        "no straggler: a step of a vote of all through the hub above one of all_to_all", more, "%", 3.0, at_most=True
    )


def _race(bench: Bench, found: dict[str, Any], kind: str, what: str, words: str, rival: str, target: float) -> None:
    """Claim how many times as many steps or samples a second the vote of a quorum has."""
    ours, theirs = found[f"{kind}: {QUORUM}"][what], found[f"{kind}: {rival}"][what]
    bench.race(f"{_WORDS[kind]}: {words}", [1 / value for value in theirs], [1 / value for value in ours], target)


def _quality(bench: Bench) -> None:
    """Train with each exchange, and compare the scores of the validation dates."""
    given = bench.config.stragglers
    if given.store is None:
        bench.notes.append("The quality section was left out: give stragglers.store=STORE.")
        return
    plain = trials.quickstart_config(given.store, seed=0, steps=given.quality_steps, optim={"lr": 1e-3})
    model = ModelConfig(hidden=8, max_hidden=8, depth=1, surroundings=0, residuals=0, precision=Precision.float32)
    plain = replace(plain, model=model, average=0.0, validate_every=10**6, checkpoint_every=10**6)
    # A seed decides the order of dates, the members and the stragglers. The fits, most of the work, are made once.
    start = trials.prepare(plain)
    scores: dict[str, list[float]] = {"start": [trials.score(start)] * given.seeds}
    for seed in range(given.seeds):
        for name, optim in _optims(bench).items():
            config = replace(plain, seed=seed, optim=OptimConfig(weight_decay=0.05, lr=1e-3, **optim))
            crps = trials.train(config, start, given.ranks, make=_maker(bench, name, config.optim, seed)).crps
            scores.setdefault(name, []).append(crps)
            log.info("quality: %s, seed %d: CRPS ratio %.5f", name, seed, crps)
    for name, values in scores.items():
        bench.figures[f"validation CRPS ratio after {given.quality_steps} steps: {name}"] = Figure.of(values, "ratio")
        above = [100 * (a / b - 1) for a, b in zip(values, scores[ALLREDUCE], strict=True)]
        if name in (QUORUM, VOTE, LOCAL):
            words = f"validation CRPS of {name} above all-reduce's, the worst of {given.seeds} seeds"
            bench.claim(words, max(above), "%", 0.5, at_most=True)
        elif name == "start":
            bench.notes.append(
                f"CRPS before the first step above all-reduce's after the last: {min(above):.2f} to {max(above):.2f} %."
            )


def _optims(bench: Bench) -> dict[str, dict[str, Any]]:
    """Return the settings of the exchange of each entrant of the quality section."""
    given = bench.config.stragglers
    quorum = {"quorum": str(quorum_of("auto", given.ranks)), "bound": given.bound}
    vote = {"exchange": ExchangeName.vote}
    return {ALLREDUCE: {"exchange": ExchangeName.allreduce}, VOTE: vote, LOCAL: {}, QUORUM: vote | quorum}


def _maker(bench: Bench, name: str, optim: OptimConfig, seed: int) -> Callable[[Communicator], Exchange] | None:
    """Return a function that makes the exchange of an entrant, or None if the settings say all."""
    given = bench.config.stragglers
    if name == LOCAL:
        return lambda group: LocalSteps(group, given.bound)
    if name != QUORUM:
        return None
    ballots = int(optim.quorum)
    pace = Pace("random", given.ranks, given.step, given.late, seed)

    def needed(vote: int) -> int:
        return given.ranks if (vote + 1) % given.bound == 0 else ballots

    script = dict(enumerate(votes(pace, given.quality_steps, needed)[0]))

    def make(group: Communicator) -> Exchange:
        exchange = quorum_vote(optim, group, ballots, join_simulated)
        exchange.script = script
        return exchange

    return make


SECTIONS: dict[str, Callable[[Bench], None]] = {"speed": _speed, "quality": _quality}
