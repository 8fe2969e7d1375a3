"""What the training dates say before any network is trained: scales, climatological spread, bias, inflation.

Axes: T lead, F field (variables and levels, then surface variables), Y latitude, X longitude. Dates are read one at a
time; at most `MOST_DATES` of them, evenly spaced.

With m, s mean and spread of the first M members, S the spread of all, y the truth:

    s_clim^2  = mean over dates of S^2                            (smoothed by one cell where dates are few)
    k         = argmax likelihood of y given s0 (RMSE(s1, S) where there is no truth)
                              s0^2 = ((M-1) s^2 + k s_clim^2) / (M-1+k), or that of s1 + linear (`models.heads`)
    s1        = the full spread expected from M members (`features.unbiased_spread`), its k by RMSE on validation dates
    bias      = s_clim * shrunk mean of (y - mean of all members) / s_clim                            (`smoothing`)
    linear    = ridge regression of y - m - bias and S - s1 on all fields around                      (`linear_fit`),
                and what a small network of the surroundings adds to it                        (`surroundings_fit`)
    inflation = log of [c * root of the shrunk mean of (y - m - bias without this date - linear)^2 / s0^2]

c, one number a field, minimises the CRPS of the variable's own family, so heavy tails and zeros are allowed for; the
CRPS that is left is the scale of the loss. Residuals leave their own date out of the bias, or sigma would come out too
small by as much as the bias was fitted to noise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.loading.reader import Reader
from ensemble_ml.models import Climate, distributions
from ensemble_ml.models.linear import LinearCorrection, correction_shape
from ensemble_ml.models.place import position_planes
from ensemble_ml.models.surroundings import Surroundings, surroundings_shapes
from ensemble_ml.store.las import local_statistics
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import MOST_DATES, Dates, Sample, families, neighbours, present, spaced, split
from ensemble_ml.training.linear_fit import Linear, fit_linear, mean_state, refuse_unfittable
from ensemble_ml.training.smoothing import Estimate, MapMean, Scales
from ensemble_ml.training.spread_fit import SHRINK, Spread, fit_climatology, fit_spread, spread_errors
from ensemble_ml.training.surroundings_fit import Correction, fit_surroundings

log = logging.getLogger(__name__)

_SAMPLE_DATES = 24  # enough for one number a field
_FACTORS = torch.linspace(-1, 1, 25).exp()
_SMALLEST_RATIO = 0.1  # of a cell's variance ratio to its field's
_LARGEST_RATIO = 25.0  # of one squared residual to s0^2
_TINY = 1e-30


@dataclass(eq=False)
class Fit:
    """The model's `climate`, and what only the training needs of the dates.

    `spread_error` (N + 1, T_out, F): mean squared error of s1 from M members as a forecast of the full spread, in row
    M: the scale of the spread loss. Rows of sizes that were not asked for repeat that of `members`;
    `input_range` (F, 2): smallest and largest value of the inputs.
    """

    climate: Climate
    spread_error: np.ndarray
    input_range: np.ndarray


def fit_climate(
    reader: Reader,
    train: Sequence[int] | np.ndarray,
    validation: Sequence[int] | np.ndarray,
    members: int,
    sizes: Sequence[int] = (),
) -> Fit:
    """Fit everything that `Climate` holds on the dates `train`, and k of s1, the ridge's penalty and the
    share of the surroundings' network on `validation`.

    Args:
        reader: of the store.
        train, validation: indices of start dates.
        members: M, the number of first members at which spread and residuals are compared.
        sizes: numbers of members that the training will show.

    Raises:
        UserError: a field is missing on all training dates, or the linear correction's sums would not fit in memory.
    """
    refuse_unfittable(reader.spec)
    dates, scales = Dates(reader, members), Scales(reader.spec.grid)
    all_train, chosen = np.asarray(train), spaced(np.asarray(train), MOST_DATES)
    sample = spaced(all_train, _SAMPLE_DATES)
    moments = dates.input_moments(all_train)
    climatology = fit_climatology(dates, chosen, scales, moments.std)
    spread = fit_spread(dates, sample, spaced(np.asarray(validation, int), _SAMPLE_DATES), climatology, scales)
    truth = _Truth(dates, spread, scales, chosen) if reader.spec.config.postprocess else None
    anchor = mean_state(dates, chosen) if reader.spec.linear else torch.zeros_like(climatology)
    static = _static(reader)
    weights = _corrections(dates, chosen, np.asarray(validation, int), sizes, spread, truth, anchor, static)
    arrays: dict[str, Tensor | np.ndarray] = {**_truth_terms(dates, truth, sample)}
    arrays["anchor"] = anchor
    arrays |= {"spread": climatology, "shrink": spread.shrink, "level_spread": dates.level_spread(sample)}
    arrays |= {"spread_shrink": spread.full_shrink, "spread_gain": spread.gain, "spread_level": spread.level}
    found = {}
    for name, values in arrays.items():
        found[f"{name}_p"], found[f"{name}_s"] = split(reader.spec, np.asarray(values), 1)
    for name in ("mean", "std"):
        found[f"{name}_p"], found[f"{name}_s"] = split(reader.spec, getattr(moments, name), 0)
    if reader.spec.local:
        found |= _maps(reader, chosen)
    log.info("climate: fitted on %d of %d training dates, %d members", len(chosen), len(all_train), dates.members)
    climate = Climate(**found, static=static, **weights)
    extremes = np.stack([moments.minimum, moments.maximum], -1)
    return Fit(climate, spread_errors(dates, sample, spread, scales, sizes).numpy(), extremes)


def _corrections(
    dates: Dates, train: np.ndarray, validation: np.ndarray, sizes: Sequence[int], spread: Spread,
    truth: _Truth | None, anchor: Tensor, static: np.ndarray,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Fit what stands before the network, which `spread` then knows of; its weights by their names in `Climate`."""
    spec = dates.spec
    weight = np.zeros(correction_shape(spec), np.float32)
    first, second = (np.zeros(shape, np.float32) for shape in surroundings_shapes(spec))
    if spec.linear:
        linear = Linear(LinearCorrection(spec, weight), anchor, spread.climatology, spread.full_shrink)
        targets = _Left(truth, spread)
        fit_linear(linear, dates, train, validation, sizes, targets)
        network = Surroundings(spec, first, second) if first.size else None
        correction = Correction(linear, network, position_planes(spec, static))
        if network is not None:
            fit_surroundings(correction, dates, train, validation, sizes, targets)
            first, second = network.first.numpy(), network.second.numpy()
        spread.corrected, weight = correction, linear.module.weight.numpy()
    return {"correction": weight, "surroundings_first": first, "surroundings_second": second}


def _maps(reader: Reader, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and deviation of each point, for local area-wise standardisation."""
    spec = reader.spec
    maps = local_statistics(
        reader.source,
        chosen,
        leads=spec.leads_in,
        variables=spec.variables,
        levels=spec.levels,
        surface=spec.surface,
    )
    return {name: values.astype(np.float32) for name, values in vars(maps).items()}


def _static(reader: Reader) -> np.ndarray:
    """(n_static, Y, X) float32."""
    planes, names = reader.source.static(), reader.spec.static
    return np.stack([planes[n] for n in names]) if names else np.zeros((0, *reader.spec.grid.shape), np.float32)


@dataclass(eq=False)
class _Left:
    """What the corrections are to explain: errors of mean and spread without them."""

    truth: _Truth | None
    spread: Spread

    def __call__(self, date: int, sample: Sample, members: int) -> tuple[Tensor, Tensor]:
        more = sample.full_spread - replace(self.spread, members=members).s1(sample.spread)
        if self.truth is None:
            return torch.zeros_like(more), more
        return self.truth.error_left(date, sample.mean), more


def _truth_terms(dates: Dates, truth: _Truth | None, sample: np.ndarray) -> dict[str, Tensor]:
    """Bias and inflation (T, F, Y, X) and error (T, F); zeros and ones where no truth is learned."""
    if truth is None:
        nothing = torch.zeros(*dates.shape, *dates.spec.grid.shape)
        return {"bias": nothing, "inflation": nothing, "error": torch.ones(dates.shape)}
    spread = truth.spread
    spread.shrink = truth.likeliest_shrink(sample)
    inflation = truth.inflation()
    factor, error = truth.best_factor(sample, inflation)
    return {"bias": truth.whole_bias, "inflation": inflation + factor[..., None, None], "error": error}


class _Truth:
    """Residuals of the training dates, and what is fitted to them."""

    def __init__(self, dates: Dates, spread: Spread, scales: Scales, chosen: np.ndarray):
        self.dates, self.spread, self.scales, self.chosen = dates, spread, scales, chosen
        self.follows = neighbours(dates.reader.source.layout.init_time[chosen])
        self.bias = self._bias()
        self._known = set(chosen.tolist())
        self.whole_bias = self.bias.map() * spread.climatology

    def _bias(self) -> Estimate:
        """Mean error of the mean of all members, in units of s_clim."""
        mean = MapMean(self.scales, self.dates.shape)
        for date, follows in zip(self.chosen, self.follows, strict=True):
            error = self._error(date)
            mean.add(self.scales.filled(error), present(error), follows=bool(follows))
        self.dates.refuse_empty(mean.count, Part.TRUTH)
        return mean.estimate()

    def _error(self, date: int) -> Tensor:
        error = self.dates.target(Part.TRUTH, date) - self.dates.target(Part.MEAN, date)
        return error / self.spread.climatology.clamp(min=_TINY)

    def error_left(self, date: int, mean: Tensor) -> Tensor:
        """Error of `mean` beyond the bias of the (other) training dates, (T, F, Y, X)."""
        return self.dates.target(Part.TRUTH, date) - mean - self._bias_without(date)

    def _bias_without(self, date: int) -> Tensor:
        if date not in self._known:
            return self.whole_bias
        error = torch.nan_to_num(self.scales.filled(self._error(date)))
        return self.bias.without(error) * self.spread.climatology

    def _unseen(self, date: int) -> tuple[Tensor, Tensor, Tensor]:
        """Truth, corrected mean of M members with `date` left out of the bias, and what sigma follows."""
        sample = self.dates.sample(int(date))
        shift, more = self.spread.correction(sample)
        centre = sample.mean + self._bias_without(date) + shift
        return self.dates.target(Part.TRUTH, date), centre, self.spread.followed(sample, more)

    def likeliest_shrink(self, chosen: np.ndarray) -> Tensor:
        """k of s0 (T, F) at which N(centre, c^2 s0^2) gives the truth the highest likelihood, c free for each k.

        With c^2 = mean r, r = (y - centre)^2 / s0^2, minus the mean log likelihood is log(mean r) / 2 + mean log s0.
        """
        if self.dates.members < 2:
            return self.spread.shrink
        ratios, logs = (torch.zeros(len(SHRINK), *self.dates.shape, dtype=torch.float64) for _ in range(2))
        count = torch.zeros(self.dates.shape, dtype=torch.float64)
        for date in chosen:
            truth, centre, followed = self._unseen(date)
            there = torch.isfinite(truth - centre) & torch.isfinite(followed)
            valid = there.any(-1).any(-1)
            count += valid
            for position, k in enumerate(SHRINK):
                s0 = self.spread.s0(followed, k.expand(self.dates.shape))
                ratio = (((truth - centre) / s0) ** 2).clamp(max=_LARGEST_RATIO)
                ratios[position] += torch.where(valid, self.scales.mean(ratio, there), 0.0)
                logs[position] += torch.where(valid, self.scales.mean(s0.log(), there), 0.0)
        count = count.clamp(min=1)
        misfit = 0.5 * torch.log(ratios.clamp(min=1e-12) / count) + logs / count
        return SHRINK[misfit.argmin(0)]

    def inflation(self) -> Tensor:
        """Half the logarithm of the mean of squared residuals over s0^2, cells shrunk to the field's mean."""
        ratios = MapMean(self.scales, self.dates.shape)
        for date, follows in zip(self.chosen, self.follows, strict=True):
            truth, centre, followed = self._unseen(date)
            ratio = ((truth - centre) / self.spread.s0(followed)) ** 2
            ratio = ratio.clamp(max=_LARGEST_RATIO)
            ratios.add(self.scales.filled(ratio), present(ratio), follows=bool(follows))
        found = ratios.estimate()
        field = found.parts[-1].clamp(min=1e-12)
        local = found.map() - found.weight[-1][..., None, None] * found.parts[-1]
        return 0.5 * torch.log(field * (1 + local / field).clamp(min=_SMALLEST_RATIO))

    def best_factor(self, chosen: np.ndarray, inflation: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the factor of sigma at which the CRPS is smallest, and that CRPS, both (T, F)."""
        total = torch.zeros(len(_FACTORS), *self.dates.shape, dtype=torch.float64)
        count = torch.zeros(self.dates.shape, dtype=torch.float64)
        for date in chosen:
            truth, centre, followed = self._unseen(date)
            scale = self.spread.s0(followed) * inflation.exp()
            crps = (self._crps(centre, scale * c, truth) for c in _FACTORS)
            scores = torch.stack([self.scales.mean(one, torch.isfinite(one)) for one in crps])
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
