"""Sum weighted values and weights, so that means can be computed from parts, and compute metrics from these means.

States of different dates, rows or columns can be added. Up to rounding, the result does not depend on how the work was
divided. One class serves chunks of rows, dates, regions and the bootstrap.

A metric is a function of weighted means of statistics. The same metric gives scores, bootstrap draws and comparisons,
because it takes nothing but means. The split into statistic, mean and metric follows WeatherBench-X.

Axes: B draw of the bootstrap, D initialisation time, W weighting (exact cell area first, then one for each point, then
area within regions and strata), C column (a lead, variable and level), Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.verification.statistics import Key, Statistic

WEIGHTINGS = ("area", "unweighted")
Strata = Mapping[str, tuple[np.ndarray, np.ndarray]]  # see `AggregationState.record`


@dataclass(frozen=True)
class Column:
    """A field that is scored: a variable at a lead and a level.

    Attributes:
        lead_hours: Lead time in hours.
        variable: Short name of the variable.
        level: Pressure level in hPa; None at the surface.
    """

    lead_hours: int
    variable: str
    level: int | None

    @property
    def name(self) -> str:
        """Return the variable and the level as one word, such as t850 or msl."""
        return self.variable if self.level is None else f"{self.variable}{self.level}"

    @property
    def title(self) -> str:
        """Return the field in words, such as "850 hPa temperature"."""
        words = registered(self.variable).long_name
        return words if self.level is None else f"{self.level} hPa {words}"

    @property
    def label(self) -> str:
        """Return the field in words with its units, such as "850 hPa temperature, K"."""
        return f"{self.title}, {registered(self.variable).units}"

    @property
    def key(self) -> tuple[str, str]:
        """Return the labels of field and lead time by which the report selects."""
        return self.label, f"{self.lead_hours} h"


@dataclass(eq=False)
class AggregationState:
    """A set of sums over points for each initialisation time, weighting and column.

    Attributes:
        dates: Length of D.
        columns: Length of C.
        weightings: Names of the weightings, in the order of W.
        total: (D, W, C) sums of weighted values by key.
        weight: (D, W, C) sums of weights by key.
        left_out: (D, C) number of points with a false mask, by key.
        points: (D, C) number of all points, by key.
    """

    dates: int
    columns: int
    weightings: tuple[str, ...] = WEIGHTINGS
    total: dict[Key, np.ndarray] = field(default_factory=dict)
    weight: dict[Key, np.ndarray] = field(default_factory=dict)
    left_out: dict[Key, np.ndarray] = field(default_factory=dict)
    points: dict[Key, np.ndarray] = field(default_factory=dict)

    def record(
        self,
        date: int,
        columns: slice,
        statistics: Mapping[Key, np.ndarray],
        mask: np.ndarray,
        weights: np.ndarray,
        strata: Strata | None = None,
    ) -> None:
        """Add the points of one initialisation time, or of some rows of it.

        Args:
            date: Position on D.
            columns: The Z columns that the values belong to.
            statistics: (Z, Y, X) values by key. A NaN under a true mask makes the mean NaN, which the report shows.
            mask: (Z, Y, X) bool, true at points that count.
            weights: (W, Y, X) weights of the first weightings.
            strata: For each further weighting by name, two fields (Z, Y, X): the factor of the values, and the weight
                to add. Both are zero outside the stratum on this date.
        """
        # With flattened points, one matrix product sums all levels and weightings at once.
        flat_w = weights.reshape(len(weights), -1).T
        flat_mask = mask.reshape(len(mask), -1)
        weight = (flat_mask @ flat_w).T  # (W, Z)
        left_out = (~flat_mask).sum(1)
        further: list[tuple[int, np.ndarray, np.ndarray]] = []
        for name, parts in (strata or {}).items():
            factor, counted = (np.where(mask, part, 0.0).reshape(flat_mask.shape) for part in parts)
            further.append((self.weightings.index(name), factor, counted))
        for key in self._counting(list(statistics)):
            self.weight[key][date, : len(weight), columns] += weight
            for at, _, counted in further:
                self.weight[key][date, at, columns] += counted.sum(1)
            self.left_out[key][date, columns] += left_out
            self.points[key][date, columns] += flat_mask.shape[1]
        for key, values in statistics.items():
            # A NaN times a weight of zero would be NaN, so masked values are replaced.
            kept = np.where(flat_mask, values.reshape(flat_mask.shape), 0.0)
            with np.errstate(invalid="ignore"):
                sums = (kept @ flat_w).T
                # An infinite log score times a weight of zero is NaN, but a point of no weight does not count.
                finite = bool(np.isfinite(sums).all())
                if not finite:
                    sums = np.stack([np.where(w == 0, 0.0, kept * w).sum(1) for w in flat_w.T])
                self.total[key][date, : len(weight), columns] += sums
                for at, factor, _ in further:
                    weighted = kept * factor if finite else np.where(factor == 0, 0.0, kept * factor)
                    self.total[key][date, at, columns] += weighted.sum(1)

    def _counting(self, keys: Sequence[Key]) -> list[Key]:
        """Prepare `keys` for recording, and return one key for each array of weights that they use.

        To save memory, statistics that are always recorded together share their arrays `weight`, `left_out` and
        `points`. Such arrays must be added to only once.
        """
        if fresh := [key for key in keys if key not in self.total]:
            self._open(fresh)
        users = Counter(id(weight) for weight in self.weight.values())
        sharing = self._sharing(keys)
        for mine in sharing:
            # If other keys share this array, adding to it would change their weights, too. So these keys get a copy.
            if users[id(self.weight[mine[0]])] > len(mine):
                self._part(mine)
        return [mine[0] for mine in sharing]

    def _sharing(self, keys: Iterable[Key]) -> list[list[Key]]:
        """Group keys by the array of weights that they share."""
        groups: dict[int, list[Key]] = {}
        for key in keys:
            groups.setdefault(id(self.weight[key]), []).append(key)
        return list(groups.values())

    def _part(self, keys: Sequence[Key]) -> None:
        """Give `keys`, which share their weights, a copy that no other key shares."""
        for table in (self.weight, self.left_out, self.points):
            table.update(dict.fromkeys(keys, table[keys[0]].copy()))  # type: ignore[attr-defined]

    def _open(self, keys: Sequence[Key]) -> None:
        """Create zero sums for new keys. The keys share one array of weights."""
        shape = self.dates, len(self.weightings), self.columns
        self.total.update({key: np.zeros(shape) for key in keys})
        self.weight.update(dict.fromkeys(keys, np.zeros(shape)))
        for counts in (self.left_out, self.points):
            counts.update(dict.fromkeys(keys, np.zeros((self.dates, self.columns), np.int64)))

    def __add__(self, other: AggregationState) -> AggregationState:
        """Return the state of the points of both states. Sums of keys that only one state has are not copied.

        Raises:
            ValueError: The dates, columns or weightings differ.
        """
        if (self.dates, self.columns, self.weightings) != (other.dates, other.columns, other.weightings):
            raise ValueError("states of different dates, columns or weightings cannot be added")
        merged = AggregationState(self.dates, self.columns, self.weightings)
        for name in ("total", "weight", "left_out", "points"):
            mine, theirs = getattr(self, name), getattr(other, name)
            getattr(merged, name).update(mine)
            for key, array in theirs.items():
                getattr(merged, name)[key] = mine[key] + array if key in mine else array
        return merged

    def part(self, columns: slice) -> dict[str, dict]:
        """Return the sums of a range of columns.

        Returns:
            `total` holds the sums by key. `counts` holds (weight, left out, points) by the tuple of keys that share
            them.
        """
        counts: dict[tuple[Key, ...], tuple[np.ndarray, ...]] = {}
        for keys in self._sharing(self.total):
            arrays = self.weight[keys[0]], self.left_out[keys[0]], self.points[keys[0]]
            counts[tuple(keys)] = tuple(array[..., columns] for array in arrays)
        return {"total": {key: total[..., columns] for key, total in self.total.items()}, "counts": counts}

    def put(self, columns: slice, part: dict[str, dict]) -> None:
        """Store the result of `part` in columns in which nothing is recorded yet.

        Keys that share their weights in the part must share them here as well, or be new: only one of them is written.
        """
        if fresh := [key for key in part["total"] if key not in self.total]:
            self._open(fresh)
        for keys, counts in part["counts"].items():
            self._counting(keys)
            for table, values in zip((self.weight, self.left_out, self.points), counts, strict=True):
                table[keys[0]][..., columns] = values  # type: ignore[attr-defined]
        for key, values in part["total"].items():
            self.total[key][..., columns] = values

    def mean(self, key: Key, weighting: str = "area", draws: np.ndarray | None = None) -> np.ndarray:
        """Return the weighted mean of a statistic over dates and points.

        Args:
            key: Competitor (forecast, raw ensemble or baseline) and statistic.
            weighting: Name of a weighting.
            draws: (B, D) how many times each draw of the bootstrap counts each date; None counts every date once.

        Returns:
            (C,) means, or (B, C) with draws; NaN where nothing was recorded or every point was left out.

        Raises:
            KeyError: Nothing was recorded for the key in any column.
            ValueError: There is no such weighting.
        """
        which = self.weightings.index(weighting)
        total, weight = self.total[key][:, which], self.weight[key][:, which]
        if draws is None:
            total, weight = total.sum(0), weight.sum(0)
        else:
            total, weight = draws @ total, draws @ weight
        return np.divide(total, weight, out=np.full(total.shape, np.nan), where=weight > 0)

    def choose(self, entrant: str, targets: Mapping[Statistic, Sequence[Statistic]]) -> dict[int, int]:
        """Choose, for each column, among alternative versions of a baseline's statistics.

        The option of the first target with the smallest area-weighted mean decides. The other targets take their
        options at the same position, so that all statistics of a column belong to one distribution.

        Args:
            entrant: A baseline that was scored as several distributions.
            targets: For each statistic to fill, the statistics to choose from.

        Returns:
            The position of the chosen option by column, without columns that have no finite mean.
        """
        first = next(iter(targets.values()))
        means = np.stack([self.mean(Key(entrant, option)) for option in first])
        known = np.flatnonzero(np.isfinite(means).any(0))
        best = {int(column): int(np.nanargmin(means[:, column])) for column in known}
        for target, options in targets.items():
            keys = [Key(entrant, option) for option in options]
            if any(key not in self.total for key in keys):
                continue
            new = Key(entrant, target)
            if new in self.total:
                self._part([new])
            else:
                self._open([new])
            for name in ("total", "weight", "left_out", "points"):
                table = getattr(self, name)
                for column, place in best.items():
                    table[new][..., column] = table[keys[place]][..., column]
        return best


@dataclass(frozen=True)
class Metric:
    """A score that is computed from the means of some statistics.

    Attributes:
        name: Name in scores.json.
        long_name: Name in the report.
        needs: Statistics whose means the formula takes.
        formula: A function that takes these means, in the order of `needs`, and returns the score elementwise.
    """

    name: str
    long_name: str
    needs: tuple[Statistic, ...]
    formula: Callable[..., np.ndarray]

    def available(self, state: AggregationState, entrant: str) -> bool:
        """Return whether the state holds every statistic of `entrant` that the formula needs."""
        return all(Key(entrant, statistic) in state.total for statistic in self.needs)

    def __call__(
        self, state: AggregationState, entrant: str, *, weighting: str = "area", draws: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute the metric of an entrant, (C,), or (B, C) with draws; NaN or infinite where the means allow no score.

        Weighting, draws and errors are those of `AggregationState.mean`.
        """
        means = (state.mean(Key(entrant, statistic), weighting, draws) for statistic in self.needs)
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.formula(*means)


def _same(mean: np.ndarray) -> np.ndarray:
    return mean


def _ratio_of_roots(variance: np.ndarray, squared_error: np.ndarray) -> np.ndarray:
    return np.sqrt(variance / squared_error)


_S = Statistic
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("crps", "CRPS", (_S.CRPS,), _same),
        Metric("crps_fair", "fair CRPS of the members", (_S.CRPS_FAIR,), _same),
        Metric("crps_members", "CRPS of the members", (_S.CRPS_MEMBERS,), _same),
        Metric("crps_normal", "CRPS of N(m, s^2)", (_S.CRPS_NORMAL,), _same),
        Metric("crps_family", "CRPS of the variable's distribution", (_S.CRPS_FAMILY,), _same),
        Metric("rmse", "RMSE of the mean", (_S.SQUARED_ERROR,), np.sqrt),
        Metric("bias", "bias of the mean", (_S.ERROR,), _same),
        # The root is taken after the mean, and the variance of a raw ensemble carries the factor (M + 1) / M (see
        # Statistic.VARIANCE): Fortin et al. (2014), doi:10.1175/JHM-D-14-0008.1.
        Metric("spread_skill", "predicted standard deviation / RMSE", (_S.VARIANCE, _S.SQUARED_ERROR), _ratio_of_roots),
        Metric("spread_rmse", "RMSE of the spread", (_S.SPREAD_SQUARED_ERROR,), np.sqrt),
        Metric("spread_rmse_0", "RMSE of the spread, ddof = 0", (_S.SPREAD_SQUARED_ERROR_0,), np.sqrt),
        Metric("brier", "Brier score of the upper tenth", (_S.BRIER,), _same),
        Metric("log_score", "log score", (_S.LOG_SCORE,), _same),
        Metric("spread_bias", "bias of the spread", (_S.SPREAD_ERROR,), _same),
        Metric("held_out_rmse", "RMSE against the held-out spread", (_S.HELD_OUT_SQUARED_ERROR,), np.sqrt),
    )
}


def geometric_mean(ratio: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the geometric mean of score ratios (..., C) over some columns, (...); NaN if no column is left.

    Only the columns that are `comparable` count, and they are the same in all rows. So every draw of a bootstrap
    averages the same columns.
    """
    columns = comparable(ratio, columns)
    if not len(columns):
        return np.full(ratio.shape[:-1], np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(np.log(ratio[..., columns]).mean(-1))


def comparable(ratio: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return those of `columns`, positions on C, whose ratio (..., C) in the first row is finite and positive.

    A column without truth or forecast, or with a score of zero, has no such ratio. The first row is that of the scores
    themselves; others are of draws.
    """
    first = ratio.reshape(-1, ratio.shape[-1])[0]
    good = np.isfinite(first) & (first > 0)
    return columns[good[columns]]
