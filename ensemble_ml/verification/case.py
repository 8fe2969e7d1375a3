"""Find the extreme case: where and when the raw full ensemble is furthest from its climate.

Axes: Y latitude, X longitude. The arrays of a `Case` cover only the part of the grid that is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ensemble_ml.grid import Grid
from ensemble_ml.verification.aggregation import Column
from ensemble_ml.verification.pictures import Pictures
from ensemble_ml.verification.plan import Plan
from ensemble_ml.verification.samples import Setting, predictions, read_sample
from ensemble_ml.verification.scoring import extreme_forecast_index, model_climate
from ensemble_ml.verification.statistics import ensemble_moments
from ensemble_ml.wording import hour_text


@dataclass(frozen=True, eq=False)
class Case:
    """A field of one initialisation time, to be drawn in the report. Values are in the units of the variable.

    Attributes:
        column: The field and its lead.
        date: Initialisation time as text.
        mean_index: Mean |EFI| over the region, where EFI is the extreme forecast index.
        region: Northern, western, southern and eastern edge of the region, in degrees.
        grid: Grid of the part that is shown: the region, and up to half its size more on each side.
        place: Latitude and longitude of the marked point, in degrees.
        index: (Y, X) EFI.
        truth: (Y, X), or None where there is none in the region.
        distributions: Mean and standard deviation (Y, X) by raw ensemble or forecast.
        at_place: Mean and standard deviation at the marked point, by raw ensemble or forecast.
        truth_at_place: Truth at the marked point, or None where there is none in the region.
        index_at_place: EFI at the marked point.
    """

    column: Column
    date: str
    mean_index: float
    region: tuple[float, float, float, float]
    grid: Grid
    place: tuple[float, float]
    index: np.ndarray
    truth: np.ndarray | None
    distributions: dict[str, tuple[np.ndarray, np.ndarray]]
    at_place: dict[str, tuple[float, float]]
    truth_at_place: float | None
    index_at_place: float

    def as_dict(self) -> dict:
        """Return the `case` of scores.json."""
        return {
            "date": self.date, "lead_hours": self.column.lead_hours, "field": self.column.name,
            "mean_abs_efi": self.mean_index, "region": list(self.region), "latitude": self.place[0],
            "longitude": self.place[1], "efi": self.index_at_place,
            "truth": self.truth_at_place,
            "forecasts": {name: {"mean": mean, "stddev": sigma} for name, (mean, sigma) in self.at_place.items()},
        }  # fmt: skip


def extreme_case(setting: Setting, plan: Plan, pictures: Pictures) -> Case | None:
    """Find and read the test date and the region with the largest mean |EFI| at the headline lead.

    Fields on pressure levels are searched only if no surface variable has an EFI.

    Args:
        setting: The setting that all groups share.
        plan: The plan of the evaluation.
        pictures: Sums that hold the mean |EFI| of each date.

    Returns:
        The case; None if no field has an EFI at that lead (for example without a model climate), or if no ensemble and
        no forecast has a standard deviation.
    """
    chosen = _most_unusual(plan, pictures)
    if chosen is None:
        return None
    column, position = chosen
    mean_index, row, place = pictures.index[column][position]
    group = next(group for group in plan.groups if group.columns.start <= column < group.columns.stop)
    z, date = column - group.columns.start, int(plan.test[position])
    sample, climate = read_sample(setting, group, date), model_climate(setting)
    index = None if climate is None else extreme_forecast_index(climate, group, date, sample.members)
    if index is None:
        return None
    # Raw ensembles are shown with the standard deviation that predicts the truth, so that all entrants are comparable.
    distributions = {}
    for size in sorted({setting.full, setting.reduced}, reverse=True):
        mean, variance = ensemble_moments(sample.raw[:size, z])
        if size > 1:
            distributions[f"raw_{size}"] = (mean, np.sqrt((1 + 1 / size) * variance))
    for label, one in predictions(setting, group, date).items():
        if one.mean is not None and one.stddev is not None:
            distributions[label] = (one.mean[z], one.stddev[z])
    if not distributions:
        return None
    grid = setting.source.layout.grid
    inside = _box(grid, pictures.box, row, place, 0.0)
    searched = np.full(grid.shape, np.nan)
    searched[inside] = index[z][inside]
    # A truth that is known elsewhere alone would leave no point of the region to mark.
    truth = None if sample.truth is None or not np.isfinite(sample.truth[z] + searched).any() else sample.truth[z]
    y, x = _place(searched, truth, grid.wraps)
    shown = _box(grid, pictures.box, row, place, 0.5)
    north, south = grid.latitude_bounds()[[inside[0].start, inside[0].stop]].tolist()
    west, east = grid.longitude_bounds()[[inside[1].start, inside[1].stop]].tolist()
    return Case(
        column=plan.columns[column],
        date=hour_text(setting.source.layout.init_time[date]),
        mean_index=mean_index,
        region=(north, west, south, east),
        grid=Grid(grid.latitude[shown[0]], grid.longitude[shown[1]]),
        place=(float(grid.latitude[y]), float(grid.longitude[x])),
        index=index[z][shown],
        truth=None if truth is None else truth[shown],
        distributions={name: (mean[shown], deviation[shown]) for name, (mean, deviation) in distributions.items()},
        at_place={
            name: (float(mean[y, x]), float(deviation[y, x])) for name, (mean, deviation) in distributions.items()
        },
        truth_at_place=None if truth is None else float(truth[y, x]),
        index_at_place=float(index[z, y, x]),
    )


def box_of(grid: Grid) -> tuple[int, int]:
    """Return how many rows and columns make a box of 30 by 60 degrees. Boxes are searched for the most unusual weather.

    Args:
        grid: Grid of the fields.
    """
    spans = np.ptp(grid.latitude_bounds()), np.ptp(grid.longitude_bounds())
    rows, columns = (
        max(1, round(width / (span / n))) for width, span, n in zip((30, 60), spans, grid.shape, strict=True)
    )
    return rows, columns


def _most_unusual(plan: Plan, pictures: Pictures) -> tuple[int, int] | None:
    """Return the positions of the column and the test date of the box that is furthest from its climate.

    Fields on pressure levels count only if no surface variable has an index. The result is None if no field has one.
    """
    lead = plan.columns[pictures.headline[0]].lead_hours
    known = {
        (c, date): mean
        for c, dates in pictures.index.items()
        for date, (mean, _, _) in dates.items()
        if plan.columns[c].lead_hours == lead
    }
    known = {one: mean for one, mean in known.items() if plan.columns[one[0]].level is None} or known
    return max(known, key=lambda one: known[one]) if known else None


def _box(grid: Grid, size: tuple[int, int], row: int, place: int, around: float) -> tuple[slice, slice]:
    """Return the rows and columns of a box, with `around` of its size on each side, as far as the grid goes."""
    edges = []
    for number, length, whole in zip((row, place), size, grid.shape, strict=True):
        more = round(around * length)
        edges.append(slice(max(0, number * length - more), min(whole, (number + 1) * length + more)))
    return edges[0], edges[1]


def _place(index: np.ndarray, truth: np.ndarray | None, wraps: bool) -> tuple[int, int]:
    """Return the row and the column where |EFI|, averaged with its four neighbours, is largest.

    The point itself counts twice, and points without an index count as zero. Without the average, a single odd point
    could be chosen.
    """
    rows, columns = index.shape
    # Longitude wraps where the points close the circle. All other edges reflect, so that edge points have neighbours.
    wide = np.pad(np.nan_to_num(np.abs(index)), ((0, 0), (1, 1)), mode="wrap" if wraps else "reflect")
    wide = np.pad(wide, ((1, 1), (0, 0)), mode="reflect")
    smooth = sum(wide[y : y + rows, 1:-1] for y in range(3)) + sum(wide[1:-1, x : x + columns] for x in range(3))
    # The marked point needs an index and a truth of its own, whatever its neighbours have.
    good = np.isfinite(index) if truth is None else np.isfinite(index) & np.isfinite(truth)
    y, x = np.unravel_index(int(np.where(good, smooth, -1).argmax()), good.shape)
    return int(y), int(x)
