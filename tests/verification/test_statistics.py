"""Statistics against brute force, scoringrules, scores, quadrature and what a perfect ensemble must score."""

import numpy as np
import pytest
import scoringrules
import xarray as xr
from scores.probability import crps_for_ensemble

from ensemble_ml.verification.statistics import (
    Statistic,
    c4,
    crps_members,
    ensemble_moments,
    raw_statistics,
    spread_statistics,
)


def draws(members, points=400, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(members, points)), rng.normal(size=points)


@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize("members", [2, 3, 10])
def test_members_against_pairs_by_brute_force(members, fair):
    x, y = draws(members, 50)
    pairs = sum(abs(x[i] - x[j]) for i in range(members) for j in range(i))
    expected = abs(x - y).mean(0) - pairs / (members * (members - 1) if fair else members**2)
    np.testing.assert_allclose(crps_members(x, y, fair=fair), expected, atol=1e-14)


@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize("members", [2, 3, 10])
def test_members_against_scoringrules_and_scores(members, fair):
    x, y = draws(members)
    peer = scoringrules.crps_ensemble(y, x, m_axis=0, estimator="fair" if fair else "nrg")
    np.testing.assert_allclose(crps_members(x, y, fair=fair), peer, atol=1e-13)
    forecast, truth = xr.DataArray(x, dims=("member", "point")), xr.DataArray(y, dims="point")
    other = crps_for_ensemble(
        forecast, truth, "member", method="fair" if fair else "ecdf", preserve_dims="all", include_components=False
    )
    np.testing.assert_allclose(crps_members(x, y, fair=fair), other, atol=1e-13)


def test_members_keep_their_digits_on_large_values():
    x, y = draws(5, seed=1)
    np.testing.assert_allclose(crps_members(x + 5e4, y + 5e4, fair=True), crps_members(x, y, fair=True), atol=1e-10)


def test_one_member_has_no_fair_score():
    x, y = draws(1)
    np.testing.assert_allclose(crps_members(x, y, fair=False), abs(x[0] - y))
    with pytest.raises(ValueError, match=r"^members=1: a fair score .*; 2 or more are needed$"):
        crps_members(x, y, fair=True)
    assert set(raw_statistics(x, y)) == {Statistic.ERROR, Statistic.SQUARED_ERROR, Statistic.CRPS_MEMBERS}


def test_a_perfect_ensemble_scores_what_the_definitions_say():
    x, y = draws(10, 400_000)
    found = {name: values.mean() for name, values in raw_statistics(x, y).items()}
    ideal = 1 / np.sqrt(np.pi)
    assert found[Statistic.CRPS_FAIR] == pytest.approx(ideal, abs=0.002)  # 0.564
    assert found[Statistic.CRPS_NORMAL] == pytest.approx(0.601, abs=0.002)
    assert found[Statistic.CRPS] == pytest.approx(0.600, abs=0.002)
    assert found[Statistic.CRPS_MEMBERS] == pytest.approx(1.1 * ideal, abs=0.002)
    assert found[Statistic.CRPS] < found[Statistic.CRPS_NORMAL]
    assert found[Statistic.VARIANCE] / found[Statistic.SQUARED_ERROR] == pytest.approx(1, abs=0.01)


def test_c4_is_what_a_sample_standard_deviation_shrinks_by():
    known = {2: 0.798, 3: 0.886, 4: 0.921, 5: 0.940, 10: 0.973}
    assert {n: round(c4(n), 3) for n in known} == known
    assert c4(10) / c4(5) == pytest.approx(1.035, abs=5e-4)
    x, _ = draws(5, 200_000)
    assert np.sqrt(ensemble_moments(x)[1]).mean() == pytest.approx(c4(5), abs=0.002)
    with pytest.raises(ValueError, match="two members"):
        c4(1)


def test_spread_statistics():
    found = spread_statistics(np.array([2.0]), np.array([1.5]), np.array([-1.0]))
    assert {name: float(value[0]) for name, value in found.items()} == {
        Statistic.SPREAD_ERROR: 0.5,
        Statistic.SPREAD_SQUARED_ERROR: 0.25,
        Statistic.HELD_OUT_SQUARED_ERROR: 1.0,
    }
    assert Statistic.HELD_OUT_SQUARED_ERROR not in spread_statistics(np.ones(1), np.ones(1), None)
