"""The closed forms of the forecast distributions at scale one, for tensors and for arrays alike.

A formula takes its functions from `m`, a `Maths`: `distributions` gives those of torch, `verification.families` those
of NumPy and SciPy. Each side keeps its own, because torch has gradients and SciPy has more digits. In float64, torch's
incomplete gamma function is good to 4e-10, its softplus to 1e-9, and the standard deviation that its `ndtr` gives for a
censored distribution to 6e-8 of the scale.

    phi, Phi   density and distribution function of the standard normal distribution
    y          observation
    v          y / scale
    z          (y - location) / scale
    l          -location / scale, where zero lies in standard units
    x          location / scale
    r(x)       log(1 + exp(2 x)) / 2, which approaches x for large x, and is always above zero
    c          `GAMMA_SHIFT`

Sources of the CRPS:

- normal: Gneiting et al. (2005), doi:10.1175/MWR2904.1, equation 5;
- normal truncated at zero: Thorarinsdottir & Gneiting (2010), doi:10.1111/j.1467-985X.2009.00616.x, section 3;
- normal censored at zero (all mass below zero is moved to zero), or at zero and one: Jordan et al. (2019),
  doi:10.18637/jss.v090.i12, appendix A;
- log-normal: Baran & Lerch (2015), doi:10.1002/qj.2521, equation 4. Its mean is scale r(x), its standard deviation the
  scale. So sigma_log^2 = log(1 + 1 / r^2), and mu_log = log(mean) - sigma_log^2 / 2;
- censored shifted gamma, max(0, G - c scale), where G has a gamma distribution with mean scale r(x + c) and standard
  deviation scale: Scheuerer & Hamill (2015), doi:10.1175/MWR-D-15-0061.1, equations 1 and 10. Its shape is k = r^2 and
  its own scale is scale / r. From r = 100 on it is scored as a normal distribution, whose score differs by at most two
  thousandths of the scale there.

Every CRPS holds for observations within the bounds of the distribution. It is written so that float32 keeps its digits.
Where zero lies above the location (l > 0), the CRPS of the
truncated normal is computed from the Mills ratio Phi(-t) / phi(t) = sqrt(pi / 2) erfcx(t / sqrt(2)), and not from a
quotient of two numbers near zero. Both branches of every `where` are finite, and so are their gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ensemble_ml.fields import GAMMA_SHIFT, Family

SKEWED = (Family.LOGNORMAL, Family.CENSORED_SHIFTED_GAMMA)
# Below the first x, a skewed distribution is as good as zero. From the second x + c, the gamma is as good as normal.
LOWEST, HIGHEST = -8.0, 100.0
TINY = 1e-290  # takes the place of zero in logarithms and divisors
_SQRT2 = math.sqrt(2.0)
_ROOT_PI = math.sqrt(math.pi)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_SERIES = 100.0  # l from which two terms of a series give the moments of the truncated normal to seven digits
_NOTHING = 40.0  # standard units beyond which the tail of a normal distribution is zero in float64


@dataclass(frozen=True, kw_only=True)
class Maths:
    """The functions of one library, for its tensors or arrays.

    `at_least` and `at_most` clip by a number, `double` converts to float64, `like` to the type of its second argument,
    and `ratio` is r(x). `incomplete` and `next_incomplete` are the regularised lower incomplete gamma functions of
    shapes k and k + 1; the third argument of `next_incomplete` is the value of `incomplete`. `gammainc` equals
    `incomplete`, but in torch it has no derivative by the shape.
    """

    where: Any
    exp: Any
    log: Any
    log1p: Any
    sqrt: Any
    expm1: Any
    maximum: Any
    erf: Any
    erfcx: Any
    ndtr: Any
    log_ndtr: Any
    ndtri: Any
    lgamma: Any
    double: Any
    like: Any
    at_least: Any
    at_most: Any
    ratio: Any
    gammainc: Any
    gammaincinv: Any
    incomplete: Any
    next_incomplete: Any


def phi(m: Maths, x: Any) -> Any:
    """Return the standard normal density."""
    return _INV_SQRT_2PI * m.exp(-0.5 * x * x)


def mills(m: Maths, x: Any) -> Any:
    """Return the Mills ratio Phi(-x) / phi(x)."""
    return math.sqrt(math.pi / 2) * m.erfcx(x / _SQRT2)


def crps_normal(m: Maths, z: Any) -> Any:
    """Return the CRPS of the standard normal distribution."""
    return z * m.erf(z / _SQRT2) + 2 * phi(m, z) - 1 / _ROOT_PI


def square_below(m: Maths, x: Any) -> Any:
    """Return the integral of Phi^2 from minus infinity to x."""
    cdf = m.ndtr(x)
    return x * cdf**2 + 2 * cdf * phi(m, x) - m.ndtr(_SQRT2 * x) / _ROOT_PI


def crps_censored(m: Maths, z: Any, l: Any, above: Any) -> Any:
    """Return the CRPS of the normal distribution censored at zero.

    It is that of the uncensored distribution, less the integral of Phi^2 below l. `above` is z - l, which the caller
    gives exactly: the difference of two large numbers would lose digits.
    """
    # Both branches are computed at every point. Clamped arguments keep the unused one and its gradient finite.
    low_l, high_l = m.at_most(l, 0), m.at_least(l, 0)
    low = crps_normal(m, z) - square_below(m, low_l)
    # For l > 0 the large terms of both integrals cancel to z - l. What is left are tails, which are small.
    tail = m.ndtr(-high_l)
    high_z = m.at_least(z, 0)
    tails = 2 * phi(m, high_z) - 2 * high_z * m.ndtr(-high_z)
    tails = tails - (2 * phi(m, high_l) * (1 - tail) - 2 * high_l * tail + high_l * tail**2)
    high = above + tails - m.ndtr(-_SQRT2 * high_l) / _ROOT_PI
    return m.where(l > 0, high, low)


def crps_truncated(m: Maths, z: Any, l: Any, above: Any) -> Any:
    """Return the CRPS of the normal distribution truncated at zero; `above` is z - l, as in `crps_censored`."""
    low_l, high_l = m.at_most(l, 0), m.double(m.at_least(l, 0))
    mass = m.ndtr(-low_l)  # at least one half
    low = z * mass * (2 * m.ndtr(z) + mass - 2) + 2 * phi(m, z) * mass - m.ndtr(-_SQRT2 * low_l) / _ROOT_PI
    low = low / mass**2
    # Integrals of the survival function S through the Mills ratio:
    # 2 int_z S = 2 exp((l^2 - z^2)/2) (1 - z mills(z)) / mills(l).
    # They are computed in float64, because terms as large as l cancel to a score of 1 / l and slopes of 1 / l^2.
    above = m.double(above)
    high_z = high_l + above
    ratio = mills(m, high_l)
    decay = m.exp(-0.5 * above * (high_z + high_l))
    high = high_z - _SQRT2 * mills(m, _SQRT2 * high_l) / ratio**2 + 2 * decay * (1 - high_z * mills(m, high_z)) / ratio
    return m.where(l > 0, m.like(high, low), low)


def cdf_truncated(m: Maths, z: Any, l: Any) -> Any:
    """Return the distribution function of the normal distribution truncated at zero, for values above zero."""
    # The ratio of two tails is computed from their logarithms: far out, both would underflow to zero.
    return -m.expm1(m.log_ndtr(-m.maximum(z, l)) - m.log_ndtr(-l))


def censored_moments(m: Maths, lower: Any, nearest: Any, upper: Any) -> tuple[Any, Any]:
    """Return mean and variance of the standard normal distribution censored at `lower` and `upper`.

    The mean is counted from c = `nearest`, the point between the bounds that is nearest to zero. E[(Y - c)^n] is the
    integral of n (t - c)^(n - 1) (1 - Phi(t)) from c to `upper`, plus (-1)^n times its mirror image below c.
    """
    up, above = excess(m, nearest, upper)
    down, below = excess(m, -nearest, -lower)
    return up - down, m.at_least(above + below - (up - down) ** 2, 0)


def excess(m: Maths, start: Any, end: Any) -> tuple[Any, Any]:
    """Return the integrals of 1 - Phi(t) and of 2 (t - start) (1 - Phi(t)) from `start` to `end`."""
    # Beyond `_NOTHING` the tail is zero in float64, and x * ndtr(-x) would be infinity times zero.
    start, end = (m.at_most(x, _NOTHING) for x in (start, end))
    first = [phi(m, x) - x * m.ndtr(-x) for x in (start, end)]
    second = [(1 - x * x) * m.ndtr(-x) + x * phi(m, x) for x in (start, end)]
    once = first[0] - first[1]
    return once, second[0] - second[1] - 2 * start * once


def excess_between(m: Maths, location: Any, mean: Any, scale: Any) -> tuple[Any, Any]:
    """Return the mean of the normal distribution censored at zero and one, less `mean`, and its slope.

    The slope is the derivative by the location. All arguments are in the units of the variable.
    """
    lower, upper = -location / scale, (1 - location) / scale
    return scale * excess(m, lower, upper)[0] - mean, m.at_least(m.ndtr(-lower) - m.ndtr(-upper), TINY)


def truncated_moments(m: Maths, l: Any) -> tuple[Any, Any]:
    """Return mean and variance of the normal distribution truncated at zero.

    Source: Johnson et al. (1994), Continuous Univariate Distributions 1, section 13.10. The mean is counted from zero.
    """
    near = m.at_most(l, _SERIES)
    hazard = m.where(near > 0, 1 / mills(m, m.at_least(near, 0)), phi(m, near) / m.ndtr(-m.at_most(near, 0)))
    mean, variance = hazard - near, 1 + near * hazard - hazard**2
    far = 1 / m.at_least(l, _SERIES)
    mean = m.where(l > _SERIES, far - 2 * far**3, mean)
    return mean, m.where(l > _SERIES, far**2 - 6 * far**4, m.at_least(variance, 0))


def log_parameters(m: Maths, r: Any) -> tuple[Any, Any]:
    """Return mu_log - log(scale) and sigma_log of the log-normal distribution."""
    square = m.log1p(1 / (r * r))
    return m.log(r) - square / 2, m.sqrt(square)


def crps_lognormal(m: Maths, x: Any, v: Any) -> Any:
    """Return the CRPS of the log-normal distribution."""
    r = m.ratio(x)
    mu, sigma = log_parameters(m, r)
    z = (m.log(m.at_least(v, TINY)) - mu) / sigma
    return v * (2 * m.ndtr(z) - 1) - 2 * r * (m.ndtr(z - sigma) - m.ndtr(-sigma / math.sqrt(2)))


def cdf_lognormal(m: Maths, x: Any, v: Any) -> Any:
    """Return the distribution function of the log-normal distribution, for values above zero."""
    mu, sigma = log_parameters(m, m.ratio(x))
    return m.ndtr((m.log(m.at_least(v, TINY)) - mu) / sigma)


def quantile_lognormal(m: Maths, x: Any, p: Any) -> Any:
    """Return the quantile of the log-normal distribution at probability `p`."""
    mu, sigma = log_parameters(m, m.ratio(x))
    return m.exp(mu + sigma * m.ndtri(p))


def gamma_ratio(m: Maths, x: Any) -> Any:
    """Return r(x + c) of the censored shifted gamma distribution, with x + c at most `HIGHEST`."""
    return m.ratio(m.at_most(x + GAMMA_SHIFT, HIGHEST))


def is_normal(x: Any) -> Any:
    """Return True where a normal distribution takes the place of the gamma distribution."""
    return x + GAMMA_SHIFT >= HIGHEST


def crps_gamma(m: Maths, x: Any, v: Any) -> Any:
    """Return the CRPS of the censored shifted gamma distribution."""
    r = gamma_ratio(m, x)
    k, low, at = r * r, GAMMA_SHIFT * r, (v + GAMMA_SHIFT) * r
    # The gamma branch is also evaluated where it is not used. A harmless argument keeps its value and gradient finite
    # there.
    at = m.where(is_normal(x), 1.0, at)
    f_low, f_at = m.incomplete(k, low), m.incomplete(k, at)
    next_low, next_at = m.next_incomplete(k, low, f_low), m.next_incomplete(k, at, f_at)
    spread = m.exp(m.lgamma(k + 0.5) - m.lgamma(k)) / math.sqrt(math.pi)
    gamma = at * (2 * f_at - 1) - low * f_low**2 + k * (1 + 2 * f_low * next_low - f_low**2 - 2 * next_at)
    gamma = (gamma - spread * (1 - m.incomplete(2 * k, 2 * low))) / r
    z = v - x
    normal = z * m.erf(z / math.sqrt(2)) + 2 * m.exp(-z * z / 2) / math.sqrt(2 * math.pi) - math.pi**-0.5
    return m.where(is_normal(x), normal, gamma)


def cdf_gamma(m: Maths, x: Any, v: Any) -> Any:
    """Return the distribution function of the censored shifted gamma distribution, for values of zero or more."""
    r = gamma_ratio(m, x)
    inside = m.gammainc(r * r, m.at_least((v + GAMMA_SHIFT) * r, 0))
    return m.where(is_normal(x), m.ndtr(v - x), inside)


def quantile_gamma(m: Maths, x: Any, p: Any) -> Any:
    """Return the quantile of the censored shifted gamma distribution at probability `p`."""
    r = gamma_ratio(m, x)
    return m.at_least(m.where(is_normal(x), x + m.ndtri(p), m.gammaincinv(r * r, p) / r - GAMMA_SHIFT), 0)


def gamma_moments(m: Maths, x: Any, above: Any) -> tuple[Any, Any]:
    """Return mean and standard deviation of the censored shifted gamma distribution.

    E[Y] and E[Y^2] over y > 0 follow by integration by parts. `above` is a function that returns 1 - F of the gamma
    distributions of shapes k, k + 1 and k + 2 at a value.
    """
    r = gamma_ratio(m, x)
    k, at = r * r, GAMMA_SHIFT * r
    whole, first, second = above(k, at)
    mean = k * first - at * whole
    square = k * (k + 1) * second - 2 * at * k * first + at**2 * whole
    deviation = m.sqrt(m.at_least(square - mean**2, 0)) / r
    return m.where(is_normal(x), x, m.at_least(mean / r, 0)), m.where(is_normal(x), 1.0, deviation)
