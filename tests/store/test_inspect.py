"""`inspect` says what a store holds, as its own reader sees it; and what a half-built one has so far."""

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic import land, make_layout, make_store

from ensemble_ml import cli
from ensemble_ml.config import InspectConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import PackedBlock, Part, StoreWriter
from ensemble_ml.store.inspect import inspect

SHAPE = 9, 16
GONE = [(Part.FORECAST, 3, 1, "t"), (Part.FORECAST, 3, 4, "t2m"), (Part.TRUTH, 5, 0, "sst")]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect") / "it's, a store.zarr"
    dates = ["2001-12-28", "2001-12-30", *(f"2002-01-{day:02}" for day in range(1, 7))]
    return make_store(path, dates=dates, members=5, shape=SHAPE, surface=("t2m", "sst"), masked=("sst",), absent=GONE)


@pytest.fixture
def looked(store, capsys):
    return inspect(InspectConfig(store=store.path, speed=False))


def test_coordinates_and_gaps(looked, store):
    assert looked["complete"] and looked["dates"]["count"] == looked["dates"]["done"] == 8
    assert looked["dates"]["by_year"] == {"2001": 2, "2002": 6} and looked["dates"]["first"] == "2001-12-28T00:00"
    assert looked["members"] == [1, 2, 3, 4, 5] and looked["surface"] == ["t2m", "sst"]
    assert looked["fingerprint"] == store.fingerprint() and looked["provenance"] == store.provenance
    gap = looked["gaps"]["forecast"]
    # t at 2 levels and t2m, at 3 leads each
    assert gap["fields"] == 9 and gap["dates"] == 1
    assert gap["first"] == ["2002-01-02T00: member 2, 5 lacks t, t2m (9 fields)"]
    assert looked["gaps"]["truth"] == {"fields": 3, "dates": 1, "first": ["2002-01-04T00: lacks sst (3 fields)"]}
    assert looked["gaps"].keys() == {"forecast", "truth"}


def test_statistics_are_those_of_the_values(looked, store):
    values = [store.read(Part.FORECAST, date) for date in range(8)]
    t = np.stack([one.pressure[:, :, 0, 1] for one in values]).astype(float)
    said = looked["statistics"]["t"]["850"]
    assert said["mean"] == pytest.approx(np.nanmean(t), rel=1e-9) and said["std"] == pytest.approx(
        np.nanstd(t), rel=1e-6
    )
    assert (said["min"], said["max"]) == (np.nanmin(t), np.nanmax(t))
    sst = np.stack([one.surface[:, :, 1] for one in values]).astype(float)
    assert looked["statistics"]["sst"]["mean"] == pytest.approx(np.nanmean(sst), rel=1e-9)
    assert looked["masked"] == {"sst": pytest.approx(land(SHAPE).mean(), abs=1e-6)}
    assert looked["quantisation_error"] == store.quantisation_error


def test_sizes_are_those_on_the_disk(looked, store, tmp_path):
    files = [p for p in Path(store.path).rglob("*") if p.is_file() and p.name != "manifest.json"]
    sizes = looked["sizes"]
    assert sizes["total"]["bytes"] == sum(p.stat().st_size for p in files) and sizes["files"] == len(files)
    arrays = "truth_pressure", "truth_surface", "truth_surface_mask"
    truth = sum(p.stat().st_size for p in files if p.relative_to(store.path).parts[0] in arrays)
    assert sizes["parts"]["truth"]["bytes"] == truth
    fields = 8 * 3 * (2 * 2 + 2) - 3
    assert sizes["parts"]["truth"]["decoded"] == fields * SHAPE[0] * SHAPE[1] * 4


def test_speed_is_that_of_one_whole_date(store, capsys):
    speed = inspect(InspectConfig(store=store.path))["speed"]
    assert speed["decoded_mb"] == pytest.approx(5 * 3 * 6 * SHAPE[0] * SHAPE[1] * 4 / 1e6, abs=1e-3)
    # seconds and speed are written rounded, so a slow machine's 0.64 MB/s is 0.6
    assert speed["mb_per_s"] == pytest.approx(speed["decoded_mb"] / speed["seconds"], rel=0.02, abs=0.05)
    assert "MB/s of decoded float32 (forecast of 200" in capsys.readouterr().out


def test_the_command_takes_a_path_with_odd_letters(store, capsys):
    assert cli.main(["inspect", store.path, "speed=false", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["store"] == store.path
    assert cli.main(["inspect", store.path, "verify=true"]) == 0
    out = capsys.readouterr().out
    assert "Verified: all" in out and "Masked: sst has no value at" in out and "Gaps in the truth: 3 fields" in out


def test_damage_is_found_by_verify(tmp_path, capsys):
    store = make_store(tmp_path / "a.zarr", dates=2, shape=SHAPE)
    shard = next(
        p for p in (tmp_path / "a.zarr" / "forecast_pressure").rglob("*") if p.is_file() and p.suffix != ".json"
    )
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert inspect(InspectConfig(store=store.path, speed=False))["complete"]
    with pytest.raises(UserError, match=r"forecast_pressure"):
        inspect(InspectConfig(store=store.path, speed=False, verify=True))


def test_what_is_no_store_is_refused_in_one_line(tmp_path, capsys):
    for path, said in ((tmp_path, "holds no archive file"), (tmp_path / "none", "no such file or folder")):
        assert cli.main(["inspect", str(path)]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path), "complete=true"]) == 2
    assert "complete=true: is for tensor stores" in capsys.readouterr().err
    assert cli.main(["inspect"]) == 2
    assert "store: must be given" in capsys.readouterr().err


def test_a_store_of_truth_alone(tmp_path):
    layout = make_layout(dates=2, members=2, leads=(24,), variables=(), levels=(), surface=("sst",), shape=SHAPE)
    values = np.random.default_rng(0).normal(280, 5, (1, 1, 1, *SHAPE)).astype(np.float32)
    mask = np.broadcast_to(land(SHAPE), values.shape).copy()
    values[mask] = np.nan
    with StoreWriter(tmp_path / "s.zarr", layout, parts=[Part.TRUTH]) as writer:
        for date in range(2):
            writer.write(Part.TRUTH, date, None, PackedBlock.plain(values, mask=mask))
    looked = inspect(InspectConfig(store=str(tmp_path / "s.zarr"), speed=False))
    assert looked["dates"]["done"] == 2 and looked["masked"] == {"sst": 0.0}
