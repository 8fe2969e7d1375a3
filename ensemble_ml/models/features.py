"""From a reduced ensemble to channels that know neither the order nor the number of its members.

Axes: B date, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude, C channel.

For each variable and input lead: the mean, standardised by level; the logarithm of the spread, shrunk towards
climatology (finite at one member) and over the level's typical spread; for predicted leads the climatological spread
itself; optionally one member's departure from the mean in typical spreads; for a variable that has points without a
value (a mask), the share of the members given that have one. Beside them stand fields common to all planes: the number
of members M as 1/M and log M, position, day of year, static fields. Where no member has a value, the mean is taken to
be the climate's, which makes that channel zero, and the spread to be zero.
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

_SMALLEST = 1e-2  # of the level's typical spread: below this a spread is as good as none, and its logarithm stays put
_SHRINK_UNFITTED = 2.0  # members' worth of climatology for input leads that are not predicted


def shrunk_spread(spread: Tensor, count: Tensor, climatology: Tensor, shrink: Tensor | float) -> Tensor:
    """s0 = sqrt(((M-1) s^2 + k s_clim^2) / (M - 1 + k)): the spread that few members and climatology agree on.

    Args:
        spread: (B, ...) standard deviation of the M members, ddof = 1; zero where M = 1.
        count: (B,) M.
        climatology: s_clim, broadcast against `spread`.
        shrink: k in members, broadcast against `spread`; positive.
    """
    freedom = (count - 1).reshape(-1, *[1] * (spread.ndim - 1))
    return torch.sqrt((freedom * spread**2 + shrink * climatology**2) / (freedom + shrink))


def unbiased_spread(
    spread: Tensor, count: Tensor, climatology: Tensor, shrink: Tensor, gain: Tensor, level: Tensor
) -> Tensor:
    """The full ensemble's spread as its expectation, from M members: s1 = ((M-1) g s / c4(M) + k l s_clim) / (M-1+k).

    s / c4(M) is free of the bias of small samples (E[s] = c4(M) sigma); g and l bring it and s_clim to the mean of the
    full ensemble's spread, k weighs them. Unlike s0, whose square is right on average, s1 is right on average itself.

    Args:
        spread, count, climatology: as for `shrunk_spread`.
        shrink, gain, level: k in members, g and l, broadcast against `spread`; positive.
    """
    several = count.clamp(min=2)
    c4 = torch.sqrt(2 / (several - 1)) * torch.exp(torch.lgamma(several / 2) - torch.lgamma((several - 1) / 2))
    shape = (-1, *[1] * (spread.ndim - 1))
    freedom = (count - 1).reshape(shape)
    sample = gain * spread / c4.reshape(shape)
    return (freedom * sample + shrink * level * climatology) / (freedom + shrink)


class Features(nn.Module):
    """Turns an `EnsembleInput` into (pressure (B, C, Y, X, Z), surface (B, C, Y, X), common (B, C, Y, X))."""

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
        self.register_buffer("position", position_planes(spec, climate.static))

    def _buffer(self, name: str, values: np.ndarray) -> None:
        self.register_buffer(name, torch.from_numpy(np.asarray(values, np.float32).copy()))

    def channels(self, *, surface: bool) -> int:
        """Channels of one variable set."""
        count = len(self.spec.surface if surface else self.spec.variables)
        leads = 2 * len(self.spec.leads_in) + len(self.spec.leads_out)
        masks = len(self.spec.leads_in) * len(self.spec.masked_positions[surface])
        return count * (leads + len(self.spec.leads_in) * self.spec.config.one_member) + masks

    def pole_rule(self, *, surface: bool) -> tuple[Tensor, Tensor]:
        """Sign and offset (C, Z) of channels continued across a pole (Z = 1 at the surface).

        A wind component w becomes -w in physical units, so its standardised value x = (w - mean) / std becomes
        -x - 2 mean / std; a departure from the mean changes sign alone; spreads stay as they are. Where the mean is a
        map, it is continued like the wind itself, so that x becomes -x.
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
        """Values for points where no member given has one (see the head of the file); `valid_*` tells them apart."""
        found: dict[str, Tensor] = {}
        for suffix, masked in zip(("p", "s"), self.spec.masked_positions, strict=True):
            mean, spread, member, valid = (getattr(x, f"{n}_{suffix}") for n in ("mean", "spread", "member", "valid"))
            hidden = torch.isnan(mean)
            found[f"valid_{suffix}"] = (~hidden[:, :, masked]).to(mean.dtype) if valid is None else valid
            mean = torch.where(hidden, self._standard(suffix)[0].to(mean.dtype), mean)
            found |= {f"mean_{suffix}": mean, f"spread_{suffix}": torch.where(hidden, 0.0, spread)}
            if member is not None:
                found[f"member_{suffix}"] = torch.where(torch.isnan(member), mean, member)
        return replace(x, **found)  # type: ignore[arg-type]

    def forward(
        self, x: EnsembleInput, spread0: Sequence[Tensor], climatology: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Build the channels; `spread0` (s0 of the predicted leads) and `climatology` (s_clim), of the pressure levels
        and of the surface, come from the heads.
        """
        pressure = self._stack(x, "p", spread0[0], climatology[0])
        surface = self._stack(x, "s", spread0[1], climatology[1])
        return pressure.permute(0, 1, 3, 4, 2), surface, self.common(x)

    def common(self, x: EnsembleInput) -> Tensor:
        """Place, season and number of members, (B, C, Y, X)."""
        return common_planes(self.position, x.count, x.day_of_year)

    def _stack(self, x: EnsembleInput, suffix: str, spread0: Tensor, climatology: Tensor) -> Tensor:
        mean, spread = getattr(x, f"mean_{suffix}"), getattr(x, f"spread_{suffix}")
        level = getattr(self, f"level_spread_{suffix}")[..., None, None]
        outs = self.spec.lead_positions
        shrunk = shrunk_spread(spread, x.count, level, _SHRINK_UNFITTED)
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
        """Mean and deviation that inputs are standardised by, to be broadcast against (B, T, ..., Y, X)."""
        mean, std = getattr(self, f"mean_{suffix}"), getattr(self, f"std_{suffix}")
        return (mean, std) if self.spec.local else (mean[..., None, None], std[..., None, None])


def _log_ratio(spread: Tensor, level: Tensor) -> Tensor:
    """log(spread / level), levelling off at `_SMALLEST`."""
    return 0.5 * torch.log((spread / level) ** 2 + _SMALLEST**2)
