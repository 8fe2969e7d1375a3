"""Find the extreme case: the test date on which the raw full ensemble is furthest from its climate.

Axes: Y latitude, X longitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ensemble_ml.verification.pictures import Pictures
from ensemble_ml.verification.plan import Plan
from ensemble_ml.verification.samples import Setting, predictions, read_sample
from ensemble_ml.verification.scoring import extreme_forecast_index, model_climate
from ensemble_ml.verification.statistics import ensemble_moments
from ensemble_ml.wording import hour_text


@dataclass(frozen=True, eq=False)
class Case:
    """One field of one initialisation time, to be drawn in the report.

    Attributes:
        column: Position of the field among the scored columns.
        name: Variable and level, such as t850.
        variable: Short name of the variable.
        lead_hours: Lead time in hours.
        date: Initialisation time as text.
        mean_index: Mean |EFI| over the sphere.
        place: Latitude and longitude of the marked point, in degrees.
        index: (Y, X) EFI.
        truth: (Y, X), or None where there is none.
        laws: Mean and standard deviation (Y, X) by raw ensemble or forecast.
        at_place: Mean and standard deviation at the marked point.
        truth_at_place: Truth at the marked point.
        index_at_place: EFI at the marked point.
    """

    column: int
    name: str
    variable: str
    lead_hours: int
    date: str
    mean_index: float
    place: tuple[float, float]
    index: np.ndarray
    truth: np.ndarray | None
    laws: dict[str, tuple[np.ndarray, np.ndarray]]
    at_place: dict[str, tuple[float, float]]
    truth_at_place: float | None
    index_at_place: float

    def as_dict(self) -> dict:
        """Return the `case` of scores.json."""
        return {
            "date": self.date, "lead_hours": self.lead_hours, "field": self.name, "mean_abs_efi": self.mean_index,
            "latitude": self.place[0], "longitude": self.place[1], "efi": self.index_at_place,
            "truth": self.truth_at_place,
            "forecasts": {name: {"mean": mean, "stddev": sigma} for name, (mean, sigma) in self.at_place.items()},
        }  # fmt: skip


def extreme_case(setting: Setting, plan: Plan, pictures: Pictures) -> Case | None:
    """Find and read the test date with the largest mean |EFI| of the first headline field.

    Args:
        setting: The setting that all groups share.
        plan: The plan of the evaluation.
        pictures: Sums that hold the mean |EFI| of each date.

    Returns:
        The case; None without a model climate, or if neither an ensemble nor a forecast has a width.
    """
    column = pictures.headline[0]
    known = pictures.index.get(column)
    if not known:
        return None
    position = max(known, key=lambda date: known[date])
    group = next(group for group in plan.groups if group.columns.start <= column < group.columns.stop)
    z, date = column - group.columns.start, int(plan.test[position])
    sample, climate = read_sample(setting, group, date), model_climate(setting)
    index = None if climate is None else extreme_forecast_index(climate, group, date, sample.members)
    if index is None:
        return None
    # Raw ensembles are shown with the standard deviation that predicts the truth, so that all entrants are comparable.
    laws = {}
    for size in sorted({setting.full, setting.reduced}, reverse=True):
        mean, variance = ensemble_moments(sample.raw[:size, z])
        if size > 1:
            laws[f"raw_{size}"] = (mean, np.sqrt((1 + 1 / size) * variance))
    for label, one in predictions(setting, group, date).items():
        if one.mean is not None and one.stddev is not None:
            laws[label] = (one.mean[z], one.stddev[z])
    if not laws:
        return None
    truth = None if sample.truth is None or not np.isfinite(sample.truth[z]).any() else sample.truth[z]
    grid = setting.source.layout.grid
    y, x = _place(index[z], truth, grid.wraps)
    return Case(
        column=column,
        name=plan.columns[column].name,
        variable=plan.columns[column].variable,
        lead_hours=plan.columns[column].lead_hours,
        date=hour_text(setting.source.layout.init_time[date]),
        mean_index=known[position],
        place=(float(grid.latitude[y]), float(grid.longitude[x])),
        index=index[z],
        truth=truth,
        laws=laws,
        at_place={name: (float(mean[y, x]), float(deviation[y, x])) for name, (mean, deviation) in laws.items()},
        truth_at_place=None if truth is None else float(truth[y, x]),
        index_at_place=float(index[z, y, x]),
    )


def _place(index: np.ndarray, truth: np.ndarray | None, wraps: bool) -> tuple[int, int]:
    """Return the row and the column where |EFI| is largest.

    |EFI| is averaged with its neighbours first, so that a single odd point is not chosen.
    """
    rows, columns = index.shape
    # Longitude wraps where the points close the circle. All other edges reflect, so that edge points have neighbours.
    wide = np.pad(np.nan_to_num(np.abs(index)), ((0, 0), (1, 1)), mode="wrap" if wraps else "reflect")
    wide = np.pad(wide, ((1, 1), (0, 0)), mode="reflect")
    smooth = sum(wide[y : y + rows, 1:-1] for y in range(3)) + sum(wide[1:-1, x : x + columns] for x in range(3))
    # The marked point needs an index and a truth of its own, whatever its neighbours have.
    there = np.where(np.isfinite(index) & (True if truth is None else np.isfinite(truth)), smooth, -1)
    y, x = np.unravel_index(int(there.argmax()), there.shape)
    return int(y), int(x)
