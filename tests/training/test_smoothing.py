"""Means of few maps: the split is exact, signal stays, noise goes, and a date can be left out."""

import numpy as np
import pytest
import torch

from ensemble_ml.grid import Grid
from ensemble_ml.training.smoothing import MapMean, Scales

GLOBE = Grid(np.linspace(90, -90, 25), np.arange(48) * 7.5)
REGION = Grid(np.linspace(60, 36, 25), np.arange(48) * 1.0)
VALID = torch.ones(1, 2, dtype=torch.bool)


def noise(seed, count, width=0.0):
    z = torch.randn(count, 1, 2, 25, 48, generator=torch.Generator().manual_seed(seed))
    return z if not width else Scales(GLOBE).smooth(z) * 3.5


def mean_of(maps, grid=GLOBE, follows=False):
    mean = MapMean(Scales(grid), (1, 2))
    for z in maps:
        mean.add(z, VALID, follows=follows)
    return mean


@pytest.mark.parametrize("grid", [GLOBE, REGION])
def test_parts_add_up(grid):
    scales, z = Scales(grid), noise(0, 1)[0]
    parts = torch.stack(list(scales.split(z)))
    assert len(parts) == scales.count == 5
    torch.testing.assert_close(parts.sum(0), z, atol=1e-5, rtol=0)
    weights = torch.from_numpy(grid.area_weights()).float()
    torch.testing.assert_close(parts[-1, ..., 0, 0], (z * weights).sum((-2, -1)) / weights.sum())


def test_longitude_wraps_on_a_globe_only():
    z = torch.zeros(25, 48)
    z[12, 0] = 1
    assert Scales(GLOBE).smooth(z)[12, -1] == Scales(GLOBE).smooth(z)[12, 1]
    assert Scales(REGION).smooth(z)[12, -1] < 1e-6
    constant = torch.full((25, 48), 2.0)
    torch.testing.assert_close(Scales(REGION).smooth(constant), constant)


def test_no_product_of_a_far_weight_is_denormal():
    z = torch.zeros(25, 48)
    z[0, 0] = 1e-6
    smooth = Scales(GLOBE).smooth(z)
    assert smooth[2, 2] > 0 and not smooth[:, 20:30].any()  # 20 widths away, exp(-200) of it


def test_noise_is_removed_and_signal_kept():
    wide = torch.from_numpy(np.cos(np.deg2rad(GLOBE.longitude)) * np.ones((25, 1))).float().expand(1, 2, 25, 48)
    for signal, smallest, largest in ((0 * wide, 0.0, 0.02), (wide, 0.9, 1.02)):
        estimate = mean_of(signal + noise(1, 12)).estimate()
        found = estimate.map()
        slope = float((found * wide).mean() / (wide * wide).mean())
        assert smallest - 0.03 <= slope <= largest
        left = float((found - signal).square().mean())
        assert left < 0.25 / 12  # the plain mean keeps 1/12


def test_rough_signal_is_kept_where_it_stands_out():
    signal = 2 * noise(7, 1)[0]
    found = mean_of(signal + noise(1, 10)).estimate().map()
    assert float((found - signal).square().mean()) < 1.05 / 10


def test_dates_that_resemble_each_other_count_less():
    white = noise(3, 60)
    red = [white[0]]
    for z in white[1:]:
        red.append(0.8 * red[-1] + 0.6 * z)
    apart, alike = mean_of(white, follows=True).estimate(), mean_of(red, follows=True).estimate()
    assert float(apart.dates[:3].mean()) > 45
    assert 4 < float(alike.dates[:3].mean()) < 12  # 60 (1 - 0.8) / (1 + 0.8) = 6.7


def test_one_date_is_no_evidence():
    assert not mean_of(noise(5, 1)).estimate().map().any()


def test_leaving_a_date_out_leaves_it_out():
    maps = 1.5 + noise(6, 9)
    whole, others = mean_of(maps).estimate(), mean_of(maps[:-1]).estimate()
    torch.testing.assert_close(whole.without(maps[-1]).mean(), others.map().mean(), atol=0.02, rtol=0)
    # A residual of an unseen date is larger than one of a date that the mean was fitted to.
    seen = (maps[-1] - whole.map()).square().mean()
    assert (maps[-1] - whole.without(maps[-1])).square().mean() > seen


def test_absent_fields_are_not_counted():
    mean = MapMean(Scales(GLOBE), (1, 2))
    z = noise(8, 3)
    z[1, :, 1] = torch.nan
    for at in range(3):
        mean.add(z[at], torch.isfinite(z[at]).all(-1).all(-1), follows=at > 0)
    assert mean.count.tolist() == [[3.0, 2.0]]
    torch.testing.assert_close(mean.mean[0, 1], (z[0, 0, 1] + z[2, 0, 1]) / 2)
    assert torch.isfinite(mean.estimate().map()).all()
