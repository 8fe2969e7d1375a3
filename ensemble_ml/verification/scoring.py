"""Fit the baselines and score every entrant, one variable and lead at a time, one start date after the other.

Memory is bounded by one date of one variable and lead, plus the sums of the fit at each cell of it. Entrants are named
by what they are and how many members they use: raw_5, local_5, spread_regression_5, climatology; forecasts by folder.

Axes: M member, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.store.source import Part, Selection, Source
from ensemble_ml.verification import baselines as base
from ensemble_ml.verification.aggregation import AggregationState, Strata
from ensemble_ml.verification.calibration import Calibration, exceeding, members_exceeding, threshold
from ensemble_ml.verification.extremes import efi
from ensemble_ml.verification.families import log_score
from ensemble_ml.verification.forecasts import ForecastSet, Predicted
from ensemble_ml.verification.model_climate import LEVELS, ModelClimate
from ensemble_ml.verification.pictures import Pictures
from ensemble_ml.verification.statistics import (
    Key,
    Statistic,
    c4,
    crps,
    ensemble_moments,
    raw_statistics,
    spread_statistics,
)

Values = dict[Key, np.ndarray]
CLIMATOLOGY = "climatology"
EXTREME, EFI_WEIGHTED = "|EFI| > 0.7", "weighted by |EFI|"  # weightings of the strata
_EXTREME_ABOVE = 0.7


@dataclass(frozen=True)
class Group:
    """What is read at once: one variable at one lead, all its levels ((None,) at the surface)."""

    variable: str
    lead_hours: int
    levels: tuple[int | None, ...]
    columns: slice

    @property
    def selection(self) -> Selection:
        """For `Source.read`."""
        if self.levels == (None,):
            return Selection(lead_hours=(self.lead_hours,), variables=(), surface=(self.variable,))
        levels = tuple(level for level in self.levels if level is not None)
        return Selection(lead_hours=(self.lead_hours,), variables=(self.variable,), levels=levels, surface=())


@dataclass(frozen=True, eq=False)
class Setting:
    """What all groups share.

    `weights` (W, Y, X): exact areas, ones, then areas of regions; `fit` indices of start dates, and the half of each (0
    or 1), which empirical Bayes holds against the other; `climate_days` of the model climate.
    """

    source: Source
    forecasts: tuple[ForecastSet, ...]
    reduced: int
    fit: np.ndarray
    halves: np.ndarray
    weights: np.ndarray
    truth: bool
    climate_days: int = 0

    @property
    def full(self) -> int:
        """Members of the full ensemble."""
        return len(self.source.layout.realization)

    @property
    def held_out(self) -> int:
        """Members that the reduced ensemble lacks."""
        return self.full - self.reduced


@dataclass(frozen=True, eq=False)
class Sample:
    """One start date of a group: `members` (M, Z, Y, X), `truth` (Z, Y, X), and where each is whole."""

    members: np.ndarray
    truth: np.ndarray | None
    whole: np.ndarray
    verified: np.ndarray


@dataclass(eq=False)
class Fit:
    """Baselines fitted for a group. `corrections` by number of members, then by name."""

    corrections: dict[int, dict[str, base.Correction]] = field(default_factory=dict)
    spread: base.SpreadFit | None = None
    held_out: base.SpreadFit | None = None
    climatology: tuple[np.ndarray, np.ndarray] | None = None


def read_sample(setting: Setting, group: Group, date: int) -> Sample:
    """Read the members and the truth of one start date."""
    members = _read(setting.source, Part.FORECAST, date, group)
    whole = np.isfinite(members).all(0)
    if not setting.truth:
        return Sample(members, None, whole, np.zeros_like(whole))
    truth = _read(setting.source, Part.TRUTH, date, group)[0]
    return Sample(members, truth, whole, whole & np.isfinite(truth))


def _read(source: Source, part: Part, date: int, group: Group) -> np.ndarray:
    fields = source.read(part, date, group.selection)
    values = fields.surface[:, 0, 0, None] if group.levels == (None,) else fields.pressure[:, 0, 0]
    return np.asarray(values, np.float64)


def held_out_spread(members: np.ndarray, reduced: int) -> np.ndarray | None:
    """Spread of the members not given, brought to the full size: s_H c4(N) / c4(H); None of fewer than two."""
    if len(members) - reduced < 2:
        return None
    spread = np.sqrt(ensemble_moments(members[reduced:])[1])
    return spread * (c4(len(members)) / c4(len(members) - reduced))


def fit_group(setting: Setting, group: Group) -> Fit:
    """Fit all baselines of one group on the fit dates."""
    shape = (len(group.levels), *setting.weights.shape[1:])
    sizes = sorted({setting.reduced, setting.full})
    by_size = {size: base.CellSums.zeros(shape) for size in sizes}
    spread, truth = base.CellSums.zeros(shape), base.CellSums.zeros(shape)
    for date, half in zip(setting.fit.tolist(), setting.halves.tolist(), strict=True):
        sample = read_sample(setting, group, date)
        moments = {size: ensemble_moments(sample.members[:size]) for size in sizes}
        if setting.full > 1:
            deviations = {size: np.sqrt(variance) for size, (_, variance) in moments.items()}
            held = held_out_spread(sample.members, setting.reduced)
            terms = base.spread_terms(deviations[setting.reduced], deviations[setting.full], held)
            spread.record(half, terms, sample.whole)
        if sample.truth is None:
            continue
        truth.record(half, {"y": sample.truth, "yy": sample.truth**2}, sample.verified)
        for size, (mean, variance) in moments.items():
            by_size[size].record(half, base.error_terms(mean, variance, sample.truth), sample.verified)
    return _solve(setting, by_size, spread, truth)


def _solve(setting: Setting, by_size: dict[int, base.CellSums], spread: base.CellSums, truth: base.CellSums) -> Fit:
    area, found = setting.weights[0], Fit()
    if spread.sums:
        found.spread = base.fit_spread(spread, area)
        if setting.held_out > 1:
            found.held_out = base.fit_spread(spread, area, "h")
    if truth.sums and truth.count.sum(0).max() >= base.FEWEST_DATES:
        found.climatology = base.fit_climatology(truth)
        for size, sums in by_size.items():
            alone = found.spread.climate**2 if size == 1 and found.spread is not None else None
            if size > 1 or alone is not None:
                found.corrections[size] = base.fit_corrections(sums, area, alone)
    return found


@dataclass(frozen=True, eq=False)
class Tables:
    """What scoring adds to."""

    state: AggregationState
    calibration: Calibration
    pictures: Pictures


def score_group(setting: Setting, group: Group, fit: Fit, dates: np.ndarray, tables: Tables) -> None:
    """Score one group on all test dates (indices into the source's start dates), adding to `tables`."""
    state, pictures, climate = tables.state, tables.pictures, model_climate(setting, group)
    for position, date in enumerate(dates):
        sample = read_sample(setting, group, int(date))
        index = None if climate is None else extreme_forecast_index(climate, int(date), sample.members)
        strata = {} if index is None else _strata(index, setting.weights[0])
        said = predictions(setting, group, int(date))
        spread = _spread_values(setting, fit, sample, said)
        mask = sample.whole & _finite(one.spread for one in said.values())
        state.record(position, group.columns, spread, mask, setting.weights, strata)
        verified, values = np.zeros_like(mask), {}
        if sample.truth is not None:
            verified = sample.verified & _finite(x for one in said.values() for x in (one.location, one.scale))
            family = registered(group.variable).family
            values = _truth_values(setting, fit, sample, said, family)
            state.record(position, group.columns, values, verified, setting.weights, strata)
            _calibrate(setting, group, fit, position, sample, said, verified, tables.calibration)
        pictures.record(group.columns, position, values, verified, sample, said, mask)
        if index is not None:
            pictures.record_index(group.columns, position, index)


def model_climate(setting: Setting, group: Group) -> ModelClimate | None:
    """The model climate of a group; None where it is turned off or there is one year only."""
    times = setting.source.layout.init_time
    if not setting.climate_days or len(np.unique(times.astype("datetime64[Y]"))) < 2:
        return None
    return ModelClimate(times, setting.climate_days, lambda date: _read(setting.source, Part.FORECAST, date, group))


def extreme_forecast_index(climate: ModelClimate, date: int, members: np.ndarray) -> np.ndarray | None:
    """EFI of the full ensemble (Z, Y, X), NaN where a value is missing; None where the climate has too few dates."""
    quantiles = climate.quantiles(date)
    return None if quantiles is None else efi(members, quantiles, LEVELS)


def _strata(index: np.ndarray, area: np.ndarray) -> Strata:
    known = np.isfinite(index)
    size = np.abs(np.where(known, index, 0.0))
    unusual = area * (size > _EXTREME_ABOVE)
    return {EXTREME: (unusual, unusual), EFI_WEIGHTED: (area * size, area * known)}


def _calibrate(
    setting: Setting,
    group: Group,
    fit: Fit,
    position: int,
    sample: Sample,
    said: dict[str, Predicted],
    mask: np.ndarray,
    calibration: Calibration,
) -> None:
    """Histograms of PIT and ranks, and reliability of the probability of an unusual value."""
    truth, family = np.asarray(sample.truth), registered(group.variable).family
    limit = None if fit.climatology is None else threshold(*fit.climatology)
    # A limit that cannot be exceeded or always is (no climate at the cell) tells nothing.
    known = mask if limit is None else mask & (fit.climatology[1] > 0)  # type: ignore[index]
    laws = {
        label: (one.family, one.location, one.scale)
        for label, one in said.items()
        if one.location is not None and one.scale is not None
    }
    for size in sorted({setting.reduced, setting.full}):
        members = sample.members[:size]
        calibration.record_ranks(f"raw_{size}", position, group.columns, members, truth, mask)
        if limit is not None:
            chance = members_exceeding(members, limit)
            calibration.record_event(f"raw_{size}", group.columns, chance, truth > limit, known)
        for name, correction in fit.corrections.get(size, {}).items():
            laws[f"{name}_{size}"] = (family, *correction(*ensemble_moments(members)))
    for entrant, law in laws.items():
        calibration.record_pit(entrant, position, group.columns, law, truth, mask)
        if limit is not None:
            calibration.record_event(entrant, group.columns, exceeding(*law, limit), truth > limit, known)


def predictions(setting: Setting, group: Group, date: int) -> dict[str, Predicted]:
    """What each forecast says of a group on one start date."""
    start = setting.source.layout.init_time[date]
    return {
        one.label: one.predicted(start, group.variable, group.lead_hours, group.levels) for one in setting.forecasts
    }


def _finite(arrays) -> np.ndarray | bool:
    """Where all of the arrays that are there are finite; True where there is none."""
    mask: np.ndarray | bool = True
    for array in arrays:
        if array is not None:
            mask = mask & np.isfinite(array)
    return mask


def _spread_values(setting: Setting, fit: Fit, sample: Sample, said: dict[str, Predicted]) -> Values:
    m, n = setting.reduced, setting.full
    if n < 2:
        return {}
    actual = np.sqrt(ensemble_moments(sample.members)[1])
    given = np.sqrt(ensemble_moments(sample.members[:m])[1])
    held = held_out_spread(sample.members, m)
    entrants = {label: one.spread for label, one in said.items() if one.spread is not None}
    if m > 1:
        entrants[f"raw_{m}"] = given
        entrants[f"size_corrected_{m}"] = base.size_corrected(given, m, n)
    if fit.spread is not None:
        entrants[f"spread_regression_{m}"] = fit.spread(given)
        entrants[CLIMATOLOGY] = fit.spread.climate
    found = {
        Key(name, statistic): value
        for name, predicted in entrants.items()
        for statistic, value in spread_statistics(predicted, actual, held).items()
    }
    for name, predicted in entrants.items():
        draws = m if name == f"raw_{m}" else n
        error = predicted * np.sqrt((draws - 1) / draws) - actual * np.sqrt((n - 1) / n)
        found[Key(name, Statistic.SPREAD_SQUARED_ERROR_0)] = error**2
    if fit.held_out is not None and held is not None:
        key = Key(f"held_out_regression_{m}", Statistic.HELD_OUT_SQUARED_ERROR)
        found[key] = (fit.held_out(given) - held) ** 2
    return found


def _truth_values(setting: Setting, fit: Fit, sample: Sample, said: dict[str, Predicted], family: Family) -> Values:
    truth, found = np.asarray(sample.truth), Values()
    limit = None if fit.climatology is None else threshold(*fit.climatology)
    for size in sorted({setting.reduced, setting.full}):
        members = sample.members[:size]
        _put(found, f"raw_{size}", raw_statistics(members, truth))
        if limit is not None:
            brier = (members_exceeding(members, limit) - (truth > limit)) ** 2
            _put(found, f"raw_{size}", {Statistic.BRIER: brier})
        moments = ensemble_moments(members)
        for name, correction in fit.corrections.get(size, {}).items():
            _put(found, f"{name}_{size}", _baseline(*correction(*moments), truth, family, limit))
    if fit.climatology is not None:
        _put(found, CLIMATOLOGY, _baseline(*fit.climatology, truth, family, limit))
    for label, one in said.items():
        if one.location is not None and one.scale is not None:
            error = np.asarray(one.mean) - truth
            scores = {Statistic.CRPS: crps(one.family, one.location, one.scale, truth), Statistic.ERROR: error}
            scores |= {Statistic.SQUARED_ERROR: error**2, Statistic.VARIANCE: np.asarray(one.stddev) ** 2}
            scores |= _probabilities(one.family, one.location, one.scale, truth, limit)
            _put(found, label, scores)
    return found


def _put(found: Values, entrant: str, scores: dict[Statistic, np.ndarray]) -> None:
    found.update({Key(entrant, statistic): value for statistic, value in scores.items()})


def _baseline(
    location: np.ndarray, scale: np.ndarray, truth: np.ndarray, family: Family, limit: np.ndarray | None
) -> dict[Statistic, np.ndarray]:
    """Scores of a corrected ensemble, as both laws where it cannot be negative: the better is taken in the end."""
    error = location - truth
    found = {Statistic.ERROR: error, Statistic.SQUARED_ERROR: error**2, Statistic.VARIANCE: scale**2}
    found |= _probabilities(family, location, scale, truth, limit)
    normal = crps(Family.NORMAL, location, scale, truth)
    if family is Family.NORMAL:
        return found | {Statistic.CRPS: normal}
    return found | {Statistic.CRPS_NORMAL: normal, Statistic.CRPS_FAMILY: crps(family, location, scale, truth)}


def _probabilities(
    family: Family, location: np.ndarray, scale: np.ndarray, truth: np.ndarray, limit: np.ndarray | None
) -> dict[Statistic, np.ndarray]:
    """Log score, and Brier score of exceeding `limit`."""
    y = truth if family is Family.NORMAL else np.maximum(truth, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {Statistic.LOG_SCORE: log_score(family, location, scale, y)}
    if limit is not None:
        # Where the scale is zero the forecast is a point.
        chance = np.where(scale > 0, exceeding(family, location, scale, limit), location > limit)
        found[Statistic.BRIER] = (chance - (truth > limit)) ** 2
    return found


def settle_families(state: AggregationState, columns: tuple, entrants: list[str]) -> dict[str, dict[str, str]]:
    """Take for each baseline and column the law that scores better on the test dates; return which, by field."""
    chosen = {}
    for entrant in entrants:
        if Key(entrant, Statistic.CRPS_FAMILY) not in state.total:
            continue
        taken = state.choose(entrant, Statistic.CRPS, (Statistic.CRPS_NORMAL, Statistic.CRPS_FAMILY))
        chosen[entrant] = {
            f"{columns[c].name} {columns[c].lead_hours} h": _law(columns[c].variable, statistic)
            for c, statistic in taken.items()
        }
    return chosen


def _law(variable: str, statistic: Statistic) -> str:
    return registered(variable).family.value if statistic is Statistic.CRPS_FAMILY else Family.NORMAL.value


def check_members(source: Source, members_in: int) -> None:
    """Raise a UserError where the ensemble has fewer members than the reduced one should."""
    full = len(source.layout.realization)
    if members_in > full:
        raise UserError(f"members_in={members_in}: {source.path} has {full} members; give {full} or fewer")
