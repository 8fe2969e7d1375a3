"""Sums of scores by start date, from which means, ratios and their bootstrap intervals are made.

Axes: D start date, C column (a lead, variable and level), B draw of the bootstrap (the first is the plain mean).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.verification.bootstrap import Interval, fewest_blocks, interval

Key = tuple[str, str]  # statistic, entrant


@dataclass(eq=False)
class Table:
    """`total` and `weight` (D, C) of each statistic of each entrant."""

    dates: int
    columns: int
    total: dict[Key, np.ndarray] = field(default_factory=dict)
    weight: dict[Key, np.ndarray] = field(default_factory=dict)

    def record(self, key: Key, date: int, columns: slice, values: np.ndarray, weight: np.ndarray) -> None:
        """Add fields (Z, Y, X) where `weight` (Z, Y, X) is above zero; a NaN there makes the score NaN."""
        for table in (self.total, self.weight):
            table.setdefault(key, np.zeros((self.dates, self.columns)))
        self.total[key][date, columns] += (np.where(weight > 0, values, 0.0) * weight).sum((-2, -1))
        self.weight[key][date, columns] += weight.sum((-2, -1))


@dataclass(frozen=True, eq=False)
class Board:
    """Scores of a table: `counts` (B, D) says how often each date counts in each draw, the first row being ones;
    `block` (D,) the block of each date, which is drawn as one."""

    table: Table
    counts: np.ndarray
    columns: np.ndarray
    confidence: float
    block: np.ndarray

    @property
    def blocks(self) -> int:
        """How many blocks the dates lie in."""
        return len(np.unique(self.block))

    def score(self, statistic: str, entrants: Sequence[str]) -> np.ndarray:
        """Weighted mean (B, C) over dates, averaged over entrants (seeds)."""
        found = []
        for entrant in entrants:
            total, weight = (
                part[statistic, entrant][:, self.columns] for part in (self.table.total, self.table.weight)
            )
            with np.errstate(invalid="ignore", divide="ignore"):
                found.append((self.counts @ total) / (self.counts @ weight))
        return np.mean(found, 0)

    def ratio(self, statistic: str, entrants: Sequence[str], others: Sequence[str], *, power: float = 1.0) -> Interval:
        """Geometric mean over columns of (entrants' score over the others')^power; NaN where a score is.

        A field of which no date counts (an extreme that did not occur), or of which one side does not err, is left out,
        of a draw that leaves none of it, too: a single zero would be the whole mean.
        """
        first, second = self.score(statistic, entrants), self.score(statistic, others)
        counted = self._counted(statistic, entrants) & self._counted(statistic, others) & (first != 0) & (second != 0)
        usable = counted[0]
        with np.errstate(invalid="ignore", divide="ignore"):
            logs = np.where(counted, power * (np.log(first) - np.log(second)), 0.0)[:, usable]
            means = np.exp(logs.sum(1) / counted[:, usable].sum(1))
        return self.interval(means, min(self._fewest(statistic, who, usable) for who in (entrants, others)))

    def _counted(self, statistic: str, entrants: Sequence[str]) -> np.ndarray:
        """Which columns a draw leaves something of, (B, C) bool."""
        weights = (self.table.weight[statistic, entrant][:, self.columns] for entrant in entrants)
        return np.logical_and.reduce([self.counts @ weight > 0 for weight in weights])

    def _fewest(self, statistic: str, entrants: Sequence[str], usable: np.ndarray) -> int:
        """The fewest blocks that know one of the `usable` columns."""
        known = [self.table.weight[statistic, entrant][:, self.columns[usable]] > 0 for entrant in entrants]
        return fewest_blocks(self.block, np.hstack(known), self.blocks)

    def gain(self, *args: object, **kwargs: object) -> Interval:
        """By how many per cent the entrants' score is lower; arguments as of `ratio`."""
        return self.ratio(*args, **kwargs).map(lambda r: 100 * (1 - r))  # type: ignore[arg-type]

    def interval(self, draws: np.ndarray, blocks: int | None = None) -> Interval:
        """Draws (B,), the first of which is the figure itself; `blocks` that it depends on, all by default."""
        return interval(float(draws[0]), draws[1:], self.confidence, self.blocks if blocks is None else blocks)
