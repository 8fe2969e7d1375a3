"""Heads that speak in units of the ensemble, and the terms that belong to one grid cell each.

Axes: B date, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.

    location = base + s_clim dL + a s0        scale = s0 exp(B + w + dB + b)        spread = s1 exp(dC + c)

a, b, c come from the network, whose last layer starts at zero; dL, dB, dC are learned, one number a cell, and start at
zero; base, B, and v and w (`models.surroundings`) are fitted before it is trained. So the untrained model *is* what the
dates say, and weight decay pulls the local terms back to it. All learned terms are in spreads or logarithms: a step of
a sign-based optimizer moves each by the same sensible share.

s0 is what sigma follows (its square is right on average), s1 what the full ensemble's spread follows (right on average
itself): see `features`. With a linear correction sigma follows s1 as it is corrected, for its neighbours know more of
the flow: s0 is then that of `FOLLOWED` members with this spread. The base is m + L + v s0 exp(B) for a normal variable.
For one that has bounds it is the location at which the distribution's *mean* is that. For one with a mass at zero,
mean and sigma are first what `models.dry` makes of them, and s0 from there on is less by as much as sigma is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ensemble_ml.fields import Family
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.dry import AT_ZERO, law_near_zero
from ensemble_ml.models.features import shrunk_spread, unbiased_spread
from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.linear import departures

FOLLOWED = 5  # members that a corrected s1 stands for, beside the k of climatology
_LEAST_SHARE = 0.2  # of s1, that a linear correction leaves of it
_BOUND = 3.0  # a scale stays within exp(3) = 20 times its start, so nothing overflows


class Heads(nn.Module):
    """The last step for one set of variables (pressure levels, or surface).

    Args:
        climate: `climatology` and `MAPS` (T, V, [Z,] Y, X); what `BY_FIELD` and `DRY` name (T, V[, Z]).
        families: of each variable.
        local_terms, postprocess, spread: as in `ModelConfig`.
    """

    MAPS = ("bias", "inflation", "anchor")
    BY_FIELD = ("shrink", "spread_shrink", "spread_gain", "spread_level")  # one number a lead, variable and level
    DRY = ("dry_share", "dry_mean")  # the same: a and b of `models.dry`

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

    @classmethod
    def of(cls, spec: ModelSpec, climate: Climate, *, surface: bool, local_terms: bool) -> Heads:
        """Those of the variables on pressure levels, or at the surface, by what the train dates say of them."""
        names = {"climatology": "spread"} | {k: k for k in (*cls.MAPS, *cls.BY_FIELD, *cls.DRY)}
        known = {k: getattr(climate, f"{v}_{'s' if surface else 'p'}") for k, v in names.items()}
        config = spec.config
        kinds = {"postprocess": config.postprocess, "spread": config.spread}
        return cls(known, spec.families[surface], local_terms=local_terms, **kinds)

    def __init__(
        self,
        climate: dict[str, np.ndarray],
        families: Sequence[Family],
        *,
        local_terms: bool,
        postprocess: bool,
        spread: bool,
    ):
        super().__init__()
        self.families, self.postprocess, self.spread = tuple(families), postprocess, spread
        for name in ("climatology", *self.MAPS, *self.BY_FIELD, *self.DRY):
            self.register_buffer(name, torch.from_numpy(np.asarray(climate[name], np.float32).copy()))
        self.register_buffer("typical", typical_spread(self.climatology))
        names = ["local_location", "local_scale"] * postprocess + ["local_spread"] * spread
        for name in ("local_location", "local_scale", "local_spread"):
            wanted = local_terms and name in names
            self.register_parameter(name, nn.Parameter(torch.zeros(climate["bias"].shape)) if wanted else None)

    @property
    def outputs(self) -> int:
        """Numbers that the network gives for each variable, lead and cell."""
        return 2 * self.postprocess + self.spread

    def base_spread(self, spread: Tensor, count: Tensor) -> Tensor:
        """s0 (B, T, V, [Z,] Y, X) of the predicted leads."""
        return shrunk_spread(spread, count, self.climatology, self.shrink[..., None, None])

    def followed(self, spread1: Tensor) -> Tensor:
        """s0 of a linearly corrected s1, the same shape."""
        count = spread1.new_full((len(spread1),), FOLLOWED)
        return shrunk_spread(spread1, count, self.climatology, self.shrink[..., None, None])

    def full_spread(self, spread: Tensor, count: Tensor) -> Tensor:
        """s1 (B, T, V, [Z,] Y, X) of the predicted leads."""
        terms = (getattr(self, name)[..., None, None] for name in self.BY_FIELD[1:])
        return unbiased_spread(spread, count, self.climatology, *terms)

    def departures(self, mean: Tensor, spread: Tensor, count: Tensor) -> Tensor:
        """d of `linear`, (B, KINDS, T, V, [Z,] Y, X), of the predicted leads."""
        shrink, typical = self.spread_shrink[..., None, None], self.typical[..., None, None]
        return departures(mean, spread, count, self.anchor, self.climatology, shrink, typical)

    def corrected(self, mean: Tensor, spread1: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and s1 with a linear correction `by` (B, KINDS, T, V, [Z,] Y, X) added."""
        shift, more = (by * self.typical[..., None, None]).unbind(1)
        return mean + shift, widened(spread1, more)

    def forward(
        self, mean: Tensor, spread0: Tensor, spread1: Tensor, network: Tensor, residuals: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        """Return location, scale and spread.

        Args:
            mean: (B, T, V, [Z,] Y, X) ensemble mean of the predicted leads, linearly corrected where that is on.
            spread0, spread1: s0 and s1, the same shape.
            network: (B, outputs, T, V, [Z,] Y, X), float32.
            residuals: v and w, (B, 2, T, V, [Z,] Y, X).
        """
        found: dict[str, Tensor | None] = {"location": None, "scale": None, "spread": None}
        # unbind, not slices: the gradient is then one copy instead of one padded tensor a slice
        parts = network.unbind(1)
        if self.postprocess:
            centre, inflation = mean + self.bias, self.inflation[None]
            if residuals is not None:
                centre, inflation = informed(centre, spread0, inflation, residuals.transpose(0, 1))
            base, spread0 = self._base(centre, spread0, inflation)
            scale = spread0 * torch.exp(inflation + bounded(_plus(parts[1], self.local_scale)))
            shift = parts[0] * spread0
            if self.local_location is not None:
                shift = shift + self.climatology * self.local_location
            found |= {"location": base + shift, "scale": scale}
        if self.spread:
            found["spread"] = spread1 * torch.exp(bounded(_plus(parts[-1], self.local_spread)))
        return found

    def _base(self, base: Tensor, spread0: Tensor, inflation: Tensor) -> tuple[Tensor, Tensor]:
        """Location, and s0 with what `models.dry` multiplies it by."""
        narrow = spread0.clone() if any(family in AT_ZERO for family in self.families) else spread0
        for index, family in enumerate(self.families):
            if family is not Family.NORMAL:
                grown = torch.exp(inflation[:, :, index])
                mean = base[:, :, index].clone()  # or a gradient by the inputs would find it overwritten
                dry = (getattr(self, name)[:, index, ..., None, None] for name in self.DRY)
                base[:, :, index], scale = law_near_zero(family, mean, spread0[:, :, index] * grown, *dry)
                if family in AT_ZERO:
                    narrow[:, :, index] = scale / grown
        return base, narrow

    def dry_of_older(self) -> dict[str, Tensor]:
        """What `DRY` names as it was before it was fitted: one and zero."""
        return dict(zip(self.DRY, (torch.ones_like(self.dry_share), torch.zeros_like(self.dry_mean)), strict=True))


def typical_spread(climatology: Tensor) -> Tensor:
    """Root mean square of s_clim (..., Y, X) over cells: the unit of linear corrections."""
    return climatology.square().mean((-2, -1)).sqrt()


def widened(spread: Tensor, more: Tensor) -> Tensor:
    """spread + more, that keeps a share of the spread where it would be below it."""
    return torch.maximum(spread + more, _LEAST_SHARE * spread)


def informed(centre: Tensor, spread0: Tensor, inflation: Tensor, residuals: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and logarithm of sigma / s0 with v and w (2, ...) of `surroundings`; all (...)."""
    v, w = bounded(residuals).unbind(0)
    return centre + v * spread0 * torch.exp(inflation), inflation + w


def _plus(network: Tensor, local: Tensor | None) -> Tensor:
    return network if local is None else network + local


def bounded(exponent: Tensor) -> Tensor:
    """The identity near zero that never leaves +-3, so that exponentials stay finite."""
    return _BOUND * torch.tanh(exponent / _BOUND)
