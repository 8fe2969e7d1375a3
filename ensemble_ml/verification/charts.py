"""Write the charts of the report: gains at a glance, curves by lead time, maps, and spread against error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.grid import Grid
from ensemble_ml.verification import plots
from ensemble_ml.verification.aggregation import Column
from ensemble_ml.verification.bootstrap import FEWEST_BLOCKS
from ensemble_ml.verification.page import image
from ensemble_ml.verification.pictures import Bins, Pictures
from ensemble_ml.verification.scores import Scores, gain
from ensemble_ml.verification.significance import RATE, p_values, significant
from ensemble_ml.verification.statistics import Key, Statistic
from ensemble_ml.verification.summary import short_name

Families = Mapping[str, Mapping[str, str]]  # entrant -> field and lead -> family that `values.settle_families` chose


def headline(scores: Scores) -> str:
    """Return a chart of the gains over the baselines at the headline lead, with intervals.

    Args:
        scores: The scores.
    """
    m, n, lead = scores.reduced, scores.full, scores.headline_lead
    columns, best, entries = scores.at_lead(lead), scores.best_baseline(lead), []
    references = [("crps", name, "CRPS") for name in (best, f"raw_{n}", f"raw_{m}") if name]
    references += [
        ("spread_rmse", f"{kind}_{m}", "spread RMSE") for kind in ("spread_regression", "size_corrected", "raw")
    ]
    references += [("held_out_rmse", f"held_out_regression_{m}", "held-out spread RMSE")]
    for label in scores.forecasts:
        who = f"{label}: " if len(scores.forecasts) > 1 else ""
        for metric, other, words in dict.fromkeys(references):
            found = gain(scores.ratio(metric, label, other, columns))
            if found is not None:
                mark = " (best baseline)" if metric == "crps" and other == best else ""
                entries.append((f"{who}{words} vs {short_name(other)}{mark}", found))
    if not entries:
        return ""
    text = f"Gain at {lead} h, geometric mean over variables and levels; lines are intervals, where there are any"
    return image(plots.gains(entries), text, width=760)


def curves(scores: Scores) -> str:
    """Return charts of score ratios by lead time.

    Args:
        scores: The scores.
    """
    m, n = scores.reduced, scores.full
    best = scores.best_baseline(scores.headline_lead)
    baselines = [name for name in (best, f"local_{m}", f"raw_{m}") if name]
    wanted = {
        f"CRPS over that of raw {n}": ("crps", f"raw_{n}", baselines),
        f"RMSE of spread over that of raw {m}": (
            "spread_rmse",
            f"raw_{m}",
            [f"spread_regression_{m}", f"size_corrected_{m}"],
        ),
    }
    panels = {}
    for title, (metric, reference, others) in wanted.items():
        curves = {}
        for entrant in dict.fromkeys((*scores.forecasts, *others)):
            points = ((lead, scores.ratio(metric, entrant, reference, scores.at_lead(lead))) for lead in scores.leads)
            known = [(lead, point) for lead, point in points if point is not None]
            if known:
                curves[short_name(entrant)] = known
        # A panel of baselines alone would answer no question about the forecasts.
        if any(short_name(label) in curves for label in scores.forecasts):
            panels[title] = curves
    if not panels:
        return ""
    return f"<h2>By lead time</h2>{image(plots.by_lead(panels), 'Ratio of scores by lead time; below one is better')}"


def maps(content: dict[str, Any], scores: Scores, pictures: Pictures, grid: Grid, land: np.ndarray | None) -> str:
    """Return maps of the gain, and of the spread on the last test date that has the field.

    Args:
        content: The content of scores.json.
        scores: The scores.
        pictures: Sums for the maps.
        grid: Grid of the maps.
        land: (Y, X) land fraction for coasts, or None.

    Returns:
        HTML; empty on a grid of one row or column.
    """
    if min(grid.shape) < 2:
        return ""  # a row or a column makes no map
    families = content["families"]
    parts, gains = [], [found for c in pictures.headline for found in _gain_maps(families, scores, pictures, c)]
    if gains:
        tested = (
            f"Dots: significant over blocks of dates, at a rate of false discoveries of {100 * RATE:g} %; none on "
            f"gains of a forecast that has more to go by"
        )
        if scores.blocks < FEWEST_BLOCKS:
            tested = f"Not tested for significance: fewer than {FEWEST_BLOCKS} blocks of dates"
        text = f"Gain of CRPS at {scores.headline_lead} h, mean over the test dates; grey: left out. {tested}"
        parts.append(image(plots.gain_maps(gains, grid, land), text))
    for column, shot in pictures.snapshots.items():
        field = scores.columns[column]
        maps = [(f"all {scores.full} members", shot.actual)]
        maps += [(f"predicted by {label}", values) for label, values in shot.predicted.items()]
        if scores.reduced > 1:
            maps.append((f"raw {scores.reduced} members", shot.reduced))
        text = f"Spread of {field.title} at {field.lead_hours} h, from {shot.date}"
        parts.append(image(plots.spread_maps(maps, grid, land, registered(field.variable).units), text))
    return f"<h2>Maps</h2>{''.join(parts)}" if parts else ""


def _gain_maps(
    families: Families, scores: Scores, pictures: Pictures, column: int
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return a title, the gain in percent and the significant points for each forecast and reference."""
    found = []
    for label in scores.forecasts:
        key = Key(label, Statistic.CRPS)
        ours = pictures.mean_map(column, key)
        for other in filter(None, (scores.best_baseline(scores.headline_lead), f"raw_{scores.full}")):
            reference = _reference(families, scores.columns[column], other)
            theirs = pictures.mean_map(column, reference)
            if ours is None or theirs is None:
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                percent = 100 * (1 - ours / theirs)
            first, second = pictures.block_means(column, key), pictures.block_means(column, reference)
            # Dots mark significant differences, but no gain of a forecast that had more input than its reference.
            dots = np.zeros(percent.shape, bool)
            if first is not None and second is not None:
                dots = significant(p_values(first - second))
                if scores.advantage("crps", label, other):
                    dots &= percent < 0
            found.append((f"{scores.columns[column].title}: {label} vs {short_name(other)}", percent, dots))
    return found


def _reference(families: Families, column: Column, entrant: str) -> Key:
    """Return the key of the CRPS that the tables show of an entrant.

    Where the entrant was scored as two distributions, it is that of the chosen one.
    """
    law = families.get(entrant, {}).get(f"{column.name} {column.lead_hours} h")
    if law is None:
        return Key(entrant, Statistic.CRPS)
    return Key(entrant, Statistic.CRPS_NORMAL if law == Family.NORMAL.value else Statistic.CRPS_FAMILY)


def bins(scores: Scores, pictures: Pictures) -> str:
    """Return charts of errors and spreads against the predicted spread.

    Args:
        scores: The scores.
        pictures: Sums in bins.
    """
    m, n = scores.reduced, scores.full
    error = (
        "Does the predicted spread tell the error? Calibrated forecasts lie on the dashed line; dots by share of area."
    )
    spread = f"Does the predicted spread tell the spread of all {n} members?"
    parts = [
        _binned(scores, pictures, pictures.error_bins, (f"raw_{m}", f"raw_{n}"), error, "RMSE of the mean"),
        _binned(scores, pictures, pictures.spread_bins, (f"raw_{m}",), spread, f"mean spread of all {n} members"),
    ]
    return f"<h2>Spread against error</h2>{''.join(parts)}" if any(parts) else ""


def _binned(
    scores: Scores,
    pictures: Pictures,
    bins: dict[tuple[int, str], Bins],
    others: tuple[str, ...],
    text: str,
    y_label: str,
) -> str:
    """Return a chart of outcome against prediction, with a panel for each headline column that has bins."""
    panels, units = {}, []
    for column in pictures.headline:
        entrants = dict.fromkeys((*scores.forecasts, *others))
        curves = {short_name(entrant): bins[column, entrant] for entrant in entrants if (column, entrant) in bins}
        if curves:
            field = scores.columns[column]
            panels[f"{field.title}, {field.lead_hours} h"] = curves
            units.append(registered(field.variable).units)
    return image(plots.binned(panels, units, y_label), text, width=820) if panels else ""
