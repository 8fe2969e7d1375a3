"""benchmark=planner, small enough for a test: its figures hang together."""

import json

import pytest

from ensemble_ml.benchmarks import planner
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, PlannerBenchmark


def test_two_ranks_on_the_loopback(tmp_path):
    settings = PlannerBenchmark(ranks=2, rates=[], seconds=0.1)
    config = BenchmarkConfig(
        benchmark="planner", output=str(tmp_path), repeats=1, size=BenchmarkSize.tiny, planner=settings
    )
    found = json.loads(planner.run(config).read_text())
    rows = found["tables"]["the loopback"]
    assert {(r["data"], r["lat"], r["lon"]) for r in rows} == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert sum(r["picked"] == "yes" for r in rows) == 1
    for row in rows:
        parts = sum(row[f"{key}, ms"] for key in ("compute", "halo", "norm", "exposed"))
        assert row["predicted, ms"] == pytest.approx(parts, abs=0.03)
    picked = next(r for r in rows if r["picked"] == "yes")
    assert picked["predicted, ms"] == min(r["predicted, ms"] for r in rows)
    behind = 100 * (picked["measured, ms"] / min(r["measured, ms"] for r in rows) - 1)
    assert found["claims"][1]["value"] == pytest.approx(behind, abs=1)
    assert found["claims"][0]["value"] == pytest.approx(max(abs(r["difference, %"]) for r in rows), abs=0.1)
