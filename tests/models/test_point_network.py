"""The point network: by hand at single points, and where there is none."""

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


def by_hand(climate, x, row, column):
    """d'', v and w of both fields at a point, (3, 2): every input from its definition."""
    kinds = []
    for field in range(2):
        clim, anchor = (np.asarray(getattr(climate, n)[0, field], float) for n in ("spread", "anchor"))
        mean, spread = (np.asarray(getattr(x, n)[0, 0, field], float) for n in ("mean", "spread"))
        k, unit = float(climate.spread_shrink[0, field]), sqrt(np.mean(clim**2))
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
    hidden = [gelu(float(v)) for v in climate.points_first.astype(float) @ given]
    found = climate.points_second.astype(float) @ [*hidden, 1.0]
    return found.reshape(3, 2) * [[1, 1], [side, 1], [1, 1]]  # only the shift of a mean has a sign


def with_and_without(variable):
    """Climate, input, a model of one variable, and the same with a network that adds nothing."""
    one = {"variables": (variable,), "surface": ("t2m",), "levels": (500,), "leads_in": (24,), "leads_out": (24,)}
    spec = make_spec(**one, local_terms=False)
    climate = make_climate(spec).checked(spec)
    models = [EnsembleModel(spec, climate) for _ in range(2)]
    models[1].points.second.zero_()
    return climate, make_input(spec), *models


@pytest.mark.parametrize(("row", "column"), [(4, 7), (3, 0), (5, 9), (0, 3), (8, 15)])
def test_the_model_adds_what_a_sum_by_hand_gives(row, column):
    climate, x, with_, without = with_and_without("v")
    added = (with_(x).spread - without(x).spread)[0, 0, 0]
    typical = sqrt(np.mean(np.asarray(climate.spread[0, 0], float) ** 2))
    wanted = by_hand(climate, x, row, column)[0, 0] * typical
    assert abs(wanted) > 1e-3
    assert float(added[row, column].detach()) == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("row", "column"), [(4, 7), (6, 2), (8, 15)])
def test_mean_and_sigma_are_what_sums_by_hand_give(row, column):
    climate, x, with_, without = with_and_without("v")
    found, before = with_(x), without(x)
    v, w = (3 * tanh(value / 3) for value in by_hand(climate, x, row, column)[1:, 0])
    sigma0, sigma = (float(p.scale[0, 0, 0, row, column].detach()) for p in (before, found))
    moved = float((found.location - before.location)[0, 0, 0, row, column].detach())
    assert min(abs(v), abs(w)) > 1e-4
    assert moved == pytest.approx(v * sigma0, rel=1e-3, abs=2e-6)
    assert log(sigma / sigma0) == pytest.approx(w, rel=1e-3, abs=1e-6)


def test_a_law_that_cannot_be_negative_keeps_its_mean_where_sigma_changes():
    _, x, with_, without = with_and_without("q")
    with_.points.second[2:4] = 0  # v
    means, scales = [], []
    for model in (with_, without):
        found, at = model(x), model.spec.of("q")
        scales.append(found.scale[:, :, at])
        means.append(moments(model.spec.family("q"), found.location[:, :, at], scales[-1])[0])
    assert float((scales[0] / scales[1] - 1).detach().abs().max()) > 1e-3
    torch.testing.assert_close(*means, rtol=1e-4, atol=1e-5)


def test_there_is_none_without_a_linear_correction_or_where_it_has_no_units():
    for config in ({"points": 0}, {"linear": False}):
        spec = make_spec(**config)
        model = EnsembleModel(spec, make_climate(spec))
        assert model.points is None
        assert climate_shapes(spec)["points_first"] == climate_shapes(spec)["points_second"] == (0, 0)


def test_of_errors_it_says_nothing_where_the_truth_is_not_predicted():
    whole, alone = (EnsembleModel(spec := make_spec(postprocess=kind), make_climate(spec)) for kind in (True, False))
    assert len(whole.points.second) == 3 * len(alone.points.second) == 3 * len(whole.linear.weight[0, 0]) // 2


@pytest.mark.parametrize("low", [False, True])
def test_strips_of_any_number_of_rows_give_the_same(monkeypatch, low):
    spec = make_spec()
    model, x = EnsembleModel(spec, make_climate(spec)), make_input(spec)
    model.speed = replace(model.speed, precision=Precision.bfloat16 if low else Precision.float32)
    found = []
    for points in (1, 5 * COLUMNS * len(x.count), 10**6):
        monkeypatch.setattr("ensemble_ml.models.points._POINTS", points)
        with torch.no_grad():
            prediction = model(x)
        parts = prediction.spread, prediction.scale, prediction.location
        found.append(torch.cat([part.flatten() for part in parts]))
    for some in found[:2]:
        torch.testing.assert_close(some, found[2], rtol=1e-2 if low else 1e-5, atol=1e-2 if low else 1e-5)


def test_gradients_reach_what_the_members_say():
    spec = make_spec()
    model, x = EnsembleModel(spec, make_climate(spec)), make_input(spec)
    x = replace(x, mean=x.mean.clone().requires_grad_())
    model(x).spread[:, :, : spec.upper].sum().backward()
    assert x.mean.grad is not None and float(x.mean.grad[:, :, : spec.upper].abs().max()) > 0


def test_gradients_of_a_law_with_bounds_reach_the_mean():
    spec = make_spec()
    assert "q" in spec.variables  # whose location is that of a mean
    model, x = EnsembleModel(spec, make_climate(spec)), make_input(spec)
    x = replace(x, mean=x.mean.clone().requires_grad_())
    model(x).location[:, :, spec.of("q")].sum().backward()
    assert torch.isfinite(x.mean.grad).all() and float(x.mean.grad[:, :, : spec.upper].abs().max()) > 0


def test_a_climate_without_its_weights_adds_nothing():
    spec = make_spec()
    climate = make_climate(spec)
    none = vars(climate) | {f"points_{name}": None for name in ("first", "second")}
    model, x = EnsembleModel(spec, type(climate)(**none)), make_input(spec)
    plain = EnsembleModel(make_spec(points=0), type(climate)(**none))
    plain.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(model(x).spread, plain(x).spread, rtol=0, atol=0)
        torch.testing.assert_close(model(x).scale, plain(x).scale, rtol=0, atol=0)
