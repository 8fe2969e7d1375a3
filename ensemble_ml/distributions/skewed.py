"""Distributions of quantities above zero with a long upper tail: log-normal, and censored shifted gamma.

Both are given by a location and a scale in the units of the variable, like the distributions made from the normal one,
so that one head serves all.

    x      location / scale
    r(x)   log(1 + exp(2 x)) / 2, which is close to x except for small x, and never negative
    c      `GAMMA_SHIFT`

- log-normal: mean scale r(x), standard deviation scale. So sigma_log^2 = log(1 + 1 / r^2), and mu_log = log(mean) -
  sigma_log^2 / 2. CRPS: Baran & Lerch (2015), doi:10.1002/qj.2521, equation 4.
- censored shifted gamma: max(0, G - c scale), where G has a gamma distribution with mean scale r(x + c) and standard
  deviation scale. So its shape is k = r^2 and its own scale is scale / r. Scheuerer & Hamill (2015),
  doi:10.1175/MWR-D-15-0061.1, equations 1 and 10. From r = 100 on it is scored as a normal distribution, whose score
  differs by at most two thousandths of the scale there.

Everything is computed in float64, because the incomplete gamma function loses digits in float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy.special
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.special import gammainc, ndtr, ndtri

from ensemble_ml.fields import GAMMA_SHIFT, Family

LAWS = (Family.LOGNORMAL, Family.CENSORED_SHIFTED_GAMMA)
_LOWEST, _HIGHEST = -8.0, 100.0  # below, the distribution is as good as zero; above, the gamma is as good as normal
_TINY = 1e-290
_STEP = 1e-5  # relative step of the shape in a difference quotient


def crps(family: Family, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Return the CRPS of each forecast.

    Args:
        family: log-normal or censored shifted gamma.
        location: location, any shape.
        scale: scale, in the units of `location`; positive.
        y: observations, in the same units; zero or more.

    Returns:
        The score, in the units of `y`.
    """
    mu, sigma, at = location.double(), scale.double(), y.double()
    standard = _crps_lognormal if family is Family.LOGNORMAL else _crps_gamma
    return (sigma * standard(mu / sigma, at / sigma)).to(location.dtype)


def cdf(family: Family, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Return the distribution function P(value <= y).

    Args:
        family: log-normal or censored shifted gamma.
        location: location, any shape.
        scale: scale, in the units of `location`; positive.
        y: values, in the same units.

    Returns:
        Probabilities in [0, 1].
    """
    x, v = location.double() / scale.double(), y.double() / scale.double()
    if family is Family.LOGNORMAL:
        mu, sigma = _log_parameters(_ratio(x))
        found = torch.where(v > 0, ndtr((v.clamp(min=_TINY).log() - mu) / sigma), 0.0)
    else:
        r = _ratio((x + GAMMA_SHIFT).clamp(max=_HIGHEST))
        inside = gammainc(r * r, ((v + GAMMA_SHIFT) * r).clamp(min=0))
        found = torch.where(v >= 0, torch.where(_is_normal(x), ndtr(v - x), inside), 0.0)
    return found.clamp(0, 1).to(location.dtype)


def quantile(family: Family, location: Tensor, scale: Tensor, level: Tensor | float) -> Tensor:
    """Return the value that is not exceeded with probability `level`.

    Args:
        family: log-normal or censored shifted gamma.
        location: location, any shape.
        scale: scale, in the units of `location`; positive.
        level: probability; a number, or a tensor that broadcasts against `location`.

    Returns:
        Values in the units of `location`.
    """
    x = location.double() / scale.double()
    p = torch.as_tensor(level, dtype=torch.float64, device=location.device)
    if family is Family.LOGNORMAL:
        mu, sigma = _log_parameters(_ratio(x))
        found = torch.exp(mu + sigma * ndtri(p))
    else:
        r = _ratio((x + GAMMA_SHIFT).clamp(max=_HIGHEST))
        # Torch has no inverse of the incomplete gamma function, so SciPy computes it on the CPU.
        shape, share = np.broadcast_arrays((r * r).detach().cpu().numpy(), p.detach().cpu().numpy())
        inverse = torch.from_numpy(np.asarray(scipy.special.gammaincinv(shape, share))).to(location.device)
        found = torch.where(_is_normal(x), x + ndtri(p), (inverse / r - GAMMA_SHIFT)).clamp(min=0)
    return (scale.double() * found).to(location.dtype)


def moments(family: Family, location: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation.

    Args:
        family: log-normal or censored shifted gamma.
        location: location, any shape.
        scale: scale, in the units of `location`; positive.

    Returns:
        Mean and standard deviation, in the units of `location`.
    """
    x, sigma = location.double() / scale.double(), scale.double()
    if family is Family.LOGNORMAL:
        return (sigma * _ratio(x)).to(location.dtype), scale
    r = _ratio((x + GAMMA_SHIFT).clamp(max=_HIGHEST))
    k, at = r * r, GAMMA_SHIFT * r
    above = [1 - gammainc(k, at)]  # 1 - F of the gamma distributions of shape k, k + 1 and k + 2
    above.append(above[0] + _density(k, at))
    above.append(above[1] + _density(k + 1, at))
    mean = k * above[1] - at * above[0]
    square = k * (k + 1) * above[2] - 2 * at * k * above[1] + at**2 * above[0]
    deviation = (square - mean**2).clamp(min=0).sqrt() / r
    mean, deviation = (
        torch.where(_is_normal(x), x, (mean / r).clamp(min=0)),
        torch.where(_is_normal(x), 1.0, deviation),
    )
    return (sigma * mean).to(location.dtype), (sigma * deviation).to(location.dtype)


def _ratio(x: Tensor) -> Tensor:
    """Return r(x)."""
    return softplus(x.clamp(min=_LOWEST), beta=2.0)


def _is_normal(x: Tensor) -> Tensor:
    """Return True where the gamma distribution is taken as a normal one."""
    return x + GAMMA_SHIFT >= _HIGHEST


def _log_parameters(r: Tensor) -> tuple[Tensor, Tensor]:
    """Return mu_log - log(scale) and sigma_log of the log-normal distribution."""
    square = torch.log1p(1 / (r * r))
    return r.log() - square / 2, square.sqrt()


def _crps_lognormal(x: Tensor, v: Tensor) -> Tensor:
    """Return the CRPS of the log-normal distribution at scale one, for x and v = y / scale."""
    r = _ratio(x)
    mu, sigma = _log_parameters(r)
    z = (v.clamp(min=_TINY).log() - mu) / sigma
    return v * (2 * ndtr(z) - 1) - 2 * r * (ndtr(z - sigma) - ndtr(-sigma / math.sqrt(2)))


def _crps_gamma(x: Tensor, v: Tensor) -> Tensor:
    """Return the CRPS of the censored shifted gamma distribution at scale one, for x and v = y / scale."""
    r = _ratio((x + GAMMA_SHIFT).clamp(max=_HIGHEST))
    k, low, at = r * r, GAMMA_SHIFT * r, (v + GAMMA_SHIFT) * r
    # The gamma branch is also evaluated where it is not used. A harmless argument keeps its value and gradient finite
    # there.
    at = torch.where(_is_normal(x), 1.0, at)
    f_low, f_at = _incomplete(k, low), _incomplete(k, at)
    next_low, next_at = f_low - _density(k, low), f_at - _density(k, at)  # F of shape k + 1
    spread = torch.exp(torch.lgamma(k + 0.5) - torch.lgamma(k)) / math.sqrt(math.pi)
    gamma = at * (2 * f_at - 1) - low * f_low**2 + k * (1 + 2 * f_low * next_low - f_low**2 - 2 * next_at)
    gamma = (gamma - spread * (1 - _incomplete(2 * k, 2 * low))) / r
    z = v - x
    normal = z * torch.erf(z / math.sqrt(2)) + 2 * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi) - math.pi**-0.5
    return torch.where(_is_normal(x), normal, gamma)


def _density(k: Tensor, x: Tensor) -> Tensor:
    """Return x^k exp(-x) / Gamma(k + 1), by which F of shape k exceeds that of shape k + 1."""
    return torch.exp(k * x.clamp(min=_TINY).log() - x - torch.lgamma(k + 1))


class _Incomplete(torch.autograd.Function):
    """The regularised lower incomplete gamma function F_k(x), with a derivative by its shape, which torch lacks.

    That derivative is a central difference. Where k is largest, it is good to six digits of a score.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, x: Tensor) -> Tensor:
        """Return F_k(x)."""
        ctx.save_for_backward(k, x)
        return gammainc(k, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        k, x = ctx.saved_tensors
        # The step is relative, because shapes range over many powers of ten.
        by_shape = (gammainc(k * (1 + _STEP), x) - gammainc(k * (1 - _STEP), x)) / (2 * _STEP * k)
        by_x = torch.exp((k - 1) * x.clamp(min=_TINY).log() - x - torch.lgamma(k))
        return grads[0] * by_shape, grads[0] * by_x


def _incomplete(k: Tensor, x: Tensor) -> Tensor:
    """Return F_k(x)."""
    found = _Incomplete.apply(k, x)
    assert isinstance(found, Tensor)
    return found
