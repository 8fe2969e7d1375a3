"""Evaluate the forecast distributions in NumPy.

For each distribution family this file has the CRPS, the distribution function, the quantiles, the log score, the
threshold-weighted CRPS, the moments, and the location that gives a distribution a wanted mean. A NaN in an input gives
a NaN in the result. A negative scale is refused. A scale of zero is a point forecast, and is refused only where a point
has no such value.

Families are those of `ensemble_ml.fields.Family`. Location and scale are in the units of the variable. The closed forms
of the CRPS use

    z     (y - location) / scale
    l     -location / scale, the position of zero in standard units
    phi   the standard normal density
    Phi   the standard normal distribution function

and come from these papers:

- normal: Gneiting et al. (2005), doi:10.1175/MWR2904.1, equation 5;
- normal truncated at zero: Thorarinsdottir & Gneiting (2010), doi:10.1111/j.1467-985X.2009.00616.x, section 3;
- normal censored at zero, and at zero and one: Jordan et al. (2019), doi:10.18637/jss.v090.i12, appendix A;
- log-normal: Baran & Lerch (2015), doi:10.1002/qj.2521, equation 4;
- censored shifted gamma: Scheuerer & Hamill (2015), doi:10.1175/MWR-D-15-0061.1, equation 10.

`ensemble_ml.distributions.skewed` states how location and scale give the parameters of the last two.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
from scipy import stats
from scipy.special import erf, erfcx, gammainc, gammaincc, gammaincinv, gammaln, hyp1f1, log_ndtr, ndtr, ndtri

from ensemble_ml.errors import UserError
from ensemble_ml.fields import GAMMA_SHIFT, Family
from ensemble_ml.verification.checks import check_between, check_scale

_SQRT2 = math.sqrt(2)
_ROOT_PI = math.sqrt(math.pi)
_LOWEST, _HIGHEST = -8.0, 100.0  # bounds of location / scale of the skewed distributions, as in training
_TINY = 1e-290
_LEVELS = (1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 1 - 1e-4, 1 - 1e-5, 1 - 1e-6)
_NODES = 12  # nodes of the quadrature between two of these levels
_GRID = (-4.0, 8.0, 1201)  # table of location / scale: first, last, number
_BELOW = (-4.0, -60.0, 281)  # table below it, for a distribution whose mean falls as 1 / -location
# Least mean of a truncated normal distribution, in scales. With a mean nearer to zero, the distribution would be
# narrower than the mean is known.
_LEAST_MEAN = 0.1
_FAR = 100.0  # scales beyond zero from which the truncated normal is exponential to seven digits
_NOTHING = 40.0  # scales beyond which a normal distribution has no mass left in float64
_NEWTON = 3  # Newton steps to the location of a mean between two bounds, which is then good to six digits
_CENSORED_NORMAL = (Family.CENSORED_NORMAL, Family.DOUBLY_CENSORED_NORMAL)
CENSORED = (*_CENSORED_NORMAL, Family.CENSORED_SHIFTED_GAMMA)  # families with a point mass at each bound


def crps(family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the CRPS of a parametric forecast.

    At scale zero this is the CRPS of a point forecast, the absolute error. A truth that the distribution cannot produce
    is scored as its nearer bound, plus the distance from that bound.

    Args:
        family: Family of the distribution.
        location: Location in the units of `y`.
        scale: Scale in the units of `y`, 0 or more.
        y: Truth. All arrays broadcast.

    Returns:
        float64 CRPS in the units of `y`.

    Raises:
        UserError: A scale is negative.
    """
    location, scale, y = (np.asarray(a, np.float64) for a in (location, scale, y))
    check_scale("scale", scale)
    spread_out = scale > 0
    unit = np.where(spread_out | np.isnan(scale), scale, 1.0)
    if family is Family.NORMAL:
        return np.where(spread_out | np.isnan(scale), unit * _normal((y - location) / unit), np.abs(y - location))
    inside = np.clip(y, *family.bounds)
    # np.where evaluates both branches, so the one that is not taken may overflow.
    with np.errstate(over="ignore", invalid="ignore"):
        if family in (Family.LOGNORMAL, Family.CENSORED_SHIFTED_GAMMA):
            skewed = _lognormal if family is Family.LOGNORMAL else _gamma
            found = unit * skewed(location / unit, inside / unit)
        else:
            standard = _truncated if family is Family.TRUNCATED_NORMAL else _censored
            found = unit * standard((inside - location) / unit, -location / unit, inside / unit)
        if family is Family.DOUBLY_CENSORED_NORMAL:
            # Censoring at one sets F to one beyond it, so the integral of (1 - F)^2 over x > 1 is taken off.
            found = found - unit * _square_below((location - 1) / unit)
    point = np.abs(inside - np.clip(location, *family.bounds))
    return np.where(spread_out | np.isnan(scale), found, point) + np.abs(y - inside)


def cdf(family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray, *, left: bool = False) -> np.ndarray:
    """Return the probability that the value is at most `y`.

    Args:
        family: Family of the distribution.
        location: Location in the units of `y`.
        scale: Scale in the units of `y`, 0 or more.
        y: Values. All arrays broadcast.
        left: Return P(value < y) instead. The two differ at the bounds of censored distributions, which have a mass
            there.

    Returns:
        float64 probabilities.

    Raises:
        UserError: A scale is negative.
    """
    location, scale, y = (np.asarray(a, np.float64) for a in (location, scale, y))
    check_scale("scale", scale)
    certain = scale == 0
    if certain.any():  # all mass lies in one point
        point = np.clip(location, *family.bounds)
        found = cdf(family, location, np.where(certain, 1.0, scale), y, left=left)
        return np.where(certain, (y > point) if left else (y >= point), found)
    x, v = location / scale, y / scale
    if family is Family.NORMAL:
        return ndtr(v - x)
    if family is Family.TRUNCATED_NORMAL:
        inside = -np.expm1(log_ndtr(-np.maximum(v - x, -x)) - log_ndtr(x))
    elif family is Family.LOGNORMAL:
        mu, sigma = _log_parameters(_ratio(x))
        inside = ndtr((np.log(np.maximum(v, _TINY)) - mu) / sigma)
    elif family in _CENSORED_NORMAL:
        inside = ndtr(v - x)
    else:
        r = _ratio(np.minimum(x + GAMMA_SHIFT, _HIGHEST))
        gamma = gammainc(r * r, np.maximum((v + GAMMA_SHIFT) * r, 0))
        inside = np.where(x + GAMMA_SHIFT >= _HIGHEST, ndtr(v - x), gamma)
    lower, upper = family.bounds
    masses = family in CENSORED and not left
    found = np.where((y >= lower) if masses else (y > lower), np.clip(inside, 0, 1), 0.0)
    found = np.where((y >= upper) if masses else (y > upper), 1.0, found)
    return np.where(np.isnan(inside), np.nan, found)


def quantile(family: Family, location: np.ndarray, scale: np.ndarray, level: np.ndarray | float) -> np.ndarray:
    """Return the value that is not exceeded with probability `level`.

    Args:
        family: Family of the distribution.
        location: Location in the units of the variable.
        scale: Scale in the units of the variable, 0 or more. At scale zero the quantile is the point itself.
        level: Probability in [0, 1]. All arrays broadcast.

    Returns:
        float64 quantiles in the units of the variable.

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
    if family is Family.LOGNORMAL:
        mu, sigma = _log_parameters(_ratio(x))
        return scale * np.exp(mu + sigma * ndtri(p))
    r = _ratio(np.minimum(x + GAMMA_SHIFT, _HIGHEST))
    gamma = gammaincinv(r * r, p) / r - GAMMA_SHIFT
    return scale * np.maximum(np.where(x + GAMMA_SHIFT >= _HIGHEST, x + ndtri(p), gamma), 0)


def log_score(family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return minus the logarithm of the predicted density at `y`, in nats.

    At a bound of a censored distribution the point mass takes the place of the density.

    Args:
        family: Family of the distribution.
        location: Location in the units of `y`.
        scale: Scale in the units of `y`, above 0, because a point has no density.
        y: Truth. All arrays broadcast.

    Returns:
        float64 score; infinite where the distribution cannot produce `y`.

    Raises:
        UserError: A scale is zero or negative.
    """
    location, scale, y = (np.asarray(a, np.float64) for a in (location, scale, y))
    check_scale("scale", scale, zero=False)
    x, v = location / scale, y / scale
    normal = 0.5 * (v - x) ** 2 + 0.5 * math.log(2 * math.pi) + np.log(scale)
    if family is Family.NORMAL:
        return normal
    if family is Family.TRUNCATED_NORMAL:
        return np.where(y < 0, np.inf, normal + log_ndtr(x))
    # A mass may be too small for a float64, while its logarithm is not.
    mass = -log_ndtr(-x) if family in CENSORED else np.inf
    if family in _CENSORED_NORMAL:
        density = normal
    elif family is Family.LOGNORMAL:
        mu, sigma = _log_parameters(_ratio(x))
        log_v = np.log(np.maximum(v, _TINY))
        z = (log_v - mu) / sigma
        density = 0.5 * z * z + 0.5 * math.log(2 * math.pi) + np.log(sigma) + log_v + np.log(scale)
    else:
        r = _ratio(np.minimum(x + GAMMA_SHIFT, _HIGHEST))
        at = np.maximum((v + GAMMA_SHIFT) * r, _TINY)
        density = at - (r * r - 1) * np.log(at) + gammaln(r * r) - np.log(r) + np.log(scale)
        far, k, low = x + GAMMA_SHIFT >= _HIGHEST, r * r, GAMMA_SHIFT * r
        density = np.where(far, normal, density)
        # P(k, low) = low^k e^-low M(1, k + 1, low) / Gamma(k + 1): DLMF 8.5.1
        mass = np.where(far, mass, low + gammaln(k + 1) - k * np.log(low) - np.log(hyp1f1(1.0, k + 1, low)))
    found = np.where(y > 0, density, np.where(y == 0, mass, np.inf))
    if family is Family.DOUBLY_CENSORED_NORMAL:
        found = np.where(y < 1, found, np.where(y == 1, -log_ndtr((location - 1) / scale), np.inf))
    return np.where(np.isnan(x + v), np.nan, found)


def moments(family: Family, location: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of a distribution.

    Sources: for the truncated normal, Johnson et al. (1994), Continuous Univariate Distributions 1, section 13.10. For
    the censored gamma, E[Y] and E[Y^2] over y > 0 follow by integration by parts. For a shape of k they need the
    distribution functions of the shapes k + 1 and k + 2. For the censored normals, let c be the point nearest to the
    location within the bounds. E[(Y - c)^n] is the integral of n (t - c)^(n - 1) (1 - Phi(t)) over t > c, plus its
    mirror image below c.

    Args:
        family: Family of the distribution.
        location: Location in the units of the variable.
        scale: Scale in the units of the variable, 0 or more. At scale zero the moments are those of the point.

    Returns:
        Mean and standard deviation in the units of the variable, float64.

    Raises:
        UserError: A scale is negative.
    """
    location, scale = np.broadcast_arrays(np.asarray(location, np.float64), np.asarray(scale, np.float64))
    check_scale("scale", scale)
    if family is Family.NORMAL:
        return location, scale
    certain = scale == 0
    unit = np.where(certain, 1.0, scale)
    point = np.clip(location, *family.bounds)
    if family in _CENSORED_NORMAL:
        mean, variance = _censored_moments(*((at - location) / unit for at in (0.0, point, family.bounds[1])))
        mean = np.clip(point + scale * mean, *family.bounds)
    else:
        mean, variance = _standard_moments(family, location / unit)
        mean = np.where(certain, point, scale * mean)
    return mean, np.where(certain, 0.0, scale * np.sqrt(variance))


def _censored_moments(lower: np.ndarray, nearest: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the variance of a censored standard normal distribution.

    The mean is counted from `nearest`, the point between the bounds that is nearest to zero. Far from the bounds this
    keeps digits that a difference of large numbers would lose.
    """
    up, above = _excess(nearest, upper)
    down, below = _excess(-nearest, -lower)
    return up - down, np.maximum(above + below - (up - down) ** 2, 0)


def _excess(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integrals of 1 - Phi(t) and of 2 (t - start) (1 - Phi(t)) from `start` to `end`."""
    start, end = np.minimum(start, _NOTHING), np.minimum(end, _NOTHING)
    once = (_phi(start) - start * ndtr(-start)) - (_phi(end) - end * ndtr(-end))
    first, last = ((1 - x * x) * ndtr(-x) + x * _phi(x) for x in (start, end))
    return once, first - last - 2 * start * once


def location_of_mean(family: Family, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the location that gives a distribution with this scale the wanted mean.

    Most of the families have no closed form for it. The location is interpolated linearly in a table whose steps are 1
    % of a scale, or 1 % of the location far below zero. Between two bounds, Newton steps follow (see
    `ensemble_ml.distributions`). The location never lies more than four scales beyond a bound, so a mean very
    near the bound is not met.

    The truncated normal distribution is an exception. Its mean approaches zero only for locations far below zero, so
    its table reaches further down, and its mean is at least `_LEAST_MEAN` scales.

    Args:
        family: Family of the distribution.
        mean: Wanted mean in the units of the variable.
        scale: Scale in the units of the variable, 0 or more. At scale zero the location is the mean.

    Returns:
        float64 location in the units of the variable.

    Raises:
        UserError: A scale is negative.
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

    By symmetry, a mean above one half is found as one minus the location for one minus the mean. Newton steps start at
    the location for a single bound.
    """
    near = np.where(mean > 0.5, 1 - mean, mean)
    found = least = location_of_mean(Family.CENSORED_NORMAL, near, scale)
    most = 0.5 + scale * ndtri(np.maximum(near, 0))
    for _ in range(_NEWTON):
        lower, upper = -found / scale, (1 - found) / scale
        excess = scale * _excess(lower, upper)[0] - near
        found = np.maximum(np.minimum(found - excess / np.maximum(ndtr(-lower) - ndtr(-upper), _TINY), most), least)
    return np.where(mean > 0.5, 1 - found, found)


@cache
def _mean_table(family: Family) -> tuple[np.ndarray, np.ndarray]:
    """Return a table of location / scale, and the mean / scale of the distribution at each."""
    x = np.linspace(*_GRID)
    if family is Family.TRUNCATED_NORMAL:
        x = np.append(np.geomspace(*_BELOW)[:0:-1], x)
    return x, moments(family, x, np.ones_like(x))[0]


def _standard_moments(family: Family, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the variance of a truncated or skewed distribution at location `x` and scale one."""
    if family is Family.LOGNORMAL:
        return _ratio(x), np.ones_like(x) + 0 * x
    if family is Family.TRUNCATED_NORMAL:
        near, l = np.maximum(x, -_FAR), np.maximum(-x, 1.0)
        hazard = np.where(near < 0, 1 / _mills(np.maximum(-near, 0)), _phi(near) / ndtr(np.maximum(near, 0)))
        mean, variance = near + hazard, np.maximum(1 - near * hazard - hazard**2, 0)
        far = x < -_FAR  # the differences above would lose their digits there
        return np.where(far, 1 / l - 2 / l**3, mean), np.where(far, 1 / l**2 - 6 / l**4, variance)
    r = _ratio(np.minimum(x + GAMMA_SHIFT, _HIGHEST))
    k, at = r * r, GAMMA_SHIFT * r
    above, first, second = (gammaincc(k + more, at) for more in range(3))
    mean = np.maximum(k * first - at * above, 0)
    variance = np.maximum(k * (k + 1) * second - 2 * at * k * first + at * at * above - mean**2, 0)
    normal = x + GAMMA_SHIFT >= _HIGHEST
    return np.where(normal, x, mean / r), np.where(normal, 1.0, variance / (r * r))


def crps_above(family: Family, location: np.ndarray, scale: np.ndarray, y: np.ndarray, threshold: float) -> np.ndarray:
    """Return the threshold-weighted CRPS with weight one above `threshold`.

    It is the integral of (F(x) - 1{y <= x})^2 over x > threshold, from Gneiting & Ranjan (2011),
    doi:10.1198/jbes.2010.08110. The normal and the normal censored below the threshold have a closed form, the CRPS of
    the distribution that is censored at the threshold. The others are integrated by Gauss-Legendre quadrature between
    quantiles, on either side of y.

    Args:
        family: Family of the distribution.
        location: Location in the units of `y`.
        scale: Scale in the units of `y`, 0 or more.
        y: Truth. All arrays broadcast.
        threshold: Lower limit in the units of `y`; -inf gives the CRPS.

    Returns:
        float64 score in the units of `y`.

    Raises:
        UserError: `threshold` is NaN or +inf, or a scale is negative.
    """
    if not threshold < np.inf:
        raise UserError(f"threshold={threshold}: must be a number, or -inf for all values")
    if np.isneginf(threshold):
        return crps(family, location, scale, y)
    location, scale, y = (np.asarray(a, np.float64) for a in (location, scale, y))
    check_scale("scale", scale)
    if family is Family.NORMAL or (family is Family.CENSORED_NORMAL and threshold >= 0):
        return crps(Family.CENSORED_NORMAL, location - threshold, scale, np.maximum(y - threshold, 0))
    at = np.maximum(y, threshold)
    edges = [np.maximum(quantile(family, location, scale, level), threshold) for level in _LEVELS]
    points, weights = np.polynomial.legendre.leggauss(_NODES)
    found = np.zeros(np.broadcast_shapes(location.shape, scale.shape, y.shape))
    # The integrand jumps at y. Each interval between quantiles is cut there, because a quadrature across the jump would
    # converge slowly.
    for first, last in itertools.pairwise([np.asarray(threshold, np.float64), *edges]):
        for start, end, step in (
            (np.minimum(first, at), np.minimum(last, at), 0.0),
            (np.maximum(first, at), np.maximum(last, at), 1.0),
        ):
            half = (end - start) / 2
            for point, weight in zip(points, weights, strict=True):
                found += weight * half * (cdf(family, location, scale, start + half * (point + 1)) - step) ** 2
    found += np.maximum(at - edges[-1], 0)  # beyond the last quantile F is taken as one
    return found


def _phi(x: np.ndarray) -> np.ndarray:
    """Return the standard normal density."""
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _mills(x: np.ndarray) -> np.ndarray:
    """Return the Mills ratio (1 - Phi(x)) / phi(x), without a quotient of vanishing numbers."""
    return math.sqrt(math.pi / 2) * erfcx(x / _SQRT2)


def _normal(z: np.ndarray) -> np.ndarray:
    """Return the CRPS of the standard normal distribution at the truth z."""
    return z * erf(z / _SQRT2) + 2 * _phi(z) - 1 / _ROOT_PI


def _square_below(x: np.ndarray) -> np.ndarray:
    """Return the integral of Phi^2 below x."""
    mass = ndtr(x)
    return x * mass**2 + 2 * mass * _phi(x) - ndtr(_SQRT2 * x) / _ROOT_PI


def _censored(z: np.ndarray, l: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Return the CRPS of the standard normal distribution censored below at l.

    It is the CRPS of the whole distribution less the integral of Phi^2 below l. `above` is z - l, given exactly.
    """
    low_l, high_l = np.minimum(l, 0), np.maximum(l, 0)
    low = _normal(z) - _square_below(low_l)
    # For l > 0 the large terms of both integrals cancel to z - l, and only tails are left. Computed directly, their
    # difference would lose all digits.
    tail, high_z = ndtr(-high_l), np.maximum(z, 0)
    tails = 2 * _phi(high_z) - 2 * high_z * ndtr(-high_z)
    tails = tails - (2 * _phi(high_l) * (1 - tail) - 2 * high_l * tail + high_l * tail**2)
    return np.where(l > 0, above + tails - ndtr(-_SQRT2 * high_l) / _ROOT_PI, low)


def _truncated(z: np.ndarray, l: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Return the CRPS of the standard normal distribution truncated below at l.

    For l > 0 it is written with the Mills ratio and not as a quotient of two vanishing tails. `above` is z - l, given
    exactly.
    """
    low_l, high_l = np.minimum(l, 0), np.maximum(l, 0)
    mass = ndtr(-low_l)
    low = z * mass * (2 * ndtr(z) + mass - 2) + 2 * _phi(z) * mass - ndtr(-_SQRT2 * low_l) / _ROOT_PI
    high_z, mills = high_l + above, _mills(high_l)
    decay = np.exp(-0.5 * above * (high_z + high_l))
    high = high_z - _SQRT2 * _mills(_SQRT2 * high_l) / mills**2 + 2 * decay * (1 - high_z * _mills(high_z)) / mills
    return np.where(l > 0, high, low / mass**2)


def _ratio(x: np.ndarray) -> np.ndarray:
    """Return log(1 + exp(2 x)) / 2, which approaches x for large x and is always above zero."""
    with np.errstate(invalid="ignore"):  # NaN stays
        return np.logaddexp(0.0, 2 * np.maximum(x, _LOWEST)) / 2


def _log_parameters(r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters mu and sigma of a log-normal distribution with mean `r` and standard deviation one."""
    square = np.log1p(1 / (r * r))
    return np.log(r) - square / 2, np.sqrt(square)


def _lognormal(x: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the CRPS of the log-normal distribution of location `x` and scale one, at the truth `v`."""
    r = _ratio(x)
    mu, sigma = _log_parameters(r)
    z = (np.log(np.maximum(v, _TINY)) - mu) / sigma
    return v * (2 * ndtr(z) - 1) - 2 * r * (ndtr(z - sigma) - ndtr(-sigma / _SQRT2))


def _gamma(x: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the CRPS of the censored shifted gamma distribution of location `x` and scale one, at the truth `v`.

    Its shape is k = r^2. Above `_HIGHEST` it is taken as normal.
    """
    r = _ratio(np.minimum(x + GAMMA_SHIFT, _HIGHEST))
    k, low, at = r * r, GAMMA_SHIFT * r, (v + GAMMA_SHIFT) * r
    f_low, f_at = gammainc(k, low), gammainc(k, at)
    next_low, next_at = gammainc(k + 1, low), gammainc(k + 1, at)
    spread = np.exp(gammaln(k + 0.5) - gammaln(k)) / _ROOT_PI
    found = at * (2 * f_at - 1) - low * f_low**2 + k * (1 + 2 * f_low * next_low - f_low**2 - 2 * next_at)
    found = (found - spread * (1 - gammainc(2 * k, 2 * low))) / r
    return np.where(x + GAMMA_SHIFT >= _HIGHEST, _normal(v - x), found)
