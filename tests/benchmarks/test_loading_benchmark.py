"""The loading race at its smallest: entrants are checked, counted, and ours reads what its plan says."""

import json
import shutil

import pytest

from ensemble_ml.benchmarks import loading
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the emulated storage")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(loading, "_CACHES", (0.25, 0.5, 1.0))
    monkeypatch.setattr(loading, "_TUNED", (0,))
    monkeypatch.setattr(loading, "streaming_packages", lambda folder: None)


@pytest.mark.slow
def test_race(tmp_path, short):
    config = BenchmarkConfig(
        benchmark="loading", output=str(tmp_path / "out"), repeats=1, size=BenchmarkSize.tiny, workspace=str(tmp_path)
    )
    path = loading.run(config)
    content = json.loads(path.read_text())
    assert content["figures"]["dataloader raw: read"]["median"] == pytest.approx(3, rel=0.01)
    claims = {claim["claim"]: claim for claim in content["claims"]}
    assert claims["bytes by which counters differ from the plan, same bytes"]["holds"]
    assert any("could not be installed" in note for note in content["notes"])
