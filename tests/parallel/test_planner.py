"""The planner: costs by hand, partitions by brute force, bytes against those that communicators count."""

import math
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.small_models import make_spec
from parallel.ranks import run_ranks

from ensemble_ml.config import (
    ExchangeName,
    OptimConfig,
    OptimName,
    ParallelConfig,
    Precision,
    TrainConfig,
)
from ensemble_ml.distributed import Mesh, Topology, choice, solo
from ensemble_ml.distributed.choice import make_exchange
from ensemble_ml.distributed.costs import (
    AT_ONCE,
    Cost,
    Link,
    Piece,
    exposed,
    halo_seconds,
    measured_links,
    reckoned,
    step_cost,
)
from ensemble_ml.distributed.echo import Message, Phase, exchange_traffic
from ensemble_ml.distributed.planner import (
    Candidate,
    _divisors,
    candidates,
    check_any,
    degrees,
    in_use,
    pick,
    rank_memory,
    reasons,
)
from ensemble_ml.distributed.topology import make_shard, own_part
from ensemble_ml.errors import UserError
from ensemble_ml.models import Speed
from ensemble_ml.models.ledger import Ledger
from ensemble_ml.optim import build
from ensemble_ml.training import probing
from ensemble_ml.training.rehearsal import Rehearsal, trace
from ensemble_ml.training.state import Average, State

AUTO = ParallelConfig(data="auto", lat="auto", lon="auto")
LAT, MODEL = ("lat",), ("data", "lat", "lon")


def small_spec(rows, columns, **settings):
    """One field of each kind: a trace takes as long as a step has operations, whatever its size."""
    return make_spec(rows, columns, variables=("t",), surface=("tp",), **settings)


def half_degree(topology):
    return make_shard(topology, (361, 720), 4).shape


def halo_message(sent, received=0):
    return Message(LAT, "all_to_all", 2, sent, received, Phase.forward)


def sum_message(sent, ranks):
    return Message(MODEL, "all_reduce", ranks, sent, sent, Phase.forward)


def test_cost_of_a_step_by_hand():
    links = {LAT: Link(1e-4, 1e-8), (): Link(1e-3, 1e-9)}
    messages = [halo_message(1000, 3000), halo_message(500, 500), sum_message(16, 4)]
    cost = step_cost(Piece(0.5, 0.3, (0.5, 1.0)), messages, [[sum_message(10**8, 4)]] * 2, links, overlap=True)
    assert cost.halo == pytest.approx(2e-4 + 3e-5 + 2e-4 + 5e-6)
    assert cost.norm == pytest.approx(2e-3 * 2 + 16e-9)
    bucket = 2e-3 * 2 + 0.1
    assert cost.exchange == pytest.approx(2 * bucket)
    # The first leaves at 0.15 s and is done before the end of backward, at 0.3 s, when the second leaves.
    assert cost.exposed == pytest.approx(bucket)
    assert cost.seconds == pytest.approx(0.5 + cost.halo + cost.norm + bucket)
    assert cost.sent == 1000 + 500 + 16 + 2 * 10**8


def test_messages_that_travel_at_once_have_a_time_of_their_own():
    def message(axis, sent, received, wave):
        return Message((axis,), "all_to_all", 2, sent, received, Phase.forward, wave)

    apart = {("lat",): Link(1e-4, 1e-8), ("lon",): Link(3e-4, 1e-8)}
    messages = [message("lat", 1000, 3000, 0), message("lon", 500, 0, 0), message("lon", 100, 100, 1)]
    assert halo_seconds(messages, apart) == pytest.approx(2e-4 + 3e-5 + 6e-4 + 5e-6 + 6e-4 + 1e-6)
    together = apart | {AT_ONCE: Link(4e-4, 2e-8)}
    assert halo_seconds(messages, together) == pytest.approx(8e-4 + 3000 * 2e-8 + 6e-4 + 1e-6)


@pytest.mark.slow
def test_a_trace_knows_what_travels_at_once():
    """Rows of the neighbours and rows across the poles do; with whole latitudes these are one message with columns."""

    def waves(**topology):
        found = defaultdict(list)
        for message in trace(
            TrainConfig(run="a"), small_spec(17, 16), Topology(**topology), 1, Speed()
        ).traffic.messages:
            if message.kind == "all_to_all":
                found[message.wave].append(message.axes)
        return list(found.values())

    assert {tuple(sorted(wave)) for wave in waves(lat=2, lon=2)} == {(("lat",), ("lon",)), (("lon",),)}
    assert {tuple(wave) for wave in waves(lon=2)} == {(("lon",),)}
    assert {tuple(wave) for wave in waves(lat=2)} == {(("lat",),)}


def test_what_a_line_takes_unasked_costs_no_time():
    assert Link(1e-4, 1e-8, free=32_000).exchange(30_000) == pytest.approx(2e-4)
    assert Link(1e-4, 1e-8, free=32_000).exchange(132_000) == pytest.approx(2e-4 + 1e-3)


@pytest.mark.parametrize(
    ("times", "ready", "left"),
    [([], (1.0,), 0), ([1, 1], (0.0,), 0), ([3, 3], (0.0, 0.1), 2), ([1, 5], (0.5, 0.5), 4), ([2], (1.0,), 2)],
)
def test_exposed_exchange(times, ready, left):
    assert exposed(times, ready, backward=4.0) == pytest.approx(left)


def piece(seconds):
    return Piece(seconds, seconds / 2, (0.5, 1.0))


def test_what_a_step_takes_whatever_its_size_does_not_shrink():
    known = [(100.0, piece(0.3)), (200.0, piece(0.5)), (400.0, piece(0.9))]  # 0.1 + 0.002 a unit
    found = reckoned(known, 25.0)
    assert found.seconds == pytest.approx(0.15) and found.backward == pytest.approx(0.075)
    assert found.ready == (0.5, 1.0) and not found.measured
    assert reckoned(known, 800.0).seconds == pytest.approx(1.7)


@pytest.mark.parametrize(
    ("known", "at_50"),
    [
        ([(100.0, 0.3)], 0.15),  # one size tells nothing of a
        ([(100.0, 0.3), (100.0, 0.3)], 0.15),
        ([(100.0, 0.1), (200.0, 0.4)], 0.05),  # a below zero: in proportion, from the nearest
        ([(100.0, 0.4), (200.0, 0.1)], 0.4),  # larger and faster is noise: all the same
    ],
)
def test_lines_that_no_machine_has(known, at_50):
    assert reckoned([(flops, piece(seconds)) for flops, seconds in known], 50.0).seconds == pytest.approx(at_50)


@given(
    st.floats(0, 1e-3), st.floats(0, 1e-7), st.floats(0, 1), st.floats(0, 1),
    st.lists(st.integers(0, 10**6), max_size=6), st.lists(st.integers(0, 10**7), max_size=3),
)  # fmt: skip
def test_better_links_never_cost_more(alpha, beta, less, lower, halos, buckets):
    def seconds(alpha, beta):
        exchanged = [[sum_message(size, 8)] for size in buckets]
        piece = Piece(0.1, 0.06, (0.3, 0.8, 1.0))
        links = {(): Link(alpha, beta)}
        return step_cost(piece, [halo_message(size) for size in halos], exchanged, links, overlap=True).seconds

    assert seconds(alpha * less, beta * lower) <= seconds(alpha, beta) * (1 + 1e-12)


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=8))
def test_pick_is_the_fastest(seconds):
    found = [Candidate(1, 1, i + 1, cost=Cost(s, 0, 0, 0, 0, 0)) for i, s in enumerate(seconds)]
    found.append(Candidate(9, 9, 9, why="does not fit", cost=Cost(1e-9, 0, 0, 0, 0, 0)))
    assert pick(found).cost.seconds == min(seconds)


@pytest.mark.parametrize("ranks", [1, 6, 16, 30])
def test_every_factorisation_once(ranks):
    found = list(degrees(ranks, AUTO))
    numbers = range(1, ranks + 1)
    wanted = {(d, a, o) for d in numbers for a in numbers for o in numbers if d * a * o == ranks}
    assert set(found) == wanted and len(found) == len(wanted)
    some = ParallelConfig(data="auto", lat=2, lon="auto")
    assert set(degrees(ranks, some)) == {f for f in wanted if f[1] == 2}


def test_divisors():
    for n in range(1, 400):
        assert _divisors(n) == [k for k in range(1, n + 1) if n % k == 0]


def test_what_does_not_fit_says_why():
    found = candidates(46, 2, AUTO, half_degree)
    why = {c.degrees: c.why for c in found}
    assert why[(1, 23, 2)] == "" and why[(2, 23, 1)] == ""
    assert "361 rows make 23 blocks of 16" in why[(1, 46, 1)]
    assert why[(46, 1, 1)] == "parallel.data=46: batch_size=2 does not divide; use a multiple of 46"
    assert "720 columns make 45 blocks of 16" in why[(1, 1, 46)]
    assert len(reasons(found)) == sum(bool(c.why) for c in found)


def test_ranks_that_nothing_fits():
    def works(n):
        return any(not c.why for c in candidates(n, 1, AUTO, half_degree))

    with pytest.raises(UserError, match=r"^47 ranks: none of 3 partitions fits .*; 46 or 48 ranks would do$"):
        check_any(candidates(47, 1, AUTO, half_degree), 47, works)
    with pytest.raises(UserError, match=r"^parallel.lat=3 parallel.lon=1: do not divide 4 ranks"):
        candidates(4, 1, ParallelConfig(lat=3), half_degree)


def test_the_busiest_rank_has_two_neighbours_and_a_largest_part():
    for lat in (1, 2, 3, 4, 6):
        rank = Candidate(2, lat, 1).busiest(half_degree)
        shapes = [half_degree(rank.at(r)) for r in range(rank.size)]
        assert half_degree(rank) == max(shapes)
        equal = [r.place.lat for r in map(rank.at, range(rank.size)) if half_degree(r) == max(shapes)]
        assert (0 < rank.place.lat < lat - 1) == any(0 < row < lat - 1 for row in equal if row == 1)


@pytest.mark.parametrize(("lat", "lon"), [(1, 3), (2, 3), (3, 3)])
def test_the_busiest_rank_may_be_the_last_of_its_row(lat, lon):
    """60 columns in blocks of 16 are 16, 16 and 28."""

    def shard(topology):
        return make_shard(topology, (64, 60), 4).shape

    rank = Candidate(1, lat, lon).busiest(shard)
    assert math.prod(shard(rank)) == max(math.prod(shard(rank.at(r))) for r in range(rank.size))
    assert shard(rank)[1] == 28


def test_memory_is_counted_as_its_limit_is(monkeypatch):
    sizes = [int(n) * os.sysconf("SC_PAGE_SIZE") for n in Path("/proc/self/statm").read_text().split()[:2]]
    cpu = torch.device("cpu")
    assert in_use(cpu, 10**9) == pytest.approx(sizes[1], rel=0.2)
    monkeypatch.setattr("ensemble_ml.distributed.planner.resource.getrlimit", lambda _: (10**9, 10**9))
    assert rank_memory(1, cpu) == 10**9  # `ulimit -v`: of addresses, of which torch takes many more
    assert in_use(cpu, 10**9) == pytest.approx(sizes[0], rel=0.2) and sizes[0] > 1.5 * sizes[1]


def test_memory_of_a_ledger_by_hand():
    kept = torch.ones(1000)
    with Ledger() as ledger:
        x = kept * 2  # 4,000 bytes
        y = x + x  # 4,000
        del x
        z = y.view(10, 100)  # the same storage
        z = z.double()  # 8,000
    assert ledger.peak == 12_000 and ledger.now == 12_000
    del y, z


OPTIMS = {
    "allreduce": OptimConfig(bucket_mb=0.01),
    "bf16": OptimConfig(exchange=ExchangeName.bf16, bucket_mb=0.01),
    "vote": OptimConfig(exchange=ExchangeName.vote, bits=2, bucket_mb=0.01),
    "powersgd": OptimConfig(exchange=ExchangeName.powersgd),
}


def count_bytes(session, spec, sent):
    """Per exchange: (bytes that communicators count, bytes that the traced step and exchange send) of this rank.

    `sent`: bytes of the traced step of each rank. Dry runs in one process share what torch keeps of them.
    """
    found, topology = {}, session.topology
    config = TrainConfig(run="a")
    rehearsal = Rehearsal(config, spec, session.mesh, 2, Speed())
    before = session.mesh.bytes_sent
    rehearsal.step()
    found["step"] = session.mesh.bytes_sent - before, sent[topology.rank]
    for name, optim in OPTIMS.items():
        exchange = make_exchange(optim, topology)
        build(optim, rehearsal.model.param_groups(), 1, exchange)
        exchange.ready()  # where the ranks compare their models
        before = exchange.bytes_sent
        exchange.begin(0)
        exchange.finish()
        groups = rehearsal.model.param_groups()
        params = [p for group in groups for p in group["params"]]
        parts, late = (
            [own_part(p) for p in params],
            [bool(group.get("late")) for group in groups for _ in group["params"]],
        )
        buckets, _ = exchange_traffic(optim, [p.shape for p in params], topology, 1, parts, late)
        found[name] = exchange.bytes_sent - before, sum(m.sent for bucket in buckets for m in bucket)
        exchange.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lat", "lon", "data"), [(2, 1, 1), (1, 2, 1), pytest.param(2, 2, 1, marks=pytest.mark.slow), (1, 2, 2)]
)
def test_bytes_are_those_that_communicators_count(lat, lon, data):
    spec, topology = small_spec(17, 16), Topology(lat=lat, lon=lon, data=data)
    ranks = range(topology.size)
    sent = [trace(TrainConfig(run="a"), spec, topology.at(rank), 2, Speed()).traffic.sent for rank in ranks]
    for found in run_ranks(count_bytes, topology.size, spec, sent, lat=lat, lon=lon, data=data):
        for name, (counted, predicted) in found.items():
            assert counted == predicted > 0, name


@pytest.mark.parametrize("bits", [1, 8])
def test_every_bucket_has_its_own_messages(bits):
    """Ballots with their heads to three others, and winners to three others; buckets in the order of backward."""
    optim = OptimConfig(exchange=ExchangeName.vote, bits=bits, bucket_mb=0.001)
    shapes = [torch.Size([n]) for n in (20, 3000, 700)]
    buckets, hidden = exchange_traffic(optim, shapes, Topology(data=4), 1)
    for messages, elements in zip(buckets, (700, 3000, 20), strict=True):
        share = -(-elements // 256)
        assert sum(m.sent for m in messages) == 3 * 8 * ((bits + 1) * share + 2)
    assert hidden


def test_votes_that_a_quorum_ends_are_planned_as_votes_of_all(monkeypatch):
    """A plan has no other ranks, so it may not wait for them at the hub of the votes."""
    monkeypatch.setattr(choice, "patience", lambda: 1.0)
    topology, votes = Topology(data=4), OptimConfig(exchange=ExchangeName.vote)
    found = [exchange_traffic(o, [torch.Size([700])], topology, 1) for o in (replace(votes, quorum="3"), votes)]
    assert found[0] == found[1]


def test_steps_of_a_quorum_are_timed_without_its_other_ranks(monkeypatch):
    monkeypatch.setattr(choice, "patience", lambda: 1.0)
    config = TrainConfig(run="a", optim=OptimConfig(exchange=ExchangeName.vote, quorum="auto", bound=5))
    shape = probing.Shape(Topology(data=4), 1)
    job = probing.Job(config, small_spec(9, 16), (shape,), 0.01, None, 0.0, False)
    assert probing._timed(job, shape, solo(), 0.01)


@pytest.mark.slow
def test_a_traced_step_holds_what_a_real_one_does():
    spec, config = small_spec(17, 16), TrainConfig(run="a")
    for speed in (Speed(), Speed(Precision.float64)):
        rehearsal = Rehearsal(config, spec, Mesh(), 2, speed)
        with Ledger() as ledger:
            rehearsal.step()
        traced = trace(config, spec, Topology(), 2, speed)
        assert traced.activations == pytest.approx(ledger.peak, rel=0.02)
        held = [*rehearsal.model.parameters(), *rehearsal.model.buffers()]
        whole = sum(t.numel() * t.element_size() for t in held)
        assert traced.resident == whole
    even = small_spec(32, 16, pole_row=False)
    parts = [trace(config, even, Topology(lat=n), 2, Speed()).activations for n in (1, 2, 4)]
    assert 1.4 < parts[0] / parts[1] < 2 and 1.3 < parts[1] / parts[2] < 2  # halos and gradients are not shared out


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OptimName))
def test_a_checkpoint_that_is_written_meanwhile_takes_memory(name):
    """Copies of all that it holds, on the first rank, while the training goes on."""
    spec, config = small_spec(17, 16), TrainConfig(run="a", optim=OptimConfig(name=name), average=0.5)
    rehearsal = Rehearsal(config, spec, Mesh(), 2, Speed())
    optimizer, schedule = build(config.optim, rehearsal.model.param_groups(), 1)
    rehearsal.step()
    optimizer.step()
    state = State(rehearsal.model, optimizer, schedule, 1, torch.zeros(1), Average(rehearsal.model, 0.5))
    state_dict, training, parts = state.tensors()
    assert parts is None  # no weight is sharded
    held = sum(t.numel() * t.element_size() for tensors in (state_dict, training) for t in tensors.values())
    traced = trace(config, spec, Topology(), 2, Speed())
    assert traced.snapshot == pytest.approx(held, rel=0.01)
    parts = traced.activations, traced.resident, traced.state, traced.loading, traced.snapshot
    assert traced.memory == sum(parts)


AFTER_A_REHEARSAL = """
import torch
from models.small_models import make_spec
from ensemble_ml.config import TrainConfig
from ensemble_ml.distributed import Topology
from ensemble_ml.fields import Family
from ensemble_ml.models import Speed
from ensemble_ml.distributions import location_of_mean
from ensemble_ml.training.rehearsal import trace

trace(TrainConfig(run="a"), make_spec(17, 16, variables=("t",), surface=("tp",)), Topology(), 2, Speed())
for family in Family:
    found = location_of_mean(family, torch.ones(3), torch.ones(3))
    assert type(found) is torch.Tensor, family
"""


@pytest.mark.slow
def test_nothing_fake_stays_after_a_rehearsal():
    """In a process of its own: tables of the laws, were they made by the rehearsal, would be wrong without a word."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", AFTER_A_REHEARSAL], env=environment, check=True)


def links_of(session):
    return measured_links(session.mesh)


def test_links_are_the_same_on_all_ranks():
    found = run_ranks(links_of, 2, lat=2)
    assert found[0] == found[1] and set(found[0]) == {LAT, ()}
    assert all(0 < link.alpha < 1 and link.beta >= 0 and math.isfinite(link.free) for link in found[0].values())


@pytest.mark.slow
def test_both_axes_at_once_are_measured():
    found = run_ranks(links_of, 4, lat=2, lon=2)
    assert all(links == found[0] for links in found) and set(found[0]) == {LAT, ("lon",), AT_ONCE, ()}
    assert all(0 < link.alpha < 1 and link.beta >= 0 and math.isfinite(link.free) for link in found[0].values())
