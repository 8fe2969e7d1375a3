"""Published ways to post-process an ensemble, behind the same interface as our network."""

from ensemble_ml.models.rivals.coupling import couple
from ensemble_ml.models.rivals.emos import Emos, fit_emos

__all__ = ["Emos", "couple", "fit_emos"]
