"""Small networks of what surrounds a point: what spread and errors owe to it beyond a linear correction.

Axes: B date, C = O channel and output of the linear correction, F = C / 2 field, H hidden unit, K input, P plane that
all fields share, Y latitude, X longitude.

    x    = d, its differences along and across rows, its mean over 3 x 3 points less itself, |d_m|, |grad d_m| and
           log s, place, static fields, 1/M, log M, season                                                        (K)
    d''  = W2 [gelu(W1 [x, 1]), 1]                                                                                (F)
    v, w = W4 [gelu(W3 [x, 1]), 1]                                                                                (2 F)

d are the departures of `models.linear` (d_m those of means), gradients in typical spreads a row, s = d_s + s_clim the
spread drawn to climate. Four numbers say of smooth fields what nine points do, at half of the work. South of the
equator x and v are those of the mirror (`models.linear`), which has the other season: northward components, differences
from row to row, sine and cosine of the season change their sign. Place does not, so that what tells hemispheres apart
is learned, too. d'' is added to the spread's d', v sigmas to the mean, and sigma is multiplied by exp(w)
(`model.residuals`). Spread grows where the flow is steep, for what is uncertain there is where things are; no linear
map of the departures says so. Nor does the spread say all of how large errors will be. Hidden layers fitted to single
points of many dates (`training.point_fit`) learn in a minute what the U-Net did not in five (ARCHITECTURE, "Tried"),
and stay as they are in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.linear import KINDS, correction_shape, of_channels
from ensemble_ml.models.place import hemisphere, plane_count, with_own_season

_STENCILS = 4  # of d: itself, two differences, the mean around
_MOST_STRETCH = 5.0  # of a step along a row, where meridians meet
# Whose inputs and hidden units are held at once (a row of each date at least).
_POINTS, _POINTS_ON_A_GPU = 1 << 12, 1 << 17  # that a cache holds; that keep a GPU busy
_LEAST_SPREAD = 1e-2  # typical spreads: below this a spread is as good as none, and its logarithm stays put


def surroundings_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Shapes of W1 and W3 (H, K + 1), W2 (F, H + 1), W4 (2 F, H + 1) by their names in `Climate`; empty where there
    is no such network."""
    channels = correction_shape(spec)[3]
    inputs, fields = (_STENCILS + 1) * channels + channels // KINDS + plane_count(spec), channels // KINDS
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


class Frame(NamedTuple):
    """How rows lie, (Y, 1) and `turn` (C, Y, 1); or points, (N, 1, 1, 1) and (N, C, 1, 1)."""

    stretch: Tensor  # a step from row to row over one along the row
    hemisphere: Tensor  # -1 south of the equator
    turn: Tensor  # -1 where channels are turned by the mirror


class Surroundings(nn.Module):
    """One of the two networks.

    Args:
        first, second: W1 and W2, or W3 and W4.
    """

    first: Tensor
    second: Tensor
    stretch: Tensor
    hemisphere: Tensor
    turn: Tensor  # (C, 1, 1) what channels are multiplied by in the mirror

    def __init__(self, spec: ModelSpec, first: np.ndarray, second: np.ndarray):
        super().__init__()
        for name, values in (("first", first), ("second", second)):
            self.register_buffer(name, torch.from_numpy(np.asarray(values, np.float32).copy()))
        turn = of_channels(spec.mirror_sign(len(spec.leads_out)))
        self.register_buffer("turn", turn[:, None, None], persistent=False)
        self.register_buffer("stretch", _stretch(spec), persistent=False)
        self.register_buffer("hemisphere", torch.from_numpy(hemisphere(spec)), persistent=False)

    def frame(self, rows: slice) -> Frame:
        """Of some rows."""
        return self._frame(self.stretch[rows], self.hemisphere[rows])

    def frame_at(self, rows: Tensor) -> Frame:
        """Of points in `rows` (N,)."""
        return self._frame(*(of_rows[rows][..., None, None] for of_rows in (self.stretch, self.hemisphere)))

    def _frame(self, stretch: Tensor, hemisphere: Tensor) -> Frame:
        return Frame(stretch, hemisphere, torch.where(hemisphere < 0, self.turn, torch.ones_like(self.turn)))

    def forward(self, inputs_BKYX: Tensor) -> Tensor:
        """From x without the constant: d'', or v and w, (B, outputs, Y, X)."""
        hidden = F.gelu(_layer(self.first, inputs_BKYX.flatten(2)))
        return _layer(self.second, hidden).unflatten(2, inputs_BKYX.shape[2:])

    def at_points(self, inputs_KN: Tensor) -> Tensor:
        """The same of single points: (outputs, N)."""
        return self(inputs_KN[None, ..., None])[0, ..., 0]


def apply_networks(
    networks: Sequence[Surroundings], padded_BCYX: Tensor, climatology_FYX: Tensor, common_BPYX: Tensor
) -> list[Tensor]:
    """What each of the networks, one at least, says of fields: (B, outputs, Y, X) each.

    Args:
        padded_BCYX: departures with a row and a column more on each side.
        climatology_FYX: s_clim in typical spreads.
        common_BPYX: of `place.common_planes`.
    """
    count, _, rows, columns = common_BPYX.shape
    found = [padded_BCYX.new_empty(count, len(network.second), rows, columns) for network in networks]
    points = _POINTS if padded_BCYX.device.type == "cpu" else _POINTS_ON_A_GPU
    step = max(1, points // max(1, count * columns))
    for start in range(0, rows, step):
        strip = slice(start, min(start + step, rows))
        padded = padded_BCYX[:, :, strip.start : strip.stop + 2]
        frame = networks[0].frame(strip)
        x = inputs_of(padded, climatology_FYX[:, strip], common_BPYX[:, :, strip], frame)
        for network, values in zip(networks, found, strict=True):
            outputs = network(x)  # of means and then of spreads, or of spreads alone
            values[:, :, strip] = outputs * frame.turn[-outputs.shape[1] :]
    return found


def inputs_of(padded_BCYX: Tensor, climatology_FYX: Tensor, common_BPYX: Tensor, frame: Frame) -> Tensor:
    """x without the constant, (B, K, Y, X).

    Args:
        padded_BCYX, climatology_FYX, common_BPYX: as for `apply_networks`; or of N points, each a date of one cell:
            (N, C, 3, 3), (N, F, 1, 1), (N, P, 1, 1).
        frame: of these rows, or points.
    """
    stretch, side, turn = (values.to(padded_BCYX.dtype) for values in frame)
    centre = padded_BCYX[..., 1:-1, 1:-1]
    along = (padded_BCYX[..., 1:-1, 2:] - padded_BCYX[..., 1:-1, :-2]) / 2
    across = (padded_BCYX[..., 2:, 1:-1] - padded_BCYX[..., :-2, 1:-1]) / 2
    around = F.avg_pool2d(padded_BCYX, 3, 1) - centre
    mean, spread = centre.chunk(KINDS, 1)
    slope = torch.hypot(along.chunk(KINDS, 1)[0] * stretch, across.chunk(KINDS, 1)[0])
    logs = (spread + climatology_FYX).clamp(min=_LEAST_SPREAD).log()
    stencils = centre * turn, along * turn, across * (turn * side), around * turn
    common = with_own_season(common_BPYX.to(centre.dtype), side)
    return torch.cat([*stencils, mean.abs(), slope, logs, common], 1)


def _layer(weights: Tensor, inputs_BKN: Tensor) -> Tensor:
    """W [x, 1], (B, H, N); faster in bfloat16 than the same as a convolution."""
    device = inputs_BKN.device.type
    low = torch.is_autocast_enabled(device)  # which would cast them again for each date
    weights = weights.to(torch.get_autocast_dtype(device) if low else inputs_BKN.dtype)
    return torch.baddbmm(weights[:, -1:], weights[:, :-1].expand(len(inputs_BKN), -1, -1), inputs_BKN)


def _stretch(spec: ModelSpec) -> Tensor:
    """(Y, 1): a step from row to row over one along the row."""
    latitude, longitude = np.asarray(spec.latitude, float), np.asarray(spec.longitude, float)
    steps = [float(np.abs(np.diff(axis)).mean()) if len(axis) > 1 else 1.0 for axis in (latitude, longitude)]
    narrow = np.cos(np.deg2rad(latitude)).clip(1e-6)
    return torch.from_numpy((steps[0] / steps[1] / narrow).clip(max=_MOST_STRETCH).astype(np.float32))[:, None]
