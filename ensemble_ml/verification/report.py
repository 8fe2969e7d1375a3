"""Compose the HTML report, a single file that needs no network. Its script only shows the cards that are selected.

Its first screen answers whether the forecast is better, and how sure that is. Details follow below.
"""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from ensemble_ml.grid import Grid
from ensemble_ml.verification import charts, rankings, sections
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.case import Case
from ensemble_ml.verification.page import number, page, table
from ensemble_ml.verification.regions import region_masks
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.scoring import Tables
from ensemble_ml.verification.svg import Atlas
from ensemble_ml.wording import SHORT_TEXT, dates_text, shortened

_SOURCES = 3  # number of checkpoints that the line of a forecast names
_DIGEST = 12  # hex digits of a checkpoint's checksum


def write_report(
    content: dict[str, Any], scores: Scores, tables: Tables, case: Case | None, grid: Grid, land: np.ndarray | None
) -> str:
    """Compose the page.

    Args:
        content: The content of scores.json.
        scores: The scores with their draws.
        tables: Histograms, and sums for maps and bins.
        case: The most unusual weather of the test dates, or None.
        grid: Grid of the fields.
        land: (Y, X) land fraction for coasts and for the regions land and sea, or None.

    Returns:
        The text of an HTML page.
    """
    pictures, first = tables.pictures, scores.columns[tables.pictures.headline[0]]
    atlas = Atlas(grid, pictures.size, land, region_masks(grid, land, content["settings"]["regions"]))
    parts = [_top(content, scores), sections.strata(content, scores)]
    parts += [charts.curves(scores, first), charts.maps(scores, pictures, atlas), sections.by_members(scores)]
    parts += [rankings.entrants(scores, first), charts.calibration(scores, tables.calibration, pictures)]
    parts += [sections.together(content, scores)]
    parts += [sections.extreme(case, scores, atlas), _background(content)]
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
