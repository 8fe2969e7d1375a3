"""Physical limits of each variable, which reveal undeclared missing values and other units.

9999 and similar numbers stand for missing values in files that declare no fill value and have no bitmap. The limits are
the same for every file format. A field that exceeds them is refused and never clipped, because its other values may be
wrong as well. Heights of pressure levels are those of the ICAO Standard Atmosphere (Doc 7488).

A variable that states no units is taken to have those of the registry if its name and its values say so. WeatherBench 2
leaves out the units of the variables that it derived, and earth2studio those of all variables. Both, and ECMWF's short
names, imply the units of the registry. Other programs write the same names with degrees Celsius, hectopascal,
millimetres or metres of height. So the values are checked before the units are taken.
"""

from __future__ import annotations

import math

import numpy as np

from data_prep.records import RawField
from data_prep.spelling import Spelling
from ensemble_ml.fields import FIELDS, Field
from ensemble_ml.grid import Grid
from ensemble_ml.units import GRAVITY

# The limits for each unit admit any weather, also at 1 hPa and in deserts, and sums over weeks. They exclude -32767 and
# most values in other units. They also exclude -9999, except in geopotential, and 9999, except in geopotential and
# radiation.
_LIMITS = {
    "K": (100.0, 400.0),
    "Pa": (3e4, 1.2e5),  # at sea level, and at the surface of the highest mountains
    "m2 s-2": (-2e4, 2e6),
    "m s-1": (-500.0, 500.0),
    "kg kg-1": (-0.1, 0.5),
    "Pa s-1": (-900.0, 900.0),  # as large as for 75 m s-1 of vertical wind near the ground
    "s-1": (-1.0, 1.0),
    "m": (-0.1, 9.5),  # water
    "kg m-2": (-10.0, 500.0),
    "J m-2": (-9.9e3, 3e9),  # some weeks of sunshine
    "J kg-1": (-1.0, 9.9e3),
    "1": (0.0, 1.0),
}
_OF_NAME = {
    "orog": (-2e3, 9.5e3),
    "r": (-0.3, 3.0),  # air may be supersaturated with respect to ice; spectral models go below zero
    "r2m": (-0.3, 3.0),
    "swe": (-0.1, 100.0),  # glaciers have 10 m and more
    "swh": (-0.1, 40.0),
}
_BELOW_ZERO = {"m s-1": -0.2, "kg kg-1": -2e-3}  # interpolation makes speeds and humidities slightly negative
_AT_BOUND = 0.01  # packing steps; rounding to float32 is off by 0.002 steps
# No variable comes near this value in any units, so it is a missing value that no attribute names.
_BEYOND = 1e15
# A level may differ from its height in the standard atmosphere by these metres plus this fraction of the height.
_HEIGHT_OFF = 2000.0, 0.1
# Negative sums and fractions outside 0 to 1 are errors, except for rounding. Centres pack rain in steps of up to 0.1 mm
# (a difference of two sums is off by half a step for each) and clouds in steps of up to 1 %.
_SUM_BELOW = {"m": 1.5e-4, "J m-2": 9.9e3}
_FRACTION_BEYOND = 0.01
# Names of conventions that fix the units.
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
# Most ranges of `_LIMITS`, which recognise missing values, are wider.
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


def plausible(field: Field, step: float = 0.0, level: int = 0) -> tuple[float, float]:
    """Return the limits between which all plausible values of a variable lie, both exclusive, in the registry's units.

    Sums and fractions may be off by the packing `step` of the values, which is 0 if it is not known. `level` is in hPa,
    and 0 if the variable has no level, or for the limits of all levels.
    """
    low, high = _OF_NAME.get(field.name, _LIMITS[field.units])
    if field.name == "z" and level:
        height, (metres, share) = standard_height(level), _HEIGHT_OFF
        off = metres + share * abs(height)
        return GRAVITY * (height - off), GRAVITY * (height + off)
    if field.accumulated:
        return -max(_SUM_BELOW[field.units], step), high
    if field.units == "1":
        beyond = max(_FRACTION_BEYOND, step)
        return low - beyond, high + beyond
    return max(low, _BELOW_ZERO.get(field.units, -1.0)) if field.family.bounds[0] == 0 else low, high


def standard_height(level: float) -> float:
    """Return the height in m of a pressure level, given in hPa, in the ICAO Standard Atmosphere (Doc 7488).

    Above the lower stratosphere, the isothermal layer from 11 km is continued upwards:

        p > 226.32 hPa:  h = 44330.77 (1 - (p / 1013.25)^0.190263)
        otherwise:       h = 11000 + 6341.62 ln(226.32 / p)
    """
    if level > 226.32:
        return 44330.77 * (1 - (level / 1013.25) ** 0.190263)
    return 11000.0 + 6341.62 * math.log(226.32 / level)


def implausible(field: Field, level: int, raw: RawField, bits: int) -> str:
    """Return a message about the values of a field that are beyond the limits, or an empty text if there are none.

    `level` is in hPa, and 0 at the surface. The values of `raw` are in the registry's units. `bits` is the size of each
    packed integer, if they are packed.
    """
    low, high = plausible(field, 2 * raw.rounding, level)
    if raw.packed:
        # Mostly the smallest and largest integer that the packing can hold decode to values within the limits. Then the
        # values need not be read. Else the field's own smallest and largest integer are tried before all are decoded.
        ends = _ends(raw, 0, (1 << bits) - 1)
        if not low < ends[0] <= ends[1] < high:
            ends = _ends(raw, int(raw.values.min()), int(raw.values.max()))
        if low < ends[0] <= ends[1] < high:
            return ""
    values = raw.decode()
    bad = (values <= low) | (values >= high)  # false for NaN, which is a point without a value
    if not bad.any():
        return ""
    first = float(values[bad][0])
    return (
        f"{int(bad.sum())} of {values.size} values are not between {low:g} and {high:g} {field.units}, the first"
        f" {first:g} (a missing value that no bitmap marks, or other units?)"
    )


def _ends(raw: RawField, least: int, most: int) -> tuple[float, float]:
    """Return the decoded values of two packed integers, in ascending order."""
    ends = [(integer * raw.scale + raw.reference) * raw.decimal for integer in (least, most)]
    return min(ends), max(ends)


def on_bounds(values: np.ndarray, step: float, bounds: tuple[float, float]) -> np.ndarray:
    """Return the float32 values of a packed field, with those near a bound of the variable moved onto it.

    The packing has an integer for a bound such as zero rain or a clear sky. But its scale and offset are rounded, so
    this integer decodes to a value that differs from the bound by about 1e-17. All dry points would then lie slightly
    above or below zero. Values whose packing `step` is 0 are not packed, and are returned as they are. Infinite bounds
    are ignored.
    """
    for bound in bounds:
        if step and np.isfinite(bound):
            values = np.where(np.abs(values - bound) < _AT_BOUND * step, np.float32(bound), values)
    return values


def wrong_values(values: np.ndarray, bad: np.ndarray, low: float, high: float, units: str) -> str:
    """Return a message that says how many values of a field (Y, X) are `bad`, and what may be the cause."""
    text = f"{int(bad.sum())} of {values.size} values are NaN, infinite or beyond {_BEYOND:g}"
    if low > 0 and (values <= 0).any():
        return f"{text}, or not above 0 {units} (a missing value that no attribute declares?)"
    if ((np.abs(values) < _BEYOND) & bad).any():
        return f"{text}, or not between {low:g} and {high:g} {units} (a missing value that no attribute declares?)"
    return text


def has_convention(spelling: Spelling) -> bool:
    """Return whether a name belongs to a convention that fixes its units to those of the registry."""
    return spelling.stem in _NAMES


def agree(field: Field, values: np.ndarray, levels: np.ndarray, grid: Grid) -> bool:
    """Return whether values agree with `field` in the registry's units.

    Values of which none is finite do not agree, nor do those of a variable whose units have no range here. Sums and
    lying snow can agree only on a grid that spans all longitudes, and if one value is above zero. `values` (Z, Y, X)
    are of one init time, member and lead, and NaN is left out. `levels` are (Z,), in hPa.
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
    known = levels > 0  # levels of no whole hPa, which are left out, are -1
    if not known.any():
        return False
    top = int(np.where(known, levels, np.inf).argmin())
    expected = GRAVITY * standard_height(float(levels[top]))
    return bool(abs(float(np.nanmean(values[top])) - expected) < 0.3 * expected + 500)
