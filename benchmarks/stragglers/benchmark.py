"""Compare votes that a quorum ends with other exchanges, where ranks are late.

    ensemble-ml benchmark benchmark=stragglers [only=[speed,scaling,quality]] [stragglers.store=STORE] [repeats=5]

Speed: hosts are network namespaces (scripts/links.sh; needs root), or processes that communicate over the loopback.
Steps are sleeps with a small backward pass, so the load of the machine hardly matters. `clock` says who is
late; all entrants meet the same stragglers, and take turns.

Scaling: the same on many ranks, by simulated time alone.

Quality: whole trainings whose ranks are threads. Who is in each vote, or whose old weights count, follows from such
stragglers by simulated time, and so does the time to a score.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks.common.hosts import Hosts, available, linked
from benchmarks.common.jobs import hand_out
from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, benchmark
from benchmarks.common.simulated import join_simulated
from benchmarks.lion import trials
from benchmarks.stragglers.averaging import DiLoCo, LocalSteps, ScriptedRounds, WaitAvoiding, groups_of
from benchmarks.stragglers.clock import KINDS, Pace, averages, votes
from benchmarks.stragglers.worker import (
    ALLREDUCE,
    DDP,
    DILOCO,
    DROP,
    HIERARCHICAL,
    HUB,
    LOCAL,
    PAPER,
    PERIODIC,
    QUORUM,
    VOTE,
)
from ensemble_ml.config import ExchangeName, ModelConfig, OptimConfig, Precision
from ensemble_ml.distributed import Communicator
from ensemble_ml.distributed.choice import quorum_vote
from ensemble_ml.distributed.quorum import quorum_of
from ensemble_ml.optim import Exchange

log = logging.getLogger(__name__)

_WORDS = {
    "random": "one rank of all late in each step", "heavy": "log-normal times", "slow": "one rank twice as slow",
    "none": "no straggler",
}  # fmt: skip
_ENTRANTS = [ALLREDUCE, DDP, VOTE, HUB, LOCAL, PERIODIC, HIERARCHICAL, DILOCO, PAPER, DROP, QUORUM]
_SCALE = 64, 1024  # ranks of the simulated jobs
_ROUNDS = 200  # steps of each


def _speed(bench: Bench) -> None:
    """Time all entrants under each kind of straggler."""
    given = bench.config.stragglers
    ballots = quorum_of("auto", given.ranks)
    settings = ("steps", "step", "late", "bound", "group", "elements")
    job: dict[str, Any] = {key: getattr(given, key) for key in settings} | {"quorum": ballots}
    job |= {"repeats": bench.config.repeats, "entrants": _ENTRANTS, "kinds": KINDS}
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
    wagma, summed = found[f"random: {DROP}"]["steps"], found[f"random: {ALLREDUCE}"]["steps"]
    words = f"{_WORDS['random']}: {DROP}: steps a second over all-reduce"
    bench.race(words, [1 / value for value in summed], [1 / value for value in wagma], 2.1)
    more = 100 * (statistics.median(a / b for a, b in zip(waiting, hub, strict=True)) - 1)
    bench.claim(
        "no straggler: a step of a vote of all through the hub above one of all_to_all", more, "%", 3.0, at_most=True
    )


def _race(bench: Bench, found: dict[str, Any], kind: str, what: str, words: str, rival: str, target: float) -> None:
    """Claim how many times as many steps or samples a second the vote of a quorum has."""
    ours, theirs = found[f"{kind}: {QUORUM}"][what], found[f"{kind}: {rival}"][what]
    bench.race(f"{_WORDS[kind]}: {words}", [1 / value for value in theirs], [1 / value for value in ours], target)


def _scaling(bench: Bench) -> None:
    """Simulate many ranks by the code that decides who is in a vote of the quality section."""
    given, rows = bench.config.stragglers, []
    for ranks in (given.ranks, *_SCALE):
        ballots = quorum_of("auto", ranks)
        for kind in ("random", "heavy", "slow", "none"):
            pace, rates = Pace(kind, ranks, given.step, given.late), dict[str, float]()
            for name, every in (("ranks that wait in every step", 1), (f"{LOCAL}, WAGMA-SGD", given.bound)):
                rates[name] = _ROUNDS / averages(pace, _ROUNDS, every)[1][-1]
            voters, ends = votes(pace, _ROUNDS, lambda vote, b=ballots, r=ranks: r if _met(vote, given.bound) else b)  # type: ignore[misc]
            samples = {name: rate * ranks for name, rate in rates.items()}
            name = "vote of a quorum of three quarters"
            rates[name], samples[name] = _ROUNDS / ends[-1], sum(map(len, voters)) / ends[-1]
            for name, rate in rates.items():
                row = {"ranks": ranks, "stragglers": _WORDS[kind], "exchange": name}
                rows.append(row | {"steps a second": round(rate, 2), "samples a second": round(samples[name], 1)})
    bench.tables["simulated time, without that of communication"] = rows


def _met(vote: int, bound: int) -> bool:
    """Return whether all ranks are in a vote."""
    return (vote + 1) % bound == 0


def _quality(bench: Bench) -> None:
    """Train with each exchange, and compare the scores of the validation dates, and the time to a score."""
    given = bench.config.stragglers
    if given.store is None:
        bench.notes.append("The quality section was left out: give stragglers.store=STORE.")
        return
    plain = trials.quickstart_config(given.store, seed=0, steps=given.quality_steps, optim={"lr": 1e-3})
    model = ModelConfig(hidden=8, max_hidden=8, depth=1, points=0, precision=Precision.float32)
    plain = replace(plain, model=model, average=0.0, validate_every=10**6, checkpoint_every=10**6)
    # A seed decides the order of dates, the members and the stragglers. The fits, most of the work, are made once.
    start = trials.prepare(plain)
    scores: dict[str, list[float]] = {"start": [trials.score(start)] * given.seeds}
    times: dict[str, list[float]] = {}
    for seed in range(given.seeds):
        pace, wanted = Pace("random", given.ranks, given.step, given.late, seed), None
        for name, optim in _optims(bench).items():
            config = replace(plain, seed=seed, optim=OptimConfig(weight_decay=0.05, lr=1e-3, **optim))
            make, ends = _maker(bench, name, config.optim, pace)
            found = trials.train(config, start, given.ranks, make=make, score_every=given.bound)
            scores.setdefault(name, []).append(found.crps)
            # All-reduce comes first. Its score after two thirds of its steps is what the others have to reach.
            goal = 2 * given.quality_steps // 3 // given.bound * given.bound or given.bound
            wanted = found.curve[goal] if wanted is None else wanted
            reached = next((step for step, score in found.curve.items() if score <= wanted), None)
            times.setdefault(name, []).append(math.inf if reached is None else ends[reached - 1])
            log.info("quality: %s, seed %d: CRPS ratio %.5f", name, seed, found.crps)
            rows = bench.tables.setdefault("validation CRPS ratio by step", [])
            rows.append({"exchange": name, "seed": seed} | {str(k): round(v, 5) for k, v in found.curve.items()})
    _say_quality(bench, scores, times)


def _say_quality(bench: Bench, scores: dict[str, list[float]], times: dict[str, list[float]]) -> None:
    """Turn scores and simulated times, by exchange and seed, into figures and claims."""
    given = bench.config.stragglers
    for name, values in scores.items():
        bench.figures[f"validation CRPS ratio after {given.quality_steps} steps: {name}"] = Figure.of(values, "ratio")
        above = [100 * (a / b - 1) for a, b in zip(values, scores[ALLREDUCE], strict=True)]
        if name == "start":
            bench.notes.append(
                f"CRPS before the first step above all-reduce's after the last: {min(above):.2f} to {max(above):.2f} %."
            )
        elif name != ALLREDUCE:
            words = f"validation CRPS of {name} above all-reduce's, the worst of {given.seeds} seeds"
            bench.claim(words, max(above), "%", 0.5, at_most=True)
    for rival, target in ((VOTE, 0.5), (LOCAL, 0.85)):
        # A rival that never gets there has taken infinite time; so has the vote, which then loses.
        shares = [a / b if math.isfinite(a) else math.inf for a, b in zip(times[QUORUM], times[rival], strict=True)]
        words = f"simulated time to all-reduce's score after two thirds of its steps, vote of a quorum over {rival}"
        bench.claim(f"{words}, median of {given.seeds} seeds", statistics.median(shares), "times", target, at_most=True)
    rows = bench.tables.setdefault("simulated seconds to all-reduce's score after two thirds of its steps", [])
    for name, values in times.items():
        told = {f"seed {i}": round(value, 2) if math.isfinite(value) else "never" for i, value in enumerate(values)}
        rows.append({"exchange": name} | told)


def _optims(bench: Bench) -> dict[str, dict[str, Any]]:
    """Return the settings of the exchange of each entrant of the quality section, all-reduce first."""
    given = bench.config.stragglers
    quorum = {"quorum": str(quorum_of("auto", given.ranks)), "bound": given.bound}
    vote = {"exchange": ExchangeName.vote}
    averaged: dict[str, dict[str, Any]] = {name: {} for name in (LOCAL, DILOCO, PAPER, DROP)}
    return {ALLREDUCE: {"exchange": ExchangeName.allreduce}, VOTE: vote, **averaged, QUORUM: vote | quorum}


def _maker(
    bench: Bench, name: str, optim: OptimConfig, pace: Pace
) -> tuple[Callable[[Communicator], Exchange] | None, list[float]]:
    """Return what makes the exchange of an entrant, None if the settings say all, and the time of each step's end."""
    given = bench.config.stragglers
    steps, bound = given.quality_steps, given.bound
    if name in (ALLREDUCE, VOTE):
        return None, averages(pace, steps, 1)[1]
    if name in (LOCAL, DILOCO):
        kind = LocalSteps if name == LOCAL else DiLoCo
        return lambda group: kind(group, bound), averages(pace, steps, bound)[1]
    if name in (DROP, PAPER):
        held, ends = averages(pace, steps, bound)
        phases, sent, news = groups_of(given.ranks, given.group), dict[tuple[int, int], Tensor](), threading.Condition()

        def wagma(group: Communicator) -> Exchange:
            def rounds(weights: Tensor) -> ScriptedRounds:
                return ScriptedRounds(group.rank, phases, held, sent, news, weights)

            return WaitAvoiding(group, bound, rounds, drop=name == DROP)

        return wagma, ends
    ballots = int(optim.quorum)
    voters, ends = votes(pace, steps, lambda vote: given.ranks if _met(vote, bound) else ballots)
    script = dict(enumerate(voters))

    def quorum(group: Communicator) -> Exchange:
        exchange = quorum_vote(optim, group, ballots, join_simulated)
        exchange.script = script
        return exchange

    return quorum, ends


run = benchmark("Ranks that do not wait", {"speed": _speed, "scaling": _scaling, "quality": _quality})
