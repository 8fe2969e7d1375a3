"""A linear correction of every field from all fields around: what errors have in common with departures nearby.

Axes: B date, C channel, O output, Y latitude, X longitude.

    d  = (m - anchor, (s_M - s_clim) (M-1) / (M-1+k)) / typical spread      of all fields and predicted leads
    d' = sum over bands of h_b (W0_b + W1_b / M) * d                       3 x 3 convolutions over (Y, X)

h_b are hat functions of latitude between `NODES`, which add up to one: what moves with the wind, and how wind and
pressure go together, differ between tropics and extratropics, and change sign between the hemispheres.
anchor is the train dates' mean of m at the point. d' is added to the ensemble mean and to s1, in typical spreads. So a
mean is drawn to climate as far as its field and scale ask for (noise of small scales most), moved along where lead
times differ, and helped by other variables; at M = 1 the mean's own pattern says what spread to expect. W is fitted in
closed form (`training.linear_fit`), and stays as it is in training. Rows of one band, or of two, are all that a band's
convolution sees: the bands cost as much as two convolutions over the globe.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.padding import Padder, geometries

NODES = (-60.0, -30.0, 0.0, 30.0, 60.0)  # degrees north; beyond the last ones there is one band
TERMS = 2  # W0 and W1
KINDS = 2  # channels of means and of spreads; outputs for the mean and for the spread


def bands_of(latitude: np.ndarray) -> np.ndarray:
    """h_b, (N, Y): those hats between `NODES` that some row lies under."""
    hats = np.stack([np.interp(latitude, NODES, unit) for unit in np.eye(len(NODES))])
    return hats[hats.any(1)]


def correction_shape(spec: ModelSpec) -> tuple[int, ...]:
    """(N, TERMS, O, C, 3, 3); without outputs and channels where there is no linear correction."""
    count = KINDS * len(spec.leads_out) * spec.fields if spec.linear else 0
    return len(bands_of(spec.grid.latitude)), TERMS, count, count, 3, 3


class LinearCorrection(nn.Module):
    """The convolutions; channels and outputs are (kind, field), fields first by lead, variable, level, then surface."""

    weight: Tensor
    bands: Tensor
    supports: list[tuple[int, int]]  # first and last + 1 row of each band

    def __init__(self, spec: ModelSpec, weight: np.ndarray):
        super().__init__()
        self.spec = spec
        sign = spec.vector_sign(len(spec.leads_out))
        finest = geometries(spec.grid, spec.config.pole, 0)[0]
        self.pad = Padder(finest, torch.cat([sign, torch.ones_like(sign)])[:, None])
        self.register_buffer("weight", torch.from_numpy(np.asarray(weight, np.float32).copy()))
        bands = bands_of(spec.grid.latitude)
        self.supports = [(int(rows[0]), int(rows[-1]) + 1) for rows in map(np.flatnonzero, bands)]
        self.register_buffer("bands", torch.from_numpy(bands)[..., None].float(), persistent=False)

    def padded(self, departures_BCYX: Tensor) -> Tensor:
        """With a row and a column more on each side, (B, C, Y + 2, X + 2)."""
        return self.pad(departures_BCYX[..., None])[..., 0]

    def forward(self, padded: Tensor, count: Tensor) -> Tensor:
        """What `padded` gives, and M (B,) -> (B, O, Y, X)."""
        rows, columns = padded.shape[2] - 2, padded.shape[3] - 2
        found = padded.new_zeros(len(padded), self.weight.shape[2], rows, columns)
        for weight, share, (first, last) in zip(self.weight, self.bands, self.supports, strict=True):
            if first < last:
                weight = weight.to(padded.dtype)
                for sample, members in enumerate(count):  # each has a kernel of its own
                    departures = padded[sample : sample + 1, :, first : last + 2]
                    added = F.conv2d(departures, weight[0] + weight[1] / members)[0]
                    found[sample, :, first:last] += share[first:last] * added
        return found

    def at_points(self, near: Tensor, rows: Tensor, members: int) -> Tensor:
        """The same at single points, from their 3 x 3 neighbours (9 C, P) and the rows they lie in: (O, P)."""
        found = near.new_zeros(self.weight.shape[2], near.shape[1])
        for weight, share in zip(self.weight, self.bands[:, rows, 0], strict=True):
            here = share > 0
            kernel = (weight[0] + weight[1] / members).flatten(1)
            found[:, here] += share[here] * (kernel @ near[:, here])
        return found


def departures(
    mean: Tensor, spread: Tensor, count: Tensor, anchor: Tensor, climatology: Tensor, shrink: Tensor, typical: Tensor
) -> Tensor:
    """d, (B, KINDS, ...); zero where there is no value.

    Args:
        mean, spread: (B, ...) of the members; `count` (B,) M.
        anchor, climatology: as one of the batch; `shrink` (k) and `typical` broadcast against them.
    """
    freedom = (count - 1).reshape(-1, *[1] * (mean.ndim - 1))
    apart = (mean - anchor) / typical
    more = freedom / (freedom + shrink) * (spread - climatology) / typical
    found = torch.stack([apart, more.expand_as(apart)], 1)
    return torch.where(torch.isnan(found), 0.0, found)
