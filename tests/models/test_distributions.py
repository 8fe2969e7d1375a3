"""Closed forms against scoringrules, quadrature, finite differences and brute-force samples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scoringrules
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from ensemble_ml.distributions import cdf, crps, location_of_mean, moments, quantile, widen
from ensemble_ml.fields import GAMMA_SHIFT, Family

NORMAL, TRUNCATED, CENSORED = Family.NORMAL, Family.TRUNCATED_NORMAL, Family.CENSORED_NORMAL
LOGNORMAL, GAMMA, DOUBLY = Family.LOGNORMAL, Family.CENSORED_SHIFTED_GAMMA, Family.DOUBLY_CENSORED_NORMAL
FAMILIES = list(Family)
F64 = torch.float64


def table():
    """Locations from far below zero to far above, observations from zero to the far tail."""
    mu, sigma, y = np.meshgrid([-6.0, -2.0, -0.5, 0.0, 0.7, 3.0, 20.0], [0.3, 1.0, 2.5], [0.0, 0.01, 0.8, 4.0, 25.0])
    return mu.ravel(), sigma.ravel(), y.ravel()


def skewed_parameters(family, mu, sigma):
    """Shape and scale from mean and standard deviation before censoring; and how far the law is moved down."""
    shift = GAMMA_SHIFT if family is GAMMA else 0.0
    mean = sigma * np.log1p(np.exp(2 * np.maximum(mu / sigma + shift, -8))) / 2
    if family is GAMMA:
        return ((mean / sigma) ** 2, sigma**2 / mean), shift * sigma
    log_variance = np.log1p((sigma / mean) ** 2)
    return (np.sqrt(log_variance), mean * np.exp(-log_variance / 2)), 0.0


def skewed(family, mu, sigma):
    """The law as scipy has it, and how far it is moved down."""
    (shape, scale), shift = skewed_parameters(family, mu, sigma)
    return (stats.gamma if family is GAMMA else stats.lognorm)(shape, scale=scale), shift


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_is_scipys_law(family):
    for mu, sigma, x in ((-3.0, 1.0, 0.3), (0.4, 0.5, 0.7), (2.0, 1.5, 4.0)):
        if family in (LOGNORMAL, GAMMA):
            law, shift = skewed(family, mu, sigma)
            wanted = law.sf(x + shift)
        elif family is TRUNCATED:
            wanted = stats.truncnorm(-mu / sigma, np.inf, mu, sigma).sf(x)
        else:
            wanted = 0.0 if family is DOUBLY and x >= 1 else stats.norm(mu, sigma).sf(x)
        assert sf(family, mu, sigma, x) == pytest.approx(wanted, rel=1e-12)


def oracle(family, mu, sigma, y):
    if family in (LOGNORMAL, GAMMA):
        law, shift = skewed(family, mu, sigma)
        if family is GAMMA:
            return scoringrules.crps_csg0(y, law.args[0], 1 / law.kwds["scale"], shift=shift)
        with np.errstate(divide="ignore"):
            return scoringrules.crps_lognormal(np.maximum(y, 1e-300), np.log(law.kwds["scale"]), law.args[0])
    if family is NORMAL:
        return scoringrules.crps_normal(y, mu, sigma)
    if family is DOUBLY:
        with np.errstate(all="ignore"):
            found = scoringrules.crps_cnormal(np.minimum(y, 1), mu, sigma, 0, 1) + np.maximum(y - 1, 0)
        # It has no value where a bound has all the mass, which is a point forecast.
        return np.where(np.isnan(found), np.abs(y - np.clip(mu, 0, 1)), found)
    masses = {"lmass": stats.norm.cdf(-mu / sigma)} if family is CENSORED else {}
    with np.errstate(all="ignore"):  # it divides by the mass above zero, be that zero
        return scoringrules.crps_gtcnormal(y, mu, sigma, lower=np.zeros_like(mu), **masses)


def sf(family, mu, sigma, x):
    """The probability beyond x, by what scipy's laws call: a quadrature calls it too often for the laws themselves."""
    if family is DOUBLY and x >= 1:
        return 0.0
    if family is TRUNCATED:
        return np.exp(special.log_ndtr((mu - x) / sigma) - special.log_ndtr(mu / sigma))
    if family not in (LOGNORMAL, GAMMA):
        return special.ndtr((mu - x) / sigma)
    law, shift = skewed_parameters(family, mu, sigma)
    shape, scale = law
    if family is GAMMA:
        return special.gammaincc(shape, (x + shift) / scale)
    return special.ndtr(-np.log(x / scale) / shape) if x > 0 else 1.0


def quadrature(family, mu, sigma, y):
    low = mu - 12 * sigma if family is NORMAL else 0.0
    top = max(y, mu, 0) + (12 if family not in (LOGNORMAL, GAMMA) else 60) * sigma
    breaks = [x for x in (mu, family.bounds[1]) if low < x < y]
    exact = {"epsabs": 1e-11, "limit": 400}
    below = integrate.quad(lambda x: (1 - sf(family, mu, sigma, x)) ** 2, low, y, points=breaks or None, **exact)[0]
    top = min(top, max(y, family.bounds[1]))
    above = integrate.quad(lambda x: sf(family, mu, sigma, x) ** 2, y, top, **exact)[0]
    return below + above


@pytest.mark.parametrize("family", FAMILIES)
def test_crps_equals_scoringrules(family):
    mu, sigma, y = table()
    near = mu / sigma > -5  # beyond, the oracle loses its digits to a vanishing mass; quadrature holds us there
    ours = crps(family, *(torch.tensor(v, dtype=F64) for v in (mu, sigma, y))).numpy()
    np.testing.assert_allclose(ours[near], oracle(family, mu, sigma, y)[near], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25)
@given(mu=st.floats(-15, 15), sigma=st.floats(0.2, 4), y=st.floats(0, 20))
@example(mu=13.0, sigma=0.25, y=7.0)
@example(mu=15.0, sigma=0.2, y=14.9)
def test_crps_equals_quadrature(family, mu, sigma, y):
    ours = crps(family, *(torch.tensor(v, dtype=F64) for v in (mu, sigma, y))).item()
    assert ours == pytest.approx(quadrature(family, mu, sigma, y), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_function(family):
    mu, sigma, y = (torch.tensor(v, dtype=F64) for v in table())
    leaves = mu.requires_grad_(), sigma.requires_grad_()
    assert torch.autograd.gradcheck(lambda m, s: crps(family, m, s, y), leaves, atol=1e-6)


def between():
    """Locations far outside zero and one, scales that leave a point or a straight line between them."""
    locations = [-1e3, -30.0, -2.0, -0.1, 0.0, 0.3, 0.5, 1.0, 1.2, 5.0, 30.0, 1e3]
    return [v.ravel() for v in np.meshgrid(locations, np.geomspace(1e-3, 1e2, 6), [0.0, 0.2, 0.5, 1.0])]


def test_crps_between_two_bounds_equals_scoringrules():
    mu, sigma, y = between()
    for dtype in (F64, torch.float32):
        ours = crps(DOUBLY, *(torch.tensor(v, dtype=dtype) for v in (mu, sigma, y)))
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, oracle(DOUBLY, mu, sigma, y), rtol=0, atol=1e-6)


def phi(w):
    return math.exp(-w * w / 2) / math.sqrt(2 * math.pi)


def test_gradients_between_two_bounds_equal_quadrature():
    mu, sigma, y = between()
    leaves = [torch.tensor(v, dtype=torch.float32).requires_grad_() for v in (mu, sigma)]
    crps(DOUBLY, *leaves, torch.tensor(y, dtype=torch.float32)).sum().backward()
    cdf_ = special.ndtr
    for at, (m, s, x) in enumerate(zip(mu, sigma, y, strict=True)):
        edges = np.clip([-m / s, (x - m) / s, (1 - m) / s], -12, 12)  # the density ends there
        for leaf, power in zip(leaves, (0, 1), strict=True):
            below = integrate.quad(lambda w, n=power: -2 * cdf_(w) * phi(w) * w**n, *edges[:2])[0]
            above = integrate.quad(lambda w, n=power: 2 * cdf_(-w) * phi(w) * w**n, *edges[1:])[0]
            assert leaf.grad[at].item() == pytest.approx(below + above, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_keeps_its_digits(family):
    mu, sigma, y = table()
    wide = crps(family, *(torch.tensor(v, dtype=F64) for v in (mu, sigma, y)))
    narrow = crps(family, *(torch.tensor(v, dtype=torch.float32) for v in (mu, sigma, y)))
    scale = torch.tensor(np.maximum(np.abs(mu), y) + sigma)
    assert ((narrow.double() - wide).abs() / scale).max() < 1e-6


def test_float32_keeps_the_truncated_law_and_its_slopes_far_below_zero():
    laws = [(-0.5, 1.0), (-3.0, 1.0), (-8.0, 1.0), (-20.0, 1.0), (-40.0, 1.0), (-20.0, 0.05), (-60.0, 0.4)]
    given = torch.tensor([(mu, sigma, y) for mu, sigma in laws for y in (0.0, 0.01, 0.05, 0.8)]).T
    found = []
    for dtype in (torch.float32, F64):
        mu, sigma, y = (v.to(dtype) for v in given)
        leaves = mu.requires_grad_(), sigma.requires_grad_()
        score = crps(TRUNCATED, *leaves, y)
        assert score.dtype == dtype
        found.append((score.detach(), *torch.autograd.grad(score.sum(), leaves)))
    for narrow, wide, error in zip(*found, (1e-8, 1e-8, 2e-6), strict=True):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=error)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_stay_finite_in_far_tails(family):
    mu = torch.tensor([-1e6, -1e3, -40.0, -12.0, 0.0, 12.0, 1e3, 1e6, 0.0, 0.0]).requires_grad_()
    sigma = torch.tensor([1.0, 1.0, 1.0, 1.0, 1e-8, 1.0, 1e-6, 1.0, 1e8, 1.0]).requires_grad_()
    y = torch.tensor([0.0, 5.0, 0.0, 30.0, 1.0, 0.0, 2.0, 0.0, 0.0, 1e6])
    score = crps(family, mu, sigma, y)
    score.sum().backward()
    assert torch.isfinite(score).all() and torch.isfinite(mu.grad).all() and torch.isfinite(sigma.grad).all()
    assert (score > -1e-3 * (1 + mu.detach().abs() * 1e-3)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_crps_of_many_samples(family):
    generator = np.random.default_rng(0)
    samples = torch.from_numpy(generator.uniform(1e-6, 1 - 1e-6, 200_000))
    values = quantile(family, torch.tensor(0.4, dtype=F64), torch.tensor(1.3, dtype=F64), samples).sort().values
    ranks = 2 * torch.arange(1, len(values) + 1) - len(values) - 1
    brute = (values - 1.1).abs().mean() - (ranks * values).sum() / len(values) ** 2
    exact = crps(family, *(torch.tensor(v, dtype=F64) for v in (0.4, 1.3, 1.1)))
    assert brute.item() == pytest.approx(exact.item(), abs=5e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mu", [-60.0, -43.0, -30.0, -20.0, -13.0, -9.0, -1.0, 0.0, 2.0, 30.0])
def test_quantile_inverts_cdf(family, mu):
    location, scale = torch.tensor(mu, dtype=F64), torch.tensor(1.5, dtype=F64)
    levels = torch.tensor([0.001, 0.1, 0.5, 0.9, 0.999], dtype=F64)
    found = quantile(family, location, scale, levels)
    back = cdf(family, location, scale, found)
    lower, upper = family.bounds
    inside = (found > lower) & (found < upper) if family in (CENSORED, GAMMA, DOUBLY) else found > -torch.inf
    torch.testing.assert_close(back[inside], levels[inside], rtol=1e-3 if mu < -45 else 1e-7, atol=1e-9)
    assert (back[~inside] >= levels[~inside]).all()


@pytest.mark.parametrize("mu", [-29.0, -31.0, -50.0, -300.0])
@pytest.mark.parametrize("level", [0.1, 0.9, 0.999999])
def test_quantiles_of_a_truncated_normal_far_in_its_tail(mu, level):
    """Where probabilities are too small for floating numbers, their logarithms are not."""
    found = quantile(TRUNCATED, torch.tensor(mu, dtype=F64), torch.tensor(1.0, dtype=F64), level).item()
    beyond = stats.norm.logsf(found - mu) - stats.norm.logsf(-mu)
    assert beyond == pytest.approx(np.log1p(-level), rel=3e-3, abs=3e-3)


def test_cdf_counts_the_censored_mass():
    zero, one = torch.zeros(()), torch.ones(())
    assert cdf(CENSORED, zero, one, zero).item() == pytest.approx(0.5)
    assert cdf(CENSORED, zero, one, -one).item() == 0
    assert cdf(TRUNCATED, zero, one, zero).item() == 0
    assert cdf(DOUBLY, zero, one, zero).item() == pytest.approx(0.5)
    at = torch.tensor([-1e-6, 1 - 1e-6, 1.0, 2.0])
    assert cdf(DOUBLY, zero, one, at).tolist() == pytest.approx([0, stats.norm.cdf(1), 1, 1], abs=1e-6)
    assert cdf(DOUBLY, zero + 50, one, at).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("y", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_cdf_of_what_is_missing_is_missing(family, y):
    """Also beyond a bound, where every distribution of the family has the same value: 0 or 1 would be a forecast."""
    for lacking in range(3):
        them = [torch.tensor(math.nan if place == lacking else value) for place, value in enumerate((0.3, 0.5, y))]
        assert cdf(family, *them).isnan()


@pytest.mark.parametrize("family", FAMILIES)
def test_values_lie_between_the_bounds(family):
    location, scale = torch.meshgrid(torch.linspace(-5, 5, 41), torch.logspace(-3, 2, 11), indexing="ij")
    lower, upper = family.bounds
    for found in (moments(family, location, scale)[0], *(quantile(family, location, scale, p) for p in (0.001, 0.999))):
        assert (found >= lower).all() and (found <= upper).all()
    outside = torch.tensor([x for x in (-0.1, 1.0, 1.1) if not lower <= x < upper])
    found = cdf(family, location[..., None], scale[..., None], outside)
    assert torch.equal(found, (outside > 0).float().expand_as(found))


@pytest.mark.parametrize("mu", [-80.0, -31.0, -29.0, -5.0, -0.3, 0.0, 1.0, 8.0])
def test_moments(mu):
    location, scale = torch.tensor(mu, dtype=F64), torch.tensor(1.0, dtype=F64)
    mean, deviation = moments(TRUNCATED, location, scale)
    if mu > -8:
        exact = stats.truncnorm(-mu, np.inf, loc=mu)
        assert (mean.item(), deviation.item()) == pytest.approx((exact.mean(), exact.std()), rel=1e-7)
    else:
        assert mean.item() == pytest.approx(-1 / mu, rel=0.1) and deviation.item() == pytest.approx(-1 / mu, rel=0.1)
    mean, deviation = moments(CENSORED, location, scale)
    first = integrate.quad(lambda x: stats.norm.sf(x - mu), 0, max(mu, 0) + 12)[0]
    second = integrate.quad(lambda x: 2 * x * stats.norm.sf(x - mu), 0, max(mu, 0) + 12)[0]
    assert (mean.item(), deviation.item()) == pytest.approx((first, np.sqrt(second - first**2)), abs=1e-7)


@pytest.mark.parametrize("l", [4.0, 29.0, 31.0, 99.0, 101.0, 1e4])
def test_moments_of_the_truncated_law_far_below_zero(l):
    """Its density falls as exp(-l x - x^2 / 2)."""
    powers = [integrate.quad(lambda t, p=p: t**p * np.exp(-t - (t / l) ** 2 / 2), 0, 60)[0] / l**p for p in range(3)]
    mean, square = powers[1] / powers[0], powers[2] / powers[0]
    found = moments(TRUNCATED, torch.tensor(-l, dtype=F64), torch.ones((), dtype=F64))
    assert [v.item() for v in found] == pytest.approx([mean, np.sqrt(square - mean**2)], rel=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 0.05, 0.4, 2.0, 100.0])
@pytest.mark.parametrize("x", [-30.0, -3.0, 0.0, 1.0, 30.0])
def test_moments_and_location_between_two_bounds(x, scale):
    """`x` counts scales from the bound that is nearer; the law seen from above is the law from below."""
    location = min(x * scale, 0.5)
    tail = lambda t: stats.norm.sf((t - location) / scale)  # noqa: E731
    points = np.unique(np.clip(np.append(np.linspace(0, 1, 11), location + scale * np.arange(-9, 10)), 0, 1))
    whole = lambda f: sum(integrate.quad(f, a, b, epsabs=1e-14)[0] for a, b in itertools.pairwise(points))  # noqa: E731
    expected = whole(tail)
    deviation = np.sqrt(max(whole(lambda t: 2 * t * tail(t)) - expected**2, 0))
    law = torch.tensor([location, 1 - location], dtype=F64), torch.full((2,), scale, dtype=F64)
    found = moments(DOUBLY, *law)
    np.testing.assert_allclose(found[0], [expected, 1 - expected], rtol=0, atol=1e-9)
    np.testing.assert_allclose(found[1], deviation, rtol=1e-6, atol=1e-7)
    if x > -4:
        torch.testing.assert_close(location_of_mean(DOUBLY, *(found[0], law[1])), law[0], rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_location_of_mean_gives_that_mean(family):
    mean, scale = torch.tensor([0.4, 1.0, 3.0, 7.0, 500.0]), torch.tensor([1.0, 1.0, 1.5, 0.5, 2.0])
    mean = mean / (1 + mean) if family is DOUBLY else mean
    found = moments(family, location_of_mean(family, mean, scale), scale)[0]
    torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_truncated_law_is_given_a_mean_near_zero(dtype):
    mean = torch.cat([torch.logspace(-0.99, 1, 300, dtype=dtype), torch.tensor([0.05, 0.0, -3.0], dtype=dtype)])
    scale = torch.full_like(mean, 0.7)
    found = moments(TRUNCATED, location_of_mean(TRUNCATED, scale * mean, scale), scale)[0]
    torch.testing.assert_close(found, scale * mean.clamp(min=0.1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("width", [0.5, 1.4, 3.0])
def test_a_wider_truncated_law_keeps_its_mean_however_near_zero(width):
    location, scale = -torch.logspace(-2, 4, 61), torch.full((61,), 0.3)
    mean, deviation = moments(TRUNCATED, location, scale)
    mean2, deviation2 = moments(TRUNCATED, *widen(TRUNCATED, location, scale, torch.tensor(width)))
    torch.testing.assert_close(mean2, mean, rtol=1e-4, atol=0)
    near = location > -20 * scale  # beyond, the deviation is the mean
    assert ((deviation2 - deviation)[near].sign() == np.sign(width - 1)).all()


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("width", [0.5, 0.8, 1.4])
def test_a_wider_law_keeps_its_mean(family, width):
    location, scale = torch.linspace(-2, 9, 23).double() * 3, torch.full((23,), 3.0).double()
    if family is DOUBLY:
        location, scale = location / 27, scale / 10
    mean, deviation = moments(family, location, scale)
    mean2, deviation2 = moments(family, *widen(family, location, scale, torch.tensor(width).double()))
    torch.testing.assert_close(mean2, mean, atol=1e-4, rtol=1e-4)
    assert ((deviation2 - deviation).sign() == np.sign(width - 1)).all()
    if family in (Family.NORMAL, Family.LOGNORMAL, Family.CENSORED_SHIFTED_GAMMA):
        torch.testing.assert_close(deviation2, width * deviation, rtol=0.1, atol=0)


def test_a_wider_law_of_next_to_nothing_stays_there():
    location, scale = torch.tensor([-40.0]), torch.tensor([2.0])
    assert (
        moments(Family.CENSORED_SHIFTED_GAMMA, *widen(Family.CENSORED_SHIFTED_GAMMA, location, scale, scale))[0] < 1e-4
    )


def test_a_wider_law_of_next_to_all_stays_there():
    """Overcast is as clear sky, seen from above."""
    location, scale, width = torch.tensor([-3.0, -0.1, 0.4]).double(), torch.full((3,), 0.2).double(), torch.tensor(1.5)
    wider, mirrored = widen(DOUBLY, location, scale, width)[0], widen(DOUBLY, 1 - location, scale, width)[0]
    torch.testing.assert_close(1 - mirrored, wider)
    assert wider[0] == -4.5 and moments(DOUBLY, 1 - wider, scale * width)[0][0] > 0.9999


def test_moments_of_the_skewed_laws_are_those_of_the_textbook():
    mu, sigma = torch.tensor(0.7, dtype=F64), torch.tensor(0.4, dtype=F64)
    law, _ = skewed(LOGNORMAL, mu.numpy(), sigma.numpy())
    assert moments(LOGNORMAL, mu, sigma)[1].item() == pytest.approx(law.std())
    law, shift = skewed(GAMMA, mu.numpy(), sigma.numpy())
    tail = [integrate.quad(lambda x, p=p: p * x ** (p - 1) * law.sf(x + shift), 0, 30)[0] for p in (1, 2)]
    mean, deviation = moments(GAMMA, mu, sigma)
    assert (mean.item(), deviation.item()) == pytest.approx((tail[0], np.sqrt(tail[1] - tail[0] ** 2)), rel=1e-7)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family is not NORMAL])
def test_location_of_mean_has_the_slopes_of_its_own_values(family):
    """By mean and by scale, as the values a step away have them, near a bound and far from it."""
    mean, scale = (values.ravel() for values in np.meshgrid([0.05, 0.2, 0.35, 0.6, 0.85], [0.12, 0.3, 0.7]))
    given = [torch.from_numpy(values).requires_grad_() for values in (mean, scale)]
    location_of_mean(family, *given).sum().backward()
    for position, values in enumerate(given):
        ways = []
        for step in (-1e-2, 1e-2):  # wider than an entry of the table, whose slope jumps from one to the next
            ways.append(location_of_mean(family, *(g.detach() + step * (g is values) for g in given)))
        slope = (ways[1] - ways[0]) / 2e-2
        torch.testing.assert_close(values.grad, slope, rtol=0.08, atol=0.08, msg=lambda m, p=position: f"{p}: {m}")
