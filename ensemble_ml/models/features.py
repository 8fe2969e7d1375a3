"""The channels that the network reads: made of a reduced ensemble, whatever the order and number of its members.

For each variable and input lead there are:

- the mean of the members, standardised;
- the logarithm of their spread, over the level's typical spread. The spread is first shrunk towards climatology, so
  that it is finite with one member;
- for predicted leads, the logarithm of the climatological spread in the same unit;
- if `one_member` is on, one member's departure from the mean in typical spreads;
- for a masked variable (one that has points without a value), the fraction of the members that have a value.

Beside them stand planes common to all fields: place, static fields, 1/M, log M and season (`models.place`).

Where no member has a value, the mean is set to the climatological one, which makes its channel zero, and the spread is
set to zero.

Axes: B initialisation time, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude,
C channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ensemble_ml.errors import UserError
from ensemble_ml.fields import field
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec
from ensemble_ml.models.place import common_planes, position_planes
from ensemble_ml.models.positions import integers, take

_SMALLEST = 1e-2  # typical spreads: the logarithm levels off below, so that no spread at all stays finite
_SHRINK_UNFITTED = 2.0  # k, in members, for input leads that are not predicted: none is fitted there


def shrunk_spread(spread: Tensor, count: Tensor, climatology: Tensor, shrink: Tensor | float) -> Tensor:
    """Return the prior spread s0, which blends the members' variance with the climatological one.

        s0^2 = ((M-1) s^2 + k s_clim^2) / (M - 1 + k)

        s        standard deviation of the M members (ddof = 1)
        s_clim   climatological spread
        k        how many members the climatology counts for

    Args:
        spread: s, (B, ...); zero where M = 1.
        count: (B,) M.
        climatology: s_clim, broadcast against `spread`.
        shrink: k in members, broadcast against `spread`; positive.

    Returns:
        s0, in the shape and units of `spread`.
    """
    freedom = (count - 1).reshape(-1, *[1] * (spread.ndim - 1))
    return torch.sqrt((freedom * spread**2 + shrink * climatology**2) / (freedom + shrink))


def unbiased_spread(
    spread: Tensor, count: Tensor, climatology: Tensor, shrink: Tensor, gain: Tensor, level: Tensor
) -> Tensor:
    """Return s1, the expectation of the full ensemble's spread given the spread of M members.

        s1 = ((M-1) g s / c4(M) + k l s_clim) / (M - 1 + k)

        s        standard deviation of the M members (ddof = 1)
        c4(M)    E[s] / sigma of M independent normal values, so s / c4(M) is free of the bias of small samples
        g, l     factors that bring s / c4(M) and s_clim to the mean of the full ensemble's spread
        k        how many members the climatology counts for

    The square of s0 (`shrunk_spread`) is right on average; s1 is right on average itself.

    Args:
        spread: s, (B, ...); zero where M = 1.
        count: (B,) M.
        climatology: s_clim, broadcast against `spread`.
        shrink: k in members, broadcast against `spread`; positive.
        gain: g, broadcast against `spread`; positive.
        level: l, broadcast against `spread`; positive.

    Returns:
        s1, in the shape and units of `spread`.
    """
    # c4 of one member is zero, and would give NaN. The clamped value does not matter: it has a weight of M - 1 = 0.
    several = count.clamp(min=2)
    c4 = torch.sqrt(2 / (several - 1)) * torch.exp(torch.lgamma(several / 2) - torch.lgamma((several - 1) / 2))
    shape = (-1, *[1] * (spread.ndim - 1))
    freedom = (count - 1).reshape(shape)
    sample = gain * spread / c4.reshape(shape)
    return (freedom * sample + shrink * level * climatology) / (freedom + shrink)


class Features(nn.Module):
    """The layer that turns an `EnsembleInput` into the channels of the network.

    Args:
        spec: variables, leads and grid.
        climate: statistics of the training dates, by which inputs are standardised.
    """

    mean_p: Tensor
    std_p: Tensor
    mean_s: Tensor
    std_s: Tensor
    position: Tensor

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__()
        self.spec = spec
        for suffix in ("p", "s"):
            for name in ("mean", "std", "level_spread"):
                self._buffer(f"{name}_{suffix}", getattr(climate, f"{name}_{suffix}"))
        # Place and static fields are constant, so they are computed once and travel with the state_dict.
        self.register_buffer("position", position_planes(spec, climate.static))

    def _buffer(self, name: str, values: np.ndarray) -> None:
        """Register a float32 copy of an array as a buffer."""
        self.register_buffer(name, torch.from_numpy(np.asarray(values, np.float32).copy()))

    def channels(self, *, surface: bool) -> int:
        """Return the number of channels of the surface variables, or of those on pressure levels.

        Args:
            surface: count those of the surface.

        Returns:
            C.
        """
        count = len(self.spec.surface if surface else self.spec.variables)
        leads = 2 * len(self.spec.leads_in) + len(self.spec.leads_out)
        masks = len(self.spec.leads_in) * len(self.spec.masked_positions[surface])
        return count * (leads + len(self.spec.leads_in) * self.spec.config.one_member) + masks

    def pole_rule(self, *, surface: bool) -> tuple[Tensor, Tensor]:
        """Return sign and offset by which channels are continued across a pole: x -> sign x + offset.

        A wind component w becomes -w in physical units. Its standardised value x = (w - mean) / std therefore becomes
        -x - 2 mean / std. A departure from the mean changes its sign alone, and spreads stay as they are. Where the
        mean is a map, the map is continued like the wind itself, so x becomes -x.

        Args:
            surface: give the rule of the surface variables.

        Returns:
            Sign and offset, (C, Z) each; Z = 1 at the surface.
        """
        names = self.spec.surface if surface else self.spec.variables
        flips = torch.tensor([field(name).vector_component for name in names], dtype=torch.bool)
        ratio = (self.mean_s / self.std_s)[:, None] if surface else self.mean_p / self.std_p
        if self.spec.local:
            ratio = torch.zeros(ratio.shape[0], 1 if surface else ratio.shape[1])
        sign_V = torch.where(flips, -1.0, 1.0)[:, None].expand_as(ratio)
        offset_V = torch.where(flips[:, None], -2 * ratio, torch.zeros_like(ratio))
        leads, outs = len(self.spec.leads_in), len(self.spec.leads_out)
        plain = torch.ones_like(sign_V).repeat(leads + outs, 1)
        signs = [sign_V.repeat(leads, 1), plain]
        offsets = [offset_V.repeat(leads, 1), torch.zeros_like(plain)]
        if self.spec.config.one_member:
            signs.append(sign_V.repeat(leads, 1))
            offsets.append(torch.zeros_like(sign_V).repeat(leads, 1))
        masks = torch.ones_like(sign_V)[self.spec.masked_positions[surface]].repeat(leads, 1)
        return torch.cat([*signs, masks]), torch.cat([*offsets, torch.zeros_like(masks)])

    def filled(self, x: EnsembleInput) -> EnsembleInput:
        """Replace the values of points where no member has one: the mean by climatology, the spread by zero.

        Args:
            x: a batch, NaN where no member has a value.

        Returns:
            A batch without NaN in means, spreads and the single member. Its `valid_*` show which points had values.
        """
        found: dict[str, Tensor] = {}
        for suffix, masked in zip(("p", "s"), self.spec.masked_positions, strict=True):
            mean, spread, member, valid = (getattr(x, f"{n}_{suffix}") for n in ("mean", "spread", "member", "valid"))
            # A NaN would spread through the convolutions to every point of the field.
            hidden = torch.isnan(mean)
            # If the input does not say how many members have a value, it is all of them or none.
            found[f"valid_{suffix}"] = (~hidden[:, :, masked]).to(mean.dtype) if valid is None else valid
            mean = torch.where(hidden, self._standard(suffix)[0].to(mean.dtype), mean)
            found |= {f"mean_{suffix}": mean, f"spread_{suffix}": torch.where(hidden, 0.0, spread)}
            if member is not None:
                found[f"member_{suffix}"] = torch.where(torch.isnan(member), mean, member)
        return replace(x, **found)  # type: ignore[arg-type]

    def forward(
        self, x: EnsembleInput, spread0: Sequence[Tensor], climatology: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Build the channels.

        Args:
            x: the batch, without NaN.
            spread0: s0 of the predicted leads, for the pressure levels and for the surface.
            climatology: s_clim of the predicted leads, for the pressure levels and for the surface.

        Returns:
            Channels of the pressure levels (B, C, Y, X, Z) and of the surface (B, C, Y, X), and the common planes
            (B, C, Y, X).

        Raises:
            UserError: the model needs a single member, and `x` has none.
        """
        pressure = self._stack(x, "p", spread0[0], climatology[0])
        surface = self._stack(x, "s", spread0[1], climatology[1])
        return pressure.permute(0, 1, 3, 4, 2), surface, self.common(x)

    def common(self, x: EnsembleInput) -> Tensor:
        """Return the planes of place, season and number of members.

        Args:
            x: the batch.

        Returns:
            (B, C, Y, X).
        """
        return common_planes(self.position, x.count, x.day_of_year)

    def _stack(self, x: EnsembleInput, suffix: str, spread0: Tensor, climatology: Tensor) -> Tensor:
        """Build the channels of one set of variables, (B, C, [Z,] Y, X)."""
        mean, spread = getattr(x, f"mean_{suffix}"), getattr(x, f"spread_{suffix}")
        level = getattr(self, f"level_spread_{suffix}")[..., None, None]
        outs = self.spec.lead_positions
        shrunk = shrunk_spread(spread, x.count, level, _SHRINK_UNFITTED)
        # Predicted leads have an s0 with a fitted k, which takes the place of the unfitted one.
        shrunk = shrunk.index_copy(1, integers(outs, spread.device), spread0)
        scales = self._standard(suffix)
        known = _log_ratio(climatology, take(level, 0, outs)).expand(len(x), *climatology.shape)
        parts = [(mean - scales[0]) / scales[1], _log_ratio(shrunk, level), known]
        if self.spec.config.one_member:
            member = getattr(x, f"member_{suffix}")
            if member is None:
                raise UserError("model.one_member=true: the input holds no single member; hand one on")
            parts.append((member - mean) / level)
        channels = torch.cat(parts, 1).flatten(1, 2)
        if not self.spec.masked_positions[suffix == "s"]:
            return channels
        return torch.cat([channels, getattr(x, f"valid_{suffix}").flatten(1, 2)], 1)

    def _standard(self, suffix: str) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation that inputs are standardised by, broadcast against (B, T, ..., Y, X)."""
        mean, std = getattr(self, f"mean_{suffix}"), getattr(self, f"std_{suffix}")
        return (mean, std) if self.spec.local else (mean[..., None, None], std[..., None, None])


def _log_ratio(spread: Tensor, level: Tensor) -> Tensor:
    """Return log(spread / level), which levels off at the logarithm of `_SMALLEST`."""
    return 0.5 * torch.log((spread / level) ** 2 + _SMALLEST**2)
