"""Draw the order of init times and the members of each sample, as pure functions of the seed.

Every draw uses a counter-based random generator (Philox: Salmon et al. 2011, doi:10.1145/2063384.2063405). Its counter
holds the epoch and the sample, so the random words of any epoch and sample are computed directly, without drawing those
before them. A resumed run and a loader that plans its reads therefore know all later draws.

NumPy guarantees that the raw words of a bit generator never change, but it gives no such guarantee for
`Generator.permutation`. This module therefore sorts raw words itself, so a seed always gives the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from ensemble_ml.errors import UserError


class Stream(IntEnum):
    """An independent random sequence under one seed.

    The numbers must never change, because another number gives other draws from the same seed.
    """

    DATES = 1
    MEMBERS = 2
    TRAINERS = 3
    PAIRS = 4
    WITHHELD = 5


def words(seed: int, stream: Stream, epoch: int, sample: int, count: int) -> np.ndarray:
    """Return raw words of Philox that depend on (seed, stream, epoch, sample) alone, (count,) uint64.

    The seed is taken modulo 2^64. Streams keep draws for different purposes independent.
    """
    # Philox adds 1 to the lowest word of the counter for each block of output. Sample and epoch are put into the words
    # above it, so that the sequences of two samples never overlap.
    counter = np.array([0, sample, epoch, 0], np.uint64)
    key = np.array([seed % 2**64, int(stream)], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the order in which an epoch visits its samples, a permutation (n,) int64 of 0 to n - 1.

    The order is a stable argsort of raw random words. The last few results are cached, because every step of an epoch
    asks for the same order. The array is shared and read-only.
    """
    order = np.argsort(words(seed, Stream.DATES, epoch, 0, n), kind="stable")
    order.flags.writeable = False
    return order


def member_subset(
    seed: int, epoch: int, sample: int, n_members: int, sizes: Sequence[int], there: np.ndarray | None = None
) -> np.ndarray:
    """Draw which members a sample shows in an epoch: their positions, ascending, (size,) int64.

    First the number of members is drawn, then the members. The random order covers all `n_members` of the full
    ensemble, and members that the sample lacks are skipped. A member that is missing from another sample therefore
    changes nothing here.

    A number that is listed twice in `sizes` is drawn twice as often. Numbers above that of the members of the sample
    are ignored. `there` are the ascending positions of the members that this sample has; None stands for all.

    Raises:
        UserError: The sample has fewer members than every size in `sizes`.
    """
    most = n_members if there is None else len(there)
    allowed = [size for size in sizes if size <= most]
    if not allowed:
        raise UserError(f"data.members={list(sizes)}: all are too large; at most {most} members can be drawn")
    drawn = words(seed, Stream.MEMBERS, epoch, sample, n_members + 1)
    size = allowed[int(drawn[0] % np.uint64(len(allowed)))]
    order = np.argsort(drawn[1:], kind="stable")
    # Skip absent members only after the order is drawn. Drawing among the present ones would change the whole subset
    # whenever one member is missing.
    if most < n_members:
        among = np.zeros(n_members, bool)
        among[there] = True
        order = order[among[order]]
    return np.sort(order[:size])


def withheld_member(seed: int, turn: int, date: int, there: np.ndarray) -> int:
    """Draw the member of a date that stands for the truth, and that no sample of this turn may show.

    `turn` is 0 for fits and validation, so that they always use the same member, and 1 + the epoch for training.
    `there` are the positions of the members that are complete on the date, one or more.
    """
    return int(there[int(words(seed, Stream.WITHHELD, turn, date, 1)[0] % np.uint64(len(there)))])


@dataclass(frozen=True)
class Order:
    """The samples of every step of a run.

    An epoch visits all `n` samples once, in global batches of `batch_size`; the last batch of an epoch may be shorter.
    """

    seed: int
    n: int
    batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of global batches in an epoch."""
        return -(-self.n // self.batch_size)

    def samples(self, step: int) -> int:
        """Return the number of samples in a global step of the run, counted from 0."""
        return min(self.batch_size, self.n - step % self.steps_per_epoch * self.batch_size)

    def epoch(self, epoch: int) -> np.ndarray:
        """Return the samples of an epoch in their order, (n,) int64."""
        return epoch_order(self.seed, epoch, self.n)

    def step(self, step: int) -> tuple[int, np.ndarray]:
        """Return the epoch of a global step, and the samples of its global batch, (at most batch_size,) int64."""
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self.batch_size
        return epoch, self.epoch(epoch)[first : first + self.batch_size]
