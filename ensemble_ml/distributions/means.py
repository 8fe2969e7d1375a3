"""Find the location that gives a distribution a wanted mean, and widen a distribution without moving its mean."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.special import ndtri

from ensemble_ml.closed_forms import excess_between
from ensemble_ml.distributions.formulas import moments
from ensemble_ml.distributions.maths import TORCH
from ensemble_ml.fields import Family

_LEAST_SLOPE = 1e-6  # least derivative of a mean by its location: a gradient is divided by it
_NEWTON = 3  # Newton steps to the location of a mean between two bounds; they give six digits
_GRID = (-4.0, 8.0, 1201)  # first, last and number of the tabulated values of location / scale
# Below the grid: first, last and number of the exponents of ten of -location / scale. The mean of the truncated normal
# falls as 1 / l there, so a table with even steps would have to be very long.
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

    Args:
        family: the distribution.
        mean: the means, any shape.
        scale: the scale, in the units of `mean`; positive.
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

    Args:
        family: the distribution.
        location: location, any shape.
        scale: scale, in the units of `location`.
        width: factor of the scale, broadcast against `scale`.
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
