"""Fit the spread: s_clim, the terms of s1, and the typical error of s1.

The formulas are in `training.climate_fit` and `models.features`.

Axes: T lead, F field (variables and levels, then surface variables), N members of the full ensemble, Y latitude,
X longitude.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.models.features import shrunk_spread, unbiased_spread
from ensemble_ml.models.heads import FOLLOWED, widened
from ensemble_ml.models.model import Start
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import Dates, Sample
from ensemble_ml.training.smoothing import Scales

log = logging.getLogger(__name__)

_FEW = 60  # dates times (N - 1): with fewer degrees of freedom, s_clim is smoothed
# Values of k that are tried.
SHRINK = torch.tensor([0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64])
_SHRINK_DEFAULT = 2.0  # k where none can be chosen
_LEAST_SPREAD = 0.02  # least s_clim of a cell, relative to the root mean square of its field
_NEVER = 1e-6  # below this fraction of a field's standard deviation, a spread counts as zero
_TINY = 1e-30


@dataclass(eq=False)
class Spread:
    """The spread of the untrained model.

    Attributes:
        climatology: (T, F, Y, X) s_clim.
        shrink: (T, F) k of s0.
        members: M.
        full_shrink: (T, F) k of s1.
        gain: (T, F) g of s1.
        level: (T, F) l of s1.
        start: the model's start, if it has a linear correction that is fitted already.
    """

    climatology: Tensor
    shrink: Tensor
    members: int
    full_shrink: Tensor
    gain: Tensor
    level: Tensor
    start: Start | None = None

    def s0(self, followed: Tensor, shrink: Tensor | None = None) -> Tensor:
        """Return the prior spread s0 from the result of `followed`, with k = `shrink` (T, F) or the fitted one."""
        k = (self.shrink if shrink is None else shrink)[..., None, None]
        # A corrected spread stands for `FOLLOWED` members whatever M is (`models.heads`).
        count = torch.tensor([float(self.members if self.start is None else FOLLOWED)])
        return shrunk_spread(followed[None], count, self.climatology, k)[0].clamp(min=_TINY)

    def followed(self, sample: Sample, more: Tensor) -> Tensor:
        """Return the spread that sigma follows, (T, F, Y, X): the members' own, or the linearly corrected s1.

        `more` is the linear correction of s1, (T, F, Y, X).
        """
        return sample.spread if self.start is None else widened(self.s1(sample.spread), more)

    def s1(self, spread: Tensor, shrink: Tensor | None = None) -> Tensor:
        """Return s1, the expected spread of the full ensemble, (T, F, Y, X).

        `spread` is that of the M members, (T, F, Y, X), and `shrink` is k, (T, F); None takes the fitted one.
        """
        k = self.full_shrink if shrink is None else shrink
        count = torch.tensor([float(self.members)])
        terms = (v[..., None, None] for v in (k, self.gain, self.level))
        return unbiased_spread(spread[None], count, self.climatology, *terms)[0]

    def correction(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the linear corrections of mean and s1, (T, F, Y, X) each in physical units; zeros if there is none."""
        if self.start is None:
            return torch.zeros_like(sample.mean), torch.zeros_like(sample.mean)
        mean, spread, count, _ = sample.batch(self.members)
        found = self.start.linear_part(self.start.anomalies(mean, spread, count), count)[0]
        shift, more = found * self.start.heads.typical[..., None, None]
        return shift, more

    def said(self, sample: Sample) -> Tensor:
        """Return d'' (in typical spreads), v and w of the point network, (3, T, F, Y, X); zeros if there is none.

        A model that does not predict the truth has d'' alone, (1, T, F, Y, X).
        """
        if self.start is None or self.start.points is None:
            return sample.mean.new_zeros(3, *sample.mean.shape)
        mean, spread, count, day = sample.batch(self.members)
        return self.start.point_part(self.start.anomalies(mean, spread, count), count, day)[0]

    def expected(self, sample: Sample) -> Tensor:
        """Return the spread of the full ensemble that the untrained model predicts, (T, F, Y, X)."""
        linear = widened(self.s1(sample.spread), self.correction(sample)[1])
        if self.start is None:
            return linear
        return widened(linear, self.said(sample)[0] * self.start.heads.typical[..., None, None])


def fit_climatology(dates: Dates, chosen: np.ndarray, scales: Scales, std: np.ndarray) -> Tensor:
    """Fit s_clim, (T, F, Y, X): the root of the full ensemble's mean variance, smoothed by one cell if dates are few.

    It is at least `_LEAST_SPREAD` times the root mean square of its field, or times the standard deviation of the field
    itself, `std` (F,), if its members never differ.

    Raises:
        UserError: a field exists on no date.
    """
    total = torch.zeros(*dates.shape, *scales.area.shape, dtype=torch.float64)
    counts = torch.zeros_like(total)
    for date in dates.each("climatological spread", chosen):
        square = dates.target(Part.SPREAD, date) ** 2
        valid = torch.isfinite(square)
        total += torch.where(valid, square, 0.0)
        counts += valid
    dates.team.add_up(total, counts)
    count = counts.amax((-2, -1))
    dates.refuse_empty(count, Part.SPREAD)
    variance = scales.filled((total / counts).float())
    few = count * (dates.reader.full_size - 1) < _FEW
    if bool(few.any()):
        which = "the climatological spread" if bool(few.all()) else f"that of {int(few.sum())} of {few.numel()} fields"
        log.info("climate: %d dates are few, so %s is smoothed by one cell", int(count.min()), which)
        variance = torch.where(few[..., None, None], scales.smooth(variance), variance)
    # Where it never rained in any member, rain is still possible. A floor keeps sigma above zero there.
    typical = scales.mean(variance).float()
    # Members may never differ at all, for example in the same prescribed sea surface. Errors need a unit even then.
    given = torch.from_numpy(np.where(std > 0, std, 1.0)).float() ** 2
    typical = torch.where(typical > _NEVER**2 * given, typical, given)
    return torch.maximum(variance, _LEAST_SPREAD**2 * typical[..., None, None]).sqrt()


def fit_spread(dates: Dates, sample: np.ndarray, validation: np.ndarray, climatology: Tensor, scales: Scales) -> Spread:
    """Fit the terms of s1, and set k of s0 to that of s1 for now.

    g and l are ratios of means over the training dates; g is one for a single member. k is the one of `SHRINK` with the
    least squared error on the validation dates (`_best_shrink`).
    `sample` are the training dates, and `climatology` is s_clim, (T, F, Y, X).
    """
    default, one = torch.full(dates.shape, _SHRINK_DEFAULT), torch.ones(dates.shape)
    spread = Spread(climatology, default, dates.members, torch.full(dates.shape, _TINY), one, one)
    full, few, apart, count = (torch.zeros(dates.shape, dtype=torch.float64) for _ in range(4))
    everywhere = scales.mean(climatology)
    for date in dates.each("terms of the spread", sample):
        found = dates.sample(date)
        there = torch.isfinite(found.full_spread) & torch.isfinite(found.spread)
        valid = there.any(-1).any(-1)
        count += valid
        full += torch.where(valid, scales.mean(found.full_spread, there), 0.0)
        first = spread.s1(found.spread)  # s / c4(M), because k is almost zero so far
        few += torch.where(valid, scales.mean(first, there), 0.0)
        # A date may lack points, so the climatological spread is averaged over the same points.
        apart += torch.where(valid, scales.mean(climatology, there) - everywhere, 0.0)
    dates.team.add_up(full, few, apart, count)
    spread.level = _ratio(full, count * everywhere + apart)
    spread.gain = _ratio(full, few) if dates.members > 1 else one
    spread.full_shrink = _best_shrink(dates, validation, spread, scales)
    spread.shrink = spread.full_shrink
    return spread


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b as float32; one where either is zero."""
    good = (a > 0) & (b > 0)
    return torch.where(good, a / torch.where(good, b, 1.0), 1.0).float()


def _best_shrink(dates: Dates, validation: np.ndarray, spread: Spread, scales: Scales) -> Tensor:
    """Return k of s1 (T, F), the one of `SHRINK` with the least squared error on the validation dates.

    It is `_SHRINK_DEFAULT` without validation dates, with a single member, and for a field that none of the dates has.
    """
    # With one member there is no sample spread to weigh against the climatological one.
    if not len(validation) or dates.members < 2:
        return torch.full(dates.shape, _SHRINK_DEFAULT)
    errors = torch.zeros(len(SHRINK), *dates.shape, dtype=torch.float64)
    known = torch.zeros(dates.shape, dtype=torch.bool)
    for date in dates.team.mine(validation.tolist()):
        sample = dates.sample(date)
        for position, k in enumerate(SHRINK):
            error = _square_error(spread.s1(sample.spread, k.expand(dates.shape)), sample, scales)
            errors[position] += torch.nan_to_num(error)  # a date without the field lacks it at every k
        known |= torch.isfinite(error)
    dates.team.add_up(errors, known)
    return torch.where(known, SHRINK[errors.argmin(0)], _SHRINK_DEFAULT)


def _square_error(s1: Tensor, sample: Sample, scales: Scales) -> Tensor:
    """Return the area mean of the squared error of s1, (T, F); NaN if the date lacks the field."""
    error = s1 - sample.full_spread
    return scales.mean(error**2, torch.isfinite(error))


def spread_errors(dates: Dates, chosen: np.ndarray, spread: Spread, scales: Scales, sizes: Sequence[int]) -> Tensor:
    """Return the mean squared error of the untrained forecast of the spread, for each number of members.

    Returns:
        (N + 1, T, F) float32; row M is for M members. Rows of numbers that are not among `sizes`, those of training
        samples, repeat that of `dates.members`.
    """
    full = dates.reader.full_size
    rows = _spread_error(dates, chosen, spread, scales).repeat(full + 1, 1, 1)
    others = {size for size in sizes if size <= full} - {dates.members}
    for size in dates.progress.over("errors of the spread", others):
        other = replace(spread, members=size)
        rows[size] = _spread_error(dates.of(size), chosen, other, scales)
    return rows


def _spread_error(dates: Dates, chosen: np.ndarray, spread: Spread, scales: Scales) -> Tensor:
    """Return the mean squared error for the number of members of `dates`, (T, F), with a floor."""
    total, count = (torch.zeros(dates.shape, dtype=torch.float64) for _ in range(2))
    for date in dates.team.mine(chosen.tolist()):
        sample = dates.sample(date)
        error = _square_error(spread.expected(sample), sample, scales)
        total += torch.nan_to_num(error)
        count += torch.isfinite(error)
    dates.team.add_up(total, count)
    # With almost all members, s1 is almost exact, and with all of them there is no target. So there is a floor of a
    # thousandth of the variance, because the loss is divided by this error.
    least = 1e-3 * scales.mean(spread.climatology**2)
    return torch.maximum(total / count.clamp(min=1), least).clamp(min=_TINY).float()
