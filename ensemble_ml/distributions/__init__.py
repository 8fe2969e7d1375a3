"""The forecast distributions: all formulas of each family of `ensemble_ml.fields.Family`, in torch.

`formulas` has those of the normal distributions (whole, truncated, censored at one bound and at two), and chooses by
family; `skewed` those of the log-normal and the censored shifted gamma; `means` finds the location of a mean; `members`
spreads members like a distribution.
"""

from ensemble_ml.distributions.formulas import cdf, crps, moments, quantile
from ensemble_ml.distributions.means import LEAST_MEAN, MEAN_TABLES, location_of_mean, widen
from ensemble_ml.distributions.members import remap_members

__all__ = [
    "LEAST_MEAN",
    "MEAN_TABLES",
    "cdf",
    "crps",
    "location_of_mean",
    "moments",
    "quantile",
    "remap_members",
    "widen",
]
