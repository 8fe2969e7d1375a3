"""The benchmark of trainers that compete, tiny, over the loopback; and its rival, the published rule."""

from __future__ import annotations

import json

import pytest
from stores import make_store

from benchmarks.tournament import benchmark as tournament
from ensemble_ml.config import BenchmarkConfig, ContestConfig
from ensemble_ml.errors import UserError


def results(tmp_path, only, **settings):
    config = BenchmarkConfig(
        benchmark="tournament", output=str(tmp_path), repeats=1, only=only, tournament=ContestConfig(**settings)
    )
    found = json.loads(tournament.run(config).read_text())
    return found["figures"], {claim["claim"]: claim for claim in found["claims"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two dates a month for training, of which slow storage is read as well, and eight for validation."""
    months = [*((2001, month) for month in range(1, 13)), *((2002, month) for month in (1, 4, 7, 10))]
    dates = [f"{year}-{month:02d}-{day:02d}" for year, month in months for day in (1, 15)]
    folder = tmp_path_factory.mktemp("store")
    return str(make_store(folder / "a.zarr", dates=dates, members=6, shape=(9, 16), bias=0.6, dispersion=0.6).path)


def test_the_simulation(tmp_path):
    figures, claims = results(tmp_path, None)
    assert figures["4 trainers, pairs: tournaments until all have the best"]["median"] >= 2
    assert figures["64 trainers, a quarter of them NaN: NaN after one tournament in pairs"]["max"] < 16
    [claim] = claims.values()
    assert 1 <= claim["value"] < 3


@pytest.mark.slow("traced")
def test_a_trainer_with_nan_spreads_by_the_published_rule_and_not_by_ours(store, tmp_path):
    figures, claims = results(tmp_path, ["nan"], store=store, seeds=1, steps=12, every=4)
    assert claims["trainers with NaN after the next tournament"]["holds"]
    # NaN is adopted, and the trainer that brings it takes the other's weights: it wanders, and is never gone.
    assert figures["trainers with NaN after tournament 3, published"]["median"] >= 1
    assert figures["trainers with NaN after tournament 1, ours"]["max"] == 0


@pytest.mark.slow("traced")
def test_a_tiny_run(store, tmp_path):
    settings = {"seeds": 1, "steps": 6, "every": 2, "rate": None, "store": store, "samples": 24, "step": 0.01}
    figures, claims = results(tmp_path, ["quality", "rates", "cost", "storage"], apart=2, mb_s=5.0, **settings)
    # The sizes, eight bytes a trainer, come on top of half.
    assert claims["bytes of a tournament beside the published rule's"]["value"] == pytest.approx(0.5, abs=1e-3)
    assert claims["times that parted trainers read each byte"]["value"] == pytest.approx(1, abs=0.01)
    scores = {name: figure["median"] for name, figure in figures.items() if name.startswith("score after")}
    assert len(scores) == 14 and all(0 < score < 2 for score in scores.values())
    assert figures["seconds of a tournament, 4 trainers, the loopback, every 2 steps"]["min"] > 0


def test_steps_without_three_tournaments():
    with pytest.raises(UserError, match=r"tournament.steps=40: must be a multiple of tournament.every=25"):
        ContestConfig(steps=40)
