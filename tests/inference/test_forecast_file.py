"""The files follow CF-1.11, as an independent checker reads it, and appear whole or not at all."""

import errno
import json
import os
import subprocess
import sys

import netCDF4
import numpy as np
import pytest
import xarray as xr
from forecasting import make_checkpoint, make_grid, make_source, make_spec

from data_prep.inspect import describe_archive
from ensemble_ml.config import PredictConfig
from ensemble_ml.errors import UserError
from ensemble_ml.folders import give_name
from ensemble_ml.grid import Grid
from ensemble_ml.inference import Header, Kind, Output, file_name, predict, select, write_forecast
from ensemble_ml.inference.contents import height_of
from ensemble_ml.verification.forecasts import open_forecasts

# The checker runs in a process of its own: its C libraries and xarray's crash together when the interpreter ends.
CHECK = """
import json, sys
from compliance_checker.runner import CheckSuite
CheckSuite.load_all_available_checkers()
suite, found = CheckSuite(), {}
for path in sys.argv[1:]:
    data = suite.load_dataset(path)
    (results, crashes), = suite.run_all(data, ["cf:1.11"]).values()
    bad = [m for r in results if r.weight == 3 and r.value not in (True, 1) and r.value[0] < r.value[1] for m in r.msgs]
    found[path] = {"errors": bad, "crashes": [str(c) for c in crashes.values()], "checks": len(results)}
    data.close()
print("RESULT" + json.dumps(found))
"""

# Start dates as checkpoints have them: every other day, and on days that no few series hold.
_DAYS = np.datetime64("1980-01-01T00:00", "m") + np.arange(8000) * np.timedelta64(1, "D")
EVEN = [str(date) for date in _DAYS[:4000:2]]
UNEVEN = [str(date) for date in np.sort(np.random.default_rng(1).choice(_DAYS, 2000, replace=False))]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A forecast of each kind of option set, by name."""
    folder = tmp_path_factory.mktemp("written")

    def make(*surface, **other):
        made = make_source(**({"dates": 1, "variables": ("t",), "surface": surface} | other))
        if "fg10" in surface:
            made.lead_bounds["fg10"] = made.lead_bounds["tp"]
        return made

    mixed = make("tp", "fg10", levels=(500,))
    mixed.lead_bounds["fg10"] = [None, [21, 24], [45, 48]]
    full, means = make("t2m", "tp", "fg10"), make("t2m", "tp")
    means.lead_bounds["t2m"] = means.lead_bounds["tp"]
    sources = {
        "members": (full, {"members_out": True, "quantiles": []}),
        "thresholds": (full, {"thresholds": {"tp": [0.001, 0.01], "t": [273.15], "fg10": [20.0]}}),
        "region": (make("tp"), {"region": [60, -45, -30, 45], "members_out": True}),
        "points": (make("tp"), {"points": [[47, 11]], "members_out": True, "thresholds": {"t": [273.15]}}),
        "surface": (make("t2m", "tp", variables=(), levels=()), {}),
        "pressure": (make(variables=("t", "z")), {"members_out": True}),
        "one_lead": (make("t2m", leads=(0,)), {}),
        "mixed_bounds": (mixed, {}),
        "means": (means, {}),
        "regional": (make("t2m", grid=make_regional()), {}),
    }
    seen = {"training_dates": UNEVEN, "validation_dates": EVEN}
    return {
        **{name: forecast(folder / name, source, settings) for name, (source, settings) in sources.items()},
        "many_dates": forecast(folder / "many_dates", make("t2m"), {}, **seen),
    }


def make_regional():
    return Grid(np.arange(56.0, 47, -1), np.arange(-8.0, 8))


def forecast(folder, source, settings, **meta):
    leads = [lead for lead in source.layout.lead_hours if lead] or list(source.layout.lead_hours)
    checkpoint = make_checkpoint(folder / "checkpoints", make_spec(source, leads_out=tuple(leads)), **meta)
    given = PredictConfig(checkpoint=str(checkpoint), input="memory", output=str(folder), members_in=3, **settings)
    return predict(given, source)[0]


@pytest.mark.slow
def test_compliance_checker_finds_no_error(written):
    ran = subprocess.run(
        [sys.executable, "-c", CHECK, *map(str, written.values())], capture_output=True, text=True, check=False
    )
    assert "RESULT" in ran.stdout, ran.stderr
    found = json.loads(ran.stdout.split("RESULT")[1])
    assert len(found) == len(written)
    for name, path in written.items():
        assert found[str(path)]["checks"] > 30
        assert not found[str(path)]["errors"] and not found[str(path)]["crashes"], name


def test_thousands_of_dates_are_short_or_a_variable_and_read_exactly(written, tmp_path):
    path = written["many_dates"]
    with netCDF4.Dataset(path) as data:
        assert data.validation_dates == "R2000/1980-01-01T00/PT48H"
        assert "training_dates" not in data.ncattrs() and data["training_dates"].dimensions == ("training_dates",)
        assert max(len(str(data.getncattr(name))) for name in data.ncattrs()) < 500
    (held,) = open_forecasts([str(path.parent)])
    assert held.training_dates.astype("datetime64[m]").astype(str).tolist() == UNEVEN
    assert held.validation_dates.astype("datetime64[m]").astype(str).tolist() == EVEN
    assert not len(held.earlier_dates) and not held.files_without_dates
    source = make_source(dates=2, variables=("t",), surface=("t2m",))
    forecast(tmp_path, source, {}, training_dates=UNEVEN)
    with xr.open_mfdataset(sorted(tmp_path.glob("*.nc")), decode_timedelta=True) as data:  # not once for each start
        assert data["training_dates"].dims == ("training_dates",) and data.sizes["training_dates"] == len(UNEVEN)
        assert data.sizes["forecast_reference_time"] == 2


@pytest.mark.parametrize("quantiles", [[], [0.1, 0.9]], ids=str)
def test_inspect_says_that_a_forecast_is_no_archive(tmp_path, quantiles):
    path = forecast(tmp_path, make_source(dates=1, variables=("t",), surface=("t2m",)), {"quantiles": quantiles})
    for given in (path, path.parent):
        with pytest.raises(UserError) as raised:
            describe_archive(str(given))
        assert str(raised.value) == (f"{path}: a forecast that predict made, no archive; use evaluate forecast={path}")


def test_storage(written):
    with netCDF4.Dataset(written["members"]) as data:
        assert data.data_model == "NETCDF4"
        variable = data["t_member"]
        assert variable.filters()["zlib"] and variable.filters()["shuffle"] and variable.filters()["complevel"] == 1
        assert variable.dtype == np.float32 and np.isnan(variable._FillValue)
        assert "axis" not in data["realization"].ncattrs()
        assert data["forecast_period"].getncattr("dtype") == "timedelta64[ns]"


def test_cell_methods_and_bounds(written):
    with xr.open_dataset(written["members"]) as data:
        assert data.tp_mean.attrs["cell_methods"] == "time: sum realization: mean"
        assert data.fg10_stddev.attrs["cell_methods"] == "time: maximum realization: standard_deviation"
        assert data.t_mean.attrs["cell_methods"] == "time: point realization: mean"
        assert data.t_member.attrs["cell_methods"] == "time: point"
        hours = (data.time_bnds - data.forecast_reference_time) / np.timedelta64(1, "h")
        assert hours.values.tolist() == [[[0, 24], [0, 48]]]
    with xr.open_dataset(written["pressure"]) as data:
        assert (
            "time_bnds" not in data
            and data.t_ensemble_spread.attrs["cell_methods"] == "realization: standard_deviation"
        )
    with xr.open_dataset(written["means"]) as data:
        assert data.t2m_mean.attrs["cell_methods"] == "realization: mean"  # over hours, nobody knows how
    with xr.open_dataset(written["mixed_bounds"]) as data:
        assert "time_bnds" not in data
        said = data.fg10_mean.attrs["cell_methods"]
        assert said == "time: maximum (comment: over lead times 21-24 h, 45-48 h) realization: mean"


def test_probabilities_and_parameters_of_sums_are_no_sums(written):
    with xr.open_dataset(written["thresholds"]) as data:
        for kind in ("location", "scale", "prob_above"):
            for name in ("tp", "fg10"):
                assert "cell_methods" not in data[f"{name}_{kind}"].attrs
            assert data[f"t_{kind}"].attrs["cell_methods"] == "time: point"
            assert "time_bnds" not in data[f"t_{kind}"].attrs.get("comment", "")
        assert data.tp_prob_above.attrs["comment"] == "of the sum over the interval of time_bnds"
        assert data.fg10_prob_above.attrs["comment"] == "of the maximum over the interval of time_bnds"
        for parameter in (data.tp_location, data.tp_scale):
            said = parameter.attrs["comment"]
            assert said.startswith("max(0, G - ") and said.endswith("; of the sum over the interval of time_bnds")
        assert data.tp_quantile.attrs["cell_methods"] == "time: sum"
    with xr.open_dataset(written["mixed_bounds"]) as data:
        assert data.fg10_location.attrs["comment"] == "of the maximum over lead times 21-24 h, 45-48 h"
        assert "cell_methods" not in data.fg10_location.attrs
    for name, hours in (("thresholds", (0, 0)), ("mixed_bounds", (21, 45))):
        (forecasts,) = open_forecasts([str(written[name])])
        assert forecasts.intervals("fg10") == {24: (hours[0], 24), 48: (hours[1], 48)}
        assert forecasts.intervals("tp") == {24: (0, 24), 48: (0, 48)}


def test_names_units_and_families(written):
    with xr.open_dataset(written["thresholds"]) as data:
        assert data.t_mean.attrs["units_metadata"] == "temperature: on_scale"
        for kind in ("stddev", "scale", "ensemble_spread"):
            assert data[f"t_{kind}"].attrs["units_metadata"] == "temperature: difference"
        assert "units_metadata" not in data.tp_mean.attrs
        assert data.tp_scale.attrs["distribution_family"] == "csgamma"
        assert "gamma distribution with mean" in data.tp_scale.attrs["comment"]
        assert data.t_location.attrs["distribution_family"] == "normal"
        assert data.tp_prob_above.attrs["units"] == "1" and data.tp_prob_above.dims[0] == "threshold_tp"
        assert data.t2m_mean.attrs["standard_name"] == "air_temperature" and float(data.t2m_mean.height_2m) == 2
        assert data.fg10_mean.height_10m == 10


def test_all_variables_of_a_height_state_it():
    heights = {name: float(height_of(name).values) for name in ("t2m", "d2m", "r2m", "fg10", "u100m", "ws100m")}
    assert list(heights.values()) == [2, 2, 2, 10, 100, 100]
    assert height_of("tp") is None and height_of("t") is None


def test_xarray_decodes_without_options_and_writes_again(written, tmp_path):
    with xr.open_dataset(written["members"]) as data:
        assert data.forecast_period.dtype.kind == "m" and data.time.dtype.kind == "M"
        data.load().to_netcdf(tmp_path / "again.nc")
    with xr.open_dataset(tmp_path / "again.nc") as again:
        assert again.identical(data)


def one_by_one(paths):
    """The data variables of files, each joined along the start dates by hand."""
    single = [xr.load_dataset(path) for path in paths]
    names = list(single[0].data_vars)
    at = {name: single[0][name].dims.index("forecast_reference_time") for name in names}
    return {name: np.concatenate([data[name].values for data in single], at[name]) for name in names}


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("how", [{}, {"combine": "nested", "concat_dim": "forecast_reference_time"}])
@pytest.mark.parametrize(
    "settings", [{"thresholds": {"t": [273.15]}}, {"points": [[47, 11]]}, {"region": [60, 0, 0, 90]}]
)
def test_many_files_open_as_one(config, source, how, settings):
    paths = predict(config(members_in=2, members_out=True, **settings), source)
    wanted = one_by_one(paths)
    with xr.open_mfdataset(paths, **how) as data:
        assert dict(data.sizes) == dict(xr.open_dataset(paths[0]).sizes) | {"forecast_reference_time": 3}
        assert np.array_equal(data.forecast_reference_time, source.layout.init_time)
        assert np.array_equal(data.time, data.forecast_reference_time + data.forecast_period)
        assert set(wanted) == set(data.data_vars) and "time_bnds" in wanted and "t_member" in wanted
        for name, values in wanted.items():
            assert np.array_equal(data[name].values, values, equal_nan=True), name
        assert np.isfinite(data.t_mean.values).all()


def test_start_dates_are_an_axis_without_end(config, source):
    """`ncrcat` joins files along such an axis alone."""
    for path in predict(config(), source):
        with netCDF4.Dataset(path) as data:
            assert [name for name, axis in data.dimensions.items() if axis.isunlimited()] == ["forecast_reference_time"]
            assert {variable.chunking()[0] for name, variable in data.variables.items() if name.endswith("time")} == {1}


def header(places):
    return Header(np.datetime64("2001-01-01T06", "ns"), (24,), (500,), places)


def test_a_failure_leaves_what_was_there(tmp_path):
    places = select(make_grid(), None, None)
    values = np.zeros((1, 1, *places.shape), np.float32)
    path = tmp_path / file_name(np.datetime64("2001-01-01T06", "ns"))
    assert path.name == "forecast_2001010106.nc"
    write_forecast(path, header(places), [Output("t", Kind.MEAN, values)])
    before = path.read_bytes()

    def outputs(error):
        yield Output("t", Kind.MEAN, values + 1)
        raise error

    for error in (KeyboardInterrupt(), MemoryError(), RuntimeError("a defect")):
        with pytest.raises(type(error)):
            write_forecast(path, header(places), outputs(error))
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_what_another_process_has_made_meanwhile_is_left(tmp_path):
    places = select(make_grid(), None, None)
    values, path = np.zeros((1, 1, *places.shape), np.float32), tmp_path / "f.nc"

    def outputs():
        yield Output("t", Kind.MEAN, values)
        path.write_text("of another")

    with pytest.raises(UserError, match="another process has made it meanwhile, so it stays"):
        write_forecast(path, header(places), outputs(), replace=False)
    assert path.read_text() == "of another" and list(tmp_path.iterdir()) == [path]
    path.unlink()
    write_forecast(path, header(places), [Output("t", Kind.MEAN, values)], replace=False)
    assert xr.load_dataset(path, decode_timedelta=False).t_mean.shape[-2:] == places.shape


def test_what_another_process_has_made_is_left_where_links_fail(tmp_path, monkeypatch):
    draft, path = tmp_path / ".draft", tmp_path / "f.nc"
    draft.write_text("ours")

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path.write_text("of another")
    with pytest.raises(UserError, match="another process has made it meanwhile, so it stays"):
        give_name(draft, path, replace=False)
    assert path.read_text() == "of another"
    path.unlink()
    give_name(draft, path, replace=False)
    assert path.read_text() == "ours"


def test_a_full_disk_is_a_users_error(tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("NetCDF: HDF error")

    monkeypatch.setattr("ensemble_ml.inference.netcdf._data_variable", full)
    places = select(make_grid(), None, None)
    with pytest.raises(UserError, match=r"output .*f.nc: cannot be written \(NetCDF: HDF error\)"):
        write_forecast(tmp_path / "f.nc", header(places), [Output("t", Kind.MEAN, np.zeros((1, 1, *places.shape)))])
    assert not list(tmp_path.iterdir())


def test_paths_that_are_no_utf8(config, tmp_path):
    """File names of the time of Latin-1: an input is told, and an output refused, as NetCDF cannot name it."""
    source = make_source(dates=1)
    source.path = os.fsdecode(b"caf\xe9")
    with netCDF4.Dataset(predict(config(members_in=2), source)[0]) as data:
        assert data.source.endswith(r"from caf\udce9")
    with pytest.raises(UserError, match=r"output .*forecast_2001013012.nc: cannot be written \('utf-8' codec"):
        predict(config(members_in=2, output=str(tmp_path / source.path)), source)


def test_a_folder_that_cannot_be_made_is_a_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_forecast(tmp_path / "file" / "f.nc", header(select(make_grid(), None, None)), [])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of file size")
def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    """As a quota does it: the library's own close fails as well."""
    program = """
import resource, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_forecast_file import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
places = select(make_grid((181, 360)), None, None)
values = np.random.default_rng(0).normal(size=(1, 1, *places.shape))
try:
    write_forecast(Path({folder!r}) / "f.nc", header(places), [Output("t", Kind.MEAN, values)])
except UserError as error:
    print("refused:", error)
"""
    given = program.format(paths=[p for p in sys.path if p], folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", given], capture_output=True, text=True)
    assert done.stdout.startswith("refused: output") and "cannot be written" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


def test_heights_and_times_are_told_only_where_they_are_known(tmp_path):
    source = make_source(dates=1, variables=("t",), surface=("tp", "fg10", "ws10"))
    data = forecast(tmp_path, source, {})
    with xr.open_dataset(data) as made:
        assert "height_10m" in made.ws10_mean.attrs.get("coordinates", "") + made.ws10_mean.encoding["coordinates"]
        assert "time: sum" in made.tp_mean.attrs["cell_methods"]
        assert "time: point" not in made.fg10_mean.attrs.get("cell_methods", "")  # a maximum over nobody knows what
        assert "time: point" in made.t_mean.attrs["cell_methods"]
