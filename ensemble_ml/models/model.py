"""The whole model: features, linear correction, small networks of a point, 3D U-Net, heads.

The parts before the U-Net are fitted before training. The U-Net reads the features and adds to the result of those
parts, so the model starts as a statistical correction. The formulas stand in `models.heads`, `models.linear` and
`models.surroundings`.

Axes in shapes:

    B    initialisation time in a batch
    T    lead time
    V    variable on pressure levels
    S    surface variable
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
from ensemble_ml.models.blocks.unet3d import Activation, Convolution, UNet3d
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.features import Features
from ensemble_ml.models.heads import Heads
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction
from ensemble_ml.models.linear import KINDS, LinearCorrection
from ensemble_ml.models.padding import Padder, geometries
from ensemble_ml.models.place import plane_count
from ensemble_ml.models.positions import take
from ensemble_ml.models.speed import Speed
from ensemble_ml.models.surroundings import apply_networks, make_network


class EnsembleModel(nn.Module):
    """A model that predicts the full ensemble's spread and the distribution of the truth from a reduced ensemble.

    Args:
        spec: shapes, variables, grid and `ModelConfig`.
        climate: statistics of the training dates. Give `Climate.default(spec)` if a state_dict will be loaded.

    Raises:
        UserError: the grid does not fit the depth and the rule for the poles, or `climate` does not fit `spec`.
    """

    def __init__(self, spec: ModelSpec, climate: Climate):
        super().__init__()
        self.spec, self.speed = spec, Speed()
        config, climate = spec.config, climate.checked(spec)
        levels = geometries(spec.grid, config.pole, config.depth)
        self.features = Features(spec, climate)
        self.pressure = _PlaneSet(spec, climate, self.features, surface=False) if spec.variables else None
        self.surface = _PlaneSet(spec, climate, self.features, surface=True) if spec.surface else None
        planes = sum(part.planes for part in (self.pressure, self.surface) if part is not None)
        widths, inner = config.channels()
        common = Convolution(plane_count(spec), widths[0], 1, config.vertical, Padder(levels[0]), bias=True)
        self.common_stem = common
        # Where one kernel serves all planes, this is what lets the network tell them apart.
        self.plane_bias = nn.Parameter(torch.zeros(widths[0], planes))
        self.unet = UNet3d(
            levels, planes, widths, config.blocks, config.vertical, inner, recompute=config.recompute is True,
            bank=config.bank, templates=config.bank_templates,
        )  # fmt: skip
        self.scale = Activation(widths[0])
        self.linear = LinearCorrection(spec, climate.correction) if spec.linear else None
        self.surroundings, self.residuals = (
            make_network(spec, vars(climate), name) for name in ("surroundings", "residuals")
        )
        self.register_buffer("error_p", torch.from_numpy(climate.error_p))
        self.register_buffer("error_s", torch.from_numpy(climate.error_s))

    def forward(self, x: EnsembleInput) -> Prediction:
        """Predict the lead times `leads_out` from a reduced ensemble with the lead times `leads_in`.

        Args:
            x: a batch in physical units, float32 or float64.

        Returns:
            Parameters of the distributions in physical units, never below float32.

        Raises:
            UserError: shapes or dtype of `x` are not those that the model takes.
        """
        self._check(x)
        # The corrections come before missing values are filled: a missing value is an anomaly of zero there.
        corrections, residuals = self._corrections(x)
        if self.spec.masked:
            x = self.features.filled(x)
        spread0 = tuple(self._base_spread(x, part, suffix) for part, suffix in self._parts())
        both = zip(self._parts(), spread0, strict=True)
        climatology = tuple(self._climatology(part, like) for (part, _), like in both)
        channels_p, channels_s, common = self.features(x, spread0, climatology)
        hidden = self._trunk(channels_p, channels_s, common)
        # The gradient of `split` is one copy; slices would each give a gradient padded to the full size. Channels come
        # last here, so that this copy has the order of axes that the backward pass needs.
        planes = [0 if part is None else part.planes for part, _ in self._parts()]
        pieces = hidden.permute(0, 2, 3, 4, 1).split(planes, 3)
        found: dict[str, Tensor | None] = {}
        for (part, suffix), s0, piece in zip(self._parts(), spread0, pieces, strict=True):
            if part is None:
                continue
            network = part.read_out(piece)
            mean = take(getattr(x, f"mean_{suffix}"), 1, self.spec.lead_positions)
            s1 = part.heads.full_spread(self._spread(x, suffix), x.count)
            if suffix in corrections:
                mean, s1 = part.heads.corrected(mean, s1, corrections[suffix])
                # The corrected spread knows more of the flow than that of the members, so sigma follows it as well.
                s0 = part.heads.followed(s1)
            heads = part.heads(mean, s0, s1, network, residuals.get(suffix))
            found |= {f"{k}_{suffix}": v for k, v in heads.items()}
        return Prediction(**found)

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameters in groups for an optimizer, with the weight decay of each.

            weights   matrices and kernels: the optimizer's own weight decay
            bank      numbers that all kernels share (`blocks.bank`): the optimizer's own weight decay
            plain     scales, shifts and biases: no weight decay
            local     terms of single grid cells: the optimizer's own weight decay

        The local terms are departures from what the training dates give, so the ordinary decay pulls them back to that.

        Returns:
            One dictionary for each group, with `name` and `params`. The groups "plain" and "bank" also have `late`,
            because the backward pass reaches some of their parameters last.
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
        """Give the convolutions kernels of their own, where they share a bank. Predictions stay as they are."""
        if self.unet.bank is not None:
            self.unet.bank.settle()
            self.unet.bank = None
            self.spec = replace(self.spec, config=replace(self.spec.config, bank=0.0))
            self.speed.apply(self)

    def _parts(self) -> tuple[tuple[_PlaneSet | None, str], tuple[_PlaneSet | None, str]]:
        """Return the two sets of variables with the suffix of their fields."""
        return (self.pressure, "p"), (self.surface, "s")

    def _spread(self, x: EnsembleInput, suffix: str) -> Tensor:
        """Return the spread of the members at the predicted leads."""
        return take(getattr(x, f"spread_{suffix}"), 1, self.spec.lead_positions)

    def _base_spread(self, x: EnsembleInput, part: _PlaneSet | None, suffix: str) -> Tensor:
        """Return the prior spread s0 at the predicted leads; the plain, empty spread if there is no variable."""
        spread = self._spread(x, suffix)
        return spread if part is None else part.heads.base_spread(spread, x.count)

    def _climatology(self, part: _PlaneSet | None, like: Tensor) -> Tensor:
        """Return s_clim of a set of variables."""
        return like[0] if part is None else part.heads.climatology  # a set without variables needs any empty tensor

    def _corrections(self, x: EnsembleInput) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute what the parts before the U-Net add to mean, spread and sigma, for each set of variables.

        Returns:
            By suffix: what the linear correction and the spread MLP add to mean and spread, in typical spreads,
            (B, KINDS, T, V, [Z,] Y, X).
            By suffix: v and w of the error MLP (`models.surroundings`), (B, 2, T, V, [Z,] Y, X); empty without it.
        """
        if self.linear is None:
            return {}, {}
        # Anomalies of all sets are joined, because the correction of each field reads all fields.
        given: dict[str, Tensor] = {}
        for part, suffix in self._parts():
            if part is not None:
                mean = take(getattr(x, f"mean_{suffix}"), 1, self.spec.lead_positions)
                given[suffix] = part.heads.departures(mean, self._spread(x, suffix), x.count)
        flat = [d.flatten(2, -3) for d in given.values()]
        padded = self.linear.padded(torch.cat(flat, 2).flatten(1, 2))
        found, residuals = self.linear(padded, x.count), None
        # The spread MLP may stand alone, but the error MLP never comes without it.
        if self.surroundings is not None:
            heads = [part.heads for part, _ in self._parts() if part is not None]
            climatology = torch.cat([(h.climatology / h.typical[..., None, None]).flatten(0, -3) for h in heads])
            common = self.features.common(x)
            # The networks of points run in bfloat16 where the U-Net does; the linear correction stays in float32.
            with torch.autocast(padded.device.type, torch.bfloat16, enabled=self.speed.low):
                networks = [n for n in (self.surroundings, self.residuals) if n is not None]
                more, *expected = apply_networks(networks, padded, climatology, common)
            # Outputs of the linear correction are all means, then all spreads. The spread MLP adds to spreads alone.
            found[:, len(climatology) :] += more
            residuals = expected[0] if expected else None

        def by_set(values: Tensor) -> dict[str, Tensor]:
            """Split (B, 2, fields of all sets, Y, X) into (B, 2, T, V, [Z,] Y, X) of each set."""
            pieces = zip(given.items(), values.split([d.shape[2] for d in flat], 2), strict=True)
            return {k: piece.unflatten(2, d.shape[2:-2]) for (k, d), piece in pieces}

        added = by_set(found.unflatten(1, (KINDS, -1)))
        return added, {} if residuals is None else by_set(residuals.unflatten(1, (2, -1)))

    def _trunk(self, channels_p: Tensor, channels_s: Tensor, common: Tensor) -> Tensor:
        """Run stems and U-Net in the precision and memory order of `speed`: (B, hidden, Y, X, Z)."""
        with torch.autocast(common.device.type, torch.bfloat16, enabled=self.speed.low):
            # The common planes are the same for every plane of the network, so they pass through a stem of their own
            # once.
            shared = self.common_stem(self.speed.arrange(common[..., None]))
            planes = []
            for (part, _), channels in zip(self._parts(), (channels_p, channels_s[..., None]), strict=True):
                if part is not None:
                    planes.append(part.stem(self.speed.arrange(channels)) + shared)
            hidden = _stack_planes(planes) + self.plane_bias[:, None, None].to(shared.dtype)
            return self.scale(self.unet(hidden)).to(self.plane_bias.dtype)

    @property
    def cells(self) -> tuple[int, int]:
        """Return (Y, X) of inputs and predictions. It is a part of the grid where ranks share the grid."""
        return self.spec.grid.shape

    def _check(self, x: EnsembleInput) -> None:
        """Raise a UserError if the input has other shapes than the spec, or a dtype below float32."""
        x.check(self.spec, self.cells)
        if x.mean_p.is_floating_point() and x.mean_p.dtype.itemsize < 4:
            raise UserError(f"input: dtype {x.mean_p.dtype}; give float32 or float64, the model lowers it itself")


class _PlaneSet(nn.Module):
    """The stem and the heads of one set of variables: those on pressure levels, or those at the surface."""

    def __init__(self, spec: ModelSpec, climate: Climate, features: Features, *, surface: bool):
        super().__init__()
        config = spec.config
        self.planes = 1 if surface else len(spec.levels)
        geometry = geometries(spec.grid, config.pole, config.depth)[0]
        pad = Padder(geometry, *features.pole_rule(surface=surface))
        channels, hidden = features.channels(surface=surface), config.channels()[0][0]
        self.stem = Convolution(channels, hidden, self.planes, config.vertical, pad, bias=True)
        self.heads = Heads.of(spec, climate, surface=surface, local_terms=config.local_terms)
        self.leads, self.variables = len(spec.leads_out), len(spec.surface if surface else spec.variables)
        self.surface = surface
        self.out = nn.Linear(hidden, self.heads.outputs * self.leads * self.variables)
        # The last layer starts at zero, so that the untrained model is the fitted statistical correction.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def read_out(self, hidden_BYXZC: Tensor) -> Tensor:
        """Apply the last layer: (B, Y, X, Z, hidden) -> (B, outputs, T, V, Z, Y, X), without Z at the surface."""
        found = self.out(hidden_BYXZC).unflatten(-1, (self.heads.outputs, self.leads, self.variables))
        # The heads read this tensor a dozen times together with tensors in the ordinary order of axes. One copy here is
        # cheaper than a dozen passes over two orders of memory.
        found = found.permute(0, 4, 5, 6, 3, 1, 2).contiguous()
        return found[:, :, :, :, 0] if self.surface else found


def _stack_planes(planes: list[Tensor]) -> Tensor:
    """Join along Z through (B, Y, X, Z, C), so that channels-last memory stays channels last."""
    if len(planes) == 1:
        return planes[0]
    return torch.cat([p.permute(0, 2, 3, 4, 1) for p in planes], 3).permute(0, 4, 1, 2, 3)
