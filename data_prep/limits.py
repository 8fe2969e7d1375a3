"""Limits beyond which a number is no weather: 9999 and its like stand for missing values that nothing else tells of.

They hold for every format alike. A field that goes beyond them is refused, never clipped: what else is wrong with it
nobody knows.
"""

from __future__ import annotations

import math

from data_prep.records import RawField
from ensemble_ml.fields import GRAVITY, Field

# By units, beyond any weather, in deserts and at 1 hPa, and any sums over weeks. 9999, -9999 and -32767 are outside,
# and so is most of what has other units than it says.
_LIMITS = {
    "K": (100.0, 400.0),
    "Pa": (3e4, 1.2e5),  # at sea level, and of the air on the highest mountains
    "m2 s-2": (-2e4, 2e6),
    "m s-1": (-500.0, 500.0),
    "kg kg-1": (-0.1, 0.5),
    "Pa s-1": (-900.0, 900.0),  # 90 m s-1 near the ground
    "s-1": (-1.0, 1.0),
    "m": (-0.1, 9.5),  # of water
    "kg m-2": (-10.0, 500.0),
    "1": (0.0, 1.0),
}
_ALTITUDES = (-2e3, 9.5e3)  # m
_BELOW_ZERO = {"m s-1": -0.2, "kg kg-1": -2e-3}  # what interpolation makes of speeds and humidities near zero
# How far a level may lie from its height in the standard atmosphere: some metres, and a share of it.
_HEIGHT_OFF = 2000.0, 0.1
# Sums below zero and fractions beyond their ends are faults, but for what rounding makes of zero and one: centres pack
# rain in steps of up to 0.1 mm (of two sums, each is off by half a step), and clouds in steps of up to 1 %.
_SUM_BELOW = 1.5e-4  # m
_FRACTION_BEYOND = 0.01


def plausible(field: Field, step: float = 0.0, level: int = 0) -> tuple[float, float]:
    """Return what the values of a variable lie between, in its units.

    Args:
        field: the variable.
        level: its level in hPa; 0 where it has none, or all of them are meant.
        step: that of the packing which the values come from, by which they may be off; 0 where it is not known.
    """
    low, high = _ALTITUDES if field.name == "orog" else _LIMITS[field.units]
    if field.name == "z" and level:
        height, (metres, share) = standard_height(level), _HEIGHT_OFF
        off = metres + share * abs(height)
        return GRAVITY * (height - off), GRAVITY * (height + off)
    if field.accumulated:
        return -max(_SUM_BELOW, step), high
    if field.units == "1":
        beyond = max(_FRACTION_BEYOND, step)
        return low - beyond, high + beyond
    return max(low, _BELOW_ZERO.get(field.units, -1.0)) if field.family.bounds[0] == 0 else low, high


def standard_height(level: float) -> float:
    """Return the height in m of a pressure level in hPa: troposphere and lower stratosphere of the ICAO standard
    atmosphere (Doc 7488), the latter continued upwards."""
    if level > 226.32:
        return 44330.77 * (1 - (level / 1013.25) ** 0.190263)
    return 11000.0 + 6341.62 * math.log(226.32 / level)


def implausible(field: Field, level: int, raw: RawField, bits: int) -> str:
    """Return how many values of a field are beyond the limits, as a message shows it; empty if none are.

    Args:
        field: the variable.
        level: its level in hPa, 0 at the surface.
        raw: its values, in its units.
        bits: of each packed integer, if they are packed. What they can hold mostly lies within the limits, and then no
            value is looked at.
    """
    low, high = plausible(field, 2 * raw.rounding, level)
    if raw.packed:
        ends = _ends(raw, 0, (1 << bits) - 1)
        if not low < ends[0] <= ends[1] < high:
            ends = _ends(raw, int(raw.values.min()), int(raw.values.max()))
        if low < ends[0] <= ends[1] < high:
            return ""
    values = raw.decode()
    bad = (values <= low) | (values >= high)  # false of NaN, which is a point without a value
    if not bad.any():
        return ""
    first = float(values[bad][0])
    return (
        f"{int(bad.sum())} of {values.size} values are not between {low:g} and {high:g} {field.units}, the first"
        f" {first:g} (a missing value that no bitmap hides, or other units?)"
    )


def _ends(raw: RawField, least: int, most: int) -> tuple[float, float]:
    """Return the values of two packed integers, in ascending order."""
    ends = [(integer * raw.scale + raw.reference) * raw.decimal for integer in (least, most)]
    return min(ends), max(ends)
