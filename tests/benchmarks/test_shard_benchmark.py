"""The benchmark of large networks, tiny: what ranks measure of sharded weights, and pretraining on members."""

from __future__ import annotations

import json

import pytest
from stores import make_store

from benchmarks.shard import benchmark as shard
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, ShardConfig
from ensemble_ml.errors import UserError


def results(tmp_path, only, **settings):
    config = BenchmarkConfig(
        benchmark="shard", output=str(tmp_path), repeats=1, only=only, size=BenchmarkSize.tiny,
        shard=ShardConfig(**settings),
    )  # fmt: skip
    found = json.loads(shard.run(config).read_text())
    return found, {claim["claim"]: claim for claim in found["claims"]}


@pytest.mark.slow("traced")
def test_sharded_weights(tmp_path):
    small = {"shape": [2, 16, 32], "hidden": [16], "ranks": [2]}
    found, claims = results(tmp_path, ["exactness", "memory", "steps"], **small)
    exact = [claim for words, claim in claims.items() if words.startswith("sharded = one process")]
    assert len(exact) == 4 and all(claim["holds"] and claim["value"] < 1e-6 for claim in exact)
    [plan] = [claim for words, claim in claims.items() if "the plan is off by" in words]
    planned, measured = (
        [f["median"] for name, f in found["figures"].items() if name.endswith(end)] for end in ("planned", "measured")
    )
    assert plan["value"] == pytest.approx(max(100 * abs(a / b - 1) for a, b in zip(planned, measured, strict=True)))
    assert plan["value"] < 40  # on so tiny a grid, kernels take more than fields
    held = {name: f["median"] for name, f in found["figures"].items() if name.startswith("weights, gradients and mom")}
    ours, whole = (next(v for name, v in held.items() if name.endswith(end)) for end in ("by block", "DDP"))
    assert len(held) == 4 and 0.5 < ours / whole < 0.7  # a small model has more beside its U-Net
    times = [f["median"] for name, f in found["figures"].items() if name.startswith("step, hidden 16, 2 ranks")]
    assert len(times) == 4 and min(times) > 0


@pytest.mark.slow("traced")
def test_without_a_gpu_and_without_a_store(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found, claims = results(tmp_path, ["plan", "pretraining", "gpu"])
    needed, efficiency = claims.values()
    assert "weights, 7 x 361 x 720, bfloat16, recomputed: a rank of 8 needs" in needed["claim"] and needed["holds"]
    [rows] = found["tables"].values()
    assert [row["devices"] for row in rows] == [8 * row["dates a step"] for row in rows] == [8 * 2**k for k in range(8)]
    # Groups add up their gradients, which costs a little.
    assert 50 < efficiency["value"] < 100 and "to 1024 devices" in efficiency["claim"]
    assert [note.split(":")[0] for note in found["notes"]] == ["On paper", "Pretraining was left out", "No GPU here"]
    weights, seconds = shard.large_step("cpu", (2, 8, 16), 1, hidden=8, max_hidden=8, depth=1)
    assert weights > 1000 and len(seconds) == 1 and seconds[0] > 0


@pytest.mark.slow("traced")
def test_pretraining(tmp_path):
    dates = [
        f"{year}-{month:02d}-{day:02d}" for year in (2001, 2002, 2003) for month in (1, 7) for day in (1, 9, 17, 25)
    ]
    store = make_store(tmp_path / "a.zarr", dates=dates, members=10, shape=(9, 16), bias=0.6, dispersion=0.6).path
    settings = {"store": str(store), "labelled": [4], "steps": [2, 3], "seeds": 2}
    found, claims = results(tmp_path, ["pretraining"], **settings)
    assert set(claims) == {
        f"4 labelled dates: {score} of pretrained on members below from scratch, same number of steps{end}"
        for score in ("CRPS", "spread RMSE")
        for end in ("", ": lower end of the interval")
    }
    runs = tmp_path / "shard" / "runs"
    logs = {path.name: (path / "log.jsonl").read_text() for path in runs.iterdir() if (path / "log.jsonl").exists()}
    assert len(logs) == 2 * (1 + 3)
    # What is trained on what, for how long.
    steps = {name: max(json.loads(line).get("step", 0) for line in text.splitlines()) for name, text in logs.items()}
    assert (
        steps["members-seed0"] == 2
        and steps["pretrained_on_members-4-seed0"] == 3
        and steps["from_scratch-4-seed0"] == 5
    )
    scores = {name: f for name, f in found["figures"].items() if "over the raw members'" in name}
    assert len(scores) == 6 and all(0 < f["median"] < 1.5 for f in scores.values())
    # A second run takes the trainings that are there.
    assert results(tmp_path, ["pretraining"], **settings)[0]["figures"] == found["figures"]


def test_settings():
    with pytest.raises(UserError, match=r"shard\.steps=\[80\]: give the steps on members, and those on the truth"):
        ShardConfig(steps=[80])
    with pytest.raises(UserError, match=r"shard\.ranks=1: must be 2 or more"):
        ShardConfig(ranks=[1])
