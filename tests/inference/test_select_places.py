"""Regions and points: either convention of longitude, across Greenwich, and refused where the grid ends."""

import numpy as np
import pytest

from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.inference import select

GLOBE = Grid(np.linspace(90, -90, 19), np.arange(36) * 10.0)
REGIONAL = Grid(np.arange(60.0, 39, -1), np.arange(-10.0, 21))


def test_all_of_the_grid_is_the_default():
    places = select(GLOBE, None, None)
    field = np.random.default_rng(0).random((2, *GLOBE.shape))
    assert np.array_equal(places.cut(field), field)
    assert places.dims == ("latitude", "longitude") and places.shape == GLOBE.shape


@pytest.mark.parametrize(
    "west, east, expected",
    [
        (10, 40, [10, 20, 30, 40]),
        (-20, 20, [-20, -10, 0, 10, 20]),
        (340, 20, [-20, -10, 0, 10, 20]),
        (340, 380, [-20, -10, 0, 10, 20]),
        (-60, -30, [300, 310, 320, 330]),
        (350, 359, [350]),
        (350, 360, [-10, 0]),
        (170, -170, [170, 180, 190]),
        (-15, 5, [-10, 0]),
    ],
)
def test_longitudes_of_a_region(west, east, expected):
    places = select(GLOBE, [50, west, 30, east], None)
    assert places.longitude.tolist() == expected
    assert places.latitude.tolist() == [50, 40, 30]
    assert np.array_equal(GLOBE.longitude[places.columns], np.mod(expected, 360))


@pytest.mark.parametrize("west, east, first", [(-180, 180, -180), (0, 360, 0), (-90, 270, -90)])
def test_the_whole_circle_begins_at_the_western_edge(west, east, first):
    places = select(GLOBE, [90, west, -90, east], None)
    assert places.longitude.tolist() == [first + 10 * i for i in range(36)]


def test_a_regional_grid_keeps_its_longitudes():
    places = select(REGIONAL, [50, 355, 48, 3], None)
    assert places.longitude.tolist() == list(range(-5, 4))
    assert places.latitude.tolist() == [50, 49, 48]
    assert select(REGIONAL, [60.5, -10.5, 39.5, 20.5], None).shape == REGIONAL.shape


@pytest.mark.parametrize(
    "region",
    [[70, 0, 50, 10], [50, 0, 30, 10], [50, 0, 40, 40], [50, 100, 40, 120], [50, -30, 40, 0], [50, 15, 45, -5]],
)
def test_a_region_beyond_a_regional_grid_is_refused(region):
    with pytest.raises(UserError, match=r"reaches beyond the grid.*21 x 31 points"):
        select(REGIONAL, region, None)


def test_a_region_between_grid_points_is_refused():
    with pytest.raises(UserError, match="holds no grid point"):
        select(GLOBE, [44, 1, 41, 3], None)


def test_points_are_the_nearest_of_the_grid():
    asked = [[47.3, 11.4], [-33.9, -70.6], [89, 359], [-90, 180], [0, 355.1]]
    places = select(GLOBE, None, asked)
    assert places.latitude.tolist() == [50, -30, 90, -90, 0]
    assert places.longitude.tolist() == [10, 290, 0, 180, 0]
    assert np.array_equal(places.asked, asked) and places.dims == ("point",)
    field = np.random.default_rng(0).random((3, *GLOBE.shape))
    assert np.array_equal(places.cut(field)[:, 1], field[:, 12, 29])


@pytest.mark.parametrize("points", [[[62, 0]], [[50, 0], [50, 30]], [[50, -12]]])
def test_a_point_outside_the_grid_is_refused(points):
    with pytest.raises(UserError, match=r"lies outside the grid, which has 21 x 31 points"):
        select(REGIONAL, None, points)


@pytest.mark.parametrize(
    "points", [[], [1, 2], "50,10", [[50]], [[50, None]], [["a", "b"]], [[float("nan"), 0]], [[47, 10**20]]]
)
def test_points_must_be_pairs(points):
    with pytest.raises(UserError, match=r"give a list of \[latitude, longitude\]"):
        select(GLOBE, None, points)


def test_a_latitude_beyond_the_pole_is_refused():
    with pytest.raises(UserError, match="outside the grid"):
        select(GLOBE, None, [[91, 0]])
