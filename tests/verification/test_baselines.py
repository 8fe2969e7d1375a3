"""Baselines find what was put into the data, and are what they are said to be."""

import numpy as np
import pytest
from scipy import stats

from ensemble_ml.fields import Family
from ensemble_ml.grid import Grid
from ensemble_ml.verification import baselines as base
from ensemble_ml.verification.families import moments, quantile
from ensemble_ml.verification.members import crps_members
from ensemble_ml.verification.probability import threshold
from ensemble_ml.verification.statistics import c4, crps, ensemble_moments

GRID = Grid(np.linspace(90, -90, 19), np.arange(0, 360, 12.0))
SHAPE = (1, *GRID.shape)
AREA = GRID.area_weights()


def sample(rng, dates, members=5, bias=0.0, ratio=1.0, flow=0.4):
    """Members N(0, sigma^2) around a truth N(bias, ratio sigma^2), sigma changing from date to date."""
    sigma = np.exp(flow * rng.normal(size=(dates, *SHAPE)))
    x = sigma * rng.normal(size=(members, dates, *SHAPE))
    return x, bias + np.sqrt(ratio) * sigma * rng.normal(size=(dates, *SHAPE))


def corrections_of(x, y, **kw):
    sums = base.CellSums.zeros(SHAPE)
    for date in range(len(y)):
        terms = base.error_terms(*ensemble_moments(x[:, date]), y[date])
        sums.record(int(2 * date >= len(y)), terms, np.isfinite(y[date]))
    return base.fit_corrections(sums, AREA, **kw)


def score(correction, x, y):
    found = [crps(Family.NORMAL, *correction(*ensemble_moments(x[:, d])), y[d]) for d in range(len(y))]
    return np.average(np.mean(found, 0)[0], weights=AREA)


def test_coupled_quantiles_stand_in_raw_order():
    members = np.array([[3.0, -1.0], [1.0, 0.0], [2.0, 5.0]])
    found = base.couple(members, np.array([10.0, 20.0]), np.array([2.0, 1.0]))
    wanted = stats.norm.ppf([1 / 6, 0.5, 5 / 6])
    np.testing.assert_allclose(found[:, 0], 10 + 2 * wanted[[2, 0, 1]])
    np.testing.assert_allclose(found[:, 1], 20 + wanted)
    with pytest.raises(ValueError, match="two or more"):
        base.couple(members[:1], np.zeros(2), np.ones(2))


@pytest.mark.parametrize("family", [Family.NORMAL, Family.CENSORED_NORMAL, Family.DOUBLY_CENSORED_NORMAL])
@pytest.mark.parametrize("members", [5, 10])
def test_coupled_members_are_scored_best_and_keep_the_mean(members, family):
    """Against quantiles at i / (M + 1), by the ordinary CRPS that they are scored with."""
    rng, location = np.random.default_rng(0), np.full(40_000, -0.7)
    one, raw = np.ones_like(location), rng.random((members, location.size))
    y, coupled = quantile(family, location, one, rng.random(location.size)), base.couple(raw, location, one, family)
    levels = np.arange(1, members + 1)[:, None] / (members + 1)
    narrow = quantile(family, location, one, levels)
    best, other = (crps_members(x, y, fair=False).mean() for x in (coupled, narrow))
    assert best < 0.995 * other
    expected = moments(family, location, one)[0]
    assert abs(coupled.mean(0) - expected).max() <= 0.5 * abs(narrow.mean(0) - expected).max() + 1e-12


def test_coupled_members_of_a_censored_law_are_never_negative_and_keep_ranks():
    members = np.random.default_rng(0).random((7, 30))
    found = base.couple(members, np.zeros(30), np.ones(30), Family.CENSORED_NORMAL)
    assert (found >= 0).all() and (found == 0).any()
    assert (np.diff(np.take_along_axis(found, members.argsort(0), 0), axis=0) >= 0).all()


def test_bias_and_inflation_are_found():
    rng = np.random.default_rng(0)
    x, y = sample(rng, 400, bias=1.5, ratio=2.0)
    found = corrections_of(x, y)
    for name in base.CORRECTIONS:
        np.testing.assert_allclose(found[name].bias.mean(), 1.5, atol=0.01)
    # The mean of M members errs by sigma^2 / M beside the truth's own variance.
    assert np.average(found["global"].slope[0], weights=AREA) == pytest.approx(2 + 1 / 5, rel=0.03)
    assert (found["global"].constant == 0).all() and (found["local_constant"].slope == 0).all()
    np.testing.assert_allclose(found["global"].bias, found["global"].bias.flat[0])


def test_the_local_fit_is_the_textbook_one():
    rng = np.random.default_rng(1)
    x, y = sample(rng, 7)
    mean, variance = zip(*(ensemble_moments(x[:, d]) for d in range(7)), strict=True)
    found, error = corrections_of(x, y)["local"], y - np.array(mean)
    np.testing.assert_allclose(found.bias, error.mean(0), atol=1e-12)
    np.testing.assert_allclose(found.slope, error.var(0, ddof=1) * (1 + 1 / 7) / np.mean(variance, 0), rtol=1e-10)


def test_shrinkage_goes_where_the_signal_is():
    rng = np.random.default_rng(2)
    pattern = rng.normal(size=SHAPE)
    x, y = sample(rng, 12, bias=0.0)
    none, strong = corrections_of(x, y), corrections_of(x, y + 5 * pattern)
    assert none["shrunk"].bias.std() < 0.4 * none["local"].bias.std()
    np.testing.assert_allclose(strong["shrunk"].bias, strong["local"].bias, atol=0.2)
    test_x, test_y = sample(rng, 60)
    scores = {name: score(none[name], test_x, test_y) for name in base.CORRECTIONS}
    assert scores["shrunk"] < scores["local"] and scores["blend"] <= scores["shrunk"] * 1.002


def test_shrunk_ratios_keep_the_mean_variance():
    """Drawn together on a log scale they would lose it: the mean of exponentials is not that of their logarithms."""
    rng = np.random.default_rng(12)
    x, y = sample(rng, 6, flow=0.0)
    found = corrections_of(x, y)
    s = np.mean([ensemble_moments(x[:, d])[1] for d in range(6)], 0)
    variance = {name: np.average((found[name].slope * s)[0], weights=AREA) for name in ("local", "shrunk")}
    assert found["shrunk"].slope.std() < 0.5 * found["local"].slope.std()
    kept = bias_kept(found).max()  # its uncertainty is in the ratio, too
    assert kept < 0.1
    assert variance["shrunk"] * (1 + 1 / 6) / variance["local"] == pytest.approx(1, abs=kept / 6 + 1e-9)


def test_the_uncertainty_of_a_bias_counts_as_far_as_it_is_kept():
    """A bias that is not taken over adds no variance; one that is adds v / n."""
    rng = np.random.default_rng(13)
    pattern = rng.normal(size=SHAPE)
    x, y = sample(rng, 6, flow=0.0)
    none, strong = corrections_of(x, y), corrections_of(x, y + 50 * pattern)
    for name in ("shrunk", "blend"):
        total = lambda c: c.slope + c.constant  # noqa: E731 - of a spread of one
        one, other = total(none[name]), total(strong[name])
        np.testing.assert_allclose(other.mean() / one.mean(), 1 + 1 / 6, rtol=0.05)


def bias_kept(found):
    """Share of each cell's own departure from the mean bias that shrinkage keeps."""
    centre = found["global"].bias
    return (found["shrunk"].bias - centre) / (found["local"].bias - centre)


def test_a_lasting_error_is_not_taken_for_a_bias():
    """Errors that persist through half of the dates look like a bias to a standard error of independent dates."""
    rng = np.random.default_rng(3)
    x, y = sample(rng, 40)
    y[:20] += rng.normal(size=SHAPE)
    y[20:] += rng.normal(size=SHAPE)
    found = corrections_of(x, y)
    assert found["shrunk"].bias.std() < 0.4 * found["local"].bias.std()


@pytest.mark.parametrize(("flow", "low", "high"), [(0.0, 0.0, 0.05), (1.0, 0.5, 1.0)])
def test_the_share_of_the_flow_is_fitted(flow, low, high):
    x, y = sample(np.random.default_rng(4), 150, members=10, flow=flow)
    blend, shrunk = (corrections_of(x, y)[name] for name in ("blend", "shrunk"))
    assert low <= (blend.slope / shrunk.slope).mean() <= high


def test_gaps_and_cells_without_spread():
    rng = np.random.default_rng(5)
    x, y = sample(rng, 10)
    y[:, 0, 2] = np.nan  # no truth in a row
    x[:, :, 0, 4] = 0.0  # all members the same
    found = corrections_of(x, y)
    for correction in found.values():
        location, scale = correction(*ensemble_moments(x[:, 0]))
        assert np.isfinite(location).all() and np.isfinite(scale).all()
        others = np.delete(scale[0], 4, axis=0)
        assert (others > 0).all() and others.max() < 40 * np.median(others)
    x[:, :, 0, 4] = rng.normal(size=x[:, :, 0, 4].shape)
    sums = base.CellSums.zeros(SHAPE)
    for date in range(10):
        sums.record(date // 5, {"y": 280 + y[date], "yy": (280 + y[date]) ** 2}, np.isfinite(y[date]))
    assert np.isnan(base.fit_climatology(sums)[1][0, 2]).all()
    mean, deviation = base.everywhere(*base.fit_climatology(sums))
    np.testing.assert_allclose(mean[0, 2], np.delete(mean[0], 2, axis=0).mean())
    assert (deviation[0, 2] > np.median(deviation)).all()  # a place of which nothing is known may be like any other
    np.testing.assert_allclose(found["local"].bias[0, 2], found["global"].bias[0, 2])
    assert (found["local"].constant[0, 4] > 0).all()


def test_a_cell_that_never_varies_is_known():
    """No rain in a desert, the same ice every day: unlike a cell that no fit date knows."""
    y = np.random.default_rng(10).normal(5, 2, size=(12, *SHAPE))
    y[:, 0, 3], y[:, 0, 2] = 0.0, np.nan
    y[:, 0, 4] = ice = np.linspace(0.1, 300, SHAPE[2])  # whose sums round
    y[:, 0, 6:] += 40  # cells that differ
    sums = base.CellSums.zeros(SHAPE)
    for date in range(12):
        sums.record(date % 2, {"y": y[date], "yy": y[date] ** 2}, np.isfinite(y[date]))
    mean, deviation = base.everywhere(*base.fit_climatology(sums))
    assert not mean[0, 3].any() and not deviation[0, 3:5].any()
    np.testing.assert_allclose(mean[0, 4], ice)
    limit = threshold(mean, deviation)
    assert not (y[:, 0, 3:5] > limit[0, 3:5]).any() and (limit[0, 3] < 1e-6).all()
    others = np.delete(y[:, 0], 2, axis=1)  # a place of which nothing is known has what lies between places, too
    np.testing.assert_allclose(deviation[0, 2], others.std(), rtol=0.02)
    assert deviation[0, 2, 0] > 20


def test_one_member_takes_its_spread_from_climate():
    x, y = sample(np.random.default_rng(6), 50, members=1, flow=0.0)
    found = corrections_of(x, y, clim_variance=np.ones(SHAPE))
    _, scale = found["global"](*ensemble_moments(x[:, 0]))
    np.testing.assert_allclose(scale, np.sqrt(2), rtol=0.02)


def test_sums_add_up():
    rng = np.random.default_rng(7)
    x, y = sample(rng, 6)
    parts = [base.CellSums.zeros(SHAPE) for _ in range(3)]
    for date in range(6):
        terms = base.error_terms(*ensemble_moments(x[:, date]), y[date])
        for sums in (parts[0], parts[1 + date % 2]):
            sums.record(int(date >= 3), terms, np.ones(SHAPE, bool))
    whole, both = base.fit_corrections(parts[0], AREA), base.fit_corrections(parts[1] + parts[2], AREA)
    np.testing.assert_allclose(both["blend"].slope, whole["blend"].slope, rtol=1e-10)


def spread_sums(rng, dates=60, members=10, given=5):
    sums, rows = base.CellSums.zeros(SHAPE), []
    local = np.exp(0.5 * rng.normal(size=SHAPE))
    for date in range(dates):
        x = local * np.exp(0.3 * rng.normal(size=SHAPE)) * rng.normal(size=(members, *SHAPE))
        s, f, h = (np.sqrt(ensemble_moments(part)[1]) for part in (x[:given], x, x[given:]))
        sums.record(int(2 * date >= dates), base.spread_terms(s, f, h), np.ones(SHAPE, bool))
        rows.append((s, f, h))
    return sums, np.array(rows)


@pytest.mark.parametrize("dates", [2, 3, 60])
@pytest.mark.parametrize(("target", "position"), [("f", 1), ("h", 2)])
def test_spread_regression_is_weighted_least_squares_with_the_mean_of_the_other_dates(target, position, dates):
    sums, rows = spread_sums(np.random.default_rng(8), dates)
    found = base.fit_spread(sums, AREA, target)
    np.testing.assert_allclose(found.climate, rows[:, 1].mean(0), rtol=1e-12)
    s, y = rows[:, 0].ravel(), rows[:, position].ravel()
    root = np.sqrt(np.broadcast_to(AREA, rows[:, 0].shape).ravel())
    climate = np.ravel([np.delete(rows[:, 1], date, 0).mean(0) for date in range(dates)])
    expected = np.linalg.lstsq(root[:, None] * np.stack([np.ones_like(s), s, climate], 1), root * y)[0]
    np.testing.assert_allclose(found.coefficients[0], expected, atol=1e-8)


def test_spread_regression_has_no_fit_by_one_date():
    """Neither at a cell, which has the mean of the others then, nor at a level."""
    _, rows = spread_sums(np.random.default_rng(14), 4)
    sums = base.CellSums.zeros((2, *GRID.shape))
    for date, (s, f, _) in enumerate(rows):
        mask = np.ones((2, *GRID.shape), bool)
        mask[0, 3], mask[1] = date == 0, date == 0
        sums.record(0, base.spread_terms(np.repeat(s, 2, 0), np.repeat(f, 2, 0), None), mask)
    found = base.fit_spread(sums, AREA)
    assert np.isnan(found.climate[1]).all() and np.isnan(found(np.ones((2, *GRID.shape)))[1]).all()
    others, weights = np.delete(rows[:, :2, 0], 3, axis=2), np.delete(AREA, 3, axis=0)
    known = others[:, 1].mean(0)
    np.testing.assert_allclose(np.delete(found.climate[0], 3, axis=0), known)
    np.testing.assert_allclose(found.climate[0, 3], np.average(known, weights=weights))
    climate = np.ravel([np.delete(others[:, 1], date, 0).mean(0) for date in range(4)])
    s, f, root = others[:, 0].ravel(), others[:, 1].ravel(), np.sqrt(np.tile(weights.ravel(), 4))
    expected = np.linalg.lstsq(root[:, None] * np.stack([np.ones_like(s), s, climate], 1), root * f)[0]
    np.testing.assert_allclose(found.coefficients[0], expected, atol=1e-8)


def test_spread_regression_survives_a_constant_predictor():
    sums = base.CellSums.zeros(SHAPE)
    for _ in range(3):
        sums.record(0, base.spread_terms(np.full(SHAPE, np.nan), np.full(SHAPE, 2.0), None), np.ones(SHAPE, bool))
    np.testing.assert_allclose(base.fit_spread(sums, AREA)(np.full(SHAPE, np.nan)), 2.0, rtol=1e-8)


@pytest.mark.parametrize("members, full", [(1, 10), (2, 5), (5, 10), (8, 11)])
def test_the_rest_of_an_ensemble_has_what_the_given_ones_leave(members, full):
    """A perfect forecast's S, the mean among draws with nearly the same s, tells of the others as of one law."""
    draws = 3.0 + 2.0 * np.random.default_rng(1).normal(size=(full, 400_000))
    given = draws[:members]
    s = given.std(0, ddof=1) if members > 1 else np.zeros(draws.shape[1])
    order = np.argsort(s).reshape(200, -1)
    expected = np.empty(draws.shape[1])
    expected[order] = draws.std(0, ddof=1)[order].mean(1, keepdims=True)
    found = base.spread_of_the_rest(expected, given, full)
    usual = (s > np.quantile(s, 0.1)) & (s < np.quantile(s, 0.9)) if members > 1 else slice(None)
    assert found.mean() == pytest.approx(2.0 * c4(full), rel=0.01)
    np.testing.assert_allclose(found[usual], 2.0 * c4(full), rtol=0.04)
    if members > 1:  # as it is, it follows the given ones' chance
        assert np.ptp(expected[usual]) > 3 * np.ptp(found[usual])


def test_the_rest_of_an_ensemble_is_not_nothing():
    far = np.array([[-9.0], [9.0]])
    assert base.spread_of_the_rest(np.array([1.0]), far, 10) == 0.5


def test_size_correction_and_climatology():
    assert base.size_corrected(np.array(1.0), 5, 10) == pytest.approx(c4(10) / c4(5))
    y = np.random.default_rng(9).normal(3, 2, size=(9, *SHAPE))
    sums = base.CellSums.zeros(SHAPE)
    for date in range(9):
        sums.record(0, {"y": y[date], "yy": y[date] ** 2}, np.ones(SHAPE, bool))
    mean, scale = base.fit_climatology(sums)
    np.testing.assert_allclose(mean, y.mean(0))
    np.testing.assert_allclose(scale, np.sqrt(y.var(0, ddof=1) * (1 + 1 / 9)))
