"""The whole model: features, linear correction, point network, 3D U-Net, heads.

The parts before the U-Net are fitted before training. The U-Net reads the features and adds to the result of those
parts, so the model starts as a statistical correction (`Start`). The fits (`training.climate_fit`) fill its arrays one
after another, and each fit applies what is already fitted in the same way as the model does. The formulas stand in
`models.heads`, `models.linear` and `models.points`.

Axes in shapes:

    B    initialisation time in a batch
    T    lead time
    F    field (variables and levels, then surface variables)
    V    variable on pressure levels, or surface variable
    C    channel
    Y    latitude
    X    longitude
    Z    plane of the network: pressure levels, then the surface
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ensemble_ml.errors import UserError
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.features import Features
from ensemble_ml.models.heads import Heads
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction, plane_count, take
from ensemble_ml.models.linear import KINDS, LinearCorrection
from ensemble_ml.models.padding import Padder, geometries
from ensemble_ml.models.points import make_network
from ensemble_ml.models.speed import Speed
from ensemble_ml.models.unet3d import Activation, Convolution, UNet3d, zeroed


class Start(nn.Module):
    """A model without its U-Net: features, heads, linear correction and point network.

    Args:
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

        Mean and spread of the members are (B, T, F, Y, X), at the predicted leads; `count` (B,) is M.
        """
        assert self.linear is not None
        return self.linear.padded(self.heads.departures(mean, spread, count).flatten(1, 3))

    def linear_part(self, padded: Tensor, count: Tensor) -> Tensor:
        """Return what the linear correction adds to mean and spread, in typical spreads, (B, KINDS, T, F, Y, X).

        `padded` is the result of `anomalies`.
        """
        assert self.linear is not None
        return self.linear(padded, count).unflatten(1, (KINDS, *self.heads.typical.shape))

    def point_part(self, padded: Tensor, count: Tensor, day_of_year: Tensor) -> Tensor:
        """Return the outputs of the point network (`models.points`) for the result of `anomalies`.

        They are (B, 1 or 3, T, F, Y, X).
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

        Mean and spread of the members are (B, T, F, Y, X), at the predicted leads; `count` (B,) is M.
        """
        if self.linear is None:
            return None, None
        padded = self.anomalies(mean, spread, count)
        points = None if self.points is None else self.point_part(padded, count, day_of_year)
        return self.linear_part(padded, count), points


class EnsembleModel(Start):
    """A model that predicts the full ensemble's spread and the distribution of the truth from a reduced ensemble.

    Give `Climate.default(spec)` as `climate` if a state_dict will be loaded.

    Raises:
        UserError: the grid does not fit the depth and the rule for the poles, `climate` does not fit `spec`, or the
            bank of kernels is too small.
    """

    def __init__(self, spec: ModelSpec, climate: Climate):
        config, climate = spec.config, climate.checked(spec)
        super().__init__(spec, climate, local_terms=config.local_terms)
        levels = geometries(spec.grid, config.pole, config.depth)
        self.pressure = _Planes(spec, self.features, self.heads.outputs, surface=False) if spec.variables else None
        self.surface = _Planes(spec, self.features, self.heads.outputs, surface=True) if spec.surface else None
        planes = sum(part.planes for part in self._parts())
        widths, inner = config.channels()
        common = Convolution(plane_count(spec), widths[0], 1, config.vertical, Padder(levels[0]), bias=True)
        self.common_stem = common
        # Where one kernel serves all planes, this bias lets the network tell them apart.
        self.plane_bias = nn.Parameter(torch.zeros(widths[0], planes))
        self.unet = UNet3d(
            levels, planes, widths, config.blocks, config.vertical, inner, recompute=config.recompute is True,
            bank=config.bank, templates=config.bank_templates,
        )  # fmt: skip
        self.scale = Activation(widths[0])
        self.register_buffer("error", torch.from_numpy(climate.error))

    def forward(self, x: EnsembleInput) -> Prediction:
        """Predict the lead times `leads_out` from a reduced ensemble with the lead times `leads_in`.

        Args:
            x: a batch in physical units, float32, or float64 if the weights are float64.

        Returns:
            Location and scale of the truth's distribution, and the full ensemble's spread, as far as the settings ask
            for them: (B, T, F, Y, X) each, in physical units, never below float32.

        Raises:
            UserError: shapes or dtype of `x` are not those that the model takes.
        """
        self._check(x)
        # The corrections come before missing values are filled: a missing value is an anomaly of zero there.
        linear, points = self.corrections(*self._predicted(x), x.count, x.day_of_year)
        if self.spec.masked:
            x = self.features.filled(x)
        heads, (mean, spread) = self.heads, self._predicted(x)
        spread0, spread1 = heads.base_spread(spread, x.count), heads.full_spread(spread, x.count)
        network = self._network(*self.features(x, spread0, heads.climatology))
        if linear is not None:
            mean, spread1 = heads.corrected(mean, spread1, linear)
            # The corrected spread depends on all fields around a point, and not only on the members' spread there. It
            # knows more of the weather, so sigma is based on it.
            spread0 = heads.followed(spread1)
        return heads(mean, spread0, spread1, network, points)

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameters in groups for an optimizer, with the weight decay of each.

            weights   matrices and kernels: the optimizer's own weight decay
            bank      numbers that all kernels share (`models.bank`): the optimizer's own weight decay
            plain     scales, shifts and biases: no weight decay
            local     terms of single grid cells: the optimizer's own weight decay

        A local term is a departure from a statistic of the training dates, so the ordinary decay draws the sum of both
        to that statistic.

        Returns:
            One dictionary for each group that has parameters, with `name` and `params`. "plain" also has `weight_decay`
            0. "plain" and "bank" have `late`, because the backward pass reaches some of their parameters last.
        """
        groups: dict[str, list[nn.Parameter]] = {"weights": [], "bank": [], "plain": [], "local": []}
        for name, parameter in self.named_parameters():
            plain = parameter.ndim < 2 or ".scale" in name or name == "plane_bias"
            kind = "local" if ".local_" in name else "plain" if plain else "weights"
            groups["bank" if name == "unet.bank.values" else kind].append(parameter)
        made: list[dict[str, Any]] = [{"name": k, "params": v} for k, v in groups.items() if v]
        for group in made:
            if group["name"] == "plain":
                group |= {"weight_decay": 0.0, "late": True}
            elif group["name"] == "bank":
                group["late"] = True
        return made

    def settle(self) -> None:
        """Give the convolutions kernels of their own, where they share a bank, and set `bank` to 0 in the spec.

        Predictions stay as they are.
        """
        if self.unet.bank is not None:
            self.unet.bank.settle()
            self.unet.bank = None
            self.spec = replace(self.spec, config=replace(self.spec.config, bank=0.0))
            self.speed.apply(self)

    @property
    def cells(self) -> tuple[int, int]:
        """Return (Y, X) of inputs and predictions: the whole grid, which `distributed.partition` narrows to a shard."""
        return self.spec.grid.shape

    def _parts(self) -> list[_Planes]:
        """Return the modules of pressure levels and of the surface, in this order, as far as the model has them."""
        return [part for part in (self.pressure, self.surface) if part is not None]

    def _predicted(self, x: EnsembleInput) -> tuple[Tensor, Tensor]:
        """Return mean and spread of the members at the predicted leads, (B, T, F, Y, X) each."""
        leads = self.spec.lead_positions
        return take(x.mean, 1, leads), take(x.spread, 1, leads)

    def _network(self, channels_p: Tensor, channels_s: Tensor, common: Tensor) -> Tensor:
        """Run the U-Net: (B, outputs, T, F, Y, X)."""
        hidden = self._trunk(channels_p, channels_s, common)
        # The gradient of `split` is one copy; slices would each give a gradient padded to the full size. Channels come
        # last here, so that this copy has the order of axes that the backward pass needs.
        pieces = hidden.permute(0, 2, 3, 4, 1).split([part.planes for part in self._parts()], 3)
        outputs = [part.read_out(piece) for part, piece in zip(self._parts(), pieces, strict=True)]
        # The heads read this tensor a dozen times together with tensors in the ordinary order of axes. One copy here is
        # cheaper than a dozen passes over two orders of memory.
        return torch.cat(outputs, 3) if len(outputs) > 1 else outputs[0].contiguous()

    def _trunk(self, channels_p: Tensor, channels_s: Tensor, common: Tensor) -> Tensor:
        """Run stems and U-Net in the precision and memory order of `speed`: (B, hidden, Y, X, Z)."""
        with torch.autocast(common.device.type, torch.bfloat16, enabled=self.speed.low):
            # The common planes are the same for every plane of the network, so they pass through a stem of their own
            # once.
            shared = self.common_stem(self.speed.arrange(common[..., None]))
            planes = []
            for part in self._parts():
                channels = channels_s[..., None] if part.surface else channels_p
                planes.append(part.stem(self.speed.arrange(channels)) + shared)
            hidden = _stack_planes(planes) + self.plane_bias[:, None, None].to(shared.dtype)
            return self.scale(self.unet(hidden)).to(self.plane_bias.dtype)

    def _check(self, x: EnsembleInput) -> None:
        """Raise a UserError if the input has other shapes than the spec, or a dtype below float32."""
        x.check(self.spec, self.cells)
        if x.mean.is_floating_point() and x.mean.dtype.itemsize < 4:
            raise UserError(f"input: dtype {x.mean.dtype}; give float32 or float64, the model lowers it itself")


class _Planes(nn.Module):
    """The stem and the last layer of one set of variables: those on pressure levels, or those at the surface."""

    def __init__(self, spec: ModelSpec, features: Features, outputs: int, *, surface: bool):
        super().__init__()
        config = spec.config
        self.planes = 1 if surface else len(spec.levels)
        geometry = geometries(spec.grid, config.pole, config.depth)[0]
        pad = Padder(geometry, *features.pole_rule(surface=surface))
        channels, hidden = features.channels(surface=surface), config.channels()[0][0]
        self.stem = Convolution(channels, hidden, self.planes, config.vertical, pad, bias=True)
        variables = len(spec.surface if surface else spec.variables)
        self.surface, self._outputs = surface, (outputs, len(spec.leads_out), variables)
        # The last layer starts at zero, so that the untrained model is the fitted statistical correction.
        self.out = zeroed(nn.Linear(hidden, outputs * len(spec.leads_out) * variables))

    def read_out(self, hidden_BYXZC: Tensor) -> Tensor:
        """Apply the last layer: (B, Y, X, Z, hidden) -> (B, outputs, T, V Z, Y, X)."""
        return self.out(hidden_BYXZC).unflatten(-1, self._outputs).permute(0, 4, 5, 6, 3, 1, 2).flatten(3, 4)


def _stack_planes(planes: list[Tensor]) -> Tensor:
    """Join planes (B, C, Y, X, Z) along Z, by way of (B, Y, X, Z, C), so that channels-last memory stays so."""
    if len(planes) == 1:
        return planes[0]
    return torch.cat([p.permute(0, 2, 3, 4, 1) for p in planes], 3).permute(0, 4, 1, 2, 3)
