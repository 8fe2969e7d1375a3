"""Names and units that the user states, and units that a convention of names fixes."""

import numpy as np
import pytest
import xarray as xr
from gribfiles import dataset, ensemble, message, noise, write

import ensemble_ml as eml
from data_prep import Overrides, open_archive, open_pair, prepare
from data_prep.limits import agree
from ensemble_ml.config import EvaluateConfig, Packing, PredictConfig, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.grid import Grid
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
         ({"intervals": {"tp": 0}}, r"intervals=\{tp: 0\}: give whole hours, or start"),
         ({"intervals": {"tp": None}}, r"intervals=\{'tp': None\}: give them by our names"),
         ({"names": {"t2m": "x", "skt": "x"}}, "stands for two of ours"),
         ({"names": {"t2m": "x", "2t": "y"}}, r"names=\{.*\}: states t2m twice, as 2t, too; state it once"),
         ({"units": {"t2m": "K", "2t": "degC"}}, "states t2m twice, as 2t, too; state it once"),
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


def sums(*leads, **attrs):
    """Rain of members at leads, whose intervals nothing states, in m."""
    data = flat(tp=1e-3).isel(step=[0] * len(leads)).assign_coords(step=np.array(leads, "timedelta64[h]"))
    rain = np.random.default_rng(0).gamma(0.3, 1e-2, data.tp.shape).astype(np.float32)
    return data.assign(tp=(data.tp.dims, rain, {"units": "m", **attrs}))


def hourly(days):
    """Rain of a truth at every hour, whose interval nothing states, in m."""
    data = sums(24).isel(number=0, step=0, time=[0] * (24 * days + 1), drop=True)
    times = np.datetime64("2001-01-01T00", "ns") + np.arange(24 * days + 1) * np.timedelta64(1, "h")
    rain = np.random.default_rng(1).gamma(0.3, 1e-3, data.tp.shape).astype(np.float32)
    return data.assign(tp=data.tp.copy(data=rain)).assign_coords(time=times)


class TestIntervals:
    @pytest.mark.parametrize(
        ("stated", "bounds"), [(24, [[0, 24], [24, 48]]), (6, [[18, 24], [42, 48]]), ("start", [[0, 24], [24, 48]])]
    )
    def test_they_are_stated_where_the_file_states_none(self, tmp_path, caplog, stated, bounds):
        data = sums(24, 48)
        if stated == "start":
            data["tp"] = data.tp.cumsum("step").assign_attrs(data.tp.attrs)
        path = written(data, tmp_path / "a.nc")
        source = open_archive(path, overrides=Overrides(intervals={"tp": stated}))
        assert source.lead_bounds == {"tp": bounds}
        read = source.read(Part.FORECAST, 0).surface[:, :, 0]
        np.testing.assert_allclose(read, sums(24, 48).tp.values[0], rtol=1e-4, atol=1e-7)
        assert "no file states the interval" not in caplog.text
        open_archive(path)
        assert "no file states the interval of tp, so they are read as sums from the start" in caplog.text
        assert "If that is wrong, give intervals={tp: 6}" in caplog.text

    def test_nothing_is_before_the_start(self, tmp_path):
        path, leads = written(sums(0, 3, 6, 12), tmp_path / "a.nc"), 2
        source = open_archive(path, overrides=Overrides(intervals={"tp": 6}))
        assert source.lead_bounds == {"tp": [[0, 6], [6, 12]]}
        assert source.catalogue.readers[0].skipped == {"tp (of hours before the start)": leads * 3 * 2}

    def test_of_a_mean_rate_they_give_the_sum(self, tmp_path):
        data = sums(24, 48, units="kg m-2 s-1", cell_methods="step: mean")
        path = written(data, tmp_path / "a.nc")
        with pytest.raises(UserError):
            open_archive(path)
        read = open_archive(path, overrides=Overrides(intervals={"tp": 3})).read(Part.FORECAST, 0).surface[:, :, 0]
        np.testing.assert_allclose(read, data.tp.values[0] * 3 * 3600 / 1000, rtol=1e-5)

    @pytest.mark.parametrize("own", ["", "mm s-1"])
    def test_units_of_a_mean_rate_are_stated_as_well(self, tmp_path, own):
        """A file that states the same in other words is no contradiction."""
        data = sums(24, 48, units=own, cell_methods="step: mean")
        path = written(data, tmp_path / "a.nc")
        said = {"units": {"tp": "kg m-2 s-1"}, "intervals": {"tp": 3}}
        config = PrepareConfig(input=path, output=str(tmp_path / "s.zarr"), **said)
        read = open_archive(path, overrides=Overrides.of(config)).read(Part.FORECAST, 0).surface[:, :, 0]
        np.testing.assert_allclose(read, data.tp.values[0] * 3 * 3600 / 1000, rtol=1e-5)
        with pytest.raises(UserError, match=r"units=\{t2m: kg m-2 s-1\}: .*cannot be converted to 'K'"):
            PrepareConfig(input=path, output="s.zarr", units={"t2m": "kg m-2 s-1"})

    def test_a_file_that_states_others_is_refused(self, tmp_path):
        data = sums(24, 48).assign_coords(step=("step", [24.0, 48.0], {"units": "hours", "bounds": "step_bnds"}))
        data["step_bnds"] = ("step", "two"), [[0.0, 24.0], [24.0, 48.0]]
        path = written(data, tmp_path / "a.nc")
        with pytest.raises(
            UserError, match=r"intervals=\{tp: 6\}: tp states sums over 24 h; leave it out of intervals="
        ):
            open_archive(path, overrides=Overrides(intervals={"tp": 6}))
        assert open_archive(path, overrides=Overrides(intervals={"tp": 24})).lead_bounds == {"tp": [[0, 24], [24, 48]]}
        moments = written(sums(24, cell_methods="step: point"), tmp_path / "b.nc")
        with pytest.raises(UserError, match=r"intervals=\{tp: 6\}: tp states instantaneous values"):
            open_archive(moments, overrides=Overrides(intervals={"tp": 6}))
        truth = written(hourly(1), tmp_path / "c.nc")
        with pytest.raises(UserError, match=r"intervals=\{tp: start\}: tp has no lead times"):
            open_archive(truth, overrides=Overrides(intervals={"tp": "start"}))

    def test_a_truth_has_its_own(self, tmp_path):
        forecast, truth = written(sums(24, 48), tmp_path / "a.nc"), written(hourly(4), tmp_path / "t.nc")
        config = dict(input=forecast, truth=truth, output=str(tmp_path / "s.zarr"), intervals={"2t": 24})
        with pytest.raises(UserError, match=r"intervals=\{t2m: 24\}: t2m is no sum; leave it out"):
            PrepareConfig(**config)
        config["intervals"] = {"TP": 24}
        with pytest.raises(UserError, match=r"state their hours: truth_intervals=\{tp: HOURS\}"):
            prepare(PrepareConfig(**config))
        store = open_store(prepare(PrepareConfig(**config, truth_intervals={"tp": 1}, packing=Packing.float32)))
        rain = hourly(4).tp.values
        days = np.stack([rain[1:25].sum(0), rain[25:49].sum(0)])
        np.testing.assert_allclose(store.read(Part.TRUTH, 0).surface[0, :, 0], days, rtol=1e-4, atol=1e-7)
        written(flat("K", t2m=280.0), tmp_path / "d.nc")
        with pytest.raises(UserError, match=r"truth_intervals=\{tp: 1\}: no file of the truth has tp"):
            open_pair(forecast, str(tmp_path / "d.nc"), overrides=Overrides(truth_intervals={"tp": 1}))

    def test_datasets_are_opened_with_them(self, tmp_path):
        ensemble, truth = sums(24, 48), hourly(4)
        path = eml.prepare(ensemble, truth, tmp_path / "a.zarr", intervals={"tp": 24}, truth_intervals={"tp": 1})
        opened = eml.open(ensemble, intervals={"tp": 24}), eml.open(truth, intervals={"tp": 1})
        whole = eml.prepare(*opened, tmp_path / "b.zarr")
        changed = [one.assign_attrs(changed=1).isel(init_time=slice(None)) for one in opened]
        parts = eml.prepare(changed[0].isel(init_time=[0, 1]), changed[1], tmp_path / "c.zarr")
        stores = [eml.open(one).load() for one in (path, whole, parts)]
        assert stores[0].tp.attrs["lead_bounds_hours"] == "0-24 24-48" and np.isfinite(stores[0].tp_truth).any()
        for store in stores[1:]:
            xr.testing.assert_equal(store, stores[0])
        with pytest.raises(UserError, match=r"intervals={tp: 6h}: give whole hours, or start"):
            eml.open(ensemble, intervals={"tp": "6h"})


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

    @pytest.mark.parametrize(("level", "height"), [(850, 1457), (100, 16180), (10, 31055), (1, 47820), (0.1, 64949)])
    def test_geopotential_of_any_level(self, level, height):
        # Heights of the US standard atmosphere (1976), whose table begins at 1000 hPa.
        values = np.full((1, 2, 3), 9.80665 * height)
        grid = Grid(np.array([10.0, 0.0]), np.array([0.0, 120.0, 240.0]))
        for factor, agrees in ((1.0, True), (0.9, True), (0.1, False), (1 / 9.80665, False)):
            assert agree(field("z"), factor * values, np.array([level]), grid) is agrees

    @pytest.mark.parametrize("name", ["tp", "swe"])
    def test_little_rain_or_snow_of_a_region_may_be_in_millimetres(self, name):
        values, latitude = np.full((1, 2, 3), 0.5), np.array([10.0, 0.0])
        for longitude, agrees in ((np.array([0.0, 120.0, 240.0]), True), (np.array([0.0, 1.0, 2.0]), False)):
            assert agree(field(name), values, np.array([0]), Grid(latitude, longitude)) == agrees

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
