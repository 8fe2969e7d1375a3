"""Folders as other systems leave them: hidden files, links, names of any bytes; and runs of shares in any order."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile

import numpy as np
import pytest
from building import archive as made_archive
from building import config
from gribfiles import ensemble, message, noise, write

from data_prep import open_archive, prepare
from data_prep.archive import ArchiveSource
from data_prep.intervals import COMBINED, Combine, difference
from data_prep.records import RawField
from ensemble_ml.config import PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store


def test_hidden_files_and_folders_are_none_of_the_archives(tmp_path):
    ensemble(tmp_path / "a.grib")
    (tmp_path / "._a.grib").write_bytes(b"\x00\x05\x16\x07 Mac OS X")
    for folder, mark in (("._a.zarr", ".zgroup"), (".trash/b.zarr", ".zgroup"), (".old", "a.grib")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / mark).write_text('{"zarr_format": 2}')
    source = open_archive(tmp_path)
    assert isinstance(source, ArchiveSource)
    assert [os.path.relpath(path, tmp_path) for path in source.catalogue.files] == ["a.grib"]


@pytest.mark.parametrize("name", ["latest", "aa"])
def test_a_link_beside_its_folder_is_the_same_folder(tmp_path, name):
    (tmp_path / "2018").mkdir()
    ensemble(tmp_path / "2018" / "a.grib")
    (tmp_path / name).symlink_to("2018")
    source = open_archive(tmp_path)
    assert [os.path.relpath(path, tmp_path) for path in source.catalogue.files] == ["2018/a.grib"]


@pytest.mark.parametrize("given", ["", "*"])
def test_an_output_inside_its_input_is_none_of_the_archive(tmp_path, caplog, given):
    made_archive(tmp_path, 2)
    settings = {"archive": tmp_path / given, "index": None}
    before = open_archive(tmp_path).fingerprint()
    store = prepare(config(output=tmp_path / "s.zarr", **settings))
    prepare(config(output=tmp_path / "t.zarr", parts="1/2", **settings))
    (tmp_path / "t.zarr.building").rename(tmp_path / "u.zarr.partial-host-1")
    prepare(config(output=tmp_path / "t.zarr", parts="1/2", **settings))
    caplog.clear()
    with caplog.at_level("INFO"):
        assert open_archive(tmp_path / given).fingerprint() == before
    (told,) = [line for line in caplog.messages if "left out" in line]
    assert told.endswith(f": 3 tensor stores or unfinished ones in it are left out (first {store})")
    with pytest.raises(UserError, match="holds no archive file"):
        open_archive(tmp_path / "t.zarr.building")


def test_a_name_that_is_no_utf8(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"donn\xe9es.grib")
    ensemble(tmp_path / "a.grib").rename(os.fsdecode(path))
    assert len(open_archive(tmp_path).fingerprint()) == 16


def test_a_pattern_in_a_folder_whose_name_holds_its_letters(tmp_path, monkeypatch):
    (tmp_path / "run[1]").mkdir()
    ensemble(tmp_path / "run[1]" / "a.grib")
    monkeypatch.chdir(tmp_path / "run[1]")
    assert open_store(prepare(PrepareConfig(input="*.grib", output="s.zarr"))).layout.names


def test_messages_keep_blanks_of_paths():
    assert str(UserError("a  b/c.grib: no such\n  file")) == "a  b/c.grib: no such file"


def test_a_value_that_is_no_number_is_named(tmp_path):
    values = noise()
    values[2, 3] = np.nan
    write(tmp_path / "a.grib", [message("t2m", values, edition=2, packing="grid_ieee", precision=1)])
    with pytest.raises(UserError, match=r"a\.grib.*: 1 of 84 values are NaN or infinite"):
        open_archive(tmp_path / "a.grib").read(Part.FORECAST, 0)


def test_one_sum_with_and_without_its_interval_stands_twice(tmp_path):
    """The lead of one is taken to run from the start, and then is the other's."""
    open_sum = message("tp", noise(mean=2, std=0.1), step=24)
    with_range = message("tp", noise(mean=5, std=0.1), step="0-24")
    write(tmp_path / "a.grib", [open_sum])
    write(tmp_path / "b.grib", [with_range])
    with pytest.raises(UserError, match=r"tp.*: stands twice in .*a\.grib and .*b\.grib"):
        open_archive(tmp_path)


def test_sums_that_do_not_run_from_the_start_are_seen_beside_masked_points():
    before, now = np.full((4, 5), 3.0), np.full((4, 5), 1.0)
    before[0, 0] = now[1, 1] = np.nan
    with pytest.raises(UserError, match="below that of the lead before at 100% of the points"):
        difference(RawField(now), RawField(before))
    found = difference(RawField(before), RawField(now))
    assert np.isnan(found[0, 0]) and np.isnan(found[1, 1]) and np.nansum(found) == 2.0 * 18


def test_parts_that_come_one_by_one_give_numpys_bits():
    parts = np.random.default_rng(0).lognormal(size=(24, 7, 12))
    assert np.array_equal(COMBINED[Combine.SUM](iter(parts)), np.sum(list(parts), axis=0))
    assert np.array_equal(COMBINED[Combine.MAXIMUM](iter(parts)), np.max(list(parts), axis=0))


def test_finishing_what_the_last_share_has_finished(tmp_path):
    given = made_archive(tmp_path / "archive", 2)
    for part in ("1/2", "2/2"):
        prepare(config(given, tmp_path / "s.zarr", parts=part))
    before = (tmp_path / "s.zarr" / "manifest.json").stat().st_mtime_ns
    prepare(config(given, tmp_path / "s.zarr", finalise=True))
    assert (tmp_path / "s.zarr" / "manifest.json").stat().st_mtime_ns == before


def test_a_share_that_is_to_finish_says_what_is_missing(tmp_path):
    given = made_archive(tmp_path / "archive", 4)
    prepare(config(given, tmp_path / "s.zarr", parts="1/2"))
    with pytest.raises(UserError, match="2 of 4 init times are not built yet; run without finalise=true"):
        prepare(config(given, tmp_path / "s.zarr", parts="1/2", finalise=True))


def tarred(content):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        about = tarfile.TarInfo("m34.grib")
        about.size = len(content)
        archive.addfile(about, io.BytesIO(content))
    return made.getvalue()


def stored(content):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("m34.grib", content)
    return made.getvalue()


COMPRESSED = {
    "m34.grib2.bz2": bz2.compress, "m34.grib2.gz": gzip.compress, "m34.grib2.xz": lzma.compress, "m34.tar": tarred,
    "m34.zip": stored,
}  # fmt: skip


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_files_are_named(tmp_path, caplog, name):
    ensemble(tmp_path / "in" / "m12.grib", members=(1, 2))
    packed = COMPRESSED[name](ensemble(tmp_path / "m34.grib", members=(3, 4)).read_bytes())
    (tmp_path / "in" / name).write_bytes(packed)
    assert open_archive(tmp_path / "in").layout.realization == (1, 2)
    assert any(
        "1 compressed files are left out, unpack them first" in line and name in line for line in caplog.messages
    )
    with pytest.raises(UserError, match=f"{name}: is compressed; unpack it first"):
        open_archive(tmp_path / "in" / name)


def test_of_many_compressed_files_a_few_are_named(tmp_path, caplog):
    whole = ensemble(tmp_path / "in" / "a.grib", members=(1, 2))
    packed = gzip.compress(whole.read_bytes())
    for number in range(100):
        (tmp_path / "in" / f"m{number:03}.grib.gz").write_bytes(packed)
    open_archive(tmp_path / "in")
    (line,) = (line for line in caplog.messages if "compressed" in line)
    assert "100 compressed files" in line and "m005.grib.gz and 94 more" in line and "m006" not in line


def test_a_bulletin_is_known_by_the_same_look_alone_and_in_a_folder(tmp_path):
    """Lines of a bulletin before the first message, and no suffix; a text that tells of GRIB is none."""
    (tmp_path / "in").mkdir()
    content = ensemble(tmp_path / "a.grib").read_bytes()
    (tmp_path / "in" / "HEFS50_ECMF_010000").write_bytes(b"\x01\r\r\n001\r\r\nHEFS50 ECMF 010000\r\r\n" + content)
    (tmp_path / "in" / "README").write_text("GRIB and GRIB2 files of an ensemble\n")
    alone, folder = (open_archive(tmp_path / "in" / name) for name in ("HEFS50_ECMF_010000", ""))
    assert alone.layout.realization == folder.layout.realization == (1, 2, 3)
    with pytest.raises(UserError, match="README: neither GRIB nor NetCDF nor Zarr"):
        open_archive(tmp_path / "in" / "README")
