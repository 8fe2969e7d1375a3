"""What the attributes and coordinates of a data variable may state of a field. All else leaves the variable out.

Each list here is of what is known. A standard name, a scalar coordinate or a grid mapping that is on none of them may
make the values another quantity (its error, a percentile of it, soil at a depth), so the variable is left out by name.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import xarray as xr

from data_prep.axes import ALIASES, SHARES, VALID, OfSomethingElse, find_axis
from data_prep.grib_fields import PROCESSED_DATA, PRODUCT_TEMPLATES, STREAMS, levels_of
from ensemble_ml.fields import FIELDS, GUST, Field

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
_OVER_TIME = {"max", "maximum", "min", "minimum", "mean", "avg", "average", "averaged"}
_OTHER = {  # words of names that make a statistic of a variable, or another quantity with its units
    *_OVER_TIME, "median", "spread", "std", "stdev", "stddev", "sd", "deviation", "variance", "range",
    "anomaly", "anomalies", "anom", "bias", "clim", "climate", "climatology", "climatological", "diff", "difference",
    "error", "err", "rmse", "uncertainty", "increment", "tendency", "trend", "apparent", "feels", "chill", "perceived",
    "wet", "dew", "dewpoint", "potential", "virtual", "index", "soil",
}  # fmt: skip
_SHARES = (*SHARES, "prob")
_JOINED = re.compile(r"p\d{1,2}|(?:ens|t|tas|ts|t2m|2t)(?:max|min|mean|std|avg|spread)")  # as `p90`, `tmax`, `ensmean`
_STATISTICS = ("units_metadata", "statistic", "ensemble_statistic", "cell_method")  # attributes that say one
_UNSAID = ("", "unknown", "missing", "255", "65535")  # what ecCodes and cfgrib write where a message does not say
_CODES = tuple(map(str, range(len(PROCESSED_DATA))))  # of PROCESSED_DATA in code table 1.4
_GRIB = {  # cfgrib's names of keys that tell a field of one run from others: what may stand there
    **dict.fromkeys(("dataType", "marsType", "type"), ("of type", PROCESSED_DATA)),
    "typeOfProcessedData": ("of type", (*PROCESSED_DATA, *_CODES)),
    **dict.fromkeys(("stream", "marsStream"), ("of stream", STREAMS)),
    "productDefinitionTemplateNumber": ("of product template", tuple(map(str, PRODUCT_TEMPLATES))),
    **dict.fromkeys(("percentileValue", "derivedForecast", "probabilityType"), ("", ())),
}
_OF_MESSAGES = {  # kinds of level of ecCodes, under which cfgrib leaves a scalar coordinate to all variables of a file
    *HEIGHTS, *GROUND, *_COLUMN, "isobaricInPa", "isobaricLayer", "heightAboveGroundLayer", "heightAboveSea",
    "heightAboveSeaLayer", "depthBelowLand", "depthBelowLandLayer", "depthBelowSea", "depthBelowSeaLayer", "nominalTop",
    "soil", "soilLayer", "snow", "snowLayer", "seaIce", "seaIceLayer", "oceanSurface", "entireOcean", "entireLake",
    "hybrid", "hybridLayer", "sigma", "sigmaLayer", "eta", "theta", "potentialVorticity", "pressureFromGround",
    "pressureFromGroundLayer", "tropopause", "maxWind", "isothermZero", "isothermal", "adiabaticCondensation",
    "mostUnstableParcel", "mixedLayerParcel", "mixingLayer", "cloudBase", "cloudTop", "lowCloudLayer",
    "middleCloudLayer", "mediumCloudLayer", "highCloudLayer", "lowCloudBottom", "lowCloudTop", "middleCloudBottom",
    "middleCloudTop", "highCloudBottom", "highCloudTop", "boundaryLayerCloudLayer", "convectiveCloudLayer",
    "convectiveCloudBottom", "convectiveCloudTop", "generalVertical", "generalVerticalLayer", "unknown",
}  # fmt: skip
_PLACED = ("t2m", "u10", "v10", "msl", "sp", "tp")  # names that say where the variable lies
_COUNTS = ("", "1", "-", "none", "unitless", "dimensionless", "count")  # units of an axis of members
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


def other_word(text: str, field: Field, *, over_time: bool = False) -> str:
    """Return the first word of a name or description that makes another quantity of `field`; empty where none does.

    Words that the registry itself has for a variable say nothing against it: `mean` of mean sea level pressure.

    Args:
        text: the name or description.
        field: what it is taken for.
        over_time: whether means and extremes over time are looked at elsewhere.
    """
    letters = f"_{_letters(re.sub('(?<=[a-z0-9])(?=[A-Z])', '_', text))}_"
    usual = {"mean_sea"}
    for other in FIELDS:
        usual |= _names(other) if other.standard_name == field.standard_name else set()
    for name in sorted(usual, key=len, reverse=True):
        letters = letters.replace(f"_{name}_", "_")
    allowed = _OVER_TIME if over_time else {"max", "maximum"} if field.standard_name == GUST else set()
    for word in letters.split("_"):
        if word not in allowed and (word.rstrip("s") in _SHARES or word in _OTHER or _JOINED.fullmatch(word)):
            return word
    return ""


def other_description(array: xr.DataArray, field: Field, *, over_time: bool) -> str:
    """Return which attribute describes another quantity than `field`, as a percentile or spread of it; empty where none
    does (see `other_word`)."""
    for key in ("long_name", *_STATISTICS):
        text = str(array.attrs.get(key, ""))
        if other_word(text, field, over_time=over_time and key == "long_name"):
            return f"{key} {text!r}"
    return ""


def other_message(array: xr.DataArray) -> str:
    """Return which of cfgrib's attributes says that values are no field of one run; empty where none does."""
    for key, (what, known) in _GRIB.items():
        said = str(array.attrs.get(f"GRIB_{key}", ""))
        if said not in (*_UNSAID, *known):
            return f"{what or f'GRIB_{key}'} {said}"
    return ""


def other_members(axis: xr.DataArray | None) -> str:
    """Return why the axis that is taken for members has something else, as percentiles; empty where it may be one."""
    if axis is None:
        return ""
    units = str(axis.attrs.get("units", "")).strip()
    if units.lower() not in _COUNTS:
        return f"{axis.name} in {units}"
    words = _letters(f"{axis.name} {axis.attrs.get('long_name', '')} {axis.attrs.get('standard_name', '')}").split("_")
    share = next((word for word in words if word.rstrip("s") in _SHARES), "")
    return f"{axis.name} is a {share}" if share else ""


def other_kind_of_level(array: xr.DataArray, field: Field) -> str:
    """Return the kind of level that a surface variable is on by its GRIB message, if not one of its own; else nothing.

    Its height is looked at elsewhere.
    """
    kind = str(array.attrs.get("GRIB_typeOfLevel", ""))
    known = {one.split()[0] for one in levels_of(field)}
    return "" if kind in ("", *known) else f"typeOfLevel {kind}"


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


def other_place(array: xr.DataArray, field: Field, *, upper: bool, placed: bool) -> str:
    """Return the coordinate of one value that puts `field` elsewhere, or makes another quantity of it; empty where
    none does.

    Args:
        array: the data variable.
        field: what it is by its names.
        upper: whether it has an axis of pressure levels, and heights are those of other variables of the file.
        placed: whether its name or GRIB parameter says where it lies, and other kinds of level are those of others.
    """
    sized = [dim for dim in array.dims if array.sizes[dim] > 1]
    for name, axis in array.coords.items():
        if axis.ndim == 1 and name not in axis.dims and (reason := _other_along(name, axis, field, upper=upper)):
            return reason
        if axis.size != 1 or set(axis.dims) & set(sized) or _is_plain(array, name, axis, field):
            continue
        shared = placed and not axis.dims
        if is_height(axis) and (upper or _is_near(axis, _NEAR if shared else heights_of(field) or _NEAR)):
            continue
        if shared and name in _OF_MESSAGES - set(HEIGHTS):
            continue
        return f"{name} {axis.values.item():g}" if axis.dtype.kind in "iuf" else f"{name} {axis.values.ravel()[0]}"
    for dim in array.dims:
        if dim not in array.coords and array.sizes[dim] == 1 and dim not in _PLAIN | set(HEIGHTS):
            return f"axis {dim}"
    return ""


def _is_near(axis: xr.DataArray, heights: set[float]) -> bool:
    return str(axis.attrs.get("units", "")) in _METRES and set(axis.values.ravel().tolist()) <= heights


def _other_along(name: Hashable, axis: xr.DataArray, field: Field, *, upper: bool) -> str:
    """Return what a coordinate along another one makes of `field`: percentiles along time, other heights; else nothing.

    Most say something of the axis that they lie along, as its months do.
    """
    words = _letters(f"{name} {axis.attrs.get('standard_name', '')}").split("_")
    of_height = is_height(axis) and not (upper or _is_near(axis, heights_of(field) or _NEAR))
    if of_height or "depth" in words or any(word.rstrip("s") in _SHARES for word in words):
        shown = ", ".join(f"{value:g}" if axis.dtype.kind in "iuf" else str(value) for value in axis.values[:3])
        return f"{name} {shown}"
    return ""


def is_placed(array: xr.DataArray, field: Field, named: Field | None) -> bool:
    """Return whether a surface variable says where it lies, by its GRIB parameter or a name of the registry.

    Args:
        array: the data variable.
        field: what it is.
        named: what its name alone is; None where the registry does not have it.
    """
    if not field.surface or other_kind_of_level(array, field):
        return False
    if named is not None and named.name in _PLACED:
        return True
    return "GRIB_typeOfLevel" in array.attrs and int(array.attrs.get("GRIB_paramId", 0)) in field.param_ids


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
        kinds = [_mapping(data, name, of_degrees=_in_degrees(array)) for name in names]
    for kind in kinds:
        if kind != _GEOGRAPHIC:
            text = f"{array.name}: is on the grid mapping {kind}; only fields on latitudes and longitudes are read"
            raise OfSomethingElse(text, f"grid mapping {kind}")


def _in_degrees(array: xr.DataArray) -> bool:
    """Return whether axes of one dimension are latitude and longitude by CF's names or units, not those of a rotated
    pole."""
    for role, unit in (("latitude", "n"), ("longitude", "e")):
        axis = find_axis(array, role)
        if axis is None or axis.ndim != 1:
            return False
        by_units = re.fullmatch(rf"deg(ree)?s?_?{unit}\w*", _letters(axis.attrs.get("units", ""))) is not None
        if axis.attrs.get("standard_name", role if by_units else "") != role:
            return False
    return True


def _mapping(data: xr.Dataset, name: Hashable, *, of_degrees: bool = False) -> str:
    """Return the kind of a grid mapping; its own name where nobody knows it.

    Args:
        data: the file.
        name: the variable that describes the mapping.
        of_degrees: whether axes say that they are geographic, and a mapping that says nothing does not matter.
    """
    if name not in data.variables:  # a choice of variables may have left it behind
        return _GEOGRAPHIC if name in _PLAIN or of_degrees else str(name)
    about = data.variables[name].attrs
    text = str(about.get("crs_wkt", about.get("spatial_ref", ""))).strip().upper()
    if "grid_mapping_name" in about:
        return str(about["grid_mapping_name"]).lower()
    short = " ".join(str(about.get(key, "")) for key in ("epsg_code", "epsg", "proj4", "proj4text", "spatial_ref"))
    if re.fullmatch(r"(EPSG:|\+INIT=EPSG:)?4326|\+PROJ=(LONGLAT|LATLONG)\b(?!.*O_PROJ).*", short.strip().upper()):
        return _GEOGRAPHIC
    if of_degrees and not (text or short.strip()):
        return _GEOGRAPHIC
    geographic = text.startswith(("GEOGCS", "GEOGCRS", "GEOGRAPHICCRS")) and "DERIVINGCONVERSION" not in text
    return _GEOGRAPHIC if geographic or (not text and name == _GEOGRAPHIC) else str(name)
