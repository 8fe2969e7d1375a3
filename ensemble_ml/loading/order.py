"""Which start dates and which members a step reads: pure functions of the seed.

Every draw is counter-based (Philox, Salmon et al. 2011, doi:10.1145/2063384.2063405): the words of any epoch and sample
come directly, without those before them, so a resumed run and a reader that plans ahead see the same future. Raw words
are sorted here, because NumPy promises the words of a bit generator for ever, but not its permutations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from ensemble_ml.errors import UserError


class Stream(IntEnum):
    """Separate sequences under one seed; the numbers are part of what a seed means."""

    DATES = 1
    MEMBERS = 2


def words(seed: int, stream: Stream, epoch: int, sample: int, count: int) -> np.ndarray:
    """Return `count` raw uint64 words that belong to (seed, stream, epoch, sample) alone."""
    # The lowest word of the counter advances with each draw; those above it hold the place.
    counter = np.array([0, sample, epoch, 0], np.uint64)
    key = np.array([seed % 2**64, int(stream)], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


@lru_cache(maxsize=4)  # of a few threads and epochs: each step would draw its epoch anew
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Order of `n` samples in an epoch: a stable argsort of raw words, (n,) int64, not to be written to."""
    order = np.argsort(words(seed, Stream.DATES, epoch, 0, n), kind="stable")
    order.flags.writeable = False
    return order


def member_subset(
    seed: int, epoch: int, sample: int, n_members: int, sizes: Sequence[int], there: np.ndarray | None = None
) -> np.ndarray:
    """Draw which members a sample shows in an epoch: sorted positions, (size,) int64.

    The size is drawn from those of `sizes` that the members allow, each as likely as its count in the list. `there`
    are the positions of the members that the sample has, None for all `n_members`: the members' order is drawn over
    all of them and those that are not there are passed over, so a gap elsewhere changes nothing here.

    Raises:
        UserError: no size fits.
    """
    most = n_members if there is None else len(there)
    allowed = [size for size in sizes if size <= most]
    if not allowed:
        raise UserError(f"data.members={list(sizes)}: no size fits; at most {most} members can be drawn")
    drawn = words(seed, Stream.MEMBERS, epoch, sample, n_members + 1)
    size = allowed[int(drawn[0] % np.uint64(len(allowed)))]
    order = np.argsort(drawn[1:], kind="stable")
    if most < n_members:
        among = np.zeros(n_members, bool)
        among[there] = True
        order = order[among[order]]
    return np.sort(order[:size])


@dataclass(frozen=True)
class Order:
    """The samples of every step: epochs of `n` samples in batches of `batch_size`, the last of an epoch maybe short."""

    seed: int
    n: int
    batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return -(-self.n // self.batch_size)

    def samples(self, step: int) -> int:
        """How many samples global `step` (counted from 0) has."""
        return min(self.batch_size, self.n - step % self.steps_per_epoch * self.batch_size)

    def epoch(self, epoch: int) -> np.ndarray:
        """Samples of `epoch` in their order, (n,)."""
        return epoch_order(self.seed, epoch, self.n)

    def step(self, step: int) -> tuple[int, np.ndarray]:
        """Epoch of global `step` (counted from 0) and its samples (at most batch_size,)."""
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self.batch_size
        return epoch, self.epoch(epoch)[first : first + self.batch_size]
