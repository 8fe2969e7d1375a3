"""An archive with a bitmap and gaps, from GRIB named like ENS-10's to scores, by the command line."""

import json
import zlib

import gribfiles
import numpy as np
import pytest
import xarray as xr

from ensemble_ml import cli
from ensemble_ml.store import Part, open_store
from ensemble_ml.training import load_checkpoint

GRID = np.linspace(90, -90, 9), np.arange(16) * 22.5
LAND = np.zeros((9, 16), bool)
LAND[2:5, 3:8] = LAND[-1:] = True
SCALES = {"t": (255.0, 10.0), "t2m": (285.0, 10.0), "sst": (290.0, 5.0)}
DAYS = ["0101", "0103", "0105"]
YEARS = range(1999, 2006)
GONE = [(19990103, 2, "t"), (20000101, 1, "t2m"), *((20010105, member, "t") for member in (1, 2, 3, 4))]


def field(name, *key):
    """A smooth field that each key has of its own."""
    rng = np.random.default_rng(zlib.crc32(repr((name, *key)).encode()))
    wave, phase = rng.integers(1, 3), rng.uniform(0, 6)
    lat, lon = np.deg2rad(GRID[0])[:, None], np.deg2rad(GRID[1])
    return np.cos(wave * lon + phase) * np.cos(lat) ** 2 + np.sin(wave * lat + phase)


def message(name, date, lead, member):
    mean, scale = SCALES[name]
    day = f"{date + lead // 24}"  # dates stay within a month
    values = field(name, day) + (0.0 if member is None else 0.3 * field(name, day, member) + 0.2)
    values, keys = mean + scale * values, {}
    if name == "sst":
        values, keys = np.where(LAND, 9999.0, values), {"bitmapPresent": 1, "missingValue": 9999.0}
    return gribfiles.message(name, values, grid=GRID, date=date, member=member, level=500, step=lead, **keys)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Four members, one file a calendar date with all years, no suffix; truth a file a year, sst absent on one day."""
    folder = tmp_path_factory.mktemp("gaps")
    for day in DAYS:
        dates = [int(f"{year}{day}") for year in YEARS]
        wanted = [(name, date, lead, member) for date in dates for member in (1, 2, 3, 4) for lead in (0, 24)
                  for name in SCALES if (date, member, name) not in GONE]  # fmt: skip
        gribfiles.write(folder / "ens" / f"output.2018{day}", [message(*one) for one in wanted])
    for year in YEARS:
        days = [int(f"{year}{day}") + more for day in DAYS for more in (0, 1)]
        wanted = [(name, date) for date in days for name in SCALES if (name, date) != ("sst", 20020104)]
        gribfiles.write(folder / "era" / f"{year}.grib", [message(name, date, 0, None) for name, date in wanted])
    return folder


def run(task, *arguments):
    return cli.main([task, *map(str, arguments)])


@pytest.fixture(scope="module")
def road(archive):
    """The folder after the whole road."""
    given = f"input={archive}/ens", f"truth={archive}/era", f"output={archive}/a.zarr"
    assert run("prepare", *given, "gaps=mask") == 0
    small = ("steps=4", "threads=1", "model.hidden=8", "model.points=16",
             "model.max_hidden=8", "model.depth=1", "model.precision=float32", "tracking.tensorboard=false",
             "data.members=[1,2,3]")  # fmt: skip
    assert run("train", f"data.store={archive}/a.zarr", "run=a", f"output={archive}/runs", *small,
               "data.train=['1999/2002']", "data.validation=['2003']", "data.validation_members=2") == 0  # fmt: skip
    best = f"checkpoint={archive}/runs/a/checkpoints/best"
    assert run("predict", best, f"input={archive}/ens", "members_in=2", "dates=['2004/2005']",
               f"output={archive}/forecast") == 0  # fmt: skip
    assert run("evaluate", f"forecast={archive}/forecast", f"ensemble={archive}/a.zarr", f"truth={archive}/a.zarr",
               "members_in=2", "bootstrap=100", f"output={archive}/scores") == 0  # fmt: skip
    return archive


def test_gaps_are_an_error_unless_asked_for(archive, capsys):
    given = f"input={archive}/ens", f"truth={archive}/era", f"output={archive}/b.zarr"
    assert run("prepare", *given) == 2
    said = capsys.readouterr().err
    assert "member 2 at 1999-01-03T00 lacks t at 500 hPa" in said and not (archive / "b.zarr").exists()


def test_the_store_holds_what_there_is(road, capsys):
    store = open_store(road / "a.zarr")
    assert store.masked == ("sst",) and len(store.layout.init_time) == 21
    index = store.layout.init_time.astype("datetime64[D]").astype(str).tolist().index
    pressure, surface = store.present(Part.FORECAST, index("1999-01-03"))
    assert not pressure[1].any() and pressure[[0, 2, 3]].all() and surface.all()
    sst = store.read(Part.FORECAST, 0).surface[:, :, store.layout.surface.index("sst")]
    assert np.isnan(sst[..., LAND]).all() and np.isfinite(sst[..., ~LAND]).all()
    assert run("inspect", road / "a.zarr", "format=json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gaps"]["forecast"]["dates"] == 3 and found["gaps"]["truth"]["fields"] == 1
    assert found["masked"]["sst"] == pytest.approx(LAND.mean(), abs=1e-6)


def test_training_leaves_out_the_date_without_members(road):
    checkpoint = load_checkpoint(road / "runs" / "a" / "checkpoints" / "best")
    dates = [date[:10] for date in checkpoint.meta["training_dates"]]
    assert checkpoint.spec.masked == ("sst",)
    assert len(dates) == 11 and "2001-01-05" not in dates and "1999-01-03" in dates


def test_forecasts_and_scores_know_the_land(road):
    files = sorted((road / "forecast").glob("*.nc"))
    assert len(files) == 6
    with xr.open_dataset(files[0]) as data:
        assert np.isnan(data.sst_mean.values[..., LAND]).all() and np.isfinite(data.sst_mean.values[..., ~LAND]).all()
        assert np.isfinite(data.t_mean).all() and np.isfinite(data.t2m_ensemble_spread).all()
    content = json.loads((road / "scores" / "scores.json").read_text())
    ours = [entry for entry in content["left_out"] if entry["entrant"] == "forecast"]
    assert ours and all(entry["field"] == "sst" and entry["left_out"] == 6 * LAND.sum() for entry in ours)


def test_a_missing_member_at_prediction_is_an_error_where_it_is_the_only_one(road, capsys):
    best = f"checkpoint={road}/runs/a/checkpoints/best"
    assert run("predict", best, f"input={road}/ens", "members_in=[2]", "dates=['1999-01-03']", f"output={road}/no") == 2
    assert "t at 500 hPa, +0 h, is missing for every member asked for" in capsys.readouterr().err
