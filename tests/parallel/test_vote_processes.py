"""Exchanges between processes: replicas equal bit for bit, resume equal bit for bit, ranks that do not fit."""

import copy
import hashlib
import os
import signal

import pytest
import torch
import torch.distributed as dist
from parallel.ranks import run_ranks
from torch import nn

from ensemble_ml.config import ExchangeName, MomentumKept, MomentumSync, OptimConfig
from ensemble_ml.distributed.choice import make_exchange, own_state, restore_state
from ensemble_ml.distributed.exchange import Reduction
from ensemble_ml.distributed.topology import Topology
from ensemble_ml.errors import UserError
from ensemble_ml.optim import Lion


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.ReLU(), nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 3))


def digest(tensors):
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(topology, steps, start=0, state=None, lr=3e-3, local_size=1, **settings):
    """Digest of the weights and the state after `steps`; ReLU leaves exact zeros in gradients."""
    config = OptimConfig(lr=lr, bucket_mb=4e-3, **settings)
    exchange = make_exchange(config, topology, reduction=Reduction.mean, local_size=local_size)
    net = network()
    optimizer = Lion(net.parameters(), lr=lr, exchange=exchange)
    if state is not None:
        for p, value in zip(net.parameters(), state["weights"], strict=True):
            p.data.copy_(value)
        optimizer.load_state_dict(state["optimizer"])  # of rank 0, as a checkpoint holds it
        restore_state(exchange, len(state["apart"]), lambda rank: state["apart"][rank])
    zeros = 0
    for step in range(start, steps):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(1000 * step + topology.rank))
        optimizer.zero_grad()
        exchange.begin(step)
        (net(x) - x[:, :3]).square().mean().backward()
        zeros += sum(int((p.grad == 0).sum()) for p in net.parameters())
        assert exchange.finish().finite
        optimizer.step()
        exchange.after_step()
    found = {
        "weights": [p.detach().clone() for p in net.parameters()],
        "apart": _apart(own_state(exchange, config.momentum_kept), topology),
        "optimizer": _first(optimizer.state_dict(), topology),
    }
    exchange.close()
    return digest(found["weights"]), digest([optimizer.momentum(p) for p in net.parameters()]), found, zeros


def _apart(own, topology):
    """Each part of what the ranks of a model hold apart, as a checkpoint keeps it."""
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, copy.deepcopy(own))
    kept = [held[rank] for rank in topology.group("data", "lat", "lon")]
    return [part.tensors for part in sorted((p for p in kept if p and p.keep), key=lambda p: p.rank)]


def _first(state, topology):
    """What the first rank that trains the same weights holds."""
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, copy.deepcopy(state))
    return held[topology.group("data", "lat", "lon")[0]]


VOTE = {"exchange": ExchangeName.vote}
SETTINGS = {
    "vote1": VOTE,
    "vote4": VOTE | {"bits": 4, "momentum_sync": MomentumSync.selective, "momentum_every": 4, "momentum_mb": 1e-3},
    "powersgd": {"exchange": ExchangeName.powersgd},
}


def everything(session):
    """What the tests below look at, in one job of four ranks: starting processes takes longer than all of it."""
    rank = session.topology.rank
    pairs, four = Topology(trainer=2, data=2, rank=rank), Topology(data=4, rank=rank)
    found = {}
    for name, settings in SETTINGS.items():
        for size, topology in ((2, pairs), (4, four)):
            found[f"resume {name} {size}"] = whole_and_resumed(topology, settings)
    found["saved"] = train(four, 3, **VOTE)[2]
    found["pairs"] = _restored(pairs, found["saved"])
    found["mean"] = train(four, 3, momentum_kept=MomentumKept.mean, **VOTE)
    found["nodes"] = train(four, 5, local_size=2, hierarchical=True, **VOTE)
    found["parts"] = train(Topology(data=2, lat=2, rank=rank), 5, **VOTE)
    found["other models"] = _other_models(four)
    found["short"] = [_short(four, name) for name in (ExchangeName.fp16, ExchangeName.bf16)]
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(everything, 4)


def whole_and_resumed(topology, settings):
    whole = train(topology, 20, **settings)
    half = train(topology, 9, **settings)
    rest = train(topology, 20, start=9, state=half[2], **settings)
    return whole[:2], rest[:2], whole[3]


def _restored(topology, state):
    exchange = make_exchange(OptimConfig(**VOTE), topology)
    net = network()
    optimizer = Lion(net.parameters(), exchange=exchange)
    restore_state(exchange, len(state["apart"]), lambda rank: state["apart"][rank])
    return optimizer.momentum(next(net.parameters()))


def _other_models(topology):
    told = []
    for change in (lambda: nn.Linear(9, 3 + (topology.rank == 2)), lambda: _shifted(nn.Linear(9, 3), topology.rank)):
        exchange = make_exchange(OptimConfig(**VOTE), topology)
        torch.manual_seed(0)
        Lion(change().parameters(), exchange=exchange)
        try:
            exchange.begin(0)
        except UserError as error:
            told.append(str(error))
    return told


def _shifted(layer, rank):
    with torch.no_grad():
        layer.bias[0] += float(rank in (1, 3))
    return layer


def _short(topology, name):
    try:
        exchange = make_exchange(OptimConfig(exchange=name), topology, reduction=Reduction.mean)
    except UserError as error:
        return str(error)
    net, given = network(), torch.full((2, 9), 1.0 + topology.rank)
    net(given).square().mean().backward()
    mine = [p.grad.clone() for p in net.parameters()]  # alone: the exchange may end before backward does
    net.zero_grad()
    Lion(net.parameters(), lr=1e-3, exchange=exchange)
    exchange.begin(0)
    net(given).square().mean().backward()
    exchange.finish()
    exchange.close()
    return mine, [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_resume_is_equal_bit_for_bit(ranks, name, size):
    found = [rank[f"resume {name} {size}"] for rank in ranks]
    groups = [found] if size == 4 else [found[:2], found[2:]]
    for group in groups:
        assert len({whole[0] for whole, _, _ in group}) == 1, "replicas differ"
        assert all(whole == rest for whole, rest, _ in group), "resumed run differs"
        assert all(zeros for *_, zeros in group), "no exact zero in a gradient"
        if name != "powersgd":
            assert len({whole[1] for whole, _, _ in group}) == size, "momenta are each rank's own"
    assert len({group[0][0][0] for group in groups}) == len(groups)


def test_state_of_four_ranks_on_two_is_the_mean(ranks):
    saved = ranks[0]["saved"]["apart"]
    mean = torch.stack([part["momentum.0"] for part in saved]).mean(0)
    assert all(torch.equal(rank["pairs"], mean) for rank in ranks)


def test_a_checkpoint_of_the_mean_holds_one_momentum(ranks):
    assert all(rank["mean"][2]["apart"] == [] for rank in ranks)
    assert len({rank["mean"][1] for rank in ranks}) == 1


def test_ranks_with_other_models_are_refused(ranks):
    for rank in ranks:
        layout, weights = rank["other models"]
        assert layout.startswith("ranks 2: their model differs from rank 0's in its layout")
        assert weights.startswith("ranks 1, 3: their weights differ from rank 0's")


@pytest.mark.parametrize("name", ["nodes", "parts"])
def test_hierarchy_keeps_momenta_equal_inside_and_apart_between(ranks, name):
    """Two nodes of two ranks, or two samples in two parts each."""
    assert len({rank[name][0] for rank in ranks}) == 1
    momenta = [rank[name][1] for rank in ranks]
    assert momenta[0] == momenta[1] and momenta[2] == momenta[3] and momenta[0] != momenta[2]


@pytest.mark.parametrize("which", [0, 1], ids=["fp16", "bf16"])
def test_short_types_average_or_are_refused(ranks, which):
    found = [rank["short"][which] for rank in ranks]
    if isinstance(found[0], str):
        assert which == 1 and all("bf16" in told and "fp16 or allreduce" in told for told in found)
        return
    means = [torch.stack(grads).mean(0) for grads in zip(*(mine for mine, _ in found), strict=True)]
    for _, got in found:
        for a, b, c in zip(got, means, found[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=0.03, atol=2e-3)
            assert torch.equal(a, c)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_replicas_are_equal_after_sixty_steps(size):
    found = run_ranks(_sixty, size, size)
    for bits in range(4):
        assert len({rank[bits][0] for rank in found}) == 1
        assert all(rank[bits][1] > 30 for rank in found), "no exact zeros"
        assert all(rank[bits][0] == rank[bits][2] for rank in found), "resumed run differs"


def _sixty(session, size):
    """Digests of the weights of a whole run and of one that was resumed after 23 steps; exact zeros in gradients."""
    topology = Topology(data=size, rank=session.topology.rank)
    found = []
    for bits in (1, 2, 4, 8):
        settings = VOTE | {"bits": bits, "momentum_sync": MomentumSync.growing, "momentum_every": 9}
        weights, _, _, zeros = train(topology, 60, **settings)
        half = train(topology, 23, **settings)[2]
        found.append((weights, zeros, train(topology, 60, start=23, state=half, **settings)[0]))
    return found


def _vote_until(session, doomed):
    """Vote for ever; one rank kills itself at step 5."""
    exchange = make_exchange(OptimConfig(**VOTE), session.topology, reduction=Reduction.mean)
    net = network()
    optimizer = Lion(net.parameters(), exchange=exchange)
    for step in range(10**6):
        session.step = step
        optimizer.zero_grad()
        exchange.begin(step)
        net(torch.ones(2, 9)).square().mean().backward()
        if session.topology.rank == doomed and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.finish()
        optimizer.step()


@pytest.mark.slow
def test_a_rank_that_dies_in_a_vote_ends_the_others_and_is_named():
    found = run_ranks(_vote_until, 3, 1, seconds=60, statuses=True, silence=4.0)
    for rank in (0, 2):
        status, seconds, text = found[rank]
        assert status != 0 and seconds < 30
        assert "rank 1 " in text and "no heartbeat" in text
