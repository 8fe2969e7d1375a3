"""Copies of samples that other ranks hold, in room that is left: chosen by next use, so that peers are asked once.

A pure function of the plan, as everything in it: all ranks know all copies.

Axes: F samples, N copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NOBODY = -1


@dataclass(frozen=True, eq=False)
class Copies:
    """`keys` (N,) ascending are rank * F + sample; `offset` (N,) is where each lies in its rank's memory."""

    keys: np.ndarray
    offset: np.ndarray
    count: int  # F

    def of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples (n,) that `rank` copies, ascending, and their offsets (n,)."""
        here = slice(*np.searchsorted(self.keys, [rank * self.count, (rank + 1) * self.count]))
        return self.keys[here] - rank * self.count, self.offset[here]

    def find(self, user: np.ndarray, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which uses (A,) are of a copy of their user, and the place of each in `keys` (0 where it is none)."""
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
    """Fill what is left of each rank's memory with samples of others, in the order in which it uses them first.

    Args:
        users: epoch -> samples (F,) in the order of use, and the rank that uses each (F,).
        epochs: how many.
        owner: (F,) who holds each sample.
        sizes: (F,) their bytes.
        used: (P,) bytes of each rank's memory that its own samples take.
        room: bytes of memory of each rank.
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
        order = np.argsort(user[new], kind="stable")
        samples, user, key = samples[new][order], user[new][order], key[new][order]
        total = np.cumsum(sizes[samples])
        first = np.searchsorted(user, user)  # where the rank's own uses begin
        start = end[user] + total - sizes[samples] - (total - sizes[samples])[first]
        fits = start + sizes[samples] <= room  # a prefix of each rank's uses, because starts ascend
        keys, offsets = np.append(keys, key[fits]), np.append(offsets, start[fits])
        np.maximum.at(end, user[fits], (start + sizes[samples])[fits])
    order = np.argsort(keys)
    return Copies(keys[order], offsets[order], count)
