"""Units of variables that state none: those that the convention of their names fixes, where their values agree.

WeatherBench 2 leaves out the units of what it derived, earth2studio those of everything. Both, and ECMWF's short names,
mean the units of the registry. Other programs write the same names with degrees Celsius, hectopascal, millimetres or
metres of height, so values are looked at before the units are taken.
"""

from __future__ import annotations

import numpy as np

from data_prep.spelling import Spelling
from ensemble_ml.fields import FIELDS, GRAVITY, Field
from ensemble_ml.grid import Grid

_NAMES = {
    *(field.name for field in FIELDS if not field.static),
    "2t", "10u", "10v", "10si", "si10", "10fg", "u10m", "v10m", "fg10m",
    "temperature", "geopotential", "u_component_of_wind", "v_component_of_wind", "specific_humidity",
    "vertical_velocity", "divergence", "wind_speed", "2m_temperature", "10m_u_component_of_wind",
    "10m_v_component_of_wind", "10m_wind_speed", "mean_sea_level_pressure", "surface_pressure", "total_precipitation",
    "convective_precipitation", "total_cloud_cover", "total_column_water", "total_column_water_vapour",
    "sea_surface_temperature", "skin_temperature",
}  # fmt: skip
# What weather stays within in the registry's units, and in other units somewhere does not: narrower than the limits
# that mark missing values.
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


def has_convention(spelling: Spelling) -> bool:
    """Return whether the convention that a name belongs to fixes its units, and they are the registry's."""
    return spelling.stem in _NAMES


def agree(field: Field, values: np.ndarray, levels: np.ndarray, grid: Grid) -> bool:
    """Return whether values are those of `field` in the registry's units.

    Args:
        field: what the values are of.
        values: (Z, Y, X) of one date, member and lead.
        levels: (Z,) hPa.
        grid: that of the values. A dry region has small sums in millimetres as in metres, and all round the globe it
            rains more than a millimetre somewhere: of sums only those of the globe agree.
    """
    valid = values[np.isfinite(values)]
    if not valid.size:
        return False
    if field.name == "z":
        return _is_geopotential(values, levels)
    low, high = _RANGES[field.units]
    within = bool(low <= valid.min() and valid.max() <= high)
    if field.accumulated:
        return within and grid.wraps and valid.max() > 0
    return within


def _is_geopotential(values: np.ndarray, levels: np.ndarray) -> bool:
    """Return whether the highest level lies where the standard atmosphere has it; its height in metres would be a tenth
    of that."""
    top = int(np.argmin(levels))
    height = 44330.8 * (1 - (float(levels[top]) / 1013.25) ** 0.190263)  # m, up to 226 hPa, and near enough above
    expected = GRAVITY * height
    return bool(abs(float(np.nanmean(values[top])) - expected) < 0.3 * expected + 500)
