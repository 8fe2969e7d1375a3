"""List what scores lack: points that a mask left out, and fields for which baselines could not be fitted."""

from __future__ import annotations

from typing import Any

import numpy as np

from ensemble_ml.verification.aggregation import WEIGHTINGS
from ensemble_ml.verification.baselines import CORRECTIONS, FEWEST_DATES, FEWEST_SPREADS
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.statistics import Key, Statistic
from ensemble_ml.verification.summary import short_name
from ensemble_ml.wording import shortened

_LACKING = {  # reasons why a regression of the spread has no value for a field that is scored
    "spread_regression": f"fewer than {FEWEST_SPREADS} fit dates have a spread",
    "start_regression": f"a test date has no spread at lead 0, or fewer than {FEWEST_SPREADS} fit dates have one",
}


def unfitted(scores: Scores, dates: int) -> list[str]:
    """Return sentences on fields for which a baseline is missing.

    If a baseline lacks a value at any point that counts, its mean is NaN and the field is left out of comparisons.

    Args:
        scores: The scores.
        dates: Number of fit dates.
    """
    found, state = [], scores.state

    def scored(key: Key) -> np.ndarray:
        return state.weight[key][:, WEIGHTINGS.index("area")].sum(0) > 0

    for kind, why in _LACKING.items():
        key = Key(f"{kind}_{scores.reduced}", Statistic.SPREAD_SQUARED_ERROR)
        if key in state.total and (lacking := _names(scores, scored(key) & ~np.isfinite(state.mean(key)))):
            found.append(f"{short_name(key.entrant)} is left out where {why}: {lacking}.")
    # Raw members need no fit. If they are scored on a field and corrections are not, too few dates could be fitted.
    raw, corrected = (
        Key(f"{name}_{scores.reduced}", Statistic.SQUARED_ERROR) for name in ("raw", next(iter(CORRECTIONS)))
    )
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
    """Return the points that a mask left out, with their share of the area of all points.

    Args:
        scores: The scores.

    Returns:
        An entry of scores.json for each entrant, statistic and field with such points.
    """
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
