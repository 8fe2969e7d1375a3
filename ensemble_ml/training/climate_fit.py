"""What the training dates say before any network is trained: scales, climatological spread, bias, inflation.

Axes: T lead, F field (variables and levels, then surface variables), Y latitude, X longitude. Dates are read one at a
time; at most `_MOST_DATES` of them, evenly spaced.

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
from ensemble_ml.models.features import shrunk_spread, unbiased_spread
from ensemble_ml.models.heads import FOLLOWED, widened
from ensemble_ml.models.linear import LinearCorrection, correction_shape
from ensemble_ml.models.place import position_planes
from ensemble_ml.models.surroundings import Surroundings, surroundings_shapes
from ensemble_ml.store.las import local_statistics
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import Dates, Sample, families, neighbours, present, spaced, split
from ensemble_ml.training.linear_fit import Linear, fit_linear, mean_state, refuse_unfittable
from ensemble_ml.training.smoothing import Estimate, MapMean, Scales
from ensemble_ml.training.surroundings_fit import Correction, fit_surroundings

log = logging.getLogger(__name__)

_MOST_DATES = 400  # 320 instead of 200 were worth 0.2 % of CRPS
_SAMPLE_DATES = 24  # enough for one number a field
_FEW = 60  # dates times degrees of freedom of a spread, below which s_clim is smoothed
_SHRINK = torch.tensor([0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64])
_SHRINK_DEFAULT = 2.0
_FACTORS = torch.linspace(-1, 1, 25).exp()
_LEAST_SPREAD = 0.02  # of s_clim over its field's root mean square
_NEVER = 1e-6  # of a field's standard deviation: spread that is none
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


@dataclass(eq=False)
class _Spread:
    """s_clim (T, F, Y, X), and (T, F) each: k of s0; k, g and l of s1."""

    climatology: Tensor
    shrink: Tensor
    members: int
    full_shrink: Tensor
    gain: Tensor
    level: Tensor
    corrected: Correction | None = None

    def s0(self, followed: Tensor, shrink: Tensor | None = None) -> Tensor:
        """What sigma is a multiple of, from what it follows."""
        k = (self.shrink if shrink is None else shrink)[..., None, None]
        count = torch.tensor([float(self.members if self.corrected is None else FOLLOWED)])
        return shrunk_spread(followed[None], count, self.climatology, k)[0].clamp(min=_TINY)

    def followed(self, sample: Sample, more: Tensor) -> Tensor:
        """The members' spread, or the corrected s1 where a correction adds `more` to it."""
        return sample.spread if self.corrected is None else widened(self.s1(sample.spread), more)

    def s1(self, spread: Tensor, shrink: Tensor | None = None) -> Tensor:
        k = self.full_shrink if shrink is None else shrink
        count = torch.tensor([float(self.members)])
        terms = (v[..., None, None] for v in (k, self.gain, self.level))
        return unbiased_spread(spread[None], count, self.climatology, *terms)[0]

    def correction(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """What the corrections add to mean and s1, (T, F, Y, X)."""
        if self.corrected is None:
            return torch.zeros_like(sample.mean), torch.zeros_like(sample.mean)
        return self.corrected(sample, self.members)

    def expected(self, sample: Sample) -> Tensor:
        """The full spread that the untrained model predicts, (T, F, Y, X)."""
        return widened(self.s1(sample.spread), self.correction(sample)[1])


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
    all_train, chosen = np.asarray(train), spaced(np.asarray(train), _MOST_DATES)
    sample = spaced(all_train, _SAMPLE_DATES)
    moments = dates.input_moments(all_train, most=_MOST_DATES)
    climatology = _climatology(dates, chosen, scales, moments.std)
    spread = _fit_spread(dates, sample, spaced(np.asarray(validation, int), _SAMPLE_DATES), climatology, scales)
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
    return Fit(climate, _spread_errors(dates, sample, spread, scales, sizes).numpy(), extremes)


def _corrections(
    dates: Dates, train: np.ndarray, validation: np.ndarray, sizes: Sequence[int], spread: _Spread,
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


def _climatology(dates: Dates, chosen: np.ndarray, scales: Scales, std: np.ndarray) -> Tensor:
    """s_clim (T, F, Y, X); `std` (F,) of the values themselves."""
    total = torch.zeros(*dates.shape, *scales.area.shape, dtype=torch.float64)
    counts = torch.zeros_like(total)
    for date in chosen:
        square = dates.target(Part.SPREAD, date) ** 2
        valid = torch.isfinite(square)
        total += torch.where(valid, square, 0.0)
        counts += valid
    count = counts.amax((-2, -1))
    dates.refuse_empty(count, Part.SPREAD)
    variance = scales.filled((total / counts).float())
    if float(count.min()) * (dates.reader.full_size - 1) < _FEW:
        log.info("climate: %d dates are few, so the climatological spread is smoothed by one cell", len(chosen))
        variance = scales.smooth(variance)
    # Where no member ever rained, rain is still possible: a floor keeps sigma, and errors in units of it, finite.
    typical = scales.mean(variance).float()
    # Where members never differ at all (a sea surface that all of them were given), errors need a unit all the same.
    given = torch.from_numpy(np.where(std > 0, std, 1.0)).float() ** 2
    typical = torch.where(typical > _NEVER**2 * given, typical, given)
    return torch.maximum(variance, _LEAST_SPREAD**2 * typical[..., None, None]).sqrt()


def _fit_spread(
    dates: Dates, sample: np.ndarray, validation: np.ndarray, climatology: Tensor, scales: Scales
) -> _Spread:
    """g and l as ratios of means over the training dates `sample`, k by `_best_shrink`; k of s0 is the same for now."""
    default, one = torch.full(dates.shape, _SHRINK_DEFAULT), torch.ones(dates.shape)
    spread = _Spread(climatology, default, dates.members, torch.full(dates.shape, _TINY), one, one)
    full, few, apart, count = (torch.zeros(dates.shape, dtype=torch.float64) for _ in range(4))
    everywhere = scales.mean(climatology)
    for date in sample:
        found = dates.sample(int(date))
        there = torch.isfinite(found.full_spread) & torch.isfinite(found.spread)
        valid = there.any(-1).any(-1)
        count += valid
        full += torch.where(valid, scales.mean(found.full_spread, there), 0.0)
        first = spread.s1(found.spread)  # s / c4(M): nothing is shrunk yet
        few += torch.where(valid, scales.mean(first, there), 0.0)
        apart += torch.where(valid, scales.mean(climatology, there) - everywhere, 0.0)
    spread.level = _ratio(full, count * everywhere + apart)
    spread.gain = _ratio(full, few) if dates.members > 1 else one
    spread.full_shrink = _best_shrink(dates, validation, spread, scales)
    spread.shrink = spread.full_shrink
    return spread


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b as float32, one where either is nothing."""
    good = (a > 0) & (b > 0)
    return torch.where(good, a / torch.where(good, b, 1.0), 1.0).float()


def _best_shrink(dates: Dates, validation: np.ndarray, spread: _Spread, scales: Scales) -> Tensor:
    """k of s1 (T, F): the best of a list on validation dates; a default where there is none, or one member only."""
    if not len(validation) or dates.members < 2:
        return torch.full(dates.shape, _SHRINK_DEFAULT)
    errors = torch.zeros(len(_SHRINK), *dates.shape, dtype=torch.float64)
    for date in validation:
        sample = dates.sample(int(date))
        for position, k in enumerate(_SHRINK):
            error = _square_error(spread.s1(sample.spread, k.expand(dates.shape)), sample, scales)
            errors[position] += torch.nan_to_num(error)  # a date without the field lacks it at every k
    return _SHRINK[errors.argmin(0)]


def _square_error(s1: Tensor, sample: Sample, scales: Scales) -> Tensor:
    """(T, F), NaN where the date lacks the field."""
    error = s1 - sample.full_spread
    return scales.mean(error**2, torch.isfinite(error))


def _spread_errors(dates: Dates, chosen: np.ndarray, spread: _Spread, scales: Scales, sizes: Sequence[int]) -> Tensor:
    """Mean squared error of s1 as a forecast of S, a row for each number of members: (N + 1, T, F) float32."""
    full = dates.reader.full_size
    rows = _spread_error(dates, chosen, spread, scales).repeat(full + 1, 1, 1)
    for size in {size for size in sizes if size <= full} - {dates.members}:
        other = replace(spread, members=size)
        rows[size] = _spread_error(Dates(dates.reader, size), chosen, other, scales)
    return rows


def _spread_error(dates: Dates, chosen: np.ndarray, spread: _Spread, scales: Scales) -> Tensor:
    """The same for one number of members, (T, F)."""
    total, count = (torch.zeros(dates.shape, dtype=torch.float64) for _ in range(2))
    for date in chosen:
        sample = dates.sample(int(date))
        error = _square_error(spread.expected(sample), sample, scales)
        total += torch.nan_to_num(error)
        count += torch.isfinite(error)
    # With all members in, s1 is almost exact: a thousandth of the variance keeps the loss from blowing up.
    least = 1e-3 * scales.mean(spread.climatology**2)
    return torch.maximum(total / count.clamp(min=1), least).clamp(min=_TINY).float()


@dataclass(eq=False)
class _Left:
    """What the corrections are to explain: errors of mean and spread without them."""

    truth: _Truth | None
    spread: _Spread

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

    def __init__(self, dates: Dates, spread: _Spread, scales: Scales, chosen: np.ndarray):
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
        ratios, logs = (torch.zeros(len(_SHRINK), *self.dates.shape, dtype=torch.float64) for _ in range(2))
        count = torch.zeros(self.dates.shape, dtype=torch.float64)
        for date in chosen:
            truth, centre, followed = self._unseen(date)
            there = torch.isfinite(truth - centre) & torch.isfinite(followed)
            valid = there.any(-1).any(-1)
            count += valid
            for position, k in enumerate(_SHRINK):
                s0 = self.spread.s0(followed, k.expand(self.dates.shape))
                ratio = (((truth - centre) / s0) ** 2).clamp(max=_LARGEST_RATIO)
                ratios[position] += torch.where(valid, self.scales.mean(ratio, there), 0.0)
                logs[position] += torch.where(valid, self.scales.mean(s0.log(), there), 0.0)
        count = count.clamp(min=1)
        misfit = 0.5 * torch.log(ratios.clamp(min=1e-12) / count) + logs / count
        return _SHRINK[misfit.argmin(0)]

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
