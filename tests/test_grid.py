"""Geometry: order, wrap, poles, areas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ml.errors import UserError
from ensemble_ml.grid import Edge, Grid, canonical


def ens10() -> Grid:
    return Grid(np.linspace(90, -90, 361), np.arange(720) * 0.5)


def test_ens10_grid_wraps_and_stands_on_both_poles():
    grid = ens10()
    assert grid.wraps
    assert grid.north is Edge.POLE_ROW and grid.south is Edge.POLE_ROW


def test_a_grid_between_the_poles():
    grid = Grid(np.arange(89.5, -90, -1), np.arange(360) + 0.5)
    assert grid.north is Edge.POLE_BETWEEN and grid.south is Edge.POLE_BETWEEN


def test_a_region_neither_wraps_nor_reaches_a_pole():
    grid = Grid(np.linspace(60, 40, 21), np.linspace(-10, 20, 31))
    assert not grid.wraps
    assert grid.north is Edge.OPEN and grid.south is Edge.OPEN


def test_areas_are_those_of_the_sphere():
    """Against the closed form: a cap of angle h has the share (1 - cos h) / 2 of the sphere."""
    weights = ens10().area_weights()
    cap = (1 - np.cos(np.deg2rad(0.25))) / 2
    assert weights[0].sum() / weights.sum() == pytest.approx(cap, rel=1e-9)
    poleward = np.abs(np.linspace(90, -90, 361)) > 60.2
    assert weights[poleward].sum() / weights.sum() == pytest.approx(1 - np.sin(np.deg2rad(60.25)), rel=1e-9)
    assert weights.mean() == pytest.approx(1)


@given(st.integers(3, 40), st.integers(0, 39), st.booleans())  # of two columns, neither is the western one
def test_canonical_order_takes_any_start_and_direction(columns, shift, flip):
    longitude = np.roll(np.arange(columns) * 360 / columns, shift % columns)
    latitude = np.linspace(80, -80, 5)
    latitude = latitude[::-1] if flip else latitude
    values = latitude[:, None] * 1000 + longitude
    grid, rows, order = canonical(latitude, longitude - 180)
    taken = values[rows[:, None], order]
    assert np.all(np.diff(grid.latitude) < 0) and np.all(np.diff(grid.longitude) > 0)
    assert 0 <= grid.longitude[0] < 360 / columns + 1e-6
    expected = grid.latitude[:, None] * 1000 + np.mod(grid.longitude + 180, 360)
    np.testing.assert_allclose(taken, expected, atol=1e-6)


def test_a_region_across_greenwich_stays_in_one_piece():
    grid, _, columns = canonical(np.arange(60, 40, -1.0), np.concatenate([np.arange(350, 360), np.arange(0, 11)]))
    np.testing.assert_allclose(grid.longitude, np.arange(-10, 11))
    assert list(columns) == list(range(21))


def test_a_region_across_greenwich_may_be_cut_out_of_0_to_360():
    """What `where(drop=True)` leaves of it: the eastern piece first."""
    cut = np.concatenate([np.arange(0, 24, 4), np.arange(340, 360, 4)]).astype(float)
    grid, _, columns = canonical(np.arange(60, 40, -1.0), cut)
    np.testing.assert_allclose(grid.longitude, np.arange(-20, 24, 4))
    np.testing.assert_allclose(np.mod(grid.longitude, 360), cut[columns])
    twice, _, columns = canonical(np.arange(60, 40, -1.0), np.concatenate([cut, [360.0]]))  # cut out of 0 to 360
    assert twice.same_as(grid) and len(columns) == len(cut)
    for end in (359.9995, 360.0005):  # in single precision or millidegrees
        twice, _, columns = canonical(np.arange(60, 40, -1.0), np.concatenate([cut, [end]]))
        assert twice.same_as(grid) and len(columns) == len(cut)
    for other in (cut[::-1], np.array([0.0, 4.0, 8.0, 20.0, 24.0])):
        with pytest.raises(UserError, match="longitude: not evenly"):
            canonical(np.arange(60, 40, -1.0), other)


def test_a_region_that_ends_at_greenwich_is_one_whatever_its_rounding():
    latitude, steps = np.arange(60, 40, -1.0), np.arange(12) / 3
    for exact in (steps - 11 / 3, np.zeros(1)):
        below, above = (canonical(latitude, exact + shift)[0] for shift in (360 - 3e-7, 3e-7))
        assert below.same_as(above) and abs(below.longitude[-1]) < 1e-6


def test_region_from_minus_180_is_moved_east():
    grid, _, _ = canonical(np.arange(60, 40, -1.0), np.arange(-120, -60, 1.0))
    assert grid.longitude[0] == 240 and grid.longitude[-1] == 299


@pytest.mark.parametrize(
    ("latitude", "longitude", "text"),
    [
        ([90, 60, 0], [0, 120, 240], "latitude: not evenly"),
        ([45, 0], [0, 120, 200], "longitude: not evenly"),
        ([], [0], "at least one"),
    ],
)
def test_irregular_axes_are_refused(latitude, longitude, text):
    with pytest.raises(UserError, match=text):
        Grid(np.array(latitude, float), np.array(longitude, float))


def test_latitude_off_the_sphere_is_refused():
    with pytest.raises(UserError, match="outside -90"):
        Grid(np.array([100.0, 0.0]), np.array([0.0]))


def test_same_as_ignores_millidegrees():
    a = Grid(np.linspace(90, -90, 7), np.arange(6) * 60.0)
    b = Grid(np.linspace(90, -90, 7), np.arange(6) * 60.0 + 2e-4)
    assert a.same_as(b)
    assert not a.same_as(Grid(np.linspace(90, -90, 5), np.arange(6) * 60.0))
    assert "7 x 6 points" in a.describe()
