"""Sums that add up whatever the chunks, metrics that are functions of means, and intervals that cover."""

import numpy as np
import pytest
import scores.continuous
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ml.grid import Grid
from ensemble_ml.verification.aggregation import METRICS, AggregationState, geometric_mean
from ensemble_ml.verification.bootstrap import Interval, blocks_of, draw_dates, interval
from ensemble_ml.verification.statistics import Key, Statistic

GRID = Grid(np.linspace(90, -90, 13), np.arange(0, 360, 30.0))
WEIGHTS = np.stack([GRID.area_weights(), np.ones(GRID.shape)])
SE = Key("ours", Statistic.SQUARED_ERROR)


def state_of(values, mask, rows=(slice(None),), dates=None):
    """Record (D, Z, Y, X) values by the given pieces of rows and of dates, each into a state of its own; add them."""
    total = AggregationState(len(values), values.shape[1])
    for piece in rows:
        for chunk in dates or [range(len(values))]:
            part = AggregationState(len(values), values.shape[1])
            for date in chunk:
                fields = {SE: values[date][:, piece]}
                part.record(date, slice(0, values.shape[1]), fields, mask[date][:, piece], WEIGHTS[:, piece])
            total = total + part
    return total


@settings(max_examples=20)
@given(cut=st.integers(1, 12), split=st.integers(1, 5), seed=st.integers(0, 99))
def test_any_chunking_gives_the_same(cut, split, seed):
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=(6, 2, *GRID.shape)) ** 2, rng.random((6, 2, *GRID.shape)) < 0.8
    whole = state_of(values, mask)
    parts = state_of(values, mask, (slice(cut), slice(cut, None)), [range(split), range(split, 6)])
    for weighting in ("area", "unweighted"):
        np.testing.assert_allclose(parts.mean(SE, weighting), whole.mean(SE, weighting), rtol=1e-12)
    np.testing.assert_array_equal(parts.left_out[SE], whole.left_out[SE])
    assert whole.left_out[SE].sum() == (~mask).sum() and (whole.points[SE] == values[0, 0].size).all()


def test_rmse_is_that_of_scores_with_exact_area_weights():
    rng = np.random.default_rng(0)
    forecast, truth = rng.normal(size=(2, 4, 1, *GRID.shape))
    state = state_of((forecast - truth) ** 2, np.ones_like(truth, bool))
    dims = ("date", "level", "latitude", "longitude")
    weights = xr.DataArray(WEIGHTS[0], dims=dims[2:])
    peer = scores.continuous.rmse(xr.DataArray(forecast, dims=dims), xr.DataArray(truth, dims=dims), weights=weights)
    rmse = METRICS["rmse"](state, "ours")
    assert rmse[0] == pytest.approx(float(peer), rel=1e-12)
    assert METRICS["rmse"](state, "ours", weighting="unweighted")[0] != pytest.approx(rmse[0], rel=1e-3)


def test_a_nan_is_never_skipped_in_silence():
    values = np.ones((1, 1, *GRID.shape))
    values[0, 0, 3, 3] = np.nan
    everywhere = np.ones_like(values, bool)
    assert np.isnan(state_of(values, everywhere).mean(SE)).all()
    masked = state_of(values, np.isfinite(values))
    assert masked.mean(SE)[0] == pytest.approx(1) and masked.left_out[SE][0, 0] == 1
    assert np.isnan(state_of(values, ~everywhere).mean(SE)).all()


def test_states_of_other_shape_are_refused():
    with pytest.raises(ValueError, match="cannot be added"):
        AggregationState(2, 1) + AggregationState(3, 1)


def test_the_better_law_is_taken_column_by_column():
    state, ones = AggregationState(1, 3), np.ones((2, *GRID.shape))
    options = (Statistic.CRPS_NORMAL, Statistic.CRPS_FAMILY)
    values = {Key("a", options[0]): ones * [[[1]], [[4]]], Key("a", options[1]): ones * [[[2]], [[3]]]}
    state.record(0, slice(0, 2), values, np.ones_like(ones, bool), WEIGHTS)
    state.record(0, slice(2, 3), {Key("a", Statistic.CRPS): 7 * ones[:1]}, np.ones_like(ones[:1], bool), WEIGHTS)
    others = (Statistic.BRIER_NORMAL, Statistic.BRIER_FAMILY)
    values = {Key("a", others[0]): ones * [[[5]], [[5]]], Key("a", others[1]): ones * [[[4]], [[6]]]}
    state.record(0, slice(0, 2), values, np.ones_like(ones, bool), WEIGHTS)
    targets = {Statistic.CRPS: options, Statistic.BRIER: others, Statistic.LOG_SCORE: others[::-1]}
    assert state.choose("a", targets) == {0: 0, 1: 1}
    np.testing.assert_allclose(state.mean(Key("a", Statistic.CRPS)), [1, 3, 7])
    np.testing.assert_allclose(state.mean(Key("a", Statistic.BRIER))[:2], [5, 6])  # of the law that CRPS took


def test_a_draw_of_dates_is_the_mean_of_those_dates():
    values = np.random.default_rng(1).normal(size=(3, 1, *GRID.shape))
    state = state_of(values, np.ones_like(values, bool))
    twice = np.concatenate([values[[0, 0]], values[[2]]])
    expected = state_of(twice, np.ones_like(values, bool)).mean(SE)
    np.testing.assert_allclose(state.mean(SE, draws=np.array([[2.0, 0, 1]]))[0], expected, rtol=1e-12)


def test_geometric_mean_leaves_out_what_cannot_be_compared():
    ratios = np.array([[0.5, 2.0, np.nan, 0.0], [1.0, 4.0, 1.0, 1.0]])
    np.testing.assert_allclose(geometric_mean(ratios, np.arange(4)), [1.0, 2.0])
    assert np.isnan(geometric_mean(ratios, np.array([2, 3]))).all()


def days(*text):
    return np.array(text, "datetime64[ns]")


def test_blocks_are_long_enough_whatever_the_calendar():
    times = days("2001-12-01", "2002-01-01")[:, None] + np.arange(0, 31, 3) * np.timedelta64(1, "D")
    blocks = blocks_of(times.ravel(), 10)
    for block in range(blocks.max() + 1):
        inside = times.ravel()[blocks == block]
        assert inside[-1] - inside[0] + np.timedelta64(3, "D") >= np.timedelta64(10, "D")
    assert sorted(set(blocks)) == list(range(blocks.max() + 1)) and (np.diff(blocks) >= 0).all()


def test_a_gap_starts_a_block_and_a_short_rest_joins():
    assert blocks_of(days("2001-01-01", "2001-01-03", "2001-06-01"), 10).tolist() == [0, 0, 1]
    step = days("2001-01-01")[0] + np.arange(12) * np.timedelta64(1, "D")
    assert blocks_of(step, 10).tolist() == [0] * 12
    assert blocks_of(days("2001-01-01"), 10).tolist() == [0]
    winters = days("2001-12-26", "2002-12-26")[:, None] + np.arange(11) * np.timedelta64(1, "D")
    assert blocks_of(winters.ravel(), 10).tolist() == [0] * 11 + [1] * 11  # New Year is a day like others


def test_draws_take_whole_blocks():
    counts = draw_dates(np.array([0, 0, 0, 1, 1]), 200, seed=0)
    assert set(map(tuple, counts)) == {(2, 2, 2, 0, 0), (1, 1, 1, 1, 1), (0, 0, 0, 2, 2)}
    np.testing.assert_array_equal(counts, draw_dates(np.array([0, 0, 0, 1, 1]), 200, seed=0))


def coverage(by_block):
    """How often a 90 % interval holds the true mean where all five dates of a block share most of their error."""
    rng, hits, dates = np.random.default_rng(3), 0, 150
    blocks = np.repeat(np.arange(30), 5) if by_block else np.arange(dates)
    counts = draw_dates(blocks, 300, seed=1)
    for _ in range(300):
        x = np.repeat(rng.normal(size=30), 5) + 0.5 * rng.normal(size=dates)
        found = interval(x.mean(), counts @ x / counts.sum(1), 0.9, 30)
        hits += found.low <= 0 <= found.high
    return hits / 300


def test_block_intervals_cover_what_single_dates_miss():
    assert 0.82 < coverage(by_block=True) < 0.95
    assert coverage(by_block=False) < 0.7


@pytest.mark.parametrize("blocks", [5, 12])
def test_intervals_of_few_blocks_hold_the_truth_as_often_as_they_say(blocks):
    rng, hits, tries = np.random.default_rng(0), 0, 600
    counts = draw_dates(np.arange(blocks), 500, seed=1)
    for _ in range(tries):
        x = rng.normal(size=blocks)
        found = interval(x.mean(), counts @ x / blocks, 0.9, blocks)
        hits += found.low <= 0 <= found.high
    assert hits / tries > {5: 0.85, 12: 0.86}[blocks]  # percentiles alone: 0.79 and 0.84


def test_one_block_has_no_interval():
    found = interval(1.0, np.ones(10), 0.95, 1)
    assert found.value == 1 and np.isnan(found.low) and not found.excludes(0)
    assert Interval(0.5, 0.4, 0.6).map(lambda r: 100 * (1 - r)) == Interval(50, 40, 60)
    assert Interval(0.5, 0.4, 0.6).below(1) and Interval(0.5, 0.4, 0.6).excludes(0)
    less = Interval(0.5, 0.4, 0.6, barred=-1)  # better is not sure, worse is; as a gain, too
    assert not less.below(1) and less.above(0.3) and not less.excludes(1)
    assert not less.map(lambda r: 100 * (1 - r)).above(0) and less.map(lambda r: 100 * (1 - r)).below(70)
    point = Interval(0.5, 0.5, 0.5, barred=-1).map(lambda r: 100 * (1 - r))  # no draw differs from the others
    assert not point.above(0) and point.below(70)


def test_values_outside_of_a_region_or_stratum_do_not_count_in_it():
    """Not even a log score that is infinite, as that of an impossible truth."""
    state, key = AggregationState(1, 1, ("area", "north", "unusual")), Key("a", Statistic.LOG_SCORE)
    values, mask = np.array([[[2.0], [np.inf]]]), np.ones((1, 2, 1), bool)
    inside = np.array([[1.0], [0.0]])
    state.record(0, slice(0, 1), {key: values}, mask, np.stack([inside + 1, inside]), {"unusual": (inside, inside)})
    assert [state.mean(key, name).item() for name in state.weightings] == [np.inf, 2.0, 2.0]


def test_weights_are_shared_while_they_are_the_same():
    """Statistics under one mask share them; one that is recorded without the others has its own from then on."""
    rng = np.random.default_rng(0)
    values, area = rng.normal(size=(2, 3, 2, 4, 5)), rng.random((1, 4, 5))
    masks = rng.random((3, 2, 4, 5)) < 0.7
    keys = [Key(name, Statistic.ERROR) for name in "ab"]
    together, apart = (AggregationState(3, 2, ("area",)) for _ in range(2))
    for date in range(3):
        mine = {key: values[place, date] for place, key in enumerate(keys)}
        together.record(date, slice(0, 2), mine if date < 2 else {keys[0]: values[0, 2]}, masks[date], area)
        shared = together.weight[keys[0]] is together.weight[keys[1]]
        assert shared == (date < 2)
        for key in keys if date < 2 else keys[:1]:
            apart.record(date, slice(0, 2), {key: mine[key]}, masks[date], area)
    for name in ("total", "weight", "left_out", "points"):
        for key in keys:
            np.testing.assert_array_equal(getattr(together, name)[key], getattr(apart, name)[key])


def test_what_is_chosen_for_one_leaves_what_shares_its_weights():
    """A statistic that is there for one column and chosen for another, beside one that the first alone has."""
    state, mask, area = AggregationState(1, 2, ("area",)), np.ones((1, 4, 5), bool), np.ones((1, 4, 5))
    both = {Key("a", statistic): np.ones((1, 4, 5)) for statistic in (Statistic.CRPS, Statistic.LOG_SCORE)}
    state.record(0, slice(0, 1), both, mask, area)
    laws = Statistic.CRPS_NORMAL, Statistic.CRPS_FAMILY
    state.record(0, slice(1, 2), {Key("a", law): np.full((1, 4, 5), 2.0) for law in laws}, mask, area)
    state.choose("a", {Statistic.CRPS: laws})
    assert state.mean(Key("a", Statistic.CRPS)).tolist() == [1.0, 2.0]
    assert np.isnan(state.mean(Key("a", Statistic.LOG_SCORE))).tolist() == [False, True]
