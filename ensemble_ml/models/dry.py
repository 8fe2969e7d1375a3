"""Give forecasts without rain a small chance of rain.

A distribution with a mass at zero and a mean of zero gives rain a probability of zero, whatever its scale. But it
sometimes rains where no member has rain. So mean and scale are changed near zero:

    sigma'  = sigma [a + (1 - a) min(u, 1)]
    mean'   = [m + hypot(m, 2 a b sigma)] / 2

    sigma   scale before the change
    mean    mean before the change
    u       mean / sigma, and zero where that is negative
    m       max(mean, 0)
    b       mean' / sigma' where u = 0, chosen so that the chance of rain there is that of the truth
    a       sigma' / sigma where u = 0, chosen so that the mean amount of rain there is that of the truth, too

a and b are two numbers for each lead, variable and level, fitted in `training.truth_fit`. From u = 1 up, a does not
change the scale, and the mean grows by at most (a b)^2 sigma / u. With a = 1 and b = 0 the mean is max(mean, 0).

The formula of mean' has the product a sigma, which is sigma' where u = 0. Elsewhere sigma' is larger, and would also
raise means that are right already: on the archive of `simulate`, they are right on average from u = 0.5 up. Models
that were fitted but not trained forecast too much rain on unseen dates of it:

    formula with      a sigma    sigma'
    no point network     5 %      16 %
    point network        2 %       8 %

With a sigma, the CRPS of rain was lower by 1.6 % without a point network, and by 0.6 % with one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ensemble_ml import distributions
from ensemble_ml.fields import Family

AT_ZERO = (Family.CENSORED_NORMAL, Family.CENSORED_SHIFTED_GAMMA)  # these have a mass at zero and no upper bound
_SHARES, _MOST = (0.05, 1.0), 1.0  # bounds of a, and the largest b
# _TINY is the least scale that divides, and the least fitted b. _LEAST is the least 2 b, because hypot has no gradient
# where both of its arguments are zero.
_TINY, _LEAST = 1e-30, 1e-6


def law_near_zero(family: Family, mean: Tensor, scale: Tensor, share: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return location and scale of the distribution for a mean and a scale, after the change near zero.

    Only the distributions in `AT_ZERO` are changed. For the others, the location is that of the mean.

    Args:
        family: the distribution.
        mean: mean before the change, (...), physical units.
        scale: scale before the change, (...).
        share: a, (...).
        least: b, (...).

    Returns:
        Location and scale, (...).
    """
    if family in AT_ZERO:
        mean, scale = wetter(mean, scale, share, least)
    return distributions.location_of_mean(family, mean, scale), scale


def wetter(mean: Tensor, scale: Tensor, share: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean' and sigma', (...) each.

    Where the mean is negative, the gradient of mean' by the mean is that at zero. Otherwise a point with a dry forecast
    would have no gradient and would stay dry in training.

    Args:
        mean: mean before the change, (...), physical units.
        scale: scale before the change, (...).
        share: a, (...).
        least: b, (...).
    """
    narrow = scale * (share + (1 - share) * (mean / scale.clamp(min=_TINY)).clamp(0, 1))
    # Its value is max(mean, 0). Its gradient is one everywhere; that of a clamp would be zero for negative means.
    positive = mean - mean.clamp(max=0).detach()
    return (positive + torch.hypot(positive, (2 * least).clamp(min=_LEAST) * share * scale)) / 2, narrow


def fitted(family: Family, often: Tensor, much: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and b, (...) each, that fit the truth where u = 0; one and zero where the truth is always zero.

    If a small mean needs an a below its lower bound, a stays at the bound and b becomes smaller.

    Args:
        family: one of `AT_ZERO`.
        often: fraction of the points with u = 0 at which the truth is above zero, (...).
        much: mean of the truth at these points, divided by the mean of sigma there, (...).
    """
    # At scale one, the chance of rain and the mean both grow with the location. So b, the mean for a chance of rain, is
    # interpolated in a table over locations.
    location, means = distributions.MEAN_TABLES[family]
    chance = 1 - distributions.cdf(family, location, torch.ones_like(location), torch.zeros_like(location))
    least = torch.as_tensor(np.interp(often.numpy(), chance.numpy(), means.numpy()), dtype=often.dtype)
    least = least.clamp(_TINY, _MOST)
    share = (much / least).clamp(*_SHARES)
    # If a had to be raised to its lower bound, b is lowered so that the amount of rain stays right.
    wet = (often > 0) & (much > 0)
    return torch.where(wet, share, 1.0), torch.where(wet, torch.minimum(least, much / share), 0.0)
