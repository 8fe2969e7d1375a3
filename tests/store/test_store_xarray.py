"""`xr.open_dataset(STORE, engine="ensemble_ml")`: lazy, decoded, CF-named."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import make_layout, make_store

from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, StoreWriter, TensorStore, open_store, quantise
from ensemble_ml.store.xarray_engine import EnsembleBackend, _attributes


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("engine") / "store.zarr"
    return make_store(path, dates=3, members=4, surface=("t2m", "tp"), shape=(9, 12), control=True)


@pytest.fixture
def dataset(store):
    with xr.open_dataset(store.path, engine="ensemble_ml") as opened:
        yield opened


def whole(store, part):
    fields = [store.read(part, date) for date in range(len(store.layout.init_time))]
    return np.stack([f.pressure for f in fields]), np.stack([f.surface for f in fields])


def test_the_engine_is_an_entry_point_of_the_package():
    assert isinstance(xr.backends.list_engines()["ensemble_ml"], EnsembleBackend)


def test_every_variable_of_every_part_is_there_and_right(store, dataset):
    for part in (Part.FORECAST, Part.CONTROL, Part.TRUTH, Part.MEAN, Part.SPREAD):
        suffix = "" if part is Part.FORECAST else f"_{part.value}"
        member = slice(None) if part is Part.FORECAST else 0
        pressure, surface = whole(store, part)
        for values, names in ((pressure, store.layout.variables), (surface, store.layout.surface)):
            for position, name in enumerate(names):
                found = dataset[name + suffix]
                assert found.dtype == np.float32
                np.testing.assert_array_equal(
                    found.values, values[:, member][..., position, *([slice(None)] * (values.ndim - 4))]
                )


def test_coordinates_and_attributes_follow_cf(dataset):
    assert dataset.t.dims == ("init_time", "realization", "lead_time", "level", "latitude", "longitude")
    assert dataset.t2m_truth.dims == ("init_time", "lead_time", "latitude", "longitude")
    assert dataset.t.attrs["standard_name"] == "air_temperature" and dataset.t.attrs["units"] == "K"
    assert dataset.t_spread.attrs["units_metadata"] == "temperature: difference"
    assert dataset.t_spread.attrs["cell_methods"] == "realization: standard_deviation"
    names = {name: dataset[name].attrs["standard_name"] for name in ("init_time", "lead_time", "level", "latitude")}
    assert names == {
        "init_time": "forecast_reference_time", "lead_time": "forecast_period", "level": "air_pressure",
        "latitude": "latitude",
    }  # fmt: skip
    assert dataset.lead_time.values[2] == np.timedelta64(48, "h")
    assert dataset.orog.attrs["units"] == "m" and dataset.orog.shape == (9, 12)


def test_variables_over_intervals_say_so(tmp_path):
    layout = make_layout(
        dates=1, members=2, leads=(24, 48), variables=(), levels=(), surface=("tp", "fg10"), shape=(5, 8)
    )
    bounds = {"tp": [[0, 24], [24, 48]], "fg10": [None, [45, 48]]}
    with StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.FORECAST], lead_bounds=bounds) as writer:
        writer.write(Part.FORECAST, 0, None, quantise(np.ones((2, 2, 2, 5, 8), np.float32)))
    found = xr.open_dataset(tmp_path / "s.zarr", engine="ensemble_ml")
    assert found.tp.attrs["cell_methods"] == "lead_time: sum"
    assert found.tp.attrs["lead_bounds_hours"] == "0-24 24-48"
    assert found.fg10_mean.attrs["cell_methods"] == "lead_time: maximum realization: mean"
    assert found.fg10.attrs["lead_bounds_hours"] == "none 45-48"


def test_opening_reads_no_field_and_indexing_only_what_is_asked(store, monkeypatch):
    asked = []
    read = TensorStore.read
    monkeypatch.setattr(TensorStore, "read", lambda self, *a: asked.append(a) or read(self, *a))
    dataset = xr.open_dataset(store.path, engine="ensemble_ml")
    point = dataset.z.sel(level=850).isel(
        init_time=2, realization=[3, 0], lead_time=1, latitude=slice(2, 5), longitude=7
    )
    assert asked == []
    values = point.values
    assert len(asked) == 1
    part, date, selection = asked[0]
    assert (part, date, selection.rows, selection.levels) == (Part.FORECAST, 2, (2, 5), (850,))
    assert set(selection.realization) == {1, 4} and selection.variables == ("z",) and selection.surface == ()
    np.testing.assert_array_equal(values, whole(store, Part.FORECAST)[0][2, [3, 0], 1, 1, 1, 2:5, 7])


index = st.one_of(
    st.integers(-3, 2),
    # xarray's own decompose_indexer fails on an empty slice of negative step, before any backend is asked
    st.slices(3).filter(lambda part: part.step is None or part.step > 0),
    st.just(slice(None, None, -2)),
    st.lists(st.integers(-3, 2), max_size=4).map(lambda positions: np.array(positions, int)),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.tuples(*[index] * 6))
def test_any_outer_index_is_that_of_the_values(store, dataset, keys):
    dims = dataset.t.dims
    sizes = {"level": 2}
    keys = {d: k for d, k in zip(dims, keys, strict=True) if d not in sizes}
    full = dataset.t.copy(data=whole(store, Part.FORECAST)[0][:, :, :, 0])
    xr.testing.assert_identical(dataset.t.isel(keys).load(), full.isel(keys))


def test_dask_chunks_are_start_dates_and_travel_to_other_processes(store):
    dataset = xr.open_dataset(store.path, engine="ensemble_ml", chunks={})
    assert dataset.t.chunks[0] == (1, 1, 1) and dataset.t.chunks[1] == (4,)
    mean = dataset.t.mean(("init_time", "realization")).compute(scheduler="threads")
    np.testing.assert_allclose(mean.values, whole(store, Part.FORECAST)[0][:, :, :, 0].mean((0, 1)), rtol=1e-5)


def test_what_it_opens_can_be_written_as_netcdf(dataset, tmp_path):
    dataset.to_netcdf(tmp_path / "all.nc")
    with xr.open_dataset(tmp_path / "all.nc", decode_timedelta=True) as again:
        xr.testing.assert_identical(again.load(), dataset.load())


def test_variables_can_be_dropped_and_other_folders_are_refused(store, tmp_path):
    dataset = xr.open_dataset(store.path, engine="ensemble_ml", drop_variables=["t", "orog"])
    assert "t" not in dataset and "orog" not in dataset and "z" in dataset
    assert EnsembleBackend().guess_can_open(store.path) and not EnsembleBackend().guess_can_open(tmp_path)
    assert not EnsembleBackend().guess_can_open(b"bytes")
    with pytest.raises(UserError, match="is no tensor store"):
        xr.open_dataset(tmp_path, engine="ensemble_ml")


@pytest.mark.slow
def test_the_synthetic_ensemble_is_calibrated_and_its_faults_are_those_asked_for(tmp_path):
    """Spread/skill of the helper that all rooms test with: 1 when calibrated, less when under-dispersive or biased."""

    def ratio(name, **options):
        made = make_store(tmp_path / name, dates=60, leads=(48,), shape=(13, 24), surface=(), **options)
        spread, error = 0.0, 0.0
        for date in range(60):
            values, truth = made.read(Part.FORECAST, date).pressure, made.read(Part.TRUTH, date).pressure[0]
            spread += values.var(0, ddof=1, dtype=np.float64)
            error += (values.mean(0, dtype=np.float64) - truth) ** 2
        scale = spread.mean((-2, -1), keepdims=True)
        return np.sqrt((1 + 1 / 6) * np.mean(spread / scale) / np.mean(error / scale))

    assert ratio("calibrated") == pytest.approx(1, abs=0.06)
    assert ratio("sharp", dispersion=0.6) == pytest.approx(0.6, abs=0.08)
    assert ratio("biased", bias=1.0) < 0.8
    assert open_store(tmp_path / "sharp").has(Part.TRUTH)


def test_only_sums_and_gusts_are_said_to_be_sums_and_maxima(store):
    """Whether a temperature over intervals is their mean or their maximum is not kept: nothing is said."""
    store = TensorStore(Path(store.path))  # of its own
    names = {"t2m": None, "tp": "lead_time: sum", "fg10": "lead_time: maximum"}
    store.lead_bounds = {name: [(0, 24)] for name in names}
    for name, methods in names.items():
        found = _attributes(store, Part.FORECAST, name)
        assert found.get("cell_methods") == methods and found["lead_bounds_hours"] == "0-24"


def test_settings_that_code_for_any_file_passes(store):
    with xr.open_dataset(store.path, engine="ensemble_ml") as plain:
        for given in (
            {"decode_timedelta": True},
            {"decode_times": True},
            {"mask_and_scale": True, "use_cftime": False},
        ):
            with xr.open_dataset(store.path, engine="ensemble_ml", **given) as opened:
                xr.testing.assert_identical(opened, plain)
    for given in ({"decode_times": False}, {"decode_cf": False}, {"use_cftime": True}):
        with pytest.raises(UserError, match=r"open_zarr|standard calendar"):
            xr.open_dataset(store.path, engine="ensemble_ml", **given)
    with pytest.raises(TypeError, match="unknown settings colour"):
        xr.open_dataset(store.path, engine="ensemble_ml", colour=1)
