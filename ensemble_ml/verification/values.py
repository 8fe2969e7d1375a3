"""Compute the statistics of every entrant at each point of one initialisation time, for one variable and lead.

An entrant is a forecast, a raw ensemble or a baseline. Forecasts are named by their folder. All others are named by
what they are and how many members they use: raw_5, local_5, spread_regression_5, climatology.

Axes: Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import numpy as np

from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.verification import baselines as base
from ensemble_ml.verification.aggregation import AggregationState
from ensemble_ml.verification.families import location_of_mean, log_score, moments
from ensemble_ml.verification.fits import Fit
from ensemble_ml.verification.forecasts import Predicted
from ensemble_ml.verification.probability import exceeding, members_exceeding, threshold
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
_POINT = 0.01  # scale of a point forecast in the log score, as a share of the field's climatological standard deviation
# Statistics of a baseline that is scored as a normal distribution and as one of the variable's family. The CRPS comes
# first, because `AggregationState.choose` decides by the first entry.
_BY_FAMILY = {
    Statistic.CRPS: (Statistic.CRPS_NORMAL, Statistic.CRPS_FAMILY),
    Statistic.LOG_SCORE: (Statistic.LOG_SCORE_NORMAL, Statistic.LOG_SCORE_FAMILY),
    Statistic.BRIER: (Statistic.BRIER_NORMAL, Statistic.BRIER_FAMILY),
    Statistic.SQUARED_ERROR: (Statistic.SQUARED_ERROR_NORMAL, Statistic.SQUARED_ERROR_FAMILY),
    Statistic.ERROR: (Statistic.ERROR_NORMAL, Statistic.ERROR_FAMILY),
    Statistic.VARIANCE: (Statistic.VARIANCE_NORMAL, Statistic.VARIANCE_FAMILY),
}


def spread_values(
    setting: Setting, fit: Fit, sample: Sample, said: dict[str, Predicted], start: np.ndarray | None
) -> Values:
    """Score every predicted spread against that of the full ensemble, and against that of the held-out members.

    A forecast of the full spread that was made from known members implies a spread of the held-out ones
    (`baselines.spread_of_the_rest`). If the reduced ensemble is the full one, its spread at the same lead is the answer
    itself, so raw, size-corrected and regressed spreads are left out. A reduced ensemble of one member has no raw and
    no size-corrected spread. `start` (Z, Y, X) is the spread of the reduced ensemble at lead 0, or None.

    The values are (Z, Y, X). There are none if the full ensemble has one member.
    """
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
        # The prediction is NaN where lead 0 is missing, which makes its mean NaN. A mean over fewer points than the
        # others' could not be compared with theirs.
        entrants[f"start_regression_{m}"] = np.where(np.isfinite(start), fit.start(start), np.nan)
    if fit.spread is not None:
        if m < n:
            entrants[f"spread_regression_{m}"] = fit.spread(given)
        entrants[CLIMATOLOGY] = fit.spread.climate
    # The spread regression is made from the reduced ensemble, so it also implies a spread of the held-out members.
    known = {f"spread_regression_{m}": list(range(m)), **sample.given}
    found = Values()
    for name, predicted in entrants.items():
        seen = name in setting.informed
        apart = None if seen else held_out_error(predicted, sample.members, m, known.get(name, ()))
        _put(found, name, spread_statistics(predicted, actual, apart))
        draws = m if name == f"raw_{m}" else n
        # For ddof = 0, each spread is converted with the number of members that it stands for.
        error = predicted * np.sqrt((draws - 1) / draws) - actual * np.sqrt((n - 1) / n)
        found[Key(name, Statistic.SPREAD_SQUARED_ERROR_0)] = error**2
    if fit.held_out is not None and held is not None:
        key = Key(f"held_out_regression_{m}", Statistic.HELD_OUT_SQUARED_ERROR)
        found[key] = (fit.held_out(given) - held) ** 2
    return found


def truth_values(setting: Setting, fit: Fit, sample: Sample, said: dict[str, Predicted], family: Family) -> Values:
    """Score raw ensembles, their corrections, climatology and forecasts against the truth, at each point (Z, Y, X)."""
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
    """Return the scores of a normal forecast, and also those of the variable's own family if the two differ.

    Which of the two is better depends on the field and the lead. `settle_families` chooses when all dates are scored.
    Both have the corrected mean where it lies within the bounds of the variable. A censored or truncated
    distribution has its location below its mean, and its variance below the square of its scale.
    """
    found: dict[Statistic, np.ndarray] = {}
    families = (Family.NORMAL,) if family is Family.NORMAL else (Family.NORMAL, family)
    for place, one in enumerate(families):
        location = location_of_mean(one, mean, scale)
        scores = _probabilities(one, location, scale, truth, limit)
        scores |= _of_points(one, location, scale, mean, truth, least)
        scores[Statistic.CRPS] = crps(one, location, scale, truth)
        expected, deviation = moments(one, location, scale)
        error = expected - truth
        scores |= {Statistic.ERROR: error, Statistic.SQUARED_ERROR: error**2, Statistic.VARIANCE: deviation**2}
        found |= scores if len(families) == 1 else {_BY_FAMILY[key][place]: score for key, score in scores.items()}
    return found


def _probabilities(
    family: Family, location: np.ndarray, scale: np.ndarray, truth: np.ndarray, limit: np.ndarray | None
) -> dict[Statistic, np.ndarray]:
    """Return the log score, and the Brier score of exceeding `limit`."""
    found = {Statistic.LOG_SCORE: _log_score(family, location, scale, truth)}
    if limit is not None:
        found[Statistic.BRIER] = (exceeding(family, location, scale, limit) - (truth > limit)) ** 2
    return found


def _log_score(family: Family, location: np.ndarray, scale: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the log score, which is NaN where the scale is zero. `_of_points` replaces such scores."""
    y = np.clip(truth, *family.bounds)
    with np.errstate(divide="ignore", invalid="ignore"):
        return log_score(family, location, np.where(scale == 0, np.nan, scale), y)


def _of_points(
    family: Family, location: np.ndarray, scale: np.ndarray, mean: np.ndarray, truth: np.ndarray,
    least: np.ndarray | None,
) -> dict[Statistic, np.ndarray]:  # fmt: skip
    """Return the log score if some scales are zero (no rain in a desert), and nothing otherwise.

    For every other score, a scale of zero is a point forecast. A point has no density, so a single such cell would make
    the mean log score NaN. The log score therefore uses `least` (Z, 1, 1) as the scale there, if it is given.
    """
    point = scale == 0
    if least is None or not point.any():
        return {}
    wide = np.where(point, least, scale)
    location = np.where(point, location_of_mean(family, mean, wide), location)
    return {Statistic.LOG_SCORE: _log_score(family, location, wide, truth)}


def settle_families(state: AggregationState, columns: tuple, entrants: list[str]) -> dict[str, dict[str, str]]:
    """Choose for each baseline and column the distribution with the lower CRPS on the test dates.

    Their sums are added to `state`. Return the chosen family by entrant, then by field and lead. Baselines with one
    distribution are missing.
    """
    chosen = {}
    for entrant in entrants:
        if Key(entrant, Statistic.CRPS_FAMILY) not in state.total:
            continue
        taken = state.choose(entrant, _BY_FAMILY)
        chosen[entrant] = {
            f"{columns[c].name} {columns[c].lead_hours} h": (
                registered(columns[c].variable).family if place else Family.NORMAL
            ).value
            for c, place in taken.items()
        }
    return chosen
