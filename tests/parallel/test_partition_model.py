"""The whole model over several ranks against one process, float64: predictions, gradients, one optimizer step."""

import copy
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache

import pytest
import torch
from models.small_models import make_input, make_model, make_spec, tensors
from parallel.ranks import run_ranks
from parallel.simulated import run_threads

from ensemble_ml.config import OptimConfig, OptimName, Pole, Vertical
from ensemble_ml.distributed import Mesh, Topology
from ensemble_ml.distributed.echo import Traffic, echo_mesh
from ensemble_ml.distributed.overlap import Overlap
from ensemble_ml.distributed.partition import partition_model, shard_of
from ensemble_ml.distributed.topology import make_shard
from ensemble_ml.errors import UserError
from ensemble_ml.models import EnsembleInput, EnsembleModel, Speed, points
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


@dataclass(frozen=True)
class Whole:
    """The model on one process: itself with its gradients, its input, what it predicts, weights after a step."""

    model: EnsembleModel
    inputs: EnsembleInput
    prediction: dict
    stepped: dict


@cache
def whole(grid, settings):
    """Compute what partitions are compared with: once, in the process that ranks are forks of."""
    torch.manual_seed(0)
    spec = make_spec(*grid, **dict(settings))
    model = make_model(spec)
    Speed().apply(model)
    model.double()
    x = make_input(spec).to(torch.float64)
    prediction = model(x)
    objective(prediction, None, spec.grid.shape).backward()
    stepped = {kind: after_a_step(model, kind) for kind in OptimName}
    return Whole(model, x, {k: v.detach() for k, v in tensors(prediction).items()}, stepped)


@contextmanager
def strips_of(mesh, name):
    """Let the point network see two rows of two dates at a time where a case asks for it, on all ranks at once."""
    usual = points._POINTS
    mesh.world.barrier()
    points._POINTS = 64 if "strips" in name else usual
    mesh.world.barrier()
    yield
    mesh.world.barrier()
    points._POINTS = usual
    mesh.world.barrier()


def compare(session, references):
    """Largest errors of each case: prediction, gradients, weights after a step."""
    found, mesh = {}, session.mesh
    for name, one in references.items():
        mine = copy.deepcopy(one.model)
        mine.zero_grad()
        shard = partition_model(mine, mesh, Overlap("overlap" in name))
        with strips_of(mesh, name):
            got = mine(cut_input(shard, one.inputs))
        errors = [(v - shard.cut(one.prediction[k])).abs().max() for k, v in tensors(got).items()]
        objective(got, shard, one.model.spec.grid.shape).backward()
        grads = []
        for p, q in zip(one.model.parameters(), mine.parameters(), strict=True):
            mesh.model.all_reduce(q.grad)
            grads.append((p.grad - q.grad).abs().max() / p.grad.abs().max().clamp(min=1e-300))
        steps = [difference(one.model, one.stepped[kind], after_a_step(mine, kind)) for kind in OptimName]
        # torch's maximum passes NaN on; Python's may not.
        found[name] = tuple(torch.stack(some).max().item() for some in (errors, grads, steps))
        assert list(mine.state_dict()) == list(one.model.state_dict())
        assert [v.shape for v in mine.state_dict().values()] == [v.shape for v in one.model.state_dict().values()]
    return found


def after_a_step(model, kind):
    """Weights that a copy of the model has after a step along its gradients."""
    mine = copy.deepcopy(model)
    for p, q in zip(mine.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    optimizer, _ = build(OptimConfig(name=kind, lr=1e-2, warmup=0), mine.param_groups(), 10)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    optimizer.step()
    return [p.detach() for p in mine.parameters()]


def difference(graded, whole, mine):
    """Largest difference of weights after a step; Lion where the sign is more than rounding."""
    errors = [torch.zeros((), dtype=torch.float64)]
    for p, q, source in zip(whole, mine, graded.parameters(), strict=True):
        sure = ~(source.grad.abs() <= 1e-9 * source.grad.abs().mean())
        if sure.any():
            # AdamW divides by |gradient| + 1e-8: the step repeats relative errors of tiny gradients
            errors.append((p - q)[sure].abs().max())
    return torch.stack(errors).max()


@pytest.mark.parametrize("kind", OptimName)
def test_weights_of_nan_are_wrong(kind):
    graded, spoilt = make_model(make_spec()), make_model(make_spec())
    for p in [*graded.parameters(), *spoilt.parameters()]:
        p.grad = torch.ones_like(p)
    next(spoilt.parameters()).data.view(-1)[0] = torch.nan
    assert difference(graded, after_a_step(graded, kind), after_a_step(spoilt, kind)).isnan()


REGION = tuple(60 - i for i in range(14)), tuple(10 + i for i in range(18))
CASES = {
    "cross, rows on the poles": ((17, 16), {}),
    "cross, no row on a pole": ((16, 16), {"pole_row": False}),
    "replicate": ((17, 16), {"pole": Pole.replicate, "vertical": Vertical.shared}),
    "zero": ((13, 16), {"pole": Pole.zero, "vertical": Vertical.separable}),
    "a plane's own weights": ((17, 16), {"vertical": Vertical.full, "depth": 1}),
    "region": ((14, 18), {"region": REGION}),
    "region, overlap": ((14, 18), {"region": REGION}),
    "cross, rows on the poles, overlap": ((17, 16), {}),
    "cross, rows on the poles, strips": ((17, 16), {}),
    "zero, separable, overlap": ((13, 16), {"pole": Pole.zero, "vertical": Vertical.separable}),
    "surface alone": ((17, 16), {"variables": (), "levels": ()}),
    "a bank of kernels": ((17, 16), {"bank": 0.2}),
}


def references_of(lat):
    """What a mesh of `lat` bands is compared with: each band has a block of four rows."""
    cases = CASES
    if lat > 2:
        cases = {k: ((v[0][0] + 4 * lat, 16), v[1]) for k, v in CASES.items() if not k.startswith("region")}
    return {name: whole(grid, tuple(settings.items())) for name, (grid, settings) in cases.items()}


def assert_exact(found, references):
    assert found.keys() == references.keys()
    for name, (forward, gradient, step) in found.items():
        assert forward < 1e-12, name
        assert gradient < 1e-12, name
        assert step < 1e-10, name


@pytest.mark.parametrize(("lat", "lon"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_equal_to_one_process(lat, lon):
    """Two processes find what two threads find, bit for bit, so that the other meshes may be threads. Of four, gloo
    adds gradients up in another order."""
    references = references_of(lat)
    by_processes = run_ranks(compare, lat * lon, references, seconds=300, lat=lat, lon=lon)
    for found in by_processes:
        assert_exact(found, references)
    by_threads = run_threads(compare, references, lat=lat, lon=lon)
    if lat * lon == 2:
        assert by_threads == by_processes
    predictions = [[{k: v[0] for k, v in found.items()} for found in way] for way in (by_threads, by_processes)]
    assert predictions[0] == predictions[1]


@pytest.mark.parametrize(
    ("lat", "lon"), [(1, 2), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((1, 3), (3, 1), (4, 2)))]
)
def test_other_meshes_are_equal_to_one_process(lat, lon):
    references = references_of(lat)
    for found in run_threads(compare, references, lat=lat, lon=lon):
        assert_exact(found, references)


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
