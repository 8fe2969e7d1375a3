"""Optimizers and learning rates: plain Lion, torch's AdamW, warm-up and cosine."""

from ensemble_ml.optim.lion import Lion
from ensemble_ml.optim.schedule import build, warmup_cosine

__all__ = ["Lion", "build", "warmup_cosine"]
