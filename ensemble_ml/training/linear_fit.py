"""Fits the linear correction of `models.linear` to the training dates: ridge regression in closed form.

The weights W of the latitude basis functions are fitted in up to three steps: one W for all functions; then what the
functions at the same distance from the equator add to it together; then what each function adds. Each step is fitted to
the residuals of the step before, and weights each point by the value of the functions there. So a function gets weights
of its own only as far as the data support them. Basis functions add up to one, so their sums over points add up to
those over the globe.

Targets, in typical spreads:

    mean      y - m - bias, with the bias of the other dates
    spread    S - s1

    y     truth
    m     mean of M members; up to three ensemble sizes M are fitted at once
    S     spread of all N members
    s1    the spread that is expected of all members (`models.features`)

A point is also weighted by its area over the square of its relative spread on that date, one number for all fields
(`linear_sums.relative_spread`), because errors grow with the spread. This is generalised least squares (Aitken 1935,
doi:10.1017/S0370164600014346), and comes close to a fit by the CRPS.

Predictors are scaled to a sum of squares of one. In each step, and for each group of functions, each output takes the
penalty from a list, or no correction at all, that gives the smallest weighted squared error on the validation dates.
Without validation dates, or if these lack a target, a fifth of the training dates is held out for this. Where a target
is partly missing, the missing part is assumed to be like the rest.

Axes: T lead, F field (variables and levels, then surface variables), C channel, O output, P point, K predictor (a
channel at one of nine offsets), N basis function, Y latitude, X longitude.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ensemble_ml.errors import UserError
from ensemble_ml.machine import memory_limit
from ensemble_ml.models.inputs import ModelSpec
from ensemble_ml.models.linear import KINDS, TERMS, correction_shape, nested_bands
from ensemble_ml.models.model import Start
from ensemble_ml.store.source import Part
from ensemble_ml.training.climate_data import Dates, dates_called, kept_apart, spaced
from ensemble_ml.training.linear_sums import SIZES, Rows, Sums, Targets, sums_of
from ensemble_ml.training.progress import Team
from ensemble_ml.training.smoothing import Scales

log = logging.getLogger(__name__)

PENALTIES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0)
BAND_PENALTIES = (1e-3, 1e-2, 0.1, 1.0, 10.0)  # for what some of the basis functions add to the weights of all
VALIDATION_DATES = 40  # most dates to choose penalties by
# With fewer dates there is no fit. The linear fit also counts the dates that penalties are chosen by.
FEWEST_DATES = 10
_TINY = 1e-12


def refuse_unfittable(spec: ModelSpec, on_host: int = 1) -> None:
    """Raise a UserError if the sums of the linear correction's fit would take more than half of the memory.

    Each of the ranks `on_host` holds the sums.
    """
    bands, _, _, channels, _, _ = correction_shape(spec)
    products = (TERMS * 9 * channels) ** 2 * 8
    needed, limit = int(products * (SIZES / TERMS**2 * bands + 6)), memory_limit() // (2 * on_host)
    if needed > limit:
        raise UserError(
            f"model.linear=true: its fit to {len(spec.leads_out)} leads of {channels // (KINDS * len(spec.leads_out))}"
            f" fields takes {needed / 1e9:.3g} GB{' a rank' if on_host > 1 else ''}, more than {limit / 1e9:.3g} GB;"
            " predict fewer at once (data.leads_out, data.variables, data.levels), or set model.linear=false"
        )


def mean_state(dates: Dates, chosen: np.ndarray) -> Tensor:
    """Return the climatological mean: the mean over dates of the mean of all members, (T, F, Y, X).

    A point that has a value on no date gets the area mean of its field, because single members may have a value there.
    A field without any value is zero.
    """
    total = torch.zeros(*dates.shape, *dates.spec.grid.shape, dtype=torch.float64)
    count = torch.zeros_like(total)
    for date in dates.each("mean state", chosen):
        values = dates.target(Part.MEAN, date)
        there = torch.isfinite(values)
        total += torch.where(there, values, 0.0)
        count += there
    dates.team.add_up(total, count)
    mean = torch.where(count > 0, total / count.clamp(min=1), torch.nan)
    return Scales(dates.spec.grid).filled(mean).nan_to_num().float()


def fit_linear(
    start: Start, dates: Dates, train: np.ndarray, validation: np.ndarray, sizes: Sequence[int], targets: Targets
) -> None:
    """Fit the weights of the linear correction. With too few dates they stay as they are, which is logged.

    `targets` returns from a date, its sample and M the errors of mean and spread to predict, (T, F, Y, X) each in
    physical units, NaN where absent. Training samples have `sizes` members.
    """
    # Validation dates without a target cannot choose a penalty. Then training dates are held out instead.
    asked = telling(dates, targets, validation)
    train, validation = kept_apart(train, asked)
    if len(train) + len(validation) < FEWEST_DATES:
        log.info("linear correction: %d dates are too few, so there is none", len(train) + len(validation))
        return
    rows = Rows(start, dates, targets, train)
    # Three ensemble sizes suffice to fit two terms in 1/M, and each size costs another pass over the dates.
    every = sorted({s for s in sizes if s < dates.reader.full_size} | {dates.members})
    shown = [every[i] for i in sorted({0, len(every) // 2, len(every) - 1})]
    # With 1/M centred, the first term is the correction at a middle size, and the second is its change with M.
    centre = float(np.mean([1 / size for size in shown]))
    sums = sums_of(rows, train, shown, centre)
    _, count, predictors, outputs = sums.right.shape
    found = torch.zeros(count, TERMS * predictors, outputs)
    to_choose_by = spaced(validation, VALIDATION_DATES)
    levels = nested_bands(dates.spec.grid.latitude)
    each = dates.progress.over("linear correction: penalties", levels)
    errors = [_refine(found, rows, sums, groups, to_choose_by, centre) for groups in each]
    before, left = errors[0][:, 0].sum(0), errors[-1].amin(1).sum(0)
    for band, (first, second) in enumerate(found.unflatten(1, (TERMS, -1))):
        # Undo the centring: first + (1/M - centre) second = (first - centre second) + second / M.
        weight = torch.stack([first - centre * second, second]).unflatten(1, (-1, 3, 3)).permute(0, 4, 1, 2, 3)
        rows.linear.weight[band].copy_(weight)
    gain = 1 - (left / before.clamp(min=_TINY)).sqrt()
    known = before > 0
    parts = zip(gain.chunk(KINDS), known.chunk(KINDS), strict=True)
    mean, spread = (100 * float(part[there].mean().nan_to_num()) for part, there in parts)
    text = "linear correction: weighted RMSE on %s %.1f %% (mean), %.1f %% (spread) lower"
    log.info(text, dates_called(asked), mean, spread)


def telling(dates: Dates, targets: Targets, validation: np.ndarray, kinds: Sequence[int] = range(KINDS)) -> np.ndarray:
    """Return the validation dates if penalties or fractions can be chosen by them, and otherwise no dates.

    They can if each target exists somewhere on them. The spread is not needed if the validation uses all members,
    because no date has a target for it then. `kinds` are the targets that are needed: 0 for the mean, 1 for the spread.
    """
    missing = {kind for kind in kinds if kind == 0 or dates.members < dates.reader.full_size}
    for date in validation:
        found = targets(int(date), dates.sample(int(date)), dates.members)
        missing -= {kind for kind in missing if bool(torch.isfinite(found[kind]).any())}
        if not missing:
            return validation
    return validation[:0]


def penalties_of(groups: list[list[int]]) -> Sequence[float]:
    """Return the penalties to try for these groups of one level of `linear.nested_bands`."""
    return PENALTIES if len(groups) == 1 else BAND_PENALTIES


def _refine(
    found: Tensor, rows: Rows, sums: Sums, groups: list[list[int]], validation: np.ndarray, centre: float
) -> Tensor:
    """Fit each group of basis functions to what `found` (N, TERMS * K, O) leaves, and add the result to it.

    All functions of a group have the same weights before and after.

    Returns:
        Weighted squared errors (group, 1 + penalty, O) on the validation dates.
    """
    penalties = penalties_of(groups)
    candidates = []
    for group in groups:
        added = found.new_zeros(1 + len(penalties), *found.shape[1:])  # outputs without targets stay zero
        for gram, right, known in sums.of(group):
            # The sums of the residuals follow from those of the targets, so no date is read again.
            left = right[:, known] - gram @ found[group[0]][:, known].double()
            added[..., known] = _solutions(gram, left, penalties, rows.dates.team)
        candidates.append(added)
    count, outputs = 1 + len(penalties), found.shape[-1]
    errors = torch.zeros(len(groups), count, outputs, dtype=torch.float64)
    for date in rows.dates.team.mine(validation.tolist()):
        errors += _errors(rows, date, candidates, groups, found, centre)
    rows.dates.team.add_up(errors)
    for group, added, error in zip(groups, candidates, errors, strict=True):
        best = _chosen(error, penalties)
        found[group] += added.gather(0, best.expand(1, added.shape[1], -1))[0]
    return errors


def _solutions(gram: Tensor, right: Tensor, penalties: Sequence[float], team: Team) -> Tensor:
    """Return coefficients for no correction at all, then for each penalty, (1 + penalty, TERMS * K, O) float32.

    Each rank solves for some of the penalties.
    """
    # Predictors are scaled to a sum of squares of one, so that a penalty is a fraction of each predictor's own sum.
    size = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(size > _TINY * size.max(), 1 / size.clamp(min=1e-300), 0.0)
    scaled, wanted = gram * scale[:, None] * scale, right * scale[:, None]
    one = torch.eye(len(gram), dtype=gram.dtype)
    found = wanted.new_zeros(1 + len(penalties), *wanted.shape)
    for place in team.stretch(len(penalties)):
        factor = torch.linalg.cholesky(scaled + penalties[place] * one)
        found[1 + place] = torch.cholesky_solve(wanted, factor) * scale[:, None]
    team.add_up(found)
    return found.float()


def _chosen(errors: Tensor, penalties: Sequence[float]) -> Tensor:
    """Return the index of the best candidate of each output, (O,), by its errors (1 + penalty, O).

    An output without a target on the validation dates gets the candidate that most outputs of its kind (mean or spread)
    take. If no output of its kind has a target, it gets the middle penalty.
    """
    found = []
    for part in errors.chunk(KINDS, 1):
        # An error of exactly zero without a correction means that the dates have no such target.
        best, known = part.argmin(0), part[0] > 0
        usual = best[known].mode().values if known.any() else torch.tensor(1 + len(penalties) // 2)
        found.append(torch.where(known, best, usual))
    return torch.cat(found)


def _errors(
    rows: Rows, date: int, candidates: Sequence[Tensor], groups: list[list[int]], found: Tensor, centre: float
) -> Tensor:
    """Return weighted squared errors (group, candidate, O) on a date, with each candidate added to `found`."""
    members = rows.dates.members
    near, wanted, there, _ = rows(date, members)

    def weight(of: Tensor) -> Tensor:
        """Return the weights for M members, (..., O, K), from those of both terms."""
        first, second = of.unflatten(-2, (TERMS, -1)).unbind(-3)
        return (first + (1 / members - centre) * second).mT

    errors = []
    for (points, root), group, some in zip(rows.shares(date, groups), groups, candidates, strict=True):
        here = near[:, points]
        left = wanted[:, points] - weight(found[group[0]]) @ here
        error = ((left - weight(some) @ here) * root) ** 2
        errors.append(torch.where(there[:, points], error, 0.0).sum(-1, dtype=torch.float64))
    return torch.stack(errors)
