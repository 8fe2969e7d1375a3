"""Scores become claims, and claims the README's table, without a figure being touched by hand."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.quickstart import benchmark as quickstart
from ensemble_ml.config import BenchmarkConfig
from ensemble_ml.errors import UserError

ROOT = Path(__file__).parents[2]


def scores(ratio: float, gain: float) -> dict:
    claims = [
        {"claim": "spread", "value": ratio, "unit": "ratio", "target": 1.0},
        {"claim": "crps", "value": gain, "unit": "%", "target": 2.0},
    ]
    entry = {"metric": "crps", "lead_hours": 48, "entrant": "forecast", "reference": "raw_10"}
    summary = [{**entry, "ratio": 0.8, "low": 0.7, "high": 0.9}]
    return {"claims": claims, "summary": summary, "headline": ["better"]}


@pytest.mark.parametrize(("ratio", "gain", "holds"), [(0.9, 2.5, [True, True]), (1.1, 1.5, [False, False])])
def test_claims_hold_as_the_scores_say(tmp_path, ratio, gain, holds):
    (tmp_path / "scores.json").write_text(json.dumps(scores(ratio, gain)))
    path = quickstart.run(BenchmarkConfig("quickstart", output=str(tmp_path / "out"), run=str(tmp_path)))
    results = json.loads(path.read_text())
    assert [claim["holds"] for claim in results["claims"]] == holds
    figure = results["figures"]["crps 48 h: forecast over raw_10"]
    assert figure == {"median": 0.8, "min": 0.7, "max": 0.9, "unit": "ratio"}
    assert {"machine", "commit", "runs"} <= results.keys() and "better" in results["notes"]


@pytest.mark.parametrize(("high", "low", "sure"), [(0.95, 1.9, [True, True]), (1.02, -0.1, [False, False])])
def test_intervals_that_hold_no_difference_are_claims_of_their_own(tmp_path, high, low, sure):
    found = scores(0.9, 2.5)
    found["claims"][0] |= {"low": 0.8, "high": high, "enough_blocks": True, "advantage": ""}
    found["claims"][1] |= {"low": low, "high": 3.0, "enough_blocks": True, "advantage": ""}
    (tmp_path / "scores.json").write_text(json.dumps(found))
    path = quickstart.run(BenchmarkConfig("quickstart", output=str(tmp_path / "out"), run=str(tmp_path)))
    claims = {claim["claim"]: claim["holds"] for claim in json.loads(path.read_text())["claims"]}
    ends = "spread: upper end of the interval", "crps: lower end of the interval"
    assert claims == {"spread": True, "crps": True, **dict(zip(ends, sure, strict=True))}


def test_claims_and_figures_stand_without_surface_pressure_too(tmp_path):
    found = scores(0.9, 2.5)
    for entry, value in zip([*found["claims"], *found["summary"]], (1.1, 1.5, 0.95), strict=True):
        entry["without_sp"] = {"value": value, "low": value - 0.1, "high": value + 0.1}
    (tmp_path / "scores.json").write_text(json.dumps(found))
    path = quickstart.run(BenchmarkConfig("quickstart", output=str(tmp_path / "out"), run=str(tmp_path)))
    results = json.loads(path.read_text())
    claims = {claim["claim"]: (claim["value"], claim["holds"]) for claim in results["claims"]}
    assert claims["spread, without surface pressure"] == (1.1, False)
    assert claims["crps, without surface pressure"] == (1.5, False) and claims["crps"] == (2.5, True)
    assert results["figures"]["crps 48 h: forecast over raw_10, without surface pressure"]["median"] == 0.95


@pytest.mark.parametrize("why", [{"enough_blocks": False}, {"advantage": "made from 10 members, compared with 5"}])
def test_what_evaluate_is_not_sure_of_is_no_claim_that_holds(tmp_path, why):
    found = scores(0.9, 2.5)
    for claim, ends in zip(found["claims"], ({"low": 0.8, "high": 0.95}, {"low": 1.9, "high": 3.0}), strict=True):
        claim |= {"enough_blocks": True, "advantage": ""} | ends | why
    (tmp_path / "scores.json").write_text(json.dumps(found))
    path = quickstart.run(BenchmarkConfig("quickstart", output=str(tmp_path / "out"), run=str(tmp_path)))
    claims = json.loads(path.read_text())["claims"]
    assert [claim["holds"] for claim in claims] == [True, False, True, False]


def test_scores_older_than_the_commit_are_not_published_as_its_own(tmp_path, monkeypatch):
    path = tmp_path / "scores.json"
    path.write_text(json.dumps(scores(0.9, 2.5)))
    monkeypatch.setattr(quickstart, "committed", lambda: path.stat().st_mtime + 1)
    with pytest.raises(UserError, match=r"scores.json: older than this commit; run scripts/quickstart.sh"):
        quickstart.run(BenchmarkConfig("quickstart", output=str(tmp_path / "out"), run=str(tmp_path)))


def test_ranges_are_those_of_the_claims_own_figure():
    """Not of one with other units, nor of one that has no ends."""
    name = importlib.util.spec_from_file_location("readme_table", ROOT / "scripts" / "readme_table.py")
    table = importlib.util.module_from_spec(name)
    name.loader.exec_module(table)
    claim = {"claim": "a", "value": 0.0, "unit": "bytes", "target": 0.0, "holds": True}
    figure = {"median": 0.0, "min": -1.0, "max": 3.0, "unit": "%"}
    ends = {"none": figure | {"min": None, "max": None, "unit": "bytes"}, "other": figure}
    assert table.reach(claim, ends) is None
    assert table.reach(claim | {"unit": "%"}, ends) == (-1.0, 3.0)
    several = ends | {"third": figure | {"min": 0.0, "max": 0.0}}  # counts that are zero by chance
    assert table.reach(claim | {"unit": "%"}, several) is None
    assert table.reach(claim | {"unit": "%"}, several | {"a": figure}) == (-1.0, 3.0)


def test_without_scores_it_says_what_to_run(tmp_path):
    with pytest.raises(UserError, match="holds no scores"):
        quickstart.run(BenchmarkConfig("quickstart", output=str(tmp_path), run=str(tmp_path)))


def test_the_readme_shows_the_published_results():
    check = [sys.executable, str(ROOT / "scripts" / "readme_table.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
