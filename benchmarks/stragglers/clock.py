"""Stragglers by the clock of a simulation: how long each rank takes for a gradient, and who is then in each vote.

random   in every step, one rank of all, drawn anew, is late by `late` seconds
slow     the last rank always takes twice as long
none     all ranks take `step` seconds
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

KINDS = ("random", "slow", "none")


@dataclass(frozen=True)
class Pace:
    """The time that ranks take for a gradient.

    Attributes:
        kind: one of `KINDS`.
        ranks: number of ranks.
        step: seconds of a gradient.
        late: seconds by which the late rank is late.
        seed: seed of the draws.
    """

    kind: str
    ranks: int
    step: float = 0.05
    late: float = 0.5
    seed: int = 0

    def seconds(self, rank: int, step: int) -> float:
        """Return the seconds that a rank takes for the gradient of a step."""
        if self.kind == "random":
            drawn = int(np.random.default_rng([self.seed, step]).integers(self.ranks))
            return self.step + self.late * (drawn == rank)
        return self.step * (2 if self.kind == "slow" and rank == self.ranks - 1 else 1)


def votes(pace: Pace, steps: int, needed: Callable[[int], int]) -> tuple[list[list[int]], float]:
    """Simulate votes that take no time themselves.

    Args:
        pace: the time that ranks take.
        steps: number of votes.
        needed: returns how many ballots end a vote, by its number.

    Returns:
        The ranks of each vote, and the seconds of all votes.
    """
    coming = [(pace.seconds(rank, 0), rank) for rank in range(pace.ranks)]
    heapq.heapify(coming)
    found, now = [], 0.0
    for vote in range(steps):
        voters: list[int] = []
        # Whoever comes at the same time as the last one that is needed counts as well.
        while coming and (len(voters) < needed(vote) or coming[0][0] <= now):
            now, rank = heapq.heappop(coming)
            voters.append(rank)
        found.append(sorted(voters))
        for rank in voters:
            heapq.heappush(coming, (now + pace.seconds(rank, vote + 1), rank))
    return found, now
