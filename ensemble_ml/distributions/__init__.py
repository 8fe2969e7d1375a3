"""The forecast distributions in torch, one for each `ensemble_ml.fields.Family`.

The formulas and their sources are in `ensemble_ml.closed_forms`. `formulas` chooses the formula of a family, and has
the torch functions that it uses; `means` gives a distribution a wanted mean or another spread, and members the spread
of a distribution.
"""

from ensemble_ml.distributions.formulas import cdf, crps, moments, quantile
from ensemble_ml.distributions.means import LEAST_MEAN, MEAN_TABLES, location_of_mean, remap_members, widen
