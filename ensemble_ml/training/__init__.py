"""Training: the fits before the first step, the trainer, the loss, validation, checkpoints, logs."""

from ensemble_ml.training.checkpoint import load_checkpoint, load_model
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.trainer import train
