"""Intervals that values of NetCDF files and Zarr stores are of, as CF states them: cell methods and bounds.

A width stands in the bounds of any coordinate that tells time: the lead's, that of valid times beside it (of one or of
two dimensions), or one of a single value, where a file holds one lead.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping

import numpy as np
import xarray as xr

from data_prep.axes import ALIASES, START, VALID, to_hours
from data_prep.records import GUST
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Field

_READ = "point", "sum", "mean", "maximum", "minimum"
_EXTREMES = "avg", "max", "min"


def over_intervals(array: xr.DataArray, field: Field) -> bool:
    """Whether values are of intervals rather than of moments: by CF cell_methods, else by what the variable is.

    Bounds of an axis are for all variables of a file, though some of them may be of moments.
    """
    found = _methods(array)
    return found != {"point"} if found else field.accumulated or field.standard_name == GUST


def other_quantity(array: xr.DataArray, field: Field) -> str:
    """Why values are not those of the variable, though they bear its name; empty where they are.

    A range or a deviation over time is another quantity; cfgrib says of means and extremes no interval.
    """
    strange = _methods(array) - set(_READ)
    if strange:
        return f" ({sorted(strange)[0]} over time)"
    kind = str(array.attrs.get("GRIB_stepType", ""))
    unsaid = kind in _EXTREMES and not over_intervals(array, field)
    return f" (GRIB_stepType {kind}, over no interval that is said)" if unsaid else ""


def _methods(array: xr.DataArray) -> set[str]:
    """CF cell methods of the axes of time."""
    pairs = re.findall(r"((?:\w+: )+)(\w+)", str(array.attrs.get("cell_methods", "")))
    times = ALIASES["init"] + ALIASES["lead"]
    return {method for axes, method in pairs if any(axis in times for axis in axes.replace(":", "").split())}


def widths(data: xr.Dataset, array: xr.DataArray, places: Mapping[Hashable, np.ndarray]) -> np.ndarray | None:
    """Hours that each field's values cover, (N,) int32; None where no coordinate has bounds.

    Args:
        places: dimension -> position along it of each of the N fields.

    Raises:
        UserError: an interval does not end at its coordinate, or bounds are not a pair for each of its values.
    """
    for axis in _times(array):
        name = axis.attrs.get("bounds", axis.encoding.get("bounds", ""))
        if name not in data:
            continue
        bounds = data[name].values
        if bounds.shape != (*axis.shape, 2):
            raise UserError(f"{axis.name}: its bounds {name} are not two for each of its values; shape {bounds.shape}")
        if not np.array_equal(bounds[..., 1], axis.values):
            raise UserError(
                f"{axis.name}: its bounds {name} end elsewhere than at the coordinate; only values of an interval that"
                " ends there are read: let the coordinate be the end of each interval"
            )
        lengths = bounds[..., 1] - bounds[..., 0]  # of valid times, or of leads in units of their own
        hours = np.rint(to_hours(lengths, axis)).astype(np.int32)
        along = np.broadcast_to(0, next(iter(places.values())).shape if places else (1,))
        return hours[tuple(places.get(dim, along) for dim in axis.dims)] + along
    return None


def _times(array: xr.DataArray) -> list[xr.DataArray]:
    """Coordinates that tell lead or valid time, the former first."""
    found = []
    for role, names in (("forecast_period", ALIASES["lead"]), ("time", VALID)):
        for axis in array.coords.values():
            standard = axis.attrs.get("standard_name")
            if standard == role or (axis.name in names and standard != START):
                found.append(axis)
    return found
