"""Datasets in, Datasets out: the bits of the command line, lazily, whoever made the ensemble's Dataset."""

import pickle
import subprocess
import sys
import warnings

import dask
import numpy as np
import pytest
import xarray as xr

import ensemble_ml as eml
from ensemble_ml.api.inputs import settings_of
from ensemble_ml.api.opening import resolve
from ensemble_ml.config import PredictConfig
from ensemble_ml.errors import UserError
from ensemble_ml.inference import lazy

HEAVY = ("numpy", "xarray", "torch", "dask", "hydra", "matplotlib", "data_prep")


@pytest.fixture(scope="module")
def files(place):
    """Return the command's forecasts from two members, opened as one."""
    paths = sorted((place / "forecast").glob("*.nc"))
    return xr.open_mfdataset(paths, decode_timedelta=True, combine_attrs="override").load()


@pytest.fixture(scope="module")
def model(place):
    return eml.load(place / "runs" / "first")


def same(forecast, files):
    """Compare all bits of a forecast with those of files."""
    assert set(forecast.variables) == set(files.variables)
    for name, values in files.variables.items():
        mine = forecast.variables[name]
        assert mine.dims == values.dims and mine.dtype == values.dtype, name
        assert mine.attrs == {k: v for k, v in values.attrs.items() if k != "_FillValue"}, name
        np.testing.assert_array_equal(mine.values, values.values, err_msg=name)


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, ensemble_ml; print(sorted(set(sys.modules) & set(sys.argv[1:])), dir(ensemble_ml))"
    ran = subprocess.run([sys.executable, "-c", code, *HEAVY], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("[] ") and "'load'" in ran.stdout


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = eml.laod


def test_a_forecast_equals_the_files_of_the_command(here, model, files):
    forecast = model.predict(eml.open("archive/ensemble"), members=2)
    assert forecast["t_mean"].chunksizes["forecast_reference_time"] == (7,)
    same(forecast.compute(), files)
    kept = ("checkpoint_sha256", "members_in", "training_dates", "training_data_fingerprint", "settings_digest")
    assert {k: forecast.attrs[k] for k in kept} == {k: files.attrs[k] for k in kept}


def test_a_lazy_forecast_is_the_same_from_another_folder(here, files, tmp_path, monkeypatch):
    forecast = eml.load("runs/first").predict("archive/ensemble", members=2, static="archive/static.grib")
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(forecast["t_mean"])), files["t_mean"])


def test_matrices_are_not_made_in_inference_mode(here, model, monkeypatch):
    """torch takes another product of matrices for weights that are, which rounds differently for some shapes."""
    seen, forward = [], lazy.forward

    def looked_at(network, *given):
        seen.append(network.pressure.out.weight)
        return forward(network, *given)

    monkeypatch.setattr(lazy, "forward", looked_at)
    model.predict(eml.open("archive/ensemble"), members=2, dates="2003-01-09")["t_mean"].compute()
    assert seen and not any(values.is_inference() for values in seen)


@pytest.mark.parametrize("way", ["store", "a path", "changed", pytest.param("processes", marks=pytest.mark.slow)])
def test_whatever_the_ensemble_comes_from(here, model, files, way):
    if way == "store":
        forecast = model.predict(eml.open("store.zarr"), members=2)
        names = ["t_mean", "z_ensemble_spread"]  # rain is packed anew in the store
    elif way == "a path":
        forecast, names = model.predict("archive/ensemble", members=2), ["tp_quantile", "q_scale"]
    else:
        ensemble = eml.open("archive/ensemble")
        if way == "changed":
            ensemble = ensemble.isel(realization=slice(2)).assign_attrs(mine=True)
            assert resolve(ensemble)[0] is ensemble
        forecast, names = model.predict(ensemble, members=[1, 2]), ["tp_mean", "t2m_quantile", "t_location"]
    with dask.config.set(scheduler="processes" if way == "processes" else "threads", num_workers=1):
        found = forecast[names].isel(forecast_reference_time=slice(8)).compute()
    for name in names:
        np.testing.assert_array_equal(found[name].values, files[name].sel(found[name].indexes).values)


def test_renamed_variables_and_renamed_times_that_were_shifted_count_as_changed(here, model):
    ensemble = eml.open("archive/ensemble")
    swapped = ensemble.rename({"u": "v", "v": "u"})
    assert resolve(swapped)[0] is swapped
    later = ensemble["init_time"].values + np.timedelta64(12, "h")
    shifted = model.predict(ensemble.rename(init_time="time").assign_coords(time=later), members=2)
    np.testing.assert_array_equal(shifted["forecast_reference_time"].values, later)


def test_nothing_is_computed_before_it_is_asked_for(here, model):
    def fails(block):
        raise AssertionError("computed")

    ensemble = eml.open("archive/ensemble")
    broken = {}
    for name, array in ensemble.items():
        broken[name] = array.copy(data=array.data.map_blocks(fails, meta=array.data._meta))
    forecast = model.predict(eml.open(ensemble.assign(broken)), members=2, dates=["2003"])
    with pytest.raises(UserError, match="AssertionError: computed"):
        forecast["t_mean"].compute()


def test_forecasts_are_written_to_zarr_without_a_warning(here, model, tmp_path):
    more = {"members_out": True, "thresholds": {"tp": [0.001]}}
    for name, where in (("grid.zarr", {}), ("points.zarr", {"points": [[48, 16], [10, 20]]})):
        forecast = model.predict(eml.open("archive/ensemble"), members=2, dates=["2003"], **where, **more)
        with warnings.catch_warnings(action="error"):
            forecast.to_zarr(tmp_path / name, zarr_format=3, consolidated=False)
        kept = xr.open_zarr(tmp_path / name, consolidated=False, decode_timedelta=True)
        xr.testing.assert_equal(kept.load(), forecast.load())  # at once: else it predicts anew for each variable


def test_options_of_the_command_and_its_refusals(here, model):
    ensemble = eml.open("archive/ensemble")
    cut = model.predict(ensemble, members=2, dates="2003", region=[60, -20, 30, 40], thresholds={"tp": [0.001]})
    assert cut.sizes["forecast_reference_time"] == 2 and float(cut.longitude[0]) < 0
    assert cut["tp_prob_above"].sizes["threshold_tp"] == 1
    for settings, said in (
        ({"members": 9}, "members_in=9"),
        ({"output": "x"}, "output=x: belongs to the command line"),
        ({"quantile": [0.5]}, "quantile: no such setting here"),
        ({"precision": "half"}, "precision=half: auto, "),
        ({"device": "warp"}, "device=warp: cannot be used"),
        ({"device": 1.5}, r"device=1\.5: cannot be used"),
        ({"members": 2.7}, r"members_in=2\.7: give a number of members"),
        ({"members": [1.9]}, r"members_in=\[1\.9\]: give a number of members"),
        ({"members": True}, "members_in=True: give a number of members"),
        ({"members": "all"}, "members_in=all: give a number of members"),
    ):
        with pytest.raises(UserError, match=said):
            model.predict(ensemble, **settings)
    with pytest.raises(UserError, match="no such folder"):
        eml.load("runs/none")
    with pytest.raises(UserError, match="no such file or folder"):
        eml.open("nothing/")


def test_the_history_names_open_datasets_in_a_list_shortly(here, model):
    ensemble = eml.open("archive/ensemble")
    parts = [ensemble.isel(init_time=[number]) for number in range(2)]
    history = model.predict(parts, members=2).attrs["history"]
    assert "input=['an open Dataset', 'an open Dataset'] members_in=2" in history


def test_an_unchanged_dataset_remembers_where_it_comes_from(here):
    ensemble = eml.open("archive/ensemble", static="archive/static.grib")
    for same_one in (ensemble, ensemble.copy(deep=True), pickle.loads(pickle.dumps(ensemble))):
        paths, settings = resolve(same_one)
        assert paths == str(here / "archive" / "ensemble") and settings["static"] == f"{here}/archive/static.grib"
    colder = ensemble.assign(t2m=ensemble["t2m"] - 1)
    moved = ensemble.assign_coords(longitude=ensemble["longitude"] + 1)
    said = ensemble.copy()
    said["t2m"] = said["t2m"].assign_attrs(units="degC")
    for other in (colder, moved, said, ensemble.isel(init_time=[0]), ensemble.drop_vars("t")):
        assert resolve(other)[0] is other


def test_opened_values_are_those_of_the_store(here):
    archive, store = eml.open("archive/ensemble"), eml.open("store.zarr")
    assert set(archive.data_vars) < set(store.data_vars) and "t_truth" in store and "orog" in store
    np.testing.assert_array_equal(archive["t"][0], store["t"][0])
    assert archive["t"].attrs == store["t"].attrs and archive["t"].chunksizes["init_time"][0] == 1
    again = eml.open(archive.isel(realization=[0, 2]).rename(t2m="2t"))
    assert again.sizes["realization"] == 2 and "t2m" in again
    np.testing.assert_array_equal(again["tp"][:, 1], archive["tp"][:, 2])  # sums keep their intervals


def test_dates_of_numpy_and_xarray_are_those_of_the_command():
    times = np.array(["2003-01-09T00", "2003-01-09T12"], "datetime64[ns]")
    texts = ["2003-01-09T00:00", "2003-01-09T12:00"]  # the day alone would be both
    for dates in (times, xr.DataArray(times, dims="init_time"), list(times)):
        config = settings_of(PredictConfig, {"dates": dates}, {"checkpoint": "c", "input": "i", "output": "o"}, {})
        assert config.dates == texts
    days = settings_of(PredictConfig, {"dates": times.astype("datetime64[D]")[:1]}, {"checkpoint": "c"}, {})
    assert days.dates == ["2003-01-09"]
