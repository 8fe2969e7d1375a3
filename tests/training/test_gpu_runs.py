"""Trainings and forecasts on a GPU: they resume bit for bit, learn, and agree with a processor."""

import copy
import logging

import numpy as np
import pytest
import torch
import xarray as xr
from training.running import assert_equal_runs, stop_at

from ensemble_ml.config import LoaderName, OptimName, Precision, PredictConfig
from ensemble_ml.errors import Stopped
from ensemble_ml.inference import predict
from ensemble_ml.loading import Reader, fixed_batches
from ensemble_ml.models.rivals import ens10_unet
from ensemble_ml.training import load_checkpoint, load_model, stepper, train
from ensemble_ml.training.tracking import read_log

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", [Precision.float32, Precision.bfloat16])
@pytest.mark.parametrize("name", ["unet3d", "drn", "ens10_unet", "poet"])
def test_resumes_bit_for_bit(config_of, monkeypatch, caplog, name, precision):
    caplog.set_level(logging.INFO)
    optim = OptimName.lion if name == "unet3d" else OptimName.adamw
    plan = dict(
        model__name=name, model__spread=name == "unet3d", model__precision=precision, optim__name=optim, average=0.9,
        steps=8, validate_every=4, checkpoint_every=100,
    )  # fmt: skip
    whole = train(config_of(run="whole", **plan))
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(Stopped):
            train(config_of(run="parts", **plan))
    parts = train(config_of(run="parts", resume=True, **plan))
    assert_equal_runs(whole, parts)
    assert ("captured a pass" in caplog.text) == (name == "unet3d")
    assert load_checkpoint(whole / "checkpoints" / "last").meta["device"] == torch.cuda.get_device_name()


def test_recorded_passes_give_what_called_ones_do(config_of, monkeypatch, caplog):
    """Bit for bit, with batches of two sizes (an epoch's last is short, and called), laws, validations in between."""
    caplog.set_level(logging.INFO)
    plan = dict(steps=24, validate_every=6, batch_size=3, optim__name=OptimName.adamw, average=0.9,
                model__families={"t2m": "lognormal"})  # fmt: skip
    played = train(config_of(run="played", **plan))
    assert caplog.text.count("captured a pass on a batch of 3") == 1, caplog.text
    monkeypatch.setattr(stepper, "Recorded", lambda model, run, record: run)
    called = train(config_of(run="called", **plan))
    assert_equal_runs(played, called)
    steps = [[line["loss"] for line in read_log(run / "log.jsonl") if "loss" in line] for run in (played, called)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("loader", list(LoaderName))
def test_learns_and_predicts_as_a_processor_does(config_of, store, tmp_path, loader):
    run = train(config_of(steps=30, validate_every=10, optim__name=OptimName.adamw, optim__lr=3e-3, average=0.9,
                          loading__name=loader))  # fmt: skip
    lines = read_log(run / "log.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert sum(losses[-8:]) < sum(losses[:8])
    assert 1 <= max(line["memory_mb"] for line in lines if "memory_mb" in line) < 200  # the GPU's, not the process's

    best = run / "checkpoints" / "best"
    paths = predict(PredictConfig(checkpoint=str(best), input=store.path, output=str(tmp_path / "forecasts"),
                                  members_in=3, dates=["2001-02"]), store)  # fmt: skip
    assert len(list((tmp_path / "forecasts").glob("*.nc"))) == 4, paths
    on_gpu, on_cpu = (load_model(best)[0].to(device).eval() for device in ("cuda", "cpu"))
    reader = Reader(store, on_cpu.spec)
    for batch in fixed_batches(reader, range(16, 20), range(3), batch_size=2):
        with torch.no_grad():
            here, there = on_cpu(batch.inputs), on_gpu(batch.inputs.to("cuda"))
        for field in ("location", "scale", "spread"):
            wanted, found = getattr(here, field), getattr(there, field).cpu()
            torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4 * float(wanted.std()), msg=field)
    with xr.open_dataset(next((tmp_path / "forecasts").glob("*.nc"))) as found:
        assert all(bool(np.isfinite(values).all()) for values in found.data_vars.values() if values.dtype.kind == "f")


@pytest.mark.parametrize("wraps", [True, False])
def test_interpolation_by_matrices_is_torchs(wraps):
    x = torch.randn(2, 3, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rows, columns in ((9, 17), (10, 18), (5, 9)):
        like = torch.empty(2, 3, rows, columns)
        found = []
        for device in ("cpu", "cuda"):
            own = copy.deepcopy(x).to(device).requires_grad_()
            values = ens10_unet._larger(own, like.to(device), wraps)
            values.square().sum().backward()
            found.append((values.detach().cpu(), own.grad.cpu()))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
