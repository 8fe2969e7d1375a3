"""Fits the network of `models.surroundings` that says what errors are left to expect, and how large they are.

With e what is left of an error once mean and bias are corrected, sigma0 = s0 exp(B) what sigma is without the network:

    v, w = argmin CRPS of N(v sigma0, [sigma0 exp(w)]^2) at e

over single points of training dates, e and sigma0 in typical spreads. Mean and width are fitted at once: an error
counts by how large errors are where it stands, so less of the mean is fitted to chance than by squared errors. The
normal law stands for all families here: `truth_fit` takes shares of v and w by the CRPS of the variable's own law on
the validation dates. Axes: as in `point_fit`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.fields import Family
from ensemble_ml.models import distributions
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.models.heads import FOLLOWED, bounded, widened
from ensemble_ml.models.linear import KINDS
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.linear_fit import FEWEST_DATES
from ensemble_ml.training.linear_sums import Targets
from ensemble_ml.training.point_fit import Correction, Points, Pool, gather, learn

log = logging.getLogger(__name__)

_TINY = 1e-12


def fit_residuals(
    correction: Correction,
    dates: Dates,
    train: np.ndarray,
    sizes: Sequence[int],
    targets: Targets,
    s1: Callable[[Sample, int], Tensor],
    shrink: Tensor,
    inflation: Tensor,
) -> bool:
    """Give `correction.residuals` its weights, and say whether it has got any.

    Args:
        train: indices of start dates.
        sizes: numbers of members that the training will show.
        targets: as `linear_fit.fit_linear` takes them.
        s1: from a sample and M the full spread that is expected of it, (T, F, Y, X).
        shrink: k (T, F) of s0, which follows the corrected spread.
        inflation: B (T, F, Y, X).
    """
    network = correction.residuals
    assert network is not None
    if len(train) < FEWEST_DATES:
        log.info("residuals: %d dates are too few, so nothing is added", len(train))
        return False
    points = Points(correction, dates, targets)
    before = _Before(points, s1, shrink, inflation)
    pool = gather("residuals", network, points, train, sizes, before.take, arrays=2, seed=1)
    if pool is None:
        return False
    error, scale = pool.given
    typical = _typical_cost(pool)

    def cost(found: Tensor, chosen: Tensor) -> Tensor:
        sigma0 = scale[chosen].clamp(min=_TINY)
        v, w = bounded(found).chunk(2, 1)
        return distributions.crps(Family.NORMAL, v * sigma0, sigma0 * w.exp(), error[chosen]) / typical

    learn(network, pool, cost, torch.ones(len(network.second)), dates)
    log.info("residuals: fitted to %d points", len(pool.inputs))
    return True


class _Before:
    """Errors and sigma of single points without the network."""

    def __init__(self, points: Points, s1: Callable[[Sample, int], Tensor], shrink: Tensor, inflation: Tensor):
        self.points, self.s1 = points, s1
        linear = points.correction.linear
        self.climatology = linear.relative_climatology.flatten(1)
        self.inflation = linear.ordered(inflation[None]).flatten(1)
        self.shrink = linear.ordered(shrink[None, ..., None, None]).flatten(1)
        self.typical = linear.ordered(linear.typical[None]).flatten(1)

    def take(self, date: int, sample: Sample, members: int, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        """x (K, P); error and sigma0 (T F, P) in typical spreads."""
        correction = self.points.correction
        assert correction.surroundings is not None
        inputs, wanted, done = self.points.at(date, sample, members, at)
        more = done.chunk(KINDS)[1] + correction.surroundings.at_points(inputs)
        first = correction.linear.ordered(self.s1(sample, members)[None]).flatten(1)[:, at] / self.typical
        followed = widened(first, more)
        climatology, inflation = self.climatology[:, at], self.inflation[:, at]
        scale = shrunk_spread(followed[None], torch.tensor([float(FOLLOWED)]), climatology, self.shrink)[0]
        left = correction.linear.module.in_mirror(wanted - done, at // self.points.columns)
        return inputs, [left.chunk(KINDS)[0], scale * inflation.exp()]


def _typical_cost(pool: Pool) -> Tensor:
    """Mean CRPS of each field without the network, (T F,)."""
    some = slice(None, None, max(1, len(pool.inputs) // 50_000))
    error, scale, weight = pool.given[0][some], pool.given[1][some].clamp(min=_TINY), pool.weight[some]
    costs = distributions.crps(Family.NORMAL, torch.zeros(()), scale, error) * weight
    return (costs.sum(0) / weight.sum(0).clamp(min=_TINY)).clamp(min=_TINY)
