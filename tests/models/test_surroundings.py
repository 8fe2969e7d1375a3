"""The networks of a point's surroundings: by hand at single points, and where there are none."""

from dataclasses import replace
from math import cos, erf, hypot, log, pi, radians, sin, sqrt, tanh

import numpy as np
import pytest
import torch
from models.small_models import make_climate, make_input, make_spec

from ensemble_ml.config import Precision
from ensemble_ml.distributions import moments
from ensemble_ml.models import EnsembleModel, climate_shapes

COLUMNS, ROWS = 16, 9


def gelu(x):
    return x * (1 + erf(x / sqrt(2))) / 2


def by_hand(climate, x, row, column, name):
    """Outputs of a network at a point, those of v first: every input from its definition."""
    kinds = []
    for suffix in "ps":
        clim, anchor = (
            np.asarray(getattr(climate, f"{n}_{suffix}"), float).reshape(ROWS, COLUMNS) for n in ("spread", "anchor")
        )
        mean, spread = (
            np.asarray(getattr(x, f"{n}_{suffix}")[0], float).reshape(ROWS, COLUMNS) for n in ("mean", "spread")
        )
        k, unit = float(np.ravel(getattr(climate, f"spread_shrink_{suffix}"))[0]), sqrt(np.mean(clim**2))
        kinds.append(((mean - anchor) / unit, 2 / (2 + k) * (spread - clim) / unit, clim / unit))
    channels = [kinds[0][0], kinds[1][0], kinds[0][1], kinds[1][1]]  # v, t2m: means; then spreads

    def at(c, i, j):
        y, across, sign = row + i, column + j, 1.0
        if not 0 <= y < ROWS:  # the pole is a row: beyond it lies the row before, half a turn away; wind turns round
            y, across = (1 if y < 0 else ROWS - 2), across + COLUMNS // 2
            sign = -1.0 if c == 0 else 1.0
        return sign * channels[c][y, across % COLUMNS]

    latitude, longitude = radians(90 - 22.5 * row), radians(22.5 * column)
    stretch = min(5.0, 1 / max(cos(latitude), 1e-6))
    side = -1 if row > 4 else 1  # south of the equator rows and season are turned, and what blows north
    turn = [side, 1, 1, 1]
    given = [turn[c] * at(c, 0, 0) for c in range(4)]
    given += [turn[c] * (at(c, 0, 1) - at(c, 0, -1)) / 2 for c in range(4)]
    given += [side * turn[c] * (at(c, 1, 0) - at(c, -1, 0)) / 2 for c in range(4)]
    around = [sum(at(c, i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)) / 9 for c in range(4)]
    given += [turn[c] * (around[c] - at(c, 0, 0)) for c in range(4)]
    given += [abs(at(c, 0, 0)) for c in range(2)]
    given += [hypot((at(c, 0, 1) - at(c, 0, -1)) / 2 * stretch, (at(c, 1, 0) - at(c, -1, 0)) / 2) for c in range(2)]
    given += [log(max(at(2 + c, 0, 0) + kinds[c][2][row, column], 0.01)) for c in range(2)]
    given += [sin(latitude), cos(latitude), sin(longitude), cos(longitude)]
    angle = float(x.day_of_year[0]) * 2 * pi / 365.2425
    given += [1 / 3, log(3), side * sin(angle), side * cos(angle), 1.0]
    hidden = [gelu(float(v)) for v in getattr(climate, f"{name}_first").astype(float) @ given]
    found = getattr(climate, f"{name}_second").astype(float) @ [*hidden, 1.0]
    return found * turn if len(found) == 4 else found  # of means and of scales, or of spreads alone


def with_and_without(name, variable):
    """Climate, input, a model of one variable, and the same with a network that adds nothing."""
    one = {"variables": (variable,), "surface": ("t2m",), "levels": (500,), "leads_in": (24,), "leads_out": (24,)}
    spec = make_spec(**one, local_terms=False)
    climate = make_climate(spec).checked(spec)
    models = [EnsembleModel(spec, climate) for _ in range(2)]
    getattr(models[1], name).second.zero_()
    return climate, make_input(spec), *models


@pytest.mark.parametrize(("row", "column"), [(4, 7), (3, 0), (5, 9), (0, 3), (8, 15)])
def test_the_model_adds_what_a_sum_by_hand_gives(row, column):
    climate, x, with_, without = with_and_without("surroundings", "v")
    added = (with_(x).spread_p - without(x).spread_p)[0, 0, 0, 0]
    typical = sqrt(np.mean(np.asarray(climate.spread_p, float) ** 2))
    wanted = by_hand(climate, x, row, column, "surroundings")[0] * typical
    assert abs(wanted) > 1e-3
    assert float(added[row, column].detach()) == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("row", "column"), [(4, 7), (6, 2), (8, 15)])
def test_mean_and_sigma_are_what_sums_by_hand_give(row, column):
    climate, x, with_, without = with_and_without("residuals", "v")
    found, before = with_(x), without(x)
    v, _, w, _ = (3 * tanh(value / 3) for value in by_hand(climate, x, row, column, "residuals"))  # of v, t2m each
    sigma0, sigma = (float(p.scale_p[0, 0, 0, 0, row, column].detach()) for p in (before, found))
    moved = float((found.location_p - before.location_p)[0, 0, 0, 0, row, column].detach())
    assert min(abs(v), abs(w)) > 1e-4
    assert moved == pytest.approx(v * sigma0, rel=1e-3, abs=2e-6)
    assert log(sigma / sigma0) == pytest.approx(w, rel=1e-3, abs=1e-6)
    torch.testing.assert_close(found.spread_p, before.spread_p, rtol=0, atol=0)


def test_a_law_that_cannot_be_negative_keeps_its_mean_where_sigma_changes():
    _, x, with_, without = with_and_without("residuals", "q")
    with_.residuals.second[:2] = 0  # v
    means = []
    for model in (with_, without):
        found = model(x)
        means.append(moments(model.spec.families[0][0], found.location_p, found.scale_p)[0])
    assert float((with_(x).scale_p / without(x).scale_p - 1).detach().abs().max()) > 1e-3
    torch.testing.assert_close(*means, rtol=1e-4, atol=1e-5)


def test_there_is_none_without_a_linear_correction_or_where_it_has_no_units():
    for config in ({"surroundings": 0}, {"linear": False}):
        spec = make_spec(**config)
        model = EnsembleModel(spec, make_climate(spec))
        assert model.surroundings is None and model.residuals is None
        assert climate_shapes(spec)["surroundings_first"] == climate_shapes(spec)["residuals_second"] == (0, 0)


def test_there_is_none_of_residuals_where_none_are_predicted_or_wanted():
    for config in ({"residuals": 0}, {"postprocess": False}):
        model = EnsembleModel(spec := make_spec(**config), make_climate(spec))
        assert model.surroundings is not None and model.residuals is None


@pytest.mark.parametrize("low", [False, True])
def test_strips_of_any_number_of_rows_give_the_same(monkeypatch, low):
    spec = make_spec()
    model, x = EnsembleModel(spec, make_climate(spec)), make_input(spec)
    model.speed = replace(model.speed, precision=Precision.bfloat16 if low else Precision.float32)
    found = []
    for points in (1, 5 * COLUMNS * len(x.count), 10**6):
        monkeypatch.setattr("ensemble_ml.models.surroundings._POINTS", points)
        with torch.no_grad():
            prediction = model(x)
        parts = prediction.spread_p, prediction.scale_p, prediction.location_p
        found.append(torch.cat([part.flatten() for part in parts]))
    for some in found[:2]:
        torch.testing.assert_close(some, found[2], rtol=1e-2 if low else 1e-5, atol=1e-2 if low else 1e-5)


def test_gradients_reach_what_the_members_say():
    spec = make_spec()
    model, x = EnsembleModel(spec, make_climate(spec)), make_input(spec)
    x = replace(x, mean_p=x.mean_p.clone().requires_grad_())
    model(x).spread_p.sum().backward()
    assert x.mean_p.grad is not None and float(x.mean_p.grad.abs().max()) > 0


def test_gradients_of_a_law_with_bounds_reach_the_mean():
    spec = make_spec()
    assert "q" in spec.variables  # whose location is that of a mean
    model, x = EnsembleModel(spec, make_climate(spec)), make_input(spec)
    x = replace(x, mean_p=x.mean_p.clone().requires_grad_())
    model(x).location_p[:, :, spec.variables.index("q")].sum().backward()
    assert torch.isfinite(x.mean_p.grad).all() and float(x.mean_p.grad.abs().max()) > 0


def test_a_climate_without_its_weights_adds_nothing():
    spec = make_spec()
    climate = make_climate(spec)
    none = vars(climate) | {f"{a}_{b}": None for a in ("surroundings", "residuals") for b in ("first", "second")}
    model, x = EnsembleModel(spec, type(climate)(**none)), make_input(spec)
    plain = EnsembleModel(make_spec(surroundings=0), type(climate)(**none))
    plain.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(model(x).spread_p, plain(x).spread_p, rtol=0, atol=0)
        torch.testing.assert_close(model(x).scale_p, plain(x).scale_p, rtol=0, atol=0)
