"""Scores on the validation dates, which choose `checkpoints/best`.

They are scores of forecasts from the first M members (for other numbers M, see `training.widths`).

    crps_ratio     CRPS over that of the raw members' distribution N(m, (1 + 1/M) s^2);
                   for M = 1 over the absolute error of the member
    spread_ratio   RMSE of the predicted spread over that of the size-corrected raw spread s c4(N) / c4(M);
                   for M = 1 over that of the climatological spread
    score          geometric mean of these two, or the one that exists; lower is better

    m, s   mean and spread of the M members
    N      members of the full ensemble
    c4     E[s] / sigma of independent normal values

For every lead, variable and level, a ratio of two means over dates and area is taken. A score is the geometric mean of
these ratios. A field is left out if there is nothing to predict: for example, if no rain fell on these dates, nor was
any forecast.

Calibration factors (`widths` in the code) are computed beside the scores. Each multiplies the predicted scale of a
field, so that the mean variance equals the mean squared error of the mean (Fortin et al. 2014,
doi:10.1175/JHM-D-14-0008.1). Training by the CRPS leaves them above one where errors have heavier tails than the
distribution. For a normal distribution the factor follows from these two means.

The standard deviation of a distribution that ends at a bound grows more slowly than its scale. So it is computed for a
few factors, and the factor at which it equals the error is interpolated. Where that result cannot be trusted, the
factor is the one with the least CRPS.

For rain and for log-normal distributions, the factor is always the one with the least CRPS. Where they are nearly zero,
most of the variance lies in values that no sample shows. For rain at location / scale = -4 the standard deviation is
the scale, and it rains one time in 600,000.

The factors depend on the number of members, because sigma may follow the spread that more members would have. They are
computed for the number of members that the validation uses. `training.widths` computes those of other numbers for each
best model.

Axes: B initialisation time, T lead, F field (variables and levels, then surface variables), G field with a bound,
W factor that is tried, Y latitude, X longitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemble_ml import distributions
from ensemble_ml.closed_forms import SKEWED
from ensemble_ml.distributed import Mesh
from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.loading import Batch
from ensemble_ml.models import AnyModel, Prediction
from ensemble_ml.models.inputs import by_family
from ensemble_ml.training.climate_data import FEWEST_TO_WIDEN
from ensemble_ml.training.losses import crps

NOTHING = 1e-3  # typical spreads; where the raw CRPS or RMSE is below this, there is nothing to predict
_WIDEST = 3.0  # largest factor of a scale; a larger one would mean more than a lack of calibration
_BY_CRPS = SKEWED  # distributions whose factor is always the one with the least CRPS
_TRIED = (0.8, 1.0, 1.25)  # factors that are tried; their logarithms are evenly spaced, for a parabola through them
_FURTHEST = 2.0  # most steps, each a factor of 1.25, from one to the minimum of the parabola
_REACH = 3.0  # most steps to where the parabola reaches the error, if the result is to be trusted
_LIKE_NORMAL = 0.95  # fraction of a normal distribution's slope above which the bound is taken to have no effect


def c4(n: int) -> float:
    """Return E[s] / sigma of n >= 2 independent normal values, for s with ddof = 1.

    c4(n) = sqrt(2 / (n - 1)) Gamma(n / 2) / Gamma((n - 1) / 2)
    """
    return math.sqrt(2 / (n - 1)) * math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2))


class NotFiniteForecast(UserError):
    """An error for a model whose predictions are NaN or infinite."""


@dataclass(frozen=True)
class Validation:
    """The result of a validation.

    Attributes:
        scores: `crps_ratio`, `spread_ratio` and `score`, each if a field of its target can be scored.
        widths: (T, F) calibration factors of the predicted scales; None without a truth.
    """

    scores: dict[str, float]
    widths: list[list[float]] | None = None


def validate(
    model: AnyModel, batches: Iterable[Batch], *, full_size: int, area: Tensor, mesh: Mesh | None = None
) -> Validation:
    """Score a model on batches; without any date, there are no scores and no factors.

    Args:
        model: the model.
        batches: batches with targets; all samples of a batch have the same number of members.
        full_size: N, members of the full ensemble.
        area: (Y, X) areas of the cells.
        mesh: the ranks that share samples and dates; all get the same result. None is a single rank.

    Raises:
        NotFiniteForecast: a prediction is NaN or infinite.
    """
    scoring = Scoring(model, full_size=full_size, area=area, mesh=mesh)
    for batch in batches:
        scoring.add(batch)
    return scoring.found()


class Scoring:
    """The work of `validate`, one batch at a time, with the same arguments."""

    def __init__(self, model: AnyModel, *, full_size: int, area: Tensor, mesh: Mesh | None = None):
        spec, mesh = model.spec, mesh or Mesh()
        fields = len(spec.leads_out), spec.fields
        self._model, self._full_size, self._laws, self._mesh = model, full_size, spec.families, mesh
        self._crps, self._spread, self._width = (_Sums(area, fields, mesh) for _ in range(3))
        self._bounded = [position for position, law in enumerate(self._laws) if law is not Family.NORMAL]
        # Distributions with a bound need their variance and CRPS at a few factors. The normal one needs two sums only.
        self._tried = [_Sums(area, (fields[0], len(self._bounded)), mesh) for _ in _TRIED if self._bounded]
        self._least = NOTHING * model.heads.typical.to(area.device).double()

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Predict a batch and add its sums."""
        model, bounded, least = self._model, self._bounded, self._least
        prediction = model(batch.inputs)
        if batch.truth is not None:
            ours, raw, truth = _crps(model, batch, prediction)
            self._crps.add(ours, raw, truth)
            errors, variances, truth, told = _squares(model, batch, prediction)
            self._width.add(errors, variances, truth, told, least)
            for width, sums in zip(_TRIED, self._tried, strict=False):
                maps = _at_width(model, batch, prediction, width)
                sums.add(*maps, truth[:, :, bounded], told[:, :, bounded], least[:, bounded])
        # Batches have a target for the spread only if the model predicts it.
        if batch.target_spread is not None:
            self._spread.add(*_spread_error(model, batch, prediction, self._full_size))

    @torch.no_grad()
    def found(self) -> Validation:
        """Compute scores and calibration factors, the same on all ranks, from all that was added. All ranks call this.

        Raises:
            NotFiniteForecast: a prediction is NaN or infinite.
        """
        bounded, least = self._bounded, self._least
        found = {"crps_ratio": self._crps.ratio(least), "spread_ratio": self._spread.ratio(least**2, 0.5)}
        scores = {name: ratio for name, ratio in found.items() if ratio is not None}
        if scores:
            scores["score"] = math.exp(sum(map(math.log, scores.values())) / len(scores))
            # Logarithms may differ in the last bit between processors, and all ranks have to make the same choices.
            of_first = torch.tensor([*scores.values()], dtype=torch.float64, device=least.device)
            self._mesh.model.broadcast(of_first).wait()
            scores = dict(zip(scores, of_first.tolist(), strict=True))
        widths = self._width.roots()
        if widths is not None and bounded:
            # A field with a bound takes the factor from its variance, unless its distribution forbids that or the
            # factor cannot be trusted. Then it takes the factor with the least CRPS.
            by_crps = torch.tensor([self._laws[position] in _BY_CRPS for position in bounded], device=widths.device)
            means = zip(*(sums.means() for sums in self._tried), strict=True)
            crps_WTG, variance_WTG = (torch.stack(values) for values in means)
            reaching, believed = _reaching(variance_WTG, widths[:, bounded])
            widths[:, bounded] = torch.where(believed & ~by_crps, reaching, _least(crps_WTG))
        return Validation(scores, None if widths is None else widths.tolist())


class _Sums:
    """A pair of sums over dates of area means for every field: ours, and the one to compare it with."""

    def __init__(self, area: Tensor, fields: tuple[int, int], mesh: Mesh):
        self.area, self.mesh = area, mesh
        self.sums = torch.zeros((2, *fields), dtype=torch.float64, device=area.device)  # ours, to compare with
        self.dates = 0
        self.known = torch.zeros(fields, dtype=torch.float64, device=area.device)  # dates with a target

    def add(
        self, ours: Tensor, raw: Tensor, target: Tensor, told: Tensor | None = None, least: Tensor | None = None
    ) -> None:
        """Add maps (B, T, F, Y, X) of some dates.

        A cell without a target adds nothing to either sum. A field of a date adds nothing if the mean of `told` is not
        above `least` (T, F): there was nothing to predict.
        """
        known = torch.isfinite(target)
        weight = (known * self.area).double()
        maps = (ours, raw) if told is None else (ours, raw, told)
        sums = [(torch.where(known, values, 0.0) * weight).sum((-2, -1)) for values in maps]
        parts = torch.stack([*sums[:2], weight.sum((-2, -1)), *sums[2:]])  # (3 or 4, B, T, F)
        # Sums over cells are completed over the ranks that share the grid before anything is divided.
        self.mesh.spatial.all_reduce(parts)
        # A dry day does not show how wide rain should be, and would enter with a ratio of two tiny numbers.
        if least is not None:
            parts = parts[:3] * (parts[3] > least * parts[2])
        self.sums += (parts[:2] / parts[2].clamp(min=1e-12)).sum(1)
        self.known += (parts[2] > 0).sum(0)
        self.dates += len(target)

    def ratio(self, least: Tensor, power: float = 1.0) -> float | None:
        """Return the geometric mean over fields of (ours / raw)^power, where ours is at least `least`.

        Only fields whose raw mean is above `least` (T, F) count; the result is None without any such field or date.
        """
        found = self._over_ranks()
        if found is None:
            return None
        ours, raw, known = found
        if not bool(torch.isfinite(ours).all()):
            text = "validation: a prediction is not finite; try a lower optim.lr or model.precision=float32"
            raise NotFiniteForecast(text)
        floor = least * known
        scored = raw > floor  # independent of our prediction, so that every validation scores the same fields
        logs = power * (torch.log(ours.maximum(floor)[scored]) - torch.log(raw[scored]))
        return math.exp(logs.mean().item()) if logs.numel() else None

    def roots(self) -> Tensor | None:
        """Return sqrt(ours / raw), (T, F), from 1/3 to 3; None without a date.

        It is one where too few dates have the field, or a sum is zero.
        """
        found = self._over_ranks()
        if found is None:
            return None
        ours, raw, known = found
        # Few dates would give a factor that is mostly chance.
        roots = torch.where(
            (raw > 0) & (ours > 0) & (known >= FEWEST_TO_WIDEN), (ours / raw.clamp(min=1e-300)).sqrt(), 1.0
        )
        return roots.clamp(1 / _WIDEST, _WIDEST)

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the means of ours and of the other, (T, F); NaN where too few dates have the field."""
        found = self._over_ranks()
        assert found is not None
        ours, other, known = found
        enough, count = known >= FEWEST_TO_WIDEN, known.clamp(min=1)
        return torch.where(enough, ours / count, torch.nan), torch.where(enough, other / count, torch.nan)

    def _over_ranks(self) -> Tensor | None:
        """Return the two sums and the number of dates with a target, over all ranks: (3, T, F); None without a date."""
        # Sums over dates are added up only here, once for all dates.
        total = torch.cat([self.sums.flatten(), self.known.flatten(), self.sums.new_tensor([self.dates])])
        self.mesh.data.all_reduce(total)
        return total[:-1].view(3, *self.known.shape) if total[-1] else None


def _squares(model: AnyModel, batch: Batch, prediction: Prediction) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return squared error of the predicted mean, predicted variance, truth, and how uncertain each point was.

    The last is the absolute error of the members' mean plus their spread. All are (B, T, F, Y, X).
    """
    truth, location, scale = _distribution(batch, prediction)
    mean, deviation = torch.empty_like(location), torch.empty_like(scale)
    # Location and scale are not mean and standard deviation, except for the normal distribution.
    for family, at in by_family(model.spec.families):
        mean[:, :, at], deviation[:, :, at] = distributions.moments(family, location[:, :, at], scale[:, :, at])
    middle, spread = _raw(model, batch)
    told = (truth - middle).abs() + spread.nan_to_num()
    return (mean - truth) ** 2, deviation**2, truth, told


def _crps(model: AnyModel, batch: Batch, prediction: Prediction) -> tuple[Tensor, Tensor, Tensor]:
    """Return the CRPS of the prediction, that of the raw members' normal distribution, and the truth.

    All are (B, T, F, Y, X).
    """
    members, (mean, spread) = int(batch.inputs.count[0]), _raw(model, batch)
    truth, location, scale = _distribution(batch, prediction)
    # The factor accounts for the sampling error of the members' mean. Members that are all equal get a tiny scale.
    wide = (math.sqrt(1 + 1 / members) * spread).clamp(min=1e-12)
    ours = crps(model.spec.families, location, scale, truth)
    return ours, distributions.crps(Family.NORMAL, mean, wide, truth), truth


def _at_width(model: AnyModel, batch: Batch, prediction: Prediction, width: float) -> tuple[Tensor, Tensor]:
    """Return CRPS and variance of the fields that have a bound, with `width` times their scale: (B, T, G, Y, X)."""
    truth, location, scale = _distribution(batch, prediction)
    scores, variances = torch.empty_like(scale), torch.empty_like(scale)
    for law, at in by_family(model.spec.families):
        if law is not Family.NORMAL:
            wider = distributions.widen(law, location[:, :, at], scale[:, :, at], truth.new_tensor(width))
            scores[:, :, at] = distributions.crps(law, *wider, truth[:, :, at])
            variances[:, :, at] = distributions.moments(law, *wider)[1] ** 2
    bounded = [position for position, law in enumerate(model.spec.families) if law is not Family.NORMAL]
    return scores[:, :, bounded], variances[:, :, bounded]


def _least(crps_WTG: Tensor) -> Tensor:
    """Return the factor with the least CRPS, (T, G), by a parabola through those tried.

    The factor is one where too few dates have the field.
    """
    before, here, after = crps_WTG
    bend, slope = before - 2 * here + after, (before - after) / 2
    # Where the parabola has no minimum, the better of the two outer factors is taken.
    step = torch.where(bend > 0, slope / bend.clamp(min=1e-300), torch.sign(slope) * (slope.abs() > 0))
    return torch.exp(step.clamp(-_FURTHEST, _FURTHEST).nan_to_num(0.0) * math.log(_TRIED[2]))


def _reaching(variance_WTG: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor at which the mean variance is `roots`^2 times as large, and whether to trust it: (T, G).

    The factor comes from a parabola through the logarithms of the variances at the factors tried. For a normal
    distribution this is the line 2 log(factor). Between two bounds, the variance has a largest value for a given mean,
    and outside the factors tried it is unknown how near it is. So a result far away is trusted only if the slope is
    almost that of a normal distribution. The factor is one where too few dates have the field.
    """
    unit = math.log(_TRIED[2])
    before, here, after = variance_WTG.clamp(min=1e-300).log()
    # Solve bend step^2 + slope step = 2 log(root), in the form that does not divide by a small bend.
    bend, slope, wanted = (before + after) / 2 - here, ((after - before) / 2).clamp(min=1e-12), 2 * roots.log()
    step = 2 * wanted / (slope + (slope**2 + 4 * bend * wanted).clamp(min=0).sqrt())
    believed = (step.abs() <= _REACH) | (slope > _LIKE_NORMAL * 2 * unit) | ~torch.isfinite(step)
    return torch.exp(step.nan_to_num(0.0) * unit).clamp(1 / _WIDEST, _WIDEST), believed


def _spread_error(
    model: AnyModel, batch: Batch, prediction: Prediction, full_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return squared errors of the predicted and of the reference spread, and the full spread: (B, T, F, Y, X)."""
    members, (_, spread), target = int(batch.inputs.count[0]), _raw(model, batch), batch.target_spread
    assert target is not None and prediction.spread is not None
    if members > 1:
        reference = spread * (c4(full_size) / c4(members))
    else:
        # One member has no sample spread. The climatological spread stands in its place.
        reference = model.heads.base_spread(spread, batch.inputs.count)
    return (prediction.spread - target) ** 2, (reference - target) ** 2, target


def _distribution(batch: Batch, prediction: Prediction) -> tuple[Tensor, Tensor, Tensor]:
    """Return truth, location and scale, (B, T, F, Y, X) each."""
    assert batch.truth is not None and prediction.location is not None and prediction.scale is not None
    return batch.truth, prediction.location, prediction.scale


def _raw(model: AnyModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return mean and spread of the members given, at the predicted leads, (B, T, F, Y, X) each."""
    leads = model.spec.lead_positions
    return batch.inputs.mean[:, leads], batch.inputs.spread[:, leads]
