"""The benchmark of the spatial partition, tiny."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.hosts import Hosts
from benchmarks.spatial import benchmark as spatial
from benchmarks.spatial import steps
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, SpatialConfig


def found_by(tmp_path, only=None):
    config = BenchmarkConfig(
        benchmark="spatial", output=str(tmp_path), repeats=1, size=BenchmarkSize.tiny, only=only,
        spatial=SpatialConfig(rates=[]),
    )  # fmt: skip
    found = json.loads(spatial.run(config).read_text())
    return found, {c["claim"]: c for c in found["claims"]}


@pytest.mark.slow
def test_steps_tiny(tmp_path):
    found, claims = found_by(tmp_path, ["scaling", "links"])
    assert [c["value"] for name, c in claims.items() if name.startswith("bytes of halos")] == [0]
    assert sum(name.startswith("strong scaling of one sample") for name in claims) == 1
    assert any("links were left out" in note for note in found["notes"])


@pytest.mark.slow
def test_other_sections_tiny(tmp_path):
    found, claims = found_by(tmp_path, ["exactness", "networks", "rivals", "periodic", "memory", "gpu"])
    exact = [c for name, c in claims.items() if name.startswith("largest error")]
    assert len(exact) >= 5 and all(c["holds"] for c in exact)
    assert all(c["holds"] for name, c in claims.items() if name.startswith("one step of"))
    [memory] = [c for name, c in claims.items() if name.startswith("peak activation memory")]
    assert -50 < memory["value"] < 100  # small models are mostly what no rank shares
    [rivals] = [rows for title, rows in found["tables"].items() if title.startswith("Split convolutions")]
    zeros = [row["forward"] for row in rivals if row["padding"] == "zeros"]
    assert min(zeros) > 1e-3, "DTensor became right for split latitude or longitude: say so"


def test_ratios_over_links_are_theirs_over_ours_round_by_round(tmp_path, monkeypatch):
    seconds = {steps.OURS: [1.0, 2.0, 2.0], steps.OVERLAP: [0.5, 1.0, 2.0], steps.GATHER: [2.0, 4.0, 6.0]}
    found = {
        "seconds": seconds, "core seconds": {key: [0.1] for key in seconds}, "halo share": {}, "formula": 7, "off": 0,
    }  # fmt: skip
    bench = spatial.SpatialBench(BenchmarkConfig(benchmark="spatial", output=str(tmp_path)), tmp_path)
    monkeypatch.setattr(spatial.SpatialBench, "job", lambda *_, **__: found)
    spatial._on_links(bench, Hosts(2, "1gbit"), (2, 1), "float32", gathering=True)
    words = "2 hosts at 1 Gbit, 2x1, float32"
    claims = {claim.claim: claim.value for claim in bench.claims}
    assert claims[f"{words}: steps a second over gathering the rows, the best rival that is right"] == 4.0
    assert bench.notes == [f"{words}: overlap makes a step 2.00 times as fast."]
    assert bench.figures[f"step, {words}: {steps.GATHER}"].median == 4000.0


def test_the_periodic_path_is_held_to_the_faster_of_the_plain_forms(tmp_path, monkeypatch):
    found = {"ours": [1.05], "plain, one way": [1.0], "plain, another": [2.0]}
    bench = spatial.SpatialBench(BenchmarkConfig(benchmark="spatial", output=str(tmp_path)), tmp_path)
    monkeypatch.setattr(spatial.SpatialBench, "job", lambda *_, **__: found)
    spatial._periodic(bench)
    [claim] = bench.claims
    assert claim.value == pytest.approx(5.0) and not claim.holds
