"""Forecasts by others that cannot be scored: each is refused in one line, before anything is fitted."""

import sys
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr
from fakes import FEW, TRAIN, corrected, settings, write_forecasts
from foreign import in_other_units, rewritten

from ensemble_ml.errors import UserError
from ensemble_ml.verification import evaluate
from ensemble_ml.verification.forecast_files import ForecastFile
from ensemble_ml.verification.forecasts import open_forecasts


@pytest.fixture
def forecast(few_forecasts):
    return few_forecasts


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"calendar": "noleap"}, "dates of the calendar noleap"),
        ({"units": "days"}, r"no dates \(its units name none\)"),
    ],
)
@pytest.mark.parametrize("name", ["time", "forecast_reference_time"])
def test_times_of_no_date_are_refused(store, forecast, tmp_path, name, told, text):
    other = rewritten(forecast, tmp_path / "f", lambda data: data)
    path = sorted(other.glob("*.nc"))[1]
    with netCDF4.Dataset(path, "a") as data:
        data[name].setncatts(told)
    with pytest.raises(UserError, match=rf"{path.name}: {name} holds {text}; give dates of the standard calendar"):
        evaluate(settings(other, store, tmp_path / "r"), store)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("time", np.nan, "time holds a missing date"),
        ("forecast_reference_time", np.nan, "forecast_reference_time holds a missing date"),
        ("time", 1e12, "time holds dates of the calendar .*; give dates of the standard calendar from 1678 to 2261"),
    ],
)
def test_times_that_are_missing_or_far_away_are_refused(store, forecast, tmp_path, name, value, text):
    other = rewritten(forecast, tmp_path / "f", lambda data: data)
    path = sorted(other.glob("*.nc"))[0]
    with xr.open_dataset(path, decode_times=False) as data:
        values = data[name].astype(np.float64).load()
        values[{dim: 0 for dim in values.dims}] = value
        changed = data.load().assign_coords({name: values.assign_attrs(data[name].attrs)})
    changed.to_netcdf(path)
    with pytest.raises(UserError, match=rf"{path.name}: {text}"):
        evaluate(settings(other, store, tmp_path / "r"), store)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda data: data.assign_coords(level=["low", "high"]),
            r"f.forecast_\S+nc: level: could not convert string to float: '\w+'",
        ),
        (
            lambda data: data.assign_coords(level=[np.nan, 850.0]),
            r"f.forecast_\S+nc: level: cannot convert float NaN to integer",
        ),
        (
            lambda data: xr.concat([data, data.isel(forecast_period=[0])], "forecast_period", data_vars="minimal"),
            r"f.forecast_\S+nc: time holds the lead of 24 h 2 times; keep one of them",
        ),
        (
            lambda data: data.assign_coords(level=[850.0, 850.3]),
            r"f.forecast_\S+nc: level holds 850 hPa several times, in whole hPa; keep one of them",
        ),
        (lambda data: data.isel(longitude=slice(0)), r"f.forecast_\S+nc: longitude: has no points"),
        (lambda data: data.expand_dims(realization=[3]), "t_mean: has a dimension realization; take one value of it"),
        (
            lambda data: xr.concat(
                [data, data.assign_coords(forecast_reference_time=[np.datetime64("2030-01-01", "ns")])],
                "forecast_reference_time",
            ),
            "forecast_reference_time holds 2 init times; give a file for each init time",
        ),
        (
            lambda data: data.assign_coords(latitude=np.sort(data.latitude.values**3)[::-1]),
            r"f.forecast_\S+nc: latitude: not evenly spaced",
        ),
        (
            lambda data: data.assign_coords(level=("level", data.level.values, {"units": "K"})),
            r"f.forecast_\S+nc: level: units 'K': cannot be converted to 'Pa'; known are Pa, .*, hPa",
        ),
    ],
)
def test_files_of_more_than_one_forecast_are_refused(store, forecast, tmp_path, change, text):
    other = rewritten(forecast, tmp_path / "f", change)
    with pytest.raises(UserError, match=text):
        evaluate(settings(other, store, tmp_path / "r"), store)


def test_units_that_are_not_known_and_laws_in_other_units_are_refused(store, forecast, tmp_path):
    other = in_other_units(forecast, tmp_path / "f", ("location", "scale"))
    with pytest.raises(UserError, match=r"tp_location: parameters of a .* distribution in mm; give them in m"):
        evaluate(settings(other, store, tmp_path / "r"), store)
    for file in other.glob("*.nc"):
        with netCDF4.Dataset(file, "a") as data:
            data["t_location"].units = "furlong"
    with pytest.raises(UserError, match="t_location: units 'furlong': cannot be converted"):
        evaluate(settings(other, store, tmp_path / "r"), store)


@pytest.mark.parametrize("part", ["scale", "stddev"])
def test_a_scale_below_zero_is_refused(store, forecast, tmp_path, monkeypatch, part):
    """As a point forecast it would have a CRPS, and squared a spread. Nothing is fitted before it is seen."""
    monkeypatch.setattr(sys.modules[evaluate.__module__], "fit_group", lambda *_: pytest.fail("fitted first"))

    def turned(data):
        data[f"t_{part}"] *= -1
        return data

    parts = ("mean", "stddev", "location", "scale")
    other = rewritten(forecast, tmp_path / "f", turned, parts)
    with pytest.raises(UserError, match=rf"f.forecast_\S+nc: t_{part} is below zero at \d+ of its points"):
        evaluate(settings(other, store, tmp_path / "r"), store)


@pytest.mark.parametrize("given", [{"units": "furlong"}, None], ids=["mean", "members"])
def test_what_is_wrong_with_all_files_is_seen_before_the_fits(store, forecast, tmp_path, monkeypatch, given):
    """Of the last field, or of members, which are scored after all else."""
    monkeypatch.setattr(sys.modules[evaluate.__module__], "fit_group", lambda *_: pytest.fail("fitted first"))

    def spoilt(data):
        if given is not None:
            return data.assign(tp_mean=data.tp_mean.assign_attrs(given))
        members = {f"{name}_member": data[f"{name}_mean"].expand_dims(realization=[1, 2]) for name in ("t", "tp")}
        return data.assign(members | {"tp_member": members["tp_member"].expand_dims(other=[1])})

    other = rewritten(forecast, tmp_path / "f", spoilt)
    text = "tp_member: has a dimension other" if given is None else "tp_mean: units 'furlong': cannot be converted"
    with pytest.raises(UserError, match=text):
        evaluate(settings(other, store, tmp_path / "r"), store)


@pytest.mark.parametrize("others", [{}, {"q": [[0, 24], [0, 48]]}], ids=["bounds of time", "in words"])
def test_files_of_sums_over_different_hours_are_refused(store, tmp_path, others):
    """As a folder holds them whose model changed from daily sums to sums of six hours."""
    for dates, first in ((FEW[:2], 24), (FEW[2:4], 42)):
        bounds = {"tp": [[0, 24], [first, 48]]} | others
        write_forecasts(tmp_path / "f", store, dates, corrected(), train=TRAIN, lead_bounds=bounds)
    with pytest.raises(
        UserError, match=r"tp at 48 h is over 42-48 h, in forecast_\S+nc over 24-48 h; keep forecasts of"
    ):
        open_forecasts([str(tmp_path / "f")])


@pytest.mark.parametrize(("told", "word"), [("[1, 2]", r"\[1"), ("1 cf", "cf"), (np.array([1.5, 2.0]), "1.5")])
def test_members_that_are_no_numbers_are_refused(told, word):
    with pytest.raises(UserError, match=rf"f.nc: members_in: '{word}' is no number of a member; give numbers"):
        _ = ForecastFile(Path("f.nc"), xr.Dataset(attrs={"members_in": told})).members_in


def test_a_forecast_that_is_on_no_grid_says_what_it_has(store, forecast, tmp_path):
    other = rewritten(forecast, tmp_path / "f", lambda data: data.rename(latitude="rlat").drop_vars("rlat"))
    with pytest.raises(UserError, match=r"no dimension latitude; it has .*rlat"):
        evaluate(settings(other, store, tmp_path / "r"), store)


def test_fields_without_units_are_refused(store, forecast, tmp_path):
    def bare(data):
        del data.t_mean.attrs["units"]
        return data

    other = rewritten(forecast, tmp_path / "f", bare)
    with pytest.raises(UserError, match=r"t_mean: has no units; set its attribute units \(here they would be K\)"):
        evaluate(settings(other, store, tmp_path / "r"), store)
