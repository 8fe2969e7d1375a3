"""Choose copies of samples that other ranks hold, for memory that is left over.

A rank copies samples in the order of their first use, and asks its peers for each copy only once. The choice is a pure
function of the plan, so every rank knows all copies.

Axes: A uses, F samples, N copies, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NOBODY = -1


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies that all ranks keep.

    Attributes:
        keys: (N,) rank * F + sample of each copy, ascending.
        offset: (N,) byte at which each copy begins in the memory of its rank.
        count: Number of samples, F.
    """

    keys: np.ndarray
    offset: np.ndarray
    count: int

    def of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples that `rank` copies, (n,) ascending, and their offsets, (n,)."""
        here = slice(*np.searchsorted(self.keys, [rank * self.count, (rank + 1) * self.count]))
        return self.keys[here] - rank * self.count, self.offset[here]

    def find(self, user: np.ndarray, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the uses whose own rank keeps a copy of the sample.

        Args:
            user: (A,) rank of each use.
            sample: (A,) sample of each use.

        Returns:
            (A,) bool, whether the user keeps a copy, and (A,) the place of the copy in `keys` (0 where there is none).
        """
        wanted = user.astype(np.int64) * self.count + sample
        place = np.searchsorted(self.keys, wanted)
        place[place == len(self.keys)] = 0
        found = self.keys[place] == wanted if len(self.keys) else np.zeros(len(wanted), bool)
        return found, np.where(found, place, 0)


def choose(
    users: Callable[[int], tuple[np.ndarray, np.ndarray]],
    epochs: int,
    owner: np.ndarray,
    sizes: np.ndarray,
    used: np.ndarray,
    room: int,
) -> Copies:
    """Fill the memory that is left on each rank with samples of other ranks, in the order of their first use.

    Args:
        users: Function from an epoch to its samples (F,) in the order of use, and the rank that uses each (F,).
        epochs: Number of epochs.
        owner: (F,) rank that holds each sample, or `NOBODY`, for samples that are not copied.
        sizes: (F,) bytes of each sample.
        used: (P,) bytes of each rank's memory that its own samples take.
        room: Bytes of memory of each rank.
    """
    count, sizes = len(owner), np.asarray(sizes, np.int64)
    end, keys, offsets = used.astype(np.int64).copy(), np.empty(0, np.int64), np.empty(0, np.int64)
    for epoch in range(epochs):
        if not len(sizes) or (room - end).max() < sizes.min():
            break
        samples, user = users(epoch)
        other = (owner[samples] != NOBODY) & (owner[samples] != user)
        samples, user = samples[other], user[other]
        key = user.astype(np.int64) * count + samples
        new = ~np.isin(key, keys)
        # Sort by rank and keep the order of use within a rank. A cumulative sum then gives the offset of each copy
        # without a loop over samples.
        order = np.argsort(user[new], kind="stable")
        samples, user, key = samples[new][order], user[new][order], key[new][order]
        total = np.cumsum(sizes[samples])
        first = np.searchsorted(user, user)  # index of the first use of the same rank
        start = end[user] + total - sizes[samples] - (total - sizes[samples])[first]
        fits = start + sizes[samples] <= room  # a prefix of each rank's uses, because offsets ascend
        keys, offsets = np.append(keys, key[fits]), np.append(offsets, start[fits])
        np.maximum.at(end, user[fits], (start + sizes[samples])[fits])
    order = np.argsort(keys)
    return Copies(keys[order], offsets[order], count)
