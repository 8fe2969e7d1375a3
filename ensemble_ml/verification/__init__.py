"""Verification: statistic -> weighted mean -> metric, baselines that are never left out, and the report."""

from ensemble_ml.verification.aggregation import AggregationState, Column
from ensemble_ml.verification.evaluate import evaluate
from ensemble_ml.verification.forecasts import open_forecasts
from ensemble_ml.verification.metrics import METRICS, Metric
from ensemble_ml.verification.statistics import Key, Statistic, c4, crps, crps_members, ensemble_moments

__all__ = [
    "METRICS", "AggregationState", "Column", "Key", "Metric", "Statistic", "c4", "crps", "crps_members",
    "ensemble_moments", "evaluate", "open_forecasts",
]  # fmt: skip
