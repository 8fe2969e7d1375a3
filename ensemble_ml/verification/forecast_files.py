"""One file of forecasts: its axes, times, levels, members and units, whoever made it.

Axes are known by CF standard names, or by usual ones. Every function that finds a file wanting raises a `UserError`
that begins with the file's path. Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ensemble_ml.errors import UserError
from ensemble_ml.fields import AXIS_NAMES, FIELDS, HECTOPASCAL, LOWEST_PASCAL, PASCAL, Family, unit_conversion
from ensemble_ml.fields import field as registered
from ensemble_ml.grid import Grid, canonical

PARTS = ("location", "scale", "mean", "stddev", "ensemble_spread")
READ = tuple(f"_{part}" for part in (*PARTS, "member"))  # endings of the names of variables that are read
KNOWN = frozenset(f"{known.name}{part}" for known in FIELDS for part in READ)  # all such names
_STANDARD = {"level": "air_pressure"}  # CF's names of axes, where they are not ours
_AT_THE_SURFACE = frozenset(known.name for known in FIELDS if known.surface)


def open_file(path: Path) -> xr.Dataset:
    """The file with axes under our names; nothing but headers is read."""
    try:
        return _with_our_axes(xr.open_dataset(path, decode_timedelta=False, cache=False))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: not a readable NetCDF file ({error}); make the forecast again") from error


def _with_our_axes(data: xr.Dataset) -> xr.Dataset:
    """The same with axes under our names."""
    made, along = data, {}
    for name, usual in AXIS_NAMES.items():
        if name in made.dims and name in made.coords:
            continue
        lines = [axis for axis, values in made.coords.items() if values.ndim < 2]
        told = [axis for axis in lines if made[axis].attrs.get("standard_name") == _STANDARD.get(name, name)]
        for axis in [*told, *(axis for axis in usual if axis in lines or axis in made.dims)][:1]:
            made = made if axis == name else made.rename({axis: name})
            if name in made.coords and made[name].ndim:
                along[name] = made[name].dims[0]
    lengths = list(along.values())  # points have one for both
    made = made.swap_dims({dim: name for name, dim in along.items() if dim != name and lengths.count(dim) == 1})
    if "level" in made.coords and "units" not in made["level"].attrs:  # it may only count them
        beside = [
            c
            for c in made.coords.values()
            if c.dims == made["level"].dims and c.attrs.get("units") in (*PASCAL, *HECTOPASCAL)
        ]
        made = made.assign_coords(level=beside[0].variable) if beside and beside[0].ndim else made
    if made is not data:
        made.set_close(data.close)
    return made


def conversion(array: xr.DataArray, variable: str) -> tuple[float, float]:
    """(factor, shift) that bring an array to the registry's units.

    Raises:
        UserError: none is known, or the array holds parameters of a law that goes by the registry's units.
    """
    known, path = registered(variable), array.encoding.get("source")
    if "units" not in array.attrs and known.units != "1":
        raise UserError(
            f"{path}: {array.name}: has no units; set its attribute units (here they would be {known.units})"
        )
    units = str(array.attrs.get("units", known.units)).strip()
    try:
        found = unit_conversion(units, known.units)
    except UserError as error:
        raise UserError(f"{path}: {array.name}: {error}") from error
    family = array.attrs.get("distribution_family", Family.NORMAL.value)
    if found != (1.0, 0.0) and family != Family.NORMAL.value:
        raise UserError(f"{path}: {array.name}: parameters of a {family} law in {units}; give them in {known.units}")
    return found


def family_of(array: xr.DataArray, usual: Family) -> Family:
    """The family that an array names, or `usual`."""
    said = array.attrs.get("distribution_family", usual.value)
    if said not in {family.value for family in Family}:
        path, known = array.encoding.get("source"), ", ".join(family.value for family in Family)
        raise UserError(f"{path}: {array.name}: distribution_family {said!r} is not known; known are {known}")
    return Family(said)


def reference_time(data: xr.Dataset, path: Path) -> np.datetime64:
    """The start date, of which a file has one."""
    if "forecast_reference_time" not in data.variables:
        raise UserError(f"{path}: no forecast_reference_time; only forecasts of ensemble-ml predict are read")
    starts = np.unique(data["forecast_reference_time"].values)
    if len(starts) != 1 or starts.dtype.kind != "M":
        what = f"{len(starts)} start dates" if len(starts) != 1 else "no date"
        raise UserError(f"{path}: forecast_reference_time holds {what}; give a file for each start date")
    return starts[0].astype("datetime64[ns]")


def lead_hours(data: xr.Dataset, path: Path) -> list[int]:
    """Lead times in whole hours."""
    if "time" not in data.variables:
        raise UserError(f"{path}: no time; only forecasts of ensemble-ml predict are read")
    return hours_of(np.atleast_1d(data["time"].values).astype("datetime64[ns]"), data, path)


def hours_of(times: np.ndarray, data: xr.Dataset, path: Path) -> list[Any]:
    """Whole hours since the start, nested like `times`; kept as floating days they are off by seconds."""
    hours = (times - reference_time(data, path)) / np.timedelta64(1, "h")
    if (np.abs(hours - np.rint(hours)) > 1 / 60).any():
        raise UserError(f"{path}: time: only whole hours of lead time are read")
    return np.rint(hours).astype(int).tolist()


def levels_of(data: xr.Dataset) -> list[int]:
    """Pressure levels in hPa; none where there is no such axis."""
    if "level" not in data.variables:
        return []
    values, units = np.atleast_1d(data["level"].values).astype(np.float64), data["level"].attrs.get("units")
    pascal = values.max() > LOWEST_PASCAL if units is None else units in PASCAL
    return [round(level) for level in (values * (0.01 if pascal else 1.0)).tolist()]


def variables_of(data: xr.Dataset) -> dict[str, tuple[int | None, ...]]:
    """Names of what can be scored, and its levels; (None,) at the surface."""
    found: dict[str, tuple[int | None, ...]] = {}
    for full_name, array in data.data_vars.items():
        for part in ("location", "mean", "ensemble_spread"):
            name = str(full_name).removesuffix(f"_{part}")
            if full_name in KNOWN and name != full_name and "latitude" in array.dims:
                one = "level" in array.coords and name not in _AT_THE_SURFACE  # a level that was chosen
                found[name] = tuple(levels_of(data)) if "level" in array.dims or one else (None,)
    return found


def grid_of(data: xr.Dataset, path: Path) -> tuple[Grid, np.ndarray, np.ndarray]:
    """The grid as `grid.canonical` orders it, and the rows and columns of the file that come so."""
    missing = [name for name in ("latitude", "longitude") if name not in data.dims]
    if missing:
        has = ", ".join(map(str, data.dims))
        raise UserError(
            f"{path}: not on a grid (no dimension {missing[0]}; it has {has}); evaluate needs forecasts without points="
        )
    return canonical(data["latitude"].values, data["longitude"].values)


def numbers_of(data: xr.Dataset) -> tuple[str, ...]:
    """Members that a file says it was made from, numbers as the ensemble has them (06 is 6)."""
    words = str(data.attrs.get("members_in", "")).replace(",", " ").split()
    return tuple(str(int(word)) if word.isdecimal() else word for word in words)


def dates_of(data: xr.Dataset, path: Path, name: str) -> np.ndarray:
    """Dates of an attribute; none where it is absent."""
    text = str(data.attrs.get(name, ""))
    try:
        return np.array(text.split(), "datetime64[ns]")
    except ValueError as error:
        raise UserError(f"{path}: {name} is no list of ISO dates ({error}); give fit=[...]") from error
