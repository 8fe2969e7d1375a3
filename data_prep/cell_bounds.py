"""Intervals that values of NetCDF files and Zarr stores are of, as CF states them: cell methods and bounds.

A width stands in the bounds of any coordinate that tells time: the lead's, that of valid times beside it (of one or of
two dimensions), or one of a single value, where a file holds one lead. WeatherBench 2 has it in the variable's name.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping

import numpy as np
import xarray as xr

from data_prep.axes import ALIASES, READ, ROUNDING, START, VALID, find_axis, to_hours
from data_prep.records import OF_STEP_TYPE, other_step_type
from ensemble_ml.errors import UserError
from ensemble_ml.fields import GUST, Field

_READ = "point", "sum", "mean", "maximum", "minimum"


def name_of_sum(name: Hashable) -> tuple[str, int]:
    """A variable's name without the hours that it is a sum over, and these; 0 where it does not say them."""
    said = re.fullmatch(r"(total_precipitation)_([1-9]\d?)hr?", str(name))
    return (said[1], int(said[2])) if said else (str(name), 0)


def other_sums(data: xr.Dataset) -> dict[str, str]:
    """Variables that are sums of what another one of the file is, over other hours: name -> the one that is read.

    That is the one that says no hours; else that over the hours between leads, or the shortest.
    """
    sums: dict[str, dict[int, str]] = {}
    for name in data.data_vars:
        what, hours = name_of_sum(name)
        sums.setdefault(what, {})[hours] = str(name)
    found: dict[str, str] = {}
    for named in (named for named in sums.values() if len(named) > 1):
        lead = find_axis(data[named[max(named)]], "lead")
        apart = int(np.diff(READ["lead"](lead)).min()) if lead is not None and lead.size > 1 else 0
        kept = named[0] if 0 in named else named[apart if apart in named else min(named)]
        found |= {name: kept for name in named.values() if name != kept}
    return found


def over_intervals(array: xr.DataArray, field: Field) -> bool:
    """Whether values are of intervals rather than of moments: by CF cell_methods, else by what the variable is.

    Bounds of an axis are for all variables of a file, though some of them may be of moments.
    """
    found = _methods(array)
    return found != {"point"} if found else field.accumulated or field.standard_name == GUST


def method(array: xr.DataArray) -> str:
    """Mean, maximum or minimum over time, where values are said to be one; empty where they are not."""
    said = _methods(array) - {"point", "sum"}
    return next(iter(said)) if len(said) == 1 else OF_STEP_TYPE.get(_step_type(array), "")


def other_quantity(data: xr.Dataset, array: xr.DataArray, field: Field) -> str:
    """Why values are not those of the variable, though they bear its name; empty where they are.

    A range or a deviation over time is another quantity, and so is whatever was made of all members. Means and extremes
    over time are read where bounds say over which; cfgrib says it of none.
    """
    of_members = _methods(array, "member") - {"point"}
    if of_members:
        return f" ({sorted(of_members)[0]} over members)"
    methods = _methods(array)
    strange = methods - set(_READ)
    if strange:
        return f" ({sorted(strange)[0]} over time)"
    kind = _step_type(array)
    said = sorted(methods - {"point"})
    if field.accumulated and (other := sorted(methods - {"point", "sum"})):
        return f" (the {other[0]} over time and not the sum)"
    if not said and (of_kind := other_step_type(kind, field)):
        return f" ({of_kind})"
    if kind in OF_STEP_TYPE and not over_intervals(array, field):
        return f" (GRIB_stepType {kind}, over no interval that is said)"
    if (
        not said
        or field.accumulated
        or field.standard_name == GUST
        or any(_bounds(axis) in data for axis in _times(array))
    ):
        return ""
    return f" ({said[0]} over time, over no interval that is said)"


def _methods(array: xr.DataArray, *roles: str) -> set[str]:
    """CF cell methods of the axes of `roles`; of time where none is given."""
    pairs = re.findall(r"((?:\w+:\s*)+)(\w+)", str(array.attrs.get("cell_methods", "")).lower())
    names = {name for role in roles or ("init", "lead") for name in ALIASES[role]}
    return {method for axes, method in pairs if names & set(axes.replace(":", " ").split())}


def _step_type(array: xr.DataArray) -> str:
    return str(array.attrs.get("GRIB_stepType", ""))


def _bounds(axis: xr.DataArray) -> str:
    return str(axis.attrs.get("bounds", axis.encoding.get("bounds", "")))


def widths(data: xr.Dataset, array: xr.DataArray, places: Mapping[Hashable, np.ndarray]) -> np.ndarray | None:
    """Hours that each field's values cover, (N,) int32; None where no coordinate has bounds and no name says it.

    Args:
        places: dimension -> position along it of each of the N fields.

    Raises:
        UserError: an interval does not end at its coordinate, or bounds are not a pair for each of its values.
    """
    along = np.zeros(next(iter(places.values())).shape if places else 1, np.int32)
    for axis in _times(array):
        name = _bounds(axis)
        if name not in data:
            continue
        bounds = data[name].values
        if bounds.shape != (*axis.shape, 2):
            raise UserError(f"{axis.name}: its bounds {name} are not two for each of its values; shape {bounds.shape}")
        if (np.abs(to_hours(bounds[..., 1] - axis.values, axis)) > ROUNDING).any():
            raise UserError(
                f"{axis.name}: its bounds {name} end elsewhere than at the coordinate; only values of an interval that"
                " ends there are read: let the coordinate be the end of each interval"
            )
        lengths = bounds[..., 1] - bounds[..., 0]  # of valid times, or of leads in units of their own
        exact = to_hours(lengths, axis)
        hours = np.rint(exact).astype(np.int32)
        if (np.abs(exact - hours) > ROUNDING).any() or (hours < 0).any():
            raise UserError(f"{axis.name}: its bounds {name} are not whole hours apart, from the first to the second")
        return hours[tuple(places.get(dim, along) for dim in axis.dims)] + along
    named = name_of_sum(array.name)[1]
    return np.int32(named) + along if named else None


def _times(array: xr.DataArray) -> list[xr.DataArray]:
    """Coordinates that tell lead or valid time, the former first."""
    found = []
    for role, names in (("forecast_period", ALIASES["lead"]), ("time", VALID)):
        for axis in array.coords.values():
            standard = axis.attrs.get("standard_name")
            if standard == role or (axis.name in names and standard != START):
                found.append(axis)
    return found
