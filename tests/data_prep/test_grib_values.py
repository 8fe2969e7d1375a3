"""Any message that ecCodes can write is read with its values, bit for bit, and with its points in their places."""

import eccodes
import numpy as np
import pytest
from gribfiles import GLOBE, finished, message, noise, write
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from data_prep import open_archive, prepare
from data_prep.grib import GribFile
from data_prep.grib_sections import headers
from ensemble_ml.config import PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, Selection, open_store

GRID = np.linspace(40, 0, 5), np.arange(0.0, 28.0, 4.0)
MISSING = 9999.0


def oracle(content: bytes) -> np.ndarray:
    """Values (Y, X) float32 on descending latitudes and ascending longitudes, NaN under a bitmap, by ecCodes alone."""
    handle = eccodes.codes_new_from_message(content)
    try:
        values, lat, lon = (eccodes.codes_get_array(handle, key) for key in ("values", "latitudes", "longitudes"))
        if eccodes.codes_get(handle, "bitmapPresent"):
            values[eccodes.codes_get_array(handle, "bitmap") == 0] = np.nan
        shape = eccodes.codes_get(handle, "Nj"), eccodes.codes_get(handle, "Ni")
    finally:
        eccodes.codes_release(handle)
    return values[np.lexsort((np.round(lon, 6) % 360, -np.round(lat, 6)))].reshape(shape).astype(np.float32)


def check(folder, contents):
    file = GribFile(str(write(folder / "a.grib", contents)))
    found = list(file.fields(file.records))
    for raw, content in zip(found, contents, strict=True):
        expected = oracle(content)
        there = ~np.isnan(expected)
        decoded = raw.decode()
        np.testing.assert_array_equal(np.isnan(decoded), ~there)
        np.testing.assert_array_equal(decoded[there].view(np.uint32), expected[there].view(np.uint32))
        np.testing.assert_array_equal(raw.mask if raw.mask is not None else ~there & False, ~there)
        assert not np.isin(decoded, MISSING).any()
    band = slice(1, 4)
    for raw, content in zip(file.fields(file.records, band), contents, strict=True):
        np.testing.assert_array_equal(raw.decode(), oracle(content)[band])
    return found


fields = arrays(np.float64, (5, 7), elements=st.floats(-2e5, 2e5, width=32).filter(lambda v: v != MISSING))
masks = st.one_of(st.none(), st.just(True), st.just(False), arrays(bool, (5, 7)))


def under(values, hidden):
    """Values with `MISSING` where `hidden`, and the keys that make a bitmap of it."""
    if hidden is None:
        return values, {}
    return np.where(hidden, MISSING, values), {"bitmapPresent": 1, "missingValue": MISSING}


@settings(max_examples=120)
@given(st.sampled_from([1, 2]), st.integers(1, 24), masks, fields)
def test_simple_packing(tmp_path_factory, edition, bits, hidden, values):
    values, keys = under(values, hidden)
    made = message("t", values, grid=GRID, edition=edition, bits=bits, **keys)
    raw = check(tmp_path_factory.mktemp("s"), [made])[0]
    assert raw.packed == (bits <= 16) or np.ptp(values) == 0 or hidden is not None


@settings(max_examples=60)
@given(st.sampled_from([1, 2]), st.integers(-2, 4), st.sampled_from([None, False]), fields)
def test_decimal_scales(tmp_path_factory, edition, decimal, hidden, values):
    """A decimal precision chooses its own number of bits; the scale of a real file may be any."""
    values, keys = under(values / 200, hidden)
    check(tmp_path_factory.mktemp("d"), [message("t", values, grid=GRID, edition=edition, decimal=decimal, **keys)])


@settings(max_examples=40)
@given(st.sampled_from([1, 2]), masks, st.floats(-1e6, 1e6, width=32).filter(lambda v: v != MISSING))
def test_constant_fields(tmp_path_factory, edition, hidden, value):
    values, keys = under(np.full((5, 7), value), hidden)
    check(tmp_path_factory.mktemp("c"), [message("t", values, grid=GRID, edition=edition, **keys)])


@settings(max_examples=60)
@given(
    st.sampled_from(["grid_ccsds", "grid_jpeg", "grid_ieee"]),
    st.integers(8, 20),
    masks,
    fields,
)
def test_other_packings(tmp_path_factory, packing, bits, hidden, values):
    values, keys = under(values, hidden)
    made = message("t", values, grid=GRID, edition=2, bits=bits, packing=packing, **keys)
    check(tmp_path_factory.mktemp("o"), [made])


@settings(max_examples=30)
@given(st.sampled_from([1, 2]), st.integers(8, 20), st.sampled_from([None, 0.3]), st.integers(0, 99))
def test_second_order_packing(tmp_path_factory, edition, bits, share, seed):
    grid = np.linspace(60, 0, 30), np.arange(0.0, 40.0)
    smooth = noise(grid, seed).cumsum(0).cumsum(1)
    hidden = None if share is None else np.random.default_rng(seed).random(smooth.shape) < share
    values, keys = under(smooth, hidden)
    handle = eccodes.codes_new_from_message(message("t", values, grid=grid, edition=edition, bits=bits, **keys))
    eccodes.codes_set(handle, "packingType", "grid_second_order")
    made = eccodes.codes_get_message(handle)
    assert eccodes.codes_get(handle, "packingType").startswith("grid_second_order")
    eccodes.codes_release(handle)
    raw = check(tmp_path_factory.mktemp("2"), [made])[0]
    assert not raw.packed


def test_a_second_order_bitmap_whose_header_seems_to_count_all_points(tmp_path):
    grid = np.linspace(40, 0, 5), np.arange(0.0, 44.0, 4.0)
    hidden = np.random.default_rng(17).random((5, 11)) < 0.4
    values, keys = under(noise(grid, 17).cumsum(0), hidden)
    handle = eccodes.codes_new_from_message(message("t", values, grid=grid, **keys))
    eccodes.codes_set(handle, "packingType", "grid_second_order")
    made = finished(handle)
    assert headers(made)[0].count == hidden.size
    np.testing.assert_array_equal(check(tmp_path, [made])[0].mask, hidden)


@pytest.mark.parametrize("packing", ["grid_complex", "grid_complex_spatial_differencing"])
def test_missing_points_inside_complex_packing_become_a_mask(tmp_path, packing):
    """They stand among the values, without a bitmap; ecCodes gives 9999 for them unless told otherwise."""
    grid = np.linspace(60, 0, 30), np.arange(0.0, 40.0)
    values = noise(grid, 3).cumsum(0)
    values[20, 20] = 9999  # a value like any other
    hidden = np.zeros(values.shape, bool)
    hidden[3:6, 4:9] = True
    handle = eccodes.codes_new_from_message(message("sst", values, grid=grid, edition=2))
    eccodes.codes_set(handle, "packingType", packing)
    eccodes.codes_set(handle, "missingValueManagementUsed", 1)
    eccodes.codes_set(handle, "missingValue", -5e4)
    eccodes.codes_set_values(handle, np.where(hidden, -5e4, values).ravel())
    made = finished(handle)
    file = GribFile(str(write(tmp_path / "a.grib", [made])))
    assert file.records["masked"].all() and not file.records["bitmap"].any()
    raw = next(file.fields(file.records))
    np.testing.assert_array_equal(raw.mask, hidden)
    assert np.isnan(raw.values[hidden]).all()
    np.testing.assert_allclose(raw.values[~hidden], values[~hidden], rtol=1e-3, atol=1)


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2]),
    st.sampled_from([8, 12, 16, 24]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 180.0, 300.0]),
    masks,
)
def test_scanning(tmp_path_factory, edition, bits, northwards, westwards, by_columns, west, hidden):
    """Values of all scanning modes that are read, on regions and on a circle of longitudes that begins anywhere."""
    latitude = np.linspace(40, 0, 5)[:: -1 if northwards else 1]
    longitude = west + np.arange(7) * (360 / 7) if west == 300.0 else west + np.arange(7.0) * 4
    grid = latitude, longitude[:: -1 if westwards else 1] % 360
    keys = {"iScansNegatively": int(westwards), "jPointsAreConsecutive": int(by_columns)}
    keys |= {"iDirectionIncrementInDegrees": float(np.diff(longitude)[0])}
    values, bitmap = under(noise(grid, 3), hidden)
    made = message("t", values, grid=grid, edition=edition, bits=bits, **keys | bitmap)
    file = GribFile(str(write(tmp_path_factory.mktemp("m") / "a.grib", [made])))
    found, expected = next(file.fields(file.records)).decode(), oracle(made)
    columns = np.argsort(np.mod(file.grid.longitude, 360))  # the oracle's order is that of 0 to 360
    np.testing.assert_array_equal(found[:, columns], expected)
    band = next(file.fields(file.records, slice(2, 3))).decode()
    np.testing.assert_array_equal(band, found[2:3])


def test_rows_in_turns_are_refused(tmp_path):
    made = message("t", edition=2, alternativeRowScanning=1)
    with pytest.raises(UserError, match="each second row is scanned the other way, which is not read; rewrite it"):
        GribFile(str(write(tmp_path / "a.grib", [made])))


def test_fields_of_one_file_may_be_scanned_in_different_ways(tmp_path):
    longitude = np.arange(0.0, 360, 30)
    values = noise(GLOBE)
    west = {"iScansNegatively": 1, "iDirectionIncrementInDegrees": 30.0}
    ways = [
        message("t", values, member=1),
        message("t", values[::-1], grid=(GLOBE[0][::-1], longitude), member=2),
        message("t", values[:, ::-1], grid=(GLOBE[0], longitude[::-1]), member=3, **west),
        message("t", np.roll(values, 6, 1), grid=(GLOBE[0], longitude - 180), member=4),
    ]
    file = GribFile(str(write(tmp_path / "a.grib", ways)))
    first, *others = (raw.decode() for raw in file.fields(file.records))
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("edition", [1, 2])
def test_integers_under_a_bitmap_reach_the_store(tmp_path, edition):
    """Sea surface temperature: integers as they are, a mask where there is land, and NaN when it is read."""
    made, hidden = [], noise(GLOBE, 9, 0, 1) > 0
    for member in (1, 2):
        values, keys = under(noise(GLOBE, member), hidden)
        made += [message("sst", values, member=member, edition=edition, bits=16, **keys), message("t", member=member)]
    path = write(tmp_path / "a.grib", made)
    source = open_archive(path)
    assert source.masked == ("sst",)
    gathered = source.gather(Part.FORECAST, 0)
    assert gathered.loose == {} and gathered.pressure.mask is None
    np.testing.assert_array_equal(gathered.surface.mask[0, 0, 0], hidden)
    store = open_store(prepare(PrepareConfig(input=str(path), output=str(tmp_path / "s.zarr"))))
    assert store.masked == ("sst",) and store.quantisation_error == {}
    for read in (source, store):
        found = read.read(Part.FORECAST, 0).surface[:, 0, 0]
        for member in (0, 1):
            np.testing.assert_array_equal(found[member], oracle(made[2 * member]))
        part = read.read(Part.FORECAST, 0, Selection(rows=(2, 5), variables=())).surface[:, 0, 0]
        np.testing.assert_array_equal(part, found[:, 2:5])
    np.testing.assert_array_equal(np.isnan(source.read(Part.SPREAD, 0).surface[0, 0, 0]), hidden)


@pytest.mark.parametrize("edition", [1, 2])
def test_a_bitmap_that_hides_nothing_is_no_mask(tmp_path, edition):
    made = message("sst", edition=edition, bitmapPresent=1, missingValue=MISSING)
    source = open_archive(write(tmp_path / "a.grib", [made]))
    assert source.masked == () and source.gather(Part.FORECAST, 0).surface.mask is None
    assert check(tmp_path, [made])[0].mask is None
