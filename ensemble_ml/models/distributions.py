"""The forecast distributions in closed form: CRPS, cdf, quantile, moments.

With standard normal density phi and distribution function Phi, z = (y - location) / scale and l = -location / scale
(zero in standard units):

- normal: Gneiting et al. (2005), doi:10.1175/MWR2904.1, equation 5;
- normal truncated at zero: Thorarinsdottir & Gneiting (2010), doi:10.1111/j.1467-985X.2009.00616.x, section 3;
- normal censored at zero, all mass below put at zero: Jordan et al. (2019), doi:10.18637/jss.v090.i12, appendix A;
- log-normal and censored shifted gamma: see `skewed`.

The CRPS is written so that float32 keeps its digits: where zero lies in the upper tail (l > 0), through the Mills ratio
Phi(-x) / phi(x) = sqrt(pi / 2) erfcx(x / sqrt(2)), never as a quotient of two vanishing numbers. Both branches of every
`where` are finite, so gradients are. What is not trained through (cdf, quantile, moments) is computed in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.special import erfcx, log_ndtr, ndtr, ndtri

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.models import skewed

_SQRT2 = math.sqrt(2.0)
_ROOT_PI = math.sqrt(math.pi)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_FAR = 30.0  # scales beyond zero where the truncated normal is exponential to four digits


def crps(family: Family, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score of each forecast, in the units of `y`.

    Observations below zero, which only the normal law can produce, are scored as zero plus their distance from it.
    """
    if family is Family.NORMAL:
        return scale * _crps_standard((y - location) / scale)
    below = torch.clamp(-y, min=0)
    y = torch.clamp(y, min=0)
    if family in skewed.LAWS:
        return skewed.crps(family, location, scale, y) + below
    standard = _crps_truncated if family is Family.TRUNCATED_NORMAL else _crps_censored
    return scale * standard((y - location) / scale, -location / scale, y / scale) + below


def _phi(x: Tensor) -> Tensor:
    return _INV_SQRT_2PI * torch.exp(-0.5 * x * x)


def _mills(x: Tensor) -> Tensor:
    return math.sqrt(math.pi / 2) * erfcx(x / _SQRT2)


def _crps_standard(z: Tensor) -> Tensor:
    return z * torch.erf(z / _SQRT2) + 2 * _phi(z) - 1 / _ROOT_PI


def _crps_censored(z: Tensor, l: Tensor, above: Tensor) -> Tensor:
    """crps of the uncensored law less the integral of Phi^2 below l; `above` = z - l, given exactly."""
    low_l, high_l = torch.clamp(l, max=0), torch.clamp(l, min=0)
    cdf = ndtr(low_l)
    low = _crps_standard(z) - (low_l * cdf**2 + 2 * cdf * _phi(low_l) - ndtr(_SQRT2 * low_l) / _ROOT_PI)
    # For l > 0 the large terms of both integrals cancel to z - l; what is left are tails.
    tail = ndtr(-high_l)
    high_z = torch.clamp(z, min=0)
    tails = 2 * _phi(high_z) - 2 * high_z * ndtr(-high_z)
    tails = tails - (2 * _phi(high_l) * (1 - tail) - 2 * high_l * tail + high_l * tail**2)
    high = above + tails - ndtr(-_SQRT2 * high_l) / _ROOT_PI
    return torch.where(l > 0, high, low)


def _crps_truncated(z: Tensor, l: Tensor, above: Tensor) -> Tensor:
    low_l, high_l = torch.clamp(l, max=0), torch.clamp(l, min=0)
    mass = ndtr(-low_l)  # at least one half
    low = z * mass * (2 * ndtr(z) + mass - 2) + 2 * _phi(z) * mass - ndtr(-_SQRT2 * low_l) / _ROOT_PI
    low = low / mass**2
    # Integrals of the survival function over the Mills ratio m: 2 int_z S = 2 exp((l^2 - z^2)/2) (1 - z m(z)) / m(l).
    high_z = high_l + above
    mills = _mills(high_l)
    decay = torch.exp(-0.5 * above * (high_z + high_l))
    high = high_z - _SQRT2 * _mills(_SQRT2 * high_l) / mills**2 + 2 * decay * (1 - high_z * _mills(high_z)) / mills
    return torch.where(l > 0, high, low)


def cdf(family: Family, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """P(value <= y), in [0, 1]; at y = 0 the censored laws count their mass there."""
    if family in skewed.LAWS:
        return skewed.cdf(family, location, scale, y)
    mu, sigma, at = location.double(), scale.double(), y.double()
    z, l = (at - mu) / sigma, -mu / sigma
    if family is Family.NORMAL:
        found = ndtr(z)
    elif family is Family.CENSORED_NORMAL:
        found = torch.where(at >= 0, ndtr(z), 0.0)
    else:
        found = torch.where(at > 0, -torch.expm1(log_ndtr(-torch.maximum(z, l)) - log_ndtr(-l)), 0.0)
    return found.clamp(0, 1).to(location.dtype)


def quantile(family: Family, location: Tensor, scale: Tensor, level: Tensor | float) -> Tensor:
    """The value that is not exceeded with probability `level` (a number, or a tensor that broadcasts)."""
    if family in skewed.LAWS:
        return skewed.quantile(family, location, scale, level)
    mu, sigma = location.double(), scale.double()
    p = torch.as_tensor(level, dtype=torch.float64, device=location.device)
    if family is Family.NORMAL:
        return (mu + sigma * ndtri(p)).to(location.dtype)
    if family is Family.CENSORED_NORMAL:
        return torch.clamp(mu + sigma * ndtri(p), min=0).to(location.dtype)
    l = -mu / sigma
    above = 0.5 * torch.erfc(torch.clamp(l, max=_FAR) / _SQRT2)  # torch's ndtr is zero below -10
    near = -ndtri((1 - p) * above)
    far = l - torch.log1p(-p) / torch.clamp(l, min=1)  # the tail is exponential there
    z = torch.where(l > _FAR, far, near)
    return torch.clamp(mu + sigma * z, min=0).to(location.dtype)


def moments(family: Family, location: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the distribution."""
    if family is Family.NORMAL:
        return location, scale
    if family in skewed.LAWS:
        return skewed.moments(family, location, scale)
    mu, sigma = location.double(), scale.double()
    mean, variance = _standard_moments(family, -mu / sigma)
    # `mean` is counted from zero, so nothing cancels where the location lies far below it.
    return (sigma * mean).to(location.dtype), (sigma * torch.sqrt(variance)).to(location.dtype)


def _standard_moments(family: Family, l: Tensor) -> tuple[Tensor, Tensor]:
    """Mean above zero and variance at scale one."""
    if family is Family.CENSORED_NORMAL:
        mean = _phi(l) - l * ndtr(-l)
        square = (1 + l * l) * ndtr(-l) - l * _phi(l)
        return mean.clamp(min=0), (square - mean**2).clamp(min=0)
    near = torch.clamp(l, max=_FAR)
    hazard = torch.where(near > 0, 1 / _mills(near.clamp(min=0)), _phi(near) / ndtr(-near.clamp(max=0)))
    mean, variance = hazard - near, 1 + near * hazard - hazard**2
    far = 1 / torch.clamp(l, min=_FAR)
    return torch.where(l > _FAR, far, mean), torch.where(l > _FAR, far**2, variance.clamp(min=0))


_GRID = (-4.0, 8.0, 1201)  # location over scale, tabulated


def _mean_table(family: Family) -> tuple[Tensor, Tensor]:
    location = torch.linspace(*_GRID, dtype=torch.float64)
    if family in skewed.LAWS:
        return location, skewed.moments(family, location, torch.ones_like(location))[0]
    return location, _standard_moments(family, -location)[0]


# Made with the module: one that is made when first asked for, within a rehearsal on fake tensors, stays fake for all.
_MEAN_TABLES = {family: _mean_table(family) for family in Family if family is not Family.NORMAL}


def location_of_mean(family: Family, mean: Tensor, scale: Tensor) -> Tensor:
    """The location at which the distribution with this scale has this mean; not below -4 scales (a mean near zero).

    Read off a table (1 % of a scale apart, linear between), because no closed form exists; carries no gradient.
    """
    if family is Family.NORMAL:
        return mean
    with torch.no_grad():
        location, means = (t.to(mean.device) for t in _MEAN_TABLES[family])
        wanted = (mean.double() / scale.double()).contiguous()
        right = torch.searchsorted(means, wanted).clamp(1, len(means) - 1)
        share = (wanted - means[right - 1]) / (means[right] - means[right - 1])
        found = location[right - 1] + share.clamp(0, 1) * (location[right] - location[right - 1])
        found = torch.where(wanted >= means[-1], wanted, found)
        return (found * scale.double()).to(mean.dtype)


def widen(family: Family, location: Tensor, scale: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Location and scale of the law with `width` times the scale and the same mean, down to where the mean is nothing.

    A law that stops at zero would move with its scale: rain of a wider one is more rain.
    """
    wider = width * scale
    if family is Family.NORMAL:
        return location, wider
    same = location_of_mean(family, moments(family, location, scale)[0], wider)
    return torch.where(location > _GRID[0] * scale, same, width * location), wider


def remap_members(
    members: Tensor, mean: Tensor, spread: Tensor, location: Tensor, scale: Tensor, family: Family = Family.NORMAL,
    order: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Coherent members of the predicted distribution: each keeps its place among them in the new one.

    Args:
        members: (M, ...) raw members x_i, two or more; NaN where one is absent, which it stays.
        mean, spread: (...) their mean m and standard deviation s (ddof = 1).
        location, scale: (...) of the predicted distribution.
        family: normal members become location + scale (x_i - m) / s, whose mean and spread are exactly those predicted;
            where s is zero, normal quantiles at (rank - 1/2) / M, brought to mean 0 and s 1, stand for (x_i - m) / s.
            Of the others, whose raw members are far from normal, they are the quantiles at (rank - 1/2) / M, the M
            values with the least CRPS (Broecker 2012, doi:10.1002/qj.1891), times what gives them the law's mean:
            where it rains more rarely than once in M, all quantiles are zero, and the last in rank has all the rain.
        order: (M,) positions of the members, in the order in which equal ones are ranked; as they are given if None. It
            is one at all points of a forecast and another in the next, so that no member is wetter for good.

    Returns:
        (M, ...), in the dtype of `location`.

    Raises:
        UserError: there is only one member.
    """
    if len(members) < 2:
        raise UserError(f"members_out=true: {len(members)} member given; remapping needs two or more")
    order = torch.arange(len(members)) if order is None else order
    if family is Family.NORMAL:
        equal = ~(spread > 0)
        place = (members - mean) / torch.where(equal, 1.0, spread)
        place[:, equal] = _even_places(members[:, equal], order)
        return location + scale * place
    rank = _ranks(members, order)
    there = ~torch.isnan(members)
    count = there.sum(0)
    level = (rank.double() + 0.5) / count
    wide = location.double(), scale.double()
    found = torch.where(there, quantile(family, *wide, torch.where(there, level, 0.5)), 0.0)
    total, wanted = found.sum(0), moments(family, *wide)[0] * count
    alone = total <= 1e-6 * wanted  # zero of zero, too, where a law's mean is too small for a number
    last = torch.where(rank == count - 1, wanted, 0.0)
    found = torch.where(alone, last, found * (wanted / torch.where(alone, 1.0, total)))
    return torch.where(there, found, torch.nan).to(location.dtype)


def _ranks(members: Tensor, order: Tensor) -> Tensor:
    """Places of the members of each point from 0 up, NaN last, equal ones as they stand in `order`."""
    return members[order].argsort(dim=0, stable=True).argsort(0)[order.argsort()]


def _even_places(members: Tensor, order: Tensor) -> Tensor:
    """Normal quantiles at (rank - 1/2) / M with mean 0 and standard deviation 1 (ddof = 1): (M, N), as `members`.

    Zero where only one member is there, which has no spread.
    """
    there = ~torch.isnan(members)
    count = there.sum(0)
    place = torch.where(there, ndtri((_ranks(members, order).double() + 0.5) / count), 0.0)
    deviation = torch.sqrt(place.square().sum(0) / (count - 1))
    return torch.where(there, torch.where(count > 1, place / deviation, 0.0), torch.nan).to(members.dtype)
