"""Stores from Python: the command's where nothing was changed, and the same fields from any Dataset."""

import json
import pickle
from pathlib import Path

import dask
import numpy as np
import pytest
import xarray as xr
from commanding import command
from synthetic import make_store

import ensemble_ml as eml
from ensemble_ml.api.opening import resolve
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store

KEEP = {"variables": ["t", "t2m", "tp"], "levels": [500, 850]}
SETTINGS = ["variables=[t,t2m,tp]", "levels=[500,850]"]


def files_of(path):
    """Return all files of a folder with their contents."""
    return {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}


def test_a_store_equals_that_of_the_command(here, tmp_path):
    ensemble, truth = eml.open("archive/ensemble", static="archive/static.grib"), eml.open("archive/truth")
    path = eml.prepare(ensemble, truth, tmp_path / "python.zarr", **KEEP)
    archive = [f"input={here}/archive/ensemble", f"truth={here}/archive/truth", "static=archive/static.grib"]
    command("prepare", *archive, f"output={tmp_path}/command.zarr", *SETTINGS)
    assert files_of(path) == files_of(tmp_path / "command.zarr")


@pytest.fixture(scope="module")
def zarrs(tmp_path_factory):
    """Return an ensemble and its truth as Zarr of somebody else: names as WeatherBench has them."""
    folder = tmp_path_factory.mktemp("zarrs")
    store = make_store(folder / "s.zarr", dates=4, members=3, leads=(24, 48), variables=("t",), surface=("t2m",))
    data = xr.open_dataset(store.path, engine="ensemble_ml")
    names = {"init_time": "time", "lead_time": "prediction_timedelta", "realization": "number", "t": "temperature"}
    names["t2m"] = "2m_temperature"
    keep = data[["t", "t2m"]].rename(names)
    every = [data[["t_truth", "t2m_truth"]].isel(lead_time=lead) for lead in range(2)]
    every = [one.assign_coords(init_time=one.init_time + one.lead_time).drop_vars("lead_time") for one in every]
    truth = xr.concat(every, "init_time").sortby("init_time").drop_duplicates("init_time")
    truth = truth.rename(init_time="time", t_truth="temperature", t2m_truth="2m_temperature")
    for name, one in (("ensemble", keep), ("truth", truth)):
        for array in one.variables.values():
            array.encoding.clear()
        one["time"].attrs.pop("standard_name", None)
        one.to_zarr(folder / f"{name}.zarr", zarr_format=2, consolidated=True)
    return folder


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param("threads", marks=pytest.mark.slow),
        "synchronous",
        pytest.param("distributed", marks=pytest.mark.slow),
    ],
)
def test_any_dataset_makes_the_same_fields(zarrs, tmp_path, scheduler):
    command(
        "prepare", f"input={zarrs}/ensemble.zarr", f"truth={zarrs}/truth.zarr", f"output={tmp_path}/command.zarr",
        "workers=2",
    )  # fmt: skip
    data = [xr.open_zarr(zarrs / f"{name}.zarr", chunks={"time": 1}) for name in ("ensemble", "truth")]
    if scheduler == "distributed":
        from distributed import Client

        with Client(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None):
            path = eml.prepare(*data, tmp_path / "python.zarr", workers=2)
    else:
        with dask.config.set(scheduler=scheduler):
            path = eml.prepare(*data, tmp_path / "python.zarr", workers=2)
    one, other = open_store(path), open_store(tmp_path / "command.zarr")
    assert one.layout.names == other.layout.names == ("t", "t2m")
    for part in Part:
        assert one.has(part) == other.has(part)
        for date in range(4 if one.has(part) else 0):
            for mine, theirs in zip(*(vars(store.read(part, date)).values() for store in (one, other)), strict=True):
                np.testing.assert_array_equal(mine, theirs)
    mine, theirs = files_of(path), files_of(tmp_path / "command.zarr")
    about = {"manifest.json", "sources.json", "zarr.json"}  # which name what the store was made of
    assert {name for name in theirs if mine.get(name) != theirs[name]} <= about
    assert json.loads(mine["zarr.json"])["attributes"]["provenance"]["input"] == ["an open Dataset"]


def test_what_cannot_be_prepared(here, tmp_path):
    ensemble = eml.open("archive/ensemble").isel(init_time=[0])
    for settings, said in (
        ({"executor": "processes"}, "executor=processes: an open Dataset is computed by Dask"),
        ({"input": "x"}, "input: no such setting here"),
        ({"variables": ["temprature"]}, "temprature"),
    ):
        with pytest.raises(UserError, match=said):
            eml.prepare(ensemble, None, tmp_path / "x.zarr", **settings)
    with pytest.raises(UserError, match="is a tensor store already"):
        eml.prepare(eml.open("store.zarr"), None, tmp_path / "x.zarr")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"workers": "two"}, "workers=two: Value 'two'"), ({"levels": 5}, "levels=5: "),
     ({"region": ["a", "b", "c", "d"]}, r"region=\['a', .*: Value 'a'"),
     ({"climate_days": [9]}, r"climate_days=\[9\]: "),
     ({"regrid": None, "truth_regrid": "perhaps"}, "truth_regrid=perhaps: ")],
)  # fmt: skip
def test_settings_of_another_type(tmp_path, wrong, said):
    with pytest.raises(UserError, match=f"^{said}") as raised:
        eml.prepare("absent", None, tmp_path / "a.zarr", **wrong)
    assert "\n" not in str(raised.value)


def test_numbers_of_numpy_are_numbers(here, tmp_path):
    ensemble = eml.open("archive/ensemble")
    how = {"levels": np.array([850]), "leads": (np.int64(24),), "workers": np.array(1), "variables": {"t"}}
    store = eml.open(eml.prepare(ensemble, None, tmp_path / "a.zarr", **how))
    assert store.level.values.tolist() == [850] and store.sizes["lead_time"] == 1 and "t2m" not in store


def test_a_list_of_datasets_keeps_what_they_were_opened_with(tmp_path, zarrs):
    data = xr.open_zarr(zarrs / "ensemble.zarr").rename({"temperature": "warmth"}).load()
    halves = [data.isel(time=part) for part in (slice(0, 2), slice(2, 4))]
    for number, half in enumerate(halves):
        for array in half.variables.values():
            array.encoding.clear()
            array.attrs.pop("standard_name", None)
        half.to_netcdf(tmp_path / f"{number}.nc")
    opened = [eml.open(tmp_path / f"{number}.nc", names={"t": "warmth"}) for number in range(2)]
    store = eml.open(eml.prepare(opened, None, tmp_path / "a.zarr"))
    whole = eml.open(eml.prepare(eml.open(str(tmp_path / "*.nc"), names={"t": "warmth"}), None, tmp_path / "b.zarr"))
    xr.testing.assert_equal(store.load(), whole.load())
    other = eml.open(tmp_path / "1.nc", names={"t": "warmth"}, units={"t2m": "K"})
    with pytest.raises(UserError, match=r"they were opened with different settings; give eml\.open the list"):
        eml.prepare([opened[0], other], None, tmp_path / "c.zarr")


def test_a_list_may_mix_paths_and_datasets_of_several_paths(tmp_path, zarrs):
    data = xr.open_zarr(zarrs / "ensemble.zarr").load()
    for number in range(4):
        part = data.isel(time=[number])
        for array in part.variables.values():
            array.encoding.clear()
        part.to_netcdf(tmp_path / f"{number}.nc")
    first, second, third, last = (str(tmp_path / f"{number}.nc") for number in range(4))
    mixed = [first, eml.open([second, third]), eml.open(last)]
    store = eml.open(eml.prepare(mixed, None, tmp_path / "a.zarr"))
    whole = eml.open(eml.prepare(str(tmp_path / "*.nc"), None, tmp_path / "b.zarr"))
    xr.testing.assert_equal(store.load(), whole.load())


def test_a_changed_static_field_and_a_relative_path_of_one_are_kept(here, tmp_path, monkeypatch):
    opened = eml.open("archive/ensemble", static="archive/static.grib")
    flat = opened.assign(orog=(opened["orog"] * 0).assign_attrs(opened["orog"].attrs))
    monkeypatch.chdir(tmp_path)
    heights = [eml.open(eml.prepare(one, None, f"{one is flat}.zarr", variables=["t2m"], leads=[24]))["orog"]
               for one in (opened, flat)]  # fmt: skip
    assert heights[0].max() > 0 and not heights[1].any()


def test_another_dataset_does_not_go_on_with_the_store_of_the_first(here, tmp_path):
    ensemble = eml.open("archive/ensemble")[["t2m"]].isel(init_time=[0])
    eml.prepare(ensemble, None, tmp_path / "x.zarr")
    warmer = ensemble.assign(t2m=(ensemble["t2m"] + 1).assign_attrs(ensemble["t2m"].attrs))
    eml.prepare(warmer, None, tmp_path / "y.zarr")
    digests = {
        json.loads((tmp_path / name / "zarr.json").read_text())["attributes"]["plan"] for name in ("x.zarr", "y.zarr")
    }
    assert len(digests) == 2


@pytest.mark.slow
def test_calibration_is_the_start_of_a_training(here, tmp_path):
    store = eml.prepare("archive/ensemble", "archive/truth", tmp_path / "rain.zarr", variables=["tp"])
    model = eml.calibrate(eml.open(store), train=["2001"], validation=["2002"], output=tmp_path / "run")
    command(
        "train", f"data.store={store}", "run=same", f"output={tmp_path}", "steps=0", "model.hidden=4",
        "model.max_hidden=4", "model.depth=0", "model.points=0",
        "tracking.tensorboard=false", "data.train=['2001']", "data.validation=['2002']", "data.members=[1,2]",
        "data.validation_members=2",
    )  # fmt: skip
    forecast, other = (one.predict("archive/ensemble", members=2) for one in (model, eml.load(tmp_path / "same")))
    for name in ("tp_mean", "tp_scale", "tp_ensemble_spread"):
        np.testing.assert_array_equal(forecast[name].values, other[name].values)
    assert model.meta["step"] == 0 and (model.save(tmp_path / "saved") / "MODEL_CARD.md").exists()


def test_calibration_of_an_archive(here):
    ensemble = eml.open("archive/ensemble")[["t2m", "tp"]]
    model = eml.calibrate(ensemble, "archive/truth", train=["2001"], validation=["2002"])
    forecast = model.predict(ensemble.isel(init_time=[-1]), members=2)
    assert set(model.spec.surface) == {"t2m", "tp"} and np.isfinite(forecast["t2m_scale"].values).all()
    with pytest.raises(UserError, match="7 init times, of which a 5th is for validation, but"):
        eml.calibrate(eml.open("store.zarr"))
    with pytest.raises(UserError, match=r"truth: .* is a tensor store"):
        eml.calibrate(eml.open("store.zarr"), "archive/truth")
    with pytest.raises(UserError, match="run=my run: letters"):  # before anything is prepared
        eml.calibrate("absent", "absent", output="runs/my run")


def test_a_notice_comes_once_for_an_opened_archive(here, zarrs, tmp_path, caplog):
    """Whatever its Dataset is handed to; opened anew, it is told anew."""
    for name in ("ensemble", "truth"):
        bare = xr.open_zarr(zarrs / f"{name}.zarr")
        for array in bare.data_vars.values():
            array.attrs.pop("units")
        bare.to_netcdf(tmp_path / f"{name}.nc")
    caplog.set_level("INFO")
    ensemble, truth = eml.open(tmp_path / "ensemble.nc"), eml.open(tmp_path / "truth.nc")
    told = [record.getMessage() for record in caplog.records if record.name.startswith("data_prep")]
    assert sum("files state no units of t K, t2m K" in text for text in told) == 2
    path = eml.prepare(ensemble, truth, tmp_path / "s.zarr")
    model = eml.calibrate(ensemble, truth, train=["2001-01-01/2001-01-02"], validation=["2001-01-03/2001-01-04"])
    forecast = model.predict(ensemble, members=2)
    eml.verify(forecast, ensemble, truth, bootstrap=100)
    pickle.loads(pickle.dumps(ensemble["t2m"])).compute()
    told = [record.getMessage() for record in caplog.records if record.name.startswith("data_prep")]
    assert sum("files state no units" in text for text in told) == 2
    assert eml.open(path)["t2m"].attrs["units"] == "K"
    eml.open(tmp_path / "truth.nc")
    assert sum("files state no units" in text for text in caplog.messages) == 3


@pytest.fixture
def small(tmp_path):
    """Return the path of a store of three init times."""
    return make_store(tmp_path / "small.zarr", dates=3, surface=("t2m",)).path


def test_another_process_reads_no_archive_that_has_grown(small, tmp_path):
    """It would take an earlier init time, which came meanwhile, for the first one that was counted."""
    times = eml.open(small)["t2m"].load()
    folder = tmp_path / "archive"
    folder.mkdir()
    for number in (1, 2):
        times.isel(init_time=[number]).to_netcdf(folder / f"{number}.nc")
    sent = pickle.dumps(eml.open(folder))
    np.testing.assert_array_equal(pickle.loads(sent)["t2m"], times.isel(init_time=[1, 2]))
    times.isel(init_time=[0]).to_netcdf(folder / "0.nc")
    with pytest.raises(UserError, match=r"has changed since it was opened; open it again"):
        pickle.loads(sent)["t2m"].compute()


def test_another_process_reads_no_store_that_was_replaced(small):
    with xr.open_dataset(small, engine="ensemble_ml") as lazy:
        before, sent = lazy["t2m"].values, [pickle.dumps(data) for data in (lazy, eml.open(small))]
    for one in sent:
        np.testing.assert_array_equal(pickle.loads(one)["t2m"], before)
    make_store(small, dates=3, surface=("t2m",), bias=5.0, overwrite=True)
    for one in sent:
        with pytest.raises(UserError, match=r"has (been replaced|changed) since it was opened; open it again"):
            pickle.loads(one)["t2m"].compute()


def test_a_pattern_means_the_same_in_another_folder(small, tmp_path, monkeypatch):
    data = eml.open(small)["t2m"].isel(init_time=[0]).load()
    for name, values in (("one", data), ("other", data + 1)):
        (tmp_path / name).mkdir()
        values.assign_attrs(data.attrs).to_netcdf(tmp_path / name / "a.nc")
    monkeypatch.chdir(tmp_path / "one")
    ensemble = eml.open("*.nc")
    monkeypatch.chdir(tmp_path / "other")
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(ensemble))["t2m"], data)
    assert resolve(ensemble)[0] == str(tmp_path / "one" / "*.nc")


def test_files_that_were_replaced_are_other_dask_arrays(small, tmp_path):
    """A cluster would otherwise give values that it keeps of the former files."""
    data, path = eml.open(small)["t2m"].load(), tmp_path / "a.nc"
    data.to_netcdf(path)
    before = eml.open(path)["t2m"]
    assert eml.open(path)["t2m"].data.name == before.data.name
    kept = before.persist()
    (data + 1).assign_attrs(data.attrs).to_netcdf(tmp_path / "new.nc")
    (tmp_path / "new.nc").rename(path)
    after = eml.open(path)["t2m"]
    assert after.data.name != before.data.name
    np.testing.assert_allclose(after - kept, 1, atol=1e-4)


def test_an_archive_beside_a_store_is_refused(small, tmp_path):
    """The store was left out without a word."""
    eml.open(small)["t2m"].to_netcdf(tmp_path / "a.nc")
    for paths in ([small, tmp_path / "a.nc"], [small, small]):
        with pytest.raises(UserError, match=rf"^{small}: is a tensor store, and no part of an archive; give it alone"):
            eml.open(paths)


def test_an_empty_path_is_not_the_current_folder(small, tmp_path, monkeypatch):
    eml.open(small)["t2m"].to_netcdf(tmp_path / "a.nc")
    monkeypatch.chdir(tmp_path)
    for call in (lambda: eml.open(""), lambda: eml.calibrate("", "a.nc"), lambda: eml.prepare("a.nc", "", "b.zarr")):
        with pytest.raises(UserError, match=r"^(paths|an input) is an empty text; give a path, or a Dataset$"):
            call()


@pytest.mark.parametrize("wrong", [5, b"a", {"a": 1}, xr.DataArray(np.zeros(2)), np.array(["a"]), [5]])
def test_what_is_no_path_is_refused(wrong, tmp_path):
    inputs = (
        lambda: eml.open(wrong), lambda: eml.open("absent", static=wrong), lambda: eml.prepare(wrong, None, "a.zarr"),
        lambda: eml.prepare("absent", wrong, "a.zarr"), lambda: eml.calibrate(wrong),
        lambda: eml.train(wrong, run="a"),
    )  # fmt: skip
    paths = (
        lambda: eml.load(wrong), lambda: eml.prepare("absent", None, wrong), lambda: eml.calibrate("a", output=wrong),
        lambda: eml.train(make_store(tmp_path / "s.zarr", dates=1).path, run=wrong, train=["2001"], validation=[]),
    )  # fmt: skip
    kind = type(wrong[0] if isinstance(wrong, list) else wrong).__name__
    for call in inputs:
        with pytest.raises(UserError, match=f"^(paths|static|an input) is {kind}; give a path, or a Dataset") as raised:
            call()
        assert ("which to_dataset() makes of it" in str(raised.value)) == (kind == "DataArray")
    for call in paths:
        with pytest.raises(UserError, match=f"^(path|output|run) is {type(wrong).__name__}; give a path$"):
            call()
