"""Damaged GRIB messages: one clear line, or what ecCodes makes of the same bytes; never a traceback, never a guess."""

import eccodes
import numpy as np
import pytest
from gribfiles import GLOBE, message, noise, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep import open_archive
from data_prep.grib import GribFile
from ensemble_ml.errors import UserError
from ensemble_ml.fields import by_param_id, field
from ensemble_ml.store import Part

HIDDEN = noise(GLOBE, 1, 0, 1) > 1
MESSAGES = [
    message("t", edition=1, step=24, member=3),
    message("t", edition=2, step=24, member=3),
    message("tp", edition=2, step="0-24", member=3),
    message("sst", np.where(HIDDEN, 9999, noise()), edition=1, bitmapPresent=1, missingValue=9999),
    message("sst", np.where(HIDDEN, 9999, noise()), edition=2, bitmapPresent=1, missingValue=9999),
    message("t", edition=2, packing="grid_ccsds"),
]


def eccodes_view(content):
    """Keys and values as ecCodes has them, or None where it refuses."""
    try:
        handle = eccodes.codes_new_from_message(content)
    except eccodes.CodesInternalError:
        return None
    try:
        get = {key: eccodes.codes_get(handle, key) for key in ("paramId", "level", "dataDate", "dataTime", "endStep")}
        get["number"] = eccodes.codes_get(handle, "number") if eccodes.codes_is_defined(handle, "number") else 0
        values = eccodes.codes_get_array(handle, "values")
        if eccodes.codes_get(handle, "bitmapPresent"):
            values[eccodes.codes_get_array(handle, "bitmap") == 0] = np.nan
        height = get["paramId"] == 156  # geopotential height, of which geopotential is made
        return get, (values * (9.80665 if height else 1.0)).astype(np.float32)
    except (eccodes.CodesInternalError, ValueError):  # numpy refuses sizes that a header makes up
        return None
    finally:
        eccodes.codes_release(handle)


def header_length(content):
    """Bytes before the packed values."""
    handle = eccodes.codes_new_from_message(content)
    try:
        return eccodes.codes_get(handle, "offsetBeforeData")
    finally:
        eccodes.codes_release(handle)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MESSAGES), st.data())
def test_flipped_header_bytes(tmp_path_factory, content, data):
    spoilt = bytearray(content)
    for _ in range(data.draw(st.integers(1, 2))):
        spoilt[data.draw(st.integers(8, header_length(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.grib"
    write(path, [bytes(spoilt)])
    try:
        file = GribFile(str(path))
        fields = [raw.decode() for raw in file.fields(file.records)]
    except UserError as error:
        assert "\n" not in str(error) and "flipped.grib" in str(error)
        return
    if not fields:
        assert file.skipped  # a variable that the registry does not know
        return
    seen = eccodes_view(bytes(spoilt))
    assert seen is not None
    keys, values = seen
    record = file.records[0]
    np.testing.assert_array_equal(np.sort(fields[0].ravel()), np.sort(values))
    known = by_param_id(keys["paramId"])
    assert known is not None and field(known.name).surface == (record["level"] == 0 or known.surface)
    assert (int(record["member"]), int(record["lead"])) == (keys["number"], keys["endStep"])
    start = f"{keys['dataDate']:08d}T{keys['dataTime']:04d}"
    assert str(record["init"].astype("datetime64[m]")).replace("-", "").replace(":", "") == start
    if not known.surface:
        assert record["level"] in (keys["level"], keys["level"] / 100)


@pytest.mark.parametrize("octet", [2, 130], ids=["positive", "negative"])  # of the decimal scale, sign and magnitude
def test_a_decimal_scale_beyond_all_floats(tmp_path, octet):
    """In packing that ecCodes decodes: 10^-512 leaves zeros, 10^512 no number."""
    content = bytearray(MESSAGES[5])
    content[header_length(bytes(content)) - 19] = octet  # 8 octets of section 5, all 6 of section 6, 5 of section 7
    file = GribFile(str(write(tmp_path / "a.grib", [bytes(content)])))
    if octet == 2:
        [raw] = file.fields(file.records)
        assert not raw.decode().any() and raw.rounding == 0
    else:
        with pytest.raises(UserError, match=r"a.grib: message at byte 0, t: 84 of 84 values are NaN or infinite"):
            list(file.fields(file.records))


@settings(max_examples=60)
@given(st.sampled_from(MESSAGES), st.data())
def test_cut_anywhere(tmp_path_factory, content, data):
    size = data.draw(st.integers(1, len(content) - 1))
    path = write(tmp_path_factory.getbasetemp() / "cut.grib", [content, content[:size]])
    try:
        file = GribFile(str(path))
    except UserError as error:
        assert "message 2 at byte" in str(error) and "truncated" in str(error) and "\n" not in str(error)
    else:
        assert size < 4 and len(file.records) == 1  # too little to tell from padding


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize("change", [-16, 1, 1000, 1 << 20])
def test_wrong_lengths_of_the_section_of_values(tmp_path, edition, change):
    content = bytearray(message("t", edition=edition))
    offset = header_length(bytes(content)) - (11 if edition == 1 else 5)
    width = 3 if edition == 1 else 4
    length = int.from_bytes(content[offset : offset + width], "big")
    content[offset : offset + width] = (length + change).to_bytes(width, "big")
    with pytest.raises(UserError, match=r"a.grib: message 1 at byte 0: .*(of values|sections|several fields)"):
        GribFile(str(write(tmp_path / "a.grib", [bytes(content)])))


@pytest.mark.parametrize(
    "change", [(3, 4), (3, 12 + 16), (0, 1, 0), (2, -2), (2, -150), (2, -159)], ids=lambda c: "_".join(map(str, c))
)
def test_a_bitmap_and_values_that_do_not_fit(tmp_path, change):
    """Octet 4 of section 3 (bits left over), its length, and the length of section 4."""
    content = bytearray(MESSAGES[3])
    handle = eccodes.codes_new_from_message(bytes(content))
    section3, section4 = (eccodes.codes_get(handle, f"offsetSection{number}") for number in (3, 4))
    eccodes.codes_release(handle)
    place, value = {2: (section4 + 2, content[section4 + 2]), 3: (section3 + 3, 0), 0: (section3 + 2, 0)}[change[0]]
    content[place] = change[1] if change[0] != 2 else value + change[1]
    if change[0] == 0:
        content[place] = content[section3 + 2] + 1
    with pytest.raises(UserError, match=r"a.grib: message .*at byte 0.*") as caught:
        file = GribFile(str(write(tmp_path / "a.grib", [bytes(content)])))
        list(file.fields(file.records))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("octets", [(3, 48), (4, 223)], ids=["vertical coordinates", "points by row"])
def test_lists_beyond_the_end_of_section_2(tmp_path, octets):
    """ecCodes reads beyond the message there, which ends the program with a segmentation fault."""
    content = bytearray(MESSAGES[3])
    content[8 + int.from_bytes(content[8:11], "big") + octets[0]] = octets[1]
    with pytest.raises(UserError, match=r"message 1 at byte 0: damaged sections \(section 2 of 32 bytes has no space"):
        GribFile(str(write(tmp_path / "a.grib", [bytes(content)])))


@pytest.mark.parametrize(("edition", "most"), [(1, 255), (2, 254)])  # in edition 2, all bits set are no number
@pytest.mark.parametrize("order", [(3, 0, None, 1), (0, 3, 1, None)])
def test_members_from_0_to_the_largest(tmp_path, edition, most, order):
    numbers = tuple(most if number is None else number for number in order)
    messages = [message("t", edition=edition, step=24, member=number, level=431) for number in numbers]
    file = GribFile(str(write(tmp_path / "a.grib", messages)))
    assert tuple(file.records["member"].tolist()) == numbers


@pytest.mark.parametrize("edition", [1, 2])
def test_a_level_of_no_pressure(tmp_path, edition):
    content = message("t", edition=edition, level=0)
    with pytest.raises(UserError, match=r"message 2 at byte .* level 0 hPa: is none"):
        GribFile(str(write(tmp_path / "a.grib", [message("t", edition=edition), content])))


def test_a_climate_of_no_year(tmp_path):
    content = bytearray(MESSAGES[0])
    content[20] = 255
    with pytest.raises(UserError, match="year 255 of its century: does not exist"):
        GribFile(str(write(tmp_path / "a.grib", [bytes(content)])))


def test_a_message_that_says_it_is_empty(tmp_path):
    content = bytearray(message("t", edition=2))
    content[8:16] = bytes(8)
    with pytest.raises(UserError, match=r"message 2 at byte \d+ states no length"):
        GribFile(str(write(tmp_path / "a.grib", [message("t"), bytes(content)])))


def test_a_bitmap_of_more_points_than_values(tmp_path):
    content = bytearray(MESSAGES[3])
    handle = eccodes.codes_new_from_message(bytes(content))
    first = eccodes.codes_get(handle, "offsetBeforeBitmap")
    eccodes.codes_release(handle)
    content[first : first + 10] = b"\xff" * 10
    with pytest.raises(UserError, match=r"sst: its bitmap has \d+ points, but not as many values; fetch it again"):
        open_archive(write(tmp_path / "a.grib", [bytes(content)])).gather(Part.FORECAST, 0)
