"""Give members the spread of a predicted distribution, and let them keep their ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from ensemble_ml.closed_forms import phi
from ensemble_ml.distributions.formulas import moments, quantile
from ensemble_ml.distributions.maths import TORCH
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family


def remap_members(
    members: Tensor, mean: Tensor, spread: Tensor, location: Tensor, scale: Tensor, family: Family = Family.NORMAL,
    order: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return members that are spread like the predicted distribution and keep their ranks.

    Each member keeps its rank among the members at every point, so fields of one member stay coherent in space and
    between variables. How a rank becomes a value depends on the distribution:

    Normal: location + scale (x_i - m) / s, so that mean and spread of the new members are exactly those predicted.
    Where s is zero, normal quantiles at (rank - 1/2) / M, brought to mean 0 and spread 1, replace (x_i - m) / s. Where
    only one member is present, it gets the location.

    Doubly censored normal: the mean of the distribution between the levels (rank - 1) / M and rank / M. Levels within
    the mass at a bound give the bound itself. The factor of the next case could lead beyond a bound.

    All others: the quantile at (rank - 1/2) / M. These M values have the least CRPS (Broecker 2012,
    doi:10.1002/qj.1891). They are multiplied by a factor that gives them the mean of the distribution. Where the
    probability of rain is at most 1 / (2 M), all quantiles are zero, and the member of the last rank gets all the rain.

    Args:
        members: (M, ...) raw members x_i, two or more. NaN where one is absent: the new member is NaN there too, and M
            above counts only those that are present.
        mean: (...) mean m of the members.
        spread: (...) standard deviation s of the members (ddof = 1).
        location: (...) location of the predicted distribution, in the units of the members.
        scale: (...) scale of the predicted distribution, in the same units.
        family: the distribution.
        order: (M,) positions of the members. Equal members are ranked in this order; None takes that of `members`. Use
            one order for all points of a forecast and another for the next forecast, so that no member is always
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
    """Return normal quantiles at (rank - 1/2) / M with mean 0 and standard deviation 1 (ddof = 1): (M, N).

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
