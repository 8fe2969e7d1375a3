"""Statistics: one value a point, whose weighted means are what every metric is a function of.

Fields have any shape and broadcast; members come first (M, ...). Values are float64 or become it. NaN goes in and comes
out: leaving points out is the business of masks (`aggregation`), never of a formula.

The closed forms of parametric forecasts stand in `families`.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.verification.families import crps
from ensemble_ml.verification.members import crps_members


class Statistic(Enum):
    """What is averaged. Squares are in squared units of the variable, all others in its units."""

    CRPS = "crps"  # of the forecast distribution; of a raw ensemble: N(m, (1 + 1/M) s^2)
    CRPS_NORMAL = "crps_normal"  # of N(m, s^2) of a raw ensemble; of a baseline: taken as a normal law
    CRPS_FAMILY = "crps_family"  # of a baseline: taken as the law of the variable's family
    CRPS_FAIR = "crps_fair"  # of raw members
    CRPS_MEMBERS = "crps_members"  # of raw members, not corrected for their number
    SQUARED_ERROR = "squared_error"  # of the mean
    ERROR = "error"  # mean minus truth
    VARIANCE = "variance"  # predicted variance; of a raw ensemble (M + 1) / M s^2
    SPREAD_SQUARED_ERROR = "spread_squared_error"  # against the spread of the full ensemble
    SPREAD_ERROR = "spread_error"  # predicted minus actual spread of the full ensemble
    SPREAD_SQUARED_ERROR_0 = "spread_squared_error_0"  # as before, all standard deviations with ddof = 0
    BRIER = "brier"  # of the truth's exceeding the cell's 90 % quantile of the fit dates (normal law)
    LOG_SCORE = "log_score"  # minus the log of the predicted density; nats
    # Of a baseline: taken as a normal law, and as the law of the variable's family.
    SQUARED_ERROR_NORMAL = "squared_error_normal"
    SQUARED_ERROR_FAMILY = "squared_error_family"
    ERROR_NORMAL = "error_normal"
    ERROR_FAMILY = "error_family"
    VARIANCE_NORMAL = "variance_normal"
    VARIANCE_FAMILY = "variance_family"
    BRIER_NORMAL = "brier_normal"
    BRIER_FAMILY = "brier_family"
    LOG_SCORE_NORMAL = "log_score_normal"
    LOG_SCORE_FAMILY = "log_score_family"
    HELD_OUT_SQUARED_ERROR = "held_out_squared_error"  # against the spread of the members that were not given


class Key(NamedTuple):
    """A statistic of one entrant (a forecast, a raw ensemble or a baseline)."""

    entrant: str
    statistic: Statistic


def c4(n: int) -> float:
    """Expected sample standard deviation (ddof = 1) of n normal draws, over the true one.

    c4(n) = sqrt(2 / (n - 1)) Gamma(n / 2) / Gamma((n - 1) / 2); Holtzman (1950), doi:10.1080/00031305.1950.10483370.
    """
    if n < 2:
        raise UserError(f"n={n}: a sample standard deviation needs two members")
    return math.sqrt(2 / (n - 1)) * math.exp(gammaln(n / 2) - gammaln((n - 1) / 2))


def ensemble_moments(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance (ddof = 1) over the first axis; the variance of one member is NaN."""
    mean = members.mean(0, dtype=np.float64)
    if len(members) < 2:
        return mean, np.full_like(mean, np.nan)
    return mean, ((members - mean) ** 2).sum(0) / (len(members) - 1)


def raw_statistics(members: np.ndarray, y: np.ndarray | None) -> dict[Statistic, np.ndarray]:
    """All statistics of a raw ensemble (M, ...) that its size and the truth at hand allow.

    One member has no spread, so it has no predicted variance and none of the distributions made from it.
    """
    if y is None:
        return {}
    m = len(members)
    mean, variance = ensemble_moments(members)
    error = mean - y
    found = {Statistic.ERROR: error, Statistic.SQUARED_ERROR: error**2}
    found[Statistic.CRPS_MEMBERS] = crps_members(members, y, fair=False)
    if m > 1:
        found[Statistic.CRPS_FAIR] = crps_members(members, y, fair=True)
        found[Statistic.CRPS_NORMAL] = crps(Family.NORMAL, mean, np.sqrt(variance), y)
        found[Statistic.VARIANCE] = (1 + 1 / m) * variance
        found[Statistic.CRPS] = crps(Family.NORMAL, mean, np.sqrt(found[Statistic.VARIANCE]), y)
    return found


def spread_statistics(
    predicted: np.ndarray, actual: np.ndarray, apart: np.ndarray | None
) -> dict[Statistic, np.ndarray]:
    """Errors of a predicted spread of the full ensemble, against that of all members; `apart`: the error of what it
    says of the members held out, where it does."""
    error = predicted - actual
    found = {Statistic.SPREAD_ERROR: error, Statistic.SPREAD_SQUARED_ERROR: error**2}
    if apart is not None:
        found[Statistic.HELD_OUT_SQUARED_ERROR] = apart**2
    return found
