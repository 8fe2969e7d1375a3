"""Members that a law gives: their order, their mean and spread, their bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models.test_distributions import CENSORED, DOUBLY, F64, GAMMA, LOGNORMAL, TRUNCATED
from scipy import stats

from ensemble_ml.distributions import cdf, location_of_mean, moments, quantile, remap_members
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family


def test_dry_members_stay_dry():
    scale = torch.tensor([1e-9, 1e-3, 1.0])
    location = location_of_mean(CENSORED, torch.zeros(3), scale)
    assert (moments(CENSORED, location, scale)[0] <= scale * 1e-4).all()


def test_remapped_members_have_the_predicted_mean_and_spread():
    members = torch.randn(5, 7, 3, dtype=F64)
    location, scale = torch.randn(7, 3, dtype=F64), torch.rand(7, 3, dtype=F64) + 0.5
    found = remap_members(members, members.mean(0), members.std(0), location, scale)
    torch.testing.assert_close(found.mean(0), location)
    torch.testing.assert_close(found.std(0), scale)
    assert (found.argsort(0) == members.argsort(0)).all()


@pytest.mark.parametrize("family", [TRUNCATED, CENSORED, LOGNORMAL, GAMMA, DOUBLY])
def test_remapped_members_respect_bounds_and_order(family):
    members = torch.randn(5, 50)
    found = remap_members(members, members.mean(0), members.std(0), torch.full((50,), 0.2), torch.ones(50), family)
    assert (found >= 0).all() and (found <= family.bounds[1]).all()
    assert (torch.gather(found, 0, members.argsort(0)).diff(dim=0) >= 0).all()


@pytest.mark.parametrize("family", [TRUNCATED, CENSORED, LOGNORMAL, GAMMA, DOUBLY])
@pytest.mark.parametrize("count", [2, 5, 10, 50])
@pytest.mark.parametrize("x", [-2.0, -1.0, 0.0, 1.5])
def test_members_of_the_law_stay_members_of_it(family, count, x):
    """Drawn from the very law that is predicted, dry days and single showers among them, they keep its mean."""
    torch.manual_seed(0)
    points = 20_000
    location, scale = torch.full((points,), x, dtype=F64), torch.ones(points, dtype=F64)
    raw = quantile(family, location, scale, torch.rand(count, points, dtype=F64))
    found = remap_members(raw, raw.mean(0), raw.std(0), location, scale, family, torch.arange(count).flip(0))
    mean, _ = moments(family, location, scale)
    torch.testing.assert_close(found.mean(0), mean)
    order = torch.argsort(raw, dim=0)
    strict = torch.gather(raw, 0, order).diff(dim=0) > 0
    assert (torch.gather(found, 0, order).diff(dim=0)[strict] >= 0).all() and (found >= 0).all()
    truth = quantile(family, location, scale, torch.rand(points, dtype=F64))
    assert of_members(found, truth) < 1.005 * of_members(raw, truth)


@pytest.mark.parametrize("scale", [1e-3, 0.2, 3.0, 100.0])
@pytest.mark.parametrize("location", [-300.0, -0.3, 0.0, 0.6, 1.0, 1.4, 300.0])
def test_members_between_two_bounds_have_the_mean_of_the_law(location, scale):
    """Where it is clear, or overcast, more often than not, the members within the mass are the bound itself."""
    law = torch.full((40,), location), torch.full((40,), scale)
    members = torch.rand(5, 40)
    members[2, 7] = torch.nan
    found = remap_members(members, members.nanmean(0), torch.ones(40), *law, DOUBLY)
    there = ~torch.isnan(members)
    assert torch.equal(torch.isnan(found), ~there) and ((found >= 0) & (found <= 1))[there].all()
    torch.testing.assert_close(found.nanmean(0), moments(DOUBLY, *law)[0], atol=1e-6, rtol=0)
    clear, covered = cdf(DOUBLY, *law, torch.zeros(())), 1 - cdf(DOUBLY, *law, torch.tensor(1 - 1e-7))
    count = there.sum(0)
    assert ((found == 0).sum(0) == torch.floor(clear * count + 1e-4)).all()
    assert ((found == 1).sum(0) == torch.floor(covered * count + 1e-4)).all()


def of_members(members, truth):
    """Mean CRPS of the members' own distribution."""
    ordered, count = members.sort(0)[0], len(members)
    weights = (2 * torch.arange(1, count + 1, dtype=F64) - count - 1)[:, None]
    return ((members - truth).abs().mean(0) - (weights * ordered).sum(0) / count**2).mean().item()


def test_equal_members_rank_as_told_and_absent_ones_stay_absent():
    location, scale = torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)
    dry = torch.zeros(4, 3, dtype=F64)
    dry[1, 2] = torch.nan
    orders = [torch.tensor(order) for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 1, 0, 2])]
    found = [remap_members(dry, dry.mean(0), dry.std(0), location, scale, CENSORED, order) for order in orders]
    for order, one in zip(orders, found, strict=True):
        assert (one[order, 0].diff() >= 0).all() and one[order[-1], 0] > one[order[-2], 0]
    as_given = remap_members(dry, dry.mean(0), dry.std(0), location, scale, CENSORED)
    torch.testing.assert_close(found[0], as_given, rtol=0, atol=0, equal_nan=True)
    levels = torch.tensor([0.125, 0.375, 0.625, 0.875], dtype=F64), torch.tensor([1 / 6, 0.5, 5 / 6], dtype=F64)
    mean = moments(CENSORED, location[0], scale[0])[0]
    for at, column in zip(levels, (0, 2), strict=True):
        wanted = quantile(CENSORED, location[0], scale[0], at)
        for one in found:
            members = one[:, column][~torch.isnan(one[:, column])]
            torch.testing.assert_close(members.sort()[0], wanted * mean / wanted.mean())
    assert all(torch.isnan(one[1, 2]) and torch.isnan(one).sum() == 1 for one in found)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_equal_members_are_spread_as_predicted(count):
    location, scale = torch.tensor([4.0, 5.0, 6.0], dtype=F64), torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    members = torch.ones(count, 3, dtype=F64)
    members[:, 1] = torch.randn(count, dtype=F64)  # a point like any other among them
    order = torch.randperm(count)
    found = remap_members(members, members.mean(0), members.std(0), location, scale, order=order)
    torch.testing.assert_close(found.mean(0), location)
    torch.testing.assert_close(found.std(0), scale)
    torch.testing.assert_close(found[:, 1], 5 + 2 * (members[:, 1] - members[:, 1].mean()) / members[:, 1].std())
    normal = torch.from_numpy(stats.norm.ppf((np.arange(count) + 0.5) / count))
    torch.testing.assert_close(found[order, 0], 4 + normal / normal.std())


def test_of_equal_members_absent_ones_stay_absent():
    members = torch.tensor([[7.0, 7.0, torch.nan], [torch.nan, torch.nan, torch.nan], [7.0, torch.nan, torch.nan]])
    mean, spread = torch.tensor([7.0, 7.0, torch.nan]), torch.tensor([0.0, 0.0, torch.nan])
    found = remap_members(members, mean, spread, torch.full((3,), 4.0), torch.ones(3))
    root = 0.5**0.5
    wanted = torch.tensor([[4 - root, 4, torch.nan], [torch.nan] * 3, [4 + root, torch.nan, torch.nan]])
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("location", [-0.1, -40.0, -1e4])
def test_members_of_a_law_that_never_comes_above_zero(location):
    raw = torch.rand(5, 3)
    far = torch.full((3,), location), torch.full((3,), 1e-3)
    found = remap_members(raw, raw.mean(0), raw.std(0), *far, Family.CENSORED_NORMAL)
    assert (found == 0).all()


def test_one_member_cannot_be_remapped():
    with pytest.raises(UserError, match="two or more"):
        remap_members(torch.ones(1, 2), torch.ones(2), torch.zeros(2), torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("family", [LOGNORMAL, GAMMA])
def test_many_remapped_members_have_the_moments_of_the_law(family):
    members = torch.from_numpy(stats.norm.ppf((np.arange(4000) + 0.5) / 4000))[:, None]
    location, scale = torch.tensor([1.2], dtype=F64), torch.tensor([0.6], dtype=F64)
    found = remap_members(members, members.mean(0), members.std(0), location, scale, family)
    mean, deviation = moments(family, location, scale)
    torch.testing.assert_close(found.mean(0), mean, rtol=2e-3, atol=0)
    torch.testing.assert_close(found.std(0), deviation, rtol=1e-2, atol=0)
