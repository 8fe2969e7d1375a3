"""Stragglers by the clock of a simulation: how long each rank takes for a gradient, and who is then in each vote.

random   in every step, one rank of all, drawn anew, is late by `late` seconds
heavy    each rank's time in each step is log-normal: `step` seconds in the median, sigma 0.7
slow     the last rank always takes twice as long
none     all ranks take `step` seconds

What ranks send takes no time here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

KINDS = ("random", "slow", "none")
_SIGMA = 0.7  # of the logarithm of a heavy-tailed time


@dataclass(frozen=True)
class Pace:
    """The time that ranks take for a gradient.

    Attributes:
        kind: one of `KINDS`, or heavy.
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
            return self.step + self.late * (int(_drawn(self, step)[0]) == rank)
        if self.kind == "heavy":
            return self.step * float(np.exp(_SIGMA * _drawn(self, step)[rank]))
        return self.step * (2 if self.kind == "slow" and rank == self.ranks - 1 else 1)


@lru_cache(1024)
def _drawn(pace: Pace, step: int) -> np.ndarray:
    """Return the draws of a step: the number of the late rank, or a normal number for each rank."""
    generator = np.random.default_rng([pace.seed, step])
    return generator.integers(pace.ranks, size=1) if pace.kind == "random" else generator.standard_normal(pace.ranks)


def votes(pace: Pace, steps: int, needed: Callable[[int], int]) -> tuple[list[list[int]], list[float]]:
    """Simulate votes.

    Args:
        pace: the time that ranks take.
        steps: number of votes.
        needed: returns how many ballots end a vote, by its number.

    Returns:
        The ranks of each vote, and the seconds after which it ends.
    """
    coming = [(pace.seconds(rank, 0), rank) for rank in range(pace.ranks)]
    heapq.heapify(coming)
    found, ends, now = [], [], 0.0
    for vote in range(steps):
        voters: list[int] = []
        # Whoever comes at the same time as the last one that is needed counts as well.
        while coming and (len(voters) < needed(vote) or coming[0][0] <= now):
            now, rank = heapq.heappop(coming)
            voters.append(rank)
        found.append(sorted(voters))
        ends.append(now)
        for rank in voters:
            heapq.heappush(coming, (now + pace.seconds(rank, vote + 1), rank))
    return found, ends


def averages(pace: Pace, steps: int, every: int) -> tuple[list[list[int]], list[float]]:
    """Simulate ranks that step alone and meet after every `every` steps.

    Args:
        pace: the time that ranks take.
        steps: number of steps.
        every: number of steps between meetings; 1 for ranks that wait for each other in every step.

    Returns:
        For each step, the last step that each rank had done when the first rank was done with it (-1: none); and the
        seconds after which all ranks are done with it.
    """
    clock, ends = np.zeros(pace.ranks), []
    done = np.empty((steps, pace.ranks))
    for step in range(steps):
        clock = clock + [pace.seconds(rank, step) for rank in range(pace.ranks)]
        done[step] = clock
        ends.append(float(clock.max()))
        if (step + 1) % every == 0:
            clock = np.full(pace.ranks, clock.max())
    held = [(np.searchsorted(times, done.min(1), side="right") - 1) for times in done.T]
    return np.minimum(np.transpose(held), np.arange(steps)[:, None]).tolist(), ends
