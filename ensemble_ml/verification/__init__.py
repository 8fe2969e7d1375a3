"""Verify forecasts against the truth, always beside baselines, and write the report.

`evaluate` scores whole forecasts and writes the report. `api` scores single xarray objects.
"""

from ensemble_ml.verification.evaluate import Evaluation, evaluate, score
from ensemble_ml.verification.forecasts import open_forecasts
from ensemble_ml.verification.heights import Heights
from ensemble_ml.verification.streaming import score_members
