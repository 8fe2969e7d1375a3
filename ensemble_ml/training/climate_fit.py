"""What the training dates say before any network is trained: scales, climatological spread, bias, inflation.

Axes: T lead, F field (variables and levels, then surface variables), Y latitude, X longitude. Dates are read one at a
time; at most `_MOST_DATES` of them, evenly spaced.

With m, s mean and spread of the first M members, S the spread of all, y the truth:

    s_clim^2  = mean over dates of S^2                            (smoothed by one cell where dates are few)
    k         = argmin RMSE(s0, S) on validation dates            s0^2 = ((M-1) s^2 + k s_clim^2) / (M-1+k)
    bias      = s_clim * shrunk mean of (y - mean of all members) / s_clim                            (`smoothing`)
    inflation = log of [c * root of the shrunk mean of (y - m - bias without this date)^2 / s0^2]

c, one number a field, minimises the CRPS of the variable's own family, so heavy tails and zeros are allowed for; the
CRPS that is left is the scale of the loss. Residuals leave their own date out of the bias, or sigma would come out too
small by as much as the bias was fitted to noise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import Climate, distributions
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import Dates, Sample, complete, families, neighbours, spaced, split
from ensemble_ml.training.smoothing import Estimate, MapMean, Scales

log = logging.getLogger(__name__)

_MOST_DATES = 200  # more would sharpen nothing that the network does not correct anyway
_SAMPLE_DATES = 24  # enough for one number a field
_FEW = 60  # dates times degrees of freedom of a spread, below which s_clim is smoothed
_SHRINK = torch.tensor([0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64])
_SHRINK_DEFAULT = 2.0
_FACTORS = torch.linspace(-1, 1, 25).exp()
_LEAST_SPREAD = 0.02  # of s_clim over its field's root mean square
_SMALLEST_RATIO = 0.1  # of a cell's variance ratio to its field's
_LARGEST_RATIO = 25.0  # of one squared residual to s0^2
_TINY = 1e-30


@dataclass(eq=False)
class Fit:
    """The model's `climate`, and what only the training needs of the dates.

    `spread_error` (N + 1, T_out, F): mean squared error of s0 from M members as a forecast of the full spread, in row
    M: the scale of the spread loss. Rows of sizes that were not asked for repeat that of `members`;
    `input_range` (F, 2): smallest and largest value of the inputs.
    """

    climate: Climate
    spread_error: np.ndarray
    input_range: np.ndarray


@dataclass(eq=False)
class _Spread:
    """s_clim (T, F, Y, X) and k (T, F): what makes s0 of a date."""

    climatology: Tensor
    shrink: Tensor
    members: int

    def s0(self, spread: Tensor, shrink: Tensor | None = None) -> Tensor:
        k = (self.shrink if shrink is None else shrink)[..., None, None]
        freedom = self.members - 1
        return torch.sqrt((freedom * spread**2 + k * self.climatology**2) / (freedom + k)).clamp(min=_TINY)


def fit_climate(
    reader: Reader,
    train: Sequence[int] | np.ndarray,
    validation: Sequence[int] | np.ndarray,
    members: int,
    sizes: Sequence[int] = (),
) -> Fit:
    """Fit everything that `Climate` holds on the dates `train`, and k on `validation`.

    Args:
        reader: of the store.
        train, validation: indices of start dates.
        members: M, the number of first members at which spread and residuals are compared.
        sizes: numbers of members that the training will show.

    Raises:
        UserError: a field is missing on all training dates.
    """
    dates, scales = Dates(reader, members), Scales(reader.spec.grid)
    all_train, chosen = np.asarray(train), spaced(np.asarray(train), _MOST_DATES)
    sample = spaced(all_train, _SAMPLE_DATES)
    moments = dates.input_moments(all_train)
    climatology = _climatology(dates, chosen, scales)
    spread = _Spread(climatology, torch.full(dates.shape, _SHRINK_DEFAULT), dates.members)
    spread.shrink = _best_shrink(dates, spaced(np.asarray(validation, int), _SAMPLE_DATES), spread, scales)
    arrays = {"spread": climatology, "shrink": spread.shrink, "level_spread": dates.level_spread(sample)}
    arrays |= _truth_terms(dates, chosen, sample, spread, scales)
    found = {}
    for name, values in arrays.items():
        found[f"{name}_p"], found[f"{name}_s"] = split(reader.spec, np.asarray(values), 1)
    for name in ("mean", "std"):
        found[f"{name}_p"], found[f"{name}_s"] = split(reader.spec, getattr(moments, name), 0)
    log.info("climate: fitted on %d of %d training dates, %d members", len(chosen), len(all_train), dates.members)
    climate = Climate(**found, static=_static(reader))
    extremes = np.stack([moments.minimum, moments.maximum], -1)
    return Fit(climate, _spread_errors(dates, sample, spread, scales, sizes).numpy(), extremes)


def _static(reader: Reader) -> np.ndarray:
    """(n_static, Y, X) float32."""
    planes, names = reader.source.static(), reader.spec.static
    return np.stack([planes[n] for n in names]) if names else np.zeros((0, *reader.spec.grid.shape), np.float32)


def _climatology(dates: Dates, chosen: np.ndarray, scales: Scales) -> Tensor:
    """s_clim (T, F, Y, X)."""
    total = torch.zeros(*dates.shape, *scales.area.shape, dtype=torch.float64)
    count = torch.zeros(dates.shape, dtype=torch.float64)
    for date in chosen:
        square = dates.target(Part.SPREAD, date) ** 2
        valid = complete(square)
        total += torch.where(valid[..., None, None], square, 0.0)
        count += valid
    dates.refuse_empty(count, Part.SPREAD)
    variance = (total / count[..., None, None]).float()
    if float(count.min()) * (dates.reader.full_size - 1) < _FEW:
        log.info("climate: %d dates are few, so the climatological spread is smoothed by one cell", len(chosen))
        variance = scales.smooth(variance)
    # Where no member ever rained, rain is still possible: a floor keeps sigma, and errors in units of it, finite.
    least = _LEAST_SPREAD**2 * scales.mean(variance)[..., None, None].float()
    return torch.maximum(variance, least).sqrt()


def _best_shrink(dates: Dates, validation: np.ndarray, spread: _Spread, scales: Scales) -> Tensor:
    """k (T, F): the best of a list on validation dates; a default where there is none, or one member only."""
    if not len(validation) or dates.members < 2:
        return spread.shrink
    errors = torch.zeros(len(_SHRINK), *dates.shape, dtype=torch.float64)
    for date in validation:
        sample = dates.sample(int(date))
        for position, k in enumerate(_SHRINK):
            errors[position] += _square_error(spread.s0(sample.spread, k.expand(dates.shape)), sample, scales)
    return _SHRINK[errors.argmin(0)]


def _square_error(s0: Tensor, sample: Sample, scales: Scales) -> Tensor:
    return scales.mean(torch.nan_to_num(s0 - sample.full_spread) ** 2)


def _spread_errors(dates: Dates, chosen: np.ndarray, spread: _Spread, scales: Scales, sizes: Sequence[int]) -> Tensor:
    """Mean squared error of s0 as a forecast of S, a row for each number of members: (N + 1, T, F) float32."""
    full = dates.reader.full_size
    rows = _spread_error(dates, chosen, spread, scales).repeat(full + 1, 1, 1)
    for size in {size for size in sizes if size <= full} - {dates.members}:
        other = _Spread(spread.climatology, spread.shrink, size)
        rows[size] = _spread_error(Dates(dates.reader, size), chosen, other, scales)
    return rows


def _spread_error(dates: Dates, chosen: np.ndarray, spread: _Spread, scales: Scales) -> Tensor:
    """The same for one number of members, (T, F)."""
    total = torch.zeros(dates.shape, dtype=torch.float64)
    for date in chosen:
        sample = dates.sample(int(date))
        total += _square_error(spread.s0(sample.spread), sample, scales)
    # With all members in, s0 is almost exact: a thousandth of the variance keeps the loss from blowing up.
    least = 1e-3 * scales.mean(spread.climatology**2)
    return torch.maximum(total / len(chosen), least).clamp(min=_TINY).float()


def _truth_terms(
    dates: Dates, chosen: np.ndarray, sample: np.ndarray, spread: _Spread, scales: Scales
) -> dict[str, Tensor]:
    """Bias and inflation (T, F, Y, X) and error (T, F); zeros and ones where no truth is learned."""
    nothing = torch.zeros_like(spread.climatology)
    if not dates.spec.config.postprocess:
        return {"bias": nothing, "inflation": nothing, "error": torch.ones(dates.shape)}
    truth = _Truth(dates, spread, scales, chosen)
    inflation = truth.inflation()
    factor, error = truth.best_factor(sample, inflation)
    bias = truth.bias.map() * spread.climatology
    return {"bias": bias, "inflation": inflation + factor[..., None, None], "error": error}


class _Truth:
    """Residuals of the training dates, and what is fitted to them."""

    def __init__(self, dates: Dates, spread: _Spread, scales: Scales, chosen: np.ndarray):
        self.dates, self.spread, self.scales, self.chosen = dates, spread, scales, chosen
        self.follows = neighbours(dates.reader.source.layout.init_time[chosen])
        self.bias = self._bias()

    def _bias(self) -> Estimate:
        """Mean error of the mean of all members, in units of s_clim."""
        mean = MapMean(self.scales, self.dates.shape)
        for date, follows in zip(self.chosen, self.follows, strict=True):
            error = self._error(date)
            mean.add(error, complete(error), follows=bool(follows))
        self.dates.refuse_empty(mean.count, Part.TRUTH)
        return mean.estimate()

    def _error(self, date: int) -> Tensor:
        error = self.dates.target(Part.TRUTH, date) - self.dates.target(Part.MEAN, date)
        return error / self.spread.climatology.clamp(min=_TINY)

    def _unseen(self, date: int) -> tuple[Tensor, Tensor, Tensor]:
        """Truth, corrected mean of M members with `date` left out of the bias, and s0."""
        sample = self.dates.sample(int(date))
        bias = self.bias.without(torch.nan_to_num(self._error(date))) * self.spread.climatology
        return self.dates.target(Part.TRUTH, date), sample.mean + bias, self.spread.s0(sample.spread)

    def inflation(self) -> Tensor:
        """Half the logarithm of the mean of squared residuals over s0^2, cells shrunk to the field's mean."""
        ratios = MapMean(self.scales, self.dates.shape)
        for date, follows in zip(self.chosen, self.follows, strict=True):
            truth, centre, s0 = self._unseen(date)
            ratio = ((truth - centre) / s0) ** 2
            ratios.add(ratio.clamp(max=_LARGEST_RATIO), complete(ratio), follows=bool(follows))
        found = ratios.estimate()
        field = found.parts[-1].clamp(min=1e-12)
        local = found.map() - found.weight[-1][..., None, None] * found.parts[-1]
        return 0.5 * torch.log(field * (1 + local / field).clamp(min=_SMALLEST_RATIO))

    def best_factor(self, chosen: np.ndarray, inflation: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the factor of sigma at which the CRPS is smallest, and that CRPS, both (T, F)."""
        total = torch.zeros(len(_FACTORS), *self.dates.shape, dtype=torch.float64)
        count = torch.zeros(self.dates.shape, dtype=torch.float64)
        for date in chosen:
            truth, centre, s0 = self._unseen(date)
            scale = s0 * inflation.exp()
            scores = torch.stack([self.scales.mean(self._crps(centre, scale * c, truth)) for c in _FACTORS])
            valid = torch.isfinite(scores).all(0)
            total += torch.where(valid, scores, 0.0)
            count += valid
        scores = total / count.clamp(min=1)
        best = scores.argmin(0)
        smallest = scores.gather(0, best[None])[0]
        return _FACTORS.log()[best], torch.where(smallest > 0, smallest, 1.0).float()

    def _crps(self, centre: Tensor, scale: Tensor, truth: Tensor) -> Tensor:
        scores = torch.empty_like(scale)
        for position, family in enumerate(families(self.dates.spec)):
            mean, sigma = centre[:, position], scale[:, position]
            location = distributions.location_of_mean(family, mean, sigma)
            scores[:, position] = distributions.crps(family, location, sigma, truth[:, position])
        return scores
