"""The distributional regression network (DRN) of Rasp & Lerch 2018, doi:10.1175/MWR-D-18-0187.1: an MLP at every point.

The network reads a point alone: its ensemble statistics, place, static fields, and a learned embedding of the point (in
the paper, of the station). In the paper, location and scale are plain numbers of degrees. Here location is
counted from the ensemble mean, and both are in typical spreads of the level, because one network has to serve fields of
all sizes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.models.climate import Climate
from ensemble_ml.models.heads import bounded
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec
from ensemble_ml.models.rivals.rival import Reduced, Rival

_EMBEDDING = 2  # numbers for each point, as in the paper


class Drn(Rival):
    """A DRN with `model.depth` hidden layers of `model.hidden` units each.

    Args:
        spec: shapes, variables, grid and configuration.
        climate: statistics of the training dates.
    """

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__(spec, climate)
        width, config = self.channels + _EMBEDDING, spec.config
        self.embedding = nn.Parameter(torch.zeros(_EMBEDDING, *spec.grid.shape))
        widths = [width] + [config.hidden] * config.depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.out = nn.Linear(widths[-1], self.outputs * len(spec.leads_out) * self.spec.fields)
        # The untrained network predicts the ensemble mean with the typical spread.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def network(self, planes_BCYX: Tensor, x: EnsembleInput) -> Tensor:
        """Apply the MLP to every point."""
        own = self.embedding.expand(len(planes_BCYX), -1, -1, -1)
        hidden = torch.cat([planes_BCYX, own], 1).permute(0, 2, 3, 1)
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=self.speed.low):
            # The same layers at every point are matrix products over the last axis.
            for layer in self.layers:
                hidden = F.relu(layer(hidden))
        return self.out(hidden.to(planes_BCYX.dtype)).permute(0, 3, 1, 2)

    def law(self, fields: Reduced, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the first two outputs into location and scale, in physical units."""
        return fields.mean + fields.typical * first, fields.typical * torch.exp(bounded(second))
