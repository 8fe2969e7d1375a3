"""Public archives as they are published: what is read of each, by which names, and why the rest is left out."""

import numpy as np
import public_archives
import public_grib
import public_weather
import pytest
import xarray as xr
from gribfiles import archive_of

from data_prep import open_archive, prepare
from data_prep.geometry import GridChange
from data_prep.inspect import describe_archive
from ensemble_ml.config import Packing, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store

DAY = np.timedelta64(24, "h")
LAST_STEP = {"ifs": 6, "gefs": 3}  # hours between the models' last step and that before, at 150 h


def inspected(path):
    """Return what `inspect` says of an archive."""
    return describe_archive(str(path))


def assert_holds(found, *, variables, surface, members, leads, left_out, levels=public_weather.LEVELS, control=False):
    """`inspect` says exactly this, and no field is missing."""
    assert (set(found["variables"]), set(found["surface"])) == (set(variables), set(surface))
    assert (tuple(found["levels"]), tuple(found["members"])) == (levels, members)
    assert (tuple(found["lead_hours"]), found["control"]) == (leads, control)
    assert sorted(found["left_out"]) == sorted(left_out)
    assert found["gaps"]["fields"] == 0


def weather(name, level, date, lead, member):
    """Return what an archive of `public_archives` has from north to south, at the longitudes of its grid."""
    valid = date + np.timedelta64(lead, "h")
    return lambda grid: public_weather.weather(name, level, valid, (grid.latitude, grid.longitude), member, lead)


def assert_same_weather(source, name, level, member, lead, *, atol, scale=1.0):
    """A field that was read is the weather that was written: at its place, in the registry's units."""
    layout = source.layout
    expected = weather(name, level, layout.init_time[0], lead, member)(layout.grid) * scale
    fields = source.read(Part.FORECAST, 0)
    at = layout.realization.index(member), layout.lead_hours.index(lead)
    if level:
        found = fields.pressure[(*at, layout.variables.index(name), layout.levels.index(level))]
    else:
        found = fields.surface[(*at, layout.surface.index(name))]
    np.testing.assert_allclose(found, expected, atol=atol)


class TestWeatherBench:
    @pytest.fixture(scope="class")
    def paths(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("wb2")
        return public_archives.weatherbench(folder, degrees=30, dates=2, members=2, whole=True)

    def test_the_ensemble(self, paths):
        """Of the three sums of rain, the one from the start states all that the others do."""
        assert_holds(
            inspected(paths[0]), variables=("t", "z", "u", "v", "ws", "r"), members=(1, 2), leads=(24, 48),
            surface=("t2m", "u10", "v10", "ws10", "msl", "tp"),
            left_out=[f"{name} (beside total_precipitation, over other hours)"
                      for name in ("total_precipitation_24hr", "total_precipitation_6hr")],
        )  # fmt: skip

    def test_the_truth(self, paths):
        found = inspected(paths[1])
        assert set(found["variables"]) == {"t", "z", "u", "v", "ws", "r", "d"}
        assert {"t2m", "u10", "v10", "ws10", "msl"} <= set(found["surface"])

    def test_what_has_no_units_and_no_convention_leaves_the_rest(self, paths, tmp_path):
        data = xr.open_zarr(paths[0], decode_timedelta=False).load()
        data["2m_temperature"].attrs.pop("units")
        data["2m_temperature"] -= 273.15
        for array in data.variables.values():
            array.encoding = {}
        data.to_zarr(tmp_path / "a.zarr", zarr_format=2)
        found = inspected(tmp_path / "a.zarr")
        assert "t2m" not in found["surface"] and "msl" in found["surface"]
        assert "2m_temperature (no units)" in found["left_out"]

    def test_neuralgcm(self, tmp_path):
        """Longitude comes before latitude, and nothing states units."""
        path = public_archives.neuralgcm(tmp_path)
        assert_holds(
            inspected(path), variables=("t", "z", "u", "v", "q"), surface=(), members=(0, 1), leads=(12, 24),
            left_out=["specific_cloud_ice_water_content"],
        )  # fmt: skip
        assert_same_weather(open_archive(path), "t", 850, 1, 24, atol=1e-3)


class TestDynamical:
    @pytest.fixture(scope="class")
    def paths(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("dynamical")
        return {model: public_archives.dynamical(folder, model) for model in ("ifs", "gefs")}

    @pytest.mark.parametrize("model", ["ifs", "gefs"])
    def test_all_of_it(self, paths, model):
        """Levels and heights are in the names, and a type of precipitation is no variable of the registry."""
        found = inspected(paths[model])
        assert_holds(
            found, variables=("t", "z"), members=(0, 1, 2), leads=(0, 3, 144, 150),
            surface=("t2m", "u10", "v10", "u100m", "v100m", "msl", "tp", "tcc"),
            left_out=["categorical_precipitation_type_surface",
                      "tp (a sum at the start of the forecast, which is zero)"],
        )  # fmt: skip
        assert found["lead_bounds"]["tp"] == [None, [0, 3], [141, 144], [150 - LAST_STEP[model], 150]]

    @pytest.mark.parametrize("model", ["ifs", "gefs"])
    def test_a_mean_rate_times_its_hours_is_a_sum(self, paths, model):
        source = open_archive(paths[model])
        for lead, hours in ((3, 3), (144, 3), (150, LAST_STEP[model])):
            assert_same_weather(source, "tp", 0, 2, lead, atol=1e-9, scale=hours / 24)
        assert_same_weather(source, "t2m", 0, 1, 144, atol=1e-3)
        assert_same_weather(source, "z", 500, 1, 150, atol=0.05)

    def test_the_step_before_is_the_models_and_not_the_files(self, paths, tmp_path):
        """Leads may be left out of a copy; the rate is over three hours all the same."""
        data = xr.open_zarr(paths["ifs"]).isel(lead_time=[0, 2]).load()
        for array in data.variables.values():
            array.encoding = {}
        assert archive_of(data, tmp_path).lead_bounds["tp"] == [None, [141, 144]]
        del data.attrs["forecast_resolution"]
        (tmp_path / "b").mkdir()
        data.to_netcdf(tmp_path / "b" / "a.nc")
        found = inspected(tmp_path / "b" / "a.nc")
        said = "precipitation_surface (since the previous step, of which nothing states the hours)"
        assert "tp" not in found["surface"] and said in found["left_out"]

    def test_a_mean_over_hours_that_depend_on_the_time_of_day(self, paths):
        bounds = open_archive(paths["gefs"]).lead_bounds
        assert bounds["tcc"] == [None, [0, 3], [138, 144], [144, 150]]
        assert "tcc" not in open_archive(paths["ifs"]).lead_bounds


class TestMetOffice:
    def test_a_cycle(self, tmp_path):
        """Files of the moment and of the hour before bear one name; heights are 1.5 m; directions are no field."""
        found = inspected(public_archives.mogreps(tmp_path))
        assert_holds(
            found, variables=("t", "z"), surface=("t2m", "msl", "ws10", "fg10", "tp"), members=(0, 1, 2), leads=(3, 6),
            left_out=["wind_from_direction", "lwe_precipitation_rate",
                      "t2m (over hours; the instantaneous is kept)",
                      "fg10 (instantaneous; the largest of some hours is kept)"],
        )  # fmt: skip
        assert found["lead_bounds"] == {"fg10": [[2, 3], [5, 6]], "tp": [[2, 3], [5, 6]]}

    def test_values_of_the_moment_are_read(self, tmp_path):
        source = open_archive(public_archives.mogreps(tmp_path))
        assert_same_weather(source, "t2m", 0, 1, 6, atol=1e-3)
        assert_same_weather(source, "z", 850, 2, 3, atol=0.05)

    def test_the_largest_alone_is_read(self, tmp_path):
        path = public_archives.mogreps(tmp_path, names=("temperature_at_screen_level_max-PT01H",))
        found = inspected(path)
        assert found["surface"] == ["t2m"] and found["lead_bounds"] == {"t2m": [[2, 3], [5, 6]]}


class TestEuppbench:
    def test_forecasts(self, tmp_path):
        found = inspected(public_archives.euppbench(tmp_path))
        assert_holds(
            found, variables=("z",), surface=("t2m", "u10", "u100m", "fg10", "tp"), levels=(500,), members=(0, 1, 2),
            leads=(6, 12), left_out=["mn2t6"],
        )  # fmt: skip
        assert found["lead_bounds"]["tp"] == [[0, 6], [6, 12]]

    def test_reforecasts_of_several_years(self, tmp_path):
        """The start dates are those of the years, which valid times tell."""
        source = open_archive(public_archives.euppbench(tmp_path, years=2))
        days = np.datetime_as_string(source.layout.init_time, "D").tolist()
        assert days == ["2015-01-02", "2015-01-03", "2016-01-02", "2016-01-03"]
        assert set(source.layout.names) == {"z", "t2m", "u10", "u100m", "fg10", "tp"}
        data = xr.open_zarr(tmp_path / "gridded_ensemble_reforecasts_surface.zarr", decode_timedelta=False)
        data["t2m"] = data["t2m"].copy(data=np.random.default_rng(0).normal(280, 5, data["t2m"].shape))
        for array in data.variables.values():
            array.encoding = {}
        data.load().to_zarr(tmp_path / "other" / "a.zarr", zarr_format=2)
        source = open_archive(tmp_path / "other" / "a.zarr", variables=["t2m"])
        for date, (year, day) in enumerate(((2, 0), (2, 1), (1, 0), (1, 1))):
            expected = data["t2m"].sel(year=year).isel(time=day, surface=0).transpose("number", "step", ...)
            np.testing.assert_allclose(source.read(Part.FORECAST, date).surface[:, :, 0], expected, rtol=1e-6)

    def test_valid_times_of_several_starts(self, tmp_path):
        public_archives.euppbench(tmp_path, years=2)
        data = xr.open_zarr(tmp_path / "gridded_ensemble_reforecasts_surface.zarr").load()
        data["valid_time"] = data["valid_time"].copy(deep=True)
        data["valid_time"][0, 0, 1] += DAY
        for array in data.variables.values():
            array.encoding = {}
        data.to_netcdf(tmp_path / "a.nc")
        with pytest.raises(UserError, match="valid_time less step gives several init times for one forecast"):
            open_archive(tmp_path / "a.nc")


def test_earth2studio(tmp_path):
    path = public_archives.earth2studio(tmp_path)
    assert_holds(
        inspected(path), variables=("t", "z", "u"), surface=("t2m", "u10", "msl", "tcwv"), members=(0, 1),
        leads=(6, 12), left_out=[],
    )  # fmt: skip
    assert_same_weather(open_archive(path), "msl", 0, 1, 12, atol=0.05)


def test_arco_era5(tmp_path):
    found = inspected(public_archives.arco_era5(tmp_path))
    assert (set(found["variables"]), found["levels"]) == ({"t", "z", "u", "v"}, [500, 850])
    assert {"t2m", "u10", "v10", "msl"} <= set(found["surface"]) and found["dates"]["count"] == 3
    assert "type_of_low_vegetation" in found["left_out"] and "soil_temperature_level_1" in found["left_out"]


def test_ens10(tmp_path):
    found = inspected(public_grib.ens10(tmp_path))
    assert_holds(
        found,
        variables=("t", "z"),
        surface=("t2m", "msl"),
        levels=(500,),
        members=(0, 1, 2),
        leads=(0, 24),
        left_out=[],
    )


class TestGefs:
    def test_as_it_is_made(self, tmp_path):
        found = inspected(public_grib.gefs(tmp_path, degrees=30, dates=1, members=2, leads=(24,))[0])
        assert set(found["surface"]) == {"t2m", "u10", "v10", "msl", "tp"} and found["control"]
        assert found["members"] == [1, 2] and all("of product template 4." in name for name in found["left_out"])

    def test_the_reforecast_on_two_grids(self, tmp_path):
        """Its files can be looked at, and are read on one grid."""
        path = public_grib.gefs_reforecast(tmp_path)
        found = inspected(path)
        assert found["control"] and found["members"] == [1, 2] and found["gaps"]["fields"] == 0
        assert found["grid"].count(";") == 1 and found["grid"].endswith("(prepare with regrid=DEGREES)")
        assert (set(found["variables"]), set(found["surface"])) == ({"t", "z"}, {"t2m", "tp"})
        with pytest.raises(UserError, match="an archive has one grid: prepare with regrid=DEGREES brings all to one"):
            open_archive(path)

    def test_both_grids_become_one(self, tmp_path):
        """Fields that are on the new grid already stay as they are, the finer ones become means over its cells."""
        source = open_archive(public_grib.gefs_reforecast(tmp_path), change=GridChange(regrid=30.0))
        assert source.layout.grid.shape == (7, 12)
        assert_same_weather(source, "t", 500, 1, 6, atol=0.01)
        fields = source.read(Part.FORECAST, 0)
        assert np.isfinite(fields.surface).all()
        t2m = fields.surface[:, :, source.layout.surface.index("t2m")]
        assert t2m.shape[-2:] == (7, 12) and 240 < t2m.min() < t2m.max() < 310


class TestEcmwfOpenData:
    def test_before_cycle_50r1(self, tmp_path):
        found = inspected(public_grib.ecmwf_open_data(tmp_path))
        assert_holds(
            found, variables=("t", "z"), surface=("t2m", "msl", "tp"), members=(1, 2), leads=(0, 3, 6), left_out=[],
            control=True,
        )  # fmt: skip

    def test_the_control_of_cycle_50r1_is_the_deterministic_run(self, tmp_path, caplog):
        with caplog.at_level("INFO"):
            found = inspected(public_grib.ecmwf_open_data(tmp_path, since_50r1=True))
        assert_holds(
            found, variables=("t", "z"), surface=("t2m", "msl", "tp"), members=(1, 2), leads=(0, 3, 6), left_out=[],
            control=True,
        )  # fmt: skip
        assert "the deterministic run is the control of the ensemble" in caplog.text


@pytest.mark.parametrize(
    ("write", "settings"),
    [(lambda folder: public_archives.dynamical(folder, "ifs"), {"leads": [3, 150]}),
     (lambda folder: public_archives.euppbench(folder, years=1), {}),
     (public_grib.gefs_reforecast, {"regrid": 30.0}),
     (lambda folder: public_grib.ecmwf_open_data(folder, since_50r1=True), {})],
    ids=["dynamical", "euppbench", "gefs_reforecast", "open_data"],
)  # fmt: skip
def test_prepare_writes_what_the_archive_reads_as(tmp_path, write, settings):
    (tmp_path / "in").mkdir()
    path = write(tmp_path / "in")
    config = PrepareConfig(
        input=str(path), output=str(tmp_path / "s.zarr"), workers=1, packing=Packing.float32, **settings
    )
    store = open_store(prepare(config))
    change = GridChange(regrid=settings["regrid"]) if "regrid" in settings else None
    source = open_archive(path, leads=settings.get("leads"), change=change)
    assert store.layout.names == source.layout.names and store.lead_bounds == source.lead_bounds
    for part in store.parts:
        for date in range(len(source.layout.init_time)):
            found, expected = store.read(part, date), source.read(part, date)
            np.testing.assert_array_equal(found.pressure, expected.pressure)
            np.testing.assert_array_equal(found.surface, expected.surface)
