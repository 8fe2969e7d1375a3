"""ENS-10's U-Net (Ashkboos et al. 2022, arXiv:2206.14786): 2D, with outputs in units of the ensemble's own spread.

Three scales of 32, 64 and 128 channels; two convolutions each with batch norm and ReLU on the way down and up; maximum
pooling, bilinear interpolation, skips by concatenation; location = m + s o1 and scale = s exp(o2), as in their
training script. Different here: one network gives all fields and leads where theirs has a network for each target; it
sees the inputs that all our entrants see; padding continues the sphere where theirs is zero. Where one member has no
spread, s is the climatological one, and s has a floor of a hundredth of its level's typical spread.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.models.climate import Climate
from ensemble_ml.models.heads import bounded
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec
from ensemble_ml.models.padding import Geometry, Padder, geometries
from ensemble_ml.models.rivals.rival import Reduced, Rival

_SMALLEST = 1e-2


class _Stage(nn.Module):
    """A 3 x 3 convolution, batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, pad: Padder):
        super().__init__()
        self.pad = pad
        self.conv = nn.Conv2d(inputs, outputs, 3, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(self.pad(x_BCYX[..., None])[..., 0])))


def _pair(inputs: int, middle: int, outputs: int, geometry: Geometry, first: Padder | None = None) -> nn.Sequential:
    pad = Padder(geometry)
    return nn.Sequential(_Stage(inputs, middle, first or pad), _Stage(middle, outputs, pad))


class Ens10UNet(Rival):
    """`model.hidden` channels at the finest scale, doubled `model.depth` times."""

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__(spec, climate)
        config = spec.config
        levels = geometries(spec.grid, config.pole, config.depth)
        widths = [min(config.hidden * 2**i, config.max_hidden) for i in range(config.depth + 1)]
        inputs = [self.channels, *widths]
        pads = [Padder(levels[0], *self.pole_rule()), *[None] * config.depth]
        self.down = nn.ModuleList(
            _pair(inputs[i], widths[i], widths[i], levels[i], pads[i]) for i in range(config.depth + 1)
        )
        below = [widths[max(i - 1, 0)] for i in range(config.depth + 1)]
        self.deepest = _pair(widths[-1], widths[-1], below[-1], levels[-1])
        self.up = nn.ModuleList(_pair(2 * widths[i], widths[i], below[i], levels[i]) for i in range(config.depth))
        self.last_pad = Padder(levels[0])
        self.out = nn.Conv2d(widths[0], self.outputs * len(spec.leads_out) * self.spec.fields, 3)
        nn.init.zeros_(self.out.weight)
        assert self.out.bias is not None
        nn.init.zeros_(self.out.bias)

    def network(self, planes_BCYX: Tensor, x: EnsembleInput) -> Tensor:
        with torch.autocast(planes_BCYX.device.type, torch.bfloat16, enabled=self.speed.low):
            hidden, skips = self.speed.arrange(planes_BCYX), []
            for index, stage in enumerate(self.down):
                hidden = stage(hidden if not index else F.max_pool2d(hidden, 2, ceil_mode=True))
                skips.append(hidden)
            hidden = self.deepest(skips.pop())
            for stage in reversed(self.up):
                skip = skips.pop()
                hidden = stage(torch.cat([skip, _larger(hidden, skip, self.spec.grid.wraps)], 1))
        return self.out(self.last_pad(hidden.to(planes_BCYX.dtype)[..., None])[..., 0])

    def law(self, fields: Reduced, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        floor = torch.maximum(fields.spread, _SMALLEST * fields.typical)
        spread = torch.where(
            fields.spread.flatten(1).amax(1).reshape(-1, *[1] * (floor.ndim - 1)) > 0, floor, fields.climatology
        )
        return fields.mean + spread * first, spread * torch.exp(bounded(second))


def _larger(x_BCYX: Tensor, like: Tensor, wraps: bool) -> Tensor:
    """Bilinear interpolation; on the sphere, where columns are doubled, it goes on across the first meridian."""
    rows, columns = like.shape[-2:]
    if not wraps:
        return _bilinear(x_BCYX, rows, columns)
    x_BCYX = torch.cat([x_BCYX[..., -1:], x_BCYX, x_BCYX[..., :1]], -1)
    return _bilinear(x_BCYX, rows, columns + 4)[..., 2:-2]


def _bilinear(x_BCYX: Tensor, rows: int, columns: int) -> Tensor:
    """Torch's; on a GPU, where its gradient is added up in any order, the same as products with matrices."""
    if not x_BCYX.is_cuda:
        return F.interpolate(x_BCYX, size=(rows, columns), mode="bilinear")
    axes = zip(x_BCYX.shape[2:], (rows, columns), strict=True)
    across, along = (_weights(size, wanted, x_BCYX.device, x_BCYX.dtype) for size, wanted in axes)
    return across @ x_BCYX @ along.T


@lru_cache
def _weights(size: int, wanted: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(wanted, size): what linear interpolation of an axis takes of each point."""
    with torch.inference_mode(False):
        found = F.interpolate(torch.eye(size, dtype=torch.float64)[None], size=wanted, mode="linear")
        return found[0].T.to(device, dtype)
