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
_FAR = 30.0  # l from which quantiles of the truncated normal come from the leading term of its tail
_SERIES = 100.0  # l from which two terms give the moments of the truncated normal to seven digits
_NOTHING = 40.0  # standard units beyond which the tail of a normal distribution is zero in float64
_TINY = 1e-290
_LEAST_SLOPE = 1e-6  # least derivative of a mean by its location: a gradient is divided by it
_NEWTON = 3  # Newton steps to the location of a mean between two bounds: it is then good to six digits


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


def _phi(x: Tensor) -> Tensor:
    """Return the standard normal density."""
    return _INV_SQRT_2PI * torch.exp(-0.5 * x * x)


def _mills(x: Tensor) -> Tensor:
    """Return the Mills ratio Phi(-x) / phi(x)."""
    return math.sqrt(math.pi / 2) * erfcx(x / _SQRT2)


def _crps_standard(z: Tensor) -> Tensor:
    """Return the CRPS of the standard normal distribution."""
    return z * torch.erf(z / _SQRT2) + 2 * _phi(z) - 1 / _ROOT_PI


def _square_below(x: Tensor) -> Tensor:
    """Return the integral of Phi^2 from minus infinity to x."""
    cdf = ndtr(x)
    return x * cdf**2 + 2 * cdf * _phi(x) - ndtr(_SQRT2 * x) / _ROOT_PI


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
    tails = 2 * _phi(high_z) - 2 * high_z * ndtr(-high_z)
    tails = tails - (2 * _phi(high_l) * (1 - tail) - 2 * high_l * tail + high_l * tail**2)
    high = above + tails - ndtr(-_SQRT2 * high_l) / _ROOT_PI
    return torch.where(l > 0, high, low)


def _crps_truncated(z: Tensor, l: Tensor, above: Tensor) -> Tensor:
    """Return the CRPS, at scale one, of the normal distribution truncated at zero; `above` is z - l."""
    low_l, high_l = torch.clamp(l, max=0), torch.clamp(l, min=0).double()
    mass = ndtr(-low_l)  # at least one half
    low = z * mass * (2 * ndtr(z) + mass - 2) + 2 * _phi(z) * mass - ndtr(-_SQRT2 * low_l) / _ROOT_PI
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
    up, above = _excess(nearest, upper)
    down, below = _excess(-nearest, -lower)
    return up - down, (above + below - (up - down) ** 2).clamp(min=0)


def _excess(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integrals of 1 - Phi(t) and of 2 (t - start) (1 - Phi(t)) from `start` to `end`."""
    # Beyond this the tail is zero in float64, and x * ndtr(-x) would be infinity times zero.
    start, end = (torch.clamp(x, max=_NOTHING) for x in (start, end))
    first = [_phi(x) - x * ndtr(-x) for x in (start, end)]
    second = [(1 - x * x) * ndtr(-x) + x * _phi(x) for x in (start, end)]
    once = first[0] - first[1]
    return once, second[0] - second[1] - 2 * start * once


def _truncated_moments(l: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance at scale one of the normal distribution truncated at zero."""
    near = torch.clamp(l, max=_SERIES)
    hazard = torch.where(near > 0, 1 / _mills(near.clamp(min=0)), _phi(near) / ndtr(-near.clamp(max=0)))
    mean, variance = hazard - near, 1 + near * hazard - hazard**2
    far = 1 / torch.clamp(l, min=_SERIES)
    mean = torch.where(l > _SERIES, far - 2 * far**3, mean)
    return mean, torch.where(l > _SERIES, far**2 - 6 * far**4, variance.clamp(min=0))


_GRID = (-4.0, 8.0, 1201)  # first, last and number of the tabulated values of location / scale
# Below the grid: first, last and number of the exponents of ten of -location / scale. The mean of the truncated normal
# falls as 1 / l there, so a table with even steps would have to be very long.
_BELOW = (math.log10(-_GRID[0]), 6.0, 1201)
LEAST_MEAN = 0.1  # scales; with a smaller mean a truncated normal would be sharper than a mean near zero is known


def _mean_table(family: Family) -> tuple[Tensor, Tensor]:
    """Return tabulated locations, and the mean of the distribution at each of them, at scale one."""
    location = torch.linspace(*_GRID, dtype=torch.float64)
    if family is Family.TRUNCATED_NORMAL:
        below = -torch.logspace(*_BELOW, dtype=torch.float64).flip(0)
        location = torch.cat([below[:-1], location])
    return location, moments(family, location, torch.ones_like(location))[0]


# Tables of location and mean at scale one. They are made when the module is imported: a table that is first made while
# a model is run on fake tensors (to plan a run) would be fake, and would stay so for all later uses.
MEAN_TABLES = {family: _mean_table(family) for family in Family if family.bounds == (0, math.inf)}


def location_of_mean(family: Family, mean: Tensor, scale: Tensor) -> Tensor:
    """Return the location at which the distribution with a given scale has a given mean.

    There is no closed form, so the location is read off a table by linear interpolation. Its entries are 1 % of a scale
    apart; far below zero, they are 1 % of the location apart. Between two bounds, the table of the distribution with
    one bound gives the start of Newton's steps. The gradient is that of the table or of the implicit function. It is
    large where the mean is near a bound, and at a bound the location does not move.

    A location never lies further than 4 scales beyond a bound, where the mean is almost the bound itself. The truncated
    normal is the exception: its mean is near zero only at locations far below, so means below `LEAST_MEAN` scales are
    raised to that.

    Args:
        family: the distribution.
        mean: the means, any shape.
        scale: the scale, in the units of `mean`; positive.

    Returns:
        Locations, in the units of `mean`.
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
    """Return the tables on `device`, copied once: every copy from the host waits for all that a GPU has to do."""
    with torch.inference_mode(False):
        location, means = (t.to(device) for t in MEAN_TABLES[family])
    return location, means


def _tabulated(family: Family, mean: Tensor, scale: Tensor) -> Tensor:
    """Return `location_of_mean` by interpolation in the table, without the floor for small means."""
    location, means = MEAN_TABLES[family] if mean.device.type == "cpu" else _tables_on(family, mean.device)
    wanted = (mean.double() / scale.double()).contiguous()
    # The means grow with the location, so the table can be searched by the mean.
    right = torch.searchsorted(means, wanted).clamp(1, len(means) - 1)
    share = (wanted - means[right - 1]) / (means[right] - means[right - 1])
    found = location[right - 1] + share.clamp(0, 1) * (location[right] - location[right - 1])
    found = torch.where(wanted >= means[-1], wanted, found)
    return (found * scale.double()).to(mean.dtype)


def _location_between(mean: Tensor, scale: Tensor) -> Tensor:
    """Return `location_of_mean` of the distribution censored at zero and one.

    The mean grows with the location at the rate P(0 < Y < 1), and it is convex up to one half. Above one half,
    everything is mirrored. The mean is less than it would be without the upper bound. As the average of Phi((location -
    t) / scale) over t, it is at least the value of that at t = one half. So the root lies between the roots of these
    two, and Newton's steps that stay between them come to it from above.
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
    """Return how far the mean of the distribution censored at zero and one exceeds `mean`, and its slope.

    The slope is the derivative of that mean by the location.
    """
    lower, upper = -location / scale, (1 - location) / scale
    return scale * _excess(lower, upper)[0] - mean, (ndtr(-lower) - ndtr(-upper)).clamp(min=_TINY)


def widen(family: Family, location: Tensor, scale: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Return location and scale of the distribution with `width` times the scale and the same mean.

    If the location stayed, the mean of a distribution that ends at zero would move with its scale: a wider distribution
    of rain would be one of more rain. Where the location lies 4 scales or more beyond a bound, the mean is almost the
    bound, and its distance from the bound is multiplied by `width` as well.

    Args:
        family: the distribution.
        location: location, any shape.
        scale: scale, in the units of `location`.
        width: factor of the scale, broadcast against `scale`.

    Returns:
        The new location and the new scale.
    """
    wider = width * scale
    if family is Family.NORMAL:
        return location, wider
    with torch.no_grad():
        mean = moments(family, location, scale)[0]
        if family is Family.TRUNCATED_NORMAL:
            # The mean of this distribution is above zero at any location, so the table applies without the floor.
            return _tabulated(family, mean, wider), wider
        same = location_of_mean(family, mean, wider)
    same = torch.where(location > _GRID[0] * scale, same, width * location)
    if family is Family.DOUBLY_CENSORED_NORMAL:
        same = torch.where(1 - location > _GRID[0] * scale, same, 1 - width * (1 - location))
    return same, wider


def remap_members(
    members: Tensor, mean: Tensor, spread: Tensor, location: Tensor, scale: Tensor, family: Family = Family.NORMAL,
    order: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return members that are spread like the predicted distribution and keep their ranks.

    Each member keeps its place among the members at every point, so fields of one member stay coherent in space and
    between variables. How a place becomes a value depends on the distribution.

    Normal: location + scale (x_i - m) / s, so that mean and spread of the new members are exactly those predicted.
    Where s is zero, normal quantiles at (rank - 1/2) / M, brought to mean 0 and spread 1, stand for (x_i - m) / s.

    Two bounds: the mean of the distribution between the levels (rank - 1) / M and rank / M. Levels that lie in a mass
    at a bound give the bound itself. A factor, as in the next case, would leave the bounds.

    All others: the quantile at (rank - 1/2) / M. These M values have the least CRPS (Broecker 2012,
    doi:10.1002/qj.1891). They are multiplied by what gives them the mean of the distribution. Where it rains more
    rarely than once in M, all quantiles are zero, and the member of the last rank gets all the rain.

    Args:
        members: (M, ...) raw members x_i, two or more; NaN where one is absent, and the new member is NaN there too.
        mean: (...) mean m of the members.
        spread: (...) standard deviation s of the members (ddof = 1).
        location: (...) location of the predicted distribution.
        scale: (...) scale of the predicted distribution.
        family: the distribution.
        order: (M,) positions of the members, in the order in which equal members are ranked; the order given if None.
            Give one order for all points of a forecast and another for the next forecast, so that no member is always
            wetter than the others.

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
    # The raw members of these variables are far from normal, so only their ranks are used.
    rank = _ranks(members, order)
    there = ~torch.isnan(members)
    # Absent members have no rank, so levels depend on how many members there are at a point.
    count = there.sum(0)
    wide = location.double(), scale.double()
    if family is Family.DOUBLY_CENSORED_NORMAL:
        return torch.where(there, _means_between_levels(*wide, rank.double(), count), torch.nan).to(location.dtype)
    level = (rank.double() + 0.5) / count
    found = torch.where(there, quantile(family, *wide, torch.where(there, level, 0.5)), 0.0)
    total, wanted = found.sum(0), moments(family, *wide)[0] * count
    # True also where both are zero, because the mean of the distribution is too small for a float.
    alone = total <= 1e-6 * wanted
    # A factor cannot give zeros a mean, so the member of the last rank gets all of it.
    last = torch.where(rank == count - 1, wanted, 0.0)
    found = torch.where(alone, last, found * (wanted / torch.where(alone, 1.0, total)))
    return torch.where(there, found, torch.nan).to(location.dtype)


def _ranks(members: Tensor, order: Tensor) -> Tensor:
    """Return the rank of each member at each point, from 0 up: NaN last, equal ones as they stand in `order`."""
    return members[order].argsort(dim=0, stable=True).argsort(0)[order.argsort()]


def _even_places(members: Tensor, order: Tensor) -> Tensor:
    """Return normal quantiles at (rank - 1/2) / M with mean 0 and standard deviation 1 (ddof = 1): (M, N).

    A point with a single member gets zero, because one member has no spread.
    """
    there = ~torch.isnan(members)
    count = there.sum(0)
    place = torch.where(there, ndtri((_ranks(members, order).double() + 0.5) / count), 0.0)
    deviation = torch.sqrt(place.square().sum(0) / (count - 1))
    return torch.where(there, torch.where(count > 1, place / deviation, 0.0), torch.nan).to(members.dtype)


def _means_between_levels(mu: Tensor, sigma: Tensor, rank: Tensor, count: Tensor) -> Tensor:
    """Return the mean of the distribution censored at zero and one between two levels of probability.

    The levels are rank / count and (rank + 1) / count.
    """
    lower, upper = -mu / sigma, (1 - mu) / sigma
    start, end = (torch.clamp(ndtri((rank + more) / count), lower, upper) for more in (0, 1))
    between = count * (mu * (ndtr(end) - ndtr(start)) + sigma * (_phi(start) - _phi(end)))
    at_one = (rank + 1 - torch.maximum(rank, count * ndtr(upper))).clamp(min=0)
    return torch.clamp(between + at_one, 0, 1)
