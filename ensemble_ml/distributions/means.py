"""Give distributions a wanted mean or another spread, and members the spread of a predicted distribution.

A distribution keeps its mean when its spread changes, and members keep their ranks. Units and shapes are as in
`formulas`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from ensemble_ml.closed_forms import excess_between, phi
from ensemble_ml.distributions.formulas import TORCH, moments, quantile
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family

_LEAST_SLOPE = 1e-6  # least derivative of a mean by its location: a gradient is divided by it
_NEWTON = 3  # Newton steps to the location of a mean between two bounds; they give six digits
_GRID = (-4.0, 8.0, 1201)  # first, last and number of the tabulated values of location / scale
# Below the grid: first, last and number of the exponents of ten of -location / scale. The mean of the truncated normal
# falls as the inverse of this ratio there, so a table with even steps would have to be very long.
_BELOW = (math.log10(-_GRID[0]), 6.0, 1201)
# Least mean of a truncated normal, in scales. Near zero, its standard deviation is about as small as its mean, and
# smaller than the error of that mean.
LEAST_MEAN = 0.1


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
    """Return the location at which the distribution with a given scale has a given mean, in the units of `mean`.

    Most distributions have no closed form, so the location is interpolated linearly in a table. Its entries are 1 % of
    a scale apart; far below zero, they are 1 % of the location apart. For the distribution with two bounds, Newton's
    method starts from the table of the distribution with one bound. Gradients are those of the interpolation, or of the
    implicit function. They are large where the mean is near a bound. At the bound, the gradient of the interpolation by
    the mean is zero.

    A location never lies further than 4 scales beyond a bound, where the mean is almost the bound itself. The truncated
    normal is the exception: its mean is near zero only at locations far below, so means below `LEAST_MEAN` scales are
    raised to `LEAST_MEAN` scales.
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
    """Return the tables on `device`. They are copied once, because each copy waits for all work queued on the GPU."""
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

    The mean is the average of Phi((location - t) / scale) over t from 0 to 1. Its slope is P(0 < Y < 1), and it is
    convex up to a mean of one half. Above one half, everything is mirrored. Two functions enclose the mean: the mean
    without the upper bound is larger, and Phi((location - 1/2) / scale) is smaller. So the root lies between the roots
    of these two. Newton's steps that stay between them come to the root from above.
    """
    near = torch.where(mean > 0.5, 1 - mean, mean)
    with torch.no_grad():
        least = location_of_mean(Family.CENSORED_NORMAL, near, scale)
        most = 0.5 + scale * ndtri(near.clamp(min=0))
        found = least
        for _ in range(_NEWTON):
            excess, slope = excess_between(TORCH, found, near, scale)
            found = torch.maximum(torch.minimum(found - excess / slope, most), least)
    if near.requires_grad or scale.requires_grad:
        excess, slope = excess_between(TORCH, found, near, scale)
        step = excess / slope.detach().clamp(min=_LEAST_SLOPE)
        found = found - (step - step.detach())  # the value stays, its gradient is that of the implicit function
    return torch.where(mean > 0.5, 1 - found, found)


def widen(family: Family, location: Tensor, scale: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Return location and scale of the distribution with `width` times the scale and the same mean.

    If the location stayed, the mean of a distribution that ends at zero would move with its scale: a wider distribution
    of rain would be one of more rain. Where the location lies 4 scales or more beyond a bound, the mean is almost the
    bound, and the distance of the location from the bound is multiplied by `width` instead. The table of the truncated
    normal covers such locations, too.

    `width` broadcasts against `scale`.
    """
    wider = width * scale
    if family is Family.NORMAL:
        return location, wider
    with torch.no_grad():
        mean = moments(family, location, scale)[0]
        if family is Family.TRUNCATED_NORMAL:
            # The mean is above zero at any location, so no floor is needed.
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

    Each member keeps its rank among the members at every point, so fields of one member stay coherent in space and
    between variables. How a rank, 1 to M, becomes a value depends on the distribution:

    Normal: location + scale (x_i - m) / s, so that mean and spread of the new members are exactly those predicted.
    Where s is zero, normal quantiles at (rank - 1/2) / M, brought to mean 0 and spread 1, replace (x_i - m) / s. Where
    only one member is present, it gets the location.

    Doubly censored normal: the mean of the distribution between the levels (rank - 1) / M and rank / M. Levels within
    the mass at a bound give the bound itself. The factor of the next case could lead beyond a bound.

    All others: the quantile at (rank - 1/2) / M. These M values have the least CRPS (Broecker 2012,
    doi:10.1002/qj.1891). They are multiplied by a factor that gives them the mean of the distribution. Where the
    probability of rain is at most 1 / (2 M), all quantiles are zero, and the member of the last rank gets all the rain.

    `members` (M, ...) holds two or more raw members x_i, `mean` (...) their mean m and `spread` (...) their standard
    deviation s (ddof = 1). `location` and `scale` are (...), in the units of the members. Where a member is absent
    (NaN), the new one is NaN, too, and M above counts only those that are present. Equal members are ranked in the
    `order` (M,) of their positions; None takes that of `members`. Use one order for all points of a forecast and
    another for the next forecast, so that no member is always wetter than the others.

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
    present = ~torch.isnan(members)
    # Absent members have no rank, so levels depend on how many members there are at a point.
    count = present.sum(0)
    wide = location.double(), scale.double()
    if family is Family.DOUBLY_CENSORED_NORMAL:
        return torch.where(present, _means_between_levels(*wide, rank.double(), count), torch.nan).to(location.dtype)
    level = (rank.double() + 0.5) / count
    found = torch.where(present, quantile(family, *wide, torch.where(present, level, 0.5)), 0.0)
    total, wanted = found.sum(0), moments(family, *wide)[0] * count
    # True also where both are zero, because the mean of the distribution is too small for a float.
    alone = total <= 1e-6 * wanted
    # No factor makes zeros larger, so the member of the last rank gets the whole sum.
    last = torch.where(rank == count - 1, wanted, 0.0)
    found = torch.where(alone, last, found * (wanted / torch.where(alone, 1.0, total)))
    return torch.where(present, found, torch.nan).to(location.dtype)


def _ranks(members: Tensor, order: Tensor) -> Tensor:
    """Return the rank of each member at each point, from 0 up; NaN last, equal members by `order`."""
    return members[order].argsort(dim=0, stable=True).argsort(0)[order.argsort()]


def _even_places(members: Tensor, order: Tensor) -> Tensor:
    """Return normal quantiles at (rank + 1/2) / M with mean 0 and standard deviation 1 (ddof = 1): (M, N).

    A point with a single member gets zero, because one member has no spread.
    """
    present = ~torch.isnan(members)
    count = present.sum(0)
    place = torch.where(present, ndtri((_ranks(members, order).double() + 0.5) / count), 0.0)
    deviation = torch.sqrt(place.square().sum(0) / (count - 1))
    return torch.where(present, torch.where(count > 1, place / deviation, 0.0), torch.nan).to(members.dtype)


def _means_between_levels(mu: Tensor, sigma: Tensor, rank: Tensor, count: Tensor) -> Tensor:
    """Return the mean of the doubly censored normal between levels rank / count and (rank + 1) / count."""
    lower, upper = -mu / sigma, (1 - mu) / sigma
    start, end = (torch.clamp(ndtri((rank + more) / count), lower, upper) for more in (0, 1))
    between = count * (mu * (ndtr(end) - ndtr(start)) + sigma * (phi(TORCH, start) - phi(TORCH, end)))
    at_one = (rank + 1 - torch.maximum(rank, count * ndtr(upper))).clamp(min=0)
    return torch.clamp(between + at_one, 0, 1)
