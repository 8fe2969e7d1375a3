"""The heads: the last step of a model, from the network's outputs to location, scale and spread of each field.

All quantities are in units of the ensemble at hand, so the same outputs suit any variable and any number of members.

    location = base + s_clim dL + n1 s0
    scale    = s0 exp(B + w + dB + n2)
    spread   = s1 exp(dC + n3)

    n1, n2, n3    outputs of the U-Net, whose last layer starts at zero
    dL, dB, dC    local terms: learned numbers, one for each grid cell, that start at zero
    s_clim        climatological spread at the cell
    B             fitted inflation of the cell, the logarithm of sigma / s0
    v, w          outputs of the point network (`models.points`), which is fitted before training
    s0            prior spread, whose square is right on average (`models.features`)
    s1            expected spread of the full ensemble (`models.features`), corrected by d' of `models.linear` and d''
                  of `models.points`
    base          location of a distribution with the mean m + L + v s0 exp(B)
    m, L          ensemble mean, linearly corrected where that is on; fitted bias of the cell

v, w, n2 + dB and n3 + dC are bounded to +-3. The untrained model is a statistical correction fitted to the training
dates, and weight decay pulls the local terms back to it. All learned terms are multiples of a spread or logarithms, so
that one step of a sign-based optimizer moves each of them by a similar, sensible amount.

With a linear correction, s0 is computed from s1 with d', as the prior spread of `FOLLOWED` members that have this
spread. The fields around a point tell more about the flow than the members' spread at the point alone. d'' is not used
here, because w corrects sigma directly.

For a normal variable the base is that mean. For a distribution with bounds, the base is the location at which the
distribution has that mean. For a distribution with a mass at zero, the mean and sigma are changed first, and s0 is then
multiplied by the same factor as sigma.

A distribution with a mass at zero and a mean of zero gives rain a probability of zero, whatever its scale. But it
sometimes rains where no member has rain. So mean and scale are changed near zero, which gives forecasts without rain a
small chance of it:

    sigma'  = sigma [a + (1 - a) min(u, 1)]
    mean'   = [p + hypot(p, 2 a b sigma)] / 2

    sigma   scale before the change
    mean    mean before the change
    u       mean / sigma, and zero where that is negative
    p       max(mean, 0)
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

Axes: B initialisation time, T lead, F field (variables and levels, then surface variables), Y latitude, X longitude.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ensemble_ml import distributions
from ensemble_ml.fields import Family
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.features import shrunk_spread, unbiased_spread
from ensemble_ml.models.inputs import ModelSpec, Prediction, by_family, integers, take
from ensemble_ml.models.linear import departures

FOLLOWED = 5  # a corrected s1 enters s0 as the spread of this many members
_LEAST_SHARE = 0.2  # each of d' and d'' leaves at least this fraction of s1
_BOUND = 3.0  # a scale stays within exp(3) = 20 times its start, so nothing overflows
AT_ZERO = (Family.CENSORED_NORMAL, Family.CENSORED_SHIFTED_GAMMA)  # these have a mass at zero and no upper bound
_SHARES, _MOST = (0.05, 1.0), 1.0  # bounds of a, and the largest b
# _TINY is the least scale that divides, and the least fitted b. _LEAST is the least 2 b, because hypot has no gradient
# where both of its arguments are zero.
_TINY, _LEAST = 1e-30, 1e-6


class Heads(nn.Module):
    """The last step of a model.

    With `local_terms`, each grid cell gets learned terms of its own.
    """

    MAPS = ("bias", "inflation", "anchor")  # (T, F, Y, X)
    BY_FIELD = ("shrink", "spread_shrink", "spread_gain", "spread_level")  # (T, F)
    DRY = ("dry_share", "dry_mean")  # (T, F), a and b

    climatology: Tensor
    anchor: Tensor
    typical: Tensor
    bias: Tensor
    inflation: Tensor
    shrink: Tensor
    spread_shrink: Tensor
    spread_gain: Tensor
    spread_level: Tensor
    dry_share: Tensor
    dry_mean: Tensor
    local_location: nn.Parameter | None
    local_scale: nn.Parameter | None
    local_spread: nn.Parameter | None

    def __init__(self, spec: ModelSpec, climate: Climate, *, local_terms: bool):
        super().__init__()
        self.families, self.postprocess, self.spread = spec.families, spec.config.postprocess, spec.config.spread
        known = {"climatology": climate.spread}
        known |= {name: getattr(climate, name) for name in (*self.MAPS, *self.BY_FIELD, *self.DRY)}
        for name, values in known.items():
            self.register_buffer(name, torch.from_numpy(np.asarray(values, np.float32).copy()))
        self.register_buffer("typical", typical_spread(self.climatology))
        names = ["local_location", "local_scale"] * self.postprocess + ["local_spread"] * self.spread
        for name in ("local_location", "local_scale", "local_spread"):
            wanted = local_terms and name in names
            self.register_parameter(name, nn.Parameter(torch.zeros(climate.bias.shape)) if wanted else None)

    @property
    def outputs(self) -> int:
        """Return the number of the network's outputs for each field, lead and cell."""
        return 2 * self.postprocess + self.spread

    @property
    def relative_climatology(self) -> Tensor:
        """Return s_clim in typical spreads, (T F, Y, X)."""
        return (self.climatology / self.typical[..., None, None]).flatten(0, 1)

    def base_spread(self, spread: Tensor, count: Tensor) -> Tensor:
        """Return the prior spread s0 at the predicted leads, for the spread (B, T, F, Y, X) of M members, (B,)."""
        return shrunk_spread(spread, count, self.climatology, self.shrink[..., None, None])

    def followed(self, spread1: Tensor) -> Tensor:
        """Return the prior spread s0 of `FOLLOWED` members whose spread is a linearly corrected s1, (B, T, F, Y, X)."""
        return self.base_spread(spread1, spread1.new_full((len(spread1),), FOLLOWED))

    def full_spread(self, spread: Tensor, count: Tensor) -> Tensor:
        """Return s1, the expected spread of the full ensemble, for the spread (B, T, F, Y, X) of M members, (B,)."""
        terms = (getattr(self, name)[..., None, None] for name in self.BY_FIELD[1:])
        return unbiased_spread(spread, count, self.climatology, *terms)

    def departures(self, mean: Tensor, spread: Tensor, count: Tensor) -> Tensor:
        """Return the anomalies d that the linear correction reads, in typical spreads, (B, KINDS, T, F, Y, X).

        Mean and spread are (B, T, F, Y, X), at the predicted leads; `count` (B,) is M (`linear.departures`).
        """
        shrink, typical = self.spread_shrink[..., None, None], self.typical[..., None, None]
        return departures(mean, spread, count, self.anchor, self.climatology, shrink, typical)

    def corrected(self, mean: Tensor, spread1: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        """Add a correction to the ensemble mean and to s1.

        Args:
            mean: (B, T, F, Y, X) ensemble mean.
            spread1: s1, the same shape.
            by: (B, KINDS, T, F, Y, X) correction of the mean and of the spread, in typical spreads.

        Returns:
            The corrected mean and the corrected s1, physical units.
        """
        shift, more = (by * self.typical[..., None, None]).unbind(1)
        return mean + shift, widened(spread1, more)

    def forward(
        self, mean: Tensor, spread0: Tensor, spread1: Tensor, network: Tensor, points: Tensor | None = None
    ) -> Prediction:
        """Compute location, scale and spread, physical units.

        Args:
            mean: (B, T, F, Y, X) ensemble mean of the predicted leads, linearly corrected where that is on.
            spread0: s0, the prior spread, the same shape.
            spread1: s1, the expected spread of the full ensemble, the same shape.
            network: (B, outputs, T, F, Y, X) outputs of the U-Net, float32 or float64.
            points: outputs of the point network: d'', v and w, (B, 3, T, F, Y, X), or d'' alone, (B, 1, T, F, Y, X), if
                the truth is not predicted; None without that network.

        Returns:
            Location and scale if the truth is predicted, and the spread if it is, (B, T, F, Y, X) each.
        """
        found: dict[str, Tensor] = {}
        # The gradient of `unbind` is one copy; each slice would give a gradient padded to the full size.
        parts = network.unbind(1)
        if self.postprocess:
            # The point network was fitted to the errors that bias and linear correction leave, so it comes after them
            # here as well.
            centre, inflation = mean + self.bias, self.inflation[None]
            if points is not None:
                centre, inflation = informed(centre, spread0, inflation, points[:, 1:].transpose(0, 1))
            base, spread0 = self._base(centre, spread0, inflation)
            scale = spread0 * torch.exp(inflation + bounded(_plus(parts[1], self.local_scale)))
            shift = parts[0] * spread0
            # The learned bias dL is the same on every date, so its unit is s_clim. The network's shift is in units of
            # the day's s0.
            if self.local_location is not None:
                shift = shift + self.climatology * self.local_location
            found |= {"location": base + shift, "scale": scale}
        if self.spread:
            if points is not None:
                spread1 = widened(spread1, points[:, 0] * self.typical[..., None, None])
            # A factor keeps the spread positive, and its bound keeps it finite.
            found["spread"] = spread1 * torch.exp(bounded(_plus(parts[-1], self.local_spread)))
        return Prediction(**found)

    def _base(self, base: Tensor, spread0: Tensor, inflation: Tensor) -> tuple[Tensor, Tensor]:
        """Return the location for each mean in `base`, and s0 after the change near zero.

        The locations overwrite the means in `base`.
        """
        # s0 is changed only for the distributions with a mass at zero, and in a copy: autograd needs the original.
        narrow = spread0.clone() if any(family in AT_ZERO for family in self.families) else spread0
        for family, at in by_family(self.families):
            if family is Family.NORMAL:
                continue
            grown = torch.exp(take(inflation, 2, at))
            dry = (take(getattr(self, name), 1, at)[..., None, None] for name in self.DRY)
            location, scale = law_near_zero(family, take(base, 2, at), take(spread0, 2, at) * grown, *dry)
            where = integers(at, base.device)
            base.index_copy_(2, where, location)
            if family in AT_ZERO:
                narrow.index_copy_(2, where, scale / grown)
        return base, narrow


def typical_spread(climatology: Tensor) -> Tensor:
    """Return the root mean square of s_clim (..., Y, X) over grid cells, the unit of linear corrections, (...)."""
    return climatology.square().mean((-2, -1)).sqrt()


def widened(spread: Tensor, more: Tensor) -> Tensor:
    """Return spread + more, but never less than a fixed fraction of the spread, so that it stays positive."""
    return torch.maximum(spread + more, _LEAST_SHARE * spread)


def informed(centre: Tensor, spread0: Tensor, inflation: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Apply v and w of the point network to a mean and to the logarithm of its sigma.

    Args:
        centre: (...) mean of the distribution.
        spread0: (...) s0.
        inflation: (...) B, the logarithm of sigma / s0.
        errors: (2, ...) v and w, before they are bounded to +-3.

    Returns:
        centre + v s0 exp(B), and B + w.
    """
    v, w = bounded(errors).unbind(0)
    return centre + v * spread0 * torch.exp(inflation), inflation + w


def _plus(network: Tensor, local: Tensor | None) -> Tensor:
    """Return the network's output, with the local term added where there is one."""
    return network if local is None else network + local


def bounded(exponent: Tensor) -> Tensor:
    """Return 3 tanh(exponent / 3), which bounds a logarithm to +-3 and leaves it as it is near zero.

    So its exponential is finite.
    """
    return _BOUND * torch.tanh(exponent / _BOUND)


def law_near_zero(family: Family, mean: Tensor, scale: Tensor, share: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return location and scale, (...), of the distribution for a mean and a scale, after the change near zero.

    Only the distributions in `AT_ZERO` are changed, by a (`share`) and b (`least`). For the others, the location is
    that of the mean.
    """
    if family in AT_ZERO:
        mean, scale = wetter(mean, scale, share, least)
    return distributions.location_of_mean(family, mean, scale), scale


def wetter(mean: Tensor, scale: Tensor, share: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean' and sigma', (...) each, for a (`share`) and b (`least`).

    Where the mean is negative, the gradient of mean' by the mean is that at zero. Otherwise a point with a dry forecast
    would have no gradient and would stay dry in training.
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
