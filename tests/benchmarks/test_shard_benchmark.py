"""The benchmark of large networks, tiny: what ranks measure of sharded weights, and pretraining on members."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from stores import make_store

from benchmarks.shard import benchmark as shard
from benchmarks.shard import masked
from ensemble_ml.config import (
    BenchmarkConfig,
    BenchmarkSize,
    DataConfig,
    ModelConfig,
    Objective,
    ShardConfig,
    TrainConfig,
)
from ensemble_ml.errors import UserError
from ensemble_ml.training import load_checkpoint, train


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
    assert plan["value"] < 5
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
        f"4 labelled dates: {score} of pretrained on members below from scratch, same processor time{end}"
        for score in ("CRPS", "spread RMSE")
        for end in ("", ": lower end of the interval")
    }
    runs = tmp_path / "shard" / "runs"
    logs = {path.name: (path / "log.jsonl").read_text() for path in runs.iterdir() if (path / "log.jsonl").exists()}
    assert len(logs) == 2 * (1 + 5)
    # What is trained on what, for how long.
    steps = {name: max(json.loads(line).get("step", 0) for line in text.splitlines()) for name, text in logs.items()}
    assert steps["members-seed0"] == 2 and steps["the_fits_alone-4-seed0"] == 0
    assert steps["pretrained_on_members-4-seed0"] == steps["pretrained_by_masking-4-seed0"] == 3
    assert steps["from_scratch-4-seed0"] > 3
    scores = {name: f for name, f in found["figures"].items() if "over the raw members'" in name}
    assert len(scores) == 8 and all(0 < f["median"] < 1.5 for f in scores.values())
    # A second run takes the trainings that are there.
    assert results(tmp_path, ["pretraining"], **settings)[0]["figures"] == found["figures"]


def test_settings():
    with pytest.raises(UserError, match=r"shard\.steps=\[80\]: give the steps on members, and those on the truth"):
        ShardConfig(steps=[80])
    with pytest.raises(UserError, match=r"shard\.ranks=1: must be 2 or more"):
        ShardConfig(ranks=[1])
    with pytest.raises(UserError, match=r"shard\.hidden=\[\]: give one number or more"):
        ShardConfig(hidden=[])


def test_a_masked_autoencoder_learns_what_was_hidden(tmp_path, monkeypatch):
    """Its errors fall, and no head learns."""
    store = make_store(tmp_path / "a.zarr", members=4, shape=(9, 16))
    config = TrainConfig(run="first", output=str(tmp_path), steps=0, seed=3, batch_size=2, threads=1)
    config.data = DataConfig(store=str(store.path), train=["2001"], validation=[], members=[2], validation_members=2)
    config.model = ModelConfig(hidden=8, max_hidden=8, depth=1, linear=False, local_terms=False)
    config.optim.lr = 1e-2
    given = train(replace(config, objective=Objective.members)) / "checkpoints" / "last"
    losses, plain, clock = [], masked._loss, iter(range(1000))
    monkeypatch.setattr(masked, "_loss", lambda *given: losses.append(plain(*given)) or losses[-1])
    monkeypatch.setattr(masked.time, "process_time", lambda: next(clock))
    steps = masked.pretrain_masked(config, store, np.arange(4), given, tmp_path / "masked", 60.0)
    assert steps == 60 == len(losses) and torch.stack(losses[-10:]).mean() < 0.8 * torch.stack(losses[:10]).mean()
    before, after = load_checkpoint(given).state_dict, load_checkpoint(tmp_path / "masked").state_dict
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"unet", "common_stem", "plane_bias", "scale", "pressure", "surface"}
    assert all(after[f"{part}.out.weight"].abs().max() == 0 for part in ("pressure", "surface"))


@pytest.mark.parametrize("shape", [(33, 64), (9, 16)])
def test_three_of_four_patches_are_hidden(shape):
    torch.manual_seed(0)
    hidden = masked._mask(torch.ones(shape))
    assert hidden.shape == shape and set(hidden.unique().tolist()) == {0.0, 1.0}
    first = hidden[::8, ::8]
    assert first.sum() == math.ceil(0.75 * first.numel())
    assert torch.equal(hidden, first.repeat_interleave(8, 0).repeat_interleave(8, 1)[: shape[0], : shape[1]])
