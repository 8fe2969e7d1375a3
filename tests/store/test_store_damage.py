"""Bad input, damage and interruption: one clear line, and nothing half-written under the store's name."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from synthetic import make_layout, make_store

from ensemble_ml.config import Packing
from ensemble_ml.errors import UserError
from ensemble_ml.store import PackedBlock, Part, Selection, StoreWriter, open_store
from ensemble_ml.store.schema import array_specs
from ensemble_ml.store.shard import read_chunks


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("damage") / "store.zarr", dates=2, shape=(7, 12))


@pytest.fixture
def copy(original, tmp_path):
    return Path(shutil.copytree(original.path, tmp_path / "copy.zarr"))


def blocks(layout, members, value=1.0):
    shape = (members, len(layout.lead_hours))
    pressure = np.full((*shape, len(layout.variables), len(layout.levels), *layout.grid.shape), value, np.float32)
    return pressure, np.full((*shape, len(layout.surface), *layout.grid.shape), value, np.float32)


def one_line(error):
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    return str(error.value)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(realization=(1, 99)), r"has no member 99; it holds 1, 2, 3, 4, 5, 6"),
        (Selection(lead_hours=(6,)), r"has no lead \(h\) 6; it holds 0, 24, 48"),
        (Selection(variables=("q",)), r"has no variable q; it holds t, z"),
        (Selection(surface=("tp",)), r"has no surface variable tp; it holds t2m"),
        (Selection(levels=(1000,)), r"has no level \(hPa\) 1000; it holds 500, 850"),
        (Selection(rows=(3, 9)), r"has no rows 3 to 9; it has rows 0 to 7"),
        (Selection(rows=(3, 3)), r"has no rows 3 to 3"),
    ],
)
def test_what_is_not_there_is_named_beside_what_is(original, selection, message):
    with pytest.raises(UserError, match=message):
        original.read(Part.FORECAST, 0, selection)


def test_dates_parts_and_years_that_are_not_there(original):
    with pytest.raises(UserError, match="has no init time 2; it holds 0 to 1"):
        original.read(Part.FORECAST, 2)
    with pytest.raises(UserError, match="has no control; it holds forecast, truth, mean, spread"):
        original.read(Part.CONTROL, 0)
    with pytest.raises(UserError, match="has no year 1999; it holds 2001"):
        original.statistics([1999])


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        open_store(tmp_path / "nothing.zarr")
    with pytest.raises(UserError, match="is no tensor store"):
        open_store(tmp_path)
    (tmp_path / "zarr.json").write_text("{ damaged")
    with pytest.raises(UserError, match="is no tensor store"):
        open_store(tmp_path)


@pytest.mark.parametrize("number", [1, 99])
def test_another_format_number_is_refused(copy, number):
    root = json.loads((copy / "zarr.json").read_text())
    root["attributes"]["ensemble_ml_store"] = number
    (copy / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(UserError, match=f"has format {number}, this version reads 2; prepare it again"):
        open_store(copy)


def test_missing_or_shortened_files_are_noticed_at_opening(copy):
    shard = copy / "truth_pressure/c.1.0.0.0.0.0"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"truth_pressure/c\.1\.0\.0\.0\.0\.0: damaged.*bytes instead of"):
        open_store(copy)
    shard.unlink()
    with pytest.raises(UserError, match=r"truth_pressure/c\.1\.0\.0\.0\.0\.0: damaged.*missing"):
        open_store(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        open_store(copy)


def test_any_flipped_byte_of_a_shard_is_noticed_when_it_is_read(copy):
    store = open_store(copy)
    store.verify()
    shard = copy / "forecast_pressure/c.0.0.0.0.0.0.0"
    good, rng = shard.read_bytes(), np.random.default_rng(0)
    for position in [0, len(good) - 1, len(good) - 5, *rng.integers(0, len(good), 40).tolist()]:
        bad = bytearray(good)
        bad[position] ^= 1 << int(rng.integers(8))
        shard.write_bytes(bad)
        with pytest.raises(UserError, match=r"c\.0\.0\.0\.0\.0\.0\.0: damaged file of a tensor store") as error:
            store.read(Part.FORECAST, 0)
        one_line(error)
    with pytest.raises(UserError, match=r"a checksum does not fit|points beyond its end|belong to no chunk"):
        store.verify()
    assert np.isfinite(store.read(Part.FORECAST, 1).pressure).all()  # other dates are not touched by it


def test_a_shard_that_goes_while_the_store_is_open_is_named(copy):
    store = open_store(copy)
    shard = copy / "forecast_surface/c.0.0.0.0.0.0"
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"forecast_surface/c\.0"):
        store.read(Part.FORECAST, 0)
    shard.unlink()
    with pytest.raises(UserError, match=r"No such file"):
        store.read(Part.FORECAST, 0)


def chunks(folder):
    return [path for path in (folder / "c").rglob("*") if path.is_file()]


@pytest.mark.parametrize("factor", ["reference", "scale", "present"])
def test_any_wrong_bit_of_factors_is_named(copy, factor):
    """They carry no checksum, and most bits of zstd's output only change the values."""
    (file,) = chunks(copy / f"forecast_pressure_{factor}")
    whole = file.read_bytes()
    for bit in np.random.default_rng(0).choice(8 * len(whole), 12, replace=False).tolist():
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(UserError, match=rf"forecast_pressure_{factor}/c/.*: damaged"):
            open_store(copy).read(Part.FORECAST, 0)
    file.write_bytes(whole)
    store = open_store(copy)
    file.unlink()  # Zarr takes an absent chunk for its fill value
    with pytest.raises(UserError, match=rf"forecast_pressure_{factor}/c/.*: damaged"):
        store.read(Part.FORECAST, 0)


@pytest.mark.parametrize(
    ("name", "read"),
    [("orog", lambda store: store.static()), ("statistics/pressure_mean", lambda store: store.statistics(store.years))],
)
def test_any_wrong_bit_of_small_arrays_is_named(copy, name, read):
    store = open_store(copy)
    (file,) = chunks(copy / name)
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=f"{name}/c/.*: damaged"):
        read(store)


@pytest.mark.parametrize(
    "name",
    ["init_time", "realization", "lead_time", "level", "latitude", "longitude", "variable", "surface_variable"],
)
def test_any_wrong_bit_of_coordinates_is_named_at_opening(copy, name):
    """A start date, or a level, would be another, and nothing else would say so."""
    for file in (*chunks(copy / name), copy / name / "zarr.json"):
        whole = file.read_bytes()
        data = bytearray(whole)
        data[-4] ^= 1
        file.write_bytes(data)
        with pytest.raises(UserError, match=f"{name}/.*: damaged file of a tensor store"):
            open_store(copy)
        file.write_bytes(whole)
    open_store(copy)


def test_a_wrong_bit_of_the_root_is_named_at_opening(copy):
    text = (copy / "zarr.json").read_text()
    (copy / "zarr.json").write_text(text.replace('"masked": []', '"masked":[ ]'))  # as long as before
    assert text != (copy / "zarr.json").read_text()
    with pytest.raises(UserError, match=r"zarr\.json: damaged"):
        open_store(copy)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EMFILE, r"cannot be opened \(Too many open files\); allow more \(`ulimit -n`\)$"),
        (errno.EACCES, r"cannot be read \(Permission denied\); check its permissions"),
        (errno.ESTALE, r"cannot be read \(Stale file handle\); check its permissions"),
        (errno.EIO, r"damaged file .*Input/output error"),
    ],
)
def test_a_file_that_the_system_does_not_give_is_not_called_damaged(copy, monkeypatch, number, remedy):
    """Preparing again, which may take days, helps only where a file is gone or spoilt."""
    store, opened = open_store(copy), os.open

    def refused(path, *rest):
        if "forecast_surface" in str(path):
            raise OSError(number, os.strerror(number))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(UserError, match=rf"forecast_surface/c\.0.*{remedy}"):
        store.read(Part.FORECAST, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_numbers_are_named_and_nothing_is_left(tmp_path, bad):
    layout = make_layout(dates=2, shape=(7, 12))
    pressure, surface = blocks(layout, 6)
    pressure[2, 1, 1, 0, 3, 4] = bad
    wanted = r"forecast, 2001-01-03T00, variable z, level 500 hPa, lead 24 h, member 3: 1 of 84 values"
    with (
        pytest.raises(UserError, match=wanted),
        StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.FORECAST]) as writer,
    ):
        writer.write(Part.FORECAST, 1, PackedBlock.plain(pressure), PackedBlock.plain(surface))
    assert os.listdir(tmp_path) == []


def test_numbers_of_absent_fields_are_not_looked_at(tmp_path):
    layout = make_layout(dates=1, shape=(7, 12))
    pressure, surface = blocks(layout, 6)
    present = np.ones(pressure.shape[:-2], bool)
    present[2, 1] = False
    pressure[2, 1] = np.nan
    with StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.FORECAST]) as writer:
        writer.write(Part.FORECAST, 0, PackedBlock.plain(pressure, present), PackedBlock.plain(surface))
    found = open_store(tmp_path / "s.zarr").read(Part.FORECAST, 0).pressure
    assert np.isnan(found[2, 1]).all() and np.isfinite(found[present]).all()


def test_a_reference_or_static_field_that_is_not_a_number_is_refused(tmp_path):
    layout = make_layout(dates=1, shape=(7, 12))
    packed = PackedBlock.empty((6, 3, 2, 2, 7, 12))
    packed.present[:] = True
    packed.reference[0, 0, 1, 1] = np.nan
    with (
        pytest.raises(UserError, match="variable z, level 850 hPa"),
        StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.FORECAST]) as writer,
    ):
        writer.write(Part.FORECAST, 0, packed, None)
    with pytest.raises(UserError, match="static field orog"):
        StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.FORECAST], static={"orog": np.full((7, 12), np.nan)})
    assert os.listdir(tmp_path) == []


def test_wrong_use_by_a_program_is_an_assertion_not_a_users_error(tmp_path):
    layout = make_layout(dates=1, shape=(7, 12))
    pressure, _ = blocks(layout, 1)
    with StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.FORECAST, Part.TRUTH]) as writer:
        with pytest.raises(ValueError, match="not among those announced"):
            writer.write(Part.CONTROL, 0, PackedBlock.plain(pressure), None)
        with pytest.raises(ValueError, match="block of shape"):
            writer.write(Part.FORECAST, 0, PackedBlock.plain(pressure), None)
        writer.write(Part.TRUTH, 0, PackedBlock.plain(pressure), None)


def test_a_writer_without_any_field_leaves_nothing(tmp_path):
    writer = StoreWriter(tmp_path / "s.zarr", make_layout(dates=1), parts=[Part.FORECAST])
    with pytest.raises(UserError, match="nothing was written"):
        writer.finish()
    assert os.listdir(tmp_path) == []


def test_an_existing_output_is_kept_unless_told_otherwise(original, copy):
    with pytest.raises(UserError, match="exists already; choose another folder, or add overwrite=true"):
        make_store(copy)
    replaced = make_store(copy, dates=1, overwrite=True)
    assert len(replaced.layout.init_time) == 1
    assert os.listdir(copy.parent) == [copy.name]


def test_overwrite_replaces_stores_only(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="no tensor store, so overwrite=true leaves it alone"):
        make_store(tmp_path / "home", overwrite=True)
    assert (tmp_path / "home/thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="leaves it alone"):
        make_store(tmp_path / "file", overwrite=True)


def test_a_failure_while_overwriting_keeps_the_old_store(copy):
    before = open_store(copy).fingerprint()
    layout = make_layout(dates=1, shape=(7, 12))
    with pytest.raises(KeyboardInterrupt), StoreWriter(copy, layout, parts=[Part.FORECAST], overwrite=True) as writer:
        pressure, surface = blocks(layout, 6)
        writer.write(Part.FORECAST, 0, PackedBlock.plain(pressure), PackedBlock.plain(surface))
        raise KeyboardInterrupt
    assert open_store(copy).fingerprint() == before
    assert os.listdir(copy.parent) == [copy.name]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"output=.*s\.zarr: cannot be written"):
        make_store(tmp_path / "file/s.zarr")


def test_a_killed_writer_leaves_nothing_under_the_name_and_the_next_one_cleans_up(tmp_path):
    target = tmp_path / "s.zarr"
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from synthetic import make_store
        make_store({str(target)!r}, dates=5000, shape=(37, 72))
    """)
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("s.zarr.partial-*/store/forecast_pressure/c.3.*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists() and len(os.listdir(tmp_path)) == 1
    make_store(target, dates=1).verify()
    assert os.listdir(tmp_path) == ["s.zarr"]


@pytest.mark.parametrize("write", ["shard.ShardWriter.append", "date.DateEntry.save"])
def test_a_full_disk_is_said_in_one_line_and_nothing_is_left(tmp_path, monkeypatch, write):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"ensemble_ml.store.{write}", full)
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device; free space or choose another"):
        make_store(tmp_path / "s.zarr", dates=1)
    assert os.listdir(tmp_path) == []


def test_a_failure_in_the_last_step_keeps_the_old_store_and_leaves_nothing(copy, monkeypatch):
    before = open_store(copy).fingerprint()

    def fail(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("ensemble_ml.store.folder.exchange", fail)
    with pytest.raises(OSError, match="Permission denied"):
        make_store(copy, dates=1, overwrite=True)
    assert open_store(copy).fingerprint() == before and os.listdir(copy.parent) == [copy.name]


def test_a_file_of_another_size_or_an_index_that_points_nowhere_is_damage(tmp_path):
    spec = array_specs(make_layout(dates=1, members=1, leads=(0,), surface=()), Part.FORECAST, Packing.uint16)[0]
    path, chunks = tmp_path / "shard", int(np.prod(spec.chunks))
    path.write_bytes(b"short")
    with pytest.raises(UserError, match="it is cut short"):
        list(read_chunks(str(path), spec, np.arange(chunks)))
    index = np.full((chunks, 2), 10**6, "<u8").tobytes()
    path.write_bytes(index + google_crc32c.value(index).to_bytes(4, "little"))
    with pytest.raises(UserError, match="points beyond its end"):
        list(read_chunks(str(path), spec, np.arange(chunks)))
