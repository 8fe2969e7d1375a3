"""Axes of NetCDF files and Zarr stores: the names under which they occur, and their values in the program's units.

CF's standard names come first, then names that are common in archives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import xarray as xr

from ensemble_ml.errors import UserError
from ensemble_ml.fields import AXIS_NAMES, LOWEST_PASCAL
from ensemble_ml.units import HECTOPASCAL, PASCAL

# Names of the axes in archives, in order of preference. Standard names in the attributes take precedence over them.
ALIASES = {
    "init": (
        "init_time", "forecast_reference_time", "initial_time", "reference_time", "initialization_time", "init",
        "time", "valid_time",
    ),
    "lead": (
        "lead_time", "prediction_timedelta", "forecast_period", "step", "lead", "leadtime", "fhour", "forecast_hour",
    ),
    "member": AXIS_NAMES["realization"],
    "level": AXIS_NAMES["level"],
    "latitude": AXIS_NAMES["latitude"],
    "longitude": AXIS_NAMES["longitude"],
}  # fmt: skip
_STANDARD = {
    "init": "forecast_reference_time",
    "lead": "forecast_period",
    "member": "realization",
    "level": "air_pressure",
}
START = _STANDARD["init"]
BETWEEN = -1  # stands for a level that is not a whole number of hPa, which is left out
YEAR = "year"
VALID = ("valid_time", "time")  # valid times in forecasts; they are init times only if nothing else is there
_MINUTE = 60_000  # ms
# Spellings of degrees in lower case. CF's spellings end in the letter or the word of the direction.
_DEGREES = {
    role: {"", "degrees", "degree", "deg", "\N{DEGREE SIGN}"}
    | {
        f"{unit}{gap}{end}"
        for unit in ("degree", "degrees", "deg", "\N{DEGREE SIGN}")
        for gap in ("", "_", " ")
        for end in (way, way[0])
    }
    for role, way in (("latitude", "north"), ("longitude", "east"))
}
_FEW = 3  # rows; so few may all lie within a degree and a half of the equator, and are not taken for radians
# Values along these coordinates are statistics of an ensemble, and not fields of one run.
SHARES = ("percentile", "quantile", "threshold", "probability")
ROUNDING = 1e-3  # hours: leads of some weeks in float32 days are off by about 1e-4
_HOURS = {
    "hour": 1.0, "h": 1.0, "hr": 1.0, "day": 24.0, "d": 24.0,
    "minute": 1 / 60, "min": 1 / 60, "second": 1 / 3600, "s": 1 / 3600, "nanosecond": 1 / 3.6e12,
}  # fmt: skip


class OfSomethingElse(UserError):
    """An error for a variable that cannot be read as a field of the registry, and that probably nobody asked for.

    If other variables of the file are read, only this one is left out, and `why` is noted after the variable's name.

    Args:
        text: the message if nothing else can be read.
        why: the reason for leaving the variable out.
    """

    def __init__(self, text: str, why: str):
        super().__init__(text)
        self.why = why


def find_axis(array: xr.DataArray, role: str) -> xr.DataArray | None:
    """Return the coordinate of `array` that plays a role of ALIASES, or None if no coordinate plays it.

    A CF standard name takes precedence over the names of ALIASES. Coordinates of several dimensions do not count.
    """
    standard = _STANDARD.get(role, role)
    for coordinate in array.coords.values():
        if coordinate.ndim <= 1 and coordinate.attrs.get("standard_name") == standard:
            return coordinate
    for name in ALIASES[role]:
        if name in array.coords and array.coords[name].ndim <= 1:
            found = array.coords[name]
            return _in_pressure(array, found) if role == "level" else found
    return None


def _in_pressure(array: xr.DataArray, level: xr.DataArray) -> xr.DataArray:
    """Return `level`, or a coordinate along it in units of pressure if `level` has no units."""
    if not level.attrs.get("units"):
        for other in array.coords.values():
            if other.dims == level.dims and other.ndim and other.attrs.get("units") in (*PASCAL, *HECTOPASCAL):
                return other
    return level


def with_start(data: xr.Dataset) -> xr.Dataset:
    """Return the file with init times, valid times, percentiles and the like as coordinates of its fields.

    Some files have these as variables that no `coordinates` attribute names. Percentiles must be noticed, because
    fields along them are no members.
    """
    beside = [name for name, array in data.data_vars.items() if _is_beside(array)]
    data = data.set_coords(beside) if beside else data
    starts = {name: a for name, a in data.data_vars.items() if a.attrs.get("standard_name") == START}
    # A scalar coordinate belongs to every field, but one with its own dimension of length one would belong to none.
    alone = {name: a.squeeze(drop=True) if a.size == 1 else a for name, a in starts.items()}
    return data.assign(alone).set_coords(list(alone)) if alone else data


def _is_beside(array: xr.DataArray) -> bool:
    """Return whether a variable holds valid times, or percentiles, thresholds or the like."""
    if array.name in SHARES and array.ndim <= 1:
        return True
    named = array.name == "valid_time" or array.attrs.get("standard_name") == "time"
    return named and np.issubdtype(array.dtype, np.datetime64)


def lead_of_valid_time(array: xr.DataArray, axes: dict[str, xr.DataArray | None]) -> None:
    """Set the lead to the difference of valid time and init time, if a file has both but no lead.

    A valid time has a name of `VALID`, or the CF standard name `time`. The file has one init time, or one for each
    valid time. In the second case all are at the same lead, or all from the same init time. Several init times of a
    single valid time are refused. The lead is set in `axes`; so is the init time if it turns out to be a single one.

    Raises:
        UserError: both init time and lead differ along a dimension, or a time is absent.
    """
    init = axes["init"]
    if init is None or axes["lead"] is not None or not np.issubdtype(init.dtype, np.datetime64):
        return
    named = [array.coords[name] for name in VALID if name in array.coords]
    for valid in (*named, *(axis for axis in array.coords.values() if axis.attrs.get("standard_name") == "time")):
        name = valid.name
        if name == init.name or not np.issubdtype(valid.dtype, np.datetime64) or valid.ndim > 1:
            continue
        if init.size != 1 and valid.dims != init.dims:
            if valid.size == 1:  # the leads differ from one init time to the next
                raise _both(array, init.dims[0])
            continue
        for axis in (init, valid):
            check_there(axis, np.isnat(axis.values))
        starts, times = (_to_minutes(axis.values) for axis in (init, valid))
        leads = times - (starts if valid.dims == init.dims else starts.ravel()[0])
        if valid.dims != init.dims or not init.ndim:
            axes["lead"] = xr.DataArray(leads, dims=valid.dims, name=name)
        elif (leads == leads[0]).all():
            axes["lead"] = xr.DataArray(leads[0], name=name)
        elif (starts == starts[0]).all():
            axes["init"] = xr.DataArray(starts[0], name=init.name)
            axes["lead"] = xr.DataArray(leads, dims=valid.dims, name=name)
        else:
            raise _both(array, init.dims[0])
        return


def by_hindcast_year(array: xr.DataArray) -> list[tuple[dict[Hashable, int], xr.DataArray]]:
    """Return the parts of a variable along an axis of hindcast years, each with init times of its own.

    EUPPBench's hindcasts have the date of the model's version as init time, and an axis `year` beside it. Only the
    valid time, which has that axis too, tells which dates were forecast.

    Returns:
        For each year its position along the axis, and the variable there. Without such an axis, or without init times,
        leads or valid times that fit it, the variable as it is.

    Raises:
        UserError: a valid time or lead is absent, a lead is no whole number of hours or has unknown units, or different
            leads give different init times.
    """
    valid, init, lead = array.coords.get("valid_time"), find_axis(array, "init"), find_axis(array, "lead")
    if YEAR not in array.dims or valid is None or YEAR not in valid.dims or init is None or lead is None:
        return [({}, array)]
    if init.ndim != 1 or not {YEAR, *init.dims} <= set(valid.dims) <= {YEAR, *init.dims, *lead.dims}:
        return [({}, array)]
    check_there(valid, np.isnat(valid.values))
    later = xr.DataArray((_read_lead(lead) * np.timedelta64(1, "h")).astype("timedelta64[ns]"), dims=lead.dims)
    starts = xr.DataArray(valid.values, dims=valid.dims) - later
    if lead.ndim:
        first = starts.isel({lead.dims[0]: 0})
        if (starts != first).any():
            raise UserError(f"{array.name}: {valid.name} less {lead.name} gives several init times for one forecast")
        starts = first
    starts = starts.transpose(YEAR, *init.dims)
    about = init.attrs | {"standard_name": START}
    parts: list[tuple[dict[Hashable, int], xr.DataArray]] = []
    for place, times in enumerate(starts.values):
        part = array.isel({YEAR: place}, drop=True)
        parts.append(({YEAR: place}, part.assign_coords({init.name: (init.dims, times, about)})))
    return parts


def _both(array: xr.DataArray, dimension: Hashable) -> UserError:
    """Return the error for a dimension along which both init time and lead change."""
    return UserError(f"{array.name}: dimension {dimension} carries both start and lead time; give each its own")


def untangle(array: xr.DataArray, axes: dict[str, xr.DataArray | None]) -> None:
    """Give a dimension that carries both init time and lead to one of them, in `axes`.

    The lead keeps it if all are from one init time, and the init time keeps it if all are at one lead. Valid times at
    one and the same lead become init times. The coordinate `time` counts as valid time if it shares the dimension of
    the leads, or if the file names both axes in CF's terms and the lead is a scalar. Beside another dimension of leads
    it is the init time.

    Raises:
        UserError: both differ along the dimension, valid times and several leads have dimensions of their own, or leads
            cannot be read.
    """
    init, lead = axes["init"], axes["lead"]
    if init is None or lead is None or not init.ndim or not np.issubdtype(init.dtype, np.datetime64):
        return
    later = (_read_lead(lead) * np.timedelta64(1, "h")).astype("timedelta64[ns]")
    in_cf = (init.attrs.get("standard_name"), lead.attrs.get("standard_name")) == ("time", _STANDARD["lead"])
    if (init.name == "valid_time" or (in_cf and not lead.ndim)) and init.dims != lead.dims:
        if lead.size > 1:
            raise UserError(f"{array.name}: axes {init.name} and {lead.name}: give init times beside the leads")
        if later.any():
            axes["init"] = xr.DataArray(init.values - later.reshape(()), dims=init.dims, name=init.name)
    if not lead.ndim or init.dims != lead.dims:
        return
    # An axis of valid times becomes one of init times by subtracting the lead.
    valid = init.name in VALID and init.attrs.get("standard_name") != START
    starts = _to_minutes(init.values - later if valid else init.values)
    if (starts == starts[0]).all():
        axes["init"] = xr.DataArray(starts[0])
    elif (later == later[0]).all():
        axes["init"] = xr.DataArray(starts, dims=init.dims, name=init.name)
        axes["lead"] = lead[0]
    else:
        raise _both(array, lead.dims[0])


def check_degrees(array: xr.DataArray, latitude: xr.DataArray, longitude: xr.DataArray) -> None:
    """Refuse a variable whose axes are not in degrees north and east.

    Raises:
        OfSomethingElse: one is in other units; or neither states units, and the values of both may be radians.
    """
    for role, axis in (("latitude", latitude), ("longitude", longitude)):
        units = str(axis.attrs.get("units", "")).strip()
        if units.lower() not in _DEGREES[role]:
            way = "north" if role == "latitude" else "east"
            text = f"{array.name}: {axis.name} is in {units!r}; only degrees_{way} are read: convert the axis"
            raise OfSomethingElse(text, f"{axis.name} in {units}")
    if latitude.attrs.get("units") or longitude.attrs.get("units") or latitude.size <= _FEW:
        return
    if np.abs(latitude.values).max() <= np.pi / 2 + 1e-6 and np.abs(longitude.values).max() <= 2 * np.pi + 1e-6:
        text = (
            f"{array.name}: {latitude.name} and {longitude.name} state no units, and their values may be radians; set"
            " their attribute units, to degrees_north and degrees_east"
        )
        raise OfSomethingElse(text, f"{latitude.name} without units may be in radians")


def check_valid_times(array: xr.DataArray, axes: dict[str, xr.DataArray | None]) -> None:
    """Refuse valid times that differ from init time plus lead.

    Raises:
        UserError: one differs by more than a minute, or leads cannot be read.
    """
    init, lead = axes["init"], axes["lead"]
    if init is None or lead is None or not np.issubdtype(init.dtype, np.datetime64):
        return
    hours = xr.DataArray(_read_lead(lead), dims=lead.dims)
    expected = xr.DataArray(init.values, dims=init.dims) + hours * np.timedelta64(1, "h").astype("timedelta64[ns]")
    for axis in array.coords.values():
        of_valid_time = axis.name == "valid_time" or axis.attrs.get("standard_name") == "time"
        if not of_valid_time or axis.name == init.name or not np.issubdtype(axis.dtype, np.datetime64):
            continue
        times, wanted = xr.broadcast(xr.DataArray(axis.values, dims=axis.dims), expected)
        apart = np.abs((times - wanted).values)
        wrong = apart > np.timedelta64(_MINUTE, "ms")  # false for NaT, which was never written
        if wrong.any():
            place = np.unravel_index(int(wrong.argmax()), wrong.shape)
            shown = [str(one.values[place].astype("datetime64[m]")) for one in (times, wanted)]
            raise UserError(
                f"{array.name}: {axis.name} is {shown[0]} where start and lead make {shown[1]}"
                f" ({int(wrong.sum())} of {wrong.size} times differ); mend the axes, or drop {axis.name}"
            )


def _read_init(axis: xr.DataArray | None) -> np.ndarray:
    """Return init times as datetime64[s]; without an axis, the epoch.

    Refused are absent times, and those that xarray cannot decode: of other calendars, or outside of 1678 to 2261.
    """
    if axis is None:
        return np.array(0, "datetime64[s]")
    if not np.issubdtype(axis.dtype, np.datetime64):
        first, said = axis.values.flat[0], axis.attrs | axis.encoding
        kind = getattr(first, "calendar", said.get("calendar"))  # that of cftime objects
        if kind in ("standard", "gregorian", "proleptic_gregorian") and 1678 <= getattr(first, "year", 0) <= 2261:
            raise UserError(f"{axis.name}: holds cftime objects; open the file with use_cftime=False")
        calendar = f" in the calendar {kind}" if kind else ""
        raise UserError(
            f"{axis.name}: units {said.get('units')!r}{calendar} do not make a date of the standard calendar"
        )
    check_there(axis, np.isnat(axis.values))
    return _to_minutes(axis.values)


def _to_minutes(times: np.ndarray) -> np.ndarray:
    """Return times, datetime64[s], rounded to the nearest minute if that is within 3.6 s, else to the second."""
    exact = times.astype("datetime64[ms]").astype(np.int64)
    # Times in days as floating-point numbers miss the hour by a rounding error.
    minutes = np.rint(exact / _MINUTE) * _MINUTE
    near = np.abs(exact - minutes) <= ROUNDING * 60 * _MINUTE
    seconds = np.where(near, minutes, np.rint(exact / 1000) * 1000)
    return seconds.astype(np.int64).astype("datetime64[ms]").astype("datetime64[s]")


def _read_member(axis: xr.DataArray | None) -> np.ndarray:
    """Return member numbers as int32; without an axis, 0."""
    if axis is None:
        return np.array(0)
    try:
        numbers = axis.values.astype(np.float64)
        whole = np.abs(numbers) < 2**31
        if (whole & (numbers == np.rint(numbers))).all():
            return numbers.astype(np.int32)
    except (ValueError, TypeError):
        pass
    raise UserError(f"{axis.name}: members are numbered with integers, not {axis.values.ravel()[:3]}")


def _read_lead(axis: xr.DataArray | None) -> np.ndarray:
    """Return leads as int32 hours; without an axis, 0."""
    if axis is None:
        return np.array(0)
    hours = to_hours(axis.values, axis)
    check_there(axis, ~(np.abs(hours) < 2**31))
    if (np.abs(hours - np.rint(hours)) > ROUNDING).any():
        raise UserError(f"{axis.name}: only whole hours of lead time are read")
    return np.rint(hours).astype(np.int32)


def to_hours(values: np.ndarray, axis: xr.DataArray) -> np.ndarray:
    """Return lead times as float64 hours, by the units that their axis states.

    Raises:
        UserError: the units are not known.
    """
    if np.issubdtype(values.dtype, np.timedelta64):
        return values / np.timedelta64(1, "h")
    units = str(axis.attrs.get("units", "")).lower()
    factor = _HOURS.get(units) or _HOURS.get(units.rstrip("s"))
    if factor is None:
        raise UserError(f"{axis.name}: units {units!r} of lead time; hours, days, minutes or seconds are read")
    return np.asarray(values, np.float64) * factor


def _read_level(axis: xr.DataArray | None) -> np.ndarray:
    """Return levels as int32 hPa, BETWEEN for those that are not whole; without an axis, 0."""
    if axis is None:
        return np.array(0)
    units = str(axis.attrs.get("units", "")).strip()
    values = axis.values.astype(np.float64)
    check_there(axis, ~np.isfinite(values))
    said = " ".join(str(axis.attrs.get(name, "")) for name in ("long_name", "standard_name")).replace("_", " ")
    of_model = any(words in said.lower() for words in ("model level", "sigma", "hybrid"))
    of_pressure = axis.attrs.get("standard_name") == _STANDARD["level"]
    if of_model and not of_pressure:  # with that name they are interpolated
        raise UserError(f"{axis.name}: counts model levels; only pressure levels are read")
    if not units and axis.name == "lev" and not of_pressure:
        raise UserError("lev: has no units, and may count model levels; set its attribute units, to hPa or Pa")
    # Without units, levels 1, 2, 3, ... may be numbers of model levels, unless a name states that they are pressure.
    counted = (
        not units and np.array_equal(np.sort(np.unique(values)), np.arange(1, values.size + 1)) and values.size > 1
    )
    if values.min() <= 0 or (counted and axis.name != "isobaricInhPa" and not of_pressure):
        raise UserError(
            f"{axis.name}: {values.min():g} to {values.max():g} may count levels; give it values and units of pressure"
        )
    if units in PASCAL or (not units and values.max() > LOWEST_PASCAL):
        values = values / 100
    elif units not in (*HECTOPASCAL, ""):
        raise UserError(f"{axis.name}: units {units!r} of pressure level; hPa or Pa are read")
    whole = np.abs(values - np.rint(values)) < 1e-6
    if not whole.any():
        raise UserError(f"{axis.name}: only levels of whole hPa are read")
    return np.where(whole, np.rint(values), BETWEEN).astype(np.int32)


def check_there(axis: xr.DataArray, absent: np.ndarray, how: str = "NaN") -> None:
    """Raise a UserError for an axis with absent values: it was made longer than what was written.

    `absent` is bool in the shape of the axis. `how` states in the message what stands for an absent value.
    """
    if absent.any():
        raise UserError(f"{axis.name}: {int(absent.sum())} of {axis.size} values are absent ({how}); leave them out")


READ: dict[str, Any] = {"init": _read_init, "member": _read_member, "lead": _read_lead, "level": _read_level}


@contextlib.contextmanager
def understood(name: Hashable) -> Iterator[None]:
    """Turn errors from axes or attributes that make no sense, such as a level `500hPa`, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{name}: its axes or attributes make no sense ({reason}); mend them, or leave it out"
        ) from error


def known_axes() -> str:
    """Return the table of axis names as messages show it."""
    return "; ".join(f"{role}: {', '.join(names)}" for role, names in ALIASES.items())


def dimensions(array: xr.DataArray, axes: dict[str, xr.DataArray | None]) -> dict[str, Hashable]:
    """Return the dimension of the array for each role that has one.

    Raises:
        UserError: a dimension has two roles.
        OfSomethingElse: a dimension longer than one has no known role.
    """
    every = axes | {role: find_axis(array, role) for role in ("latitude", "longitude")}
    dims = {role: axis.dims[0] for role, axis in every.items() if axis is not None and axis.ndim}
    for role, dim in dims.items():
        other = next((one for one in dims if one != role and dims[one] == dim), None)
        if other is not None:
            raise UserError(f"{array.name}: dimension {dim} carries both {role} and {other}; give each its own")
    for dim in array.dims:
        if dim in dims.values() or array.sizes[dim] == 1:
            continue
        if any(dim in names for names in ALIASES.values()) and dim not in array.coords:
            text = f"{array.name}: axis {dim} has no coordinate variable; give it one, that numbers it"
        elif dim == "expver":  # the Climate Data Store's axis of ERA5 and ERA5T
            text = (
                f"{array.name}: has ERA5 and ERA5T side by side; join them: "
                "data.sel(expver=1).combine_first(data.sel(expver=5))"
            )
        else:
            text = f"{array.name}: axis {dim} is not known; known are {known_axes()}"
        raise OfSomethingElse(text, f"axis {dim}")
    return dims
