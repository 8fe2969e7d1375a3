"""What a GRIB message is: a field of one run is read, all else is left out by name, whatever parameter it bears."""

import logging
from pathlib import Path

import eccodes
import numpy as np
import pytest
from grib_table import changed, kinds, table
from gribfiles import decoded, ensemble, message, noise, write

from data_prep import open_archive, prepare
from data_prep.grib import GribFile
from data_prep.grib_fields import PRODUCT_TEMPLATES, STREAMS
from data_prep.records import CONTROL, MEMBER, MEMBER_TYPES
from ensemble_ml.config import PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part

PAGE = Path(__file__).parents[2] / "docs" / "grib.md"


@pytest.fixture(scope="module")
def found():
    return kinds()


def read_names(found, heading):
    return {name for name, (is_read, _) in found[heading].items() if is_read}


@pytest.mark.slow
def test_only_runs_and_their_members_are_read_of_all_that_ecCodes_writes(found):
    templates = found["Product definition templates (edition 2, code table 4.0)"]
    assert len(templates) > 150
    assert read_names(found, "Product definition templates (edition 2, code table 4.0)") == {
        f"4.{number}" for number in PRODUCT_TEMPLATES
    }
    assert templates["4.6"][1].endswith("of product template 4.6")
    assert len(found["Types of MARS"]) > 70 and read_names(found, "Types of MARS") == set(MEMBER_TYPES)
    assert found["Types of MARS"]["ses"][1].endswith("of type ses")
    assert len(found["Streams of MARS"]) > 120 and read_names(found, "Streams of MARS") == set(STREAMS)
    assert len(found["Local definitions of ECMWF, edition 2"]) > 30
    assert read_names(found, "Local definitions of ECMWF, edition 2") == {"1", "15", "26", "30", "36"}
    assert read_names(found, "Levels of temperature, edition 1") == {"isobaricInhPa (100)"}
    second = "Levels of temperature, edition 2 (at a height of 2 m it is the 2 metre temperature)"
    assert read_names(found, second) == {"isobaricInhPa (100)", "heightAboveGround (103)"}
    assert read_names(found, "Levels of 2 metre temperature, edition 1") == {"surface (1)", "heightAboveGround (105)"}


@pytest.mark.slow
def test_the_documentation_shows_what_is_read(found):
    assert PAGE.read_text() == table(found), "python tests/data_prep/grib_table.py > docs/grib.md"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"typeOfGeneratingProcess": 9}, "of generating process 9"),
        ({"typeOfGeneratingProcess": 6}, "of generating process 6"),
        ({"significanceOfReferenceTime": 2}, "of reference time 2, which is no start"),
        ({"typeOfProcessedData": 8}, "of type ep"),
        ({"typeOfTimeIncrement": 1}, "of time increment 1, over several runs"),
    ],
)
def test_keys_beside_the_template_are_looked_at(tmp_path, keys, reason):
    made = changed(message("t", edition=2, member=2, step="0-24" if "typeOfTimeIncrement" in keys else 24), **keys)
    file = GribFile(str(write(tmp_path / "a.grib", [message("t", edition=2, member=1, step=24), made])))
    assert file.records["member"].tolist() == [1]
    assert list(file.skipped) == [f"130 (t, isobaricInhPa), {reason}"]


def test_statistics_of_statistics_are_left_out(tmp_path):
    made = message("tp", edition=2, member=2, step="0-24")
    daily = changed(made, numberOfTimeRange=2, typeOfStatisticalProcessing=1)
    file = GribFile(str(write(tmp_path / "a.grib", [message("tp", edition=2, member=1, step="0-24"), daily])))
    assert file.records["member"].tolist() == [1] and sum(file.skipped.values()) == 1


@pytest.mark.parametrize("version", [0, 4, 15, 34])
@pytest.mark.parametrize(
    ("code", "kind"), [(1, MEMBER), (3, CONTROL), (4, MEMBER), (255, MEMBER), (6, None), (8, None), (192, None)]
)
def test_codes_of_processed_data_are_the_same_in_all_tables(tmp_path, version, code, kind):
    """ecCodes names them otherwise from one version of the tables to the next, and the missing one not at all."""
    made = changed(message("t", edition=2, member=2, step=24), tablesVersion=version)
    file = GribFile(str(write(tmp_path / "a.grib", [changed(made, typeOfProcessedData=code)])))
    assert file.records["kind"].tolist() == ([] if kind is None else [kind])


def test_an_interval_that_ends_elsewhere_by_its_date_is_left_out(tmp_path):
    keys = {"edition": 2, "step": "0-24"}
    made = [message("tp", member=m, **keys) for m in (1, 2, 3)]
    made[1] = changed(made[1], dayOfEndOfOverallTimeInterval=5)
    file = GribFile(str(write(tmp_path / "a.grib", made)))
    assert file.records["member"].tolist() == [1, 3]
    (said,) = file.skipped
    assert "ends at 2001-01-05T00:00:00 by its date, at 2001-01-02T00:00:00 by its length" in said


@pytest.mark.parametrize("how", ["zeros", "half", "page"])
def test_bytes_between_messages_are_named(tmp_path, caplog, how):
    first, second, third = (message("t", member=m) for m in (1, 2, 3))
    made = {
        "zeros": [first, bytes(len(second)), third],
        "half": [first, third, second[len(second) // 2 :] + second],
        "page": [first, third, b"<html>" + b"x" * 300],
    }[how]
    source = open_archive(write(tmp_path / "a.grib", made))
    assert {1, 3} <= set(source.layout.realization)
    assert any(
        "a message may be damaged there" in line and "that are no GRIB message" in line for line in caplog.messages
    )
    caplog.clear()
    heading = b"\x01\r\r\n001\r\r\nHEFS50 ECMF 010000\r\r\n"
    open_archive(write(tmp_path / "b.grib", [heading + first, heading + second + bytes(4000)]))
    assert not any("damaged" in line for line in caplog.messages)


@pytest.mark.parametrize(("value", "fits"), [(9999.0, False), (0.0, False), (-9999.0, False), (5700.0, True)])
def test_heights_of_a_level_lie_near_those_of_the_standard_atmosphere(tmp_path, value, fits):
    values = noise(mean=5500.0, std=50.0)
    values[2, 2] = value
    source = open_archive(write(tmp_path / "a.grib", [message("z", 9.80665 * values, bits=24)]))
    if fits:
        source.read(Part.FORECAST, 0)
        return
    with pytest.raises(UserError, match=r"z at 500 hPa, .*: 1 of 84 values are not between 29586.5 and 79746.4"):
        source.read(Part.FORECAST, 0)


def test_local_sections_of_edition_1(tmp_path):
    """5 is a forecast probability, 16 a monthly mean; 26 is a hindcast's label."""
    for number, members in ((5, [1]), (16, [1]), (26, [1, 2])):
        made = changed(message("t", member=2), localDefinitionNumber=number)
        made = changed(made, type="pf", stream="enfo", **({"number": 2} if number == 26 else {}))
        file = GribFile(str(write(tmp_path / f"{number}.grib", [message("t"), made])))
        assert file.records["member"].tolist() == members
        if number != 26:
            assert list(file.skipped) == [f"130 (t, isobaricInhPa), of local definition {number} of ecmf"]


def test_a_member_without_a_number_is_none(tmp_path):
    """255 is the missing value of the octet; as the first message of its kind, and as one of many."""
    for template, name, step in ((1, "t2m", 24), (11, "tp", "0-24"), (60, "t2m", 24), (61, "tp", "0-24")):
        made = [message(name, member=m, edition=2, step=step) for m in (255, 3, 255, 254)]
        made = [changed(one, productDefinitionTemplateNumber=template) for one in made]
        file = GribFile(str(write(tmp_path / f"{template}.grib", made)))
        assert file.records["member"].tolist() == [3, 254]
        assert sum(file.skipped.values()) == 2
        assert all(said.endswith(", of a member without a number") for said in file.skipped)


@pytest.mark.parametrize(("edition", "parameter", "hours"), [(1, 123, 6), (1, 228028, 3), (2, 123, 6)])
def test_the_largest_gust_of_some_hours_is_not_that_of_the_moment(tmp_path, edition, parameter, hours):
    """Messages of edition 1 and of some encoders state one step, and no range."""
    one = {"edition": edition, "paramId": parameter}
    made = [message("fg10", member=m, step=step, **one) for m in (1, 2) for step in (4, 12)]
    file = GribFile(str(write(tmp_path / "a.grib", [*made, message("fg10", member=1, step="0-48")])))
    assert file.records["lead_start"].tolist() == [max(4 - hours, 0), 12 - hours] * 2 + [0]
    assert file.records["bounded"].all() and file.methods == {"fg10": "maximum"}
    of_moment = message("fg10", member=1, step=24, **(one | {"paramId": 228029}))
    path = write(tmp_path / "b.grib", [*made, of_moment])
    with pytest.raises(UserError, match=r"fg10: at 24 h the archive has instantaneous values, at 4 h .* an interval"):
        open_archive(path)


def test_what_is_left_out_is_named_with_its_reason(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    percentile = changed(message("t2m", edition=2, member=None), productDefinitionTemplateNumber=6, percentileValue=90)
    path = write(tmp_path / "a.grib", [message("t2m", member=m) for m in (1, 2)] + [percentile])
    assert open_archive(path).layout.realization == (1, 2)
    assert any("2t, heightAboveGround), of product template 4.6" in line for line in caplog.messages)
    alone = write(tmp_path / "p90.grib", [percentile])
    with pytest.raises(UserError, match=r"p90.grib: holds no field .*of product template 4.6"):
        open_archive(alone)
    with pytest.raises(UserError, match=r"p90.grib: holds no field .*of product template 4.6"):
        prepare(PrepareConfig(input=str(path), truth=str(alone), output=str(tmp_path / "s.zarr")))


def joined(messages, *, section):
    """One message of edition 2 with several fields, which repeats its sections from `section` on."""
    many = eccodes.codes_grib_multi_new()
    for made in messages:
        handle = eccodes.codes_new_from_message(made)
        eccodes.codes_grib_multi_append(handle, section, many)
        eccodes.codes_release(handle)
    return many


@pytest.mark.parametrize("section", [3, 4])
@pytest.mark.parametrize("packing", ["grid_simple", "grid_ccsds", "grid_complex"])
def test_messages_of_several_fields_are_their_fields(tmp_path, section, packing):
    keys = {"edition": 2, "step": 24, "packing": packing}
    parts = [message(name, member=2, level=level, seed=level, **keys) for name in ("t", "z") for level in (500, 850)]
    many = joined(parts, section=section)
    with (tmp_path / "many.grib").open("wb") as file:
        eccodes.codes_grib_multi_write(many, file)
    eccodes.codes_grib_multi_release(many)
    one = message("t", member=3, level=500, seed=9, **keys)
    (tmp_path / "many.grib").write_bytes((tmp_path / "many.grib").read_bytes() + one)
    assert (tmp_path / "many.grib").read_bytes().count(b"7777") < len(parts) + 1  # they are in one message
    apart = write(tmp_path / "apart.grib", [*parts, one])
    files = [GribFile(str(path)) for path in (tmp_path / "many.grib", apart)]
    assert len(files[0].records) == len(parts) + 1
    for name in ("field", "level", "member", "lead", "init", "bits", "reference", "scale", "decimal"):
        np.testing.assert_array_equal(files[0].records[name], files[1].records[name])
    for mine, (_, values) in zip(files[0].fields(files[0].records), decoded(apart), strict=True):
        np.testing.assert_array_equal(mine.decode(), values)


def test_a_bitmap_of_the_field_before_hides_the_same_points(tmp_path):
    hidden = np.random.default_rng(0).random((7, 12)) < 0.3
    parts = []
    for number in (1, 2):
        values = noise(seed=number, mean=290)
        values[hidden] = 9999
        parts.append(message("sst", values, edition=2, member=number, missingValue=9999, bitmapPresent=1))
    first, second = parts
    begin = second.index(b"\0\0", 16)  # section 1
    sections = {}
    while second[begin : begin + 4] != b"7777":
        length = int.from_bytes(second[begin : begin + 4], "big")
        sections[second[begin + 4]] = second[begin : begin + length]
        begin += length
    sections[6] = b"\0\0\0\6\6\xfe"  # the bitmap that was defined before
    body = first[16:-4] + b"".join(sections[number] for number in (4, 5, 6, 7)) + b"7777"
    many = first[:8] + (16 + len(body)).to_bytes(8, "big") + body
    files = [GribFile(str(write(tmp_path / name, made))) for name, made in (("m.grib", [many]), ("a.grib", parts))]
    both = [list(file.fields(file.records)) for file in files]
    for mine, apart in zip(*both, strict=True):
        np.testing.assert_array_equal(mine.mask, hidden)
        np.testing.assert_array_equal(mine.decode(), apart.decode())
    lone = second[:16] + b"".join(sections[number] for number in sorted(sections)) + b"7777"
    lone = lone[:8] + len(lone).to_bytes(8, "big") + lone[16:]
    with pytest.raises(UserError, match="its bitmap is that of a field before, and there is none"):
        GribFile(str(write(tmp_path / "l.grib", [lone])))


@pytest.mark.parametrize("value", [9999.0, -9999.0, 9.999e20])
@pytest.mark.parametrize("packing", ["grid_simple", "grid_ccsds"])
def test_missing_values_that_no_bitmap_hides_are_refused(tmp_path, value, packing):
    values = noise()
    values[3, 4] = value
    made = [message("t2m", values, edition=2, member=m, packing=packing, bits=24) for m in (1, 2)]
    source = open_archive(write(tmp_path / "a.grib", made))
    with pytest.raises(UserError, match=r"t2m, member 1, .*: 1 of 84 values are not between 100 and 400 K, the first"):
        source.read(Part.FORECAST, 0)


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("tp", -6.4e-3, "1 of 84 values are not between -0.00015 and 9.5 m, the first -0.0064"),
        ("tp", -0.5, "1 of 84 values"),
        ("tcc", 1.2, "1 of 84 values are not between -0.01 and 1.01 1, the first 1.2"),
        ("q", 12.0, "1 of 84 values are not between -0.002 and 0.5"),
        ("msl", 1013.0, "1 of 84 values are not between 30000 and 120000 Pa"),
    ],
)
def test_values_that_are_no_weather_are_refused(tmp_path, name, values, text):
    typical = {"tp": 5e-3, "tcc": 0.5, "q": 5e-3, "msl": 1e5}[name]
    field = noise(mean=typical, std=typical / 100)
    field[0, 0] = values
    steps = {"step": "0-24"} if name == "tp" else {"step": 24}
    made = [message(name, field, member=m, bits=16, **steps) for m in (1, 2)]
    source = open_archive(write(tmp_path / "a.grib", made))
    with pytest.raises(UserError, match=text):
        source.read(Part.FORECAST, 0)


def test_zero_rain_and_whole_clouds_stay_as_they_are(tmp_path):
    for name, values in (("tp", np.zeros((7, 12))), ("tcc", np.ones((7, 12)))):
        values[1] = 0.3e-3 if name == "tp" else 0.2
        made = [message(name, values, member=m, step="0-24" if name == "tp" else 24, bits=8) for m in (1, 2)]
        source = open_archive(write(tmp_path / f"{name}.grib", made))
        (_, expected), _ = decoded(tmp_path / f"{name}.grib")
        np.testing.assert_array_equal(source.read(Part.FORECAST, 0).surface[0, 0, 0], expected)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"experimentVersionNumber": "0078"}, "experiment 0078"),
        ({"marsClass": "rd"}, "class rd"),
        ({"centre": "kwbc"}, "centre kwbc"),
        ({"marsStream": "eefo"}, "ensemble eefo"),
    ],
)
def test_members_of_two_centres_or_experiments_are_refused_by_name(tmp_path, keys, said):
    edition = 2 if "centre" in keys else 1  # in edition 1 each centre numbers its variables
    ensemble(tmp_path / "in" / "a.grib", names=("t2m",), members=(1, 2), dates=(20010101,), steps=(0,), edition=edition)
    others = [changed(message("t2m", member=m, edition=edition), **keys) for m in (3, 4)]
    write(tmp_path / "in" / "b.grib", others)
    with pytest.raises(UserError, match=rf"holds fields of .*a.grib\) and of .*{said}.*b.grib\); give those of one"):
        open_archive(tmp_path / "in")
    assert open_archive(tmp_path / "in" / "b.grib").layout.realization == (3, 4)


@pytest.mark.parametrize("edition", [1, 2])
def test_members_of_two_subcentres_are_refused_by_name(tmp_path, edition):
    for first, second, one in ((2, 3, False), (0, 2, False), (255, 2, True), (2, 2, True)):
        folder = tmp_path / f"{first}-{second}"
        for number, subcentre in ((1, first), (2, second)):
            made = changed(message("t2m", member=number, edition=edition), subCentre=subcentre)
            write(folder / f"{number}.grib", [made])
        if one:
            assert open_archive(folder).layout.realization == (1, 2)
            continue
        with pytest.raises(UserError, match=rf"centre ecmf, subcentre {first}.* of centre ecmf, subcentre {second}"):
            open_archive(folder)


def hindcast(how, member, year, date):
    """A member of a hindcast that a model of some year made."""
    edition = 1 if how == "edition 1" else 2
    made = message("t2m", member=member, edition=edition, date=date, step=24)
    if how == "template":
        made = changed(made, productDefinitionTemplateNumber=60)
        return changed(made, YearOfModelVersion=year, MonthOfModelVersion=1, DayOfModelVersion=2)
    local = {"setLocalDefinition": 1, "grib2LocalSectionNumber": 26}
    made = changed(made, **({"localDefinitionNumber": 26} if edition == 1 else local))
    made = changed(made, type="pf", stream="enfh", **({"number": member} if edition == 1 else {}))
    return changed(made, referenceDate=year * 10000 + 102)


@pytest.mark.parametrize("how", ["template", "edition 1", "edition 2"])
def test_hindcasts_of_two_models_are_no_one_ensemble(tmp_path, how):
    write(tmp_path / "in" / "a.grib", [hindcast(how, 1, 2020, 20010101)])
    write(tmp_path / "in" / "b.grib", [hindcast(how, 2, 2021, 20010101)])
    with pytest.raises(UserError, match=r"model 20200102 \(.*a.grib\) and of .*model 20210102 \(.*b.grib\); give"):
        open_archive(tmp_path / "in")
    write(tmp_path / "in" / "b.grib", [hindcast(how, 1, 2021, 20010104)])
    assert len(open_archive(tmp_path / "in").layout.init_time) == 2


def test_start_dates_may_come_from_one_ensemble_after_the_other(tmp_path):
    ensemble(tmp_path / "in" / "a.grib", names=("t2m",), members=(1, 2), dates=(20010101,), steps=(0,))
    later = [changed(message("t2m", member=m, date=20010103), marsStream="eefo") for m in (1, 2)]
    write(tmp_path / "in" / "b.grib", later)
    assert len(open_archive(tmp_path / "in").layout.init_time) == 2


def test_a_control_may_be_a_run_of_its_own(tmp_path):
    """As in ECMWF's open data since cycle 50r1; waves are of the ensemble."""
    members = [message("t2m", member=m) for m in (1, 2)]
    control = changed(message("t2m", member=None), marsStream="oper")
    waves = [changed(message("t2m", member=3), marsStream="waef")]
    write(tmp_path / "in" / "a.grib", [*members, *waves])
    write(tmp_path / "in" / "b.grib", [control])
    assert open_archive(tmp_path / "in").layout.realization == (1, 2, 3)


def test_members_of_two_seasonal_systems_are_refused_by_name(tmp_path):
    for system in (4, 5):
        keys = {"setLocalDefinition": 1, "localDefinitionNumber": 15, "marsStream": "seas", "systemNumber": system}
        write(tmp_path / "in" / f"{system}.grib", [changed(message("t2m", member=system), **keys)])
    with pytest.raises(UserError, match=r"ensemble seas system 4 .*4.grib\) and of .*ensemble seas system 5 .*5.grib"):
        open_archive(tmp_path / "in")


def test_preliminary_data_go_on_where_the_final_ones_end(tmp_path, caplog):
    forecast = ensemble(tmp_path / "f.grib", names=("t2m",), steps=(24,))
    truth = [message("t2m", member=None, date=20010102)]
    truth.append(changed(message("t2m", member=None, date=20010103), experimentVersionNumber="0005"))
    write(tmp_path / "t.grib", truth)
    from data_prep import open_pair

    pair = open_pair(forecast, tmp_path / "t.grib")
    assert all(pair.present(Part.TRUTH, date)[1].all() for date in (0, 1))
    assert any("experiment 0005" in line and "both are taken" in line for line in caplog.messages)
    other = changed(message("t2m", member=None, date=20010103), centre="kwbc", setLocalDefinition=0)
    write(tmp_path / "two.grib", [truth[0], other])
    with pytest.raises(UserError, match=r"two.grib: holds fields of centre ecmf.* and of centre kwbc"):
        open_pair(forecast, tmp_path / "two.grib")
