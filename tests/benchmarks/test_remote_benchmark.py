"""The benchmark of archives by URL: its archive, its server's faults, and its race in small."""

import json

import pytest

from benchmarks.remote import benchmark as remote
from benchmarks.remote.entrants import ours
from benchmarks.remote.faults import meet_faults
from benchmarks.remote.server import Plan, serving
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize

pytest.importorskip("obstore", reason="URLs need the extra `remote`")


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return remote.archive(tmp_path_factory.mktemp("remote") / "ens.zarr", 2, members=2, shape=(6, 12))


@pytest.mark.slow
def test_after_a_fault_the_store_is_the_same_or_stays(archive, tmp_path):
    found = meet_faults(archive, tmp_path, 8, seed=3)
    assert sum(found.values()) == 8 and min(found.values()) > 0


def test_prepare_reads_each_chunk_of_the_slice_once(archive, tmp_path):
    plan = Plan()
    with serving(archive.parent, plan) as url:
        found = ours(f"{url}/{archive.name}", str(tmp_path / "a.zarr"))
    chunks = [one for one in plan.asked if one.rsplit("/", 1)[-1].count(".") >= 4]
    assert len(chunks) == len(set(chunks)) == 2 * 2 * 4  # dates, leads, variables
    assert remote.wanted_bytes(archive) < found["bytes"] and found["requests"] == len(plan.asked)


@pytest.mark.slow
def test_the_race_without_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "available", lambda: "not here")
    config = BenchmarkConfig("remote", str(tmp_path), 1, BenchmarkSize.tiny, ["speed"])
    found = json.loads(remote.run(config).read_text())
    assert found["figures"]["prepare"]["median"] > 0 and "not here" in " ".join(found["notes"])
    [claim] = [one for one in found["claims"] if one["claim"].startswith("bytes that prepare reads")]
    assert claim["holds"]
