"""The benchmark of scoring runs small, and both entrants give the same scores."""

import json

from ensemble_ml.benchmarks.verification import run
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize


def test_both_entrants_agree(tmp_path):
    found = json.loads(
        run(BenchmarkConfig("verification", str(tmp_path), repeats=1, size=BenchmarkSize.tiny)).read_text()
    )
    assert float(found["notes"][0].rpartition(" ")[2].rstrip(".")) < 1e-5
    assert [claim["unit"] for claim in found["claims"]] == ["times", "MB"]
    assert found["figures"]["ours: peak memory"]["max"] > 50
