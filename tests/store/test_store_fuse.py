"""Mean, spread and moments of packed members against float64, to the bounds that `fuse` states."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ml.store.fuse import Members, fuse
from ensemble_ml.store.packing import PackedBlock, decode, exact_fields, quantise

LEVELS, ROWS, COLUMNS = 3, 5, 24


def members_of(block, extremes=False):
    exact = exact_fields(block.reference, block.scale, block.decimal)
    ends = None
    if extremes:
        codes = np.stack([block.values.min((2, 3)), block.values.max((2, 3))])
        ends = ((codes * block.scale + block.reference) * block.decimal).astype(np.float32)
    return Members(block.values, block.reference, block.scale, block.decimal, block.present, exact, ends, block.mask)


def drawn(seed, members, centre, deviation, spread):
    rng = np.random.default_rng(seed)
    shared = rng.normal(centre, deviation, (LEVELS, ROWS, COLUMNS))
    return (shared + rng.normal(0, spread, (members, LEVELS, ROWS, COLUMNS))).astype(np.float32)


def compare(fused, values, members):
    """Against float64; the bounds of the head of `fuse.py`. `values` (M, Z, R, X) of the members that are there."""
    wide = values.astype(np.float64)
    mean, spread = wide.mean(0), wide.std(0, ddof=1)
    assert (np.abs(fused.mean - mean) <= np.spacing(np.abs(values).max(0)) + 2.0**-21 * np.ptp(wide, axis=0)).all()
    bound = members * (1 + members) * 2.0**-24 * spread + np.spacing(np.abs(values).max(0)) * 1e-3
    assert (np.abs(fused.spread - spread) <= bound).all()
    axes = (0, 2, 3)
    found = fused.moments
    assert (found.count == values[:, 0].size).all()
    np.testing.assert_allclose(found.mean, wide.mean(axes), rtol=1e-9, atol=4e-7 * wide.std())
    np.testing.assert_allclose(found.std, wide.std(axes), rtol=1e-6, atol=np.spacing(np.abs(values).max()))
    np.testing.assert_array_equal(found.minimum, values.min(axes))
    np.testing.assert_array_equal(found.maximum, values.max(axes))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    members=st.integers(2, 12),
    centre=st.sampled_from([0.0, 280.0, 5e4, -3e-5, 1e5]),
    size=st.floats(1e-6, 1e-1),
    ratio=st.floats(1e-3, 2.0),
    extremes=st.booleans(),
)
def test_packed_members_against_float64(seed, members, centre, size, ratio, extremes):
    deviation = max(abs(centre), 1e-3) * size
    block = quantise(drawn(seed, members, centre, deviation, ratio * deviation))
    compare(fuse(members_of(block, extremes)), decode(block), members)


@pytest.mark.parametrize(("centre", "spread"), [(280.0, 0.5), (5e4, 100.0), (2e-5, 1e-6), (1e-3, 1e-4)])
def test_errors_are_far_below_a_step_of_sixteen_bits(centre, spread):
    block = quantise(drawn(1, 10, centre, 10 * spread, spread))
    fused, wide = fuse(members_of(block)), decode(block).astype(np.float64)
    for found, exact in ((fused.mean, wide.mean(0)), (fused.spread, wide.std(0, ddof=1))):
        step = np.ptp(exact) / 65535
        rounding = np.spacing(np.abs(wide).max().astype(np.float32))  # what float32 values can tell at all
        assert np.abs(found - exact).max() < step / 50 + rounding


def test_an_outlying_first_member_costs_no_more_than_the_bound():
    values = drawn(2, 50, 280.0, 5.0, 1.0)
    values[0] += 300
    compare(fuse(Members.plain(values, np.ones((50, LEVELS), bool))), values, 50)


def test_decimal_scales_are_decoded_as_readers_decode_them():
    block = quantise(drawn(3, 4, 280.0, 5.0, 1.0))
    block = PackedBlock(block.values, block.reference, block.scale, block.decimal / 1e3, block.present)
    assert not exact_fields(block.reference, block.scale, block.decimal).any()
    compare(fuse(members_of(block)), decode(block), 4)


def test_absent_members_and_levels_do_not_count():
    block = quantise(drawn(4, 5, 280.0, 5.0, 1.0))
    present = block.present.copy()
    present[1, 0] = present[1:, 1] = present[:, 2] = False
    fused = fuse(members_of(PackedBlock(block.values, block.reference, block.scale, block.decimal, present)))
    values = decode(block).astype(np.float64)
    some = values[[0, 2, 3, 4], 0]
    np.testing.assert_allclose(fused.mean[0], some.mean(0), rtol=1e-7)
    np.testing.assert_allclose(fused.spread[0], some.std(0, ddof=1), rtol=2e-6)
    assert np.isnan(fused.mean[1:]).all() and np.isnan(fused.spread[1:]).all()
    points = ROWS * COLUMNS
    assert fused.moments.count.tolist() == [4 * points, points, 0]
    assert fused.of_mean.count.tolist() == fused.of_spread.count.tolist() == [points, 0, 0]
    np.testing.assert_allclose(fused.moments.mean[1], values[0, 1].mean(), rtol=1e-7)
    assert np.isinf(fused.moments.minimum[2]) and fused.moments.mean[2] == 0


def test_masked_points_are_missing_in_mean_and_spread_and_do_not_count():
    values = drawn(5, 3, 280.0, 5.0, 1.0)
    mask = np.zeros(values.shape, bool)
    mask[1, 0, 2, 3:9] = mask[:, 1, 4] = True
    fused = fuse(members_of(quantise(values, mask=mask)))
    hidden = mask.any(0)
    assert (np.isnan(fused.mean) == hidden).all() and (np.isnan(fused.spread) == hidden).all()
    there = decode(quantise(values, mask=mask)).astype(np.float64)
    assert fused.moments.count.tolist() == (~mask).sum((0, 2, 3)).tolist()
    np.testing.assert_allclose(fused.moments.mean, np.nanmean(there, (0, 2, 3)), rtol=1e-8)
    np.testing.assert_allclose(fused.moments.std, np.nanstd(there, (0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(fused.of_mean.mean, np.nanmean(fused.mean.astype(float), (1, 2)), rtol=1e-12)
    assert fused.of_spread.count.tolist() == (~hidden).sum((1, 2)).tolist()


def test_results_do_not_depend_on_how_a_field_is_cut():
    block = quantise(drawn(6, 10, 280.0, 5.0, 1.0))
    whole = fuse(members_of(block))
    mean, spread = whole.mean.copy(), whole.spread.copy()
    for first in range(ROWS):
        part = block.values[:, :, first : first + 1]
        one = fuse(members_of(PackedBlock(part, block.reference, block.scale, block.decimal, block.present)))
        np.testing.assert_array_equal(one.mean[:, 0], mean[:, first])
        np.testing.assert_array_equal(one.spread[:, 0], spread[:, first])
