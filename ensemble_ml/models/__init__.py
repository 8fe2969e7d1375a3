"""The models: features, corrections, modified 3D U-Net, heads, distributions. They know neither ranks nor Hydra."""

from ensemble_ml.models.climate import Climate, climate_shapes
from ensemble_ml.models.distributions import cdf, crps, moments, quantile, remap_members
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction, ensemble_input
from ensemble_ml.models.model import EnsembleModel
from ensemble_ml.models.registry import MODELS, AnyModel, build_model, refuse_masks
from ensemble_ml.models.speed import Speed, choose

__all__ = [
    "MODELS",
    "AnyModel",
    "Climate",
    "EnsembleInput",
    "EnsembleModel",
    "ModelSpec",
    "Prediction",
    "Speed",
    "build_model",
    "cdf",
    "choose",
    "climate_shapes",
    "crps",
    "ensemble_input",
    "moments",
    "quantile",
    "refuse_masks",
    "remap_members",
    "shrunk_spread",
]
