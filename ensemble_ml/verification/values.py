"""Statistics of every entrant at each point of one start date, of one variable and lead.

Entrants are named by what they are and how many members they use: raw_5, local_5, spread_regression_5, climatology;
forecasts by folder. Axes: Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import numpy as np

from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.verification import baselines as base
from ensemble_ml.verification.aggregation import AggregationState
from ensemble_ml.verification.calibration import exceeding, members_exceeding, threshold
from ensemble_ml.verification.families import location_of_mean, log_score, moments
from ensemble_ml.verification.fits import Fit
from ensemble_ml.verification.forecasts import Predicted
from ensemble_ml.verification.samples import Sample, Setting, held_out_error, held_out_spread
from ensemble_ml.verification.statistics import (
    Key,
    Statistic,
    crps,
    ensemble_moments,
    raw_statistics,
    spread_statistics,
)

Values = dict[Key, np.ndarray]
CLIMATOLOGY = "climatology"
_POINT = 0.01  # of the field's deviation: the scale of a point forecast in the log score
_BY_LAW = {  # the first is chosen by
    Statistic.CRPS: (Statistic.CRPS_NORMAL, Statistic.CRPS_FAMILY),
    Statistic.LOG_SCORE: (Statistic.LOG_SCORE_NORMAL, Statistic.LOG_SCORE_FAMILY),
    Statistic.BRIER: (Statistic.BRIER_NORMAL, Statistic.BRIER_FAMILY),
    Statistic.SQUARED_ERROR: (Statistic.SQUARED_ERROR_NORMAL, Statistic.SQUARED_ERROR_FAMILY),
    Statistic.ERROR: (Statistic.ERROR_NORMAL, Statistic.ERROR_FAMILY),
    Statistic.VARIANCE: (Statistic.VARIANCE_NORMAL, Statistic.VARIANCE_FAMILY),
}


def spread_values(
    setting: Setting, fit: Fit, sample: Sample, said: dict[str, Predicted], start: np.ndarray | None = None
) -> Values:
    """Of the spread: each entrant against the full ensemble's, and against the held-out members', of which forecasts of
    the former from the members given say something else (`baselines.spread_of_the_rest`); `start`: the reduced
    ensemble's at lead 0. Where the reduced ensemble is the full one, what is made of its spread knows the answer."""
    m, n = setting.reduced, setting.full
    if n < 2:
        return {}
    actual = np.sqrt(ensemble_moments(sample.members)[1])
    given = np.sqrt(ensemble_moments(sample.members[:m])[1])
    held = held_out_spread(sample.members, m)
    entrants = {label: one.spread for label, one in said.items() if one.spread is not None}
    if 1 < m < n:
        entrants[f"raw_{m}"] = given
        entrants[f"size_corrected_{m}"] = base.size_corrected(given, m, n)
    if fit.start is not None and start is not None:
        # NaN where lead 0 is missing: its mean is none then, which would be over other points than everyone else's.
        entrants[f"start_regression_{m}"] = np.where(np.isfinite(start), fit.start(start), np.nan)
    if fit.spread is not None:
        if m < n:
            entrants[f"spread_regression_{m}"] = fit.spread(given)
        entrants[CLIMATOLOGY] = fit.spread.climate
    known = {f"spread_regression_{m}": list(range(m)), **sample.given}
    found = {}
    for name, predicted in entrants.items():
        seen = name in setting.informed
        apart = None if seen else held_out_error(predicted, sample.members, m, known.get(name, ()))
        for statistic, value in spread_statistics(predicted, actual, apart).items():
            found[Key(name, statistic)] = value
        draws = m if name == f"raw_{m}" else n
        error = predicted * np.sqrt((draws - 1) / draws) - actual * np.sqrt((n - 1) / n)
        found[Key(name, Statistic.SPREAD_SQUARED_ERROR_0)] = error**2
    if fit.held_out is not None and held is not None:
        key = Key(f"held_out_regression_{m}", Statistic.HELD_OUT_SQUARED_ERROR)
        found[key] = (fit.held_out(given) - held) ** 2
    return found


def truth_values(setting: Setting, fit: Fit, sample: Sample, said: dict[str, Predicted], family: Family) -> Values:
    """Against the truth: raw ensembles, their corrections, climatology, forecasts."""
    truth, found = np.asarray(sample.truth), Values()
    limit = None if fit.climate is None else threshold(*fit.climate)
    least = None if fit.climate is None else _POINT * np.sqrt((fit.climate[1] ** 2).mean((-2, -1), keepdims=True))
    for size in sorted({setting.reduced, setting.full}):
        members = sample.raw[:size]
        _put(found, f"raw_{size}", raw_statistics(members, truth))
        if limit is not None:
            brier = (members_exceeding(members, limit) - (truth > limit)) ** 2
            _put(found, f"raw_{size}", {Statistic.BRIER: brier})
        of_members = ensemble_moments(members)
        for name, correction in fit.corrections.get(size, {}).items():
            _put(found, f"{name}_{size}", _baseline(*correction(*of_members), truth, family, limit, least))
    if fit.climate is not None:
        _put(found, CLIMATOLOGY, _baseline(*fit.climate, truth, family, limit, least))
    for label, one in said.items():
        if one.mean is not None:
            error = one.mean - truth
            _put(found, label, {Statistic.ERROR: error, Statistic.SQUARED_ERROR: error**2})
        if one.location is not None and one.scale is not None:
            scores = {Statistic.CRPS: crps(one.family, one.location, one.scale, truth)}
            scores |= {Statistic.VARIANCE: np.asarray(one.stddev) ** 2}
            scores |= _probabilities(one.family, one.location, one.scale, truth, limit)
            scores |= _of_points(one.family, one.location, one.scale, np.asarray(one.mean), truth, least)
            _put(found, label, scores)
    return found


def _put(found: Values, entrant: str, scores: dict[Statistic, np.ndarray]) -> None:
    found.update({Key(entrant, statistic): value for statistic, value in scores.items()})


def _baseline(
    mean: np.ndarray,
    scale: np.ndarray,
    truth: np.ndarray,
    family: Family,
    limit: np.ndarray | None,
    least: np.ndarray | None = None,
) -> dict[Statistic, np.ndarray]:
    """Scores of a corrected ensemble, as both laws where the variable's own has bounds: the better is taken in the end.

    Both have the corrected mean where that is within them: a law that stops at zero has its location below it, and less
    variance than its scale says.
    """
    found: dict[Statistic, np.ndarray] = {}
    laws = (Family.NORMAL,) if family is Family.NORMAL else (Family.NORMAL, family)
    for place, law in enumerate(laws):
        location = location_of_mean(law, mean, scale)
        scores = _probabilities(law, location, scale, truth, limit)
        scores |= _of_points(law, location, scale, mean, truth, least)
        scores[Statistic.CRPS] = crps(law, location, scale, truth)
        expected, deviation = moments(law, location, scale)
        error = expected - truth
        scores |= {Statistic.ERROR: error, Statistic.SQUARED_ERROR: error**2, Statistic.VARIANCE: deviation**2}
        found |= scores if len(laws) == 1 else {_BY_LAW[key][place]: score for key, score in scores.items()}
    return found


def _probabilities(
    family: Family, location: np.ndarray, scale: np.ndarray, truth: np.ndarray, limit: np.ndarray | None
) -> dict[Statistic, np.ndarray]:
    """Log score, and Brier score of exceeding `limit`."""
    found = {Statistic.LOG_SCORE: _log_score(family, location, scale, truth)}
    if limit is not None:
        # Where the scale is zero the forecast is a point.
        chance = np.where(scale > 0, exceeding(family, location, scale, limit), location > limit)
        found[Statistic.BRIER] = (chance - (truth > limit)) ** 2
    return found


def _log_score(family: Family, location: np.ndarray, scale: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Log score; NaN where the scale is zero, of which the mean over all is none then: see `_of_points`."""
    y = np.clip(truth, *family.bounds)
    with np.errstate(divide="ignore", invalid="ignore"):
        return log_score(family, location, np.where(scale == 0, np.nan, scale), y)


def _of_points(
    family: Family, location: np.ndarray, scale: np.ndarray, mean: np.ndarray, truth: np.ndarray,
    least: np.ndarray | None,
) -> dict[Statistic, np.ndarray]:  # fmt: skip
    """The log score where some scales are zero (no rain in a desert), nothing elsewhere. Such a law is a point to every
    other score; the log score takes `least` (Z, 1, 1) for its scale: a point has no density, and one such cell would
    leave the mean over all undefined."""
    point = scale == 0
    if least is None or not point.any():
        return {}
    wide = np.where(point, least, scale)
    location = np.where(point, location_of_mean(family, mean, wide), location)
    return {Statistic.LOG_SCORE: _log_score(family, location, wide, truth)}


def settle_families(state: AggregationState, columns: tuple, entrants: list[str]) -> dict[str, dict[str, str]]:
    """Take for each baseline and column the law with the lower CRPS on the test dates; return which, by field."""
    chosen = {}
    for entrant in entrants:
        if Key(entrant, Statistic.CRPS_FAMILY) not in state.total:
            continue
        taken = state.choose(entrant, _BY_LAW)
        chosen[entrant] = {
            f"{columns[c].name} {columns[c].lead_hours} h": _law(columns[c].variable, place)
            for c, place in taken.items()
        }
    return chosen


def _law(variable: str, place: int) -> str:
    return registered(variable).family.value if place else Family.NORMAL.value
