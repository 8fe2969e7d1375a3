"""Verify forecasts: statistic, weighted mean, metric; baselines that are never left out; and the report.

`evaluate` scores whole forecasts and writes the report. `api` scores single xarray objects.
"""

from ensemble_ml.verification.evaluate import Evaluation, evaluate, score
from ensemble_ml.verification.forecasts import open_forecasts
from ensemble_ml.verification.heights import Heights
from ensemble_ml.verification.streaming import score_members
