"""CRPS, distribution function, quantile and moments of the forecast distributions, by the formulas of `closed_forms`.

Location, scale and values have the same physical units and any shape; the scale is positive. Results have the type of
`location`. Distribution function, quantile and moments are computed in float64, since no loss contains them. So is the
CRPS of

- the skewed distributions, because the incomplete gamma function loses digits in float32;
- the distribution with two bounds, which has little mass between them where its scale is large;
- the truncated normal with a location below zero, where large terms cancel (see `closed_forms.crps_truncated`).

`TORCH` has the functions of torch that the formulas take.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy.special
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.special import erfcx, gammainc, log_ndtr, ndtr, ndtri

from ensemble_ml import closed_forms as forms
from ensemble_ml.closed_forms import LOWEST, TINY, Maths
from ensemble_ml.fields import Family

_SQRT2 = math.sqrt(2.0)
_FAR = 30.0  # above this -location / scale, quantiles of the truncated normal use the leading term of its tail
_STEP = 1e-5  # relative step of the shape k, by which `_Incomplete` finds a derivative


def crps(family: Family, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score (CRPS) of observations `y`, in their units.

    An observation outside the bounds gets the score of the nearer bound plus the distance to that bound.
    """
    if family is Family.NORMAL:
        return scale * forms.crps_normal(TORCH, (y - location) / scale)
    # The formulas hold within the bounds only. Outside, the score grows by the distance, as the CRPS does.
    inside = torch.clamp(y, *family.bounds)
    outside = (y - inside).abs()
    if family in forms.SKEWED:
        mu, sigma, at = location.double(), scale.double(), inside.double()
        skewed = forms.crps_lognormal if family is Family.LOGNORMAL else forms.crps_gamma
        return (sigma * skewed(TORCH, mu / sigma, at / sigma)).to(location.dtype) + outside
    if family is Family.DOUBLY_CENSORED_NORMAL:
        return _crps_doubly_censored(location.double(), scale.double(), inside.double()).to(location.dtype) + outside
    standard = forms.crps_truncated if family is Family.TRUNCATED_NORMAL else forms.crps_censored
    return scale * standard(TORCH, (inside - location) / scale, -location / scale, inside / scale) + outside


def _crps_doubly_censored(mu: Tensor, sigma: Tensor, y: Tensor) -> Tensor:
    """Return the CRPS of the normal distribution censored at zero and one.

    This is the CRPS of the distribution censored at zero alone, less the integral of (1 - Phi)^2 above one.
    """
    censored = forms.crps_censored(TORCH, (y - mu) / sigma, -mu / sigma, y / sigma)
    return sigma * (censored - forms.square_below(TORCH, (mu - 1) / sigma))


def cdf(family: Family, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Return the distribution function P(value <= y), in [0, 1]; at a bound, with the mass that lies there.

    It is NaN where an argument is.
    """
    mu, sigma, at = location.double(), scale.double(), y.double()
    z, l, x, v = (at - mu) / sigma, -mu / sigma, mu / sigma, at / sigma
    if family is Family.LOGNORMAL:
        found = torch.where(v > 0, forms.cdf_lognormal(TORCH, x, v), 0.0)
    elif family is Family.CENSORED_SHIFTED_GAMMA:
        found = torch.where(v >= 0, forms.cdf_gamma(TORCH, x, v), 0.0)
    elif family is Family.TRUNCATED_NORMAL:
        found = torch.where(at > 0, forms.cdf_truncated(TORCH, z, l), 0.0)
    else:
        lower, upper = family.bounds
        found = torch.where(at >= upper, 1.0, torch.where(at < lower, 0.0, ndtr(z)))
    # A comparison with NaN is false, so a missing value would look like one beyond a bound.
    return torch.where(torch.isnan(z), torch.nan, found.clamp(0, 1)).to(location.dtype)


def quantile(family: Family, location: Tensor, scale: Tensor, level: Tensor | float) -> Tensor:
    """Return the value that is not exceeded with probability `level`, in the units of `location`.

    The level is between 0 and 1: a number, or a tensor that broadcasts against `location`.
    """
    mu, sigma = location.double(), scale.double()
    p = torch.as_tensor(level, dtype=torch.float64, device=location.device)
    if family in forms.SKEWED:
        skewed = forms.quantile_lognormal if family is Family.LOGNORMAL else forms.quantile_gamma
        return (sigma * skewed(TORCH, mu / sigma, p)).to(location.dtype)
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
    """Return mean and standard deviation of the distribution, in the units of `location`."""
    if family is Family.NORMAL:
        return location, scale
    mu, sigma = location.double(), scale.double()
    if family is Family.LOGNORMAL:
        return (sigma * TORCH.ratio(mu / sigma)).to(location.dtype), scale
    if family is Family.CENSORED_SHIFTED_GAMMA:
        mean, deviation = forms.gamma_moments(TORCH, mu / sigma, survivals)
        return (sigma * mean).to(location.dtype), (sigma * deviation).to(location.dtype)
    lower, upper = family.bounds
    nearest = torch.clamp(mu, lower, upper)
    if family is Family.TRUNCATED_NORMAL:
        # `truncated_moments` counts the mean from zero, so nothing cancels where the location lies far below zero.
        mean, variance = forms.truncated_moments(TORCH, -mu / sigma)
        nearest = torch.zeros_like(mu)
    else:
        mean, variance = forms.censored_moments(TORCH, *((at - mu) / sigma for at in (lower, nearest, upper)))
    mean = torch.clamp(nearest + sigma * mean, lower, upper)
    return mean.to(location.dtype), (sigma * torch.sqrt(variance)).to(location.dtype)


class _Incomplete(torch.autograd.Function):
    """The regularised lower incomplete gamma function F_k(x), with a derivative by its shape, which torch lacks.

    The derivative by the shape k is a central difference. At the largest k, it gives derivatives of scores to six
    digits.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(k, x)
        return gammainc(k, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        k, x = ctx.saved_tensors
        # The step is relative, because shapes range over many powers of ten.
        by_shape = (gammainc(k * (1 + _STEP), x) - gammainc(k * (1 - _STEP), x)) / (2 * _STEP * k)
        by_x = torch.exp((k - 1) * x.clamp(min=TINY).log() - x - torch.lgamma(k))
        return grads[0] * by_shape, grads[0] * by_x


def density(k: Tensor, x: Tensor) -> Tensor:
    """Return x^k exp(-x) / Gamma(k + 1), which is F_k(x) - F_{k + 1}(x) (DLMF 8.8.5)."""
    return torch.exp(k * x.clamp(min=TINY).log() - x - torch.lgamma(k + 1))


def survivals(k: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 - F(x) of the gamma distributions of shapes k, k + 1 and k + 2."""
    whole = 1 - gammainc(k, x)
    first = whole + density(k, x)
    return whole, first, first + density(k + 1, x)


def _gammaincinv(k: Tensor, p: Tensor) -> Tensor:
    """Return the inverse of the incomplete gamma function, which torch lacks: SciPy computes it on the CPU."""
    shape, share = np.broadcast_arrays(k.detach().cpu().numpy(), p.detach().cpu().numpy())
    return torch.from_numpy(np.asarray(scipy.special.gammaincinv(shape, share))).to(k.device)


TORCH = Maths(
    where=torch.where,
    exp=torch.exp,
    log=torch.log,
    log1p=torch.log1p,
    expm1=torch.expm1,
    sqrt=torch.sqrt,
    maximum=torch.maximum,
    erf=torch.erf,
    erfcx=erfcx,
    ndtr=ndtr,
    log_ndtr=log_ndtr,
    ndtri=ndtri,
    lgamma=torch.lgamma,
    double=torch.Tensor.double,
    like=lambda x, other: x.to(other.dtype),
    at_least=lambda x, bound: torch.clamp(x, min=bound),
    at_most=lambda x, bound: torch.clamp(x, max=bound),
    ratio=lambda x: softplus(x.clamp(min=LOWEST), beta=2.0),
    gammainc=gammainc,
    gammaincinv=_gammaincinv,
    incomplete=_Incomplete.apply,
    next_incomplete=lambda k, x, found: found - density(k, x),
)
