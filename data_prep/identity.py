"""Which variable of the registry a data variable of somebody else's file is, in what units, and whether of members."""

from __future__ import annotations

import re
from collections.abc import Hashable

import xarray as xr

from data_prep.axes import find_axis, lead_of_valid_time, understood
from data_prep.cell_bounds import name_of_sum, other_quantity
from data_prep.records import FIELD_INDEX, GEOPOTENTIAL_UNITS, MEMBER_TYPES, OTHER_UNITS
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, GRAVITY, Field, by_param_id, resolve, unit_conversion

_HEIGHTS, _GROUND = ("height", "heightAboveGround"), ("surface", "meanSea")  # coordinates of one value
_VERTICAL = (*_HEIGHTS, "hybrid", "tropopause", "model_level_number", "depthBelowLand", "depthBelowLandLayer", "theta")


class OfSomethingElse(UserError):
    """A variable has other units, or no start date, and is most likely something that nobody asked for.

    Args:
        why: what it is listed by where others of the file are read.
    """

    def __init__(self, text: str, why: str):
        super().__init__(text)
        self.why = why


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


def variables_with_members(data: xr.Dataset) -> dict[str, Hashable]:
    """Variables of the registry that a data variable has for numbered members, and that data variable."""
    found: dict[str, Hashable] = {}
    for name, array in data.data_vars.items():
        with understood(name):
            if array.ndim > 1 and find_axis(array, "member") is not None:
                field, _ = identify(data, array)
                found |= {} if field is None else {field.name: name}
    return found


def _near_ground(array: xr.DataArray, field: Field) -> bool | None:
    """Whether a field without pressure levels lies where those of its surface variable do; None where nothing tells.

    A file of fields at 80 m, on a model level or at the tropopause says so in a coordinate of one value; one of fields
    on a single pressure level may say nothing.
    """
    told = None
    for name, axis in array.coords.items():
        vertical = axis.attrs.get("axis") == "Z" or "positive" in axis.attrs or name in (*_VERTICAL, *_GROUND)
        if axis.size != 1 or not vertical:
            continue
        usual = {re.sub(r"\D", "", f.name) for f in FIELDS if f.surface and f.standard_name == field.standard_name}
        if name not in _GROUND and (name not in _HEIGHTS or f"{axis.values.item():g}" not in usual):
            return False
        told = True
    return told


def _of_the_ground(array: xr.DataArray, near: bool | None) -> bool:
    """Whether geopotential without pressure levels is that of the ground, which is one field: the service gives it a
    time, and it stands there for members and leads only where a coordinate says that it is near the ground.
    """
    axes = {role: find_axis(array, role) for role in ("init", "member", "lead")}
    lead_of_valid_time(array, axes)
    several = {role for role, axis in axes.items() if axis is not None and axis.size > 1}
    return "init" not in several if near else not several


def _of_soil(array: xr.DataArray) -> bool:
    """Whether a variable is one of the soil by its names: ecCodes' CF name of its first layer's temperature is that of
    the surface's."""
    said = str(array.attrs.get("long_name", "")).lower()
    return "soil" in said or re.fullmatch(r"i?stl\d", str(array.name)) is not None


def identify(data: xr.Dataset, array: xr.DataArray) -> tuple[Field | None, str]:
    """The registry's entry of a data variable: by its name, its GRIB parameter, or its CF standard name.

    Where it has none, what a message says after the variable's name.
    """
    known: list[Field] = []
    number = by_param_id(int(array.attrs.get("GRIB_paramId", -1)))
    aliases = [name_of_sum(array.name)[0], str(array.attrs.get("standard_name", ""))]
    if number is None and ("GRIB_paramId" in array.attrs or _of_soil(array)):
        aliases.pop()  # ecCodes gives a maximum, or a layer of soil, the standard name of what it is of
    for alias in aliases:
        try:
            known.append(resolve(alias))
        except UserError:
            continue
    known += [number] if number else []
    if not known:
        return None, ""
    if grib_type(array) not in ("", *MEMBER_TYPES):
        return None, f" (of type {grib_type(array)})"
    first = known[0]
    if reason := other_quantity(data, array, first):
        return None, reason
    if first.surface or first.static or find_axis(array, "level") is not None:
        return first, ""
    near = _near_ground(array, first)
    if near is not False and first.name == "z" and _of_the_ground(array, near):
        return FIELDS[FIELD_INDEX["orog"]], ""
    surface = [f for f in FIELDS if f.surface and f.standard_name == first.standard_name]
    if near and len(surface) == 1:  # e.g. air_temperature at 2 m
        return surface[0], ""
    return None, " (no pressure level)" if near is None else ""


def conversion(array: xr.DataArray, field: Field) -> tuple[float, float]:
    """Factor and shift from a data variable's units to the registry's.

    Raises:
        OfSomethingElse: they are another quantity's.
        UserError: it has no units.
    """
    units = str(array.attrs.get("units", "")).strip()
    if not units and not field.static:
        raise UserError(f"{array.name}: has no units; set its attribute units, e.g. to {field.units!r}")
    if field.name == "orog" and units in GEOPOTENTIAL_UNITS:
        return 1 / GRAVITY, 0.0
    try:
        return unit_conversion(units or field.units, field.units)
    except UserError as error:
        raise OfSomethingElse(f"{array.name}: {error}", f"{OTHER_UNITS}{array.attrs.get('units')}") from error
