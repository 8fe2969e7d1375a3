"""Score every entrant, one variable and lead at a time, one initialisation time after the other.

Memory holds the fields of one date of one variable and lead, the sums of its fit at each cell, the coarse maps of all
fields, and sums for each date. These sums take about 25 kB for each date and field, whatever the grid.

What the scores lack is listed beside them: points that a mask left out (`left_out`), and fields for which baselines
could not be fitted (`unfitted`).

Axes: M member, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.store.climate import ModelClimate
from ensemble_ml.verification.aggregation import WEIGHTINGS, AggregationState, Strata
from ensemble_ml.verification.baselines import CORRECTIONS, FEWEST_DATES, FEWEST_SPREADS
from ensemble_ml.verification.extremes import efi
from ensemble_ml.verification.fits import Fit
from ensemble_ml.verification.forecasts import Predicted
from ensemble_ml.verification.pictures import Pictures
from ensemble_ml.verification.probability import Calibration, exceeding, members_exceeding, threshold
from ensemble_ml.verification.samples import Group, Sample, Setting, predictions, read_sample, start_spread
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.statistics import Key, Statistic
from ensemble_ml.verification.summary import short_name
from ensemble_ml.verification.values import spread_values, truth_values
from ensemble_ml.verification.vectors import Vectors
from ensemble_ml.wording import shortened

EXTREME, EFI_WEIGHTED = "|EFI| > 0.7", "weighted by |EFI|"  # names of the weightings of the extreme strata
EVERYWHERE = "all points"  # name of the weighting by area in the report
_EXTREME_ABOVE = 0.7
OF_THE_LIMIT = (Statistic.BRIER, Statistic.BRIER_NORMAL, Statistic.BRIER_FAMILY)  # of exceeding the upper tenth
_LACKING = {  # reasons why a regression of the spread has no value for a field that is scored
    "spread_regression": f"fewer than {FEWEST_SPREADS} fit dates have a spread",
    "start_regression": f"a test date has no spread at lead 0, or fewer than {FEWEST_SPREADS} fit dates have one",
}


@dataclass(frozen=True, eq=False)
class Tables:
    """The results that scoring adds to.

    Attributes:
        state: Sums of all statistics.
        calibration: Histograms and reliability.
        pictures: Sums for maps and bins.
        vectors: Scores of members as vectors, one entry for each lead.
    """

    state: AggregationState
    calibration: Calibration
    pictures: Pictures
    vectors: list[Vectors] = field(default_factory=list)


def score_group(setting: Setting, group: Group, fit: Fit, dates: np.ndarray, tables: Tables) -> None:
    """Score one group on all test dates, given as positions in the source, and add the results to `tables`."""
    state, pictures, climate = tables.state, tables.pictures, model_climate(setting)
    for position, date in enumerate(dates):
        # Everything about one date is computed while it is in memory, so that each field is read only once here.
        sample = read_sample(setting, group, int(date))
        index = None if climate is None else extreme_forecast_index(climate, group, int(date), sample.members)
        strata = {} if index is None else _strata(index, setting.weights[0])
        said = predictions(setting, group, int(date))
        begun = None if fit.start is None else start_spread(setting, group, int(date))
        spread = spread_values(setting, fit, sample, said, begun)
        # One mask serves all entrants, so that their means are over the same points.
        mask = sample.whole & _finite(one.spread for one in said.values())
        state.record(position, group.columns, spread, mask, setting.weights, strata)
        verified, values = np.zeros_like(mask), {}
        if sample.truth is not None:
            verified = sample.verified & _finite(
                x for one in said.values() for x in (one.location, one.scale, one.mean)
            )
            family = registered(group.variable).family
            values = truth_values(setting, fit, sample, said, family)
            brier = {key: value for key, value in values.items() if key.statistic in OF_THE_LIMIT}
            rest = {key: value for key, value in values.items() if key not in brier}
            state.record(position, group.columns, rest, verified, setting.weights, strata)
            # Brier scores have their own mask, because the limit has no meaning at some cells.
            state.record(position, group.columns, brier, verified & _meaningful(fit, group), setting.weights, strata)
            _calibrate(setting, group, fit, position, sample, said, verified, tables.calibration)
        pictures.record(group.columns, position, values, verified, sample, said, mask)
        if index is not None:
            pictures.record_index(group.columns, position, index)
    pictures.finish(group.columns, state)


def model_climate(setting: Setting) -> ModelClimate | None:
    """Return the model climate of the ensemble.

    It is None if it is turned off, or if all init times are of one calendar year.
    """
    times = setting.source.layout.init_time
    if not setting.climate_days or len(np.unique(times.astype("datetime64[Y]"))) < 2:
        return None
    return ModelClimate(setting.source, days=setting.climate_days, seasons=setting.seasons)


def climate_note(setting: Setting) -> str:
    """Return a sentence on the model climate that the extreme forecast index is measured against."""
    climate = model_climate(setting)
    if climate is None:
        return "There is no extreme forecast index: it needs init times of two years, and climate_days above 0."
    window = f"members of other years within {setting.climate_days} days of the date"
    where = "as the store holds it" if climate.stored is not None else "made for this evaluation"
    return f"The model climate of the extreme forecast index: {window}, {where}."


def extreme_forecast_index(climate: ModelClimate, group: Group, date: int, members: np.ndarray) -> np.ndarray | None:
    """Return the extreme forecast index (Z, Y, X) of the full ensemble (M, Z, Y, X), NaN where a value is missing.

    It is None if the climate has too few dates. `date` is a position in the source.
    """
    if not climate.enough(date):
        return None
    return efi(members, climate.quantiles(date, group.selection).one(), climate.probabilities)


def _strata(index: np.ndarray, area: np.ndarray) -> Strata:
    """Return the weights of the two extreme strata, as `AggregationState.record` takes them."""
    # The first field of each pair is the factor of the values, and the second their weight. The extreme event CRPS is
    # the mean of |EFI| times CRPS, so its weight is the area without |EFI| (Grönquist et al. 2021,
    # doi:10.1098/rsta.2020.0092).
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
    """Add PIT and rank histograms, and the reliability of exceeding the upper tenth and the thresholds."""
    truth = np.asarray(sample.truth)
    limits: dict[float | None, tuple[Any, np.ndarray]] = {at: (at, mask) for at in setting.thresholds(group.variable)}
    if fit.climatology is not None:
        limits[None] = threshold(*fit.climatology), mask & _meaningful(fit, group)
    for size in sorted({setting.reduced, setting.full}):
        members = sample.raw[:size]
        calibration.record_ranks(f"raw_{size}", position, group.columns, members, truth, mask)
        for at, (limit, known) in limits.items():
            chance = members_exceeding(members, limit)
            calibration.record_event(f"raw_{size}", group.columns, chance, truth > limit, known, at)
    for label, one in said.items():
        if one.location is not None and one.scale is not None:
            predicted = one.family, one.location, one.scale
            calibration.record_pit(label, position, group.columns, predicted, truth, mask)
            for at, (limit, known) in limits.items():
                chance = exceeding(*predicted, limit)
                calibration.record_event(label, group.columns, chance, truth > limit, known, at)


def _meaningful(fit: Fit, group: Group) -> np.ndarray | bool:
    """Return where the limit of the upper tenth has a meaning, (Z, Y, X) bool; True without a climatology.

    It has none at cells without a climate, where the climate never varies, and where the limit is not below the upper
    bound of the variable, so that no value can exceed it (a sky that is mostly overcast).
    """
    if fit.climatology is None:
        return True
    most = registered(group.variable).family.bounds[1]
    return (fit.climatology[1] > 0) & (threshold(*fit.climatology) < most)


def _finite(arrays) -> np.ndarray | bool:
    """Return where all arrays that are not None are finite; True if there is none."""
    mask: np.ndarray | bool = True
    for array in arrays:
        if array is not None:
            mask = mask & np.isfinite(array)
    return mask


def unfitted(scores: Scores, dates: int) -> list[str]:
    """Return sentences on fields for which a baseline is missing. `dates` is the number of fit dates.

    If a baseline lacks a value at any point that counts, its mean is NaN and the field is left out of comparisons.
    """
    found, state = [], scores.state

    def scored(key: Key) -> np.ndarray:
        return state.weight[key][:, WEIGHTINGS.index("area")].sum(0) > 0

    for kind, why in _LACKING.items():
        key = Key(f"{kind}_{scores.reduced}", Statistic.SPREAD_SQUARED_ERROR)
        if key in state.total and (lacking := _names(scores, scored(key) & ~np.isfinite(state.mean(key)))):
            found.append(f"{short_name(key.entrant)} is left out where {why}: {lacking}.")
    # Raw members need no fit. If they are scored on a field and corrections are not, too few dates could be fitted.
    raw = Key(f"raw_{scores.reduced}", Statistic.SQUARED_ERROR)
    corrected = Key(f"{next(iter(CORRECTIONS))}_{scores.reduced}", Statistic.SQUARED_ERROR)
    if raw in state.total and dates >= FEWEST_DATES:  # with fewer dates the plan has a note already
        if corrected not in state.total:
            found.append(
                f"No correction of the raw ensemble is shown: of the {dates} fit dates fewer than {FEWEST_DATES} have a"
                f" truth and all {scores.full} members of a field."
            )
        elif lacking := _names(scores, scored(raw) & ~np.isfinite(state.mean(corrected))):
            found.append(
                f"Corrections of the raw ensemble, and what is compared with them, leave out fields of which fewer than"
                f" {FEWEST_DATES} fit dates have a truth: {lacking}."
            )
    return found


def _names(scores: Scores, columns: np.ndarray) -> str:
    there = [scores.columns[c] for c in np.flatnonzero(columns)]
    return shortened([f"{column.title} at {column.lead_hours} h" for column in there])


def left_out(scores: Scores) -> list[dict[str, Any]]:
    """Return the points that a mask left out, with their share of the area of all points, for scores.json."""
    found = []
    area = WEIGHTINGS.index("area")
    for key, counts in scores.state.left_out.items():
        for c in np.flatnonzero(counts.sum(0)):
            column, points = scores.columns[c], int(scores.state.points[key][:, c].sum())
            found.append(
                {
                    "entrant": key.entrant,
                    "statistic": key.statistic.value,
                    "field": column.name,
                    "lead_hours": column.lead_hours,
                    "left_out": int(counts[:, c].sum()),
                    "points": points,
                    # the mean area of all points is one
                    "area_share": round(1 - float(scores.state.weight[key][:, area, c].sum() / points), 6),
                }
            )
    return found
