"""The benchmark of ranks that do not wait, tiny, over the loopback; and its simulated clock against cases by hand."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from parallel.simulated import on_ranks
from stores import make_store
from torch import nn

from benchmarks.common.simulated import Room, SimulatedCommunicator
from benchmarks.stragglers import benchmark as stragglers
from benchmarks.stragglers.averaging import (
    DiLoCo,
    GroupRounds,
    LocalSteps,
    ScriptedRounds,
    Starts,
    WaitAvoiding,
    combined,
    groups_of,
)
from benchmarks.stragglers.clock import Pace, averages, votes
from ensemble_ml.config import BenchmarkConfig, StragglersConfig
from ensemble_ml.distributed.hub import LocalLink
from ensemble_ml.errors import UserError
from ensemble_ml.optim import Lion


@pytest.mark.slow("traced")
def test_tiny_run(tmp_path):
    """Both sections; the quality is of four steps, so that only the way there is tested."""
    dates = [f"{year}-{month:02d}-01" for year in (2001, 2002) for month in range(1, 13)]
    store = make_store(tmp_path / "a.zarr", dates=dates, members=10, shape=(9, 16), bias=0.6, dispersion=0.6).path
    settings = StragglersConfig(
        rate=None, steps=4, bound=2, step=0.01, late=0.1, elements=4096, store=str(store), seeds=1, quality_steps=4
    )  # fmt: skip
    config = BenchmarkConfig(benchmark="stragglers", output=str(tmp_path), repeats=1, stragglers=settings)
    found = json.loads(stragglers.run(config).read_text())
    claims = {claim["claim"]: claim for claim in found["claims"]}
    assert claims["replicas equal bit for bit after every run of a vote"]["holds"]
    faster = "one rank of all late in each step: a vote of 3 of 4: steps a second over the vote of all"
    assert claims[faster]["value"] > 1
    ratios = {name: figure["median"] for name, figure in found["figures"].items() if "CRPS ratio" in name}
    assert len(ratios) == 8 and all(0 < value < 2 for value in ratios.values())
    assert len(set(ratios.values())) == 8, "two entrants did the same"
    table = found["tables"]["simulated time, without that of communication"]
    rates = {tuple(row.values())[:3]: row["steps a second"] for row in table}
    random = "one rank of all late in each step"
    assert rates[64, random, "vote of a quorum of three quarters"] > rates[64, random, "ranks that wait in every step"]


def test_the_clock_by_hand():
    """Rank 2 takes 2 s, the others 1 s: it is in every other vote of two, and in all votes of three."""
    pace = Pace("slow", 3, step=1.0)
    assert votes(pace, 4, lambda vote: 2) == ([[0, 1], [0, 1, 2], [0, 1], [0, 1, 2]], [1.0, 2.0, 3.0, 4.0])
    assert votes(pace, 2, lambda vote: 3) == ([[0, 1, 2], [0, 1, 2]], [2.0, 4.0])
    assert votes(pace, 2, lambda vote: 3 if vote == 1 else 2)[0] == [[0, 1], [0, 1, 2]]
    late = [rank for step in range(8) for rank in range(3) if Pace("random", 3, 1.0, 5.0).seconds(rank, step) == 6]
    assert len(late) == 8 and len(set(late)) > 1


def test_who_is_late_by_hand():
    """Rank 1 takes 2 s, rank 0 1 s, and they meet after every third step."""
    assert averages(Pace("slow", 2, step=1.0), 6, 3) == (
        [[0, -1], [1, 0], [2, 0], [3, 2], [4, 3], [5, 3]],
        [2.0, 4.0, 6.0, 8.0, 10.0, 12.0],
    )
    assert averages(Pace("slow", 2, step=1.0), 2, 1)[1] == [2.0, 4.0]


def test_groups_reach_every_rank():
    assert groups_of(4, 2) == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    for ranks, size in ((9, 3), (8, 2), (4, 4)):
        known = [{rank} for rank in range(ranks)]
        for phase in groups_of(ranks, size):
            assert sorted(rank for group in phase for rank in group) == list(range(ranks))
            known = [set().union(*(known[i] for i in next(g for g in phase if rank in g))) for rank in range(ranks)]
        assert all(len(heard) == ranks for heard in known)
    with pytest.raises(UserError, match="groups of 2: the number of ranks, 6, is not a power of 2"):
        groups_of(6, 2)


@pytest.mark.parametrize(
    ("drop", "place", "mean"), [(False, 0, 3.0), (False, 1, 5.0), (True, 0, 1.0), (True, 1, (1 + 9) / 2)]
)
def test_what_a_rank_makes_of_its_group(drop, place, mean):
    """Rank 0 was in time with 1; rank 1 had sent 5 of an earlier step, and has 9 now."""
    own = torch.tensor([[1.0], [9.0]])[place]
    sent = [(torch.tensor([1.0]), 7), (torch.tensor([5.0]), 6)]
    assert combined(own, sent, place, 7, drop=drop).item() == mean


def steps_alone(exchange, rank, steps):
    """Weights after each step of ranks whose steps are 1, 10, 100, ..."""
    p = nn.Parameter(torch.zeros(2))
    exchange.attach(Lion([p]))
    seen = []
    for step in range(steps):
        exchange.begin(step)
        with torch.no_grad():
            p += 10.0**rank
        exchange.after_step()
        seen.append(p.detach()[0].item())
    exchange.close()
    return seen


def test_diloco_by_hand():
    """The mean moves by 5.5 in each interval of one step: first by 0.7 * 1.9 * 5.5, then with the momentum."""
    found = on_ranks(2, lambda group: steps_alone(DiLoCo(group, 1), group.rank, 2))
    first = 0.7 * (5.5 + 0.9 * 5.5)
    assert found[0] == found[1] == pytest.approx([first, first + 0.7 * (5.5 + 0.9 * (0.9 * 5.5 + 5.5))])


@pytest.mark.parametrize("scripted", [False, True])
def test_wagma_of_ranks_in_time_averages_its_groups(scripted):
    """Two phases of pairs among four ranks, then a meeting."""
    sent, news, starts = {}, threading.Condition(), Starts(4)
    phases = groups_of(4, 2)
    ready = threading.Barrier(4)

    def work(group):
        mine = [next(pair for pair in phase if group.rank in pair) for phase in phases]

        def rounds(weights):
            if scripted:
                return ScriptedRounds(group.rank, phases, [[k] * 4 for k in range(3)], sent, news, weights)
            pairs = [SimulatedCommunicator(rooms[tuple(pair)], pair.index(group.rank)) for pair in mine]
            return Patient(LocalLink(starts, group.rank), pairs, lambda step: step == 3, weights)

        class Patient(GroupRounds):
            """The averages begin when all ranks have sent, so that no rank is late."""

            def publish(self, step, weights):
                self._sent = (weights, step)
                ready.wait()
                super().publish(step, weights)

        return steps_alone(WaitAvoiding(group, 3, rounds, drop=True), group.rank, 3)

    rooms = {tuple(pair): Room(2) for phase in phases for pair in phase}
    steps = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    first = steps.view(2, 2).mean(1).repeat_interleave(2)  # ranks 0 and 1, then 2 and 3
    second = (first + steps).view(2, 2).mean(0).repeat(2)  # ranks 0 and 2, then 1 and 3
    wanted = torch.stack([first, second, (second + steps).mean().expand(4)], 1)
    torch.testing.assert_close(torch.tensor(on_ranks(4, work)), wanted)
    starts.close()


def test_local_steps_average_weights_at_meetings_alone():
    def work(group):
        p = nn.Parameter(torch.zeros(3))
        exchange = LocalSteps(group, 2)
        optimizer = Lion([p], lr=1.0, weight_decay=0.0, exchange=exchange)
        seen = []
        for step in range(2):
            exchange.begin(step)
            p.grad = torch.full((3,), 1.0 if group.rank else -1.0)
            exchange.finish()
            optimizer.step()
            exchange.after_step()
            seen.append(float(p[0].detach()))
        return seen

    assert on_ranks(2, work) == [[1.0, 0.0], [-1.0, 0.0]]


def test_steps_that_do_not_end_at_a_meeting():
    with pytest.raises(UserError, match=r"stragglers.steps=31: must be a multiple of stragglers.bound=10"):
        StragglersConfig(steps=31)
