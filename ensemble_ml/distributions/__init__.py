"""The forecast distributions in torch, of each family of `ensemble_ml.fields.Family`.

The formulas stand in `ensemble_ml.closed_forms`, with their sources. `maths` has the functions of torch that they use;
`formulas` chooses by family; `means` finds the location of a mean; `members` spreads members like a distribution.
"""

from ensemble_ml.distributions.formulas import cdf, crps, moments, quantile
from ensemble_ml.distributions.means import LEAST_MEAN, MEAN_TABLES, location_of_mean, widen
from ensemble_ml.distributions.members import remap_members
