"""Define metrics, which are functions of weighted means of statistics.

The same metric gives scores, bootstrap draws and comparisons, because it takes nothing but means. The split into
statistic, mean and metric follows WeatherBench-X.

Axes: B draw of the bootstrap, D initialisation time, C column (a lead, variable and level).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ensemble_ml.verification.aggregation import AggregationState
from ensemble_ml.verification.statistics import Key, Statistic


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
        """Return whether the state holds every statistic that the formula needs.

        Args:
            state: Sums of all statistics.
            entrant: Label of a forecast, raw ensemble or baseline.
        """
        return all(Key(entrant, statistic) in state.total for statistic in self.needs)

    def __call__(
        self, state: AggregationState, entrant: str, *, weighting: str = "area", draws: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute the metric of an entrant from its means.

        Args:
            state: Sums of all statistics.
            entrant: Label of a forecast, raw ensemble or baseline.
            weighting: Name of the weighting of the points.
            draws: (B, D) how often each draw of the bootstrap counts each date; None counts every date once.

        Returns:
            (C,) score of each column, or (B, C) with draws; NaN or infinite where the means allow no score.

        Raises:
            KeyError: The state lacks a statistic (see `available`).
            ValueError: The state has no such weighting.
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
    """Return the geometric mean of score ratios over columns, (...); NaN if no column is left.

    Only the columns that are `comparable` count, and they are the same in all rows. So every draw of a bootstrap
    averages the same columns.

    Args:
        ratio: (..., C) ratios of scores; the first row decides which columns are left out.
        columns: Positions on C to average over.
    """
    columns = comparable(ratio, columns)
    if not len(columns):
        return np.full(ratio.shape[:-1], np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(np.log(ratio[..., columns]).mean(-1))


def comparable(ratio: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return those of `columns` whose ratio in the first row is finite and positive, as positions on C.

    A column without truth or forecast, or with a score of zero, has no such ratio.

    Args:
        ratio: (..., C) ratios of scores. The first row is that of the scores themselves; others are of draws.
        columns: Positions on C.
    """
    first = ratio.reshape(-1, ratio.shape[-1])[0]
    good = np.isfinite(first) & (first > 0)
    return columns[good[columns]]
