"""A GRIB file is scanned once: its table is kept on disk until the file changes."""

import logging
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gribfiles import dataset, ensemble, message, write

from data_prep import files, grib, grib_io, open_archive, prepare
from data_prep.file_index import FileIndex
from data_prep.grib import GribFile
from data_prep.grib_io import Stamp, Windows
from ensemble_ml.config import PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store
from ensemble_ml.store.folder import NoLocks


@pytest.fixture
def scanned(monkeypatch):
    """Paths of files whose headers are read, in turn."""
    seen = []

    class Counted(Windows):
        def __init__(self, file):
            seen.append(os.path.basename(file.path))
            super().__init__(file)

    monkeypatch.setattr(grib_io, "Windows", Counted)
    return seen


@pytest.fixture
def config(tmp_path):
    for day in (20010101, 20010102):
        ensemble(tmp_path / "in" / f"{day}.grib", dates=(day,))
    days = [message("t", date=20010100 + d, member=None, level=z) for d in (1, 2, 3) for z in (500, 850)]
    truth = write(tmp_path / "truth.grib", days)
    return PrepareConfig(input=str(tmp_path / "in"), truth=str(truth), output=str(tmp_path / "s.zarr"))


def test_prepare_scans_no_file_twice(config, tmp_path, scanned, monkeypatch):
    first = open_store(prepare(config))
    assert sorted(scanned) == ["20010101.grib", "20010102.grib", "truth.grib"]
    assert len(list((tmp_path / ".s.zarr.index").iterdir())) == 3
    scanned.clear()
    opened = []

    def counted(path, *arguments, **keys):
        opened.append(os.path.basename(str(path)))
        return open(path, *arguments, **keys)

    monkeypatch.setattr(files, "open", counted, raising=False)
    config.overwrite = True
    again = open_store(prepare(config))
    assert scanned == [] and opened == []  # not even to see what kind of file it is
    assert again.fingerprint() == first.fingerprint()


def test_of_many_that_begin_at_once_one_scans(tmp_path, scanned, monkeypatch):
    """Shares of a build that a batch queue starts together, here as threads: locks are between files that are open."""
    path = ensemble(tmp_path / "a.grib", dates=(20010101,))
    indexer = grib._Indexer.table
    monkeypatch.setattr(grib._Indexer, "table", lambda self: (time.sleep(0.5), indexer(self))[1])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: GribFile(str(path), FileIndex(tmp_path / "index")), range(4)))
    assert scanned == ["a.grib"]
    assert all(len(one.records) == len(found[0].records) > 0 for one in found)
    assert [p.name.startswith("a.grib") for p in (tmp_path / "index").iterdir()] == [True]  # and no lock is left


def test_without_locks_each_scans(tmp_path, scanned, monkeypatch):
    path = ensemble(tmp_path / "a.grib", dates=(20010101,))

    def none(_path):
        raise NoLocks("there are none")

    monkeypatch.setattr("data_prep.file_index.claimed_once", none)
    assert len(GribFile(str(path), FileIndex(tmp_path / "index")).records) > 0
    assert scanned == ["a.grib"] and FileIndex(tmp_path / "index").holds(str(path))


def test_only_what_changed_is_scanned_again(config, tmp_path, scanned):
    index = FileIndex(tmp_path / "index")
    before = open_archive(config.input, index=index)
    path = ensemble(tmp_path / "in" / "20010102.grib", dates=(20010102,), bits=12)
    scanned.clear()
    after = open_archive(config.input, index=index)
    assert scanned == ["20010102.grib"]
    np.testing.assert_array_equal(after.read(Part.FORECAST, 0).pressure, before.read(Part.FORECAST, 0).pressure)
    assert not np.array_equal(after.read(Part.FORECAST, 1).pressure, open_archive(config.input).read(Part.FORECAST, 0))
    os.utime(path, ns=(1, 1))
    scanned.clear()
    open_archive(config.input, index=index)
    assert scanned == ["20010102.grib"]


def test_a_table_says_the_same_as_the_file(tmp_path):
    lon = np.arange(-180.0, 180.0, 30.0)
    south = message("t", grid=(np.linspace(-90, 90, 7), lon), member=4)
    path = write(tmp_path / "a.grib", [message("t"), message("t", member=2, edition=2), message(78), south])
    index = FileIndex(tmp_path / "index")
    first, second = GribFile(str(path), index), GribFile(str(path), index)
    assert first.records.tobytes() == second.records.tobytes()
    assert first.skipped == second.skipped and second.grid.same_as(first.grid)
    for one, other in zip(first.fields(first.records), second.fields(second.records), strict=True):
        np.testing.assert_array_equal(one.decode(), other.decode())


@pytest.mark.parametrize("spoil", [
    lambda content: b"", lambda content: content[:-7], lambda content: content[:40], lambda content: b"x" + content,
    lambda content: content[:-9] + b"\0" + content[-8:], lambda content: content.replace(b"count", b"cuont"),
])  # fmt: skip
def test_a_damaged_table_is_made_anew(tmp_path, caplog, spoil, scanned):
    path = str(ensemble(tmp_path / "a.grib"))
    index = FileIndex(tmp_path / "index")
    whole = GribFile(path, index).records
    place = index.place(path)
    content = place.read_bytes()
    place.write_bytes(spoil(content))
    scanned.clear()
    with caplog.at_level(logging.INFO, "data_prep"):
        assert GribFile(path, index).records.tobytes() == whole.tobytes()
    assert scanned == ["a.grib"] and any("is scanned anew" in record.getMessage() for record in caplog.records)
    assert place.read_bytes() == content


def test_a_path_that_was_grib_may_be_netcdf_now(tmp_path):
    path, index = tmp_path / "output.20010101", FileIndex(tmp_path / "index")
    open_archive(ensemble(path), index=index)
    dataset().to_netcdf(path)
    assert open_archive(path, index=index).layout.init_time.astype("datetime64[D]")[-1].astype(str) == "2001-01-03"
    ensemble(path)
    assert open_archive(path, index=index).layout.init_time.astype("datetime64[D]")[-1].astype(str) == "2001-01-02"


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "index").write_text("a file")
    index = FileIndex(tmp_path / "index")
    with caplog.at_level(logging.WARNING, "data_prep"):
        for name in "ab":
            GribFile(str(ensemble(tmp_path / f"{name}.grib")), index)
    assert [r.getMessage() for r in caplog.records if "cannot be kept" in r.getMessage()][1:] == []


def test_indexing_reads_headers_only(tmp_path, monkeypatch):
    grid = np.linspace(90, -90, 91), np.arange(0.0, 360.0, 2.0)
    path = str(ensemble(tmp_path / "a.grib", members=range(1, 11), grid=grid))
    read = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: read.append(real(*arguments)) or read[-1])
    monkeypatch.setattr(grib, "_kinds", {})
    records = GribFile(path).records
    assert len(records) == 80 and len(read) < 1.2 * len(records)
    assert sum(read) < 0.05 * os.path.getsize(path)
    assert len(grib._kinds) == 2  # members, levels, dates and leads are read from the headers; lead 0 stands apart


def test_an_archive_goes_to_another_process(tmp_path):
    source = open_archive(ensemble(tmp_path / "a.grib"))
    expected = source.read(Part.FORECAST, 1).pressure
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).read(Part.FORECAST, 1).pressure, expected)


class TestFilesThatChange:
    def grown(self, path):
        with open(path, "ab") as file:
            file.write(message("t", member=9))

    def test_between_index_and_reading(self, tmp_path):
        path = ensemble(tmp_path / "a.grib")
        source = open_archive(path)
        self.grown(path)
        with pytest.raises(UserError, match=r"a.grib: changed while it was read \(\d+ bytes, now \d+\); wait until"):
            source.read(Part.FORECAST, 0)

    def changed_while_indexed(self, path, monkeypatch, change):
        real = grib.headers

        def changing(*arguments):
            change()
            return real(*arguments)

        monkeypatch.setattr(grib, "headers", changing)
        with pytest.raises(UserError, match=r"a.grib: changed while it was read"):
            GribFile(str(path))

    def test_while_it_is_indexed(self, tmp_path, monkeypatch):
        path = ensemble(tmp_path / "a.grib")
        self.changed_while_indexed(path, monkeypatch, lambda: self.grown(path))

    def test_half_written_when_it_is_first_seen(self, tmp_path, monkeypatch):
        """The end of a file that still grows looks damaged; the message says what it is."""
        path = ensemble(tmp_path / "a.grib")
        content = path.read_bytes()
        path.write_bytes(content[:-40])
        self.changed_while_indexed(path, monkeypatch, lambda: path.write_bytes(content))

    def test_overwritten_in_place_while_it_is_read(self, tmp_path):
        path = ensemble(tmp_path / "a.grib")
        file = GribFile(str(path))
        fields = file.fields(file.records)
        next(fields)
        path.write_bytes(path.read_bytes()[:-100] + b"\0" * 100)
        os.utime(path, ns=(5, 5))
        with pytest.raises(UserError, match=r"a.grib: changed while it was read \(still \d+ bytes"):
            next(fields)

    def test_shrunk(self, tmp_path):
        path = ensemble(tmp_path / "a.grib")
        file = GribFile(str(path))
        stamp = Stamp.of(str(path))
        with open(path, "r+b") as out:
            out.truncate(stamp.size // 2)
        os.utime(path, ns=(stamp.mtime_ns, stamp.mtime_ns))
        with pytest.raises(UserError, match=r"a.grib: changed while it was read"):
            list(file.fields(file.records))

    def test_no_permission(self, tmp_path, monkeypatch):
        path = str(ensemble(tmp_path / "a.grib"))
        monkeypatch.setattr(os, "open", lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        with pytest.raises(
            UserError, match=r"a.grib: cannot be read \(Permission denied\); check the path and its perm"
        ):
            GribFile(path)
