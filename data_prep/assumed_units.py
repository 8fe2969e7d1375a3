"""Units of variables that state none: those that the convention of their names implies, if their values agree.

WeatherBench 2 leaves out the units of the variables that it derived, and earth2studio those of all variables. Both, and
ECMWF's short names, imply the units of the registry. Other programs write the same names with degrees Celsius,
hectopascal, millimetres or metres of height. So the values are checked before the units are taken.
"""

from __future__ import annotations

import numpy as np

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
# Weather stays within these ranges in the registry's units, but leaves them somewhere in other units. They are narrower
# than the limits in `data_prep.limits`, which mark missing values.
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

    Args:
        field: the variable.
        values: (Z, Y, X) of one init time, member and lead.
        levels: (Z,) hPa.
        grid: the grid of the values. A dry region has small sums in millimetres as well as in metres, but somewhere on
            the globe it always rains more than a millimetre. So only sums on grids all around the globe can agree.
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
    if field.accumulated:
        return within and grid.wraps and valid.max() > 0
    return within


def _is_geopotential(values: np.ndarray, levels: np.ndarray) -> bool:
    """Return whether the mean of the highest level is near its geopotential in the standard atmosphere.

    Its height in metres would be a tenth of that.
    """
    top = int(np.argmin(levels))
    height = 44330.8 * (1 - (float(levels[top]) / 1013.25) ** 0.190263)  # m, up to 226 hPa, and near enough above
    expected = GRAVITY * height
    return bool(abs(float(np.nanmean(values[top])) - expected) < 0.3 * expected + 500)
