"""EMOS against an independent fit: scipy on the closed form, point by point."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.optimize import minimize
from scoringrules import crps_cnormal, crps_normal

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.models.rivals import Emos, fit_emos
from ensemble_ml.models.rivals.emos import merged

REAL = Path(os.environ.get("ENSEMBLE_ML_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))


def draw(rng, dates, a=0.7, b=0.9, c=0.4, d=1.5, season=0.0):
    """Mean and variance of five members, an observation from the law itself, and one seasonal term."""
    mean = 280 + 8 * rng.standard_normal(dates)
    variance = rng.chisquare(4, dates) / 4 * np.exp(rng.standard_normal(dates) * 0.5)
    term = np.sin(np.arange(dates) * 2 * np.pi / 50)
    centre = a + 280 + b * (mean - 280) + season * term
    return mean, variance, centre + np.sqrt(c + d * variance) * rng.standard_normal(dates), term


def by_scipy(mean, variance, y, term=None, crps=crps_normal):
    """Coefficients a, b, c, d, e of the smallest mean CRPS."""
    middle = mean.mean()
    terms = np.zeros_like(mean) if term is None else term

    def loss(p):
        return crps(y, p[0] + p[1] * (mean - middle) + p[4] * terms, np.sqrt(p[2] ** 2 + p[3] ** 2 * variance)).mean()

    start = [y.mean(), 1.0, 1.0, 1.0, 0.0]
    found = minimize(loss, start, method="BFGS", options={"gtol": 1e-9})
    p = found.x
    return np.array([p[0] - p[1] * middle, p[1], p[2] ** 2, p[3] ** 2, p[4]]), found.fun


def test_parts_of_a_vector_of_points_make_the_whole():
    values = np.arange(14.0)
    whole = Emos(*(torch.tensor(values + 100 * n) for n in range(4)), torch.tensor(np.stack([values, -values], 1)))
    for count in (1, 3, 14):
        slices = [slice(k, None, count) for k in range(count)]
        again = merged([whole.at(points) for points in slices], slices)
        assert all(torch.equal(getattr(again, name), getattr(whole, name)) for name in ("a", "b", "c", "d", "season"))


def of(emos):
    season = emos.season[..., 0] if emos.season.shape[-1] else torch.zeros_like(emos.a)
    return torch.stack([emos.a, emos.b, emos.c, emos.d, season], -1).numpy()


def test_many_points_at_once_are_scipys_fits():
    rng = np.random.default_rng(0)
    laws = [dict(a=a, c=c, season=e) for a, c, e in ((0.7, 0.4, 0.0), (-2.0, 1.5, 1.0), (0.0, 0.2, -0.5))]
    mean, variance, y, term = (np.stack(v) for v in zip(*(draw(rng, 400, **law) for law in laws), strict=True))
    plain, seasonal = fit_emos(mean, variance, y), fit_emos(mean, variance, y, season=term[..., None])
    for point in range(3):
        sample = mean[point], variance[point], y[point]
        for found, (wanted, least) in (
            (plain, by_scipy(*sample)), (seasonal, by_scipy(*sample, term[point])),
        ):  # fmt: skip
            np.testing.assert_allclose(of(found)[point], wanted, rtol=1e-3, atol=1e-3)
            terms = term[point][:, None] if found is seasonal else None
            one = Emos(*(v[point] for v in (found.a, found.b, found.c, found.d, found.season)))
            assert float(one.crps(*sample, terms).mean()) <= least + 1e-9


def test_observations_of_a_temperature_station():
    path = REAL / "gefs_innsbruck_temperature.nc"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    data = xr.open_dataset(path).load()
    data = data.isel(init_time=(data.valid_time.dt.year <= 2010).values)
    for members in (5, 11):
        x, y = data.t2m.values[:, :members], data.observation.values
        sample = x.mean(1), x.var(1, ddof=1), y
        wanted, _ = by_scipy(*sample)
        np.testing.assert_allclose(of(fit_emos(*sample)), wanted, rtol=1e-3, atol=1e-3)


def test_points_of_other_climates_share_coefficients_of_anomalies():
    """One fit of three points that differ in climate alone is scipy's of the anomalies; the climates leave no trace."""
    rng = np.random.default_rng(6)
    mean, variance, y, _ = (np.stack(v) for v in zip(*(draw(rng, 300) for _ in range(3)), strict=True))
    level = np.array([[-40.0], [0.0], [25.0]])
    reference = mean.mean(1, keepdims=True)
    wanted, least = by_scipy((mean - reference).ravel(), variance.ravel(), (y - reference).ravel())
    for away in (0.0, level):
        sample = [np.ravel(v) for v in (mean + away, variance, y + away)]
        there = np.ravel(np.broadcast_to(reference + away, y.shape))
        found = fit_emos(*sample, reference=there)
        np.testing.assert_allclose(of(found), wanted, rtol=1e-3, atol=1e-3)
        assert float(found.crps(*sample, None, there).mean()) == pytest.approx(least, abs=1e-8)
    assert float(fit_emos(*sample).crps(*sample).mean()) > 1.001 * least  # of absolute values


@pytest.mark.parametrize("family", [Family.CENSORED_NORMAL, Family.DOUBLY_CENSORED_NORMAL])
def test_a_censored_law_is_fitted_by_its_own_crps(family):
    rng = np.random.default_rng(1)
    mean = rng.gamma(0.5, 4.0, 600)
    variance = 0.3 * mean + 0.1
    lower, upper = family.bounds
    unit = 1.0 if upper == np.inf else 0.25  # so that a quarter lies at either bound
    y = 0.8 * mean - 0.5 + np.sqrt(0.2 + 1.2 * variance) * rng.standard_normal(600)
    mean, variance, y = unit * mean, unit**2 * variance, np.clip(unit * y, lower, upper)
    found = fit_emos(mean, variance, y, family=family)

    def of_law(y, mu, sigma):
        with np.errstate(all="ignore"):  # it has no value where a bound has all the mass
            score = crps_cnormal(y, mu, sigma, lower=lower, upper=upper)
        return np.where(np.isnan(score), np.abs(y - np.clip(mu, lower, upper)), score)

    wanted, least = by_scipy(mean, variance, y, crps=of_law)
    assert float(found.crps(mean, variance, y).mean()) == pytest.approx(least, abs=1e-8)
    np.testing.assert_allclose(of(found), wanted, rtol=5e-3, atol=5e-3)


def test_weights_and_gaps_leave_samples_out():
    rng = np.random.default_rng(2)
    mean, variance, y, _ = draw(rng, 300)
    kept = rng.random(300) < 0.8
    wanted = of(fit_emos(mean[kept], variance[kept], y[kept]))
    np.testing.assert_allclose(of(fit_emos(mean, variance, y, weights=kept)), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of(fit_emos(mean, variance, np.where(kept, y, np.nan))), wanted, rtol=1e-5, atol=1e-5)


def test_a_prior_draws_as_far_as_its_strength_says():
    rng = np.random.default_rng(3)
    parts = [np.stack(v) for v in zip(*(draw(rng, 40, a=a) for a in (-1.0, 2.0)), strict=True)]
    mean, variance, y = parts[:3]
    whole = fit_emos(mean.ravel(), variance.ravel(), y.ravel())
    free, drawn, bound = (fit_emos(mean, variance, y, prior=whole, strength=s) for s in (0.0, 10.0, 1e9))
    np.testing.assert_allclose(of(bound)[:, 1], np.broadcast_to(of(whole)[1], 2), rtol=1e-4)
    share = of(bound)[:, 3] / of(bound)[:, 2]  # of the two parts of the variance, whose size is the point's own affair
    np.testing.assert_allclose(share, np.broadcast_to(of(whole)[3] / of(whole)[2], 2), rtol=1e-3)
    np.testing.assert_allclose(of(free), of(fit_emos(mean, variance, y)), rtol=1e-3, atol=1e-2)

    def away(e):
        return np.abs(of(e)[:, 1] - of(whole)[1])

    assert np.all(away(drawn) < away(free))


def test_large_biases_are_left_alone_and_noise_is_not():
    rng = np.random.default_rng(5)
    for size, kept in ((30.0, (0.9, 1.1)), (0.0, (-0.1, 0.7))):
        bias = size * rng.standard_normal((50, 1))
        mean, variance = 280 + 8 * rng.standard_normal((50, 40)), np.ones((50, 40))
        y = mean + bias + rng.standard_normal((50, 40))
        whole = Emos(*(torch.tensor(v, dtype=torch.float64) for v in (0.0, 1.0, 1.0, 0.0)), season=torch.zeros(0))
        found = fit_emos(mean, variance, y, prior=whole, strength=1e6)
        measured = (y - mean).mean(1)
        share = np.polyfit(measured, found.a.numpy(), 1)[0]
        assert kept[0] < share < kept[1]


def test_one_member_has_no_variance_to_follow():
    rng = np.random.default_rng(4)
    mean, _, y, _ = draw(rng, 200)
    found = fit_emos(mean, np.zeros(200), y)
    assert float(found.d) == 0 and 0.5 < float(found.c) < 5


def test_what_is_refused():
    with pytest.raises(UserError, match="3 observations for 4 coefficients; fit on more dates"):
        fit_emos(np.arange(3.0), np.ones(3), np.arange(3.0))
    with pytest.raises(UserError, match="they must be equal"):
        fit_emos(np.zeros(5), np.zeros(4), np.zeros(5))


def test_a_point_without_observations_says_nothing_of_the_others():
    rng = np.random.default_rng(9)
    parts = [np.stack(v) for v in zip(*(draw(rng, 40, a=a) for a in rng.normal(0, 2, 20)), strict=True)]
    mean, variance, y = parts[:3]
    prior = fit_emos(*(v.ravel() for v in (mean, variance, y)))
    wanted = fit_emos(mean, variance, y, prior=prior, strength=8.0)
    y[7] = np.nan
    found = fit_emos(mean, variance, y, prior=prior, strength=8.0)
    others = np.arange(20) != 7
    np.testing.assert_allclose(found.a[others], wanted.a[others], atol=0.1)
