"""Figures show the values that they are given, or say in one line what is missing."""

import builtins

import numpy as np
import pytest
import xarray as xr

import ensemble_ml as eml
from ensemble_ml.errors import UserError


def test_figures(here):
    ensemble = eml.open("archive/ensemble", static="archive/static.grib")
    forecast = eml.load("runs/first").predict(ensemble, members=2, dates=["2003-01-09"], thresholds={"tp": [0.001]})
    figure = eml.plot.map(forecast["t_mean"].isel(level=0, forecast_period=0), land=ensemble["lsm"])
    assert figure.axes[0].get_title(loc="left").endswith(", from 2003-01-09T00, +24 h")
    truth = eml.open("store.zarr")["t_truth"].sel(init_time=["2003-01-09"])
    fan = eml.plot.fan(forecast, "t", 48.2, -16.4, level=850, truth=truth.isel(lead_time=slice(1, None)))
    labels = [text.get_text() for text in fan.axes[0].get_legend().get_texts()]
    assert labels == ["10 to 90 %", "25 to 75 %", "50 %", "truth"]
    point = forecast["t_quantile"].sel(level=850, quantile=0.5).sel(latitude=48.2, longitude=343.6, method="nearest")
    drawn = next(line for line in fan.axes[0].lines if line.get_label() == "50 %")
    np.testing.assert_array_equal(drawn.get_ydata(), point.values.ravel())
    probability = forecast["tp_prob_above"].isel(threshold_tp=0, forecast_reference_time=0).drop_vars("time")
    event = probability > 0.4
    (curve,) = eml.plot.reliability(probability, event).axes[1].lines[:1]
    assert set(curve.get_ydata()[:3]) == {0.0} and curve.get_ydata()[-1] == 1.0


def test_reliability_of_each_threshold(here):
    """The truth may have more dates and leads, and names its axes as a store does."""
    forecast = eml.load("runs/first").predict(
        "archive/ensemble", members=2, dates=["2003"], thresholds={"tp": [0.001, 0.005]}
    )
    probability, truth = forecast["tp_prob_above"], eml.open("store.zarr")["tp_truth"]
    figure = eml.plot.reliability(probability, truth, title="rain")
    assert [axis.get_title(loc="left") for axis in figure.axes[:2]] == ["rain, over 0.001 m", "rain, over 0.005 m"]
    at = truth.sel(
        init_time=probability["forecast_reference_time"].values, lead_time=probability["forecast_period"].values
    )
    for number, value in enumerate((0.001, 0.005)):
        one = probability.isel(threshold_tp=number).rename(
            forecast_reference_time="init_time", forecast_period="lead_time"
        )
        alone = eml.plot.reliability(one.drop_vars("time"), at > value).axes[1].lines[0]
        drawn = figure.axes[2 + number].lines[0]
        np.testing.assert_array_equal(drawn.get_xydata(), alone.get_xydata())
    last = eml.plot.reliability(probability.isel(forecast_period=1), truth).axes[2].lines[0]
    same = eml.plot.reliability(probability.isel(forecast_period=[1]), truth).axes[2].lines[0]
    np.testing.assert_array_equal(last.get_xydata(), same.get_xydata())
    with pytest.raises(UserError, match="event or truth has several values along number"):
        eml.plot.reliability(probability, truth.expand_dims(number=2))
    with pytest.raises(UserError, match=r"probabilities along threshold_tp, but the event is for one threshold"):
        eml.plot.reliability(probability, truth > 0.001)
    with pytest.raises(UserError, match="forecast: the truth lacks some of its times or places"):
        eml.plot.reliability(probability, truth.isel(init_time=[0]))


@pytest.mark.parametrize(
    ("lead", "units", "text"),
    [(np.timedelta64(24, "h"), {}, "+24 h"), (24, {"units": "hours"}, "+24 hours"), (1.5, {}, "+1.5")],
)
def test_the_lead_of_a_map_may_be_a_number(lead, units, text):
    """As files have it that are opened with decode_timedelta=False."""
    axes = {"latitude": np.arange(60, 29, -1.0), "longitude": np.arange(61.0)}
    field = xr.DataArray(np.zeros((31, 61)), axes, list(axes), "t2m")
    figure = eml.plot.map(field.assign_coords(lead_time=xr.DataArray(lead, attrs=units)))
    assert figure.axes[0].get_title(loc="left") == f"t2m, {text}"


def test_the_start_of_a_map_is_told_to_the_minute():
    for start, text in (("2003-01-09T12:30", "2003-01-09T12:30"), ("2003-01-09", "2003-01-09T00")):
        figure = eml.plot.map(on_globe(19, 36).assign_coords(init_time=np.datetime64(start, "ns")))
        assert figure.axes[0].get_title(loc="left") == f"t2m, from {text}"


def test_maps_without_a_land_mask_show_coasts_where_they_are():
    """The Iberian Peninsula's west coast lies near 9 degrees west, whichever way the grid counts its longitudes."""
    for west in (-30.0, 330.0):
        axes = {"latitude": np.arange(60, 29, -1.0), "longitude": west + np.arange(61)}
        axis = eml.plot.map(xr.DataArray(np.zeros((31, 61)), axes, list(axes))).axes[0]
        lines = np.concatenate([np.c_[line.get_xdata(), line.get_ydata()] for line in axis.lines])
        iberia = lines[(np.abs(lines[:, 1] - 40) < 2) & (np.abs(lines[:, 0] - (west + 21.5)) < 2)]
        assert len(iberia) and axis.get_xlim()[1] - axis.get_xlim()[0] < 65 and axis.get_ylim() == (29.5, 60.5)


def test_a_map_of_the_globe_has_greenwich_in_the_middle_and_says_which_threshold():
    axes = {"latitude": np.arange(80, -81, -20.0), "longitude": np.arange(0, 360, 20.0)}
    about = {"units": "1", "long_name": "probability that tp exceeds the threshold"}
    field = xr.DataArray(np.zeros((9, 18)) + axes["longitude"] / 360, axes, list(axes), "tp_prob_above", about)
    at = xr.DataArray(0.001, attrs={"units": "m"})
    figure = eml.plot.map(field.assign_coords(threshold_tp=at, level=850))
    axis, bar = figure.axes
    assert axis.get_xlim() == (-190, 170) and bar.get_ylabel() == "probability"
    assert axis.get_title(loc="left") == f"{about['long_name']}, threshold 0.001 m, level 850 hPa"
    drawn = axis.collections[0].get_array().reshape(9, 18)
    np.testing.assert_allclose(drawn[0], np.roll(axes["longitude"] / 360, 9))
    figure.canvas.draw()
    labels = [tick.get_text() for tick in axis.get_xticklabels()]
    assert "150°W" in labels and "0°" in labels and "100°E" in labels


def on_globe(rows, columns, **more):
    """Return a field that grows northwards, on a grid from the north pole to the south pole."""
    axes = {"latitude": np.linspace(90, -90, rows), "longitude": np.arange(columns) * 360 / columns}
    values = np.broadcast_to(axes["latitude"][:, None], (rows, columns))
    return xr.DataArray(values, axes, list(axes), "t2m", {"units": "K"}).expand_dims(more)


def test_land_is_taken_at_the_points_of_the_field():
    field, land = on_globe(19, 36), on_globe(37, 72) / 180 + 0.5
    for one in (land, land[::-1], land.assign_coords(latitude=land.latitude.astype("f4"))):
        coasts = eml.plot.map(field, land=one).axes[0].collections[-1]
        ends = np.concatenate([path.vertices for path in coasts.get_paths()])
        assert len(ends) and np.abs(ends[:, 1]).max() < 1e-4  # land begins at the equator
    with pytest.raises(UserError, match="land: lacks some of the field's points"):
        eml.plot.map(field, land=on_globe(9, 16))


def test_a_region_across_greenwich_is_found_in_land_and_truth_of_the_globe():
    """Its longitudes begin below zero, theirs at zero; files may hold them in single precision."""
    globe = (on_globe(19, 36) + np.arange(36)) / 400 + 0.4
    west = globe.assign_coords(longitude=(globe.longitude + 180) % 360 - 180).sortby("longitude")
    region = west.sel(longitude=slice(-30, 30))
    for one in (region, region.assign_coords(longitude=region.longitude.astype("f4") - np.float32(1e-6))):
        eml.plot.map(one, land=globe)
        probability = one.clip(0, 1).expand_dims(threshold_t2m=[0.3, 0.5])
        curves = [
            [axis.lines[0].get_xydata() for axis in eml.plot.reliability(probability, truth).axes[2:]]
            for truth in (globe, region.assign_coords(one.coords))
        ]
        np.testing.assert_array_equal(*curves)
    with pytest.raises(UserError, match="the truth lacks some of its times or places"):
        eml.plot.reliability(probability, globe.isel(longitude=slice(4, None)))


def test_a_fan_shows_the_truth_at_its_own_leads():
    hours = np.array([24, 48], "timedelta64[h]").astype("timedelta64[ns]")
    forecast = xr.Dataset({"t2m_quantile": on_globe(19, 36, quantile=[0.1, 0.5, 0.9], forecast_period=hours)})
    truth = xr.DataArray([1.0, 2.0], {"lead_time": hours[::-1]}, ["lead_time"])
    for one in (forecast, forecast.sel(latitude=0, longitude=0)):
        lines = eml.plot.fan(one, "t2m", 0, 0, truth=truth).axes[0].lines
        assert [line.get_ydata().tolist() for line in lines if line.get_label() == "truth"] == [[2.0, 1.0]]
    (median,) = eml.plot.fan(forecast.sel(quantile=0.5), "t2m", 0, 0).axes[0].lines
    assert median.get_label() == "50 %"
    assert eml.plot.fan(forecast.isel(forecast_period=0), "t2m", 0, 0).axes[0].lines[0].get_xdata().tolist() == [24.0]
    for seen, told in (
        (truth.assign_coords(lead_time=hours + hours), "truth: has no values at 24 h of the forecast"),
        (truth.drop_vars("lead_time"), "truth: has no lead times"),
        (forecast.t2m_quantile[0].isel(latitude=0), "t2m_quantile: has longitude alone of a grid's two axes"),
    ):
        with pytest.raises(UserError, match=told):
            eml.plot.fan(forecast, "t2m", 0, 0, truth=seen)
    with pytest.raises(UserError, match="is int64, not timedelta64; open the file with decode_timedelta=True"):
        eml.plot.fan(forecast.assign_coords(forecast_period=[24, 48]), "t2m", 0, 0)


def test_a_fan_does_not_show_the_truth_of_another_start():
    hours = np.array([24, 48], "timedelta64[h]").astype("timedelta64[ns]")
    starts = np.array(["2003-01-09", "2003-01-10"], "datetime64[ns]")
    axes = {"quantile": [0.1, 0.5, 0.9], "forecast_period": hours}
    quantiles = on_globe(19, 36, forecast_reference_time=starts, **axes)
    forecast = xr.Dataset({"t2m_quantile": quantiles}).isel(forecast_reference_time=[1])
    truth = xr.DataArray(
        [[1.0, 2.0], [3.0, 4.0]], {"init_time": starts, "lead_time": hours}, ["init_time", "lead_time"]
    )
    for mine in ([1], 1):
        eml.plot.fan(forecast, "t2m", 0, 0, truth=truth.isel(init_time=mine))
    for other in ([0], 0):
        with pytest.raises(UserError, match="truth: starts at 2003-01-09T00:00, the forecast at 2003-01-10T00:00"):
            eml.plot.fan(forecast, "t2m", 0, 0, truth=truth.isel(init_time=other))


def test_an_event_of_more_dates_is_not_compared_with_one_forecast():
    """Repeated over all dates, the forecast of one would make a diagram of no meaning."""
    probability = on_globe(19, 36, init_time=[0, 1]) / 180 + 0.5
    event = probability > 0.4
    one = eml.plot.reliability(probability.isel(init_time=0), event.isel(init_time=[0])).axes[1].lines[0]
    assert len(one.get_xdata()) == 10
    with pytest.raises(UserError, match="ours: event or truth has several values along init_time"):
        eml.plot.reliability({"ours": probability.isel(init_time=0)}, event)
    with pytest.raises(UserError, match="probability: holds no forecast"):
        eml.plot.reliability({}, event)


def test_a_dataset_in_the_place_of_a_variable_is_told_in_one_line():
    field = on_globe(19, 36, quantile=[0.5], forecast_period=np.array([24], "timedelta64[h]").astype("timedelta64[ns]"))
    fields, one = xr.Dataset({"t2m_quantile": field, "t2m_mean": field}), field[0, 0]
    for draw, told in (
        (lambda: eml.plot.map(fields), "field: is a Dataset; choose one of its variables: t2m_quantile, t2m_mean"),
        (lambda: eml.plot.map(one, land=fields), "land: is a Dataset; choose one of its variables"),
        (lambda: eml.plot.map(one.values), "field: is ndarray; give an xarray DataArray"),
        (lambda: eml.plot.fan(fields, "t2m", 0, 0, truth=fields), "truth: is a Dataset; choose one of its variables"),
        (lambda: eml.plot.fan(field, "t2m", 0, 0), "forecast: is DataArray; give the Dataset that predict returns"),
        (lambda: eml.plot.reliability(one > 0, fields), "event: is a Dataset; choose one of its variables"),
        (lambda: eml.plot.reliability([one], one > 0), "forecast: is list; give an xarray DataArray"),
    ):
        with pytest.raises(UserError, match=told):
            draw()


def test_numbers_of_points_are_no_degrees():
    """Of an array without coordinates a map was drawn from 0 to 18 degrees north."""
    hours = np.array([24], "timedelta64[h]").astype("timedelta64[ns]")
    field = on_globe(19, 36).drop_vars("longitude")
    quantiles = field.expand_dims(quantile=[0.5], forecast_period=hours).to_dataset(name="t2m_quantile")
    share = field / 180 + 0.5
    for draw in (
        lambda: eml.plot.map(field),
        lambda: eml.plot.map(on_globe(19, 36), land=field),
        lambda: eml.plot.fan(quantiles, "t2m", 0, 0),
        lambda: eml.plot.reliability(share, share > 0.4),
    ):
        with pytest.raises(UserError, match="dimension longitude: has no coordinate; give its degrees"):
            draw()


def test_a_level_may_be_named_by_a_word():
    figure = eml.plot.map(on_globe(19, 36).assign_coords(level_type="isobaricInhPa", level="surface"))
    assert figure.axes[0].get_title(loc="left") == "t2m"


def test_an_event_of_another_start_lead_or_level_is_not_counted():
    """Wherever the start is written: as one date along a dimension, or beside the values."""
    starts = np.array(["2003-01-09", "2003-01-10"], "datetime64[ns]")
    leads = np.array([24, 48], "timedelta64[h]").astype("timedelta64[ns]")
    field = on_globe(19, 36, init_time=starts, lead_time=leads, level=[500, 850]) / 180 + 0.5
    mine = {"init_time": 0, "lead_time": 0, "level": 0}
    forecast = field.isel(mine).rename(init_time="forecast_reference_time", lead_time="forecast_period")
    of_thresholds = forecast.expand_dims(threshold_t=[0.1, 0.9])
    for axis, told in (
        ("init_time", "event: starts at 2003-01-10T00:00, the forecast at 2003-01-09T00:00"),
        ("lead_time", "event: has a lead of 48 h, the forecast of 24 h"),
        ("level", "event: is at level 850, the forecast at level 500"),
    ):
        for one in (1, [1]):
            other = field.isel(mine | {axis: one})
            with pytest.raises(UserError, match=told):
                eml.plot.reliability(forecast, other > 0.4)
        with pytest.raises(UserError, match=told):
            eml.plot.reliability(of_thresholds, field.isel(mine | {axis: 1}))
    eml.plot.reliability(forecast.assign_coords(forecast_period=24), field.isel(mine) > 0.4)
    eml.plot.reliability(of_thresholds, field)


def test_a_truth_in_other_units_is_neither_drawn_nor_counted():
    """In mm, nearly all rain would be over a threshold in m."""
    hours = np.array([24, 48], "timedelta64[h]").astype("timedelta64[ns]")
    forecast = xr.Dataset({"t2m_quantile": on_globe(19, 36, quantile=[0.1, 0.5, 0.9], forecast_period=hours)})
    truth = xr.DataArray([1.0, 2.0], {"lead_time": hours}, ["lead_time"])
    for units in ("K", "kelvin", None):
        eml.plot.fan(forecast, "t2m", 0, 0, truth=truth if units is None else truth.assign_attrs(units=units))
    with pytest.raises(UserError, match="truth: the truth is in degC, the forecast in K; bring the truth to K"):
        eml.plot.fan(forecast, "t2m", 0, 0, truth=truth.assign_attrs(units="degC"))
    rain = on_globe(19, 36) / 1e5
    at = xr.DataArray([1e-4, 5e-4], dims=["threshold_tp"], attrs={"units": "m"})
    probability = (rain.expand_dims(threshold_tp=2) * 1e3).clip(0, 1).assign_coords(threshold_tp=at)
    eml.plot.reliability(probability, rain.assign_attrs(units="m"))
    with pytest.raises(UserError, match="ours: the truth is in mm, the forecast in m; bring the truth to m"):
        eml.plot.reliability({"ours": probability}, (1000 * rain).assign_attrs(units="mm"))


def test_a_fan_of_one_level_is_not_that_of_another():
    hours = np.array([24, 48], "timedelta64[h]").astype("timedelta64[ns]")
    quantiles = on_globe(19, 36, quantile=[0.1, 0.5, 0.9], level=[500, 850], forecast_period=hours)
    forecast = xr.Dataset({"z_quantile": quantiles}).sel(level=500)
    for level in (None, 500):
        eml.plot.fan(forecast, "z", 0, 0, level=level)
    with pytest.raises(UserError, match="level=850: give one of 500 hPa"):
        eml.plot.fan(forecast, "z", 0, 0, level=850)
    with pytest.raises(UserError, match="truth: is at level 850, the forecast at level 500"):
        eml.plot.fan(forecast, "z", 0, 0, truth=quantiles.isel(quantile=1).sel(level=850))
    surface = forecast.drop_vars("level").rename(z_quantile="t2m_quantile")
    eml.plot.fan(surface, "t2m", 0, 0)
    with pytest.raises(UserError, match="level=850: the forecast of t2m has no levels; leave it out"):
        eml.plot.fan(surface, "t2m", 0, 0, level=850)


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda f: eml.plot.map(f["t_mean"]), "t_mean: has several values along"),
        (lambda f: eml.plot.map(f["level"]), "level: has several values along level"),
        (lambda f: eml.plot.fan(f, "t", 0, 0), "level=None: give one of"),
        (lambda f: eml.plot.fan(f, "t2m", 0, 0), "holds 7 init times"),
        (lambda f: eml.plot.fan(f, "sst", 0, 0), "sst: the forecast has no quantiles"),
        (lambda f: eml.plot.reliability(f["t2m_mean"], f["t2m_mean"] > 0), "forecast: holds"),
        (lambda f: eml.plot.reliability(f["t2m_mean"], f["t2m_mean"][:, :, 1:] > 0), "coordinates are not those"),
    ],
)
def test_what_cannot_be_drawn(here, draw, said):
    forecast = xr.open_mfdataset("forecast/*.nc", decode_timedelta=True, combine_attrs="override")
    with pytest.raises(UserError, match=said):
        draw(forecast)


def test_without_matplotlib_one_line_says_so(monkeypatch):
    real = builtins.__import__

    def without(name, *given, **more):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *given, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="matplotlib: not installed"):
        eml.plot.map(xr.DataArray(np.zeros((2, 2)), dims=("latitude", "longitude")))
