"""Which start dates a run forecasts, how its files are named, and what a broken run leaves."""

import importlib
import itertools
import logging
import os

import numpy as np
import pytest
from forecasting import make_checkpoint, make_source, make_spec, opened
from gribfiles import ensemble

from data_prep import open_archive, open_pair
from data_prep.simulate.archive import model_years
from ensemble_ml.config import SimulateConfig
from ensemble_ml.errors import UserError
from ensemble_ml.inference import predict


def test_existing_output_is_refused_before_anything_is_read(config, tmp_path):
    source = make_source()
    there = tmp_path / "out" / "forecast_2001013112.nc"
    there.parent.mkdir()
    there.write_text("kept")
    with pytest.raises(
        UserError, match=r"forecast_2001013112.nc: exists, with 1 of 3 forecasts; resume=true keeps those"
    ):
        predict(config(), source)
    assert there.read_text() == "kept" and not source.reads
    assert len(predict(config(dates=["2001-01-30"]), source)) == 1
    assert len(predict(config(overwrite=True), source)) == 3
    assert "t_mean" in opened(there)


def test_starts_within_an_hour_have_names_of_their_own(config):
    source = make_source(dates=2)
    source.layout.init_time[1] = source.layout.init_time[0] + np.timedelta64(30, "m")
    paths = predict(config(), source)
    assert [path.name for path in paths] == ["forecast_2001013012.nc", "forecast_200101301230.nc"]
    titles = [opened(path).attrs["title"].split(" from ")[1] for path in paths]
    assert titles == ["2001-01-30 12 UTC", "2001-01-30 12:30 UTC"]
    source.layout.init_time[1] = source.layout.init_time[0] + np.timedelta64(30, "s")
    with pytest.raises(UserError, match="two init times lie in one minute"):
        predict(config(overwrite=True), source)


def test_a_killed_run_goes_on_with_what_is_left(config, tmp_path, caplog):
    whole = {path.name: opened(path) for path in predict(config(output=str(tmp_path / "whole")), make_source())}
    paths = predict(config(), make_source())
    stamps = {path: path.stat().st_mtime_ns for path in paths}
    paths[1].unlink()
    source = make_source()
    with caplog.at_level("INFO"):
        assert predict(config(resume=True), source) == paths
    assert "2 of 3 forecasts exist already" in caplog.text
    assert [path.stat().st_mtime_ns == stamps[path] for path in paths] == [True, False, True]
    for path in paths:
        found = opened(path)
        assert found.equals(whole[path.name])
        assert {**found.attrs, "history": ""} == {**whole[path.name].attrs, "history": ""}
    source = make_source()
    assert len(predict(config(resume=True, dates=["2001-01-30"]), source)) == 1 and not source.reads


def test_only_the_same_run_goes_on(config, source, tmp_path, monkeypatch):
    trained_again = str(make_checkpoint(tmp_path / "again" / "checkpoints", make_spec(source), seed=2))
    paths = predict(config(dates=["2001-01-31"]), make_source())
    others = {
        "settings": [
            {"quantiles": [0.5]},
            {"members_out": True},
            {"thresholds": {"t": [273.15]}},
            {"region": [60, 0, 0, 90]},
            {"names": {"tp": "rain"}},
            {"units": {"tp": "mm"}},
            {"intervals": {"tp": 24}},
        ],
        "members_in": [{"members_in": 2}],
        "checkpoint": [{"checkpoint": trained_again}],
    }
    for word, asked in [(word, asked) for word, many in others.items() for asked in many]:
        with pytest.raises(UserError, match=rf"0131.*: was made with other {word}, so resume=true") as said:
            predict(config(resume=True, **asked), make_source())
        assert "\n" not in str(said.value)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="was made with other input, so"):
        patch.setattr(type(source), "fingerprint", lambda self: "fedcba9876543210")
        predict(config(resume=True), source)
    paths[0].write_text("no forecast at all")
    with pytest.raises(UserError, match="was made with other checkpoint, input, settings, members_in, so"):
        predict(config(resume=True), make_source())
    assert paths[0].read_text() == "no forecast at all"


def test_an_archive_that_grows_is_the_same_input_for_the_dates_it_had(config, tmp_path):
    """The next date's file, or messages behind those that are there; a date that was read from other fields is not."""
    folder = tmp_path / "in"
    dates = ensemble(folder / "a.grib", dates=[20010101, 20010102])
    given = make_checkpoint(tmp_path / "c", make_spec(open_archive(folder), leads_out=(24,)))
    config = config(checkpoint=str(given), resume=True)
    paths = predict(config, open_pair(folder))
    stamps = [path.stat().st_mtime_ns for path in paths]
    later = ensemble(tmp_path / "later.grib", dates=[20010103]).read_bytes()
    (folder / "b.grib").write_bytes(ensemble(tmp_path / "b.grib", dates=[20010104]).read_bytes())
    dates.write_bytes(dates.read_bytes() + later)
    assert len(predict(config, open_pair(folder))) == 4
    assert [path.stat().st_mtime_ns for path in paths] == stamps
    ensemble(folder / "a.grib", dates=[20010101, 20010102], decimal=1)
    with pytest.raises(UserError, match=r"forecast_2001010100.nc: was made with other input, so resume=true"):
        predict(config, open_pair(folder))


def test_a_killed_run_that_replaces_others_goes_on(config, tmp_path):
    paths = predict(config(members_in=2), make_source())
    predict(config(overwrite=True, dates=["2001-01-30"]), make_source())
    paths[2].write_text("no forecast at all")
    kept = paths[0].stat().st_mtime_ns
    source = make_source()
    assert predict(config(resume=True, overwrite=True), source) == paths
    assert [opened(path).attrs["members_in"] for path in paths] == ["1 2 3 4 5 6"] * 3
    assert paths[0].stat().st_mtime_ns == kept
    source = make_source()
    assert predict(config(resume=True, overwrite=True), source) == paths and not source.reads


def test_no_dates_and_far_ends(config, source):
    with pytest.raises(UserError, match=r"dates=\[\]: names no init time"):
        predict(config(dates=[]), source)
    assert len(predict(config(dates=["2001-02/9999"]), source)) == 1


def test_what_a_killed_run_left_is_removed(config, source, tmp_path):
    (tmp_path / "out").mkdir()
    left = tmp_path / "out" / ".forecast_2001013112.nc.partial-1"
    left.write_text("half")
    os.utime(left, (0, 0))
    (tmp_path / "out" / ".forecast_2001013112.nc.partial-2").write_text("of a run beside this one")
    predict(config(dates=["2001-01-31"]), source)
    there = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert there == [".forecast_2001013112.nc.partial-2", "forecast_2001013112.nc"]


def test_interrupted_nothing_is_half_written(config, source, tmp_path, monkeypatch):
    module = importlib.import_module("ensemble_ml.inference.predict")  # the name in the package is the function
    read, calls = type(source).read, itertools.count()

    def stop(self, *args):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return read(self, *args)

    monkeypatch.setattr(type(source), "read", stop)
    monkeypatch.setattr(module, "_LARGEST_BATCH", 1)
    with pytest.raises(KeyboardInterrupt):
        predict(config(), source)
    left = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert left and left == [f"forecast_20010{d}12.nc" for d in (130, 131)][: len(left)]
    assert all("t_mean" in opened(tmp_path / "out" / name) for name in left)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_dates_that_cannot_be_read_cost_the_others_nothing(config, tmp_path, monkeypatch, size):
    monkeypatch.setattr(importlib.import_module("ensemble_ml.inference.predict"), "_LARGEST_BATCH", size)
    whole = predict(config(output=str(tmp_path / "whole")), make_source(dates=5))
    source = make_source(dates=5)
    source.pressure[[1, 4], 0, 1, 0, 0, 3, 4] = np.nan
    said = r"^2001-01-31T12:00, 2001-02-03T12:00: no forecast, .* t at 500 hPa of 2001-01-31T12:00 \+24 h, member 1, is"
    with pytest.raises(UserError, match=said) as raised:
        predict(config(), source)
    assert "\n" not in str(raised.value)
    left = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in left] == [whole[date].name for date in (0, 2, 3)]
    for path in left:  # of the same batches: bit for bit
        assert opened(path).drop_attrs().identical(opened(tmp_path / "whole" / path.name).drop_attrs())
    assert len(predict(config(resume=True), make_source(dates=5))) == 5


def test_an_error_leaves_what_is_computed(config, tmp_path, monkeypatch):
    """Of whatever kind: here the disk's."""
    real = type(make_source()).read
    monkeypatch.setattr(importlib.import_module("ensemble_ml.inference.predict"), "_LARGEST_BATCH", 2)

    def read(self, part, date, selection):
        if date == 2:
            raise OSError("gone")
        return real(self, part, date, selection)

    monkeypatch.setattr(type(make_source()), "read", read)
    with pytest.raises(OSError, match="gone"):
        predict(config(), make_source())
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_progress_in_plain_lines(config, source, caplog):
    with caplog.at_level(logging.INFO):
        predict(config(), source)
    assert "forecast_2001020112.nc (3 of 3)" in caplog.text


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def started(*times):
    source = make_source(dates=len(times))
    source.layout.init_time[:] = np.array(times, "datetime64[ns]")
    return source


def trained_on(folder, source, dates):
    return str(make_checkpoint(folder / "checkpoints", make_spec(source), training_dates=dates))


def test_hours_and_seasons_that_training_lacked_are_told(config, tmp_path, caplog):
    source = started("2001-12-01T00", "2002-01-31T12", "2002-04-14T00", "2002-04-15T00", "2002-07-01T06")
    given = trained_on(tmp_path, source, ["2000-01-02T00:00", "2001-02-28T00:00", "1999-01-15T00:00"])
    paths = predict(config(checkpoint=given), source)
    known = "those trained on are at 00 UTC in Jan, Feb"
    comments = [opened(path).attrs.get("comment", "") for path in paths]
    assert comments == [
        "",
        f"start at 12 UTC, {known}",
        "",
        f"start 46 days of the year away, {known}",
        f"start at 06 UTC and 123 days of the year away, {known}",
    ]
    said = "input memory: 3 of 5 init times are at an hour or in a season that training lacked, the first"
    assert warnings(caplog) == [f"{said} 2002-01-31T12:00: {comments[1]}"]


@pytest.mark.parametrize("first", [True, False])
def test_one_rank_warns_for_all(config, tmp_path, caplog, monkeypatch, first):
    source = started("2001-01-30T12", "2001-07-01T12")
    source.lead_bounds, source.pressure[0, 0, 0] = {}, np.nan
    about = {"lead_bounds": {"tp": [None, [0, 24], [0, 48]]}, "config": {"data": {"members": [6, 8]}}}
    given = str(make_checkpoint(tmp_path / "c", make_spec(source), training_dates=["2000-01-02T12:00"], **about))
    monkeypatch.setattr("ensemble_ml.distributed.launch.Session.first", first)
    predict(config(checkpoint=given, thresholds={"t2m": [1e4]}), source)
    words = "tp is over nothing", "member 1 is missing", "training lacked", "extrapolated to so few", "thresholds: t2m"
    for word in words:
        assert sum(word in warning for warning in warnings(caplog)) == first, word
    assert first or not warnings(caplog)


def test_checkpoints_without_training_dates_say_nothing_of_starts(config, tmp_path, caplog):
    source = started("2001-07-01T06")
    path = predict(config(checkpoint=trained_on(tmp_path, source, [])), source)[0]
    assert "comment" not in opened(path).attrs and not warnings(caplog)


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"windows": ["01-07", "07-07"], "train_dates": 40}, marks=pytest.mark.slow)]
)
def test_starts_of_the_seasons_and_hours_trained_on_say_nothing(config, tmp_path, caplog, settings):
    """The dates of the embedded archive: model years of their own for training and test."""
    years = model_years(SimulateConfig(output=str(tmp_path), **settings))
    dates = {year.split: [f"{cycle.start:%Y-%m-%dT%H:%M}" for cycle in year.written] for year in years}
    source = started(*dates["test"])
    paths = predict(config(checkpoint=trained_on(tmp_path, source, dates["train"]), quantiles=[]), source)
    assert len(paths) >= 26 and not warnings(caplog)
    assert not any("comment" in opened(path).attrs for path in paths)
