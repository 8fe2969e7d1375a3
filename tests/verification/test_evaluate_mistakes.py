"""What cannot be scored is refused in one line, before anything is written."""

import errno
import json
import os
import sys

import netCDF4
import pytest
from fakes import DATES, TEST, TRAIN, corrected, settings, write_forecasts
from stores import make_store

from ensemble_ml.errors import UserError
from ensemble_ml.folders import check_writable
from ensemble_ml.verification import evaluate


@pytest.fixture
def forecast(few_forecasts):
    return few_forecasts


def truncate(folder):
    path = sorted(folder.glob("*.nc"))[0]
    path.write_bytes(path.read_bytes()[:500])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"forecast": "nowhere"}, "forecast=nowhere: no such folder"),
        ({"members_in": 11}, "members_in=11: .* has 10 members"),
        ({"fit": ["1999"]}, "fit 1999: no init time lies there"),
        ({"fit": ["2003"]}, r"none of 8 init times can be scored \(seen in training, used to fit"),
    ],
)
def test_mistakes_of_the_configuration(store, forecast, tmp_path, change, match):
    config = settings(forecast, store, tmp_path / "r")
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(UserError, match=match):
        evaluate(config, store)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("made", "match"),
    [
        ({"rows": slice(2, 9)}, "its grid .* is not that of"),
        ({"train": []}, "records no training_dates; give dates to fit baselines on by fit="),
        ({"leads": (24,), "names": ("t",), "broken": True}, "not a readable NetCDF file"),
    ],
)
def test_mistakes_of_the_forecasts(store, tmp_path, made, match):
    broken = made.pop("broken", False)
    folder = write_forecasts(tmp_path / "f", store, TEST[:2], corrected(), **({"train": TRAIN} | made))
    if broken:
        truncate(folder)
    with pytest.raises(UserError, match=match):
        evaluate(settings(folder, store, tmp_path / "r"), store)
    assert not (tmp_path / "r").exists()


def test_all_files_of_a_folder_lie_on_one_grid(store, tmp_path):
    folder = write_forecasts(tmp_path / "f", store, TEST[:2], corrected(), train=TRAIN)
    with netCDF4.Dataset(max(folder.glob("*.nc")), "a") as data:
        data["latitude"][:] = data["latitude"][::-1]
    with pytest.raises(UserError, match="other latitude than"):
        evaluate(settings(folder, store, tmp_path / "r"), store)


def test_fit_dates_must_be_in_the_ensemble(store, forecast, tmp_path):
    small = make_store(tmp_path / "s.zarr", dates=DATES[10:], members=10, variables=("t",), surface=())
    with pytest.raises(UserError, match="lacks 10 of the 12 training dates"):
        evaluate(settings(forecast, small, tmp_path / "r"), small)


def test_empty_or_doubled_folders_and_missing_variables(store, forecast, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no NetCDF file"):
        evaluate(settings(tmp_path / "empty", store, tmp_path / "r"), store)
    with pytest.raises(UserError, match="named twice"):
        evaluate(settings([str(forecast)] * 2, store, tmp_path / "r"), store)
    monkeypatch.chdir(forecast.parent)
    with pytest.raises(UserError, match="named twice"):
        evaluate(settings([str(forecast), forecast.name], store, tmp_path / "r"), store)
    folder = write_forecasts(tmp_path / "f", store, TEST[:1], corrected(), train=TRAIN)
    write_forecasts(folder, store, TEST[1:2], corrected(), names=("q", "tp"), train=TRAIN)
    with pytest.raises(UserError, match="lacks t_location, which other files hold"):
        evaluate(settings(folder, store, tmp_path / "r"), store)


@pytest.mark.parametrize("name", ["area", "all points"])
def test_a_box_may_not_take_the_name_of_a_weighting(store, forecast, tmp_path, name):
    with pytest.raises(UserError, match=rf"{name}.*stands for something else"):
        evaluate(settings(forecast, store, tmp_path, regions={name: [48, 5, 44, 16]}), store)


@pytest.mark.parametrize("forecast", [[], None])
def test_no_forecast_is_refused(store, tmp_path, forecast):
    given = settings([], store, tmp_path / "r")
    given.forecast = forecast
    with pytest.raises(UserError, match=r"forecast=.*give a folder of forecasts"):
        evaluate(given, store)


def test_a_law_that_is_not_known_is_named(store, forecast, tmp_path):
    (tmp_path / "f").mkdir()
    for path in forecast.glob("*.nc"):
        (tmp_path / "f" / path.name).write_bytes(path.read_bytes())
        with netCDF4.Dataset(tmp_path / "f" / path.name, "a") as data:
            data["t_location"].distribution_family = "weibull"
    with pytest.raises(UserError, match="t_location: distribution_family 'weibull' is not known; known are normal"):
        evaluate(settings(tmp_path / "f", store, tmp_path / "r"), store)


def test_what_cannot_be_written_is_told_before_anything_is_read(store, forecast, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "r"):
        with pytest.raises(UserError, match="file is a file; give a folder"):
            evaluate(settings(forecast, store, output), None)
    monkeypatch.setattr("os.access", lambda path, _: str(path) != str(tmp_path))
    with pytest.raises(UserError, match="may not be written; choose another folder"):
        evaluate(settings(forecast, store, tmp_path / "a" / "b"), None)
    assert not (tmp_path / "a").exists()


def test_an_output_below_a_folder_that_may_not_be_entered_is_refused(tmp_path, monkeypatch):
    """As stat refuses it to a user who may not enter the folder."""
    stat = os.stat

    def refuse(path, *given, **more):
        if str(path).startswith(f"{tmp_path}/closed/"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, *given, **more)

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("os.stat", refuse)
    monkeypatch.setattr("os.access", lambda path, _: str(path) != f"{tmp_path}/closed")
    with pytest.raises(UserError, match="closed may not be written; choose another folder"):
        check_writable(tmp_path / "closed" / "a")


@pytest.mark.slow
def test_a_report_that_another_process_made_meanwhile_is_left(store, forecast, tmp_path, monkeypatch):
    killed = tmp_path / ".scores.json.partial-1"
    killed.write_text("half")
    os.utime(killed, (0, 0))

    def slow(*_):
        (tmp_path / "scores.json").write_text("theirs")

    monkeypatch.setattr(sys.modules[evaluate.__module__], "extreme_case", slow)
    with pytest.raises(UserError, match=r"scores\.json: another process has made it meanwhile"):
        evaluate(settings(forecast, store, tmp_path), store)
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]
    assert (tmp_path / "scores.json").read_text() == "theirs"


def test_scores_outlive_a_page_that_cannot_be_drawn(store, forecast, tmp_path, monkeypatch, caplog):
    def fails(*_):
        assert (tmp_path / "scores.json").exists()  # even a process that is killed leaves it
        raise MemoryError("no room for a map")

    (tmp_path / "report.html").write_text("of other scores")
    monkeypatch.setattr(sys.modules[evaluate.__module__], "write_report", fails)
    with pytest.raises(MemoryError, match="no room for a map"):
        evaluate(settings(forecast, store, tmp_path, overwrite=True), store)
    assert json.loads((tmp_path / "scores.json").read_text())["claims"]
    assert "scores.json holds all scores; report.html could not be drawn" in caplog.text
    assert not (tmp_path / "report.html").exists()


def test_a_report_is_not_overwritten_unasked(store, forecast, tmp_path, plain):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(UserError, match=r"report\.html exists there; set overwrite=true"):
        evaluate(settings(forecast, store, tmp_path), store)
    assert (tmp_path / "report.html").read_text() == "mine"
    evaluate(settings(forecast, store, tmp_path, overwrite=True, fit=["2001"]), store)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lineage.json", "report.html", "scores.json"]
