"""Forecasts that others made or cut: other units, other intervals, fewer leads and levels."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from fakes import FEW, TEST, TRAIN, corrected, entry, known_forecast, scores_of, settings, write_forecasts
from foreign import in_other_units, rewritten

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.verification import evaluate
from ensemble_ml.verification.families import moments
from ensemble_ml.verification.forecast_files import ForecastFile, open_file
from ensemble_ml.verification.forecasts import open_forecasts


@pytest.fixture(scope="module")
def forecast(store, tmp_path_factory):
    """Make a forecast of three dates: what is read of a file is seen on each of them."""
    return known_forecast(tmp_path_factory.mktemp("three") / "forecast", store, TEST[:3])


def test_a_foreign_forecast_upside_down_with_moments_alone(store, forecast, tmp_path, plain):
    """Latitude south to north, levels in another order and in Pa, mean and standard deviation only."""
    (tmp_path / "f").mkdir()
    for path in forecast.glob("*.nc"):
        with xr.open_dataset(path, decode_timedelta=False) as data:
            kept = data[["t_mean", "t_stddev"]].isel(latitude=slice(None, None, -1), level=slice(None, None, -1))
            kept = kept.assign_coords(level=("level", kept.level.values * 100, {"units": "Pa"}))
            kept.to_netcdf(tmp_path / "f" / path.name)
    content = scores_of([str(forecast), str(tmp_path / "f")], store, tmp_path / "r")
    for level in (500, 850):
        ours, theirs = (entry(content, name, "t", level)["crps"] for name in ("forecast", "f"))
        assert theirs["value"] == pytest.approx(ours["value"], rel=1e-9)


@pytest.mark.parametrize(("units", "size"), [("Pascals", 100), ("pascals", 100), ("kPa", 0.1), ("mbar", 1), ("", 1)])
def test_levels_in_any_units_of_pressure(forecast, tmp_path, units, size):
    def given_in(data):
        return data.assign_coords(level=("level", data.level.values * size, {"units": units}))

    rewritten(forecast, tmp_path / "f", given_in)
    with open_file(next((tmp_path / "f").glob("*.nc"))) as file:
        assert sorted(file.levels) == [500, 850]


def test_a_single_member_needs_no_axis(store, forecast, tmp_path):
    """A file of one forecast may have dropped the axis of its only member."""

    def change(data):
        return data.assign(t_member=data.t_mean, tp_member=data.tp_mean)

    [one] = open_forecasts([str(rewritten(forecast, tmp_path / "f", change))])
    for name, levels in (("t", (500, 850)), ("tp", (None,))):
        found = one.members(max(one.files), name, 48, levels)
        assert found.shape == (1, len(levels), *store.layout.grid.shape)
        np.testing.assert_array_equal(found[0], one.predicted(max(one.files), name, 48, levels).mean)
    one.close()


def test_files_whose_axis_is_the_valid_time_score_the_same(store, forecast, tmp_path, plain):
    """As `predict` wrote them once, and as others may."""

    def of_valid_time(data):
        return data.isel(forecast_reference_time=0).swap_dims(forecast_period="time")

    other = rewritten(forecast, tmp_path / "f", of_valid_time, ("mean", "stddev", "location", "scale"))
    with xr.open_dataset(next(other.glob("*.nc"))) as data:
        assert data.t_mean.dims == ("time", "level", "latitude", "longitude") and not data.forecast_reference_time.dims
    content = scores_of([str(forecast), str(other)], store, tmp_path / "r")
    for name, level in (("t", 850), ("tp", None)):
        ours, theirs = (entry(content, label, name, level)["crps"] for label in ("forecast", "f"))
        assert ours["value"] == theirs["value"] > 0


def test_a_foreign_forecast_with_axes_in_another_order(store, forecast, tmp_path, plain):
    other = rewritten(forecast, tmp_path / "f", lambda data: data.transpose("longitude", "latitude", ...))
    content = scores_of([str(forecast), str(other)], store, tmp_path / "r")
    for name, level in (("t", 850), ("tp", None)):
        ours, theirs = (entry(content, label, name, level)["bias"]["value"] for label in ("forecast", "f"))
        assert theirs == pytest.approx(ours, rel=1e-9)


def test_times_in_floating_days_are_whole_hours():
    hours = np.arange(1, 121)
    days = (hours / 24).astype(np.float32)  # some lie before their hour
    units = {"units": "days since 2001-01-01"}
    data = xr.Dataset({"forecast_reference_time": ((), np.float32(0), units)}, {"time": ("time", days, units)})
    assert ForecastFile(Path("f.nc"), xr.decode_cf(data)).lead_hours == hours.tolist()
    half = data.assign_coords(time=("time", hours / 48, units))
    with pytest.raises(UserError, match=r"f.nc: time: only whole hours of lead time are read"):
        _ = ForecastFile(Path("f.nc"), xr.decode_cf(half)).lead_hours


def test_axes_may_differ_by_their_rounding(store, forecast, tmp_path, plain):
    files = iter(range(100))
    other = rewritten(
        forecast, tmp_path / "f", lambda data: data.assign_coords(latitude=data.latitude + 1e-6 * next(files))
    )
    evaluate(settings(other, store, tmp_path / "r"), store)


def test_a_foreign_forecast_in_other_units(store, forecast, tmp_path, plain):
    other = in_other_units(forecast, tmp_path / "f", ("mean", "stddev"))
    content = scores_of([str(forecast), str(other)], store, tmp_path / "r")
    ours, theirs = (entry(content, name, "t", 850) for name in ("forecast", "f"))
    assert theirs["crps"]["value"] == pytest.approx(ours["crps"]["value"], rel=1e-4)
    ours, theirs = (entry(content, name, "tp", None)["bias"]["value"] for name in ("forecast", "f"))
    assert theirs == pytest.approx(ours, rel=1e-3)


@pytest.mark.parametrize("offset", [32500.7, 32500.3])
def test_a_packed_zero_is_no_scale_below_zero_or_above(store, forecast, tmp_path, plain, offset):
    """16-bit integers bring a zero back as what rounding makes of it."""

    def dry(data):
        data["tp_stddev"][{"latitude": slice(3)}] = 0.0
        return data

    parts = ("mean", "stddev")
    whole, packed = rewritten(forecast, tmp_path / "f", dry, parts), tmp_path / "g"
    packed.mkdir()
    for path in whole.glob("*.nc"):
        with xr.open_dataset(path, decode_timedelta=False) as data:
            step = float(data.tp_stddev.max()) / 65000
            kind = {"dtype": "int16", "scale_factor": step, "add_offset": offset * step, "_FillValue": -32768}
            data.to_netcdf(packed / path.name, encoding={"tp_stddev": kind})
        with xr.open_dataset(packed / path.name, decode_timedelta=False) as data:
            assert -step < float(data.tp_stddev.min()) < step and float(data.tp_stddev.min())
    content = scores_of([str(whole), str(packed)], store, tmp_path / "r")
    ours, theirs = (entry(content, name, "tp", None) for name in ("f", "g"))
    assert theirs["crps"]["value"] == pytest.approx(ours["crps"]["value"], rel=1e-3)
    # a point has no density: the scale that baselines take there keeps the log score of the others
    assert np.isfinite(ours["log_score"]["value"])
    assert not [row for row in content.get("left_out", ()) if row["entrant"] == "f"]


def test_parameters_are_no_moments(store, forecast, tmp_path, plain):
    """Location and scale of a law that stops at zero, alone: its mean and standard deviation are those of the law."""
    for name, parts in (("whole", ("location", "scale", "mean", "stddev")), ("alone", ("location", "scale"))):
        (tmp_path / name).mkdir()
        for path in forecast.glob("*.nc"):
            with xr.open_dataset(path, decode_timedelta=False) as data:
                made = data[[f"tp_{part}" for part in parts]].load()
                law = Family(made.tp_location.attrs["distribution_family"])
                if "mean" in parts:
                    made.tp_mean[:], made.tp_stddev[:] = moments(law, made.tp_location.values, made.tp_scale.values)
                made.to_netcdf(tmp_path / name / path.name)
    assert law is not Family.NORMAL
    content = scores_of([str(tmp_path / "whole"), str(tmp_path / "alone")], store, tmp_path / "r")
    whole, alone = (entry(content, name, "tp", None) for name in ("whole", "alone"))
    for metric in ("crps", "rmse", "bias", "spread_skill"):
        assert alone[metric]["value"] == pytest.approx(whole[metric]["value"], rel=1e-5)


@pytest.mark.parametrize(
    "others", [{}, pytest.param({"q": [[0, 24], [0, 48]]}, marks=pytest.mark.slow)], ids=["bounds of time", "in words"]
)
def test_sums_over_other_hours_are_not_compared(store, tmp_path, plain, monkeypatch, others):
    bounds = {"tp": [[0, 24], [24, 48]]}
    folder = write_forecasts(tmp_path / "f", store, FEW, corrected(), train=TRAIN, lead_bounds=bounds | others)
    monkeypatch.setattr(store, "lead_bounds", {"tp": [None, [0, 24], [24, 48]]})
    evaluate(settings(folder, store, tmp_path / "r"), store)
    monkeypatch.setattr(store, "lead_bounds", {"tp": [None, [0, 24], [42, 48]]})
    with pytest.raises(UserError, match=r"tp at 48 h is over 24-48 h, in .* over 42-48 h; give the data that it was"):
        evaluate(settings(folder, store, tmp_path / "r2"), store)


@pytest.mark.slow
def test_files_cut_to_one_lead_keep_its_interval(store, tmp_path, plain, monkeypatch):
    bounds = {"tp": [[0, 24], [24, 48]], "q": [[0, 24], [0, 48]]}
    folder = write_forecasts(tmp_path / "f", store, FEW, corrected(), train=TRAIN, lead_bounds=bounds)
    (tmp_path / "cut").mkdir()
    for path in folder.glob("*.nc"):
        with xr.open_dataset(path, decode_timedelta=False) as data:
            data.isel(forecast_period=[1]).to_netcdf(tmp_path / "cut" / path.name)
    monkeypatch.setattr(store, "lead_bounds", {"tp": [None, [0, 24], [24, 48]]})
    evaluate(settings(tmp_path / "cut", store, tmp_path / "r"), store)
    monkeypatch.setattr(store, "lead_bounds", {"tp": [None, [0, 24], [42, 48]]})
    with pytest.raises(UserError, match="tp at 48 h is over 24-48 h"):
        evaluate(settings(tmp_path / "cut", store, tmp_path / "r2"), store)


@pytest.mark.slow
def test_files_of_one_level_that_was_chosen(store, forecast, tmp_path, plain):
    (tmp_path / "f").mkdir()
    for path in forecast.glob("*.nc"):
        with xr.open_dataset(path, decode_timedelta=False) as data:
            data.sel(level=850).to_netcdf(tmp_path / "f" / path.name)
    content = scores_of([str(forecast), str(tmp_path / "f")], store, tmp_path / "r")
    for name, level in (("t", 850), ("tp", None)):
        ours, theirs = (entry(content, label, name, level)["crps"]["value"] for label in ("forecast", "f"))
        assert theirs == pytest.approx(ours)
    with xr.open_dataset(forecast / path.name, decode_timedelta=False) as data:
        data.sel(level=500).to_netcdf(tmp_path / "f" / path.name)
    with pytest.raises(UserError, match="other level than"):
        evaluate(settings(tmp_path / "f", store, tmp_path / "r2"), store)


@pytest.mark.slow
def test_members_that_a_forecast_does_not_state_are_not_made_up(store, tmp_path, plain):
    """It may be of all ten."""
    other = write_forecasts(tmp_path / "f", store, FEW, corrected(members=10), members_in="")
    content = scores_of(other, store, tmp_path / "r", fit=["2001"])
    assert content["claims"]
    assert all(one["claim"].startswith("from members that it does not state at 48 h") for one in content["claims"])
    assert any(note.startswith("f does not state the members that it was made from") for note in content["notes"])


@pytest.mark.parametrize("told", ["01, 2 12", np.array([1, 2, 12], "i4"), np.array([1.0, 2.0, 12.0]), ["1", "2", "12"]])
def test_members_are_read_from_words_and_from_lists(told):
    assert ForecastFile(Path("f.nc"), xr.Dataset(attrs={"members_in": told})).members_in == ("1", "2", "12")
    for one in (12, np.int64(12)):
        assert ForecastFile(Path("f.nc"), xr.Dataset(attrs={"members_in": one})).members_in == ("12",)
    assert ForecastFile(Path("f.nc"), xr.Dataset(attrs={"members_in": ""})).members_in == ()


def content_of(forecasts, store, folder, **changes):
    evaluate(settings(forecasts, store, folder, **changes), store)
    return json.loads((folder / "scores.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("known_by", ["usual names", "standard names"])
def test_axes_go_by_usual_or_standard_names(store, forecast, tmp_path, plain, known_by):
    """Levels without units beyond a thousand are in Pa."""

    def renamed(data):
        names = {"latitude": "lat", "longitude": "lon", "level": "plev"}
        if known_by == "standard names":
            names = {"latitude": "y", "longitude": "x", "level": "pfull"}
        for name, standard in (("latitude", "latitude"), ("longitude", "longitude"), ("level", "air_pressure")):
            data[name].attrs = {"standard_name": standard} if known_by == "standard names" else {}
        return data.assign_coords(level=data.level * 100).rename(names)

    other = rewritten(forecast, tmp_path / "f", renamed)
    content = content_of([str(forecast), str(other)], store, tmp_path / "r")
    for name, level in (("t", 500), ("t", 850), ("tp", None)):
        ours, theirs = (entry(content, label, name, level)["bias"]["value"] for label in ("forecast", "f"))
        assert theirs == pytest.approx(ours, rel=1e-9)


@pytest.mark.parametrize("way", ["a dimension of its own", "levels counted"])
def test_axes_that_lie_along_other_dimensions(store, forecast, tmp_path, plain, way):
    """`latitude(y)` and `longitude(x)`; `level` that counts beside `plev(level)`."""

    def laid(data):
        if way == "levels counted":
            plev = ("level", data.level.values * 100.0, {"units": "Pa"})
            return data.assign_coords(plev=plev, level=("level", np.arange(data.sizes["level"])))
        return data.swap_dims(latitude="y", longitude="x")

    other = rewritten(forecast, tmp_path / "f", laid)
    content = content_of([str(forecast), str(other)], store, tmp_path / "r")
    ours, theirs = (entry(content, label, "t", 850)["bias"]["value"] for label in ("forecast", "f"))
    assert theirs == pytest.approx(ours, rel=1e-9)


def test_a_mean_without_a_width_has_errors_and_no_crps(store, forecast, tmp_path, plain):
    other = rewritten(forecast, tmp_path / "f", lambda data: data, parts=("mean",))
    content = content_of([str(forecast), str(other)], store, tmp_path / "r")
    ours, theirs = (entry(content, label, "t", 850) for label in ("forecast", "f"))
    assert theirs["rmse"]["value"] == pytest.approx(ours["rmse"]["value"], rel=1e-9) and "crps" not in theirs
    told = "f gives no width (stddev, or location and scale) of t, tp: no CRPS, errors of the mean alone."
    assert told in content["notes"]


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (("mean", "scale"), "no width (stddev, or location and scale) of t, tp: no CRPS, errors of the mean alone"),
        (("location",), "neither mean and stddev nor location and scale of t, tp: no CRPS, no errors"),
        (("location", "stddev"), "neither mean and stddev nor location and scale of t, tp: no CRPS, no errors"),
    ],
)
def test_parts_that_make_no_distribution_are_told_of(store, forecast, tmp_path, plain, parts, told):
    other = rewritten(forecast, tmp_path / "f", lambda data: data, parts=parts)
    content = content_of([str(forecast), str(other)], store, tmp_path / "r")
    assert not any("crps" in row for row in content["scores"] if row["entrant"] == "f")
    assert f"f gives {told}." in content["notes"]


@pytest.mark.slow
def test_a_start_without_a_training_step_is_told_of(store, forecast, tmp_path, plain):
    """And so is that no baseline with a slope on the mean, as EMOS has, stands beside it."""
    for step, told in (("0", True), ("7", False)):
        other = rewritten(
            forecast, tmp_path / f"f{step}", lambda data, step=step: data.assign_attrs(checkpoint_step=step)
        )
        content = content_of(str(other), store, tmp_path / f"r{step}")
        assert any(note.startswith(f"f{step}: its checkpoint is of step 0") for note in content["notes"]) == told
        assert any(
            "the best statistical baseline (no EMOS among the baselines), " in line for line in content["headline"]
        )


@pytest.mark.slow
def test_leads_that_some_files_lack_are_not_scored(store, tmp_path, plain):
    """Whichever file comes first."""
    for first in (0, -1):
        folder = write_forecasts(tmp_path / f"f{first}", store, FEW, corrected(), train=TRAIN)
        one = sorted(folder.glob("*.nc"))[first]
        with xr.open_dataset(one, decode_timedelta=False) as data:
            short = data.isel(forecast_period=[0]).load()
        short.to_netcdf(one)
        content = content_of(str(folder), store, tmp_path / f"r{first}")
        assert {row["lead_hours"] for row in content["scores"]} == {24}
        assert f"f{first}: leads 48 h are not in all of its files, and not scored." in content["notes"]


@pytest.mark.slow
def test_what_one_file_holds_beside_is_no_matter(store, forecast, tmp_path, plain):
    """Members are told of; a variable that nobody knows is not looked at."""
    for place in (0, -1):
        other = rewritten(forecast, tmp_path / f"f{place}", lambda data: data)
        one = sorted(other.glob("*.nc"))[place]
        with xr.open_dataset(one, decode_timedelta=False) as data:
            more = data.assign(t_member=data.t_mean.expand_dims(realization=[1, 2]), qc_mean=data.tp_mean).load()
        more.to_netcdf(one)
        content = content_of(str(other), store, tmp_path / f"r{place}")
        assert f"f{place}: members of t are not in all of its files, and not scored." in content["notes"]
        assert not any("qc" in note for note in content["notes"])
        assert not any(row["entrant"] == f"f{place}" for row in content["vectors"])


@pytest.mark.slow
def test_hours_of_a_sum_that_one_side_does_not_state_are_told_of(store, forecast, tmp_path, plain, monkeypatch):
    monkeypatch.setattr(store, "lead_bounds", {"tp": [None, [0, 24], [24, 48]]})
    other = rewritten(forecast, tmp_path / "f", lambda data: data)
    content = content_of(str(other), store, tmp_path / "r")
    told = "f does not state the hours of sums or maxima, so those of the other are assumed: tp 24 h, tp 48 h."
    assert told in content["notes"]
    bounds = {"tp": [[0, 24], [24, 48]]}
    stated = write_forecasts(tmp_path / "stated", store, FEW, corrected(), train=TRAIN, lead_bounds=bounds)
    monkeypatch.setattr(store, "lead_bounds", {})
    content = content_of(str(stated), store, tmp_path / "r2")
    assert told.replace("f ", f"{store.path} ", 1) in content["notes"]


@pytest.mark.slow
def test_what_a_forecast_does_not_state_makes_nothing_sure(store, tmp_path, plain):
    """The same forecast is surely better where it says what it was made from."""
    found = {}
    for name, members in (("silent", ""), ("stated", "1 2 3 4 5")):
        made = write_forecasts(tmp_path / name, store, TEST, corrected(inflate=1 / 0.7), members_in=members)
        found[name] = content_of(str(made), store, tmp_path / f"r{name}", fit=["2001"], block_days=3)
    crps = {name: [one for one in content["claims"] if one["unit"] == "%"] for name, content in found.items()}
    assert any(one["certain"] for one in crps["stated"]) and not any(one["certain"] for one in crps["silent"])
    assert all(one["advantage"] == "made from members that it does not state" for one in crps["silent"])
    assert "held_out_rmse" in entry(found["stated"], "stated", "t", 850)
    assert "held_out_rmse" not in entry(found["silent"], "silent", "t", 850)
    assert any(note.startswith("silent does not state the dates that it was tr") for note in found["silent"]["notes"])


def test_what_the_truth_cannot_verify_is_told_of_what_is_scored(store, forecast, tmp_path, plain):
    told = {"t": "truth x: t stays without truth at these leads: 24 h", "z": "truth x: z stays without truth: no"}
    evaluate(settings(forecast, store, tmp_path / "r"), store, told)
    content = json.loads((tmp_path / "r" / "scores.json").read_text())
    assert told["t"] in content["notes"] and told["z"] not in content["notes"]
    assert content["settings"]["control"] == "apart"
