"""The benchmark of the spatial partition, tiny."""

from __future__ import annotations

import json

import pytest

from ensemble_ml.benchmarks import spatial
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, SpatialConfig


def found_by(tmp_path, only=None):
    config = BenchmarkConfig(
        benchmark="spatial", output=str(tmp_path), repeats=1, size=BenchmarkSize.tiny, only=only,
        spatial=SpatialConfig(rates=[]),
    )  # fmt: skip
    found = json.loads(spatial.run(config).read_text())
    return found, {c["claim"]: c for c in found["claims"]}


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
