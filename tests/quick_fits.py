"""Fits as most tests need them: short, of fields that are read once, and shared by all trainings of the same settings.

A training of a test spends nine tenths of its time on the fits before its first step. Tests that look at how well
networks are fitted take `whole_fits`; tests that look at how fits are kept take `own_fits`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from stores import shared_folder

from ensemble_ml.store.source import Fields, Part, Selection
from ensemble_ml.training import climate_data, fit_cache, point_fit

_SHORT = {"_LEAST_STEPS": 30, "_PASSES": 1, "_CHOICES": 2}
_WHOLE = {name: getattr(point_fit, name) for name in _SHORT}
_MOST_KEPT = 1000  # files


class RememberedSource:
    """A source that reads each start date of each part once, all members of it, and cuts what is asked for from that.

    For the small stores of tests, of which a fit reads the same fields dozens of times.
    """

    def __init__(self, source):
        self._source, self._seen = source, {}

    def __getattr__(self, name):
        return getattr(self._source, name)

    def read(self, part, date, selection=None):
        selection = selection or Selection()
        key = part, int(date), replace(selection, realization=None)
        if key not in self._seen:
            self._seen[key] = self._source.read(*key)
        fields = self._seen[key]
        if part is not Part.FORECAST or selection.realization is None:
            return Fields(fields.pressure.copy(), fields.surface.copy())
        members = self._source.layout.realization
        at = np.array([members.index(number) for number in selection.realization], int)
        return Fields(fields.pressure[at], fields.surface[at])


@contextmanager
def fits_of(settings, folder):
    """Fit the small networks by these settings, and keep the fits in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(point_fit, name, value)
        patch.setattr(fit_cache, "FOLDER", str(folder))  # in no run's output folder
        patch.setattr(fit_cache, "_KEPT", _MOST_KEPT)
        yield


@pytest.fixture(scope="session")
def fits_folder(tmp_path_factory):
    """Return the folder of fits of this test run: workers write a file as a whole."""
    return shared_folder(tmp_path_factory) / "fits"


@pytest.fixture(autouse=True, scope="session")
def short_fits(fits_folder):
    """Fit the small networks in a few steps; ranks are forks of the test's process, and do the same."""
    with fits_of(_SHORT, fits_folder / "short"):
        yield


@pytest.fixture(scope="module")
def whole_fits(fits_folder):
    """Fit the small networks of a module's tests as long as for users."""
    with fits_of(_WHOLE, fits_folder / "whole"):
        yield


@pytest.fixture
def own_fits(monkeypatch):
    """Keep fits in the runs' output folder, as for users."""
    monkeypatch.setattr(fit_cache, "FOLDER", ".fits")
    monkeypatch.setattr(fit_cache, "_KEPT", 8)


@pytest.fixture(autouse=True, scope="session")
def fields_read_once():
    """Let fits read each field of a store once."""
    real = climate_data.Dates.__init__

    def remembering(self, reader, *arguments):
        real(self, reader.over(RememberedSource(reader.source)), *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(climate_data.Dates, "__init__", remembering)
        yield
