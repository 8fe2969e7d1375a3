"""Return sections of the report as HTML: strata, scores of members as vectors, ensemble sizes and the extreme case."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import Any

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.case import Case
from ensemble_ml.verification.page import FORECAST, LEAD, choice, note, number, table
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.summary import explained, short_name
from ensemble_ml.verification.svg import Atlas, Curve, chart


def strata(content: dict[str, Any], scores: Scores) -> str:
    """Return a section on the gain in regions, seasons and unusual weather.

    Args:
        content: The content of scores.json.
        scores: The scores.

    Returns:
        HTML; empty if there are no strata.
    """
    cards = {}
    for forecast in scores.forecasts:
        for lead in scores.leads:
            rows = [row for row in content["strata"] if (row["lead_hours"], row["forecast"]) == (lead, forecast)]
            cards[forecast, f"{lead} h"] = _strata_table(scores, forecast, rows)
    shown = choice([FORECAST, LEAD], cards, (scores.forecasts[0], f"{scores.headline_lead} h"))
    return f"<h2>Where and when: regions, seasons, extremes</h2>{shown}" if shown else ""


def _strata_table(scores: Scores, forecast: str, rows: list[dict[str, Any]]) -> str:
    """Return a table of the gain of a forecast at one lead, with strata as rows; empty without rows."""
    heads = list(dict.fromkeys((row["metric"], row["reference"]) for row in rows))
    # A forecast that had more input than its reference must not be marked as surely better. The rows do not hold
    # `Interval.barred`, so it is computed again.
    barred_of = {head: scores.barred(head[0], forecast, head[1]) for head in heads}
    lines, marks = [], []
    for kind, name in dict.fromkeys((row["kind"], row["stratum"]) for row in rows):
        by_head = {
            (row["metric"], row["reference"]): row for row in rows if (row["kind"], row["stratum"]) == (kind, name)
        }
        gains = [
            _gain(row["ratio"], row["low"], row["high"], row["blocks"], barred) if (row := by_head.get(head)) else None
            for head, barred in barred_of.items()
        ]
        first = next(iter(by_head.values()))
        dates = f"{first['dates']} ({first['blocks']})"
        lines.append([escape(name), dates, *("" if gain is None else number(gain) for gain in gains)])
        marks.append([None, None, *(_mark(gain) for gain in gains)])
    words = {"crps": "CRPS", "spread_rmse": "spread RMSE"}
    titles = [f"{words[metric]} vs {short_name(reference)}" for metric, reference in heads]
    caption = f"gain in %, geometric mean over variables and levels. {explained(other for _, other in heads)}"
    return table(["stratum", "dates (blocks)", *titles], lines, caption=caption, classes=marks) if lines else ""


def together(content: dict[str, Any], scores: Scores) -> str:
    """Return a section on the scores of members as vectors.

    Args:
        content: The content of scores.json.
        scores: The scores.

    Returns:
        HTML; empty if no forecast holds members.
    """
    cards = {}
    for lead in scores.leads:
        rows = [row for row in content["vectors"] if row["lead_hours"] == lead]
        cards[(f"{lead} h",)] = _vector_table(scores, rows) if rows else ""
    shown = choice([LEAD], cards, (f"{scores.headline_lead} h",))
    return f"<h2>Members together</h2>{shown}" if shown else ""


def _vector_table(scores: Scores, found: list[dict[str, Any]]) -> str:
    """Return a table of the gains in scores of members as vectors at one lead."""
    words = {"crps_members": "CRPS of members", "energy": "energy score", "variogram": "variogram score"}
    words = {metric: title for metric, title in words.items() if any(row["metric"] == metric for row in found)}
    others = f"ecc_{scores.reduced}", f"raw_{scores.full}"
    lines, marks = [], []
    for entrant in dict.fromkeys(row["entrant"] for row in found):
        mine = {row["metric"]: row for row in found if row["entrant"] == entrant}
        gains = [
            _gain(
                row[f"over_{o}"], row[f"over_{o}_low"], row[f"over_{o}_high"], row["blocks"],
                scores.barred(row["metric"], entrant, o),
            )
            if f"over_{o}" in row else None
            for row in mine.values() for o in others
        ]  # fmt: skip
        lines.append([escape(short_name(entrant)), *("" if gain is None else number(gain) for gain in gains)])
        marks.append([None, *(_mark(gain) for gain in gains)])
    heads = [f"{words[metric]} vs {short_name(other)}" for metric in words for other in others]
    caption = f"gain in % over {found[0]['fields']} fields, each divided by the standard deviation of its climate"
    # Scores of vectors may cover fewer fields and points than other scores, which the caption must state.
    for paired in [row["paired"] for row in found if row["metric"] == "variogram"][:1]:
        caption += f"; variogram over {len(paired)} of them"
    if found[0]["left_out_area"]:
        caption += f"; {100 * found[0]['left_out_area']:.3g} % of the area lacks a value of some field and is left out"
    if without := found[0].get("left_out_fields"):
        caption += f"; {', '.join(without)} left out: without variance or a fit on the fit dates"
    return table(["members", *heads], lines, caption=caption, classes=marks)


def _gain(ratio: float, low: float, high: float, blocks: int, barred: int) -> Interval:
    """Convert a ratio of scores with its interval to a gain in percent."""
    return Interval(ratio, low, high, blocks, barred).map(lambda r: 100 * (1 - r))


def _mark(gain: Interval | None) -> str | None:
    """Return the CSS class of a gain that is surely positive ("b") or negative ("w"), None for any other."""
    if gain is None or not gain.excludes(0):
        return None
    return "b" if gain.value > 0 else "w"


def by_members(scores: Scores) -> str:
    """Return a section with scores plotted against the number of members that forecasts were made from.

    Baselines, and forecasts that do not state their members, are not shown.

    Args:
        scores: The scores.

    Returns:
        HTML; empty if fewer than two different numbers of members are stated.
    """
    sizes = {label: scores.given[label] for label in scores.forecasts if label in scores.given}
    if len(set(sizes.values())) < 2:
        return ""
    columns, full = scores.at_lead(scores.headline_lead), f"raw_{scores.full}"
    shown = ""
    for metric, reference, title in (
        ("crps", full, f"CRPS over that of raw {scores.full}"),
        ("spread_rmse", f"spread_regression_{scores.reduced}", f"spread RMSE over regression on {scores.reduced}"),
    ):
        points = [(sizes[label], scores.ratio(metric, label, reference, columns)) for label in sizes]
        known = sorted(((size, ratio) for size, ratio in points if ratio is not None), key=lambda item: item[0])
        curve = Curve([size for size, _ in known], [ratio for _, ratio in known])
        shown += chart({"forecasts": curve}, title, "members in", ticks=sorted({*sizes.values()}), level=1.0)
    text = f"Forecasts from different numbers of members at {scores.headline_lead} h; below one is better"
    return f'<h2>By number of members</h2>{note(text)}<div class="charts">{shown}</div>' if shown else ""


def extreme(case: Case | None, scores: Scores, atlas: Atlas) -> str:
    """Return a section with maps of the most unusual weather: raw ensembles, forecasts and truth side by side.

    Args:
        case: The extreme case, or None.
        scores: The scores.
        atlas: Grid and coasts of the maps of the whole report.

    Returns:
        HTML; empty without a case, or if the part of the grid that it shows has a single row or column.
    """
    if case is None or min(case.grid.shape) < 2:
        return ""
    units = registered(case.column.variable).units
    (north, west, south, east), (lat, lon) = case.region, case.place
    lead = (
        f"{case.column.title} from {case.date}, {case.column.lead_hours} h ahead, {south:g} to {north:g}°N and "
        f"{west:g} to {east:g}°E. Of all test dates and boxes of 30 by 60 degrees, the raw {scores.full} members are "
        f"furthest from their climate here (mean |EFI| {case.mean_index:.2f}). The cross marks "
        f"{abs(lat):g}°{'N' if lat >= 0 else 'S'} {lon:g}°E, where EFI is {case.index_at_place:+.2f}."
    )
    lines = []
    for name, (mean, deviation) in case.at_place.items():
        error = sigmas = ""
        if case.truth_at_place is not None:
            error = f"{case.truth_at_place - mean:+.3g}"
            # If all members are dry, their deviation is zero, and the error cannot be divided by it.
            sigmas = f"{(case.truth_at_place - mean) / deviation:+.2f}" if deviation > 0 else ""
        lines.append([escape(short_name(name)), f"{mean:.5g}", f"{deviation:.3g}", error, sigmas])
    if case.truth_at_place is not None:
        lines.append(["truth", f"{case.truth_at_place:.5g}", "", "", ""])
    heads = [f"at the cross ({units})", "mean", "standard deviation", "truth - mean", "in standard deviations"]
    pictures = f'<div class="charts">{"".join(_case_maps(case, atlas, units))}</div>'
    return f'<h2 id="extreme">An extreme case</h2><p>{escape(lead)}</p>{pictures}{table(heads, lines)}'


def _case_maps(case: Case, atlas: Atlas, units: str) -> list[str]:
    """Return maps of means and the truth, of standard deviations, of errors in standard deviations, and of the EFI."""
    here = replace(atlas, grid=case.grid, size=1)
    fields = {short_name(name): mean for name, (mean, _) in case.distributions.items()}
    fields |= {} if case.truth is None else {"truth": case.truth}
    # All maps of a kind share one colour scale, so that they can be compared.
    low, high = np.nanpercentile(np.stack(list(fields.values())), [1, 99])
    top = float(np.nanpercentile(np.stack([deviation for _, deviation in case.distributions.values()]), 99)) or 1.0
    means = (float(low), float(high) if high > low else float(low) + 1.0)
    parts = [
        here.map(name if name == "truth" else f"mean, {name}", values, "viridis", means, units, case.place)
        for name, values in fields.items()
    ]
    for name, (_, deviation) in case.distributions.items():
        title = f"standard deviation, {short_name(name)}"
        parts.append(here.map(title, deviation, "magma", (0.0, top), units, case.place))
    for name, (mean, deviation) in case.distributions.items() if case.truth is not None else ():
        error = (case.truth - mean) / np.where(deviation > 0, deviation, np.nan)
        title = f"(truth - mean) / standard deviation, {short_name(name)}; beyond 2 is rare"
        parts.append(here.map(title, error, "PuOr", (-4.0, 4.0), "", case.place))
    parts.append(here.map("EFI of all raw members", case.index, "RdBu_r", (-1.0, 1.0), "", case.place))
    return parts
