"""Compute statistics: one value at each point, whose weighted means feed every metric.

Fields have any shape and broadcast against each other. Members come first (M, ...). Results are float64. A NaN in an
input gives a NaN in the result. Only the masks in `aggregation` leave points out, never a formula. `families` has the
CRPS of parametric distributions.
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
    """A quantity that is averaged over points and dates.

    Squares and variances are in squared units of the variable, log scores in nats, and Brier scores have no units. All
    others are in the units of the variable.
    """

    # CRPS of the forecast distribution. For a raw ensemble this is N(m, (1 + 1/M) s^2), which claims are made against.
    CRPS = "crps"
    CRPS_NORMAL = "crps_normal"  # CRPS of N(m, s^2) for a raw ensemble; of the normal distribution for a baseline
    CRPS_FAMILY = "crps_family"  # CRPS of a baseline as a distribution of the variable's family
    CRPS_FAIR = "crps_fair"  # fair CRPS of raw members
    CRPS_MEMBERS = "crps_members"  # CRPS of raw members, not corrected for their number
    SQUARED_ERROR = "squared_error"  # squared error of the mean
    ERROR = "error"  # predicted mean minus truth
    VARIANCE = "variance"  # predicted variance; (M + 1) / M s^2 for a raw ensemble
    SPREAD_SQUARED_ERROR = "spread_squared_error"  # squared error against the spread of the full ensemble
    SPREAD_ERROR = "spread_error"  # predicted spread minus the spread of the full ensemble
    SPREAD_SQUARED_ERROR_0 = "spread_squared_error_0"  # squared error of the spread, both spreads with ddof = 0
    # Brier score of the event that the truth exceeds the cell's 90 % quantile. The quantile is that of a normal
    # distribution with the moments of the fit dates.
    BRIER = "brier"
    LOG_SCORE = "log_score"  # minus the logarithm of the predicted density, in nats
    # Scores of a baseline, once as a normal distribution and once as a distribution of the variable's family. The
    # better of the two is chosen when all dates are scored (`values.settle_families`).
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
    HELD_OUT_SQUARED_ERROR = "held_out_squared_error"  # squared error of the spread implied for the held-out members


class Key(NamedTuple):
    """A statistic of one entrant, where an entrant is a forecast, a raw ensemble or a baseline."""

    entrant: str
    statistic: Statistic


def c4(n: int) -> float:
    """Return the expected sample standard deviation of n normal draws, divided by the true one.

        c4(n) = sqrt(2 / (n - 1)) Gamma(n / 2) / Gamma((n - 1) / 2)

    The sample standard deviation has ddof = 1. The ratio lies between 0.798 (n = 2) and 1. The formula is that of
    Holtzman (1950), American Journal of Psychology 63, 615-617.

    Raises:
        UserError: `n` is below two.
    """
    if n < 2:
        raise UserError(f"n={n}: a sample standard deviation needs two members")
    # The gamma function itself overflows for large n, but its logarithm does not.
    return math.sqrt(2 / (n - 1)) * math.exp(gammaln(n / 2) - gammaln((n - 1) / 2))


def ensemble_moments(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the variance (ddof = 1) over members (M, ...), each (...) float64.

    The variance of a single member is NaN.
    """
    mean = members.mean(0, dtype=np.float64)
    if len(members) < 2:
        return mean, np.full_like(mean, np.nan)
    return mean, ((members - mean) ** 2).sum(0) / (len(members) - 1)


def raw_statistics(members: np.ndarray, y: np.ndarray) -> dict[Statistic, np.ndarray]:
    """Return the errors, the CRPS and the predicted variance (...) of a raw ensemble (M, ...), by statistic.

    A single member has no spread. It therefore has no variance, no fair CRPS and no CRPS of a normal distribution.
    """
    m = len(members)
    mean, variance = ensemble_moments(members)
    error = mean - y
    found = {Statistic.ERROR: error, Statistic.SQUARED_ERROR: error**2}
    found[Statistic.CRPS_MEMBERS] = crps_members(members, y, fair=False)
    if m > 1:
        found[Statistic.CRPS_FAIR] = crps_members(members, y, fair=True)
        found[Statistic.CRPS_NORMAL] = crps(Family.NORMAL, mean, np.sqrt(variance), y)
        # The truth is one more draw beside M members, and the mean of M draws is uncertain by s^2 / M. The variance of
        # truth minus mean is therefore (1 + 1/M) s^2.
        found[Statistic.VARIANCE] = (1 + 1 / m) * variance
        found[Statistic.CRPS] = crps(Family.NORMAL, mean, np.sqrt(found[Statistic.VARIANCE]), y)
    return found


def spread_statistics(
    predicted: np.ndarray, actual: np.ndarray, apart: np.ndarray | None
) -> dict[Statistic, np.ndarray]:
    """Return the errors of a predicted spread of the full ensemble, (...) by statistic.

    `apart` is the error of the spread that the forecast implies for the held-out members; None where it implies none.
    """
    error = predicted - actual
    found = {Statistic.SPREAD_ERROR: error, Statistic.SPREAD_SQUARED_ERROR: error**2}
    if apart is not None:
        found[Statistic.HELD_OUT_SQUARED_ERROR] = apart**2
    return found
