"""Write the tables of the report: the scorecard of each forecast, and all forecasts and baselines side by side.

An entrant is a forecast, a raw ensemble or a baseline.
"""

from __future__ import annotations

from html import escape

import numpy as np

from ensemble_ml.verification.aggregation import METRICS, Column, geometric_mean
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.page import FIELD, LEAD, REGION, SCORE, choice, note, number, table
from ensemble_ml.verification.scores import Scores, gain
from ensemble_ml.verification.scoring import EFI_WEIGHTED, EVERYWHERE
from ensemble_ml.verification.summary import describe, short_name
from ensemble_ml.verification.values import CLIMATOLOGY

_NO_REGION = ("unweighted", EFI_WEIGHTED)  # weightings that do not stand for a region


def regions(scores: Scores) -> dict[str, str]:
    """Return the weightings of regions, by the name of the region in the report."""
    found = [weighting for weighting in scores.state.weightings if weighting not in _NO_REGION]
    return {EVERYWHERE if weighting == "area" else weighting: weighting for weighting in found}


def scorecard(scores: Scores) -> str:
    """Return scorecards, one for each score, reference and region, of which the page shows the selected one.

    Rows are fields and columns are leads, with a group of columns for each forecast. A cell shows the gain in percent
    and the two scores that it is computed from. It is coloured by the sign of the gain, darker where the gain is
    significant. All comparisons, also those between forecasts, use the same bootstrap draws of init times.
    The result is empty if nothing can be compared.
    """
    m, n, best = scores.reduced, scores.full, scores.best_baseline(scores.headline_lead)
    several = scores.forecasts if len(scores.forecasts) > 1 else ()
    pairs = [("crps", other) for other in (*several[:1], *filter(None, [best]))]
    pairs += [("crps", f"raw_{n}"), ("crps", f"raw_{m}"), ("crps", CLIMATOLOGY)]
    pairs += [("crps", other) for other in (*several, *scores.baselines)]
    pairs += [("spread_rmse", other) for other in (f"spread_regression_{m}", f"size_corrected_{m}", *several)]
    pairs += [("rmse", other) for other in (f"raw_{n}", *several)]
    cards: dict[tuple[str, str], str] = {}
    for metric, other in dict.fromkeys(pairs):
        mark = ", the best baseline" if metric == "crps" and other == best else ""
        compared = f"{METRICS[metric].long_name} vs {short_name(other)}{mark}"
        cards |= {
            (compared, words): _card(scores, metric, other, weighting) for words, weighting in regions(scores).items()
        }
    shown = choice([SCORE, REGION], cards)
    text = (
        "Each cell shows the gain in %, and below it the score of the forecast | the score of the reference. Blue is "
        f"better, orange is worse. Dark cells are significant: the {100 * scores.confidence:g} % interval excludes "
        "zero and rests on enough blocks of dates. Rest the pointer on a cell to see the interval. Click on it to "
        "choose its field and lead for the page."
    )
    return f'<h2>Scorecard</h2>{note(text)}<div class="card">{shown}</div>' if shown else ""


def _card(scores: Scores, metric: str, other: str, weighting: str) -> str:
    """Return the scorecard against the entrant `other` in a region; empty if no cell has a value."""
    gains = {
        label: [percent for _, percent in scores.difference(metric, label, other, weighting)]
        for label in scores.forecasts
        if label != other
    }
    gains = {label: found for label, found in gains.items() if any(np.isfinite(one.value) for one in found)}
    if not gains:
        return ""
    names = list(dict.fromkeys(column.label for column in scores.columns))
    position = {column.key: c for c, column in enumerate(scores.columns)}
    lines, marks = [], []
    whole = [
        _gain_cell(gain(scores.ratio(metric, label, other, scores.at_lead(lead), weighting)))
        for label in gains
        for lead in scores.leads
    ]
    if len(names) > 1:
        lines.append(["geometric mean of all fields", *(text for text, _ in whole)])
        marks.append([None, *(mark for _, mark in whole)])
    for name in names:
        cells = []
        for label, found in gains.items():
            ours, theirs = (scores.score(metric, entrant, weighting) for entrant in (label, other))
            assert ours is not None and theirs is not None  # without one of the scores there would be no gains
            for lead in scores.leads:
                c = position.get((name, f"{lead} h"))
                values = "" if c is None else f"{ours.value[c]:.3g} | {theirs.value[c]:.3g}"
                cells.append(_gain_cell(None if c is None else found[c], values))
        if any(text for text, _ in cells):
            lines.append([escape(name), *(text for text, _ in cells)])
            marks.append([None, *(mark for _, mark in cells)])
    heads = ["", *(f"{lead} h" for _ in gains for lead in scores.leads)]
    groups = {label: len(scores.leads) for label in gains} if len(scores.forecasts) > 1 else {}
    return table(heads, lines, caption=f"Compared with {describe(other)}", classes=marks, groups=groups)


def _gain_cell(found: Interval | None, values: str = "") -> tuple[str, str | None]:
    """Return a gain in percent as a cell, with its class; both are empty without a value."""
    if found is None or not np.isfinite(found.value):
        return "", None
    ends = f"{found.low:+z.1f} to {found.high:+z.1f} %" if np.isfinite(found.low) else "no interval"
    small = f"<small>{values}</small>" if values else ""
    return f'<span title="{ends}">{found.value:+z.1f}{small}</span>', _mark(found)


def _mark(found: Interval) -> str | None:
    """Return the CSS class of a cell: b for a gain, w for a loss, followed by 0 if it is not significant."""
    if abs(found.value) < 0.05:  # such a value is shown as 0.0
        return None
    return ("b" if found.value > 0 else "w") + ("" if found.excludes(0) else "0")


def entrants(scores: Scores, first: Column) -> str:
    """Return tables of all entrants: ratios to a reference, area-weighted and unweighted, and the scores of each field.

    The page begins with the field and lead `first`. The result is empty if nothing can be compared.
    """
    full, regression = f"raw_{scores.full}", f"spread_regression_{scores.reduced}"
    pairs = (("crps", full), ("rmse", full), ("spread_rmse", regression), ("held_out_rmse", regression))
    cards = {}
    for lead in scores.leads:
        tables = "".join(_ranking(scores, metric, reference, lead) for metric, reference in pairs)
        cards[(f"{lead} h",)] = f'<div class="side">{tables}</div>{_raw_table(scores, lead)}' if tables else ""
    means = choice([LEAD], cards, first.key[1:])
    every = choice(
        [FIELD, LEAD], {column.key: _all_scores(scores, c) for c, column in enumerate(scores.columns)}, first.key
    )
    return f"<h2>All forecasts and baselines</h2>{means}{every}" if means else ""


def _ranking(scores: Scores, metric: str, reference: str, lead: int) -> str:
    """Return a table of all entrants by their ratio to a reference, the best first."""
    columns, found = scores.at_lead(lead), []
    for entrant in scores.entrants():
        ratio = scores.ratio(metric, entrant, reference, columns)
        if ratio is not None:
            plain = scores.unweighted_ratio(metric, entrant, reference, columns)
            mark = "us" if entrant in scores.forecasts else None
            found.append((ratio.value, [_title(scores, entrant), number(ratio, 3), f"{plain:.3f}"], [mark] * 3))
    if not found:
        return ""
    found.sort(key=lambda item: item[0])
    caption = f"{METRICS[metric].long_name} over that of {short_name(reference)}, geometric mean"
    lines, marks = [line for _, line, _ in found], [mark for _, _, mark in found]
    return table(["", "ratio", "unweighted"], lines, caption=caption, classes=marks)


def _title(scores: Scores, entrant: str) -> str:
    """Return the name of an entrant as a cell, with what it stands for."""
    mine = entrant in (*scores.forecasts, *scores.baselines) or scores.full == scores.reduced
    uses_full = entrant.endswith(f"_{scores.full}") and not mine
    note = f" (uses all {scores.full})" if uses_full else ""
    words = describe(entrant)
    return escape(short_name(entrant) + note) + (f"<small>{escape(words)}</small>" if words != entrant else "")


def _raw_table(scores: Scores, lead: int) -> str:
    """Return a table of the raw ensembles' CRPS by each estimator.

    The values are ratios to the CRPS of the full ensemble as N(m, (1+1/M) s²), which claims are made against.
    """
    columns, lines = scores.at_lead(lead), []
    ways = ("crps", "crps_normal", "crps_fair", "crps_members")
    base = scores.score("crps", f"raw_{scores.full}")
    for size in dict.fromkeys((scores.reduced, scores.full)):
        cells = []
        for way in ways:
            score = scores.score(way, f"raw_{size}")
            if score is None or base is None:
                cells.append("")
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                mean = float(geometric_mean(score.value / base.value, columns))
            cells.append(f"{mean:.3f}" if np.isfinite(mean) else "")
        lines.append([f"raw {size}", *cells])
    if not any(cell for line in lines for cell in line[1:]):
        return ""
    heads = ["", "N(m, (1+1/M) s²)", "N(m, s²)", "fair, members", "ordinary, members"]
    text = f"CRPS of the raw ensembles by each estimator, divided by that of raw {scores.full} as N(m, (1+1/M) s²)"
    return table(heads, lines, caption=text)


def _all_scores(scores: Scores, column: int) -> str:
    """Return a table of the scores of all entrants in one field with intervals, in its units but `spread_skill`."""
    shown = ("crps", "rmse", "bias", "spread_skill", "spread_rmse", "held_out_rmse")
    heads, lines = ["", *(METRICS[name].long_name for name in shown)], []
    for entrant in scores.entrants():
        found = [scores.interval_of(name, entrant, column) for name in shown]
        if any(found):
            cells = ["" if one is None else number(one, 4, general=True) for one in found]
            lines.append([_title(scores, entrant), *cells])
    return table(heads, lines) if lines else ""
