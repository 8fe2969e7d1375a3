"""Missing members, levels and dates: listed, skipped or masked, and reported."""

import hashlib
import json
import logging
import os
from pathlib import Path

import netCDF4
import numpy as np
import pytest
from gribfiles import dataset, ensemble, message, write

from data_prep import open_archive, open_pair, prepare, xarray_files
from data_prep.file_index import FileIndex
from data_prep.gaps import Gap, find_gaps, find_truth_gaps, holes, kept_gaps, listed
from ensemble_ml.config import Executor, Gaps, InspectConfig, PrepareConfig
from ensemble_ml.errors import UserError
from ensemble_ml.store import Part, open_store
from ensemble_ml.store.inspect import as_text, inspect

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
    assert "5 fields of 2 init times missing: member 2 at 2001-01-02T00 lacks t at 500 hPa, lead 24 h; " in text
    assert "member 3 at 2001-01-03T00 lacks t at 500 hPa, lead 0 h (4 fields)" in text and "gaps=skip" in text
    assert not (tmp_path / "error.zarr").exists()


def test_a_long_list_is_cut(tmp_path):
    gone = [(date, member, 24, "t", 500) for date in DATES[:3] for member in range(1, 7)]
    path = ensemble(tmp_path / "a.grib", dates=DATES, members=range(1, 8), leave_out=gone)
    gaps = find_gaps(open_pair(path).forecast)
    assert len(gaps) == 18 and listed(gaps).endswith("lead 24 h; and 8 more like these")
    assert listed(gaps).count("lacks") == 10 and listed(gaps).startswith("18 fields of 3 init times missing: ")


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
    assert kept["policy"] == "skip" and kept["dates"] == "2001-01-02T00 2001-01-03T00"
    assert kept["first"][-1] == "member 3 at 2001-01-03T00 lacks t at 500 hPa, lead 0 h (4 fields)"
    assert kept["fields"] == 5
    assert any("these init times are left out (gaps=skip)" in record.getMessage() for record in caplog.records)


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
        UserError, match=r"truth .*: 4 fields of 2 init times missing: lacks t at 500 hPa at 2001-01-04"
    ):
        prepare(config)
    config.gaps = Gaps.skip
    skipped = open_store(prepare(config))
    assert starts(skipped) == ["2001-01-01", "2001-01-02"]
    with pytest.raises(UserError, match=r"2 init times are not in the store: 2001-01-03T00, 2001-01-04T00"):
        inspect(InspectConfig(store=skipped.path, complete=True))
    np.testing.assert_array_equal(skipped.read(Part.TRUTH, 1).pressure, pair.read(Part.TRUTH, 1).pressure)
    config.gaps, config.output = Gaps.mask, str(tmp_path / "m.zarr")
    masked = open_store(prepare(config))
    inspect(InspectConfig(store=masked.path, complete=True, speed=False))  # no init time is missing
    assert masked.present(Part.TRUTH, 2)[0][0, :, 0, 0].tolist() == [True, False]
    np.testing.assert_array_equal(masked.read(Part.TRUTH, 3).pressure, pair.read(Part.TRUTH, 3).pressure)


def test_nothing_is_left(tmp_path):
    gone = [(date, 2, 24, "t", level) for date, level in zip(DATES, (500, 850) * 2, strict=True)]
    path = ensemble(tmp_path / "a.grib", dates=DATES, leave_out=gone)
    config = PrepareConfig(input=str(path), output=str(tmp_path / "s.zarr"), gaps=Gaps.skip)
    with pytest.raises(UserError, match="gaps=skip: no init time is complete; 4 fields of 4 init times"):
        prepare(config)


def test_a_regular_series_without_a_date(tmp_path, caplog):
    path = ensemble(tmp_path / "a.grib", dates=(20010101, 20010103, 20010105, 20010109, 20010111, 20010113))
    with caplog.at_level(logging.WARNING, "data_prep"):
        prepare(PrepareConfig(input=str(path), output=str(tmp_path / "s.zarr")))
    assert "1 init times of a regular series are missing: 2001-01-07T00" in caplog.text
    store = open_store(tmp_path / "s.zarr")
    kept = {"policy": "error", "dates": "", "fields": 0, "first": [], "starts": "2001-01-07T00"}
    assert store.provenance["gaps"] == kept
    with pytest.raises(UserError, match=r"1 init times are not in the store: 2001-01-07T00"):
        inspect(InspectConfig(store=store.path, complete=True))
    looked = inspect(InspectConfig(store=store.path, speed=False))
    for starts in ("2001-01-07T00", ["2001-01-07T00"]):  # as stores had them before
        looked["provenance"]["gaps"]["starts"] = starts
        assert "Regularly spaced except for 1 init time: 2001-01-07T00" in as_text(looked)
    looked["provenance"]["gaps"]["starts"] = "R40/2001-01-07T00/PT24H"
    assert "for 40 init times: 2001-01-07T00, 2001-01-08T00" in as_text(looked)


def test_provenance_of_thousands_of_gaps_is_short():
    days = np.datetime64("1990-01-01T00", "h") + np.arange(3000) * np.timedelta64(24, "h")
    gaps = [Gap(at, str(day), f"member 3 at {day} lacks t at 500 hPa, lead 24 h", 2) for at, day in enumerate(days)]
    kept = kept_gaps(gaps, Gaps.skip, [])
    assert kept["dates"] == "R3000/1990-01-01T00/PT24H" and kept["fields"] == 6000 and len(kept["first"]) == 10
    assert kept["first"][0] == "member 3 at 1990-01-01T00 lacks t at 500 hPa, lead 24 h (2 fields)"
    assert len(str(kept)) < 1500 and "starts" not in kept


def test_twice_a_week_and_years_apart_are_no_holes():
    mondays = np.datetime64("2001-01-01", "ns") + np.arange(10) * np.timedelta64(7, "D")
    assert holes(np.sort(np.concatenate([mondays, mondays + np.timedelta64(3, "D")]))) == []
    assert holes(np.concatenate([mondays, mondays + np.timedelta64(364 * 24, "h")])) == []
    assert holes(mondays[[0, 1, 2, 3, 5, 6, 7, 8]]) == [mondays[4]]


@pytest.mark.parametrize("lacking", [[4], [5], [4, 5, 6], [1], [4, 11], [24], [4, 6, 8, 10]])
def test_a_date_that_a_series_of_two_steps_lacks(lacking):
    """Mondays and Thursdays of two years, as hindcasts have them: one is named in each year that lacks it."""
    mondays = np.datetime64("2001-01-01", "ns") + np.arange(10) * np.timedelta64(7, "D")
    year = np.sort(np.concatenate([mondays, mondays + np.timedelta64(3, "D")]))
    whole = np.concatenate([year, year + np.timedelta64(365, "D")])
    assert holes(whole) == []
    assert holes(np.delete(whole, lacking)) == [whole[place] for place in lacking]


def test_a_series_without_steps_in_turn_has_no_holes():
    days = np.cumsum([0, 3, 5, 3, 3, 5, 5, 7, 3, 5, 8, 3, 3, 5])
    assert holes(np.datetime64("2001-01-01", "ns") + days * np.timedelta64(1, "D")) == []


class TestHypercubes:
    """NetCDF and Zarr have a place for each combination of start date, member, lead and level: some are all NaN."""

    @pytest.fixture(params=["nc", "zarr"])
    def config(self, request, tmp_path):
        data = dataset()
        data["t"].values[0, 1] = np.nan  # a member of the first start date
        data["t"].values[1, 2, 1, 0] = np.nan  # a level of one lead
        path = tmp_path / f"a.{request.param}"
        data.to_netcdf(path) if request.param == "nc" else data.to_zarr(path, consolidated=False)
        return PrepareConfig(input=str(path), output=str(tmp_path / "s.zarr"))

    def test_they_end_the_run_and_a_line_says_what_helps(self, config, tmp_path):
        with pytest.raises(UserError, match=r"84 of 84 values are NaN.*; if it is absent, prepare with gaps=mask"):
            prepare(config)
        assert not (tmp_path / "s.zarr").exists()

    def test_they_are_masked(self, config, caplog):
        config.gaps = Gaps.mask
        with caplog.at_level(logging.WARNING, "data_prep"):
            store = open_store(prepare(config))
        there = np.ones((2, 3, 2, 2), bool)  # start date, member, lead, level
        there[0, 1], there[1, 2, 1, 1] = False, False  # levels from the top down
        values = dataset()["t"].values[:, :, :, ::-1]
        for date in range(2):
            np.testing.assert_array_equal(store.present(Part.FORECAST, date)[0][:, :, 0], there[date])
            found = store.read(Part.FORECAST, date).pressure[:, :, 0]
            assert np.isnan(found[~there[date]]).all()
            np.testing.assert_allclose(found[there[date]], values[date][there[date]], atol=1e-3)
        phrase = "member 2 at 2001-01-01T00 lacks t at 500 hPa, lead 0 h (4 fields)"
        assert store.provenance["gaps"]["first"][0] == phrase
        told = [record.getMessage() for record in caplog.records]
        phrase = "5 of 24 fields, on 2 init times, are all NaN and count as absent; the first:"
        assert sum(phrase in text and "member 2, 2001-01-01T00" in text for text in told) == 1

    def test_nothing_is_left_where_all_dates_have_some(self, config):
        config.gaps = Gaps.skip
        with pytest.raises(UserError, match=r"gaps=skip: no init time is complete; 5 fields of 2 init times"):
            prepare(config)

    def test_they_are_looked_for_once(self, config, monkeypatch):
        config.gaps, config.overwrite = Gaps.mask, True
        first, seen = open_store(prepare(config)).fingerprint(), []
        real = FileIndex.save_looks
        monkeypatch.setattr(FileIndex, "save_looks", lambda *given: seen.append(1) or real(*given))
        assert open_store(prepare(config)).fingerprint() == first and not seen
        config.index = None
        assert open_store(prepare(config)).fingerprint() == first and seen

    def test_an_open_dataset_is_searched_once_from_any_folder(self, tmp_path, monkeypatch):
        data, seen = dataset(), []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            monkeypatch.chdir(tmp_path / name)
            open_archive(data, index=FileIndex(tmp_path / "index", look=True))
            real = FileIndex.save_looks
            monkeypatch.setattr(FileIndex, "save_looks", lambda *given, real=real: seen.append(1) or real(*given))
        assert not seen and len(list((tmp_path / "index").iterdir())) == 1

    def test_what_is_not_wanted_is_not_looked_at(self, config, monkeypatch):
        config.gaps, config.leads, config.dates, looked = Gaps.mask, [24], ["2001-01-03"], []
        real = FileIndex.save_looks
        monkeypatch.setattr(FileIndex, "save_looks", lambda *given: looked.append(given[-1]) or real(*given))
        store = open_store(prepare(config))
        assert starts(store) == ["2001-01-03"] and store.present(Part.FORECAST, 0)[0].sum() == 5
        assert [(found > 0).sum() for found in looked] == [6] and (looked[0] == 2).sum() == 1
        config.leads, config.dates, config.overwrite = None, None, True
        prepare(config)
        assert [(found > 0).sum() for found in looked] == [6, 24]  # what was looked at is kept

    def test_what_was_found_of_another_list_of_fields_says_nothing(self, config):
        config.gaps, config.overwrite = Gaps.mask, True
        first = open_store(prepare(config)).fingerprint()
        (kept,) = (Path(config.output).parent / ".s.zarr.index").glob("*.looks")
        head, _, rows = kept.read_bytes().partition(b"\n")
        other = json.loads(head) | {"fields": "of other fields"}
        all_there = bytes(len(rows) * [1])
        other["sha256"] = hashlib.sha256(all_there).hexdigest()
        kept.write_bytes(json.dumps(other).encode() + b"\n" + all_there)
        assert open_store(prepare(config)).fingerprint() == first

    def test_a_file_that_changes_meanwhile_is_refused(self, config, monkeypatch):
        config.gaps = Gaps.mask
        real = xarray_files.XarrayFile._read
        inside = [path for path in (Path(config.input), *Path(config.input).rglob("*")) if path.is_file()]
        chunk = max(inside, key=os.path.getsize)
        monkeypatch.setattr(
            xarray_files.XarrayFile, "_read", lambda *given: os.utime(chunk, ns=(0, 2**62)) or real(*given)
        )
        with pytest.raises(UserError, match="changed while it was read"):
            prepare(config)

    @pytest.mark.slow
    def test_workers_in_other_processes_see_the_same(self, config):
        config.gaps, config.overwrite = Gaps.mask, True
        first = open_store(prepare(config)).fingerprint()
        config.executor, config.workers = Executor.processes, 2
        assert open_store(prepare(config)).fingerprint() == first


@pytest.mark.parametrize("rows", [slice(3, 4), slice(1, None)])
def test_a_field_that_has_a_value_is_no_gap(tmp_path, rows):
    data = dataset()
    data["t"].values[0, 1, 0, 0, rows] = np.nan
    data.to_netcdf(tmp_path / "a.nc")
    config = PrepareConfig(input=str(tmp_path / "a.nc"), output=str(tmp_path / "s.zarr"), gaps=Gaps.mask)
    with pytest.raises(UserError, match=r"t at 850 hPa, member 2, 2001-01-01T00, lead 0 h: \d+ of 84 values are NaN"):
        prepare(config)


def test_what_nobody_wrote_is_missing(tmp_path):
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:  # no attribute names the number that stands there
        source = dataset()
        for name, axis in source.coords.items():
            file.createDimension(name, axis.size)
            values = axis.values.astype("m8[h]").astype(float) if name == "step" else axis.values
            values = (values - np.datetime64("2001-01-01")) / np.timedelta64(1, "h") if name == "time" else values
            one = file.createVariable(name, "f8", (name,))
            one[:] = values
            one.units = {"step": "hours", "time": "hours since 2001-01-01"}.get(name, "")
        file["isobaricInhPa"].units = "hPa"
        t = file.createVariable("t", "f4", tuple(source.t.dims))
        t.units = "K"
        t[0] = source.t.values[0]
        t[1, :2] = source.t.values[1, :2]
    config = PrepareConfig(input=str(tmp_path / "a.nc"), output=str(tmp_path / "s.zarr"))
    with pytest.raises(UserError, match=r"t at 850 hPa, member 3, 2001-01-03T00, lead 0 h: 84 of 84 values are NaN"):
        prepare(config)
    config.gaps, config.restart = Gaps.mask, True
    store = open_store(prepare(config))
    assert store.present(Part.FORECAST, 0)[0].all() and not store.present(Part.FORECAST, 1)[0][2].any()


def test_absent_times_of_a_truth(tmp_path):
    path = ensemble(tmp_path / "a.grib", dates=DATES)
    analyses = dataset().isel(number=0, step=0, drop=True)
    analyses = analyses.reindex(time=np.datetime64("2001-01-01", "ns") + np.arange(5) * np.timedelta64(1, "D"))
    analyses["t"].values[[1, 4]] = 280.0  # two of the four start dates are verified at both leads
    analyses.to_netcdf(tmp_path / "t.nc")
    config = PrepareConfig(input=str(path), truth=str(tmp_path / "t.nc"), output=str(tmp_path / "s.zarr"))
    config.gaps = Gaps.skip
    assert starts(open_store(prepare(config))) == ["2001-01-01", "2001-01-02"]
