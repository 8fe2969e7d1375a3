"""Optimizers, learning rates, and the interface by which ranks agree before a step.

The optimizers are Lion and torch's AdamW; the learning rate warms up and then follows a cosine.
"""

from ensemble_ml.optim.exchange import Exchange, Outcome
from ensemble_ml.optim.lion import Lion
from ensemble_ml.optim.schedule import build, warmup_cosine
