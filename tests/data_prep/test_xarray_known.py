"""What NetCDF and Zarr may state of a field: what is not known leaves a variable out, by name and with the reason."""

import numpy as np
import pytest
import xarray as xr
from gribfiles import GLOBE, dataset, opened, surface

from data_prep import open_archive
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part


@pytest.mark.parametrize(
    ("name", "said"),
    [("t2m", ""), ("t2m", "unknown"), ("t2m", "air_temperature"), ("t2m", "2 metre temperature"),
     ("msl", "air_pressure_at_sea_level"), ("tcwv", "lwe_thickness_of_atmosphere_mass_content_of_water_vapor"),
     ("tp", "precipitation_amount"), ("sst", "Sea Surface Temperature"), ("u10", "eastward_wind")],
)  # fmt: skip
def test_standard_names_of_the_variable(tmp_path, name, said):
    units = {"msl": "Pa", "tcwv": "kg m-2", "tp": "m", "u10": "m s-1"}.get(name, "K")
    source, skipped = opened(surface(name, standard_name=said, units=units), tmp_path)
    assert set(source.layout.surface) == {name, "skt"} and skipped == []


@pytest.mark.parametrize(
    "said",
    ["air_temperature standard_error", "air_temperature number_of_observations", "air_temperature status_flag",
     "soil_temperature", "dew_point_temperature", "surface_temperature", "something"],
)  # fmt: skip
def test_standard_names_of_other_quantities(tmp_path, said, caplog):
    with caplog.at_level("INFO"):
        source, skipped = opened(surface(standard_name=said), tmp_path)
    assert source.layout.surface == ("skt",) and skipped == [f"t2m (standard_name {said})"]
    assert f"left out: t2m (standard_name {said})" in caplog.text


def test_a_file_with_nothing_left_names_what_was_left_out(tmp_path):
    data = dataset()
    data.t.attrs["standard_name"] = "air_potential_temperature"
    with pytest.raises(UserError, match=r"no field .*; it has t \(standard_name air_potential_temperature\)"):
        opened(data, tmp_path)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"GRIB_paramId": 121}, "GRIB_paramId 121"),
        ({"GRIB_paramId": 134}, "GRIB_paramId 134"),
        ({"GRIB_dataType": "pb"}, "of type pb"),
        ({"flag_values": [0, 1], "flag_meanings": "cold warm"}, "flags"),
        ({"cell_methods": "time: mean within days time: maximum over days"}, "mean over time, of a climatology"),
        ({"cell_methods": "time: maximum time: mean"}, "maximum and mean over time"),
        ({"cell_methods": "step: sum"}, "the sum over time"),
        ({"cell_methods": "area: mean where land"}, "mean where land"),
        ({"cell_methods": "area: maximum"}, "maximum over area"),
        ({"cell_methods": "model: mean"}, "mean over model"),
        ({"cell_methods": "mean"}, "cell_methods 'mean'"),
    ],
)
def test_attributes_of_what_is_no_field(tmp_path, attributes, reason):
    source, skipped = opened(surface(**attributes), tmp_path)
    assert source.layout.surface == ("skt",) and skipped == [f"t2m ({reason})"]


@pytest.mark.parametrize("attribute", ["ancillary_variables", "cell_measures"])
def test_variables_that_describe_others(tmp_path, attribute):
    data = surface()
    data["skt"].attrs[attribute] = "t2m" if attribute == "ancillary_variables" else "area: t2m"
    source, skipped = opened(data, tmp_path)
    assert source.layout.surface == ("skt",) and skipped == ["t2m (describes another variable)"]


def test_a_climatology_is_no_field(tmp_path):
    data = dataset()
    data.time.attrs["climatology"] = "climatology_bounds"
    with pytest.raises(UserError, match=r"t \(of a climatology\)"):
        opened(data, tmp_path)


@pytest.mark.parametrize("dimension", [False, True])
@pytest.mark.parametrize(
    ("axis", "value", "known"),
    [("percentile", 50.0, False), ("threshold", 273.15, False), ("depth", 0.05, False), ("height", 80.0, False),
     ("heightAboveGround", 80.0, False), ("month", 1, False), ("season", "DJF", False), ("height", 1.5, True),
     ("height", 2.0, True), ("surface", 0.0, True), ("expver", "0001", True), ("spatial_ref", 0, True)],
)  # fmt: skip
def test_coordinates_of_one_value(tmp_path, axis, value, known, dimension):
    data = surface().drop_vars("skt")
    data = data.expand_dims({axis: [value]}) if dimension else data.assign_coords({axis: value})
    if known:
        assert opened(data, tmp_path)[0].layout.surface == ("t2m",)
        return
    shown = f"{value:g}" if isinstance(value, float) else value
    with pytest.raises(UserError, match=rf"it has t2m \({axis} {shown}\)"):
        opened(data, tmp_path)


def test_a_height_of_other_variables_leaves_pressure_at_sea_level(tmp_path):
    """Files that were merged share the coordinates of one value."""
    data = surface("msl", units="Pa").assign_coords(heightAboveGround=2.0)
    assert set(opened(data, tmp_path)[0].layout.surface) == {"msl", "skt"}


def test_air_temperature_at_the_screen_of_the_met_office(tmp_path):
    data = surface("air_temperature", standard_name="air_temperature").drop_vars("skt")
    data = data.assign_coords(height=((), 1.5, {"units": "m", "positive": "up"}))
    assert opened(data, tmp_path)[0].layout.surface == ("t2m",)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["latitude_longitude", "rotated_latitude_longitude", "polar_stereographic", "healpix"])
def test_grid_mappings(tmp_path, kind, named):
    data = surface()
    data["crs"] = (), 0, {"grid_mapping_name": kind}
    if named:
        for name in ("t2m", "skt"):
            data[name].attrs["grid_mapping"] = "crs: latitude longitude"
    if kind == "latitude_longitude":
        assert set(opened(data, tmp_path)[0].layout.surface) == {"t2m", "skt"}
        return
    with pytest.raises(UserError, match=f"skt: is on the grid mapping {kind}; only fields on latitudes"):
        opened(data, tmp_path)


def test_a_grid_mapping_that_is_not_there(tmp_path):
    source, skipped = opened(surface(grid_mapping="rotated_pole"), tmp_path)
    assert source.layout.surface == ("skt",) and skipped == ["t2m (grid mapping rotated_pole)"]


@pytest.mark.parametrize(
    ("mapping", "plain"),
    [("grid_of_the_model", True), ("rotated_pole", False), ("rotated_latitude_longitude", False),
     ("Lambert_Conformal", False), ("polar_stereographic", False)],
)  # fmt: skip
def test_axes_in_degrees_north_are_plain_unless_the_mapping_that_is_lost_says_otherwise(
    tmp_path, mapping, plain, caplog
):
    data = surface(grid_mapping=mapping)
    data.latitude.attrs["units"], data.longitude.attrs["units"] = "degrees_north", "degrees_east"
    source, skipped = opened(data, tmp_path)
    assert set(source.layout.surface) == ({"t2m", "skt"} if plain else {"skt"})
    assert skipped == ([] if plain else [f"t2m (grid mapping {mapping})"])
    assert (f"the grid mapping {mapping} is named, but is not in the file" in caplog.text) is plain


@pytest.mark.parametrize(
    "name", ["mx2t6", "mn2t6", "mx2t", "mn2t24", "tx", "tn", "tg", "t2max", "tmax2m", "tmin2m", "t2m_mx", "t2m_mn"]
)
def test_names_of_extremes_under_the_standard_name_of_the_moment(tmp_path, name):
    data = surface(name, standard_name="air_temperature").assign_coords(height=((), 2.0, {"units": "m"}))
    source, skipped = opened(data, tmp_path)
    assert source.layout.surface == ("skt",) and len(skipped) == 1 and skipped[0].startswith(f"{name} (")


@pytest.mark.parametrize(
    ("about", "reason"),
    [({"long_name": "0: ensemble mean, 1: spread"}, "mean along number"),
     ({"long_name": "statistic of the ensemble"}, "statistic along number"),
     ({"flag_values": [1, 2, 3], "flag_meanings": "least middle most"}, "flags along number"),
     ({"long_name": "ensemble member numerical id", "units": "1"}, "")],
)  # fmt: skip
def test_statistics_that_are_numbered_like_members(tmp_path, about, reason):
    data = surface()
    data.number.attrs = about
    if not reason:
        assert opened(data, tmp_path)[0].layout.realization == (1, 2, 3)
        return
    with pytest.raises(UserError, match=rf"t2m \({reason}\)"):
        opened(data, tmp_path)


def test_a_negative_number_is_no_member_and_nothing_is_forecast_before_the_start(tmp_path):
    data = surface().drop_vars("skt")
    hours = np.array([-6, 24], "timedelta64[h]").astype("timedelta64[ns]")
    source, skipped = opened(data.assign_coords(number=[-1.0, 0.0, 1.0], step=hours), tmp_path)
    assert source.layout.realization == (0, 1) and source.layout.lead_hours == (24,)
    assert skipped == ["t2m (of a negative member)", "t2m (of leads before the start)"]
    np.testing.assert_array_equal(source.read(Part.FORECAST, 1).surface[:, 0, 0], data.t2m.values[1, 1:, 1])


@pytest.mark.parametrize(
    ("units", "good"),
    [("degrees_north", True), ("degreesN", True), ("degree_N", True), ("degrees", True), ("", True),
     ("degrees_south", False), ("degrees_east", False), ("radian", False), ("m", False)],
)  # fmt: skip
def test_units_of_latitude(tmp_path, units, good):
    data = dataset()
    data.latitude.attrs["units"] = units
    if good:
        assert opened(data, tmp_path)[0].layout.grid.shape == (7, 12)
        return
    with pytest.raises(UserError, match=rf"t: latitude is in '{units}'; only degrees_north are read"):
        opened(data, tmp_path)


def test_radians_that_no_units_tell_of(tmp_path):
    data = dataset().assign_coords(latitude=np.deg2rad(GLOBE[0]), longitude=np.deg2rad(GLOBE[1]))
    with pytest.raises(UserError, match="latitude and longitude state no units, and their values may be radians"):
        opened(data, tmp_path)
    band = dataset().assign_coords(latitude=np.linspace(1.5, -1.5, 7), longitude=GLOBE[1])
    (tmp_path / "band").mkdir()
    assert opened(band, tmp_path / "band")[0].layout.grid.shape == (7, 12)


class TestNames:
    """Names that state a pressure level or a height."""

    def archive(self, *names, units="K", **attributes):
        data = dataset().isel(isobaricInhPa=0, drop=True)
        out = data[[]]
        for number, name in enumerate(names):
            out[name] = (data.t + number).assign_attrs({"units": units} | attributes)
        return out

    @pytest.mark.parametrize(
        ("name", "short", "level"),
        [("t850", "t", 850), ("temperature_850hpa", "t", 850), ("ta500", "t", 500), ("T_700mb", "t", 700),
         ("temperature_2m", "t2m", 0), ("air_temperature_2m", "t2m", 0), ("2t", "t2m", 0)],
    )  # fmt: skip
    def test_the_level_or_height_of_a_name(self, tmp_path, name, short, level):
        data = self.archive(name)
        source, _ = opened(data, tmp_path)
        assert source.layout.names == (short,) and source.layout.levels == ((level,) if level else ())
        found = source.read(Part.FORECAST, 1)
        block = found.pressure[:, :, 0, 0] if level else found.surface[:, :, 0]
        np.testing.assert_array_equal(block, data[name].values[1])

    def test_several_levels_of_one_variable(self, tmp_path):
        data = self.archive("t850", "t500")
        source, _ = opened(data, tmp_path)
        assert source.layout.levels == (500, 850)
        found = source.read(Part.FORECAST, 0).pressure[:, :, 0]
        np.testing.assert_array_equal(found[:, :, 0], data.t500.values[0])
        np.testing.assert_array_equal(found[:, :, 1], data.t850.values[0])

    @pytest.mark.parametrize("name", ["temperature_80m", "80m_temperature"])
    def test_other_heights_are_left_out(self, tmp_path, name):
        source, skipped = opened(self.archive(name, "t2m"), tmp_path)
        assert source.layout.names == ("t2m",) and skipped == [f"{name} (at 80 m)"]

    @pytest.mark.parametrize(("others", "levels"), [((), ()), (("u850",), (100, 850))])
    def test_a_number_that_may_be_a_height(self, tmp_path, others, levels):
        """ECMWF's u100 is wind at 100 m, earth2studio's at 100 hPa: levels beside it tell."""
        source, skipped = opened(self.archive("u100", "u10", *others, units="m s-1"), tmp_path)
        assert source.layout.levels == levels
        assert [name[:4] for name in skipped] == ([] if levels else ["u100"])

    def test_a_level_that_its_axis_contradicts(self, tmp_path):
        data = self.archive("t850", "t2m").assign_coords(isobaricInhPa=500.0)
        source, skipped = opened(data, tmp_path)
        assert source.layout.names == ("t2m",)
        assert skipped == ["t850 (850 hPa by its name, another level by isobaricInhPa)"]

    @pytest.mark.parametrize(
        ("name", "attributes", "ground"),
        [("z", {}, False), ("z", {"long_name": "Geopotential of isobaric surface"}, False),
         ("z", {"long_name": "Surface geopotential"}, True), ("z", {"GRIB_typeOfLevel": "surface"}, True),
         ("geopotential_at_surface", {}, True), ("geopotential", {"standard_name": "surface_geopotential"}, True),
         ("geopotential_height_500hpa", {"units": "m", "standard_name": "geopotential_height"}, False)],
    )  # fmt: skip
    def test_orography_only_where_something_says_so(self, tmp_path, name, attributes, ground):
        data = self.archive(name, units="m2 s-2").isel(time=[0], number=0, step=0, drop=True)
        data[name].attrs |= attributes
        data["t2m"] = data[name].copy()
        data["t2m"].attrs = {"units": "K"}
        source, _ = opened(data, tmp_path)
        assert list(source.static()) == (["orog"] if ground else [])
        assert source.layout.levels == ((500,) if "500" in name else ())


class TestSums:
    def rain(self, name="tp", **attributes):
        data = dataset(t=name).isel(isobaricInhPa=0, drop=True).isel(step=[1])
        data = data.assign_coords(step=np.array([120], "timedelta64[h]").astype("timedelta64[ns]"))
        data[name] = (abs(data[name]) / 1e5).assign_attrs({"units": "m"} | attributes)
        return data

    @pytest.mark.parametrize(
        ("name", "said", "first"),
        [("tp6", "", 114), ("tp24", "", 96), ("tp_6h", "", 114), ("tp06", "", 114), ("precipitation_24h", "", 96),
         ("total_precipitation_6hr", "", 114), ("tp", "Total precipitation in the last 6 hours", 114),
         ("tp", "6-hourly precipitation", 114), ("tp", "accumulated over 24 hours", 96),
         ("tp6", "Precipitation of 6 h", 114)],
    )  # fmt: skip
    def test_names_and_descriptions_state_the_hours(self, tmp_path, name, said, first, caplog):
        source, _ = opened(self.rain(name, long_name=said), tmp_path)
        assert source.lead_bounds == {"tp": [[first, 120]]} and "no file states the interval" not in caplog.text

    def test_convective_rain_of_six_hours(self, tmp_path):
        assert opened(self.rain("cp6"), tmp_path)[0].lead_bounds == {"cp": [[114, 120]]}

    def test_a_sum_that_states_nothing_is_warned_of(self, tmp_path, caplog):
        with caplog.at_level("WARNING"):
            source, _ = opened(self.rain(), tmp_path)
        assert source.lead_bounds == {"tp": [[0, 120]]}
        assert "no file states the interval of tp, so they are read as sums from the start" in caplog.text

    def test_hours_that_contradict_each_other(self, tmp_path):
        with pytest.raises(UserError, match="tp6: name and long_name call it a sum over 6 h and 24 h"):
            opened(self.rain("tp6", long_name="rain of 24 hours"), tmp_path)

    def test_hours_that_contradict_the_bounds(self, tmp_path):
        data = self.rain("tp6").assign_coords(step=("step", [120.0], {"units": "hours", "bounds": "step_bnds"}))
        data["step_bnds"] = ("step", "two"), [[96.0, 120.0]]
        with pytest.raises(
            UserError, match="tp6: is a sum over 6 h by its name, and over 24 h by the bounds step_bnds"
        ):
            opened(data, tmp_path)

    def test_a_rate_leaves_the_sum_beside_it(self, tmp_path):
        data = self.rain("tp6")
        data["pr"] = data.tp6.assign_attrs(units="kg m-2 s-1")
        source, skipped = opened(data, tmp_path)
        assert source.lead_bounds == {"tp": [[114, 120]]} and skipped == ["pr (units kg m-2 s-1)"]


@pytest.mark.parametrize("shift", [0, 30, 3600])
@pytest.mark.parametrize("one", [False, True])
def test_valid_times_that_contradict_start_and_lead(tmp_path, shift, one):
    data = surface()
    times = data.time.values[:, None] + data.step.values + np.timedelta64(shift, "s")
    data = data.assign_coords(valid_time=(("time", "step"), times))
    data = data.isel(time=1) if one else data
    if shift < 60:
        assert opened(data, tmp_path)[0].layout.lead_hours == (0, 24)
        return
    first = "2001-01-03" if one else "2001-01-01"
    with pytest.raises(UserError, match=f"valid_time is {first}T01:00 where start and lead make {first}T00:00"):
        opened(data, tmp_path)


@pytest.mark.parametrize(
    ("attributes", "whole", "origin"),
    [({}, {}, "no centre that is stated"), ({}, {"GRIB_centre": "ecmf"}, "centre ecmf"),
     ({"GRIB_experimentVersionNumber": "1"}, {"GRIB_centre": "ecmf"}, "centre ecmf, experiment 0001"),
     ({}, {"institution": "Met Office"}, "institution Met Office")],
)  # fmt: skip
def test_who_made_a_variable(tmp_path, attributes, whole, origin):
    data = surface(**attributes)[["t2m"]]
    data.attrs = whole
    source, _ = opened(data, tmp_path)
    assert [str(one) for one in source.catalogue.origins] == [origin]


def test_members_of_two_institutions_are_refused_by_name(tmp_path):
    (tmp_path / "in").mkdir()
    for number, whole in enumerate(({"institution": "ECMWF"}, {"institution": "ecmwf"}, {"institution": "NCEP"})):
        data = surface().isel(number=[number]).assign_coords(number=[number])
        data.attrs = whole
        data.to_netcdf(tmp_path / "in" / f"{number}.nc")
    with pytest.raises(UserError, match=r"holds fields of institution \w+ .* and of institution NCEP \(.*2.nc\)"):
        open_archive(tmp_path / "in")
    (tmp_path / "in" / "2.nc").unlink()
    assert open_archive(tmp_path / "in").layout.realization == (0, 1)


def test_a_variable_that_cannot_be_placed_leaves_the_others(tmp_path):
    data = surface()
    data["msl"] = xr.DataArray(np.ones((2, 3)), dims=("time", "colour"), attrs={"units": "Pa"})
    source, skipped = opened(data, tmp_path)
    assert set(source.layout.surface) == {"t2m", "skt"} and skipped == ["msl (no latitude and longitude axes)"]


def test_a_level_of_the_air_under_the_name_of_the_surface(tmp_path):
    about = {"GRIB_paramId": 130, "GRIB_typeOfLevel": "isobaricInhPa"}
    source, skipped = opened(surface(**about), tmp_path)
    assert source.layout.surface == ("skt",) and skipped == ["t2m (typeOfLevel isobaricInhPa)"]


def test_the_parameter_of_the_surface_under_the_name_of_the_air(tmp_path):
    """Beside a level that other variables of the file are on."""
    data = surface("t", GRIB_paramId=167, GRIB_typeOfLevel="heightAboveGround").drop_vars("skt")
    source, _ = opened(data.assign_coords(isobaricInhPa=500.0), tmp_path)
    assert source.layout.surface == ("t2m",) and source.layout.levels == ()


@pytest.mark.parametrize(
    "title", ["GEFS ensemble mean", "Ensemble-Mean of 30 members", "ens spread", "ENSEMBLE STANDARD DEVIATION"]
)
def test_a_file_whose_title_is_of_all_members_holds_none(tmp_path, title):
    data = dataset().assign_attrs(title=title)
    data.isel(number=0, drop=True).to_netcdf(tmp_path / "a.nc")
    with pytest.raises(UserError, match=rf"t \(title '{title}'\)"):
        open_archive(tmp_path / "a.nc")
    data.to_netcdf(tmp_path / "b.nc")  # it has members
    assert open_archive(tmp_path / "b.nc").layout.variables == ("t",)


def test_a_title_of_an_ensemble_is_no_statistic(tmp_path):
    data = dataset().assign_attrs(title="Perturbed forecast of an ensemble; mean sea level pressure, too")
    data.isel(number=0, drop=True).to_netcdf(tmp_path / "a.nc")
    assert open_archive(tmp_path / "a.nc").layout.variables == ("t",)
