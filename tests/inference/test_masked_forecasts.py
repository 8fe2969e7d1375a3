"""Sea surface temperature from training to scores: no value on land, in forecasts and in what they are scored on."""

import json

import numpy as np
import pytest
import torch
import xarray as xr
from stores import make_store
from synthetic import land

from ensemble_ml import cli
from ensemble_ml.config import PredictConfig
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.inference import predict
from ensemble_ml.inference.outputs import _Variable
from ensemble_ml.store import open_store

SHAPE = 9, 16
LAND = land(SHAPE)
SMALL = ["steps=3", "threads=1", "model.hidden=8", "model.points=16",
         "model.max_hidden=8", "model.depth=1", "model.precision=float32",
         "tracking.tensorboard=false", "data.members=[1,2,4]", "data.validation_members=3"]  # fmt: skip


def ensemble_ml(task, **settings):
    assert cli.main([task, *(f"{key.replace('__', '.')}={value}" for key, value in settings.items())]) == 0


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Store, run, forecasts of the test dates, scores."""
    folder = tmp_path_factory.mktemp("masked")
    make_store(folder / "a.zarr", dates=30, members=5, shape=SHAPE, leads=(24,), variables=("t",), levels=(500,),
               surface=("t2m", "sst"), masked=("sst",), static=False)  # fmt: skip
    store = folder / "a.zarr"
    assert cli.main(["train", f"data.store={store}", "run=a", f"output={folder}/runs", *SMALL,
                     'data.train=["2001-01"]', 'data.validation=["2001-02-01/2001-02-05"]']) == 0  # fmt: skip
    ensemble_ml(
        "predict", checkpoint=folder / "runs/a/checkpoints/best", input=store, members_in=3, output=folder / "forecast",
        dates="['2001-02-06/2001-03']", members_out="true", thresholds="{sst: [290]}",
    )  # fmt: skip
    ensemble_ml(
        "evaluate", forecast=folder / "forecast", ensemble=store, truth=store, members_in=3, bootstrap=100,
        output=folder / "scores",
    )  # fmt: skip
    return folder


def test_land_is_missing_in_every_field_of_the_variable_and_in_no_other(done):
    files = sorted((done / "forecast").glob("*.nc"))
    with xr.open_dataset(files[0]) as data, xr.open_dataset(files[0], mask_and_scale=False) as raw:
        names = [name for name in data.data_vars if str(name).startswith("sst_")]
        assert {"sst_mean", "sst_stddev", "sst_ensemble_spread", "sst_quantile", "sst_prob_above", "sst_member"} <= {
            *names
        }
        for name in names:
            values = data[name].values
            assert np.isnan(values[..., LAND]).all() and np.isfinite(values[..., ~LAND]).all()
            assert np.isnan(raw[name].attrs["_FillValue"])
        others = [name for name in data.data_vars if str(name).startswith(("t_", "t2m_")) and data[name].ndim > 2]
        assert others and all(np.isfinite(data[name].values).all() for name in others)


@pytest.mark.parametrize(("where", "refused"), [(LAND, False), (~LAND, True)])
def test_a_field_that_is_not_finite_is_refused_unless_it_is_masked(done, tmp_path, monkeypatch, where, refused):
    real = _Variable.fields

    def spoilt(self, wanted):
        for kind, values in real(self, wanted):
            yield kind, values.masked_fill(torch.from_numpy(where), torch.inf) if self._name == "sst" else values

    monkeypatch.setattr(_Variable, "fields", spoilt)
    checkpoint, dates = str(done / "runs/a/checkpoints/best"), ["2001-02-06"]
    given = PredictConfig(checkpoint, str(done / "a.zarr"), output=str(tmp_path), members_in=3, dates=dates)
    if refused:
        with pytest.raises(UserError, match="sst: mean is not finite; the checkpoint is of no use"):
            predict(given, open_store(done / "a.zarr"))
    else:
        with xr.open_dataset(predict(given, open_store(done / "a.zarr"))[0]) as data:
            assert np.isnan(data.sst_mean.values[..., LAND]).all()


def test_scores_say_how_much_of_the_area_is_masked(done):
    content = json.loads((done / "scores" / "scores.json").read_text())
    area = Grid(np.linspace(90, -90, SHAPE[0]), np.arange(SHAPE[1]) * 360 / SHAPE[1]).area_weights()
    share = area[LAND].sum() / area.sum()
    dates = len(content["dates"]["test"])
    ours = [entry for entry in content["left_out"] if entry["entrant"] == "forecast"]
    assert {entry["field"] for entry in content["left_out"]} == {"sst"} and ours
    for entry in ours:
        assert entry["area_share"] == pytest.approx(share, abs=1e-5)
        assert (entry["left_out"], entry["points"]) == (dates * LAND.sum(), dates * LAND.size)
    assert any("of the area" in note for note in content["notes"])
    rows = [row for row in content["scores"] if row["variable"] == "sst" and row["entrant"] == "forecast"]
    assert rows and all(np.isfinite(row["crps"]["value"]) for row in rows)


@pytest.mark.slow
def test_masks_that_the_model_does_not_know_are_refused(done, tmp_path):
    """A checkpoint of a store without masks, data with them."""
    make_store(tmp_path / "b.zarr", dates=30, members=5, shape=SHAPE, leads=(24,), variables=("t",), levels=(500,),
               surface=("t2m", "sst"), static=False)  # fmt: skip
    assert cli.main(["train", f"data.store={tmp_path}/b.zarr", "run=b", f"output={tmp_path}/runs", *SMALL,
                     'data.train=["2001-01"]']) == 0  # fmt: skip
    config = PredictConfig(f"{tmp_path}/runs/b/checkpoints/last", str(done / "a.zarr"), output=str(tmp_path / "f"))
    with pytest.raises(UserError, match=r"sst of .*NaN"):
        predict(config, open_store(done / "a.zarr"))
