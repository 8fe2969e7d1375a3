"""What the attributes and coordinates of a data variable may state of a field. All else leaves the variable out.

Each list here is of what is known. A standard name, a scalar coordinate or a grid mapping that is on none of them may
make the values another quantity (its error, a percentile of it, soil at a depth), so the variable is left out by name.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import xarray as xr

from data_prep.axes import ALIASES, VALID, OfSomethingElse
from ensemble_ml.fields import FIELDS, Field

HEIGHTS = ("height", "heightAboveGround", "height_above_ground", "height_agl")  # coordinates of one value, in m
GROUND = ("surface", "meanSea")
_COLUMN = ("entireAtmosphere", "atmosphere", "atmosphereSingleLayer")
_SCREEN = 1.5  # m: where the Met Office has what others have at 2 m
_METRES = ("", "m", "metre", "metres", "meter", "meters")
_NEAR = {0.0, _SCREEN, 2.0, 10.0}  # m: of other variables of the file, that share its scalar coordinates
_PLAIN = {  # coordinates of one value that make no other quantity of a field
    *(name for names in ALIASES.values() for name in names), *VALID, *GROUND, *_COLUMN,
    "expver", "crs", "spatial_ref", "latitude_longitude", "expected_forecast_length", "ingested_forecast_length",
}  # fmt: skip
_ROLES = {"forecast_reference_time", "forecast_period", "realization", "air_pressure", "latitude", "longitude", "time"}
_AREA_TYPES = ("type", "area_type", "typeland")  # of static fields, as CMIP writes them
_FLAGS = ("flag_values", "flag_masks", "flag_meanings")
_MEASURES = ("ancillary_variables", "cell_measures")  # attributes that name variables which describe others
_GEOGRAPHIC = "latitude_longitude"
_NAMELESS = ("", "unknown", "none")  # cfgrib and WeatherBench 2 write "unknown"
_OF_GROUND = ("geopotential_height", "geopotential", "height")  # ecCodes calls the orography of others by the first


def described(data: xr.Dataset) -> set[str]:
    """Return the names of variables that describe others: their errors, counts, flags, and areas of their cells."""
    names: set[str] = set()
    for array in data.variables.values():
        for attribute in _MEASURES:
            names |= set(str(array.attrs.get(attribute, array.encoding.get(attribute, ""))).replace(":", " ").split())
    return names


def _letters(text: Any) -> str:
    return re.sub(r"[^a-z0-9]+", "_", str(text).lower()).strip("_")


def _names(field: Field) -> set[str]:
    return {_letters(name) for name in (field.name, field.standard_name, field.long_name, *field.aliases)}


def other_standard_name(array: xr.DataArray, field: Field) -> str:
    """Return why the standard name is not that of `field`; empty where it is, or says nothing.

    CF's modifiers (`air_temperature standard_error`) make another quantity. Text that only spells the variable in
    another way passes; a surface variable may have the name of what it is at the surface.
    """
    text = str(array.attrs.get("standard_name", "")).strip()
    names = _names(field)
    if field.surface:
        for other in FIELDS:
            if other.standard_name == field.standard_name:
                names |= _names(other)
    if field.name == "orog":
        names |= set(_OF_GROUND)
    if "GRIB_paramId" in array.attrs:  # which was compared
        names |= {_letters(array.attrs.get(key, "")) for key in ("GRIB_name", "GRIB_shortName")}
    return "" if _letters(text) in {*names, *_NAMELESS} else f"standard_name {text}"


def has_modifier(array: xr.DataArray) -> bool:
    """Return whether a standard name has one of CF's modifiers behind it."""
    modifiers = ("detection_minimum", "number_of_observations", "standard_error", "status_flag")
    return str(array.attrs.get("standard_name", "")).strip().endswith(tuple(f" {one}" for one in modifiers))


def is_height(axis: xr.DataArray) -> bool:
    """Return whether a coordinate is a height above ground."""
    return axis.name in HEIGHTS or axis.attrs.get("standard_name") == "height"


def heights_of(field: Field) -> set[float]:
    """Return the heights at which the surface variables of a quantity lie, in m; empty where they have none."""
    heights = set()
    for other in FIELDS:
        if other.surface and other.standard_name == field.standard_name and (number := re.sub(r"\D", "", other.name)):
            heights.add(float(number))
    return heights | ({_SCREEN} if 2.0 in heights else set())


def other_place(array: xr.DataArray, field: Field, *, upper: bool) -> str:
    """Return the coordinate of one value that puts `field` elsewhere, or makes another quantity of it; empty where
    none does.

    Args:
        array: the data variable.
        field: what it is by its names.
        upper: whether it has an axis of pressure levels, and heights are those of other variables of the file.
    """
    sized = [dim for dim in array.dims if array.sizes[dim] > 1]
    for name, axis in array.coords.items():
        if axis.size != 1 or set(axis.dims) & set(sized) or _is_plain(array, name, axis, field):
            continue
        if is_height(axis) and str(axis.attrs.get("units", "")) in _METRES:
            near = heights_of(field) or _NEAR
            if upper or axis.values.item() in near:
                continue
        return f"{name} {axis.values.item():g}" if axis.dtype.kind in "iuf" else f"{name} {axis.values.ravel()[0]}"
    for dim in array.dims:
        if dim not in array.coords and array.sizes[dim] == 1 and dim not in _PLAIN | set(HEIGHTS):
            return f"axis {dim}"
    return ""


def _is_plain(array: xr.DataArray, name: Hashable, axis: xr.DataArray, field: Field) -> bool:
    about: Mapping[str, Any] = axis.attrs
    mapping = "grid_mapping_name" in about or "crs_wkt" in about
    along_known = bool(axis.dims) and name not in axis.dims  # says something of an axis of length one
    of_area = field.static and name in _AREA_TYPES
    return name in _PLAIN or about.get("standard_name") in _ROLES or mapping or along_known or of_area


def flags(array: xr.DataArray, field: Field) -> bool:
    """Return whether values are marks that attributes explain. Those of the land mask are the field."""
    return field.name != "lsm" and any(name in array.attrs for name in _FLAGS)


def check_mapping(data: xr.Dataset, array: xr.DataArray) -> None:
    """Check that a variable lies on latitudes and longitudes by its grid mapping, or by none.

    A variable that names no mapping has that of the file, where the file has one.

    Raises:
        OfSomethingElse: it is on another grid, or on one that nobody knows.
    """
    words = str(array.attrs.get("grid_mapping", array.encoding.get("grid_mapping", "")))
    # CF's long form names the coordinates behind each mapping: "crs: latitude longitude".
    names = re.findall(r"(\w+)\s*:", words) or words.split()
    if not names:
        every = [_mapping(data, name) for name, one in data.variables.items() if "grid_mapping_name" in one.attrs]
        kinds = [] if _GEOGRAPHIC in every else every
    else:
        kinds = [_mapping(data, name) for name in names]
    for kind in kinds:
        if kind != _GEOGRAPHIC:
            text = f"{array.name}: is on the grid mapping {kind}; only fields on latitudes and longitudes are read"
            raise OfSomethingElse(text, f"grid mapping {kind}")


def _mapping(data: xr.Dataset, name: Hashable) -> str:
    if name not in data.variables:  # a choice of variables may have left it behind
        return _GEOGRAPHIC if name in _PLAIN else str(name)
    about = data.variables[name].attrs
    text = str(about.get("crs_wkt", about.get("spatial_ref", ""))).strip().upper()
    if "grid_mapping_name" in about:
        return str(about["grid_mapping_name"])
    geographic = text.startswith(("GEOGCS", "GEOGCRS", "GEOGRAPHICCRS")) and "DERIVINGCONVERSION" not in text
    return _GEOGRAPHIC if geographic or (not text and name == _GEOGRAPHIC) else str(name)
