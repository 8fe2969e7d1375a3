"""Small networks of what surrounds a point: what errors owe to it beyond a linear correction, and how large they are.

Axes: B date, C channel, O output, H hidden unit, K input, Y latitude, X longitude.

    x   = d at 3 x 3 points, |d_m| and |grad d_m| at the point, place, static fields, 1/M, log M, season     (K)
    d'' = W2 [gelu(W1 [x, 1]), 1]                                                                            (O)
    w   = W4 [gelu(W3 [x, 1]), 1]                                                                            (O / 2)

d are the departures of `models.linear` (d_m those of means), gradients in typical spreads a row. d'' is added to d',
sigma multiplied by exp(w). Spread grows where the flow is steep, for what is uncertain there is where things are; no
linear map of the departures says so. Nor does the spread say all of how large errors will be: that is for w
(`model.sharpness`). Hidden layers fitted to single points of many dates (`training.point_fit`) learn in a minute what
the U-Net did not in five (ARCHITECTURE, "Tried"), and stay as they are in training.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.linear import KINDS, correction_shape
from ensemble_ml.models.place import plane_count

NEAR = 9  # points around, and the point itself
_MOST_STRETCH = 5.0  # of a step along a row, where meridians meet


def surroundings_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Shapes of W1 and W3 (H, K + 1), W2 (O, H + 1), W4 (O / 2, H + 1) by their names in `Climate`; empty where there
    is no such network."""
    channels = correction_shape(spec)[3]
    width = spec.config.surroundings if channels else 0
    wide = width and spec.config.sharpness and spec.config.postprocess
    first, none = (width, (NEAR + 1) * channels + plane_count(spec) + 1), (0, 0)
    return {
        "surroundings_first": first if width else none,
        "surroundings_second": (channels, width + 1) if width else none,
        "sharpness_first": first if wide else none,
        "sharpness_second": (channels // KINDS, width + 1) if wide else none,
    }


def make_network(spec: ModelSpec, weights: Mapping[str, np.ndarray], name: str) -> Surroundings | None:
    """The network of the `weights` NAME_first and NAME_second; None where these are empty."""
    first, second = weights[f"{name}_first"], weights[f"{name}_second"]
    return Surroundings(spec, first, second) if first.size else None


class Surroundings(nn.Module):
    """One of the two networks.

    Args:
        first, second: W1 and W2, or W3 and W4.
    """

    first: Tensor
    second: Tensor
    stretch: Tensor

    def __init__(self, spec: ModelSpec, first: np.ndarray, second: np.ndarray):
        super().__init__()
        for name, values in (("first", first), ("second", second)):
            self.register_buffer(name, torch.from_numpy(np.asarray(values, np.float32).copy()))
        self.register_buffer("stretch", _stretch(spec), persistent=False)
        self.channels = correction_shape(spec)[3]

    def forward(self, padded_BCYX: Tensor, common_BPYX: Tensor) -> Tensor:
        """Departures with a row and a column more on each side, and the common planes -> d'' or w (B, O, Y, X)."""
        first, second = self.first.to(padded_BCYX.dtype), self.second.to(padded_BCYX.dtype)
        around = NEAR * self.channels
        others = torch.cat([self.sizes(padded_BCYX), common_BPYX.to(first.dtype)], 1)
        hidden = F.conv2d(padded_BCYX, first[:, :around].unflatten(1, (self.channels, 3, 3)), first[:, -1])
        hidden = F.gelu(hidden + F.conv2d(others, first[:, around:-1, None, None]))
        return F.conv2d(hidden, second[:, :-1, None, None], second[:, -1])

    def at_points(self, inputs_KP: Tensor) -> Tensor:
        """The same of single points, from x without the constant: (O, P)."""
        hidden = F.gelu(self.first[:, :-1] @ inputs_KP + self.first[:, -1:])
        return self.second[:, :-1] @ hidden + self.second[:, -1:]

    def sizes(self, padded_BCYX: Tensor) -> Tensor:
        """|d_m| and |grad d_m|, (B, C, Y, X)."""
        mean = padded_BCYX[:, : self.channels // KINDS]
        across = (mean[..., 1:-1, 2:] - mean[..., 1:-1, :-2]) / 2 * self.stretch.to(mean.dtype)
        along = (mean[..., 2:, 1:-1] - mean[..., :-2, 1:-1]) / 2
        return torch.cat([mean[..., 1:-1, 1:-1].abs(), torch.hypot(across, along)], 1)


def _stretch(spec: ModelSpec) -> Tensor:
    """(Y, 1): a step from row to row over one along the row."""
    latitude, longitude = np.asarray(spec.latitude, float), np.asarray(spec.longitude, float)
    steps = [float(np.abs(np.diff(axis)).mean()) if len(axis) > 1 else 1.0 for axis in (latitude, longitude)]
    narrow = np.cos(np.deg2rad(latitude)).clip(1e-6)
    return torch.from_numpy((steps[0] / steps[1] / narrow).clip(max=_MOST_STRETCH).astype(np.float32))[:, None]
