"""Regions, seasons and extremes; calibration by date; the model climate; significance with few false discoveries."""

import re
from dataclasses import replace
from html import escape
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import norm
from stores import make_store

from ensemble_ml.config import EvaluateConfig
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.grid import Grid
from ensemble_ml.store.climate import PROBABILITIES
from ensemble_ml.verification.aggregation import WEIGHTINGS, AggregationState, Column
from ensemble_ml.verification.bootstrap import draw_dates, interval, merged, p_values, significant
from ensemble_ml.verification.extremes import efi
from ensemble_ml.verification.fits import Fit
from ensemble_ml.verification.probability import Calibration, exceeding, members_exceeding, threshold
from ensemble_ml.verification.rankings import scorecard
from ensemble_ml.verification.samples import Group, Setting, read_sample
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.scoring import EFI_WEIGHTED, EXTREME, _calibrate, extreme_forecast_index, model_climate
from ensemble_ml.verification.statistics import Key, Statistic
from ensemble_ml.verification.strata import _place, calibration_rows, region_masks, strata_rows
from ensemble_ml.verification.summary import headline

GRID = Grid(np.linspace(90, -90, 19), np.arange(0, 360, 20.0))
AREA = GRID.area_weights()


def make_scores(dates=24):
    """Ours has half the reference's CRPS in the tropics and where |EFI| is large, and the same elsewhere."""
    rng = np.random.default_rng(0)
    masks = region_masks(GRID)
    state = AggregationState(dates, 1, (*WEIGHTINGS, *masks, EXTREME, EFI_WEIGHTED))
    weights = np.stack([AREA, np.ones(GRID.shape), *(AREA * mask for mask in masks.values())])
    for date in range(dates):
        theirs = rng.gamma(2, size=(1, *GRID.shape))
        index = np.zeros((1, *GRID.shape))
        index[0, :2] = 0.9
        ours = theirs * np.where(masks["tropics"] | (np.abs(index) > 0.7), 0.5, 1.0)
        values = {Key("ours", Statistic.CRPS): ours, Key("raw_10", Statistic.CRPS): theirs}
        unusual = AREA * (np.abs(index) > 0.7)
        strata = {EXTREME: (unusual, unusual), EFI_WEIGHTED: (AREA * np.abs(index), AREA + 0 * index)}
        state.record(date, slice(0, 1), values, np.ones_like(theirs, bool), weights, strata)
    times = np.datetime64("2001-01-01", "ns") + np.arange(dates) * np.timedelta64(15, "D")
    counts = draw_dates(np.arange(dates), 200, seed=0)
    scores = Scores(state, (Column(48, "t", 850),), counts, dates, 0.95, ("ours",), 5, 10, given={"ours": 5})
    return scores, times, tuple(masks)


def test_strata_find_where_the_gain_is():
    scores, times, regions = make_scores()
    rows = {row["stratum"]: row for row in strata_rows(scores, times, regions) if row["reference"] == "raw_10"}
    assert rows["tropics"]["ratio"] == pytest.approx(0.5) and rows["tropics"]["better"]
    assert rows["southern extratropics"]["ratio"] == pytest.approx(1.0)
    assert 0.5 < rows["northern extratropics"]["ratio"] < 1 and rows["northern extratropics"]["better"]
    assert rows[EXTREME]["ratio"] == pytest.approx(0.5) and rows[EFI_WEIGHTED]["ratio"] == pytest.approx(0.5)
    assert rows["DJF"]["dates"] == 5  # four in January and February, one in December
    assert sum(rows[name]["dates"] for name in ("DJF", "MAM", "JJA", "SON")) == 24
    state = scores.state
    mean = lambda name: state.mean(Key("ours", Statistic.CRPS), name)[0]  # noqa: E731
    polar = AREA[:2].sum() / AREA.sum()
    assert mean(EFI_WEIGHTED) == pytest.approx(0.9 * polar * mean(EXTREME))  # EECRPS: the mean of |EFI| CRPS


def test_the_scorecard_finds_where_the_gain_is():
    scores, _, _ = make_scores()
    cards = scorecard(scores).split("<section ")[1:]
    of_region = {re.search(r"<h4>CRPS vs raw 10, (.*?)</h4>", card)[1]: card for card in cards}
    extratropics = "northern extratropics", "southern extratropics"
    assert list(of_region) == ["all points", extratropics[0], "tropics", extratropics[1], escape(EXTREME)]
    cell = re.search(r'<td class=(\w+)><span title="(.*?)">(.*?)<small>(.*?) \| (.*?)</small>', of_region["tropics"])
    assert cell.groups()[:3] == ("b", "+50.0 to +50.0 %", "+50.0")
    assert float(cell[4]) == pytest.approx(float(cell[5]) / 2, rel=0.01)
    assert "850 hPa temperature, K" in of_region["tropics"] and "<th>48 h</th>" in of_region["tropics"]
    assert "<td><span" in of_region["southern extratropics"]  # no gain has no colour
    scores.counts, scores.blocks = draw_dates(np.arange(24) // 12, 200, seed=0), 2
    scores._cache.clear(), scores._known.clear()
    vars(scores).pop("_block")
    assert "<td class=b0><span" in scorecard(scores)  # of two blocks nothing is sure, and the colour is pale


def test_runs_stand_side_by_side_and_are_compared_with_the_first():
    """The second has a third less than the first in the tropics; the first is not compared with itself."""
    scores, _, _ = make_scores()
    state = scores.state
    for table in (state.total, state.weight, state.left_out, state.points):
        table[Key("B<", Statistic.CRPS)] = table[Key("ours", Statistic.CRPS)].copy()
    tropics = state.weightings.index("tropics")
    state.total[Key("B<", Statistic.CRPS)][:, tropics] *= 2 / 3
    scores.forecasts, scores.given = ("ours", "B<"), {"ours": 5, "B<": 5}
    cards = {re.search(r"<h4>(.*?)</h4>", card)[1]: card for card in scorecard(scores).split("<section ")[1:]}
    assert next(iter(cards)) == "CRPS vs ours, all points"
    heads = re.findall(r'<th colspan="1" scope="colgroup">(.*?)</th>', cards["CRPS vs raw 10, tropics"])
    assert heads == ["ours", "B&lt;"] and '<th title="B&lt;">48 h</th>' in cards["CRPS vs raw 10, tropics"]
    found = re.findall(r'<td class=(\w+)><span title=".*?">(.*?)<small>', cards["CRPS vs raw 10, tropics"])
    assert found == [("b", "+50.0"), ("b", "+66.7")]
    assert re.findall(r"<td class=b><span title=.*?>(.*?)<small>", cards["CRPS vs ours, tropics"]) == ["+33.3"]
    assert re.findall(r"<td><span title=.*?>(.*?)<small>", cards["CRPS vs B&lt;, southern extratropics"]) == ["+0.0"]


def test_what_lies_in_one_block_has_no_interval():
    scores, times, regions = make_scores()
    scores.counts, scores.blocks = draw_dates(np.arange(24) // 12, 200, seed=0), 2  # halves of the year
    rows = {row["stratum"]: row for row in strata_rows(scores, times, regions) if row["reference"] == "raw_10"}
    assert rows["tropics"]["blocks"] == 2 and np.isfinite(rows["tropics"]["high"]) and rows["tropics"]["high"] < 1
    assert not rows["tropics"]["better"]  # of two blocks, chance alone excludes one half of the time
    assert [rows[name]["blocks"] for name in ("DJF", "MAM", "JJA", "SON")] == [2, 1, 2, 1]
    assert all(np.isnan(rows[name]["low"]) and not rows[name]["better"] for name in ("MAM", "SON"))


def test_few_blocks_make_nothing_sure():
    rng = np.random.default_rng(0)
    for blocks, sure in ((2, 0.0), (4, 0.0), (12, 0.05)):
        counts, found = draw_dates(np.arange(blocks), 400, seed=0), []
        for _ in range(200):
            values = rng.normal(size=blocks)
            found.append(interval(values.mean(), counts @ values / blocks, 0.95, blocks).excludes(0))
        assert np.mean(found) <= sure + 0.03


def test_an_interval_rests_on_the_blocks_that_know_its_own_metric():
    scores, _, _ = make_scores()
    for entrant in ("ours", "raw_10"):
        weight = scores.state.weight[Key(entrant, Statistic.CRPS)]
        scores.state.total[Key(entrant, Statistic.ERROR)] = scores.state.total[Key(entrant, Statistic.CRPS)] + 1
        scores.state.weight[Key(entrant, Statistic.ERROR)] = weight * (np.arange(24) < 3)[:, None, None]
    assert scores.blocks_of("crps", "ours", [0]) == 24 and scores.blocks_of("bias", "ours", [0]) == 3
    assert scores.ratio("crps", "ours", "raw_10", np.array([0])).below(1.0)


def test_calibration_of_a_perfect_forecast_is_flat_and_adds_over_dates():
    rng, dates = np.random.default_rng(1), 30
    found = Calibration(dates, 1, AREA)
    where, ones = slice(0, 1), np.ones((1, *GRID.shape), bool)
    zero, one = np.zeros((1, *GRID.shape)), np.ones((1, *GRID.shape))
    limit = threshold(zero, one)
    for date in range(dates):
        y, members = rng.normal(size=(1, *GRID.shape)), rng.normal(size=(9, 1, *GRID.shape))
        found.record_pit("ours", date, where, (Family.NORMAL, zero, one), y, ones)
        found.record_ranks("raw_9", date, where, members, y, ones)
        found.record_event("ours", where, exceeding(Family.NORMAL, zero, one, limit), y > limit, ones)
        found.record_event("raw_9", where, members_exceeding(members, limit), y > limit, ones)
    np.testing.assert_allclose(found.share("pit", "ours")[0], 0.1, atol=0.012)
    np.testing.assert_allclose(found.share("rank", "raw_9")[0], 0.1, atol=0.012)
    assert found.share("pit", "raw_9") is None
    drawn = found.share("pit", "ours", np.eye(dates)[:1])[0, 0]
    np.testing.assert_allclose(drawn, found.histograms["pit", "ours"][0, 0] / AREA.sum())
    forecast, event, count = found.reliability[0, "ours", None].curve()
    assert (
        forecast == pytest.approx([0.1])
        and event == pytest.approx([0.1], abs=0.01)
        and count.sum() == dates * AREA.size
    )
    scores, _, _ = make_scores(dates)
    rows = calibration_rows(scores, found)
    assert [row["kind"] for row in rows] == ["pit", "rank"]
    assert all(
        low <= share <= high
        for row in rows
        for low, share, high in zip(row["low"], row["shares"], row["high"], strict=True)
    )


def test_histograms_count_areas_not_points():
    """A truth below all members in one row of cells, above in the others: at the pole a row is small."""
    found, shape = Calibration(1, 1, AREA), (1, *GRID.shape)
    y = np.full(shape, 9.0)
    y[0, 0] = -9.0
    mask = np.ones(shape, bool)
    mask[0, -3:] = False  # what is left out has no area either
    low = AREA[0].sum() / AREA[:-3].sum()
    found.record_pit("ours", 0, slice(0, 1), (Family.NORMAL, np.zeros(shape), np.ones(shape)), y, mask)
    found.record_ranks("raw_3", 0, slice(0, 1), np.zeros((3, *shape)), y, mask)
    np.testing.assert_allclose(found.share("pit", "ours")[0], [low, *[0.0] * 8, 1 - low])
    np.testing.assert_allclose(found.share("rank", "raw_3")[0], [low, 0.0, 0.0, 1 - low])
    assert low < 0.5 / len(AREA)


@pytest.mark.parametrize(("variable", "cells"), [("tcc", 1), ("t2m", 3)])
def test_reliability_is_of_limits_that_can_be_exceeded(variable, cells):
    """Cloud cover of 0.9 and a deviation of 0.3 cannot be 1.28 deviations above its mean; a temperature can."""
    shape = (1, 1, 4)
    mean, deviation = np.array([[[0.2, 0.9, 0.8, 0.5]]]), np.array([[[0.3, 0.3, 0.2, 0.0]]])
    setting = SimpleNamespace(reduced=2, full=3, thresholds=lambda name: {variable: [0.4, 0.7]}[name])
    members = np.full((3, *shape), 0.5)
    sample = SimpleNamespace(members=members, raw=members, truth=np.full(shape, 0.6))
    found, fit = Calibration(1, 1, np.ones((1, 4))), Fit(climatology=(mean, deviation))
    said = {"ours": SimpleNamespace(family=Family.NORMAL, location=mean, scale=np.ones(shape))}
    group = Group(variable, 24, (None,), slice(0, 1))
    _calibrate(setting, group, fit, 0, sample, said, np.ones(shape, bool), found)
    counts = {(name, at): table.curve()[2].sum() for (_, name, at), table in found.reliability.items()}
    assert counts == {
        (name, at): cells if at is None else 4 for name in ("ours", "raw_2", "raw_3") for at in (None, 0.4, 0.7)
    }
    # Thresholds need no climate: the truth is 0.6 and the members are 0.5 everywhere.
    assert found.thresholds(0) == [0.4, 0.7]
    curves = [found.reliability[0, "raw_2", at].curve()[:2] for at in (0.4, 0.7)]
    assert [[float(x[0]) for x in curve] for curve in curves] == [[1.0, 1.0], [0.0, 0.0]]
    forecast, _, count = found.reliability[0, "ours", 0.4].curve()
    assert forecast @ count == pytest.approx((1 - norm.cdf(0.4 - mean)).sum())


def test_the_index_is_that_of_other_seasons(tmp_path):
    """Late December and the January after it are one season: neither enters the climate of the other."""
    dates = ["2001-01-03", "2001-12-30", "2002-01-02", "2002-12-29", "2003-01-04", "2003-06-01"]
    store = make_store(
        tmp_path / "s.zarr", dates=dates, members=10, leads=(24,), variables=("t",), surface=("t2m",), shape=(9, 16)
    )
    setting = Setting(store, (), 5, np.arange(0), np.arange(0), np.ones((2, 9, 16)), False, climate_days=9)
    climate = model_climate(setting)
    for group in (Group("t", 24, (500, 850), slice(0, 2)), Group("t2m", 24, (None,), slice(2, 3))):
        members = [read_sample(setting, group, date).members for date in range(6)]
        for date, others in {0: [1, 2, 3, 4], 1: [0, 3, 4], 2: [0, 3, 4], 3: [0, 1, 2], 4: [0, 1, 2]}.items():
            pooled = np.concatenate([members[other] for other in others])
            expected = efi(members[date], np.quantile(pooled, PROBABILITIES, axis=0), PROBABILITIES)
            found = extreme_forecast_index(climate, group, date, members[date])
            np.testing.assert_allclose(found, expected, atol=1e-4)
        assert extreme_forecast_index(climate, group, 5, members[5]) is None  # no other June
    assert model_climate(replace(setting, climate_days=0)) is None


def test_significance_controls_false_discoveries():
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(12, 40, 50))
    assert significant(p_values(noise)).mean() < 0.01
    noise[:, :10] -= 3
    found = significant(p_values(noise))
    assert found[:10].mean() > 0.95 and found[10:].sum() / found.sum() < 0.15
    assert not significant(p_values(noise[:4])).any()  # too few blocks
    holes = noise.copy()
    holes[:, 0, 0] = np.nan
    assert not significant(p_values(holes))[0, 0]
    assert merged(np.arange(100)).max() == 19 and merged(np.arange(7)).tolist() == list(range(7))


def test_boxes_are_checked():
    with pytest.raises(UserError, match=r"regions.alps=\[44, 5, 48, 16\]: give \[north, west, south, east\]"):
        EvaluateConfig("f", "e", output="o", regions={"alps": [44, 5, 48, 16]})


def test_a_box_may_be_named_by_a_number():
    """As in regions={1: [60, 0, 30, 90]}; the report writes names as text."""
    boxes = EvaluateConfig("f", "e", output="o", regions={1: [60, 0, 30, 90]}).regions
    assert list(region_masks(GRID, boxes=boxes))[-1] == "1"


def test_the_edge_of_a_box_belongs_to_it_whatever_axes_were_kept_in():
    grid = Grid(np.linspace(60, 40, 21), np.arange(0, 100, dtype=np.float32).astype(np.float64) / 10)
    near = Grid(grid.latitude, (np.arange(0, 100) / np.float32(10)).astype(np.float32).astype(np.float64))
    for one in (grid, near):
        mask = region_masks(one, boxes={"box": [50.0, 5.1, 45.0, 6.2]})["box"]
        assert mask.sum(1).max() == 12 and mask.any(1).sum() == 6


def test_the_place_of_a_case_has_no_neighbours_beyond_the_pole():
    index = np.zeros((5, 8))
    index[0, 2], index[4, 2], index[2, 6], index[2, 7] = 0.5, 0.5, 0.5, 0.45
    assert _place(index, None, wraps=True) == (2, 6)
    index[2, 7], index[2, 5], index[3, 0] = 0.0, 0.4, 0.0
    assert _place(index, None, wraps=False) == (2, 6)


@pytest.mark.parametrize("count", [4, 12])
def test_an_efi_of_a_climate_of_other_levels_is_refused(count):
    """The first quantiles of more would pass for the whole climate."""
    with pytest.raises(UserError, match=f"climate: has {count} quantiles for 11 levels"):
        efi(np.zeros((3, 2)), np.linspace(0, 1, count)[:, None] * np.ones(2), np.linspace(0, 1, 11))


def test_the_first_sentences_tell_bias_and_spread():
    """Of temperature at two levels and rain: one is biased, one too sure, one fine; of too few blocks none is sure."""
    rng, dates = np.random.default_rng(0), 24
    columns = Column(48, "t", 850), Column(48, "t", 500), Column(48, "tp", None)
    for blocks, few in ((np.arange(dates), False), (np.arange(dates) // 8, True)):
        state = AggregationState(dates, len(columns))
        for date in range(dates):
            error = rng.normal(size=(3, *GRID.shape)) * np.array([1.0, 2.0, 1e-3])[:, None, None]
            error[0] += 0.5
            variance = np.ones_like(error) * np.array([1.25, 1.0, 1e-6])[:, None, None]
            values = {Statistic.ERROR: error, Statistic.SQUARED_ERROR: error**2, Statistic.VARIANCE: variance}
            values = {Key("ours", statistic): value for statistic, value in values.items()}
            weights = np.stack([AREA, np.ones(GRID.shape)])
            state.record(date, slice(0, 3), values, np.ones_like(error, bool), weights)
        counts = draw_dates(blocks, 200, seed=0)
        scores = Scores(state, columns, counts, int(blocks.max()) + 1, 0.95, ("ours",), 5, 10, given={"ours": 5})
        bias, spread, _ = headline(scores, dates)
        said = "too few blocks of dates to be sure in any of 3 fields"
        sure = "mean surely biased in 1 of 3 fields; "
        assert bias.startswith(f"At 48 h: mean biased: {said}; " if few else f"At 48 h: {sure}"), bias
        size = r"\+0\.(49|5\d?) K \(\+0\.[45]\d* to \+0\.5\d*\), 4\d % of the RMSE\."
        assert re.search(f"largest for its RMSE in 850 hPa temperature: {size}$", bias), bias
        words = "spread too small or too large"
        sure = "spread surely too small or too large in 1 of 3 fields; "
        assert spread.startswith(f"At 48 h: {words}: {said}; " if few else f"At 48 h: {sure}"), spread
        size = r"500 hPa temperature: 0\.(49|5\d) \(0\.\d\d to 0\.\d\d\)\."
        assert re.search(f"standard deviation over RMSE furthest from 1 in {size}$", spread), spread
    state.total[Key("ours", Statistic.ERROR)][:] = 0
    fine = replace(scores, counts=draw_dates(np.arange(dates), 200, seed=0), blocks=dates, _cache={}, _known={})
    assert headline(fine, dates)[0].startswith("At 48 h: mean surely biased in none of 3 fields; ")
