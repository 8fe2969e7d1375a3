"""The ensemble and the forecasts that evaluations are tried on; a file may have its own."""

import sys

import pytest
from fakes import FEW, known_forecast, known_store

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


@pytest.fixture
def plain(monkeypatch):
    """Figures take most of the time of a small evaluation; one test looks at them."""
    module = sys.modules[evaluate.__module__]  # the package's `evaluate` is the function
    monkeypatch.setattr(module, "write_report", lambda *_: "<!doctype html>")
