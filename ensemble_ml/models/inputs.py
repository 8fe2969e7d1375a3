"""The values that go into a model and come out of it, as small dataclasses.

`ModelSpec` fixes the shape of a model and is checked when it is made, `EnsembleInput` is a batch of reduced ensembles,
and `Prediction` holds the parameters of the predicted distributions.

Axes in shapes:

    B    initialisation time in a batch
    M    ensemble member
    T    lead time
    F    field: each variable on pressure levels at each level, level by level, then the surface variables
    P    plane that all variables share
    Y    latitude
    X    longitude

All values are in the units of the registry (`ensemble_ml.fields`). The model standardises them itself.

Input planes that all variables share are made here, too: place, static fields, number of members, and season. Lists of
integers, such as positions along an axis, are copied to a GPU once and not in every step. A copy from the host waits
for all work that the GPU has been given, and it cannot be part of a CUDA graph (`training.recorded`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from functools import lru_cache
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

_DAYS = 365.2425  # of a mean year
_PLACE, _NUMBERS = 4, 4  # planes of place, and planes of one number each
_SEASON = 2  # sine and cosine of the season are the last planes


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A description of everything that fixes the shape of a model. A checkpoint stores it as JSON.

    If the depth in `config` is "auto", it is replaced by `ModelConfig.usual_depth`, or by the largest number of
    poolings that the grid allows if that is less.

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
        UserError: a predicted lead is not an input; there are no variables, no predicted leads, or no levels for
            variables on levels; a variable is unknown or in the wrong list; the grid is not regular; or
            `config.widths` or `config.inner` do not fit the depth.
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
        # YAML, JSON and NumPy give lists and scalars of their own types. Plain tuples of Python values can be written
        # as JSON, and equal specs then give equal JSON.
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
        # Pooling halves the columns. If longitude wraps, an odd number of columns cannot be halved.
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
    def upper(self) -> int:
        """Return how many fields are on pressure levels: variables times levels. They come first."""
        return len(self.variables) * len(self.levels)

    @property
    def fields(self) -> int:
        """Return F, the number of fields of one lead time: variables times levels, plus surface variables."""
        return self.upper + len(self.surface)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the shape (T_out, F, Y, X) of the predicted fields."""
        return len(self.leads_out), self.fields, len(self.latitude), len(self.longitude)

    @property
    def names(self) -> list[tuple[str, int | None]]:
        """Return variable and level in hPa of each of the F fields; the level of a surface variable is None."""
        on_levels: list[tuple[str, int | None]] = [(name, level) for name in self.variables for level in self.levels]
        return on_levels + [(name, None) for name in self.surface]

    def of(self, name: str) -> slice:
        """Return where the fields of a variable, one of `variables` or `surface`, stand on the axis F."""
        if name in self.surface:
            first, count = self.upper + self.surface.index(name), 1
        else:
            first, count = self.variables.index(name) * len(self.levels), len(self.levels)
        return slice(first, first + count)

    def vector_sign(self, leads: int) -> Tensor:
        """Return the factor (T F,) by which an anomaly of each field is multiplied when it is continued across a pole.

        The factor is -1 for components of a vector and 1 for scalars, because east and north point the other way beyond
        the pole.
        """
        return self._signs(lambda one: one.vector_component).repeat(leads)

    def mirror_sign(self, leads: int) -> Tensor:
        """Return the factor (T F,) by which an anomaly of each field is multiplied when it is mirrored at the equator.

        The factor is -1 for northward components and 1 for all other fields.
        """
        return self._signs(lambda one: one.northward).repeat(leads)

    def _signs(self, turns: Callable[[Field], bool]) -> Tensor:
        """Return -1 for the fields for which `turns` is true and 1 for the others, (F,)."""
        flips = [turns(field(name)) for name, _ in self.names]
        return torch.where(torch.tensor(flips, dtype=torch.bool), -1.0, 1.0)

    @property
    def families(self) -> tuple[Family, ...]:
        """Return the distribution of each of the F fields."""
        return tuple(self.family(name) for name, _ in self.names)

    def family(self, name: str) -> Family:
        """Return the distribution of variable `name`: the one in the configuration, or else the registry's."""
        return Family((self.config.families or {}).get(name, field(name).family))

    @property
    def local(self) -> bool:
        """Return True if inputs are standardised by a map for each field, False if by one number for each level."""
        return self.config.standardise is Standardise.las

    @property
    def linear(self) -> bool:
        """Return True if the model has a linear correction (`models.linear`) before its network."""
        return self.config.linear and self.config.name == "unet3d"

    @property
    def takes_members(self) -> bool:
        """Return True if the model reads all members in addition to their mean and spread."""
        return self.config.name == "poet"

    @property
    def masked_positions(self) -> list[int]:
        """Return the positions of the fields of masked variables."""
        return [position for position, (name, _) in enumerate(self.names) if name in self.masked]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values that `from_json` turns back into a spec of the same model.

        The distribution of every variable is written out. Otherwise, after a change of the registry, the parameters
        that a checkpoint has learned would be used with another distribution.
        """
        plain: dict[str, Any] = {f.name: list(getattr(self, f.name)) for f in fields(self) if f.name != "config"}
        if not self.masked:
            del plain["masked"]  # so the JSON of models without masks equals that of checkpoints older than masks
        plain["config"] = {k: v.value if isinstance(v, Enum) else v for k, v in asdict(self.config).items()}
        plain["config"]["families"] = {name: self.family(name).value for name in (*self.variables, *self.surface)}
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ModelSpec:
        """Build the spec that `to_json` wrote."""
        # JSON has no enumerations; it holds their values.
        config = dict(plain["config"])
        kinds = {"vertical": Vertical, "pole": Pole, "precision": Precision, "standardise": Standardise}
        for key, kind in kinds.items():
            config[key] = kind(config[key])
        return cls(ModelConfig(**config), **{k: tuple(v) for k, v in plain.items() if k != "config"})


def _check_spec(spec: ModelSpec) -> None:
    """Check the names, leads and grid of a spec."""
    if not spec.variables and not spec.surface:
        raise UserError("data.variables, data.surface: both are empty; name at least one variable")
    if spec.variables and not spec.levels:
        raise UserError(f"data.levels: empty, but data.variables={list(spec.variables)}; name at least one level")
    for key in ("leads_in", "leads_out"):
        if not getattr(spec, key):
            raise UserError(f"data.{key}: empty; name at least one lead time")
    # The model corrects the ensemble at the predicted lead, so that lead must be an input.
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


@dataclass(eq=False)
class EnsembleInput:
    """A batch of reduced ensembles, as a model takes it. T runs over `ModelSpec.leads_in`.

    Samples may have different numbers of members.

    Attributes:
        mean: (B, T, F, Y, X) mean of the members, physical units; NaN where no member has a value.
        spread: as `mean`: standard deviation of the members (ddof = 1); zero where there is one member.
        count: (B,) M, the number of members of each sample.
        day_of_year: (B,) day of the year of the initialisation time, 1 to 366.
        member: as `mean`: one single member, for a model with `one_member`.
        members: (B, M, T, F, Y, X) all members, for a model that takes them (`ModelSpec.takes_members`). The first
            `count` of a sample are members; the rest are zeros.
        valid: (B, T, Fm, Y, X) fraction of the members that have a value at a point, for the Fm fields of masked
            variables.
    """

    mean: Tensor
    spread: Tensor
    count: Tensor
    day_of_year: Tensor
    member: Tensor | None = None
    members: Tensor | None = None
    valid: Tensor | None = None

    def check(self, spec: ModelSpec, cells: tuple[int, int]) -> None:
        """Check that the mean has the shape of `spec` on `cells`, the rows and columns (Y, X) that this process holds.

        Raises:
            UserError: the mean has another shape.
        """
        # The mean suffices, because all other fields are made from the same members.
        given, wanted = tuple(self.mean.shape[1:]), (len(spec.leads_in), spec.fields, *cells)
        if given != wanted:
            raise UserError(f"input: shape {given} (lead, field, row, column); the model takes {wanted}")

    def to(self, *args: Any, **kwargs: Any) -> EnsembleInput:
        """Return the same batch on another device or in another dtype, given like the arguments of `Tensor.to`."""
        return replace(self, **{k: v.to(*args, **kwargs) for k, v in vars(self).items() if v is not None})

    def __len__(self) -> int:
        return len(self.count)


@dataclass(eq=False)
class Prediction:
    """The parameters of the predicted distributions, in physical units. T runs over `ModelSpec.leads_out`.

    Attributes:
        location: (B, T, F, Y, X) location of the field's distribution; None without the postprocess head.
        scale: scale of the field's distribution, the same shape; None without the postprocess head.
        spread: predicted standard deviation of the full ensemble, the same shape; None without the spread head.
    """

    location: Tensor | None = None
    scale: Tensor | None = None
    spread: Tensor | None = None

    def widened(self, widths_BTF: Tensor, families: Sequence[Family]) -> Prediction:
        """Return the prediction with the scale of each lead and field multiplied by a calibration factor.

        The factors are (B, T, F), or (T, F) for all samples. The means of the distributions stay as they are (see
        `distributions.widen`). A prediction without location and scale is returned unchanged.
        """
        if self.location is None or self.scale is None:
            return self
        widths = (widths_BTF if widths_BTF.ndim == 3 else widths_BTF[None])[..., None, None].to(self.scale)
        location, scale = torch.empty_like(self.location), torch.empty_like(self.scale)
        # Fields have different distributions, and each is widened by the rule of its own.
        for law, at in by_family(families):
            own = (take(values, 2, at) for values in (self.location, self.scale, widths))
            for found, values in zip((location, scale), widen(law, *own), strict=True):
                found.index_copy_(2, integers(at, found.device), values)
        return replace(self, location=location, scale=scale)


def by_family(families: Sequence[Family]) -> list[tuple[Family, list[int]]]:
    """Return each distribution with the positions of its fields."""
    kinds = dict.fromkeys(families)
    return [(kind, [at for at, family in enumerate(families) if family is kind]) for kind in kinds]


def ensemble_input(members: Tensor, day_of_year: Tensor) -> EnsembleInput:
    """Reduce members (B, M, T, F, Y, X), with a value at every point, to their mean and spread, the input of a model.

    All samples must have the same number M of members. Models that also take one member, all members or the fraction of
    members with a value need more than this. `day_of_year` (B,) is that of the initialisation time, 1 to 366.
    """
    batch, count = members.shape[:2]
    return EnsembleInput(
        members.mean(1),
        torch.zeros_like(members[:, 0]) if count == 1 else members.std(1),  # torch gives NaN for one member
        members.new_full((batch,), float(count)),
        day_of_year,
    )


def valid_shares(spec: ModelSpec, pressure: np.ndarray, surface: np.ndarray) -> np.ndarray:
    """Return the fraction of members that have a value at each point: `valid` of `EnsembleInput`, without the axis B.

    The members are (M, T_in, V, Z, Y, X) and (M, T_in, S, Y, X), NaN where masked.
    """
    # The members are the largest arrays of a sample, so only the masked variables are copied, one kind at a time.
    shares = []
    for names, values in ((spec.variables, pressure), (spec.surface, surface)):
        masked = [position for position, name in enumerate(names) if name in spec.masked]
        share = np.isfinite(values[:, :, masked]).mean(0, dtype=np.float32)
        shares.append(share.reshape(len(share), -1, *share.shape[-2:]))
    return np.concatenate(shares, axis=1)


def plane_count(spec: ModelSpec) -> int:
    """Return P: four planes of place, the static fields, and four planes of one number each."""
    return _PLACE + len(spec.static) + _NUMBERS


def hemisphere(spec: ModelSpec) -> np.ndarray:
    """Return -1 for rows south of the equator and 1 for the others, (Y, 1) float32."""
    return np.where(np.asarray(spec.latitude) < 0, -1, 1).astype(np.float32)[:, None]


def position_planes(spec: ModelSpec, static: np.ndarray) -> Tensor:
    """Return sine and cosine of latitude and of longitude, then the standardised static fields, (P - 4, Y, X)."""
    lat, lon = np.deg2rad(np.asarray(spec.latitude)), np.deg2rad(np.asarray(spec.longitude))
    # The longitude itself would jump where the circle closes, so the planes are sines and cosines.
    planes = [np.sin(lat)[:, None], np.cos(lat)[:, None], np.sin(lon)[None], np.cos(lon)[None]]
    shape = len(lat), len(lon)
    place = torch.from_numpy(np.stack([np.broadcast_to(p, shape) for p in planes]).astype(np.float32))
    return torch.cat([place, _standardised(torch.from_numpy(static))])


def common_planes(position: Tensor, count: Tensor, day_of_year: Tensor) -> Tensor:
    """Return all common planes: those of `position_planes`, 1/M, log M, sine and cosine of the season, (B, P, Y, X).

    Counts M and days of the year, from 1 on, are (B,).
    """
    numbers = torch.stack([1 / count, torch.log(count), *seasonal_terms(day_of_year).unbind(-1)], 1)
    planes = numbers.to(position.dtype)[:, :, None, None].expand(-1, -1, *position.shape[1:])
    return torch.cat([position.expand(len(count), *position.shape), planes], 1)


def seasonal_terms(day_of_year: Tensor) -> Tensor:
    """Return sine and cosine of the season, (..., 2), for days of the year (...), from 1 on."""
    angle = day_of_year * (2 * np.pi / _DAYS)
    return torch.stack([torch.sin(angle), torch.cos(angle)], -1)


def with_own_season(common_BPYX: Tensor, hemisphere: Tensor) -> Tensor:
    """Shift the season of `common_planes` by half a year, by changing the sign of its sine and cosine, (B, P, Y, X).

    `hemisphere` is -1 where the season is to be shifted, broadcast against (B, 2, Y, X).
    """
    others, season = common_BPYX[:, :-_SEASON], common_BPYX[:, -_SEASON:]
    return torch.cat([others, season * hemisphere.to(season.dtype)], 1)


def _standardised(static: Tensor) -> Tensor:
    """Standardise static fields to mean zero and standard deviation one; a constant field becomes zero."""
    if not static.numel():
        return static
    centred = static - static.mean((-2, -1), keepdim=True)
    deviation = centred.std((-2, -1), correction=0, keepdim=True)
    return centred / torch.where(deviation > 0, deviation, torch.ones_like(deviation))


def take(x: Tensor, dim: int, positions: Sequence[int]) -> Tensor:
    """Return a copy of `x` at some positions of one axis."""
    return x.index_select(dim, integers(positions, x.device))


def integers(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return N integers as a tensor (N,) int64 on `device`. The caller must not write to it."""
    # On other devices a cache saves nothing. It could even do harm: a tensor that was made in a dry run on fake tensors
    # would be fake for all later uses.
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    return _kept(tuple(numbers), device)


@lru_cache(maxsize=1024)
def _kept(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tensor from the cache, or make it."""
    # A tensor made in inference mode could not be used in training later.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device=device)
