"""Optimizers and learning rates: Lion, torch's AdamW, warm-up and cosine; what ranks agree on before a step."""

from ensemble_ml.optim.exchange import Exchange, Outcome
from ensemble_ml.optim.lion import Lion
from ensemble_ml.optim.schedule import build, warmup_cosine

__all__ = ["Exchange", "Lion", "Outcome", "build", "warmup_cosine"]
