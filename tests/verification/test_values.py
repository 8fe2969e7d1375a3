"""Statistics of corrected ensembles and of the climatology, at each point."""

from types import SimpleNamespace

import numpy as np
import pytest

from ensemble_ml.fields import Family
from ensemble_ml.verification.families import location_of_mean, moments, quantile
from ensemble_ml.verification.fits import Fit
from ensemble_ml.verification.samples import Setting, held_out_error, held_out_spread
from ensemble_ml.verification.statistics import Statistic as S
from ensemble_ml.verification.statistics import ensemble_moments
from ensemble_ml.verification.values import _baseline
from ensemble_ml.verification.vectors import Known


@pytest.mark.parametrize("family", [Family.TRUNCATED_NORMAL, Family.CENSORED_SHIFTED_GAMMA])
def test_a_law_that_is_the_truths_has_a_spread_skill_of_one(family):
    rng = np.random.default_rng(0)
    mean, scale = np.full(100_000, 0.8), np.ones(100_000)
    y = quantile(family, location_of_mean(family, mean, scale), scale, rng.random(mean.size))
    found = _baseline(mean, scale, y, family, None)
    skill = found[S.VARIANCE_FAMILY].mean() / found[S.SQUARED_ERROR_FAMILY].mean()
    assert skill == pytest.approx(1, abs=0.02)
    assert found[S.VARIANCE_NORMAL].mean() == 1 and found[S.ERROR_FAMILY].mean() == pytest.approx(0, abs=0.01)
    assert S.VARIANCE not in found  # the law is chosen in the end


def test_a_law_that_stops_at_zero_has_no_mean_below():
    found = _baseline(np.array([-0.5]), np.array([0.1]), np.array([0.0]), Family.CENSORED_NORMAL, None)
    assert found[S.ERROR_NORMAL] == -0.5 and 0 <= found[S.ERROR_FAMILY] < 1e-3
    expected = moments(Family.CENSORED_NORMAL, np.array([-0.4]), np.array([0.1]))[1] ** 2
    np.testing.assert_allclose(found[S.VARIANCE_FAMILY], expected)


def test_cloud_cover_has_a_law_of_its_own_between_clear_and_overcast():
    found = _baseline(np.array([1.2, 0.7]), np.full(2, 0.1), np.ones(2), Family.DOUBLY_CENSORED_NORMAL, np.ones(2))
    assert found[S.ERROR_NORMAL][0] == pytest.approx(0.2) and -1e-3 < found[S.ERROR_FAMILY][0] <= 0
    assert found[S.ERROR_FAMILY][1] == pytest.approx(-0.3) and found[S.ERROR_NORMAL][1] == pytest.approx(-0.3)
    assert (found[S.BRIER_FAMILY] == 0).all() and (found[S.BRIER_NORMAL] > 0).all()  # nothing is more than overcast
    assert np.isfinite(found[S.LOG_SCORE_FAMILY]).all()


def test_a_scale_that_is_missing_has_no_brier_score():
    found = _baseline(np.zeros(2), np.array([np.nan, 0.0]), np.zeros(2), Family.NORMAL, np.ones(2))
    assert np.isnan(found[S.BRIER][0]) and found[S.BRIER][1] == 0


# A log-normal law never gives zero.
@pytest.mark.parametrize("family", [family for family in Family if family is not Family.LOGNORMAL])
def test_a_point_has_scores_that_are_finite(family):
    """A dry cell, forecast dry without doubt: beside a cell that varies, and where it rains after all."""
    mean, scale, y = np.array([[[0.0, 0.0, 2.0]]]), np.array([[[0.0, 0.0, 1.0]]]), np.array([[[0.0, 0.5, 1.5]]])
    least = np.full((1, 1, 1), 0.01)
    found = _baseline(mean, scale, y, family, mean, least)
    assert all(np.isfinite(value).all() for value in found.values())
    plain = _baseline(mean, scale, y, family, mean)
    for statistic, value in found.items():
        if not statistic.value.startswith("log_score"):
            np.testing.assert_array_equal(value, plain[statistic])
        np.testing.assert_array_equal(value[..., 2], plain[statistic][..., 2])  # with a scale of its own
    brier = found[S.BRIER if family is Family.NORMAL else S.BRIER_FAMILY]
    assert brier[0, 0, :2].tolist() == [0.0, 1.0]


def test_the_scale_of_vectors_is_that_of_known_cells():
    deviation = np.array([[[2.0, 0.0, np.nan]], [[0.0, 0.0, 0.0]]])
    setting = SimpleNamespace(weights=np.array([[[1.0, 3.0, 4.0]]]), reduced=5)
    fit = Fit(corrections={5: {"blend": None}}, climatology=(deviation, deviation))
    np.testing.assert_allclose(Known.of(setting, fit).scale, [1.0, 0.0])  # root of (1 * 4 + 3 * 0) / 4; nothing


def test_members_of_a_forecast_are_those_that_the_file_of_the_date_says():
    days = np.array(["2000-01-01", "2000-01-03"], "datetime64[ns]")
    told = {
        "five": ("1 2 3 4 5", "1 2 3 4 5"), "turned": ("3 1", "3 1"), "uneven": ("1 2", "1 2 3"), "silent": ("", ""),
        "other": ("1 77", "1"),
    }  # fmt: skip
    forecasts = tuple(
        SimpleNamespace(label=k, made_of={day: tuple(s.split()) for day, s in zip(days, said, strict=True)})
        for k, said in told.items()
    )
    layout = SimpleNamespace(realization=np.array([1, 2, 3, 4, 5, 6]), init_time=days)
    setting = Setting(SimpleNamespace(layout=layout), forecasts, 5, *[np.arange(0)] * 3, False)
    every = {"five": [0, 1, 2, 3, 4], "turned": [2, 0], "silent": []}
    assert setting.given(0) == every | {"uneven": [0, 1]}
    assert setting.given(1) == every | {"uneven": [0, 1, 2], "other": [0]}


def test_the_error_of_held_out_spread_is_that_of_what_a_forecast_leaves_for_them():
    """Who knows the law (sigma = 2) expects of all ten's squares (4 s^2 + 5 sigma^2) / 9: sigma of the others."""
    members = 2 * np.random.default_rng(0).normal(size=(10, 1, 20, 30))
    given = ensemble_moments(members[:5])[1]
    expected = np.sqrt((4 * given + 5 * 2.0**2) / 9)
    held = held_out_spread(members, 5)
    np.testing.assert_allclose(held_out_error(expected, members, 5, range(5)), 2.0 - held)
    np.testing.assert_array_equal(held_out_error(expected, members, 5), expected - held)  # it does not say from which
    assert held_out_error(expected, members, 5, [0, 7]) is None and held_out_error(expected, members, 9, [0]) is None
