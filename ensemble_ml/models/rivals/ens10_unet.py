"""The 2D U-Net of ENS-10 (Ashkboos et al. 2022, arXiv:2206.14786), with outputs in units of the ensemble's own spread.

The network of the paper has three scales of 32, 64 and 128 channels, with two convolutions on the way down and two on
the way up at each scale, batch norm, ReLU, maximum pooling, bilinear interpolation, and skips by concatenation. From
its outputs o1 and o2 come location = m + s o1 and scale = s exp(o2), as in the authors' training script. m and s are
mean and standard deviation of the members.

Some things differ here. One network predicts all fields and leads; the paper has a network for each target. It reads
the inputs that all our baselines read. Padding continues the sphere; that of the paper is zero. With one member, s is
the climatological spread; with more, s is at least a hundredth of its level's typical spread. o2 is bounded to +-3.
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
from ensemble_ml.models.unet3d import zeroed

_SMALLEST = 1e-2  # least s, in typical spreads


class _Stage(nn.Module):
    """A 3 x 3 convolution with batch norm and ReLU, after the padding `pad`."""

    def __init__(self, inputs: int, outputs: int, pad: Padder):
        super().__init__()
        self.pad = pad
        self.conv = nn.Conv2d(inputs, outputs, 3, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        """Apply the stage to (B, C, Y, X)."""
        return F.relu(self.norm(self.conv(self.pad(x_BCYX[..., None])[..., 0])))


def _pair(inputs: int, middle: int, outputs: int, geometry: Geometry, first: Padder | None = None) -> nn.Sequential:
    """Return two stages; `first` is the padding of the first one if it differs."""
    pad = Padder(geometry)
    return nn.Sequential(_Stage(inputs, middle, first or pad), _Stage(middle, outputs, pad))


class Ens10UNet(Rival):
    """The U-Net: `model.hidden` channels at the finest scale, doubled `model.depth` times up to `model.max_hidden`."""

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
        # A stage on the way up gives as many channels as the next finer level has.
        below = [widths[max(i - 1, 0)] for i in range(config.depth + 1)]
        self.deepest = _pair(widths[-1], widths[-1], below[-1], levels[-1])
        self.up = nn.ModuleList(_pair(2 * widths[i], widths[i], below[i], levels[i]) for i in range(config.depth))
        self.last_pad = Padder(levels[0])
        self.out = zeroed(nn.Conv2d(widths[0], self.heads.outputs * len(spec.leads_out) * self.spec.fields, 3))

    def network(self, planes_BCYX: Tensor, x: EnsembleInput) -> Tensor:
        """Apply the U-Net."""
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
        """Turn the first two outputs into location and scale, in physical units."""
        # If the spread is zero at all points, there is one member, and the climatological spread is used.
        floor = torch.maximum(fields.spread, _SMALLEST * fields.typical)
        spread = torch.where(
            fields.spread.flatten(1).amax(1).reshape(-1, *[1] * (floor.ndim - 1)) > 0, floor, fields.climatology
        )
        return fields.mean + spread * first, spread * torch.exp(bounded(second))


def _larger(x_BCYX: Tensor, like: Tensor, wraps: bool) -> Tensor:
    """Interpolate bilinearly to the size of `like`; if longitude wraps, also across the first meridian."""
    rows, columns = like.shape[-2:]
    if not wraps:
        return _bilinear(x_BCYX, rows, columns)
    # A column of the other end is added on each side, so that outer columns have their true neighbours. Each added
    # column becomes two, which are cut off.
    x_BCYX = torch.cat([x_BCYX[..., -1:], x_BCYX, x_BCYX[..., :1]], -1)
    return _bilinear(x_BCYX, rows, columns + 4)[..., 2:-2]


def _bilinear(x_BCYX: Tensor, rows: int, columns: int) -> Tensor:
    """Interpolate bilinearly.

    On a GPU this is done by matrix products: the gradient of torch's interpolation is summed there in an order that
    changes from run to run.
    """
    if not x_BCYX.is_cuda:
        return F.interpolate(x_BCYX, size=(rows, columns), mode="bilinear")
    axes = zip(x_BCYX.shape[2:], (rows, columns), strict=True)
    across, along = (_weights(size, wanted, x_BCYX.device, x_BCYX.dtype) for size, wanted in axes)
    return across @ x_BCYX @ along.T


@lru_cache
def _weights(size: int, wanted: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the weight that linear interpolation of an axis gives to each point: (wanted, size)."""
    with torch.inference_mode(False):
        found = F.interpolate(torch.eye(size, dtype=torch.float64)[None], size=wanted, mode="linear")
        return found[0].T.to(device, dtype)
