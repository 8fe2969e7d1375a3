"""Padding against analytic fields on the sphere, and its adjoint against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import make_climate, make_spec

from ensemble_ml.config import ModelConfig, Pole
from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.features import Features
from ensemble_ml.models.padding import Beyond, Padder, geometries

F64 = torch.float64


def global_grid(rows, columns, pole_row=True):
    latitude = np.linspace(90, -90, rows) if pole_row else 90 - (np.arange(rows) + 0.5) * 180 / rows
    return Grid(latitude, np.arange(columns) * 360 / columns)


def region(rows=7, columns=9):
    return Grid(60 - np.arange(rows) * 1.0, -10 + np.arange(columns) * 1.0)


def beyond(grid):
    """Latitude and longitude of the padded grid, radians; latitudes go on past 90 degrees."""
    lat, lon = np.deg2rad(grid.latitude), np.deg2rad(grid.longitude)
    step = lat[0] - lat[1]
    lat = np.concatenate([[lat[0] + step], lat, [lat[-1] - step]])
    lon = np.concatenate([[lon[0] * 2 - lon[1]], lon, [lon[-1] * 2 - lon[-2]]])
    return lat[:, None], lon[None]


def scalar(lat, lon):
    x, y, z = np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat) + 0 * lon
    return 1 + x - 2 * y * z + 0.5 * x * x + z**3


def wind(lat, lon, axis=(0.3, -1.2, 0.7)):
    """A constant vector of space seen from the surface: smooth over the poles, where u and v are not."""
    a, b, c = axis
    eastward = -a * np.sin(lon) + b * np.cos(lon) + 0 * lat
    northward = -np.sin(lat) * (a * np.cos(lon) + b * np.sin(lon)) + c * np.cos(lat)
    return eastward, northward


def field(values):
    return torch.from_numpy(np.asarray(values))[None, None, :, :, None]


@pytest.mark.parametrize("pole_row", [True, False])
@pytest.mark.parametrize("rows", [9, 12, 33])
def test_cross_continues_a_smooth_scalar(rows, pole_row):
    grid = global_grid(rows, 16, pole_row)
    padded = beyond(grid)
    inner = scalar(np.deg2rad(grid.latitude)[:, None], np.deg2rad(grid.longitude)[None])
    found = Padder(geometries(grid, Pole.cross, 0)[0])(field(inner))
    torch.testing.assert_close(found, field(scalar(*padded)))


@pytest.mark.parametrize("pole_row", [True, False])
def test_cross_turns_the_wind_in_physical_units(pole_row):
    """The standardised input of the network, padded and brought back to m/s, is the wind beyond the pole."""
    spec = make_spec(12, 16, variables=("u", "v", "t"), surface=("u10",), pole_row=pole_row, one_member=True)
    climate = make_climate(spec)
    features = Features(spec, climate).double()
    grid = spec.grid
    padder = Padder(geometries(grid, Pole.cross, 0)[0], *features.pole_rule(surface=False)).double()
    mean, std = (torch.from_numpy(a[: spec.upper]).double().unflatten(0, (3, 2)) for a in (climate.mean, climate.std))
    inner = wind(np.deg2rad(grid.latitude)[:, None], np.deg2rad(grid.longitude)[None])
    channels = padder.sign.shape[0]
    x = torch.zeros(1, channels, 12, 16, 2, dtype=F64)
    lead = 1
    for component in (0, 1):
        value = torch.from_numpy(inner[component])[..., None]
        x[0, lead * 3 + component] = (value - mean[component]) / std[component]
    found = padder(x)
    expected = wind(*beyond(grid))
    for component in (0, 1):
        physical = found[0, lead * 3 + component] * std[component] + mean[component]
        exact = torch.from_numpy(expected[component])[..., None].expand_as(physical)
        torch.testing.assert_close(physical, exact, atol=1e-6, rtol=1e-6)


def test_only_wind_changes_sign():
    spec = make_spec(variables=("t", "u"), surface=("tp", "v10"), leads_in=(0, 24), leads_out=(24,), one_member=True)
    features = Features(spec, make_climate(spec))
    sign, offset = features.pole_rule(surface=False)
    # mean (2 leads x t, u), spread (2 x 2), climatological spread (1 x 2), member (2 x 2)
    assert sign[:, 0].tolist() == [1, -1, 1, -1, *[1] * 6, 1, -1, 1, -1]
    assert (offset[:, 0] != 0).tolist() == [False, True, False, True, *[False] * 10]
    assert features.pole_rule(surface=True)[0].shape == (14, 1)


def test_mirror_rule_of_each_level():
    def skips(rows, pole_row=True):
        levels = geometries(global_grid(rows, 64, pole_row), Pole.cross, 3)
        return [(g.north.skip, g.south.skip) for g in levels]

    assert skips(33) == [(1, 1), (0, 1), (0, 1), (0, 1)]  # the last pooled row holds the pole alone
    assert skips(361) == [(1, 1), (0, 1), (0, 1), (0, 1)]
    assert skips(32, False) == [(0, 0)] * 4
    assert [g.rows for g in geometries(global_grid(361, 64), Pole.cross, 4)] == [361, 181, 91, 46, 23]


def test_pooled_mirror_takes_the_nearest_row():
    """Beyond a pooled edge, the latitude itself is continued as well as any row can."""
    for rows, pole_row in ((33, True), (34, True), (35, True), (36, False), (37, False), (38, False)):
        grid = global_grid(rows, 32, pole_row)
        positions = np.arange(float(rows))
        for level, geometry in enumerate(geometries(grid, Pole.cross, 3)):
            last = positions[-1]
            pole = rows - 1 if pole_row else rows - 0.5
            wanted = 2 * pole - (last + 2**level)
            nearest = np.abs(positions - wanted).min()
            assert abs(positions[-1 - geometry.south.skip] - wanted) == pytest.approx(nearest)
            positions = np.array([positions[i : i + 2].mean() for i in range(0, len(positions), 2)])


def test_other_edges():
    x = torch.arange(12.0).reshape(1, 1, 3, 4, 1)
    grid = Grid(np.array([45.0, 0, -45]), np.arange(4) * 90.0)  # wraps, but reaches no pole
    found = Padder(geometries(grid, Pole.cross, 0)[0])(x)[0, 0, :, :, 0]
    assert torch.equal(found[0], found[1]) and torch.equal(found[:, 0], found[:, 4])
    open_grid = Padder(geometries(region(3, 4), Pole.cross, 0)[0])(x)[0, 0, :, :, 0]
    assert torch.equal(open_grid[:, 0], open_grid[:, 1]) and torch.equal(open_grid[-1], open_grid[-2])
    zero = Padder(geometries(global_grid(3, 4), Pole.zero, 0)[0])(x + 1)[0, 0, :, :, 0]
    assert (zero[0] == 0).all() and (zero[-1] == 0).all() and (zero[1:-1] > 0).all()


@pytest.mark.parametrize("pole", list(Pole))
@pytest.mark.parametrize("grid", [global_grid(5, 4), global_grid(4, 4, False), global_grid(2, 4), region(3, 3)])
def test_gradient_is_the_adjoint(grid, pole):
    geometry = geometries(grid, pole, 0)[0]
    sign, offset = torch.tensor([[1.0], [-1.0]], dtype=F64), torch.tensor([[0.0], [3.0]], dtype=F64)
    padder = Padder(geometry, sign, offset)
    x = torch.randn(2, 2, *grid.shape, 2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(padder, x)
    last = x.detach().contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    found = padder(last)
    assert found.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(found, padder(x))


def test_longitudes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"model.depth=3: 24 longitudes.*use model.depth=2"):
        geometries(global_grid(13, 24), Pole.cross, 3)
    assert len(geometries(global_grid(13, 24), Pole.replicate, 3)) == 4
    with pytest.raises(UserError, match="odd number"):
        geometries(global_grid(13, 15), Pole.cross, 0)
    with pytest.raises(UserError, match=r"use model.depth=0"):
        geometries(global_grid(13, 15), Pole.replicate, 1)
    assert [g.columns for g in geometries(region(7, 9), Pole.cross, 3)] == [9, 5, 3, 2]
    assert geometries(region(), Pole.cross, 0)[0].north.beyond is Beyond.REPLICATE


@pytest.mark.parametrize(
    ("grid", "name", "depth"),
    [
        (global_grid(181, 360), "unet3d", 2),
        (global_grid(180, 360, False), "unet3d", 2),
        (global_grid(91, 180), "unet3d", 1),
        (global_grid(61, 120), "unet3d", 2),
        (global_grid(37, 72), "unet3d", 2),
        (global_grid(36, 72, False), "unet3d", 2),
        (global_grid(33, 64), "unet3d", 3),
        (global_grid(33, 64), "poet", 3),
        (global_grid(33, 64), "ens10_unet", 2),
        (global_grid(91, 180), "ens10_unet", 1),
        (region(33, 45), "unet3d", 3),
        (global_grid(91, 180), "drn", 2),  # which pools nothing
    ],
)
def test_auto_takes_the_most_poolings_that_a_grid_allows(grid, name, depth):
    def spec_of(config):
        return ModelSpec(config, (), (), ("t2m",), (0,), (0,), tuple(grid.latitude), tuple(grid.longitude))

    config = ModelConfig(name=name, spread=name == "unet3d", hidden=4, max_hidden=4)
    spec = spec_of(config)
    assert spec.config.depth == depth and config.depth == "auto"
    assert ModelSpec.from_json(spec.to_json()).config.depth == depth
    if config.pools:
        geometries(grid, Pole.cross, depth)
        if grid.wraps and depth < config.usual_depth:
            with pytest.raises(UserError, match=rf"use model.depth={depth} or less, or auto"):
                geometries(grid, Pole.cross, depth + 1)
