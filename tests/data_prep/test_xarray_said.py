"""What names, attributes and coordinates of NetCDF and Zarr say against a variable, and what they do not."""

import numpy as np
import pytest
import xarray as xr
from gribfiles import dataset, opened, surface

from data_prep import open_archive
from data_prep.identity import Overrides
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part


class TestWords:
    """Names and descriptions that make another quantity of what the standard name says."""

    @pytest.mark.parametrize(
        ("name", "word"),
        [("maximum_temperature_2m", "maximum"), ("average_temperature_2m", "average"), ("t2m_spread", "spread"),
         ("apparent_temperature_2m", "apparent"), ("temperature_anomaly_2m", "anomaly"), ("t2m_std", "std"),
         ("temperature_mean_850hpa", "mean"), ("t_p90_500hpa", "p90"), ("t2m_clim", "clim"), ("tasmax", "tasmax"),
         ("temperature_bias", "bias"), ("t2mSpread", "spread"), ("air_temperature_percentiles", "percentiles")],
    )  # fmt: skip
    def test_names_that_contradict_the_standard_name(self, tmp_path, name, word):
        data = surface(name, standard_name="air_temperature").assign_coords(height=2.0)
        source, skipped = opened(data, tmp_path)
        assert source.layout.surface == ("skt",) and skipped == [f"{name} ({word} by its name)"]

    @pytest.mark.parametrize(
        ("name", "attributes", "place", "read"),
        [("tscr", {"standard_name": "air_temperature", "long_name": "Screen temperature"}, {"height": 1.5}, "t2m"),
         ("p_red", {"standard_name": "air_pressure_at_mean_sea_level", "units": "Pa",
                    "long_name": "Mean sea-level pressure"}, {}, "msl"),
         ("gustmax", {"standard_name": "wind_speed_of_gust", "units": "m s-1", "short_name": "max_gust"}, {}, "fg10"),
         ("mslp", {"standard_name": "air_pressure_at_sea_level", "units": "Pa"}, {"height": 2.0}, "msl"),
         ("t2m", {"long_name": "2 metre temperature", "units_metadata": "temperature: on_scale"}, {}, "t2m")],
    )  # fmt: skip
    def test_names_that_say_nothing_against_it(self, tmp_path, name, attributes, place, read):
        source, skipped = opened(surface(name, **attributes).assign_coords(place), tmp_path)
        assert set(source.layout.surface) == {read, "skt"} and skipped == []

    @pytest.mark.parametrize(
        ("key", "text"),
        [("long_name", "Ensemble standard deviation of 2 metre temperature"), ("statistic", "standard deviation"),
         ("long_name", "90th percentile of temperature"), ("units_metadata", "temperature: difference"),
         ("ensemble_statistic", "spread"), ("cell_method", "time: maximum"), ("long_name", "Mean 2 m temperature")],
    )  # fmt: skip
    def test_descriptions_of_other_quantities(self, tmp_path, key, text):
        source, skipped = opened(surface(**{key: text}), tmp_path)
        assert source.layout.surface == ("skt",) and skipped == [f"t2m ({key} {text!r})"]

    @pytest.mark.parametrize(
        ("said", "reason"),
        [("max", " (step_type max, over an interval that is not stated)"), ("instant", ""), ("instantaneous", ""),
         ("maximum", " (step_type max, over an interval that is not stated)"), ("diff", " (of stepType diff)")],
    )  # fmt: skip
    def test_the_step_type_that_others_than_cfgrib_write(self, tmp_path, said, reason):
        source, skipped = opened(surface(step_type=said), tmp_path)
        assert skipped == ([f"t2m{reason}"] if reason else [])
        assert ("t2m" in source.layout.surface) == (not reason)

    def test_a_mean_over_time_whose_interval_is_said(self, tmp_path):
        """The description says no more than cell methods and bounds do."""
        data = surface(long_name="Mean 2 metre temperature", cell_methods="step: mean").drop_vars("skt")
        hours = xr.DataArray([24.0, 48.0], dims="step", attrs={"units": "hours", "bounds": "step_bnds"})
        data = data.assign_coords(step=hours)
        data["step_bnds"] = ("step", "two"), [[0.0, 24.0], [24.0, 48.0]]
        source, _ = opened(data, tmp_path)
        assert source.lead_bounds == {"t2m": [[0, 24], [24, 48]]}

    def test_the_user_decides_what_a_name_is(self, tmp_path):
        data = surface("temperature_mean", long_name="Ensemble mean").drop_vars("skt")
        source, _ = opened(data, tmp_path, overrides=Overrides({"t2m": "temperature_mean"}))
        np.testing.assert_array_equal(
            source.read(Part.FORECAST, 1).surface[:, :, 0], data["temperature_mean"].values[1]
        )


class TestMessages:
    """Attributes that cfgrib copies from GRIB messages, if it is told to."""

    @pytest.mark.parametrize(
        ("key", "value", "reason"),
        [("marsType", "es", "of type es"), ("type", "em", "of type em"), ("typeOfProcessedData", "ep", "of type ep"),
         ("stream", "moda", "of stream moda"), ("marsStream", "enfh", ""), ("dataType", "pb", "of type pb"),
         ("productDefinitionTemplateNumber", 6, "of product template 6"), ("productDefinitionTemplateNumber", 11, ""),
         ("percentileValue", 90, "GRIB_percentileValue 90"), ("derivedForecast", 2, "GRIB_derivedForecast 2"),
         ("percentileValue", 255, ""), ("typeOfProcessedData", 4, ""), ("typeOfProcessedData", 8, "of type 8"),
         ("dataType", "cp", ""), ("dataType", "af", ""), ("dataType", "unknown", ""), ("dataType", "missing", ""),
         ("dataType", 255, "")],
    )  # fmt: skip
    def test_keys_that_tell_a_field_of_one_run(self, tmp_path, key, value, reason):
        source, skipped = opened(surface(**{f"GRIB_{key}": value}), tmp_path)
        assert skipped == ([f"t2m ({reason})"] if reason else [])
        assert ("t2m" in source.layout.surface) == (not reason)

    @pytest.mark.parametrize(
        ("name", "kind", "good"),
        [("t2m", "heightAboveGround", True), ("t2m", "surface", True), ("t2m", "depthBelowLandLayer", False),
         ("msl", "meanSea", True), ("msl", "heightAboveGround", False), ("tcc", "atmosphere", True),
         ("tcc", "lowCloudLayer", False), ("air_temperature", "hybrid", False)],
    )  # fmt: skip
    def test_kinds_of_level_of_surface_variables(self, tmp_path, name, kind, good):
        data = surface(name, units={"msl": "Pa", "tcc": "1"}.get(name, "K"), GRIB_typeOfLevel=kind)
        place = {"height": 2.0} if name == "air_temperature" else {}
        source, skipped = opened(data.assign_coords(place), tmp_path)
        assert skipped == ([] if good else [f"{name} (typeOfLevel {kind})"])
        assert (name in source.layout.surface) == good


class TestPlaces:
    """Coordinates that all variables of a file share, and those that make another quantity of one."""

    @pytest.mark.parametrize(
        ("place", "value"),
        [("depthBelowLandLayer", 0.0), ("heightAboveGround", 10.0), ("hybrid", 1.0), ("mostUnstableParcel", 0.0)],
    )
    @pytest.mark.parametrize(
        ("name", "read", "attributes"),
        [("t2m", "t2m", {}), ("2m_temperature", "t2m", {}),
         ("t2m", "t2m", {"GRIB_paramId": 167, "GRIB_typeOfLevel": "heightAboveGround"}),
         ("t", "t2m", {"GRIB_paramId": 167, "GRIB_typeOfLevel": "surface"}),
         ("tcwv", "tcwv", {"GRIB_paramId": 137, "GRIB_typeOfLevel": "entireAtmosphere", "units": "kg m-2"})],
    )  # fmt: skip
    def test_places_of_other_variables_of_the_file(self, tmp_path, place, value, name, read, attributes):
        data = surface(name, **attributes).drop_vars("skt")
        source, skipped = opened(data.assign_coords({place: value}), tmp_path)
        assert source.layout.surface == (read,) and skipped == []
        np.testing.assert_array_equal(source.read(Part.FORECAST, 1).surface[:, :, 0], data[name].values[1])

    @pytest.mark.parametrize(
        ("name", "coordinate"),
        [("air_temperature", {"depthBelowLandLayer": 0.0}), ("tcc", {"lowCloudLayer": 0.0})],
    )
    def test_places_that_may_be_its_own_are_warned_of(self, tmp_path, name, coordinate, caplog):
        data = surface(name, units="1" if name == "tcc" else "K").assign_coords(coordinate)
        data["sp"] = data["skt"].assign_attrs(units="Pa", GRIB_paramId=134, GRIB_typeOfLevel="surface")
        data = data.drop_vars("skt")
        with caplog.at_level("WARNING"):
            source, skipped = opened(data, tmp_path)
        place, value = next(iter(coordinate.items()))
        assert source.layout.surface == ("sp",) and skipped == [f"{name} ({place} {value:g})"]
        assert f"left out because a coordinate makes them another quantity: {skipped[0]}; drop it" in caplog.text

    def test_a_length_one_axis_is_the_variables_own(self, tmp_path):
        data = surface().drop_vars("skt").expand_dims(heightAboveGround=[10.0])
        with pytest.raises(UserError, match=r"it has t2m \(heightAboveGround 10\)"):
            opened(data, tmp_path)

    @pytest.mark.parametrize(
        ("name", "values", "reason"),
        [("percentile", [10.0, 90.0], "percentile 10, 90"), ("height", [80.0, 80.0], "height 80, 80"),
         ("height", [2.0, 2.0], ""), ("threshold", [273.0, 280.0], "threshold 273, 280"), ("month", [1, 1], ""),
         ("season", ["DJF", "DJF"], "")],
    )  # fmt: skip
    @pytest.mark.parametrize("dates", [1, 2])
    def test_coordinates_along_time(self, tmp_path, name, values, reason, dates):
        data = surface().isel(time=slice(dates)).drop_vars("skt")
        data = data.assign_coords({name: ("time", values[:dates])})
        if not reason:
            assert opened(data, tmp_path)[0].layout.surface == ("t2m",)
            return
        shown = reason if dates == 2 else reason.split(",")[0]
        with pytest.raises(UserError, match=rf"it has t2m \({shown}\)"):
            opened(data, tmp_path)

    @pytest.mark.parametrize("name", ["percentile", "quantile", "threshold", "probability"])
    def test_data_variables_of_one_value_that_are_coordinates(self, tmp_path, name):
        with pytest.raises(UserError, match=rf"it has t2m \({name} 90\)"):
            opened(surface().drop_vars("skt").assign({name: 90.0}), tmp_path)

    @pytest.mark.parametrize(
        ("name", "about", "reason"),
        [("number", {"units": "%"}, "number in %"), ("number", {"long_name": "Percentile"}, "number is a percentile"),
         ("sample", {"long_name": "quantile level of the distribution"}, "sample is a quantile"),
         ("number", {"units": "1", "long_name": "ensemble member numerical id"}, ""), ("sample", {"units": ""}, "")],
    )  # fmt: skip
    def test_axes_that_count_no_members(self, tmp_path, name, about, reason):
        data = surface().drop_vars("skt")
        data = data.rename(number=name) if name != "number" else data
        data = data.assign_coords({name: (name, [10, 50, 90], about)})
        if not reason:
            assert opened(data, tmp_path)[0].layout.realization == (10, 50, 90)
            return
        with pytest.raises(UserError, match=rf"it has t2m \({reason}\)"):
            opened(data, tmp_path)


class TestValidTimes:
    """Valid times that stand beside start and lead in other ways than as a coordinate of these two."""

    @pytest.mark.parametrize("hours", [0, 12])
    @pytest.mark.parametrize("name", ["valid_time", "verification"])
    @pytest.mark.parametrize("dims", [("time", "step"), ("time", "number", "step"), ("step", "time", "latitude")])
    def test_each_is_checked(self, tmp_path, hours, name, dims):
        data = surface()
        times = (data.time + data.step + np.timedelta64(hours, "h")).broadcast_like(data.t2m).isel(longitude=0)
        if "latitude" not in dims:
            times = times.isel(latitude=0)
        times = times if "number" in dims else times.isel(number=0)
        data[name] = dims, times.drop_vars(times.coords).transpose(*dims).values, {"standard_name": "time"}
        if not hours:
            assert opened(data, tmp_path)[0].layout.lead_hours == (0, 24)
            return
        with pytest.raises(UserError, match=f"{name} is 2001-01-01T12:00 where start and lead make 2001-01-01T00:00"):
            opened(data, tmp_path)

    def test_starts_and_valid_times_alone_make_the_lead(self, tmp_path):
        data = surface().isel(step=0, drop=True)
        data = data.rename(time="forecast_reference_time")
        data["valid_time"] = "forecast_reference_time", data.forecast_reference_time.values + np.timedelta64(36, "h")
        assert opened(data, tmp_path)[0].layout.lead_hours == (36,)


class TestMappings:
    """Grid mappings that are absent, or say in other words that the axes are latitude and longitude."""

    @pytest.mark.parametrize(
        ("mapping", "degrees", "good"),
        [(None, True, True), (None, False, False), ({}, True, True), ({"epsg_code": "EPSG:4326"}, False, True),
         ({"proj4": "+proj=longlat +datum=WGS84"}, False, True), ({"spatial_ref": "EPSG:4326"}, False, True),
         ({"grid_mapping_name": "Latitude_Longitude"}, False, True), ({"epsg_code": "EPSG:3035"}, True, False),
         ({"proj4": "+proj=ob_tran +o_proj=longlat"}, True, False)],
    )  # fmt: skip
    def test_what_a_mapping_says(self, tmp_path, mapping, degrees, good):
        data = surface(grid_mapping="LatLon_Projection")
        if mapping is not None:
            data["LatLon_Projection"] = (), 0, mapping
        if degrees:
            data.latitude.attrs["units"], data.longitude.attrs["units"] = "degrees_north", "degrees_east"
        source, skipped = opened(data, tmp_path)
        assert skipped == ([] if good else ["t2m (grid mapping LatLon_Projection)"])
        assert ("t2m" in source.layout.surface) == good


class TestHoursOfSums:
    """Intervals of sums in words and in keys of GRIB messages."""

    def rain(self, **attributes):
        data = dataset(t="tp").isel(isobaricInhPa=0, drop=True).isel(step=[1])
        data["tp"] = (abs(data["tp"]) / 1e5).assign_attrs({"units": "m"} | attributes)
        return data.assign_coords(step=np.array([120], "timedelta64[h]").astype("timedelta64[ns]"))

    @pytest.mark.parametrize(
        ("key", "text", "hours"),
        [("long_name", "Total precipitation in the last six hours", 6), ("long_name", "Daily total precipitation", 24),
         ("long_name", "Rain in the last twenty four hours", 24), ("long_name", "Rain, seventy-two hour sum", 72),
         ("long_name", "Total precipitation, 1-day sum", 24), ("long_name", "Rain of the previous day", 24),
         ("description", "sum over the last 6 hours", 6), ("comment", "6 h accumulation", 6),
         ("comment", "15-day forecast, written every 6 hours", 120), ("GRIB_stepRange", "114-120", 6),
         ("GRIB_stepRange", "18-24", 120), ("GRIB_lengthOfTimeRange", 6, 6)],
    )  # fmt: skip
    def test_where_hours_are_said(self, tmp_path, key, text, hours):
        source, _ = opened(self.rain(**{key: text}), tmp_path)
        assert source.lead_bounds == {"tp": [[120 - hours, 120]]}

    def test_a_range_of_steps_is_that_of_one_lead(self, tmp_path):
        data = xr.concat([self.rain(GRIB_stepRange="114-120")] * 2, "step")
        data = data.assign_coords(step=np.array([114, 120], "timedelta64[h]").astype("timedelta64[ns]"))
        source, _ = opened(data, tmp_path)
        assert source.lead_bounds == {"tp": [[0, 114], [114, 120]]}

    def test_hours_that_contradict_each_other(self, tmp_path):
        with pytest.raises(UserError, match="tp: long_name and comment call it a sum over 6 h and 24 h"):
            opened(self.rain(long_name="rain in 6 hours", comment="24 h accumulation"), tmp_path)

    def test_bounds_that_the_file_lacks(self, tmp_path):
        data = self.rain()
        data = data.assign_coords(step=("step", [120.0], {"units": "hours", "bounds": "step_bnds"}))
        with pytest.raises(UserError, match="tp: a sum whose time has the bounds step_bnds, which the file lacks"):
            opened(data, tmp_path)

    def test_a_sum_since_a_step_that_the_file_does_not_tell(self, tmp_path):
        """It would be read as a sum from the start. The user may state its hours."""
        data = self.rain(long_name="Precipitation since previous step")
        with pytest.raises(UserError, match=r"tp: a sum since the model's previous step, of which nothing states the"):
            opened(data, tmp_path)
        source = open_archive(tmp_path / "a.nc", overrides=Overrides(intervals={"tp": 6}))
        assert source.lead_bounds == {"tp": [[114, 120]]}
