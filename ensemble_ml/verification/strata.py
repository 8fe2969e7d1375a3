"""Make rows of scores.json: scores by region, season and extreme forecast index, calibration, and the extreme case.

Regions are masks on the grid, and seasons are sets of initialisation times. The extreme case is where and when the raw
full ensemble is furthest from its climate; the arrays of a `Case` cover only the part of the grid that is shown.

Axes: B draw of the bootstrap, C column, D initialisation time, Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.grid import Grid, points_within
from ensemble_ml.verification.aggregation import METRICS, Column, geometric_mean
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.pictures import Pictures
from ensemble_ml.verification.plan import Plan
from ensemble_ml.verification.probability import Calibration, flatness
from ensemble_ml.verification.samples import Setting, predictions, read_sample
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.scoring import EFI_WEIGHTED, EXTREME, extreme_forecast_index, model_climate
from ensemble_ml.verification.statistics import Key, ensemble_moments
from ensemble_ml.wording import date_text

TROPICS = 20.0  # degrees of latitude, the WMO's border between tropics and extratropics
SEASONS = ("DJF", "MAM", "JJA", "SON")


def strata_rows(scores: Scores, times: np.ndarray, regions: tuple[str, ...]) -> list[dict]:
    """Return the `strata` of scores.json. `regions` are the names of the weightings that are regions."""
    everywhere = np.ones(len(times))
    parts = [("region", name, name, everywhere) for name in regions]
    seasons = season_of(times)
    parts += [("season", SEASONS[k], "area", (seasons == k).astype(float)) for k in sorted(set(seasons.tolist()))]
    parts += [("extreme", EXTREME, EXTREME, everywhere), ("extreme", EFI_WEIGHTED, EFI_WEIGHTED, everywhere)]
    found = []
    for lead in scores.leads:
        best, m, n = scores.best_baseline(lead), scores.reduced, scores.full
        pairs = [("crps", best)] if best else []
        pairs += [("crps", f"raw_{n}"), ("crps", f"raw_{m}"), ("spread_rmse", f"spread_regression_{m}")]
        for forecast in scores.forecasts:
            of_first = [("crps", first) for first in scores.forecasts[:1] if first != forecast]
            for metric, reference in dict.fromkeys([*of_first, *pairs]):
                for kind, name, weighting, dates in parts:
                    ratio, there = stratum_ratio(scores, metric, forecast, reference, lead, weighting, dates)
                    if ratio is not None:
                        found.append(
                            {"kind": kind, "stratum": name, "lead_hours": lead, "forecast": forecast,
                             "reference": reference, "metric": metric, "ratio": ratio.value, "low": ratio.low,
                             "high": ratio.high, "better": ratio.below(1.0), "worse": ratio.above(1.0),
                             "dates": int(there.sum()), "blocks": ratio.blocks}
                        )  # fmt: skip
    return found


def stratum_ratio(
    scores: Scores, metric: str, forecast: str, reference: str, lead: int, weighting: str, dates: np.ndarray
) -> tuple[Interval | None, np.ndarray]:
    """Return the geometric mean of the score ratios of `forecast` to `reference` over variables and levels.

    `dates` (D,) is one for dates of the stratum and zero for others. The points of `weighting` form the stratum. The
    ratio is None if the two entrants share no field with a score in the stratum. Also return the dates on which the
    stratum has points of the forecast, (D,) bool, none if an entrant lacks the metric.
    """
    rule, state = METRICS[metric], scores.state
    if not all(rule.available(state, entrant) for entrant in (forecast, reference)):
        return None, np.zeros(len(dates), bool)
    # A stratum may have points on some dates only, such as extremes. The interval must rest on the blocks of these
    # dates.
    weight = state.weight[Key(forecast, rule.needs[0])][:, state.weightings.index(weighting), scores.at_lead(lead)]
    known = (weight > 0) & (dates > 0)[:, None]
    there = known.sum(1) > 0
    # Dates outside of the stratum count zero times, in the value (first row) as in the draws.
    draws = np.vstack([dates, scores.counts * dates])
    first, second = (rule(state, entrant, weighting=weighting, draws=draws) for entrant in (forecast, reference))
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = geometric_mean(first / second, scores.at_lead(lead))
    if not np.isfinite(mean[0]):
        return None, there
    # The mean is no more certain than its least known field, as in `Scores.ratio`.
    found = scores.interval(mean[0], mean[1:], scores.fewest_blocks(known))
    return replace(found, barred=scores.barred(metric, forecast, reference)), there


def calibration_rows(scores: Scores, calibration: Calibration) -> list[dict]:
    """Return the `calibration` of scores.json: histograms of forecasts and raw ensembles, with intervals of bins."""
    found = []
    # PIT histograms of forecasts that count as baselines are left out.
    keys = [key for key in calibration.histograms if key[1] in scores.forecasts or key[0] == "rank"]
    for kind, entrant in keys:
        value = calibration.share(kind, entrant)
        draws = calibration.share(kind, entrant, scores.counts)
        assert value is not None and draws is not None
        for c, column in enumerate(scores.columns):
            if not np.isfinite(value[c]).all():
                continue
            known = scores.blocks_among(calibration.known(kind, entrant, c))
            ends = [scores.interval(share, draws[:, c, k], known) for k, share in enumerate(value[c])]
            found.append(
                {"kind": kind, "entrant": entrant, "lead_hours": column.lead_hours, "variable": column.variable,
                 "level": column.level, "shares": value[c].tolist(), "low": [e.low for e in ends],
                 "high": [e.high for e in ends], "flatness": float(flatness(value[c]))}
            )  # fmt: skip
    return found


def region_masks(
    grid: Grid,
    land: np.ndarray | None = None,
    boxes: Mapping[str, Sequence[float]] | None = None,
    taken: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """Return masks (Y, X) of the regions that the grid reaches: extratropics, tropics, land, sea, and boxes, by name.

    A point is land where `land` (Y, X) is at least one half; None leaves out land and sea. `boxes` are [north, west,
    south, east] in degrees by name. If west exceeds east, the box crosses Greenwich or the date line. `taken` are names
    that boxes may not have, besides those of the other regions that the grid reaches.

    Raises:
        UserError: A box holds no point of the grid, or its name is taken.
    """
    lat = np.broadcast_to(grid.latitude[:, None], grid.shape)
    found = {
        "northern extratropics": lat >= TROPICS,
        "tropics": np.abs(lat) < TROPICS,
        "southern extratropics": lat <= -TROPICS,
    }
    if land is not None:
        found |= {"land": np.asarray(land) >= 0.5, "sea": np.asarray(land) < 0.5}
    found = {name: mask for name, mask in found.items() if mask.any()}
    for name, box in ((str(name), box) for name, box in (boxes or {}).items()):  # settings may name a box by a number
        if name in found or name in taken:
            raise UserError(f"regions.{name}={list(box)}: the name stands for something else in scores; give another")
        mask = np.zeros(grid.shape, bool)
        mask[np.ix_(*points_within(grid, box))] = True
        if not mask.any():
            raise UserError(
                f"regions.{name}={list(box)}: holds no point of {grid.describe()}; give [north, west, south, east]"
            )
        found[name] = mask
    return found


def season_of(times: np.ndarray) -> np.ndarray:
    """Return the meteorological season of each time (datetime64), (D,) positions in `SEASONS`."""
    month = times.astype("datetime64[M]").astype(int) % 12
    return ((month + 1) // 3) % 4


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

    Fields on pressure levels are searched only if no surface variable has an EFI. The case is None if no field has an
    EFI at that lead (for example without a model climate), or if no ensemble and no forecast has a standard deviation.
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
    inside = _box_around(grid, pictures.box, row, place, 0.0)
    searched = np.full(grid.shape, np.nan)
    searched[inside] = index[z][inside]
    # A truth that is known elsewhere alone would leave no point of the region to mark.
    truth = None if sample.truth is None or not np.isfinite(sample.truth[z] + searched).any() else sample.truth[z]
    y, x = _place(searched, truth, grid.wraps)
    shown = _box_around(grid, pictures.box, row, place, 0.5)
    north, south = grid.latitude_bounds()[[inside[0].start, inside[0].stop]].tolist()
    west, east = grid.longitude_bounds()[[inside[1].start, inside[1].stop]].tolist()
    return Case(
        column=plan.columns[column],
        date=date_text(setting.source.layout.init_time[date]),
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
    """Return how many rows and columns make a box of 30 by 60 degrees, in which unusual weather is searched."""
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


def _box_around(grid: Grid, size: tuple[int, int], row: int, place: int, around: float) -> tuple[slice, slice]:
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
