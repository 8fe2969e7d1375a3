"""The models that `model.name` can name: ours, and published ways to post-process an ensemble, as its rivals.

Each takes a `ModelSpec` and a `Climate`, maps an `EnsembleInput` to a `Prediction`, and offers `spec`, `speed`,
`pressure`, `surface` (each with `heads`, or None), `features` and `param_groups()`.
"""

from __future__ import annotations

from ensemble_ml.errors import UserError
from ensemble_ml.models.climate import Climate
from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.model import EnsembleModel
from ensemble_ml.models.rivals.drn import Drn
from ensemble_ml.models.rivals.emos_model import EmosModel
from ensemble_ml.models.rivals.ens10_unet import Ens10UNet
from ensemble_ml.models.rivals.poet import Poet
from ensemble_ml.models.rivals.rival import Rival

AnyModel = EnsembleModel | Rival

MODELS: dict[str, type[EnsembleModel] | type[Rival]] = {
    "unet3d": EnsembleModel,
    "emos": EmosModel,
    "drn": Drn,
    "ens10_unet": Ens10UNet,
    "poet": Poet,
}


def refuse_masks(spec: ModelSpec) -> None:
    """Raise a UserError where the model that `spec` names takes no masks, and a variable has points without a value."""
    if spec.masked and MODELS[spec.config.name] is not EnsembleModel:
        raise UserError(
            f"model.name={spec.config.name}: takes no variable that has points without a value"
            f" ({', '.join(spec.masked)}); leave it out of data.variables and data.surface, or take unet3d"
        )


def build_model(spec: ModelSpec, climate: Climate) -> AnyModel:
    """Make the model that `spec.config.name` names.

    Raises:
        UserError: the grid does not fit depth and pole, `climate` does not fit `spec`, or the model cannot take masks.
    """
    refuse_masks(spec)
    return MODELS[spec.config.name](spec, climate)
