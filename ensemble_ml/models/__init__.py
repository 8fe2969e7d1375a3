"""The models: features, corrections, modified 3D U-Net, heads. They know neither ranks nor Hydra."""

from ensemble_ml.models.climate import Climate, climate_shapes
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction, ensemble_input
from ensemble_ml.models.model import EnsembleModel
from ensemble_ml.models.registry import MODELS, AnyModel, build_model, refuse_masks
from ensemble_ml.models.speed import Speed, choose
