"""Packing: exact against ecCodes, bounded where it rounds, loud where it cannot."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ensemble_ml.errors import UserError
from ensemble_ml.store import PackedBlock, decode, error_bound, grib_factors, quantise
from ensemble_ml.store.packing import check_finite, exact_in_float32

SHAPE = (20, 30)


def as_message(eccodes, values, *, edition, bits, decimal_scale=0):
    handle = eccodes.codes_grib_new_from_samples(f"regular_ll_pl_grib{edition}")
    for key, value in (("Ni", SHAPE[1]), ("Nj", SHAPE[0]), ("bitsPerValue", bits)):
        eccodes.codes_set(handle, key, value)
    if decimal_scale:
        eccodes.codes_set(handle, "decimalScaleFactor", decimal_scale)
    eccodes.codes_set_values(handle, values.ravel().astype(np.float64))
    return handle


def as_block(eccodes, handle):
    """The integers of a message, unpacked bit by bit, with its own reference and factors."""
    bits = eccodes.codes_get(handle, "bitsPerValue")
    binary, decimal = (eccodes.codes_get(handle, key) for key in ("binaryScaleFactor", "decimalScaleFactor"))
    data = eccodes.codes_get_message(handle)[eccodes.codes_get(handle, "offsetBeforeData") :]
    stream = np.unpackbits(np.frombuffer(data, np.uint8))[: bits * 600].reshape(600, bits)
    codes = (stream.astype(np.int64) @ (1 << np.arange(bits)[::-1])).astype(np.uint16)
    scale, factor = grib_factors(bits, binary, decimal)
    reference = eccodes.codes_get(handle, "referenceValue")
    return PackedBlock(codes.reshape(SHAPE), reference, scale, factor, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize("bits", [10, 12, 16])
@pytest.mark.parametrize(("centre", "width"), [(250.0, 10.0), (5e-3, 1e-3), (5e4, 1e3), (0.0, 1e-5)])
def test_decoding_is_bit_equal_to_eccodes(edition, bits, centre, width):
    eccodes = pytest.importorskip("eccodes")
    values = np.random.default_rng(bits).normal(centre, width, SHAPE)
    handle = as_message(eccodes, values, edition=edition, bits=bits)
    assert eccodes.codes_get(handle, "bitsPerValue") == bits
    decoded = decode(as_block(eccodes, handle)).ravel()
    assert decoded.tobytes() == eccodes.codes_get_array(handle, "values").astype(np.float32).tobytes()
    assert decoded.tobytes() == eccodes.codes_get_float_array(handle, "values").tobytes()


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize("decimal_scale", [-3, -2, -1, 1, 2, 3, 5])
def test_decoding_with_a_decimal_scale_is_bit_equal_to_eccodes(edition, decimal_scale):
    eccodes = pytest.importorskip("eccodes")
    # ecCodes chooses the bits itself once a decimal scale is set: keep the range within 16 of them
    values = 280 + np.random.default_rng(decimal_scale + 3).uniform(0, 20_000 / 10.0**decimal_scale, SHAPE)
    handle = as_message(eccodes, values, edition=edition, bits=16, decimal_scale=decimal_scale)
    assert 8 < eccodes.codes_get(handle, "bitsPerValue") <= 16
    decoded = decode(as_block(eccodes, handle)).ravel()
    assert decoded.tobytes() == eccodes.codes_get_array(handle, "values").astype(np.float32).tobytes()


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize("decimal_scale", [0, 2])
def test_a_constant_field_is_its_reference(edition, decimal_scale):
    eccodes = pytest.importorskip("eccodes")
    values = np.full(SHAPE, 273.456)
    handle = as_message(eccodes, values, edition=edition, bits=16, decimal_scale=decimal_scale)
    assert eccodes.codes_get(handle, "bitsPerValue") == 0
    decoded = decode(as_block(eccodes, handle)).ravel()
    assert decoded.tobytes() == eccodes.codes_get_array(handle, "values").astype(np.float32).tobytes()


def test_grib_factors_follow_eccodes_division():
    assert grib_factors(16, -7, 0) == (2.0**-7, 1.0)
    assert grib_factors(12, 3, -2) == (8.0, 100.0)
    assert grib_factors(12, 0, 3)[1] == 1.0 / 10 / 10 / 10  # 1.0000000000000002e-3 is not the double nearest 1e-3
    assert grib_factors(0, 5, 2) == (0.0, 1.0)


finite = st.floats(-1e6, 1e6, width=32)


@given(
    hnp.arrays(np.uint16, (2, 3, 5)),
    hnp.arrays(np.float32, (2,), elements=finite),
    st.integers(-100, 90),
)
def test_float32_arithmetic_is_used_only_where_it_gives_the_same_bits(codes, reference, exponent):
    reference, scale = reference.astype(np.float64), np.full(2, 2.0**exponent)
    assert exact_in_float32(reference, scale, np.ones(2))
    block = PackedBlock(codes, reference, scale, np.ones(2), np.ones(2, bool))
    wide = (codes * scale[:, None, None] + reference[:, None, None]) * 1.0
    assert decode(block).tobytes() == wide.astype(np.float32).tobytes()


def test_float32_arithmetic_is_refused_where_it_could_differ():
    one = np.ones(1)
    assert not exact_in_float32(one / 3, one, one)
    assert not exact_in_float32(one, one * 3, one)
    assert not exact_in_float32(one, one, one / 10)
    assert not exact_in_float32(one, one * 2.0**-140, one)
    assert not exact_in_float32(one * 1e300, one, one)


@settings(max_examples=60)
@given(hnp.arrays(np.float32, (2, 4, 5), elements=st.floats(-(2.0**60), 2.0**60, width=32)))
def test_quantising_errs_by_less_than_its_bound(values):
    block = quantise(values)
    error = np.abs(decode(block).astype(np.float64) - values).max((-2, -1))
    assert (error <= error_bound(block)).all()
    again = quantise(decode(block))
    assert decode(again).tobytes() == decode(block).tobytes()  # what was packed once packs exactly


def test_quantising_uses_at_least_half_of_the_codes():
    values = np.random.default_rng(0).normal(280, 10, (3, 40, 50)).astype(np.float32)
    block = quantise(values)
    assert (block.values.max((-2, -1)) >= 32767).all()
    assert (error_bound(block) < 80 / 65535).all()


@pytest.mark.filterwarnings("error")
def test_the_bound_of_the_largest_values_is_a_number():
    block = quantise(np.array([[-3.4e38, 0.0], [1.0, 3.4e38]], np.float32))
    assert block.scale / 2 <= error_bound(block) < block.scale


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("low", [-1.0, -1e-8, 0.0, 0.3, 0.5, 0.999, 1.0])
def test_the_largest_float_stays_finite(low):
    """The nearest step lies beyond it."""
    most, rng = np.finfo(np.float32).max, np.random.default_rng(0)
    values = (rng.uniform(low, 1, (40, 8, 8)) * float(most)).astype(np.float32)
    values[:, 0, :2] = low * most, most
    block = quantise(values)
    error = np.abs(decode(block).astype(np.float64) - values).max((-2, -1))
    assert (error <= error_bound(block)).all()


def test_a_constant_field_quantises_without_error():
    values = np.full((1, 4, 5), 0.1, np.float32)
    block = quantise(values)
    assert decode(block).tobytes() == values.tobytes()
    assert error_bound(block) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_numbers_are_refused_by_name(bad):
    values = np.zeros((2, 3, 4, 5), np.float32)
    values[1, 2, 0, 3] = bad
    with pytest.raises(UserError, match=r"temperature at 850 hPa: 1 of 20 values are not numbers"):
        check_finite(values, where=lambda index: {(1, 2): "temperature at 850 hPa"}[index])
    with pytest.raises(UserError, match=r"field \(1, 2\): 1 of 20 values are not numbers"):
        quantise(values)


def test_absent_fields_decode_to_nan_and_plain_values_to_themselves():
    values = np.arange(40, dtype=np.float32).reshape(2, 4, 5)
    out = decode(PackedBlock.plain(values, np.array([True, False])))
    assert out[0].tobytes() == values[0].tobytes() and np.isnan(out[1]).all()


def test_a_block_of_wrong_shape_or_type_is_refused():
    ones = np.ones(2)
    with pytest.raises(ValueError, match="scale has shape"):
        PackedBlock(np.zeros((2, 4, 5), np.uint16), ones, np.ones(3), ones, ones.astype(bool))
    with pytest.raises(ValueError, match="uint16 or float32"):
        PackedBlock(np.zeros((2, 4, 5), np.int32), ones, ones, ones, ones.astype(bool))


def test_small_fields_are_packed_together_as_each_alone():
    """Fields are worked on in groups, of which the last one is not whole; constant ones lie among the others."""
    rng = np.random.default_rng(3)
    values = rng.normal(280, 5, (3, 300, 16, 32)).astype(np.float32)
    values[1, 7], values[2, 299] = 273.25, 0.0
    mask = rng.random(values.shape) < 0.1
    for hidden in (None, mask):
        together = quantise(values, mask=hidden)
        for place in ((0, 0), (1, 7), (2, 255), (2, 256), (2, 299)):
            alone = quantise(values[place][None], mask=None if hidden is None else hidden[place][None])
            for name in ("values", "reference", "scale"):
                np.testing.assert_array_equal(getattr(together, name)[place], getattr(alone, name)[0])
    values[2, 298, 0, 0] = np.inf
    with pytest.raises(UserError, match=r"field \(2, 298\): 1 of 512 values are not numbers"):
        quantise(values)
