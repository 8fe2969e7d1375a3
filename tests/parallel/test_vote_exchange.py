"""Exchanges during backward: against one process that knows all ranks' gradients."""

import copy
from functools import partial

import pytest
import torch
from parallel.simulated import on_ranks
from parallel.small_net import RIVALS, Net, batch, same, train
from torch import nn

from ensemble_ml.config import ClipBy, ExchangeName, MomentumKept, MomentumSync, OptimConfig, VoteScale
from ensemble_ml.distributed.communicator import NullCommunicator
from ensemble_ml.distributed.exchange import GradientAverage, Reduction
from ensemble_ml.distributed.vote import sign_allreduce
from ensemble_ml.distributed.voting import DistributedLion, LionCub, MomentumPlan, Vote, choose, relative_variance
from ensemble_ml.errors import UserError
from ensemble_ml.optim import Lion


@pytest.mark.parametrize("bucket_mb", [1e-4, 4.0])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_average_is_one_process_on_the_whole_batch(reduction, bucket_mb):
    found = train(lambda g: GradientAverage(g, reduction=reduction, bucket_mb=bucket_mb), 3)
    assert same(found)
    net, steps = Net(), range(5)
    optimizer = Lion(net.parameters(), lr=1e-2)
    for step in steps:
        optimizer.zero_grad()
        losses = [net(batch(rank, step)) for rank in range(3)]
        (sum(losses) / (3 if reduction is Reduction.mean else 1)).backward()
        optimizer.step()
    for a, b in zip(found[0][0], net.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda g: GradientAverage(g, bucket_mb=1e-4, clip=1.0),
        lambda g: GradientAverage(g, bucket_mb=1e-4, dtype=torch.bfloat16),
        lambda g: Vote(g, bucket_mb=1e-4),
        lambda g: Vote(g, bits=4, bucket_mb=1e-4),
    ],
)
def test_without_a_thread_nothing_waits_within_backward(make):
    """As on a GPU, where hooks enqueue what backward must not wait for."""
    early = []

    def from_hooks(group):
        exchange, finishing = make(group), []
        ready, finish, drain = exchange.ready, exchange.finish, exchange._drain

        def without_thread():
            ready()
            if exchange._thread is not None:
                exchange._thread.shutdown()
                exchange._thread = None

        def finished():
            finishing.append(True)
            outcome = finish()
            finishing.clear()
            return outcome

        def drained():
            early.append(not finishing)
            drain()

        exchange.ready, exchange.finish, exchange._drain = without_thread, finished, drained
        return exchange

    wanted, found = train(make, 3), train(from_hooks, 3)
    assert same(found) and early and not any(early)
    for one, other in zip(wanted, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_vote_in_buckets_is_a_vote_on_each_parameter(bits, size):
    """Buckets change nothing; parameters with permuted axes vote in their order in memory."""
    found = train(lambda g: Vote(g, bits=bits, bucket_mb=1e-4), size)
    whole = train(lambda g: Vote(g, bits=bits), size)
    assert same(found) and same(whole)
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], whole[0][0], strict=True))

    def by_hand(group):
        net = Net()
        momenta = [torch.zeros_like(p) for p in net.parameters()]
        for step in range(5):
            net.zero_grad()
            net(batch(group.rank, step)).backward()
            for p, m in zip(net.parameters(), momenta, strict=True):
                if p.grad is None:
                    continue
                u = m * 0.9 + p.grad * (1 - 0.9)
                order = sorted(range(p.ndim), key=lambda d: -p.stride(d))
                back = [order.index(d) for d in range(p.ndim)]
                signs = sign_allreduce(u.permute(order).contiguous(), bits, group, step).permute(back)
                p.data.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * signs)
                m.mul_(0.99).add_(p.grad, alpha=1 - 0.99)
        return [p.detach() for p in net.parameters()]

    for a, b in zip(found[0][0], on_ranks(size, by_hand)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make", [*(partial(Vote, bits=bits) for bits in (1, 2, 4, 8)), LionCub, partial(LionCub, bits=1), DistributedLion]
)
def test_ranks_without_a_sample_do_not_outvote_those_that_have_one(make):
    """Epochs of two steps, the second of one sample, whose gradient points the other way: as in one process, if all
    had the gradient of the whole batch; and their momenta stay as they are."""

    def gradient(step):
        return -20.0 if step % 2 else 1.0

    def work(group):
        weights = nn.Parameter(torch.zeros(64))
        exchange = make(group, reduction=Reduction.sum)
        optimizer, moved, momenta = Lion([weights], lr=1.0, weight_decay=0.0, exchange=exchange), [], []
        for step in range(4):
            optimizer.zero_grad()
            exchange.with_samples = 1 if step % 2 else 3
            exchange.begin(step)
            exchange.share = (1 / 3, float(group.rank == 0))[step % 2]
            (weights * gradient(step) * exchange.share).sum().backward()
            before = weights.detach().clone()
            exchange.finish()
            optimizer.step()
            moved.append((weights.detach() - before)[0].item())
            momenta.append(optimizer.momentum(weights)[0].item())
        exchange.close()
        return moved, momenta

    found = on_ranks(3, work)
    assert [moved for moved, _ in found] == [[-1.0, 1.0, -1.0, 1.0]] * 3
    assert found[1][1][1] == found[1][1][0] != found[1][1][2] and found[0][1][1] != found[0][1][0]


def test_one_voter_is_plain_lion():
    [(weights, momenta, _)] = train(lambda g: Vote(g), 1, batches=lambda r, s: batch(r, s).abs())
    net = Net()
    optimizer = Lion(net.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        net(batch(0, step).abs()).backward()
        optimizer.step()
    zero = [(p.grad == 0) if p.grad is not None else torch.zeros_like(p, dtype=torch.bool) for p in net.parameters()]
    for a, b, z in zip(weights, net.parameters(), zero, strict=True):
        assert torch.equal(a[~z], b.detach()[~z])
    assert all(torch.equal(m, optimizer.momentum(p)) for m, p in zip(momenta, net.parameters(), strict=True))


def test_published_forms_of_one_bit_win_the_same_vote():
    ours, *others = (train(RIVALS[name], 3)[0][0] for name in ("vote", "cub1", "distributed"))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


def test_published_eight_bits_end_at_127_ranks():
    class Many:
        size, rank, bytes_sent = 128, 0, 0

    with pytest.raises(UserError, match="128 ranks"):
        LionCub(Many(), bits=8)
    LionCub(Many(), bits=8, scale=VoteScale.sign)  # one bit, whatever `bits` is


@pytest.mark.parametrize("bits", [1, 4])
def test_weights_in_bfloat16_vote_with_momenta_in_float32(bits):
    """Replicas stay equal; one step is that of the same gradients in float32, rounded."""
    found = train(lambda g: Vote(g, bits=bits), 3, dtype=torch.bfloat16, steps=20)
    assert same(found) and all(p.dtype is torch.bfloat16 for p in found[0][0])
    assert all(m.dtype is torch.float32 for _, momenta, _ in found for m in momenta)
    assert any(not torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True)), "momenta are each rank's"

    def wide(group):
        """The same gradients, voted on as float32."""
        net = Net().to(torch.bfloat16)
        net(batch(group.rank, 0).to(torch.bfloat16)).backward()
        copied = [nn.Parameter(p.detach().float()) for p in net.parameters()]
        exchange = Vote(group, bits=bits, overlap=False)
        optimizer = Lion(copied, lr=1e-2, exchange=exchange)
        exchange.begin(0)
        for p, q in zip(net.parameters(), copied, strict=True):
            q.grad = None if p.grad is None else p.grad.float()
        assert exchange.finish().finite
        optimizer.step()
        exchange.close()
        return [q.detach() for q in copied]

    wanted = on_ranks(3, wide)[0]
    one = train(lambda g: Vote(g, bits=bits), 3, dtype=torch.bfloat16, steps=1)[0][0]
    for a, b in zip(one, wanted, strict=True):
        assert torch.equal(a, b.to(torch.bfloat16))


@pytest.mark.parametrize("bits", [1, 4])
def test_gradient_accumulation(bits):
    def twice(group):
        net, exchange = Net(), Vote(group, bits=bits)
        optimizer = Lion(net.parameters(), lr=1e-2, exchange=exchange)
        for step in range(3):
            optimizer.zero_grad()
            exchange.begin(step)
            with exchange.hold():
                net(batch(group.rank, step)).backward()
            net(batch(group.rank, step + 50)).backward()
            assert exchange.finish().finite
            optimizer.step()
        exchange.close()
        return [p.detach() for p in net.parameters()]

    def once(group):
        net, exchange = Net(), Vote(group, bits=bits, overlap=False)
        optimizer = Lion(net.parameters(), lr=1e-2, exchange=exchange)
        for step in range(3):
            optimizer.zero_grad()
            exchange.begin(step)
            (net(batch(group.rank, step)) + net(batch(group.rank, step + 50))).backward()
            exchange.finish()
            optimizer.step()
        exchange.close()
        return [p.detach() for p in net.parameters()]

    a, b = on_ranks(2, twice), on_ranks(2, once)
    for x, y in zip(a[0], b[0], strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("clip_by", list(ClipBy))
def test_clipping_bounds_the_own_gradient(clip_by, reduction):
    found = train(lambda g: Vote(g, clip=1e-3, clip_by=clip_by, bucket_mb=1e-4, reduction=reduction), 2)
    assert same(found)
    for _, momenta, outcomes in found:
        assert outcomes[0].norm > 1e-3
        # Momentum is a sum of clipped gradients with weights that add up to less than 1 - 0.99^5.
        assert torch.cat([m.flatten() for m in momenta]).norm() <= 1e-3 * (1 - 0.99**5) * 1.001


def test_a_gradient_of_several_ranks_is_clipped_by_buckets_alone():
    def refused(group):
        with pytest.raises(UserError, match=r"optim.clip=1: 2 ranks form one gradient .*clip_by=bucket"):
            Vote(NullCommunicator(), inner=group, clip=1.0)
        return Vote(NullCommunicator(), inner=group, clip=1.0, clip_by=ClipBy.bucket).clip

    assert on_ranks(2, refused) == [1.0, 1.0]


@pytest.mark.parametrize("name", list(ExchangeName))
def test_settings_clip_by_buckets_where_ranks_vote_alone(name):
    if name in (ExchangeName.vote, ExchangeName.lion_cub, ExchangeName.distributed_lion):
        assert OptimConfig(exchange=name, clip=1.0, clip_by=ClipBy.bucket).clip_by is ClipBy.bucket
    else:
        with pytest.raises(UserError, match=rf"^optim.clip_by=bucket: exchange={name.value} .*; use clip_by=total"):
            OptimConfig(exchange=name, clip=1.0, clip_by=ClipBy.bucket)


def test_momenta_are_averaged_for_a_checkpoint_where_ranks_vote_alone():
    """Elsewhere they are equal, and the setting would only keep the clock from asking for checkpoints."""
    assert OptimConfig(exchange=ExchangeName.vote, momentum_kept=MomentumKept.mean)
    with pytest.raises(UserError, match=r"^optim.momentum_kept=mean: exchange=allreduce ignores it; leave"):
        OptimConfig(momentum_kept=MomentumKept.mean)


def test_clipping_of_an_average_bounds_the_average():
    found = train(lambda g: GradientAverage(g, clip=1e-3), 2)
    assert found[0][2][0].norm > 1e-3
    assert torch.cat([m.flatten() for m in found[0][1]]).norm() <= 1e-3 * (1 - 0.99**5) * 1.001


@pytest.mark.parametrize("bits", [1, 8])
def test_hierarchy_averages_inside_and_votes_between(bits):
    """2 groups of 2: equal to two voters that each hold the mean gradient of their group."""

    def flat_pair(group):
        net, exchange = Net(), Vote(group, bits=bits)
        optimizer = Lion(net.parameters(), lr=1e-2, exchange=exchange)
        for step in range(5):
            optimizer.zero_grad()
            exchange.begin(step)
            with exchange.hold():
                (net(batch(2 * group.rank, step)) / 2).backward()
            (net(batch(2 * group.rank + 1, step)) / 2).backward()
            exchange.finish()
            optimizer.step()
        exchange.close()
        return [p.detach() for p in net.parameters()]

    wanted = on_ranks(2, flat_pair)[0]
    found = hierarchical(lambda outer, inner: Vote(outer, bits=bits, inner=inner))
    assert same(found)
    for a, b in zip(found[0][0], wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def hierarchical(make, other=()):
    from concurrent.futures import ThreadPoolExecutor

    from parallel.simulated import Room, SimulatedCommunicator

    inner, outer = [Room(2), Room(2)], [Room(2), Room(2)]

    def work(rank):
        node, place = divmod(rank, 2)
        exchange = make(SimulatedCommunicator(outer[place], node), SimulatedCommunicator(inner[node], place))
        net = Net()
        if rank in other:
            nn.init.ones_(net.a)
        optimizer = Lion(net.parameters(), lr=1e-2, exchange=exchange)
        for step in range(5):
            optimizer.zero_grad()
            exchange.begin(step)
            net(batch(rank, step)).backward()
            assert exchange.finish().finite
            optimizer.step()
        exchange.close()
        return [p.detach() for p in net.parameters()], None

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, range(4)))


@pytest.mark.parametrize("ranks", [[1, 3], [2, 3], [1]])
def test_models_are_compared_over_all_ranks_of_a_hierarchy(ranks):
    """Where the second ranks of both nodes have the same other model, those that vote with each other are alike."""

    with pytest.raises(UserError, match=f"^ranks {', '.join(map(str, ranks))}: their weights differ from rank 0's"):
        hierarchical(lambda outer, inner: Vote(outer, inner=inner), other=ranks)


def test_momentum_is_averaged_when_it_is_due():
    assert [s for s in range(40) if MomentumPlan(MomentumSync.every, 10).due(s)] == [9, 19, 29, 39]
    assert [s for s in range(200) if MomentumPlan(MomentumSync.growing, 10).due(s)] == [9, 29, 69, 149]
    assert not any(MomentumPlan().due(s) for s in range(200))
    synced = train(lambda g: Vote(g, plan=MomentumPlan(MomentumSync.every, 5)), 3)
    apart = train(lambda g: Vote(g), 3)
    mean = [sum(ms) / 3 for ms in zip(*(m for _, m, _ in apart), strict=True)]
    for _, momenta, _ in synced:
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(momenta, mean, strict=True))


def test_the_layers_that_differ_most_are_taken_within_the_budget():
    def work(group):
        noise = torch.Generator().manual_seed(group.rank)
        common = torch.randn(1000, generator=torch.Generator().manual_seed(9))
        momenta = [
            common.clone(),
            common + 0.5 * torch.randn(1000, generator=noise),
            torch.randn(1000, generator=noise),
            torch.zeros(0),  # a layer without parameters
        ]
        found = relative_variance(momenta, group, 3)
        done = MomentumPlan(MomentumSync.selective, 1, 7000.0).follow(momenta, group, 3)
        return found, done, momenta

    results = on_ranks(4, work)
    variance, done, _ = results[0]
    assert variance[0] == variance[3] == 0 and 0.1 < variance[1] < 0.35 and 0.8 < variance[2] < 1.2
    assert done.layers == (2,) and done.variance == tuple(variance)  # 2 * 4000 * 3/4 = 6000 bytes a layer
    assert all(torch.equal(m[2], results[0][2][2]) for *_, m in results)
    assert choose([0.1, 0.5, 0.3], [10.0, 100.0, 10.0], 25.0) == (0, 2)
    assert copy.copy(done) == done
