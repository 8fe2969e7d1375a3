"""Scores of unusual values, and the case that shows them, where the truth or the variable has limits of its own."""

import json
import sys

import pytest
from fakes import DATES, TEST, TRAIN, corrected, entry, write_forecasts
from fakes import settings as settings_of
from synthetic import make_store

from ensemble_ml.store import Part
from ensemble_ml.verification import evaluate


def test_the_brier_score_leaves_out_what_reliability_does(tmp_path, monkeypatch):
    """Where a limit cannot be exceeded (a sky that is mostly overcast) a forecast of never is no skill."""
    kept = {}
    module = sys.modules[evaluate.__module__]
    monkeypatch.setattr(module, "write_report", lambda content, scores, tables, *_: kept.update(tables=tables) or "")
    store = make_store(
        tmp_path / "a.zarr", dates=DATES, members=10, variables=("t",), levels=(850,), surface=("tcc",), leads=(0, 48),
        bias=0.3,
    )  # fmt: skip
    forecast = write_forecasts(tmp_path / "f", store, TEST, corrected(), leads=(48,), train=TRAIN)
    evaluate(settings_of(forecast, store, tmp_path / "r"), store)
    content = json.loads((tmp_path / "r" / "scores.json").read_text())
    reliability = kept["tables"].calibration.reliability
    points = []
    for column, (variable, level) in enumerate((("t", 850), ("tcc", None))):
        for entrant in ("f", "raw_10"):
            table = reliability[column, entrant]
            found = entry(content, entrant, variable, level)["brier"]["value"]
            assert found == pytest.approx(table.parts().score, rel=1e-5)
            points.append(int(table.count.sum()))
    assert points[0] == points[1] > points[2] == points[3] > 0


def test_a_case_without_a_truth_is_placed_by_its_index(tmp_path, plain):
    known = dict(dates=DATES, members=10, variables=("t", "q"), levels=(500, 850), surface=("tp",), bias=0.6)
    cases = []
    for name, absent in (("a", []), ("b", [(Part.TRUTH, date, 0, "t") for date in TEST])):
        store = make_store(tmp_path / f"{name}.zarr", absent=absent, dispersion=0.7, **known)
        forecast = write_forecasts(tmp_path / name, store, TEST, corrected(), train=TRAIN)
        evaluate(settings_of(forecast, store, tmp_path / f"r{name}"), store)
        cases.append(json.loads((tmp_path / f"r{name}" / "scores.json").read_text())["case"])
    assert cases[1]["truth"] is None
    assert [cases[0][key] for key in ("date", "latitude", "longitude", "efi")] == [
        cases[1][key] for key in ("date", "latitude", "longitude", "efi")
    ]
