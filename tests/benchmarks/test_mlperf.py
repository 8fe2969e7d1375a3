"""Time to solution, tiny: three seeds whose logs the checker reads, and a race to a score that nobody reaches."""

import json
import math

import pytest
from stores import make_store

from benchmarks.mlperf import benchmark as mlperf
from ensemble_ml.config import BenchmarkConfig, MlperfConfig
from ensemble_ml.errors import UserError
from ensemble_ml.training.mllog import encoded

SETTINGS = ["model.linear=false", "model.local_terms=false", "data.members=[3]", "data.validation_members=3"]


def log(*scores, seconds=10.0, status="success"):
    """Return the log of a run."""
    events = [("run_start", 0, None, {})]
    events += [(key, 1, None, {"epoch_num": n}) for n in range(1, len(scores)) for key in ("epoch_start", "epoch_stop")]
    events += [("eval_error", 2, value, {"epoch_num": n}) for n, value in enumerate(scores)]
    events += [("run_stop", seconds, None, {"status": status})]
    return "".join(encoded(int(1e3 * at), "X", key, value, about) + "\n" for key, at, value, about in events)


def test_a_log_and_the_olympic_mean_by_hand():
    run = mlperf.outcome(log(0.9, 0.8, 0.7))
    assert (run.seconds, run.reached, run.scores, run.epochs) == (10.0, True, (0.9, 0.8, 0.7), 2)
    assert not mlperf.outcome(log(0.9, status="aborted")).reached
    assert mlperf.olympic([5, 100, 1, 3, 4]) == 4 and mlperf.olympic([1, 4]) == 2.5


@pytest.mark.slow
def test_tiny_run(tmp_path, monkeypatch):
    pytest.importorskip("mlperf_logging")
    monkeypatch.chdir(tmp_path)  # the checker writes a log beside it
    dates = [f"{year}-{month:02d}-01" for year in (2001, 2002) for month in range(1, 13)]
    store = make_store(tmp_path / "a.zarr", dates=dates, members=5, shape=(9, 16), bias=0.6, dispersion=0.6).path

    def settings(**changes):
        given = {"store": str(store), "until": 0.999, "seeds": 3, "steps": 2, "validate_every": 1, "train": SETTINGS}
        return BenchmarkConfig(
            benchmark="mlperf", output=str(tmp_path), repeats=1, only=changes.pop("only"),
            mlperf=MlperfConfig(**(given | changes)),
        )  # fmt: skip

    found = json.loads(mlperf.run(settings(only=["time"])).read_text())
    claims = {claim["claim"]: claim["value"] for claim in found["claims"]}
    assert claims["logs that pass the checker of mlperf_logging"] == claims["runs that reach the target"] == 3
    assert len(found["tables"]["Runs"]) == 3 and all(row["seconds"] > 0 for row in found["tables"]["Runs"])
    everyone = found["figures"]["time to solution, all runs"]
    assert found["figures"]["time to solution, olympic mean"]["median"] == everyone["median"]
    assert found["figures"]["staging"]["min"] > 0
    found = json.loads(mlperf.run(settings(only=["loading"], until=1e-6, storage_mb_s=100.0)).read_text())
    assert math.isnan(float(found["claims"][0]["value"] or "nan")) and not found["claims"][0]["holds"]
    assert any("not all runs reached" in note for note in found["notes"])


def test_bad_settings(tmp_path):
    with pytest.raises(UserError, match=r"mlperf\.store"):
        mlperf.run(BenchmarkConfig(benchmark="mlperf", output=str(tmp_path)))
    with pytest.raises(UserError, match=r"mlperf\.until"):
        MlperfConfig(until=1.0)
