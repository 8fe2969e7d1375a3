"""The model climate against brute force, and against a normal law whose quantiles are known."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from scipy.stats import norm
from synthetic import make_layout, make_store

from ensemble_ml.errors import UserError
from ensemble_ml.store import PackedBlock, Part, Selection, StoreWriter, open_store
from ensemble_ml.store.climate import ModelClimate, quantiles, same_season
from ensemble_ml.verification.extremes import efi

DATES = [f"{year}-{day}" for year in (2001, 2002, 2003) for day in ("01-01", "01-08", "02-20", "02-28", "12-28")]
LEVELS = (0, 0.1, 0.5, 0.75, 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("climate") / "s.zarr"
    return make_store(path, dates=DATES, members=4, leads=(0, 24), shape=(33, 40), surface=("t2m", "tp"), truth=False)


def index(store, day):
    return int(np.flatnonzero(store.layout.init_time == np.datetime64(day))[0])


def days_of(store, numbers):
    return [str(day) for day in store.layout.init_time[numbers].astype("datetime64[D]")]


def test_the_window_takes_other_years_alone(store):
    climate = ModelClimate(store)
    around_new_year = ["2001-12-28", "2002-01-01", "2002-01-08", "2002-12-28", "2003-01-01", "2003-01-08", "2003-12-28"]
    found = days_of(store, climate.dates(index(store, "2001-01-01")))
    assert found == around_new_year  # 2001-12-28 is near 2002-01-01
    found = days_of(store, climate.dates(index(store, "2002-01-01")))
    assert found == [
        "2001-01-01",
        "2001-01-08",
        "2002-12-28",
        "2003-01-01",
        "2003-01-08",
        "2003-12-28",
    ]  # not 2001-12-28
    assert days_of(store, climate.dates(index(store, "2002-02-20"))) == [
        "2001-02-20", "2001-02-28", "2003-02-20", "2003-02-28",
    ]  # fmt: skip
    narrow = ModelClimate(store, days=0)
    assert days_of(store, narrow.dates(index(store, "2002-02-20"))) == ["2001-02-20", "2003-02-20"]


def test_leap_days():
    times = np.array([f"{y}-{d}" for y in (2003, 2004, 2005) for d in ("02-27", "02-28", "03-01")], "datetime64[ns]")
    leap = np.datetime64("2004-02-29")
    assert times[same_season(times, leap, 0)].astype("datetime64[D]").astype(str).tolist() == [
        "2003-02-28",
        "2005-02-28",
    ]
    assert same_season(times, leap, 1).sum() == 6 and not same_season(times, leap, 1)[3:6].any()
    other = same_season(np.array([leap]), np.datetime64("2001-02-28"), 1)
    assert other.all() and not same_season(np.array([leap]), np.datetime64("2001-02-28"), 0).any()


@pytest.mark.parametrize("memory", [1, 2**29])
def test_quantiles_are_those_of_all_values(store, tmp_path, memory):
    climate = ModelClimate(store, probabilities=LEVELS, folder=tmp_path, memory=memory)
    date = index(store, "2002-01-01")
    found = climate.quantiles(date)
    every = [store.read(Part.FORECAST, int(d)) for d in climate.dates(date)]
    pressure = np.concatenate([one.pressure for one in every]).astype(float)
    surface = np.concatenate([one.surface for one in every]).astype(float)
    np.testing.assert_allclose(found.pressure, np.quantile(pressure, LEVELS, axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.surface[:, :, 0], np.quantile(surface[:, :, 0], LEVELS, axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.surface[:, 1], np.quantile(surface[:, 1], LEVELS, axis=0), rtol=1e-6)
    assert not found.surface[:, 0, 1].any()  # no rain at the start
    some = climate.quantiles(date, Selection(None, (24,), ("z",), (850, 500), (), (5, 9)))
    np.testing.assert_array_equal(some.pressure[:, 0, 0], found.pressure[:, 1, 1, ::-1, 5:9])
    assert some.surface.shape == (5, 1, 0, 4, 40)


def test_kept_beside_the_store_and_read_again(store, tmp_path, monkeypatch, caplog):
    climate = ModelClimate(store, probabilities=LEVELS, folder=tmp_path)
    first = climate.quantiles(2).pressure
    [folder] = tmp_path.iterdir()
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    with monkeypatch.context() as patch:
        patch.setattr(ModelClimate, "_compute", None)
        np.testing.assert_array_equal(
            ModelClimate(store, probabilities=LEVELS, folder=tmp_path).quantiles(2).pressure, first
        )
    ModelClimate(store, probabilities=(0.5,), folder=tmp_path).quantiles(2)
    ModelClimate(store, days=8, probabilities=LEVELS, folder=tmp_path).quantiles(2)
    assert len(list(tmp_path.iterdir())) == 3  # other settings, another folder
    damaged = sorted(folder.iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:-7])
    np.testing.assert_array_equal(climate.quantiles(2).pressure, first)
    assert "damaged, computed anew" in caplog.text
    assert ModelClimate(store)._folder.parent.name == "s.zarr.climate"


def test_a_folder_that_cannot_be_written_is_no_error(store, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "file").write_text("")
    climate = ModelClimate(store, probabilities=(0.5,), folder=tmp_path / "file")
    chosen = Selection(None, (24,), ("t",), (500,), ())
    assert np.isfinite(climate.quantiles(0, chosen).pressure).all() and "not kept" in caplog.text


def test_values_that_are_missing_are_left_out():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(50, 6, 7)).astype(np.float32)
    values[rng.random(values.shape) < 0.3] = np.nan
    values[:, 2, 3] = np.nan
    levels = np.array(LEVELS)
    with pytest.warns(RuntimeWarning, match="All-NaN"):
        expected = np.nanquantile(values.astype(float), levels, axis=0)
    np.testing.assert_allclose(quantiles(values, levels), expected, rtol=1e-6)


def test_a_normal_climate_and_its_index(tmp_path):
    """Ten years of one law: quantiles are the law's; the index is 0 for its own draws and 1 far beyond it."""
    days = [f"{year}-07-{day:02d}" for year in range(2001, 2011) for day in (1, 4, 7, 10)]
    shape = dict(leads=(24,), variables=("t",), levels=(500,), surface=(), shape=(9, 16))
    layout = make_layout(dates=days, members=10, **shape)
    rng = np.random.default_rng(1)
    with StoreWriter(tmp_path / "n.zarr", layout, parts=[Part.FORECAST]) as writer:
        for date in range(len(days)):
            values = rng.normal(270, 5, (10, 1, 1, 1, 9, 16)).astype(np.float32)
            writer.write(Part.FORECAST, date, PackedBlock.plain(values), None)
    store, levels = open_store(tmp_path / "n.zarr"), np.linspace(0, 1, 101)
    climate = ModelClimate(store, probabilities=levels)
    assert len(climate.dates(5)) == 36
    found = climate.quantiles(5).pressure[:, 0, 0, 0]
    expected = norm.ppf(levels[5:96], 270, 5)
    np.testing.assert_allclose(found[5:96].mean((1, 2)), expected, atol=0.2)
    own = store.read(Part.FORECAST, 5).pressure[:, 0, 0, 0]
    assert abs(efi(own, found, levels).mean()) < 0.05
    assert efi(own + 60, found, levels).mean() == pytest.approx(1, abs=0.02)


def test_refusals(store, tmp_path):
    one = make_store(tmp_path / "one.zarr", dates=3, shape=(9, 16))
    with pytest.raises(UserError, match="two years or more; it has 2001 alone"):
        ModelClimate(one)
    apart = make_store(tmp_path / "apart.zarr", dates=["2001-01-01", "2002-06-01"], shape=(9, 16))
    with pytest.raises(UserError, match="no start date of another year lies within 9 days of 2001-01-01"):
        ModelClimate(apart).quantiles(0)
    with pytest.raises(UserError, match="ascending numbers"):
        ModelClimate(store, probabilities=(0.5, 0.1))
    with pytest.raises(UserError, match="has no level"):
        ModelClimate(store).quantiles(0, Selection(levels=(300,)))
