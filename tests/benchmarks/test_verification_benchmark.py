"""The benchmark of scoring runs small, and both entrants give the same scores."""

import json
import math

import pytest

from benchmarks.verification import benchmark as verification
from benchmarks.verification.benchmark import run
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize


@pytest.mark.slow
def test_both_entrants_agree(tmp_path):
    found = json.loads(
        run(BenchmarkConfig("verification", str(tmp_path), repeats=1, size=BenchmarkSize.tiny)).read_text()
    )
    assert [claim["unit"] for claim in found["claims"]] == ["times", "MB", "1"]
    assert found["claims"][2]["value"] < 1e-5
    assert found["figures"]["ours: peak memory"]["max"] > 50


@pytest.mark.parametrize("last", [2.0, math.nan])
def test_scores_that_differ_are_a_claim_that_does_not_hold(tmp_path, monkeypatch, last):
    """In any round, and where one of them has none."""
    answers = iter([[1.0, last], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])

    def measured(*_, **__):
        return {"seconds": 1.0, "peak_bytes": 1.0, "scores": next(answers)}

    monkeypatch.setattr(verification.process, "run", measured)
    path = run(BenchmarkConfig("verification", str(tmp_path), repeats=2, size=BenchmarkSize.tiny))
    assert [claim["holds"] for claim in json.loads(path.read_text())["claims"]] == [False, True, False]
