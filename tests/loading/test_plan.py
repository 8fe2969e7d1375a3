"""The plan covers every sample once an epoch, holds no duplicate, and reads what the lower bound says."""

import time
from itertools import pairwise

import numpy as np
import pytest

from ensemble_ml.config import Assign
from ensemble_ml.errors import UserError
from ensemble_ml.loading.order import Order
from ensemble_ml.loading.plan import DISK, NOBODY, RAM, Plan, Room, place, to_holders

F, E = 37, 4


def make(ranks=1, share=0.5, assign=Assign.fixed, disk=0.0, sizes=None, batch=8, heads=False):
    sizes = np.full(F, 10) if sizes is None else sizes
    room = [int(part * sizes.sum() / ranks) for part in (share, disk)]
    return Plan(Order(5, F, batch), E, sizes, Room(*room), ranks, assign, heads=heads)


CASES = [(p, c, a) for p in (1, 2, 3, 4, 8) for c in (0, 0.1, 0.5, 1, 2) for a in Assign]


@pytest.mark.parametrize("ranks, share, assign", CASES)
def test_every_sample_once_an_epoch_whoever_computes_it(ranks, share, assign):
    plan = make(ranks, share, assign)
    for epoch in range(E):
        reads = [plan.reads(epoch, rank) for rank in range(ranks)]
        assert sorted(np.concatenate([r.sample for r in reads]).tolist()) == list(range(F))
        for step in range(plan.order.steps_per_epoch):
            number = epoch * plan.order.steps_per_epoch + step
            parts = [dict(zip(r.position[r.step == number], r.sample[r.step == number], strict=True)) for r in reads]
            batch = {k: v for part in parts for k, v in part.items()}
            assert [batch[k] for k in sorted(batch)] == plan.order.step(number)[1].tolist()
            counts = [len(part) for part in parts]
            assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("ranks, share, assign", CASES)
def test_reads_the_bound_but_for_the_ends_of_caches(ranks, share, assign):
    plan = make(ranks, share, assign)
    told = plan.explain()
    assert 0 <= told.storage - told.bound <= (E - 1) * ranks * 10
    # Replay: what nobody holds is read each time, the rest once.
    where, read, warm = plan.placement, 0, set()
    for epoch in range(E):
        for rank in range(ranks):
            for sample in plan.reads(epoch, rank).sample.tolist():
                if where.owner[sample] == NOBODY or sample not in warm:
                    read += 10
                    warm.add(sample)
    assert read == told.storage


@pytest.mark.parametrize("seed", range(10))
def test_caches_hold_no_duplicate_and_are_not_overfilled(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 50, F)
    plan = make(int(rng.integers(1, 5)), float(rng.uniform(0, 1.2)), disk=float(rng.uniform(0, 0.5)), sizes=sizes)
    where, room = plan.placement, {RAM: plan.tiers.ram, DISK: plan.tiers.disk}
    for rank in range(plan.ranks):
        for tier, limit in room.items():
            held = where.held(rank, tier)
            spans = sorted(zip(where.offset[held], sizes[held], strict=True))
            ends = [start + size for start, size in spans]
            assert all(end <= start for end, (start, _) in zip(ends[:-1], spans[1:], strict=True))
            assert not ends or ends[-1] <= limit


@pytest.mark.parametrize("ranks, share, assign", CASES)
def test_heads_reach_the_bound_to_the_byte(ranks, share, assign):
    sizes = np.arange(F) * 7 % 13 + 4
    plan = make(ranks, share, assign, sizes=sizes, heads=True)
    where, told, most = plan.placement, plan.explain(), ranks * plan.tiers.ram
    short = min(most, int(sizes.sum())) - int(where.kept.sum())
    assert short == 0 or (0 < short < (ranks - 1) * 16 and not (where.owner == NOBODY).any())
    assert told.storage == told.bound + (E - 1) * short
    assert told.bound == sizes.sum() + (E - 1) * max(0, sizes.sum() - most)
    heads = np.flatnonzero((where.kept > 0) & (where.kept < sizes))
    assert len(set(where.owner[heads].tolist())) == len(heads)  # no rank holds two
    for rank in range(ranks):
        held = where.held(rank, RAM)
        ends = np.sort(where.offset[held] + where.kept[held])
        assert np.array_equal(ends, np.cumsum(where.kept[held][np.argsort(where.offset[held])]))
        assert not len(ends) or ends[-1] <= plan.tiers.ram
        assert not np.isin(heads, plan.copies.of(rank)[0]).any()
    # Replay: the first use reads the whole, later ones what is not kept.
    read, seen = 0, set()
    for epoch in range(E):
        for sample in np.concatenate([plan.reads(epoch, rank).sample for rank in range(ranks)]).tolist():
            read += int(sizes[sample] - (where.kept[sample] if sample in seen else 0))
            seen.add(sample)
    assert read == told.storage


def test_one_sample_larger_than_all_memory_is_held_by_its_head():
    plan = Plan(Order(0, 3, 1), 5, np.full(3, 100), Room(40), heads=True)
    assert sorted(plan.placement.kept.tolist()) == [0, 0, 40] and not plan.holds_all
    assert plan.explain().storage == 300 + 4 * 260


def test_locality_computes_where_samples_lie():
    fixed, local = make(4, 1.0).explain(), make(4, 1.0, Assign.locality).explain()
    assert local.peers < fixed.peers / 3
    assert local.storage == fixed.storage


def test_locality_keeps_the_slices_as_long_as_they_were():
    given = to_holders(np.array([0, 0, 0, 1, NOBODY, 2]), np.array([2, 2, 2]))
    assert given.tolist() == [0, 0, 1, 1, 2, 2]


def test_resume_on_other_ranks_gives_the_same_global_batches():
    a, b = make(2), make(3, assign=Assign.locality)
    for start in (0, 3, 7):
        for plan in (a, b):
            runs = [list(plan.run(rank, start_step=start)) for rank in range(plan.ranks)]
            for number, parts in enumerate(zip(*runs, strict=True), start):
                assert {step for step, _, _ in parts} == {number}
                batch = {p: s for _, ps, ss in parts for p, s in zip(ps.tolist(), ss.tolist(), strict=True)}
                assert [batch[k] for k in sorted(batch)] == plan.order.step(number)[1].tolist()


def test_hash_is_of_what_decides():
    assert make().hash == make().hash
    others = {make(2).hash, make(share=0.6).hash, make(assign=Assign.locality).hash, make(sizes=np.arange(F) + 1).hash}
    others.add(make(heads=True).hash)
    assert len(others) == 5 and make().hash not in others


@pytest.mark.parametrize("n, batch, ranks", [(1, 8, 4), (5, 8, 2), (9, 4, 3)])
def test_short_batches_and_single_samples(n, batch, ranks):
    plan = Plan(Order(0, n, batch), 2, np.full(n, 3), Room(9), ranks)
    for epoch in range(2):
        assert sum(len(plan.reads(epoch, rank).sample) for rank in range(ranks)) == n


@pytest.mark.parametrize("wrong", [dict(epochs=0), dict(ranks=0), dict(sizes=np.ones(3))])
def test_nonsense_is_refused(wrong):
    good = dict(order=Order(0, 5, 2), epochs=1, sizes=np.ones(5), tiers=Room(1))
    with pytest.raises(UserError, match="plan"):
        Plan(**good | wrong)


def test_plans_a_thousand_ranks_fast():
    # Twenty epochs of 100,000 samples: 1 % of the size that the design names, in 1 % of its minute.
    began = time.process_time()
    plan = Plan(Order(1, 100_000, 4096), 20, np.full(100_000, 10**7), Room(10**9), 1024)
    used = sum(len(plan.reads(epoch, 7).sample) for epoch in range(20))
    assert used == pytest.approx(20 * 100_000 / 1024, rel=0.05)
    assert time.process_time() - began < 6


@pytest.mark.parametrize("heads", [False, True])
def test_a_thousand_ranks_find_place_for_samples_of_all_sizes_fast(heads):
    # Where sizes differ every cache has an end that fits none: a search through all samples for each took 6 s.
    sizes = np.random.default_rng(0).integers(900, 1100, 200_000)
    began = time.process_time()
    where = place(Order(0, len(sizes), 8192), 1024, sizes, Room(100_000), heads=heads)
    assert time.process_time() - began < 2
    assert (where.kept.sum() == 1024 * 100_000) == heads


@pytest.mark.parametrize("ranks, share", [(2, 2.0), (3, 1.7), (4, 4.0), (2, 1.0)])
def test_spare_room_holds_copies_and_asks_peers_once(ranks, share):
    sizes = np.arange(F) % 5 + 8
    plan = make(ranks, share, sizes=sizes)
    where = plan.placement
    peers, kept = 0, [dict(zip(*map(np.ndarray.tolist, plan.copies.of(rank)), strict=True)) for rank in range(ranks)]
    for rank, copies in enumerate(kept):
        own = {int(s): int(where.offset[s]) for s in where.held(rank, RAM)}
        assert not own.keys() & copies.keys()
        spans = sorted((start, start + int(sizes[sample])) for sample, start in (own | copies).items())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert spans[-1][1] <= plan.tiers.ram
        made = set()
        for epoch in range(E):
            for sample in plan.reads(epoch, rank).sample.tolist():
                if where.owner[sample] not in (rank, NOBODY) and sample not in made:
                    peers += int(sizes[sample])
                    if sample in copies:
                        made.add(sample)
        used = set(np.concatenate([plan.reads(epoch, rank).sample for epoch in range(E)]).tolist())
        if share >= ranks:
            assert copies.keys() == used - own.keys()  # whatever it uses is its own, or copied
    assert plan.explain().peers == peers
    assert share == 1 or plan.explain().storage == sizes.sum()
