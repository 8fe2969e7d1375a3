"""Missing members, levels and dates: listed, skipped or masked, and reported."""

import logging

import numpy as np
import pytest
from gribfiles import ensemble, message, write

from data_prep import open_pair, prepare
from data_prep.gaps import find_gaps, find_truth_gaps, holes, listed
from ensemble_ml.config import Gaps, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store

DATES = (20010101, 20010102, 20010103, 20010104)
GONE = [(20010102, 2, 24, "t", 500), *((20010103, 3, step, "t", level) for step in (0, 24) for level in (500, 850))]


def truth(path, days, levels=(500, 850)):
    return write(
        path, [message("t", date=20010100 + day, member=None, level=z, seed=day) for day in days for z in levels]
    )


def settings(tmp_path, gaps, **keys):
    path = ensemble(tmp_path / "a.grib", dates=DATES, leave_out=GONE)
    return PrepareConfig(input=str(path), output=str(tmp_path / f"{gaps.value}.zarr"), gaps=gaps, **keys)


def starts(source):
    return source.layout.init_time.astype("datetime64[D]").astype(str).tolist()


def test_all_that_is_missing_is_listed(tmp_path):
    with pytest.raises(UserError) as caught:
        prepare(settings(tmp_path, Gaps.error))
    text = str(caught.value)
    assert "5 fields of 2 start dates missing: member 2 at 2001-01-02T00 lacks t at 500 hPa, lead 24 h; " in text
    assert "member 3 at 2001-01-03T00 lacks t at 500 hPa, lead 0 h (4 fields)" in text and "gaps=skip" in text
    assert not (tmp_path / "error.zarr").exists()


def test_a_long_list_is_cut(tmp_path):
    gone = [(date, member, 24, "t", 500) for date in DATES[:3] for member in range(1, 7)]
    path = ensemble(tmp_path / "a.grib", dates=DATES, members=range(1, 8), leave_out=gone)
    gaps = find_gaps(open_pair(path).forecast)
    assert len(gaps) == 18 and listed(gaps).endswith("lead 24 h; and 8 more like these")
    assert listed(gaps).count("lacks") == 10 and listed(gaps).startswith("18 fields of 3 start dates missing: ")


def test_dates_with_gaps_are_left_out(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "data_prep"):
        store = open_store(prepare(settings(tmp_path, Gaps.skip)))
    assert starts(store) == ["2001-01-01", "2001-01-04"]
    whole = open_pair(tmp_path / "a.grib")
    for date, other in enumerate((0, 3)):
        np.testing.assert_array_equal(
            store.read(Part.FORECAST, date).pressure, whole.read(Part.FORECAST, other).pressure
        )
        assert store.present(Part.FORECAST, date)[0].all()
    kept = store.provenance["gaps"]
    assert kept["policy"] == "skip" and sorted(kept["dates"]) == ["2001-01-02T00", "2001-01-03T00"]
    assert kept["dates"]["2001-01-03T00"] == ["member 3 at 2001-01-03T00 lacks t at 500 hPa, lead 0 h (4 fields)"]
    assert any("these start dates are left out (gaps=skip)" in record.getMessage() for record in caplog.records)


def test_dates_with_gaps_are_kept_with_these_fields_absent(tmp_path):
    store = open_store(prepare(settings(tmp_path, Gaps.mask)))
    whole = open_pair(tmp_path / "a.grib")
    assert starts(store) == starts(whole)
    for date in range(4):
        there = store.present(Part.FORECAST, date)[0]
        np.testing.assert_array_equal(there, whole.present(Part.FORECAST, date)[0])
        np.testing.assert_array_equal(
            store.read(Part.FORECAST, date).pressure, whole.read(Part.FORECAST, date).pressure
        )
    assert not store.present(Part.FORECAST, 2)[0][2].any() and store.provenance["gaps"]["policy"] == "mask"


def test_gaps_of_the_truth(tmp_path):
    path = ensemble(tmp_path / "a.grib", dates=DATES)
    verifying = truth(tmp_path / "t.grib", (1, 2, 3, 5))  # the 4th verifies the 3rd at 24 h and itself at 0 h
    pair = open_pair(path, verifying)
    assert [gap.start for gap in find_truth_gaps(pair.truth)] == ["2001-01-03T00", "2001-01-04T00"]
    config = PrepareConfig(input=str(path), truth=str(verifying), output=str(tmp_path / "s.zarr"))
    with pytest.raises(
        UserError, match=r"truth .*: 4 fields of 2 start dates missing: lacks t at 500 hPa at 2001-01-04"
    ):
        prepare(config)
    config.gaps = Gaps.skip
    skipped = open_store(prepare(config))
    assert starts(skipped) == ["2001-01-01", "2001-01-02"]
    np.testing.assert_array_equal(skipped.read(Part.TRUTH, 1).pressure, pair.read(Part.TRUTH, 1).pressure)
    config.gaps, config.output = Gaps.mask, str(tmp_path / "m.zarr")
    masked = open_store(prepare(config))
    assert masked.present(Part.TRUTH, 2)[0][0, :, 0, 0].tolist() == [True, False]
    np.testing.assert_array_equal(masked.read(Part.TRUTH, 3).pressure, pair.read(Part.TRUTH, 3).pressure)


def test_nothing_is_left(tmp_path):
    gone = [(date, 2, 24, "t", level) for date, level in zip(DATES, (500, 850) * 2, strict=True)]
    path = ensemble(tmp_path / "a.grib", dates=DATES, leave_out=gone)
    config = PrepareConfig(input=str(path), output=str(tmp_path / "s.zarr"), gaps=Gaps.skip)
    with pytest.raises(UserError, match="gaps=skip: no start date is complete; 4 fields of 4 start dates"):
        prepare(config)


def test_a_regular_series_without_a_date(tmp_path, caplog):
    path = ensemble(tmp_path / "a.grib", dates=(20010101, 20010103, 20010105, 20010109, 20010111, 20010113))
    with caplog.at_level(logging.WARNING, "data_prep"):
        prepare(PrepareConfig(input=str(path), output=str(tmp_path / "s.zarr")))
    assert any(
        "regular series but for 1 start dates: 2001-01-07T00" in record.getMessage() for record in caplog.records
    )


def test_twice_a_week_and_years_apart_are_no_holes():
    mondays = np.datetime64("2001-01-01", "ns") + np.arange(10) * np.timedelta64(7, "D")
    assert holes(np.sort(np.concatenate([mondays, mondays + np.timedelta64(3, "D")]))) == []
    assert holes(np.concatenate([mondays, mondays + np.timedelta64(364 * 24, "h")])) == []
    assert holes(mondays[[0, 1, 2, 3, 5, 6, 7, 8]]) == [mondays[4]]
