"""Inputs standardised by local maps: a run trains, resumes bit for bit, and predicts from its checkpoint alone."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from stores import make_store

from ensemble_ml.config import ModelConfig, Precision, PredictConfig, Standardise
from ensemble_ml.errors import UserError
from ensemble_ml.inference import predict
from ensemble_ml.loading import Reader, fixed_batches
from ensemble_ml.models import Climate, EnsembleModel, ModelSpec
from ensemble_ml.store.las import local_statistics
from ensemble_ml.training import load_checkpoint, train
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.tracking import Tracker, read_log


def losses(run):
    return [line["loss"] for line in read_log(run / "log.jsonl") if "loss" in line]


@pytest.fixture
def config(config_of):
    def make(**changes):
        return config_of(model__standardise=Standardise.las, model__precision=Precision.float32, **changes)

    return make


@pytest.mark.slow
def test_trains_resumes_and_predicts(config, config_of, store, tmp_path, monkeypatch):
    whole = train(config(run="whole"))
    assert losses(whole) != losses(train(config_of(run="other")))
    parts, real = config(run="parts", checkpoint_every=100, validate_every=100), Tracker.step

    def told(self, done, **values):
        real(self, done, **values)
        if done == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Tracker, "step", told)
        train(parts)
    again = train(replace(parts, resume=True))
    assert losses(again) == losses(whole)
    one, other = (load_checkpoint(run / "checkpoints" / "last").state_dict for run in (whole, again))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    january = np.flatnonzero(store.layout.init_time < np.datetime64("2001-02-01"))
    maps = local_statistics(store, january)
    upper = maps.mean_p.shape[0] * maps.mean_p.shape[1]
    wanted = maps.mean_p.reshape(upper, *maps.mean_p.shape[2:]).astype(np.float32)
    np.testing.assert_array_equal(one["features.mean"][:upper], wanted)
    np.testing.assert_array_equal(one["features.std"][upper:], maps.std_s.astype(np.float32))
    made = PredictConfig(str(whole / "checkpoints" / "last"), store.path, output=str(tmp_path / "out"), members_in=3)
    made.dates = ["2001-02"]
    predict(made, store)
    [first, *_] = sorted((tmp_path / "out").glob("*.nc"))
    with xr.open_dataset(first) as data:
        assert np.isfinite(data["t_mean"]).all() and (data["t_stddev"] > 0).all()


@pytest.mark.slow
def test_surface_variables_alone_have_maps(config, config_of):
    surface = {"data__variables": [], "data__surface": ["t2m"], "steps": 2}
    assert losses(train(config(run="maps", **surface))) != losses(train(config_of(run="levels", **surface)))


def test_a_window_wider_than_the_grid_is_refused_before_the_long_fits(config, tmp_path, monkeypatch):
    monkeypatch.setattr("ensemble_ml.training.assemble.kept_fit", lambda *_: pytest.fail("the fits began"))
    narrow = make_store(tmp_path / "narrow.zarr", dates=20, shape=(9, 6))
    with pytest.raises(UserError, match="a window of 7 points is wider than the grid"):
        train(config(data__store=narrow.path))


@pytest.mark.slow
def test_channels_are_departures_in_units_of_the_place(store):
    lay = store.layout
    config = ModelConfig(hidden=8, max_hidden=8, depth=0, standardise=Standardise.las)
    grid = tuple(lay.grid.latitude), tuple(lay.grid.longitude)
    spec = ModelSpec(config, lay.variables, lay.levels, lay.surface, lay.lead_hours, (24, 48), *grid)
    again = ModelSpec.from_json(spec.to_json())
    assert again.local and again.to_json() == spec.to_json()
    reader = Reader(store, spec)
    climate = fit_climate(reader, np.arange(16), [], 3).climate
    model = EnsembleModel(spec, climate)
    [batch] = fixed_batches(reader, [3], range(6))
    spread0 = model.heads.base_spread(model._predicted(batch.inputs)[1], batch.inputs.count)
    upper, flat, _ = model.features(batch.inputs, spread0, model.heads.climatology)
    mean = batch.inputs.mean[0].numpy()  # T, F, Y, X
    expected = ((mean - climate.mean) / climate.std)[:, : spec.upper]
    found = upper[0, : 3 * 2].permute(0, 3, 1, 2).unflatten(0, (3, 2)).flatten(1, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert flat.shape[1] == model.features.channels(surface=True)


def test_wind_across_the_pole_changes_sign_alone(tmp_path):
    store = make_store(tmp_path / "w.zarr", dates=4, variables=("t", "z"), surface=("t2m",), shape=(9, 16))
    lay = store.layout
    grid = tuple(lay.grid.latitude), tuple(lay.grid.longitude)
    config = ModelConfig(hidden=8, max_hidden=8, depth=0, standardise=Standardise.las)
    spec = ModelSpec(config, ("t", "u"), lay.levels, ("v10",), lay.lead_hours, (24,), *grid)
    model = EnsembleModel(spec, Climate.default(spec))
    sign, offset = model.features.pole_rule(surface=False)
    assert not offset.any() and sign[:6, 0].tolist() == [1, -1, 1, -1, 1, -1] and (sign[6:] == 1).all()
    sign, offset = model.features.pole_rule(surface=True)
    assert sign.shape == offset.shape == (model.features.channels(surface=True), 1) and sign[0] == -1


def test_golden_settings_are_the_default():
    assert ModelConfig().standardise is Standardise["global"]
