"""A small network that predicts spread and errors at a point from the fields around it: the point network.

It has one hidden layer, and adds what the linear correction (`models.linear`) cannot express:

    d'', v, w  = W2 [gelu(W1 [x, 1]), 1]

    x     inputs at a point, (K)
    d''   correction of the spread in addition to d', in typical spreads, (F)
    v     shift of the mean in sigmas, (F)
    w     change of the logarithm of sigma, (F)

A model that does not predict the truth has neither v nor w. The inputs x are:

    d                the anomalies of `models.linear`
    differences      of d along a row, and of d from row to row
    mean around      mean of d over 3 x 3 points, less d
    |d_m|            size of the anomalies of means
    |grad d_m|       size of their gradient, in typical spreads per row
    log s            logarithm of the spread s = d_s + s_clim, in typical spreads (d_s is shrunk, so s is as well)
    common planes    place, static fields, 1/M, log M, season (`models.inputs`)

Spread is large where gradients are, because the position of a steep gradient is uncertain. No linear map of anomalies
can express that. Nor does the spread alone show how large errors will be. For smooth fields, four numbers (d, two
differences and the mean around) tell as much as all nine points, at half the cost.

South of the equator, x and v are mirrored at the equator as in `models.linear`. So northward components and differences
from row to row change their sign, and the season is shifted by half a year. The place is not mirrored, so the network
can also learn how the hemispheres differ.

The weights are fitted to single points of many training dates (`training.point_fit`), and stay fixed when the U-Net is
trained. The fit learns in a minute what the U-Net did not learn in five (ARCHITECTURE, "Tried").

Axes: B initialisation time, C = O channel and output of the linear correction, F = C / 2 field at a lead, H hidden
unit, K input, P plane common to all fields, N point, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.models.inputs import ModelSpec, hemisphere, plane_count, with_own_season
from ensemble_ml.models.linear import KINDS, correction_shape, of_channels

STENCILS = 4  # numbers made of each d: itself, two differences, the mean around
_MOST_STRETCH = 5.0  # largest factor of a difference along a row: it grows without bound towards the poles
# Number of points that the network takes at once (one row of each sample at least). On a CPU the inputs and hidden
# units of so many points stay in its cache; a GPU needs more points to be busy.
_POINTS, _POINTS_ON_A_GPU = 1 << 12, 1 << 17
_LEAST_SPREAD = 1e-2  # typical spreads: the logarithm of a smaller spread is that of this one, so it stays finite


def outputs_of(spec: ModelSpec) -> int:
    """Return how many numbers the network gives for each field: d'', and v and w where the truth is predicted."""
    return 3 if spec.config.postprocess else 1


def point_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights by their names in `Climate`: W1 (H, K + 1) and W2 (outputs F, H + 1).

    They are (0, 0) if the model has no such network.
    """
    channels = correction_shape(spec)[3]
    fields = channels // KINDS
    # The network reads the anomalies of the linear correction, so there is none without that correction.
    units = spec.config.points if channels else 0
    if not units:
        return {"points_first": (0, 0), "points_second": (0, 0)}
    inputs = (STENCILS + 1) * channels + fields + plane_count(spec)
    return {"points_first": (units, inputs + 1), "points_second": (outputs_of(spec) * fields, units + 1)}


def make_network(spec: ModelSpec, weights: Mapping[str, np.ndarray]) -> PointNetwork | None:
    """Return the network with the weights `points_first` and `points_second`, or None if these are empty."""
    first, second = weights["points_first"], weights["points_second"]
    return PointNetwork(spec, first, second) if first.size else None


class Frame(NamedTuple):
    """The geometry of rows, (Y, 1) with `turn` (C, Y, 1), or of N points, (N, 1, 1, 1) with `turn` (N, C, 1, 1)."""

    stretch: Tensor  # distance from row to row, divided by that between neighbours in the row; 5 at most
    hemisphere: Tensor  # -1 south of the equator, 1 elsewhere
    turn: Tensor  # -1 where the mirror changes the sign of a channel, 1 elsewhere


class PointNetwork(nn.Module):
    """The point network, with W1 and W2 in the shapes of `point_shapes`."""

    first: Tensor
    second: Tensor
    stretch: Tensor
    hemisphere: Tensor
    turn: Tensor  # (C, 1, 1) factor of each channel in the mirror

    def __init__(self, spec: ModelSpec, first: np.ndarray, second: np.ndarray):
        super().__init__()
        for name, values in (("first", first), ("second", second)):
            self.register_buffer(name, torch.from_numpy(np.asarray(values, np.float32).copy()))
        turn = of_channels(spec.mirror_sign(len(spec.leads_out)))
        self.register_buffer("turn", turn[:, None, None], persistent=False)
        self.register_buffer("stretch", _stretch(spec), persistent=False)
        self.register_buffer("hemisphere", torch.from_numpy(hemisphere(spec)), persistent=False)

    def frame(self, rows: slice) -> Frame:
        """Return the geometry of some rows, which broadcasts against (B, C, rows, X)."""
        return self._frame(self.stretch[rows], self.hemisphere[rows])

    def frame_at(self, rows: Tensor) -> Frame:
        """Return the geometry of single points in the rows (N,), which broadcasts against (N, C, 1, 1)."""
        return self._frame(*(of_rows[rows][..., None, None] for of_rows in (self.stretch, self.hemisphere)))

    def _frame(self, stretch: Tensor, hemisphere: Tensor) -> Frame:
        """Return the geometry with the signs of the mirror."""
        return Frame(stretch, hemisphere, torch.where(hemisphere < 0, self.turn, torch.ones_like(self.turn)))

    def forward(self, inputs_BKYX: Tensor) -> Tensor:
        """Compute d'', v and w of fields, as seen in the mirror south of the equator, (B, outputs F, Y, X).

        The inputs are x without the constant.
        """
        hidden = apply_first(self.first, inputs_BKYX.flatten(2))
        return _layer(self.second, hidden).unflatten(2, inputs_BKYX.shape[2:])

    def over(self, padded_BCYX: Tensor, climatology_FYX: Tensor, common_BPYX: Tensor) -> Tensor:
        """Apply the network to anomalies, (B, outputs, F, Y, X), no longer mirrored.

        Args:
            padded_BCYX: anomalies d, padded by a row and a column on each side.
            climatology_FYX: s_clim in typical spreads.
            common_BPYX: the planes of `inputs.common_planes`.
        """
        count, _, rows, columns = common_BPYX.shape
        found = padded_BCYX.new_empty(count, len(self.second), rows, columns)
        points = _POINTS if padded_BCYX.device.type == "cpu" else _POINTS_ON_A_GPU
        # Strip by strip: all inputs and hidden units of a whole field would not fit into a CPU's cache.
        step = max(1, points // max(1, count * columns))
        for start in range(0, rows, step):
            strip = slice(start, min(start + step, rows))
            frame = self.frame(strip)
            given = padded_BCYX[:, :, strip.start : strip.stop + 2], climatology_FYX[:, strip], common_BPYX[:, :, strip]
            # Outputs are d'', v and w, and only v, the shift of a mean, changes its sign in the mirror. `turn` has the
            # signs of means and then ones for spreads; the ones serve d'' and w.
            signs = torch.cat([frame.turn[len(climatology_FYX) :], frame.turn])[: len(self.second)]
            found[:, :, strip] = self(inputs_of(*given, frame)) * signs
        return found.unflatten(1, (-1, len(climatology_FYX)))


def stencils(padded_BCYX: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return d, its differences along a row and from row to row, and the mean over 3 x 3 points less d."""
    centre = padded_BCYX[..., 1:-1, 1:-1]
    along = (padded_BCYX[..., 1:-1, 2:] - padded_BCYX[..., 1:-1, :-2]) / 2
    across = (padded_BCYX[..., 2:, 1:-1] - padded_BCYX[..., :-2, 1:-1]) / 2
    return centre, along, across, F.avg_pool2d(padded_BCYX, 3, 1) - centre


def inputs_of(padded_BCYX: Tensor, climatology_FYX: Tensor, common_BPYX: Tensor, frame: Frame) -> Tensor:
    """Build x without the constant, (B, K, Y, X), mirrored south of the equator.

    N single points are given as N samples of one cell each.

    Args:
        padded_BCYX: anomalies d, padded by one on each side; (N, C, 3, 3) for points.
        climatology_FYX: s_clim in typical spreads; (N, F, 1, 1) for points.
        common_BPYX: the planes of `inputs.common_planes`; (N, P, 1, 1) for points.
        frame: the geometry of these rows, or points.
    """
    stretch, side, turn = (values.to(padded_BCYX.dtype) for values in frame)
    centre, along, across, around = stencils(padded_BCYX)
    mean, spread = centre.chunk(KINDS, 1)
    slope = torch.hypot(along.chunk(KINDS, 1)[0] * stretch, across.chunk(KINDS, 1)[0])
    logs = (spread + climatology_FYX).clamp(min=_LEAST_SPREAD).log()
    parts = centre * turn, along * turn, across * (turn * side), around * turn
    # The mirror image of a southern point has the season of the north, half a year away.
    common = with_own_season(common_BPYX.to(centre.dtype), side)
    return torch.cat([*parts, mean.abs(), slope, logs, common], 1)


def apply_first(first: Tensor, inputs_BKN: Tensor) -> Tensor:
    """Compute the hidden units gelu(W1 [x, 1]), (B, H, N), of inputs without the constant."""
    return F.gelu(_layer(first, inputs_BKN))


def _layer(weights: Tensor, inputs_BKN: Tensor) -> Tensor:
    """Compute W [x, 1], (B, H, N). In bfloat16 this is faster than a convolution that does the same."""
    device = inputs_BKN.device.type
    # The weights are cast before they are expanded: autocast would cast them again for each sample.
    low = torch.is_autocast_enabled(device)
    weights = weights.to(torch.get_autocast_dtype(device) if low else inputs_BKN.dtype)
    return torch.baddbmm(weights[:, -1:], weights[:, :-1].expand(len(inputs_BKN), -1, -1), inputs_BKN)


def _stretch(spec: ModelSpec) -> Tensor:
    """Return the distance from row to row, divided by that between neighbours in the row: (Y, 1)."""
    latitude, longitude = np.asarray(spec.latitude, float), np.asarray(spec.longitude, float)
    steps = [float(np.abs(np.diff(axis)).mean()) if len(axis) > 1 else 1.0 for axis in (latitude, longitude)]
    # Meridians converge towards the poles, so neighbours in a row are closer there.
    narrow = np.cos(np.deg2rad(latitude)).clip(1e-6)
    return torch.from_numpy((steps[0] / steps[1] / narrow).clip(max=_MOST_STRETCH).astype(np.float32))[:, None]
