"""Make the channels that the network reads from a reduced ensemble of any number of members.

For each variable and input lead there are:

- the mean of the members, standardised;
- the logarithm of spread / typical spread of the level. The spread is first shrunk towards the climatological spread
  (at leads that are not predicted, towards the typical spread), so that the logarithm is finite with one member;
- for predicted leads, the logarithm of climatological spread / typical spread;
- if `one_member` is on, one member's departure from the mean, divided by the typical spread;
- for a masked variable (one that has points without a value), the fraction of the members that have a value.

In addition there are planes common to all fields: place, static fields, 1/M, log M and season (`models.inputs`).

Where no member has a value, the mean that standardises inputs takes the place of the members' mean, so that its channel
is zero. The spread is set to zero there.

Axes: B initialisation time, T lead, F field (variables and levels, then surface variables), V pressure-level variable,
S surface variable, Z level, Y latitude, X longitude, C channel.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ensemble_ml.errors import UserError
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, common_planes, integers, position_planes, take

_SMALLEST = 1e-2  # in typical spreads; the logarithm levels off below this, so that it is finite for a spread of zero
_SHRINK_UNFITTED = 2.0  # k in members for input leads that are not predicted: k is fitted for predicted leads only


def shrunk_spread(spread: Tensor, count: Tensor, climatology: Tensor, shrink: Tensor | float) -> Tensor:
    """Return the prior spread s0, which blends the members' variance with the climatological one, in its units.

        s0^2 = ((M-1) s^2 + k s_clim^2) / (M - 1 + k)

        s        standard deviation of the M members (ddof = 1)
        s_clim   climatological spread
        k        weight of the climatology, as a number of members

    Args:
        spread: s, (B, ...); zero where M = 1.
        count: (B,) M.
        climatology: s_clim, broadcast against `spread`.
        shrink: k in members, broadcast against `spread`; positive.
    """
    freedom = (count - 1).reshape(-1, *[1] * (spread.ndim - 1))
    return torch.sqrt((freedom * spread**2 + shrink * climatology**2) / (freedom + shrink))


def unbiased_spread(
    spread: Tensor, count: Tensor, climatology: Tensor, shrink: Tensor, gain: Tensor, level: Tensor
) -> Tensor:
    """Return s1, the expected spread of the full ensemble given the spread of M members, in the units of `spread`.

        s1 = ((M-1) g s / c4(M) + k l s_clim) / (M - 1 + k)

        s        standard deviation of the M members (ddof = 1)
        c4(M)    E[s] / sigma of M independent normal values, so s / c4(M) is free of the bias of small samples
        g, l     factors that bring s / c4(M) and s_clim to the mean of the full ensemble's spread
        k        weight of the climatology, as a number of members

    On average, s1 equals the full ensemble's spread. Of s0 (`shrunk_spread`), only the square is right on average.

    The arguments are those of `shrunk_spread`, with g as `gain` and l as `level`, broadcast against `spread`; positive.
    """
    # The formula of c4 gives NaN for one member. M is therefore clamped to 2. The value that this gives does not
    # matter, because its weight M - 1 is zero.
    several = count.clamp(min=2)
    c4 = torch.sqrt(2 / (several - 1)) * torch.exp(torch.lgamma(several / 2) - torch.lgamma((several - 1) / 2))
    shape = (-1, *[1] * (spread.ndim - 1))
    freedom = (count - 1).reshape(shape)
    sample = gain * spread / c4.reshape(shape)
    return (freedom * sample + shrink * level * climatology) / (freedom + shrink)


class Features(nn.Module):
    """The layer that turns an `EnsembleInput` into the channels of the network.

    Inputs are standardised by the statistics of the training dates in `climate`.
    """

    mean: Tensor
    std: Tensor
    level_spread: Tensor
    position: Tensor

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__()
        self.spec = spec
        for name in ("mean", "std", "level_spread"):
            self.register_buffer(name, torch.from_numpy(np.asarray(getattr(climate, name), np.float32).copy()))
        # Place and static fields are constant, so they are computed once and saved in the state_dict.
        self.register_buffer("position", position_planes(spec, climate.static))

    def channels(self, *, surface: bool) -> int:
        """Return the number of channels C of the surface variables, or of the variables on pressure levels."""
        names = self.spec.surface if surface else self.spec.variables
        leads = 2 * len(self.spec.leads_in) + len(self.spec.leads_out)
        masks = len(self.spec.leads_in) * sum(name in self.spec.masked for name in names)
        return len(names) * (leads + len(self.spec.leads_in) * self.spec.config.one_member) + masks

    def pole_rule(self, *, surface: bool) -> tuple[Tensor, Tensor]:
        """Return sign and offset, (C, Z) each, by which channels are continued across a pole: x -> sign x + offset.

        A wind component w becomes -w in physical units. Its standardised value x = (w - mean) / std therefore becomes
        -x - 2 mean / std. If the mean is a map, the map is continued like the wind itself, so x becomes -x. One
        member's departure from the mean changes its sign with the wind. All other channels stay as they are. At the
        surface, Z = 1.
        """
        spec = self.spec
        names, levels = (spec.surface, 1) if surface else (spec.variables, len(spec.levels))
        sign_V = spec.vector_sign(1)[spec.upper :] if surface else spec.vector_sign(1)[: spec.upper]
        if spec.local:
            offset_V = torch.zeros_like(sign_V)
        else:
            ratio = (self.mean / self.std)[spec.upper :] if surface else (self.mean / self.std)[: spec.upper]
            offset_V = torch.where(sign_V < 0, -2 * ratio, torch.zeros_like(ratio))
        sign_V, offset_V = (values.view(len(names), levels) for values in (sign_V, offset_V))
        leads, outs = len(spec.leads_in), len(spec.leads_out)
        plain = torch.ones_like(sign_V).repeat(leads + outs, 1)
        signs = [sign_V.repeat(leads, 1), plain]
        offsets = [offset_V.repeat(leads, 1), torch.zeros_like(plain)]
        if spec.config.one_member:
            signs.append(sign_V.repeat(leads, 1))
            offsets.append(torch.zeros_like(sign_V).repeat(leads, 1))
        masks = sign_V.new_ones(leads * sum(name in spec.masked for name in names), levels)
        return torch.cat([*signs, masks]), torch.cat([*offsets, torch.zeros_like(masks)])

    def filled(self, x: EnsembleInput) -> EnsembleInput:
        """Fill points where no member has a value: the mean with that of the standardisation, the spread with zero.

        Returns:
            A batch without NaN in its mean, spread and single member. Where the single member has no value, it is set
            to the mean. `valid` is always filled: the fraction of the members that have a value.
        """
        # A NaN would spread through the convolutions to every point of the field.
        hidden = torch.isnan(x.mean)
        mean = torch.where(hidden, self._standard()[0].to(x.mean.dtype), x.mean)
        # An input without `valid` does not say how many members have a value at a point: all or none are assumed.
        valid = (~hidden[:, :, self.spec.masked_positions]).to(mean.dtype) if x.valid is None else x.valid
        member = None if x.member is None else torch.where(torch.isnan(x.member), mean, x.member)
        return replace(x, mean=mean, spread=torch.where(hidden, 0.0, x.spread), member=member, valid=valid)

    def forward(self, x: EnsembleInput, spread0: Tensor, climatology: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Build the channels.

        Args:
            x: a batch without NaN, such as `filled` returns.
            spread0: (B, T_out, F, Y, X) s0 of the predicted leads.
            climatology: (T_out, F, Y, X) s_clim of the predicted leads.

        Returns:
            Channels of the variables on pressure levels (B, C, Y, X, Z), channels of the surface variables
            (B, C, Y, X), and common planes (B, C, Y, X). Each of the three has its own C.

        Raises:
            UserError: the model needs a single member, and `x` has none; or `x` is float64 and the weights are float32.
        """
        if x.mean.dtype is torch.float64 and self.mean.dtype is torch.float32:
            raise UserError("input: dtype torch.float64; the weights of this model are torch.float32; give the same")
        level, outs = self.level_spread[..., None, None], self.spec.lead_positions
        shrunk = shrunk_spread(x.spread, x.count, level, _SHRINK_UNFITTED)
        # At predicted leads, s0 with its fitted k replaces the spread that was shrunk with `_SHRINK_UNFITTED`.
        shrunk = shrunk.index_copy(1, integers(outs, x.spread.device), spread0)
        mean, std = self._standard()
        known = _log_ratio(climatology, take(level, 0, outs)).expand(len(x), *climatology.shape)
        parts = [(x.mean - mean) / std, _log_ratio(shrunk, level), known]
        if self.spec.config.one_member:
            if x.member is None:
                raise UserError("model.one_member=true: the input holds no single member; give `member`")
            parts.append((x.member - x.mean) / level)
        pressure, surface = self._planes(torch.cat(parts, 1), self.spec.upper)
        if masked := self.spec.masked_positions:
            assert x.valid is not None
            upper, flat = self._planes(x.valid, sum(position < self.spec.upper for position in masked))
            pressure, surface = torch.cat([pressure, upper], 1), torch.cat([surface, flat], 1)
        return pressure.permute(0, 1, 3, 4, 2), surface, self.common(x.count, x.day_of_year)

    def _planes(self, values: Tensor, upper: int) -> tuple[Tensor, Tensor]:
        """Fold fields into planes: (B, T, F, Y, X) -> (B, T V, Z, Y, X) and (B, T S, Y, X).

        The first `upper` fields are on pressure levels.
        """
        on_levels, surface = values.split([upper, values.shape[2] - upper], 2)
        levels = max(1, len(self.spec.levels))
        return on_levels.unflatten(2, (upper // levels, levels)).flatten(1, 2), surface.flatten(1, 2)

    def common(self, count: Tensor, day_of_year: Tensor) -> Tensor:
        """Return the planes of place, season and number of members, (B, C, Y, X), for (B,) counts and days."""
        return common_planes(self.position, count, day_of_year)

    def _standard(self) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation that standardise inputs, broadcast against (B, T, F, Y, X)."""
        if self.spec.local:
            return self.mean, self.std
        return self.mean[:, None, None], self.std[:, None, None]


def _log_ratio(spread: Tensor, level: Tensor) -> Tensor:
    """Return log(spread / level), which levels off at the logarithm of `_SMALLEST`."""
    return 0.5 * torch.log((spread / level) ** 2 + _SMALLEST**2)
