"""benchmark=planner, small enough for a test: its figures hang together."""

import json
from pathlib import Path

import pytest

from benchmarks.common import hosts
from benchmarks.common.hosts import available, fair_share, linked, python
from benchmarks.planner import benchmark as planner
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, PlannerBenchmark


@pytest.mark.slow
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


def test_hosts_share_out_the_cores_only_where_there_are_too_few(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "cores", lambda: 2)
    for able in (True, False):
        monkeypatch.setattr(hosts, "_control_groups", lambda able=able: able)
        assert fair_share(2) is None and fair_share(4) == (0.5 if able else None)
    monkeypatch.undo()
    assert not hosts._control_groups(tmp_path / "nothing")
    (tmp_path / "cpu").mkdir()
    assert hosts._control_groups(tmp_path)


@pytest.mark.skipif(bool(available()), reason=f"hosts of their own cannot be made: {available()}")
def test_a_host_has_its_share_of_a_core_and_no_more(tmp_path):
    """However idle the other is: what it leaves is lost."""
    if fair_share(1000) is None:
        pytest.skip("control groups cannot be made")
    spin = (
        "import os, pathlib, sys, time\n"
        "start = time.monotonic()\n"
        "while os.environ['RANK'] == '0' and time.monotonic() - start < 2: pass\n"
        "(pathlib.Path(sys.argv[1]) / os.environ['RANK']).write_text(str(time.process_time()))"
    )
    with linked(2, "none", 0.25) as two:
        two.run(python("-c", spin, str(tmp_path)), seconds=60)
    busy, idle = (float((tmp_path / rank).read_text()) for rank in "01")
    assert idle < 0.25 < busy < 0.75  # start-up included
    assert not list(Path("/sys/fs/cgroup").glob("eml*")) + list(Path("/sys/fs/cgroup/cpu").glob("eml*"))
