"""The ensemble and the forecasts that evaluations are tried on; a file may have its own."""

import pytest
from fakes import known_forecast, known_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return known_store(tmp_path_factory.mktemp("store") / "store.zarr")


@pytest.fixture(scope="module")
def forecast(store, tmp_path_factory):
    return known_forecast(tmp_path_factory.mktemp("made") / "forecast", store)
