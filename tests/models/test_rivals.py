"""The rivals behind the interface of our network: where they start, and that order and number of members may vary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_models import awake, make_climate, make_spec, tensors

from ensemble_ml.errors import UserError
from ensemble_ml.models import MODELS, Climate, ModelSpec, build_model, ensemble_input
from ensemble_ml.models.inputs import seasonal_terms
from ensemble_ml.models.points import inputs_of
from ensemble_ml.models.rivals.emos import SIZES, Emos, rows_for

RIVALS = [name for name in MODELS if name != "unet3d"]


def members_of(spec, batch=2, count=4, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return 4 + torch.randn(batch, count, len(spec.leads_in), *spec.shape[1:], generator=generator)


def reduce(spec, members, day=(40.0, 200.0)):
    found = ensemble_input(members, torch.tensor(day[: len(members)]))
    return replace(found, members=members) if spec.takes_members else found


def make(name, **settings):
    spec = make_spec(name=name, **settings)
    return build_model(spec, make_climate(spec)).eval()


def close(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **tolerance)


@pytest.mark.parametrize("name", RIVALS)
def test_order_of_members_does_not_matter(name):
    model = awake(make(name))
    members = members_of(model.spec)
    order = torch.tensor([2, 0, 3, 1])
    one = tensors(model(reduce(model.spec, members)))
    close(one, tensors(model(reduce(model.spec, members[:, order]))), rtol=1e-4, atol=1e-4)
    other, upper = members.clone(), model.spec.upper
    other[:, 0, :, :upper] += 1
    changed = tensors(model(reduce(model.spec, other)))["location"]
    assert not torch.allclose(changed[:, :, :upper], one["location"][:, :, :upper])


def test_the_meridian_where_the_grid_begins_is_no_edge_for_the_u_net():
    """What it sees, turned by one point of the coarsest level, gives what it says, turned."""
    model = awake(make("ens10_unet"))
    members, columns = members_of(model.spec), 2**model.spec.config.depth
    inputs = reduce(model.spec, members)
    planes = model.planes(inputs, model.reduced(inputs))
    with torch.no_grad():
        found = model.network(planes, None)
        turned = model.network(planes.roll(columns, -1), None).roll(-columns, -1)
    assert found.std() > 0.01
    torch.testing.assert_close(turned, found, rtol=1e-4, atol=1e-4 * float(found.std()))


@pytest.mark.parametrize("name", RIVALS)
def test_a_batch_of_several_sizes_is_each_alone(name):
    model = awake(make(name))
    alone, parts = [], []
    for size in (1, 2, 5):
        parts.append(members_of(model.spec, count=size, seed=size)[:1])
        alone.append(tensors(model(reduce(model.spec, parts[-1]))))
    inputs = [reduce(model.spec, part) for part in parts]
    whole = {}
    for key, first in vars(inputs[0]).items():
        if first is None:
            continue
        values = [getattr(one, key) for one in inputs]
        if key == "members":
            values = [torch.cat([v, v.new_zeros(1, 5 - v.shape[1], *v.shape[2:])], 1) for v in values]
        whole[key] = torch.cat(values)
    together = tensors(model(type(inputs[0])(**whole)))
    for at, one in enumerate(alone):
        close({k: v[at : at + 1] for k, v in together.items()}, one, rtol=1e-4, atol=1e-4)
        assert all(torch.isfinite(v).all() for v in one.values())
        assert (one["scale"] > 0).all()


@pytest.mark.parametrize("name", RIVALS)
def test_gradients_reach_every_parameter(name):
    model = awake(make(name, spread=True)).train()
    found = tensors(model(reduce(model.spec, members_of(model.spec))))
    assert set(found) == {"location", "scale", "spread"}
    if name == "emos":
        return
    sum((v * torch.randn_like(v)).sum() for v in found.values()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", ["drn", "ens10_unet", "poet"])
def test_departures_are_the_statistical_starts(name):
    """The same numbers as the inputs of our linear correction and of the point network, in its own hemisphere."""
    plain, model = make(name), awake(make(name, departures=True))
    x = reduce(model.spec, members_of(model.spec))
    reduced = model.reduced(x)
    planes = model.planes(x, reduced)
    known = plain.planes(x, plain.reduced(x))
    assert planes.shape[1] == model.channels and torch.equal(planes[:, : plain.channels], known)
    added = planes[:, plain.channels :].chunk(4, 1)
    ours = make("unet3d", points=16)
    leads = model.spec.lead_positions
    given = ours.heads.departures(x.mean[:, leads], x.spread[:, leads], x.count)
    padded = ours.linear.padded(given.flatten(1, 3))
    north = slice(0, len(model.spec.latitude) // 2)
    frame = ours.points.frame(slice(None))
    common = ours.features.common(x.count, x.day_of_year)
    inputs = inputs_of(padded, torch.ones(padded.shape[1] // 2, 1, 1), common, frame)
    for mine, theirs in zip(added, inputs.split(padded.shape[1], 1), strict=False):
        torch.testing.assert_close(mine[:, :, north], theirs[:, :, north])
    assert all(torch.isfinite(v).all() for v in tensors(model(x)).values())
    sign, offset = model.pole_rule()
    assert len(sign) == len(offset) == model.channels


def test_ens10_speaks_in_the_ensembles_own_spread():
    model = make("ens10_unet")
    x = reduce(model.spec, members_of(model.spec))
    leads = model.spec.lead_positions
    found = model(x)
    torch.testing.assert_close(found.location, x.mean[:, leads])
    torch.testing.assert_close(found.scale, x.spread[:, leads])
    single = model(reduce(model.spec, members_of(model.spec, count=1)))
    torch.testing.assert_close(single.scale[0], model.heads.climatology)


def test_poet_untrained_is_the_blended_ensemble():
    model = make("poet")
    x = reduce(model.spec, members_of(model.spec))
    found = model(x)
    leads = model.spec.lead_positions
    torch.testing.assert_close(found.location, x.mean[:, leads])
    blended = model.heads.base_spread(x.spread[:, leads], x.count)
    torch.testing.assert_close(found.scale, blended, rtol=1e-3, atol=1e-4)
    with pytest.raises(UserError, match="holds no members"):
        model(ensemble_input(members_of(model.spec), torch.tensor([1.0, 2.0])))


def test_poet_turns_the_wind_of_members_across_the_poles():
    """A wind that is the same all over the pole has components of opposite sign at opposite longitudes."""
    settings = {"variables": ("t", "u", "v"), "surface": ("u10", "tp"), "leads_in": (0, 24)}
    model = make("poet", rows=10, pole_row=False, **settings)
    spec = model.spec
    members = torch.zeros(1, 2, 2, *spec.shape[1:])
    lon = torch.deg2rad(torch.tensor(spec.longitude))
    for name in ("u", "v", "u10"):
        members[:, 0, :, spec.of(name)] = -torch.cos(lon) if name == "v" else -torch.sin(lon)
    for name in ("t", "tp"):
        members[:, 0, :, spec.of(name)] = torch.cos(2 * lon)  # the same at opposite points
    read = []
    model.member_stem.register_forward_pre_hook(lambda module, given: read.append(given[0]))
    model(reduce(spec, members, (40.0,)))
    padded = model.member_stem.pad(read[0])[..., 1:-1, 0]
    assert padded[0, :, 1].abs().amax(-1).min() > 0.1
    for beyond, last in ((0, 1), (-1, -2)):
        torch.testing.assert_close(padded[:, :, beyond], padded[:, :, last])


def test_emos_applies_what_was_put():
    model = make("emos")
    emos = Emos(*(torch.tensor(v) for v in (0.5, 0.9, 0.2, 1.5)), season=torch.tensor([0.3, -0.2]))
    reference = 4 + torch.randn(len(model.spec.latitude) * len(model.spec.longitude), dtype=torch.float64)
    for row in range(len(SIZES)):
        model.put(row, 0, 3, emos)  # the second variable at the second level
        model.put(row, 0, 2, emos, reference)  # and its anomalies at the first
    assert [model.spec.names[at] for at in (2, 3)] == [("u", 500), ("u", 850)]
    x = reduce(model.spec, members_of(model.spec))
    first, mean, spread = (v.flatten(1) for v in (x.mean[:, -1, 2], x.mean[:, -1, 3], x.spread[:, -1, 3]))
    location, scale = emos(mean, spread**2, seasonal_terms(x.day_of_year)[:, None])
    found = model(x)
    torch.testing.assert_close(found.location[:, 0, 3].flatten(1).double(), location, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.scale[:, 0, 3].flatten(1).double(), scale, rtol=1e-5, atol=1e-5)
    location, _ = emos(first, spread**2, seasonal_terms(x.day_of_year)[:, None], reference)
    torch.testing.assert_close(found.location[:, 0, 2].flatten(1).double(), location, rtol=1e-5, atol=1e-5)
    assert [SIZES[model.row(m)] for m in (1, 2, 4, 7, 8, 50)] == [1, 2, 5, 5, 10, 10]


def test_emos_is_fitted_for_the_sizes_that_are_asked_for():
    assert rows_for(5, [1, 2, 3, 5, 8, 10]) == list(SIZES)
    assert rows_for(4, [3, 4, 5]) == [3, 4, 5] and rows_for(9, []) == [9]
    assert rows_for(8, [1, 2, 3, 5, 8, 10]) == [1, 2, 5, 8, 10]
    assert rows_for(20, [1, 2, 5, 10, 20, 50]) == [1, 2, 5, 20, 50]


@pytest.mark.parametrize("name", RIVALS)
def test_a_state_dict_is_all_there_is(name):
    model = awake(make(name))
    spec = ModelSpec.from_json(model.spec.to_json())
    loaded = build_model(spec, Climate.default(spec)).eval()
    loaded.load_state_dict(model.state_dict())
    x = reduce(spec, members_of(spec))
    close(tensors(loaded(x)), tensors(model(x)), rtol=0, atol=0)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("missing", ["variables", "surface"])
def test_fields_of_one_kind_are_enough(name, missing):
    empty = {"variables": (), "levels": ()} if missing == "variables" else {"surface": ()}
    model = make(name, **empty)
    found = tensors(model(reduce(model.spec, members_of(model.spec))))
    assert set(found) == {"location", "scale", "spread"}
    assert all(value.shape[1:] == model.spec.shape for value in found.values())
    assert model.spec.fields == (3 if missing == "variables" else 8)
