"""Archives that are legal, or nearly so, and that a reader may get wrong without a word."""

import logging
from contextlib import suppress

import netCDF4
import numpy as np
import pytest
import xarray as xr
from gribfiles import GLOBE, archive_of, dataset, ensemble, message, noise, write

from data_prep import open_archive, open_pair, prepare
from data_prep.files import check_whole
from data_prep.gaps import find_gaps
from data_prep.geometry import Geometry
from data_prep.intervals import Tiles
from data_prep.records import FIELD_INDEX, RECORD
from ensemble_ml.config import Control, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid, canonical
from ensemble_ml.store import Part
from ensemble_ml.verification import api

SHAPE = len(GLOBE[0]), len(GLOBE[1])


@pytest.mark.parametrize("form", ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"])
@pytest.mark.parametrize("records", [0, 1, 3])
def test_a_classic_file_that_was_cut_short_is_not_read_as_zeros(tmp_path, form, records):
    path = tmp_path / "a.nc"
    with netCDF4.Dataset(path, "w", format=form) as file:
        file.title = "odd"
        file.createDimension("time", None if records else 2)
        file.createDimension("x", 5)
        for name, kind in (("a", "f4"), ("b", "i2"))[: 2 if records != 1 else 1]:  # one alone is not padded
            variable = file.createVariable(name, kind, ("time", "x"))
            variable.units = "K"
            variable[: records or 2] = np.ones((records or 2, 5))
        file.createVariable("c", "f8", ())[...] = 3.0
    check_whole(str(path))
    whole = path.read_bytes()
    for size in (len(whole) - 9, len(whole) // 2, 30, 3):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="cut short"):
            check_whole(str(path))


@pytest.mark.parametrize("length", [2**62, 2**63, 2**64 - 1])
def test_a_damaged_length_is_one_clear_error(tmp_path, length):
    path = tmp_path / "a.nc"
    with netCDF4.Dataset(path, "w", format="NETCDF3_64BIT_DATA") as file:
        file.createDimension("x", 5)
        file.createVariable("a", "f4", ("x",)).units = "K"
    whole, number = path.read_bytes(), length.to_bytes(8, "big")
    path.write_bytes(whole[:24] + number + whole[32:])  # the length of the first dimension's name
    with pytest.raises(UserError, match=r"a.nc: its NetCDF header is damaged or cut short; fetch it again"):
        check_whole(str(path))
    for place in range(4, len(whole), 4):
        path.write_bytes(whole[:place] + number + whole[place + 8 :])
        with suppress(UserError):
            check_whole(str(path))


def test_a_version_that_nobody_wrote_is_left_to_the_library(tmp_path):
    path = tmp_path / "a.nc"
    path.write_bytes(b"CDF\x03" + bytes(200))
    check_whole(str(path))
    with pytest.raises(UserError, match=r"a.nc: cannot be opened as NetCDF .*Unknown file format"):
        open_archive(path)


def test_a_classic_archive_is_read_while_it_is_whole(tmp_path):
    path = tmp_path / "a.nc"
    dataset().to_netcdf(path, format="NETCDF3_64BIT")
    assert np.isfinite(open_archive(path).read(Part.FORECAST, 0).pressure).all()
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match=r"a.nc: is cut short: its header announces \d+ bytes, but it has \d+"):
        open_archive(path)


@pytest.mark.parametrize("leads", [1, 2])
def test_a_reference_time_for_each_record_is_the_start(tmp_path, leads):
    """As CF writes it where the time axis is the valid time."""
    start = np.datetime64("2001-01-01", "ns")
    data = dataset().isel(time=0, drop=True).isel(step=slice(-leads, None)).rename(step="time")
    lead = data.time.values
    about = {"standard_name": "forecast_reference_time"}
    data = data.assign_coords(
        time=start + lead,
        forecast_reference_time=("time", np.full(leads, start), about),
        forecast_period=("time", lead / np.timedelta64(1, "h"), {"units": "hours", "standard_name": "forecast_period"}),
    )
    layout = archive_of(data, tmp_path).layout
    assert layout.lead_hours == (0, 24)[-leads:] and layout.init_time.tolist() == [start.item()]


@pytest.mark.parametrize(
    ("starts", "hours", "leads"),
    [([0, 6, 24], [6, 6, 6], (6,)), ([0, 0, 0], [6, 12, 30], (6, 12, 30)), ([6], [6], (6,)), ([0, 6], [6, 12], None)],
)
def test_the_lead_of_a_reference_time_for_each_record_is_that_to_its_valid_time(tmp_path, starts, hours, leads):
    first, hour = np.datetime64("2001-01-01", "ns"), np.timedelta64(1, "h")
    data = dataset().isel(time=[0] * len(starts), step=0, drop=True)
    data["t"] = data.t + xr.DataArray(10.0 * np.arange(len(starts)), dims="time")
    data.t.attrs["units"] = "K"
    about = {"standard_name": "forecast_reference_time"}
    times = first + np.array(starts) * hour
    data = data.assign_coords(time=times + np.array(hours) * hour, forecast_reference_time=("time", times, about))
    data.to_netcdf(tmp_path / "a.nc")
    if leads is None:
        with pytest.raises(UserError, match="dimension time carries both start and lead time"):
            open_archive(tmp_path / "a.nc")
        return
    source = open_archive(tmp_path / "a.nc")
    assert source.layout.lead_hours == leads and source.layout.init_time.tolist() == np.unique(times).tolist()
    last = source.read(Part.FORECAST, len(source.layout.init_time) - 1).pressure[:, -1, 0]
    np.testing.assert_array_equal(last, data.t.values[-1, :, ::-1].astype(np.float32))


@pytest.mark.parametrize("reference", [False, True], ids=["valid times", "starts too"])
def test_leads_that_are_equal_leave_a_time_axis_to_the_starts(tmp_path, reference):
    """Forecasts of one lead time, joined along their valid times."""
    starts = np.datetime64("2001-01-01", "ns") + np.array([0, 6, 24]) * np.timedelta64(1, "h")
    data = dataset().isel(time=[0, 0, 0], step=0, drop=True)
    data["t"] = data.t + xr.DataArray(10.0 * np.arange(3), dims="time")
    data.t.attrs["units"] = "K"
    data = data.assign_coords(
        time=starts + np.timedelta64(6, "h"),
        forecast_period=("time", [6, 6, 6], {"units": "hours", "standard_name": "forecast_period"}),
    )
    if reference:  # as a variable of its own, which the fields' `coordinates` do not name
        data["reference"] = "time", starts, {"standard_name": "forecast_reference_time"}
    source = archive_of(data, tmp_path)
    assert source.layout.lead_hours == (6,) and source.layout.init_time.tolist() == starts.tolist()
    found = source.read(Part.FORECAST, 2).pressure[:, 0, 0]
    np.testing.assert_array_equal(found, data.t.values[2, :, ::-1].astype(np.float32))


def test_a_truth_of_short_forecasts_without_leads_stands_at_its_valid_times(tmp_path):
    data = dataset().isel(number=0, time=0, drop=True)
    start, leads = np.datetime64("2001-01-01", "ns"), data.step.values
    truth = data.rename(step="time").assign_coords(time=start + leads)
    about = {"standard_name": "forecast_reference_time"}
    before = start + leads - np.timedelta64(24, "h")
    truth.assign_coords(forecast_reference_time=("time", before, about)).to_netcdf(tmp_path / "t.nc")
    found = open_pair(ensemble(tmp_path / "f.grib"), tmp_path / "t.nc").read(Part.TRUTH, 0).pressure[0, :, 0]
    np.testing.assert_array_equal(found, data.t.values[:, ::-1])


def test_files_that_say_nothing_are_told_of(tmp_path, caplog):
    ensemble(tmp_path / "output.pl.20180101")
    (tmp_path / "output.sfc.20180101").touch()
    (tmp_path / "output.pl.20180104").write_bytes(bytes(100))
    (tmp_path / "README").write_text("An archive.")
    with caplog.at_level(logging.WARNING):
        open_archive(tmp_path)
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 2 and all("output." in line for line in told)


@pytest.mark.parametrize("form", ["NETCDF3_CLASSIC", "NETCDF3_64BIT", "NETCDF4"])
def test_netcdf_files_of_a_folder_are_known_by_their_first_letters(tmp_path, form):
    data = dataset().isel(step=[1])
    for day, name in enumerate(("a.nc", "b.cdf", "20010103")):
        times = data.time.values[:1] + np.timedelta64(day, "D")
        data.isel(time=[0]).assign_coords(time=times).to_netcdf(tmp_path / name, format=form)
    (tmp_path / "README").write_text("CDF and HDF files of three days.")
    assert len(open_archive(tmp_path).layout.init_time) == 3


def test_what_cannot_be_read_may_be_part_of_the_archive(tmp_path, monkeypatch):
    ensemble(tmp_path / "a.grib")
    (tmp_path / "output.pl.20180104").write_bytes(b"GRIB")
    whole = open

    def refused(path, *args, **keys):
        if str(path).endswith("20180104"):
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path, *args, **keys)

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(UserError, match=r"20180104: cannot be read \(Permission denied\)"):
        open_archive(tmp_path)


def test_gusts_of_the_moment_and_of_hours_are_not_mixed(tmp_path):
    of_moment = message("fg10", noise(mean=5), step=24, paramId=228029)
    write(tmp_path / "a.grib", [message("fg10", noise(mean=20), step="21-24"), of_moment])
    with pytest.raises(UserError, match="fg10: at 24 h the archive has instantaneous values and values of an interval"):
        open_archive(tmp_path / "a.grib")


def test_means_are_not_put_together_as_maxima(tmp_path):
    def mean(value, step, **keys):
        return message("t2m", np.full(SHAPE, value) + noise(mean=0, std=1e-3), step=step, **keys)

    forecast = write(tmp_path / "f.grib", [mean(280.0, "0-24", date=20010101, member=m) for m in (1, 2)])
    parts = [mean(270.0, "0-12", date=20010101, member=None), mean(290.0, "12-24", date=20010101, member=None)]
    truth = open_pair(forecast, write(tmp_path / "t.grib", parts)).truth
    assert not truth.present(0)[1].any()
    with pytest.raises(UserError, match=r"t2m: 2 of its intervals fill 0-24 h .*means or ext.*; or prepare without a"):
        truth.unmatched()
    assert "t2m stays without truth: 2 of its intervals fill 0-24 h" in truth.unverified()["t2m"]


def test_a_height_that_is_a_dimension_says_as_much(tmp_path):
    data = dataset(t="u10").isel(isobaricInhPa=0, drop=True)
    data["u10"].attrs = {"standard_name": "eastward_wind", "units": "m s-1"}
    data = data.rename(u10="u").expand_dims(height=[80.0])
    data.height.attrs = {"axis": "Z", "units": "m", "positive": "up"}
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match="holds no field"):
        open_archive(tmp_path / "a.nc")


def test_levels_without_units_may_be_of_a_model(tmp_path):
    data = dataset(isobaricInhPa="lev")
    data.lev.attrs = {}
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match="lev: has no units"):
        open_archive(tmp_path / "a.nc")


def test_a_meridian_that_stands_there_twice_counts_once():
    latitude, longitude = np.linspace(90, -90, 19), np.linspace(-180, 180, 37)
    grid, rows, columns = canonical(latitude, longitude)
    assert grid.wraps and grid.shape == (19, 36) and len(columns) == 36
    field = np.tile(np.where(longitude == 0, 300.0, 250.0), (19, 1))[rows[:, None], columns]
    coarse = Grid(np.linspace(80, -80, 9), np.arange(0, 360, 20.0))
    found = Geometry(grid, coarse).means(field)
    np.testing.assert_allclose(found[:, 0], 275.0)
    data = xr.DataArray(np.ones((19, 37)), dims=("latitude", "longitude"), coords=[latitude, longitude])
    weights = api.area_weights(data)
    assert float(weights[:, -1].sum()) == 0 and float(weights.sum()) == pytest.approx(19 * 36)


def test_of_equal_intervals_the_shortest_lead_is_taken():
    records = np.zeros(2, RECORD)
    records["field"] = FIELD_INDEX["tp"]
    records["init"] = np.array(["2001-01-01T06", "2001-01-01T18"], "datetime64[s]")
    records["lead_start"], records["lead"] = [12, 0], [18, 6]
    times = np.array(["2001-01-01T18", "2001-01-02T00"], "datetime64[s]")
    assert Tiles(records, np.arange(2)).cover(*times) == (1,)


@pytest.mark.parametrize(
    ("intervals", "rows"),
    [
        ([(2, 6), (3, 6), (0, 3)], (2, 1)),
        ([(2, 6), (1, 2), (0, 3), (3, 6)], (2, 3)),
        ([(2, 6), (1, 2), (3, 6), (1, 3)], ()),
        ([(0, 3), (3, 6), (0, 6)], (2,)),
        ([(0, 1), (1, 3), (0, 3), (3, 6), (4, 6)], (2, 3)),
    ],
)
def test_intervals_are_covered_wherever_a_choice_of_records_fills_them(intervals, rows):
    records = np.zeros(len(intervals), RECORD)
    records["field"] = FIELD_INDEX["tp"]
    records["init"] = np.datetime64("2001-01-01T00", "s")
    records["lead_start"], records["lead"] = np.transpose(intervals)
    times = np.array(["2001-01-01T00", "2001-01-01T06"], "datetime64[s]")
    assert Tiles(records, np.arange(len(records))).cover(*times) == rows


def test_orography_that_the_service_gave_a_time(tmp_path):
    ensemble(tmp_path / "a.grib")
    values = 9.80665 * np.arange(np.prod(SHAPE), dtype=float).reshape(1, *SHAPE)
    coords = {"valid_time": [np.datetime64("2001-01-01", "ns")], "latitude": GLOBE[0], "longitude": GLOBE[1]}
    data = xr.Dataset({"z": (("valid_time", "latitude", "longitude"), values, {"units": "m**2 s**-2"})}, coords)
    data.to_netcdf(tmp_path / "static.nc")
    with pytest.raises(UserError, match=r"it has z \(no pressure level\)"):  # as of a file of one level it may be
        open_pair(tmp_path / "a.grib", None, tmp_path / "static.nc")
    data["z"].attrs["GRIB_typeOfLevel"] = "surface"  # as the service writes it
    data.to_netcdf(tmp_path / "static.nc")
    pair = open_pair(tmp_path / "a.grib", None, tmp_path / "static.nc")
    np.testing.assert_allclose(pair.static()["orog"], values[0] / 9.80665, rtol=1e-6)


@pytest.mark.parametrize("axis", ["number", "step"])
def test_geopotential_of_members_or_leads_is_no_orography(tmp_path, axis):
    """On one level that nothing names; beside a coordinate that says surface it is."""
    data = dataset(t="z").isel(time=0, isobaricInhPa=0, drop=True)
    data = data.assign_coords(forecast_reference_time=np.datetime64("2001-01-01", "ns"))
    data["z"].attrs["units"] = "m**2 s**-2"
    data["t2m"] = data.z.copy().assign_attrs(units="K")
    data["z"] = data.z.isel({"step" if axis == "number" else "number": 0}, drop=True)
    source = archive_of(data, tmp_path)
    assert source.static() == {} and source.catalogue.readers[0].skipped == {"z (no pressure level)": 1}
    if axis == "step":
        times = np.datetime64("2001-01-01", "ns") + data.step.values
        data = data.rename(step="time").assign_coords(time=times)
        data.to_netcdf(tmp_path / "c.nc")
        assert open_archive(tmp_path / "c.nc").static() == {}
    data["z"] = data.z.assign_coords(surface=0.0)
    data.to_netcdf(tmp_path / "b.nc")
    assert list(open_archive(tmp_path / "b.nc").static()) == ["orog"]


def test_relative_paths_mean_the_same_to_whoever_goes_on(tmp_path, monkeypatch):
    ensemble(tmp_path / "a.grib")
    monkeypatch.chdir(tmp_path)
    here = prepare(PrepareConfig(input="a.grib", output="one.zarr"))
    there = prepare(PrepareConfig(input=str(tmp_path / "a.grib"), output=str(tmp_path / "two.zarr")))
    assert (here / "zarr.json").read_text() == (there / "zarr.json").read_text()


@pytest.mark.parametrize("edition", [1, 2])
def test_a_deterministic_run_beside_its_ensemble_is_no_member(tmp_path, caplog, edition):
    one = {"grid": GLOBE, "level": 500, "edition": edition, "step": 24}
    members = [message("t", member=m, kind="pf" if m else "cf", seed=m, **one) for m in (0, 1, 2)]
    write(tmp_path / "ef.grib", members)
    write(tmp_path / "oper.grib", [message("t", noise(mean=300.0), member=None, dataType="fc", **one)])
    with caplog.at_level(logging.WARNING):
        source = open_archive([tmp_path / "ef.grib", tmp_path / "oper.grib"])
    assert source.layout.realization == (1, 2) and source.has(Part.CONTROL)
    (told,) = [record.getMessage() for record in caplog.records if "without a member number" in record.getMessage()]
    assert told.endswith(f"1 fields without a member number are left out, because others have one: t "
                         f"({tmp_path / 'oper.grib'})")  # fmt: skip
    alone = open_archive(tmp_path / "oper.grib")
    assert alone.layout.realization == (0,) and not alone.has(Part.CONTROL)


def test_one_field_of_no_member_is_no_member_of_which_all_else_is_missing(tmp_path, caplog):
    write(tmp_path / "ens.grib", [message("t", member=m, seed=m) for m in (1, 2, 3)])
    write(tmp_path / "sst.grib", [message("sst", member=None)])
    with caplog.at_level(logging.WARNING):
        source = open_archive([tmp_path / "ens.grib", tmp_path / "sst.grib"])
    assert source.layout.realization == (1, 2, 3) and source.layout.names == ("t",)
    assert "1 fields without a member number are left out, because others have one: sst" in caplog.text
    assert find_gaps(source) == []


def test_a_lead_of_the_surface_that_the_truth_lacks_is_told_of(tmp_path, caplog):
    ensemble(tmp_path / "a.grib", names=("t2m",), steps=(12, 24), dates=(20010101, 20010102))
    write(tmp_path / "t.grib", [message("t2m", date=date, member=None) for date in (20010102, 20010103)])
    with caplog.at_level(logging.WARNING):
        pair = open_pair(tmp_path / "a.grib", tmp_path / "t.grib")
        [told] = pair.unverified().values()
    assert told.endswith("t2m stays without truth at these leads: 12 h")


def test_static_fields_of_the_archive_stay_beside_those_given(tmp_path):
    data = dataset()
    one = data.t.isel(time=0, number=0, step=0, isobaricInhPa=0, drop=True)
    data.assign(orog=one.assign_attrs(units="m")).to_netcdf(tmp_path / "a.nc")
    xr.Dataset({"lsm": (one > 280).astype("float32").assign_attrs(units="1")}).to_netcdf(tmp_path / "b.nc")
    assert list(open_pair(tmp_path / "a.nc", None, tmp_path / "b.nc").static()) == ["orog", "lsm"]


def test_a_control_that_is_not_there_cannot_be_included(tmp_path, caplog):
    path = write(tmp_path / "a.grib", [message("t", member=m, seed=m) for m in (1, 2)])
    with caplog.at_level(logging.WARNING):
        open_archive(path, control=Control.include)
    assert f"control=include: {path} holds no control" in caplog.text


def test_a_forecast_without_a_start_date_is_not_of_1970(tmp_path):
    dataset().isel(time=0, drop=True).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=r"a.nc: \w+: has no init time; give it a coordinate forecast_reference_time"):
        open_archive(tmp_path / "a.nc")


@pytest.mark.parametrize("rows", [4, 32, 161])
@pytest.mark.parametrize("south_first", [False, True])
def test_a_gaussian_grid_is_not_taken_for_a_regular_one(tmp_path, rows, south_first):
    """Nearly evenly spaced, and not so at the poles."""
    latitude = np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(rows)[0]))[:: 1 if south_first else -1]
    for name, ticks in (("gauss", latitude), ("between", 90 - 180 * (np.arange(rows) + 0.5) / rows)):
        axes = {"time": np.array(["2001-01-01"], "datetime64[ns]"), "latitude": ticks, "longitude": np.arange(8) * 45.0}
        values = np.full([len(axis) for axis in axes.values()], 280.0, np.float32)
        xr.Dataset({"t2m": (tuple(axes), values, {"units": "K"})}, axes).to_netcdf(tmp_path / f"{name}.nc")
    with pytest.raises(UserError, match=r"t2m: a Gaussian grid; only regular ones are read"):
        open_archive(tmp_path / "gauss.nc")
    assert open_archive(tmp_path / "between.nc").layout.grid.shape == (rows, 8)


def test_a_land_mask_may_be_true_and_false(tmp_path):
    data = dataset()
    land = data.t.isel(time=0, number=0, step=0, isobaricInhPa=0, drop=True) > 280
    data["lsm"] = land.assign_attrs(units="1")
    np.testing.assert_array_equal(archive_of(data, tmp_path).static()["lsm"], land.values)


def test_means_over_time_however_they_are_spelled(tmp_path):
    for number, method in enumerate(("time: mean", "time:mean", "Time: mean")):
        data = dataset()
        data.t.attrs["cell_methods"] = method
        data["q"] = data.t.copy().assign_attrs(units="kg kg**-1", cell_methods="time: point") * 0 + 1e-3
        data["q"].attrs["units"] = "kg kg**-1"
        data.to_netcdf(tmp_path / f"{number}.nc")
        assert open_archive(tmp_path / f"{number}.nc").layout.names == ("q",), method


def test_analyses_and_members_of_another_variable_make_one_truth_or_archive(tmp_path):
    write(tmp_path / "a.grib", [message("t", member=None), message("q", np.full(SHAPE, 1e-3), member=0, kind="pf")])
    assert open_archive(tmp_path / "a.grib").layout.variables == ("t", "q")
    write(tmp_path / "b.grib", [message("t", member=m, date=20010102, seed=m) for m in (1, 2)])
    with pytest.raises(UserError, match="holds 3 members; the truth is one field"):
        open_pair(tmp_path / "b.grib", [tmp_path / "a.grib", tmp_path / "b.grib"])


@pytest.mark.parametrize(
    ("coordinates", "attributes", "members"),
    [
        ({}, {}, (1, 2, 3)),
        ({"number": 0}, {"GRIB_dataType": "fc", "GRIB_totalNumber": 0}, (1, 2, 3)),  # as cfgrib reads edition 1
        ({"number": 0}, {"GRIB_dataType": "fc", "GRIB_totalNumber": 4}, (0, 1, 2, 3)),
        ({"number": 0}, {}, (0, 1, 2, 3)),
    ],
)
def test_a_file_of_no_member_beside_files_of_members(tmp_path, coordinates, attributes, members):
    data = dataset()
    alone = data.isel(number=0, drop=True).assign_coords(coordinates) + 30
    alone["t"].attrs = {"units": "K", **attributes}
    data.to_netcdf(tmp_path / "ef.nc")
    alone.to_netcdf(tmp_path / "oper.nc")
    assert open_archive(tmp_path).layout.realization == members
    assert open_archive(tmp_path / "oper.nc").layout.realization == (0,)


def test_a_deterministic_run_may_be_numbered_in_some_of_its_files(tmp_path):
    data = dataset().isel(number=0, drop=True)
    data.isel(time=[0]).to_netcdf(tmp_path / "a.nc")
    data.isel(time=[1]).assign_coords(number=0).to_netcdf(tmp_path / "b.nc")
    layout = open_archive(tmp_path).layout
    assert layout.realization == (0,) and len(layout.init_time) == 2
