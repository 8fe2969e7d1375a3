"""Exchanges when something goes wrong: steps given up, jobs that fail, values that are not finite, unused weights."""

import time

import pytest
import torch
from parallel.simulated import on_ranks
from parallel.small_net import RIVALS, Net, batch, same, train
from torch import nn

from ensemble_ml.distributed.communicator import NullCommunicator
from ensemble_ml.distributed.powersgd import PowerSGD
from ensemble_ml.distributed.voting import Vote
from ensemble_ml.optim import Lion


def test_a_step_that_was_given_up_ends_before_the_next_begins():
    """Whenever a rank begins anew, all have sent the same before."""

    class Slow(Vote):
        def _exchange(self, number):
            time.sleep(0.05)
            super()._exchange(number)

    def work(group):
        net, exchange = Net(), Slow(group, bucket_mb=1e-4)
        optimizer = Lion(net.parameters(), lr=1e-2, exchange=exchange)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(group.rank))
        exchange.begin(0)
        for number in range(3):  # as backward hands buckets on until it raises
            exchange._full(number)
        time.sleep(0.6 * group.rank)
        for step in range(2):
            optimizer.zero_grad()
            exchange.begin(step)
            net(batch(group.rank, step)).backward()
            exchange.finish()
            optimizer.step()
        exchange.close()
        return [p.detach() for p in net.parameters()], None

    found = on_ranks(2, work)
    assert same(found)


def test_an_exchange_that_fails_is_told_once_and_the_rest_of_the_step_left_out():
    done = []

    class Failing(Vote):
        def _exchange(self, number):
            done.append(number)
            if number == 1:
                raise RuntimeError("bucket 1")

    net = Net()
    exchange = Failing(NullCommunicator(), bucket_mb=1e-4)
    Lion(net.parameters(), lr=1e-2, exchange=exchange)
    for _ in range(2):
        done.clear()
        exchange.begin(0)
        net(batch(0, 0)).backward()
        with pytest.raises(RuntimeError, match="bucket 1"):
            exchange.finish()
        assert done == [0, 1] and len(exchange.buckets) > 2
        for p in net.parameters():
            p.grad = None
    exchange.close()


@pytest.mark.parametrize("name", RIVALS)
def test_replicas_stay_equal_and_unused_parameters_do_not_hang(name):
    found = train(RIVALS[name], 3, use=lambda rank, step: rank == 1 and step % 2 == 0)
    assert same(found)
    start = Net()
    assert torch.equal(found[0][0][4], start.never)  # used by nobody: not even decayed
    assert not torch.equal(found[0][0][3], start.unused)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_known_to_all_and_who_it_was(name, bad):
    def poison(net, rank, step):
        if step == 2 and rank == 1:
            net.a.grad[0, 0] = bad

    deferred = {"overlap": False} if name in ("vote", "fp32", "fp16") else {}
    found = train(lambda g: RIVALS[name](g, **deferred), 3, before=poison)
    assert [[o.culprits for o in outcomes] for *_, outcomes in found] == [[(), (), (1,), (), ()]] * 3
    assert same(found) and all(torch.isfinite(p).all() for p in found[0][0])
    assert all(torch.isfinite(m).all() for m in found[1][1])


@pytest.mark.parametrize("name", RIVALS)
def test_frozen_parameters_stay_as_they_are(name):
    """From the start, or thawed after two steps."""

    def frozen():
        net = Net()
        for p in (net.b, net.c, net.unused):
            p.requires_grad_(False)
        return net

    def thaw(net, rank, step):
        if step == 1:
            net.b.requires_grad_(True)

    start = Net()
    for steps, thawed in ((2, False), (4, True)):
        found = train(RIVALS[name], 2, steps=steps, net=frozen, before=thaw)
        a, b, c, unused, _ = found[0][0]
        assert same(found) and torch.equal(c, start.c) and torch.equal(unused, start.unused)
        assert not torch.equal(a, start.a) and torch.equal(b, start.b) is not thawed


def test_what_was_left_out_waits_for_the_next_gradient():
    """A parameter that no rank used is not stepped, so its error must not shrink."""

    def work(group):
        p, q, exchange = nn.Parameter(torch.zeros(40, 40)), nn.Parameter(torch.zeros(3)), PowerSGD(group, rank=2)
        exchange.attach(torch.optim.SGD([p, q], lr=1.0))
        ones, held = torch.randn(40, 40, generator=torch.Generator().manual_seed(group.rank)), []
        for step in range(3):
            p.grad = q.grad = None
            exchange.begin(step)
            (q.sum() + ((p * ones).sum() if step == 0 else 0)).backward()
            exchange.finish()
            held.append({name: value.clone() for name, value in exchange.local_state().items()})
            assert (p.grad is None) is (step > 0)
        exchange.close()
        return held

    for held in on_ranks(2, work):
        assert held[0].keys() == {"error.0", "factor.0"} and held[0]["error.0"].norm() > 1
        assert all(torch.equal(later[name], value) for later in held[1:] for name, value in held[0].items())


def test_poison_found_during_backward():
    found = train(lambda g: Vote(g), 2, batches=lambda r, s: batch(r, s) * (float("nan") if (r, s) == (0, 3) else 1))
    assert [o.culprits for o in found[1][2]] == [(), (), (), (0,), ()]


def test_a_second_backward_without_hold_is_refused():
    def work(group):
        net, exchange = Net(), Vote(group)
        Lion(net.parameters(), exchange=exchange)
        exchange.begin(0)
        net(batch(0, 0), True).backward()
        (net.never.sum() + net(batch(0, 0))).backward()  # the bucket is full, and goes
        with pytest.raises(RuntimeError, match="hold"):
            net(batch(0, 1)).backward()
        exchange.finish()
        exchange.close()

    on_ranks(1, work)
