"""Fits what needs the truth: bias, inflation, zero-inflation parameters, v and w, and the width of the distribution.

The formulas are in `training.climate_fit`.

Axes: T lead, F field (variables and levels, then surface variables), P point, Y latitude, X longitude.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ensemble_ml import distributions
from ensemble_ml.fields import Family
from ensemble_ml.models.heads import AT_ZERO, Heads, fitted, informed, law_near_zero
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import (
    FEWEST_TO_WIDEN,
    Dates,
    Sample,
    dates_called,
    field_names,
    kept_apart,
    neighbours,
    present,
    spaced,
)
from ensemble_ml.training.linear_fit import telling
from ensemble_ml.training.point_targets import fit_points
from ensemble_ml.training.progress import NETWORK
from ensemble_ml.training.smoothing import Estimate, MapMean, Scales
from ensemble_ml.training.spread_fit import SHRINK, Spread

log = logging.getLogger(__name__)

VALIDATION_DATES, _POINTS = 80, 1000  # most dates, and points of each, to choose fractions of v and w by
_FACTORS = torch.linspace(-1, 1, 25).exp()  # factors of sigma that are tried for its width
_NEAR = torch.linspace(-0.25, 0.25, 7).exp()  # factors of sigma that are tried with each pair of fractions
_SHARES = 0.0, 0.25, 0.5, 0.75, 1.0  # fractions of v and of w that are tried
_ALIKE = 1e-6  # differences of the negative log likelihood up to this do not count
# Typical spreads: a date on which members differ and err by less does not show how wide sigma should be.
_NOTHING = 1e-3
_SMALLEST_RATIO = 0.1  # least variance ratio of a cell, relative to that of its field
_LARGEST_RATIO = 25.0  # largest squared residual over s0^2, relative to their mean
_TINY = 1e-30
_ABOVE_ZERO, _OFTEN = (Family.TRUNCATED_NORMAL, Family.LOGNORMAL), 0.02  # no mass at zero; fraction of zeros to warn of
_FEWEST_DRY = 500  # fewest dry points that a fit of a and b (`models.heads`) needs
_LEAST_RAIN = 1e-3  # sigmas: less rain than this is a rounding error of packing
_LEAST_CRPS, _USUAL_CRPS = 0.02, 0.5  # typical spreads: least scale of the loss, and that without a score


@dataclass(eq=False)
class Left:
    """The targets of the corrections: errors of mean and spread without them.

    Attributes:
        truth: the bias and the truth; None if the model predicts no distribution (`model.postprocess=false`).
        spread: the spread of the untrained model.
    """

    truth: Truth | None
    spread: Spread

    def __call__(self, date: int, sample: Sample, members: int) -> tuple[Tensor, Tensor]:
        """Return the errors of mean and spread to predict, (T, F, Y, X) in physical units, NaN where absent.

        That of the mean is zero if `truth` is None.
        """
        more = sample.full_spread - self.s1(sample, members)
        if self.truth is None:
            return torch.zeros_like(more), more
        return self.truth.error_left(date, sample.mean), more

    def s1(self, sample: Sample, members: int) -> Tensor:
        """Return the expected spread of the full ensemble, (T, F, Y, X)."""
        return replace(self.spread, members=members).s1(sample.spread)


class Truth:
    """The bias of the training dates, and the fits to what it leaves.

    Args:
        dates: reads dates.
        spread: the spread of the untrained model.
        scales: means and smoothing on the grid.
        chosen: indices of the training dates that are fitted to.

    Raises:
        UserError: a field has no truth on any of these dates.
    """

    # The last date and its truth minus the bias, because fits take several choices of a date's members in a row.
    _last: tuple[int, Tensor] | None = None

    def __init__(self, dates: Dates, spread: Spread, scales: Scales, chosen: np.ndarray):
        self.dates, self.spread, self.scales, self.chosen = dates, spread, scales, chosen
        self.follows = neighbours(dates.reader.source.layout.init_time[chosen])
        self.bias = self._bias()
        self._known = set(chosen.tolist())
        self.whole_bias = self.bias.map() * spread.climatology
        self.dry = torch.ones(dates.shape), torch.zeros(dates.shape)  # a and b of `models.heads`, (T, F)

    def _bias(self) -> Estimate:
        """Fit the mean of the truth minus the mean of all members, in units of s_clim."""
        mean = self._map_mean("bias", self._error)
        self.dates.refuse_empty(mean.count, Part.TRUTH)
        return mean.estimate()

    def _map_mean(self, stage: str, of: Callable[[int], Tensor]) -> MapMean:
        """Return the mean over the training dates of a map (T, F, Y, X) of each date, NaN where absent."""
        mean, mine = MapMean(self.scales, self.dates.shape), self.dates.team.stretch(len(self.chosen))
        if mine and mine.start and self.follows[mine.start]:
            # The correlation of neighbouring dates also needs the last date of the previous rank.
            before = of(int(self.chosen[mine.start - 1]))
            mean.stand_before(self.scales.filled(before), present(before))
        for at in self.dates.progress.over(stage, mine):
            values = of(int(self.chosen[at]))
            mean.add(self.scales.filled(values), present(values), follows=bool(self.follows[at]))
        mean.add_up(self.dates.team)
        return mean

    def tell_of_zeros(self, sample: np.ndarray) -> None:
        """Warn of variables whose truth is often zero on dates of `sample`, but whose distribution has no mass there.

        No forecast of such a distribution can be calibrated.
        """
        laws = self.dates.spec.families
        at = [position for position, law in enumerate(laws) if law in _ABOVE_ZERO]
        if not at:
            return
        zeros, count = torch.zeros(2, len(at))
        for date in self.dates.team.mine(sample.tolist()):
            truth = self.dates.target(Part.TRUTH, date)[:, at]
            zeros += (truth == 0).sum((0, -2, -1))
            count += torch.isfinite(truth).sum((0, -2, -1))
        self.dates.team.add_up(zeros, count)
        named: set[str] = set()
        names = field_names(self.dates.spec)
        # The level with the most zeros comes first, and each variable is named only once.
        for share, position in sorted(zip((zeros / count.clamp(min=1)).tolist(), at, strict=True), reverse=True):
            variable = names[position].split()[0]
            if share > _OFTEN and variable not in named:
                named.add(variable)
                log.warning(
                    "%s: the truth is zero at %.0f %% of the points, but the %s distribution has no mass there;"
                    " 'model.families={%s: %s}' gives one that has",
                    names[position], 100 * share, laws[position].value, variable, Family.CENSORED_NORMAL.value,
                )  # fmt: skip

    def _error(self, date: int) -> Tensor:
        """Return the truth minus the mean of all members, in units of s_clim, (T, F, Y, X), NaN where absent."""
        error = self.dates.target(Part.TRUTH, date) - self.dates.target(Part.MEAN, date)
        return error / self.spread.climatology.clamp(min=_TINY)

    def error_left(self, date: int, mean: Tensor) -> Tensor:
        """Return truth - ensemble mean - bias of the other training dates, (T, F, Y, X), NaN where absent."""
        if self._last is None or self._last[0] != date:
            self._last = date, self.dates.target(Part.TRUTH, date) - self._bias_without(date)
        return self._last[1] - mean

    def _bias_without(self, date: int) -> Tensor:
        """Return the bias as fitted without a date, (T, F, Y, X)."""
        if date not in self._known:
            return self.whole_bias
        error = torch.nan_to_num(self.scales.filled(self._error(date)))
        return self.bias.without(error) * self.spread.climatology

    def _unseen(self, sample: Sample, date: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return truth, corrected mean of M members (by the bias of other dates), and the spread that sigma follows."""
        shift, more = self.spread.correction(sample)
        centre = sample.mean + self._bias_without(date) + shift
        return self.dates.target(Part.TRUTH, date), centre, self.spread.followed(sample, more)

    def _uninformed(self, date: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return truth, linearly corrected mean and s0 of a date, and v and w of the point network.

        The truth is NaN in fields in which there was nothing to predict, such as rain on a dry day, because the best
        width on such a date is useless on others.
        """
        sample = self.dates.sample(date)
        truth, centre, followed = self._unseen(sample, date)
        size = (truth - sample.mean).abs() + sample.spread.nan_to_num()
        enough = self.scales.mean(size, torch.isfinite(size)) > _NOTHING * self.scales.mean(self.spread.climatology)
        truth = torch.where(enough[..., None, None], truth, torch.nan)
        return truth, centre, self.spread.s0(followed), self.spread.said(sample)[1:]

    def likeliest_shrink(self, chosen: np.ndarray) -> Tensor:
        """Fit k of s0, by the likelihood of the truth under N(centre, c^2 s0^2), with c free for each k.

        With r = (y - centre)^2 / s0^2 and c^2 = mean r, the mean negative log likelihood is
        log(mean r) / 2 + mean log s0, up to a constant.

        Returns:
            (T, F) the likeliest k; that of s1 with a single member, or for a field that no date has.
        """
        # One member has no sample spread to weigh against the climatological one, so k of s1 is kept.
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
                # The bound follows from the mean of this date and this k. With one bound for all k, all k with far too
                # small an s0 would be equally likely.
                ratio = self._bounded(ratio, there)
                ratios[position] += torch.where(valid, self.scales.mean(ratio, there), 0.0)
                logs[position] += torch.where(valid, self.scales.mean(s0.log(), there), 0.0)
        self.dates.team.add_up(ratios, logs, count)
        known, count = count > 0, count.clamp(min=1)
        misfit = 0.5 * torch.log(ratios.clamp(min=_TINY) / count) + logs / count
        # If members never differ, many k fit equally well. The largest of them relies on the climatological spread.
        alike = misfit <= misfit.amin(0) + _ALIKE
        largest = (alike * torch.arange(len(SHRINK))[:, None, None]).amax(0)
        return torch.where(known, SHRINK[largest], self.spread.shrink)

    def _bounded(self, ratio: Tensor, there: Tensor, least: float = 0.0) -> Tensor:
        """Return squared residuals over s0^2, (T, F, Y, X), with an upper bound for each field.

        The bound is `_LARGEST_RATIO` times their mean, or that many times `least` if this is larger.
        """
        usual = self.scales.mean(ratio, there).clamp(min=least)
        return ratio.minimum(_LARGEST_RATIO * usual[..., None, None].to(ratio.dtype))

    def inflation(self) -> Tensor:
        """Fit B: half the logarithm of the mean of squared residuals over s0^2, (T, F, Y, X).

        Cells are shrunk towards the mean of their field. B is zero for a field whose residuals are absent or all zero.
        """

        def ratio(date: int) -> Tensor:
            truth, centre, followed = self._unseen(self.dates.sample(date), date)
            found = ((truth - centre) / self.spread.s0(followed)) ** 2
            # The bound follows the mean: where members hardly differ, s0 is far too small, and all ratios are large
            # without being outliers.
            return self._bounded(found, torch.isfinite(found), least=1.0)

        found = self._map_mean("inflation", ratio).estimate()
        field = torch.where(found.parts[-1] > 0, found.parts[-1], 1.0).clamp(min=1e-12)
        # The last part is the area mean. Only the departures of cells from it are shrunk.
        local = found.map() - found.weight[-1][..., None, None] * found.parts[-1]
        return 0.5 * torch.log(field * (1 + local / field).clamp(min=_SMALLEST_RATIO))

    def learn_dry(self, inflation: Tensor, chosen: np.ndarray) -> None:
        """Fit a and b of `models.heads` to points at which the corrected mean is zero or below.

        Fields with few such points, or on few of the dates `chosen`, keep their a and b. `inflation` is B,
        (T, F, Y, X).
        """
        laws = self.dates.spec.families
        at = [position for position, family in enumerate(laws) if family in AT_ZERO]
        if not at:
            return
        # Sums over dry points: area, area with rain, amount of rain, sigma.
        sums = torch.zeros(4, len(inflation), len(at), dtype=torch.float64)
        points, days = torch.zeros(2, len(inflation), len(at))
        for date in self.dates.team.mine(chosen.tolist()):
            _, centre, s0, more = self._uninformed(date)
            centre, wide = informed(centre, s0, inflation, more)
            centre, sigma, truth = (
                values[:, at] for values in (centre, s0 * wide.exp(), self.dates.target(Part.TRUTH, date))
            )
            there = (centre <= 0) & torch.isfinite(truth)
            # Packed fields have tiny values where there is no rain.
            wet = there & (truth > _LEAST_RAIN * sigma)
            terms = there.float(), wet.float(), torch.where(wet, truth, 0.0), torch.where(there, sigma, 0.0)
            sums += (torch.stack(terms) * self.scales.area).double().sum((-2, -1))
            points += there.sum((-2, -1))
            days += there.any(-1).any(-1)
        self.dates.team.add_up(sums, points, days)
        often, much = sums[1] / sums[0].clamp(min=_TINY), sums[2] / sums[3].clamp(min=_TINY)
        # Many points of few dates are not enough, because dry points of one date are alike.
        enough = (points >= _FEWEST_DRY) & (days >= FEWEST_TO_WIDEN)
        for place, position in enumerate(at):
            found = fitted(laws[position], often[:, place], much[:, place])
            for values, number in zip(self.dry, found, strict=True):
                values[:, position] = torch.where(enough[:, place], number.float(), values[:, position])

    def learn_points(self, inflation: Tensor, train: np.ndarray, validation: np.ndarray, sizes: Sequence[int]) -> bool:
        """Fit the point network, choose which fraction of v and of w each field takes, and return whether it was fit.

        The fractions are those with the smallest CRPS on the validation dates, at the best of a few factors of sigma.
        `inflation` is B, (T, F, Y, X), and `sizes` are the numbers of members that training samples have.
        """
        start, left = self.spread.start, Left(self, self.spread)
        if start is None or start.points is None:
            return False
        # The loss of the truth uses the distribution as it is fitted so far.
        terms = ("shrink", self.spread.shrink), ("inflation", inflation), *zip(Heads.DRY, self.dry, strict=True)
        for name, values in terms:
            getattr(start.heads, name).copy_(values)
        if not fit_points(start, self.dates, train, validation, sizes, left, left.s1):
            return False
        asked = telling(self.dates, left, validation, kinds=(0,))
        validation = kept_apart(train, asked)[1]
        errors = start.points.second.chunk(3)[1:]
        seen = self._points(spaced(validation, VALIDATION_DATES), inflation)
        # All pairs of fractions are tried, because the best width depends on the mean.
        tried = torch.cartesian_prod(torch.tensor(_SHARES), torch.tensor(_SHARES))
        each = self.dates.progress.over(f"{NETWORK}: shares of errors", tried)
        costs = torch.stack([self._cost(*seen, pair) for pair in each])
        # All pairs have the same CRPS only in fields that no date has.
        known = costs.amax(0) > costs.amin(0)
        best = costs.argmin(0)
        usual = best[known].mode().values if known.any() else torch.tensor(len(tried) // 2)
        shares = tried[torch.where(known, best, usual)].permute(2, 0, 1)  # (2, T, F)
        # The last layer is linear, so a fraction of the output is a fraction of its weights.
        for weights, share in zip(errors, shares, strict=True):
            weights *= share.flatten()[:, None]
        gain = 1 - float((costs.amin(0) / costs[0])[known].mean().nan_to_num(1.0))
        log.info("point network: CRPS on %s %.2f %% lower", dates_called(asked), 100 * gain)
        return True

    def _points(self, chosen: np.ndarray, inflation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return truth, mean, sigma0 (3, T, F, P), v and w (2, T, F, P), areas (P,) of random points of its dates."""
        given, said, areas = [torch.empty(3, *inflation.shape[:2], 0)], [torch.empty(2, *inflation.shape[:2], 0)], []
        for date in self.dates.team.mine(chosen.tolist()):
            truth, centre, s0, more = self._uninformed(date)
            # Points are drawn by the date's own seed, so that they do not depend on the number of ranks.
            at = torch.randperm(self.scales.area.numel(), generator=torch.Generator().manual_seed(date))[:_POINTS]
            given.append(torch.stack([truth, centre, s0 * inflation.exp()]).flatten(-2)[..., at])
            said.append(more.flatten(-2)[..., at])
            areas.append(self.scales.area.flatten()[at])
        return torch.cat(given, -1), torch.cat(said, -1), torch.cat([torch.empty(0), *areas])

    def _cost(self, given: Tensor, said: Tensor, areas: Tensor, shares: Tensor) -> Tensor:
        """Return the CRPS (T, F) with fractions (2,) of v and of w, at the best of a few factors of sigma.

        It is one for a field that no date has.
        """
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
        """Find the factor of sigma with the smallest CRPS.

        That CRPS becomes the scale of the loss. So it is at least `_LEAST_CRPS` typical spreads, even for a field that
        was dry on all dates, and `_USUAL_CRPS` of them where there is no score.

        Returns:
            Logarithm of the factor, that CRPS in physical units, and the number of dates with a CRPS; (T, F) each.
        """
        total = torch.zeros(len(_FACTORS), *self.dates.shape, dtype=torch.float64)
        count = torch.zeros(self.dates.shape, dtype=torch.float64)
        for date in self.dates.each(stage, chosen):
            truth, centre, s0, more = self._uninformed(date)
            found = []
            # Each factor is tried on the same forecasts, so only one pass over the dates is needed.
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
        """Return the CRPS of distributions given by mean and sigma, each field by its own distribution."""
        scores = torch.empty_like(scale)
        for position, family in enumerate(self.dates.spec.families):
            mean, sigma = centre[:, position], scale[:, position]
            dry = (values[:, position].view(-1, *[1] * (mean.ndim - 1)) for values in self.dry)
            law = law_near_zero(family, mean, sigma, *dry)
            scores[:, position] = distributions.crps(family, *law, truth[:, position])
        return scores
