"""What fits of tests do otherwise than those of users: the same fields, read once, and fewer steps."""

import numpy as np
import pytest
from quick_fits import RememberedSource
from stores import make_store

from ensemble_ml.store.source import Part, Selection
from ensemble_ml.training import climate_fit, fit_cache, linear_sums, point_fit


@pytest.mark.parametrize("members", [None, (2,), (4, 1), (1, 1, 3)])
@pytest.mark.parametrize("part", [Part.FORECAST, Part.TRUTH, Part.SPREAD])
def test_fields_that_are_read_once_are_those_of_the_store(tmp_path, part, members):
    gone = [(Part.FORECAST, 1, 2, "t2m")]
    store = make_store(tmp_path / "a.zarr", dates=2, members=4, shape=(9, 16), absent=gone)
    chosen = Selection(members, lead_hours=(24, 48), levels=(850,), rows=(2, 7))
    remembered = RememberedSource(store)
    for date in (1, 0, 1):
        found, expected = remembered.read(part, date, chosen), store.read(part, date, chosen)
        np.testing.assert_array_equal(found.pressure, expected.pressure)
        np.testing.assert_array_equal(found.surface, expected.surface)
        found.pressure[:], found.surface[:] = 0, 0  # what a reader does to its fields is its own affair


def test_fields_are_read_once_whatever_members_are_asked_for(tmp_path, monkeypatch):
    store = make_store(tmp_path / "a.zarr", dates=2, members=4, shape=(9, 16))
    read, asked = store.read, []
    monkeypatch.setattr(store, "read", lambda *given: asked.append(given) or read(*given))
    remembered = RememberedSource(store)
    for members in ((1, 2), (3,), None):
        remembered.read(Part.FORECAST, 0, Selection(members))
    assert asked == [(Part.FORECAST, 0, Selection())]
    assert remembered.fingerprint() == store.fingerprint()


def test_fits_are_short_where_no_test_asks_for_whole_ones():
    assert point_fit._LEAST_STEPS < 100 and climate_fit.SAMPLE_DATES < 24 and fit_cache.FOLDER.endswith("fits/short")


def test_fits_are_those_of_users_where_a_test_asks_for_whole_ones(whole_fits):
    assert (point_fit._LEAST_STEPS, point_fit._PASSES, point_fit._CHOICES) == (500, 4, 4)
    assert (climate_fit.SAMPLE_DATES, linear_sums._CHOICES) == (24, 4)
    assert fit_cache.FOLDER.endswith("fits/whole")
