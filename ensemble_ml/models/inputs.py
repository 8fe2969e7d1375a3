"""What goes into a model and what comes out: plain values, validated when they are made.

Axes: B date in a batch, M member, T lead, V pressure-level variable, S surface variable, Z level, Y latitude,
X longitude. Values are in the registry's units throughout; the model standardises inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.config import ModelConfig, Pole, Precision, Standardise, Vertical
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family, Field, field
from ensemble_ml.grid import Grid
from ensemble_ml.models.distributions import widen
from ensemble_ml.models.padding import deepest


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """Everything that fixes the shape of a model; a checkpoint keeps it as JSON.

    `levels` hPa ascending, `leads_in` and `leads_out` hours ascending, `latitude` (Y,) degrees north descending,
    `longitude` (X,) degrees east ascending, `static` names of the static fields that the model is given, `masked` those
    of the variables that have points without a value (sea surface temperature on land). Where the depth of `config` is
    auto, the spec has the number that the grid allows.

    Raises:
        UserError: a lead that is predicted is no input, or nothing is predicted, or the grid is not regular.
    """

    config: ModelConfig
    variables: tuple[str, ...]
    levels: tuple[int, ...]
    surface: tuple[str, ...]
    leads_in: tuple[int, ...]
    leads_out: tuple[int, ...]
    latitude: tuple[float, ...]
    longitude: tuple[float, ...]
    static: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("variables", "surface", "static", "masked"):
            object.__setattr__(self, name, tuple(str(v) for v in getattr(self, name)))
        for name in ("levels", "leads_in", "leads_out"):
            object.__setattr__(self, name, tuple(int(v) for v in getattr(self, name)))
        for name in ("latitude", "longitude"):
            object.__setattr__(self, name, tuple(float(v) for v in np.asarray(getattr(self, name), np.float64)))
        _check_spec(self)
        if self.config.depth == "auto":
            object.__setattr__(self, "config", replace(self.config, depth=self._depth()))

    def _depth(self) -> int:
        """Return the depth that auto stands for."""
        usual = self.config.usual_depth
        limit = deepest(self.grid, self.config.pole) if self.config.pools else None
        return usual if limit is None else min(usual, limit)

    @property
    def grid(self) -> Grid:
        """The grid of all fields."""
        return Grid(np.asarray(self.latitude), np.asarray(self.longitude))

    @property
    def lead_positions(self) -> list[int]:
        """Where each predicted lead stands among the leads of the input."""
        return [self.leads_in.index(lead) for lead in self.leads_out]

    @property
    def pressure_shape(self) -> tuple[int, int, int, int, int]:
        """(T_out, V, Z, Y, X)."""
        rows, columns = len(self.latitude), len(self.longitude)
        return len(self.leads_out), len(self.variables), len(self.levels), rows, columns

    @property
    def surface_shape(self) -> tuple[int, int, int, int]:
        """(T_out, S, Y, X)."""
        return len(self.leads_out), len(self.surface), len(self.latitude), len(self.longitude)

    @property
    def fields(self) -> int:
        """F: variables on levels, and at the surface, of one lead."""
        return len(self.variables) * len(self.levels) + len(self.surface)

    def vector_sign(self, leads: int) -> Tensor:
        """What departures of all fields are multiplied by across a pole: -1 for components of vectors, 1 for others.

        (leads F,), by lead, variable and level, then by lead and surface variable.
        """
        return self._signs(leads, lambda one: one.vector_component)

    def mirror_sign(self, leads: int) -> Tensor:
        """What they are multiplied by in a mirror at the equator: -1 for northward components, 1 for others."""
        return self._signs(leads, lambda one: one.northward)

    def _signs(self, leads: int, turns: Callable[[Field], bool]) -> Tensor:
        upper = [turns(field(name)) for name in self.variables for _ in self.levels]
        flips = upper * leads + [turns(field(name)) for name in self.surface] * leads
        return torch.where(torch.tensor(flips, dtype=torch.bool), -1.0, 1.0)

    @property
    def families(self) -> tuple[tuple[Family, ...], tuple[Family, ...]]:
        """Distribution family of each pressure-level and each surface variable."""
        return tuple(map(self.family, self.variables)), tuple(map(self.family, self.surface))

    def family(self, name: str) -> Family:
        """That of the registry, unless the configuration names another."""
        return Family((self.config.families or {}).get(name, field(name).family))

    @property
    def local(self) -> bool:
        """Whether inputs are standardised by maps, not by one number a level."""
        return self.config.standardise is Standardise.las

    @property
    def linear(self) -> bool:
        """Whether a linear correction by all fields around a point stands before the network."""
        return self.config.linear and self.config.name == "unet3d"

    @property
    def takes_members(self) -> bool:
        """Whether the model sees members one by one, beside their mean and spread."""
        return self.config.name == "poet"

    @property
    def masked_positions(self) -> tuple[list[int], list[int]]:
        """Where masked variables stand among those on pressure levels, and among those at the surface."""
        both = self.variables, self.surface
        upper, flat = ([names.index(name) for name in names if name in self.masked] for names in both)
        return upper, flat

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values (numbers, strings, lists) that `from_json` turns back into an equal spec.

        The families of all variables are named: a registry that changes would read what was learned under another law.
        """
        plain: dict[str, Any] = {f.name: list(getattr(self, f.name)) for f in fields(self) if f.name != "config"}
        if not self.masked:
            del plain["masked"]  # specs of models without masks stay what they always were
        plain["config"] = {k: v.value if isinstance(v, Enum) else v for k, v in asdict(self.config).items()}
        plain["config"]["families"] = {name: self.family(name).value for name in (*self.variables, *self.surface)}
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ModelSpec:
        """Inverse of `to_json`."""
        config = dict(plain["config"])
        kinds = {"vertical": Vertical, "pole": Pole, "precision": Precision, "standardise": Standardise}
        for key, kind in kinds.items():
            config[key] = kind(config[key])
        return cls(ModelConfig(**config), **{k: tuple(v) for k, v in plain.items() if k != "config"})


@dataclass(eq=False)
class EnsembleInput:
    """A batch of reduced ensembles; T runs over `leads_in`.

    `mean_p`, `spread_p` (B, T, V, Z, Y, X) and `mean_s`, `spread_s` (B, T, S, Y, X): mean and standard deviation
    (ddof = 1; zero where there is one member) of the members given; `count` (B,) how many they are; `day_of_year` (B,)
    1..366 of the start; `member_p`, `member_s` as the means: one single member, where the model asks for it;
    `members_p`, `members_s` (B, M, ...): all members for a model that takes them (`ModelSpec.takes_members`), the first
    `count` of each sample, then zeros.
    `valid_p` (B, T, Vm, Z, Y, X), `valid_s` (B, T, Sm, Y, X): share of the members given that have a value at a point,
    for the masked variables. Means and spreads are NaN where none has one.
    A model without pressure-level (surface) variables takes tensors with V = 0 (S = 0).
    """

    mean_p: Tensor
    spread_p: Tensor
    mean_s: Tensor
    spread_s: Tensor
    count: Tensor
    day_of_year: Tensor
    member_p: Tensor | None = None
    member_s: Tensor | None = None
    members_p: Tensor | None = None
    members_s: Tensor | None = None
    valid_p: Tensor | None = None
    valid_s: Tensor | None = None

    def check(self, spec: ModelSpec, cells: tuple[int, int]) -> None:
        """Raise a UserError where shapes are not those of `spec` on `cells` (Y, X) of the grid."""
        leads = len(spec.leads_in)
        wanted = (leads, *spec.pressure_shape[1:-2], *cells), (leads, *spec.surface_shape[1:-2], *cells)
        for given, shape in zip((self.mean_p, self.mean_s), wanted, strict=True):
            if tuple(given.shape[1:]) != shape:
                raise UserError(f"input: shape {tuple(given.shape[1:])} (lead, variable, ...); the model takes {shape}")

    def to(self, *args: Any, **kwargs: Any) -> EnsembleInput:
        """The same batch on another device or in another dtype; arguments as of `Tensor.to`."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(*args, **kwargs) for k, v in moved.items() if v is not None})

    def __len__(self) -> int:
        return len(self.count)


@dataclass(eq=False)
class Prediction:
    """Parameters of the predicted distributions, physical units; T runs over `leads_out`.

    `location_*`, `scale_*`: location and scale of the variable's family (None without the postprocess head);
    `spread_*`: predicted standard deviation of the full ensemble (None without the spread head). All `_p` (`_s`) are
    None where the model has no pressure-level (surface) variable.
    Shapes (B, T, V, Z, Y, X) for `_p` and (B, T, S, Y, X) for `_s`.
    """

    location_p: Tensor | None = None
    scale_p: Tensor | None = None
    spread_p: Tensor | None = None
    location_s: Tensor | None = None
    scale_s: Tensor | None = None
    spread_s: Tensor | None = None

    def widened(self, widths_BTF: Tensor, families: tuple[tuple[Family, ...], tuple[Family, ...]]) -> Prediction:
        """The same with the scale of each lead and field (variables and levels, then surface variables) widened.

        `widths_BTF`: (B, T, F), or (T, F) for all samples; `families`: of the pressure-level and of the surface
        variables. Means stay.
        """
        found, left = {}, widths_BTF if widths_BTF.ndim == 3 else widths_BTF[None]
        for suffix, laws in zip("ps", families, strict=True):
            location, scale = getattr(self, f"location_{suffix}"), getattr(self, f"scale_{suffix}")
            if scale is not None:
                fields = scale.shape[2:-2]
                own, left = left.tensor_split([fields.numel()], -1)
                width = own.unflatten(-1, fields)[..., None, None].to(scale)
                parts = [widen(law, location[:, :, i], scale[:, :, i], width[:, :, i]) for i, law in enumerate(laws)]
                found[f"location_{suffix}"], found[f"scale_{suffix}"] = (
                    torch.stack(p, 2) for p in zip(*parts, strict=True)
                )
        return replace(self, **found)


def ensemble_input(
    members_p: Tensor,
    members_s: Tensor,
    day_of_year: Tensor,
    *,
    one_member: bool = False,
    all_members: bool = False,
) -> EnsembleInput:
    """Reduce members to what the model takes, all samples with the same number M of members.

    Args:
        members_p: (B, M, T, V, Z, Y, X).
        members_s: (B, M, T, S, Y, X).
        day_of_year: (B,) day of the start.
        one_member: also hand on the first member.
        all_members: also hand on all of them.
    """
    batch, count = members_p.shape[:2]
    # torch warns of a standard deviation of nothing, be it one member or no variable.
    plain = [count == 1 or not x.numel() for x in (members_p, members_s)]
    members = members_p, members_s
    deviations = [torch.zeros_like(x[:, 0]) if p else x.std(1) for x, p in zip(members, plain, strict=True)]
    return EnsembleInput(
        members_p.mean(1),
        deviations[0],
        members_s.mean(1),
        deviations[1],
        members_p.new_full((batch,), float(count)),
        day_of_year,
        members_p[:, 0] if one_member else None,
        members_s[:, 0] if one_member else None,
        members_p if all_members else None,
        members_s if all_members else None,
    )


def valid_shares(spec: ModelSpec, pressure: np.ndarray, surface: np.ndarray) -> dict[str, np.ndarray]:
    """`valid_p` and `valid_s` of one date (without B) from its members (M, T_in, ...), NaN where masked."""
    upper, flat = spec.masked_positions
    known = np.isfinite(pressure[:, :, upper]), np.isfinite(surface[:, :, flat])
    return {f"valid_{suffix}": one.mean(0, dtype=np.float32) for suffix, one in zip("ps", known, strict=True)}


def _check_spec(spec: ModelSpec) -> None:
    if not spec.variables and not spec.surface:
        raise UserError("data.variables, data.surface: both are empty; name at least one variable")
    if spec.variables and not spec.levels:
        raise UserError(f"data.levels: empty, but data.variables={list(spec.variables)}; name at least one level")
    if not spec.leads_out:
        raise UserError("data.leads_out: empty; name at least one lead time")
    missing = [lead for lead in spec.leads_out if lead not in spec.leads_in]
    if missing:
        raise UserError(
            f"data.leads_out={missing}: predicted leads must be among data.leads_in={list(spec.leads_in)};"
            " add them there"
        )
    for name, surface in [(v, False) for v in spec.variables] + [(v, True) for v in spec.surface]:
        if field(name).surface != surface:
            kind, key = ("pressure-level", "variables") if surface else ("surface", "surface")
            raise UserError(f"variable {name}: is a {kind} variable; name it in data.{key}")
    _ = spec.grid  # raises where the points are not a regular grid
