"""The benchmark of shared kernels, tiny."""

from __future__ import annotations

import json

import pytest
from stores import make_store

from benchmarks.bank import benchmark as bank
from ensemble_ml.config import BankBenchmark, BenchmarkConfig, BenchmarkSize


def results(tmp_path, only, **settings):
    config = BenchmarkConfig(
        benchmark="bank", output=str(tmp_path), repeats=2, only=only, size=BenchmarkSize.tiny,
        bank=BankBenchmark(**settings),
    )  # fmt: skip
    return json.loads(bank.run(config).read_text())


def test_a_step_with_a_bank_and_without(tmp_path):
    figures = results(tmp_path, ["step"])["figures"]
    assert figures["training step, bank over dense"]["min"] > 0
    assert 6 < figures["weights of the U-Net, dense over bank"]["median"] < 10


@pytest.mark.slow("traced")
def test_hosts_that_vote_send_a_fraction(tmp_path, monkeypatch):
    monkeypatch.setattr(bank, "available", lambda: "for a test")
    found = results(tmp_path, ["links"], ranks=2)
    [claim] = found["claims"]
    assert 4 < claim["value"] < 12 and "Loopback instead of links" in found["notes"][0]


@pytest.mark.slow("traced")
def test_tiny_trainings(tmp_path):
    dates = [f"{year}-{month:02d}-{day:02d}" for year in (2001, 2002) for month in (1, 4, 7, 10) for day in (1, 15)]
    store = str(make_store(tmp_path / "a.zarr", dates=dates, members=6, shape=(17, 32), bias=0.6).path)
    found = results(tmp_path, ["quality"], store=store, seeds=1, steps=3)
    scores = {name: figure["median"] for name, figure in found["figures"].items() if name.startswith("crps_ratio")}
    assert len(scores) == 6 and all(0 < score < 2 for score in scores.values()) and len(found["claims"]) == 4
    again = results(tmp_path, ["quality"], store=store, seeds=1, steps=3)
    assert again["figures"] == found["figures"]  # nothing is trained a second time
