"""Fits the error MLP of `models.surroundings`: which errors are left to expect, and how large they are.

    v, w = argmin CRPS of N(v sigma0, [sigma0 exp(w)]^2) at e

    e        error that is left after bias and linear correction, in typical spreads
    sigma0   s0 exp(B), the sigma without the network, in typical spreads

The minimum is one over single points of training dates. Mean and width are fitted at once. So an error counts relative
to how large errors are where it stands, and less of the mean is fitted to chance than by squared errors.

A variable that has bounds is scored by its own distribution, with the mean y - e + v sigma0, kept a little off the
bounds (at zero as in `models.dry`). Most of what can be known of rain is whether there is any, and a normal
distribution does not ask that.

`truth_fit` then takes fractions of v and w by the CRPS of the validation dates. Axes: as in `point_fit`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ensemble_ml import distributions
from ensemble_ml.fields import Family
from ensemble_ml.models.dry import AT_ZERO, wetter
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.models.heads import FOLLOWED, bounded, widened
from ensemble_ml.models.linear import KINDS
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import Dates, Sample, families
from ensemble_ml.training.linear_fit import FEWEST_DATES
from ensemble_ml.training.linear_sums import Targets
from ensemble_ml.training.point_fit import LOOKED_AT, Correction, Points, Pool, gather, learn
from ensemble_ml.training.team import Team

log = logging.getLogger(__name__)

_LEAST_MEAN = 0.01  # scales from a bound: the location of a mean nearer to it moves too fast to be fitted
# Typical spreads. Without this floor, the few wet points of a field that is dry nearly everywhere would outweigh all
# other fields.
_LEAST_COST = 0.02
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
    dry: tuple[Tensor, Tensor],
) -> bool:
    """Fit the weights of the error MLP.

    Args:
        correction: the corrections; its error MLP is changed in place.
        dates: reads dates.
        train: indices of the training dates.
        sizes: numbers of members that the training will show.
        targets: returns the errors to explain (see `linear_fit.fit_linear`).
        s1: from a sample and M to the expected spread of all members, (T, F, Y, X).
        shrink: (T, F) k of s0, which follows the corrected spread.
        inflation: (T, F, Y, X) B.
        dry: a and b of `models.dry`, (T, F) each.

    Returns:
        False if the network got no weights, for lack of time, dates, memory or targets.
    """
    network = correction.residuals
    assert network is not None
    if dates.team.anywhere(dates.progress.is_late("residuals")):
        dates.progress.note_cut("residuals", "none of its steps")
        return False
    if len(train) < FEWEST_DATES:
        log.info("error MLP: %d dates are too few, so nothing is added", len(train))
        return False
    points = Points(correction, dates, targets)
    score = _Score(correction, dates, dry)
    before = _Before(points, s1, shrink, inflation, truth=bool(score.bounded))
    pool = gather("residuals", network, points, train, sizes, before.take, arrays=before.arrays, stream=1)
    if pool is None:
        return False
    # Divided by their typical CRPS, all fields weigh the same in the loss.
    typical = score.typical(pool, dates.team)

    def cost(found: Tensor, chosen: Tensor) -> Tensor:
        """Return the CRPS of the pool's rows, relative to that without the network."""
        return score(found, [values[chosen] for values in pool.given]) / typical

    if not learn("residuals", network, pool, cost, torch.ones(len(network.second)), dates):
        return False
    log.info("error MLP: fitted to %d points", pool.rows)
    return True


class _Score:
    """The CRPS of single points, each field by its own distribution.

    Attributes:
        bounded: distributions that are not normal, with the positions of their fields.
    """

    def __init__(self, correction: Correction, dates: Dates, dry: tuple[Tensor, Tensor]):
        linear = correction.linear
        self.dry = [linear.ordered(values[None, ..., None, None]).flatten() for values in dry]
        laws = families(dates.spec)
        # Fields are grouped by distribution, so that each is scored in one call. `back` restores their order.
        kinds = list(dict.fromkeys(law for law in laws if law is not Family.NORMAL))
        codes = torch.tensor([kinds.index(law) if law in kinds else -1 for law in laws])
        places = linear.ordered(codes.expand(1, *dates.shape)[..., None, None]).flatten()
        self.normal = torch.nonzero(places < 0).flatten()
        self.bounded = {kind: torch.nonzero(places == code).flatten() for code, kind in enumerate(kinds)}
        self.unit = linear.ordered(linear.typical[None]).flatten()  # bounds are fixed numbers in physical units
        self.back = torch.argsort(torch.cat([self.normal, *self.bounded.values()]))

    def __call__(self, found: Tensor, given: Sequence[Tensor]) -> Tensor:
        """Return the CRPS in typical spreads, (P, T F).

        Args:
            found: (P, 2 T F) v and w, before they are bounded.
            given: error, sigma0 and, if any field has bounds, the truth; the arrays of `_Before`.
        """
        error, sigma0 = given[0], given[1].clamp(min=_TINY)
        v, w = bounded(found).chunk(2, 1)
        shift, sigma = v * sigma0, sigma0 * w.exp()
        normal = (values[:, self.normal] for values in (shift, sigma, error))
        costs = [distributions.crps(Family.NORMAL, *normal)]
        for law, at in self.bounded.items():
            truth, unit = given[2][:, at], self.unit[at]
            # The error is y - mean without the network, so y - e is that mean. Distributions with bounds need physical
            # units.
            mean, wide = truth + (shift - error)[:, at] * unit, sigma[:, at] * unit
            if law in AT_ZERO:
                mean, wide = wetter(mean, wide, *(values[at] for values in self.dry))
            # `location_of_mean` itself raises such a mean to `LEAST_MEAN`, but then there would be no gradient.
            near = distributions.LEAST_MEAN if law is Family.TRUNCATED_NORMAL else _LEAST_MEAN
            mean = _within(mean, law, near * wide)
            location = distributions.location_of_mean(law, mean, wide)
            costs.append(distributions.crps(law, location, wide, truth) / unit)
        return torch.cat(costs, 1)[:, self.back]

    def typical(self, pool: Pool, team: Team) -> Tensor:
        """Return the mean CRPS of each field without the network, (T F,)."""
        some = pool.spaced(LOOKED_AT)
        weight = pool.weight[some]
        costs = self(weight.new_zeros(len(weight), 2 * weight.shape[1]), [values[some] for values in pool.given])
        cost, count = (costs * weight).sum(0), weight.sum(0)
        team.add_up(cost, count)
        return (cost / count.clamp(min=_TINY)).clamp(min=_LEAST_COST)


def _within(mean: Tensor, law: Family, least: Tensor) -> Tensor:
    """Return the mean, kept at least `least` away from the bounds.

    The gradient is as if it were not kept away. Otherwise a point that is forecast dry could never become wet.
    """
    lower, upper = law.bounds
    return mean + (lower + least - mean).clamp(min=0).detach() - (mean - upper + least).clamp(min=0).detach()


class _Before:
    """The errors and the sigma of single points without the network, and the truth itself if it is needed."""

    # The last date and its truth. The fit asks for several choices of a date's members in a row.
    _date, _latest = -1, torch.empty(0)

    def __init__(
        self, points: Points, s1: Callable[[Sample, int], Tensor], shrink: Tensor, inflation: Tensor, *, truth: bool
    ):
        self.points, self.s1, self.arrays = points, s1, 3 if truth else 2
        linear = points.correction.linear
        self.climatology = linear.relative_climatology.flatten(1)
        self.inflation = linear.ordered(inflation[None]).flatten(1)
        self.shrink = linear.ordered(shrink[None, ..., None, None]).flatten(1)
        self.typical = linear.ordered(linear.typical[None]).flatten(1)

    def take(self, date: int, sample: Sample, members: int, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return x (K, P); error and sigma0 (T F, P) in typical spreads, and the truth in physical units."""
        correction = self.points.correction
        assert correction.surroundings is not None
        inputs, wanted, done = self.points.at(date, sample, members, at)
        # sigma follows the spread with both of its corrections, as in the model.
        more = done.chunk(KINDS)[1] + correction.surroundings.at_points(inputs)
        first = correction.linear.ordered(self.s1(sample, members)[None]).flatten(1)[:, at] / self.typical
        followed = widened(first, more)
        climatology, inflation = self.climatology[:, at], self.inflation[:, at]
        scale = shrunk_spread(followed[None], torch.tensor([float(FOLLOWED)]), climatology, self.shrink)[0]
        # The network sees southern points in the mirror, so its targets must be mirrored as well.
        left = correction.linear.module.in_mirror(wanted - done, at // self.points.columns)
        given = [left.chunk(KINDS)[0], scale * inflation.exp()]
        if self.arrays > len(given):
            given.append(self._truth(date)[:, at])
        return inputs, given

    def _truth(self, date: int) -> Tensor:
        """Return the truth of a date, (T F, Y X)."""
        if date != self._date:
            truth = self.points.dates.target(Part.TRUTH, date)
            self._date, self._latest = date, self.points.correction.linear.ordered(truth[None]).flatten(1)
        return self._latest
