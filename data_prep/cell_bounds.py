"""Find the time intervals that values of NetCDF files and Zarr stores cover, and their statistic over time.

The statistic follows from CF cell methods or ecCodes' stepType. The length of an interval follows from the bounds of
any time coordinate: the lead, the valid time beside it (with one or two dimensions), or a coordinate with a single
value if a file holds one lead. WeatherBench 2 states it in the name of the variable; cfgrib, dynamical.org and the
Datasets of this package state it in attributes.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping

import numpy as np
import xarray as xr

from data_prep.axes import ALIASES, ROUNDING, START, VALID, OfSomethingElse, find_axis, to_hours
from data_prep.grib_fields import GUST_HOURS
from data_prep.records import OF_STEP_TYPE, other_step_type
from data_prep.spelling import hours_in_text, spell
from ensemble_ml.errors import UserError
from ensemble_ml.fields import GUST, Field
from ensemble_ml.units import rate_conversion

_READ = "point", "sum", "mean", "maximum", "minimum"  # cell methods
_OF_CELLS = "area", "lat", "lon", "latitude", "longitude"  # the value of a model cell is a mean over these anyway
_METHOD = re.compile(r"((?:\w+\s*:\s*)+)(\w+)((?:\s+(?:where|within|over)\s+\w+)*)")
_SINCE = re.compile(r"\bsince (?:the )?(?:previous|last) (?:forecast step|step|post-processing|output)\b", re.I)
_MASKED = {"sst": ("sea", "ocean", "ice_free_sea"), "lsm": ("land",)}  # area types that a variable implies
_STEP_TYPES = {  # other spellings -> ecCodes'
    "instantaneous": "instant", "accumulated": "accum", "accumulation": "accum", "sum": "accum",
    "mean": "avg", "average": "avg", "maximum": "max", "minimum": "min",
}  # fmt: skip


def hours_of_sum(array: xr.DataArray) -> int:
    """Return the hours that a sum covers, by its name or its attributes; 0 if neither states them.

    Raises:
        UserError: name and attributes state different hours, or the units of the lead are not known.
    """
    stated = {"name": {spell(array.name).hours}, "GRIB_stepRange": _hours_of_range(array)}
    for attribute in ("long_name", "GRIB_name", "description", "comment"):
        remark = attribute in ("description", "comment")
        stated[attribute] = hours_in_text(str(array.attrs.get(attribute, "")), remark=remark)
    # A place that states no hours contributes a 0.
    hours = set().union(*stated.values()) - {0}
    if len(hours) > 1:
        said = " and ".join(f"{one} h" for one in sorted(hours))
        places = " and ".join(place for place, some in stated.items() if some - {0})
        verb = "call" if " and " in places else "calls"
        raise UserError(f"{array.name}: {places} {verb} it a sum over {said}; leave the right one in them")
    return next(iter(hours), 0)


def hours_of_gust(array: xr.DataArray) -> int:
    """Return the hours over which a gust is the largest, by ECMWF's names and parameters; 0 if they do not say."""
    named = re.fullmatch(r"10fg([1-9]\d?)|fg10_([1-9]\d?)", str(array.name))
    if named is not None:
        return int(named[1] or named[2])
    return GUST_HOURS.get(int(array.attrs.get("GRIB_paramId", 0)), 0)


def _hours_of_range(array: xr.DataArray) -> set[int]:
    """Return the hours of the range of steps that cfgrib copies from a GRIB message; an empty set if there are none.

    The attribute is valid only if there is a single lead: in a file that was joined from several, it is that of the
    first.
    """
    lead = find_axis(array, "lead")
    if lead is None or lead.size != 1:
        return set()
    end = float(np.ravel(to_hours(lead.values, lead))[0])
    if parts := re.fullmatch(r"(\d+)-(\d+)", str(array.attrs.get("GRIB_stepRange", ""))):
        # A range that does not end at the lead belongs to another message.
        return {int(parts[2]) - int(parts[1])} if int(parts[2]) == end else set()
    length = str(array.attrs.get("GRIB_lengthOfTimeRange", ""))
    units = str(array.attrs.get("GRIB_indicatorOfUnitForTimeRange", "h"))
    return {int(length)} if length.isdigit() and units in ("1", "h") else set()


def over_intervals(array: xr.DataArray, field: Field) -> bool:
    """Return whether values cover intervals and not moments.

    Hours that the variable states decide; without them, CF cell_methods; without these, the registry. Bounds of an axis
    do not decide, because they apply to all variables of a file, and some of these may be moments.
    """
    if "lead_bounds_hours" in array.attrs or (field.accumulated and hours_of_sum(array)) or _periods(array):
        return True
    found = _methods(array)
    return found != {"point"} if found else field.accumulated or field.standard_name == GUST


def is_mean_rate(array: xr.DataArray, field: Field) -> bool:
    """Return whether values are the mean rate over an interval of a variable that is a sum, by units and method.

    The mean rate times the length of its interval is the sum. An instantaneous rate gives no sum.
    """
    units = str(array.attrs.get("units", ""))
    return field.accumulated and rate_conversion(units, field.units) is not None and method(array) == "mean"


def method(array: xr.DataArray) -> str:
    """Return the method over time that values state, such as mean or maximum; an empty text if they state none.

    A single CF cell method decides; without one, or with several, ecCodes' stepType.
    """
    said = _methods(array) - {"point", "sum"}
    return next(iter(said)) if len(said) == 1 else OF_STEP_TYPE.get(_step_type(array), "")


def other_quantity(data: xr.Dataset, array: xr.DataArray, field: Field) -> str:
    """Return why values are not those of the variable, although they have its name. The text is empty if they are.

    A range or a standard deviation over time is another quantity, and so is any statistic of all members. Means and
    extremes over time are read if bounds state their interval, which cfgrib never does. Maxima of gusts and mean rates
    of sums pass without bounds.
    """
    if reason := _other_cells(array, field):
        return f" ({reason})"
    # A mean or an extreme over members is not a member.
    of_members = _methods(array, "member") - {"point"}
    if of_members:
        return f" ({sorted(of_members)[0]} over members)"
    methods = _methods(array)
    strange = methods - set(_READ)
    if strange:
        return f" ({sorted(strange)[0]} over time)"
    if is_mean_rate(array, field):
        return ""
    kind = _step_type(array)
    said = sorted(methods - {"point"})
    if len(said) > 1:
        return f" ({' and '.join(said)} over time)"
    if "sum" in said and not field.accumulated:
        return " (the sum over time)"
    if field.accumulated and (other := sorted(methods - {"point", "sum"})):
        return f" (the {other[0]} over time and not the sum)"
    if not said and (of_kind := other_step_type(kind, field)):
        return f" ({of_kind})"
    if field.standard_name == GUST and (of_gust := set(said) | {OF_STEP_TYPE.get(kind, "maximum")}) != {"maximum"}:
        return f" (the {sorted(of_gust - {'maximum'})[0]} over time and not the maximum)"
    named = "GRIB_stepType" if "GRIB_stepType" in array.attrs else "step_type"
    if kind in OF_STEP_TYPE and not over_intervals(array, field):
        return f" ({named} {kind}, over an interval that is not stated)"
    if (
        not said
        or field.accumulated
        or field.standard_name == GUST
        or any(_bounds(axis) in data for axis in _times(array))
    ):
        return ""
    return f" ({said[0]} over time, over an interval that is not stated)"


def _cell_methods(array: xr.DataArray) -> tuple[list[tuple[set[str], str, str]], str]:
    """Return the CF cell methods of a variable, and the rest of the attribute that does not have their form.

    Each method is a triple: its axes, its name, and the words that follow, such as `where sea` or `within days`.
    """
    # CF allows comments in parentheses, which state no method.
    text = re.sub(r"\([^)]*\)", " ", str(array.attrs.get("cell_methods", "")).lower())
    found = []
    for axes, method, more in _METHOD.findall(text):
        found.append((set(axes.replace(":", " ").split()), method, " ".join(more.split())))
    return found, _METHOD.sub("", text).strip()


def _other_cells(array: xr.DataArray, field: Field) -> str:
    """Return why values are not those of whole cells at a time; the text is empty if they are.

    The reason is a climatology, a part of each cell, cell_methods that cannot be parsed, or a statistic over cells
    other than the mean or over an axis that fields do not have.
    """
    methods, rest = _cell_methods(array)
    if rest:
        return f"cell_methods {array.attrs['cell_methods']!r}"
    for axis in array.coords.values():
        if "climatology" in axis.attrs or "climatology" in axis.encoding:
            return "of a climatology"
    usual = {name for role in ("init", "lead", "member") for name in ALIASES[role]}
    for axes, method, more in methods:
        kind, _, of = more.partition(" ")
        if kind in ("within", "over"):
            return f"{method} over time, of a climatology"
        if kind == "where" and of not in _MASKED.get(field.name, ()):
            return f"{method} {more}"
        strange = sorted(axes - usual - (set(_OF_CELLS) if method == "mean" else set()))
        if strange and method != "point" and (method in _READ or not axes & usual):
            return f"{method} over {strange[0]}"
    return ""


def _methods(array: xr.DataArray, *roles: str) -> set[str]:
    """Return the CF cell methods over the axes of `roles`, or over time if none is given."""
    names = {name for role in roles or ("init", "lead") for name in ALIASES[role]}
    return {method for axes, method, _ in _cell_methods(array)[0] if names & axes}


def _step_type(array: xr.DataArray) -> str:
    """Return ecCodes' stepType of a variable, as cfgrib and other programs write it."""
    said = str(array.attrs.get("GRIB_stepType", array.attrs.get("step_type", "")))
    return _STEP_TYPES.get(said, said)


def _bounds(axis: xr.DataArray) -> str:
    """Return the name of the bounds of a coordinate, or an empty text."""
    return str(axis.attrs.get("bounds", axis.encoding.get("bounds", "")))


def widths(
    data: xr.Dataset, array: xr.DataArray, field: Field, places: Mapping[Hashable, np.ndarray]
) -> np.ndarray | None:
    """Return the hours that each of N fields' values cover, (N,) int32; None if nothing states them.

    `places` holds for each dimension the positions of the fields along it.

    Raises:
        OfSomethingElse: the variable is a sum, the file lacks the bounds that its time names, and nothing else states
            the hours; it is a mean or sum since the model's previous step, which the file does not tell; or its comment
            leaves out an hour of the day.
        UserError: an interval does not end at its coordinate or has no whole hours, bounds are not a pair for each
            value, or the variable's name or attributes state other hours than the bounds or than each other.
    """
    own = _own_intervals(array, places)
    if own is None:
        own = _by_hour_of_day(array, places)
    if own is not None:
        return own
    named = hours_of_sum(array) if field.accumulated else 0
    gust = hours_of_gust(array) if field.standard_name == GUST else 0
    absent = ""
    along = np.zeros(next(iter(places.values())).shape if places else 1, np.int32)
    for axis in _times(array):
        name = _bounds(axis)
        if name not in data:
            absent = absent or name
            continue
        bounds = _as_decoded(data[name].values, axis)
        if bounds.shape != (*axis.shape, 2):
            raise UserError(f"{axis.name}: its bounds {name} are not two for each of its values; shape {bounds.shape}")
        # A value is stored at the lead at which its interval ends, so the coordinate has to be that end.
        if (np.abs(to_hours(bounds[..., 1] - axis.values, axis)) > ROUNDING).any():
            raise UserError(
                f"{axis.name}: its bounds {name} end elsewhere than at the coordinate; only values of an interval that"
                " ends there are read: let the coordinate be the end of each interval"
            )
        lengths = bounds[..., 1] - bounds[..., 0]  # of valid times, or of leads in their own units
        exact = to_hours(lengths, axis)
        hours = np.rint(exact).astype(np.int32)
        if (np.abs(exact - hours) > ROUNDING).any() or (hours < 0).any():
            raise UserError(f"{axis.name}: its bounds {name} are not whole hours apart, from the first to the second")
        wrong = np.atleast_1d(hours)
        wrong = wrong[(wrong != named) & (wrong > 0) & (named > 0)]
        if wrong.size:
            raise UserError(
                f"{array.name}: is a sum over {named} h by its name, and over {wrong[0]} h by the bounds {name} of"
                f" {axis.name}; mend one of them"
            )
        # Widths are known along the axes of this coordinate. Each field takes the one at its own position.
        return _at_places(hours, axis, places)
    if absent and field.accumulated and not named:
        text = f"{array.name}: a sum whose time has the bounds {absent}, which the file lacks; add them"
        raise OfSomethingElse(text, f"its bounds {absent} are not in the file")
    if named or gust:
        return np.int32(named or gust) + along
    return _since_previous_step(data, array, field, places)


def _as_decoded(bounds: np.ndarray, axis: xr.DataArray) -> np.ndarray:
    """Return the bounds of a coordinate in the type of the coordinate.

    xarray converts the numbers of a lead to time differences by its units. Bounds have no units of their own and stay
    numbers.
    """
    if not np.issubdtype(axis.dtype, np.timedelta64) or np.issubdtype(bounds.dtype, np.timedelta64):
        return bounds
    units = xr.DataArray(0, name=axis.name, attrs={"units": axis.encoding.get("units", "")})
    return np.rint(to_hours(bounds, units) * 3600).astype("timedelta64[s]")


def _periods(array: xr.DataArray) -> dict[int, int]:
    """Return the hours that values cover by the hour of the day at which they end; empty if a comment states none.

    dynamical.org writes of GEFS: "Average value in the last 6 hour period (00, 06, 12, 18 UTC) or 3 hour period (03,
    09, 15, 21 UTC)."
    """
    said = re.findall(r"(\d+)[\s-]hour period \(((?:\d\d,? )+)UTC\)", str(array.attrs.get("comment", "")))
    return {int(hour): int(length) for length, hours in said for hour in re.findall(r"\d\d", hours)}


def _by_hour_of_day(array: xr.DataArray, places: Mapping[Hashable, np.ndarray]) -> np.ndarray | None:
    """Return the hours that each field's values cover, (N,) int32, by the time of day; None if none are stated."""
    periods, init, lead = _periods(array), find_axis(array, "init"), find_axis(array, "lead")
    if not periods or init is None or lead is None:
        return None
    leads = np.rint(to_hours(lead.values, lead)).astype(int)
    hour = _at_places(leads, lead, places)
    start = _at_places(init.values.astype("datetime64[h]").astype(int), init, places)
    ends = ((start + hour) % 24).tolist()
    if not set(ends) <= set(periods):
        text = f"{array.name}: its comment says over which hours values are at some hours of the day only"
        raise OfSomethingElse(text, "over hours that its comment does not say")
    # No interval begins before the forecast.
    return np.minimum([periods[end] for end in ends], hour).astype(np.int32)


def _since_previous_step(
    data: xr.Dataset, array: xr.DataArray, field: Field, places: Mapping[Hashable, np.ndarray]
) -> np.ndarray | None:
    """Return the hours, (N,) int32, since the model's step before; None if values are not said to be since then.

    For extremes, the result is also None if nothing states the steps; means and sums are then refused.

    The distance of two leads of the file is not what counts, because leads may have been left out. dynamical.org states
    the model's steps in the attribute `forecast_resolution` of its archives.
    """
    lead = find_axis(array, "lead")
    said = " ".join(str(array.attrs.get(name, "")) for name in ("long_name", "comment"))
    if lead is None or not _SINCE.search(said):
        return None
    hours = np.rint(np.atleast_1d(to_hours(lead.values, lead))).astype(int)
    steps = _model_steps(str(data.attrs.get("forecast_resolution", "")))
    lengths = [_step_before(hour, steps) for hour in hours.tolist()]
    if None in lengths:
        kind = "mean" if method(array) == "mean" else "sum"
        if kind == "sum" and not field.accumulated:  # the largest value since then is read without its interval, too
            return None
        said = "previous step, of which nothing states the hours"
        raise OfSomethingElse(f"{array.name}: a {kind} since the model's {said}; leave it out", f"since the {said}")
    return _at_places(np.array(lengths, np.int32), lead, places)


def _model_steps(text: str) -> list[tuple[int, int, int]]:
    """Parse a text like "Forecast step 0-144 hours: 3 hourly, 144-360 hours: 6 hourly".

    Each stretch gives its first hour, its last hour and the hours of a step.
    """
    found = re.findall(r"(?:(\d+)-(\d+) hours: )?(?:(\d+) )?hourly", text)
    return [(int(first or 0), int(last or 10**6), int(hours or 1)) for first, last, hours in found]


def _step_before(hour: int, steps: list[tuple[int, int, int]]) -> int | None:
    """Return the hours from the model's step before to a lead, 0 at the start; None if the lead is no step."""
    for first, last, length in steps:
        if hour <= last:
            return min(length, hour) if (hour - first) % length == 0 else None
    return None


def _own_intervals(array: xr.DataArray, places: Mapping[Hashable, np.ndarray]) -> np.ndarray | None:
    """Return the hours that each field's values cover, (N,) int32, as the Datasets of this package state them.

    `store.xarray_engine` writes `lead_bounds_hours = "none 0-24 24-48"`. Each interval ends at its lead, so the text
    stays valid if leads are left out. The result is None if nothing is stated.
    """
    said, lead = array.attrs.get("lead_bounds_hours"), find_axis(array, "lead")
    if said is None or lead is None:
        return None
    # Hours of a truth are negative, as in "-6-0", so the last hyphen parts them.
    pairs = [[int(hour) for hour in pair.rsplit("-", 1)] for pair in str(said).split() if pair != "none"]
    # An interval is found by the lead at which it ends.
    length = {last: last - first for first, last in pairs}
    hours = np.rint(np.atleast_1d(to_hours(lead.values, lead))).astype(int)
    return _at_places(np.array([length.get(hour, 0) for hour in hours.tolist()], np.int32), lead, places)


def _at_places(values: np.ndarray, axis: xr.DataArray, places: Mapping[Hashable, np.ndarray]) -> np.ndarray:
    """Return the value that each of the N fields has among the integers along a coordinate, (N,)."""
    along = np.zeros(next(iter(places.values())).shape if places else 1, np.int32)
    return np.reshape(values, axis.shape)[tuple(places.get(dim, along) for dim in axis.dims)] + along


def _times(array: xr.DataArray) -> list[xr.DataArray]:
    """Return the coordinates that hold the lead or the valid time, leads first."""
    found = []
    for role, names in (("forecast_period", ALIASES["lead"]), ("time", VALID)):
        for axis in array.coords.values():
            standard = axis.attrs.get("standard_name")
            if standard == role or (axis.name in names and standard != START):
                found.append(axis)
    return found
