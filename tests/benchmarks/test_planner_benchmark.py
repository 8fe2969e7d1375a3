"""benchmark=planner, small enough for a test: its figures hang together."""

import fcntl
import json
import threading
from pathlib import Path
from types import SimpleNamespace

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


def test_hosts_of_another_program_are_waited_for(monkeypatch, tmp_path):
    """Their names are the same: whoever made hosts removed those of others, of a test beside it or of a benchmark."""
    ran, waits = [], threading.Event()
    monkeypatch.setattr(hosts, "_LOCK", tmp_path / "lock")
    monkeypatch.setattr(hosts.log, "info", lambda _: waits.set())
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(hosts, "subprocess", SimpleNamespace(run=lambda words, **_: ran.append(words[2]) or done))

    def use():
        with linked(2, "none"):
            ran.append("used")

    with hosts._LOCK.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        other = threading.Thread(target=use)
        other.start()
        assert waits.wait(60) and not ran
    other.join(60)
    assert ran == ["up", "used", "down"]


@pytest.mark.skipif(bool(available()), reason=f"hosts of their own cannot be made: {available()}")
def test_a_host_has_its_share_of_a_core_and_no_more(tmp_path):
    """However idle the other is: what it leaves is lost."""
    if fair_share(1000) is None:
        pytest.skip("control groups cannot be made")
    spin = (
        "import os, pathlib, sys, time\n"
        "start, before = time.monotonic(), time.process_time()\n"
        "while os.environ['RANK'] == '0' and time.process_time() - before < 0.5: pass\n"
        "(pathlib.Path(sys.argv[1]) / os.environ['RANK']).write_text(str(time.monotonic() - start))"
    )
    with linked(2, "none", 0.25) as two:
        two.run(python("-c", spin, str(tmp_path)), seconds=60)
    busy, idle = (float((tmp_path / rank).read_text()) for rank in "01")
    assert busy > 1.5 and idle < busy  # half a second of the processor takes 2 s, and no less beside other programs
    assert not list(Path("/sys/fs/cgroup").glob("eml*")) + list(Path("/sys/fs/cgroup/cpu").glob("eml*"))
