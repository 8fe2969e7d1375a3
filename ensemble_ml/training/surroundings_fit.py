"""Fits the network of `models.surroundings` that adds to the spread to what the linear correction leaves of it.

Targets are errors in typical spreads, each divided by its own root mean square. What the network adds to a field is
then scaled by the share of it, none to all, that leaves the smallest squared error on the validation dates: a field
that it learned nothing of keeps its linear correction. Axes: as in `point_fit`.
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
_UNTRIED = 0.5  # share of what no date to choose by can tell of
_TINY = 1e-12


def fit_surroundings(
    correction: Correction,
    dates: Dates,
    train: np.ndarray,
    validation: np.ndarray,
    sizes: Sequence[int],
    targets: Targets,
) -> None:
    """Give `correction.surroundings` its weights.

    Args:
        train, validation: indices of start dates.
        sizes: numbers of members that the training will show.
        targets: as `linear_fit.fit_linear` takes them.
    """
    network = correction.surroundings
    assert network is not None
    if dates.team.anywhere(dates.progress.is_late("surroundings")):
        dates.progress.note_cut("surroundings", "none of its steps")
        return
    asked = telling(dates, targets, validation)
    train, validation = kept_apart(train, asked)
    if len(train) + len(validation) < FEWEST_DATES:
        log.info("surroundings: %d dates are too few, so nothing is added", len(train) + len(validation))
        return
    points = Points(correction, dates, targets)

    def take(date: int, sample: Sample, members: int, at: Tensor) -> tuple[Tensor, list[Tensor]]:
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
    told = "surroundings: fitted to %d points; RMSE of the spread on %s %.1f %% lower"
    log.info(told, pool.rows, dates_called(asked), 100 * float(gain.mean().nan_to_num()))


def _sizes(pool: Pool, team: Team) -> Tensor:
    """Root mean square of each target, (T F,)."""
    pairs = zip(pool.given[0].T, pool.weight.T, strict=True)
    power, count = torch.stack([torch.stack([(w**2 * c).sum(), c.sum()]) for w, c in pairs]).T.contiguous()
    team.add_up(power, count)
    return (power / count.clamp(min=_TINY)).sqrt().clamp(min=_TINY)


def _shares(points: Points, validation: np.ndarray) -> tuple[Tensor, Tensor]:
    """How much of each output to take, (T F,), as of the others where the dates lack it; by what share the root mean
    square error of those that they have then falls."""
    correction, team = points.correction, points.dates.team
    both, own, whole = torch.zeros(3, len(correction.linear.relative_climatology), dtype=torch.float64)
    linear, network = correction.linear, correction.surroundings
    assert network is not None
    for date in points.dates.each("spread network: shares", validation):
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
    shares, known = (both / own.clamp(min=_TINY)).clamp(0, 1), whole > 0
    usual = shares[known].mean() if known.any() else torch.tensor(_UNTRIED, dtype=shares.dtype)
    shares = torch.where(known, shares, usual)
    left = whole - 2 * shares * both + shares**2 * own
    gain = 1 - (left / whole.clamp(min=_TINY)).clamp(0, 1).sqrt()
    return shares.float(), gain[known]
