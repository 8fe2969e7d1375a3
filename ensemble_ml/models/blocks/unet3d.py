"""The modified 3D U-Net: convolutions over latitude, longitude and level, pooling over latitude and longitude only.

Axes: B date, C channel, Y latitude, X longitude, Z plane (pressure levels from the top down, then the surface).
Pressure comes last, in channels-last memory (B, Y, X, Z, C), where a whole column is a matrix (see `models.speed`).

"Modified" is how weights act across planes (`Vertical`): one kernel for all planes (shared); the same with a scale and
a shift of each plane's own (affine); a horizontal, then a vertical kernel (separable); a kernel of its own for each
plane (full). Above the top and below the lowest plane the network sees zeros: nothing continues there, and the
convolution pads zeros for free.

Nothing is normalised: inputs are standardised, every residual branch starts at zero, and the optimizer steps by signs.
Measured on a synthetic task, this reached a lower loss than a norm over groups of channels, which in turn beat one over
the channels of a point: a norm takes out the amplitude that a spread consists of. A scale and a shift stand where norms
would. So no point waits for another, no sum over the grid is needed, and any partition of it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.config import Vertical
from ensemble_ml.models.blocks.resample import add_upsampled, pool
from ensemble_ml.models.padding import Geometry, Padder


class ScaleShift(nn.Module):
    """Scale and shift by channel, or by plane and channel."""

    def __init__(self, channels: int, planes: int | None = None):
        super().__init__()
        shape = (channels,) if planes is None else (planes, channels)
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        x_BYXZC, dtype = x_BCYXZ.permute(0, 2, 3, 4, 1), x_BCYXZ.dtype
        return torch.addcmul(self.bias.to(dtype), x_BYXZC, self.weight.to(dtype)).permute(0, 4, 1, 2, 3)


class PointLinear(nn.Linear):
    """A 1 x 1 x 1 convolution: in channels-last memory one matrix product."""

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        return super().forward(x_BCYXZ.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)


class Convolution(nn.Module):
    """3 x 3 over (Y, X) with padding made before, and three planes deep in the way that `vertical` says."""

    def __init__(self, inputs: int, outputs: int, planes: int, vertical: Vertical, pad: Padder, *, bias: bool):
        super().__init__()
        self.pad = pad
        deep = 3 if planes > 1 else 1
        self.deep = deep
        if vertical is Vertical.full:
            convs = [nn.Conv3d(inputs, outputs, (3, 3, deep), bias=bias) for _ in range(planes)]
            self.by_plane = nn.ModuleList(convs)
        elif vertical is Vertical.separable:
            self.across = nn.Conv3d(inputs, outputs, (3, 3, 1), bias=False)
            self.along = nn.Conv3d(outputs, outputs, (1, 1, deep), padding=(0, 0, deep // 2), bias=bias)
        else:
            self.conv = nn.Conv3d(inputs, outputs, (3, 3, deep), padding=(0, 0, deep // 2), bias=bias)
        self.vertical = vertical

    def start_at_zero(self) -> None:
        """Let the output be zero until something is learned."""
        last = {Vertical.full: "by_plane", Vertical.separable: "along"}.get(self.vertical, "conv")
        for parameter in self.get_submodule(last).parameters():
            nn.init.zeros_(parameter)

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        padded = self.pad(x_BCYXZ)
        if self.vertical is Vertical.full:
            half = self.deep // 2
            padded = F.pad(padded, (half, half)) if half else padded
            parts = [conv(padded[..., z : z + self.deep]) for z, conv in enumerate(self.by_plane)]
            return torch.cat(parts, -1)
        if self.vertical is Vertical.separable:
            return self.along(self.across(padded))
        return self.conv(padded)


class ResidualBlock(nn.Module):
    """x + convolution(act(scale(convolution(act(scale(x)))))); the last convolution starts at zero."""

    def __init__(self, channels: int, planes: int, vertical: Vertical, geometry: Geometry):
        super().__init__()
        pad = Padder(geometry)
        self.scale1 = ScaleShift(channels)
        self.conv1 = Convolution(channels, channels, planes, vertical, pad, bias=False)
        self.scale2 = ScaleShift(channels, planes if vertical is Vertical.affine else None)
        self.conv2 = Convolution(channels, channels, planes, vertical, pad, bias=True)
        self.conv2.start_at_zero()

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.scale1(x_BCYXZ)))
        return x_BCYXZ + self.conv2(F.silu(self.scale2(h)))


class UNet3d(nn.Module):
    """Encoder and decoder over `geometries` (finest first), (B, hidden, Y, X, Z) -> the same.

    Args:
        geometries: one a level, as `padding.geometries` gives them.
        planes: Z.
        widths: channels of each level.
        blocks: residual blocks a level, in the encoder and again in the decoder.
        vertical: how weights act across planes.
    """

    def __init__(
        self, geometries: Sequence[Geometry], planes: int, widths: Sequence[int], blocks: int, vertical: Vertical
    ):
        super().__init__()

        def stage(level: int) -> nn.Sequential:
            made = [ResidualBlock(widths[level], planes, vertical, geometries[level]) for _ in range(blocks)]
            return nn.Sequential(*made)

        depth = len(geometries) - 1
        self.encoder = nn.ModuleList(stage(level) for level in range(depth + 1))
        self.decoder = nn.ModuleList(stage(level) for level in range(depth))
        self.down = nn.ModuleList(PointLinear(widths[i], widths[i + 1]) for i in range(depth))
        self.up = nn.ModuleList(PointLinear(widths[i + 1], widths[i]) for i in range(depth))

    def forward(self, x_BCYXZ: Tensor) -> Tensor:
        skips = []
        for stage, down in zip(self.encoder, self.down, strict=False):
            x_BCYXZ = stage(x_BCYXZ)
            skips.append(x_BCYXZ)
            x_BCYXZ = down(pool(x_BCYXZ))
        x_BCYXZ = self.encoder[-1](x_BCYXZ)
        for level in reversed(range(len(self.decoder))):
            x_BCYXZ = self.decoder[level](add_upsampled(skips[level], self.up[level](x_BCYXZ)))
        return x_BCYXZ
