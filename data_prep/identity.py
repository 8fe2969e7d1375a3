"""Which variable of the registry a data variable of somebody else's file is, in what units, and whether of members."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr

from data_prep.axes import READ, OfSomethingElse, find_axis, lead_of_valid_time, understood
from data_prep.cell_bounds import hours_of_sum, method, other_quantity
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
    other_word,
)
from data_prep.records import FIELD_INDEX, GEOPOTENTIAL_UNITS, OTHER_UNITS
from data_prep.spelling import Spelling, may_be_height, spell
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, GRAVITY, Field, by_param_id, resolve, unit_conversion

_ALTITUDES = ("surface_altitude", "surface_geopotential")
_ISOBARIC = ("isobaricInhPa", "isobaricInPa")
_TOP = re.compile(r"surface|orograph|terrain|topograph|altitude")
_ALOFT = re.compile(r"isobar|pressure|hpa|\bmb\b|trop|level")


@dataclass(frozen=True)
class Overrides:
    """What the user states of an archive's variables, by our names: how files call them, and their units.

    Units are for variables that state none, or none that are known. Where a file of a `forecast` states others, it is
    refused; a truth that states its own keeps them.
    """

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    units: Mapping[str, str] = dataclasses.field(default_factory=dict)
    forecast: bool = True

    def field_of(self, name: Hashable) -> Field | None:
        """Return the registry's entry of the variable `name` of a file, None where nothing is stated of it."""
        for ours, theirs in self.names.items():
            if theirs == name:
                return FIELDS[FIELD_INDEX[ours]]
        return None


NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class Identity:
    """What a data variable is. Without a `field` it is left out, and `reason` stands behind its name then.

    `level` is the pressure level that its name states, in hPa; 0 where it has an axis of levels, or none. `elsewhere`
    says that it would be a variable of the registry, but for a coordinate that all variables of the file may share.
    """

    field: Field | None
    reason: str = ""
    level: int = 0
    elsewhere: bool = False


def grib_type(array: xr.DataArray) -> str:
    """cfgrib's GRIB_dataType: pf is a perturbed member, cf the control; joined arrays keep that of the first."""
    members = find_axis(array, "member")
    return str(array.attrs.get("GRIB_dataType", "")) if members is None or members.size == 1 else ""


def numbered(array: xr.DataArray, members: xr.DataArray | None) -> bool:
    """Whether a variable is of members by its own account. cfgrib gives a deterministic run of edition 1 a number 0, of
    a total of none."""
    kind = grib_type(array)
    deterministic = kind not in ("", "cf", "pf") and members is not None and members.size == 1
    return kind == "cf" or (members is not None and not (deterministic and array.attrs.get("GRIB_totalNumber") == 0))


def variables_with_members(data: xr.Dataset, overrides: Overrides = NO_OVERRIDES) -> dict[str, Hashable]:
    """Variables of the registry that a data variable has for numbered members, and that data variable."""
    found: dict[str, Hashable] = {}
    for name, array in data.data_vars.items():
        with understood(name):
            if array.ndim > 1 and find_axis(array, "member") is not None:
                field = identify(data, array, overrides).field
                found |= {} if field is None else {field.name: name}
    return found


def other_sums(data: xr.Dataset, overrides: Overrides = NO_OVERRIDES) -> dict[str, str]:
    """Variables that are sums of what another one of the file is, over other hours: name -> the one that is read.

    That is the one that says no hours; else that over the hours between leads, or the shortest.
    """
    sums: dict[str, dict[int, str]] = {}
    for name in sorted(map(str, data.data_vars)):
        with understood(name):
            field = identify(data, data[name], overrides).field
            if field is not None and field.accumulated and _convertible(data[name], field):
                sums.setdefault(field.name, {}).setdefault(hours_of_sum(data[name]), name)
    found: dict[str, str] = {}
    for named in (named for named in sums.values() if len(named) > 1):
        lead = find_axis(data[named[max(named)]], "lead")
        apart = int(np.diff(READ["lead"](lead)).min()) if lead is not None and lead.size > 1 else 0
        kept = named[0] if 0 in named else named[apart if apart in named else min(named)]
        found |= {name: kept for name in named.values() if name != kept}
    return found


def _convertible(array: xr.DataArray, field: Field) -> bool:
    """Return whether a variable's units, where it states any, are those of a sum: a rate is read by nobody."""
    try:
        conversion(array, field, str(array.attrs.get("units", "")).strip())
    except OfSomethingElse:
        return False
    return True


def _of_the_ground(array: xr.DataArray) -> bool:
    """Return whether geopotential without pressure levels is that of the ground, which is one field.

    A coordinate, the level of its GRIB message or one of its names must say so: a file of one pressure level may say
    nothing. The service gives it a time, and merged files other members and leads.
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
    """Whether a variable is one of the soil by its names: ecCodes' CF name of its first layer's temperature is that of
    the surface's."""
    said = str(array.attrs.get("long_name", "")).lower()
    return "soil" in said or re.fullmatch(r"i?stl\d", str(array.name)) is not None


def _by_parameter(array: xr.DataArray) -> tuple[int, Field | None]:
    """Return the GRIB parameter of a variable, 0 where it has none, and the registry's entry of that."""
    number = int(array.attrs.get("GRIB_paramId", 0))
    return number, by_param_id(number)


def _named(array: xr.DataArray, spelling: Spelling) -> Field | None:
    """Return the registry's entry of a data variable by its name, its GRIB parameter, or its CF standard name."""
    number, of_number = _by_parameter(array)
    if spelling.field is not None and of_number is not None and of_number.surface:
        # A short name may be shared by several places, as "t" is; the parameter of 2 m temperature is not.
        return of_number if _same_quantity(spelling.field, of_number) else spelling.field
    if spelling.field is not None or of_number is not None:
        return spelling.field or of_number
    if number or _of_soil(array):
        return None  # ecCodes gives a maximum, or a layer of soil, the standard name of what it is of
    try:
        return resolve(str(array.attrs.get("standard_name", "")).strip())
    except UserError:
        return None


def identify(data: xr.Dataset, array: xr.DataArray, overrides: Overrides = NO_OVERRIDES) -> Identity:
    """Return what a data variable is, by what the user states, its name, GRIB parameter, or standard name."""
    stated, spelling = overrides.field_of(array.name), spell(array.name)
    field = stated or _named(array, spelling)
    if field is None:
        return Identity(None)
    if field.name == "z" and array.attrs.get("standard_name") in _ALTITUDES:
        field = FIELDS[FIELD_INDEX["orog"]]
    other = overrides.names.get(field.name)
    if other in data and other != array.name:
        return Identity(None, f" (names= says that {other} is {field.name})")
    if reason := _no_field(data, array, field) or ("" if stated else _contradicted(array, field, spelling)):
        return Identity(None, f" ({reason})")
    if reason := other_quantity(data, array, field):
        return Identity(None, reason)
    return _placed(data, array, field, spelling)


def _no_field(data: xr.Dataset, array: xr.DataArray, field: Field) -> str:
    """Return why values are no field of one run, whatever they are called; empty where they may be one."""
    if reason := other_message(array) or other_members(find_axis(array, "member")):
        return reason
    if array.name in described(data):
        return "describes another variable"
    if flags(array, field):
        return "flags"
    return f"standard_name {array.attrs['standard_name']}" if has_modifier(array) else ""


def _contradicted(array: xr.DataArray, field: Field, spelling: Spelling) -> str:
    """Return which of a variable's attributes says that it is not `field`; empty where none does."""
    number, of_number = _by_parameter(array)
    if number and (of_number is None or not _same_quantity(of_number, field)):
        return f"GRIB_paramId {number}"
    if reason := other_standard_name(array, field):
        return reason
    if spelling.field is None:  # and what the registry knows of it is less than what the name says
        for key, text in (("name", str(array.name)), ("short_name", str(array.attrs.get("short_name", "")))):
            if word := other_word(text, field):
                return f"{word} by its {key}"
    known = spelling.field is not None and bool(method(array))  # means and extremes are looked at with their intervals
    return other_description(array, field, over_time=known)


def _same_quantity(one: Field, other: Field) -> bool:
    heights = {"z", "orog"}  # GRIB has the orography as geopotential of the surface
    return one.standard_name == other.standard_name or {one.name, other.name} <= heights


def _placed(data: xr.Dataset, array: xr.DataArray, field: Field, spelling: Spelling) -> Identity:
    """Return the identity of `field` where it lies: on levels, on the level of its name, or near the ground."""
    axis = find_axis(array, "level")
    upper = not (field.surface or field.static)
    on_levels, placed = upper and axis is not None and axis.size > 1, is_placed(array, field, spelling.field)
    if reason := other_place(array, field, upper=on_levels, placed=placed):
        return Identity(None, f" ({reason})", elsewhere=True)
    kind = array.attrs.get("GRIB_typeOfLevel")
    if not upper:  # one level of the air that was given the name of the surface's variable says so by its type
        return _at_surface(array, field)
    if spelling.height is not None:
        near = spelling.height in heights_of(field)
        return _near_ground(array, field) if near else Identity(None, f" (at {spelling.height:g} m)")
    if spelling.level:
        return _on_named_level(data, field, spelling, axis)
    if axis is not None:
        other = kind not in (None, *_ISOBARIC)
        return Identity(None, f" (typeOfLevel {kind})") if other else Identity(field)
    if field.name == "z" and _of_the_ground(array):
        return _at_surface(array, FIELDS[FIELD_INDEX["orog"]])
    grounds = [one for one in array.coords.values() if one.size == 1 and (one.name in GROUND or is_height(one))]
    return _near_ground(array, field) if grounds else Identity(None, " (no pressure level)")


def _at_surface(array: xr.DataArray, field: Field) -> Identity:
    """Return the identity of a surface variable, if the kind of level of its GRIB message is one of its own."""
    other = other_kind_of_level(array, field)
    return Identity(None, f" ({other})") if other else Identity(field)


def _near_ground(array: xr.DataArray, field: Field) -> Identity:
    """Return the surface variable of a quantity, as air temperature at 2 m, where there is one."""
    surface = [one for one in FIELDS if one.surface and one.standard_name == field.standard_name]
    return _at_surface(array, surface[0]) if len(surface) == 1 else Identity(None, " (no pressure level)")


def _on_named_level(data: xr.Dataset, field: Field, spelling: Spelling, axis: xr.DataArray | None) -> Identity:
    """Return the identity of a variable whose name states its pressure level, e.g. z500."""
    if axis is not None and np.any(READ["level"](axis) != spelling.level):
        return Identity(None, f" ({spelling.level} hPa by its name, another level by {axis.name})")
    if may_be_height(spelling, data.data_vars):
        return Identity(None, f" ({spelling.level} hPa or m: rename it, {spelling.stem}_{spelling.level}hpa or ..m)")
    return Identity(field, level=spelling.level)


class NoUnits(OfSomethingElse):
    """A variable of the registry states no units, and nothing else tells them."""

    def __init__(self, array: xr.DataArray, field: Field):
        super().__init__(f"{array.name}: has no units; say 'units={{{field.name}: {field.units}}}'", "no units")
        self.name, self.field = str(array.name), field


def units_of(array: xr.DataArray, field: Field, overrides: Overrides = NO_OVERRIDES) -> str:
    """Return the units of a data variable, its own or those that the user states; empty where nobody states any.

    Raises:
        UserError: both do, and they differ.
    """
    own, given = str(array.attrs.get("units", "")).strip(), overrides.units.get(field.name, "")
    if not given or not own:
        return own or given
    try:
        stated = _conversion(own, field)
    except UserError:
        return given
    if overrides.forecast and stated != _conversion(given, field):
        raise UserError(
            f"units={{{field.name}: {given}}}: {array.name} states units {own!r}; leave it out of units=, or mend"
            " the file"
        )
    return own


def _conversion(units: str, field: Field) -> tuple[float, float]:
    if field.name == "orog" and units in GEOPOTENTIAL_UNITS:
        return 1 / GRAVITY, 0.0
    return unit_conversion(units, field.units)


def conversion(array: xr.DataArray, field: Field, units: str) -> tuple[float, float]:
    """Factor and shift from `units` of a data variable to the registry's; none are the registry's.

    Raises:
        OfSomethingElse: they are another quantity's.
    """
    try:
        return _conversion(units or field.units, field)
    except UserError as error:
        raise OfSomethingElse(f"{array.name}: {error}", f"{OTHER_UNITS}{units}") from error
