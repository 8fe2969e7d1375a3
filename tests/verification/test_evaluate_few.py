"""What is left of an evaluation where dates, members or truths are few."""

from types import SimpleNamespace

import numpy as np
import pytest
from fakes import DATES, FEW, TEST, TRAIN, corrected, entry, scores_of, settings, write_forecasts
from stores import make_store

from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.inference import Kind
from ensemble_ml.store import Part
from ensemble_ml.store.source import Fields
from ensemble_ml.verification import evaluate
from ensemble_ml.verification.aggregation import Column
from ensemble_ml.verification.report import extreme_section
from ensemble_ml.verification.strata import Case
from ensemble_ml.verification.svg import Atlas


def spread_only(name, members):
    return {Kind.SPREAD: members[:5].std(0, ddof=1)}


def test_spread_alone_at_lead_zero_with_one_date(tmp_path, caplog):
    caplog.set_level("INFO")
    store = make_store(tmp_path / "s.zarr", dates=4, members=10, leads=(0,), surface=(), truth=False, static=False)
    folder = write_forecasts(tmp_path / "f", store, [3], spread_only, leads=(0,), train=[0, 1, 2])
    content = scores_of(folder, store, tmp_path / "r")
    assert "There is no truth: spread alone is scored." in content["notes"]
    assert [claim["unit"] for claim in content["claims"]] == ["ratio"] * 3
    assert content["claims"][0]["value"] == pytest.approx(1, rel=1e-5) and content["claims"][0]["low"] is None
    assert not any(claim["certain"] for claim in content["claims"])
    assert "1 test date in 1 independent block: too few for any interval." in content["headline"]
    assert "crps" not in entry(content, "raw_5", "t", 500, 0)
    assert "too few for any interval" in caplog.text and "report.html" in caplog.text


@pytest.mark.parametrize("members", [1, 5])
def test_one_date_to_fit_on_makes_no_baseline_of_the_spread(tmp_path, plain, members):
    """Fitted on itself it would be certain of its own spread, and any forecast better than that."""
    store = make_store(tmp_path / "s.zarr", dates=4, leads=(0,), surface=(), truth=False, static=False)
    folder = write_forecasts(tmp_path / "f", store, [2, 3], spread_only, leads=(0,))
    content = scores_of(folder, store, tmp_path / "r", fit=["2001-01-01"], members_in=members)
    assert set(content["entrants"]) == ({"f"} if members == 1 else {"f", "raw_5", "size_corrected_5"})
    assert any(note.startswith("Fewer than 2 dates to fit on: neither regressions") for note in content["notes"])


def test_a_field_of_one_fit_date_has_no_regression_of_its_spread(tmp_path, plain):
    gone = [(Part.FORECAST, date, member, "t") for date in (1, 2) for member in range(6)]
    store = make_store(tmp_path / "s.zarr", dates=5, leads=(24,), surface=(), truth=False, static=False, absent=gone)
    folder = write_forecasts(tmp_path / "f", store, [3, 4], spread_only, leads=(24,), train=[0, 1, 2])
    content = scores_of(folder, store, tmp_path / "r", members_in=3)
    said = {row["variable"] for row in content["scores"] if row["entrant"] == "spread_regression_3"}
    both = [f"{level} hPa temperature at 24 h" for level in (500, 850)]
    note = f"spread regression 3 is left out where fewer than 2 fit dates have a spread: {', '.join(both)}."
    assert said == {"z"} and note in content["notes"]


@pytest.mark.slow
def test_a_field_of_few_truths_to_fit_on_is_told_to_have_no_corrections(tmp_path, plain):
    gone = [(Part.TRUTH, date, 0, "t") for date in TRAIN[4:]]
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=10, leads=(24,), surface=(), absent=gone)
    folder = write_forecasts(tmp_path / "f", made, TEST, corrected(), leads=(24,), train=TRAIN)
    content = scores_of(folder, made, tmp_path / "r")
    corrected_fields = {row["variable"] for row in content["scores"] if row["entrant"] == "local_5"}
    raw_fields = {row["variable"] for row in content["scores"] if row["entrant"] == "raw_5" and "crps_fair" in row}
    note = (
        "Corrections of the raw ensemble, and what is compared with them, leave out fields of which fewer than 5 fit"
        " dates have a truth: 500 hPa temperature at 24 h, 850 hPa temperature at 24 h."
    )
    assert (corrected_fields, raw_fields) == ({"z"}, {"z", "t"}) and note in content["notes"]


@pytest.mark.slow
def test_an_ensemble_of_one_in_all_has_its_corrections(tmp_path, plain):
    """A deterministic forecast: nothing tells its spread, and the fit dates tell its errors."""
    one = make_store(tmp_path / "one.zarr", dates=DATES, members=1, variables=("t",), levels=(500,), surface=("t2m",))

    def wide(name, members_m):
        mean, scale = members_m[0], np.ones_like(members_m[0])
        return {Kind.MEAN: mean, Kind.STDDEV: scale, Kind.LOCATION: mean, Kind.SCALE: scale}

    made = write_forecasts(tmp_path / "f", one, TEST, wide, train=TRAIN)
    content = scores_of(made, one, tmp_path / "r", members_in=1)
    found = {row["entrant"] for row in content["scores"] if row["variable"] == "t2m" and row.get("crps") is not None}
    assert {"local_1", "climatology"} <= found
    assert not any("Nothing could be compared" in line for line in content["headline"])


@pytest.mark.slow
def test_one_member_has_no_raw_spread(store, few_forecasts, tmp_path, plain):
    content = scores_of(few_forecasts, store, tmp_path / "r", members_in=1)
    assert "raw_1" in content["entrants"] and "size_corrected_1" not in content["entrants"]
    assert "crps" not in entry(content, "raw_1", "t", 500) and "crps" in entry(content, "local_1", "t", 500)
    references = [claim["reference"] for claim in content["claims"]]
    assert references[0] == "spread_regression_1" and references[-1] == "raw_10"


@pytest.mark.slow
def test_a_field_of_one_block_is_certain_of_nothing(tmp_path, plain):
    gone = [(Part.TRUTH, date, 0, "tp") for date in TEST[3:]]
    made = make_store(
        tmp_path / "s.zarr", dates=DATES, members=10, variables=("t",), surface=("tp",), bias=0.6, absent=gone
    )
    folder = write_forecasts(tmp_path / "f", made, TEST, corrected(), train=TRAIN)
    content = scores_of(folder, made, tmp_path / "r")
    rain, heat = (entry(content, "f", *field)["crps"] for field in (("tp", None), ("t", 500)))
    assert entry(content, "f", "tp", None)["spread_rmse"]["low"] is not None  # which needs no truth
    assert rain["value"] > 0 and rain["low"] is None and heat["low"] < heat["value"] < heat["high"]
    # which field leaves the mean without an interval, and that it is no matter of all dates
    rain = "total precipitation at 24 h, total precipitation at 48 h"
    assert f"CRPS of {rain} is known in 1 of 4 blocks: no interval of means that hold them." in content["notes"]
    said = [line for line in content["headline"] if "CRPS" in line and " than " in line]
    assert len(said) == 2 and all(line.endswith("(no interval: total precipitation at 48 h).") for line in said)
    assert not any("The spread of" in note or "nothing is sure" in note for note in content["notes"])


class OneLevelShort:
    """A source whose truth lacks a level on all dates to fit on."""

    def __init__(self, store):
        self._store, self.path, self.layout = store, store.path, store.layout

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read(self, part, date, selection):
        found = self._store.read(part, date, selection)
        if part is not Part.TRUTH or date not in TRAIN:
            return found
        pressure = found.pressure.copy()
        pressure[..., list(selection.levels or self.layout.levels).index(500), :, :] = np.nan
        return Fields(pressure, found.surface)


def test_a_level_of_no_truth_to_fit_on_has_no_climatology_of_zero(tmp_path, plain):
    """Corrections were forecasts of one value without width, the climatology one of 0 K, and no word was said."""
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=10, leads=(24,), variables=("t",), surface=())
    folder = write_forecasts(tmp_path / "f", made, TEST, corrected(), leads=(24,), train=TRAIN)
    content = scores_of(folder, made, tmp_path / "r", source=OneLevelShort(made))
    note = (
        "Corrections of the raw ensemble, and what is compared with them, leave out fields of which fewer than 5 fit"
        " dates have a truth: 500 hPa temperature at 24 h."
    )
    assert note in content["notes"]
    for entrant in ("local_5", "climatology"):
        scored = {row["level"] for row in content["scores"] if row["entrant"] == entrant and row.get("crps")}
        assert scored == {850}
    assert {row["level"] for row in content["scores"] if row["entrant"] == "raw_5" and row.get("crps")} == {500, 850}


def test_starts_at_half_hours_are_told_as_they_are(tmp_path, plain):
    """Cut to the hour, two test dates had one name, and neither was that of an init time."""
    starts = [f"2001-01-{day:02}T{hour}" for day in range(1, 5) for hour in ("12:00", "12:30")]
    one = {"variables": (), "surface": ("tp",), "leads": (24,), "shape": (5, 8)}
    made = make_store(tmp_path / "s.zarr", dates=starts, members=3, **one)
    made_from = {"members_in": "1 2", "leads": (24,), "train": [0, 1, 2, 3]}
    folder = write_forecasts(tmp_path / "f", made, [3, 4, 5, 6, 7], corrected(members=2), **made_from)
    dates = scores_of(folder, made, tmp_path / "r")["dates"]
    assert dates["test"] == ["2001-01-03T12", "2001-01-03T12:30", "2001-01-04T12", "2001-01-04T12:30"]
    assert dates["fit"] == ["2001-01-01T12", "2001-01-01T12:30", "2001-01-02T12", "2001-01-02T12:30"]
    assert dates["dropped"] == [{"date": "2001-01-02T12:30", "reason": "seen in training"}]


def test_a_forecast_of_spread_alone_says_where_it_is_better(tmp_path, plain):
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=10, leads=(24,), surface=())
    folder = write_forecasts(tmp_path / "f", made, TEST, spread_only, leads=(24,), train=TRAIN)
    content = scores_of(folder, made, tmp_path / "r")
    [said] = [line for line in content["headline"] if line.startswith("At 24 h: spread RMSE against")]
    assert "too few blocks of dates to be sure in any of 4 fields; gain from " in said


@pytest.mark.slow
def test_maps_of_few_blocks_claim_no_test_of_significance(tmp_path):
    one = {"variables": ("t",), "levels": (500,), "surface": (), "leads": (24,), "shape": (9, 16)}
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=10, bias=0.6, **one)
    folder = write_forecasts(tmp_path / "f", made, FEW, corrected(), leads=(24,), train=TRAIN)
    evaluate(settings(folder, made, tmp_path / "r"), made)
    page = (tmp_path / "r" / "report.html").read_text()
    assert "Not tested for significance: fewer than 5 blocks of dates" in page and "Dots: " not in page


def test_an_error_has_no_size_in_deviations_that_are_none():
    """As where all members are dry. A forecast may be called like the truth, and has a map of its own."""
    grid, field = Grid(np.linspace(90, -90, 9), np.arange(16) * 22.5), np.zeros((9, 16))
    laws = {"raw_10": (field, field), "truth": (field, field + 0.5)}
    place = {name: (float(mean[0, 0]), float(deviation[0, 0])) for name, (mean, deviation) in laws.items()}
    case = Case(
        Column(24, "tp", None), "2001-01-01T00", 0.9, (90.0, 0.0, 60.0, 60.0), grid, (90.0, 0.0), field - 1, field + 1,
        laws, place, 1.0, -1.0,
    )  # fmt: skip
    page = extreme_section(case, SimpleNamespace(full=10), Atlas(grid, 1, None, {}))
    assert "+2.00" in page and "e+" not in page.partition("<table")[2]
    assert "mean, truth" in page
    assert "total precipitation from 2001-01-01T00, 24 h ahead, 60 to 90°N and 0 to 60°E" in page


def test_dates_on_which_a_member_is_missing_everywhere_are_not_counted(tmp_path, plain):
    gone = [(Part.FORECAST, date, 2, name) for date in FEW[:4] for name in ("t", "z")]
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=6, leads=(24,), surface=(), absent=gone)
    folder = write_forecasts(tmp_path / "f", made, FEW, corrected(members=2), leads=(24,), train=TRAIN)
    content = scores_of(folder, made, tmp_path / "r")
    assert len(content["dates"]["test"]) == len(FEW) - 4
    assert {one["reason"] for one in content["dates"]["dropped"]} == {
        "with some members missing of every field that is scored"
    }


def test_where_no_fit_date_has_all_members_the_report_says_that_corrections_are_not_there(tmp_path, plain):
    gone = [(Part.FORECAST, date, 2, name) for date in TRAIN for name in ("t", "z")]
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=6, leads=(24,), surface=(), absent=gone)
    folder = write_forecasts(tmp_path / "f", made, FEW, corrected(members=2), leads=(24,), train=TRAIN)
    content = scores_of(folder, made, tmp_path / "r")
    told = "No correction of the raw ensemble is shown: of the 12 fit dates fewer than 5 have a truth and all 6 members"
    assert any(note.startswith(told) for note in content["notes"]) and "local_2" not in content["entrants"]


def test_baselines_of_several_start_hours_are_told_of(tmp_path, plain):
    dates = [f"{day}T{hour:02}" for day, hour in zip(DATES, [0, 12] * 15, strict=True)]
    made = make_store(tmp_path / "s.zarr", dates=dates, members=6, leads=(24,), surface=())
    folder = write_forecasts(tmp_path / "f", made, FEW, corrected(members=2), leads=(24,), train=TRAIN)
    content = scores_of(folder, made, tmp_path / "r")
    assert any(
        note.startswith("Baselines and climatology are fitted to starts at 00, 12 UTC") for note in content["notes"]
    )


def test_baselines_are_those_of_the_hours_at_which_forecasts_start(tmp_path, plain):
    dates = [f"{day}T{hour:02}" for day, hour in zip(DATES, [0, 12] * 15, strict=True)]
    made = make_store(tmp_path / "s.zarr", dates=dates, members=6, leads=(24,), surface=())
    folder = write_forecasts(tmp_path / "f", made, FEW[::2], corrected(members=2), leads=(24,), train=TRAIN)
    content = scores_of(folder, made, tmp_path / "r")
    assert content["dates"]["fit"] == [dates[date] for date in TRAIN[::2]]
    assert "Baselines are fitted to the 6 of 12 training dates at 00 UTC, as forecasts start." in content["notes"]
    assert not any("00, 12 UTC" in note for note in content["notes"])


@pytest.mark.slow
def test_one_member_and_forecasts_of_the_mean_alone(tmp_path):
    """Nothing has a width: there is no picture of an extreme case, and the report is written."""
    dates = [str(np.datetime64(year, "D") + 2 * k) for year in ("2001", "2002", "2003", "2004") for k in range(12)]
    made = make_store(tmp_path / "s.zarr", dates=dates, members=1, variables=("t",), levels=(850,), surface=())
    rule = lambda name, members: {Kind.MEAN: members.mean(0)}  # noqa: E731
    folder = write_forecasts(tmp_path / "f", made, range(36, 48), rule, train=range(24), members_in="1")
    content = scores_of(folder, made, tmp_path / "r")
    assert content["case"] is None and entry(content, "f", "t", 850)["rmse"]["value"] > 0
    assert "An extreme case" not in (tmp_path / "r" / "report.html").read_text()


@pytest.mark.slow
def test_maps_are_of_a_date_that_has_the_field(tmp_path):
    """Of the last test date a member is missing, of t all truths: neither leaves an empty picture, or rows of nan."""
    gone = [(Part.FORECAST, FEW[-1], 2, name) for name in ("t", "z")]
    gone += [(Part.TRUTH, date, 0, "t") for date in FEW]
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=6, leads=(48,), surface=("t2m",), absent=gone)
    folder = write_forecasts(tmp_path / "f", made, FEW, corrected(members=2), leads=(48,), train=TRAIN)
    evaluate(settings(folder, made, tmp_path / "r"), made)
    page = (tmp_path / "r" / "report.html").read_text()
    assert f"spread from {DATES[FEW[-2]]}T00, all 6 members" in page
    assert "<td>nan</td>" not in page


def test_a_truth_that_verifies_nothing_is_refused(tmp_path):
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=6, leads=(24,), surface=(), truth=False)
    folder = write_forecasts(tmp_path / "f", made, FEW, spread_only, leads=(24,), train=TRAIN)
    with pytest.raises(UserError, match=r"truth=other: holds nothing at any valid time of .*s.zarr"):
        evaluate(settings(folder, made, tmp_path / "r", truth="other"), made)
