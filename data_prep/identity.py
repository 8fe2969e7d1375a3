"""The identity of data variables in NetCDF and Zarr: the registry's variable, its units, and whether it has members.

Names, GRIB parameters and CF standard names identify a variable. A variable that an attribute contradicts is left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from data_prep.axes import READ, OfSomethingElse, find_axis, lead_of_valid_time, understood
from data_prep.cell_bounds import hours_of_sum, is_mean_rate, method, other_quantity
from data_prep.grib_fields import UNSTATED_SUBCENTRES
from data_prep.no_field import (
    GROUND,
    described,
    flags,
    has_modifier,
    heights_of,
    is_height,
    is_placed,
    other_description,
    other_kind_of_level,
    other_members,
    other_message,
    other_place,
    other_standard_name,
    other_title,
    other_word,
)
from data_prep.records import FIELD_INDEX, GEOPOTENTIAL_UNITS, OTHER_UNITS, Origin
from data_prep.spelling import Spelling, may_be_height, spell
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, Field, by_param_id, resolve
from ensemble_ml.units import GRAVITY, rate_conversion, unit_conversion

_ALTITUDES = ("surface_altitude", "surface_geopotential")
_ISOBARIC = ("isobaricInhPa", "isobaricInPa")
_ALOFT_TOO = ("dew_point_temperature", "dewpoint_temperature")  # names of variables near the ground and on levels
_LOW = 10.0  # m
_TOP = re.compile(r"surface|orograph|terrain|topograph|altitude")
_ALOFT = re.compile(r"isobar|pressure|hpa|\bmb\b|trop|level")


@dataclass(frozen=True)
class Overrides:
    """The user's statements on variables of NetCDF and Zarr files, each by the registry's name of the variable.

    Attributes:
        names: the variable's name in the files.
        units: its units, for files that state none, or none that are known. A forecast that states others is refused; a
            truth keeps those that it states.
        intervals: the hours that its sums cover up to each time, or `FROM_START`, for files that state none. Files that
            state others are refused.
        truth_intervals: the same for the truth.
        forecast: whether the files are those of a forecast.
    """

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    units: Mapping[str, str] = dataclasses.field(default_factory=dict)
    intervals: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    truth_intervals: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    forecast: bool = True

    @classmethod
    def of(cls, settings: Any) -> Overrides:
        """Return the statements among the settings of a task."""
        of_truth = getattr(settings, "truth_intervals", {})  # `predict` reads no truth
        return cls(settings.names, settings.units, settings.intervals, of_truth)

    def of_truth(self) -> Overrides:
        """Return the statements on the truth."""
        return dataclasses.replace(self, intervals=self.truth_intervals, forecast=False)

    def of_static(self) -> Overrides:
        """Return the statements on static fields, which are no sums."""
        return dataclasses.replace(self, intervals={}, forecast=False)

    def field_of(self, name: Hashable) -> Field | None:
        """Return the registry's entry for the variable `name` of a file, or None if nothing is stated about it."""
        for ours, theirs in self.names.items():
            if theirs == name:
                return FIELDS[FIELD_INDEX[ours]]
        return None


NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class Identity:
    """The result of identifying a data variable. Without a `field` it is left out.

    `reason` says why it is left out; messages add it to the variable's name. `level` is the pressure level in the name,
    in hPa, or 0 if the name has none. `elsewhere` marks a variable of the registry that is left out only because of a
    coordinate, which may belong to other variables of the file.
    """

    field: Field | None
    reason: str = ""
    level: int = 0
    elsewhere: bool = False


def grib_type(array: xr.DataArray) -> str:
    """Return cfgrib's GRIB_dataType, such as pf for a perturbed member and cf for the control.

    It is empty for several members, because joined arrays keep the type of the first.
    """
    members = find_axis(array, "member")
    return str(array.attrs.get("GRIB_dataType", "")) if members is None or members.size == 1 else ""


def numbered(array: xr.DataArray, members: xr.DataArray | None) -> bool:
    """Return whether a variable states that it has members.

    cfgrib gives a deterministic run of edition 1 the number 0 in an ensemble of size 0.
    """
    kind = grib_type(array)
    deterministic = kind not in ("", "cf", "pf") and members is not None and members.size == 1
    return kind == "cf" or (members is not None and not (deterministic and array.attrs.get("GRIB_totalNumber") == 0))


def variables_with_members(data: xr.Dataset, overrides: Overrides = NO_OVERRIDES) -> dict[str, Hashable]:
    """Return the registry's variables that a file has for numbered members, with the data variable for each."""
    found: dict[str, Hashable] = {}
    for name, array in data.data_vars.items():
        with understood(name):
            if array.ndim > 1 and find_axis(array, "member") is not None:
                field = identify(data, array, overrides).field
                found |= {} if field is None else {field.name: name}
    return found


def is_of_no_member(array: xr.DataArray) -> bool:
    """Return whether a variable has no axis of members, and is no control forecast of GRIB."""
    return find_axis(array, "member") is None and grib_type(array) != "cf"


def with_units(data: xr.Dataset, overrides: Overrides) -> xr.Dataset:
    """Return a Dataset in which variables that state no units have those that the user states of them.

    Only units tell a mean rate from a sum, so they have to be there before variables are identified.
    """
    given = {}
    lacking = [array for array in data.data_vars.values() if not str(array.attrs.get("units", "")).strip()]
    for array, (ours, units) in product(lacking, overrides.units.items()):
        stated = array.assign_attrs(units=units)
        with understood(array.name):
            field = identify(data, stated, overrides).field
        if field is not None and field.name == ours:
            given[array.name] = stated
    return data.assign(given)


def other_sums(data: xr.Dataset, overrides: Overrides = NO_OVERRIDES) -> dict[str, str]:
    """Return variables that repeat a quantity as sums over other hours or as a mean rate, with the one that is read.

    Of several sums, the one that states no hours is read; else that over the shortest time between leads; else the
    shortest. A mean rate is read only if there is no sum. If any has members, those without are not compared.
    """
    sums: dict[str, dict[int, str]] = {}
    rates: dict[str, str] = {}
    with_members = variables_with_members(data, overrides)
    for name in sorted(map(str, data.data_vars)):
        with understood(name):
            field = identify(data, data[name], overrides).field
            if field is not None and field.name in with_members and is_of_no_member(data[name]):
                continue  # a mean over the members must not be read in their place
            if field is not None and field.accumulated and _convertible(data[name], field):
                if is_mean_rate(data[name], field):
                    rates[name] = field.name
                else:
                    sums.setdefault(field.name, {}).setdefault(hours_of_sum(data[name]), name)
    found: dict[str, str] = {}
    for quantity, named in sums.items():
        kept = next(iter(named.values()))
        if len(named) > 1:
            lead = find_axis(data[named[max(named)]], "lead")
            apart = int(np.diff(np.sort(READ["lead"](lead))).min()) if lead is not None and lead.size > 1 else 0
            kept = named[0] if 0 in named else named[apart if apart in named else min(named)]
        repeated = [*named.values(), *(name for name, one in rates.items() if one == quantity)]
        found |= {name: kept for name in repeated if name != kept}
    return found


def _convertible(array: xr.DataArray, field: Field) -> bool:
    """Return whether a variable's units, if it states any, are those of a sum or of a mean rate."""
    try:
        conversion(array, field, str(array.attrs.get("units", "")).strip())
    except OfSomethingElse:
        return False
    return True


def _of_the_ground(array: xr.DataArray) -> bool:
    """Return whether geopotential without pressure levels is that of the ground, which is a single field.

    A coordinate, the level of its GRIB message or one of its names must state the ground, because a file of one
    pressure level may state no level at all. The orography may have one time (as from the Climate Data Store), and
    members and leads (in merged files).
    """
    words = " ".join(str(array.attrs.get(name, "")) for name in ("long_name", "standard_name")) + f" {array.name}"
    words = words.lower().replace("_", " ")
    named = _TOP.search(words) is not None and _ALOFT.search(words) is None
    placed = any(
        axis.name in GROUND or (is_height(axis) and axis.size == 1 and not axis.values.item())
        for axis in array.coords.values()
    )
    in_grib = array.attrs.get("GRIB_typeOfLevel") == "surface" or "GRIB_surface" in array.attrs
    axes = {"init": find_axis(array, "init"), "lead": find_axis(array, "lead")}
    lead_of_valid_time(array, axes)
    several = axes["init"] is not None and axes["init"].size > 1
    return (named or placed or in_grib) and not several


def _of_soil(array: xr.DataArray) -> bool:
    """Return whether a variable's names are those of soil.

    ecCodes gives the temperature of the first soil layer the CF name of the surface temperature.
    """
    said = str(array.attrs.get("long_name", "")).lower()
    return "soil" in said or re.fullmatch(r"i?stl\d", str(array.name)) is not None


def _by_parameter(array: xr.DataArray) -> tuple[int, Field | None]:
    """Return the GRIB parameter of a variable, 0 if it has none, and the registry's entry for it."""
    number = int(array.attrs.get("GRIB_paramId", 0))
    return number, by_param_id(number)


def _named(array: xr.DataArray, spelling: Spelling) -> Field | None:
    """Return the registry's entry for a data variable by its name, its GRIB parameter, or its CF standard name."""
    number, of_number = _by_parameter(array)
    if spelling.field is not None and of_number is not None and of_number.surface:
        # A short name such as "t" may be used at several heights. The GRIB parameter of 2 m temperature is not.
        return of_number if _same_quantity(spelling.field, of_number) else spelling.field
    if spelling.field is not None or of_number is not None:
        return spelling.field or of_number
    if number or _of_soil(array):
        return None  # ecCodes gives maxima and soil layers the standard name of the plain quantity
    standard = str(array.attrs.get("standard_name", "")).strip()
    try:
        return resolve(standard)
    except UserError:
        rates = (one for one in FIELDS if standard in one.rates and is_mean_rate(array, one))
        return next(rates, None)


def identify(data: xr.Dataset, array: xr.DataArray, overrides: Overrides = NO_OVERRIDES) -> Identity:
    """Identify a data variable by the user's statements, its name, GRIB parameter or standard name."""
    stated, spelling = overrides.field_of(array.name), spell(array.name)
    field = stated or _named(array, spelling)
    if field is None:
        return Identity(None)
    # The orography may be called z, and then only its standard name tells it from geopotential.
    if field.name == "z" and array.attrs.get("standard_name") in _ALTITUDES:
        field = FIELDS[FIELD_INDEX["orog"]]
    other = overrides.names.get(field.name)
    # The user chose another variable of the file for this field, so this one must not take its place.
    if other in data and other != array.name:
        return Identity(None, f" (names= states that {other} is {field.name})")
    if reason := _no_field(data, array, field) or ("" if stated else _contradicted(array, field, spelling)):
        return Identity(None, f" ({reason})")
    if reason := other_quantity(data, array, field):
        return Identity(None, reason)
    return _placed(data, array, field, spelling)


def _no_field(data: xr.Dataset, array: xr.DataArray, field: Field) -> str:
    """Return why values cannot be a field of one run, whatever their name; empty if they can."""
    axis = find_axis(array, "member")
    if reason := other_message(array) or other_members(axis) or other_title(data, array):
        return reason
    if array.name in described(data):
        return "describes another variable"
    if flags(array, field):
        return "flags"
    return f"standard_name {array.attrs['standard_name']}" if has_modifier(array) else ""


def _contradicted(array: xr.DataArray, field: Field, spelling: Spelling) -> str:
    """Return the attribute that contradicts that a variable is `field`; empty if none does."""
    number, of_number = _by_parameter(array)
    if number and (of_number is None or not _same_quantity(of_number, field)):
        return f"GRIB_paramId {number}"
    if reason := other_standard_name(array, field):
        return reason
    if spelling.field is None:  # a name that the registry has needs no such check
        for key, text in (("name", str(array.name)), ("short_name", str(array.attrs.get("short_name", "")))):
            if word := other_word(text, field):
                return f"{word} by its {key}"
    known = spelling.field is not None and bool(method(array))  # means and extremes are checked with their intervals
    return other_description(array, field, over_time=known)


def _same_quantity(one: Field, other: Field) -> bool:
    """Return whether two variables are the same quantity, perhaps at different heights."""
    heights = {"z", "orog"}  # GRIB has the orography as geopotential of the surface
    return one.standard_name == other.standard_name or {one.name, other.name} <= heights


def _placed(data: xr.Dataset, array: xr.DataArray, field: Field, spelling: Spelling) -> Identity:
    """Return the identity of `field` by where it lies: on levels, on the level in its name, or near the ground."""
    axis = find_axis(array, "level")
    upper = not (field.surface or field.static)
    on_levels, placed = upper and axis is not None and axis.size > 1, is_placed(array, field, spelling.field)
    if reason := other_place(array, field, upper=on_levels, placed=placed):
        return Identity(None, f" ({reason})", elsewhere=True)
    kind = array.attrs.get("GRIB_typeOfLevel")
    # A pressure level under the name of a surface variable is recognised by its kind of level in `_at_surface`.
    if not upper:
        if axis is not None and not placed and spelling.stem in _ALOFT_TOO:
            return Identity(None, " (on pressure levels)")
        return _at_surface(array, field)
    if spelling.height is not None:
        near = spelling.height in heights_of(field)
        at = {spelling.height}
        return _near_ground(array, field, at) if near else Identity(None, f" (at {spelling.height:g} m)")
    if spelling.level:
        return _on_named_level(data, field, spelling, axis)
    if axis is not None:
        other = kind not in (None, *_ISOBARIC)
        return Identity(None, f" (typeOfLevel {kind})") if other else Identity(field)
    if field.name == "z" and _of_the_ground(array):
        return _at_surface(array, FIELDS[FIELD_INDEX["orog"]])
    grounds = [one for one in array.coords.values() if one.size == 1 and (one.name in GROUND or is_height(one))]
    at = {float(one.values.item()) for one in grounds if is_height(one)}
    return _near_ground(array, field, at) if grounds else Identity(None, " (no pressure level)")


def _at_surface(array: xr.DataArray, field: Field) -> Identity:
    """Return the identity of a surface variable, if its GRIB message is on one of the variable's kinds of level."""
    other = other_kind_of_level(array, field)
    return Identity(None, f" ({other})") if other else Identity(field)


def _near_ground(array: xr.DataArray, field: Field, heights: set[float]) -> Identity:
    """Return the surface variable of a quantity, such as air temperature at 2 m, if there is exactly one.

    The variable lies at `heights` above ground (m). Without any, or with 0 m alone, it is one near it, up to 10 m,
    unless it is of a GRIB message at the surface.
    """
    surface = [one for one in FIELDS if one.surface and one.standard_name == field.standard_name]
    stated = heights - {0.0}
    # The parameter of the air in a GRIB message at the surface itself, such as NCEP's TMP, is that of the skin.
    if not stated and (kind := array.attrs.get("GRIB_typeOfLevel")) in GROUND:
        return Identity(None, f" (typeOfLevel {kind})")
    near = [one for one in surface if (heights_of(one) & stated if stated else max(heights_of(one), default=0) <= _LOW)]
    return _at_surface(array, near[0]) if len(near) == 1 else Identity(None, " (no pressure level)")


def _on_named_level(data: xr.Dataset, field: Field, spelling: Spelling, axis: xr.DataArray | None) -> Identity:
    """Return the identity of a variable whose name states its pressure level, e.g. z500."""
    if axis is not None and np.any(READ["level"](axis) != spelling.level):
        return Identity(None, f" ({spelling.level} hPa by its name, another level by {axis.name})")
    if may_be_height(spelling, data.data_vars):
        names = f"{spelling.stem}_{spelling.level}hpa or {spelling.stem}_{spelling.level}m"
        return Identity(None, f" ({spelling.level} may be hPa or m: rename it to {names})")
    return Identity(field, level=spelling.level)


class NoUnits(OfSomethingElse):
    """An error for a variable of the registry without units, if nothing else determines them."""

    def __init__(self, array: xr.DataArray, field: Field):
        super().__init__(f"{array.name}: has no units; give 'units={{{field.name}: {field.units}}}'", "no units")
        self.name, self.field = str(array.name), field


def units_of(array: xr.DataArray, field: Field, overrides: Overrides = NO_OVERRIDES) -> str:
    """Return the units that a data variable or the user states; empty if neither does.

    Raises:
        UserError: both are stated for a forecast, and they differ or the user's cannot be converted.
    """
    own, given = str(array.attrs.get("units", "")).strip(), overrides.units.get(field.name, "")
    if not given or not own:
        return own or given
    try:
        stated = conversion(array, field, own)
    except UserError:
        return given
    if overrides.forecast and stated != conversion(array.assign_attrs(units=given), field, given):
        raise UserError(
            f"units={{{field.name}: {given}}}: {array.name} states units {own!r}; leave it out of units=, or mend"
            " the file"
        )
    return own


def _conversion(units: str, field: Field) -> tuple[float, float]:
    """Return factor and shift from `units` to the registry's. The orography may be given as geopotential."""
    if field.name == "orog" and units in GEOPOTENTIAL_UNITS:
        return 1 / GRAVITY, 0.0
    return unit_conversion(units, field.units)


def conversion(array: xr.DataArray, field: Field, units: str) -> tuple[float, float]:
    """Return factor and shift from the units of a data variable to those of the registry: value * factor + shift.

    From a mean rate they give the sum over one second. An empty text of units stands for the registry's.

    Raises:
        OfSomethingElse: the units cannot be converted.
    """
    rate = rate_conversion(units, field.units) if is_mean_rate(array, field) else None
    if rate is not None:
        return rate, 0.0
    try:
        return _conversion(units or field.units, field)
    except UserError as error:
        raise OfSomethingElse(f"{array.name}: {error}", f"{OTHER_UNITS}{units}") from error


def origin_of(data: xr.Dataset, array: xr.DataArray) -> Origin:
    """Return the producer of a variable, from the attributes that cfgrib and other programs write."""

    def stated(*names: str) -> str:
        texts = [str(about[name]).strip() for about in (array.attrs, data.attrs) for name in names if name in about]
        return next((text for text in texts if text), "")

    experiment = stated("GRIB_experimentVersionNumber", "GRIB_expver", "expver")
    if not experiment and "expver" in array.coords:  # of ERA5 or its preliminary ERA5T
        versions = np.unique(array.coords["expver"].values.astype(str))
        experiment = versions[0] if versions.size == 1 else ""
    if experiment.isdigit():
        experiment = experiment.zfill(4)  # as in GRIB
    subcentre = stated("GRIB_subCentre")
    subcentre = "" if subcentre in UNSTATED_SUBCENTRES else subcentre
    return Origin(stated("GRIB_centre"), subcentre, stated("GRIB_class"), experiment, stated("institution"))
