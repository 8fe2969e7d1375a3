"""Votes that end before all ballots are in: what the weights follow from, replicas, stragglers, bad input."""

import copy
import hashlib
import os
import signal
import socket
import subprocess
import threading
import time

import pytest
import torch
from parallel.ranks import run_ranks, until_gone
from parallel.simulated import on_ranks
from torch import nn

from benchmarks.common.simulated import join_simulated
from ensemble_ml.config import ExchangeName, MomentumSync, OptimConfig
from ensemble_ml.distributed.choice import make_exchange
from ensemble_ml.distributed.communicator import Done
from ensemble_ml.distributed.exchange import Reduction
from ensemble_ml.distributed.hub import Hub, join_hub, opened
from ensemble_ml.distributed.quorum import Quorum, QuorumVote, quorum_of
from ensemble_ml.distributed.voting import Vote
from ensemble_ml.errors import UserError
from ensemble_ml.optim import Lion

LR, DECAY, BETA1, BETA2 = 3e-3, 0.1, 0.9, 0.99


_FIRST = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 3))


def network():
    """The same network on ranks that are threads or forks; none of its gradients is exactly zero."""
    return copy.deepcopy(_FIRST)


def loss(net, rank, step):
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (net(x) - x[:, :3].sin()).square().mean()


def digest(net):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()


def steps_of(exchange, rank, steps, pause=lambda rank, step: None):
    """Train; return the network, the digest of its weights after each step, and which steps this rank missed."""
    net = network()
    optimizer = Lion(net.parameters(), lr=LR, betas=(BETA1, BETA2), weight_decay=DECAY, exchange=exchange)
    digests, missed = [], []
    while len(digests) < steps:
        optimizer.zero_grad(set_to_none=True)
        exchange.begin(len(digests))
        loss(net, rank, len(digests)).backward()
        pause(rank, len(digests))
        exchange.tells = lambda: {"samples": 4.0, "rank": float(rank)}
        while True:
            outcome = exchange.finish()
            assert outcome.finite
            optimizer.step()
            digests.append(digest(net))
            if not outcome.missed:
                break
            missed.append(len(digests) - 1)
    exchange.close()
    return net, digests, missed


def by_hand(script, size):
    """The weights after votes of these ranks, from the definition: a rank that was in a vote begins anew after it."""
    net = network()
    params = list(net.parameters())
    weights = [[p.detach().clone() for p in params]]
    momenta = {rank: [torch.zeros_like(p) for p in params] for rank in range(size)}
    begun = dict.fromkeys(range(size), 0)
    for vote, voters in enumerate(script):
        votes = [torch.zeros_like(p) for p in params]
        for rank in voters:
            for p, value in zip(params, weights[begun[rank]], strict=True):
                p.data.copy_(value)
            grads = torch.autograd.grad(loss(net, rank, begun[rank]), params)
            for total, m, g in zip(votes, momenta[rank], grads, strict=True):
                total += (BETA1 * m + (1 - BETA1) * g).sign()
                m.mul_(BETA2).add_(g, alpha=1 - BETA2)
            begun[rank] = vote + 1
        old = weights[-1]
        weights.append([w * (1 - LR * DECAY) - LR * v.sign() for w, v in zip(old, votes, strict=True)])
    return weights[-1]


def quorum_vote(group, ballots, bound, script=None, **settings):
    exchange = QuorumVote(group, Quorum(ballots, bound, 60.0), join_simulated, **settings)
    exchange.script = script
    return exchange


def test_weights_follow_from_who_was_in_each_vote():
    """Odd numbers of voters, so that no tie falls; the reference is written from the definition alone."""
    script = [(0, 1, 2), (2, 3, 4), (0, 1, 3), (0, 1, 2), (0, 1, 2, 3, 4), (1, 2, 4), (1, 2, 4), (0, 1, 2, 3, 4)]

    def work(group):
        return steps_of(quorum_vote(group, 3, 100, dict(enumerate(script))), group.rank, len(script))

    found = on_ranks(5, work)
    assert len({digests[-1] for _, digests, _ in found}) == 1
    assert found[4][2] == [0, 2, 3]
    assert found[0][2] == [1, 5, 6]
    for own, wanted in zip(found[0][0].parameters(), by_hand(script, 5), strict=True):
        assert torch.allclose(own, wanted, rtol=0, atol=1e-6)  # a single other sign would make 2 LR = 6e-3


@pytest.mark.parametrize("bits", [1, 4])
def test_with_all_ballots_it_is_the_synchronous_vote_bit_for_bit(bits):
    settings = {"bits": bits, "clip": 0.5}

    def waiting(group):
        return steps_of(Vote(group, bucket_mb=4e-4, **settings), group.rank, 6)[1]

    def quorum(group):
        return steps_of(quorum_vote(group, 4, 3, **settings), group.rank, 6)[1]

    assert on_ranks(4, quorum) == on_ranks(4, waiting)


def straggling(session, steps, bits):
    """Rank 3 sleeps half a second in its first two gradients."""
    record = []
    config = OptimConfig(exchange=ExchangeName.vote, quorum="3", bound=8, bits=bits)
    exchange = make_exchange(config, session.topology, reduction=Reduction.mean)
    exchange.record = lambda vote, ranks: record.append((vote, ranks))
    slow = iter([0.5, 0.5])

    def pause(rank, step):
        if rank == 3:
            time.sleep(next(slow, 0.0))

    _, digests, missed = steps_of(exchange, session.topology.rank, steps, pause)
    return digests, missed, record


@pytest.mark.parametrize("bits", [1, 2])
def test_four_processes_pass_a_straggler_by_and_stay_equal_bit_for_bit(bits):
    found = run_ranks(straggling, 4, 24, bits)
    digests, _, record = found[0]
    assert len(digests) == 24 and len(set(digests)) == 24
    assert all(other == digests and log == record for other, _, log in found)
    assert [vote for vote, _ in record] == list(range(24))
    late = found[3][1]
    assert {0, 1, 2} <= set(late), "the straggler was waited for"
    assert all((3 in ranks) == (vote not in late) for vote, ranks in record)
    assert all(len(ranks) >= 3 for _, ranks in record)
    assert all(ranks == (0, 1, 2, 3) for vote, ranks in record if (vote + 1) % 8 == 0)


def dies(session, how):
    """Rank 2 is killed or stopped in its sixth gradient; the bound is beyond the end, so only the end is a meeting."""
    config = OptimConfig(exchange=ExchangeName.vote, quorum="2", bound=40)
    exchange = make_exchange(config, session.topology, reduction=Reduction.mean)
    others_leave = until_gone(session, 0, 1)

    def pause(rank, step):
        session.step = step
        time.sleep(0.02)
        if rank == 2 and step >= 5:
            # A stopped rank never ends by itself.
            subprocess.Popen(["sh", "-c", f"{others_leave}; kill -KILL {os.getpid()}"])
            os.kill(os.getpid(), how)

    steps_of(exchange, session.topology.rank, 40, pause)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_is_stopped_ends_the_job_and_is_named(how):
    ends = run_ranks(dies, 3, how, statuses=True, silence=2, seconds=15)
    for status, seconds, text in ends[:2]:
        assert status == 70 and seconds < 14 and "rank 2" in text and "no heartbeat for 2 s" in text


def test_heads_tell_all_ranks_the_same_sums():
    def work(group):
        exchange = quorum_vote(group, 2, 100, {0: (0, 2), 1: (0, 1, 2)})
        net = network()
        Lion(net.parameters(), lr=LR, exchange=exchange)
        sums = []
        for step in range(2 - (group.rank == 1)):
            exchange.begin(step)
            loss(net, group.rank, step).backward()
            exchange.tells = lambda: {"samples": 2.0, "rank": 1.5 * group.rank}
            outcome = exchange.finish()
            sums.append((outcome.missed, outcome.sums))
            while outcome.missed:
                outcome = exchange.finish()
                sums.append((outcome.missed, outcome.sums))
        exchange.close()
        return sums

    first, second = {"samples": 4.0, "rank": 3.0}, {"samples": 6.0, "rank": 4.5}
    assert on_ranks(3, work) == [
        [(False, first), (False, second)],
        [(True, first), (False, second)],
        [(False, first), (False, second)],
    ]


def test_a_rank_without_a_sample_has_no_say():
    """Ranks 1 and 2 have no sample: the signs are those of rank 0."""

    def work(group):
        exchange = quorum_vote(group, 3, 100)
        net = network()
        Lion(net.parameters(), lr=LR, exchange=exchange)
        exchange.begin(0)
        (loss(net, 0, 0) * (1 if group.rank == 0 else -1)).backward()
        exchange.tells = lambda: {"samples": float(group.rank == 0)}
        grads = [p.grad.clone() for p in net.parameters()]
        exchange.finish()
        exchange.close()
        return grads, [s.clone() for s in exchange.signs(list(net.parameters()))], exchange.abstains

    found = on_ranks(3, work)
    for grad, sign in zip(found[0][0], found[2][1], strict=True):
        assert torch.equal(grad.sign(), sign)
    assert [abstains for *_, abstains in found] == [False, True, True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ranks_do_not_wait_for_a_hub_that_fails():
    def needed(vote):
        raise MemoryError

    hub = Hub(2, 1, 0, needed)
    hub.put(0, torch.zeros(3, dtype=torch.int64))
    assert [outbox.get(timeout=5) for outbox in hub.outboxes] == [None, None]
    hub.close()


def test_a_ballot_that_does_not_come_is_named():
    hub = Hub(3, 1, 7, lambda vote: 3, seconds=0.2)
    for rank in (0, 2):
        hub.put(rank, torch.tensor([2, 1, 0, 5]))
    with pytest.raises(UserError, match="vote 8 still waits for a ballot of rank 1"):
        opened(hub.outboxes[0].get(timeout=10), 3, 2)
    hub.close()


def test_a_vote_waits_only_from_its_first_ballot_on():
    """Between two votes all ranks may validate, for longer than parallel.timeout; then nobody waits for a ballot."""
    hub = Hub(2, 1, 0, lambda vote: 2, seconds=0.3)
    time.sleep(0.6)
    for rank in (0, 1):
        hub.put(rank, torch.tensor([2, 1, 0, 5]))
    vote, ranks, *_ = opened(hub.outboxes[0].get(timeout=10), 2, 2)
    hub.close()
    assert (vote, ranks) == (0, (0, 1))


class Announcing:
    """The first of four ranks. Once it has announced where its hub is, `greetings(word)` are sent there in turn."""

    rank, size = 0, 4

    def __init__(self, greetings):
        self.greetings, self.connections = greetings, []

    def broadcast(self, x):
        self.others = threading.Thread(target=self.connect, args=x.tolist(), daemon=True)
        self.others.start()
        return Done()

    def connect(self, port, *word):
        for greeting in self.greetings(bytes(word)):
            self.connections.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            self.connections[-1].sendall(greeting)


@pytest.mark.parametrize("ranks", [(2,), (2, 1, 3)])
def test_ranks_that_do_not_reach_the_hub_are_named(ranks):
    def greetings(word):
        yield bytes(len(word)) + (1).to_bytes(8, "little")  # another secret
        for rank in (0, 4, 2**63, 2, *ranks):  # no other ranks of the job, and one that comes twice
            yield word + rank.to_bytes(8, "little")

    hub, group = Hub(4, 1, 0, lambda vote: 4), Announcing(greetings)
    if ranks == (2,):
        with pytest.raises(UserError, match=r"rank 1, 3 did not connect to rank 0 at port \d+ within 2 s"):
            join_hub(group, lambda: hub, 2.0)
    else:
        link = join_hub(group, lambda: hub, 100.0)
        group.others.join()
        refused = group.connections[:4] + group.connections[5:6]
        assert [connection.recv(1) for connection in refused] == [b""] * 5
        link.close()
    assert hub.outboxes[0].get(timeout=10) is None
    group.others.join()
    assert group.connections[4].recv(1) == b""


@pytest.mark.parametrize("text, ranks, ballots", [("all", 5, 5), ("auto", 4, 3), ("auto", 2, 2), ("2", 4, 2)])
def test_number_of_ballots(text, ranks, ballots):
    assert quorum_of(text, ranks) == ballots


@pytest.mark.parametrize(
    "text, ranks, message",
    [
        ("5", 4, "larger than the number of ranks; give 4"),
        ("1", 4, "fewer than half of 4 ranks"),
        ("2", 1, "ranks; give 1"),
    ],
)
def test_numbers_of_ballots_that_cannot_decide(text, ranks, message):
    with pytest.raises(UserError, match=message):
        quorum_of(text, ranks)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"exchange": ExchangeName.allreduce, "quorum": "3"}, "optim.quorum=3: exchange=allreduce ignores it"),
        ({"exchange": ExchangeName.lion_cub, "quorum": "auto"}, "optim.quorum=auto: exchange=lion_cub"),
        ({"exchange": ExchangeName.vote, "quorum": "most"}, "optim.quorum=most: all, auto, or a number"),
        ({"exchange": ExchangeName.vote, "quorum": "0"}, "optim.quorum=0"),
        ({"exchange": ExchangeName.vote, "quorum": 3, "bound": 0}, "optim.bound=0: must be 1 or more"),
        ({"exchange": ExchangeName.vote, "bound": 5}, "optim.bound=5: quorum=all waits in every vote"),
        ({"exchange": ExchangeName.vote, "replay": "a"}, "optim.replay=a: quorum=all has nothing to repeat"),
        ({"exchange": ExchangeName.vote, "quorum": 3, "hierarchical": True}, "neither hierarchical nor momentum_sync"),
        ({"exchange": ExchangeName.vote, "quorum": 3, "momentum_sync": MomentumSync.every}, "neither hierarchical"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(UserError, match=message):
        OptimConfig(**settings)
