"""A new user's first hour: public archives as they are published, and the commands of the README with their defaults.

A model trains from one start date on; its linear correction and its small networks are fitted from ten on.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import public_archives
import public_grib
import public_weather
import pytest
import xarray as xr

from data_prep.limits import plausible
from ensemble_ml import cli
from ensemble_ml.fields import field
from ensemble_ml.store import Part, open_store
from ensemble_ml.training.linear_fit import FEWEST_DATES

ALL_FITS = FEWEST_DATES  # start dates to train on
FEW = 2
MEMBERS = 5
LEADS = (24, 48)
NARROW = {  # networks, for a grid of a degree in a test
    "model.hidden": 8, "model.max_hidden": 16, "model.points": 16,
    "model.precision": "float32",
}  # fmt: skip
GEFS_LEFT_OUT = {  # fields at each date, lead and of each product
    "130 (t, isobaricInhPa), of product template 4.2": 2,
    "156 (gh, isobaricInhPa), of product template 4.2": 2,
    "165 (10u, heightAboveGround), of product template 4.2": 1,
    "166 (10v, heightAboveGround), of product template 4.2": 1,
    "167 (2t, heightAboveGround), of product template 4.2": 1,
    "228228 (tp, surface), of product template 4.12": 1,
    "260074 (prmsl, meanSea), of product template 4.2": 1,
}


@dataclass
class Hour:
    """What a user has after an hour: what `inspect` said of the archive, a store, a run, and forecasts."""

    folder: Path
    inspected: dict
    predicted: list[str]

    @property
    def store(self):
        return open_store(self.folder / "store.zarr")

    @property
    def forecasts(self) -> xr.Dataset:
        return xr.open_mfdataset(f"{self.folder}/forecast/*.nc", decode_timedelta=True)


def ensemble_ml(task, **settings):
    """Run a command of the README."""
    assert cli.main([task, *(f"{key}={value}" for key, value in settings.items())]) == 0


@pytest.fixture
def first_hour(tmp_path, capfd, caplog):
    """Return a function that walks the road of the README, with no setting beyond paths, dates and three steps."""

    def walk(archive: Path, truth: Path, *, train: int, **model: object) -> Hour:
        store, runs = tmp_path / "store.zarr", tmp_path / "runs"
        assert cli.main(["inspect", str(archive), "format=json"]) == 0
        inspected = json.loads(capfd.readouterr().out)
        caplog.clear()
        ensemble_ml("prepare", input=archive, truth=truth, output=store)
        *first, validation, one, other = np.datetime_as_string(public_weather.days(train + 3), "D").tolist()
        split = {"data.train": f"[{first[0]}/{first[-1]}]", "data.validation": f"[{validation}]"}
        ensemble_ml("train", run="first", output=runs, steps=3, threads=1, **{"data.store": store}, **split, **model)
        best = runs / "first" / "checkpoints" / "best"
        dates, output = f"[{one}/{other}]", tmp_path / "forecast"
        ensemble_ml("predict", checkpoint=best, input=store, dates=dates, members_in=MEMBERS, output=output)
        return Hour(tmp_path, inspected, [one, other])

    caplog.set_level("INFO", "data_prep")
    return walk


def assert_store_is_what_was_inspected(hour):
    """Every start date, member, lead and variable that `inspect` promised is in the store, and all of the truth."""
    layout, promised = hour.store.layout, hour.inspected
    assert promised["dates"]["count"] == len(layout.init_time)
    assert tuple(promised["members"]) == layout.realization == tuple(range(1, MEMBERS + 1))
    assert tuple(promised["lead_hours"]) == layout.lead_hours
    assert tuple(promised["levels"]) == layout.levels == public_weather.LEVELS
    assert (tuple(promised["variables"]), tuple(promised["surface"])) == (layout.variables, layout.surface)
    assert promised["lead_bounds"] == hour.store.lead_bounds
    assert promised["grid"] == layout.grid.describe()
    assert promised["control"] == hour.store.has(Part.CONTROL)
    assert promised["gaps"]["fields"] == 0
    for date in range(len(layout.init_time)):
        assert all(there.all() for there in hour.store.present(Part.FORECAST, date))


def assert_forecasts_are_weather(hour, names):
    """The forecasts are one data set, whole and plausible, and nearer to the truth than another day's weather."""
    forecasts = hour.forecasts
    starts = np.datetime_as_string(forecasts["forecast_reference_time"].values, "D")
    assert starts.tolist() == hour.predicted
    assert (forecasts["forecast_period"].values / np.timedelta64(1, "h")).tolist() == [*hour.store.layout.lead_hours]
    assert forecasts.attrs["members_in"].split() == [str(number + 1) for number in range(MEMBERS)]
    assert {str(name).removesuffix("_mean") for name in forecasts if str(name).endswith("_mean")} == names
    for name, values in forecasts.data_vars.items():
        assert np.isfinite(values.values).all(), name
    grid = forecasts["latitude"].values, forecasts["longitude"].values
    for name in names:
        mean = forecasts[f"{name}_mean"].transpose("forecast_reference_time", "forecast_period", ...)
        low, high = plausible(field(name))
        assert low < mean.min() and mean.max() < high, name
        assert (forecasts[f"{name}_stddev"] > 0).all() and (forecasts[f"{name}_ensemble_spread"] >= 0).all(), name
        for level in public_weather.LEVELS if "level" in mean.dims else (0,):
            if (name, level) in public_weather.WEATHER:
                assert_nearer_than_another_day(mean, name, level, grid)


def assert_nearer_than_another_day(mean, name, level, grid):
    """Rows or members that were mixed up would be as far from the truth as the weather of another day."""
    deviation = public_weather.WEATHER[name, level][2]
    for start in mean["forecast_reference_time"].values:
        for lead in mean["forecast_period"].values:
            values = mean.sel(forecast_reference_time=start, forecast_period=lead)
            values = values.sel(level=level) if level else values
            truth = public_weather.weather(name, level, start + lead, grid)
            assert np.sqrt(np.square(values.values - truth).mean()) < deviation, (name, level, start, lead)


@pytest.mark.slow
def test_what_cfgrib_makes_of_an_ensemble_as_netcdf(first_hour, caplog, tmp_path):
    """Rain is a sum from the start on, of which analyses have none, so the model leaves it out and says so."""
    paths = public_archives.cfgrib(tmp_path, degrees=10, dates=ALL_FITS + 3, members=MEMBERS, leads=LEADS)
    hour = first_hour(*paths, train=ALL_FITS)
    assert_store_is_what_was_inspected(hour)
    verified = {"t", "z", "q", "t2m", "u10", "v10", "msl"}
    assert set(hour.store.layout.names) == {*verified, "tp"}
    assert hour.store.lead_bounds == {"tp": [[0, 24], [24, 48]]}
    assert not hour.store.has(Part.CONTROL)
    assert hour.inspected["left_out"] == {} and hour.inspected["other_files"] == []
    assert "tp stays without truth" in caplog.text
    assert "holds no truth of tp, so the model leaves it out" in caplog.text
    assert_forecasts_are_weather(hour, verified)


@pytest.mark.slow
def test_gefs_as_grib(first_hour, caplog, tmp_path):
    """Heights become geopotential; the control stands apart; mean and spread of the ensemble are left out."""
    paths = public_grib.gefs(tmp_path, degrees=5, dates=FEW + 3, members=MEMBERS, leads=LEADS)
    hour = first_hour(*paths, train=FEW)
    assert_store_is_what_was_inspected(hour)
    verified = {"t", "z", "t2m", "u10", "v10", "msl"}
    assert set(hour.store.layout.names) == {*verified, "tp"}
    assert hour.store.lead_bounds == {"tp": [[18, 24], [42, 48]]}
    assert hour.store.has(Part.CONTROL)
    derived = 2 * len(LEADS) * (FEW + 3)  # means and spreads
    counts = {name: derived * count for name, count in GEFS_LEFT_OUT.items()}
    assert hour.inspected["left_out"] == counts
    assert all(name in caplog.text for name in counts)
    others = {Path(path).name.partition(".")[0] for path in hour.inspected["other_files"]}
    assert others >= {"geavg", "gespr"}
    assert "holds no truth of tp, so the model leaves it out" in caplog.text
    assert_forecasts_are_weather(hour, verified)


@pytest.mark.slow
def test_weatherbench_as_zarr(first_hour, caplog, tmp_path):
    """What has no units has those that its name means."""
    paths = public_archives.weatherbench(tmp_path, degrees=1, dates=FEW + 3, members=MEMBERS, leads=LEADS[:1])
    hour = first_hour(*paths, train=FEW, **NARROW)
    assert_store_is_what_was_inspected(hour)
    names = {"t", "z", "u", "v", "ws", "r", "t2m", "u10", "v10", "ws10", "msl", "tp"}
    assert set(hour.store.layout.names) == names
    assert hour.store.lead_bounds == {"tp": [[18, 24]]}
    assert "files state no units of r 1, tp m, ws m s-1, ws10 m s-1" in caplog.text
    assert hour.inspected["left_out"] == {}
    assert_forecasts_are_weather(hour, names)
