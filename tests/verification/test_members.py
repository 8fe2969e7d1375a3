"""Scores of members against pairs by brute force, scoringrules, scores, and what a perfect ensemble must give."""

import numpy as np
import pytest
import scoringrules
import xarray as xr
from scores.probability import tail_tw_crps_for_ensemble

from ensemble_ml.verification.members import (
    crps_members,
    crps_members_weighted,
    energy_score,
    pair_sum,
    rank_of_truth,
    sort_members,
    sorting_network,
    variogram_score,
)
from ensemble_ml.verification.streaming import EnsembleSums, score_members


@pytest.mark.parametrize("n", [1, 2, 3, 5, 10, 11, 31, 64, 70])
def test_members_are_sorted_at_every_point(n):
    x = np.random.default_rng(n).normal(size=(n, 40)).round(1)
    np.testing.assert_array_equal(np.stack(sort_members(x.copy())), np.sort(x, 0))
    brute = sum(abs(x[i] - x[j]) for i in range(n) for j in range(i))
    np.testing.assert_allclose(pair_sum(sort_members(x.copy())), brute + np.zeros(40), atol=1e-12)


def test_the_network_of_ten_is_short():
    assert len(sorting_network(10)) <= 32  # 29 is the least possible


@pytest.mark.parametrize("members", [2, 3, 10])
@pytest.mark.parametrize(("lower", "upper"), [(-np.inf, np.inf), (0.5, np.inf), (-1.0, 0.3)])
def test_threshold_weighted_crps_against_scoringrules(members, lower, upper):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(members, 300)), rng.normal(size=300)
    for fair, estimator in ((True, "fair"), (False, "nrg")):
        peer = scoringrules.twcrps_ensemble(
            y, x, lower, upper, m_axis=0, estimator=estimator, v_func=lambda a: np.clip(a, lower, upper)
        )
        np.testing.assert_allclose(crps_members_weighted(x, y, fair=fair, lower=lower, upper=upper), peer, atol=1e-12)


def test_threshold_weighted_crps_against_scores():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(10, 200)), rng.normal(size=200)
    forecast, truth = xr.DataArray(x, dims=("member", "point")), xr.DataArray(y, dims="point")
    peer = tail_tw_crps_for_ensemble(forecast, truth, "member", 0.4, method="fair", tail="upper", preserve_dims="all")
    np.testing.assert_allclose(crps_members_weighted(x, y, fair=True, lower=0.4), peer, atol=1e-12)


@pytest.mark.parametrize("members", [2, 3, 10])
def test_energy_and_variogram_score_against_scoringrules(members):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(members, 4, 50)), rng.normal(size=(4, 50))
    swapped = np.moveaxis(x, (2, 0, 1), (0, 1, 2)), np.moveaxis(y, 0, 1)
    for fair, estimator in ((True, "fair"), (False, "nrg")):
        peer = scoringrules.es_ensemble(swapped[1], swapped[0], estimator=estimator)
        np.testing.assert_allclose(energy_score(x, y, fair=fair), peer, atol=1e-12)
    for order in (0.5, 1.0):
        peer = scoringrules.vs_ensemble(swapped[1], swapped[0], p=order, estimator="nrg")
        np.testing.assert_allclose(variogram_score(x, y, order), peer, atol=1e-12)


def test_energy_score_of_one_variable_is_the_crps():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(5, 1, 30)), rng.normal(size=(1, 30))
    np.testing.assert_allclose(energy_score(x, y, fair=True), crps_members(x[:, 0], y[0], fair=True), atol=1e-14)


def test_ranks_and_ties():
    x = np.array([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]])
    assert rank_of_truth(x, np.array([1.0, 0.0, 3.0])).tolist() == [1, 0, 2]
    zero = np.zeros((4, 50_000))
    ranks = rank_of_truth(zero, zero[0], np.random.default_rng(0).random(50_000))
    np.testing.assert_allclose(np.bincount(ranks, minlength=5) / 50_000, 0.2, atol=0.01)


def perfect(members=10, shape=(361, 720), dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    centre = 250 + 20 * rng.normal(size=shape)
    draw = lambda: (centre + rng.normal(size=shape)).astype(dtype)  # noqa: E731
    return np.stack([draw() for _ in range(members)]), draw()


def test_a_perfect_ensemble_gives_the_known_answers():
    x, y = perfect()
    found = score_members(x, y)
    assert found.crps_fair == pytest.approx(1 / np.sqrt(np.pi), abs=0.004)  # 0.564
    assert found.crps == pytest.approx(1.1 / np.sqrt(np.pi), abs=0.004)
    assert found.spread_skill == pytest.approx(1, abs=0.005)
    assert found.bias == pytest.approx(0, abs=0.005)
    np.testing.assert_allclose(found.rank_histogram, 1 / 11, atol=0.002)


@pytest.mark.parametrize("members", [1, 2, 3, 10])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_streaming_equals_the_formulas_and_adds_up(members, dtype):
    x, y = perfect(members, (90, 200), dtype, seed=4)
    w = np.random.default_rng(5).uniform(0.2, 2, (90, 1))
    whole = score_members(x, y, w)
    mean = lambda values: np.average(values, weights=np.broadcast_to(w, y.shape))  # noqa: E731
    wide = x.astype(np.float64)
    assert whole.crps == pytest.approx(mean(crps_members(x, y, fair=False)), rel=1e-6)
    assert whole.rmse == pytest.approx(np.sqrt(mean((wide.mean(0) - y) ** 2)), rel=1e-6)
    if members > 1:
        assert whole.crps_fair == pytest.approx(mean(crps_members(x, y, fair=True)), rel=1e-6)
        variance = (1 + 1 / members) * mean(wide.var(0, ddof=1))
        assert whole.spread_skill == pytest.approx(np.sqrt(variance) / whole.rmse, rel=1e-6)
    expected = np.bincount(rank_of_truth(x, y).ravel(), np.broadcast_to(w, y.shape).ravel(), members + 1)
    np.testing.assert_allclose(whole.rank_histogram, expected / expected.sum(), atol=1e-4)
    parts = score_members(x[:, :37], y[:37], w[:37]) + score_members(x[:, 37:], y[37:], w[37:])
    assert parts.crps == pytest.approx(whole.crps, rel=1e-6) and parts.points == whole.points
    with pytest.raises(ValueError, match="cannot be added"):
        EnsembleSums.zeros(2) + EnsembleSums.zeros(3)


def test_streamed_ties_are_broken_among_all_ranks_alike():
    zero = np.zeros((4, 50_000), np.float32)
    np.testing.assert_allclose(score_members(zero, zero[0]).rank_histogram, 0.2, atol=0.01)
    some = np.concatenate([zero[:2], zero[:2] + 1])
    np.testing.assert_allclose(score_members(some, zero[0]).rank_histogram, [1 / 3, 1 / 3, 1 / 3, 0, 0], atol=0.01)


def test_points_without_a_value_are_left_out_and_counted():
    x, y = perfect(5, (40, 50), seed=6)
    hole = x.copy()
    hole[2, 3, 4], lost = np.nan, y.copy()
    lost[7, 7] = np.nan
    found = score_members(hole, lost)
    keep = np.isfinite(hole).all(0) & np.isfinite(lost)
    rest = score_members(x[:, keep], y[keep])
    assert (found.left_out, found.points) == (2, 2000)
    assert found.crps_fair == pytest.approx(rest.crps_fair, rel=1e-6)
    assert found.rmse == pytest.approx(rest.rmse, rel=1e-6)


def test_a_truth_or_weights_of_other_points_are_refused():
    """One row of the truth was scored for all, and one turned round at points of others."""
    x, y = np.random.default_rng(0).random((5, 10, 20)), np.zeros((10, 20))
    for other in (y[0], y.T, y[None], 0.0):
        with pytest.raises(ValueError, match=r"y of shape .*, members of 5 fields of \(10, 20\): give the truth at"):
            score_members(x, other)
    for other in (np.ones(10), np.ones((3, 10, 20))):
        with pytest.raises(ValueError, match="broadcast"):
            score_members(x, y, other)
    assert score_members(x, y, np.ones((10, 1))).weight == 200
