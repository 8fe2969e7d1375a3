"""Truth beside a forecast: aligned to valid time, sums over the forecast's own intervals, stores as truth."""

import numpy as np
import pytest
import xarray as xr
from gribfiles import GLOBE, REGION, dataset, decoded, ensemble, message, noise, write
from synthetic import make_store

import ensemble_ml as eml
from data_prep import open_archive, open_pair, prepare
from data_prep.file_index import FileIndex
from ensemble_ml import cli
from ensemble_ml.config import EvaluateConfig, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, Selection, open_store
from ensemble_ml.tasks import TASKS

SHAPE = len(GLOBE[0]), len(GLOBE[1])


def analyses(path, days=range(1, 5), names=("t",), **keys):
    made = [
        message(name, date=20010100 + day, member=None, seed=day * 100 + number, level=level, **keys)
        for day in days
        for number, name in enumerate(names)
        for level in (500, 850)[: 2 if name == "t" else 1]
    ]
    return write(path, made)


def rain(path, start, step, amount, **keys):
    return message("tp", np.full(SHAPE, amount) + noise(mean=0, std=1e-6), date=start, step=step, **keys)


@pytest.fixture
def wet(tmp_path):
    """Rain from the start of one forecast: 1 mm in 24 h, 4 mm in 48 h."""
    made = [
        rain(None, 20010101, step, amount, member=m)
        for m in (1, 2)
        for step, amount in (("0-24", 1e-3), ("0-48", 4e-3))
    ]
    return write(tmp_path / "wet.grib", made)


class TestAlignment:
    def test_truth_is_read_at_valid_time(self, tmp_path):
        forecast = ensemble(tmp_path / "f.grib", steps=(0, 24, 48))
        truth = analyses(tmp_path / "t.grib")
        pair = open_pair(forecast, truth)
        by_day = {(keys["dataDate"] - 20010100, keys["level"]): values for keys, values in decoded(truth)}
        for date in range(2):
            found = pair.read(Part.TRUTH, date).pressure
            assert found.shape == (1, 3, 1, 2, *SHAPE)
            for lead in range(3):
                for z, level in enumerate((500, 850)):
                    np.testing.assert_array_equal(found[0, lead, 0, z], by_day[1 + date + lead, level])
        assert pair.has(Part.TRUTH) and all(there.all() for there in pair.present(Part.TRUTH, 1))

    def test_selection(self, tmp_path):
        pair = open_pair(
            ensemble(tmp_path / "f.grib", names=("t", "t2m")), analyses(tmp_path / "t.grib", names=("t", "t2m"))
        )
        whole = pair.read(Part.TRUTH, 0)
        some = pair.read(Part.TRUTH, 0, Selection((1,), (24,), ("t",), (850,), (), (1, 4)))
        np.testing.assert_array_equal(some.pressure, whole.pressure[:, 1:, :, 1:, 1:4])
        assert some.surface.shape == (1, 1, 0, 3, SHAPE[1])

    def test_short_forecasts_verify_and_the_shortest_lead_wins(self, tmp_path):
        forecast = ensemble(tmp_path / "f.grib", steps=(24,), levels=(500,), dates=(20010101,))
        late = message("t", date=20010101, time=1800, step=6, member=None, seed=1)
        soon = message("t", date=20010101, time=2100, step=3, member=None, seed=2)
        pair = open_pair(forecast, write(tmp_path / "t.grib", [late, soon]))
        expected = list(decoded(tmp_path / "t.grib"))[1][1]
        np.testing.assert_array_equal(pair.read(Part.TRUTH, 0).pressure[0, 0, 0, 0], expected)

    def test_what_a_file_says_of_itself_does_not_matter(self, tmp_path):
        """Analyses as forecast, and a perturbed forecast's message as truth."""
        forecast = write(tmp_path / "f.grib", [message("t", kind="an", member=number) for number in (0, 1)])
        pair = open_pair(forecast, write(tmp_path / "t.grib", [message("t", kind="pf", member=3)]))
        assert pair.layout.realization == (0, 1) and pair.has(Part.TRUTH)

    def test_era5_as_the_climate_data_store_has_it(self, tmp_path):
        times = np.arange("2001-01-01", "2001-01-05", 12, dtype="datetime64[h]").astype("datetime64[ns]")
        values = np.random.default_rng(1).normal(270, 9, (len(times), 2, *SHAPE)).astype(np.float32)
        axes = {"valid_time": times, "pressure_level": [850.0, 500.0], "latitude": GLOBE[0], "longitude": GLOBE[1]}
        data = xr.Dataset({"t": (tuple(axes), values, {"units": "K", "GRIB_paramId": 130})}, axes)
        data = data.assign_coords(number=0, expver=("valid_time", ["0001"] * len(times)))
        data.valid_time.attrs["standard_name"] = "time"
        data.pressure_level.attrs["units"] = "hPa"
        data.to_netcdf(tmp_path / "t.nc")
        found = open_pair(ensemble(tmp_path / "f.grib"), tmp_path / "t.nc").read(Part.TRUTH, 1).pressure[0, :, 0]
        np.testing.assert_array_equal(found, values[[2, 4]][:, ::-1])

    def test_no_truth_is_fine(self, tmp_path):
        pair = open_pair(ensemble(tmp_path / "f.grib"))
        assert not pair.has(Part.TRUTH)
        with pytest.raises(UserError, match="has no truth"):
            pair.read(Part.TRUTH, 0)

    def test_missing_truth_is_nan_where_it_is_read(self, tmp_path):
        pair = open_pair(ensemble(tmp_path / "f.grib"), analyses(tmp_path / "t.grib", days=(1, 2)))
        assert pair.present(Part.TRUTH, 1)[0][0, :, 0, 0].tolist() == [True, False]
        assert np.isnan(pair.read(Part.TRUTH, 1).pressure[0, 1]).all()

    def test_an_ensemble_is_no_truth(self, tmp_path):
        path = ensemble(tmp_path / "f.grib")
        with pytest.raises(UserError, match="holds 3 members; the truth is one field for each time"):
            open_pair(path, path)

    def test_another_grid(self, tmp_path):
        with pytest.raises(UserError, match=r"t.grib: grid 4 x 7 points.* differs from the forecast's, 7 x 12"):
            open_pair(ensemble(tmp_path / "f.grib"), analyses(tmp_path / "t.grib", grid=REGION))

    def test_fingerprint_covers_both(self, tmp_path):
        forecast = ensemble(tmp_path / "f.grib")
        prints = {open_pair(forecast, analyses(tmp_path / f"{n}.grib", days=range(1, n))).fingerprint() for n in (4, 5)}
        assert len(prints | {open_pair(forecast).fingerprint()}) == 3


class TestSums:
    def test_a_sum_over_the_same_interval_is_taken_as_it_is(self, tmp_path, wet):
        made = [rain(None, 20010100 + day, "0-24", day * 1e-3, member=None) for day in (1, 2)]
        truth = write(tmp_path / "t.grib", made)
        found = open_pair(wet, truth).read(Part.TRUTH, 0).surface[0, :, 0]
        for lead, (_, values) in enumerate(decoded(truth)):
            np.testing.assert_array_equal(found[lead], values)

    def test_hourly_sums_are_added_up(self, tmp_path, wet):
        made = []
        for hour in range(48):  # as ERA5 has them: forecasts at 06 and 18 UTC, here one a day for short
            day, step = divmod(hour, 24)
            made.append(rain(None, 20010101 + day, f"{step}-{step + 1}", 1e-4 * (1 + day), member=None))
        found = open_pair(wet, write(tmp_path / "t.grib", made)).read(Part.TRUTH, 0).surface[0, :, 0]
        np.testing.assert_allclose(found.mean((1, 2)), [24e-4, 48e-4], rtol=1e-2)

    def test_netcdf_states_its_interval_by_bounds(self, tmp_path, wet):
        times = np.array(["2001-01-02", "2001-01-03"], "datetime64[ns]")
        data = xr.Dataset(
            {
                "tp": (
                    ("time", "latitude", "longitude"),
                    np.stack([np.full(SHAPE, v) for v in (2e-3, 3e-3)]),
                    {"units": "m"},
                )
            },
            {"time": ("time", times, {"bounds": "time_bnds"}), "latitude": GLOBE[0], "longitude": GLOBE[1]},
        )
        data["time_bnds"] = ("time", "nv"), np.stack([times - np.timedelta64(24, "h"), times], 1)
        data.time.encoding["units"] = "hours since 2001-01-01"
        data.to_netcdf(tmp_path / "t.nc")
        found = open_pair(wet, tmp_path / "t.nc").read(Part.TRUTH, 0).surface[0, :, 0]
        np.testing.assert_allclose(found[:, 0, 0], [2e-3, 3e-3], rtol=1e-6)
        data.drop_vars("time_bnds").assign_coords(time=times).to_netcdf(tmp_path / "u.nc")
        config = PrepareConfig(input=str(wet), truth=str(tmp_path / "u.nc"), output=str(tmp_path / "s.zarr"))
        with pytest.raises(UserError, match=r"tp: its sums state no interval .*, and those over 0-24 h, 24-48 h after"):
            prepare(config)

    def test_means_over_a_day_verify_no_moment(self, tmp_path):
        """The moment is taken where both are there; with the mean alone there is nothing to verify by."""
        forecast = ensemble(tmp_path / "f.grib", names=("t2m", "t"), dates=(20010101,), steps=(24,))
        times = np.array(["2001-01-02"], "datetime64[ns]")
        axes = {"time": ("time", times, {"bounds": "time_bnds"}), "latitude": GLOBE[0], "longitude": GLOBE[1]}
        mean = np.full((1, *SHAPE), 250.0), {"units": "K", "cell_methods": "time: mean"}
        data = xr.Dataset({"t2m": (("time", "latitude", "longitude"), *mean)}, axes)
        data["time_bnds"] = ("time", "nv"), np.stack([times - np.timedelta64(24, "h"), times], 1)
        data.time.encoding["units"] = "hours since 2001-01-01"
        data.to_netcdf(tmp_path / "mean.nc")
        moment = analyses(tmp_path / "moment.grib", names=("t2m", "t"))
        found = open_pair(forecast, [tmp_path / "mean.nc", moment])
        assert found.read(Part.TRUTH, 0).surface.min() > 251
        upper = analyses(tmp_path / "upper.grib")
        alone = open_pair(forecast, [tmp_path / "mean.nc", upper])
        assert not alone.present(Part.TRUTH, 0)[1].any() and alone.present(Part.TRUTH, 0)[0].any()
        assert alone.truth.unmatched() == {"t2m": "the truth has it over intervals, the forecast at one time"}

    def test_means_on_pressure_levels_are_verified_each_by_its_own_level(self, tmp_path):
        data = dataset().sel(step=[np.timedelta64(24, "h")])
        data["t"].attrs["cell_methods"] = "step: mean"
        data = data.assign_coords(step=("step", [24.0], {"units": "hours", "bounds": "step_bnds"}))
        data["step_bnds"] = ("step", "two"), np.array([[0.0, 24.0]])
        data.to_netcdf(tmp_path / "f.nc")
        truth = data.isel(number=0, drop=True)
        truth.to_netcdf(tmp_path / "t.nc")
        pair = open_pair(tmp_path / "f.nc", tmp_path / "t.nc")
        assert pair.lead_bounds == {"t": [[0, 24]]} and pair.truth.unmatched() == {}
        found = pair.read(Part.TRUTH, 0).pressure[0, :, 0]
        np.testing.assert_array_equal(found, truth.t.transpose("time", "step", ...).values[0, :, ::-1])
        truth.isel(isobaricInhPa=[1]).to_netcdf(tmp_path / "upper.nc")
        one = open_pair(tmp_path / "f.nc", tmp_path / "upper.nc")
        assert one.present(Part.TRUTH, 0)[0][0, 0, 0].tolist() == [True, False]
        np.testing.assert_array_equal(one.read(Part.TRUTH, 0).pressure[0, :, 0, 0], found[:, 0])

    @pytest.mark.parametrize(("said", "there"), [("mean", False), ("maximum", True), ("", True)])
    def test_a_maximum_is_not_verified_by_a_mean(self, tmp_path, said, there):
        times = np.array(["2001-01-02"], "datetime64[ns]")
        for name, method in (("f", "maximum"), ("t", said)):
            axes = {"time": ("time", times, {"bounds": "time_bnds"}), "latitude": GLOBE[0], "longitude": GLOBE[1]}
            about = {"units": "K", "cell_methods": f"time: {method}" if method else ""}
            values = np.full((1, *SHAPE), 280.0), about
            data = xr.Dataset({"t2m": (("time", "latitude", "longitude"), *values)}, axes)
            data["time_bnds"] = ("time", "nv"), np.stack([times - np.timedelta64(24, "h"), times], 1)
            if name == "f":
                data = data.assign_coords(forecast_reference_time=times[0] - np.timedelta64(24, "h"))
            data.time.encoding["units"] = "hours since 2001-01-01"
            data.to_netcdf(tmp_path / f"{name}.nc")
        found = open_pair(tmp_path / "f.nc", tmp_path / "t.nc")
        assert found.present(Part.TRUTH, 0)[1].all() == there
        why = {"t2m": "the truth is its mean over time, the forecast its maximum"}
        assert found.truth.unmatched() == ({} if there else why)

    @pytest.mark.parametrize(("indicator", "there"), [(3, False), (2, True)])  # a mean, a maximum
    def test_a_maximum_in_grib_is_not_verified_by_a_mean(self, tmp_path, indicator, there):
        for name, kind, member in (("f", 2, 1), ("t", indicator, None)):
            write(tmp_path / f"{name}.grib", [message("t2m", step="0-24", member=member, timeRangeIndicator=kind)])
        index = FileIndex(tmp_path / "index")
        for _ in range(2):  # scanned, and by the tables that were kept
            found = open_pair(tmp_path / "f.grib", tmp_path / "t.grib", index=index)
            why = {"t2m": "the truth is its mean over time, the forecast its maximum"}
            assert found.truth.unmatched() == ({} if there else why)

    def test_intervals_that_do_not_fit_are_an_error(self, tmp_path, wet):
        made = [rain(None, 20010101, "12-36", 1e-3, member=None)]
        config = PrepareConfig(
            input=str(wet), truth=str(write(tmp_path / "t.grib", made)), output=str(tmp_path / "s.zarr")
        )
        with pytest.raises(UserError, match="tp: its intervals do not fill 0-24 h, 24-48 h after the start") as raised:
            prepare(config)
        assert str(raised.value).endswith("; or prepare without a truth, truth=null")

    @pytest.mark.parametrize("python", [False, True])
    def test_a_refusal_names_the_others_as_the_caller_gives_them(self, tmp_path, wet, python, capsys):
        keys = {"dates": (20010101,), "steps": (24, 48), "members": (1, 2)}
        forecast = [str(wet), str(ensemble(tmp_path / "f.grib", names=("t", "t2m"), **keys))]
        sums = [rain(None, 20010101, "12-36", 1e-3, member=None)]
        truth = [str(write(tmp_path / "t.grib", sums)), str(analyses(tmp_path / "u.grib", names=("t", "t2m")))]
        output = tmp_path / "s.zarr"
        if python:
            opened = eml.open(forecast), eml.open(truth)
            with pytest.raises(UserError, match="tp: its intervals do not fill") as raised:
                eml.prepare(*opened, output)
            assert str(raised.value).endswith("; or keep the others alone, variables=['t', 't2m']")
            store = open_store(eml.prepare(*opened, output, variables=["t", "t2m"]))
        else:
            words = ["prepare", f"input=[{','.join(forecast)}]", f"truth=[{','.join(truth)}]", f"output={output}"]
            assert cli.main(words) == cli.STATUS_USER
            assert capsys.readouterr().err.strip().endswith("; or keep the others alone, 'variables=[t,t2m]'")
            assert cli.main([*words, "variables=[t,t2m]"]) == 0
            store = open_store(output)
        assert store.layout.names == ("t", "t2m") and store.has(Part.TRUTH)

    def test_maxima_over_parts_make_the_maximum(self, tmp_path):
        gusts = write(
            tmp_path / "f.grib", [message("fg10", noise(mean=50), step="0-6", member=m, seed=m) for m in (1, 2)]
        )
        parts = [
            message("fg10", noise(mean=50, seed=n), step=step, member=None) for n, step in enumerate(("0-3", "3-6"))
        ]
        truth = write(tmp_path / "t.grib", parts)
        expected = np.max([values for _, values in decoded(truth)], axis=0)
        np.testing.assert_array_equal(open_pair(gusts, truth).read(Part.TRUTH, 0).surface[0, 0, 0], expected)


class TestStores:
    @pytest.fixture
    def store(self, tmp_path):
        forecast = ensemble(tmp_path / "f.grib", names=("t", "t2m"), steps=(0, 24))
        truth = analyses(tmp_path / "t.grib", names=("t", "t2m"))
        return prepare(PrepareConfig(input=str(forecast), truth=str(truth), output=str(tmp_path / "s.zarr")))

    def test_a_store_brings_its_own_truth(self, store, tmp_path):
        pair = open_pair(store)
        own = open_pair(tmp_path / "f.grib", tmp_path / "t.grib")
        np.testing.assert_array_equal(pair.read(Part.TRUTH, 0).pressure, own.read(Part.TRUTH, 0).pressure)

    def test_a_store_is_the_truth_of_an_archive(self, store, tmp_path):
        part = ensemble(tmp_path / "g.grib", names=("t",), steps=(24, 48), dates=(20010102, 20010103), levels=(850,))
        pair = open_pair(part, store)
        found = pair.read(Part.TRUTH, 0).pressure
        np.testing.assert_array_equal(found[:, 0], open_pair(store).read(Part.TRUTH, 1).pressure[:, 1, :, 1:])
        assert np.isnan(found[:, 1]).all() and np.isnan(pair.read(Part.TRUTH, 1).pressure).all()
        assert pair.present(Part.TRUTH, 0)[0][0, :, 0, 0].tolist() == [True, False]
        assert not pair.present(Part.TRUTH, 1)[0].any()
        assert pair.read(Part.TRUTH, 0, Selection(lead_hours=(24,), rows=(0, 2))).pressure.shape == (
            1,
            1,
            1,
            1,
            2,
            SHAPE[1],
        )

    @pytest.mark.slow
    def test_an_archive_is_the_truth_of_a_store(self, store, tmp_path):
        other = analyses(tmp_path / "u.grib", names=("t", "t2m"), bits=12)
        pair = open_pair(store, other)
        assert not np.array_equal(pair.read(Part.TRUTH, 0).pressure, open_pair(store).read(Part.TRUTH, 0).pressure)

    def test_a_store_without_truth(self, tmp_path):
        forecast = ensemble(tmp_path / "f.grib")
        store = prepare(PrepareConfig(input=str(forecast), output=str(tmp_path / "s.zarr")))
        with pytest.raises(UserError, match="the store has no truth; prepare it with truth=ARCHIVE"):
            open_pair(forecast, store)


def test_forecasts_of_long_leads_that_stand_for_the_truth_are_told_of(tmp_path, caplog):
    forecast = ensemble(tmp_path / "f.grib", steps=(24,), levels=(500,), dates=(20010101,))
    old = [message("t", date=20001228, step=120, member=None), message("t", date=20001230, step=72, member=None)]
    pair = open_pair(forecast, write(tmp_path / "t.grib", old))
    assert pair.has(Part.TRUTH)
    assert "t: some valid times are verified by forecasts of up to 72 h; give analyses or shorter ones" in caplog.text


def gusts(path, times, *, over):
    """Gusts as the service has them, `over` the hour before, or of the moment."""
    start = np.timedelta64(1 if over else 0, "h")
    data = xr.Dataset(coords={"latitude": ("latitude", GLOBE[0]), "longitude": ("longitude", GLOBE[1]), "time": times})
    values = np.full((len(times), *SHAPE), 20.0 if over else 10.0, np.float32)
    about = {"units": "m s-1", "standard_name": "wind_speed_of_gust"} | (
        {"cell_methods": "time: maximum"} if over else {}
    )
    data["fg10"] = ("time", "latitude", "longitude"), values, about
    if over:
        data["time"].attrs["bounds"] = "edges"
        data["edges"] = ("time", "nv"), np.stack([times - start, times], 1)
    data.to_netcdf(path)
    return path


def test_gusts_of_the_moment_are_not_verified_by_those_of_an_hour(tmp_path, caplog):
    """Where the forecast states no interval: moments where there are any, else it is said."""
    forecast = ensemble(tmp_path / "f.grib", steps=(6,), names=("fg10",), dates=(20010101,), paramId=49)
    times = np.array(["2001-01-01T06", "2001-01-01T07"], "datetime64[ns]")
    hours = gusts(tmp_path / "a.nc", times, over=True)
    pair = open_pair(forecast, hours)
    assert pair.read(Part.TRUTH, 0).surface.max() == 20
    assert "fg10 is over intervals; the forecast states none, and is assumed to be over the same" in caplog.text
    pair = open_pair(forecast, [hours, gusts(tmp_path / "b.nc", times, over=False)])
    assert pair.read(Part.TRUTH, 0).surface.max() == 10


def test_starts_that_nanoseconds_do_not_reach_are_refused(tmp_path):
    path = write(tmp_path / "a.grib", [message("t", date=23000101, member=m, seed=m) for m in (1, 2)])
    data = dataset().assign_coords(time=np.array(["2300-01-01", "2300-01-02"], "datetime64[s]"))
    for archive in (path, data):
        for dates in (None, ["2300"]):
            with pytest.raises(UserError, match="init time 2300-01-01T00: only those from 1678 to 2261 can be kept"):
                open_archive(archive, dates=dates)
        with pytest.raises(UserError, match="dates 1715: no init time lies there; the data span 2300-01-01T00 to"):
            open_archive(archive, dates=["1715"])


def test_the_truth_of_other_years_is_refused_with_both_periods(tmp_path):
    """By evaluate, too, whether it is an archive or a store."""
    ensemble(tmp_path / "ens.grib", dates=(20010101, 20010103))
    made = [message("t", date=20030100 + d, time=hour, member=None) for d in (1, 2) for hour in range(0, 2400, 300)]
    write(tmp_path / "truth.grib", made)
    periods = (
        r"2001-01-01 to 2001-01-04 \(00 UTC\), the truth 2003-01-01 to 2003-01-02 \(00, 03, 06, 09 and 4 more UTC\)"
    )
    with pytest.raises(UserError, match=rf"truth \S+truth.grib: the forecast is valid {periods}; give the truth of"):
        open_pair(tmp_path / "ens.grib", tmp_path / "truth.grib")
    ensemble(tmp_path / "later.grib", dates=(20030101, 20030102), steps=(0,), levels=(500,))
    given = {"input": str(tmp_path / "later.grib"), "truth": str(tmp_path / "truth.grib")}
    store = prepare(PrepareConfig(output=str(tmp_path / "s.zarr"), **given))
    starts = (
        r"the forecast starts 2001-01-01 to 2001-01-03 \(00 UTC\), and the store has truth for starts 2003-01-01 to"
    )
    with pytest.raises(UserError, match=rf"truth \S+s.zarr: {starts} 2003-01-02 \(00 UTC\); give the truth"):
        open_pair(tmp_path / "ens.grib", store)
    with pytest.raises(UserError, match="the forecast is valid"):
        TASKS["evaluate"].run(EvaluateConfig(ensemble=str(tmp_path / "ens.grib"), truth=str(tmp_path / "truth.grib")))


def test_points_that_the_truth_of_a_store_lacks_are_known(tmp_path):
    whole, masked = (
        make_store(tmp_path / name, dates=2, members=2, shape=(7, 12), surface=("sst",), masked=of)
        for name, of in (("a.zarr", ()), ("b.zarr", ("sst",)))
    )
    assert open_pair(whole.path, masked.path).masked == ("sst",)
    assert open_pair(whole.path, whole.path).masked == ()
