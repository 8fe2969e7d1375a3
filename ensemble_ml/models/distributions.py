"""The forecast distributions in closed form: CRPS, cdf, quantile, moments.

With standard normal density phi and distribution function Phi, z = (y - location) / scale and l = -location / scale
(zero in standard units):

- normal: Gneiting et al. (2005), doi:10.1175/MWR2904.1, equation 5;
- normal truncated at zero: Thorarinsdottir & Gneiting (2010), doi:10.1111/j.1467-985X.2009.00616.x, section 3;
- normal censored at zero, all mass below put at zero, and censored at one, too: Jordan et al. (2019),
  doi:10.18637/jss.v090.i12, appendix A;
- log-normal and censored shifted gamma: see `skewed`.

The CRPS is written so that float32 keeps its digits: where zero lies in the upper tail (l > 0), through the Mills ratio
Phi(-x) / phi(x) = sqrt(pi / 2) erfcx(x / sqrt(2)), never as a quotient of two vanishing numbers. Both branches of every
`where` are finite, so gradients are. What is not trained through (cdf, quantile, moments) is computed in float64, and
so are the law with two bounds (where its scale is large, little is left between them) and the truncated one where
l > 0 (the score falls as 1 / l, its slopes as 1 / l^2).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.special import erfcx, log_ndtr, ndtr, ndtri

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.models import skewed

_SQRT2 = math.sqrt(2.0)
_ROOT_PI = math.sqrt(math.pi)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_FAR = 30.0  # scales beyond zero where quantiles of the truncated normal are those of an exponential law
_SERIES = 100.0  # scales beyond zero where two terms give the moments of the truncated normal to seven digits
_NOTHING = 40.0  # scales beyond which no float64 is left of a normal law
_TINY = 1e-290
_LEAST_SLOPE = 1e-6  # of a mean by its location, that its gradient is divided by
_NEWTON = 3  # steps to the location of a mean between two bounds: it is then good to six digits


def crps(family: Family, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score of each forecast, in the units of `y`.

    Observations that the law cannot produce are scored as its nearer bound plus their distance from it.
    """
    if family is Family.NORMAL:
        return scale * _crps_standard((y - location) / scale)
    inside = torch.clamp(y, *family.bounds)
    outside = (y - inside).abs()
    if family in skewed.LAWS:
        return skewed.crps(family, location, scale, inside) + outside
    if family is Family.DOUBLY_CENSORED_NORMAL:
        return _crps_doubly_censored(location.double(), scale.double(), inside.double()).to(location.dtype) + outside
    standard = _crps_truncated if family is Family.TRUNCATED_NORMAL else _crps_censored
    return scale * standard((inside - location) / scale, -location / scale, inside / scale) + outside


def _phi(x: Tensor) -> Tensor:
    return _INV_SQRT_2PI * torch.exp(-0.5 * x * x)


def _mills(x: Tensor) -> Tensor:
    return math.sqrt(math.pi / 2) * erfcx(x / _SQRT2)


def _crps_standard(z: Tensor) -> Tensor:
    return z * torch.erf(z / _SQRT2) + 2 * _phi(z) - 1 / _ROOT_PI


def _square_below(x: Tensor) -> Tensor:
    """Integral of Phi^2 below x."""
    cdf = ndtr(x)
    return x * cdf**2 + 2 * cdf * _phi(x) - ndtr(_SQRT2 * x) / _ROOT_PI


def _crps_doubly_censored(mu: Tensor, sigma: Tensor, y: Tensor) -> Tensor:
    """crps of the law that is censored at zero alone less the integral of (1 - Phi)^2 above one."""
    censored = _crps_censored((y - mu) / sigma, -mu / sigma, y / sigma)
    return sigma * (censored - _square_below((mu - 1) / sigma))


def _crps_censored(z: Tensor, l: Tensor, above: Tensor) -> Tensor:
    """crps of the uncensored law less the integral of Phi^2 below l; `above` = z - l, given exactly."""
    low_l, high_l = torch.clamp(l, max=0), torch.clamp(l, min=0)
    low = _crps_standard(z) - _square_below(low_l)
    # For l > 0 the large terms of both integrals cancel to z - l; what is left are tails.
    tail = ndtr(-high_l)
    high_z = torch.clamp(z, min=0)
    tails = 2 * _phi(high_z) - 2 * high_z * ndtr(-high_z)
    tails = tails - (2 * _phi(high_l) * (1 - tail) - 2 * high_l * tail + high_l * tail**2)
    high = above + tails - ndtr(-_SQRT2 * high_l) / _ROOT_PI
    return torch.where(l > 0, high, low)


def _crps_truncated(z: Tensor, l: Tensor, above: Tensor) -> Tensor:
    low_l, high_l = torch.clamp(l, max=0), torch.clamp(l, min=0).double()
    mass = ndtr(-low_l)  # at least one half
    low = z * mass * (2 * ndtr(z) + mass - 2) + 2 * _phi(z) * mass - ndtr(-_SQRT2 * low_l) / _ROOT_PI
    low = low / mass**2
    # Integrals of the survival function over the Mills ratio m: 2 int_z S = 2 exp((l^2 - z^2)/2) (1 - z m(z)) / m(l).
    # In float64: terms as large as l leave a score of 1 / l, and slopes of 1 / l^2.
    above = above.double()
    high_z = high_l + above
    mills = _mills(high_l)
    decay = torch.exp(-0.5 * above * (high_z + high_l))
    high = high_z - _SQRT2 * _mills(_SQRT2 * high_l) / mills**2 + 2 * decay * (1 - high_z * _mills(high_z)) / mills
    return torch.where(l > 0, high.to(low.dtype), low)


def cdf(family: Family, location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """P(value <= y), in [0, 1]; at their bounds the censored laws count their mass there."""
    if family in skewed.LAWS:
        return skewed.cdf(family, location, scale, y)
    mu, sigma, at = location.double(), scale.double(), y.double()
    z, l = (at - mu) / sigma, -mu / sigma
    if family is Family.TRUNCATED_NORMAL:
        found = torch.where(at > 0, -torch.expm1(log_ndtr(-torch.maximum(z, l)) - log_ndtr(-l)), 0.0)
    else:
        lower, upper = family.bounds
        found = torch.where(at >= upper, 1.0, torch.where(at < lower, 0.0, ndtr(z)))
    return found.clamp(0, 1).to(location.dtype)


def quantile(family: Family, location: Tensor, scale: Tensor, level: Tensor | float) -> Tensor:
    """The value that is not exceeded with probability `level` (a number, or a tensor that broadcasts)."""
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
    """Mean and standard deviation of the distribution."""
    if family is Family.NORMAL:
        return location, scale
    if family in skewed.LAWS:
        return skewed.moments(family, location, scale)
    mu, sigma = location.double(), scale.double()
    lower, upper = family.bounds
    nearest = torch.clamp(mu, lower, upper)
    if family is Family.TRUNCATED_NORMAL:
        # `mean` is counted from zero, so nothing cancels where the location lies far below it.
        mean, variance = _truncated_moments(-mu / sigma)
        nearest = torch.zeros_like(mu)
    else:
        mean, variance = _censored_moments(*((at - mu) / sigma for at in (lower, nearest, upper)))
    mean = torch.clamp(nearest + sigma * mean, lower, upper)
    return mean.to(location.dtype), (sigma * torch.sqrt(variance)).to(location.dtype)


def _censored_moments(lower: Tensor, nearest: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, counted from what lies `nearest` to zero between the bounds, and variance of the censored standard law.

    E[(Y - c)^n], as integrals of n (t - c)^(n - 1) (1 - Phi(t)) over t > c, and of its mirror image below.
    """
    up, above = _excess(nearest, upper)
    down, below = _excess(-nearest, -lower)
    return up - down, (above + below - (up - down) ** 2).clamp(min=0)


def _excess(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Integrals of 1 - Phi(t) and of 2 (t - start) (1 - Phi(t)) from `start` to `end`."""
    start, end = (torch.clamp(x, max=_NOTHING) for x in (start, end))
    first = [_phi(x) - x * ndtr(-x) for x in (start, end)]
    second = [(1 - x * x) * ndtr(-x) + x * _phi(x) for x in (start, end)]
    once = first[0] - first[1]
    return once, second[0] - second[1] - 2 * start * once


def _truncated_moments(l: Tensor) -> tuple[Tensor, Tensor]:
    """Mean above zero and variance at scale one."""
    near = torch.clamp(l, max=_SERIES)
    hazard = torch.where(near > 0, 1 / _mills(near.clamp(min=0)), _phi(near) / ndtr(-near.clamp(max=0)))
    mean, variance = hazard - near, 1 + near * hazard - hazard**2
    far = 1 / torch.clamp(l, min=_SERIES)
    mean = torch.where(l > _SERIES, far - 2 * far**3, mean)
    return mean, torch.where(l > _SERIES, far**2 - 6 * far**4, variance.clamp(min=0))


_GRID = (-4.0, 8.0, 1201)  # location over scale, tabulated
_BELOW = (math.log10(-_GRID[0]), 6.0, 1201)  # powers of ten below it, for a law whose mean falls as 1 / -location
LEAST_MEAN = 0.1  # scales, of a truncated normal law: nearer to zero it would be surer of it than a mean is known


def _mean_table(family: Family) -> tuple[Tensor, Tensor]:
    location = torch.linspace(*_GRID, dtype=torch.float64)
    if family is Family.TRUNCATED_NORMAL:
        below = -torch.logspace(*_BELOW, dtype=torch.float64).flip(0)
        location = torch.cat([below[:-1], location])
    return location, moments(family, location, torch.ones_like(location))[0]


# Location and mean, at scale one. Made with the module: one that is made when first asked for, within a rehearsal on
# fake tensors, stays fake for all.
MEAN_TABLES = {family: _mean_table(family) for family in Family if family.bounds == (0, math.inf)}


def location_of_mean(family: Family, mean: Tensor, scale: Tensor) -> Tensor:
    """The location at which the distribution with this scale has this mean; not 4 scales beyond a bound (mean near it).

    The truncated normal law, whose mean is near zero only far below it, is given means from `LEAST_MEAN` scales up.

    Read off a table (1 % of a scale apart, far below zero 1 % of the location; linear between), because no closed form
    exists. Between two bounds the table is of one scale alone: Newton's steps start there. The gradient is that of the
    table, or of the implicit function, large where the mean is near a bound; at one the location does not move.
    """
    if family is Family.NORMAL:
        return mean
    if family is Family.DOUBLY_CENSORED_NORMAL:
        return _location_between(mean.double(), scale.double()).to(mean.dtype)
    if family is Family.TRUNCATED_NORMAL:
        mean = torch.maximum(mean, (LEAST_MEAN * scale).to(mean.dtype))
    return _tabulated(family, mean, scale)


@lru_cache
def _tables_on(family: Family, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables where they are asked for in every step: a copy from the host waits for all that a GPU has to do."""
    with torch.inference_mode(False):
        location, means = (t.to(device) for t in MEAN_TABLES[family])
    return location, means


def _tabulated(family: Family, mean: Tensor, scale: Tensor) -> Tensor:
    """`location_of_mean` as far as the table goes."""
    location, means = MEAN_TABLES[family] if mean.device.type == "cpu" else _tables_on(family, mean.device)
    wanted = (mean.double() / scale.double()).contiguous()
    right = torch.searchsorted(means, wanted).clamp(1, len(means) - 1)
    share = (wanted - means[right - 1]) / (means[right] - means[right - 1])
    found = location[right - 1] + share.clamp(0, 1) * (location[right] - location[right - 1])
    found = torch.where(wanted >= means[-1], wanted, found)
    return (found * scale.double()).to(mean.dtype)


def _location_between(mean: Tensor, scale: Tensor) -> Tensor:
    """`location_of_mean` between zero and one.

    The mean grows with the location by P(0 < Y < 1), and is convex up to one half; above, all is mirrored. It is less
    than without the upper bound, and, as the average of Phi((location - t) / scale) over t, no less than that at one
    half. The root lies between the roots of these two, and steps that stay there come to it from above.
    """
    near = torch.where(mean > 0.5, 1 - mean, mean)
    with torch.no_grad():
        least = location_of_mean(Family.CENSORED_NORMAL, near, scale)
        most = 0.5 + scale * ndtri(near.clamp(min=0))
        found = least
        for _ in range(_NEWTON):
            excess, slope = _excess_between(found, near, scale)
            found = torch.maximum(torch.minimum(found - excess / slope, most), least)
    if near.requires_grad or scale.requires_grad:
        excess, slope = _excess_between(found, near, scale)
        step = excess / slope.detach().clamp(min=_LEAST_SLOPE)
        found = found - (step - step.detach())  # the value stays, its gradient is that of the implicit function
    return torch.where(mean > 0.5, 1 - found, found)


def _excess_between(location: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """By how much the mean of the law between zero and one is above `mean`, and how fast that grows with location."""
    lower, upper = -location / scale, (1 - location) / scale
    return scale * _excess(lower, upper)[0] - mean, (ndtr(-lower) - ndtr(-upper)).clamp(min=_TINY)


def widen(family: Family, location: Tensor, scale: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Location and scale of the law with `width` times the scale and the same mean, up to where the mean is a bound.

    A law that stops at zero would move with its scale: rain of a wider one is more rain.
    """
    wider = width * scale
    if family is Family.NORMAL:
        return location, wider
    with torch.no_grad():
        mean = moments(family, location, scale)[0]
        if family is Family.TRUNCATED_NORMAL:
            return _tabulated(family, mean, wider), wider  # however far below zero, its mean is not quite there
        same = location_of_mean(family, mean, wider)
    same = torch.where(location > _GRID[0] * scale, same, width * location)
    if family is Family.DOUBLY_CENSORED_NORMAL:
        same = torch.where(1 - location > _GRID[0] * scale, same, 1 - width * (1 - location))
    return same, wider


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
            Between two bounds a factor would leave them: there they are the means of the law between the levels
            (rank - 1) / M and rank / M, of which those within a mass are the bound itself.
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
    wide = location.double(), scale.double()
    if family is Family.DOUBLY_CENSORED_NORMAL:
        return torch.where(there, _means_between_levels(*wide, rank.double(), count), torch.nan).to(location.dtype)
    level = (rank.double() + 0.5) / count
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


def _means_between_levels(mu: Tensor, sigma: Tensor, rank: Tensor, count: Tensor) -> Tensor:
    """Mean of the law between zero and one where its distribution function lies in (rank, rank + 1) / count."""
    lower, upper = -mu / sigma, (1 - mu) / sigma
    start, end = (torch.clamp(ndtri((rank + more) / count), lower, upper) for more in (0, 1))
    between = count * (mu * (ndtr(end) - ndtr(start)) + sigma * (_phi(start) - _phi(end)))
    at_one = (rank + 1 - torch.maximum(rank, count * ndtr(upper))).clamp(min=0)
    return torch.clamp(between + at_one, 0, 1)
