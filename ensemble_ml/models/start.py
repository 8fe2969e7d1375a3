"""The start of a model: everything before its U-Net, which is fitted to the training dates before training.

The formulas stand in `models.heads`, `models.linear` and `models.points`. The fits (`training.climate_fit`) fill the
arrays one after another. Each fit applies what is already fitted in the same way as the model does.

Axes: B initialisation time, C channel of the linear correction, T lead, F field (variables and levels, then surface
variables), Y latitude, X longitude.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ensemble_ml.models.climate import Climate
from ensemble_ml.models.features import Features
from ensemble_ml.models.heads import Heads
from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.linear import KINDS, LinearCorrection
from ensemble_ml.models.points import make_network
from ensemble_ml.models.speed import Speed


class Start(nn.Module):
    """Features, heads, linear correction and point network.

    Args:
        spec: shapes, variables, grid and `ModelConfig`.
        climate: statistics of the training dates; during the fits, those computed so far.
        local_terms: give each grid cell learned terms of its own.

    Attributes:
        linear: the linear correction, or None.
        points: the point network, or None.
    """

    def __init__(self, spec: ModelSpec, climate: Climate, *, local_terms: bool = False):
        super().__init__()
        self.spec, self.speed = spec, Speed()
        self.features = Features(spec, climate)
        self.heads = Heads(spec, climate, local_terms=local_terms)
        self.linear = LinearCorrection(spec, climate.correction) if spec.linear else None
        self.points = make_network(spec, vars(climate))

    def anomalies(self, mean: Tensor, spread: Tensor, count: Tensor) -> Tensor:
        """Return the anomalies d that linear correction and point network read, padded by one, (B, C, Y + 2, X + 2).

        Args:
            mean: (B, T, F, Y, X) mean of the members at the predicted leads.
            spread: spread of the members, the same shape.
            count: (B,) number of members M.
        """
        assert self.linear is not None
        return self.linear.padded(self.heads.departures(mean, spread, count).flatten(1, 3))

    def linear_part(self, padded: Tensor, count: Tensor) -> Tensor:
        """Return what the linear correction adds to mean and spread, in typical spreads, (B, KINDS, T, F, Y, X).

        Args:
            padded: result of `anomalies`.
            count: (B,) number of members M.
        """
        assert self.linear is not None
        return self.linear(padded, count).unflatten(1, (KINDS, *self.heads.typical.shape))

    def point_part(self, padded: Tensor, count: Tensor, day_of_year: Tensor) -> Tensor:
        """Return the outputs of the point network (`models.points`), (B, 1 or 3, T, F, Y, X).

        Args:
            padded: result of `anomalies`.
            count: (B,) number of members M.
            day_of_year: (B,) day of the year of the initialisation time.
        """
        assert self.points is not None
        common = self.features.common(count, day_of_year)
        # The point network runs in bfloat16 where the U-Net does; the linear correction stays in float32.
        with torch.autocast(padded.device.type, torch.bfloat16, enabled=self.speed.low):
            found = self.points.over(padded, self.heads.relative_climatology, common)
        return found.unflatten(2, self.heads.typical.shape)

    def corrections(
        self, mean: Tensor, spread: Tensor, count: Tensor, day_of_year: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return `linear_part` and `point_part`; None for a part that the model lacks.

        Args:
            mean: (B, T, F, Y, X) mean of the members at the predicted leads.
            spread: spread of the members, the same shape.
            count: (B,) number of members M.
            day_of_year: (B,) day of the year of the initialisation time.
        """
        if self.linear is None:
            return None, None
        padded = self.anomalies(mean, spread, count)
        points = None if self.points is None else self.point_part(padded, count, day_of_year)
        return self.linear_part(padded, count), points
