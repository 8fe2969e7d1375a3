"""Statistics: one value a point, whose weighted means are what every metric is a function of.

Fields have any shape and broadcast; members come first (M, ...). Values are float64 or become it. NaN goes in and comes
out: leaving points out is the business of masks (`aggregation`), never of a formula.

With standard normal density phi and distribution function Phi, z = (y - location) / scale and l = -location / scale
(zero in standard units), the closed forms of the CRPS are those of

- the normal law: Gneiting et al. (2005), doi:10.1175/MWR2904.1, equation 5;
- the normal law truncated at zero: Thorarinsdottir & Gneiting (2010), doi:10.1111/j.1467-985X.2009.00616.x, section 3;
- the normal law censored at zero: Jordan et al. (2019), doi:10.18637/jss.v090.i12, appendix A.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

import numpy as np
from scipy.special import erf, erfcx, gammaln, ndtr

from ensemble_ml.fields import Family

_SQRT2 = math.sqrt(2)
_ROOT_PI = math.sqrt(math.pi)


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
        raise ValueError(f"n={n}: a sample standard deviation needs two members")
    return math.sqrt(2 / (n - 1)) * math.exp(gammaln(n / 2) - gammaln((n - 1) / 2))


def ensemble_moments(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance (ddof = 1) over the first axis; the variance of one member is NaN."""
    mean = members.mean(0, dtype=np.float64)
    if len(members) < 2:
        return mean, np.full_like(mean, np.nan)
    return mean, ((members - mean) ** 2).sum(0) / (len(members) - 1)


def crps_members(members: np.ndarray, y: np.ndarray, *, fair: bool) -> np.ndarray:
    """CRPS of an ensemble as the sample that it is.

    mean_i |x_i - y| - sum_{i<j} |x_i - x_j| / (M (M - 1)) if fair, / M^2 if not. The fair one estimates without bias
    the score of the law that the members come from; it holds for raw, exchangeable members alone. Ferro (2014),
    doi:10.1002/qj.2270, equation 3.

    Args:
        members: (M, ...); two or more if `fair`.
        y: (...) truth.
        fair: which of the two.
    """
    m = len(members)
    if fair and m < 2:
        raise ValueError(f"fair CRPS of {m} member: two or more are needed")
    distance = np.sort(np.asarray(members, np.float64) - y, axis=0)  # large values lose no digits
    order = 2.0 * np.arange(1, m + 1) - m - 1  # sum over pairs = sum of (2 k - M - 1) x_(k), k the rank
    pairs = np.tensordot(order, distance, axes=1)
    return np.abs(distance).mean(0) - pairs / (m * (m - 1) if fair else m * m)


def crps(family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray) -> np.ndarray:
    """CRPS of a parametric forecast, in the units of `y`; at scale zero that of the point forecast.

    A truth below zero, which the truncated and the censored normal cannot produce, is scored as zero plus its distance
    from it.
    """
    location, scale, y = (np.asarray(a, np.float64) for a in (location, scale, y))
    spread_out = scale > 0
    unit = np.where(spread_out | np.isnan(scale), scale, 1.0)
    if family is Family.NORMAL:
        return np.where(spread_out | np.isnan(scale), unit * _normal((y - location) / unit), np.abs(y - location))
    below, inside = np.maximum(-y, 0), np.maximum(y, 0)
    standard = _truncated if family is Family.TRUNCATED_NORMAL else _censored
    with np.errstate(over="ignore", invalid="ignore"):  # branches that are not taken
        found = unit * standard((inside - location) / unit, -location / unit, inside / unit)
    return np.where(spread_out | np.isnan(scale), found, np.abs(inside - np.maximum(location, 0))) + below


def _phi(x: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _mills(x: np.ndarray) -> np.ndarray:
    return math.sqrt(math.pi / 2) * erfcx(x / _SQRT2)


def _normal(z: np.ndarray) -> np.ndarray:
    return z * erf(z / _SQRT2) + 2 * _phi(z) - 1 / _ROOT_PI


def _censored(z: np.ndarray, l: np.ndarray, above: np.ndarray) -> np.ndarray:
    """CRPS of the whole law less the integral of Phi^2 below zero; `above` = z - l, given exactly."""
    low_l, high_l = np.minimum(l, 0), np.maximum(l, 0)
    cdf = ndtr(low_l)
    low = _normal(z) - (low_l * cdf**2 + 2 * cdf * _phi(low_l) - ndtr(_SQRT2 * low_l) / _ROOT_PI)
    # For l > 0 the large terms of both integrals cancel to z - l; what is left are tails.
    tail, high_z = ndtr(-high_l), np.maximum(z, 0)
    tails = 2 * _phi(high_z) - 2 * high_z * ndtr(-high_z)
    tails = tails - (2 * _phi(high_l) * (1 - tail) - 2 * high_l * tail + high_l * tail**2)
    return np.where(l > 0, above + tails - ndtr(-_SQRT2 * high_l) / _ROOT_PI, low)


def _truncated(z: np.ndarray, l: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Beyond l = 0 written with the Mills ratio, never as a quotient of two vanishing tails."""
    low_l, high_l = np.minimum(l, 0), np.maximum(l, 0)
    mass = ndtr(-low_l)
    low = z * mass * (2 * ndtr(z) + mass - 2) + 2 * _phi(z) * mass - ndtr(-_SQRT2 * low_l) / _ROOT_PI
    high_z, mills = high_l + above, _mills(high_l)
    decay = np.exp(-0.5 * above * (high_z + high_l))
    high = high_z - _SQRT2 * _mills(_SQRT2 * high_l) / mills**2 + 2 * decay * (1 - high_z * _mills(high_z)) / mills
    return np.where(l > 0, high, low / mass**2)


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
    predicted: np.ndarray, actual: np.ndarray, held_out: np.ndarray | None
) -> dict[Statistic, np.ndarray]:
    """Errors of a predicted spread of the full ensemble, against that of all members and that of those held out."""
    error = predicted - actual
    found = {Statistic.SPREAD_ERROR: error, Statistic.SPREAD_SQUARED_ERROR: error**2}
    if held_out is not None:
        found[Statistic.HELD_OUT_SQUARED_ERROR] = (predicted - held_out) ** 2
    return found
