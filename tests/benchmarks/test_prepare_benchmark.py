"""The prepare benchmark: a fair race means that all entrants make the same numbers."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import eccodes
import numpy as np
import pytest
import xarray as xr
import zarr

from benchmarks.common import process
from benchmarks.prepare import benchmark as prepare
from benchmarks.prepare import conversion, data, decoding, reading, reduction, robustness
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store
from ensemble_ml.store.date import DateEntry
from ensemble_ml.store.manifest import Entry

SHAPE = data.Shape(17, 32, (500, 850), 4, (0, 24), 2, ("t", "q", "z"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return data.archive(tmp_path_factory.mktemp("archive"), SHAPE)


@pytest.fixture(scope="module")
def store(files, tmp_path_factory):
    path = tmp_path_factory.mktemp("ours") / "store"
    conversion.ours(str(files.years), str(path), truth=str(files.truth_years))
    return open_store(path)


def test_archive_is_like_ens10(files, store):
    lay = store.layout
    assert lay.init_time.astype("datetime64[D]").tolist() == [np.datetime64(f"{y}-01-05").item() for y in (1998, 1999)]
    assert (lay.realization, lay.lead_hours, lay.levels) == ((1, 2, 3, 4), (0, 24), (500, 850))
    assert set(lay.variables) == {"t", "q", "z"} and store.has(Part.TRUTH)
    assert files.years.stat().st_size == 2 * files.forecast.stat().st_size
    with open(files.forecast, "rb") as file:
        handle = eccodes.codes_grib_new_from_file(file)
        keys = [eccodes.codes_get(handle, key) for key in ("edition", "bitsPerValue", "dataType", "packingType")]
        eccodes.codes_release(handle)
    assert keys == [1, 16, "pf", "grid_simple"]


def test_archive_is_made_once_and_anew_for_another_shape(files, tmp_path):
    first = data.archive(tmp_path, SHAPE)
    assert first.forecast.read_bytes() == files.forecast.read_bytes()
    before = first.forecast.stat().st_mtime_ns
    assert data.archive(tmp_path, SHAPE).forecast.stat().st_mtime_ns == before
    other = data.Shape(**{**asdict(SHAPE), "members": 2})
    assert data.archive(tmp_path, other).forecast.stat().st_size * 2 == files.forecast.stat().st_size


@pytest.mark.parametrize("chunks", ["ours", "whole"])
@pytest.mark.parametrize("derive", [False, True])
def test_all_entrants_write_the_same_values(files, store, tmp_path, chunks, derive):
    conversion.cfgrib(str(files.forecast), str(tmp_path / "cfgrib"), chunks, derive=derive)
    conversion.eccodes(str(files.forecast), str(tmp_path / "eccodes"), asdict(SHAPE), chunks, derive=derive)
    theirs = xr.open_zarr(tmp_path / "cfgrib", group="members", consolidated=False)
    group = zarr.open_group(tmp_path / "eccodes")
    ours = store.read(Part.FORECAST, 0).pressure
    for v, name in enumerate(store.layout.variables):
        np.testing.assert_array_equal(ours[:, :, v], group[name][...])
        np.testing.assert_array_equal(ours[:, :, v], theirs[name].sortby("isobaricInhPa").values)
    for part, off in ((Part.MEAN, 1e-6), (Part.SPREAD, 1e-4)) if derive else ():
        theirs = xr.open_zarr(tmp_path / "cfgrib", group=part.value, consolidated=False)
        ours = store.read(part, 0).pressure[0]
        for v, name in enumerate(store.layout.variables):
            mine = ours[:, v]
            for values in (group[f"{part.value}/{name}"][...], theirs[name].sortby("isobaricInhPa").values):
                np.testing.assert_allclose(values, mine, rtol=off, atol=off * np.abs(mine).mean())


def test_decoders_agree_bit_for_bit(files):
    found = [getattr(decoding, name)(str(files.member), 1) for name in ("ours", "eccodes", "cfgrib")]
    assert len({one["checksum"] for one in found}) == 1 and found[0]["seconds"] > 0
    assert {one["bytes"] for one in found} == {4 * 17 * 32 * SHAPE.fields // 4}


@pytest.mark.parametrize("packing", ["grid_simple", "grid_ccsds"])
def test_decoders_of_edition_2_agree_bit_for_bit(files, tmp_path, packing):
    source = tmp_path / "a.grib2"
    decoding.of_edition_2(str(files.member), str(source), packing)
    found = [getattr(decoding, name)(str(source), 1) for name in ("ours", "eccodes")]
    if importlib.util.find_spec("gribberish"):
        found.append(decoding.gribberish(str(source), 1))
    assert len({one["checksum"] for one in found}) == 1
    assert {one["bytes"] for one in found} == {4 * 17 * 32 * SHAPE.fields // 4}


def test_readers_read_the_same_and_bytes_are_counted(store, tmp_path):
    reading.write_zarr(store.path, str(tmp_path / "whole"))
    mine, other = reading.ours(store.path, 3), reading.zarr(str(tmp_path / "whole"), 3)
    assert mine["total"] == pytest.approx(other["total"], rel=1e-6)
    assert 0 < min(mine["bytes"]) < min(other["bytes"])


def test_draws_meet_every_variable_equally_often():
    found = reading.draws(3, 10, 7, 7)
    assert np.bincount([v for *_, pair in found for v in pair]).tolist() == [2] * 7
    assert all(len(set(members)) == 5 for _, members, _ in found)
    assert reading.band(361) == (96, 192) and reading.band(16) == (0, 16)


@pytest.mark.slow
def test_entrants_run_apart(tmp_path):
    outcome = process.run("prepare.reduction", "race", members=4, fields=2, rows=8, columns=16, passes=2)
    assert all(len(outcome[name]) == 2 for name in ("ours", *reduction.DASK))
    assert outcome["difference"] < 1e-3 and outcome["peak_bytes"] > 1e7
    with pytest.raises(UserError, match="no-such-file"):
        process.run("prepare.decoding", "ours", source=str(tmp_path / "no-such-file"), passes=1)


def test_run_writes_results_of_the_sections_asked_for(tmp_path):
    config = BenchmarkConfig("prepare", str(tmp_path / "out"), 2, BenchmarkSize.tiny, ["reduction"])
    results = json.loads(prepare.run(config).read_text())
    [claim] = results["claims"]
    assert claim["target"] == 3 and claim["holds"] == (claim["value"] >= 3) and results["runs"] == 2
    assert results["figures"]["mean and spread over members, ours"]["unit"] == "MB/s"
    ours, *rivals = (results["figures"][f"mean and spread over members, {name}"] for name in ("ours", *reduction.DASK))
    least = ours["min"] / max(rival["max"] for rival in rivals)
    assert 0.999 * least <= claim["value"] <= 1.001 * ours["max"] / max(rival["min"] for rival in rivals)
    assert results["size"] == "tiny"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["prepare"]  # the archive was temporary
    with pytest.raises(UserError, match="only=nothing"):
        prepare.run(BenchmarkConfig("prepare", str(tmp_path), only=["nothing"]))


@pytest.mark.slow
def test_every_other_section_in_small(tmp_path):
    sections = ["conversion", "memory", "decoding", "reading", "kills", "workers"]
    config = BenchmarkConfig("prepare", str(tmp_path / "out"), 1, BenchmarkSize.tiny, sections)
    results = json.loads(prepare.run(config).read_text())
    claims = {claim["claim"]: claim for claim in results["claims"]}
    for words in ("equals an uninterrupted one", "made twice", "different stores"):
        [claim] = [claim for text, claim in claims.items() if words in text]
        assert claim["holds"], claim
    assert {"kills of a build", "build by 2 processes"} <= results["figures"].keys()


def test_a_file_that_is_made_again_is_seen(tmp_path):
    """Of an unfinished build, and of the store that it becomes."""
    store, building = tmp_path / "a.zarr", tmp_path / "a.zarr.building"
    entry = DateEntry({name: Entry(1, "") for name in ("one", "two")})
    (building / "entries").mkdir(parents=True)
    (building / "store").mkdir()
    entry.save(building / "entries" / "000000.npz")
    for name in ("one", "two", "three"):
        (building / "store" / name).write_text("a")
    done = robustness.finished(store)
    assert done.keys() == {"one", "two"} and robustness.made_again(store, done) == 0
    (building / "store" / "two").unlink()
    assert robustness.made_again(store, done) == 1
    (building / "store" / "two").write_text("a")
    os.utime(building / "store" / "two", ns=(1, 1))  # the file system may give the same inode within a tick
    assert robustness.made_again(store, done) == 1
    (building / "store").rename(store)
    assert robustness.made_again(store, done) == 1


def test_a_field_that_is_not_the_archives_is_counted(files, store, tmp_path):
    file, folder = files.years, Path(store.path)
    fields, different = robustness.compared(file, folder)
    assert fields > 0 and different == 0
    read = type(store).read

    def shifted(self, part, date, *selection):
        found = read(self, part, date, *selection)
        return replace(found, pressure=found.pressure + 1) if date == 0 else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "read", shifted)
        assert robustness.compared(file, folder)[1] == fields // 2
