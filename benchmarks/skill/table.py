"""Sums of scores by init time, from which means, ratios and their bootstrap intervals are computed.

Axes: D init time, C column (a lead, variable and level), B draw of the bootstrap (the first is the plain mean).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.verification.bootstrap import Interval, fewest_blocks, interval

Key = tuple[str, str]  # statistic, entrant


@dataclass(eq=False)
class Table:
    """The sums `total` and `weight` (D, C) of each statistic of each entrant."""

    dates: int
    columns: int
    total: dict[Key, np.ndarray] = field(default_factory=dict)
    weight: dict[Key, np.ndarray] = field(default_factory=dict)

    def record(self, key: Key, date: int, columns: slice, values: np.ndarray, weight: np.ndarray) -> None:
        """Add fields (Z, Y, X) where `weight` (Z, Y, X) is above zero. A NaN there makes the score NaN.

        Args:
            key: statistic and entrant.
            date: position of the date.
            columns: the columns of the levels.
            values: the scores.
            weight: the weights.
        """
        for table in (self.total, self.weight):
            table.setdefault(key, np.zeros((self.dates, self.columns)))
        self.total[key][date, columns] += (np.where(weight > 0, values, 0.0) * weight).sum((-2, -1))
        self.weight[key][date, columns] += weight.sum((-2, -1))


@dataclass(frozen=True, eq=False)
class Board:
    """The scores of a table, with the draws of a bootstrap.

    Attributes:
        table: the sums.
        counts: (B, D), how often each date counts in each draw; the first row is ones.
        columns: the columns that are used.
        confidence: level of the intervals.
        block: (D,) block of each date; dates of a block are drawn together.
    """

    table: Table
    counts: np.ndarray
    columns: np.ndarray
    confidence: float
    block: np.ndarray

    @property
    def blocks(self) -> int:
        """Return the number of blocks of dates."""
        return len(np.unique(self.block))

    def score(self, statistic: str, entrants: Sequence[str]) -> np.ndarray:
        """Return the weighted mean (B, C) over dates, averaged over entrants (seeds).

        Args:
            statistic: the score.
            entrants: labels to average.
        """
        found = []
        for entrant in entrants:
            total, weight = (
                part[statistic, entrant][:, self.columns] for part in (self.table.total, self.table.weight)
            )
            with np.errstate(invalid="ignore", divide="ignore"):
                found.append((self.counts @ total) / (self.counts @ weight))
        return np.mean(found, 0)

    def ratio(self, statistic: str, entrants: Sequence[str], others: Sequence[str], *, power: float = 1.0) -> Interval:
        """Return the geometric mean over columns of (entrants' score over the others')^power. It is NaN if a score is.

        A field is left out if no date counts (an extreme that did not occur), or if one side has no error, because a
        single zero would decide the whole mean. In a draw, fields of which no date remains are left out, too.

        Args:
            statistic: the score.
            entrants: labels to average.
            others: labels to average for comparison.
            power: exponent; 0.5 turns squares into roots.
        """
        first, second = self.score(statistic, entrants), self.score(statistic, others)
        counted = self._counted(statistic, entrants) & self._counted(statistic, others) & (first != 0) & (second != 0)
        usable = counted[0]
        with np.errstate(invalid="ignore", divide="ignore"):
            logs = np.where(counted, power * (np.log(first) - np.log(second)), 0.0)[:, usable]
            means = np.exp(logs.sum(1) / counted[:, usable].sum(1))
        return self.interval(means, min(self._fewest(statistic, who, usable) for who in (entrants, others)))

    def _counted(self, statistic: str, entrants: Sequence[str]) -> np.ndarray:
        """Return the columns of which a draw keeps any date, (B, C) bool."""
        weights = (self.table.weight[statistic, entrant][:, self.columns] for entrant in entrants)
        return np.logical_and.reduce([self.counts @ weight > 0 for weight in weights])

    def _fewest(self, statistic: str, entrants: Sequence[str], usable: np.ndarray) -> int:
        """Return the smallest number of blocks in which one of the `usable` columns has a value."""
        known = [self.table.weight[statistic, entrant][:, self.columns[usable]] > 0 for entrant in entrants]
        return fewest_blocks(self.block, np.hstack(known), self.blocks)

    def gain(self, *args: object, **kwargs: object) -> Interval:
        """Return by how many per cent the entrants' score is lower.

        Args:
            *args: as in `ratio`.
            **kwargs: as in `ratio`.
        """
        return self.ratio(*args, **kwargs).map(lambda r: 100 * (1 - r))  # type: ignore[arg-type]

    def interval(self, draws: np.ndarray, blocks: int | None = None) -> Interval:
        """Return the interval of draws (B,), of which the first is the figure itself.

        Args:
            draws: the figure in each draw.
            blocks: number of blocks on which it depends; None takes all.
        """
        return interval(float(draws[0]), draws[1:], self.confidence, self.blocks if blocks is None else blocks)
