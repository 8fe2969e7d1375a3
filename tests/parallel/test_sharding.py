"""Sharded weights against one process, float64: predictions, gradients, one optimizer step; and what a rank holds."""

import copy
from dataclasses import replace

import pytest
import torch
from models.small_models import make_input, make_model, make_spec, tensors
from parallel.ranks import run_ranks
from parallel.test_partition_model import cut_input, objective, whole

from ensemble_ml.config import OptimConfig, OptimName
from ensemble_ml.distributed.choice import consecutive_groups, make_exchange, process_group
from ensemble_ml.distributed.overlap import Overlap
from ensemble_ml.distributed.partition import partition_model
from ensemble_ml.distributed.sharding import local, shard_weights, shards_of, split_groups
from ensemble_ml.distributed.sharding import whole as gathered
from ensemble_ml.models.unet3d import ResidualBlock
from ensemble_ml.optim import build

GRID = (17, 16), ()
REFERENCE = whole(*GRID)


def sharded(session, model, shards, *, recompute=False, overlap=False, **how):
    """A model of this rank: its part of the grid, recomputed or not, its part of the weights."""
    mine = copy.deepcopy(model)
    mine.zero_grad()
    shard = partition_model(mine, session.mesh, Overlap(overlap))
    for module in mine.modules():
        if isinstance(module, ResidualBlock):
            module.recompute = recompute
    groups = consecutive_groups(session.topology, shards, process_group)
    shard_weights(mine, session.mesh, *groups, **how)
    return mine, shard


def part_of_batch(session, x):
    """The samples of this rank."""
    which, parts = session.topology.place.data, session.topology.data
    names = [name for name, value in vars(x).items() if value is not None]
    return replace(x, **{name: getattr(x, name)[which::parts] for name in names})


def compare(session, *given):
    return [compare_with(session, *given, kind) for kind in OptimName]


def compare_with(session, shards, recompute, overlap, kind):
    one = REFERENCE
    mine, shard = sharded(session, one.model, shards, recompute=recompute, overlap=overlap)
    exchange = make_exchange(OptimConfig(name=kind), session.topology)
    config = OptimConfig(name=kind, lr=1e-2, warmup=0, clip=1.0)
    exchange.clip = config.clip
    optimizer, _ = build(config, split_groups(mine.param_groups()), 10, exchange)
    which, parts = session.topology.place.data, session.topology.data
    exchange.begin(0)
    got = mine(part_of_batch(session, cut_input(shard, one.inputs)))
    errors = [(v - shard.cut(one.prediction[k])[which::parts]).abs().max() for k, v in tensors(got).items()]
    objective(got, shard, one.model.spec.grid.shape).backward()
    before = [None if p.grad is None or shards_of(p) is None else gathered(p.grad) for p in mine.parameters()]
    outcome = exchange.finish()
    grads = []
    for p, early in zip(one.model.parameters(), before, strict=True):
        if early is not None:
            grads.append((p.grad - early).abs().max() / p.grad.abs().max().clamp(min=1e-300))
    norm = torch.stack([p.grad.square().sum() for p in one.model.parameters()]).sum().sqrt()
    optimizer.step()
    stepped = copy.deepcopy(one.model)
    for p, q in zip(stepped.parameters(), one.model.parameters(), strict=True):
        p.grad = q.grad * (1 / (norm + 1e-6)).clamp(max=1.0)
    build(replace(config, clip=0.0), stepped.param_groups(), 10)[0].step()
    steps = []
    for p, q, source in zip(stepped.parameters(), mine.parameters(), one.model.parameters(), strict=True):
        sure = ~(source.grad.abs() <= 1e-9 * source.grad.abs().mean())
        off = (p - gathered(q)).abs() * sure
        # A rank steps the terms of its own cells alone.
        off = shard.cut(off) if any(q is own for own in exchange.apart) else off
        steps.append(off.max())
    exchange.close()
    names = list(mine.state_dict()) == list(one.model.state_dict())
    worst = [torch.stack(some).max().item() for some in (errors, grads, steps)]
    return *worst, abs(outcome.norm / norm.item() - 1), names, len(grads)


CASES = [
    ((1, 1, 2), 2, False, False), ((1, 1, 2), 2, True, False), ((2, 1, 1), 2, False, True), ((2, 1, 1), 2, True, True),
    ((3, 1, 1), 3, True, False),
    pytest.param((2, 2, 1), 4, True, True, marks=pytest.mark.slow),
    pytest.param((2, 1, 2), 2, True, False, marks=pytest.mark.slow),
    pytest.param((2, 2, 1), 2, False, False, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "shards", "recompute", "overlap"), CASES)
def test_equal_to_one_process(mesh, shards, recompute, overlap):
    lat, lon, data = mesh
    found = run_ranks(compare, lat * lon * data, shards, recompute, overlap, lat=lat, lon=lon, data=data)
    for forward, grads, steps, norm, names, count in (one for rank in found for one in rank):
        assert max(forward, grads, steps, norm) < 1e-12
        assert names
        assert count == len(list(REFERENCE.model.unet.parameters()))


def gradients(session, model, x, how):
    """All gradients of a sharded model, and the gathered weights that are left after the forward pass."""
    mine, _ = sharded(session, model, 2, **how)
    found = mine(x)
    blocks = [module for module in mine.unet.modules() if isinstance(module, ResidualBlock)]
    left = sum(shards_of(p) is None for block in blocks for p in block.parameters())
    sum(v.sum() for v in tensors(found).values()).backward()
    return [gathered(p.grad) for p in mine.unet.parameters()], left


def test_other_times_of_gathering_give_the_same_gradients():
    """The rivals of the benchmark: weights that stay after the forward pass, and a U-Net that is one unit."""
    spec = make_spec(9, 16)
    model, x = make_model(spec), make_input(spec)
    rivals = {}, {"after_forward": False}, {"by_block": False}
    ours, kept, one = (run_ranks(gradients, 2, model, x, how, data=2)[0] for how in rivals)
    assert all(torch.equal(a, b) for other in (kept, one) for a, b in zip(ours[0], other[0], strict=True))
    assert ours[1] == one[1] == 0 < kept[1]


def bytes_held(session, model, x, shards):
    """Bytes of weights, gradients and momenta on this rank after a step."""
    mine, _ = sharded(session, model, shards)
    exchange = make_exchange(OptimConfig(), session.topology)
    optimizer, _ = build(OptimConfig(), split_groups(mine.param_groups()), 10, exchange)
    exchange.begin(0)
    sum(v.sum() for v in tensors(mine(x)).values()).backward()
    exchange.finish()
    optimizer.step()
    exchange.close()
    kept = [t for p in mine.parameters() for t in (p, p.grad, optimizer.momentum(p))]
    return sum(local(t).numel() * t.element_size() for t in kept)


def test_ranks_share_the_bytes():
    """A small model has more beside its U-Net than a large one, for which sharding is."""
    fields = {"variables": ("t",), "surface": ("t2m",), "leads_in": (24,), "linear": False}
    spec = make_spec(9, 16, hidden=64, max_hidden=128, **fields)
    model, x = make_model(spec), make_input(spec)
    alone = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    for ranks in (2, 3, 4):
        found = run_ranks(bytes_held, ranks, model, x, ranks, data=ranks)
        assert max(found) <= 1.05 / ranks * alone
    assert max(run_ranks(bytes_held, 4, model, x, 2, data=4)) <= 1.05 / 2 * alone
