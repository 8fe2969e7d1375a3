"""Belady with bypass against exhaustive search, and against the bound for samples that are used once an epoch."""

from functools import cache

import numpy as np
import pytest

from ensemble_ml.loading.order import epoch_order
from ensemble_ml.loading.unit_plan import NEVER, decide, next_uses


def fewest_reads(chunks: tuple[int, ...], capacity: int) -> int:
    """The least number of misses of any policy for chunks of one size, by trying every content of the cache."""

    @cache
    def best(use: int, held: frozenset[int]) -> int:
        if use == len(chunks):
            return 0
        chunk = chunks[use]
        if chunk in held:
            return best(use + 1, held)
        choices = [held]  # bypass
        if len(held) < capacity:
            choices.append(held | {chunk})
        choices += [held - {victim} | {chunk} for victim in held] if capacity else []
        return 1 + min(best(use + 1, after) for after in choices)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_no_policy_reads_less(seed):
    rng = np.random.default_rng(seed)
    chunks = rng.integers(0, 5, 14)
    capacity = int(rng.integers(0, 5))
    found = decide(chunks, np.ones(5, int), capacity)
    assert int((~found.hit).sum()) == fewest_reads(tuple(chunks.tolist()), capacity)


def replay(chunks, sizes, capacity, found):
    """Do what the decisions say, and check that it can be done."""
    held: set[int] = set()
    dropped: dict[int, list[int]] = {}
    for use, chunk in found.dropped:
        dropped.setdefault(use, []).append(chunk)
    for use, chunk in enumerate(chunks.tolist()):
        for victim in dropped.get(use, []):
            held.remove(victim)
        assert (chunk in held) == found.hit[use]
        if found.keep[use]:
            held.add(chunk)
        assert sum(sizes[list(held)]) <= capacity


@pytest.mark.parametrize("seed", range(20))
def test_decisions_never_overfill_and_can_be_carried_out(seed):
    rng = np.random.default_rng(seed)
    chunks, sizes = rng.integers(0, 30, 500), rng.integers(1, 9, 30)
    capacity = int(rng.integers(0, sizes.sum() + 20))
    found = decide(chunks, sizes, capacity)
    replay(chunks, sizes, capacity, found)
    assert sizes[chunks[~found.hit]].sum() >= sizes[np.unique(chunks)].sum()


def test_once_an_epoch_it_reaches_the_bound():
    samples, epochs, held = 20, 6, 7
    chunks = np.concatenate([epoch_order(3, epoch, samples) for epoch in range(epochs)])
    found = decide(chunks, np.ones(samples, int), held)
    assert int((~found.hit).sum()) == samples + (epochs - 1) * (samples - held)


def test_next_uses():
    assert next_uses(np.array([4, 2, 4, 4, 2])).tolist() == [2, 4, 3, NEVER, NEVER]
