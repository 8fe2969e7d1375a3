"""The values that go into a model and come out of it, as small dataclasses that are checked when they are made.

`ModelSpec` fixes the shape of a model, `EnsembleInput` is a batch of reduced ensembles, and `Prediction` holds the
parameters of the predicted distributions.

Axes in shapes:

    B    initialisation time in a batch
    M    ensemble member
    T    lead time
    V    variable on pressure levels
    S    surface variable
    Z    pressure level
    Y    latitude
    X    longitude

All values are in the units of the registry (`ensemble_ml.fields`). The model standardises them itself.
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
from ensemble_ml.distributions import widen
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family, Field, field
from ensemble_ml.grid import Grid
from ensemble_ml.models.padding import deepest


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A description of everything that fixes the shape of a model. A checkpoint stores it as JSON.

    If the depth in `config` is "auto", it is replaced by the number of poolings that the grid allows.

    Attributes:
        config: the model's part of the configuration.
        variables: (V,) names of the variables on pressure levels.
        levels: (Z,) pressure levels in hPa, ascending.
        surface: (S,) names of the surface variables.
        leads_in: lead times of the input in hours, ascending.
        leads_out: lead times that are predicted, in hours, ascending; each must be one of `leads_in`.
        latitude: (Y,) degrees north, descending.
        longitude: (X,) degrees east, ascending.
        static: names of the static fields that the model is given, such as orography.
        masked: names of the variables that have points without a value (sea surface temperature has none on land).

    Raises:
        UserError: a predicted lead is not an input, or nothing is predicted, or the grid is not regular.
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
        # YAML, JSON and NumPy give lists and scalars of their own types. Plain tuples of Python values make equal specs
        # compare equal, and they can be written as JSON.
        for name in ("variables", "surface", "static", "masked"):
            object.__setattr__(self, name, tuple(str(v) for v in getattr(self, name)))
        for name in ("levels", "leads_in", "leads_out"):
            object.__setattr__(self, name, tuple(int(v) for v in getattr(self, name)))
        for name in ("latitude", "longitude"):
            object.__setattr__(self, name, tuple(float(v) for v in np.asarray(getattr(self, name), np.float64)))
        _check_spec(self)
        if self.config.depth == "auto":
            object.__setattr__(self, "config", replace(self.config, depth=self._depth()))
        if self.config.name == "unet3d":
            self.config.channels()  # raises a UserError for lists that do not fit the depth

    def _depth(self) -> int:
        """Return the depth that "auto" stands for: the usual one, or less where the longitudes allow no more."""
        # Pooling halves the columns. Where they wrap, an odd number of columns cannot be halved without breaking the
        # circle.
        usual = self.config.usual_depth
        limit = deepest(self.grid, self.config.pole) if self.config.pools else None
        return usual if limit is None else min(usual, limit)

    @property
    def grid(self) -> Grid:
        """Return the grid on which all fields of the model lie."""
        return Grid(np.asarray(self.latitude), np.asarray(self.longitude))

    @property
    def lead_positions(self) -> list[int]:
        """Return the position of each predicted lead time among the lead times of the input."""
        return [self.leads_in.index(lead) for lead in self.leads_out]

    @property
    def pressure_shape(self) -> tuple[int, int, int, int, int]:
        """Return the shape (T_out, V, Z, Y, X) of the predicted fields on pressure levels."""
        rows, columns = len(self.latitude), len(self.longitude)
        return len(self.leads_out), len(self.variables), len(self.levels), rows, columns

    @property
    def surface_shape(self) -> tuple[int, int, int, int]:
        """Return the shape (T_out, S, Y, X) of the predicted surface fields."""
        return len(self.leads_out), len(self.surface), len(self.latitude), len(self.longitude)

    @property
    def fields(self) -> int:
        """Return F, the number of fields of one lead time: variables times levels, plus surface variables."""
        return len(self.variables) * len(self.levels) + len(self.surface)

    def vector_sign(self, leads: int) -> Tensor:
        """Return the factor by which an anomaly of each field is multiplied when it is continued across a pole.

        The factor is -1 for components of a vector and 1 for scalars, because east and north point the other way beyond
        the pole.

        Args:
            leads: number of lead times T.

        Returns:
            (T F,) factors, ordered by (lead, variable, level) and then by (lead, surface variable).
        """
        return self._signs(leads, lambda one: one.vector_component)

    def mirror_sign(self, leads: int) -> Tensor:
        """Return the factor by which an anomaly of each field is multiplied when it is mirrored at the equator.

        The factor is -1 for northward components and 1 for all other fields.

        Args:
            leads: number of lead times T.

        Returns:
            (T F,) factors, in the order of `vector_sign`.
        """
        return self._signs(leads, lambda one: one.northward)

    def _signs(self, leads: int, turns: Callable[[Field], bool]) -> Tensor:
        """Return -1 for the fields for which `turns` is true and 1 for the others, in the order of `vector_sign`."""
        upper = [turns(field(name)) for name in self.variables for _ in self.levels]
        # Channels of all leads on pressure levels come first, then those of all leads at the surface.
        flips = upper * leads + [turns(field(name)) for name in self.surface] * leads
        return torch.where(torch.tensor(flips, dtype=torch.bool), -1.0, 1.0)

    @property
    def families(self) -> tuple[tuple[Family, ...], tuple[Family, ...]]:
        """Return the distribution of each pressure-level variable, and that of each surface variable."""
        return tuple(map(self.family, self.variables)), tuple(map(self.family, self.surface))

    def family(self, name: str) -> Family:
        """Return the distribution of variable `name`: the one in the configuration, or else the registry's."""
        return Family((self.config.families or {}).get(name, field(name).family))

    @property
    def local(self) -> bool:
        """Return True if inputs are standardised by a map for each field, False if by one number for each level."""
        return self.config.standardise is Standardise.las

    @property
    def linear(self) -> bool:
        """Return True if the model has a linear correction by all fields around a point before its network."""
        return self.config.linear and self.config.name == "unet3d"

    @property
    def takes_members(self) -> bool:
        """Return True if the model reads the members one by one, beside their mean and spread."""
        return self.config.name == "poet"

    @property
    def masked_positions(self) -> tuple[list[int], list[int]]:
        """Return the positions of masked variables among the pressure-level and among the surface variables."""
        both = self.variables, self.surface
        upper, flat = ([names.index(name) for name in names if name in self.masked] for names in both)
        return upper, flat

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values (numbers, strings, lists) that `from_json` turns back into an equal spec.

        The distribution of every variable is written out. Otherwise a later change of the registry would make a
        checkpoint read its learned parameters as those of another distribution.
        """
        plain: dict[str, Any] = {f.name: list(getattr(self, f.name)) for f in fields(self) if f.name != "config"}
        if not self.masked:
            del plain["masked"]  # so the JSON of models without masks equals that of checkpoints older than masks
        plain["config"] = {k: v.value if isinstance(v, Enum) else v for k, v in asdict(self.config).items()}
        plain["config"]["families"] = {name: self.family(name).value for name in (*self.variables, *self.surface)}
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ModelSpec:
        """Build the spec that `to_json` wrote.

        Args:
            plain: the result of `to_json`, perhaps read from a file.

        Returns:
            An equal spec.
        """
        # JSON has no enumerations, so their values are turned back into them.
        config = dict(plain["config"])
        kinds = {"vertical": Vertical, "pole": Pole, "precision": Precision, "standardise": Standardise}
        for key, kind in kinds.items():
            config[key] = kind(config[key])
        return cls(ModelConfig(**config), **{k: tuple(v) for k, v in plain.items() if k != "config"})


@dataclass(eq=False)
class EnsembleInput:
    """A batch of reduced ensembles, as a model takes it. T runs over `ModelSpec.leads_in`.

    Samples may have different numbers of members. A model without pressure-level variables takes tensors with V = 0,
    and one without surface variables takes tensors with S = 0.

    Attributes:
        mean_p: (B, T, V, Z, Y, X) mean of the members, physical units; NaN where no member has a value.
        spread_p: as `mean_p`: standard deviation of the members (ddof = 1); zero where there is one member.
        mean_s: (B, T, S, Y, X) mean of the members for surface variables.
        spread_s: as `mean_s`: standard deviation of the members.
        count: (B,) M, the number of members of each sample.
        day_of_year: (B,) day of the year of the initialisation time, 1 to 366.
        member_p: as `mean_p`: one single member, for a model that asks for one.
        member_s: as `mean_s`: the same for surface variables.
        members_p: (B, M, T, V, Z, Y, X) all members, for a model that takes them (`ModelSpec.takes_members`). The first
            `count` of a sample are members; the rest are zeros.
        members_s: (B, M, T, S, Y, X) the same for surface variables.
        valid_p: (B, T, Vm, Z, Y, X) fraction of the members that have a value at a point, for the Vm masked variables.
        valid_s: (B, T, Sm, Y, X) the same for the Sm masked surface variables.
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
        """Check that the means have the shapes of `spec` on `cells`.

        Args:
            spec: the model's spec.
            cells: (Y, X), the numbers of rows and columns that this process holds.

        Raises:
            UserError: the mean of the pressure levels or of the surface has another shape.
        """
        leads = len(spec.leads_in)
        wanted = (leads, *spec.pressure_shape[1:-2], *cells), (leads, *spec.surface_shape[1:-2], *cells)
        # The means suffice, because all other fields are made from the same members.
        for given, shape in zip((self.mean_p, self.mean_s), wanted, strict=True):
            if tuple(given.shape[1:]) != shape:
                raise UserError(f"input: shape {tuple(given.shape[1:])} (lead, variable, ...); the model takes {shape}")

    def to(self, *args: Any, **kwargs: Any) -> EnsembleInput:
        """Return the same batch on another device or in another dtype.

        Args:
            args: positional arguments of `Tensor.to`.
            kwargs: keyword arguments of `Tensor.to`.

        Returns:
            A new batch.
        """
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(*args, **kwargs) for k, v in moved.items() if v is not None})

    def __len__(self) -> int:
        return len(self.count)


@dataclass(eq=False)
class Prediction:
    """The parameters of the predicted distributions, in physical units. T runs over `ModelSpec.leads_out`.

    Shapes are (B, T, V, Z, Y, X) for `_p` and (B, T, S, Y, X) for `_s`. All `_p` are None if the model has no
    pressure-level variable, and all `_s` if it has no surface variable.

    Attributes:
        location_p: location of the variable's distribution; None without the postprocess head.
        scale_p: scale of the variable's distribution; None without the postprocess head.
        spread_p: predicted standard deviation of the full ensemble; None without the spread head.
        location_s: the same as `location_p` for surface variables.
        scale_s: the same as `scale_p` for surface variables.
        spread_s: the same as `spread_p` for surface variables.
    """

    location_p: Tensor | None = None
    scale_p: Tensor | None = None
    spread_p: Tensor | None = None
    location_s: Tensor | None = None
    scale_s: Tensor | None = None
    spread_s: Tensor | None = None

    def widened(self, widths_BTF: Tensor, families: tuple[tuple[Family, ...], tuple[Family, ...]]) -> Prediction:
        """Return the prediction with the scale of each lead and field multiplied by a calibration factor.

        The means of the distributions stay as they are (see `distributions.widen`).

        Args:
            widths_BTF: calibration factors, (B, T, F), or (T, F) for all samples. F runs over variables and levels,
                then over surface variables.
            families: distributions of the pressure-level variables and of the surface variables.

        Returns:
            A new prediction.
        """
        found, left = {}, widths_BTF if widths_BTF.ndim == 3 else widths_BTF[None]
        for suffix, laws in zip("ps", families, strict=True):
            location, scale = getattr(self, f"location_{suffix}"), getattr(self, f"scale_{suffix}")
            if scale is not None:
                fields = scale.shape[2:-2]
                # The factors are listed for all fields in one axis. Each set takes its own from the front.
                own, left = left.tensor_split([fields.numel()], -1)
                width = own.unflatten(-1, fields)[..., None, None].to(scale)
                # Variables have different distributions, so each is widened by the rule of its own.
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
    """Reduce the members to their mean and spread, which is what a model takes.

    All samples must have the same number M of members.

    Args:
        members_p: (B, M, T, V, Z, Y, X) members on pressure levels, physical units.
        members_s: (B, M, T, S, Y, X) members at the surface.
        day_of_year: (B,) day of the year of the initialisation time, 1 to 366.
        one_member: also pass on the first member.
        all_members: also pass on all members.

    Returns:
        The batch.
    """
    batch, count = members_p.shape[:2]
    # torch warns when it takes the standard deviation of one member or of an empty tensor, so both are set to zero.
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
    """Return the fraction of members that have a value at each point, for the masked variables of one init time.

    Args:
        spec: the model's spec; it names the masked variables.
        pressure: (M, T_in, V, Z, Y, X) members, NaN where masked.
        surface: (M, T_in, S, Y, X) members, NaN where masked.

    Returns:
        `valid_p` and `valid_s` of `EnsembleInput`, without the axis B.
    """
    upper, flat = spec.masked_positions
    known = np.isfinite(pressure[:, :, upper]), np.isfinite(surface[:, :, flat])
    return {f"valid_{suffix}": one.mean(0, dtype=np.float32) for suffix, one in zip("ps", known, strict=True)}


def _check_spec(spec: ModelSpec) -> None:
    """Raise a UserError if the spec names nothing to predict, or a variable in the wrong list, or an irregular grid."""
    if not spec.variables and not spec.surface:
        raise UserError("data.variables, data.surface: both are empty; name at least one variable")
    if spec.variables and not spec.levels:
        raise UserError(f"data.levels: empty, but data.variables={list(spec.variables)}; name at least one level")
    if not spec.leads_out:
        raise UserError("data.leads_out: empty; name at least one lead time")
    # The model corrects the ensemble at the lead that it predicts, so it must be given the ensemble there.
    missing = [lead for lead in spec.leads_out if lead not in spec.leads_in]
    if missing:
        raise UserError(
            f"data.leads_out={missing}: predicted leads must be among data.leads_in={list(spec.leads_in)};"
            " add them there"
        )
    # A surface variable in the list of pressure-level variables would be read at levels that it does not have.
    for name, surface in [(v, False) for v in spec.variables] + [(v, True) for v in spec.surface]:
        if field(name).surface != surface:
            kind, key = ("pressure-level", "variables") if surface else ("surface", "surface")
            raise UserError(f"variable {name}: is a {kind} variable; name it in data.{key}")
    _ = spec.grid  # making a Grid raises a UserError if the points are not regular
