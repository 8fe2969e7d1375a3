"""The common base of the baselines (`Rival`), and the smallest of their networks, DRN.

Baselines read our network's inputs as maps and predict as our network does.

Axes: B initialisation time, T lead, C channel, F field (variables and levels, then surface variables), O output,
Y latitude, X longitude.

The distributional regression network (DRN) of Rasp & Lerch 2018, doi:10.1175/MWR-D-18-0187.1, is an MLP at every point.
It reads a point alone: its ensemble statistics, place, static fields, and a learned embedding of the point (in the
paper, of the station). In the paper, location and scale are plain numbers of degrees. Here location is counted from the
ensemble mean, and both are in typical spreads of the level, because one network has to serve fields of all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.models.climate import Climate
from ensemble_ml.models.features import Features
from ensemble_ml.models.heads import Heads, bounded
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction, plane_count, take
from ensemble_ml.models.linear import KINDS, departure_padder, of_channels
from ensemble_ml.models.padding import Padder
from ensemble_ml.models.points import STENCILS, stencils
from ensemble_ml.models.speed import Speed
from ensemble_ml.models.unet3d import zeroed

_EMBEDDING = 2  # numbers for each point, as in the paper


@dataclass(eq=False)
class Reduced:
    """The inputs at the predicted leads, (B, T, F, Y, X).

    Attributes:
        mean: mean of the members.
        spread: spread of the members.
        s0: prior spread (`models.features`).
        s1: expected spread of the full ensemble (`models.features`).
        climatology: s_clim, without B.
        typical: one typical spread for each lead and field, (T, F, 1, 1).
    """

    mean: Tensor
    spread: Tensor
    s0: Tensor
    s1: Tensor
    climatology: Tensor
    typical: Tensor


class Rival(nn.Module):
    """A baseline that sees maps of C channels and returns O numbers for each lead, field and grid point.

    A subclass defines `network` and `law`, which turns the first two outputs into location and scale, or a `forward` of
    its own. If `model.spread` is on, the last output changes the spread as in our own head.

    Raises:
        UserError: `climate` does not fit `spec`, or the grid does not fit the rule for the poles.
    """

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__()
        self.spec, self.speed = spec, Speed()
        climate = climate.checked(spec)
        self.features = Features(spec, climate)
        self.heads = Heads(spec, climate, local_terms=False)  # for the statistics that it holds, and s0 and s1
        self.near: Padder | None = departure_padder(spec) if spec.config.departures else None
        # The error is the scale of the CRPS loss. As a buffer it is part of every checkpoint.
        self.register_buffer("error", torch.from_numpy(climate.error))

    def network(self, planes_BCYX: Tensor, x: EnsembleInput) -> Tensor:
        """Return the outputs (B, O * T * F, Y, X) of the channels of `planes`, in at least float32."""
        raise NotImplementedError

    def law(self, fields: Reduced, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the first two outputs, (B, T, F, Y, X) each, into location and scale in physical units."""
        raise NotImplementedError

    def forward(self, x: EnsembleInput) -> Prediction:
        """Predict location, scale and spread at `leads_out` from `leads_in`, as far as the settings ask for them.

        They are (B, T, F, Y, X), in physical units.

        Raises:
            UserError: the mean has another shape than the model takes.
        """
        fields, config = self.reduced(x), self.spec.config
        outputs = self.heads.outputs
        raw = self.network(self.planes(x, fields), x).unflatten(1, (outputs, len(self.spec.leads_out), -1))
        location, scale = self.law(fields, raw[:, 0], raw[:, 1]) if config.postprocess else (None, None)
        return Prediction(location, scale, fields.s1 * torch.exp(bounded(raw[:, -1])) if config.spread else None)

    @property
    def channels(self) -> int:
        """Return C, the number of channels of `planes`."""
        upper = self.features.channels(surface=False) * len(self.spec.levels)
        every = upper + self.features.channels(surface=True) + plane_count(self.spec)
        return every + STENCILS * KINDS * len(self.spec.leads_out) * self.spec.fields * self.spec.config.departures

    def reduced(self, x: EnsembleInput) -> Reduced:
        """Return mean, spread and climate at the predicted leads.

        Raises:
            UserError: the mean has another shape than the model takes.
        """
        x.check(self.spec, self.spec.grid.shape)
        leads, heads = self.spec.lead_positions, self.heads
        mean, spread = (take(values, 1, leads) for values in (x.mean, x.spread))
        s0, s1 = heads.base_spread(spread, x.count), heads.full_spread(spread, x.count)
        typical = take(self.features.level_spread, 0, leads)[..., None, None]
        return Reduced(mean, spread, s0, s1, heads.climatology, typical)

    def planes(self, x: EnsembleInput, fields: Reduced) -> Tensor:
        """Return the channels of our own network, with each pressure level as channels of its own, (B, C, Y, X).

        If `model.departures` is on, the anomalies d of `models.linear` are added, with their differences and means
        around each point.
        """
        upper, flat, common = self.features(x, fields.s0, fields.climatology)
        planes = [upper.permute(0, 1, 4, 2, 3).flatten(1, 2), flat, common]
        if self.near is not None:
            departures = self.heads.departures(fields.mean, fields.spread, x.count)
            planes += stencils(self.near(departures.flatten(1, 3)[..., None])[..., 0])
        return torch.cat(planes, 1)

    def pole_rule(self) -> tuple[Tensor, Tensor]:
        """Return sign and offset, (C, 1) each, by which the channels of `planes` are continued across a pole."""
        rules = [self.features.pole_rule(surface=surface) for surface in (False, True)]
        sign, offset = (torch.cat([rule[i].flatten() for rule in rules]) for i in (0, 1))
        plain = torch.zeros(plane_count(self.spec))
        signs, offsets = [sign, plain + 1], [offset, plain]
        # On the other side of a pole, rows run in the opposite direction, so differences across rows change their sign.
        if self.near is not None:
            turn = of_channels(self.spec.vector_sign(len(self.spec.leads_out)))
            signs += [turn, turn, -turn, turn]
            offsets.append(torch.zeros(STENCILS * len(turn)))
        return torch.cat(signs)[:, None], torch.cat(offsets)[:, None]

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of parameters for an optimizer.

        Parameters with two or more axes have weight decay, also those of single grid cells. All others have none.
        """
        plain = [p for p in self.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"name": "weights", "params": [p for p in self.parameters() if p.ndim > 1]}]
        groups.append({"name": "plain", "params": plain, "weight_decay": 0.0})
        return [group for group in groups if group["params"]]


class Drn(Rival):
    """A DRN with `model.depth` hidden layers of `model.hidden` units each."""

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__(spec, climate)
        width, config = self.channels + _EMBEDDING, spec.config
        self.embedding = nn.Parameter(torch.zeros(_EMBEDDING, *spec.grid.shape))
        widths = [width] + [config.hidden] * config.depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        # The untrained network predicts the ensemble mean with the typical spread.
        self.out = zeroed(nn.Linear(widths[-1], self.heads.outputs * len(spec.leads_out) * self.spec.fields))

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
