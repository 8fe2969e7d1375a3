"""The benchmark of workflow engines, tiny, with those that are installed; make always is."""

import json

import pytest

from benchmarks.workflows import benchmark, engines
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize


@pytest.mark.slow
def test_tiny_run(tmp_path):
    config = BenchmarkConfig(benchmark="workflows", output=str(tmp_path), repeats=1, size=BenchmarkSize.tiny)
    found = json.loads(benchmark.run(config).read_text())
    installed = [name for name, needs in benchmark._NEEDS.items() if all(map(engines.find, needs))]
    assert "make -j2" in installed and len(found["notes"]) == len(benchmark.ENGINES) - len(installed)
    assert {name.partition(":")[0] for name in found["figures"]} == set(installed)
    assert all(figure["median"] > 0 for figure in found["figures"].values())
    (rows,) = found["tables"].values()
    after = {row["engine"]: row["what depends on a task that failed"] for row in rows}
    goes_on = {"Merlin --local", "Merlin, redis"}
    assert after == {name: "runs" if name in goes_on else "does not run" for name in installed}
    status = {row["engine"]: row["status"] for row in rows}
    assert all((status[name] == 0) == (name in goes_on) for name in installed)


@pytest.mark.slow
@pytest.mark.skipif(not all(map(engines.find, benchmark._NEEDS["ecFlow"])), reason="ecFlow is not installed")
def test_a_task_that_is_slow_to_fail_again_is_waited_for(tmp_path, monkeypatch):
    """On a busy machine the second try takes longer than the moment that what depends on it gets as its chance."""
    monkeypatch.setattr(benchmark.Place, "command", lambda self, number: f"test {number} != 1 || (sleep 3; exit 3)")
    place = benchmark.Place(tmp_path, 1, bad=1)
    assert benchmark.ENGINES["ecFlow"](place) == 1 and not place.ended()
