"""The benchmark of compaction, tiny."""

from __future__ import annotations

import json

import pytest
from stores import make_store

from benchmarks.compact import benchmark as compact
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, CompactBenchmark


def results(tmp_path, only, **settings):
    config = BenchmarkConfig(
        benchmark="compact", output=str(tmp_path), repeats=2, only=only, size=BenchmarkSize.tiny,
        compact=CompactBenchmark(**settings),
    )  # fmt: skip
    return json.loads(compact.run(config).read_text())


@pytest.mark.slow("traced")
def test_a_tiny_run(tmp_path):
    dates = [f"{year}-{month:02d}-{day:02d}" for year in (2001, 2002) for month in range(1, 13) for day in (1, 15)]
    shape = {"members": 10, "shape": (17, 32), "bias": 0.6, "dispersion": 0.6}
    store = str(make_store(tmp_path / "a.zarr", dates=dates, **shape).path)
    run = tmp_path / "compact" / "runs" / "seed0-whole"
    settings = {"store": store, "seeds": 1, "steps": 4, "speedup": 1.05, "checkpoint": str(run)}
    found = results(tmp_path, ["quality", "predict"], **settings)
    scores = {name: figure["median"] for name, figure in found["figures"].items() if name.startswith("crps_ratio")}
    assert len(scores) == 6 and all(0 < score < 2 for score in scores.values())
    passes = {name: figure["min"] for name, figure in found["figures"].items() if name.startswith("forward pass")}
    assert len(passes) == 6 and min(passes, key=passes.get).endswith("none")
    assert found["figures"]["predict as a whole, compacted"]["min"] > 0


@pytest.mark.slow("traced")
def test_speed_at_a_tiny_size(tmp_path):
    figures = results(tmp_path, ["speed"])["figures"]
    ms = {name.rpartition(", ")[2]: figure["min"] for name, figure in figures.items() if "float32" in name}
    assert ms["none"] < ms["compacted"] < ms["whole"]
