"""The common base of the baseline networks: our network's inputs as planes of a map, and parameters of each field out.

Axes: B date, T lead, V pressure-level variable, S surface variable, Z level, C channel, F field (variables and levels,
then surface variables), O output, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ensemble_ml.models.climate import Climate
from ensemble_ml.models.features import Features
from ensemble_ml.models.heads import Heads, bounded
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction
from ensemble_ml.models.linear import KINDS, of_channels
from ensemble_ml.models.padding import Padder, geometries
from ensemble_ml.models.place import plane_count
from ensemble_ml.models.positions import take
from ensemble_ml.models.speed import Speed

_STENCILS = 4  # of departures: the departures themselves, two differences, the mean around


@dataclass(eq=False)
class Reduced:
    """The inputs of one kind of fields (pressure levels or surface) at the predicted leads, (B, T, V, [Z,] Y, X).

    Attributes:
        mean: mean of the members.
        spread: spread of the members.
        s0: prior spread (`models.features`).
        s1: expected spread of the full ensemble (`models.features`).
        climatology: s_clim, without B.
        typical: one typical spread for each lead, variable and level, without B.
    """

    mean: Tensor
    spread: Tensor
    s0: Tensor
    s1: Tensor
    climatology: Tensor
    typical: Tensor


class FieldSet(nn.Module):
    """The training dates' statistics of the pressure levels, or of the surface, as heads without learned terms."""

    def __init__(self, spec: ModelSpec, climate: Climate, suffix: str):
        super().__init__()
        self.heads = Heads.of(spec, climate, surface=suffix == "s", local_terms=False)


class Rival(nn.Module):
    """A baseline that sees maps of C channels and returns `outputs` numbers for each lead, field and grid point.

    A subclass defines `network`, (B, C, Y, X) -> (B, O * T * F, Y, X), and `law`, which turns the first two outputs
    into location and scale. If `model.spread` is on, the last output changes the spread as in our own head.

    Args:
        spec: shapes, variables, grid and `ModelConfig`.
        climate: statistics of the training dates.
    """

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__()
        self.spec, self.speed = spec, Speed()
        climate = climate.checked(spec)
        self.features = Features(spec, climate)
        self.pressure = FieldSet(spec, climate, "p") if spec.variables else None
        self.surface = FieldSet(spec, climate, "s") if spec.surface else None
        self.near: Padder | None = None
        if spec.config.departures:
            sign = of_channels(spec.vector_sign(len(spec.leads_out)))[:, None]
            self.near = Padder(geometries(spec.grid, spec.config.pole, 0)[0], sign)
        # The error is the scale of the CRPS loss. As a buffer it is part of every checkpoint.
        self.register_buffer("error_p", torch.from_numpy(climate.error_p))
        self.register_buffer("error_s", torch.from_numpy(climate.error_s))

    def network(self, planes_BCYX: Tensor, x: EnsembleInput) -> Tensor:
        """Return the outputs (B, O * T * F, Y, X) of the channels, in at least float32.

        Args:
            planes_BCYX: the channels of `planes`.
            x: the inputs of the model.
        """
        raise NotImplementedError

    def law(self, fields: Reduced, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the first two outputs into a distribution.

        Args:
            fields: the fields of one kind.
            first: (B, T, V, [Z,] Y, X) the first output.
            second: the second output, in the same shape.

        Returns:
            Location and scale in physical units, in the same shape.
        """
        raise NotImplementedError

    def forward(self, x: EnsembleInput) -> Prediction:
        """Predict `leads_out` from `leads_in`.

        Args:
            x: the inputs of the model.

        Returns:
            Location, scale and spread in physical units, as far as the settings ask for them.
        """
        reduced = self.reduced(x)
        raw = self.network(self.planes(x, reduced), x).unflatten(1, (self.outputs, len(self.spec.leads_out), -1))
        found: dict[str, Tensor | None] = {}
        for suffix, output in zip("ps", self.split(raw, 3), strict=True):
            if suffix not in reduced:
                continue
            fields = reduced[suffix]
            if self.spec.config.postprocess:
                law = self.law(fields, output[:, 0], output[:, 1])
                found |= {f"location_{suffix}": law[0], f"scale_{suffix}": law[1]}
            if self.spec.config.spread:
                found[f"spread_{suffix}"] = fields.s1 * torch.exp(bounded(output[:, -1]))
        return Prediction(**found)

    @property
    def outputs(self) -> int:
        """Return O, the number of outputs for each lead, field and grid point."""
        return 2 * self.spec.config.postprocess + self.spec.config.spread

    @property
    def channels(self) -> int:
        """Return C, the number of channels of `planes`."""
        upper = self.features.channels(surface=False) * len(self.spec.levels)
        every = upper + self.features.channels(surface=True) + plane_count(self.spec)
        return every + _STENCILS * KINDS * len(self.spec.leads_out) * self.spec.fields * self.spec.config.departures

    def reduced(self, x: EnsembleInput) -> dict[str, Reduced]:
        """Return mean, spread and climate at the predicted leads, by "p" (pressure levels) and "s" (surface).

        Kinds without variables are left out.

        Args:
            x: the inputs of the model.
        """
        x.check(self.spec, self.spec.grid.shape)
        leads, found = self.spec.lead_positions, {}
        for suffix, part in self._parts():
            mean, spread = (take(getattr(x, f"{name}_{suffix}"), 1, leads) for name in ("mean", "spread"))
            heads = part.heads
            s0, s1 = heads.base_spread(spread, x.count), heads.full_spread(spread, x.count)
            typical = take(getattr(self.features, f"level_spread_{suffix}"), 0, leads)[..., None, None]
            found[suffix] = Reduced(mean, spread, s0, s1, heads.climatology, typical)
        return found

    def planes(self, x: EnsembleInput, reduced: dict[str, Reduced]) -> Tensor:
        """Return the channels of our own network, with pressure levels side by side, (B, C, Y, X).

        If `model.departures` is on, the inputs of its statistical start are among them: departures d of
        `models.linear`, with their differences and means around each point.

        Args:
            x: the inputs of the model.
            reduced: the result of `reduced`.
        """
        # `Features` takes both kinds of fields. A kind without variables has an empty axis.
        empty = {k: take(getattr(x, f"mean_{k}"), 1, self.spec.lead_positions) for k in "ps"}
        s0 = [reduced[k].s0 if k in reduced else empty[k] for k in "ps"]
        climatology = [reduced[k].climatology if k in reduced else empty[k][0] for k in "ps"]
        upper, flat, common = self.features(x, s0, climatology)
        planes = [upper.permute(0, 1, 4, 2, 3).flatten(1, 2), flat, common]
        return torch.cat([*planes, *self._departures_around(x, reduced)], 1)

    def _departures_around(self, x: EnsembleInput, reduced: dict[str, Reduced]) -> list[Tensor]:
        """Return d, its differences along and across rows, and the mean around minus d, (B, KINDS T F, Y, X) each."""
        if self.near is None:
            return []
        found = []
        for suffix, part in self._parts():
            fields = reduced[suffix]
            found.append(part.heads.departures(fields.mean, fields.spread, x.count).flatten(2, -3))
        padded = self.near(torch.cat(found, 2).flatten(1, 2)[..., None])[..., 0]
        centre = padded[..., 1:-1, 1:-1]
        along = (padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]) / 2
        across = (padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]) / 2
        return [centre, along, across, F.avg_pool2d(padded, 3, 1) - centre]

    def pole_rule(self) -> tuple[Tensor, Tensor]:
        """Return sign and offset (C, 1) that the channels of `planes` take across a pole."""
        rules = [self.features.pole_rule(surface=surface) for surface in (False, True)]
        sign, offset = (torch.cat([rule[i].flatten() for rule in rules]) for i in (0, 1))
        plain = torch.zeros(plane_count(self.spec))
        signs, offsets = [sign, plain + 1], [offset, plain]
        # On the other side of a pole, rows run in the opposite direction, so differences across rows change their sign.
        if self.near is not None:
            turn = of_channels(self.spec.vector_sign(len(self.spec.leads_out)))
            signs += [turn, turn, -turn, turn]
            offsets.append(torch.zeros(_STENCILS * len(turn)))
        return torch.cat(signs)[:, None], torch.cat(offsets)[:, None]

    def split(self, values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """Split an axis of F fields into (V, Z) of the pressure levels and S of the surface.

        Args:
            values: a tensor with an axis of F fields.
            axis: position of that axis.
        """
        shape = len(self.spec.variables), len(self.spec.levels)
        upper, flat = values.split((shape[0] * shape[1], len(self.spec.surface)), axis)
        return (upper.unflatten(axis, shape) if upper.shape[axis] else upper), flat

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of parameters for an optimizer.

        Parameters with two or more axes decay, also those that belong to places. All others do not.
        """
        plain = [p for p in self.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"name": "weights", "params": [p for p in self.parameters() if p.ndim > 1]}]
        groups.append({"name": "plain", "params": plain, "weight_decay": 0.0})
        return [group for group in groups if group["params"]]

    def _parts(self) -> Iterator[tuple[str, FieldSet]]:
        """Yield "p" and "s" with their statistics, if there are such variables."""
        for suffix, part in (("p", self.pressure), ("s", self.surface)):
            if part is not None:
                yield suffix, part
