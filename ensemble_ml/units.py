"""Convert units as files spell them (CF, UDUNITS and GRIB) to the units of the registry.

Spellings that archives are known to use are in tables. All others are parsed as by UDUNITS: products and quotients of
powers of units, with prefixes and numbers.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from ensemble_ml.errors import UserError

PASCAL, HECTOPASCAL = ("Pa", "pascal"), ("hPa", "millibars", "millibar", "mbar", "mb")  # spellings in files
GRAVITY = 9.80665  # m s-2, WMO's standard value, by which geopotential height is converted to geopotential
_SAME_UNITS = {
    "K": ("K", "kelvin", "kelvins", "Kelvin", "degK", "degree_K", "degrees_K"),
    "m2 s-2": ("m2 s-2", "m2/s2", "J kg-1", "J/kg"),
    "m s-1": ("m s-1", "m/s", "meters/second", "metres/second", "meters per second", "metres per second"),
    "kg kg-1": ("kg kg-1", "kg/kg", "1"),
    "Pa": ("Pa", "pascal", "pascals", "Pascal", "Pascals"),
    "Pa s-1": ("Pa s-1", "Pa/s"),
    "s-1": ("s-1", "1/s"),
    "m": ("m", "metre", "meter", "metres", "meters", "gpm"),
    "kg m-2": ("kg m-2", "kg/m2"),
    "J m-2": ("J m-2", "J/m2"),
    "J kg-1": ("J kg-1", "J/kg", "m2 s-2", "m2/s2"),
    "1": ("1", "(0 - 1)", "0 - 1", "(0-1)", "0-1", "dimensionless", "fraction"),
}
_CELSIUS = (
    *(f"{degree}C" for degree in ("deg", "deg_", "degree_", "degrees_", "\N{DEGREE SIGN}")),
    *(f"{degree}{name}" for degree in ("", "degree_", "degrees_") for name in ("celsius", "Celsius")),
)
_FAHRENHEIT = ("degF", "deg_F", "degree_F", "degrees_F", "fahrenheit", "degree_fahrenheit", "degrees_fahrenheit")
_CONVERSIONS = {  # (from, to) -> (factor, offset): value_to = factor * value_from + offset
    **{(celsius, "K"): (1.0, 273.15) for celsius in _CELSIUS},
    **{(fahrenheit, "K"): (5 / 9, 273.15 - 32 * 5 / 9) for fahrenheit in _FAHRENHEIT},
    **{(name, "Pa"): (100.0, 0.0) for name in (*HECTOPASCAL, "hectopascal", "hectopascals")},
    ("gpm", "m2 s-2"): (GRAVITY, 0.0),  # geopotential height, which TIGGE and GEFS have instead of geopotential
    ("m", "m2 s-2"): (GRAVITY, 0.0),
    ("mm", "m"): (1e-3, 0.0),
    ("kg m-2", "m"): (1e-3, 0.0),  # water: GRIB edition 2 has precipitation in kg m-2
    ("kg/m2", "m"): (1e-3, 0.0),
    ("cm", "m"): (1e-2, 0.0),
    ("m of water equivalent", "m"): (1.0, 0.0),
    ("g kg-1", "kg kg-1"): (1e-3, 0.0),
    ("g/kg", "kg kg-1"): (1e-3, 0.0),
    ("%", "1"): (1e-2, 0.0),
    ("percent", "1"): (1e-2, 0.0),
}
_RATES = {  # (units of the rate, units of the sum) -> factor: sum over one second = factor * rate
    **{(rate, "m"): 1e-3 for rate in ("kg m-2 s-1", "kg/m2/s", "mm s-1", "mm/s")},
    **{(rate, "m"): 1e-3 / 3600 for rate in ("kg m-2 h-1", "mm h-1", "mm hr-1", "mm/h", "mm/hr")},
    **{(rate, "m"): 1.0 for rate in ("m s-1", "m/s")},
    **{(rate, "J m-2"): 1.0 for rate in ("W m-2", "W/m2", "J m-2 s-1")},
}


class Quantity(NamedTuple):
    """A unit as a multiple of SI units.

    Attributes:
        factor: its size in SI units.
        dimensions: its powers of metre, kilogram, second and kelvin.
    """

    factor: float
    dimensions: tuple[int, int, int, int]

    def by(self, other: Quantity, power: int = 1) -> Quantity:
        """Return the product of this unit and a power of another one."""
        pairs = zip(self.dimensions, other.dimensions, strict=True)
        metre, kilogram, second, kelvin = (own + power * its for own, its in pairs)
        return Quantity(self.factor * other.factor**power, (metre, kilogram, second, kelvin))


_ONE = Quantity(1.0, (0, 0, 0, 0))
_METRE, _KILOGRAM, _SECOND = (Quantity(1.0, powers) for powers in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0)))
_NEWTON = _KILOGRAM.by(_METRE).by(_SECOND, -2)
_JOULE, _PASCAL = _NEWTON.by(_METRE), _NEWTON.by(_METRE, -2)


def _times(factor: float, unit: Quantity) -> Quantity:
    """Return a multiple of a unit."""
    return unit._replace(factor=factor * unit.factor)


_BASE = {  # units that take prefixes, by symbol
    "m": _METRE, "g": _times(1e-3, _KILOGRAM), "s": _SECOND, "K": Quantity(1.0, (0, 0, 0, 1)), "N": _NEWTON,
    "J": _JOULE, "W": _JOULE.by(_SECOND, -1), "Pa": _PASCAL, "bar": _times(1e5, _PASCAL),
    "Hz": Quantity(1.0, (0, 0, -1, 0)),
}  # fmt: skip
_NAMES = {  # symbols of these units, by name
    "metre": "m", "meter": "m", "gram": "g", "second": "s", "sec": "s", "kelvin": "K", "newton": "N", "joule": "J",
    "watt": "W", "pascal": "Pa", "hertz": "Hz",
}  # fmt: skip
_PREFIXES = {
    "G": 1e9, "M": 1e6, "k": 1e3, "h": 1e2, "da": 1e1, "d": 1e-1, "c": 1e-2, "m": 1e-3, "u": 1e-6,
    "\N{MICRO SIGN}": 1e-6,
}  # fmt: skip
_PREFIX_NAMES = {
    "giga": 1e9, "mega": 1e6, "kilo": 1e3, "hecto": 1e2, "deca": 1e1, "deci": 1e-1, "centi": 1e-2, "milli": 1e-3,
    "micro": 1e-6,
}  # fmt: skip
_SUMS = {"m": _METRE, "J m-2": _JOULE.by(_METRE, -2)}  # units of sums over time: depth of water, and energy
_PLAIN_UNITS = {  # units without prefixes
    **dict.fromkeys(("min", "minute"), _times(60.0, _SECOND)),
    **dict.fromkeys(("h", "hr", "hour"), _times(3600.0, _SECOND)),
    **dict.fromkeys(("d", "day"), _times(86400.0, _SECOND)),
    **dict.fromkeys(("knot", "kt"), _times(1852 / 3600, _METRE.by(_SECOND, -1))),
    **dict.fromkeys(("ft", "foot", "feet"), _times(0.3048, _METRE)),
    **dict.fromkeys(("in", "inch", "inches"), _times(0.0254, _METRE)),
    "mile": _times(1609.344, _METRE),
    "nautical_mile": _times(1852.0, _METRE),
    "atm": _times(101325.0, _PASCAL),
    "mmHg": _times(133.322387415, _PASCAL),
    "inHg": _times(3386.388640341, _PASCAL),
}
_TERM = re.compile(r"(?P<unit>[A-Za-z_\N{MICRO SIGN}]+)(?P<power>[+-]?\d+)?|(?P<number>\d+\.?\d*(?:[eE][+-]?\d+)?)")


@cache
def _quantity(text: str) -> Quantity | None:
    """Return size and dimensions of units from `_plain`; None if a word is not known or there is no such number."""
    found, sign = _ONE, 1
    for word in re.sub(r"\bper\b", "/", text).replace("/", " / ").split():
        if word == "/":
            sign = -1
            continue
        term = _TERM.fullmatch(word)
        if term is None:
            return None
        if term["number"]:
            unit, power = _times(float(term["number"]), _ONE), 1
        else:
            named = _named(term["unit"])
            if named is None:
                return None
            unit, power = named, int(term["power"] or 1)
        # As in UDUNITS, a slash divides by the next unit alone: J/kg K is (J/kg) K.
        try:
            found, sign = found.by(unit, sign * power), 1
        except ArithmeticError:  # a power beyond all numbers, or a division by 0
            return None
    return found


def _named(word: str) -> Quantity | None:
    """Return the unit of a symbol or a name, which may have a prefix; None if there is none."""
    single = word.removesuffix("s") if len(word) > 3 else word  # plural of a name; short words are symbols
    for name in (word, single):
        if name in _BASE or name in _PLAIN_UNITS:
            return _BASE.get(name) or _PLAIN_UNITS[name]
        for prefix, factor in _PREFIX_NAMES.items():
            if (rest := name.removeprefix(prefix)) in _NAMES:
                return _times(factor if rest != name else 1.0, _BASE[_NAMES[rest]])
    for prefix, factor in _PREFIXES.items():
        if word.startswith(prefix) and word.removeprefix(prefix) in _BASE:
            return _times(factor, _BASE[word.removeprefix(prefix)])
    return None


def _plain(units: str) -> str:
    """Return `units` with powers and products as CF writes them: m**2 s**-2, m^2.s^-2, m2 s{-2} become m2 s-2."""
    scaled = re.sub(r"(?<![\w.])10(?:\*\*|\^)\{?([+-]?\d+)\}?", r"1e\1", units)
    # Only after a letter: the digits of another number and its power would become one number.
    powers = re.sub(r"(?<=[^\W\d_])(?:\*\*|\^)|[{}]", "", scaled)
    factors = re.sub(r"(?<=[A-Za-z0-9])[.*\N{MIDDLE DOT}](?=[A-Za-z])", " ", powers)
    return " ".join(factors.split())


def unit_conversion(found: str, wanted: str) -> tuple[float, float]:
    """Return (factor, offset) such that factor * value + offset is in the `wanted` units of the registry.

    Raises:
        UserError: `found` is not a spelling of `wanted`, and no conversion is known.
    """
    plain = _plain(found)
    if plain == wanted or plain in _SAME_UNITS.get(wanted, ()):
        return 1.0, 0.0
    if (plain, wanted) in _CONVERSIONS:
        return _CONVERSIONS[plain, wanted]
    scale, target = _quantity(plain), _quantity(wanted)
    # A number without dimensions may be a fraction of anything, so only spellings in the tables are accepted for it.
    if scale is not None and target is not None and scale.dimensions == target.dimensions and any(target.dimensions):
        return scale.factor / target.factor, 0.0
    known = [*_SAME_UNITS.get(wanted, (wanted,)), *(source for source, target in _CONVERSIONS if target == wanted)]
    raise UserError(f"units {found!r}: cannot be converted to {wanted!r}; known are {', '.join(known)}")


def rate_conversion(found: str, wanted: str) -> float | None:
    """Return the factor that turns a rate into its sum over one second; None if `found` are no units of such a rate."""
    plain = _plain(found)
    if (plain, wanted) in _RATES:
        return _RATES[plain, wanted]
    rate, total = _quantity(plain), _SUMS.get(wanted)
    if rate is None or total is None:
        return None
    if rate.dimensions == total.by(_SECOND, -1).dimensions:
        return rate.factor / total.factor
    if wanted == "m" and rate.dimensions == _KILOGRAM.by(_METRE, -2).by(_SECOND, -1).dimensions:
        return rate.factor * 1e-3  # a kilogram of water on a square metre is a millimetre deep
    return None


def same_units(one: str, other: str, *, differences: bool = False) -> bool:
    """Return whether two spellings mean the same unit.

    Units that convert to none of the registry's are the same if they are spelled alike, or if both have dimensions and
    are parsed to the same multiple of SI units.

    With `differences`, the zero point does not matter, so K and degC are the same.
    """
    if _plain(one) == _plain(other):
        return True
    of_one, of_other = _quantity(_plain(one)), _quantity(_plain(other))
    if of_one is not None and of_one == of_other and any(of_one.dimensions):
        return True
    for wanted in _SAME_UNITS:
        try:
            found = [unit_conversion(units, wanted) for units in (one, other)]
        except UserError:
            continue
        if found[0] == found[1] or (differences and found[0][0] == found[1][0]):
            return True
    return False
