"""The registry: names, aliases, units."""

import pytest

from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, Family, by_param_id, field, resolve
from ensemble_ml.units import rate_conversion, same_units, unit_conversion


def test_names_and_parameters_are_unique():
    names = [f.name for f in FIELDS]
    numbers = [n for f in FIELDS for n in f.param_ids]
    assert len(set(names)) == len(names)
    assert len(set(numbers)) == len(numbers)


def test_a_mirror_at_the_equator_turns_what_blows_north():
    assert [f.name for f in FIELDS if f.northward] == ["v", "v10", "v100m"]


@pytest.mark.parametrize(
    ("alias", "name"),
    [("T", "t"), ("T2M", "t2m"), ("2t", "t2m"), ("SSTK", "sst"), ("U10M", "u10"), ("Z", "z"), ("D", "d"),
     ("air_temperature", "t"), ("temperature", "t"), ("10fg3", "fg10"), ("TCW", "tcw"), ("hus", "q")],
)  # fmt: skip
def test_archives_names_lead_to_the_registry(alias, name):
    assert resolve(alias).name == name


def test_all_of_ens10_is_known():
    for name in [
        "Z",
        "T",
        "U",
        "V",
        "Q",
        "W",
        "D",
        "SSTK",
        "TCW",
        "TCWV",
        "CP",
        "MSL",
        "TCC",
        "U10M",
        "V10M",
        "T2M",
        "TP",
        "SKT",
    ]:
        assert resolve(name)


def test_unknown_name_offers_near_ones():
    with pytest.raises(UserError, match=r"variable T2M: unknown; use t2m$"):  # settings take the registry's own
        field("T2M")
    with pytest.raises(UserError, match=r"variable temprature: unknown; did you mean .*temperature"):
        resolve("temprature")
    with pytest.raises(UserError, match="unknown"):
        field("T")  # an alias is no short name


def test_families_fit_the_quantity():
    assert field("t").family is Family.NORMAL
    assert field("q").family is Family.TRUNCATED_NORMAL
    assert field("tp").family is Family.CENSORED_SHIFTED_GAMMA
    assert field("tcc").family is Family.DOUBLY_CENSORED_NORMAL
    assert field("tp").accumulated


def test_parameters():
    assert by_param_id(130).name == "t"
    assert by_param_id(999999) is None


@pytest.mark.parametrize(
    ("found", "wanted", "value", "expected"),
    [("degC", "K", 0.0, 273.15), ("hPa", "Pa", 1013.25, 101325.0), ("mm", "m", 5.0, 0.005), ("K", "K", 280.0, 280.0),
     ("m s**-1", "m s-1", 3.0, 3.0), ("%", "1", 50.0, 0.5), ("degrees_C", "K", 1.0, 274.15), ("m.s-1", "m s-1", 2., 2.),
     ("\N{DEGREE SIGN}C", "K", 0, 273.15), ("meters", "m", 2.0, 2.0), ("mb", "Pa", 1.0, 100.0), ("0 - 1", "1", 1., 1.),
     ("kg m**-2", "m", 5.0, 0.005), ("m^2/s^2", "m2 s-2", 1.0, 1.0), ("m^{2} s^{-2}", "m2 s-2", 1.0, 1.0)],
)  # fmt: skip
def test_units_are_converted(found, wanted, value, expected):
    factor, offset = unit_conversion(found, wanted)
    assert factor * value + offset == pytest.approx(expected)


def test_unknown_unit_says_what_is_known():
    with pytest.raises(UserError, match=r"units 'furlong': cannot be converted to 'm'; known are m"):
        unit_conversion("furlong", "m")


@pytest.mark.parametrize(
    ("one", "other", "same", "of_differences"),
    [
        ("degC", "celsius", True, True),
        ("m/s", "metres per second", True, True),
        ("W m**-2", "W m^-2", True, True),
        ("K", "degC", False, True),
        ("m", "mm", False, False),
        ("K", "furlong", False, False),
    ],
)
def test_spellings_of_one_unit_are_the_same(one, other, same, of_differences):
    for pair in ((one, other), (other, one)):
        assert same_units(*pair) is same and same_units(*pair, differences=True) is of_differences


@pytest.mark.parametrize(
    ("found", "wanted", "seconds", "expected"),
    [("kg m-2 s-1", "m", 86400, 86.4), ("kg m**-2 s**-1", "m", 10, 0.01), ("mm/h", "m", 7200, 2e-3),
     ("m s-1", "m", 10, 10.0), ("W m**-2", "J m-2", 3600, 3600.0)],
)  # fmt: skip
def test_a_rate_times_its_seconds_is_a_sum(found, wanted, seconds, expected):
    assert seconds * rate_conversion(found, wanted) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("found", "wanted"), [("m", "m"), ("K", "K"), ("W m-2", "m"), ("K s-1", "K")])
def test_what_is_no_rate_of_a_sum(found, wanted):
    assert rate_conversion(found, wanted) is None


def test_parameters_are_those_of_eccodes():
    """Names and units of the parameter database are known names and units of the variable."""
    eccodes = pytest.importorskip("eccodes")
    for one in FIELDS:
        for number in one.param_ids:
            handle = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib1" if number < 1000 else "GRIB2")
            try:
                eccodes.codes_set(handle, "paramId", number)
                units = eccodes.codes_get(handle, "units")
            except eccodes.CodesInternalError:  # ecCodes encodes some on other kinds of level alone
                continue
            finally:
                eccodes.codes_release(handle)
            if one.name not in ("orog", "z"):
                assert unit_conversion(units, one.units), (one.name, number, units)
