"""Fits as most tests need them: short, of fields that are read once, and shared by all trainings of the same settings.

A training of a test would spend nine tenths of its time on the fits before its first step. Tests that look at how well
something is fitted take `whole_fits`, and tests that look at how fits are kept `own_fits`; the golden run takes
`golden_fits`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from stores import shared_folder

from ensemble_ml.store.source import Fields, Part, Selection
from ensemble_ml.training import (
    climate_data,
    climate_fit,
    fit_cache,
    linear_fit,
    linear_sums,
    point_fit,
    spread_fit,
    widths,
)
from ensemble_ml.training import truth_fit as truth
from ensemble_ml.training.climate_data import FEWEST_TO_WIDEN

_SHORT_NETWORKS = {(point_fit, "_LEAST_STEPS"): 30, (point_fit, "_PASSES"): 1, (point_fit, "_CHOICES"): 2}
_FEW_SHRINKS = torch.tensor([0.5, 2, 8, 32])
_SHORT = _SHORT_NETWORKS | {  # fewer values to choose from, by fewer dates
    (climate_fit, "SAMPLE_DATES"): 8,
    (linear_fit, "PENALTIES"): (1e-3, 3e-2, 1.0),
    (linear_fit, "BAND_PENALTIES"): (1e-2, 1.0),
    (linear_sums, "_CHOICES"): 1,
    (spread_fit, "SHRINK"): _FEW_SHRINKS,
    (truth, "SHRINK"): _FEW_SHRINKS,
    (truth, "_FACTORS"): torch.linspace(-1, 1, 9).exp(),
    (truth, "_NEAR"): torch.linspace(-0.25, 0.25, 3).exp(),
    (truth, "_SHARES"): (0.0, 0.5, 1.0),
    (widths, "_DATES_A_SIZE"): FEWEST_TO_WIDEN,  # or validation would take more forward passes than training
}
_WHOLE = {(module, name): getattr(module, name) for module, name in _SHORT}
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
    """Fit by these settings, and keep the fits in `folder`: what names a fit does not tell such settings apart."""
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in settings.items():
            patch.setattr(module, name, value)
        patch.setattr(fit_cache, "FOLDER", str(folder))  # in no run's output folder
        patch.setattr(fit_cache, "_KEPT", _MOST_KEPT)
        yield


@pytest.fixture(scope="session")
def fits_folder(tmp_path_factory):
    """Return the folder of fits of this test run: workers write a file as a whole."""
    return shared_folder(tmp_path_factory) / "fits"


@pytest.fixture(autouse=True, scope="session")
def short_fits(fits_folder):
    """Fit in a few steps; ranks are forks of the test's process, and do the same."""
    with fits_of(_SHORT, fits_folder / "short"):
        yield


@pytest.fixture(scope="module")
def whole_fits(fits_folder):
    """Fit a module's tests as for users."""
    with fits_of(_WHOLE, fits_folder / "whole"):
        yield


@pytest.fixture
def golden_fits(fits_folder):
    """Fit as when the losses of the golden run were written: short networks, all else as for users."""
    with fits_of(_WHOLE | _SHORT_NETWORKS, fits_folder / "golden"):
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
