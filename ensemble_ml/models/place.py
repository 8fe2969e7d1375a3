"""Planes that all variables share: where a point lies, when the forecast starts, and how many members there are.

Axes: B date, P plane, Y latitude, X longitude.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.models.inputs import ModelSpec

_DAYS = 365.2425
_PLACE, _NUMBERS = 4, 4
_SEASON = 2  # the last ones


def plane_count(spec: ModelSpec) -> int:
    """P: four of place, the static fields, four numbers."""
    return _PLACE + len(spec.static) + _NUMBERS


def hemisphere(spec: ModelSpec) -> np.ndarray:
    """(Y, 1) float32: -1 south of the equator, 1 elsewhere."""
    return np.where(np.asarray(spec.latitude) < 0, -1, 1).astype(np.float32)[:, None]


def position_planes(spec: ModelSpec, static: np.ndarray) -> Tensor:
    """Sine and cosine of latitude and of longitude, then `static` (n, Y, X) standardised: (P - 4, Y, X)."""
    lat, lon = np.deg2rad(np.asarray(spec.latitude)), np.deg2rad(np.asarray(spec.longitude))
    planes = [np.sin(lat)[:, None], np.cos(lat)[:, None], np.sin(lon)[None], np.cos(lon)[None]]
    shape = len(lat), len(lon)
    place = torch.from_numpy(np.stack([np.broadcast_to(p, shape) for p in planes]).astype(np.float32))
    return torch.cat([place, _standardised(torch.from_numpy(static))])


def common_planes(position: Tensor, count: Tensor, day_of_year: Tensor) -> Tensor:
    """`position`, then 1/M, log M, sine and cosine of the season: (B, P, Y, X).

    Args:
        position: of `position_planes`.
        count, day_of_year: (B,) M and 1..366.
    """
    numbers = torch.stack([1 / count, torch.log(count), *seasonal_terms(day_of_year).unbind(-1)], 1)
    planes = numbers.to(position.dtype)[:, :, None, None].expand(-1, -1, *position.shape[1:])
    return torch.cat([position.expand(len(count), *position.shape), planes], 1)


def seasonal_terms(day_of_year: Tensor) -> Tensor:
    """Sine and cosine of the season, (..., 2), of the day of the year, 1..366."""
    angle = day_of_year * (2 * np.pi / _DAYS)
    return torch.stack([torch.sin(angle), torch.cos(angle)], -1)


def with_own_season(common_BPYX: Tensor, hemisphere: Tensor) -> Tensor:
    """`common_planes` with the season of the northern hemisphere half a year from now where `hemisphere` is -1."""
    others, season = common_BPYX[:, :-_SEASON], common_BPYX[:, -_SEASON:]
    return torch.cat([others, season * hemisphere.to(season.dtype)], 1)


def _standardised(static: Tensor) -> Tensor:
    """Static fields to mean zero and deviation one; a constant one becomes zero."""
    if not static.numel():
        return static
    centred = static - static.mean((-2, -1), keepdim=True)
    deviation = centred.std((-2, -1), correction=0, keepdim=True)
    return centred / torch.where(deviation > 0, deviation, torch.ones_like(deviation))
