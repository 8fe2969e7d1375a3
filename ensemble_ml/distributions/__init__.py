"""The forecast distributions in torch, one for each `ensemble_ml.fields.Family`.

The formulas and their sources are in `ensemble_ml.closed_forms`. `maths` has the torch functions that they use;
`formulas` chooses the formula of a family; `means` finds the location that gives a mean; `members` gives members the
spread of a distribution.
"""

from ensemble_ml.distributions.formulas import cdf, crps, moments, quantile
from ensemble_ml.distributions.means import LEAST_MEAN, MEAN_TABLES, location_of_mean, widen
from ensemble_ml.distributions.members import remap_members
