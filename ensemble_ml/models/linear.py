"""A linear correction of every field from all fields around: what errors have in common with departures nearby.

Axes: B date, C channel, O output, Y latitude, X longitude.

    d  = (m - anchor, (s_M - s_clim) (M-1) / (M-1+k)) / typical spread      of all fields and predicted leads
    d' = (W0 + W1 / M) * d                                                  a 3 x 3 convolution over (Y, X)

anchor is the train dates' mean of m at the point. d' is added to the ensemble mean and to s1, in typical spreads. So a
mean is drawn to climate as far as its field and scale ask for (noise of small scales most), moved along where lead
times differ, and helped by other variables; at M = 1 the mean's own pattern says what spread to expect. W is fitted in
closed form (`training.linear_fit`), and stays as it is in training.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.fields import field
from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.padding import Padder, geometries

TERMS = 2  # W0 and W1
KINDS = 2  # channels of means and of spreads; outputs for the mean and for the spread


def correction_shape(spec: ModelSpec) -> tuple[int, ...]:
    """(TERMS, O, C, 3, 3); without outputs and channels where there is no linear correction."""
    count = KINDS * len(spec.leads_out) * (len(spec.variables) * len(spec.levels) + len(spec.surface))
    count = count if spec.linear else 0
    return TERMS, count, count, 3, 3


class LinearCorrection(nn.Module):
    """The convolution; channels and outputs are (kind, field), fields first by lead, variable, level, then surface."""

    weight: Tensor

    def __init__(self, spec: ModelSpec, weight: np.ndarray):
        super().__init__()
        self.spec = spec
        flips = [field(v).vector_component for v in spec.variables for _ in spec.levels] * len(spec.leads_out)
        flips += [field(v).vector_component for v in spec.surface] * len(spec.leads_out)
        sign = torch.where(torch.tensor(flips), -1.0, 1.0)
        finest = geometries(spec.grid, spec.config.pole, 0)[0]
        self.pad = Padder(finest, torch.cat([sign, torch.ones_like(sign)])[:, None])
        self.register_buffer("weight", torch.from_numpy(np.asarray(weight, np.float32).copy()))

    def forward(self, departures_BCYX: Tensor, count: Tensor) -> Tensor:
        """(B, C, Y, X) and M (B,) -> (B, O, Y, X)."""
        padded = self.pad(departures_BCYX[..., None])[..., 0]
        both = F.conv2d(padded, self.weight.to(padded.dtype).flatten(0, 1)).unflatten(1, (TERMS, -1))
        return both[:, 0] + both[:, 1] / count.reshape(-1, 1, 1, 1)


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
