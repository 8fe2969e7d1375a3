"""What a store was read from: kept by start date, shown by inspect, looked at when a build is taken up again."""

import logging
import os

import building
import google_crc32c
import gribfiles
import numpy as np
import pytest

from data_prep import prepare
from data_prep.build_job import Job
from data_prep.grib import GribFile
from ensemble_ml.config import InspectConfig, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import open_store
from ensemble_ml.store.date import DateEntry
from ensemble_ml.store.inspect import inspect
from ensemble_ml.store.manifest import PLACE, Sources, changed, stamp

DATES = (20010101, 20010102, 20020101)


@pytest.fixture
def archive(tmp_path):
    return gribfiles.ensemble(tmp_path / "in" / "a.grib", names=("t", "t2m"), dates=DATES)


def settings(archive, output, **changes):
    return PrepareConfig(input=str(archive), output=str(output), **changes)


def entries(output):
    folder = output.with_name(f"{output.name}.building") / "entries"
    return [DateEntry.load(file) for file in sorted(folder.glob("*.npz"))]


def alter(archive, place, value=1):
    """Change one byte of a file; its time of change is set, for a fast test may be over within a tick of the clock."""
    before = os.stat(archive)
    with open(archive, "r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ value]))
    os.utime(archive, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def test_an_entry_names_every_message_of_its_date(archive, tmp_path):
    prepare(settings(archive, tmp_path / "a.zarr", parts="1/3"))
    [entry] = entries(tmp_path / "a.zarr")
    found = entry.sources["forecast"]
    assert list(found.files) == [str(archive)] and found.files[str(archive)] == stamp(str(archive))
    file = GribFile(str(archive))
    of_date = file.records[file.records["init"] == np.datetime64("2001-01-01")]
    places = sorted(zip(found.places["offset"].tolist(), found.places["length"].tolist(), strict=True))
    assert places == sorted(zip(of_date["offset"].tolist(), of_date["length"].tolist(), strict=True))
    assert len(places) == 3 * 2 * 3  # members, leads, t on two levels and t2m


def test_the_checksum_is_of_the_values(archive, tmp_path):
    sums = []
    for number, change in enumerate((False, False, True)):
        if change:
            alter(archive, int(GribFile(str(archive)).records["data"][0]) + 5)
        prepare(settings(archive, tmp_path / f"{number}.zarr", parts="1/3"))
        sums.append(entries(tmp_path / f"{number}.zarr")[0].sources["forecast"].checksum)
    assert sums[0] == sums[1] != sums[2]


@pytest.mark.parametrize("constants", [False, True], ids=["values", "constants"])
def test_a_changed_file_makes_its_dates_be_built_again(archive, tmp_path, caplog, constants):
    other = gribfiles.ensemble(tmp_path / "in" / "b.grib", names=("t", "t2m"), dates=(20030101,))
    archive = archive.parent
    prepare(settings(archive, tmp_path / "a.zarr", parts="1/4"))
    prepare(settings(archive, tmp_path / "a.zarr", parts="4/4"))
    data = int(GribFile(str(archive / "a.grib")).records["data"][0])
    alter(archive / "a.grib", data - 2 if constants else data + 5)  # the last octet of the reference value
    before = stamp(str(other))
    caplog.set_level(logging.INFO)
    prepare(settings(archive, tmp_path / "a.zarr"))
    assert f"{archive}/a.grib: changed since 1 init times (first 2001-01-01T00) were built from it" in caplog.text
    assert "b.grib: changed" not in caplog.text and "1 of 4 init times are built already" in caplog.text
    assert stamp(str(other)) == before
    prepare(settings(archive, tmp_path / "fresh.zarr"))
    assert building.contents(tmp_path / "a.zarr") == building.contents(tmp_path / "fresh.zarr")


@pytest.mark.parametrize("begun", [[], [0], [1, 2]])
def test_a_file_that_is_replaced_while_it_is_read_ends_the_build(archive, tmp_path, monkeypatch, begun):
    """The open file stays what it was; dates were built from one that is gone."""
    building.begin(settings(archive, tmp_path / "a.zarr", workers=1), begun)
    whole = Job.run

    def replaced(self, *args):
        done = whole(self, *args)
        (tmp_path / "new").write_bytes(archive.read_bytes())
        os.replace(tmp_path / "new", archive)
        return done

    monkeypatch.setattr(Job, "run", replaced)
    with pytest.raises(UserError, match="changed while it was read; leave it alone until the build is done"):
        prepare(settings(archive, tmp_path / "a.zarr", workers=1))


def test_inspect_shows_the_sources(archive, tmp_path, capsys):
    prepare(settings(archive, tmp_path / "a.zarr", parts="1/3"))
    half = inspect(InspectConfig(store=str(tmp_path / "a.zarr"), speed=False))["sources"]
    prepare(settings(archive, tmp_path / "a.zarr"))
    whole = inspect(InspectConfig(store=str(tmp_path / "a.zarr"), speed=False))["sources"]
    assert half["dates"].items() <= whole["dates"].items() and len(whole["dates"]) == 3
    assert (half["fields"], whole["fields"]) == (18, 54) and whole["bytes"] == archive.stat().st_size
    assert whole["files"][0]["state"] == "unchanged"
    fingerprint = open_store(tmp_path / "a.zarr").fingerprint()
    os.utime(archive, ns=(1, 1))
    capsys.readouterr()
    assert (
        inspect(InspectConfig(store=str(tmp_path / "a.zarr"), speed=False))["sources"]["files"][0]["state"] == "changed"
    )
    assert f"from 1 file; 0 unchanged since\n  changed: {archive}" in capsys.readouterr().out
    prepare(settings(archive, tmp_path / "moved.zarr"))  # of a file with another time of change, but the same fields
    assert open_store(tmp_path / "moved.zarr").fingerprint() == fingerprint


def test_sources_of_several_files_are_numbered_by_their_paths():
    found = Sources()
    stamps = [("x", 1, 10), ("y", 2, 20), ("z", 3, 30)]
    found.add(stamps, np.array([(2, 5, 7), (0, 1, 2)], PLACE), 11)
    found.add(stamps, np.array([(1, 8, 9), (2, 6, 7)], PLACE), 12)
    names = list(found.files)
    assert [names[number] for number in found.places["file"]] == ["z", "x", "y", "z"]
    assert found.places["offset"].tolist() == [5, 1, 8, 6] and found.summary()["bytes"] == 25
    assert found.checksum == google_crc32c.value(b"\x0b\0\0\0\x0c\0\0\0")


def test_files_out_of_sight_count_only_where_the_archive_is_another(tmp_path):
    (tmp_path / "a").write_text("1")
    files = {str(tmp_path / "a"): stamp(str(tmp_path / "a")), str(tmp_path / "gone"): (1, 2)}
    assert list(changed(files, {}, lost=False)) == [] and list(changed(files, {}, lost=True)) == [
        str(tmp_path / "gone")
    ]


def test_a_truth_that_grows_between_parts_is_one_truth_in_the_store(tmp_path, caplog):
    """Short forecasts first; analyses, which are better, come when a date is built already."""

    def truth(name, date, days, **keys):
        made = [gribfiles.message("t", np.full((7, 12), 280.0 + days) + gribfiles.noise(mean=0), date=date + day,
                                  member=None, **keys) for day in (0, 1)]  # fmt: skip
        gribfiles.write(tmp_path / "truth" / name, made)

    forecast = gribfiles.ensemble(tmp_path / "f.grib", dates=DATES[:2], steps=(24,), levels=(500,))
    truth("fc.grib", 20010101, 0, time=1800, step=6)
    given = {"truth": str(tmp_path / "truth")}
    prepare(settings(forecast, tmp_path / "a.zarr", parts="1/2", **given))
    truth("an.grib", 20010102, 5)
    prepare(settings(forecast, tmp_path / "a.zarr", parts="2/2", **given))
    text = "1 init times (first 2001-01-01T00) were built from other fields than the archive has now; build them again"
    assert [line for line in caplog.messages if line.endswith(text)]
    assert not (tmp_path / "a.zarr").exists()
    prepare(settings(forecast, tmp_path / "a.zarr", parts="1/2", **given))
    prepare(settings(forecast, tmp_path / "b.zarr", **given))
    one, other = open_store(tmp_path / "a.zarr"), open_store(tmp_path / "b.zarr")
    assert one.fingerprint() == other.fingerprint()


def test_what_an_archive_has_more_of_leaves_finished_dates_alone(tmp_path, caplog):
    gribfiles.ensemble(tmp_path / "in" / "a.grib", dates=DATES[:2])
    prepare(settings(tmp_path / "in", tmp_path / "a.zarr", parts="1/2", variables=["t"]))
    [before] = entries(tmp_path / "a.zarr")
    gribfiles.ensemble(tmp_path / "in" / "b.grib", names=("t2m",), dates=DATES[:2])
    with caplog.at_level(logging.INFO):
        prepare(settings(tmp_path / "in", tmp_path / "a.zarr", variables=["t"]))
    assert any("1 of 2 init times are built already" in line for line in caplog.messages) and before.fingerprint
    assert not any("other fields" in line for line in caplog.messages)


@pytest.mark.parametrize("text", ["[]", "7", '{"files": null, "sources": null}'])
def test_an_entry_of_other_json_is_damaged(tmp_path, text):
    np.savez(tmp_path / "a.npz", json=np.frombuffer(text.encode(), np.uint8))
    for read in (DateEntry.load, DateEntry.files_of):
        with pytest.raises(UserError, match=r"a.npz: damaged file"):
            read(tmp_path / "a.npz")
