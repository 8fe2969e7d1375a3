"""GRIB messages: found, understood and decoded as ecCodes does, bit for bit; damaged ones refused in one line."""

import struct
import threading

import numpy as np
import pytest
from gribfiles import GLOBE, REGION, decoded, message, noise, write
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from data_prep.grib import GribFile
from data_prep.grib_io import Descriptors
from data_prep.grib_keys import unpack
from data_prep.grib_sections import frames, headers
from ensemble_ml.errors import UserError


def bits_of(values):
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def same_as_eccodes(path):
    file = GribFile(str(path))
    for raw, (_, values) in zip(file.fields(file.records), decoded(path), strict=True):
        np.testing.assert_array_equal(bits_of(raw.decode()), bits_of(values))
    return file


def test_a_descriptor_is_not_closed_while_it_is_used(tmp_path):
    paths = [str(write(tmp_path / f"{number}.grib", [message("t")])) for number in range(3)]
    files = Descriptors(most=1)
    with files.opened(paths[0]) as first, files.opened(paths[1]) as second:
        assert first.content()[:4] == second.content()[:4] == b"GRIB"
    with files.opened(paths[2]):
        pass
    with pytest.raises(OSError):
        _ = first.stamp


def test_a_reader_that_was_given_up_is_finalised_by_who_holds_the_lock(tmp_path, monkeypatch):
    """The garbage collector ends a suspended reader, of a build that failed, in the midst of another's opening."""
    paths = [str(write(tmp_path / f"{number}.grib", [message("t")])) for number in range(2)]
    files = Descriptors(most=1)

    def reading():
        with files.opened(paths[0]) as descriptor:
            yield descriptor

    given_up = reading()
    next(given_up)
    monkeypatch.setattr(files, "_close_oldest", given_up.close)

    def another():
        with files.opened(paths[1]):
            pass

    thread = threading.Thread(target=another, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize("bits", [1, 5, 8, 10, 12, 15, 16])
def test_simple_packing_keeps_integers_and_equals_eccodes(tmp_path, edition, bits):
    path = write(tmp_path / "a.grib", [message("t", edition=edition, bits=bits, seed=seed) for seed in range(3)])
    file = same_as_eccodes(path)
    assert all(raw.packed and raw.values.max() < 2**bits for raw in file.fields(file.records))


@settings(max_examples=40)
@given(
    st.sampled_from([8, 10, 12, 16]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, -2, 1, 3, 4]),
    arrays(np.float64, (3, 5), elements=st.floats(-1024, 1024, width=32)),
)
def test_any_values_and_scales_equal_eccodes(tmp_path_factory, bits, edition, decimal, values):
    grid = np.linspace(10, 0, 3), np.arange(5.0)
    path = tmp_path_factory.mktemp("any") / "a.grib"
    same_as_eccodes(write(path, [message("t", values, grid=grid, edition=edition, bits=bits, decimal=decimal)]))


@settings(max_examples=30)
@given(st.floats(-1e6, 1e6, allow_subnormal=False), st.sampled_from([1, 2]))
def test_constant_fields_need_no_bits(tmp_path_factory, value, edition):
    path = write(tmp_path_factory.mktemp("c") / "a.grib", [message("t", np.full((7, 12), value), edition=edition)])
    assert same_as_eccodes(path).records["bits"][0] == 0


@settings(max_examples=40)
@given(st.integers(1, 24), st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=40))
def test_unpacking_undoes_packing(bits, values):
    values = [value % 2**bits for value in values]
    text = "".join(f"{value:0{bits}b}" for value in values)
    text += "0" * (-len(text) % 8)
    content = bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))
    np.testing.assert_array_equal(unpack(np.frombuffer(content, np.uint8), bits, len(values)), values)


@pytest.mark.parametrize("packing", ["grid_ccsds", "grid_ieee", "grid_jpeg"])
def test_other_packings_are_decoded_by_eccodes(tmp_path, packing):
    file = same_as_eccodes(write(tmp_path / "a.grib", [message("t", edition=2, packing=packing, bits=20)]))
    assert not next(file.fields(file.records)).packed


@pytest.mark.parametrize("bits", [17, 20, 24, 25, 32])
def test_more_than_16_bits_are_decoded_to_float32(tmp_path, bits):
    file = same_as_eccodes(write(tmp_path / "a.grib", [message("t", bits=bits)]))
    assert not next(file.fields(file.records)).packed


def test_units_are_converted_without_losing_the_integers(tmp_path):
    values = np.abs(noise(mean=0.0, std=0.5)) * 100
    path = write(tmp_path / "a.grib", [message(228164, values, edition=2)])  # cloud cover in %
    file = GribFile(str(path))
    raw = next(file.fields(file.records))
    assert raw.packed
    np.testing.assert_allclose(raw.decode(), next(decoded(path))[1] / 100, rtol=1e-6)


def test_surface_geopotential_is_orography(tmp_path):
    file = GribFile(str(write(tmp_path / "a.grib", [message(129, noise(mean=5000, std=100))])))
    expected = next(decoded(file.path))[1] / 9.80665
    np.testing.assert_allclose(next(file.fields(file.records)).decode(), expected, rtol=1e-6)


def test_keys_are_recorded(tmp_path):
    made = [
        message("t", date=19991231, time=1800, step=48, member=7, level=850),
        message("t", step=48, member=0, kind="cf", edition=2),
        message("fg10", step="69-72", member=3),
        message("tp", step="0-24", member=2, edition=2),
        message("t2m", member=None),
    ]
    records = GribFile(str(write(tmp_path / "a.grib", made))).records
    assert str(records[0]["init"]) == "1999-12-31T18:00:00"
    assert records["level"].tolist() == [850, 500, 0, 0, 0]
    assert records["member"].tolist() == [7, 0, 3, 2, 0]
    assert records["kind"].tolist() == [0, 1, 0, 0, 0]
    assert records["lead"].tolist() == [48, 48, 72, 24, 0]
    assert records["lead_start"].tolist() == [48, 48, 69, 0, 0]
    assert records["bounded"].tolist() == [False, False, True, True, False]


def test_headers_met_before_are_not_confused(tmp_path):
    """Equal headers but for date and packing constants share one answer of ecCodes; all else must not."""
    made = []
    for day in (20010101, 20020228, 20000229):
        for number in (1, 2):
            for level in (500, 850):
                made.append(message("t", date=day, member=number, level=level, seed=day + number + level))
    file = same_as_eccodes(write(tmp_path / "a.grib", made))
    for record, (keys, _) in zip(file.records, decoded(file.path), strict=True):
        date = keys["dataDate"]
        assert str(record["init"])[:10] == f"{date // 10000}-{date // 100 % 100:02d}-{date % 100:02d}"
        assert (record["member"], record["level"]) == (keys["number"], keys["level"])


def test_rows_from_south_and_longitudes_from_minus_180(tmp_path):
    grid = np.linspace(-90, 90, 7), np.arange(-180.0, 180.0, 30.0)
    values = np.add.outer(grid[0], grid[1] / 1000)
    file = GribFile(str(write(tmp_path / "a.grib", [message("t", values, grid=grid)])))
    assert file.grid.wraps and file.grid.latitude[0] == 90 and file.grid.longitude[0] == 0
    expected = np.add.outer(file.grid.latitude, (np.mod(file.grid.longitude + 180, 360) - 180) / 1000)
    np.testing.assert_allclose(next(file.fields(file.records)).decode(), expected, atol=0.01)


def test_messages_scanned_both_ways_stand_in_one_file(tmp_path):
    south = GLOBE[0][::-1], GLOBE[1]
    values = noise()
    path = write(tmp_path / "a.grib", [message("t", values), message("t", values[::-1], grid=south, member=2)])
    file = GribFile(str(path))
    first, second = (raw.decode() for raw in file.fields(file.records))
    np.testing.assert_array_equal(first, second)


def test_a_region_stays_in_one_piece(tmp_path):
    grid = GribFile(str(write(tmp_path / "a.grib", [message("t", grid=REGION)]))).grid
    assert not grid.wraps and grid.longitude[0] == -12 and grid.longitude[-1] == 6


def test_large_messages_of_edition_1_are_found():
    """Above 8 MiB edition 1 states its length in units of 120 bytes, less what section 4 says (here 100 = 120 - 20)."""
    sections = (28).to_bytes(3, "big") + bytes(25)
    total = 120 * 70_000
    surplus = 20
    length = (0x800000 | 70_000).to_bytes(3, "big")
    body = b"GRIB" + length + b"\x01" + sections + (surplus + 4).to_bytes(3, "big")
    content = body + bytes(total - surplus - 4 + 4 - len(body) - 4) + b"7777"
    assert list(frames("a", content)) == [(0, len(content))]


def test_bytes_between_messages_are_passed_over(tmp_path):
    path = write(tmp_path / "a.grib", [b"\0" * 8, message("t"), b"\0" * 13, message("t", member=2), b"\0"])
    assert len(GribFile(str(path)).records) == 2


@pytest.mark.parametrize("edition", [1, 2])
def test_truncated_file(tmp_path, edition, capfd):
    one = message("t", edition=edition)
    path = write(tmp_path / "a.grib", [one, message("t", member=2, edition=edition)[:-30]])
    with pytest.raises(UserError, match=rf"a.grib: message 2 at byte {len(one)} needs .* truncated") as caught:
        GribFile(str(path))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_damaged_end_and_damaged_sections(tmp_path, capfd):
    one = message("t")
    with pytest.raises(UserError, match="does not end in 7777"):
        GribFile(str(write(tmp_path / "a.grib", [one[:-4] + b"0000"])))
    broken = bytearray(message("t", edition=2))
    broken[16:20] = struct.pack(">I", 0)
    with pytest.raises(UserError, match="message 1 at byte 0: damaged sections"):
        GribFile(str(write(tmp_path / "b.grib", [bytes(broken)])))
    assert capfd.readouterr().err == ""


def test_neither_messages_nor_content(tmp_path):
    with pytest.raises(UserError, match="holds no GRIB message"):
        GribFile(str(write(tmp_path / "a.grib", [b"GRIN" * 20])))
    with pytest.raises(UserError, match="is empty"):
        GribFile(str(write(tmp_path / "b.grib", [])))


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff", (2 * 10**9).to_bytes(4, "big")])
def test_intervals_of_no_length_or_of_millennia_are_refused(tmp_path, length):
    whole = message("tp", step="24-48", edition=2)
    place = whole.index((24).to_bytes(4, "big"), whole.index((24).to_bytes(4, "big")) + 4)  # behind the first hour
    path = write(tmp_path / "a.grib", [whole[:place] + length + whole[place + 4 :]])
    with pytest.raises(UserError, match=r"step 24-\S+: not understood; hours, or a range of hours, are read"):
        GribFile(str(path))


def test_sections_out_of_their_order_are_damaged():
    one = message("t", edition=2)
    repeated = one[:-4] + b"\0\0\0\x09\x04\0\0\0\0" + b"7777"  # a section 4 that no values follow
    with pytest.raises(UserError, match=r"damaged sections \(they do not fill the message\)"):
        headers(repeated)


@pytest.mark.parametrize(("sample", "name"), [("reduced_ll_sfc_grib2", "reduced_ll"), ("sh_ml_grib1", "sh")])
def test_other_grids_are_refused_by_name(tmp_path, sample, name):
    import eccodes

    handle = eccodes.codes_grib_new_from_samples(sample)
    eccodes.codes_set(handle, "paramId", 130)
    eccodes.codes_set(handle, "typeOfLevel", "isobaricInhPa")
    path = write(tmp_path / "a.grib", [eccodes.codes_get_message(handle)])
    with pytest.raises(UserError, match=f"grid type {name}; only regular latitude-longitude grids .* Gaussian"):
        GribFile(str(path))


def test_two_grids_in_one_file(tmp_path):
    path = write(tmp_path / "a.grib", [message("t"), message("t", grid=REGION, member=2)])
    with pytest.raises(
        UserError, match=r"message 2 at byte .*: grid 4 x 7 points.*differs from the file's first, 7 x 12"
    ):
        GribFile(str(path))


def test_unknown_parameters_are_counted(tmp_path):
    file = GribFile(str(write(tmp_path / "a.grib", [message(78), message(78, member=2), message("t")])))
    assert len(file.records) == 1 and list(file.skipped.values()) == [2]


def test_minutes_are_read_as_whole_hours_or_refused(tmp_path):
    good = message("t", edition=2, step="120m", stepUnits="m", productDefinitionTemplateNumber=1)
    assert GribFile(str(write(tmp_path / "a.grib", [good]))).records["lead"][0] == 2
    bad = message("t", edition=2, step="90m", stepUnits="m", productDefinitionTemplateNumber=1)
    with pytest.raises(UserError, match="step 90m: only whole hours are read"):
        GribFile(str(write(tmp_path / "b.grib", [bad])))
