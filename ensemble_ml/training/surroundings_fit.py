"""Fit the spread MLP of `models.surroundings`, which adds to the spread after the linear correction.

Targets are the errors that the linear correction leaves, in typical spreads, each divided by its own root mean square.
For each field, the output of the network is then scaled by the fraction, from none to all, that leaves the smallest
squared error on the validation dates. So a field about which the network learned nothing keeps its linear correction.
Axes: as in `point_fit`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.models.linear import KINDS
from ensemble_ml.training.climate_data import Dates, Sample, dates_called, kept_apart, spaced
from ensemble_ml.training.linear_fit import FEWEST_DATES, telling
from ensemble_ml.training.linear_sums import Targets
from ensemble_ml.training.point_fit import Correction, Points, Pool, gather, learn
from ensemble_ml.training.team import Team

log = logging.getLogger(__name__)

VALIDATION_DATES = 40
_UNTRIED = 0.5  # fraction for fields if the dates to choose by have none of them
_TINY = 1e-12


def fit_surroundings(
    correction: Correction,
    dates: Dates,
    train: np.ndarray,
    validation: np.ndarray,
    sizes: Sequence[int],
    targets: Targets,
) -> None:
    """Fit the weights of the spread MLP.

    Args:
        correction: the corrections; its spread MLP is changed in place.
        dates: reads dates.
        train: indices of the training dates.
        validation: indices of the validation dates.
        sizes: numbers of members that the training will show.
        targets: returns the errors to explain (see `linear_fit.fit_linear`).
    """
    network = correction.surroundings
    assert network is not None
    if dates.team.anywhere(dates.progress.is_late("surroundings")):
        dates.progress.note_cut("surroundings", "none of its steps")
        return
    # Validation dates without a target cannot choose a fraction. Then training dates are held out instead.
    asked = telling(dates, targets, validation)
    train, validation = kept_apart(train, asked)
    if len(train) + len(validation) < FEWEST_DATES:
        log.info("spread MLP: %d dates are too few, so nothing is added", len(train) + len(validation))
        return
    points = Points(correction, dates, targets)

    def take(date: int, sample: Sample, members: int, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return inputs and the error of the spread that the linear correction leaves."""
        inputs, wanted, done = points.at(date, sample, members, at)
        return inputs, [(wanted - done).chunk(KINDS)[1]]

    pool = gather("surroundings", network, points, train, sizes, take, arrays=1, stream=0)
    if pool is None:
        return
    (wanted,), unit = pool.given, _sizes(pool, dates.team)
    if not learn(
        "surroundings", network, pool, lambda found, chosen: (found - wanted[chosen] / unit) ** 2, unit, dates
    ):
        return
    shares, gain = _shares(points, spaced(validation, VALIDATION_DATES))
    network.second *= shares[:, None]
    told = "spread MLP: fitted to %d points; RMSE of the spread on %s %.1f %% lower"
    log.info(told, pool.rows, dates_called(asked), 100 * float(gain.mean().nan_to_num()))


def _sizes(pool: Pool, team: Team) -> Tensor:
    """Return the root mean square of each target, (T F,)."""
    pairs = zip(pool.given[0].T, pool.weight.T, strict=True)
    power, count = torch.stack([torch.stack([(w**2 * c).sum(), c.sum()]) for w, c in pairs]).T.contiguous()
    team.add_up(power, count)
    return (power / count.clamp(min=_TINY)).sqrt().clamp(min=_TINY)


def _shares(points: Points, validation: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return which fraction of each output to take, (T F,), and by how much this lowers the errors.

    A field that the dates lack gets the mean fraction of the others. The second result is the relative decrease of the
    root mean square error of the fields that the dates have.
    """
    correction, team = points.correction, points.dates.team
    both, own, whole = torch.zeros(3, len(correction.linear.relative_climatology), dtype=torch.float64)
    linear, network = correction.linear, correction.surroundings
    assert network is not None
    for date in points.dates.each("spread MLP: shares", validation):
        sample, members = points.dates.sample(date), points.dates.members
        padded = linear.padded(sample.mean, sample.spread, members)
        errors = points.wanted(date, sample, members)
        errors = (errors - linear.module(padded, torch.tensor([float(members)]))[0].flatten(1)).chunk(KINDS)[1]
        weight = torch.isfinite(errors) * points.area
        errors = errors.nan_to_num()
        found = correction.of(network, padded, sample, members)[0].flatten(1)
        both = both + (weight * errors * found).sum(1, dtype=torch.float64)
        own = own + (weight * found**2).sum(1, dtype=torch.float64)
        whole = whole + (weight * errors**2).sum(1, dtype=torch.float64)
    team.add_up(both, own, whole)
    # The fraction a that minimises the sum of (error - a output)^2 has a closed form. Outside of [0, 1] it would be
    # trusted to turn the output around or to enlarge it.
    shares, known = (both / own.clamp(min=_TINY)).clamp(0, 1), whole > 0
    usual = shares[known].mean() if known.any() else torch.tensor(_UNTRIED, dtype=shares.dtype)
    shares = torch.where(known, shares, usual)
    # The squared error with these fractions, without another pass over the dates.
    left = whole - 2 * shares * both + shares**2 * own
    gain = 1 - (left / whole.clamp(min=_TINY)).clamp(0, 1).sqrt()
    return shares.float(), gain[known]
