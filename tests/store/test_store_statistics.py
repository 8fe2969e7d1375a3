"""Statistics: right against a direct calculation, and the same in whatever order they are merged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_store

from ensemble_ml.store import Moments, Part, open_store
from ensemble_ml.store.statistics import merge_all


def moments_of(values):
    mean = values.mean()
    numbers = (values.size, mean, ((values - mean) ** 2).sum(), values.min(), values.max())
    return Moments(*(np.array([float(number)]) for number in numbers))


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), centre=st.floats(-1e5, 1e5), pieces=st.integers(1, 12))
def test_merging_is_independent_of_the_order(seed, centre, pieces):
    rng = np.random.default_rng(seed)
    samples = [rng.normal(centre, 10 ** rng.uniform(-1, 2), rng.integers(1, 400)) for _ in range(pieces)]
    parts = [moments_of(sample) for sample in samples] + [Moments.nothing((1,))]
    forward, shuffled = merge_all(parts, (1,)), merge_all([parts[i] for i in rng.permutation(len(parts))], (1,))
    half = len(parts) // 2
    tree = merge_all(parts[:half], (1,)).merge(merge_all(parts[half:], (1,)))
    direct = moments_of(np.concatenate(samples))
    near = 1e-12 * max(np.abs(sample).max() for sample in samples)  # a mean of values of both signs may be near zero
    for other in (shuffled, tree, direct):
        for name, values in forward.arrays().items():
            np.testing.assert_allclose(getattr(other, name), values, rtol=1e-12, atol=near, err_msg=name)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    dates = ["2001-01-01", "2001-07-01", "2002-01-01", "2004-12-31T12"]
    return make_store(tmp_path_factory.mktemp("statistics") / "s.zarr", dates=dates, surface=("t2m", "tp"))


@pytest.mark.parametrize(
    ("years", "dates"), [([2001], [0, 1]), ([2004, 2001], [0, 1, 3]), ([2001, 2002, 2004], [0, 1, 2, 3])]
)
def test_statistics_of_years_are_those_of_their_members(store, years, dates):
    found = store.statistics(years)
    for name, moments in (("pressure", found.pressure), ("surface", found.surface)):
        values = np.stack([getattr(store.read(Part.FORECAST, date), name) for date in dates]).astype(np.float64)
        axes = (0, 1, -2, -1)
        assert (moments.count == values[0, 0].size / moments.count.size * len(dates) * 6).all()
        np.testing.assert_allclose(moments.mean, values.mean(axes), rtol=1e-8)
        np.testing.assert_allclose(moments.std, values.std(axes), rtol=1e-6)
        assert (moments.minimum == values.min(axes)).all() and (moments.maximum == values.max(axes)).all()


def test_years_are_listed_and_no_year_gives_nothing(store):
    assert store.years == (2001, 2002, 2004)
    nothing = store.statistics([]).pressure
    assert (nothing.count == 0).all() and np.isnan(nothing.std).all() and nothing.mean.shape == (3, 2, 2)


def test_a_store_without_variables_of_one_kind(tmp_path):
    make_store(tmp_path / "s.zarr", surface=(), dates=1)
    found = open_store(tmp_path / "s.zarr").statistics([2001])
    assert found.surface.mean.shape == (3, 0) and found.pressure.mean.shape == (3, 2, 2)


def test_mean_and_spread_have_statistics_of_their_own(tmp_path):
    days = ["2001-01-01", "2001-03-01", "2002-01-01"]
    store = make_store(tmp_path / "own.zarr", dates=days, members=4, shape=(33, 24), surface=("t2m",))
    for part in (Part.MEAN, Part.SPREAD):
        for years, dates in (([2001], [0, 1]), ([2001, 2002], [0, 1, 2])):
            found = store.statistics(years, part)
            fields = [store.read(part, date) for date in dates]
            upper = np.stack([one.pressure[0] for one in fields]).astype(float)
            flat = np.stack([one.surface[0] for one in fields]).astype(float)
            assert (found.pressure.count == len(dates) * 33 * 24).all()
            np.testing.assert_allclose(found.pressure.mean, upper.mean((0, -2, -1)), rtol=1e-12)
            np.testing.assert_allclose(found.pressure.std, upper.std((0, -2, -1)), rtol=1e-10)
            np.testing.assert_array_equal(found.pressure.maximum, upper.max((0, -2, -1)))
            np.testing.assert_allclose(found.surface.mean, flat.mean((0, -2, -1)), rtol=1e-12)
            np.testing.assert_array_equal(found.surface.minimum, flat.min((0, -2, -1)))
    spread = store.statistics([2001], Part.SPREAD).pressure.mean
    assert (spread < store.statistics([2001]).pressure.std).all()
