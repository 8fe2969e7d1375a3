"""Distributions in NumPy against scoringrules, quadrature, samples, and the same closed forms in torch."""

import itertools

import numpy as np
import pytest
import scoringrules
import torch
from scipy import stats
from scipy.integrate import quad
from scipy.special import log_ndtr
from scipy.stats import norm

from ensemble_ml import distributions as trained
from ensemble_ml.fields import GAMMA_SHIFT, Family
from ensemble_ml.verification.families import cdf, crps, crps_above, location_of_mean, log_score, moments, quantile

FAMILIES = list(Family)
SKEWED = (Family.LOGNORMAL, Family.CENSORED_SHIFTED_GAMMA)
DOUBLY = Family.DOUBLY_CENSORED_NORMAL
POINTS = [(0.3, 0.0), (1.0, 2.5), (-2.0, 0.4), (-7.0, 0.1), (-20.0, 0.05), (1.0, -0.5)]


def parameters(seed=0, points=500):
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.1, 3, points)
    return scale * rng.uniform(-3, 6, points), scale, np.abs(rng.normal(size=points)) * rng.choice([0, 1, 3], points)


def skewed(family, location, scale):
    """scipy's law and how far it is moved down."""
    shift = GAMMA_SHIFT * (family is Family.CENSORED_SHIFTED_GAMMA)
    mean = scale * np.log1p(np.exp(2 * np.maximum(location / scale + shift, -8))) / 2
    if family is Family.LOGNORMAL:
        variance = np.log1p((scale / mean) ** 2)
        return stats.lognorm(np.sqrt(variance), scale=mean * np.exp(-variance / 2)), 0.0
    return stats.gamma((mean / scale) ** 2, scale=scale**2 / mean), shift * scale


def test_crps_against_scoringrules():
    location, scale, y = parameters()
    np.testing.assert_allclose(
        crps(Family.NORMAL, location, scale, y), scoringrules.crps_normal(y, location, scale), atol=1e-12
    )
    truncated = scoringrules.crps_tnormal(y, location, scale, 0, np.inf)
    np.testing.assert_allclose(crps(Family.TRUNCATED_NORMAL, location, scale, y), truncated, atol=1e-9)
    censored = scoringrules.crps_cnormal(y, location, scale, 0, np.inf)
    np.testing.assert_allclose(crps(Family.CENSORED_NORMAL, location, scale, y), censored, atol=1e-9)
    censored = scoringrules.crps_cnormal(np.minimum(y, 1), location, scale, 0, 1) + np.maximum(y - 1, 0)
    np.testing.assert_allclose(crps(DOUBLY, location, scale, y), censored, atol=1e-9)
    law, _ = skewed(Family.LOGNORMAL, location, scale)
    peer = scoringrules.crps_lognormal(np.maximum(y, 1e-300), np.log(law.kwds["scale"]), law.args[0])
    np.testing.assert_allclose(crps(Family.LOGNORMAL, location, scale, y), peer, atol=1e-9)
    law, shift = skewed(Family.CENSORED_SHIFTED_GAMMA, location, scale)
    peer = scoringrules.crps_csg0(y, law.args[0], 1 / law.kwds["scale"], shift=shift)
    np.testing.assert_allclose(crps(Family.CENSORED_SHIFTED_GAMMA, location, scale, y), peer, atol=1e-7)


def survival(family, location, scale):
    """P(value > x), straight from the definition of the family."""
    if family in SKEWED:
        law, shift = skewed(family, location, scale)
        return lambda x: np.where(x >= 0, law.sf(x + shift), 1.0)
    return {
        Family.NORMAL: lambda x: norm.sf((x - location) / scale),
        Family.CENSORED_NORMAL: lambda x: np.where(x >= 0, norm.sf((x - location) / scale), 1.0),
        DOUBLY: lambda x: np.where((x >= 0) & (x < 1), norm.sf((x - location) / scale), x < 0),
        Family.TRUNCATED_NORMAL: lambda x: np.where(
            x >= 0, np.exp(log_ndtr((location - x) / scale) - log_ndtr(location / scale)), 1.0
        ),
    }[family]


def integral(tail, y, start, end):
    inside = min(max(y, start), end)
    split = np.geomspace(max(inside, 1e-8), max(end, 2e-8), 12) if inside >= 0 else [inside, end]
    above = sum(quad(lambda x: tail(x) ** 2, a, b, limit=200)[0] for a, b in itertools.pairwise(split))
    rest = split[0] - inside  # from zero to the first point of the logarithmic split
    return quad(lambda x: (1 - tail(x)) ** 2, start, inside, limit=400)[0] + above + rest * tail(split[0]) ** 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("location", "y"), POINTS)
def test_crps_against_quadrature(family, location, y):
    start = -40 * 1.3 if family is Family.NORMAL else min(0.0, y)
    end = max(y, location, 0) + 40 * 1.3 * (20 if family in SKEWED else 1)
    expected = integral(survival(family, location, 1.3), y, start, end)
    found = crps(family, np.array(location), np.array(1.3), np.array(y))
    assert found == pytest.approx(expected, abs=3e-6 if family is Family.LOGNORMAL else 5e-7)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threshold", [0.0, 0.7, 3.0])
def test_threshold_weighted_crps_against_quadrature(family, threshold):
    for location, y in POINTS[:4]:
        end = max(y, location, threshold) + 400
        tail = survival(family, location, 1.3)
        low = quad(lambda x, tail=tail: (1 - tail(x)) ** 2, threshold, max(y, threshold), limit=300)[0]
        points = max(y, threshold) + np.append(0, np.geomspace(1e-6, end, 30))
        high = sum(quad(lambda x, tail=tail: tail(x) ** 2, a, b)[0] for a, b in itertools.pairwise(points))
        found = crps_above(family, *map(np.array, (location, 1.3, y)), threshold)
        assert found == pytest.approx(low + high, abs=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_of_a_law_agree(family):
    location, scale, y = parameters(1)
    tensors = [torch.from_numpy(a) for a in (location, scale, y)]
    atol = 1e-9 if family in SKEWED else 1e-13  # torch's incomplete gamma function has fewer digits
    np.testing.assert_allclose(crps(family, location, scale, y), trained.crps(family, *tensors), rtol=0, atol=atol)
    np.testing.assert_allclose(cdf(family, location, scale, y), trained.cdf(family, *tensors), rtol=0, atol=atol)
    level = np.linspace(0.01, 0.99, len(y))
    found = trained.quantile(family, *tensors[:2], torch.from_numpy(level))
    np.testing.assert_allclose(quantile(family, location, scale, level), found, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_score_is_minus_the_log_of_the_density(family):
    location, scale, y = parameters(2)
    y = np.maximum(y, 0.05)
    step = 1e-5
    density = (cdf(family, location, scale, y + step) - cdf(family, location, scale, y - step)) / (2 * step)
    good = density > 1e-5
    np.testing.assert_allclose(log_score(family, location, scale, y)[good], -np.log(density[good]), atol=1e-3)
    if family is Family.NORMAL:
        np.testing.assert_allclose(log_score(family, location, scale, y), scoringrules.logs_normal(y, location, scale))


def test_log_score_at_a_mass_and_where_nothing_can_be():
    zero, one = np.zeros(1), np.ones(1)
    assert log_score(Family.CENSORED_NORMAL, zero, one, zero) == pytest.approx(np.log(2))
    assert log_score(DOUBLY, one, 2 * one, zero) == pytest.approx(-norm.logcdf(-0.5))
    for at, y in ((-40, 1), (41, 0)):
        assert log_score(DOUBLY, at * one, one, y * one) == pytest.approx(-norm.logsf(41))
    assert np.isposinf(log_score(DOUBLY, one, one, np.array([-0.1, 1.1]))).all()
    assert np.isposinf(log_score(Family.LOGNORMAL, one, one, -one))
    assert np.isposinf(log_score(Family.TRUNCATED_NORMAL, one, one, -one))


@pytest.mark.parametrize("location", [-7.0, -1.0, 0.0, 1.0, 5.0, 15.0, 20.0, 30.0, 60.0, 99.4, 120.0])
def test_log_score_of_a_dry_day_that_rain_was_sure_of(location):
    """Where the mass at zero is too small for a number: by the density of the gamma law, integrated in logarithms."""
    law = skewed(Family.CENSORED_SHIFTED_GAMMA, np.array(location), np.array(1.0))[0]
    top = law.logpdf(GAMMA_SHIFT) if location > 1 else 0.0
    expected = norm.logcdf(-location)
    if location + GAMMA_SHIFT < 100:
        expected = law.logcdf(GAMMA_SHIFT)
        if expected < -600:
            integral = quad(lambda x: np.exp(law.logpdf(x) - top), 0, GAMMA_SHIFT, points=[0.9 * GAMMA_SHIFT])[0]
            expected = np.log(integral) + top
    found = log_score(Family.CENSORED_SHIFTED_GAMMA, np.array(location), np.array(1.0), np.array(0.0))
    np.testing.assert_allclose(found, -expected, rtol=1e-9, atol=1e-11)


def test_the_mass_at_zero_counts_from_the_right():
    zero, one = np.zeros(3), np.ones(3)
    for family in (Family.CENSORED_NORMAL, Family.CENSORED_SHIFTED_GAMMA, DOUBLY):
        assert (cdf(family, zero, one, zero) > 0.3).all() and (cdf(family, zero, one, zero, left=True) == 0).all()


def test_the_mass_at_one_counts_from_the_right():
    half, one = np.full(3, 0.5), np.ones(3)
    np.testing.assert_allclose(cdf(DOUBLY, half, one, one, left=True), norm.cdf(0.5))
    assert (cdf(DOUBLY, half, one, one) == 1).all() and (cdf(DOUBLY, half, one, 2 * one, left=True) == 1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forecast_without_spread_is_scored_as_a_point(family):
    location, y = np.array([1.5, -1.0, 0.0]), np.array([0.0, 2.0, 0.0])
    point = np.clip(location, *family.bounds)
    np.testing.assert_allclose(crps(family, location, np.zeros(3), y), abs(point - y))
    assert np.isnan(crps(family, location, np.array([np.nan, 1, 1]), y)).tolist() == [True, False, False]


@pytest.mark.parametrize("family", list(Family))
def test_a_scale_of_nothing_is_a_step(family):
    """As the moments of members that agree on no rain."""
    location, y = np.array([2.0, 0.0, -1.0]), np.array([2.0, 0.0, 0.0])
    at = np.clip(location, *family.bounds)
    assert cdf(family, location, np.zeros(3), y).tolist() == (y >= at).astype(float).tolist()
    assert cdf(family, location, np.zeros(3), y, left=True).tolist() == (y > at).astype(float).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_location_of_mean_gives_that_mean(family):
    mean, scale = np.array([0.3, 0.5, 1.0, 3.0, 9.0, 40.0, 5.0]), np.array([1.0, 2.0, 1.0, 2.0, 1.0, 0.5, 0.0])
    if family is DOUBLY:
        mean = mean / (1 + mean)
    location = location_of_mean(family, mean, scale)
    assert location[-1] == mean[-1]  # without a scale it is the mean itself
    levels = (np.arange(20_000) + 0.5) / 20_000
    found = quantile(family, location[:-1, None], scale[:-1, None], levels).mean(1)
    np.testing.assert_allclose(found, mean[:-1], atol=2e-3 * scale[:-1].max())


def test_a_truncated_law_is_given_a_mean_near_zero():
    mean = np.append(np.geomspace(0.101, 10, 300), [0.05, 0.0, -3.0])
    location = location_of_mean(Family.TRUNCATED_NORMAL, 0.7 * mean, np.full(303, 0.7))
    found = moments(Family.TRUNCATED_NORMAL, location, np.full(303, 0.7))[0]
    np.testing.assert_allclose(found, 0.7 * np.maximum(mean, 0.1), rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_location_of_mean_is_that_of_training(family):
    mean, scale = (v.ravel() for v in np.meshgrid([-1.0, 0.0, 0.03, 0.1, 0.3, 0.6, 0.98], [0.05, 0.4, 2.0]))
    peer = trained.location_of_mean(family, torch.from_numpy(mean), torch.from_numpy(scale))
    np.testing.assert_allclose(location_of_mean(family, mean, scale), peer, rtol=1e-3, atol=1e-3)


def test_far_from_zero_the_gamma_law_is_scored_as_the_normal_one():
    """As its other scores are; the density has no bound there."""
    y = np.array([100.3, 101.0])
    found = log_score(Family.CENSORED_SHIFTED_GAMMA, np.array([100.0]), np.array([1.0]), y)
    np.testing.assert_allclose(found, log_score(Family.NORMAL, np.array([100.0]), np.array([1.0]), y))


def moments_by_quadrature(family, location, scale):
    """E[Y^n] = integral of n y^(n - 1) P(Y > y) over y > 0, for laws that are never negative."""
    tail = survival(family, location, scale)
    near = np.concatenate([[0], np.geomspace(1e-9, 0.5, 30), np.linspace(1, 30, 59)])  # tails fall at once, or late
    ends = scale * np.append(near, np.geomspace(31, 1e10 if family in SKEWED else 300, 99))
    ends = np.unique(np.minimum(ends, family.bounds[1]))
    nodes, weights = np.polynomial.legendre.leggauss(12)
    half = np.diff(ends)[:, None] / 2
    points, weights = (ends[:-1, None] + half * (1 + nodes)).ravel(), (half * weights).ravel()
    above = weights * tail(points)
    mean, square = above.sum(), (2 * points * above).sum()
    return mean, np.sqrt(max(square - mean**2, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_against_scipy_and_quadrature(family):
    scale = 0.7
    for x in (-8.0, -5.0, -2.0, -0.6, 0.0, 0.4, 1.5, 3.0, 7.9, 8.1, 20.0):
        mean, deviation = moments(family, np.array(scale * x), np.array(scale))
        if family is Family.NORMAL:
            expected = scale * x, scale
        elif family is Family.TRUNCATED_NORMAL:
            law = stats.truncnorm(-x, np.inf, scale * x, scale)
            expected = law.mean(), law.std()
        elif family is Family.LOGNORMAL:
            law, _ = skewed(family, scale * x, scale)
            expected = law.mean(), law.std()
        else:
            expected = moments_by_quadrature(family, scale * x, scale)
        assert mean == pytest.approx(expected[0], rel=1e-5, abs=1e-8)
        assert deviation == pytest.approx(expected[1], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_are_those_that_are_trained_through(family):
    x = np.linspace(-8, 60, 69)
    mean, deviation = moments(family, 0.3 * x, np.full(69, 0.3))
    peer = trained.moments(family, torch.from_numpy(0.3 * x), torch.full((69,), 0.3, dtype=torch.float64))
    np.testing.assert_allclose(mean, peer[0], rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(deviation, peer[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_of_a_point_and_of_nothing(family):
    mean, deviation = moments(family, np.array([2.0, -1.0, np.nan, 1.0]), np.array([0.0, 0.0, 1.0, np.nan]))
    at = np.clip([2.0, -1.0], *family.bounds).tolist()
    assert mean[:2].tolist() == at and deviation[:2].tolist() == [0.0, 0.0]
    assert np.isnan(mean[2]) and np.isnan(deviation[3])
    if family is Family.TRUNCATED_NORMAL:  # far below zero an exponential law
        far = moments(family, np.array([-99.9, -100.1, -1e6]), np.ones(3))
        np.testing.assert_allclose(far, np.array([1 / 99.9, 1 / 100.1, 1e-6]) * np.ones((2, 1)), rtol=4e-4)
        assert np.diff(far[0])[0] < 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_what_misses_has_no_score(family, gone):
    """Of location, scale and truth (or level), in every function."""
    given = [np.array([1.0]), np.array([0.5]), np.array([0.3])]
    given[gone] = np.array([np.nan])
    for score in (crps, cdf, log_score, quantile, lambda *a: cdf(*a, left=True), lambda *a: crps_above(*a, 0.2)):
        assert np.isnan(score(family, *given)).all()
        assert np.isnan(score(family, *(np.append(a, a) for a in given[:2]), np.append(0.0, given[2]))[1])
    assert gone == 2 or np.isnan(log_score(family, *given[:2], np.array([-1.0]))).all()
    if gone != 1:  # a scale of zero is a point
        assert np.isnan(cdf(family, given[0], np.zeros(1), given[2])).all()
    assert gone != 0 or np.isnan(moments(family, given[0], np.zeros(1))[0]).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_quantiles_of_a_point_are_the_point(family):
    location = np.array([2.0, 0.0, -1.0])
    at = np.clip(location, *family.bounds)
    np.testing.assert_array_equal(quantile(family, location, np.zeros(3), np.array([[0.1], [0.9]])), [at, at])
    y = np.array([3.0, 0.4, 0.0])
    expected = np.abs(np.maximum(at, 0.2) - np.maximum(y, 0.2))
    np.testing.assert_allclose(crps_above(family, location, np.zeros(3), y, 0.2), expected)
