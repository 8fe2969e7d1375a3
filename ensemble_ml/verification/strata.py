"""Make rows of scores.json: scores split by region, season and extreme forecast index, and calibration.

Axes: B draw of the bootstrap, C column, D initialisation time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.calibration import Calibration
from ensemble_ml.verification.metrics import METRICS, geometric_mean
from ensemble_ml.verification.probability import flatness
from ensemble_ml.verification.regions import SEASONS, season_of
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.scoring import EFI_WEIGHTED, EXTREME
from ensemble_ml.verification.statistics import Key


def strata_rows(scores: Scores, times: np.ndarray, regions: tuple[str, ...]) -> list[dict]:
    """Return the `strata` of scores.json.

    Args:
        scores: The scores of all dates.
        times: (D,) init times.
        regions: Names of the weightings that are regions.
    """
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
    """Return the geometric mean of score ratios over variables and levels within a stratum.

    Args:
        scores: The scores of all dates.
        metric: Name in `METRICS`.
        forecast: Label of a forecast; the numerator.
        reference: The entrant that it is compared with; the denominator.
        lead: Lead time in hours.
        weighting: Name of the weighting whose points form the stratum.
        dates: (D,) one for dates of the stratum, zero for others.

    Returns:
        The ratio with its interval, or None if the two share no field with a score in the stratum; and the dates on
        which the stratum has points of the forecast, (D,) bool, none if an entrant lacks the metric.
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
    """Return the `calibration` of scores.json: histograms of forecasts and raw ensembles, with intervals of all bins.

    Args:
        scores: The scores, whose draws are used.
        calibration: The histograms.
    """
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
