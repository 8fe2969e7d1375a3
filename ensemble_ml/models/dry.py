"""What a forecast that says zero leaves open: a little rain, where no member has any.

A law with a mass at zero whose mean is zero is sure of it, however wide it is; the truth is not. So, with sigma the
scale that such a law would have and u = mean / sigma, none below zero,

    sigma' = sigma [a + (1 - a) min(u, 1)]        mean' = [m + hypot(m, 2 b sigma')] / 2,  m = max(mean, 0)

b is the mean, in scales, at which the law is above zero as often as the truth is where u = 0, and a the share of sigma
with which it is then as much as the truth is there: two numbers a lead, variable and level (`training.truth_fit`). From
u = 1 up a changes nothing, and b adds b^2 / u scales at most. With a = 1 and b = 0 the law has the mean max(mean, 0).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.fields import Family
from ensemble_ml.models import distributions

AT_ZERO = (Family.CENSORED_NORMAL, Family.CENSORED_SHIFTED_GAMMA)  # with a mass at zero, and no other bound
_SHARES, _MOST = (0.05, 1.0), 1.0  # between which a lies, and the most that b is
_TINY, _LEAST = 1e-30, 1e-6  # scales; hypot has no slope at nothing


def law_near_zero(family: Family, mean: Tensor, scale: Tensor, share: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Location and scale of the law with this mean and scale, all (...), once a = `share` and b = `least` are in it.

    Only of a family of `AT_ZERO` do they change anything.
    """
    if family in AT_ZERO:
        mean, scale = wetter(mean, scale, share, least)
    return distributions.location_of_mean(family, mean, scale), scale


def wetter(mean: Tensor, scale: Tensor, share: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """mean' and sigma'; the slope of mean' by the mean is as if that were positive, or what is dry would stay dry."""
    narrow = scale * (share + (1 - share) * (mean / scale.clamp(min=_TINY)).clamp(0, 1))
    positive = mean - mean.clamp(max=0).detach()
    return (positive + torch.hypot(positive, (2 * least).clamp(min=_LEAST) * narrow)) / 2, narrow


def fitted(family: Family, often: Tensor, much: Tensor) -> tuple[Tensor, Tensor]:
    """a and b (...) of a family of `AT_ZERO`; one and zero where the truth is always zero.

    Args:
        often: (...) how often the truth is above zero where u = 0.
        much: (...) its mean there over that of sigma. Where a cannot be as small as that asks for, b is.
    """
    location, means = distributions.MEAN_TABLES[family]
    chance = 1 - distributions.cdf(family, location, torch.ones_like(location), torch.zeros_like(location))
    least = torch.as_tensor(np.interp(often.numpy(), chance.numpy(), means.numpy()), dtype=often.dtype)
    least = least.clamp(_TINY, _MOST)
    share = (much / least).clamp(*_SHARES)
    wet = (often > 0) & (much > 0)
    return torch.where(wet, share, 1.0), torch.where(wet, torch.minimum(least, much / share), 0.0)
