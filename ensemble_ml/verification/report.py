"""Compose the HTML report, a single file that needs no network. Its script only shows the cards that are selected.

Its first screen answers whether the forecast is better, and how sure that is. Details follow below. Strata, scores of
members as vectors, ensemble sizes and the extreme case are composed here; `charts` and `rankings` compose most others.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import Any

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.grid import Grid
from ensemble_ml.verification import charts, rankings
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.page import FORECAST, LEAD, choice, note, number, page, table
from ensemble_ml.verification.scores import Scores, gain
from ensemble_ml.verification.scoring import Tables
from ensemble_ml.verification.strata import Case, region_masks
from ensemble_ml.verification.summary import explained, short_name
from ensemble_ml.verification.svg import Atlas, Curve, chart
from ensemble_ml.wording import SHORT_TEXT, dates_text, shortened

_SOURCES = 3  # most sources, and most checkpoints, that the line of a forecast names
_DIGEST = 12  # hex digits of a checkpoint's checksum


def write_report(
    content: dict[str, Any], scores: Scores, tables: Tables, case: Case | None, grid: Grid, land: np.ndarray | None
) -> str:
    """Return the page as HTML, given the content of scores.json and what it was made from.

    `case` is the most unusual weather of the test dates, or None. `land` is the land fraction (Y, X) for coasts and for
    the regions land and sea, or None.
    """
    pictures, first = tables.pictures, scores.columns[tables.pictures.headline[0]]
    atlas = Atlas(grid, pictures.size, land, region_masks(grid, land, content["settings"]["regions"]))
    parts = [_top(content, scores), _strata(content, scores)]
    parts += [charts.curves(scores, first), charts.maps(scores, pictures, atlas), _by_members(scores)]
    parts += [rankings.entrants(scores, first), charts.calibration(scores, tables.calibration, pictures)]
    parts += [_together(content, scores)]
    parts += [extreme_section(case, scores, atlas), _background(content)]
    return page("Forecast evaluation", "\n".join([atlas.shared(), *parts]))


def _top(content: dict[str, Any], scores: Scores) -> str:
    """Return the first screen: answer, scorecard, a chart of gains, claims, what made the forecasts, and notes."""
    dates = content["dates"]
    test = dates["test"]
    span = test[0] if len(test) == 1 else f"{test[0]} to {test[-1]}"
    # The first line says what the forecast was made from, because a gain on fewer members means something else.
    sizes = sorted({scores.given[label] for label in scores.forecasts if label in scores.given})
    beside = "" if sizes == [scores.reduced] else f", beside a raw ensemble of {scores.reduced}"
    stated = f"{', '.join(map(str, sizes))} of {scores.full} members" if sizes else "members that are not stated"
    sub = (
        f"From {stated}{beside}. {len(test)} test date{'s' * (len(test) != 1)} ({span}), "
        f"baselines fitted on {len(dates['fit'])} dates, {content['ensemble']['grid']}, area-weighted. "
        "Blue: surely better; orange: surely worse; grey: the interval holds zero, or rests on few blocks, or the "
        "forecast has more input."
    )
    lines = "".join(f"<p>{escape(line)}</p>" for line in content["headline"])
    notes = "".join(f"<li>{escape(note)}</li>" for note in content["notes"])
    figure = charts.headline(scores)
    return (
        f'<h1>Is the forecast better, where, by how much, how sure?</h1><p class="sub">{escape(sub)}</p>'
        f'<div class="answer">{lines}</div>'
        '<p id="bar" role="group" aria-label="What the page shows" hidden></p>'
        f"{rankings.scorecard(scores)}{figure}{_claims(content)}{_made_by(content)}"
        + (f'<ul class="note">{notes}</ul>' if notes else "")
    )


def _made_by(content: dict[str, Any]) -> str:
    """Return a line for each forecast: the program, checkpoint, model and step that made it, as its files state."""
    lines = []
    for one in content["forecasts"]:
        made = shortened(one["sources"], _SOURCES) or "its files do not say what made them"
        sums = shortened([digest[:_DIGEST] for digest in one["checkpoints"]], _SOURCES)
        made += f"; checkpoint sha256 {sums}" if sums else ""
        lines.append(f'<p class="sub"><b>{escape(one["label"])}</b>: {escape(made)}</p>')
    return "".join(lines)


def _claims(content: dict[str, Any]) -> str:
    """Return a folded table of the claims: what was measured, whether that is a gain at all, and how sure it is.

    The targets in scores.json are left out. They are those of this project's own benchmark.
    """
    if not content["claims"]:
        return ""
    lines = []
    for claim in content["claims"]:
        better = claim["value"] < 1 if claim["unit"] == "ratio" else claim["value"] > 0
        held = '<span class="yes">yes</span>' if better else '<span class="no">no</span>'
        why = claim["advantage"] or ("" if claim["enough_blocks"] else "few blocks")
        sure = "yes" if claim["certain"] else f"no, {escape(why)}" if why else "no"
        digits = 3 if claim["unit"] == "ratio" else 1
        figure = number(Interval(claim["value"], claim["low"], claim["high"]), digits)
        lines.append([escape(claim["claim"]), f"{figure} {claim['unit'].replace('ratio', '')}", held, sure])
    listed = table(["claim", "measured", "better", "certain"], lines, wrap=True)
    return f"<details><summary>The claims, one by one</summary>{listed}</details>"


def _background(content: dict[str, Any]) -> str:
    """Return the definitions, and the folded lists of dates, points left out and settings."""
    definitions = content["definitions"].items()
    words = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in definitions)
    dates = content["dates"]
    # Dropped dates are grouped by reason, because hundreds of dates with the same reason would hide the others.
    reasons: dict[str, list[str]] = {}
    for one in dates["dropped"]:
        reasons.setdefault(one["reason"], []).append(one["date"])
    dropped = "; ".join(f"{_dates(some)} ({reason})" for reason, some in reasons.items()) or "none"
    listed = (
        f"<p><b>Test dates</b> {_dates(dates['test'])}</p>"
        f"<p><b>Fit dates</b> {_dates(dates['fit'])}</p>"
        f"<p><b>Not scored</b> {escape(dropped)}</p>"
    )
    settings = table(["setting", "value"], [[escape(str(k)), escape(str(v))] for k, v in content["settings"].items()])
    left_out = content["left_out"]
    # The page shows 200 entries at most. scores.json holds all of them.
    lines = [[escape(str(v)) for v in entry.values()] for entry in left_out[:200]]
    masks = table(list(left_out[0]), lines) if left_out else "<p>No point was left out.</p>"
    return (
        f"<h2>Definitions</h2><dl>{words}</dl><h2>Dates, masks and settings</h2><details><summary>Show</summary>"
        f"{listed}{masks}{settings}</details>"
    )


def _dates(dates: list[str]) -> str:
    """Return the number of dates, the first and the last, and all of them if they make a short text (`dates_text`)."""
    if not dates:
        return "none"
    text = dates_text(dates)
    every = text if len(text) <= SHORT_TEXT else "all in scores.json"
    return f"{len(dates)}, {min(dates)} to {max(dates)}: {every}"


def _strata(content: dict[str, Any], scores: Scores) -> str:
    """Return a section on the gain in regions, seasons and unusual weather; empty if there are no strata."""
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
        found = [(by_head.get(head), barred) for head, barred in barred_of.items()]
        gains = [
            gain(Interval(row["ratio"], row["low"], row["high"], row["blocks"], barred)) if row else None
            for row, barred in found
        ]
        first = next(iter(by_head.values()))
        dates = f"{first['dates']} ({first['blocks']})"
        lines.append([escape(name), dates, *("" if gain is None else number(gain) for gain in gains)])
        marks.append([None, None, *(_mark(gain) for gain in gains)])
    words = {"crps": "CRPS", "spread_rmse": "spread RMSE"}
    titles = [f"{words[metric]} vs {short_name(reference)}" for metric, reference in heads]
    caption = f"gain in %, geometric mean over variables and levels. {explained(other for _, other in heads)}"
    return table(["stratum", "dates (blocks)", *titles], lines, caption=caption, classes=marks) if lines else ""


def _together(content: dict[str, Any], scores: Scores) -> str:
    """Return a section on the scores of members as vectors; empty if no forecast holds members."""
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
            gain(Interval(
                row[f"over_{o}"], row[f"over_{o}_low"], row[f"over_{o}_high"], row["blocks"],
                scores.barred(row["metric"], entrant, o),
            ))
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


def _mark(gain: Interval | None) -> str | None:
    """Return the CSS class of a gain that is surely positive ("b") or negative ("w"), None for any other."""
    if gain is None or not gain.excludes(0):
        return None
    return "b" if gain.value > 0 else "w"


def _by_members(scores: Scores) -> str:
    """Return a section with scores plotted against the number of members that forecasts were made from.

    Baselines, and forecasts that do not state their members, are not shown. It is empty if fewer than two different
    numbers are stated.
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


def extreme_section(case: Case | None, scores: Scores, atlas: Atlas) -> str:
    """Return a section with maps of the most unusual weather: raw ensembles, forecasts and truth side by side.

    It is empty without a case, or if the part of the grid that it shows has a single row or column.
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
    fields = {f"mean, {short_name(name)}": mean for name, (mean, _) in case.distributions.items()}
    fields |= {} if case.truth is None else {"truth": case.truth}
    # All maps of a kind share one colour scale, so that they can be compared.
    low, high = np.nanpercentile(np.stack(list(fields.values())), [1, 99])
    top = float(np.nanpercentile(np.stack([deviation for _, deviation in case.distributions.values()]), 99)) or 1.0
    means = (float(low), float(high) if high > low else float(low) + 1.0)
    parts = [here.map(title, values, "viridis", means, units, case.place) for title, values in fields.items()]
    for name, (_, deviation) in case.distributions.items():
        title = f"standard deviation, {short_name(name)}"
        parts.append(here.map(title, deviation, "magma", (0.0, top), units, case.place))
    for name, (mean, deviation) in case.distributions.items() if case.truth is not None else ():
        error = (case.truth - mean) / np.where(deviation > 0, deviation, np.nan)
        title = f"(truth - mean) / standard deviation, {short_name(name)}; beyond 2 is rare"
        parts.append(here.map(title, error, "PuOr", (-4.0, 4.0), "", case.place))
    parts.append(here.map("EFI of all raw members", case.index, "RdBu_r", (-1.0, 1.0), "", case.place))
    return parts
