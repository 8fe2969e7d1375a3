"""The benchmark of ranks that do not wait, tiny, over the loopback; and its simulated clock against cases by hand."""

from __future__ import annotations

import json

import pytest
import torch
from parallel.simulated import on_ranks
from stores import make_store
from torch import nn

from benchmarks.stragglers import benchmark as stragglers
from benchmarks.stragglers.clock import Pace, votes
from benchmarks.stragglers.local import LocalSteps
from ensemble_ml.config import BenchmarkConfig, StragglersConfig
from ensemble_ml.errors import UserError
from ensemble_ml.optim import Lion


@pytest.mark.slow
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
    assert len(ratios) == 5 and all(0 < value < 2 for value in ratios.values())
    assert len(set(ratios.values())) == 5, "two entrants did the same"


def test_the_clock_by_hand():
    """Rank 2 takes 2 s, the others 1 s: it is in every other vote of two, and in all votes of three."""
    pace = Pace("slow", 3, step=1.0)
    assert votes(pace, 4, lambda vote: 2) == ([[0, 1], [0, 1, 2], [0, 1], [0, 1, 2]], 4.0)
    assert votes(pace, 2, lambda vote: 3) == ([[0, 1, 2], [0, 1, 2]], 4.0)
    assert votes(pace, 2, lambda vote: 3 if vote == 1 else 2)[0] == [[0, 1], [0, 1, 2]]
    late = [rank for step in range(8) for rank in range(3) if Pace("random", 3, 1.0, 5.0).seconds(rank, step) == 6]
    assert len(late) == 8 and len(set(late)) > 1


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
