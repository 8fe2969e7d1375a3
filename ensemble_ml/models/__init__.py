"""The models: features, corrections, modified 3D U-Net, heads. They know neither ranks nor Hydra.

The setting `model.name` chooses our network (`unet3d`) or one of its baselines, published methods. Each is made from a
`ModelSpec` and a `Climate`, and maps an `EnsembleInput` to a `Prediction`. Each has the attributes `spec`, `speed`,
`features` and `heads`, and the method `param_groups()`.
"""

from __future__ import annotations

from ensemble_ml.errors import UserError
from ensemble_ml.models.climate import Climate, climate_shapes
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.models.inputs import EnsembleInput, ModelSpec, Prediction, ensemble_input
from ensemble_ml.models.model import EnsembleModel
from ensemble_ml.models.rivals.emos import EmosModel
from ensemble_ml.models.rivals.ens10_unet import Ens10UNet
from ensemble_ml.models.rivals.poet import Poet
from ensemble_ml.models.rivals.rival import Drn, Rival
from ensemble_ml.models.speed import Speed, choose

AnyModel = EnsembleModel | Rival

# A new model needs an entry here and its name in `config.model.NETWORKS`.
MODELS: dict[str, type[EnsembleModel] | type[Rival]] = {
    "unet3d": EnsembleModel,
    "emos": EmosModel,
    "drn": Drn,
    "ens10_unet": Ens10UNet,
    "poet": Poet,
}


def refuse_masks(spec: ModelSpec) -> None:
    """Check that the chosen model can take variables that have points without a value.

    Raises:
        UserError: the spec has masked variables, and its model is a baseline.
    """
    if spec.masked and MODELS[spec.config.name] is not EnsembleModel:
        raise UserError(
            f"model.name={spec.config.name}: takes no variable that has points without a value"
            f" ({', '.join(spec.masked)}); leave it out of data.variables and data.surface, or take unet3d"
        )


def build_model(spec: ModelSpec, climate: Climate) -> AnyModel:
    """Build the model that `spec.config.name` chooses.

    Raises:
        UserError: the grid does not fit the depth and the rule for the poles, `climate` does not fit `spec`, the bank
            of kernels is too small, or the model cannot take masked variables or needs the truth.
    """
    refuse_masks(spec)
    return MODELS[spec.config.name](spec, climate)
