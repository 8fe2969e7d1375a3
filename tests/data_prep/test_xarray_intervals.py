"""The interval of sums and means in NetCDF: CF bounds, cell methods, and what falls."""

import logging

import numpy as np
import pytest
import xarray as xr
from gribfiles import archive_of, dataset, message, opened, write

from data_prep import open_archive
from data_prep.identity import other_sums
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part
from ensemble_ml.store.xarray_engine import source_dataset


def test_sums_that_fall_do_not_run_from_the_start(tmp_path):
    data = dataset(t="tp").isel(isobaricInhPa=0, drop=True)
    rain = np.random.default_rng(0).gamma(0.3, 0.01, data.tp.shape).astype(np.float32)
    data["tp"] = data.tp.copy(data=rain).assign_attrs(units="m")
    data = data.assign_coords(step=np.array([24, 48], "timedelta64[h]").astype("timedelta64[ns]"))
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=r"tp, member 1, .*lead 48 h: its sum is below that of the lead before at \d+%"):
        open_archive(tmp_path / "a.nc").read(Part.FORECAST, 0)
    data["tp"] = data.tp.copy(data=np.cumsum(rain, list(data.tp.dims).index("step")))
    data.to_netcdf(tmp_path / "b.nc")
    found = open_archive(tmp_path / "b.nc").read(Part.FORECAST, 0).surface[:, :, 0]
    np.testing.assert_allclose(found, rain[0], atol=1e-6)
    for dry in (0.0, -9e-19):  # packed with an offset
        data["tp"].values[:, :, 0] = dry
        data.to_netcdf(tmp_path / f"c{dry}.nc")
        assert (open_archive(tmp_path / f"c{dry}.nc").read(Part.FORECAST, 0).surface > -1e-15).all()


@pytest.mark.parametrize("turn", [-1, 0, 1])
def test_packing_leaves_a_dry_point_dry_and_a_clear_sky_clear(tmp_path, turn):
    """Scales and offsets as the service has them, and one rounding beside."""
    data = dataset(t="tp").isel(isobaricInhPa=0, drop=True)
    data = data.assign_coords(step=("step", [24.0, 48.0], {"units": "hours", "bounds": "step_bnds"}))
    data["step_bnds"] = ("step", "two"), [[0.0, 24.0], [24.0, 48.0]]
    drawn = np.random.default_rng(0).normal(0, 0.5, data.tp.shape)
    data["tcc"] = data.tp.copy(data=(drawn + 0.5).clip(0, 1)).assign_attrs(units="(0 - 1)")
    data["tp"] = data.tp.copy(data=(0.03 * drawn).clip(0, 0.05)).assign_attrs(units="m", cell_methods="step: sum")
    packing = {"tp": (8.03329303850659e-07, 0.0263210846406669), "tcc": (1.52597204419215e-05, 0.499984740280558)}
    encoding = {
        name: dict(dtype="int16", _FillValue=-32767, scale_factor=scale, add_offset=np.nextafter(shift, shift + turn))
        for name, (scale, shift) in packing.items()
    }
    data.to_netcdf(tmp_path / "a.nc", encoding=encoding)
    source = open_archive(tmp_path / "a.nc")
    found = dict(zip(source.layout.surface, np.moveaxis(source.read(Part.FORECAST, 0).surface, 2, 0), strict=True))
    for name, bound in (("tp", 0), ("tcc", 0), ("tcc", 1)):
        wanted = data[name].isel(time=0).transpose("number", "step", ...).values == bound
        assert wanted.any()
        np.testing.assert_array_equal(found[name] == bound, wanted)


def test_values_of_the_moment_have_no_interval(tmp_path):
    data = dataset(t="tp").isel(isobaricInhPa=0, drop=True)
    data["tp"].attrs["units"] = "m"
    for name, methods in (("t2m", ""), ("d2m", "time: point"), ("msl", "time: mean")):
        data[name] = data.tp.copy().assign_attrs(units="Pa" if name == "msl" else "K", cell_methods=methods)
    hours = np.array([24.0, 48.0])
    data = data.assign_coords(step=("step", hours, {"units": "hours", "bounds": "step_bnds"}))
    data["step_bnds"] = ("step", "two"), np.stack([hours - 6, hours], 1)
    assert sorted(archive_of(data, tmp_path).lead_bounds) == ["msl", "tp"]


@pytest.mark.parametrize("bounds", [False, True])
def test_valid_times_after_one_start_are_leads(tmp_path, bounds):
    data = dataset(t="tp").isel(time=0, isobaricInhPa=0, drop=True)
    data["tp"].attrs["units"] = "m"
    start = np.datetime64("2001-01-01", "ns")
    times = start + np.array([24, 48], "timedelta64[h]")
    data = data.rename(step="time").assign_coords(time=times, forecast_reference_time=start)
    data.time.encoding["units"] = "hours since 2001-01-01"
    if bounds:
        data.time.attrs["bounds"] = "time_bnds"
        data["time_bnds"] = ("time", "two"), np.stack([times - np.timedelta64(6, "h"), times], 1)
    source = archive_of(data, tmp_path)
    assert source.layout.lead_hours == (24, 48) and source.layout.init_time.tolist() == [start.item()]
    assert source.lead_bounds == {"tp": [[18, 24], [42, 48]] if bounds else [[0, 24], [24, 48]]}


def rain_at(hours, width=6):
    """One start and valid times after it, with leads beside them; bounds of both, `width` hours wide."""
    data = dataset(t="tp").isel(time=0, isobaricInhPa=0, drop=True).rename(step="time").isel(time=slice(len(hours)))
    data["tp"] = (data.tp / 1000).assign_attrs(units="m")
    start, leads = np.datetime64("2001-01-01", "ns"), np.array(hours, float)
    times = start + np.array(hours, "timedelta64[h]")
    period = ("time", leads, {"units": "hours", "standard_name": "forecast_period", "bounds": "forecast_period_bnds"})
    data = data.assign_coords(time=times, forecast_reference_time=start, forecast_period=period)
    data.forecast_reference_time.attrs["standard_name"] = "forecast_reference_time"
    data.time.attrs |= {"bounds": "time_bnds", "standard_name": "time"}
    data.time.encoding["units"] = "hours since 2001-01-01"
    data["time_bnds"] = ("time", "two"), np.stack([times - np.timedelta64(width, "h"), times], 1)
    data["forecast_period_bnds"] = ("time", "two"), np.stack([leads - width, leads], 1)
    return data


@pytest.mark.parametrize(
    ("attrs", "reason"),
    [
        ({"cell_methods": "time: mean"}, "mean"),
        ({"cell_methods": "time: maximum"}, "maximum"),
        ({"GRIB_stepType": "avg"}, "mean"),
    ],
)
def test_what_is_no_sum_of_rain_is_left_out(tmp_path, caplog, attrs, reason):
    data = rain_at([24, 48]).assign(t2m=lambda made: made.tp.assign_attrs(units="K"))
    data.tp.attrs |= attrs
    data.to_netcdf(tmp_path / "a.nc")
    with caplog.at_level("INFO"):
        assert open_archive(tmp_path / "a.nc").layout.surface == ("t2m",)
    assert f"tp (the {reason} over time and not the sum)" in caplog.text


@pytest.mark.parametrize("minutes", [30, 45, 90, -360])
def test_sums_over_parts_of_hours_are_refused(tmp_path, minutes):
    data = rain_at([24, 48]).drop_vars("forecast_period_bnds")
    del data.forecast_period.attrs["bounds"]
    data["time_bnds"][:, 0] = data.time - np.timedelta64(minutes, "m")
    data.time_bnds.encoding["units"] = data.time.encoding["units"] = "minutes since 2001-01-01"
    data.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match="time: its bounds time_bnds are not whole hours apart"):
        open_archive(tmp_path / "a.nc")


@pytest.mark.parametrize("dropped", ["time", "forecast_period"])
def test_bounds_of_valid_times_or_of_leads_say_the_interval(tmp_path, dropped):
    data = rain_at([24, 48]).drop_vars(f"{dropped}_bnds")
    del data[dropped].attrs["bounds"]
    source = archive_of(data, tmp_path)
    assert source.lead_bounds == {"tp": [[18, 24], [42, 48]]}
    np.testing.assert_array_equal(source.read(Part.FORECAST, 0).surface[:, 1, 0], data.tp.values[:, 1])


def test_bounds_of_one_lead_say_its_interval(tmp_path):
    data = rain_at([24, 48], width=24)
    for lead in (0, 1):
        data.isel(time=lead).to_netcdf(tmp_path / f"{lead}.nc")
    source = open_archive(tmp_path)
    assert source.lead_bounds == {"tp": [[0, 24], [24, 48]]}
    np.testing.assert_array_equal(source.read(Part.FORECAST, 0).surface[:, 1, 0], data.tp.values[:, 1])


def test_bounds_of_valid_times_of_starts_and_leads_say_the_interval(tmp_path):
    data = dataset(t="tp").isel(isobaricInhPa=0, drop=True)
    data["tp"].attrs["units"] = "m"
    leads = np.array([24, 48])
    times = data.time.values[:, None] + leads.astype("timedelta64[h]")
    valid = ("time", "step"), times, {"bounds": "valid_bounds", "standard_name": "time"}
    data = data.assign_coords(step=("step", leads, {"units": "hours"}), valid_time=valid)
    data["valid_bounds"] = ("time", "step", "two"), np.stack([times - np.timedelta64(6, "h"), times], -1)
    for name in ("time", "valid_time", "valid_bounds"):
        data[name].encoding["units"] = "hours since 2001-01-01"
    assert archive_of(data, tmp_path).lead_bounds == {"tp": [[18, 24], [42, 48]]}


def test_bounds_that_are_no_pairs_are_refused(tmp_path):
    data = rain_at([24, 48])
    data["forecast_period_bnds"] = data.forecast_period_bnds.T
    data.isel(time=[0, 1, 1]).assign_coords(time=data.time.values[[0, 1, 1]] + np.arange(3)).to_netcdf(
        tmp_path / "a.nc"
    )
    with pytest.raises(UserError, match="forecast_period: its bounds forecast_period_bnds are not two for each"):
        open_archive(tmp_path / "a.nc")


@pytest.mark.parametrize("method", ["mean", "maximum"])
def test_means_and_extremes_over_no_interval_that_is_said(tmp_path, method):
    """A day's maximum is not the temperature of a moment; with bounds it is read, and says over which hours."""
    data = dataset()
    data["t"].attrs["cell_methods"] = f"step: {method}"
    data["u"] = data.t.copy().assign_attrs(units="m s-1", cell_methods="step: point")
    source = archive_of(data, tmp_path)
    assert source.layout.variables == ("u",)
    assert source.catalogue.readers[0].skipped == {f"t ({method} over time, over an interval that is not stated)": 1}


def test_sums_that_begin_anew_become_consecutive(tmp_path):
    data = dataset(t="tp").isel(isobaricInhPa=[0, 0], time=0).stack(ahead=["step", "isobaricInhPa"]).drop_vars("ahead")
    data = data.rename(ahead="step").drop_vars(["step", "isobaricInhPa"], errors="ignore")
    starts, ends = np.array([0.0, 0, 6, 6]), np.array([3.0, 6, 9, 12])
    rain = np.random.default_rng(0).gamma(0.3, 0.01, data.tp.shape).astype(np.float32)
    every = rain.copy()
    axis = data.tp.dims.index("step")
    for later in (1, 3):  # of the hours before, too
        at = tuple(later if dim == axis else slice(None) for dim in range(rain.ndim))
        before = tuple(later - 1 if dim == axis else slice(None) for dim in range(rain.ndim))
        every[at] += rain[before]
    data["tp"] = data.tp.copy(data=every).assign_attrs(units="m")
    data = data.assign_coords(step=("step", ends, {"units": "hours", "bounds": "step_bnds"}))
    data["step_bnds"] = ("step", "two"), np.stack([starts, ends], 1)
    source = archive_of(data, tmp_path)
    assert source.lead_bounds == {"tp": [[0, 3], [3, 6], [6, 9], [9, 12]]}
    found = source.read(Part.FORECAST, 0).surface[:, :, 0]
    np.testing.assert_allclose(found, np.moveaxis(rain, axis, 1), atol=1e-6)


def test_bounds_in_another_precision_end_at_the_coordinate(tmp_path):
    data = rain_at([10, 20], width=10)
    days = np.array([10, 20]) / 24
    said = {**data.forecast_period.attrs, "units": "days"}
    data = data.assign_coords(forecast_period=("time", days.astype(np.float32), said))
    data["forecast_period_bnds"] = ("time", "two"), np.stack([days - 10 / 24, days], 1)
    assert archive_of(data, tmp_path).lead_bounds == {"tp": [[0, 10], [10, 20]]}


def test_sums_at_lead_zero_alone_are_left_out_with_a_line(tmp_path, caplog):
    """As of an ensemble of analyses, whose hourly sums stand at their valid times without bounds."""
    data = dataset(t="tp").isel(step=0, isobaricInhPa=0, drop=True)
    data["tp"].attrs["units"] = "m"
    data["t2m"] = data.tp.copy().assign_attrs(units="K")
    data.to_netcdf(tmp_path / "a.nc")
    with caplog.at_level(logging.INFO, "data_prep"):
        assert open_archive(tmp_path / "a.nc").layout.surface == ("t2m",)
    told = [record.getMessage() for record in caplog.records if "tp left out" in record.getMessage()]
    assert len(told) == 1 and "state no interval" in told[0] and "time bounds" in told[0]
    for variables in (["tp"], ["t2m", "tp"]):
        with pytest.raises(UserError, match=r"variables=tp: .*a.nc has sums at lead 0 alone that state no interval"):
            open_archive(tmp_path / "a.nc", variables=variables)
    data.drop_vars("t2m").to_netcdf(tmp_path / "b.nc")
    with pytest.raises(UserError, match=r"b.nc: tp: there are sums at lead 0 alone that state no interval"):
        open_archive(tmp_path / "b.nc")
    data.time.attrs["bounds"] = "time_bnds"
    data.time.encoding["units"] = "hours since 2001-01-01"
    data["time_bnds"] = ("time", "two"), data.time.values[:, None] - np.array([[1, 0]], "timedelta64[h]")
    data.to_netcdf(tmp_path / "c.nc")
    assert open_archive(tmp_path / "c.nc", variables=["tp"]).lead_bounds == {"tp": [[-1, 0]]}


def test_the_name_of_a_sum_says_over_how_many_hours(tmp_path):
    """As WeatherBench 2 calls them."""
    data = dataset(t="total_precipitation_6hr").isel(isobaricInhPa=0, drop=True)
    data["total_precipitation_6hr"] = (data["total_precipitation_6hr"] / 1e4).assign_attrs(units="m")
    data["total_precipitation_6hr"][:, :, 0] = np.nan  # at the start, where there is nothing before
    data["total_precipitation_24hr"] = data["total_precipitation_6hr"] * 4
    data["total_precipitation_12hr"] = data["total_precipitation_6hr"] * 2
    for name, hours, factor in (("a.nc", (6,), 1), ("b.nc", (6, 12), 1), ("c.nc", (6, 12, 24), 4)):
        data[[f"total_precipitation_{one}hr" for one in hours]].to_netcdf(tmp_path / name)
        source = open_archive(tmp_path / name)
        first = 24 - 6 * factor
        assert source.layout.surface == ("tp",) and source.lead_bounds == {"tp": [[first, 24]]}
        rain = data["total_precipitation_6hr"].values[0, :, 1] * np.float32(factor)
        np.testing.assert_array_equal(source.read(Part.FORECAST, 0).surface[:, 0, 0], rain)
        told = source.catalogue.readers[0].skipped
        assert any("over other hours" in label for label in told) == (len(hours) > 1)


def test_a_rate_that_is_left_out_names_the_sum_that_is_read():
    data = dataset(t="tp").isel(isobaricInhPa=0, drop=True)
    rain = (data.tp / 1e4).assign_attrs(units="m")
    rate = rain.assign_attrs(units="kg m-2 s-1", standard_name="precipitation_flux", cell_methods="time: mean")
    assert other_sums(xr.Dataset({"tp12": rain, "tp6": rain, "rate": rate})) == {"tp12": "tp6", "rate": "tp6"}


def test_of_several_sums_that_between_two_leads_is_read_in_any_order_of_the_leads():
    rain = (dataset(t="tp").tp.isel(isobaricInhPa=0, drop=True) / 1e4).assign_attrs(units="m")
    data = xr.Dataset({"tp24": rain, "tp6": rain})
    assert other_sums(data) == other_sums(data.isel(step=[1, 0])) == {"tp6": "tp24"}


def test_a_sum_without_members_does_not_take_the_place_of_the_members_sums(tmp_path):
    """The mean of all members stands beside them under the name that states no hours."""
    data = dataset(t="tp6").isel(isobaricInhPa=0, drop=True).isel(step=[1])
    data["tp6"] = (abs(data.tp6) * 1e-5).assign_attrs(units="m")
    data["tp"] = data.tp6.mean("number").assign_attrs(units="m")
    source, skipped = opened(data, tmp_path)
    assert source.layout.realization == (1, 2, 3) and source.lead_bounds == {"tp": [[18, 24]]}
    assert skipped == ["tp (without members; tp6 has them)"]
    np.testing.assert_array_equal(source.read(Part.FORECAST, 0).surface[:, 0, 0], data.tp6.values[0, :, 0])


def test_a_known_variable_in_unknown_units_is_left_out_with_a_warning(tmp_path, caplog):
    data = dataset().assign(q=lambda made: (made.t / 1e5).assign_attrs(units="furlongs"))
    assert archive_of(data, tmp_path).layout.variables == ("t",)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1 and "though the variables are known: q (units furlongs)" in told[0]


@pytest.mark.parametrize("name", ["air_temperature", "wind_speed_of_gust"])
@pytest.mark.parametrize("lead", [24, 48])
def test_an_extreme_is_not_the_moment_of_another_file_under_the_same_name(tmp_path, name, lead):
    """As MOGREPS-G has them: the two differ by their cell methods and bounds alone."""
    gust = name == "wind_speed_of_gust"
    data = dataset(t=name).isel(isobaricInhPa=0, drop=True).isel(step=0, time=0, drop=True)
    data[name] = (data[name] / 20 if gust else data[name]).assign_attrs(
        standard_name=name, units="m s-1" if gust else "K"
    )
    start = np.datetime64("2001-01-01", "ns")
    data = data.assign_coords(forecast_reference_time=start, height=((), 10.0 if gust else 1.5, {"units": "m"}))
    data.assign_coords(forecast_period=((), 24, {"units": "hours"})).to_netcdf(tmp_path / "moment.nc")
    about = {"units": "hours", "bounds": "forecast_period_bnds"}
    data[name].attrs["cell_methods"] = "time: maximum (interval: 1 hour)"
    data = data.assign_coords(forecast_period=((), lead, about))
    data["forecast_period_bnds"] = "two", [lead - 1, lead]
    data.to_netcdf(tmp_path / "maximum.nc")
    short = "fg10" if gust else "t2m"
    assert open_archive(tmp_path / "moment.nc").lead_bounds == {}
    assert open_archive(tmp_path / "maximum.nc").lead_bounds == {short: [[lead - 1, lead]]}
    if lead == 24:  # where both are there, the one that the registry means is read, and the other left out by name
        both = open_archive(tmp_path)
        assert both.lead_bounds == ({short: [[23, 24]]} if gust else {})
        assert any(
            label.startswith(f"{short} (instantaneous" if gust else f"{short} (over hours")
            for label in both.catalogue.skipped
        )
        return
    with pytest.raises(UserError, match=rf"{short}: at 24 h the archive has instantaneous values.* keep one kind"):
        open_archive(tmp_path)


@pytest.mark.parametrize(
    ("name", "about", "first"),
    [("10fg6", {}, 18), ("fg10_6", {}, 18), ("fg10_3", {}, 21), ("fg10", {"GRIB_paramId": 123}, 18),
     ("10fg3", {"GRIB_paramId": 228028, "GRIB_stepType": "max"}, 21), ("10fg", {}, None), ("i10fg", {}, None)],
)  # fmt: skip
def test_gusts_of_some_hours_have_their_interval(tmp_path, name, about, first):
    data = dataset(t=name).isel(isobaricInhPa=0, drop=True)
    data[name] = (data[name] / 20).assign_attrs({"units": "m s-1"} | about)
    bounds = archive_of(data, tmp_path).lead_bounds
    assert bounds == ({} if first is None else {"fg10": [None, [first, 24]]})


def test_leads_without_an_interval_have_no_sum(tmp_path):
    """The Dataset of an archive has rain at 24 h alone; at 6 h it says "none", and must not cut the sum in two."""
    steps = {"t2m": (6, 24), "tp": ("0-24",)}
    members = [message(name, step=step, member=m) for m in (1, 2) for name in steps for step in steps[name]]
    archive = open_archive(write(tmp_path / "a.grib", members))
    again = open_archive(source_dataset(archive, [Part.FORECAST]).copy(deep=True).load())
    assert again.lead_bounds == archive.lead_bounds == {"tp": [None, [0, 24]]}
    for part in (archive, again):
        assert part.present(Part.FORECAST, 0)[1][0, :, 1].tolist() == [False, True]
    np.testing.assert_array_equal(*(part.read(Part.FORECAST, 0).surface for part in (archive, again)))
    assert again.catalogue.skipped == {"tp (sums over 0 h)": 2}
