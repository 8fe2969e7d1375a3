"""Fits what the truth says of the forecasts: bias, inflation, and how wide the distribution is (see `climate_fit`).

Axes: T lead, F field (variables and levels, then surface variables), Y latitude, X longitude.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.fields import Family
from ensemble_ml.models import distributions
from ensemble_ml.models.dry import AT_ZERO, fitted, law_near_zero
from ensemble_ml.models.heads import informed
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import (
    FEWEST_TO_WIDEN,
    Dates,
    Sample,
    dates_called,
    families,
    field_names,
    kept_apart,
    neighbours,
    present,
    spaced,
)
from ensemble_ml.training.linear_fit import telling
from ensemble_ml.training.residual_fit import fit_residuals
from ensemble_ml.training.smoothing import Estimate, MapMean, Scales
from ensemble_ml.training.spread_fit import SHRINK, Spread

log = logging.getLogger(__name__)

VALIDATION_DATES, _POINTS = 80, 1000  # of each date: enough for a few numbers a field
_FACTORS = torch.linspace(-1, 1, 25).exp()
_NEAR = torch.linspace(-0.25, 0.25, 7).exp()  # where nothing but a comparison is asked for
_SHARES = 0.0, 0.25, 0.5, 0.75, 1.0  # of v and of w
_ALIKE = 1e-6  # of minus the log likelihood
_NOTHING = (
    1e-3  # typical spreads: where members differ and err by less, a date says nothing of how wide sigma should be
)
_SMALLEST_RATIO = 0.1  # of a cell's variance ratio to its field's
_LARGEST_RATIO = 25.0  # of one squared residual over s0^2 to their mean
_TINY = 1e-30
_ABOVE_ZERO, _OFTEN = (Family.TRUNCATED_NORMAL, Family.LOGNORMAL), 0.02  # laws without a mass at zero; share of points
_FEWEST_DRY = 500  # points, to say how often and how much it rains after all
_LEAST_RAIN = 1e-3  # sigmas: less is what packing leaves of nothing
_LEAST_CRPS, _USUAL_CRPS = 0.02, 0.5  # of the typical spread


@dataclass(eq=False)
class Left:
    """What the corrections are to explain: errors of mean and spread without them."""

    truth: Truth | None
    spread: Spread

    def __call__(self, date: int, sample: Sample, members: int) -> tuple[Tensor, Tensor]:
        more = sample.full_spread - self.s1(sample, members)
        if self.truth is None:
            return torch.zeros_like(more), more
        return self.truth.error_left(date, sample.mean), more

    def s1(self, sample: Sample, members: int) -> Tensor:
        """The full spread that is expected of M members, (T, F, Y, X)."""
        return replace(self.spread, members=members).s1(sample.spread)


class Truth:
    """Residuals of the training dates, and what is fitted to them."""

    _last: tuple[int, Tensor] | None = None  # a date and its truth less the bias: other choices of its members follow

    def __init__(self, dates: Dates, spread: Spread, scales: Scales, chosen: np.ndarray):
        self.dates, self.spread, self.scales, self.chosen = dates, spread, scales, chosen
        self.follows = neighbours(dates.reader.source.layout.init_time[chosen])
        self.bias = self._bias()
        self._known = set(chosen.tolist())
        self.whole_bias = self.bias.map() * spread.climatology
        self.dry = torch.ones(dates.shape), torch.zeros(dates.shape)  # a and b of `models.dry`, (T, F)

    def _bias(self) -> Estimate:
        """Mean error of the mean of all members, in units of s_clim."""
        mean = self._map_mean("bias", self._error)
        self.dates.refuse_empty(mean.count, Part.TRUTH)
        return mean.estimate()

    def _map_mean(self, stage: str, of: Callable[[int], Tensor]) -> MapMean:
        """Return the mean over the dates that are fitted to of a date's map, (T, F, Y, X), NaN where absent."""
        mean, mine = MapMean(self.scales, self.dates.shape), self.dates.team.stretch(len(self.chosen))
        if mine and mine.start and self.follows[mine.start]:
            before = of(int(self.chosen[mine.start - 1]))
            mean.stand_before(self.scales.filled(before), present(before))
        for at in self.dates.progress.over(stage, mine):
            values = of(int(self.chosen[at]))
            mean.add(self.scales.filled(values), present(values), follows=bool(self.follows[at]))
        mean.add_up(self.dates.team)
        return mean

    def tell_of_zeros(self, sample: np.ndarray) -> None:
        """Warn of variables whose truth is often zero, and whose law has no mass there: none of them is calibrated."""
        laws = families(self.dates.spec)
        at = [position for position, law in enumerate(laws) if law in _ABOVE_ZERO]
        if not at:
            return
        zeros, count = torch.zeros(2, len(at))
        for date in self.dates.team.mine(sample.tolist()):
            truth = self.dates.target(Part.TRUTH, date)[:, at]
            zeros += (truth == 0).sum((0, -2, -1))
            count += torch.isfinite(truth).sum((0, -2, -1))
        self.dates.team.add_up(zeros, count)
        told: set[str] = set()
        names = field_names(self.dates.spec)
        for share, position in sorted(zip((zeros / count.clamp(min=1)).tolist(), at, strict=True), reverse=True):
            variable = names[position].split()[0]
            if share > _OFTEN and variable not in told:
                told.add(variable)
                log.warning(
                    "%s: the truth is zero at %.0f %% of the points, to which the %s law gives no chance;"
                    " 'model.families={%s: %s}' has one that does",
                    names[position], 100 * share, laws[position].value, variable, Family.CENSORED_NORMAL.value,
                )  # fmt: skip

    def _error(self, date: int) -> Tensor:
        error = self.dates.target(Part.TRUTH, date) - self.dates.target(Part.MEAN, date)
        return error / self.spread.climatology.clamp(min=_TINY)

    def error_left(self, date: int, mean: Tensor) -> Tensor:
        """Error of `mean` beyond the bias of the (other) training dates, (T, F, Y, X)."""
        if self._last is None or self._last[0] != date:
            self._last = date, self.dates.target(Part.TRUTH, date) - self._bias_without(date)
        return self._last[1] - mean

    def _bias_without(self, date: int) -> Tensor:
        if date not in self._known:
            return self.whole_bias
        error = torch.nan_to_num(self.scales.filled(self._error(date)))
        return self.bias.without(error) * self.spread.climatology

    def _unseen(self, sample: Sample, date: int) -> tuple[Tensor, Tensor, Tensor]:
        """Truth, corrected mean of M members with `date` left out of the bias, and what sigma follows."""
        shift, more = self.spread.correction(sample)
        centre = sample.mean + self._bias_without(date) + shift
        return self.dates.target(Part.TRUTH, date), centre, self.spread.followed(sample, more)

    def _uninformed(self, date: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Truth, corrected mean and s0 of a date, and v and w, which are not in them yet. The truth is NaN of fields in
        which there was nothing to predict (a dry day): the width that is best there is no matter of others."""
        sample = self.dates.sample(date)
        truth, centre, followed = self._unseen(sample, date)
        told = (truth - sample.mean).abs() + sample.spread.nan_to_num()
        told = self.scales.mean(told, torch.isfinite(told)) > _NOTHING * self.scales.mean(self.spread.climatology)
        truth = torch.where(told[..., None, None], truth, torch.nan)
        return truth, centre, self.spread.s0(followed), self.spread.expected_errors(sample)

    def likeliest_shrink(self, chosen: np.ndarray) -> Tensor:
        """k of s0 (T, F) at which N(centre, c^2 s0^2) gives the truth the highest likelihood, c free for each k.

        With c^2 = mean r, r = (y - centre)^2 / s0^2, minus the mean log likelihood is log(mean r) / 2 + mean log s0.
        """
        if self.dates.members < 2:
            return self.spread.shrink
        ratios, logs = (torch.zeros(len(SHRINK), *self.dates.shape, dtype=torch.float64) for _ in range(2))
        count = torch.zeros(self.dates.shape, dtype=torch.float64)
        for date in self.dates.each("shrinkage of the spread", chosen):
            truth, centre, followed = self._unseen(self.dates.sample(date), date)
            there = torch.isfinite(truth - centre) & torch.isfinite(followed)
            valid = there.any(-1).any(-1)
            count += valid
            for position, k in enumerate(SHRINK):
                s0 = self.spread.s0(followed, k.expand(self.dates.shape))
                ratio = ((truth - centre) / s0) ** 2
                # Of the date's own mean: a bound for all k would make those alike that are all far too small.
                ratio = self._bounded(ratio, there)
                ratios[position] += torch.where(valid, self.scales.mean(ratio, there), 0.0)
                logs[position] += torch.where(valid, self.scales.mean(s0.log(), there), 0.0)
        self.dates.team.add_up(ratios, logs, count)
        known, count = count > 0, count.clamp(min=1)
        misfit = 0.5 * torch.log(ratios.clamp(min=_TINY) / count) + logs / count
        alike = misfit <= misfit.amin(0) + _ALIKE  # members that never differ say nothing: the climate's spread does
        largest = (alike * torch.arange(len(SHRINK))[:, None, None]).amax(0)
        return torch.where(known, SHRINK[largest], self.spread.shrink)

    def _bounded(self, ratio: Tensor, there: Tensor, least: float = 0.0) -> Tensor:
        """Squared residuals over s0^2 (T, F, Y, X), none of them many times as large as their mean, or `least`."""
        usual = self.scales.mean(ratio, there).clamp(min=least)
        return ratio.minimum(_LARGEST_RATIO * usual[..., None, None].to(ratio.dtype))

    def inflation(self) -> Tensor:
        """Half the logarithm of the mean of squared residuals over s0^2, cells shrunk to the field's mean; zero for
        fields without residuals (there are none, or truth and members never vary)."""

        def ratio(date: int) -> Tensor:
            truth, centre, followed = self._unseen(self.dates.sample(date), date)
            found = ((truth - centre) / self.spread.s0(followed)) ** 2
            # Where s0 is far too small (members that hardly differ), all ratios are large, and none of them is chance.
            return self._bounded(found, torch.isfinite(found), least=1.0)

        found = self._map_mean("inflation", ratio).estimate()
        field = torch.where(found.parts[-1] > 0, found.parts[-1], 1.0).clamp(min=1e-12)
        local = found.map() - found.weight[-1][..., None, None] * found.parts[-1]
        return 0.5 * torch.log(field * (1 + local / field).clamp(min=_SMALLEST_RATIO))

    def learn_dry(self, inflation: Tensor, chosen: np.ndarray) -> None:
        """Fit a and b of `models.dry` to the points of the `chosen` dates at which the corrected mean is zero or below;
        a field that has few of them is left as it is."""
        laws = families(self.dates.spec)
        at = [position for position, family in enumerate(laws) if family in AT_ZERO]
        if not at:
            return
        sums = torch.zeros(4, len(inflation), len(at), dtype=torch.float64)  # of area, and of rain: times it, amount
        points, days = torch.zeros(2, len(inflation), len(at))
        for date in self.dates.team.mine(chosen.tolist()):
            _, centre, s0, more = self._uninformed(date)
            centre, wide = informed(centre, s0, inflation, more)
            centre, sigma, truth = (
                values[:, at] for values in (centre, s0 * wide.exp(), self.dates.target(Part.TRUTH, date))
            )
            there = (centre <= 0) & torch.isfinite(truth)
            wet = there & (truth > _LEAST_RAIN * sigma)
            terms = there.float(), wet.float(), torch.where(wet, truth, 0.0), torch.where(there, sigma, 0.0)
            sums += (torch.stack(terms) * self.scales.area).double().sum((-2, -1))
            points += there.sum((-2, -1))
            days += there.any(-1).any(-1)
        self.dates.team.add_up(sums, points, days)
        often, much = sums[1] / sums[0].clamp(min=_TINY), sums[2] / sums[3].clamp(min=_TINY)
        enough = (points >= _FEWEST_DRY) & (days >= FEWEST_TO_WIDEN)
        for place, position in enumerate(at):
            found = fitted(laws[position], often[:, place], much[:, place])
            for values, number in zip(self.dry, found, strict=True):
                values[:, position] = torch.where(enough[:, place], number.float(), values[:, position])

    def learn_residuals(
        self, inflation: Tensor, train: np.ndarray, validation: np.ndarray, sizes: Sequence[int]
    ) -> bool:
        """Fit the residuals' network, where there is one, and take the shares of v and of w, field by field, at which
        the CRPS of the validation dates is smallest, with sigma free to change a little; whether there is one now."""
        correction = self.spread.corrected
        if correction is None or correction.residuals is None:
            return False
        left, shrink = Left(self, self.spread), self.spread.shrink
        asked = telling(self.dates, left, validation, kinds=(0,))
        train, validation = kept_apart(train, asked)
        if not fit_residuals(correction, self.dates, train, sizes, left, left.s1, shrink, inflation, self.dry):
            return False
        second, linear = correction.residuals.second, correction.linear
        seen = self._points(spaced(validation, VALIDATION_DATES), inflation)
        tried = torch.cartesian_prod(torch.tensor(_SHARES), torch.tensor(_SHARES))
        each = self.dates.progress.over("error network: shares", tried)
        costs = torch.stack([self._cost(*seen, pair) for pair in each])
        known = costs.amax(0) > costs.amin(0)  # the validation dates may lack a field
        best = costs.argmin(0)
        usual = best[known].mode().values if known.any() else torch.tensor(len(tried) // 2)
        shares = tried[torch.where(known, best, usual)].permute(2, 0, 1)  # (2, T, F)
        second *= linear.ordered(shares[..., None, None]).flatten()[:, None]
        gain = 1 - float((costs.amin(0) / costs[0])[known].mean().nan_to_num(1.0))
        log.info("residuals: CRPS on %s %.2f %% lower", dates_called(asked), 100 * gain)
        return True

    def _points(self, chosen: np.ndarray, inflation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Random points of all dates: truth, mean and sigma0 (3, T, F, P); v and w (2, T, F, P); areas (P,)."""
        given, said, areas = [torch.empty(3, *inflation.shape[:2], 0)], [torch.empty(2, *inflation.shape[:2], 0)], []
        for date in self.dates.team.mine(chosen.tolist()):
            truth, centre, s0, more = self._uninformed(date)
            at = torch.randperm(self.scales.area.numel(), generator=torch.Generator().manual_seed(date))[:_POINTS]
            given.append(torch.stack([truth, centre, s0 * inflation.exp()]).flatten(-2)[..., at])
            said.append(more.flatten(-2)[..., at])
            areas.append(self.scales.area.flatten()[at])
        return torch.cat(given, -1), torch.cat(said, -1), torch.cat([torch.empty(0), *areas])

    def _cost(self, given: Tensor, said: Tensor, areas: Tensor, shares: Tensor) -> Tensor:
        """CRPS (T, F) with shares (2,) of v and of w, at the best of a few factors of sigma."""
        (truth, centre, sigma0), said = given, shares[:, None, None, None] * said
        sums, counts = torch.zeros(2, len(_NEAR), *centre.shape[:2])
        for place, factor in enumerate(_NEAR):
            moved, wide = informed(centre, sigma0, factor.log(), said)
            crps = self._crps(moved, sigma0 * wide.exp(), truth)
            there = torch.isfinite(crps) * areas
            sums[place], counts[place] = (crps.nan_to_num() * there).sum(-1), there.sum(-1)
        self.dates.team.add_up(sums, counts)
        least = (sums / counts.clamp(min=_TINY)).amin(0)
        return torch.where(least > 0, least, 1.0)

    def best_factor(self, chosen: np.ndarray, inflation: Tensor, stage: str) -> tuple[Tensor, Tensor, Tensor]:
        """Logarithm of the factor of sigma at which the CRPS is smallest, that CRPS, and on how many of the `chosen`
        dates there is one, all (T, F).

        The CRPS is the scale of the loss: it is not below _LEAST_CRPS typical spreads (a field that was dry on all
        dates), and _USUAL_CRPS of them where there is none.
        """
        total = torch.zeros(len(_FACTORS), *self.dates.shape, dtype=torch.float64)
        count = torch.zeros(self.dates.shape, dtype=torch.float64)
        for date in self.dates.each(stage, chosen):
            truth, centre, s0, more = self._uninformed(date)
            found = []
            for factor in _FACTORS.log():
                moved, wide = informed(centre, s0, inflation + factor, more)
                crps = self._crps(moved, s0 * wide.exp(), truth)
                found.append(self.scales.mean(crps, torch.isfinite(crps)))
            scores = torch.stack(found)
            valid = torch.isfinite(scores).all(0)
            total += torch.where(valid, scores, 0.0)
            count += valid
        self.dates.team.add_up(total, count)
        mean = total / count.clamp(min=1)
        best = mean.argmin(0)
        smallest = mean.gather(0, best[None])[0]
        factor = torch.where(count > 0, _FACTORS.log()[best], 0.0)
        typical = self.scales.mean(self.spread.climatology).to(smallest.dtype)
        error = torch.where(count > 0, smallest.maximum(_LEAST_CRPS * typical), _USUAL_CRPS * typical)
        return factor, error.float(), count

    def _crps(self, centre: Tensor, scale: Tensor, truth: Tensor) -> Tensor:
        scores = torch.empty_like(scale)
        for position, family in enumerate(families(self.dates.spec)):
            mean, sigma = centre[:, position], scale[:, position]
            dry = (values[:, position].view(-1, *[1] * (mean.ndim - 1)) for values in self.dry)
            law = law_near_zero(family, mean, sigma, *dry)
            scores[:, position] = distributions.crps(family, *law, truth[:, position])
        return scores
