"""Decide whether a variable that states no units has those of the registry, by its name and its values.

WeatherBench 2 leaves out the units of the variables that it derived, and earth2studio those of all variables. Both, and
ECMWF's short names, imply the units of the registry. Other programs write the same names with degrees Celsius,
hectopascal, millimetres or metres of height. So the values are checked before the units are taken.
"""

from __future__ import annotations

import numpy as np

from data_prep.limits import standard_height
from data_prep.spelling import Spelling
from ensemble_ml.fields import FIELDS, Field
from ensemble_ml.grid import Grid
from ensemble_ml.units import GRAVITY

_NAMES = {
    *(field.name for field in FIELDS if not field.static),
    "2t", "10u", "10v", "10si", "si10", "10fg", "u10m", "v10m", "fg10m",
    "temperature", "geopotential", "u_component_of_wind", "v_component_of_wind", "specific_humidity",
    "vertical_velocity", "divergence", "wind_speed", "2m_temperature", "10m_u_component_of_wind",
    "10m_v_component_of_wind", "10m_wind_speed", "mean_sea_level_pressure", "surface_pressure", "total_precipitation",
    "convective_precipitation", "total_cloud_cover", "total_column_water", "total_column_water_vapour",
    "sea_surface_temperature", "skin_temperature", "relative_humidity",
}  # fmt: skip
# In the registry's units all weather lies within these ranges, except high waves and deep snow, whose units must be
# stated. In degrees Celsius, hectopascal, g kg-1, percent or millimetres, some values of nearly every field lie beyond.
# `data_prep.limits` has ranges for another purpose, to recognise missing values; most of them are wider.
_RANGES = {
    "K": (150.0, 350.0),
    "Pa": (4e4, 1.15e5),
    "m s-1": (-200.0, 200.0),
    "kg kg-1": (-1e-3, 0.05),
    "Pa s-1": (-100.0, 100.0),
    "s-1": (-0.01, 0.01),
    "kg m-2": (-1.0, 200.0),
    "1": (-0.01, 1.01),
    "m": (-1e-4, 1.0),
}
_HUMID = (-0.1, 2.0)  # relative humidity; as a percentage it is higher somewhere in every field


def has_convention(spelling: Spelling) -> bool:
    """Return whether a name belongs to a convention that fixes its units to those of the registry."""
    return spelling.stem in _NAMES


def agree(field: Field, values: np.ndarray, levels: np.ndarray, grid: Grid) -> bool:
    """Return whether values agree with `field` in the registry's units.

    Values of which none is finite do not agree, nor do those of a variable whose units have no range here. Sums and
    lying snow can agree only on a grid that spans all longitudes, and if one value is above zero.

    Args:
        field: the variable.
        values: (Z, Y, X) of one init time, member and lead; NaN is left out.
        levels: (Z,) hPa.
        grid: the grid of the values.
    """
    valid = values[np.isfinite(values)]
    if not valid.size:
        return False
    if field.name == "z":
        return _is_geopotential(values, levels)
    if field.units not in _RANGES:
        return False
    low, high = _HUMID if field.standard_name == "relative_humidity" else _RANGES[field.units]
    within = bool(low <= valid.min() and valid.max() <= high)
    # A dry region has small sums in millimetres as well as in metres, but somewhere around the globe it always rains
    # more than a millimetre, and there lies more snow. So only fields that go all around in longitude can agree.
    if field.accumulated or field.name == "swe":
        return within and grid.wraps and valid.max() > 0
    return within


def _is_geopotential(values: np.ndarray, levels: np.ndarray) -> bool:
    """Return whether the mean over the highest level is near the level's geopotential in the standard atmosphere.

    It may differ by 30 % and 500 m2 s-2. Geopotential heights in metres would be a tenth of the geopotential.
    """
    top = int(np.argmin(levels))
    expected = GRAVITY * standard_height(float(levels[top]))
    return bool(abs(float(np.nanmean(values[top])) - expected) < 0.3 * expected + 500)
