"""Scores of everyone with intervals, and their comparison by geometric means.

Axes: B draw of the bootstrap, C column (a lead, variable and level).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ensemble_ml.verification.aggregation import AggregationState, Column, Key
from ensemble_ml.verification.baselines import CORRECTIONS
from ensemble_ml.verification.bootstrap import FEWEST_BLOCKS, Interval, fewest_blocks, interval
from ensemble_ml.verification.metrics import METRICS, comparable, geometric_mean
from ensemble_ml.verification.values import CLIMATOLOGY

HEADLINE_LEAD = 48  # hours
_OF_THE_FULL_SPREAD = ("spread_rmse", "spread_rmse_0")


@dataclass(frozen=True)
class Score:
    """Values of a metric: `value` and `unweighted` (C,), `draws` (B, C)."""

    value: np.ndarray
    unweighted: np.ndarray
    draws: np.ndarray


@dataclass(eq=False)
class Scores:
    """All scores of an evaluation, computed when first asked for.

    `counts` (B, D): the draws, the same for all; `baselines`: labels of forecasts by statistics from `reduced` members.
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
    given: Mapping[str, int] = field(default_factory=dict)  # most members that a forecast was made from, where it says
    _cache: dict[tuple[str, str], Score | None] = field(default_factory=dict)
    _known: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def entrants(self) -> list[str]:
        """Everyone with a score, forecasts first."""
        found = dict.fromkeys(self.forecasts) | dict.fromkeys(key.entrant for key in self.state.total)
        return list(found)

    def score(self, metric: str, entrant: str) -> Score | None:
        """None where the entrant has no such score."""
        if (metric, entrant) not in self._cache:
            rule, found = METRICS[metric], None
            if rule.available(self.state, entrant):
                value = rule(self.state, entrant)
                plain = rule(self.state, entrant, weighting="unweighted")
                found = Score(value, plain, rule(self.state, entrant, draws=self.counts))
            self._cache[metric, entrant] = found
        return self._cache[metric, entrant]

    def interval(self, value: float, draws: np.ndarray, blocks: int | None = None) -> Interval:
        """A figure and its draws as an interval at the level asked for; `blocks` that it depends on, all by default."""
        return interval(value, draws, self.confidence, self.blocks if blocks is None else blocks)

    def advantage(self, metric: str, entrant: str, other: str) -> str:
        """What a forecast goes by that `other` does not, in words: with it, better by `metric` is not sure. Else ""."""
        if entrant in self.forecasts and entrant not in self.given:
            return f"made from {self.made_from(entrant)}"
        mine = self.given.get(entrant, 0)
        if metric in _OF_THE_FULL_SPREAD and mine >= self.full:
            return f"all {self.full} members, whose spread it is scored against, are its input"
        size = "" if other in (*self.forecasts, *self.baselines) else other.rpartition("_")[2]
        theirs = self.given.get(other, int(size) if size.isdigit() else mine)
        return f"made from {mine} members, compared with {theirs}" if mine > theirs else ""

    def made_from(self, label: str) -> str:
        """What a forecast was made from, in words."""
        found = self.given.get(label)
        return "members that it does not state" if found is None else f"{found} of {self.full} members"

    def barred(self, metric: str, entrant: str, other: str) -> int:
        """The `Interval.barred` of a ratio or difference of scores, which are better where they are smaller."""
        return -1 if self.advantage(metric, entrant, other) else 0

    def blocks_among(self, dates: np.ndarray) -> int:
        """How many blocks `dates` (D,) bool lie in."""
        return len(np.unique(self._block[dates]))

    def fewest_blocks(self, known: np.ndarray) -> int:
        """The fewest blocks that a column of `known` (D, C) bool lies in; all where none has a date."""
        return fewest_blocks(self._block, known, self.blocks)

    def blocks_of(self, metric: str, entrant: str, columns: Iterable[int]) -> int:
        """The fewest blocks that know a metric of one of `columns` of an entrant: one of one block has no interval."""
        return min([self.blocks, *(self._blocks_of(metric, entrant, int(c)) for c in columns)])

    def least_known(self, metric: str, entrants: Iterable[str], columns: Iterable[int]) -> dict[int, int]:
        """Of `columns` of which all `entrants` have a metric, in how many blocks those lie that others have more of,
        and that lie in too few for anything to be sure."""
        of = {one: score.value for one in entrants if (score := self.score(metric, one)) is not None}
        there = [int(c) for c in columns if of and all(np.isfinite(value[c]) for value in of.values())]
        known = {c: min(self._blocks_of(metric, one, c) for one in of) for c in there}
        most = max(known.values(), default=0)
        return {c: blocks for c, blocks in known.items() if blocks < min(most, FEWEST_BLOCKS)}

    def _blocks_of(self, metric: str, entrant: str, column: int) -> int:
        name = metric, entrant, column
        if name not in self._known:
            keys = [Key(entrant, statistic) for statistic in METRICS[metric].needs]
            there = [self.state.weight[key][:, 0, column] > 0 for key in keys if key in self.state.weight]
            self._known[name] = self.fewest_blocks(np.stack(there, 1)) if there else self.blocks
        return self._known[name]

    @cached_property
    def _block(self) -> np.ndarray:
        # (D,): the dates of a block are drawn together
        return np.unique(self.counts, axis=1, return_inverse=True)[1].reshape(-1)

    def at_lead(self, lead: int) -> np.ndarray:
        """Columns of a lead."""
        return np.array([c for c, column in enumerate(self.columns) if column.lead_hours == lead], int)

    def without_sp(self, lead: int) -> np.ndarray:
        """Return the columns of a lead but that of surface pressure; none where it is not among them.

        Much of what is gained there may be a height of the ground that the model has otherwise than the truth.
        """
        columns = self.at_lead(lead)
        others = np.array([c for c in columns if self.columns[c].variable != "sp"], int)
        return others if len(others) < len(columns) else others[:0]

    @property
    def leads(self) -> list[int]:
        """Leads that are scored, ascending."""
        return sorted({column.lead_hours for column in self.columns})

    @property
    def headline_lead(self) -> int:
        """48 h, or the last lead where that is not there."""
        return HEADLINE_LEAD if HEADLINE_LEAD in self.leads else self.leads[-1]

    def ratio(self, metric: str, entrant: str, other: str, columns: np.ndarray) -> Interval | None:
        """Geometric mean over `columns` of the entrant's score over the other's; None where they share no field."""
        first, second = self.score(metric, entrant), self.score(metric, other)
        if first is None or second is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.vstack([first.value / second.value, first.draws / second.draws])
        mean = geometric_mean(ratios, columns)
        shared = columns[np.isfinite(ratios[0, columns])]
        if not np.isfinite(mean[0]):
            return None
        blocks = min(self.blocks_of(metric, one, shared) for one in (entrant, other))
        return replace(self.interval(mean[0], mean[1:], blocks), barred=self.barred(metric, entrant, other))

    def unweighted_ratio(self, metric: str, entrant: str, other: str, columns: np.ndarray) -> float:
        """As `ratio`, every point counting the same."""
        first, second = self.score(metric, entrant), self.score(metric, other)
        if first is None or second is None:
            return float("nan")
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(geometric_mean(first.unweighted / second.unweighted, columns))

    def difference(self, metric: str, entrant: str, other: str) -> list[tuple[Interval, Interval]]:
        """Per column: the entrant's score less the other's, and its gain in percent of the other's."""
        first, second = self.score(metric, entrant), self.score(metric, other)
        if first is None or second is None:
            return []
        found, barred = [], self.barred(metric, entrant, other)
        with np.errstate(divide="ignore", invalid="ignore"):
            gain, gains = 100 * (1 - first.value / second.value), 100 * (1 - first.draws / second.draws)
        for c in range(len(self.columns)):
            blocks = min(self.blocks_of(metric, one, [c]) for one in (entrant, other))
            less = self.interval(first.value[c] - second.value[c], first.draws[:, c] - second.draws[:, c], blocks)
            percent = self.interval(gain[c], gains[:, c], blocks)
            found.append((replace(less, barred=barred), replace(percent, barred=-barred)))
        return found

    def best_baseline(self, lead: int) -> str | None:
        """The correction of the reduced ensemble, forecast of `baselines`, or climatology with the lowest geometric
        mean CRPS.

        Picking it on the test dates themselves favours the baseline: nobody could have known it before.
        """
        names = [*(f"{name}_{self.reduced}" for name in CORRECTIONS), CLIMATOLOGY, *self.baselines]
        scores = {name: score for name in names if (score := self.score("crps", name)) is not None}
        if not scores:
            return None
        values = np.stack([score.value for score in scores.values()])
        columns = self.at_lead(lead)
        for row in values:
            columns = comparable(row, columns)
        if not len(columns):
            return None
        means = np.log(values[:, columns]).mean(1)
        return list(scores)[int(means.argmin())]


def gain(ratio: Interval | None) -> Interval | None:
    """A ratio of scores as a gain in percent."""
    return None if ratio is None else ratio.map(lambda r: 100 * (1 - r))
