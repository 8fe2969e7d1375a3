"""Statistics of corrected ensembles and of the climatology, at each point."""

import numpy as np
import pytest

from ensemble_ml.fields import Family
from ensemble_ml.verification.families import location_of_mean, moments, quantile
from ensemble_ml.verification.statistics import Statistic as S
from ensemble_ml.verification.values import _baseline


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
