"""Names and units that the user states, and units that a convention of names fixes."""

import numpy as np
import pytest
from gribfiles import dataset, ensemble, message, noise, write

from data_prep import Overrides, open_archive, open_pair, prepare
from ensemble_ml.config import EvaluateConfig, PredictConfig, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store

USUAL = {"t2m": 280.0, "msl": 101300.0, "z500": 54000.0, "z1000": 900.0, "t850": 275.0, "tp": 1e-3, "u10m": 3.0}


def flat(units=None, **values):
    """Variables without levels; without units where none are given."""
    data = dataset().isel(isobaricInhPa=0, drop=True)
    data = data.assign_coords(step=np.array([24, 48], "timedelta64[h]").astype("timedelta64[ns]"))
    drawn = (data.t.values - 270) / 9
    out = data.drop_vars("t")
    for name, value in values.items():
        out[name] = data.t.dims, (value * (1 + 0.01 * drawn)).astype(np.float32), {"units": units} if units else {}
    return out


def written(data, path):
    data.to_netcdf(path)
    return str(path)


class TestNames:
    def test_they_say_which_variable_is_which(self, tmp_path):
        data = flat("K", screen=280.0)
        path = written(data, tmp_path / "a.nc")
        with pytest.raises(UserError, match="holds no field that the registry knows; it has screen"):
            open_archive(path)
        config = PrepareConfig(input=path, output=str(tmp_path / "s.zarr"), names={"2t": "screen"}, variables=["2t"])
        store = open_store(prepare(config))
        assert store.layout.surface == ("t2m",)
        np.testing.assert_allclose(store.read(Part.FORECAST, 1).surface[:, :, 0], data.screen.values[1], atol=1e-3)

    def test_the_one_that_is_named_is_read(self, tmp_path):
        path = written(flat("K", t2m=270.0, screen=280.0), tmp_path / "a.nc")
        source = open_archive(path, overrides=Overrides({"t2m": "screen"}))
        assert source.read(Part.FORECAST, 0).surface.mean() > 275
        assert list(source.catalogue.readers[0].skipped) == ["t2m (names= states that screen is t2m)"]

    def test_they_leave_modifiers_out(self, tmp_path):
        data = flat("K", screen=280.0, skt=280.0)
        data["screen"].attrs["standard_name"] = "air_temperature standard_error"
        path = written(data, tmp_path / "a.nc")
        assert open_archive(path, overrides=Overrides({"t2m": "screen"})).layout.surface == ("skt",)

    def test_a_name_that_no_file_has(self, tmp_path):
        config = dict(input=written(flat("K", t2m=280.0), tmp_path / "a.nc"), output=str(tmp_path / "s.zarr"))
        with pytest.raises(UserError, match=r"names=\{t2m: scren\}: no file of .* has a variable scren; they have t2m"):
            prepare(PrepareConfig(**config, names={"t2m": "scren"}))

    def test_a_name_of_the_truth_alone(self, tmp_path):
        forecast = ensemble(tmp_path / "a.grib", names=("t2m",), steps=(24,), dates=(20010101,))
        truth = flat("K", screen=280.0).isel(number=0, step=0, drop=True)
        truth = truth.assign_coords(time=truth.time.values + np.timedelta64(1, "D"))
        path = written(truth, tmp_path / "t.nc")
        pair = open_pair(forecast, path, overrides=Overrides({"t2m": "screen"}))
        assert pair.has(Part.TRUTH)

    @pytest.mark.parametrize("config", [PrepareConfig, PredictConfig, EvaluateConfig])
    @pytest.mark.parametrize(
        ("settings", "message"),
        [({"names": {"temprature": "x"}}, "variable temprature: unknown; did you mean"),
         ({"names": "t2m"}, "names=t2m: give them by our names"),
         ({"names": {"t2m": "x", "skt": "x"}}, "stands for two of ours"),
         ({"units": {"tp": "furlong"}}, r"units=\{tp: furlong\}: units 'furlong': cannot be converted to 'm'")],
    )  # fmt: skip
    def test_settings_that_make_no_sense(self, config, settings, message):
        with pytest.raises(UserError, match=message):
            config(**settings)


class TestUnits:
    def test_they_are_stated_where_the_file_states_none(self, tmp_path):
        data = flat(tp=2.0)
        path = written(data, tmp_path / "a.nc")
        with pytest.raises(UserError, match=r"a.nc: tp: has no units; give them, as in 'units=\{tp: m\}'"):
            open_archive(path)
        found = open_archive(path, overrides=Overrides({}, {"tp": "mm"})).read(Part.FORECAST, 0).surface[:, 0, 0]
        np.testing.assert_allclose(found, data.tp.values[0, :, 0] / 1e3, rtol=1e-6)

    def test_a_file_that_states_others_is_refused(self, tmp_path):
        path = written(flat("m", tp=1e-3), tmp_path / "a.nc")
        with pytest.raises(UserError, match=r"units=\{tp: mm\}: tp states units 'm'; leave it out of units="):
            open_archive(path, overrides=Overrides({}, {"tp": "mm"}))
        assert open_archive(path, overrides=Overrides({}, {"tp": "metre"})).layout.surface == ("tp",)

    def test_a_truth_keeps_its_own(self, tmp_path):
        forecast = written(flat(t2m=5.0).isel(step=[0]), tmp_path / "a.nc")
        truth = [message("t2m", noise(mean=280), date=date, member=None) for date in (20010102, 20010104)]
        truth = write(tmp_path / "t.grib", truth)
        other = flat("K", t2m=280.0).isel(number=0, step=0, drop=True)
        other = other.assign_coords(time=other.time.values + np.timedelta64(1, "D"))
        for path in (truth, written(other, tmp_path / "t.nc")):
            pair = open_pair(forecast, path, overrides=Overrides({}, {"t2m": "degC"}))
            assert pair.read(Part.FORECAST, 0).surface.mean() > 273
            assert 270 < np.nanmean(pair.read(Part.TRUTH, 0).surface) < 290

    def test_units_of_what_is_not_there(self, tmp_path):
        path = written(flat("K", t2m=280.0), tmp_path / "a.nc")
        with pytest.raises(UserError, match=r"units=\{tp: mm\}: no file of .*a.nc has tp"):
            open_pair(path, overrides=Overrides({}, {"tp": "mm"}))


class TestConventions:
    def test_what_earth2studio_writes(self, tmp_path, caplog):
        data = flat(**USUAL)
        path = written(data, tmp_path / "a.nc")
        with caplog.at_level("WARNING"):
            source = open_archive(path)
        assert source.layout.names == ("t", "z", "t2m", "msl", "u10", "tp")
        assert source.layout.levels == (500, 850, 1000)
        (told,) = [line for line in caplog.messages if "state no units" in line]
        assert "msl Pa, t K, t2m K, tp m, u10 m s-1, z m2 s-2" in told and "'units={msl: Pa, t: K," in told
        found = source.read(Part.FORECAST, 0).surface[:, :, source.layout.surface.index("msl")]
        np.testing.assert_array_equal(found, data.msl.values[0])

    def test_what_weather_bench_derives(self, tmp_path):
        names = ["wind_speed", "10m_wind_speed", "divergence"]
        data = dataset(t="temperature", isobaricInhPa="level", number="realization", step="prediction_timedelta")
        small = abs(data.temperature) / 30
        data["wind_speed"], data["divergence"] = small, small / 1e6
        data["10m_wind_speed"] = small.isel(level=0, drop=True)
        for name in names:
            data[name].attrs = {}
        assert open_archive(written(data, tmp_path / "a.nc")).layout.names == ("t", "d", "ws", "ws10")

    @pytest.mark.parametrize(
        ("values", "lacking"),
        [({"t2m": 5.0}, "t2m"), ({"msl": 1013.0}, "msl"), ({"z500": 5500.0}, "z500"), ({"tp": 3.0}, "tp"),
         ({"tcc": 60.0}, "tcc"), ({"q850": 8.0}, "q850"), ({"tas": 280.0}, "tas")],
    )  # fmt: skip
    def test_values_or_names_of_other_units(self, tmp_path, values, lacking, caplog):
        data = flat(**values, skt=280.0)
        path = written(data, tmp_path / "a.nc")
        with caplog.at_level("WARNING"):
            assert open_archive(path).layout.names == ("skt",)
        assert f"left out for having no units: {lacking}; give them, as in 'units={{" in caplog.text
        short = {"z500": "z", "q850": "q", "tas": "t2m"}.get(lacking, lacking)
        with pytest.raises(UserError, match=rf"variables=\[{short}\]: .*a.nc: {lacking} has no units; give them"):
            open_archive(path, variables=[short])

    def test_all_are_named_at_once(self, tmp_path):
        written(flat(t2m=5.0, msl=1013.0), tmp_path / "a.nc")
        written(flat(z500=5500.0, z850=1500.0), tmp_path / "b.nc")
        said = r"msl, t2m, z500, z850: have no units; give them, as in 'units=\{msl: Pa, t2m: K, z: m2 s-2\}'"
        with pytest.raises(UserError, match=said):
            open_archive(tmp_path)

    def test_rain_of_a_region_may_be_in_any_units(self, tmp_path):
        """Where it is dry, millimetres look like metres."""
        data = flat(tp=1e-3, skt=280.0).isel(longitude=slice(0, 5))
        assert open_archive(written(data, tmp_path / "a.nc")).layout.names == ("skt",)

    def test_the_first_fields_may_be_absent(self, tmp_path):
        data = flat(total_precipitation_6hr=1e-3)
        data["total_precipitation_6hr"][:, :, 0] = np.nan
        source = open_archive(written(data, tmp_path / "a.nc"), leads=[48])
        assert source.lead_bounds == {"tp": [[42, 48]]}

    def test_a_zarr_store(self, tmp_path):
        data = flat(t2m=280.0)
        data.to_zarr(tmp_path / "a.zarr", consolidated=False)
        found = open_archive(tmp_path / "a.zarr").read(Part.FORECAST, 0).surface[:, :, 0]
        np.testing.assert_array_equal(found, data.t2m.values[0])


def test_variables_by_other_names(tmp_path):
    path = written(flat("K", t2m=280.0, skt=280.0), tmp_path / "a.nc")
    assert PrepareConfig(variables=["2t", "temperature_2m"]).variables == ["t2m", "t2m"]
    assert open_archive(path, variables=["2t"]).layout.names == ("t2m",)
    with pytest.raises(UserError, match="variable temprature: unknown; did you mean"):
        open_archive(path, variables=["temprature"])
