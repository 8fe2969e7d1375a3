"""Fit the forms of EMOS (`models.rivals.emos`) on the training dates, and keep the one that scores best in validation.

    global     one set of coefficients for each lead and field
    local      one set for each lead, field and grid point, with a seasonal term
    shrunk K   local coefficients, pulled towards the global ones, which weigh as much as K dates

All forms take the members' mean as an anomaly from its mean over the training dates at the point. So the global
coefficients do not depend on how the climate differs from place to place.

Axes: D date, T lead, F field (variables and levels, then surface variables), P grid point.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ensemble_ml import distributions
from ensemble_ml.fields import Family
from ensemble_ml.loading.reader import Reader, day_of_year
from ensemble_ml.machine import memory_limit
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.inputs import seasonal_terms
from ensemble_ml.models.rivals import Emos, fit_emos
from ensemble_ml.models.rivals.emos import COEFFICIENTS, EmosModel, merged, rows_for
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import Dates, field_names, most_dates, spaced
from ensemble_ml.training.progress import Progress
from ensemble_ml.training.validation import NOTHING

log = logging.getLogger(__name__)

STRENGTHS = (0.5, 2.0, 8.0, 32.0)  # dates that the global coefficients count for, K
_MOST_SAMPLES = 200_000  # points times dates of a global fit of four numbers: all dates, at some points
_AT_ONCE = 4_000_000  # points times dates that are fitted together; each takes 350 bytes
_MOST_POINTS = 1100  # points for the choice of a form; the chosen form is fitted at all points
_ITERATIONS, _TOLERANCE = 12, 1e-3
_EVERY = slice(None)
_TINY = 1e-30
_REFINED = 8  # iterations for another ensemble size, which starts from the coefficients of the first


@dataclass(eq=False)
class _Samples:
    """The mean, variance and truth of some dates, as EMOS uses them.

    Where one of the three is missing, the truth is NaN, and so has no weight.

    Attributes:
        mean: (D, T, F, P) float32, mean of M members.
        variance: (D, T, F, P) float32, variance of M members, ddof = 1.
        truth: (D, T, F, P) float32, NaN where something is missing.
        season: (D, 2) sine and cosine of the day of the year.
        members: M.
        reference: (T, F, P) float64, the mean of `mean` over these dates.
    """

    mean: Tensor
    variance: Tensor
    truth: Tensor
    season: Tensor
    members: int

    def __post_init__(self) -> None:
        self.reference = self.mean.double().mean(0)

    @classmethod
    def read(cls, reader: Reader, dates: np.ndarray, members: int, points: slice = _EVERY) -> _Samples:
        """Read some dates at some points, with mean and variance of `members` members (see `Dates.sample`)."""
        source = Dates(reader, members)
        count = len(range(*points.indices(math.prod(reader.spec.grid.shape))))
        mean, variance, truth = torch.empty(3, len(dates), *source.shape, count).unbind()
        for number, date in enumerate(dates):
            sample = source.sample(int(date))
            read = sample.mean, sample.spread**2, source.target(Part.TRUTH, int(date))
            for kept, values in zip((mean, variance, truth), read, strict=True):
                kept[number] = values.flatten(-2)[..., points]
        days = [float(day_of_year(reader.time(int(date)))) for date in dates]
        whole = torch.isfinite(mean) & torch.isfinite(variance)  # not where a date has fewer members than M
        truth = torch.where(whole, truth, torch.nan)
        # Missing values get the mean over dates, so that they are finite. Their truth is NaN, so they have no weight.
        mean, variance = (torch.where(whole, v, torch.nan_to_num(v.nanmean(0))) for v in (mean, variance))
        return cls(mean, variance, truth, seasonal_terms(torch.tensor(days)), source.members)

    def field(self, lead: int, field: int, points: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and truth of one lead and field, (P, D) each."""
        whole = self.mean, self.variance, self.truth
        return tuple(v[:, lead, field, points].T.contiguous() for v in whole)  # type: ignore[return-value]


def fit_emos_model(
    model: EmosModel, reader: Reader, train: np.ndarray, validation: np.ndarray, members: int, sizes: Sequence[int],
    progress: Progress | None = None,
) -> dict[str, object]:  # fmt: skip
    """Fit the coefficients of `model`. A point where too few dates have a truth takes the global coefficients.

    The validation dates choose the form, at M = `members`. It is "shrunk 8" if there are none, or if no field has
    anything to predict on them (`_Fit.scores`). Of the other ensemble `sizes` to fit for, the model has rows for some
    only (see `rows_for`).

    Returns:
        {"form": the chosen form, "validation_crps_ratio": CRPS by form over that of the raw ensemble, empty if nothing
        could choose the form}.

    Raises:
        UserError: too few values of the truth are there to fit the global coefficients of a lead and field.
    """
    progress = progress or Progress()
    progress.begin(["EMOS: its forms", "EMOS: all points"])
    train = spaced(np.asarray(train), _dates_that_fit(reader, len(train)))
    samples = _Samples.read(reader, train, members)
    fit = _Fit(samples, torch.from_numpy(reader.spec.grid.area_weights()).flatten(), reader.spec.families, progress)
    scores: dict[str, float] = {}
    if len(validation):
        seen = _Samples.read(reader, np.asarray(validation), members, fit.some_points)
        scores = fit.scores(seen, model.heads.typical)
    # Without validation dates no form can be preferred, so one with moderate shrinkage is taken.
    form = min(scores, key=lambda name: scores[name]) if scores else "shrunk 8"
    listed = ", ".join(f"{name} {score:.4f}" for name, score in scores.items())
    fit.warn_few_dates(reader.spec)
    log.info("emos: CRPS on the validation dates over the raw ensemble's: %s; taken: %s", listed or "none", form)
    # A size gets coefficients only if enough dates have so many members.
    whole = np.array([len(reader.available(int(date))) for date in train])
    wanted = rows_for(samples.members, [s for s in sizes if (whole >= s).sum() >= COEFFICIENTS])
    if wanted[0] > 1 and reader.spec.config.min_members == 1:
        log.warning("emos: fitted to %s members but not to one, so its sigma for one member is too small", wanted)
    # The model has a fixed number of rows. Unused rows repeat the largest size.
    spare = len(model.sizes) - len(wanted)
    model.sizes.copy_(torch.tensor([*wanted, *[wanted[-1]] * spare]))
    fitted = first = fit.all_points(form, None)
    for size in [samples.members, *(s for s in wanted if s != samples.members)]:
        if size != samples.members:
            fit.samples = _Samples.read(reader, train, size)
            fitted = fit.all_points(form, first)
        for row, filled in enumerate(model.sizes.tolist()):
            for (lead, field), emos in fitted.items() if filled == size else ():
                model.put(row, lead, field, emos, fit.samples.reference[lead, field])
    return {"form": form, "validation_crps_ratio": scores}


class _Fit:
    """The fit of one model, with the samples of the ensemble size that is being fitted."""

    def __init__(self, samples: _Samples, area: Tensor, families: Sequence[Family], progress: Progress):
        self.samples, self.area, self.families, self.progress = samples, area, families, progress

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Return all pairs of lead and field."""
        _, leads, fields, _ = self.samples.mean.shape
        return [(lead, field) for lead in range(leads) for field in range(fields)]

    def scores(self, validation: _Samples, typical: Tensor) -> dict[str, float]:
        """Return for each form the geometric mean over leads and fields of its CRPS divided by the raw ensemble's.

        The raw ensemble is N(m, (1 + 1/M) s^2). A field has nothing to predict, and is left out, if its raw CRPS is
        negligible compared with its `typical` spread (T, F) or with its raw CRPS on the training dates. `validation`
        has `some_points` only.
        """
        logs: dict[str, list[float]] = {}
        for lead, field in self.progress.over("EMOS: its forms", self.columns):
            known = validation.field(lead, field, _EVERY)
            raw = self._raw(known, validation.members)
            before = self._raw(self.samples.field(lead, field, self.some_points), self.samples.members)
            least = NOTHING * max(before, float(typical[lead, field]))
            if raw <= least:
                continue
            reference = self._reference(lead, field, self.some_points)
            for name, emos in self._forms(lead, field, self.some_points).items():
                score = self._mean(emos.crps(*known, validation.season, reference), known[2])
                logs.setdefault(name, []).append(math.log(max(score, least) / raw))
        return {name: math.exp(sum(values) / len(values)) for name, values in logs.items()}

    def all_points(self, form: str, first: dict[tuple[int, int], Emos] | None) -> dict[tuple[int, int], Emos]:
        """Fit `form` at all points, from the coefficients `first` of another size; return them by lead and field."""
        each = self.progress.over("EMOS: all points", self.columns)
        return {at: self._at_all_points(form, *at, None if first is None else first[at]) for at in each}

    def warn_few_dates(self, spec: ModelSpec) -> None:
        """Warn of fields with points that take the global coefficients for lack of dates."""
        names, few = field_names(spec), []
        for lead, field in self.columns:
            counts = torch.isfinite(self.samples.truth[:, lead, field]).sum(0)
            without = int(((counts > 0) & (counts < COEFFICIENTS)).sum())
            if without:
                few.append(f"{names[field]} at +{spec.leads_out[lead]} h ({without} of {int((counts > 0).sum())})")
        if few:
            log.warning("emos: points with the truth of too few dates take global coefficients: %s", ", ".join(few))

    def _enough(self, lead: int, field: int) -> bool:
        """Return whether any point has a truth on at least as many dates as there are coefficients."""
        return bool((torch.isfinite(self.samples.truth[:, lead, field]).sum(0) >= COEFFICIENTS).any())

    def _at_all_points(self, form: str, lead: int, field: int, start: Emos | None) -> Emos:
        """Fit one lead and field at all points; if these are many, in n parts of every n-th point."""
        if start is not None and int(torch.isfinite(self.samples.truth[:, lead, field]).sum()) < COEFFICIENTS:
            return start  # too few dates with so many members have a truth
        whole = self._global(lead, field)
        if form == "global" or not self._enough(lead, field):
            return whole
        start = start if start is not None and start.a.ndim else None
        dates, _, _, count = self.samples.mean.shape
        parts = -(-count * dates // _AT_ONCE)
        slices = [slice(k, None, parts) for k in range(parts)]
        found = [self._local(form, whole, lead, field, s, None if start is None else start.at(s)) for s in slices]
        return merged(found, slices)

    def _forms(self, lead: int, field: int, points: slice) -> dict[str, Emos]:
        """Fit all forms at some points, and return them by name."""
        whole = self._global(lead, field)
        names = ["local", *(f"shrunk {strength:g}" for strength in STRENGTHS)]
        if not self._enough(lead, field):
            return dict.fromkeys(["global", *names], whole)
        return {"global": whole} | {name: self._local(name, whole, lead, field, points, None) for name in names}

    def _global(self, lead: int, field: int) -> Emos:
        """Fit one set of coefficients for the globe."""
        dates, _, _, count = self.samples.mean.shape
        # Points are drawn at random, so that no meridian or row counts more than others.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        points = order[: max(4, _MOST_SAMPLES // dates)].sort().values
        weights = (self.area[points, None] * torch.ones(dates)).flatten()
        chosen = [v.flatten() for v in self.samples.field(lead, field, points)]
        reference = self._reference(lead, field, points).expand(-1, dates).flatten()
        return fit_emos(
            *chosen, reference=reference, weights=weights, family=self.families[field], iterations=_ITERATIONS,
            tolerance=_TOLERANCE,
        )  # fmt: skip

    def _reference(self, lead: int, field: int, points: slice | Tensor) -> Tensor:
        """Return the mean over the training dates at some points, (P, 1)."""
        return self.samples.reference[lead, field, points][:, None]

    def _local(self, name: str, whole: Emos, lead: int, field: int, points: slice, start: Emos | None) -> Emos:
        """Fit coefficients for each of some points. Points with the truth of too few dates take the global ones."""
        strength = float(name.removeprefix("shrunk ")) if name != "local" else 0.0
        mean, variance, truth = self.samples.field(lead, field, points)
        few = torch.isfinite(truth).sum(-1) < COEFFICIENTS
        found = fit_emos(
            mean, variance, torch.where(few[:, None], torch.nan, truth), season=self.samples.season,
            reference=self._reference(lead, field, points), prior=whole, family=self.families[field], strength=strength,
            start=start, iterations=_REFINED if start else _ITERATIONS, tolerance=_TOLERANCE,
        )  # fmt: skip
        a, b, c, d = (torch.where(few, getattr(whole, name), getattr(found, name)) for name in "abcd")
        return replace(found, a=a, b=b, c=c, d=d, season=found.season.masked_fill(few[:, None], 0.0))

    def _raw(self, known: tuple[Tensor, Tensor, Tensor], members: int) -> float:
        """Return the mean CRPS of the raw ensemble, N(m, (1 + 1/M) s^2); for one member its mean absolute error."""
        mean, variance, truth = (v.double() for v in known)
        scale = torch.sqrt((1 + 1 / members) * variance).clamp(min=1e-12)
        if members == 1:
            return self._mean((truth - mean).abs(), truth)
        return self._mean(distributions.crps(Family.NORMAL, mean, scale, truth), truth)

    def _mean(self, scores: Tensor, truth: Tensor) -> float:
        """Return the area-weighted mean over `some_points` and dates; zero if no date has a truth."""
        weight = torch.where(torch.isfinite(truth), self.area[self.some_points][:, None], 0.0)
        return float((torch.where(weight > 0, scores, 0.0) * weight).sum() / weight.sum().clamp(min=_TINY))

    @property
    def some_points(self) -> slice:
        """Return the points at which forms are compared: every n-th point, spread over the meridians of the grid."""
        step = -(-len(self.area) // _MOST_POINTS)
        # A step that shares a factor with the number of points could visit only some of the meridians.
        while math.gcd(step, len(self.area)) > 1:
            step += 1
        return slice(None, None, step)


def _dates_that_fit(reader: Reader, there: int) -> int:
    """Return the largest number of dates to fit to: `most_dates`, or fewer if a quarter of the memory holds fewer."""
    spec = reader.spec
    values = len(spec.leads_out) * spec.fields * math.prod(spec.grid.shape)
    each = 3 * 3 * 4 * values  # bytes of mean, variance and truth: as read, made complete, and of the size before
    most = most_dates(spec)
    found = int(min(most, max(1, memory_limit() // 4 // each)))
    if found < min(there, most):
        log.warning("emos: memory holds %d of %d training dates, so it is fitted to these only", found, there)
    return found
