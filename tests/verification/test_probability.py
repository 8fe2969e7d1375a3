"""PIT, reliability and Brier score, quantile score, extreme forecast index, regions: oracles and known answers."""

import numpy as np
import pytest
import scoringrules
from scipy.integrate import quad
from scipy.stats import norm

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.grid import Grid
from ensemble_ml.store.climate import PROBABILITIES
from ensemble_ml.verification.extremes import efi
from ensemble_ml.verification.families import quantile
from ensemble_ml.verification.probability import (
    Reliability,
    bin_of,
    flatness,
    pit,
    quantile_score,
    shares,
)
from ensemble_ml.verification.strata import SEASONS, region_masks, season_of

GRID = Grid(np.linspace(90, -90, 19), np.arange(0, 360, 10.0))


@pytest.mark.parametrize("family", list(Family))
def test_pit_of_a_calibrated_forecast_is_flat(family):
    rng = np.random.default_rng(0)
    location, scale = rng.normal(size=100_000), rng.uniform(0.3, 2, 100_000)
    y = quantile(family, location, scale, rng.random(100_000))
    found = pit(family, location, scale, y, rng.random(100_000))
    counts = np.bincount(bin_of(found, 10), minlength=10)
    np.testing.assert_allclose(shares(counts), 0.1, atol=0.005)
    assert flatness(counts) < 0.03
    too_sharp = pit(family, location, scale / 3, y, rng.random(100_000))
    assert flatness(np.bincount(bin_of(too_sharp, 10), minlength=10)) > 0.3


def test_flatness_at_its_worst_and_without_counts():
    assert flatness(np.array([7.0, 0, 0, 0])) == pytest.approx(1.5)
    assert np.isnan(flatness(np.zeros(4)))


def test_brier_score_and_its_parts_add_up():
    rng = np.random.default_rng(1)
    p = rng.random((30, 40))
    event, w = rng.random((30, 40)) < p**1.5, rng.uniform(0.5, 2, (30, 1))
    mask = rng.random((30, 40)) < 0.9
    whole = Reliability.zeros()
    whole.record(p, event, w, mask)
    top, bottom = Reliability.zeros(), Reliability.zeros()
    top.record(p[:11], event[:11], w[:11], mask[:11])
    bottom.record(p[11:], event[11:], w[11:], mask[11:])
    parts, again = whole.parts(), (top + bottom).parts()
    brier = scoringrules.brier_score(event.astype(float), p)
    expected = np.average(brier[mask], weights=np.broadcast_to(w, p.shape)[mask])
    assert parts.score == pytest.approx(expected) and again.score == pytest.approx(expected)
    assert parts.reliability - parts.resolution + parts.uncertainty + parts.within == pytest.approx(expected)
    assert whole.curve()[2].sum() == mask.sum()


def test_murphys_parts_of_few_distinct_probabilities_leave_nothing_within():
    p = np.repeat([0.15, 0.55, 0.95], 100)
    event = np.concatenate([np.arange(100) < 15, np.arange(100) < 40, np.arange(100) < 95])
    table = Reliability.zeros()
    table.record(p, event, np.ones(1), np.ones(300, bool))
    parts = table.parts()
    assert parts.within == pytest.approx(0, abs=1e-12)
    assert parts.reliability == pytest.approx((0.15**2) / 3)
    assert parts.uncertainty == pytest.approx(0.5 * 0.5)


def test_quantile_score_against_scoringrules_and_its_integral_is_the_crps():
    rng = np.random.default_rng(2)
    q, y = rng.normal(size=(2, 50))
    for level in (0.1, 0.5, 0.9):
        np.testing.assert_allclose(quantile_score(q, y, level), scoringrules.quantile_score(y, q, level))
    twice = 2 * quad(lambda a: float(quantile_score(norm.ppf(a), np.array(0.4), a)), 0, 1)[0]
    assert twice == pytest.approx(scoringrules.crps_normal(0.4, 0, 1), abs=1e-6)


def efi_by_quadrature(members, climate, levels):
    """The integral of its definition, with p = (1 - cos theta) / 2, which takes the root away."""

    def inside(theta):
        p = (1 - np.cos(theta)) / 2
        return p - np.mean(members <= np.interp(p, levels, climate))

    return 2 / np.pi * quad(inside, 0, np.pi, limit=2000, epsabs=1e-6)[0]


@pytest.mark.parametrize("shift", [-2.0, -0.3, 0.0, 1.1, 3.0])
def test_efi_against_quadrature_of_its_definition(shift):
    rng = np.random.default_rng(3)
    levels = np.linspace(0, 1, 101)
    climate = np.sort(rng.normal(size=101))
    members = rng.normal(shift, 0.5, 10)
    found = efi(members[:, None], climate[:, None], levels)[0]
    assert found == pytest.approx(efi_by_quadrature(members, climate, levels), abs=2e-4)


def test_efi_at_its_ends_in_the_middle_and_with_dry_points():
    levels, climate = np.linspace(0, 1, 21), np.linspace(-1, 1, 21)[:, None]
    assert efi(np.full((5, 1), 9.0), climate, levels)[0] == pytest.approx(1)
    assert efi(np.full((5, 1), -9.0), climate, levels)[0] == pytest.approx(-1)
    like = norm.cdf(norm.ppf((np.arange(2000) + 0.5) / 2000)) * 2 - 1
    assert efi(like[:, None], climate, levels)[0] == pytest.approx(0, abs=1e-3)
    rain = np.maximum(np.linspace(-1, 1, 21) + 0.05, 0)[:, None]  # dry below a probability of 0.475
    found = efi(np.maximum(like + 0.05, 0)[:, None], rain, levels)[0]
    assert found == pytest.approx(0, abs=1e-3)
    dry = efi(np.zeros((5, 1)), rain, levels)[0]
    mean = quad(lambda p: np.arccos(1 - 2 * p), 0, 0.475)[0] / 0.475
    assert dry == pytest.approx(2 / np.pi * mean - 1)
    np.testing.assert_allclose(efi(np.zeros((5, 1)), -rain[::-1], levels), -dry)  # a mass at the upper end
    with pytest.raises(ValueError, match="from 0 to 1"):
        efi(np.zeros((5, 1)), rain, levels + 0.1)
    assert np.isnan(efi(np.array([[np.nan], [0.0]]), climate, levels)[0])


def test_efi_of_a_forecast_that_is_its_dry_climate_is_zero_to_half_a_step():
    """The list of levels says between which two the dry days end, and no more."""
    levels, ranks = np.array(PROBABILITIES, np.float64), (np.arange(500) + 0.5) / 500
    found = {}
    for dry in (0.30, 0.33, 0.37, 0.55, 0.58, 0.62, 0.85, 0.94):
        amount = np.where(ranks < dry, 0.0, -np.log1p(-np.clip((ranks - dry) / (1 - dry), 0, 1)))
        climate = np.quantile(amount, levels)
        found[dry] = efi(amount[:, None], climate[:, None], levels)[0]
    assert max(abs(index) for index in found.values()) < 0.02
    assert abs(found[0.55]) < 0.004 and abs(found[0.85]) < 0.004  # in the middle of two levels
    assert abs(np.mean(list(found.values()))) < 0.01


def test_regions_cover_the_sphere_once():
    land = np.zeros(GRID.shape)
    land[5:9, 3:9] = 0.7
    found = region_masks(GRID, land, {"europe": [70, -10, 40, 30]})
    three = [found[name] for name in ("northern extratropics", "tropics", "southern extratropics")]
    assert (sum(mask.astype(int) for mask in three) == 1).all()
    assert found["land"].sum() == 24 and (found["land"] ^ found["sea"]).all()
    rows, columns = np.nonzero(found["europe"])
    assert set(GRID.latitude[rows]) == {70, 60, 50, 40} and set(GRID.longitude[columns]) == {350, 0, 10, 20, 30}
    weights = GRID.area_weights()
    assert (weights * found["tropics"]).sum() / weights.sum() == pytest.approx(np.sin(np.deg2rad(15)), rel=1e-6)


@pytest.mark.parametrize(("west", "east"), [(0, 360), (-180, 180), (180, -180), (-180, 181), (-200, 300)])
def test_boxes_all_around_however_wide(west, east):
    assert region_masks(GRID, None, {"polar": [90, west, 60, east]})["polar"].sum() == 4 * 36


def test_boxes_where_nothing_lies():
    with pytest.raises(UserError, match=r"regions.gap=\[44.0, 1.0, 41.0, 2.0\]: holds no point"):
        region_masks(GRID, None, {"gap": [44.0, 1.0, 41.0, 2.0]})


def test_seasons():
    times = np.array(["2001-12-01", "2002-02-28", "2002-03-01", "2002-07-15", "2002-11-30"], "datetime64[ns]")
    assert [SEASONS[k] for k in season_of(times)] == ["DJF", "DJF", "MAM", "JJA", "SON"]
