"""Scores from Python are those of the command, bit for bit."""

import json
import resource

import numpy as np
import pytest
import xarray as xr
from commanding import command

import ensemble_ml as eml
from ensemble_ml.api.verifying import _saved
from ensemble_ml.errors import UserError
from ensemble_ml.verification import open_forecasts

NAMES = ("settings", "forecasts", "ensemble", "notes")  # which hold paths


@pytest.fixture(scope="module")
def scores(place, tmp_path_factory):
    """Return the command's scores of the forecasts from two members."""
    folder = tmp_path_factory.mktemp("scores")
    command(
        "evaluate", f"forecast={place}/forecast", f"ensemble={place}/archive/ensemble",
        f"truth={place}/archive/truth", "bootstrap=100", f"output={folder}",
    )  # fmt: skip
    return json.loads((folder / "scores.json").read_text())


@pytest.mark.slow
def test_scores_equal_those_of_the_command(here, scores, tmp_path):
    ensemble, truth = eml.open("archive/ensemble"), eml.open("archive/truth")
    forecast = eml.load("runs/first").predict(ensemble, members=2)
    found = eml.verify(forecast, ensemble, truth, bootstrap=100)
    mine = json.loads((found.save(tmp_path / "out") / "scores.json").read_text())
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    assert {k: v for k, v in mine.items() if k not in NAMES} == {k: v for k, v in scores.items() if k not in NAMES}
    assert mine["forecasts"][0]["checkpoints"] == scores["forecasts"][0]["checkpoints"]
    assert mine["ensemble"]["fingerprint"] == scores["ensemble"]["fingerprint"]
    values = found.to_xarray()
    row = scores["scores"][0]
    name = f"{row['variable']}{row['level'] or ''}"
    metric = next(k for k, v in row.items() if isinstance(v, dict))
    lead = np.timedelta64(row["lead_hours"], "h")
    assert float(values[metric].sel(entrant=row["entrant"], lead_time=lead, field=name)) == row[metric]["value"]
    assert repr(found).splitlines()[1:] == scores["headline"]
    with pytest.raises(UserError, match=r"report\.html: exists"):
        found.report(tmp_path / "out" / "report.html")


def test_several_forecasts_by_name_and_refusals(here, tmp_path, monkeypatch):
    ensemble = eml.open("store.zarr")
    forecast = xr.open_mfdataset("forecast/*.nc", decode_timedelta=True, combine_attrs="override")
    with pytest.raises(UserError, match="no dimension forecast_reference_time"):
        eml.verify(ensemble, ensemble)
    with pytest.raises(UserError, match="draws: no such setting here"):
        eml.verify("forecast", ensemble, draws=3)
    small = forecast[[name for name in forecast if str(name).startswith(("t2m", "time"))]]
    # Variables may be chunked differently, as those that xr.open_zarr gives.
    small["t2m_mean"] = small["t2m_mean"].chunk(forecast_reference_time=-1)
    with pytest.raises(ValueError, match="inconsistent chunks"):
        small.chunks  # noqa: B018
    given = {"bootstrap": 100, "members": np.int64(2)}
    scores = eml.verify({"ours": small, "theirs": "forecast"}, ensemble, baselines={"lazy": small}, **given)
    assert [(one["label"], one["baseline"]) for one in scores.content["forecasts"]] == [
        ("ours", False), ("theirs", False), ("lazy", True),
    ]  # fmt: skip
    given = [one["path"] for one in scores.content["forecasts"]]
    assert given == ["an open Dataset", "forecast", "an open Dataset"]  # the temporary folder is gone
    assert [scores.content["settings"][name] for name in ("forecast", "baselines", "output")] == [
        given[:2], given[2:], None,
    ]  # fmt: skip
    assert "/ensemble_ml-" not in json.dumps(scores.content)
    found = scores.to_xarray()
    with pytest.raises(UserError, match="baseline: Datasets in a list have no names"):
        eml.verify("forecast", ensemble, baselines=[small, small])
    with pytest.raises(UserError, match="/absent: holds no NetCDF file"):
        eml.verify({"ours": "absent"}, ensemble)
    with pytest.raises(UserError, match="forecast: ours is int; give a Dataset of a forecast, or a folder"):
        eml.verify({"ours": 5}, ensemble)
    for wrong in (small["t2m_mean"], [5]):
        with pytest.raises(UserError, match=r"^forecast is (DataArray|int); give a path, or a Dataset"):
            eml.verify(wrong, ensemble)
    for label in ("a\0b", "x" * 300):
        with pytest.raises(UserError, match=r"^forecast: '(a.x00b|x{60})' cannot be the name of a forecast"):
            eml.verify({label: small}, ensemble)
    for label in (f"{here}/x", "../x", "", ".", "..", "raw_5"):
        with pytest.raises(UserError, match=f"forecast: '{label}' cannot be the name of a forecast"):
            eml.verify({label: small}, ensemble)
    with pytest.raises(UserError, match="baseline: 'ours' cannot be the name of a forecast"):
        eml.verify({"ours": small}, ensemble, baselines={"ours": small})
    with pytest.raises(UserError, match="forecast: '1' cannot be the name of a forecast"):
        eml.verify({1: "forecast", "1": "forecast"}, ensemble)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "report.html").touch()
    with pytest.raises(UserError, match=r"report\.html: exists"):
        scores.save(tmp_path / "half")
    assert not (tmp_path / "half" / "scores.json").exists()
    with pytest.raises(UserError, match="half: is a folder; choose another name"):
        scores.report(tmp_path / "half", overwrite=True)
    with monkeypatch.context() as patch:  # a report that cannot be drawn leaves no new scores beside the old one
        patch.setattr(type(scores._found), "page", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scores.save(tmp_path / "half", overwrite=True)
    assert [file.name for file in (tmp_path / "half").iterdir()] == ["report.html"]
    crps = found["crps"].sel(field="t2m")
    np.testing.assert_array_equal(crps.sel(entrant="ours"), crps.sel(entrant="theirs"))
    assert np.isfinite(crps.sel(entrant="ours")).all()


def test_an_init_time_that_stands_twice_is_refused_as_in_files(here):
    forecast = xr.open_mfdataset("forecast/*.nc", decode_timedelta=True, combine_attrs="override")
    twice = xr.concat([forecast, forecast.isel(forecast_reference_time=[1])], "forecast_reference_time")
    with pytest.raises(UserError, match=r"forecast: forecast_reference_time 2001-01-09 .*stands twice"):
        eml.verify(twice, "store.zarr")


def test_init_times_as_objects_of_cftime_are_refused_in_one_line(here):
    forecast = xr.open_mfdataset("forecast/*.nc", decode_times=xr.coders.CFDatetimeCoder(use_cftime=True))
    with pytest.raises(UserError, match="forecast: forecast_reference_time holds cftime objects; open"):
        eml.verify(forecast, "store.zarr")


def test_a_temporary_folder_without_room_is_told_of(tmp_path):
    """On many clusters it is in memory. The limit of a file stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    axes = {"forecast_reference_time": np.array(["2003-01-09"], "datetime64[ns]"), "latitude": np.arange(90.0)}
    field = xr.DataArray(np.random.default_rng(0).random((1, 90, 90)), axes, [*axes, "longitude"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"ours: .*/ours/forecast_2003.* cannot be written \(.*\); set .* TMPDIR"):
            _saved(field.to_dataset(name="t2m_mean"), tmp_path / "ours")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_two_init_times_within_a_minute_are_two(tmp_path):
    """Named by the minute, the file of the second replaced that of the first."""
    starts = np.array(["2003-01-09", "2003-01-09T00:00:30"], "datetime64[ns]")
    axes = {"forecast_reference_time": starts, "latitude": [45.0, 0.0, -45.0], "longitude": [0.0, 120.0, 240.0]}
    field = xr.DataArray(np.arange(18.0).reshape(2, 3, 3), axes, list(axes), attrs={"units": "K"})
    forecast = field.to_dataset(name="t2m_mean").assign_coords(time=("forecast_reference_time", starts))
    (tmp_path / "f").mkdir()
    (found,) = open_forecasts([_saved(forecast, tmp_path / "f")])
    means = [found.predicted(start, "t2m", 0, (None,)).mean for start in starts]
    np.testing.assert_array_equal(np.squeeze(means), field)
