"""Which start dates a run forecasts, how its files are named, and what a broken run leaves."""

import importlib
import itertools
import logging
import os

import numpy as np
import pytest
from forecasting import make_source, opened

from ensemble_ml.errors import UserError
from ensemble_ml.inference import predict


def test_existing_output_is_refused_before_anything_is_read(config, tmp_path):
    source = make_source()
    there = tmp_path / "out" / "forecast_2001013112.nc"
    there.parent.mkdir()
    there.write_text("kept")
    with pytest.raises(UserError, match=r"forecast_2001013112.nc: exists, with 1 of 3 forecasts; set overwrite=true"):
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
    with pytest.raises(UserError, match="two start dates lie in one minute"):
        predict(config(overwrite=True), source)


def test_no_dates_and_far_ends(config, source):
    with pytest.raises(UserError, match=r"dates=\[\]: names no start date"):
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


def test_progress_in_plain_lines(config, source, caplog):
    with caplog.at_level(logging.INFO):
        predict(config(), source)
    assert "forecast_2001020112.nc (3 of 3)" in caplog.text
