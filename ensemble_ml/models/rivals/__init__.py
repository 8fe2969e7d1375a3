"""Published ways to post-process an ensemble, behind the same interface as our network."""

from ensemble_ml.models.rivals.emos import Emos, fit_emos

__all__ = ["Emos", "fit_emos"]
