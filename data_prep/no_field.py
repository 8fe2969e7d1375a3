"""Check that a variable's attributes and coordinates allow it to be a field. Otherwise it is left out with a reason.

Coordinates, grid mappings and the values of some GRIB keys must be in lists of harmless ones, and names and
descriptions must hold no word of another quantity (a percentile, an error, soil at a depth). The attributes are those
of the CF conventions and those that cfgrib copies from GRIB messages.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

import xarray as xr

from data_prep.axes import ALIASES, SHARES, VALID, YEAR, OfSomethingElse, find_axis
from data_prep.cell_bounds import is_mean_rate
from data_prep.grib_fields import PROCESSED_DATA, PRODUCT_TEMPLATES, STREAMS, levels_of
from data_prep.notices import notice_log
from ensemble_ml.fields import FIELDS, GUST, Field

log = notice_log(__name__)

HEIGHTS = ("height", "heightAboveGround", "height_above_ground", "height_agl")  # scalar coordinates, in m
GROUND = ("surface", "meanSea")
_COLUMN = ("entireAtmosphere", "atmosphere", "atmosphereSingleLayer")
_SCREEN = 1.5  # m: the Met Office's height for variables that others have at 2 m
_METRES = ("", "m", "metre", "metres", "meter", "meters")
_NEAR = {0.0, _SCREEN, 2.0, 10.0}  # m: heights of surface variables, which may share a scalar coordinate with others
_PLAIN = {  # scalar coordinates that do not turn a field into another quantity
    *(name for names in ALIASES.values() for name in names), *VALID, *GROUND, *_COLUMN,
    "expver", "crs", "spatial_ref", "latitude_longitude", "expected_forecast_length", "ingested_forecast_length",
}  # fmt: skip
_ROLES = {"forecast_reference_time", "forecast_period", "realization", "air_pressure", "latitude", "longitude", "time"}
_AREA_TYPES = ("type", "area_type", "typeland")  # scalar coordinates of CMIP's static fields
_FLAGS = ("flag_values", "flag_masks", "flag_meanings")
_MEASURES = ("ancillary_variables", "cell_measures")  # attributes that name variables describing this one
_GEOGRAPHIC = "latitude_longitude"
_NAMELESS = ("", "unknown", "none")  # cfgrib and WeatherBench 2 write "unknown"
_OVER_TIME = {"max", "maximum", "min", "minimum", "mean", "avg", "average", "averaged"}
_OTHER = {  # words in names that mark a statistic of a variable, or another quantity with the same units
    *_OVER_TIME, "median", "spread", "std", "stdev", "stddev", "sd", "deviation", "variance", "range",
    "anomaly", "anomalies", "anom", "bias", "clim", "climate", "climatology", "climatological", "diff", "difference",
    "error", "err", "rmse", "uncertainty", "increment", "tendency", "trend", "apparent", "feels", "chill", "perceived",
    "wet", "dew", "dewpoint", "potential", "virtual", "index", "soil",
}  # fmt: skip
_SHARES = (*SHARES, "prob")
# Names that join a statistic to a variable without a separator: `p90`, `tmax`, `t2max`, `ensmean`; ECMWF's `mx2t6` and
# `mn2t`; `tx`, `tn` and `tg` of observations.
_JOINED = re.compile(
    r"p\d{1,2}|(?:ens|t|t2|tas|ts|t2m|2t)(?:max|min|mean|std|avg|spread)(?:2m)?|m[xn]2t\d*|t[xng]|mx|mn"
)
_OF_MEMBERS = {"mean", "median", "spread", "std", "stdev", "stddev", "deviation", "variance", "statistic", "statistics"}
_OF_ENSEMBLE = re.compile(
    r"\bens(?:emble)?[ _-]*(?:mean|median|spread|std|standard deviation|variance|percentile|quantile|probabilit)", re.I
)
_OTHER_GRIDS = re.compile(r"rotat|rpole|lambert|stereo|mercator|albers|healpix|geostation|sinusoid|curvilin")
_STATISTICS = ("units_metadata", "statistic", "ensemble_statistic", "cell_method")  # attributes that name a statistic
_UNSAID = ("", "unknown", "missing", "255", "65535")  # ecCodes and cfgrib write these for keys that are not stated
_CODES = tuple(map(str, range(len(PROCESSED_DATA))))  # the numbers of PROCESSED_DATA in code table 1.4
_GRIB = {  # cfgrib's attributes that distinguish a field of one run, with the values that such a field has
    **dict.fromkeys(("dataType", "marsType", "type"), ("of type", PROCESSED_DATA)),
    "typeOfProcessedData": ("of type", (*PROCESSED_DATA, *_CODES)),
    **dict.fromkeys(("stream", "marsStream"), ("of stream", STREAMS)),
    "productDefinitionTemplateNumber": ("of product template", tuple(map(str, PRODUCT_TEMPLATES))),
    **dict.fromkeys(("percentileValue", "derivedForecast", "probabilityType"), ("", ())),
}
_OF_MESSAGES = {  # ecCodes' kinds of level: cfgrib gives all variables of a file a scalar coordinate of such a name
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
_PLACED = ("t2m", "u10", "v10", "msl", "sp", "tp")  # names that imply where the variable lies
_COUNTS = ("", "1", "-", "none", "unitless", "dimensionless", "count")  # units of an axis of members
_OF_GROUND = ("geopotential_height", "geopotential", "height")  # ecCodes gives other centres' orography the first name


def described(data: xr.Dataset) -> set[str]:
    """Return the names of variables that describe others: their errors, counts, flags, and the areas of their cells."""
    names: set[str] = set()
    for array in data.variables.values():
        for attribute in _MEASURES:
            names |= set(str(array.attrs.get(attribute, array.encoding.get(attribute, ""))).replace(":", " ").split())
    return names


def _letters(text: Any) -> str:
    """Return a text in lower case, with an underscore for every run of characters other than letters and digits."""
    return re.sub(r"[^a-z0-9]+", "_", str(text).lower()).strip("_")


def _names(field: Field) -> set[str]:
    """Return all names of a variable in the registry, in the spelling of `_letters`."""
    return {_letters(name) for name in (field.name, field.standard_name, field.long_name, *field.aliases)}


def other_standard_name(array: xr.DataArray, field: Field) -> str:
    """Return the standard name if it is not that of `field`; otherwise an empty text.

    CF's modifiers (`air_temperature standard_error`) make another quantity. Other spellings of the variable's names are
    accepted. A surface variable may have the name of the quantity alone, without its height or surface.
    """
    text = str(array.attrs.get("standard_name", "")).strip()
    names = _names(field) | (set(field.rates) if is_mean_rate(array, field) else set())
    if field.surface:
        for other in FIELDS:
            if other.standard_name == field.standard_name:
                names |= _names(other)
    if field.name == "orog":
        names |= set(_OF_GROUND)
    # The GRIB parameter is checked elsewhere, so ecCodes' names for it are accepted as well as CF's.
    if "GRIB_paramId" in array.attrs:
        names |= {_letters(array.attrs.get(key, "")) for key in ("GRIB_name", "GRIB_shortName")}
    return "" if _letters(text) in {*names, *_NAMELESS} else f"standard_name {text}"


def other_word(text: str, field: Field, *, over_time: bool = False) -> str:
    """Return the first word of a name or description that makes it another quantity than `field`; empty if none does.

    Words in the registry's own names do not count, such as `mean` in mean sea level pressure. With `over_time`, words
    for means and extremes over time are accepted, because they are checked elsewhere.
    """
    # "camelCase" names are split into words first.
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
    """Return the attribute that describes another quantity than `field`, such as a percentile; empty if none does.

    `over_time` is that of `other_word`, for the long name.
    """
    for key in ("long_name", *_STATISTICS):
        text = str(array.attrs.get(key, ""))
        if other_word(text, field, over_time=over_time and key == "long_name"):
            return f"{key} {text!r}"
    return ""


def other_message(array: xr.DataArray) -> str:
    """Return the cfgrib attribute that shows that the values are not a field of one run; empty if there is none."""
    for key, (what, known) in _GRIB.items():
        said = str(array.attrs.get(f"GRIB_{key}", ""))
        if said not in (*_UNSAID, *known):
            return f"{what or f'GRIB_{key}'} {said}"
    return ""


def other_members(axis: xr.DataArray | None) -> str:
    """Return why the axis taken for members holds something else, such as percentiles; empty if it may hold members."""
    if axis is None:
        return ""
    units = str(axis.attrs.get("units", "")).strip()
    if units.lower() not in _COUNTS:
        return f"{axis.name} in {units}"
    words = _letters(f"{axis.name} {axis.attrs.get('long_name', '')} {axis.attrs.get('standard_name', '')}").split("_")
    share = next((word for word in words if word.rstrip("s") in _SHARES), "")
    if share:
        return f"{axis.name} is a {share}"
    statistic = next((word for word in words if word in _OF_MEMBERS), "flags" if _FLAGS[2] in axis.attrs else "")
    return f"{statistic} along {axis.name}" if statistic else ""


def other_title(data: xr.Dataset, array: xr.DataArray) -> str:
    """Return the title of a file if it says that it holds a statistic of all members; empty if it does not.

    A variable with an axis of members holds members, whatever the title says.
    """
    title = str(data.attrs.get("title", ""))
    of_all = find_axis(array, "member") is None and _OF_ENSEMBLE.search(title)
    return f"title {title!r}" if of_all else ""


def other_kind_of_level(array: xr.DataArray, field: Field) -> str:
    """Return the kind of level of a GRIB message if a surface variable cannot be on it; otherwise an empty text.

    The height of the level is checked elsewhere.
    """
    kind = str(array.attrs.get("GRIB_typeOfLevel", ""))
    known = {one.split()[0] for one in levels_of(field)}
    return "" if kind in ("", *known) else f"typeOfLevel {kind}"


def has_modifier(array: xr.DataArray) -> bool:
    """Return whether a standard name ends in one of CF's modifiers (CF conventions, appendix C)."""
    modifiers = ("detection_minimum", "number_of_observations", "standard_error", "status_flag")
    return str(array.attrs.get("standard_name", "")).strip().endswith(tuple(f" {one}" for one in modifiers))


def is_height(axis: xr.DataArray) -> bool:
    """Return whether a coordinate is a height above ground."""
    return axis.name in HEIGHTS or axis.attrs.get("standard_name") == "height"


def heights_of(field: Field) -> set[float]:
    """Return the heights in m of a variable: a pressure variable has those of all surface variables of its quantity.

    With 2 m, the 1.5 m of the Met Office is returned as well.
    """
    heights = set()
    for other in (field,) if field.surface else FIELDS:
        if other.surface and other.standard_name == field.standard_name and (number := re.sub(r"\D", "", other.name)):
            heights.add(float(number))
    return heights | ({_SCREEN} if 2.0 in heights else set())


def other_place(array: xr.DataArray, field: Field, *, upper: bool, placed: bool) -> str:
    """Return the scalar coordinate that puts `field` elsewhere or makes it another quantity; empty if none does.

    A scalar coordinate that belongs to another variable of the file is ignored: a height if `array` has an axis of
    pressure levels (`upper`), and one that is named after a kind of level if its name or GRIB parameter implies its
    height (`placed`).
    """
    sized = [dim for dim in array.dims if array.sizes[dim] > 1]
    for name, axis in array.coords.items():
        if axis.ndim == 1 and name not in axis.dims and (reason := _other_along(name, axis, field, upper=upper)):
            return reason
        if axis.size != 1 or set(axis.dims) & set(sized) or _is_plain(array, name, axis, field):
            continue
        shared = placed and not axis.dims
        if is_height(axis) and (upper or _is_near(axis, _heights(field, shared=shared))):
            continue
        if shared and name in _OF_MESSAGES - set(HEIGHTS):
            continue
        return f"{name} {axis.values.item():g}" if axis.dtype.kind in "iuf" else f"{name} {axis.values.ravel()[0]}"
    for dim in array.dims:
        if dim not in array.coords and array.sizes[dim] == 1 and dim not in _PLAIN | set(HEIGHTS):
            return f"axis {dim}"
    return ""


def _is_near(axis: xr.DataArray, heights: set[float]) -> bool:
    """Return whether a height is in metres and all its values are among `heights`."""
    return str(axis.attrs.get("units", "")) in _METRES and set(axis.values.ravel().tolist()) <= heights


def _heights(field: Field, *, shared: bool) -> set[float]:
    """Return the heights in m that a coordinate of a variable may have, more if others may share the coordinate."""
    own = heights_of(field)
    return own | _NEAR if shared or not own else own


def _other_along(name: Hashable, axis: xr.DataArray, field: Field, *, upper: bool) -> str:
    """Return the name and first values of a coordinate that makes `field` another quantity, as percentiles do.

    The text is empty if the coordinate only describes the axis, such as the months of its times.
    """
    words = _letters(f"{name} {axis.attrs.get('standard_name', '')}").split("_")
    of_height = is_height(axis) and not (upper or _is_near(axis, _heights(field, shared=False)))
    if of_height or "depth" in words or any(word.rstrip("s") in _SHARES for word in words):
        shown = ", ".join(f"{value:g}" if axis.dtype.kind in "iuf" else str(value) for value in axis.values[:3])
        return f"{name} {shown}"
    return ""


def is_placed(array: xr.DataArray, field: Field, named: Field | None) -> bool:
    """Return whether a surface variable implies its height, by its GRIB parameter or by one of the names in `_PLACED`.

    `named` is the variable that its name alone suggests, or None if the registry does not have the name.
    """
    if not field.surface or other_kind_of_level(array, field):
        return False
    if named is not None and named.name in _PLACED:
        return True
    return "GRIB_typeOfLevel" in array.attrs and int(array.attrs.get("GRIB_paramId", 0)) in field.param_ids


def _is_plain(array: xr.DataArray, name: Hashable, axis: xr.DataArray, field: Field) -> bool:
    """Return whether a coordinate leaves the quantity as it is: an axis, a grid mapping, or an area type."""
    about: Mapping[str, Any] = axis.attrs
    mapping = "grid_mapping_name" in about or "crs_wkt" in about
    along_known = bool(axis.dims) and name not in axis.dims  # it describes an axis of length one
    of_area = field.static and name in _AREA_TYPES
    if name == YEAR and name in array.dims and "valid_time" in array.coords:
        return name in array.coords["valid_time"].dims  # years of hindcasts (see `data_prep.axes.by_hindcast_year`)
    return name in _PLAIN or about.get("standard_name") in _ROLES or mapping or along_known or of_area


def flags(array: xr.DataArray, field: Field) -> bool:
    """Return whether values are flags that attributes explain. The flags of the land mask are the field itself."""
    return field.name != "lsm" and any(name in array.attrs for name in _FLAGS)


def check_mapping(data: xr.Dataset, array: xr.DataArray) -> None:
    """Refuse a variable whose grid mapping is not latitude and longitude.

    A variable that names no mapping is accepted if the file has none, or one of latitude and longitude.

    Raises:
        OfSomethingElse: the variable is on another grid, or on an unknown one.
    """
    words = str(array.attrs.get("grid_mapping", array.encoding.get("grid_mapping", "")))
    # CF's extended form names the coordinates after each mapping: "crs: latitude longitude".
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
    """Return whether one-dimensional axes are latitude and longitude by CF names or units; rotated ones lack those."""
    for role, unit in (("latitude", "n"), ("longitude", "e")):
        axis = find_axis(array, role)
        if axis is None or axis.ndim != 1:
            return False
        by_units = re.fullmatch(rf"deg(ree)?s?_?{unit}\w*", _letters(axis.attrs.get("units", ""))) is not None
        if axis.attrs.get("standard_name", role if by_units else "") != role:
            return False
    return True


@cache
def _note_absent(name: str) -> None:
    """Log that a grid mapping is not in the file. Log it only once, because there may be thousands of files."""
    text = "the grid mapping %s is named, but is not in the file; the axes are taken as latitude and longitude"
    log.warning(text, name)


def _mapping(data: xr.Dataset, name: Hashable, *, of_degrees: bool = False) -> str:
    """Return the kind of a grid mapping, or its name if the kind is not known.

    If the axes are known to be latitude and longitude (`of_degrees`), the mapping may be absent or empty.
    """
    if name not in data.variables:  # it may have been lost when variables were selected
        if name in _PLAIN:
            return _GEOGRAPHIC
        if not of_degrees or _OTHER_GRIDS.search(_letters(name)):
            return str(name)
        _note_absent(str(name))
        return _GEOGRAPHIC
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
