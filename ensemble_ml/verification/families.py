"""Evaluate the forecast distributions in NumPy.

For each distribution family this file has the CRPS, the distribution function, the quantiles, the log score, the
threshold-weighted CRPS, the moments, and the location that gives a distribution a wanted mean. A NaN in an input gives
a NaN in the result. A negative scale is a UserError. A scale of zero is a point forecast, which only the log score
refuses.

Families are those of `ensemble_ml.fields.Family`. Location and scale are in the units of the variable, and a scale is 0
or more. All arrays broadcast, and results are float64. The closed forms and their sources are in
`ensemble_ml.closed_forms`. Here they are computed with the functions of SciPy.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
from scipy import special, stats
from scipy.special import gammaincc, gammaln, hyp1f1, log_ndtr, ndtr, ndtri

from ensemble_ml import closed_forms as forms
from ensemble_ml.errors import UserError
from ensemble_ml.fields import GAMMA_SHIFT, Family
from ensemble_ml.verification.checks import check_between, check_scale


def _ratio(x: np.ndarray) -> np.ndarray:
    """Return log(1 + exp(2 x)) / 2, where x is raised to `LOWEST` if it is below."""
    with np.errstate(invalid="ignore"):  # NaN stays
        return np.logaddexp(0.0, 2 * np.maximum(x, forms.LOWEST)) / 2


_SCIPY = forms.Maths(
    where=np.where,
    exp=np.exp,
    log=np.log,
    log1p=np.log1p,
    expm1=np.expm1,
    sqrt=np.sqrt,
    maximum=np.maximum,
    erf=special.erf,
    erfcx=special.erfcx,
    ndtr=ndtr,
    log_ndtr=log_ndtr,
    ndtri=ndtri,
    lgamma=gammaln,
    double=lambda x: x,
    like=lambda x, other: x,
    at_least=np.maximum,
    at_most=np.minimum,
    ratio=_ratio,
    gammainc=special.gammainc,
    gammaincinv=special.gammaincinv,
    incomplete=special.gammainc,
    next_incomplete=lambda k, x, found: special.gammainc(k + 1, x),
)
# Levels of the quantiles between which `crps_above` integrates.
_LEVELS = (1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 1 - 1e-4, 1 - 1e-5, 1 - 1e-6)
_NODES = 12  # nodes of the quadrature between two of these quantiles
_GRID = (-4.0, 8.0, 1201)  # table of location / scale: first, last, number
_BELOW = (-4.0, -60.0, 281)  # more of the table, for the truncated normal, whose mean falls only as 1 / -location
# Least mean of a truncated normal distribution, in scales. Near zero, its standard deviation is about as small as its
# mean, and smaller than the error of that mean.
_LEAST_MEAN = 0.1
_NEWTON = 3  # Newton steps to the location of a mean between two bounds, which is then good to six digits
_CENSORED_NORMAL = (Family.CENSORED_NORMAL, Family.DOUBLY_CENSORED_NORMAL)
CENSORED = (*_CENSORED_NORMAL, Family.CENSORED_SHIFTED_GAMMA)  # families with a point mass at each bound


def crps(family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the CRPS of a parametric forecast, in the units of the truth `y`.

    At scale zero this is the CRPS of a point forecast, the absolute error. For a truth beyond a bound of the
    distribution, the result is the CRPS at the bound plus the distance from it.
    """
    location, scale, y = (np.asarray(a, np.float64) for a in (location, scale, y))
    check_scale("scale", scale)
    certain = scale == 0
    unit = np.where(certain, 1.0, scale)
    if family is Family.NORMAL:
        found = unit * forms.crps_normal(_SCIPY, (y - location) / unit)
        return np.where(certain, np.abs(y - location), found)
    inside = np.clip(y, *family.bounds)
    # np.where evaluates both branches, so the one that is not taken may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        if family in forms.SKEWED:
            skewed = forms.crps_lognormal if family is Family.LOGNORMAL else forms.crps_gamma
            found = unit * skewed(_SCIPY, location / unit, inside / unit)
        else:
            standard = forms.crps_truncated if family is Family.TRUNCATED_NORMAL else forms.crps_censored
            found = unit * standard(_SCIPY, (inside - location) / unit, -location / unit, inside / unit)
        if family is Family.DOUBLY_CENSORED_NORMAL:
            # Censoring at one sets F to one beyond it, so the integral of (1 - F)^2 over x > 1 is taken off.
            found = found - unit * forms.square_below(_SCIPY, (location - 1) / unit)
    point = np.abs(inside - np.clip(location, *family.bounds))
    return np.where(certain, point, found) + np.abs(y - inside)


def cdf(family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray, *, left: bool = False) -> np.ndarray:
    """Return the probability that the value is at most `y`, or with `left` that it is below `y`.

    The two differ at the bounds of censored distributions, which have a point mass there, and at scale zero.
    """
    location, scale, y = (np.asarray(a, np.float64) for a in (location, scale, y))
    check_scale("scale", scale)
    certain = scale == 0
    if certain.any():  # all mass lies in one point
        point = np.clip(location, *family.bounds)
        found = cdf(family, location, np.where(certain, 1.0, scale), y, left=left)
        reached = np.where(np.isnan(point + y), np.nan, (y > point) if left else (y >= point))
        return np.where(certain, reached, found)
    x, v = location / scale, y / scale
    if family is Family.NORMAL:
        return ndtr(v - x)
    if family is Family.TRUNCATED_NORMAL:
        inside = forms.cdf_truncated(_SCIPY, v - x, -x)
    elif family is Family.LOGNORMAL:
        inside = forms.cdf_lognormal(_SCIPY, x, v)
    elif family in _CENSORED_NORMAL:
        inside = ndtr(v - x)
    else:
        inside = forms.cdf_gamma(_SCIPY, x, v)
    lower, upper = family.bounds
    masses = family in CENSORED and not left
    found = np.where((y >= lower) if masses else (y > lower), np.clip(inside, 0, 1), 0.0)
    found = np.where((y >= upper) if masses else (y > upper), 1.0, found)
    return np.where(np.isnan(inside), np.nan, found)


def quantile(family: Family, location: np.ndarray, scale: np.ndarray, level: np.ndarray | float) -> np.ndarray:
    """Return the value that is not exceeded with probability `level`. At scale zero it is the point itself.

    Raises:
        UserError: A scale is negative, or a level is outside of [0, 1].
    """
    location, scale, p = (np.asarray(a, np.float64) for a in (location, scale, level))
    check_scale("scale", scale)
    check_between("level", p, 0, 1, "a level is a probability, 0.9 and not 90")
    p = np.clip(p, 0, 1)  # the check lets rounding errors pass
    certain = scale == 0
    if certain.any():
        point = np.clip(location, *family.bounds)
        return np.where(certain, point + 0 * p, quantile(family, location, np.where(certain, 1.0, scale), level))
    if family is Family.NORMAL or family in _CENSORED_NORMAL:
        return np.clip(location + scale * ndtri(p), *family.bounds)
    x = location / scale
    if family is Family.TRUNCATED_NORMAL:
        return location + scale * stats.truncnorm.ppf(p, -x, np.inf)
    skewed = forms.quantile_lognormal if family is Family.LOGNORMAL else forms.quantile_gamma
    return scale * skewed(_SCIPY, x, p)


def log_score(family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return minus the logarithm of the predicted density at the truth `y`, in nats.

    At a bound of a censored distribution the point mass takes the place of the density. The score is infinite where the
    distribution cannot produce `y`.

    Raises:
        UserError: A scale is zero or negative. A point has no density.
    """
    location, scale, y = (np.asarray(a, np.float64) for a in (location, scale, y))
    check_scale("scale", scale, zero=False)
    x, v = location / scale, y / scale
    normal = 0.5 * (v - x) ** 2 + 0.5 * math.log(2 * math.pi) + np.log(scale)
    if family is Family.NORMAL:
        return normal
    if family is Family.TRUNCATED_NORMAL:
        return np.where(y < 0, np.where(np.isnan(x), np.nan, np.inf), normal + log_ndtr(x))
    # A mass may be too small for a float64, while its logarithm is not.
    mass = -log_ndtr(-x) if family in CENSORED else np.inf
    if family in _CENSORED_NORMAL:
        density = normal
    elif family is Family.LOGNORMAL:
        mu, sigma = forms.log_parameters(_SCIPY, _ratio(x))
        log_v = np.log(np.maximum(v, forms.TINY))
        z = (log_v - mu) / sigma
        density = 0.5 * z * z + 0.5 * math.log(2 * math.pi) + np.log(sigma) + log_v + np.log(scale)
    else:
        r = forms.gamma_ratio(_SCIPY, x)
        at = np.maximum((v + GAMMA_SHIFT) * r, forms.TINY)
        density = at - (r * r - 1) * np.log(at) + gammaln(r * r) - np.log(r) + np.log(scale)
        far, k, low = forms.is_normal(x), r * r, GAMMA_SHIFT * r
        density = np.where(far, normal, density)
        # P(k, low) = low^k e^-low M(1, k + 1, low) / Gamma(k + 1): DLMF 8.5.1
        mass = np.where(far, mass, low + gammaln(k + 1) - k * np.log(low) - np.log(hyp1f1(1.0, k + 1, low)))
    found = np.where(y > 0, density, np.where(y == 0, mass, np.inf))
    if family is Family.DOUBLY_CENSORED_NORMAL:
        found = np.where(y < 1, found, np.where(y == 1, -log_ndtr((location - 1) / scale), np.inf))
    return np.where(np.isnan(x + v), np.nan, found)


def moments(family: Family, location: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of a distribution. At scale zero they are those of the point."""
    location, scale = np.broadcast_arrays(np.asarray(location, np.float64), np.asarray(scale, np.float64))
    check_scale("scale", scale)
    if family is Family.NORMAL:
        return location, scale
    certain = scale == 0
    unit = np.where(certain, 1.0, scale)
    point = np.clip(location, *family.bounds)
    if family in _CENSORED_NORMAL:
        edges = (0.0, point, family.bounds[1])
        mean, variance = forms.censored_moments(_SCIPY, *((at - location) / unit for at in edges))
        mean, deviation = np.clip(point + scale * mean, *family.bounds), np.sqrt(variance)
    else:
        mean, deviation = _standard_moments(family, location / unit)
        mean = np.where(certain, point, scale * mean)
    return mean, np.where(certain, 0 * location, scale * deviation)


def location_of_mean(family: Family, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the location that gives a distribution with this scale the wanted mean.

    At scale zero it is the mean. Most families have no closed form for it. The location is interpolated linearly in a
    table with a step of a hundredth of a scale. For a distribution with two bounds, Newton steps follow (see
    `ensemble_ml.distributions`). The location never lies more than four scales beyond a bound, so a wanted mean very
    near the bound is not reached.

    The truncated normal distribution is an exception. Its mean approaches zero only for locations far below zero. So
    its table goes on below minus four scales, with a step of 1 % of the location, and wanted means below `_LEAST_MEAN`
    scales are raised to that.
    """
    mean, scale = np.asarray(mean, np.float64), np.asarray(scale, np.float64)
    check_scale("scale", scale)
    if family is Family.NORMAL:
        return mean
    if family is Family.DOUBLY_CENSORED_NORMAL:
        return np.where(scale > 0, _location_between(mean, np.where(scale > 0, scale, 1.0)), mean + 0 * scale)
    location, means = _mean_table(family)
    wanted = mean / np.where(scale > 0, scale, 1.0)
    if family is Family.TRUNCATED_NORMAL:
        wanted = np.maximum(wanted, _LEAST_MEAN)
    found = np.where(wanted >= means[-1], wanted, np.interp(wanted, means, location))
    return np.where(scale > 0, found * scale, mean + 0 * scale)


def _location_between(mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the location of a normal distribution that is censored at zero and one and has the wanted mean.

    By symmetry, the location for a mean above one half is one minus the location for one minus that mean. Newton steps
    start at the location for a single bound at zero.
    """
    near = np.where(mean > 0.5, 1 - mean, mean)
    found = least = location_of_mean(Family.CENSORED_NORMAL, near, scale)
    most = 0.5 + scale * ndtri(np.maximum(near, 0))
    for _ in range(_NEWTON):
        excess, slope = forms.excess_between(_SCIPY, found, near, scale)
        found = np.maximum(np.minimum(found - excess / slope, most), least)
    return np.where(mean > 0.5, 1 - found, found)


@cache
def _mean_table(family: Family) -> tuple[np.ndarray, np.ndarray]:
    """Return a table of location / scale, ascending, and the mean / scale of the distribution at each."""
    x = np.linspace(*_GRID)
    if family is Family.TRUNCATED_NORMAL:
        x = np.append(np.geomspace(*_BELOW)[:0:-1], x)
    return x, moments(family, x, np.ones_like(x))[0]


def _standard_moments(family: Family, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of a truncated or skewed distribution at location `x` and scale one."""
    if family is Family.LOGNORMAL:
        return _ratio(x), np.ones_like(x) + 0 * x
    if family is Family.TRUNCATED_NORMAL:
        mean, variance = forms.truncated_moments(_SCIPY, -x)
        return mean, np.sqrt(variance)
    return forms.gamma_moments(_SCIPY, x, lambda k, at: tuple(gammaincc(k + more, at) for more in range(3)))


def crps_above(family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray, threshold: float) -> np.ndarray:
    """Return the threshold-weighted CRPS with weight one above `threshold`, in the units of the truth `y`.

    It is the integral of (F(x) - 1{y <= x})^2 over x > threshold, from Gneiting & Ranjan (2011),
    doi:10.1198/jbes.2010.08110. The normal distribution, and the censored normal for thresholds of zero or more, have a
    closed form: the CRPS of the normal distribution censored at the threshold. For the others the integral is computed
    by Gauss-Legendre quadrature between quantiles, separately below and above y. A threshold of -inf gives the CRPS.

    Raises:
        UserError: `threshold` is NaN or +inf, or a scale is negative.
    """
    if not threshold < np.inf:
        raise UserError(f"threshold={threshold}: must be a number, or -inf for all values")
    if np.isneginf(threshold):
        return crps(family, location, scale, y)
    location, scale, y = (np.asarray(a, np.float64) for a in (location, scale, y))
    if family is Family.NORMAL or (family is Family.CENSORED_NORMAL and threshold >= 0):
        return crps(Family.CENSORED_NORMAL, location - threshold, scale, np.maximum(y - threshold, 0))
    at = np.maximum(y, threshold)
    edges = [np.maximum(quantile(family, location, scale, level), threshold) for level in _LEVELS]
    points, weights = np.polynomial.legendre.leggauss(_NODES)
    found = np.zeros(np.broadcast_shapes(location.shape, scale.shape, y.shape))
    # The integrand jumps at y. An interval between quantiles that holds y is split there, because a quadrature across
    # the jump would converge slowly.
    for first, last in itertools.pairwise([np.asarray(threshold, np.float64), *edges]):
        for start, end, step in (
            (np.minimum(first, at), np.minimum(last, at), 0.0),
            (np.maximum(first, at), np.maximum(last, at), 1.0),
        ):
            half = (end - start) / 2
            for point, weight in zip(points, weights, strict=True):
                found += weight * half * (cdf(family, location, scale, start + half * (point + 1)) - step) ** 2
    found += np.maximum(at - edges[-1], 0)  # beyond the last quantile, F is taken as one
    return found
