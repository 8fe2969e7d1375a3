"""The input planes that all variables share: place, static fields, number of members, and season.

Axes: B initialisation time, P plane, Y latitude, X longitude.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.models.inputs import ModelSpec

_DAYS = 365.2425
_PLACE, _NUMBERS = 4, 4
_SEASON = 2  # sine and cosine of the season are the last planes


def plane_count(spec: ModelSpec) -> int:
    """Return P: four planes of place, the static fields, and four planes of one number each."""
    return _PLACE + len(spec.static) + _NUMBERS


def hemisphere(spec: ModelSpec) -> np.ndarray:
    """Return -1 for rows south of the equator and 1 for the others, (Y, 1) float32."""
    return np.where(np.asarray(spec.latitude) < 0, -1, 1).astype(np.float32)[:, None]


def position_planes(spec: ModelSpec, static: np.ndarray) -> Tensor:
    """Return sine and cosine of latitude and of longitude, then the standardised static fields, (P - 4, Y, X).

    Args:
        spec: the model's spec.
        static: (n, Y, X) static fields.
    """
    lat, lon = np.deg2rad(np.asarray(spec.latitude)), np.deg2rad(np.asarray(spec.longitude))
    # The longitude itself would jump where the circle closes, so the planes are sines and cosines.
    planes = [np.sin(lat)[:, None], np.cos(lat)[:, None], np.sin(lon)[None], np.cos(lon)[None]]
    shape = len(lat), len(lon)
    place = torch.from_numpy(np.stack([np.broadcast_to(p, shape) for p in planes]).astype(np.float32))
    return torch.cat([place, _standardised(torch.from_numpy(static))])


def common_planes(position: Tensor, count: Tensor, day_of_year: Tensor) -> Tensor:
    """Return all common planes: those of `position_planes`, 1/M, log M, sine and cosine of the season, (B, P, Y, X).

    Args:
        position: the result of `position_planes`.
        count: (B,) number of members.
        day_of_year: (B,) 1 to 366.
    """
    numbers = torch.stack([1 / count, torch.log(count), *seasonal_terms(day_of_year).unbind(-1)], 1)
    planes = numbers.to(position.dtype)[:, :, None, None].expand(-1, -1, *position.shape[1:])
    return torch.cat([position.expand(len(count), *position.shape), planes], 1)


def seasonal_terms(day_of_year: Tensor) -> Tensor:
    """Return sine and cosine of the season, (..., 2).

    Args:
        day_of_year: (...) 1 to 366.
    """
    angle = day_of_year * (2 * np.pi / _DAYS)
    return torch.stack([torch.sin(angle), torch.cos(angle)], -1)


def with_own_season(common_BPYX: Tensor, hemisphere: Tensor) -> Tensor:
    """Shift the season by half a year in the southern hemisphere, by changing the sign of its sine and cosine.

    Args:
        common_BPYX: the result of `common_planes`.
        hemisphere: -1 where the season is to be shifted, broadcast against (B, 2, Y, X).

    Returns:
        (B, P, Y, X).
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
