"""Fit the baselines of one variable and lead on the fit dates, one initialisation time after the other.

Memory is bounded by the fields of one date, plus the sums of the fit at each cell.

Axes: Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ensemble_ml.verification import baselines as base
from ensemble_ml.verification.samples import Group, Setting, held_out_spread, read_sample, start_spread
from ensemble_ml.verification.statistics import ensemble_moments


@dataclass(eq=False)
class Fit:
    """The baselines of a group, fitted on the fit dates.

    Attributes:
        corrections: Corrections by number of members, then by name in `baselines.CORRECTIONS`. NaN at levels without a
            cell of at least `baselines.FEWEST_DATES` fit dates.
        spread: Regression of the full ensemble's spread on that of the reduced one.
        start: Regression of the full ensemble's spread on the reduced one's spread at lead 0.
        held_out: Regression of the held-out members' spread on that of the reduced ensemble.
        climatology: Mean and predictive standard deviation of the truth, each (Z, Y, X). NaN at cells with fewer than
            two fit dates, and at the same levels as the corrections.
    """

    corrections: dict[int, dict[str, base.Correction]] = field(default_factory=dict)
    spread: base.SpreadFit | None = None
    start: base.SpreadFit | None = None
    held_out: base.SpreadFit | None = None
    climatology: tuple[np.ndarray, np.ndarray] | None = None

    @cached_property
    def climate(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the climatology with its unknown cells filled, so that it can serve as a forecast.

        Levels without a known cell stay NaN. None if there is no climatology.
        """
        return None if self.climatology is None else base.everywhere(*self.climatology)


def fit_group(setting: Setting, group: Group) -> Fit:
    """Fit all baselines of one group on the fit dates. Those for which the dates do not suffice are None or missing."""
    shape = (len(group.levels), *setting.weights.shape[1:])
    sizes = sorted({setting.reduced, setting.full})
    by_size = {size: base.CellSums.zeros(shape) for size in sizes}
    spread, start, truth = (base.CellSums.zeros(shape) for _ in range(3))
    for date, half in zip(setting.fit.tolist(), setting.halves.tolist(), strict=True):
        sample = read_sample(setting, group, date)
        moments = {size: ensemble_moments(sample.members[:size]) for size in sizes}
        if setting.full > 1:
            deviations = {size: np.sqrt(variance) for size, (_, variance) in moments.items()}
            held = held_out_spread(sample.members, setting.reduced)
            terms = base.spread_terms(deviations[setting.reduced], deviations[setting.full], held)
            spread.record(half, terms, sample.whole)
            begun = start_spread(setting, group, date)
            if begun is not None:
                terms = base.spread_terms(begun, deviations[setting.full], None)
                start.record(half, terms, sample.whole & np.isfinite(begun))
        if sample.truth is None:
            continue
        truth.record(half, {"y": sample.truth, "yy": sample.truth**2}, sample.verified)
        # Spread regressions use the members as they were read. Corrections use members at the height of the truth's
        # ground.
        if sample.raw is not sample.members:
            moments = {size: ensemble_moments(sample.raw[:size]) for size in sizes}
        for size, (mean, variance) in moments.items():
            by_size[size].record(half, base.error_terms(mean, variance, sample.truth), sample.verified)
    return _solve(setting, by_size, spread, start, truth)


def _solve(
    setting: Setting,
    by_size: dict[int, base.CellSums],
    spread: base.CellSums,
    start: base.CellSums,
    truth: base.CellSums,
) -> Fit:
    """Solve for all baselines that the sums allow."""
    area, found = setting.weights[0], Fit()
    enough = len(setting.fit) >= base.FEWEST_SPREADS
    if enough and start.count.any():
        found.start = base.fit_spread(start, area)
    if enough and spread.sums:
        found.spread = base.fit_spread(spread, area)
        if setting.held_out > 1:
            found.held_out = base.fit_spread(spread, area, "h")
    if truth.sums and truth.count.sum(0).max() >= base.FEWEST_DATES:
        found.climatology = base.fit_climatology(truth)
        for size, sums in by_size.items():
            alone = None
            # One member has no spread. The mean variance of the full ensemble replaces it, because it shows which cells
            # vary more. If the full ensemble has only one member, the climatological variance of the truth is used.
            if size == 1 and spread.sums:
                alone = spread.total("ff") / np.maximum(spread.count.sum(0), 1)
            elif size == 1:
                alone = base.everywhere(*found.climatology)[1] ** 2
            found.corrections[size] = base.fit_corrections(sums, area, alone)
        _forget(found, truth.count.sum(0).max((-2, -1)) < base.FEWEST_DATES)
    return found


def _forget(found: Fit, few: np.ndarray) -> None:
    """Set climatology and corrections to NaN at levels where `few` (Z,): those with too few dates of the truth."""
    if not few.any():
        return
    assert found.climatology is not None
    for values in found.climatology:
        values[few] = np.nan
    for corrections in found.corrections.values():
        for name, one in corrections.items():
            bias, constant = (np.where(few[:, None, None], np.nan, part) for part in (one.bias, one.constant))
            corrections[name] = replace(one, bias=bias, constant=constant)
