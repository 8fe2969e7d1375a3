"""From forecasts to scores.json and report.html, on a synthetic store whose answers are known."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import netCDF4
import numpy as np
import pytest
import scoringrules
from fakes import DATES, FEW, TEST, TRAIN, corrected, entry, scores_of, settings, write_forecasts
from stores import make_store

from ensemble_ml.inference import Kind
from ensemble_ml.store import Fields, Part
from ensemble_ml.verification import evaluate
from ensemble_ml.verification.report import _background
from ensemble_ml.verification.vectors import Known


def truth_and_members(store, date, name, level, lead):
    layout = store.layout
    at = (slice(None), layout.lead_hours.index(lead), layout.variables.index(name), layout.levels.index(level))
    return store.read(Part.TRUTH, date).pressure[at][0], store.read(Part.FORECAST, date).pressure[at].astype(float)


def test_scores_are_those_of_an_independent_computation(result, store):
    """scoringrules on the numbers of store and rule, np.average with the grid's exact areas."""
    content, _ = result
    weights, found = store.layout.grid.area_weights(), []
    for date in TEST:
        y, x = truth_and_members(store, date, "t", 850, 24)
        given = x[:5]
        s = given.std(0, ddof=1)
        ours = scoringrules.crps_normal(y, given.mean(0), np.sqrt(1.2) * s / 0.7)
        raw = scoringrules.crps_normal(y, x.mean(0), np.sqrt(1.1) * x.std(0, ddof=1))
        fair = scoringrules.crps_ensemble(y, given, m_axis=0, estimator="fair")
        held = x[5:].std(0, ddof=1) * 0.97266 / 0.93999
        rest = np.sqrt((9 * (1.035 * s) ** 2 - 4 * s**2) / 5)  # of all less that of the five given
        found.append([ours, raw, fair, (1.035 * s - x.std(0, ddof=1)) ** 2, (rest - held) ** 2])
    crps, raw, fair, spread, held = (np.average(values, weights=weights) for values in np.mean(found, 0))
    mine = entry(content, "forecast", "t", 850, 24)
    assert mine["crps"]["value"] == pytest.approx(crps, rel=1e-5)  # NetCDF holds float32
    assert mine["spread_rmse"]["value"] == pytest.approx(np.sqrt(spread), rel=1e-5)
    assert mine["held_out_rmse"]["value"] == pytest.approx(np.sqrt(held), rel=1e-4)
    assert entry(content, "raw_10", "t", 850, 24)["crps"]["value"] == pytest.approx(raw, rel=1e-9)
    assert entry(content, "raw_5", "t", 850, 24)["crps_fair"]["value"] == pytest.approx(fair, rel=1e-9)
    assert mine["crps"]["low"] < mine["crps"]["value"] < mine["crps"]["high"]
    assert mine["crps"]["unweighted"] == pytest.approx(np.mean([f[0] for f in found]), rel=1e-5)


def test_the_climatology_of_the_spread_is_the_best_constant(result, store):
    """Of the fit dates, at each point, by the squared error; the root-mean-square spread is more than that."""
    content, _ = result
    weights, spreads = store.layout.grid.area_weights(), {}
    for date in (*TRAIN, *TEST):
        spreads[date] = truth_and_members(store, date, "t", 850, 24)[1].std(0, ddof=1)
    fitted, tested = (np.stack([spreads[date] for date in dates]) for dates in (TRAIN, TEST))
    errors = ((fitted.mean(0) - tested) ** 2).mean(0)
    root = np.sqrt(np.average(errors, weights=weights))
    assert entry(content, "climatology", "t", 850, 24)["spread_rmse"]["value"] == pytest.approx(root, rel=1e-6)


def test_claims_summary_and_comparisons_agree(result):
    content, _ = result
    assert [claim["unit"] for claim in content["claims"]] == ["ratio"] * 3 + ["%"] * 2
    assert [claim["target"] for claim in content["claims"]] == [1, 1, 1, 2, 0]
    best = next(row["reference"] for row in content["summary"] if row["best_baseline"] and row["lead_hours"] == 48)
    assert content["claims"][3]["reference"] == best and best.endswith("_5")
    rows = [r for r in content["comparisons"] if r["reference"] == best and r["lead_hours"] == 48]
    gains = [1 - row["gain_percent"]["value"] / 100 for row in rows]
    assert len(rows) == 5 and content["claims"][3]["value"] == pytest.approx(100 * (1 - np.exp(np.mean(np.log(gains)))))
    for claim in content["claims"]:
        assert claim["low"] <= claim["value"] <= claim["high"]
        assert {"claim", "value", "unit", "target", "holds", "certain", "enough_blocks"} <= set(claim)
    # Inflation alone beats raw; it cannot beat a correction that also removes the bias.
    assert not content["claims"][3]["holds"] and content["claims"][3]["value"] < 0
    assert not content["claims"][2]["holds"]


def test_nobody_is_left_out(result):
    content, _ = result
    kinds = ("raw", "global", "local", "local_constant", "shrunk", "local_blend", "blend")
    expected = {f"{kind}_{size}" for kind in kinds for size in (5, 10)} | {"forecast", "climatology"}
    expected |= {"size_corrected_5", "spread_regression_5", "start_regression_5", "held_out_regression_5"}
    assert set(content["entrants"]) == expected
    assert (
        set(content["families"]["local_5"]) >= {"q500 48 h", "tp 24 h"}
        and "t500 48 h" not in content["families"]["local_5"]
    )
    raw = entry(content, "raw_10", "q", 500)
    assert {"crps", "crps_normal", "crps_fair", "crps_members", "spread_skill"} <= set(raw)
    local = entry(content, "local_5", "tp", None)
    assert local["crps"]["value"] == min(local["crps_normal"]["value"], local["crps_family"]["value"])


def test_dates_are_accounted_for(result):
    content, _ = result
    assert content["dates"]["test"] == [f"{DATES[d]}T00" for d in TEST]
    assert content["dates"]["fit"] == [f"{DATES[d]}T00" for d in TRAIN]
    assert [d["reason"] for d in content["dates"]["dropped"]] == ["seen in training"] * 2
    assert "2 init times are not scored: 2 seen in training." in content["notes"]
    assert content["dates"]["blocks"] == 4 and content["left_out"] == []


class Checker(HTMLParser):
    """Collects what would make a browser fetch or run something, and checks that tags close."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.pictures = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v[:5] != "data:" and v[:1] != "#"]
        self.fetched += [tag] if tag in ("iframe", "object") else []
        self.pictures += tag == "figure"
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_whole_file_that_answers_first(result):
    content, html = result
    checker = Checker()
    checker.feed(html)
    assert not checker.open and not checker.fetched and checker.pictures > 100
    top = html[: html.index("<figure")]
    said = "CRPS", "95 % interval", "too few blocks of dates to be sure in any of", "independent blocks"
    assert all(words in top for words in said)
    for text in content["definitions"]:
        assert f"<dt>{text}</dt>" in html
    assert "url(" not in html and "@import" not in html and not re.search(r"\bnan\b", html)


def test_a_calibrated_ensemble_has_spread_skill_one(tmp_path, plain):
    levels = (300, 500, 700, 850)
    store = make_store(
        tmp_path / "s.zarr", dates=DATES, members=10, leads=(24,), variables=("t",), levels=levels, surface=()
    )
    folder = write_forecasts(tmp_path / "f", store, TEST, corrected(), leads=(24,), train=TRAIN)
    content = scores_of(folder, store, tmp_path / "r")

    def mean(entrant, metric):
        return np.mean([entry(content, entrant, "t", level, 24)[metric]["value"] for level in levels])

    for entrant in ("raw_5", "raw_10", "f"):
        assert mean(entrant, "spread_skill") == pytest.approx(1, abs=0.05)
    assert mean("blend_5", "spread_skill") == pytest.approx(1, abs=0.1)  # fitted on a few dates
    assert mean("raw_5", "crps_fair") == pytest.approx(mean("raw_10", "crps_fair"), rel=0.02)
    assert mean("raw_5", "crps") > mean("raw_10", "crps") > mean("raw_10", "crps_fair")


class Holes:
    """A source with a hole in the truth of one date, and no truth at all on another."""

    def __init__(self, store):
        self._store, self.path, self.layout = store, store.path, store.layout

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read(self, part, date, *args):
        found = self._store.read(part, date, *args)
        if part is Part.TRUTH and date == TEST[0]:
            pressure = found.pressure.copy()
            pressure[..., 3, 5] = np.nan
            return Fields(pressure, found.surface)
        return found

    def present(self, part, date):
        there = self._store.present(part, date)
        return tuple(a & (part is not Part.TRUTH or date != TEST[1]) for a in there)


def test_holes_are_counted(store, few_forecasts, tmp_path, plain):
    content = scores_of(few_forecasts, store, tmp_path / "r", source=Holes(store))
    assert {"date": f"{DATES[TEST[1]]}T00", "reason": "without truth"} in content["dates"]["dropped"]
    holes = [hole for hole in content["left_out"] if hole["entrant"] == "forecast" and hole["statistic"] == "crps"]
    assert all(0 < h["area_share"] < 3 / h["points"] for h in holes)
    assert {(h["field"], h["left_out"]) for h in holes} == {(f, 1) for f in ("t500", "t850", "q500", "q850")}
    assert np.isfinite(entry(content, "forecast", "t", 500)["crps"]["value"])
    assert any("scores leave points out" in note for note in content["notes"])


def test_all_members_given_are_not_compared_with_what_knows_the_answer(store, tmp_path, plain):
    folder = write_forecasts(tmp_path / "f", store, FEW, corrected(members=10), leads=(48,), train=TRAIN)
    content = scores_of(folder, store, tmp_path / "r", members_in=10)
    rows = {row["entrant"]: row["spread_rmse"]["value"] for row in content["scores"] if "spread_rmse" in row}
    assert "climatology" in rows and not {"raw_10", "size_corrected_10", "spread_regression_10"} & rows.keys()
    assert all(abs(claim["value"]) < 1e3 for claim in content["claims"])


def as_list(data, dates):
    """Write dates as files had them before there were series."""
    data.validation_dates = " ".join(f"{date}T00:00" for date in dates)


def as_series(data, dates):
    data.validation_dates = (
        f"R{len(dates)}/{dates[0]}T00/PT{24 * int(np.diff(np.array(dates, 'M8[D]'))[0].astype(int))}H"
    )


def as_variable(data, dates):
    data.createDimension("validation_dates", len(dates))
    made = data.createVariable("validation_dates", "i8", ("validation_dates",))
    made.units = "hours since 1970-01-01"
    made[:] = np.array(dates, "M8[h]").astype(int)


def write_one(folder, store):
    """Write forecasts of one variable at one lead, for what is only a matter of their dates."""
    return write_forecasts(folder, store, FEW, corrected(), leads=(24,), names=("t",), train=TRAIN)


@pytest.mark.parametrize("form", [as_list, as_series, as_variable])
def test_validation_dates_are_not_scored(store, tmp_path, plain, form):
    folder = write_one(tmp_path / "f", store)
    for path in folder.glob("*.nc"):
        with netCDF4.Dataset(path, "a") as data:
            form(data, [DATES[d] for d in FEW[:2]])
    content = scores_of(folder, store, tmp_path / "r")
    assert content["dates"]["test"] == [f"{DATES[d]}T00" for d in FEW[2:]]
    assert [d["reason"] for d in content["dates"]["dropped"]] == ["chose the checkpoint"] * 2


def test_the_report_shows_dates_as_series():
    days = [f"{day}T00" for day in np.datetime64("2003-01-01") + np.arange(0, 2000, 2)]
    uneven = [days[place] for place in sorted(np.random.default_rng(0).choice(1000, 300, replace=False))]
    dropped = [{"date": day, "reason": "seen in training"} for day in days[:3]]
    dates = {"test": days, "fit": uneven, "dropped": [*dropped, {"date": days[9], "reason": "chose the checkpoint"}]}
    html = _background({"definitions": {}, "dates": dates, "settings": {}, "left_out": []})
    assert f"<b>Test dates</b> 1000, 2003-01-01T00 to {days[-1]}: R1000/2003-01-01T00/PT48H<" in html
    assert f"<b>Fit dates</b> 300, {uneven[0]} to {uneven[-1]}: all in scores.json<" in html
    assert "3, 2003-01-01T00 to 2003-01-05T00: R3/2003-01-01T00/PT48H (seen in training); 1, " in html


def test_dates_that_weights_had_seen_before_training_began_are_not_scored(store, tmp_path, plain):
    folder = write_one(tmp_path / "f", store)
    for path in folder.glob("*.nc"):
        with netCDF4.Dataset(path, "a") as data:
            data.earlier_dates = " ".join(f"{DATES[d]}T00" for d in FEW[:2])
    content = scores_of(folder, store, tmp_path / "r")
    assert content["dates"]["test"] == [f"{DATES[d]}T00" for d in FEW[2:]]
    assert content["dates"]["fit"] == [f"{DATES[d]}T00" for d in TRAIN]
    reasons = [d["reason"] for d in content["dates"]["dropped"]]
    assert reasons == ["seen by the weights that training began from"] * 2
    told = "f: training began from weights that had seen 2 dates which baselines are not fitted on."
    assert told in content["notes"]


def test_the_spread_at_the_start_is_a_predictor(tmp_path, plain):
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=10, leads=(0, 24), variables=("t",), surface=())
    folder = write_forecasts(tmp_path / "f", made, TEST, corrected(), leads=(24,), names=("t",), train=TRAIN)
    content = scores_of(folder, made, tmp_path / "r")
    assert content["entrants"]["start_regression_5"] == "the regression of the spread on that of 5 members at the start"
    rows = {row["entrant"]: row["spread_rmse"]["value"] for row in content["scores"] if "spread_rmse" in row}
    # The members of this store are drawn anew at each lead: their spread at the start tells no more than the climate.
    assert rows["spread_regression_5"] < rows["start_regression_5"] < 1.2 * rows["climatology"]


class WithoutStart:
    """A source that lacks a level of lead 0 on one date."""

    def __init__(self, store, date):
        self._store, self._date, self.path, self.layout = store, date, store.path, store.layout

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read(self, part, date, selection=None):
        found = self._store.read(part, date, selection)
        if part is Part.FORECAST and date == self._date and selection is not None and selection.lead_hours == (0,):
            pressure = found.pressure.copy()
            pressure[..., 0, :, :] = np.nan
            return Fields(pressure, found.surface)
        return found


def test_a_start_that_is_missing_leaves_out_only_the_regression_on_it(tmp_path, plain):
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=10, leads=(0, 24), variables=("t",), surface=())
    folder = write_forecasts(tmp_path / "f", made, FEW, corrected(), leads=(24,), names=("t",), train=TRAIN)
    found = []
    for name, source in (("whole", made), ("r", WithoutStart(made, FEW[1]))):
        evaluate(settings(folder, source, tmp_path / name), source)
        found.append(json.loads((tmp_path / name / "scores.json").read_text()))
    whole, content = found
    gone = [(row["entrant"], row["level"]) for row in whole["scores"] if row not in content["scores"]]
    assert gone == [("start_regression_5", 500)] and content["left_out"] == []
    why = "a test date has no spread at lead 0, or fewer than 2 fit dates have one"
    assert f"start regression 5 is left out where {why}: 500 hPa temperature at 24 h." in content["notes"]
    assert not any("start_regression" in text for text in whole["notes"])


def with_members(name, members_m):
    """Members stretched by what the ensemble lacks."""
    given = members_m[:5]
    stretched = given.mean(0) + (given - given.mean(0)) / 0.7
    return corrected(inflate=1 / 0.7)(name, members_m) | {Kind.MEMBER: stretched}


@pytest.mark.slow
def test_members_are_scored_as_vectors(store, tmp_path):
    folder = write_forecasts(tmp_path / "f", store, TEST, with_members, train=TRAIN)
    content = scores_of(folder, store, tmp_path / "r")
    rows = {(r["lead_hours"], r["entrant"], r["metric"]): r for r in content["vectors"]}
    assert {entrant for _, entrant, _ in rows} == {"raw_5", "raw_10", "ecc_5", "f"} and len(rows) == 2 * 4 * 3
    assert rows[48, "f", "energy"]["fields"] == 5  # t and q at two levels, tp
    assert all(row["left_out_area"] == 0 and row["blocks"] == content["dates"]["blocks"] for row in rows.values())
    area, found = store.layout.grid.area_weights(), []
    fits = [store.read(Part.TRUTH, d) for d in TRAIN]
    step = store.layout.lead_hours.index(48)
    spans = np.stack([np.concatenate([f.pressure[0, step].reshape(4, *area.shape), f.surface[0, step]]) for f in fits])
    scale = np.sqrt((area * spans.var(0, ddof=1) * (1 + 1 / len(TRAIN))).sum((1, 2)) / area.sum())[:, None, None]
    for date in TEST:
        ensemble, truth = store.read(Part.FORECAST, date), store.read(Part.TRUTH, date)
        x = np.concatenate([ensemble.pressure[:5, step].reshape(5, 4, *area.shape), ensemble.surface[:5, step]], 1)
        y = np.concatenate([truth.pressure[0, step].reshape(4, *area.shape), truth.surface[0, step]])
        x, y = x / scale, y / scale
        pairs = np.sqrt(((x[:, None] - x) ** 2).sum(2)).mean((0, 1))
        score = np.sqrt(((x - y) ** 2).sum(1)).mean(0) - pairs / 2
        found.append((area * score).sum() / area.sum())
    assert rows[48, "raw_5", "energy"]["value"] == pytest.approx(np.mean(found), rel=1e-5)
    energy = rows[48, "f", "energy"]
    ratio = energy["value"] / rows[48, "ecc_5", "energy"]["value"]
    assert energy["over_ecc_5"] == pytest.approx(ratio) and energy["over_ecc_5_low"] <= ratio
    # The raw five are too narrow, and off by 0.6 of a spread: one mends the first, the other both.
    values = [rows[48, entrant, "energy"]["value"] for entrant in ("raw_5", "f", "ecc_5")]
    assert values[0] > values[1] > values[2]
    html = (tmp_path / "r" / "report.html").read_text()
    assert "Members together" in html and "ecc 5" in html


def test_strata_calibration_and_the_extreme_case_are_in_the_files(result):
    content, html = result
    kinds = {row["kind"] for row in content["strata"]}
    assert {"region", "season"} <= kinds and all(row["low"] <= row["ratio"] <= row["high"] for row in content["strata"])
    entrants = {(row["kind"], row["entrant"]) for row in content["calibration"]}
    assert {("pit", "forecast"), ("rank", "raw_5"), ("rank", "raw_10")} <= entrants
    assert all(sum(row["shares"]) == pytest.approx(1) for row in content["calibration"])
    assert content["case"]["date"] in content["dates"]["test"] and "An extreme case" in html
    assert {"raw_10", "raw_5", "forecast"} == set(content["case"]["forecasts"])
    raw = entry(content, "raw_5", "t", 850)
    assert 0 < raw["brier"]["value"] < 0.25 and raw["spread_rmse_0"]["value"] > raw["spread_rmse"]["value"] * 0.8


def test_dates_that_any_checkpoint_of_a_folder_was_trained_on_are_not_scored(store, tmp_path, plain):
    folder = write_one(tmp_path / "f", store)
    with netCDF4.Dataset(max(folder.glob("*.nc")), "a") as data:
        data.training_dates = " ".join(f"{DATES[d]}T00" for d in [*TRAIN, *FEW[:3]])
    content = scores_of(folder, store, tmp_path / "r", fit=["2001"])
    assert content["dates"]["test"] == [f"{DATES[d]}T00" for d in FEW[3:]]


@pytest.mark.slow
def test_a_single_field_has_no_variogram(tmp_path):
    """It is a score of pairs; of one field it was zero, for everybody."""
    one = {"variables": (), "surface": ("tp",), "leads": (24,), "shape": (9, 16)}
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=10, bias=0.6, **one)
    folder = write_forecasts(tmp_path / "f", made, FEW, with_members, leads=(24,), train=TRAIN)
    rows = scores_of(folder, made, tmp_path / "r")["vectors"]
    assert {row["metric"] for row in rows} == {"crps_members", "energy"} and rows[0]["fields"] == 1
    html = (tmp_path / "r" / "report.html").read_text()
    assert "Members together" in html and "variogram score vs" not in html and "variogram over" not in html


@pytest.mark.slow
def test_what_vectors_leave_out_is_told(tmp_path, monkeypatch):
    gone = [(Part.TRUTH, date, 0, "tp") for date in FEW[:2]]
    two = {"variables": ("t",), "surface": ("tp",), "leads": (24,), "shape": (9, 16)}
    made = make_store(tmp_path / "s.zarr", dates=DATES, members=10, bias=0.6, absent=gone, **two)
    folder = write_forecasts(tmp_path / "f", made, FEW, with_members, leads=(24,), train=TRAIN)
    rows = scores_of(folder, made, tmp_path / "r")["vectors"]
    (share,) = {row["left_out_area"] for row in rows}
    assert share == pytest.approx(2 / len(FEW), abs=1e-6)
    assert "of the area lacks a value of some field" in (tmp_path / "r" / "report.html").read_text()
    of = Known.of

    def without_rain(setting, fit):
        found = of(setting, fit)
        return replace(found, scale=np.zeros(1)) if len(found.scale) == 1 else found

    monkeypatch.setattr(Known, "of", without_rain)
    evaluate(settings(folder, made, tmp_path / "dry"), made)
    rows = json.loads((tmp_path / "dry" / "scores.json").read_text())["vectors"]
    assert all(row["left_out_fields"] == ["tp"] and row["left_out_area"] == 0 for row in rows)
    assert {row["fields"] for row in rows} == {len(made.layout.levels)} and rows[0]["value"] < 10
    assert "tp left out: without variance" in (tmp_path / "dry" / "report.html").read_text()
    monkeypatch.setattr(Known, "of", lambda setting, fit: found if len((found := of(setting, fit)).scale) > 1 else None)
    rows = scores_of(folder, made, tmp_path / "unfitted")["vectors"]  # as if too few dates had a truth
    assert all(row["left_out_fields"] == ["tp"] and row["fields"] == len(made.layout.levels) for row in rows)
