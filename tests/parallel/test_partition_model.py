"""The whole model over several ranks against one process, float64: predictions, gradients, one optimizer step."""

import copy
from dataclasses import fields, replace

import pytest
import torch
from models.small_models import make_input, make_model, make_spec, tensors
from parallel.ranks import run_ranks

from ensemble_ml.config import OptimConfig, OptimName, Pole, Vertical
from ensemble_ml.distributed import Mesh, Topology
from ensemble_ml.distributed.echo import Traffic, echo_mesh
from ensemble_ml.distributed.overlap import Overlap
from ensemble_ml.distributed.partition import partition_model, shard_of
from ensemble_ml.distributed.shard import make_shard
from ensemble_ml.errors import UserError
from ensemble_ml.models import Speed, surroundings
from ensemble_ml.optim import build


def test_a_layer_that_nobody_knows_is_refused():
    """A norm over the grid would train wrong on two ranks without a word."""
    model = make_model(make_spec(17, 16))
    model.unet.norm = torch.nn.GroupNorm(1, 8)
    with pytest.raises(TypeError, match=r"layer unet.norm \(GroupNorm\)"):
        partition_model(model, echo_mesh(Topology(lat=2), Traffic()))


def cut_input(shard, x):
    names = [f.name for f in fields(x) if f.name not in ("count", "day_of_year")]
    return replace(x, **{n: shard.cut(getattr(x, n)) for n in names if getattr(x, n) is not None})


def objective(prediction, shard, shape):
    """A sum over cells of something that depends on all outputs, with a weight of each cell's own."""
    weight = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    weight = shard.cut(weight) if shard is not None else weight
    return sum((torch.log1p(v**2) * weight).sum() for v in tensors(prediction).values())


def compare(session, cases):
    """Largest errors of each case: prediction, gradients, weights after a step."""
    found, points = {}, surroundings._POINTS
    for name, (grid, config) in cases.items():
        torch.manual_seed(0)
        spec = make_spec(*grid, **config)
        whole = make_model(spec)
        Speed().apply(whole)
        whole.double()
        mine, overlap = copy.deepcopy(whole), "overlap" in name
        shard = partition_model(mine, session.mesh, Overlap(overlap))
        x = make_input(spec).to(torch.float64)
        expected = whole(x)
        surroundings._POINTS = 64 if "strips" in name else points  # two rows of two dates
        got = mine(cut_input(shard, x))
        surroundings._POINTS = points
        errors = [(v - shard.cut(tensors(expected)[k])).abs().max() for k, v in tensors(got).items()]
        objective(expected, None, spec.grid.shape).backward()
        objective(got, shard, spec.grid.shape).backward()
        grads = []
        for p, q in zip(whole.parameters(), mine.parameters(), strict=True):
            session.mesh.model.all_reduce(q.grad)
            grads.append((p.grad - q.grad).abs().max() / p.grad.abs().max().clamp(min=1e-300))
        steps = [one_step(copy.deepcopy(whole), copy.deepcopy(mine), whole, mine, kind) for kind in OptimName]
        # torch's maximum passes NaN on; Python's may not.
        found[name] = tuple(torch.stack(some).max().item() for some in (errors, grads, steps))
        assert list(mine.state_dict()) == list(whole.state_dict())
        assert {k: v.shape for k, v in mine.state_dict().items()} == {k: v.shape for k, v in whole.state_dict().items()}
    return found


def one_step(whole, mine, graded, graded_mine, kind):
    """Largest difference of weights after a step; Lion where the sign is more than rounding."""
    for model, source in ((whole, graded), (mine, graded_mine)):
        for p, q in zip(model.parameters(), source.parameters(), strict=True):
            p.grad = q.grad.clone()
        optimizer, _ = build(OptimConfig(name=kind, lr=1e-2, warmup=0), model.param_groups(), 10)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
    errors = [torch.zeros((), dtype=torch.float64)]
    for p, q in zip(whole.parameters(), mine.parameters(), strict=True):
        sure = ~(p.grad.abs() <= 1e-9 * p.grad.abs().mean())
        if sure.any():
            # AdamW divides by |gradient| + 1e-8: the step repeats relative errors of tiny gradients
            errors.append((p - q)[sure].abs().max())
    return torch.stack(errors).max().detach()


@pytest.mark.parametrize("kind", OptimName)
def test_weights_of_nan_are_wrong(kind):
    models = [make_model(make_spec()) for _ in range(4)]
    for model in models:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    next(models[1].parameters()).data.view(-1)[0] = torch.nan
    assert one_step(*models, kind).isnan()


CASES = {
    "cross, rows on the poles": ((17, 16), {}),
    "cross, no row on a pole": ((16, 16), {"pole_row": False}),
    "replicate": ((17, 16), {"pole": Pole.replicate, "vertical": Vertical.shared}),
    "zero": ((13, 16), {"pole": Pole.zero, "vertical": Vertical.separable}),
    "a plane's own weights": ((17, 16), {"vertical": Vertical.full, "depth": 1}),
    "region": ((14, 18), {"region": ([60 - i for i in range(14)], [10 + i for i in range(18)])}),
    "region, overlap": ((14, 18), {"region": ([60 - i for i in range(14)], [10 + i for i in range(18)])}),
    "cross, rows on the poles, overlap": ((17, 16), {}),
    "cross, rows on the poles, strips": ((17, 16), {}),
    "zero, separable, overlap": ((13, 16), {"pole": Pole.zero, "vertical": Vertical.separable}),
    "surface alone": ((17, 16), {"variables": (), "levels": ()}),
}


@pytest.mark.parametrize(
    ("lat", "lon"),
    [
        (1, 2),
        (2, 1),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(1, 3, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
def test_equal_to_one_process(lat, lon):
    cases = CASES
    if lat > 2:  # more blocks of four rows
        cases = {k: ((v[0][0] + 4 * lat, 16), v[1]) for k, v in CASES.items() if not k.startswith("region")}
    for found in run_ranks(compare, lat * lon, cases, lat=lat, lon=lon):
        assert found.keys() == cases.keys()
        for name, (forward, gradient, step) in found.items():
            assert forward < 1e-12, name
            assert gradient < 1e-12, name
            assert step < 1e-10, name


def test_one_rank_is_the_plain_model():
    model = make_model(make_spec())
    kinds = [type(m) for m in model.modules()]
    assert partition_model(model, Mesh()).shape == (9, 16)
    assert [type(m) for m in model.modules()] == kinds


def test_shards_of_half_a_degree():
    shard = make_shard(Topology(lat=4, lon=2, rank=7), (361, 720), 4)
    assert [b - a for a, b in shard.rows] == [96, 96, 96, 73] and shard.shape == (73, 352)
    assert shard.pooled(3).rows == ((0, 12), (12, 24), (24, 36), (36, 46))
    assert shard.columns == ((0, 368), (368, 720))


@pytest.mark.parametrize(
    ("grid", "degrees", "text"),
    [
        ((9, 16), {"lat": 4}, "parallel.lat=4: 9 rows make 3 blocks of 4; use at most 3"),
        ((9, 16), {"lon": 5}, "parallel.lon=5: 16 columns make 4 blocks of 4; use at most 4"),
        ((9, 16), {"lat": 3}, "parallel.lat=3: the rank at a pole has 1 row after 0 poolings, .*cross needs 2"),
    ],
)
def test_partitions_that_do_not_fit(grid, degrees, text):
    with pytest.raises(UserError, match=text):
        partition_model(make_model(make_spec(*grid)), Mesh(Topology(**degrees)))
    with pytest.raises(UserError, match=text):  # before there is a model, and anything is fitted
        shard_of(make_spec(*grid), Topology(**degrees))


def test_an_input_of_the_wrong_size():
    spec = make_spec(12)
    model = make_model(spec)
    partition_model(model, Mesh(Topology(lat=2)))
    with pytest.raises(UserError, match="shape"):
        model(make_input(spec))
