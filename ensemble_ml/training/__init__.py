"""Training: the fits before the first step, the trainer, the loss, validation, checkpoints, logs."""

from ensemble_ml.training.checkpoint import Checkpoint, load_checkpoint, load_model, load_spec
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.trainer import train

__all__ = ["Checkpoint", "fit_climate", "load_checkpoint", "load_model", "load_spec", "train"]
