"""What predict refuses, and what it warns of."""

import importlib
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forecasting import make_checkpoint, make_grid, make_source, make_spec, opened
from gribfiles import GLOBE, dataset, message, noise, write

from data_prep import open_archive
from ensemble_ml import verification
from ensemble_ml.config import EvaluateConfig, PredictConfig
from ensemble_ml.errors import UserError
from ensemble_ml.inference import predict
from ensemble_ml.inference.outputs import wanted_outputs
from ensemble_ml.store import Part
from ensemble_ml.tasks import TASKS


def test_a_missing_member_warns_and_is_recorded(config, caplog):
    source = make_source()
    source.pressure[1, 2, 1, 0, 1] = np.nan
    paths = predict(config(members_in=4, members_out=True), source)
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == 1 and "2001-01-31T12:00: member 3 is missing (t at 850 hPa, +24 h)" in told[0]
    data = [opened(path) for path in paths]
    assert [d.attrs["members_in"] for d in data] == ["1 2 3 4", "1 2 4", "1 2 3 4"]
    assert "member 3 is missing" in data[1].attrs["comment"] and "comment" not in data[0].attrs
    assert data[1].realization.values.tolist() == [1, 2, 4]


def test_a_member_of_nan_in_netcdf_is_missing(config, tmp_path, caplog, monkeypatch):
    """As xarray writes what is absent; forecasts are made from the other members, and scored so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = dataset()
    data.to_netcdf(tmp_path / "whole.nc")
    given = make_checkpoint(tmp_path / "c", make_spec(open_archive(tmp_path / "whole.nc"), leads_out=(24,)))
    truth = data.isel(number=0, drop=True)
    data.t[1, 1, 1] = np.nan
    data.to_netcdf(tmp_path / "a.nc")
    truth.t[1, 1, 0] = np.nan
    truth.to_netcdf(tmp_path / "truth.nc")
    paths = TASKS["predict"].run(config(checkpoint=str(given), input=str(tmp_path / "a.nc")))
    assert [opened(path).attrs["members_in"] for path in paths] == ["1 2 3", "1 3"]
    assert "2001-01-03T00:00: member 2 is missing (t at 500 hPa, +24 h), which leaves 2 of 3 members" in caplog.text
    monkeypatch.setattr(verification, "evaluate", lambda config, both, unverified, ground: both)
    inputs = {"ensemble": str(tmp_path / "a.nc"), "truth": str(tmp_path / "truth.nc")}
    both = TASKS["evaluate"].run(EvaluateConfig(str(tmp_path / "out"), **inputs, output=str(tmp_path / "s")))
    assert both.present(Part.FORECAST, 1)[0][:, 1, 0].tolist() == [[True, True], [False, False], [True, True]]
    assert both.present(Part.TRUTH, 1)[0][0, 1, 0].tolist() == [True, False]


def test_too_few_members_are_an_error_before_anything_is_read(config, tmp_path):
    source = make_source()
    source.surface[2, 1, 2, 1] = np.nan
    given = make_checkpoint(tmp_path / "checkpoints", make_spec(source, min_members=3))
    with pytest.raises(UserError, match=r"2001-02-01T12:00: member 2 is missing \(tp, \+48 h\), which leaves 2; .*=3"):
        predict(config(checkpoint=str(given), members_in=3), source)
    assert not source.reads and not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"members_in=2: 2 members; .*min_members=3"):
        predict(config(checkpoint=str(given), members_in=2), source)


def test_a_field_that_no_member_has_is_named(config):
    source = make_source()
    source.pressure[0, :, 2, 1, 0] = np.nan
    with pytest.raises(UserError, match=r"2001-01-30T12:00: z at 500 hPa, \+48 h, is missing for every member"):
        predict(config(), source)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_named(config, tmp_path, bad):
    source = make_source()
    source.pressure[2, 3, 1, 1, 1, 4, 5] = bad
    with pytest.raises(UserError, match=r"z at 850 hPa of 2001-02-01T12:00 \+24 h, member 4, is missing or holds"):
        predict(config(), source)
    assert not list((tmp_path / "out").glob("*partial*"))


def test_inputs_beyond_the_training_range_warn_once(config, tmp_path, caplog):
    source = make_source()
    source.pressure[:, 0, 0, 0, 1, 3, 3] = 400.0
    source.pressure[1:, 0, 0, 0, 0, 3, 3] = 420.0
    source.surface[2, 1, 0, 0, 0, 0] = 150.0
    paths = predict(config(), source)
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == 2
    assert "t at 850 hPa reaches 400 K, 102 above the training range (202 to 298)" in told[0]
    assert "t2m reaches 150 K, 82 below the training range" in told[1]
    comments = [opened(path).attrs["comment"] for path in paths]
    assert "400 K" in comments[0] and "t at 500 hPa reaches 420 K" in comments[1] and "t2m" in comments[2]


def test_thresholds_in_other_units_warn_once(config, source, caplog):
    near = {"t": [210.0, 290.0], "t2m": [273.15], "tp": [0.001]}
    predict(config(thresholds=near), source)
    assert "thresholds" not in caplog.text
    predict(config(thresholds={"t": [-10.0, 273.15], "t2m": [280.0], "tp": [1.0, 10.0]}, overwrite=True), source)
    told = [record.getMessage() for record in caplog.records if "thresholds" in record.getMessage()]
    assert len(told) == 1
    assert "t -10 K (it was 202 to 298 K in training); tp 1, 10 m (it was -0.01 to 0.014 m in training):" in told[0]


def test_cloud_cover_in_per_cent_is_no_threshold(config):
    """It is a share, so no forecast could exceed 50; that it exceeds nothing at all is a question."""
    spec = SimpleNamespace(variables=(), surface=("tcc",), config=SimpleNamespace(postprocess=True))
    for value in (50.0, 1.0, -0.1):
        with pytest.raises(UserError, match=rf"^thresholds.tcc={value:g}: .* goes from 0 to 1, in units of 1; give"):
            wanted_outputs(config(thresholds={"tcc": [0.5, value]}), spec)
    assert wanted_outputs(config(thresholds={"tcc": [0.5, 0.0]}), spec).thresholds == {"tcc": (0.0, 0.5)}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"members_in": 9}, r"members_in=9: the input holds 6 members \(1, 2, 3, 4, 5, 6\)"),
        ({"members_in": 0}, "members_in=0"),
        ({"members_in": [1, 12]}, "member 12 is not there"),
        ({"members_in": [1, 1]}, "different member numbers"),
        ({"members_in": "five"}, "give a number of members, or a list"),
        ({"members_in": [True, 2]}, "give a number of members, or a list"),
        ({"points": [[True, 2]]}, "give a list of \\[latitude, longitude\\]"),
        ({"members_in": 1, "members_out": True}, "members_out=true needs two members or more"),
        ({"dates": ["1999"]}, "dates 1999: no init time lies there"),
        ({"thresholds": {"q": [1.0]}}, "thresholds: q is not predicted; the checkpoint predicts t, z, t2m, tp"),
        ({"thresholds": {"t": []}}, "thresholds.t"),
        ({"thresholds": {"t": [float("nan")]}}, "thresholds.t"),
        ({"thresholds": {"tp": [0.001, -0.5]}}, r"thresholds.tp=-0.5: .* goes from 0, in units of m; give a threshold"),
        ({"points": [[95, 0]]}, "outside the grid"),
        ({"checkpoint": "nowhere"}, "checkpoint nowhere: no such folder"),
        ({"static": "f.nc"}, None),
    ],
)
def test_mistakes_are_refused(config, source, tmp_path, settings, message):
    if message is None:  # the checkpoint takes no static field, so a file of them is no matter
        assert predict(config(**settings), source)
        return
    with pytest.raises(UserError, match=message):
        predict(config(**settings), source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "other, message",
    [
        ({"leads": (0, 24)}, r"needs leads \(h\) 48 \(there are 0, 24\)"),
        (
            {"levels": (500,), "surface": ("t2m",)},
            r"levels \(hPa\) 850 \(there are 500\); surface variables tp \(there are t2m\)",
        ),
        ({"variables": ("z",)}, r"pressure-level variables t \(there are z\)"),
    ],
)
def test_a_source_that_lacks_something_is_refused(config, other, message):
    with pytest.raises(UserError, match=message):
        predict(config(), make_source(**other))


def test_another_grid_is_refused(config):
    with pytest.raises(UserError, match=r"its grid has 13 x 24 points, .*, the checkpoint's 9 x 16 points"):
        predict(config(), make_source(grid=make_grid((13, 24))))


def test_values_of_unknown_intervals_are_warned_of(config, caplog, tmp_path):
    other = make_source()
    other.lead_bounds = {}
    given = make_checkpoint(tmp_path / "checkpoints", make_spec(other), lead_bounds={"tp": [None, [0, 24], [0, 48]]})
    predict(config(checkpoint=str(given)), other)
    said = "tp is over nothing, 0-24 h, 0-48 h in training, and over no interval that is known in input memory"
    assert f"{said}: it may be another quantity" in caplog.text


def test_a_prediction_that_is_not_finite_is_refused(tmp_path, monkeypatch):
    source = make_source(dates=1)
    checkpoint = make_checkpoint(tmp_path / "c", make_spec(source))
    module = importlib.import_module("ensemble_ml.inference.predict")
    real = module.forward

    def broken(*given):
        found = real(*given)
        found.scale[0, 1, 0, 3, 3] = torch.nan
        return found

    monkeypatch.setattr(module, "forward", broken)
    with pytest.raises(UserError, match=r"t: the prediction is not finite"):
        predict(PredictConfig(checkpoint=str(checkpoint), input="memory", output=str(tmp_path / "f")), source)
    assert not list((tmp_path / "f").glob("*"))


@pytest.mark.parametrize("bounds", [[None, [0, 24], [24, 48]], [None, [12, 24], [36, 48]]])
def test_archives_with_leads_between_those_of_training(config, tmp_path, monkeypatch, bounds):
    """Their sums from the start are cut where the checkpoint's are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def rain(name, steps):
        made = [
            message("tp", noise(GLOBE, step, 1e-3 * step, 1e-5), step=f"0-{step}", member=m)
            for m in (1, 2)
            for step in steps
        ]
        made += [message("t2m", step=step, member=m, seed=step + m) for m in (1, 2) for step in (0, *steps)]
        return str(write(tmp_path / name, made))

    few, many = (
        rain("few.grib", {hour for pair in bounds[1:] for hour in pair if hour}),
        rain("many.grib", range(12, 49, 12)),
    )
    spec = make_spec(open_archive(few, leads=[0, 24, 48]))
    given = {"checkpoint": str(make_checkpoint(tmp_path / "c", spec, lead_bounds={"tp": bounds}))}
    first, second = (
        opened(TASKS["predict"].run(config(**given, input=path, output=path[:-5]))[0]) for path in (few, many)
    )
    assert first.drop_attrs().identical(second.drop_attrs())


def test_rain_over_other_hours_is_refused(tmp_path):
    source = make_source(dates=1)
    checkpoint = make_checkpoint(tmp_path / "c", make_spec(source), lead_bounds={"tp": [None, [0, 24], [24, 48]]})
    source.lead_bounds["tp"] = [None, [18, 24], [42, 48]]
    given = PredictConfig(checkpoint=str(checkpoint), input="memory", output=str(tmp_path / "f"))
    with pytest.raises(UserError, match="tp over nothing, 18-24 h, 42-48 h, the checkpoint knows it over nothing, 0"):
        predict(given, source)
    source.lead_bounds["tp"] = [None, [0, 24], [24, 48]]
    predict(given, source)
