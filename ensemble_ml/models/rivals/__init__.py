"""The baselines: published methods to post-process an ensemble, behind the interface of our network."""

from ensemble_ml.models.rivals.emos import Emos, fit_emos
