"""The ensemble and the forecasts that evaluations are tried on; a file may have its own."""

import json
import sys

import pytest
from fakes import FEW, known_forecast, known_store, settings

from ensemble_ml.verification import evaluate


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return known_store(tmp_path_factory.mktemp("store") / "store.zarr")


@pytest.fixture(scope="session")
def forecast(store, tmp_path_factory):
    return known_forecast(tmp_path_factory.mktemp("made") / "forecast", store)


@pytest.fixture(scope="session")
def few_forecasts(store, tmp_path_factory):
    """Make the same of a third of the dates, for what does not depend on how many there are."""
    return known_forecast(tmp_path_factory.mktemp("few") / "forecast", store, FEW)


@pytest.fixture(scope="session")
def result(store, forecast, tmp_path_factory):
    """Return the content of scores.json and the report of one evaluation."""
    output = tmp_path_factory.mktemp("scores")
    found = evaluate(settings(forecast, store, output), store)
    assert found == output
    return json.loads((output / "scores.json").read_text()), (output / "report.html").read_text()


@pytest.fixture
def plain(monkeypatch):
    """Figures take most of the time of a small evaluation; one test looks at them."""
    module = sys.modules[evaluate.__module__]  # the package's `evaluate` is the function
    monkeypatch.setattr(module, "write_report", lambda *_: "<!doctype html>")
