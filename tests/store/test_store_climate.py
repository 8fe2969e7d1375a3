"""The model climate against brute force, and against a normal law whose quantiles are known."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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


def test_bands_and_members_that_are_kept_are_not_mixed_up(tmp_path):
    """Memory for one band of rows and a half: several bands, each of whose members serve several dates."""
    dates = [f"{year}-01-0{day}" for year in (2001, 2002, 2003) for day in (1, 3)]
    given = {"dates": dates, "members": 6, "leads": (24,), "variables": (), "levels": (), "surface": ("t2m",)}
    store = make_store(tmp_path / "s.zarr", **given, shape=(33, 40), truth=False)
    band = 4 * 16 * 40 * 6 * 4  # of 16 rows: six members of four dates
    climate = ModelClimate(store, memory=band * 3 // 2)
    for date in (2, 3):
        others = [store.read(Part.FORECAST, int(other)).surface[:, 0, 0] for other in climate.dates(date)]
        expected = np.quantile(np.concatenate(others).astype(float), climate.probabilities, axis=0)
        np.testing.assert_allclose(climate.quantiles(date).surface[:, 0, 0], expected, rtol=1e-6)


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


def test_starts_at_other_hours_are_another_climate(tmp_path):
    """Two cycles a day, with a day and a night of eight degrees more and less: neither is extreme."""
    times = [f"{year}-01-{day:02}T{hour:02}" for year in range(2001, 2006) for day in (1, 3, 5) for hour in (0, 12)]
    store = make_store(tmp_path / "cycles.zarr", dates=times, members=4, variables=(), levels=(), surface=("t2m",))
    read = store.read

    def with_day_and_night(part, date, chosen):
        fields = read(part, date, chosen)
        fields.surface[:] += 8.0 * (-1) ** date
        return fields

    store.read = with_day_and_night
    climate = ModelClimate(store)
    found = [climate.dates(date) for date in (12, 13)]
    assert [len(dates) for dates in found] == [12, 12] and not set(found[0]) & set(found[1])
    middles = [climate.quantiles(date, Selection(None, (24,))).surface[8].mean() for date in (12, 13)]
    assert middles[0] - middles[1] == pytest.approx(16, abs=3)


@pytest.mark.parametrize("memory", [1, 2**29])
def test_quantiles_are_those_of_all_values(store, memory):
    climate = ModelClimate(store, probabilities=LEVELS, memory=memory)
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


@settings(max_examples=60)
@given(
    starts=st.lists(st.dates(datetime.date(1998, 1, 1), datetime.date(2004, 12, 31)), min_size=2, max_size=40),
    days=st.integers(0, 40),
    around_new_year=st.booleans(),
)
def test_the_window_against_brute_force(starts, days, around_new_year):
    """A date counts if some other year's anniversary is near; its own season is near no other anniversary."""
    if around_new_year:
        starts = [datetime.date(d.year, 12 if d.day > 15 else 1, d.day) for d in starts]
    times = np.array(starts, "datetime64[ns]")
    for date in starts:
        others = [anniversary(date, year) for year in range(1996, 2008) if year != date.year]
        expected = [min(abs((start - other).days) for other in others) <= days for start in starts]
        assert same_season(times, np.datetime64(date, "ns"), days).tolist() == expected


def anniversary(date, year):
    try:
        return date.replace(year=year)
    except ValueError:  # 29 February
        return datetime.date(year, 2, 28)


def test_members_are_kept_for_the_next_date(store, monkeypatch):
    climate, reads = ModelClimate(store), []
    read = store.read
    monkeypatch.setattr(store, "read", lambda part, date, chosen: reads.append(date) or read(part, date, chosen))
    chosen = Selection(None, (24,), ("t",), (500,), ())
    climate.quantiles(index(store, "2002-01-01"), chosen)
    assert reads == climate.dates(index(store, "2002-01-01")).tolist()
    reads.clear()
    climate.quantiles(index(store, "2002-01-01"), chosen)
    assert not reads
    one = ModelClimate(store, memory=1)  # room for one date: reads all again
    for _ in range(2):
        one.quantiles(index(store, "2002-02-20"), Selection(None, (24,), ("t",), (500,), (), (0, 16)))
    assert len(reads) == 8


def test_a_point_with_few_values_has_no_climate(store):
    few = ModelClimate(store, days=0)  # two dates of four members
    assert not few.enough(index(store, "2002-02-20"))
    assert np.isnan(few.quantiles(index(store, "2002-02-20")).pressure).all()
    assert ModelClimate(store).enough(index(store, "2002-01-01"))


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
    with pytest.raises(UserError, match="no init time of another year lies within 9 days of 2001-01-01"):
        ModelClimate(apart).quantiles(0)
    with pytest.raises(UserError, match="ascending numbers"):
        ModelClimate(store, probabilities=(0.5, 0.1))
    with pytest.raises(UserError, match="has no level"):
        ModelClimate(store).quantiles(0, Selection(levels=(300,)))


def test_values_that_are_not_finite_are_left_out_of_quantiles():
    values = np.array([[1.0, -np.inf], [2.0, 1.0], [3.0, 2.0], [np.nan, 3.0], [np.inf, np.nan]], np.float32)
    np.testing.assert_array_equal(quantiles(values, np.array([0.0, 0.5, 1.0])), [[1, 1], [2, 2], [3, 3]])
