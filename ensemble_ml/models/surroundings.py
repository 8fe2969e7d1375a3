"""Small networks of what surrounds a point: what spread and errors owe to it beyond a linear correction.

Axes: B date, C = O channel and output of the linear correction, F = C / 2 field, H hidden unit, K input, Y latitude,
X longitude.

    x    = d at 3 x 3 points, |d_m|, |grad d_m| and log s at the point, place, static fields, 1/M, log M, season  (K)
    d''  = W2 [gelu(W1 [x, 1]), 1]                                                                                (F)
    v, w = W4 [gelu(W3 [x, 1]), 1]                                                                                (2 F)

d are the departures of `models.linear` (d_m those of means), gradients in typical spreads a row, s = d_s + s_clim the
spread drawn to climate. d'' is added to the spread's d', v sigmas to the mean, and sigma is multiplied by exp(w)
(`model.residuals`). Spread grows where the flow is steep, for what is uncertain there is where things are; no linear
map of the departures says so. Nor does the spread say all of how large errors will be. Hidden layers fitted to single
points of many dates (`training.point_fit`) learn in a minute what the U-Net did not in five (ARCHITECTURE, "Tried"),
and stay as they are in training.
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
_UNITS = 256  # that are held at once: a global field of each takes as much memory as many fields of the forecast
_LEAST_SPREAD = 1e-2  # typical spreads: below this a spread is as good as none, and its logarithm stays put


def surroundings_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Shapes of W1 and W3 (H, K + 1), W2 (F, H + 1), W4 (2 F, H + 1) by their names in `Climate`; empty where there
    is no such network."""
    channels = correction_shape(spec)[3]
    inputs, fields = (NEAR + 1) * channels + channels // KINDS + plane_count(spec), channels // KINDS
    width = spec.config.surroundings if channels else 0
    wide = spec.config.residuals if width and spec.config.postprocess else 0
    shapes = {}
    for name, units, outputs in (("surroundings", width, fields), ("residuals", wide, 2 * fields)):
        shapes[f"{name}_first"] = (units, inputs + 1) if units else (0, 0)
        shapes[f"{name}_second"] = (outputs, units + 1) if units else (0, 0)
    return shapes


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

    def forward(self, padded_BCYX: Tensor, climatology_FYX: Tensor, common_BPYX: Tensor) -> Tensor:
        """Departures with a row and a column more on each side, s_clim in typical spreads and the common planes -> d'',
        or v and w: (B, outputs, Y, X)."""
        first, second = self.first.to(padded_BCYX.dtype), self.second.to(padded_BCYX.dtype)
        around = NEAR * self.channels
        others = torch.cat([self.sizes(padded_BCYX, climatology_FYX), common_BPYX.to(first.dtype)], 1)
        found = second[:, -1:, None].expand(len(others), -1, *others.shape[2:])
        for start in range(0, len(first), _UNITS):
            units = slice(start, start + _UNITS)
            near, rest = first[units, :around].unflatten(1, (self.channels, 3, 3)), first[units, around:-1, None, None]
            hidden = F.gelu(F.conv2d(padded_BCYX, near, first[units, -1]) + F.conv2d(others, rest))
            found = found + F.conv2d(hidden, second[:, :-1][:, units, None, None])
        return found

    def at_points(self, inputs_KP: Tensor) -> Tensor:
        """The same of single points, from x without the constant: (outputs, P)."""
        hidden = F.gelu(self.first[:, :-1] @ inputs_KP + self.first[:, -1:])
        return self.second[:, :-1] @ hidden + self.second[:, -1:]

    def sizes(self, padded_BCYX: Tensor, climatology_FYX: Tensor) -> Tensor:
        """|d_m|, |grad d_m| and log s, (B, 3 F, Y, X)."""
        mean, spread = padded_BCYX.chunk(KINDS, 1)
        across = (mean[..., 1:-1, 2:] - mean[..., 1:-1, :-2]) / 2 * self.stretch.to(mean.dtype)
        along = (mean[..., 2:, 1:-1] - mean[..., :-2, 1:-1]) / 2
        logs = (spread[..., 1:-1, 1:-1] + climatology_FYX).clamp(min=_LEAST_SPREAD).log()
        return torch.cat([mean[..., 1:-1, 1:-1].abs(), torch.hypot(across, along), logs], 1)


def _stretch(spec: ModelSpec) -> Tensor:
    """(Y, 1): a step from row to row over one along the row."""
    latitude, longitude = np.asarray(spec.latitude, float), np.asarray(spec.longitude, float)
    steps = [float(np.abs(np.diff(axis)).mean()) if len(axis) > 1 else 1.0 for axis in (latitude, longitude)]
    narrow = np.cos(np.deg2rad(latitude)).clip(1e-6)
    return torch.from_numpy((steps[0] / steps[1] / narrow).clip(max=_MOST_STRETCH).astype(np.float32))[:, None]
