"""Axes of NetCDF archives: levels of pressure and of models, coordinates that are absent, leads in any precision."""

import netCDF4
import numpy as np
import pytest
import xarray as xr
from gribfiles import GLOBE, dataset

from data_prep import open_archive
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part


@pytest.mark.parametrize(
    ("levels", "attributes", "message"),
    [
        ([0, 1], {}, "isobaricInhPa: 0 to 1 may count levels"),
        ([1, 2], {"name": "level"}, "level: 1 to 2 may count levels"),
        ([1, 2], {"name": "level", "long_name": "sigma level"}, "counts model levels"),
        ([np.nan, 500], {"units": "hPa"}, "isobaricInhPa: 1 of 2 values are absent"),
    ],
)
def test_levels_that_are_none_of_pressure(tmp_path, levels, attributes, message):
    name = attributes.pop("name", "isobaricInhPa")
    data = dataset().assign_coords(isobaricInhPa=("isobaricInhPa", np.array(levels), attributes))
    data.rename(isobaricInhPa=name).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=message):
        open_archive(tmp_path / "a.nc")


def test_levels_that_are_counted_beside_their_pressure(tmp_path):
    data = dataset().rename(isobaricInhPa="level").assign_coords(level=[0, 1])
    data.assign_coords(p=("level", [50000.0, 85000.0], {"units": "Pa"})).to_netcdf(tmp_path / "a.nc")
    source = open_archive(tmp_path / "a.nc")
    assert source.layout.levels == (500, 850)
    np.testing.assert_array_equal(source.read(Part.FORECAST, 1).pressure[:, :, 0, 1], data.t.values[1, :, :, 1])


@pytest.mark.parametrize(
    ("axis", "values", "message"),
    [
        ("time", np.array(["2001-01-01", "NaT"], "datetime64[ns]"), "time: 1 of 2 values are absent"),
        ("number", [1.0, np.nan, 3.0], "number: members are numbered with integers"),
        ("number", [0.5, 1.5, 2.5], "number: members are numbered with integers"),
        ("latitude", [np.nan, *GLOBE[0][1:]], "1 of 7 values are absent"),
        ("longitude", [np.nan, *GLOBE[1][1:]], "values are absent"),
    ],
)
def test_axes_that_were_not_written_to_their_end(tmp_path, axis, values, message):
    dataset().assign_coords({axis: values}).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=message):
        open_archive(tmp_path / "a.nc")


@pytest.mark.parametrize(
    ("axis", "values", "message"),
    [
        ("isobaricInhPa", ["850hPa", "500hPa"], "could not convert string to float.*850hPa"),
        ("longitude", [f"{place:g}E" for place in GLOBE[1]], "could not convert string to float.*0E"),
        ("GRIB_paramId", "x", r"ValueError: invalid literal for int\(\) with base 10: 'x'"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(tmp_path, axis, values, message):
    data = dataset()
    if axis in data.coords:
        data = data.assign_coords({axis: values})
    else:
        data["t"].attrs[axis] = values
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=rf"a.nc: t: its axes or attributes make no sense \(.*{message}") as said:
        open_archive(tmp_path / "a.nc")
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("axis", ["isobaricInhPa", "time", "number", "step"])
def test_variables_of_no_value_are_left_out(tmp_path, axis):
    data = dataset().isel({axis: slice(0)})
    if axis == "time":
        start = "time", data.time.values, {"standard_name": "forecast_reference_time"}
        data = data.isel(step=0, drop=True).assign_coords(forecast_reference_time=start)
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=r"a.nc: holds no field .*; it has t \(an axis of length 0"):
        open_archive(tmp_path / "a.nc")
    dataset(t="q").assign(q=lambda other: (0 * other.q).assign_attrs(units="1")).to_netcdf(tmp_path / "b.nc")
    assert open_archive(tmp_path).layout.variables == ("q",)


def test_rotated_grids_are_refused(tmp_path):
    data = dataset()
    data.latitude.attrs["standard_name"], data.longitude.attrs["standard_name"] = "grid_latitude", "grid_longitude"
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match="latitude is grid_latitude; only geographic grids are read"):
        open_archive(tmp_path / "a.nc")


@pytest.mark.parametrize(
    ("axis", "ticks", "attributes"),
    [
        ("step", np.array([6, 12], "i4"), {"units": "hours"}),
        ("step", np.array([6, 12], "i8"), {"units": "hours"}),
        ("number", np.array([1, 2, 3], "i2"), {}),
        ("isobaricInhPa", np.array([850, 500], "i4"), {"units": "hPa"}),
        ("time", np.array([0, 48], "i4"), {"units": "hours since 2001-01-01"}),
        ("time", np.array([0, 48], "f8"), {"units": "hours since 2001-01-01"}),
    ],
)
def test_a_dimension_longer_than_its_coordinate(tmp_path, axis, ticks, attributes):
    """Fields were added, and their lead or member was not written: the library's fill value stands there."""
    data = dataset().assign_coords({axis: (axis, ticks, attributes)})
    data.to_netcdf(tmp_path / "a.nc", unlimited_dims=[axis], encoding={axis: {"_FillValue": None}})
    assert open_archive(tmp_path / "a.nc").layout.realization == (1, 2, 3)
    with netCDF4.Dataset(tmp_path / "a.nc", "a") as file:
        place = [slice(None)] * 6
        place[data.t.dims.index(axis)] = len(ticks)
        file["t"][tuple(place)] = 280.0
    said = rf"a.nc: {axis}: 1 of {len(ticks) + 1} values are absent \(never written\)"
    with pytest.raises(UserError, match=said):
        open_archive(tmp_path / "a.nc")


@pytest.mark.parametrize("absent", [np.array([6.0, np.nan]), np.array([6, "NaT"], "timedelta64[h]")])
def test_leads_that_are_absent(tmp_path, absent):
    values = absent.astype("timedelta64[ns]") if absent.dtype.kind == "m" else ("step", absent, {"units": "hours"})
    dataset().assign_coords(step=values).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match="step: 1 of 2 values are absent"):
        open_archive(tmp_path / "a.nc")


def test_levels_of_pressure_that_were_made_from_a_models(tmp_path):
    said = {"units": "hPa", "standard_name": "air_pressure", "long_name": "pressure levels (from hybrid levels)"}
    dataset().assign_coords(isobaricInhPa=("isobaricInhPa", [850.0, 500.0], said)).to_netcdf(tmp_path / "a.nc")
    assert open_archive(tmp_path / "a.nc").layout.levels == (500, 850)


def test_days_in_single_precision(tmp_path):
    days = np.array([241, 250], np.float32) / np.float32(24)
    dataset().assign_coords(step=("step", days, {"units": "days"})).to_netcdf(tmp_path / "a.nc")
    assert open_archive(tmp_path / "a.nc").layout.lead_hours == (241, 250)


def test_a_valid_time_that_only_its_standard_name_tells_gives_the_lead(tmp_path):
    start = ((), np.datetime64("2001-01-01", "ns"), {"standard_name": "forecast_reference_time"})
    valid = ((), np.datetime64("2001-01-03", "ns"), {"standard_name": "time"})
    data = dataset().isel(step=0, time=0, drop=True).assign_coords(start=start, validity=valid)
    data.to_netcdf(tmp_path / "a.nc")
    assert open_archive(tmp_path / "a.nc").layout.lead_hours == (48,)


def test_forecasts_of_several_starts_for_one_valid_time_are_not_at_lead_0(tmp_path):
    data = dataset().isel(step=0, drop=True).rename(time="forecast_reference_time")
    data.assign_coords(time=np.datetime64("2001-01-05", "ns")).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match="dimension forecast_reference_time carries both start and lead time"):
        open_archive(tmp_path / "a.nc")


@pytest.mark.parametrize(
    ("calendar", "message"),
    [("standard", "time: holds cftime objects; open the file with use_cftime=False"),
     ("360_day", "time: units None in the calendar 360_day do not make a date of the standard calendar")],
)  # fmt: skip
def test_init_times_of_cftime(calendar, message):
    times = xr.date_range("2001-01-01", periods=2, calendar=calendar, use_cftime=True)
    with pytest.raises(UserError, match=message):
        open_archive(dataset().assign_coords(time=times))


def test_geopotential_without_units_is_known_beside_a_level_of_no_whole_hpa(tmp_path):
    data = dataset(t="z").assign_coords(isobaricInhPa=[0.4, 500.0])
    data["z"] += 54000.0 - 270.0
    del data.z.attrs["units"]
    data.to_netcdf(tmp_path / "a.nc")
    source = open_archive(tmp_path / "a.nc")
    assert (source.layout.variables, source.layout.levels) == (("z",), (500,))
