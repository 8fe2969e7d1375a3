"""The whole model: what it says untrained, what it must not depend on, every form of input."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from small_models import make_climate, make_input, make_model, make_spec, tensors

from ensemble_ml.config import Pole, Vertical
from ensemble_ml.distributions import moments
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family, field
from ensemble_ml.models import Climate, EnsembleModel, ModelSpec, ensemble_input, shrunk_spread
from ensemble_ml.models.features import unbiased_spread
from ensemble_ml.models.heads import wetter


def test_untrained_model_is_the_statistical_correction():
    spec = make_spec(linear=False)
    climate = make_climate(spec)
    x = make_input(spec)
    found = EnsembleModel(spec, climate)(x)
    lead = spec.lead_positions
    mean, spread = x.mean[:, lead], x.spread[:, lead]
    clim, bias, inflation = (torch.from_numpy(getattr(climate, n)) for n in ("spread", "bias", "inflation"))
    shrink = torch.from_numpy(climate.shrink)[..., None, None]
    s0 = torch.sqrt((2 * spread**2 + shrink * clim**2) / (2 + shrink))
    k, gain, level = (
        torch.from_numpy(getattr(climate, f"spread_{n}"))[..., None, None] for n in ("shrink", "gain", "level")
    )
    s1 = (2 * gain * spread / (np.sqrt(np.pi) / 2) + k * level * clim) / (2 + k)  # c4(3) = sqrt(pi) / 2
    torch.testing.assert_close(found.spread, s1)
    dry = [torch.from_numpy(getattr(climate, f"dry_{n}"))[..., None, None] for n in ("share", "mean")]
    for name in (*spec.variables, *spec.surface):
        at = spec.of(name)
        location, scale = found.location[:, :, at], found.scale[:, :, at]
        wanted, wide = (mean + bias)[:, :, at], (s0 * inflation.exp())[:, :, at]
        if spec.family(name) is Family.NORMAL:
            torch.testing.assert_close(location, wanted)
            torch.testing.assert_close(scale, wide)
        else:  # the mean of the distribution is the corrected mean
            if name == "tp":
                wanted, wide = wetter(wanted, wide, *(values[:, at] for values in dry))
            torch.testing.assert_close(scale, wide)
            predicted = moments(spec.family(name), location, wide)[0]
            reachable = wanted > 0.3 * wide
            torch.testing.assert_close(predicted[reachable], wanted[reachable], rtol=1e-3, atol=1e-3)
            assert name in ("q", "tp")


def test_one_member_gives_finite_climatological_spread():
    spec = make_spec(vertical=Vertical.shared, linear=False)
    x = make_input(spec, members=1)
    assert (x.spread == 0).all()
    model = EnsembleModel(spec, make_climate(spec))
    found = model(x)
    expected = model.heads.spread_level[..., None, None] * model.heads.climatology
    torch.testing.assert_close(found.spread, expected.expand_as(found.spread))
    assert all(torch.isfinite(v).all() for v in tensors(make_model(spec)(x)).values())


@pytest.mark.parametrize("members", [2, 3, 5, 10])
def test_unbiased_spread_is_right_on_average(members):
    """E[s] = c4(M) sigma: whatever the weight of climatology, s1 of normal samples averages to sigma."""
    spread = torch.randn(members, 200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).std(0)
    one = torch.ones(1, dtype=torch.float64)
    s1 = unbiased_spread(spread[None], members * one, one, 3 * one, one, one)
    assert float(s1.mean()) == pytest.approx(1, abs=3e-3)


def test_order_of_members_changes_nothing():
    spec = make_spec()
    members = torch.randn(1, 4, 2, *spec.shape[1:])
    model, day, order = make_model(spec), torch.tensor([10.0]), torch.tensor([2, 0, 3, 1])
    a, b = model(ensemble_input(members, day)), model(ensemble_input(members[:, order], day))
    for key, value in tensors(a).items():
        torch.testing.assert_close(getattr(b, key), value, rtol=1e-4, atol=1e-4)


def test_samples_of_a_batch_do_not_see_each_other():
    spec = make_spec()
    model, x = make_model(spec), make_input(spec, batch=3)
    x.count[1], x.spread[1] = 1.0, 0.0
    together = tensors(model(x))
    for sample in range(3):
        one = dataclasses.replace(x, **{k: v[sample : sample + 1] for k, v in vars(x).items() if v is not None})
        for key, value in tensors(model(one)).items():
            torch.testing.assert_close(value, together[key][sample : sample + 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shift", [4, 12])
def test_the_earth_may_be_turned(shift):
    """Rolling inputs, positions, climate and local terms by whole blocks rolls the prediction."""
    spec = make_spec(static=("orog",))
    model, x = make_model(spec).double(), make_input(spec).to(torch.float64)
    turned = copy.deepcopy(model)
    roll = lambda v: v.roll(shift, -1) if v.ndim >= 3 and v.shape[-2:] == (9, 16) else v  # noqa: E731
    turned.load_state_dict({k: roll(v) for k, v in model.state_dict().items()})
    moved = dataclasses.replace(x, **{k: roll(v) for k, v in vars(x).items() if v is not None})
    found = tensors(turned(moved))
    for key, value in tensors(model(x)).items():
        torch.testing.assert_close(found[key], value.roll(shift, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vertical", list(Vertical))
@pytest.mark.parametrize("pole", list(Pole))
def test_every_form_trains(vertical, pole):
    spec = make_spec(vertical=vertical, pole=pole, depth=1)
    model = make_model(spec)
    sum(v.square().mean() for v in tensors(model(make_input(spec))).values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


FORMS = {
    "no surface": {"surface": ()},
    "no pressure levels": {"variables": (), "levels": ()},
    "one level": {"levels": (500,), "surface": ()},
    "one lead, zero": {"leads_in": (0,), "leads_out": (0,)},
    "four leads": {"leads_in": (0, 24, 48, 72), "leads_out": (24, 72)},
    "static": {"static": ("orog", "lsm")},
    "one member": {"one_member": True},
    "no local terms": {"local_terms": False},
    "spread alone": {"postprocess": False},
    "distribution alone": {"spread": False},
    "33 rows": {"rows": 33, "columns": 32, "depth": 3},
    "no pooling": {"depth": 0},
    "between the rows": {"rows": 10, "pole_row": False},
    "region": {"region": (55 - np.arange(7) * 0.5, -3 + np.arange(9) * 0.5)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_input(form):
    settings = dict(FORMS[form])
    spec = make_spec(settings.pop("rows", 9), settings.pop("columns", 16), **settings)
    found = make_model(spec)(make_input(spec, one_member=spec.config.one_member))
    fields = len(spec.variables) * len(spec.levels) + len(spec.surface)
    shape = (2, len(spec.leads_out), fields, len(spec.latitude), len(spec.longitude))
    expected = {"location", "scale"} if spec.config.postprocess else set()
    assert set(tensors(found)) == expected | ({"spread"} if spec.config.spread else set())
    for value in tensors(found).values():
        assert tuple(value.shape) == shape and torch.isfinite(value).all()


def test_361_rows():
    spec = make_spec(361, 16, variables=("t",), surface=(), levels=(500,), depth=3, hidden=4, max_hidden=4)
    assert make_model(spec)(make_input(spec, batch=1)).spread.shape == (1, 1, 1, 361, 16)


def test_state_dict_is_self_contained():
    spec = make_spec(static=("orog",))
    model, x = make_model(spec), make_input(spec)
    loaded = EnsembleModel(ModelSpec.from_json(spec.to_json()), Climate.default(spec))
    loaded.load_state_dict(model.state_dict())
    for key, value in tensors(model(x)).items():
        assert torch.equal(getattr(loaded(x), key), value)


def test_static_fields_from_the_climate_reach_the_network():
    spec = make_spec(static=("orog",))
    model, x = make_model(spec), make_input(spec)
    before = model(x).spread
    model.features.position[4] += 1
    after = model(x).spread
    for kind in (slice(None, spec.upper), slice(spec.upper, None)):  # on levels, at the surface
        assert not torch.equal(after[:, :, kind], before[:, :, kind])


def test_nothing_overflows():
    spec = make_spec()
    model = make_model(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    assert all(torch.isfinite(v).all() for v in tensors(model(make_input(spec))).values())


def test_tiny_variables_reach_the_network_at_full_size():
    """A variable in units a hundred million times as large gives the same channels: no constant is added to a scale."""
    spec = make_spec(variables=("t", "q"), surface=())
    climate, x = make_climate(spec), make_input(spec)
    factor = np.repeat(np.array([1, 1e-8], np.float32), len(spec.levels))
    scaled = copy.deepcopy(climate)
    for name, trailing in (("mean", 0), ("std", 0), ("spread", 2), ("bias", 2), ("level_spread", 0)):
        getattr(scaled, name)[:] *= factor.reshape(-1, *[1] * trailing)
    by = torch.from_numpy(factor)[:, None, None]
    small = dataclasses.replace(x, mean=x.mean * by, spread=x.spread * by)
    seen = []
    for given, statistics in ((x, climate), (small, scaled)):
        model = EnsembleModel(spec, statistics)
        model.features.register_forward_hook(lambda module, args, out: seen.append(out[0]))
        model(given)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-4)


def test_param_groups_cover_everything_once():
    spec = make_spec()
    model = EnsembleModel(spec, make_climate(spec))
    groups = {g["name"]: g for g in model.param_groups()}
    assert sorted(id(p) for g in groups.values() for p in g["params"]) == sorted(id(p) for p in model.parameters())
    assert len(groups["local"]["params"]) == 3 and groups["plain"]["weight_decay"] == 0
    assert all((p == 0).all() for p in groups["local"]["params"])  # decay pulls them to climatology


def test_shrunk_spread_weighs_by_members():
    s, clim = torch.full((2, 1), 3.0), torch.ones(1)
    found = shrunk_spread(s, torch.tensor([1.0, 5.0]), clim, 4.0)
    assert found[:, 0].tolist() == pytest.approx([1.0, np.sqrt((4 * 9 + 4) / 8)])


def test_mistakes_are_named():
    with pytest.raises(UserError, match="leads_out"):
        make_spec(leads_in=(0, 24), leads_out=(48,))
    for leads, key in (((), "leads_in"), ((24,), "leads_out")):
        with pytest.raises(UserError, match=f"data.{key}: empty"):
            make_spec(leads_in=leads, leads_out=())
    with pytest.raises(UserError, match="t2m: is a surface variable"):
        make_spec(variables=("t2m",))
    with pytest.raises(UserError, match="both are empty"):
        make_spec(variables=(), surface=())
    spec = make_spec()
    climate = make_climate(spec)
    climate.spread = climate.spread[:, :1]
    with pytest.raises(UserError, match="climate spread: shape"):
        EnsembleModel(spec, climate)
    climate = make_climate(spec)
    climate.bias[0, -1, 0, 0] = np.nan
    with pytest.raises(UserError, match="climate bias: holds NaN"):
        EnsembleModel(spec, climate)
    with pytest.raises(UserError, match="input: shape"):
        make_model(spec)(make_input(make_spec(leads_in=(24,))))
    with pytest.raises(UserError, match="one_member"):
        one = make_spec(one_member=True)
        make_model(one)(make_input(one))


def test_climate_fills_what_was_not_fitted():
    spec = make_spec(leads_in=(0, 24), leads_out=(24,))
    climate = make_climate(spec)
    climate.level_spread = None
    climate.std[0] = 0
    full = climate.checked(spec)
    assert full.level_spread.shape == (2, spec.fields) and (full.level_spread > 0).all() and (full.std > 0).all()
    for wrong in (np.concatenate([climate.spread] * 2), climate.spread[0, 0, 0]):
        climate.spread = wrong
        with pytest.raises(UserError, match=r"climate spread: shape \(.*\); the model needs"):
            climate.checked(spec)


def test_what_was_learned_under_one_law_stays_so_whatever_the_registry_says_later(monkeypatch):
    spec = make_spec(linear=False)
    plain = spec.to_json()
    older = plain | {"config": plain["config"] | {"families": None}}  # which named none but those of the configuration
    assert ModelSpec.from_json(older).to_json() == ModelSpec.from_json(plain).to_json() == plain
    other = dataclasses.replace(field("q"), family=Family.LOGNORMAL)
    monkeypatch.setattr("ensemble_ml.models.inputs.field", lambda name: other if name == "q" else field(name))
    assert ModelSpec.from_json(older).family("q") is Family.LOGNORMAL
    assert ModelSpec.from_json(plain).family("q") is Family.TRUNCATED_NORMAL


def test_a_family_named_in_the_configuration_wins_over_the_registry():
    spec = make_spec(linear=False)
    changed = dataclasses.replace(spec, config=dataclasses.replace(spec.config, families={"q": "lognormal"}))
    assert changed.family("q") is Family.LOGNORMAL and spec.family("q") is Family.TRUNCATED_NORMAL
    assert ModelSpec.from_json(changed.to_json()).families == changed.families
    x, found = make_input(changed), EnsembleModel(changed, make_climate(changed))(make_input(changed))
    at = spec.of("q")
    predicted = moments(Family.LOGNORMAL, found.location[:, :, at], found.scale[:, :, at])[0]
    wanted = (x.mean[:, spec.lead_positions] + torch.from_numpy(make_climate(spec).bias))[:, :, at]
    reachable = wanted > 0.3 * found.scale[:, :, at]
    torch.testing.assert_close(predicted[reachable], wanted[reachable], rtol=1e-3, atol=1e-3)
    with pytest.raises(UserError, match=r"families\.q=normally: normal, truncated_normal"):
        dataclasses.replace(spec.config, families={"q": "normally"})
