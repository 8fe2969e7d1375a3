"""Fits the network of `models.surroundings` that says how wide the distribution is, beyond what the spread says.

With e what is left of an error once mean and bias are corrected, sigma0 = s0 exp(B) what sigma is without the network:

    w = argmin CRPS of N(0, [sigma0 exp(w)]^2) at e

over single points of training dates, e and sigma0 in typical spreads. The normal law stands for all families here:
`truth_fit` takes none, half or all of w, by the CRPS of the variable's own law on the validation dates. Axes: as in
`point_fit`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.fields import Family
from ensemble_ml.models import distributions
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.models.heads import FOLLOWED, bounded, widened
from ensemble_ml.models.linear import KINDS
from ensemble_ml.models.place import plane_count
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.linear_fit import FEWEST_DATES, Targets
from ensemble_ml.training.point_fit import Correction, Points, Pool, gather, learn

log = logging.getLogger(__name__)

_PASSES = 2
_TINY = 1e-12


def fit_sharpness(
    correction: Correction,
    dates: Dates,
    train: np.ndarray,
    sizes: Sequence[int],
    targets: Targets,
    shrink: Tensor,
    inflation: Tensor,
) -> bool:
    """Give `correction.sharpness` its weights, and say whether it has got any.

    Args:
        train: indices of start dates.
        sizes: numbers of members that the training will show.
        targets: as `linear_fit.fit_linear` takes them.
        shrink: k (T, F) of s0, which follows the corrected spread.
        inflation: B (T, F, Y, X).
    """
    network = correction.sharpness
    assert network is not None
    if len(train) < FEWEST_DATES:
        log.info("sharpness: %d dates are too few, so nothing is added", len(train))
        return False
    points = Points(correction, dates, targets)
    before = _Before(points, shrink, inflation)
    pool = gather("sharpness", network, points, train, sizes, before.take, arrays=2, passes=_PASSES, seed=1)
    if pool is None:
        return False
    error, scale = pool.given
    zero = torch.zeros(())

    def cost(found: Tensor, chosen: Tensor) -> Tensor:
        sigma = scale[chosen].clamp(min=_TINY) * bounded(found).exp()
        return distributions.crps(Family.NORMAL, zero, sigma, error[chosen]) / typical

    typical = _typical_cost(pool)
    one = torch.ones(len(network.second))
    learn(network, pool, cost, unit=one, common=plane_count(dates.spec), passes=_PASSES, beat=dates.beat)
    log.info("sharpness: fitted to %d points", len(pool.inputs))
    return True


class _Before:
    """Errors and sigma of single points without the network."""

    def __init__(self, points: Points, shrink: Tensor, inflation: Tensor):
        self.points = points
        linear = points.correction.linear
        self.climatology = linear.ordered((linear.climatology / linear.typical)[None]).flatten(1)
        self.inflation = linear.ordered(inflation[None]).flatten(1)
        self.shrink = linear.ordered(shrink[None, ..., None, None]).flatten(1)
        self.typical = linear.ordered(linear.typical[None]).flatten(1)

    def take(self, date: int, sample: Sample, members: int, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        """x (K, P); error and sigma0 (O, P) in typical spreads."""
        correction = self.points.correction
        assert correction.surroundings is not None
        inputs, wanted, left = self.points.at(date, sample, members, at)
        error, missing = (left - correction.surroundings.at_points(inputs)).chunk(KINDS)
        full = correction.linear.ordered(sample.full_spread[None]).flatten(1)[:, at] / self.typical
        first = full - wanted.chunk(KINDS)[1]  # s1, not yet corrected
        followed = widened(first, full - missing - first)
        climatology, inflation = self.climatology[:, at], self.inflation[:, at]
        scale = shrunk_spread(followed[None], torch.tensor([float(FOLLOWED)]), climatology, self.shrink)[0]
        return inputs, [error, scale * inflation.exp()]


def _typical_cost(pool: Pool) -> Tensor:
    """Mean CRPS of each output without the network, (O,)."""
    some = slice(None, None, max(1, len(pool.inputs) // 50_000))
    error, scale, weight = pool.given[0][some], pool.given[1][some].clamp(min=_TINY), pool.weight[some]
    costs = distributions.crps(Family.NORMAL, torch.zeros(()), scale, error) * weight
    return (costs.sum(0) / weight.sum(0).clamp(min=_TINY)).clamp(min=_TINY)
