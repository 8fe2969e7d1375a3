"""The forecast distributions in closed form: CRPS, distribution function, quantile, moments.

    phi, Phi   density and distribution function of the standard normal distribution
    y          observation
    z          (y - location) / scale
    l          -location / scale, which is zero in standard units

Sources of the CRPS:

- normal: Gneiting et al. (2005), doi:10.1175/MWR2904.1, equation 5;
- normal truncated at zero: Thorarinsdottir & Gneiting (2010), doi:10.1111/j.1467-985X.2009.00616.x, section 3;
- normal censored at zero (all mass below zero is put at zero), and also at one: Jordan et al. (2019),
  doi:10.18637/jss.v090.i12, appendix A;
- log-normal and censored shifted gamma: see `skewed`.

The CRPS is written so that float32 keeps its digits. Where zero lies in the upper tail (l > 0), it goes through the
Mills ratio Phi(-x) / phi(x) = sqrt(pi / 2) erfcx(x / sqrt(2)), and never through a quotient of two vanishing numbers.
Both branches of every `where` are finite, and so are their gradients.

Distribution function, quantile and moments are not trained through; they are computed in float64. So is the CRPS of two
distributions: that with two bounds, because little is left between them where its scale is large; and the truncated one
where l > 0, because there the score falls as 1 / l and its slopes as 1 / l^2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.special import erfcx, log_ndtr, ndtr, ndtri

from ensemble_ml.distributions import skewed
from ensemble_ml.fields import Family

_SQRT2 = math.sqrt(2.0)
_ROOT_PI = math.sqrt(math.pi)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_FAR = 30.0  # l from which quantiles of the truncated normal come from the leading term of its tail
_SERIES = 100.0  # l from which two terms give the moments of the truncated normal to seven digits
_NOTHING = 40.0  # standard units beyond which the tail of a normal distribution is zero in float64


def crps(family: Family, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score (CRPS) of each forecast.

    An observation that the distribution cannot produce gets the score of the nearer bound plus its distance from it.

    Args:
        family: the distribution.
        location: location of the forecasts, physical units, any shape.
        scale: scale of the forecasts, in the same units; positive.
        y: observations, in the same units.

    Returns:
        The score of each forecast, in the units of `y`.
    """
    if family is Family.NORMAL:
        return scale * _crps_standard((y - location) / scale)
    # The formulas hold within the bounds only. Outside, the score grows by the distance, as the CRPS does.
    inside = torch.clamp(y, *family.bounds)
    outside = (y - inside).abs()
    if family in skewed.LAWS:
        return skewed.crps(family, location, scale, inside) + outside
    if family is Family.DOUBLY_CENSORED_NORMAL:
        return _crps_doubly_censored(location.double(), scale.double(), inside.double()).to(location.dtype) + outside
    standard = _crps_truncated if family is Family.TRUNCATED_NORMAL else _crps_censored
    return scale * standard((inside - location) / scale, -location / scale, inside / scale) + outside


def phi(x: Tensor) -> Tensor:
    """Return the standard normal density."""
    return _INV_SQRT_2PI * torch.exp(-0.5 * x * x)


def _mills(x: Tensor) -> Tensor:
    """Return the Mills ratio Phi(-x) / phi(x)."""
    return math.sqrt(math.pi / 2) * erfcx(x / _SQRT2)


def _crps_standard(z: Tensor) -> Tensor:
    """Return the CRPS of the standard normal distribution."""
    return z * torch.erf(z / _SQRT2) + 2 * phi(z) - 1 / _ROOT_PI


def _square_below(x: Tensor) -> Tensor:
    """Return the integral of Phi^2 from minus infinity to x."""
    cdf = ndtr(x)
    return x * cdf**2 + 2 * cdf * phi(x) - ndtr(_SQRT2 * x) / _ROOT_PI


def _crps_doubly_censored(mu: Tensor, sigma: Tensor, y: Tensor) -> Tensor:
    """Return the CRPS of the normal distribution censored at zero and one.

    It is that of the distribution censored at zero alone, less the integral of (1 - Phi)^2 above one.
    """
    censored = _crps_censored((y - mu) / sigma, -mu / sigma, y / sigma)
    return sigma * (censored - _square_below((mu - 1) / sigma))


def _crps_censored(z: Tensor, l: Tensor, above: Tensor) -> Tensor:
    """Return the CRPS, at scale one, of the normal distribution censored at zero.

    It is that of the uncensored distribution, less the integral of Phi^2 below l. `above` is z - l, which the caller
    gives exactly: the difference of two large numbers would lose digits.
    """
    # Both branches are computed at every point. Clamped arguments keep the unused one finite, and so its gradient.
    low_l, high_l = torch.clamp(l, max=0), torch.clamp(l, min=0)
    low = _crps_standard(z) - _square_below(low_l)
    # For l > 0 the large terms of both integrals cancel to z - l. What is left are tails, which are small.
    tail = ndtr(-high_l)
    high_z = torch.clamp(z, min=0)
    tails = 2 * phi(high_z) - 2 * high_z * ndtr(-high_z)
    tails = tails - (2 * phi(high_l) * (1 - tail) - 2 * high_l * tail + high_l * tail**2)
    high = above + tails - ndtr(-_SQRT2 * high_l) / _ROOT_PI
    return torch.where(l > 0, high, low)


def _crps_truncated(z: Tensor, l: Tensor, above: Tensor) -> Tensor:
    """Return the CRPS, at scale one, of the normal distribution truncated at zero; `above` is z - l."""
    low_l, high_l = torch.clamp(l, max=0), torch.clamp(l, min=0).double()
    mass = ndtr(-low_l)  # at least one half
    low = z * mass * (2 * ndtr(z) + mass - 2) + 2 * phi(z) * mass - ndtr(-_SQRT2 * low_l) / _ROOT_PI
    low = low / mass**2
    # Integrals of the survival function S through the Mills ratio m:
    # 2 int_z S = 2 exp((l^2 - z^2)/2) (1 - z m(z)) / m(l).
    # In float64, because terms as large as l leave a score of 1 / l and slopes of 1 / l^2.
    above = above.double()
    high_z = high_l + above
    mills = _mills(high_l)
    decay = torch.exp(-0.5 * above * (high_z + high_l))
    high = high_z - _SQRT2 * _mills(_SQRT2 * high_l) / mills**2 + 2 * decay * (1 - high_z * _mills(high_z)) / mills
    return torch.where(l > 0, high.to(low.dtype), low)


def cdf(family: Family, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Return the distribution function P(value <= y).

    At its bounds, a censored distribution counts the mass that lies there.

    Args:
        family: the distribution.
        location: location, any shape.
        scale: scale, in the units of `location`; positive.
        y: values, in the same units.

    Returns:
        Probabilities in [0, 1].
    """
    if family in skewed.LAWS:
        return skewed.cdf(family, location, scale, y)
    mu, sigma, at = location.double(), scale.double(), y.double()
    z, l = (at - mu) / sigma, -mu / sigma
    if family is Family.TRUNCATED_NORMAL:
        # The ratio of two tails is computed from their logarithms: far out, both would underflow to zero.
        found = torch.where(at > 0, -torch.expm1(log_ndtr(-torch.maximum(z, l)) - log_ndtr(-l)), 0.0)
    else:
        lower, upper = family.bounds
        found = torch.where(at >= upper, 1.0, torch.where(at < lower, 0.0, ndtr(z)))
    return found.clamp(0, 1).to(location.dtype)


def quantile(family: Family, location: Tensor, scale: Tensor, level: Tensor | float) -> Tensor:
    """Return the value that is not exceeded with probability `level`.

    Args:
        family: the distribution.
        location: location, any shape.
        scale: scale, in the units of `location`; positive.
        level: probability; a number, or a tensor that broadcasts against `location`.

    Returns:
        Values in the units of `location`.
    """
    if family in skewed.LAWS:
        return skewed.quantile(family, location, scale, level)
    mu, sigma = location.double(), scale.double()
    p = torch.as_tensor(level, dtype=torch.float64, device=location.device)
    if family is not Family.TRUNCATED_NORMAL:
        return torch.clamp(mu + sigma * ndtri(p), *family.bounds).to(location.dtype)
    l = -mu / sigma
    above = 0.5 * torch.erfc(torch.clamp(l, max=_FAR) / _SQRT2)  # torch's ndtr is zero below -10
    near = -ndtri((1 - p) * above)
    e = -torch.log1p(-p)  # the tail falls as exp(-(z^2 - l^2) / 2) there: z^2 = l^2 + 2 e
    far = l + 2 * e / (l + torch.sqrt(l * l + 2 * e)).clamp(min=1)
    z = torch.where(l > _FAR, far, near)
    return torch.clamp(mu + sigma * z, min=0).to(location.dtype)


def moments(family: Family, location: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the distribution.

    Args:
        family: the distribution.
        location: location, any shape.
        scale: scale, in the units of `location`; positive.

    Returns:
        Mean and standard deviation, in the units of `location`.
    """
    if family is Family.NORMAL:
        return location, scale
    if family in skewed.LAWS:
        return skewed.moments(family, location, scale)
    mu, sigma = location.double(), scale.double()
    lower, upper = family.bounds
    nearest = torch.clamp(mu, lower, upper)
    if family is Family.TRUNCATED_NORMAL:
        # `_truncated_moments` counts the mean from zero, so nothing cancels where the location lies far below zero.
        mean, variance = _truncated_moments(-mu / sigma)
        nearest = torch.zeros_like(mu)
    else:
        mean, variance = _censored_moments(*((at - mu) / sigma for at in (lower, nearest, upper)))
    mean = torch.clamp(nearest + sigma * mean, lower, upper)
    return mean.to(location.dtype), (sigma * torch.sqrt(variance)).to(location.dtype)


def _censored_moments(lower: Tensor, nearest: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the standard normal distribution censored at `lower` and `upper`.

    The mean is counted from c = `nearest`, the point between the bounds that is nearest to zero. E[(Y - c)^n] is the
    sum of integrals of n (t - c)^(n - 1) (1 - Phi(t)) over t > c, and of its mirror image below c.
    """
    up, above = excess(nearest, upper)
    down, below = excess(-nearest, -lower)
    return up - down, (above + below - (up - down) ** 2).clamp(min=0)


def excess(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integrals of 1 - Phi(t) and of 2 (t - start) (1 - Phi(t)) from `start` to `end`."""
    # Beyond this the tail is zero in float64, and x * ndtr(-x) would be infinity times zero.
    start, end = (torch.clamp(x, max=_NOTHING) for x in (start, end))
    first = [phi(x) - x * ndtr(-x) for x in (start, end)]
    second = [(1 - x * x) * ndtr(-x) + x * phi(x) for x in (start, end)]
    once = first[0] - first[1]
    return once, second[0] - second[1] - 2 * start * once


def _truncated_moments(l: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance at scale one of the normal distribution truncated at zero."""
    near = torch.clamp(l, max=_SERIES)
    hazard = torch.where(near > 0, 1 / _mills(near.clamp(min=0)), phi(near) / ndtr(-near.clamp(max=0)))
    mean, variance = hazard - near, 1 + near * hazard - hazard**2
    far = 1 / torch.clamp(l, min=_SERIES)
    mean = torch.where(l > _SERIES, far - 2 * far**3, mean)
    return mean, torch.where(l > _SERIES, far**2 - 6 * far**4, variance.clamp(min=0))
