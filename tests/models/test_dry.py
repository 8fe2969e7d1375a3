"""Laws with a mass at zero, where the mean is near it: as often and as much above zero as was said, and no surer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from small_models import make_climate, make_input, make_spec

from ensemble_ml import distributions
from ensemble_ml.config import ModelConfig
from ensemble_ml.fields import Family
from ensemble_ml.models import EnsembleModel
from ensemble_ml.models.heads import AT_ZERO, fitted, law_near_zero, wetter

MEANS = torch.tensor([-5.0, -0.3, 0.0, 1e-4, 0.2, 1.0, 3.0, 40.0], dtype=torch.float64)
OFTEN, MUCH = 0.35, 0.06  # of points that are said to be dry; in scales


def number(value):
    return torch.tensor(float(value), dtype=torch.float64)


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("scale", [1e-5, 2.5])
def test_one_and_zero_leave_every_law_as_it_is(family, scale):
    size = 1.0 if family is Family.DOUBLY_CENSORED_NORMAL else scale
    wide = torch.full_like(MEANS, 0.1 * size)
    location, same = law_near_zero(family, MEANS * size / 10, wide, number(1), number(0))
    assert torch.equal(same, wide)
    expected = distributions.location_of_mean(family, MEANS * size / 10, wide)
    torch.testing.assert_close(location, expected, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("family", AT_ZERO)
def test_what_is_said_to_be_dry_rains_as_often_and_as_much_as_was_seen(family):
    share, least = fitted(family, number(OFTEN), number(MUCH))
    dry = torch.tensor([-7.0, -0.1, 0.0], dtype=torch.float64)
    law = law_near_zero(family, dry, torch.ones_like(dry), share, least)
    chance = 1 - distributions.cdf(family, *law, torch.zeros_like(dry))
    torch.testing.assert_close(chance, torch.full_like(dry, OFTEN), rtol=1e-3, atol=0)
    torch.testing.assert_close(distributions.moments(family, *law)[0], torch.full_like(dry, MUCH), rtol=1e-3, atol=0)


@pytest.mark.parametrize("family", AT_ZERO)
def test_wet_forecasts_keep_scale_and_mean_and_all_between_grows_with_the_mean(family):
    share, least = fitted(family, number(OFTEN), number(MUCH))
    means = torch.linspace(-1, 6, 701, dtype=torch.float64)
    mean, scale = wetter(means, torch.ones_like(means), share, least)
    assert (mean[means >= 0].diff() > 0).all() and (scale.diff() >= 0).all()
    far = means >= 1
    torch.testing.assert_close(scale[far], torch.ones_like(scale[far]))
    assert ((mean - means)[far] <= (share * least) ** 2 / means[far] + 1e-12).all() and (mean >= means).all()


def test_numbers_stay_within_bounds_and_a_field_that_is_always_dry_stays_so():
    often = torch.tensor([0.0, 0.3, 0.3, 1.0, 0.3])
    much = torch.tensor([0.0, 1e-9, 50.0, 0.5, 0.0])
    share, least = fitted(Family.CENSORED_SHIFTED_GAMMA, often, much)
    assert share.tolist() == pytest.approx([1, 0.05, 1, 0.5, 1])
    assert least.tolist() == pytest.approx([0, 2e-8, float(least[2]), 1, 0]) and least[2] > 0.2


@pytest.mark.parametrize("least", [0.0, 0.3])
def test_slopes_are_finite_and_the_dry_can_become_wet(least):
    mean = torch.tensor([-2.0, 0.0, 0.5, 30.0], requires_grad=True)
    scale = torch.tensor([1.0, 1e-9, 1e-9, 1.0], requires_grad=True)
    wet, wide = wetter(mean, scale, torch.tensor(0.2), torch.tensor(least))
    slopes = torch.autograd.grad(wet.sum(), (mean, scale), retain_graph=True)
    assert all(torch.isfinite(values).all() for values in (wet, wide, *slopes))
    assert slopes[0][0] > 0.4


def test_the_untrained_model_has_them_and_without_them_the_dry_stays_dry():
    spec = make_spec(linear=False)
    spec = dataclasses.replace(spec, config=ModelConfig(hidden=8, depth=1, linear=False, families={"q": "csgamma"}))
    at = spec.of("q")
    assert set(spec.families[at]) == {Family.CENSORED_SHIFTED_GAMMA}
    x, climate = make_input(spec), make_climate(spec)
    climate.bias[:, at] = -1e3  # so that all of it is dry
    climate.dry_share = climate.dry_mean = None
    before = EnsembleModel(spec, climate)
    share, least = fitted(Family.CENSORED_SHIFTED_GAMMA, number(OFTEN), number(MUCH))
    climate.dry_share, climate.dry_mean = np.ones_like(climate.shrink), np.zeros_like(climate.shrink)
    climate.dry_share[:, : spec.upper], climate.dry_mean[:, : spec.upper] = float(share), float(least)
    found, dry = EnsembleModel(spec, climate)(x), before(x)
    chance = [1 - distributions.cdf(Family.CENSORED_SHIFTED_GAMMA, p.location[:, :, at], p.scale[:, :, at],
                                    torch.zeros_like(p.scale[:, :, at])) for p in (found, dry)]  # fmt: skip
    torch.testing.assert_close(chance[0], torch.full_like(chance[0], OFTEN), rtol=1e-2, atol=0)
    assert (chance[1] < 1e-3).all()
    torch.testing.assert_close(found.scale[:, :, at], share.float() * dry.scale[:, :, at])
    rest = [place for place in range(spec.fields) if not at.start <= place < at.stop]
    assert torch.equal(found.location[:, :, rest], dry.location[:, :, rest])


def test_there_are_gradients_by_the_inputs_of_a_set_with_such_a_law():
    """The spread that is narrowed in place is not the one that gradients need."""
    spec = make_spec(surface=("u10", "tp"))
    model, x = EnsembleModel(spec, make_climate(spec)).double(), make_input(spec)
    x = x.to(dtype=torch.float64)
    rain = spec.of("tp").start
    x.mean.requires_grad_()
    found = model(x)
    (found.location[0, 0, rain, 3, 5] + found.scale[0, 0, rain, 3, 5]).backward()
    slope, step = x.mean.grad[0, 1, rain, 3, 5].item(), 1e-6
    assert torch.isfinite(x.mean.grad).all() and slope != 0
    ends = []
    for side in (-1, 1):
        with torch.no_grad():
            x.mean[0, 1, rain, 3, 5] += side * step
            moved = model(x)
            x.mean[0, 1, rain, 3, 5] -= side * step
        ends.append(float(moved.location[0, 0, rain, 3, 5] + moved.scale[0, 0, rain, 3, 5]))
    assert slope == pytest.approx((ends[1] - ends[0]) / (2 * step), rel=1e-2)
