"""Train models: fits before the first step, steps, loss, validation, checkpoints and logs."""

from ensemble_ml.training.checkpoint import load_checkpoint, load_model
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.trainer import train
