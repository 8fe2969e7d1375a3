"""Fits the point network of `models.points` to what the linear correction leaves of the spread and of the mean's error.

    d''    minimises (d'' - e_S)^2
    v, w   minimise the CRPS of N(v sigma0, [sigma0 exp(w)]^2) at e

    e_S      error of the spread that the linear correction leaves, in typical spreads
    e        error of the mean that is left after bias and linear correction, in typical spreads
    sigma0   s0 exp(B), the sigma without the network, in typical spreads

The losses are means over single points of training dates. Each field's loss is divided by its loss without the network,
and the loss of the spread is multiplied by `_WEIGHT_OF_SPREAD`. Because v and w are fitted together, an error counts
relative to the size of errors at its point, and v overfits less than with squared errors.

A variable with bounds is scored by its own distribution, with the mean y - e + v sigma0 (y the truth), kept a little
inside the bounds (near zero as in `models.heads`). Of rain, mostly its occurrence can be predicted, which a normal
distribution does not represent.

Then d'' of each field is multiplied by the fraction from 0 to 1 that gives the smallest squared error on the validation
dates. So a field about which the network learned nothing keeps its linear correction. `truth_fit` chooses fractions of
v and w by the CRPS on the validation dates. Axes: as in `point_fit`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ensemble_ml import distributions
from ensemble_ml.fields import Family
from ensemble_ml.models.features import shrunk_spread
from ensemble_ml.models.heads import AT_ZERO, FOLLOWED, bounded, wetter, widened
from ensemble_ml.models.linear import KINDS
from ensemble_ml.models.model import Start
from ensemble_ml.models.points import inputs_of, outputs_of
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import Dates, Sample, dates_called, kept_apart, spaced
from ensemble_ml.training.linear_fit import FEWEST_DATES, telling
from ensemble_ml.training.linear_sums import Targets, neighbourhoods
from ensemble_ml.training.point_fit import LOOKED_AT, Known, Pool, gather, learn
from ensemble_ml.training.progress import NETWORK, Team

log = logging.getLogger(__name__)

VALIDATION_DATES = 40  # most dates to choose fractions by
_WEIGHT_OF_SPREAD = 0.3  # with 1, the gain in CRPS is a twentieth smaller (ARCHITECTURE, "Tried")
_UNTRIED = 0.5  # fraction if no field has targets on the validation dates
_LEAST_MEAN = 0.01  # least distance of a mean from a bound, in scales: nearer to it, the location changes too fast
# Typical spreads. Without this floor, the few wet points of a field that is dry nearly everywhere would outweigh all
# other fields.
_LEAST_COST = 0.02
_TINY = 1e-12


# Returns from a sample and M the expected spread of all members, (T, F, Y, X) in physical units.
Expected = Callable[[Sample, int], Tensor]


def fit_points(
    start: Start, dates: Dates, train: np.ndarray, validation: np.ndarray, sizes: Sequence[int],
    targets: Targets, s1: Expected | None,
) -> bool:  # fmt: skip
    """Fit the weights of the point network, and choose which fraction of d'' each field takes.

    The rest of the model's start is fitted already. `s1` returns the expected spread, which sigma follows; it is None
    if the model does not predict the truth. `targets` and `sizes` are as in `linear_fit.fit_linear`.

    Returns:
        True if the network was fitted; False if it was not, for lack of time, dates, memory or targets.
    """
    network = start.points
    assert network is not None
    if dates.team.anywhere(dates.progress.is_late()):
        dates.progress.note_cut("none of its steps")
        return False
    # Validation dates without a target cannot choose a fraction. Then training dates are held out instead.
    asked = telling(dates, targets, validation)
    train, validation = kept_apart(train, asked)
    if len(train) < FEWEST_DATES:
        log.info("%s: %d dates are too few, so nothing is added", NETWORK, len(train))
        return False
    points = Points(start, dates, targets, s1)
    pool = gather(network, dates, train, sizes, points.take, points.arrays)
    if pool is None:
        return False
    unit = _root_mean_square(pool.known[0], dates.team)
    typical = points.score.typical(pool, dates.team) if points.score else torch.ones(())

    def losses(found: Tensor, known: list[Known]) -> list[Tensor]:
        """Return weighted squared errors of the spread, and the CRPS, each relative to its mean without the network."""
        more, errors = found[:, : len(unit)], found[:, len(unit) :]
        costs = [_WEIGHT_OF_SPREAD * (more - known[0].arrays[0] / unit) ** 2]
        if points.score is not None:
            costs.append(points.score(errors, known[1].arrays) / typical)
        return costs

    if not learn(network, pool, losses, torch.cat([unit, torch.ones(len(network.second) - len(unit))]), dates):
        return False
    shares, gain = _shares(points, spaced(validation, VALIDATION_DATES))
    network.second[: len(unit)] *= shares[:, None]
    text = "point network: fitted to %d points; RMSE of the spread on %s %.1f %% lower"
    log.info(text, pool.rows, dates_called(asked), 100 * float(gain.mean().nan_to_num()))
    return True


class Points:
    """A source of inputs and targets of the network at single points of a date, with arguments as of `fit_points`.

    Attributes:
        arrays: number of arrays that each loss needs: that of the spread, then that of the truth.
        score: the loss of the truth, or None.
    """

    # The last date and its truth, because the fit takes several choices of a date's members in a row.
    _date, _latest = -1, torch.empty(0)

    def __init__(self, start: Start, dates: Dates, targets: Targets, s1: Expected | None):
        assert start.linear is not None and start.points is not None
        self.start, self.linear, self.network = start, start.linear, start.points
        self.dates, self.targets, self.s1 = dates, targets, s1
        self.area = torch.from_numpy(dates.spec.grid.area_weights()).float().flatten()
        self.columns = dates.spec.grid.shape[1]
        self.score, self.arrays = None, [1]
        if s1 is not None and outputs_of(dates.spec) > 1:
            self.score = _Score(start)
            self.arrays.append(3 if self.score.bounded else 2)

    def wanted(self, date: int, sample: Sample, members: int) -> Tensor:
        """Return the errors of mean and spread before the linear correction, at all points.

        Their shape is (2 T F, Y X), in typical spreads, NaN where absent.
        """
        errors = torch.stack(self.targets(date, sample, members)) / self.start.heads.typical[..., None, None]
        return errors.flatten(3).flatten(0, 2)

    def take(self, date: int, sample: Sample, members: int, at: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Return the inputs, and the arrays that the losses need, at the points with indices `at` (P,) into Y X.

        Returns:
            x without the constant (K, P), and the arrays (T F, P) of each loss. These are e_S for the spread; e and
            sigma0 for the truth, in typical spreads, and the truth in physical units if a variable has bounds.
        """
        heads, rows = self.start.heads, at // self.columns
        mean, spread, count, day = sample.batch(members)
        near = neighbourhoods(self.start.anomalies(mean, spread, count)[0], at)
        common = self.start.features.common(count, day)[0]
        cells = near.unflatten(0, (-1, 3, 3)).movedim(-1, 0)
        climatology, common = (v.flatten(1).index_select(1, at) for v in (heads.relative_climatology, common))
        frame = self.network.frame_at(rows)
        inputs = inputs_of(cells, climatology.T[..., None, None], common.T[..., None, None], frame)[..., 0, 0].T
        done = self.linear.at_points(near, rows, members)
        left = self.wanted(date, sample, members).index_select(1, at) - done
        # The network sees southern points mirrored, so its targets are mirrored as well.
        error, more = self.linear.in_mirror(left, rows).chunk(KINDS)
        known = [[more]]
        if self.score is not None:
            assert self.s1 is not None
            first = self.s1(sample, members).flatten(2).flatten(0, 1)[:, at] / heads.typical.flatten()[:, None]
            # sigma follows the linearly corrected spread, as in the model.
            followed = widened(first, done.chunk(KINDS)[1])[None]
            shrink, inflation = heads.shrink.flatten()[:, None], heads.inflation.flatten(2).flatten(0, 1)[:, at]
            scale = shrunk_spread(followed, torch.tensor([float(FOLLOWED)]), climatology, shrink)[0]
            known.append([error, scale * inflation.exp()])
            if self.score.bounded:
                known[1].append(self._truth(date)[:, at])
        return inputs, known

    def _truth(self, date: int) -> Tensor:
        """Return the truth of a date, (T F, Y X)."""
        if date != self._date:
            truth = self.dates.target(Part.TRUTH, date)
            self._date, self._latest = date, truth.flatten(2).flatten(0, 1)
        return self._latest


class _Score:
    """The CRPS of single points, each field by its own distribution.

    Attributes:
        bounded: distributions that are not normal, with the positions of their fields.
    """

    def __init__(self, start: Start):
        heads, laws = start.heads, start.spec.families
        self.dry = [heads.dry_share.flatten(), heads.dry_mean.flatten()]
        # Fields are grouped by distribution, so that each is scored in one call. `back` restores their order.
        kinds = list(dict.fromkeys(law for law in laws if law is not Family.NORMAL))
        codes = torch.tensor([kinds.index(law) if law in kinds else -1 for law in laws])
        places = codes.expand_as(heads.typical).flatten()
        self.normal = torch.nonzero(places < 0).flatten()
        self.bounded = {kind: torch.nonzero(places == code).flatten() for code, kind in enumerate(kinds)}
        self.unit = heads.typical.flatten()  # bounds are fixed numbers in physical units
        self.back = torch.argsort(torch.cat([self.normal, *self.bounded.values()]))

    def __call__(self, found: Tensor, given: Sequence[Tensor]) -> Tensor:
        """Return the CRPS in typical spreads, (P, T F), from v and w before they are bounded, (P, 2 T F).

        Given are error, sigma0 and, if any field has bounds, the truth, (P, T F) each, in the units of `Points.take`.
        """
        error, sigma0 = given[0], given[1].clamp(min=_TINY)
        v, w = bounded(found).chunk(2, 1)
        shift, sigma = v * sigma0, sigma0 * w.exp()
        normal = (values[:, self.normal] for values in (shift, sigma, error))
        costs = [distributions.crps(Family.NORMAL, *normal)]
        for law, at in self.bounded.items():
            truth, unit = given[2][:, at], self.unit[at]
            # y - e is the mean without the network. Distributions with bounds need physical units.
            mean, wide = truth + (shift - error)[:, at] * unit, sigma[:, at] * unit
            if law in AT_ZERO:
                mean, wide = wetter(mean, wide, *(values[at] for values in self.dry))
            # `location_of_mean` also raises such a mean to `LEAST_MEAN`, but without a gradient.
            near = distributions.LEAST_MEAN if law is Family.TRUNCATED_NORMAL else _LEAST_MEAN
            mean = _within(mean, law, near * wide)
            location = distributions.location_of_mean(law, mean, wide)
            costs.append(distributions.crps(law, location, wide, truth) / unit)
        return torch.cat(costs, 1)[:, self.back]

    def typical(self, pool: Pool, team: Team) -> Tensor:
        """Return the mean CRPS of each field without the network, (T F,) in typical spreads, at least `_LEAST_COST`."""
        some = pool.known[1].at(pool.spaced(LOOKED_AT))
        costs = self(some.weight.new_zeros(len(some.weight), 2 * some.weight.shape[1]), some.arrays)
        cost, count = (costs * some.weight).sum(0), some.weight.sum(0)
        team.add_up(cost, count)
        return (cost / count.clamp(min=_TINY)).clamp(min=_LEAST_COST)


def _within(mean: Tensor, law: Family, least: Tensor) -> Tensor:
    """Return the mean, moved to at least `least` inside the bounds.

    The gradient passes as if the mean were not moved. Otherwise a point with a dry forecast could never become wet.
    """
    lower, upper = law.bounds
    return mean + (lower + least - mean).clamp(min=0).detach() - (mean - upper + least).clamp(min=0).detach()


def _root_mean_square(known: Known, team: Team) -> Tensor:
    """Return the root mean square of each target, (T F,)."""
    pairs = zip(known.arrays[0].T, known.weight.T, strict=True)
    power, count = torch.stack([torch.stack([(w**2 * c).sum(), c.sum()]) for w, c in pairs]).T.contiguous()
    team.add_up(power, count)
    return (power / count.clamp(min=_TINY)).sqrt().clamp(min=_TINY)


def _shares(points: Points, validation: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the fraction of d'' that each field takes, (T F,), and by which fraction this lowers the RMSE of each.

    A field without a target on the dates gets the mean fraction of the others, and the second result leaves it out.
    """
    start, team = points.start, points.dates.team
    both, own, whole = torch.zeros(3, start.heads.typical.numel(), dtype=torch.float64)
    for date in points.dates.each(f"{NETWORK}: shares", validation):
        sample, members = points.dates.sample(date), points.dates.members
        linear, found = start.corrections(*sample.batch(members))
        assert linear is not None and found is not None
        found = found[0, 0].flatten(2).flatten(0, 1)
        errors = (points.wanted(date, sample, members) - linear[0].flatten(3).flatten(0, 2)).chunk(KINDS)[1]
        weight = torch.isfinite(errors) * points.area
        errors = errors.nan_to_num()
        both = both + (weight * errors * found).sum(1, dtype=torch.float64)
        own = own + (weight * found**2).sum(1, dtype=torch.float64)
        whole = whole + (weight * errors**2).sum(1, dtype=torch.float64)
    team.add_up(both, own, whole)
    # The fraction a that minimises the sum of (error - a output)^2 has a closed form. It is kept within [0, 1], so that
    # an output is neither reversed nor enlarged.
    shares, known = (both / own.clamp(min=_TINY)).clamp(0, 1), whole > 0
    usual = shares[known].mean() if known.any() else torch.tensor(_UNTRIED, dtype=shares.dtype)
    shares = torch.where(known, shares, usual)
    # The squared error with these fractions, without another pass over the dates.
    left = whole - 2 * shares * both + shares**2 * own
    gain = 1 - (left / whole.clamp(min=_TINY)).clamp(0, 1).sqrt()
    return shares.float(), gain[known]
