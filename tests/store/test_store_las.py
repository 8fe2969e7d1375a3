"""Local area-wise standardisation against brute force over all members, dates and windows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from synthetic import make_store

from ensemble_ml.errors import UserError
from ensemble_ml.store import PackedBlock, Part, StoreWriter, open_store
from ensemble_ml.store.las import Pooled, local_statistics, smoothed, windows

DATES = [0, 2, 3]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("las") / "s.zarr"
    return make_store(path, dates=4, members=5, shape=(13, 24), surface=("t2m", "tp"), leads=(0, 24))


def brute(values, wraps, size=7):
    """Mean and deviation of values (N, Y, X) in windows, point by point, NaN left out."""
    rows, columns = values.shape[-2:]
    half, mean, std = size // 2, np.full((rows, columns), np.nan), np.full((rows, columns), np.nan)
    for y in range(rows):
        for x in range(columns):
            near = np.arange(x - half, x + half + 1)
            near = near % columns if wraps else near[(near >= 0) & (near < columns)]
            box = values[:, max(0, y - half) : y + half + 1][:, :, near]
            box = box[np.isfinite(box)]
            if box.size:
                mean[y, x], std[y, x] = box.mean(), box.std()
    return mean, std


@pytest.mark.parametrize("wraps", [True, False])
def test_windows_pool_exactly(wraps):
    rng = np.random.default_rng(0)
    values = rng.normal(5e4, 30, (6, 4, 9, 16)) + 900 * rng.normal(size=(1, 1, 9, 16))  # D, M, Y, X
    values[2, :, 3, 5], values[:, :, 0, 0] = np.nan, np.nan
    pooled = Pooled.nothing((9, 16))
    for members in values:
        pooled.add(np.full((9, 16), 4.0), members.mean(0), members.var(0, ddof=1) * 3)
    found = windows(pooled, wraps)
    mean, std = brute(values.reshape(-1, 9, 16), wraps)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-13)
    np.testing.assert_allclose(np.sqrt(found.m2 / found.count), std, rtol=1e-10)


def test_a_store_gives_what_brute_force_over_its_members_gives(store):
    found = local_statistics(store, DATES, sigma=0)
    members = np.stack([store.read(Part.FORECAST, d).pressure for d in DATES]).astype(float)  # D M T V Z Y X
    for v, z in np.ndindex(2, 2):
        mean, std = brute(members[:, :, :, v, z].reshape(-1, 13, 24), True)
        # the store keeps mean and spread in float32
        np.testing.assert_allclose(found.mean_p[v, z], mean, rtol=1e-6)
        np.testing.assert_allclose(found.std_p[v, z], std, rtol=1e-5)
    ground = np.stack([store.read(Part.FORECAST, d).surface for d in DATES]).astype(float)
    mean, std = brute(ground[:, :, :, 0].reshape(-1, 13, 24), True)
    np.testing.assert_allclose(found.mean_s[0], mean, rtol=1e-6)
    np.testing.assert_allclose(found.std_s[0], std, rtol=1e-5)
    mean, std = brute(ground[:, :, 1:, 1].reshape(-1, 13, 24), True)  # no rain at the start: not a field at all
    np.testing.assert_allclose(found.std_s[1], std, rtol=1e-4)


def test_selection_and_order(store):
    whole = local_statistics(store, DATES, sigma=0)
    some = local_statistics(store, DATES, sigma=0, variables=("z",), levels=(850, 500), surface=())
    np.testing.assert_array_equal(some.mean_p[0], whole.mean_p[1, ::-1])
    assert some.mean_s.shape == (0, 13, 24)
    late = local_statistics(store, DATES, sigma=0, leads=(24,))
    assert not np.array_equal(late.mean_p, whole.mean_p)


def test_smoothing_is_gaussian_and_ends_at_edges():
    rng = np.random.default_rng(1)
    points = Pooled(np.ones((40, 60)), rng.normal(size=(40, 60)), np.ones((40, 60)))
    mean, std = smoothed(points, True, 3.0)
    np.testing.assert_allclose(std, 1, rtol=1e-12)  # a constant stays one, at the edges too
    middle = gaussian_filter(points.mean, 3.0, mode=("nearest", "wrap"))
    np.testing.assert_allclose(mean[13:-13], middle[13:-13], atol=1e-12)
    rolled, _ = smoothed(Pooled(points.count, np.roll(points.mean, 7, 1), points.m2), True, 3.0)
    np.testing.assert_allclose(rolled, np.roll(mean, 7, 1), atol=1e-12)
    region, _ = smoothed(Pooled(points.count, np.roll(points.mean, 7, 1), points.m2), False, 3.0)
    assert not np.allclose(region, rolled)


def test_where_nothing_varied_a_deviation_is_still_something():
    """A belt without rain, wider than the filter reaches: next season's rain there is no 1e8 deviations."""
    m2 = np.random.default_rng(0).gamma(2.0, 1e-6, (140, 40))
    m2[40:] = 0.0
    _, std = smoothed(Pooled(np.full(m2.shape, 9.0), np.zeros(m2.shape), m2), True)
    typical = np.sqrt((std**2).mean())
    assert (std > 0.019 * typical).all() and (std[90:] == std.min()).all()


def test_gaps_and_masks_are_left_out(store, tmp_path):
    lay, mask = store.layout, np.zeros(store.layout.grid.shape, bool)
    mask[2:9, 3:15] = True
    with StoreWriter(tmp_path / "gaps.zarr", lay, parts=[Part.FORECAST]) as writer:
        for date in range(4):
            fields = store.read(Part.FORECAST, date)
            there, points = np.ones(fields.pressure.shape[:-2], bool), np.zeros(fields.surface.shape, bool)
            there[:, :, 0] = date != 2  # t is missing on one date
            there[3:, :, 1] = date != 3  # z of two members on another
            points[:, :, 0] = mask
            values = np.where(points, np.nan, fields.surface)
            writer.write(Part.FORECAST, date, PackedBlock.plain(fields.pressure, there),
                         PackedBlock.plain(values, None, points))  # fmt: skip
    gappy = open_store(tmp_path / "gaps.zarr")
    found = local_statistics(gappy, DATES, sigma=0)
    members = np.stack([gappy.read(Part.FORECAST, d).pressure for d in DATES]).astype(float)
    for v in range(2):
        mean, std = brute(members[:, :, :, v, 0].reshape(-1, 13, 24), True)
        np.testing.assert_allclose(found.mean_p[v, 0], mean, rtol=1e-6)
        np.testing.assert_allclose(found.std_p[v, 0], std, rtol=1e-5)
    ground = np.stack([gappy.read(Part.FORECAST, d).surface for d in DATES]).astype(float)[:, :, :, 0]
    mean, std = brute(ground.reshape(-1, 13, 24), True)
    near = np.isfinite(mean)
    np.testing.assert_allclose(found.mean_s[0][near], mean[near], rtol=1e-6)
    assert not near.all() and np.isfinite(found.mean_s[0]).all()
    assert np.isfinite(local_statistics(gappy, DATES).std_s).all()


def test_refusals(store, tmp_path, monkeypatch):
    monkeypatch.setattr("ensemble_ml.store.las.WINDOW", 25)
    with pytest.raises(UserError, match="wider than the grid"):
        local_statistics(store, DATES)
    single = make_store(tmp_path / "one.zarr", dates=2, members=1)
    with pytest.raises(UserError, match="no mean and spread"):
        local_statistics(single, [0])
