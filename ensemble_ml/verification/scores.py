"""Compute the scores of all entrants with intervals, and compare them by geometric means.

An entrant is a forecast, a raw ensemble or a baseline.

Axes: B draw of the bootstrap, C column (a lead, variable and level), D initialisation time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ensemble_ml.verification.aggregation import METRICS, AggregationState, Column, Key, comparable, geometric_mean
from ensemble_ml.verification.baselines import CORRECTIONS
from ensemble_ml.verification.bootstrap import FEWEST_BLOCKS, Interval, fewest_blocks, interval
from ensemble_ml.verification.values import CLIMATOLOGY

HEADLINE_LEAD = 48  # hours
_OF_THE_FULL_SPREAD = ("spread_rmse", "spread_rmse_0")


@dataclass(frozen=True)
class Score:
    """The values of a metric for one entrant.

    Attributes:
        value: (C,) score with the weighting that was asked for, exact cell areas by default.
        unweighted: (C,) score with equal weights.
        draws: (B, C) score of each draw of the bootstrap, weighted as `value`.
    """

    value: np.ndarray
    unweighted: np.ndarray
    draws: np.ndarray


@dataclass(eq=False)
class Scores:
    """A lazy table of all scores of an evaluation. Each score is computed when it is first asked for.

    In methods, `metric` is a name in `METRICS`. `entrant` and `other` are forecasts, raw ensembles or baselines.
    `weighting` names the weighting of the points, such as a region. `columns` are positions on C. `lead` is in hours.

    Attributes:
        state: Sums of all statistics.
        columns: The fields that are scored.
        counts: (B, D) how often each draw counts each date, the same for all scores.
        blocks: Number of blocks of dates.
        confidence: Probability that an interval should contain the truth, within (0, 1).
        forecasts: Labels of the forecasts that are judged.
        reduced: Number of members of the reduced ensemble.
        full: Number of members of the full ensemble.
        baselines: Labels of forecasts that count as baselines, such as EMOS.
        given: Number of members that each forecast was made from, on the date with the most, by label. A forecast that
            does not state them is missing.
    """

    state: AggregationState
    columns: tuple[Column, ...]
    counts: np.ndarray
    blocks: int
    confidence: float
    forecasts: tuple[str, ...]
    reduced: int
    full: int
    baselines: tuple[str, ...] = ()
    given: Mapping[str, int] = field(default_factory=dict)
    _cache: dict[tuple[str, str, str], Score | None] = field(default_factory=dict)
    _known: dict[tuple[str, str, int, str], int] = field(default_factory=dict)

    def entrants(self) -> list[str]:
        """Return the names of the forecasts, and then of all other entrants that have a statistic."""
        return list(dict.fromkeys(self.forecasts) | dict.fromkeys(key.entrant for key in self.state.total))

    def score(self, metric: str, entrant: str, weighting: str = "area") -> Score | None:
        """Return the values of a metric for an entrant, or None if the entrant has no such score."""
        name = metric, entrant, weighting
        if name not in self._cache:
            rule, found = METRICS[metric], None
            if rule.available(self.state, entrant):
                value = rule(self.state, entrant, weighting=weighting)
                plain = rule(self.state, entrant, weighting="unweighted")
                found = Score(value, plain, rule(self.state, entrant, weighting=weighting, draws=self.counts))
            self._cache[name] = found
        return self._cache[name]

    def interval(self, value: float, draws: np.ndarray, blocks: int) -> Interval:
        """Return the interval of a value from its draws (B,), at the confidence of this evaluation.

        `blocks` is the number of blocks that the value depends on.
        """
        return interval(value, draws, self.confidence, blocks)

    def interval_of(self, metric: str, entrant: str, column: int, weighting: str = "area") -> Interval | None:
        """Return a metric of an entrant in one column with its interval, or None if it has no such score there."""
        score = self.score(metric, entrant, weighting)
        if score is None or not np.isfinite(score.value[column]):
            return None
        blocks = self.blocks_of(metric, entrant, [column], weighting)
        return self.interval(score.value[column], score.draws[:, column], blocks)

    def advantage(self, metric: str, entrant: str, other: str) -> str:
        """Describe the input that a forecast has and `other` lacks, in words. Return "" if there is none.

        With such an advantage, a better score by `metric` is not called sure. There are three cases: the forecast does
        not state its members; it is scored on the full ensemble's spread and was made from all members; it was made
        from more members than `other`.
        """
        if entrant in self.forecasts and entrant not in self.given:
            return f"made from {self.made_from(entrant)}"
        mine = self.given.get(entrant, 0)
        if metric in _OF_THE_FULL_SPREAD and mine >= self.full:
            return f"all {self.full} members, whose spread it is scored against, are its input"
        # The name of a raw ensemble or a fitted baseline ends with its number of members, as in raw_5. A forecast may
        # have any name, so its number is looked up.
        size = "" if other in (*self.forecasts, *self.baselines) else other.rpartition("_")[2]
        theirs = self.given.get(other, int(size) if size.isdigit() else mine)
        return f"made from {mine} members, compared with {theirs}" if mine > theirs else ""

    def made_from(self, label: str) -> str:
        """Return in words from how many members a forecast was made."""
        found = self.given.get(label)
        return "members that it does not state" if found is None else f"{found} of {self.full} members"

    def barred(self, metric: str, entrant: str, other: str) -> int:
        """Return the side that is never sure in a comparison, in the form of `Interval.barred`.

        Smaller scores are better, so an advantage bars the side below.
        """
        return -1 if self.advantage(metric, entrant, other) else 0

    def blocks_among(self, dates: np.ndarray) -> int:
        """Return the number of blocks that contain any of some dates, (D,) bool."""
        return len(np.unique(self._block[dates]))

    def fewest_blocks(self, known: np.ndarray) -> int:
        """Return the smallest number of blocks with values in any column; all blocks if no column has a date.

        `known` (D, C) is true where a column has a value on a date.
        """
        return fewest_blocks(self._block, known, self.blocks)

    def blocks_of(self, metric: str, entrant: str, columns: Iterable[int], weighting: str = "area") -> int:
        """Return the smallest number of blocks in which any of some columns has a metric of an entrant.

        A column that is known in only one block has no interval. A mean that depends on it has none either.
        """
        return min([self.blocks, *(self._blocks_of(metric, entrant, int(c), weighting) for c in columns)])

    def least_known(self, metric: str, entrants: Iterable[str], columns: Iterable[int]) -> dict[int, int]:
        """Return the columns that are known in too few blocks: the number of these blocks by position on C.

        Entrants without the metric are ignored. Only columns in which all others have it are considered. A column is
        returned if it is known in fewer blocks than another one, and in fewer than FEWEST_BLOCKS.
        """
        of = {one: score.value for one in entrants if (score := self.score(metric, one)) is not None}
        there = [int(c) for c in columns if of and all(np.isfinite(value[c]) for value in of.values())]
        known = {c: min(self._blocks_of(metric, one, c) for one in of) for c in there}
        # If all columns are known in equally few blocks, too few dates are the reason, and no column is returned.
        most = max(known.values(), default=0)
        return {c: blocks for c, blocks in known.items() if blocks < min(most, FEWEST_BLOCKS)}

    def _blocks_of(self, metric: str, entrant: str, column: int, weighting: str = "area") -> int:
        name = metric, entrant, column, weighting
        if name not in self._known:
            keys = [Key(entrant, statistic) for statistic in METRICS[metric].needs]
            w = self.state.weightings.index(weighting)
            there = [self.state.weight[key][:, w, column] > 0 for key in keys if key in self.state.weight]
            self._known[name] = self.fewest_blocks(np.stack(there, 1)) if there else self.blocks
        return self._known[name]

    @cached_property
    def _block(self) -> np.ndarray:
        # (D,) number of the block of each date. The dates of a block are drawn together, so their columns in `counts`
        # are equal.
        return np.unique(self.counts, axis=1, return_inverse=True)[1].reshape(-1)

    def at_lead(self, lead: int) -> np.ndarray:
        """Return the positions on C of the columns at a lead."""
        return np.array([c for c, column in enumerate(self.columns) if column.lead_hours == lead], int)

    def without_sp(self, lead: int) -> np.ndarray:
        """Return the columns at a lead without surface pressure; none if the lead has no surface pressure.

        Much of a gain in surface pressure may come from different heights of the ground in model and truth.
        """
        columns = self.at_lead(lead)
        others = np.array([c for c in columns if self.columns[c].variable != "sp"], int)
        return others if len(others) < len(columns) else others[:0]

    @property
    def leads(self) -> list[int]:
        """Return the lead times that are scored, in hours, ascending."""
        return sorted({column.lead_hours for column in self.columns})

    @property
    def headline_lead(self) -> int:
        """Return 48 h, or the last lead if 48 h is not scored."""
        return HEADLINE_LEAD if HEADLINE_LEAD in self.leads else self.leads[-1]

    def ratio(
        self, metric: str, entrant: str, other: str, columns: np.ndarray, weighting: str = "area"
    ) -> Interval | None:
        """Return the geometric mean over columns of an entrant's score divided by that of another.

        The ratio is None if the two share no field with a score.
        """
        first, second = self.score(metric, entrant, weighting), self.score(metric, other, weighting)
        if first is None or second is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            # The first row holds the value and the others the draws, so that one geometric mean covers the same columns
            # in all.
            ratios = np.vstack([first.value / second.value, first.draws / second.draws])
        mean = geometric_mean(ratios, columns)
        # Only columns that entered the mean may bound the number of blocks that it rests on.
        shared = columns[np.isfinite(ratios[0, columns])]
        if not np.isfinite(mean[0]):
            return None
        blocks = min(self.blocks_of(metric, one, shared, weighting) for one in (entrant, other))
        return replace(self.interval(mean[0], mean[1:], blocks), barred=self.barred(metric, entrant, other))

    def unweighted_ratio(self, metric: str, entrant: str, other: str, columns: np.ndarray) -> float:
        """Return the value of `ratio` with equal weights for all points; NaN if the two share no field with a score."""
        first, second = self.score(metric, entrant), self.score(metric, other)
        if first is None or second is None:
            return float("nan")
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(geometric_mean(first.unweighted / second.unweighted, columns))

    def difference(
        self, metric: str, entrant: str, other: str, weighting: str = "area"
    ) -> list[tuple[Interval, Interval]]:
        """Return the difference of two entrants' scores in each column, and the gain in percent.

        These are the score of `entrant` minus that of `other`, in the units of the metric, and 100 (1 - score / other's
        score). The list is empty if one of the two lacks the metric.
        """
        first, second = self.score(metric, entrant, weighting), self.score(metric, other, weighting)
        if first is None or second is None:
            return []
        found, barred = [], self.barred(metric, entrant, other)
        with np.errstate(divide="ignore", invalid="ignore"):
            gain, gains = 100 * (1 - first.value / second.value), 100 * (1 - first.draws / second.draws)
        for c in range(len(self.columns)):
            blocks = min(self.blocks_of(metric, one, [c], weighting) for one in (entrant, other))
            less = self.interval(first.value[c] - second.value[c], first.draws[:, c] - second.draws[:, c], blocks)
            percent = self.interval(gain[c], gains[:, c], blocks)
            # A gain is positive where the difference is negative, so its barred side is the opposite one.
            found.append((replace(less, barred=barred), replace(percent, barred=-barred)))
        return found

    def best_baseline(self, lead: int) -> str | None:
        """Return the baseline with the lowest geometric mean CRPS at a lead.

        Candidates are the corrections of the reduced ensemble, climatology and the forecasts in `baselines`. The choice
        is made on the test dates themselves, which favours the baseline. The result is None if no baseline has a CRPS,
        or if they share no field at the lead.
        """
        names = [*(f"{name}_{self.reduced}" for name in CORRECTIONS), CLIMATOLOGY, *self.baselines]
        scores = {name: score for name in names if (score := self.score("crps", name)) is not None}
        if not scores:
            return None
        values = np.stack([score.value for score in scores.values()])
        columns = self.at_lead(lead)
        # Baselines are compared over the fields that all of them have. Otherwise one that lacks a difficult field could
        # win.
        for row in values:
            columns = comparable(row, columns)
        if not len(columns):
            return None
        means = np.log(values[:, columns]).mean(1)
        return list(scores)[int(means.argmin())]


def gain(ratio: Interval | None) -> Interval | None:
    """Convert a ratio of scores to a gain in percent, 100 (1 - ratio); None stays None."""
    return None if ratio is None else ratio.map(lambda r: 100 * (1 - r))
