"""The registry of variables: one short name for each, and all other names that archives use.

All files of the project name a variable by its `name` here. CF standard names are from the CF standard name table, GRIB
parameters from the ECMWF parameter database, and ENS-10's names from its own loaders (Ashkboos et al. 2022).
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial

from ensemble_ml.errors import UserError


class Family(Enum):
    """The parametric family of a variable's forecast distribution (see `ensemble_ml.distributions`)."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"  # normal distribution restricted to values above zero: wind speed, humidity
    CENSORED_NORMAL = "censored_normal"  # normal distribution with its mass below zero at zero: solar radiation, snow
    LOGNORMAL = "lognormal"  # for positive quantities with a long upper tail: humidity
    CENSORED_SHIFTED_GAMMA = "csgamma"  # gamma distribution shifted down, mass below zero at zero: precipitation
    DOUBLY_CENSORED_NORMAL = "doubly_censored_normal"  # censored normal, also with its mass above one at one: clouds

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest possible value, in the units of the variable."""
        if self is Family.NORMAL:
            return -math.inf, math.inf
        return 0.0, 1.0 if self is Family.DOUBLY_CENSORED_NORMAL else math.inf


AXIS_NAMES = {  # names of the axes in archives and forecasts, with the program's own name first
    "realization": ("realization", "number", "member", "ensemble", "ensemble_member", "ens", "sample"),
    "level": ("level", "isobaricInhPa", "plev", "pressure_level", "pressure", "air_pressure", "isobaric", "lev"),
    "latitude": ("latitude", "lat"),
    "longitude": ("longitude", "lon"),
}
LOWEST_PASCAL = 1100  # levels without units are in Pa if the largest is above this number, else in hPa
GUST = "wind_speed_of_gust"  # standard name of the only variable that is a maximum over an interval
GAMMA_SHIFT = 0.5  # shift of the censored shifted gamma distribution, in standard deviations of its gamma distribution


@dataclass(frozen=True)
class Field:
    """A variable of the registry. `units` are those of tensors, stores and forecasts, in the spelling of UDUNITS."""

    name: str
    standard_name: str
    long_name: str
    units: str
    surface: bool
    param_ids: tuple[int, ...]  # numbers in the ECMWF parameter database
    aliases: tuple[str, ...] = ()  # names in archives
    family: Family = Family.NORMAL
    vector_component: bool = False  # changes sign if a row is continued across a pole
    accumulated: bool = False  # a sum over an interval that ends at the valid time
    static: bool = False
    rates: tuple[str, ...] = ()  # CF standard names of its rate; a mean rate times the interval is the sum
    components: tuple[str, ...] = ()  # the two components of the vector whose magnitude it is
    maskable: bool = False  # has no value at some points (sea surface temperature on land), so NaN is no error

    @property
    def temperature(self) -> bool:
        """Return whether CF-1.11 asks for `units_metadata` (a temperature on a scale, or a difference of two)."""
        return self.units == "K"

    @property
    def northward(self) -> bool:
        """Return whether the variable changes sign if the field is mirrored at the equator."""
        return self.vector_component and self.standard_name.startswith("northward_")


def _field(
    surface: bool, name: str, standard_name: str, long_name: str, units: str, ids: tuple[int, ...], *aliases: str, **kw
) -> Field:
    """Return a variable at the surface or on pressure levels."""
    return Field(name, standard_name, long_name, units, surface, ids, aliases, **kw)


_pressure, _surface = partial(_field, False), partial(_field, True)
_TRUNCATED = Family.TRUNCATED_NORMAL
_CENSORED = Family.CENSORED_SHIFTED_GAMMA

# fmt: off
FIELDS: tuple[Field, ...] = (
    _pressure("t", "air_temperature", "temperature", "K", (130,), "T", "temperature", "ta"),
    _pressure("z", "geopotential", "geopotential", "m2 s-2", (129, 156), "Z", "geopotential", "gh", "zg", "geopotential_height"),
    _pressure("u", "eastward_wind", "eastward wind", "m s-1", (131,), "U", "u_component_of_wind", "ua", "wind_u", vector_component=True),
    _pressure("v", "northward_wind", "northward wind", "m s-1", (132,), "V", "v_component_of_wind", "va", "wind_v", vector_component=True),
    _pressure("q", "specific_humidity", "specific humidity", "kg kg-1", (133,), "Q", "specific_humidity", "hus", family=_TRUNCATED),
    _pressure("w", "lagrangian_tendency_of_air_pressure", "vertical velocity", "Pa s-1", (135,), "W", "vertical_velocity", "wap", "omega", "vertical_air_velocity_expressed_as_tendency_of_pressure"),
    _pressure("d", "divergence_of_wind", "divergence", "s-1", (155,), "D", "divergence"),
    _pressure("ws", "wind_speed", "wind speed", "m s-1", (10,), "wind_speed", "wspd", family=_TRUNCATED, components=("u", "v")),
    _pressure("r", "relative_humidity", "relative humidity", "1", (157,), "R", "relative_humidity", "hur", family=_TRUNCATED),
    _surface("t2m", "air_temperature", "2 metre temperature", "K", (167,), "T2M", "2t", "2m_temperature", "tas", "temperature_2m"),
    _surface("msl", "air_pressure_at_mean_sea_level", "mean sea level pressure", "Pa", (151, 260074), "MSL", "mean_sea_level_pressure", "psl", "prmsl", "air_pressure_at_sea_level", "pressure_at_mean_sea_level", "pressure_reduced_to_mean_sea_level"),
    _surface("sp", "surface_air_pressure", "surface pressure", "Pa", (134,), "SP", "surface_pressure", "ps", "pressure_surface", "pressure_at_surface"),
    _surface("u10", "eastward_wind", "10 metre eastward wind", "m s-1", (165,), "U10M", "10u", "10m_u_component_of_wind", "uas", "u10m", "wind_u_10m", vector_component=True),
    _surface("v10", "northward_wind", "10 metre northward wind", "m s-1", (166,), "V10M", "10v", "10m_v_component_of_wind", "vas", "v10m", "wind_v_10m", vector_component=True),
    _surface("ws10", "wind_speed", "10 metre wind speed", "m s-1", (207,), "10si", "si10", "10m_wind_speed", "sfcWind", "wind_speed_10m", family=_TRUNCATED, components=("u10", "v10")),
    _surface("fg10", GUST, "10 metre wind gust", "m s-1", (49, 228028, 123, 228029), "10fg", "10fg3", "10fg6", "i10fg", "fg10", "fg10_3", "fg10_6", "fg10m", family=_TRUNCATED),
    _surface("u100m", "eastward_wind", "100 metre eastward wind", "m s-1", (228246,), "100u", "100m_u_component_of_wind", "wind_u_100m", vector_component=True),
    _surface("v100m", "northward_wind", "100 metre northward wind", "m s-1", (228247,), "100v", "100m_v_component_of_wind", "wind_v_100m", vector_component=True),
    _surface("ws100m", "wind_speed", "100 metre wind speed", "m s-1", (228249,), "100si", "si100", "100m_wind_speed", "wind_speed_100m", family=_TRUNCATED, components=("u100m", "v100m")),
    _surface("d2m", "dew_point_temperature", "2 metre dew point temperature", "K", (168,), "2d", "2m_dewpoint_temperature", "dew_point_temperature_2m", "2 metre dewpoint temperature", "dewpoint_temperature", "tdps"),
    _surface("r2m", "relative_humidity", "2 metre relative humidity", "1", (260242,), "2r", "relative_humidity_2m", "2m_relative_humidity", "hurs", family=_TRUNCATED),
    _surface("tp", "lwe_thickness_of_precipitation_amount", "total precipitation", "m", (228, 228228), "TP", "total_precipitation", "pr_amount", "precipitation_amount", "precipitation", "precipitation_surface", "pr", family=_CENSORED, accumulated=True, rates=("precipitation_flux", "lwe_precipitation_rate")),
    _surface("cp", "lwe_thickness_of_convective_precipitation_amount", "convective precipitation", "m", (143, 228143), "CP", "convective_precipitation", "convective_precipitation_amount", family=_CENSORED, accumulated=True, rates=("convective_precipitation_flux", "lwe_convective_precipitation_rate")),
    _surface("sf", "lwe_thickness_of_snowfall_amount", "snowfall", "m", (144, 228144), "snowfall", family=_CENSORED, accumulated=True, rates=("snowfall_flux", "lwe_snowfall_rate")),
    _surface("ssrd", "integral_wrt_time_of_surface_downwelling_shortwave_flux_in_air", "surface short-wave radiation downwards", "J m-2", (169,), "surface_solar_radiation_downwards", "downward_short_wave_radiation_flux_surface", family=Family.CENSORED_NORMAL, accumulated=True, rates=("surface_downwelling_shortwave_flux_in_air",)),
    _surface("strd", "integral_wrt_time_of_surface_downwelling_longwave_flux_in_air", "surface long-wave radiation downwards", "J m-2", (175,), "surface_thermal_radiation_downwards", "downward_long_wave_radiation_flux_surface", family=_TRUNCATED, accumulated=True, rates=("surface_downwelling_longwave_flux_in_air",)),
    _surface("swe", "lwe_thickness_of_surface_snow_amount", "snow depth water equivalent", "m", (141, 228141), "snow_depth_water_equivalent", family=Family.CENSORED_NORMAL),
    _surface("cape", "atmosphere_convective_available_potential_energy", "convective available potential energy", "J kg-1", (59,), "CAPE", "convective_available_potential_energy", family=_CENSORED),
    _surface("tcw", "atmosphere_mass_content_of_water", "total column water", "kg m-2", (136,), "TCW", "total_column_water", family=_TRUNCATED),
    _surface("tcwv", "atmosphere_mass_content_of_water_vapor", "total column water vapour", "kg m-2", (137,), "TCWV", "total_column_water_vapour", "prw", "atmosphere_water_vapor_content", "lwe_thickness_of_atmosphere_mass_content_of_water_vapor", family=_TRUNCATED),
    _surface("tcc", "cloud_area_fraction", "total cloud cover", "1", (164, 228164), "TCC", "total_cloud_cover", "clt", "total_cloud_cover_atmosphere", family=Family.DOUBLY_CENSORED_NORMAL),
    _surface("lcc", "low_type_cloud_area_fraction", "low cloud cover", "1", (186, 3073), "low_cloud_cover", family=Family.DOUBLY_CENSORED_NORMAL),
    _surface("mcc", "medium_type_cloud_area_fraction", "medium cloud cover", "1", (187, 3074), "medium_cloud_cover", family=Family.DOUBLY_CENSORED_NORMAL),
    _surface("hcc", "high_type_cloud_area_fraction", "high cloud cover", "1", (188, 3075), "high_cloud_cover", family=Family.DOUBLY_CENSORED_NORMAL),
    _surface("swh", "sea_surface_wave_significant_height", "significant wave height", "m", (140229,), "significant_height_of_combined_wind_waves_and_swell", "hs", family=_TRUNCATED, maskable=True),
    _surface("sst", "sea_surface_temperature", "sea surface temperature", "K", (34,), "SSTK", "sstk", "sea_surface_temperature", "tos", maskable=True),
    _surface("skt", "surface_temperature", "skin temperature", "K", (235,), "SKT", "skin_temperature", "ts"),
    _surface("orog", "surface_altitude", "orography", "m", (228002,), "orography", "geopotential_at_surface", "surface_geopotential", static=True),
    _surface("lsm", "land_area_fraction", "land-sea mask", "1", (172,), "LSM", "land_sea_mask", "sftlf", "land_binary_mask", static=True),
)
# fmt: on


@cache
def _by_name() -> dict[str, Field]:
    """Return the variables by their short names."""
    return {field.name: field for field in FIELDS}


@cache
def _by_alias() -> dict[str, Field]:
    """Return the variables by all their names.

    A standard name that several variables share means the variable on pressure levels.
    """
    # Names of the registry come last, so that no alias of another variable replaces them.
    table = {alias: field for field in FIELDS for alias in (*field.aliases, field.standard_name)}
    table |= {field.standard_name: field for field in FIELDS if not field.surface}
    return table | _by_name()


@cache
def _by_param_id() -> dict[int, Field]:
    """Return the variables by their ECMWF parameter numbers."""
    return {number: field for field in FIELDS for number in field.param_ids}


def field(name: str) -> Field:
    """Return the variable with the registry's short `name`.

    Raises:
        UserError: no variable has that short name; the message suggests others.
    """
    found = _by_name().get(name)
    if found is None:
        known = _by_alias().get(name)
        raise UserError(f"variable {name}: unknown; {f'use {known.name}' if known else _suggest(name)}")
    return found


def resolve(alias: str) -> Field:
    """Return the variable that an archive calls `alias` (registry, ENS-10, cfgrib, ERA5 or CF standard name).

    Raises:
        UserError: no variable is known under that name.
    """
    found = _by_alias().get(alias)
    if found is None:
        raise UserError(f"variable {alias}: unknown; {_suggest(alias)}")
    return found


def by_param_id(number: int) -> Field | None:
    """Return the variable with the ECMWF parameter `number`, or None if the registry does not have it."""
    return _by_param_id().get(number)


def _suggest(name: str) -> str:
    """Return a hint with the nearest names, or with all names if none is near."""
    near = difflib.get_close_matches(name, list(_by_alias()), n=3)
    return f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(_by_name())}"
