"""A network like PoET (Ben Bouallegue et al. 2024, doi:10.1175/AIES-D-23-0027.1), which maps members to members.

One U-Net transforms every member. At its three deepest scales, the members attend to each other at each grid point.

    x_i'     = x_i + s0 d_i
    location = mean of x_i'
    scale^2  = ((M-1) s'^2 + k s_clim^2) / (M - 1 + k)

    x_i      member i
    s0       prior spread (`models.features`)
    d_i      output of the network for member i
    s'       standard deviation of the x_i'
    s_clim   climatological spread, times a learned factor for each lead and field
    k        weight of the climatology, as a number of members

The paper minimises the fair CRPS of the members. Here the prediction is a distribution, as for all baselines, and the
CRPS of that distribution is minimised. Its variance is blended with the climatological one as in s0, because the spread
of two or three members is a poor forecast, and one member has none. For each member, the network reads its departures
from the mean and the channels that all baselines read.

Axes: B initialisation time, M member, T lead, F field, C channel, Y latitude, X longitude, Z plane (one), N = B M.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.config import Vertical
from ensemble_ml.errors import UserError
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.models.heads import bounded
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction, take
from ensemble_ml.models.padding import Padder, geometries
from ensemble_ml.models.rivals.rival import Reduced, Rival
from ensemble_ml.models.unet3d import Activation, Convolution, PointLinear, UNet3d, add_upsampled, pool, zeroed

_HEADS = 4
_ATTENDING = 3  # number of the deepest scales at which members attend to each other


class MemberAttention(nn.Module):
    """An attention layer in which the members at one grid point attend to each other. Its last layer starts at zero."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.inwards = nn.Linear(channels, 3 * channels)
        self.outwards = zeroed(nn.Linear(channels, channels))

    def forward(self, x_NCYXZ: Tensor, there_BM: Tensor) -> Tensor:
        """Apply the layer to (B M, C, Y, X, Z). Only members that exist, where `there_BM` is True, are attended to."""
        batch, members = there_BM.shape
        points = x_NCYXZ.permute(0, 2, 3, 4, 1)
        kinds = self.inwards(self.norm(points)).unflatten(0, (batch, members)).unflatten(-1, (3, _HEADS, -1))
        # Query, key and value are (B, YXZ, H, M, C).
        query, key, value = kinds.flatten(2, 4).permute(3, 0, 2, 4, 1, 5).unbind(0)
        mask = there_BM[:, None, None, None, :]  # nobody attends to the empty places of samples with fewer members
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        found = found.permute(0, 3, 1, 2, 4).flatten(3).reshape(points.shape)
        return x_NCYXZ + self.outwards(found).permute(0, 4, 1, 2, 3)


class _MemberUNet(UNet3d):
    """The blocks of our U-Net over one plane, with attention after each of the deepest stages of the encoder."""

    def __init__(self, spec: ModelSpec, widths: list[int]):
        config = spec.config
        super().__init__(geometries(spec.grid, config.pole, config.depth), 1, widths, config.blocks, Vertical.shared)
        first = max(0, config.depth + 1 - _ATTENDING)
        self.attention = nn.ModuleDict({str(i): MemberAttention(widths[i]) for i in range(first, config.depth + 1)})

    def transform(self, x_NCYXZ: Tensor, there_BM: Tensor) -> Tensor:
        """Transform the members: (B M, C, Y, X, Z) -> the same shape."""
        skips = []
        for level, stage in enumerate(self.encoder):
            x_NCYXZ = stage(x_NCYXZ if not level else self.down[level - 1](pool(x_NCYXZ)))
            if str(level) in self.attention:
                x_NCYXZ = self.attention[str(level)](x_NCYXZ, there_BM)
            skips.append(x_NCYXZ)
        x_NCYXZ = skips.pop()
        for level in reversed(range(len(self.decoder))):
            x_NCYXZ = self.decoder[level](add_upsampled(skips.pop(), self.up[level](x_NCYXZ)))
        return x_NCYXZ


class Poet(Rival):
    """The network. It takes all members (`EnsembleInput.members`).

    As in our own network, `model.hidden` channels double with each level up to `model.max_hidden`.
    """

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__(spec, climate)
        config = spec.config
        widths = [min(config.hidden * 2**i, config.max_hidden) for i in range(config.depth + 1)]
        geometry = geometries(spec.grid, config.pole, config.depth)[0]
        pad = Padder(geometry, *self.pole_rule())
        self.stem = Convolution(self.channels, widths[0], 1, Vertical.shared, pad, bias=True)
        # A departure from the mean changes only its sign beyond a pole, so it needs no offset.
        sign = self.spec.vector_sign(len(spec.leads_in))
        pad = Padder(geometry, sign[:, None])
        self.member_stem = Convolution(len(sign), widths[0], 1, Vertical.shared, pad, bias=False)
        self.unet = _MemberUNet(spec, widths)
        self.scale = Activation(widths[0])
        # Each field has a shift, and the spread of the full ensemble where it is predicted.
        outputs = len(spec.leads_out) * self.spec.fields * (1 + self.spec.config.spread)
        self.out = zeroed(PointLinear(widths[0], outputs))
        # For each field, the logarithm of a factor of the climatological spread in the predicted scale.
        self.widen = nn.Parameter(torch.zeros(len(spec.leads_out), self.spec.fields))

    def forward(self, x: EnsembleInput) -> Prediction:
        """Predict the parameters of the distributions, in physical units, from a batch with all members.

        Raises:
            UserError: the batch has no members, or its mean has another shape than the model takes.
        """
        if x.members is None:
            raise UserError("model.name=poet: the input holds no members; give `members`")
        fields, shape = self.reduced(x), (len(self.spec.leads_out), self.spec.fields)
        there = torch.arange(x.members.shape[1], device=x.count.device) < x.count[:, None]
        departures = (x.members - x.mean[:, None]) / self.features.level_spread[..., None, None]
        departures = departures.flatten(2, 3) * there[:, :, None, None, None]  # zero where there is no member
        raw = self._transform(self.planes(x, fields), departures, there)
        moves, rest = raw[:, :, : math.prod(shape)].unflatten(2, shape), raw[:, :, math.prod(shape) :]
        members = take(x.members, 2, self.spec.lead_positions)
        config = self.spec.config
        law = self._moments(members, x.count, fields, moves, there) if config.postprocess else None
        location, scale = law or (None, None)
        # The spread is a property of the whole ensemble, so its output is averaged over members.
        factor = torch.exp(bounded(_mean(rest, there).unflatten(1, shape))) if config.spread else None
        return Prediction(location, scale, None if factor is None else fields.s1 * factor)

    def _transform(self, planes: Tensor, departures: Tensor, there: Tensor) -> Tensor:
        """Run the network for every member: (B, M, outputs, Y, X)."""
        with torch.autocast(planes.device.type, torch.bfloat16, enabled=self.speed.low):
            # The common planes are the same for all members of a date, so they pass through their stem only once.
            shared = self.stem(self.speed.arrange(planes[..., None]))
            own = self.member_stem(self.speed.arrange(departures.flatten(0, 1)[..., None]))
            hidden = own + shared.repeat_interleave(departures.shape[1], 0)
            hidden = self.scale(self.unet.transform(hidden, there))
        return self.out(hidden.to(planes.dtype))[..., 0].unflatten(0, there.shape)

    def _moments(
        self, members: Tensor, count: Tensor, fields: Reduced, move: Tensor, there: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return location and scale of the transformed members; members and shifts d are (B, M, T, F, Y, X)."""
        centre = _mean(move, there)
        # The mean of the shifts goes into the location, so only differences between members go into the spread.
        apart = (members - fields.mean[:, None]) + fields.s0[:, None] * (move - centre[:, None])
        freedom = (count - 1).clamp(min=1).reshape(-1, *[1] * centre.ndim)
        weight = there.reshape(*there.shape, *[1] * (centre.ndim - 1))
        # The small term keeps the gradient of the root finite where all members are equal.
        spread = torch.sqrt((weight * apart**2 / freedom).sum(1) + (1e-3 * fields.typical) ** 2)
        climatology = fields.climatology * torch.exp(bounded(self.widen[..., None, None]))
        return fields.mean + fields.s0 * centre, shrunk_spread(
            spread, count, climatology, self.heads.shrink[..., None, None]
        )


def _mean(values: Tensor, there_BM: Tensor) -> Tensor:
    """Return the mean over the members that a sample has: (B, M, ...) -> (B, ...)."""
    weight = there_BM.to(values.dtype) / there_BM.sum(1, keepdim=True)
    return (values * weight.reshape(*there_BM.shape, *[1] * (values.ndim - 2))).sum(1)
