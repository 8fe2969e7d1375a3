"""Units that no table lists are read as UDUNITS and pint read them."""

import cf_units
import pint
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS
from ensemble_ml.units import rate_conversion, same_units, unit_conversion

REGISTRY = pint.UnitRegistry()
WANTED = sorted({one.units for one in FIELDS} - {"1", "kg kg-1", "K"})
PREFIXES = ("", "G", "M", "k", "h", "d", "c", "m")
WITH_PREFIX, WITHOUT = ("m", "g", "s", "N", "J", "W", "Pa", "bar", "Hz"), ("min", "h", "d", "ft", "knot", "inch", "atm")
FACTOR = st.tuples(st.sampled_from(PREFIXES), st.sampled_from(WITH_PREFIX)) | st.tuples(
    st.just(""), st.sampled_from(WITHOUT)
)
POWERS = st.sampled_from((-3, -2, -1, 1, 2, 3))


def ours(terms) -> str:
    return " ".join(f"{prefix}{unit}{power if power != 1 else ''}" for (prefix, unit), power in terms)


def theirs(terms) -> str:
    return " * ".join(f"{prefix}{unit} ** {power}" for (prefix, unit), power in terms)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(FACTOR, POWERS), min_size=1, max_size=4), st.sampled_from(WANTED))
def test_products_of_units_are_those_of_pint(terms, wanted):
    unit = REGISTRY.Unit(theirs(terms))
    target = REGISTRY.Unit(" * ".join(f"{word}" for word in spelled(wanted)))
    if unit.dimensionality == target.dimensionality:
        factor, offset = unit_conversion(ours(terms), wanted)
        assert offset == 0 and factor == pytest.approx(REGISTRY.Quantity(1.0, unit).to(target).magnitude, rel=1e-12)
    # What the tables take beside these: water as a depth, geopotential height.
    elif (ours(terms), wanted) not in {("kg m-2", "m"), ("m", "m2 s-2"), ("mm", "m")}:
        with pytest.raises(UserError, match="cannot be converted"):
            unit_conversion(ours(terms), wanted)


def spelled(units: str) -> list[str]:
    """Return the factors of the registry's units as pint writes them."""
    return [
        word if word[-1].isalpha() else f"{word.rstrip('-0123456789')} ** {word.lstrip('mskgPaJ')}"
        for word in units.split()
    ]


# A lawful spelling of each of the registry's dimensions, as UDUNITS has them.
LAWFUL = {
    "Pa": "kPa, daPa, MPa, N m-2, N/m2, J m-3, kg m-1 s-2, bar, dbar, atm, 100 Pa, 10^3 Pa, 10**2 Pa, kilopascal, "
    "hectopascals",
    "Pa s-1": "hPa s-1, Pa/min, hPa/h, mbar hour-1, kPa day-1",
    "m s-1": "km h-1, km/h, knot, knots, cm s-1, ft/s, m min-1, kilometers per hour, feet/second, dm.s-1",
    "m2 s-2": "kJ kg-1, N m kg-1, km2 s-2, J/g",
    "m": "km, dm, ft, feet, inch, inches, micrometer, um, 0.01 m, nautical_mile, mile, kilometre",
    "s-1": "h-1, 1/h, min-1, Hz, kHz, day-1, 1e-5 s-1, 10^-5 s^-1, 10 s-1",
    "kg m-2": "g cm-2, g m-2, kg/m2, mg/cm2, kg.m-2",
    "J m-2": "kJ m-2, MJ/m2, W s m-2, W h m-2, J cm-2, kW h m-2",
    "J kg-1": "kJ/kg, m2 s-2, J g-1",
}


@pytest.mark.parametrize(
    ("wanted", "found"), [(wanted, one) for wanted, some in LAWFUL.items() for one in some.split(", ")]
)
def test_spellings_are_those_of_udunits(wanted, found):
    assert wanted in {one.units for one in FIELDS}
    factor, offset = unit_conversion(found, wanted)
    assert offset == 0 and factor == pytest.approx(cf_units.Unit(found).convert(1.0, wanted), rel=1e-12)


@pytest.mark.parametrize("degree", ["degF", "fahrenheit", "degree_fahrenheit", "degC", "celsius", "K"])
def test_temperatures_have_a_zero_point(degree):
    factor, offset = unit_conversion(degree, "K")
    for value in (-40.0, 0.0, 98.6):
        assert factor * value + offset == pytest.approx(cf_units.Unit(degree).convert(value, "K"), rel=1e-12)


@pytest.mark.parametrize(
    ("found", "wanted", "factor"),
    [
        ("kW m-2", "J m-2", 1e3),
        ("J m-2 h-1", "J m-2", 1 / 3600),
        ("MJ m-2 day-1", "J m-2", 1e6 / 86400),
        ("cm h-1", "m", 1e-2 / 3600),
        ("inch/hour", "m", 0.0254 / 3600),
        ("g m-2 s-1", "m", 1e-6),
        ("kg m-2 day-1", "m", 1e-3 / 86400),
    ],
)
def test_rates(found, wanted, factor):
    assert rate_conversion(found, wanted) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    "found", ["furlong", "K m-1", "s", "m s", "kg", "", "m/", "percent", "m2 s-2 K", "kkPa", "Paa", "mms"]
)
def test_what_is_no_unit_of_a_speed_is_refused(found):
    with pytest.raises(UserError, match="cannot be converted to 'm s-1'"):
        unit_conversion(found, "m s-1")
    assert rate_conversion(found, "J m-2") is None


def test_numbers_without_dimensions_are_those_of_the_tables():
    for found in ("m m-1", "g g-1", "s Hz", "0.01", "Pa/Pa"):  # of what, they do not say
        with pytest.raises(UserError, match="cannot be converted"):
            unit_conversion(found, "1")
    assert unit_conversion("%", "1") == (0.01, 0.0)


def test_the_same_unit_in_two_spellings():
    assert same_units("W m-2", "W/m2") and not same_units("W m-2", "J m-2") and not same_units("1", "%")
    assert same_units("km/h", "km h-1") and same_units("kPa", "kilopascal") and not same_units("kPa", "hPa")


def test_a_power_of_another_number_is_not_read_as_its_digits():
    with pytest.raises(UserError, match="cannot be converted"):
        unit_conversion("2^3 Pa", "Pa")


def test_a_symbol_has_no_plural():
    assert unit_conversion("bars", "Pa") == (1e5, 0.0)
    with pytest.raises(UserError, match="cannot be converted to 'Pa'"):
        unit_conversion("Pas", "Pa")


@pytest.mark.parametrize("units", ["km9999", "m/0", "km-9999"])
def test_powers_and_quotients_that_are_no_numbers_are_refused(units):
    with pytest.raises(UserError, match=f"units '{units}': cannot be converted to 'm'"):
        unit_conversion(units, "m")
    assert rate_conversion(units, "m") is None
