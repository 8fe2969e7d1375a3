"""Write the tables of the report: the scorecard of each forecast, and all entrants side by side."""

from __future__ import annotations

from html import escape

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.verification.aggregation import Column
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.metrics import METRICS
from ensemble_ml.verification.page import choice, number, table
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.scoring import EFI_WEIGHTED
from ensemble_ml.verification.summary import describe, short_name
from ensemble_ml.verification.values import CLIMATOLOGY

_NO_REGION = ("unweighted", EFI_WEIGHTED)  # weightings of the points that name no set of them


def scorecard(scores: Scores) -> str:
    """Return the scorecard: fields as rows, leads as columns, for each forecast, baseline and region.

    A cell shows the gain in percent and the two scores that it is computed from, and is coloured by the sign of the
    gain, darker where the difference is significant. One card is open and the others are folded; where scripts run, the
    page shows one card at a time, which the reader chooses (`page.SCRIPT`).

    Args:
        scores: The scores.

    Returns:
        HTML; empty if nothing can be compared.
    """
    m, n, best = scores.reduced, scores.full, scores.best_baseline(scores.headline_lead)
    pairs = [("crps", best)] if best else []
    pairs += [("crps", f"raw_{n}"), ("crps", f"raw_{m}"), ("crps", CLIMATOLOGY)]
    pairs += [("crps", other) for other in (*scores.forecasts, *scores.baselines)]
    pairs += [("spread_rmse", f"{kind}_{m}") for kind in ("spread_regression", "size_corrected")]
    pairs += [("rmse", f"raw_{n}")]
    cards = []
    for label in scores.forecasts:
        for metric, other in dict.fromkeys(pair for pair in pairs if pair[1] != label):
            for weighting in scores.state.weightings:
                card = "" if weighting in _NO_REGION else _card(scores, metric, label, other, weighting)
                if card:
                    mark = ", the best baseline" if metric == "crps" and other == best else ""
                    compared = f"{METRICS[metric].long_name} vs {short_name(other)}{mark}"
                    cards.append(([label, compared, "all points" if weighting == "area" else weighting], card))
    text = (
        f"Gain in %, and the scores of the forecast | of what it is compared with. Blue: better, orange: worse; dark: "
        f"the {100 * scores.confidence:g} % interval, which shows when the pointer rests on a cell, excludes zero and "
        f"rests on enough blocks of dates; pale: not sure."
    )
    return f'<h2>Scorecard</h2><p class="note">{text}</p>{choice(["forecast", "score", "region"], cards)}' * bool(cards)


def _card(scores: Scores, metric: str, label: str, other: str, weighting: str) -> str:
    """Return the scorecard of a forecast against another entrant in a region; empty if no cell has a value."""
    gains = [percent for _, percent in scores.difference(metric, label, other, weighting)]
    ours, theirs = (scores.score(metric, entrant, weighting) for entrant in (label, other))
    if not any(np.isfinite(gain.value) for gain in gains):
        return ""
    assert ours is not None and theirs is not None  # where one has no score there are no gains
    position = {column: c for c, column in enumerate(scores.columns)}
    lines, marks = [], []
    for variable, level in dict.fromkeys((column.variable, column.level) for column in scores.columns):
        cells: list[tuple[str, str | None]] = []
        for lead in scores.leads:
            c = position.get(Column(lead, variable, level))
            if c is None or not np.isfinite(gains[c].value):
                cells.append(("", None))
                continue
            gain, values = gains[c], f"{ours.value[c]:.3g} | {theirs.value[c]:.3g}"
            ends = f"{gain.low:+z.1f} to {gain.high:+z.1f} %" if np.isfinite(gain.low) else "no interval"
            cells.append((f'<span title="{ends}">{gain.value:+z.1f}<small>{values}</small></span>', _mark(gain)))
        if any(text for text, _ in cells):
            name = Column(scores.leads[0], variable, level).title
            lines.append([f"{escape(name)}, {escape(registered(variable).units)}", *(text for text, _ in cells)])
            marks.append([None, *(mark for _, mark in cells)])
    heads = ["", *(f"{lead} h" for lead in scores.leads)]
    return table(heads, lines, caption=f"Compared with {describe(other)}", classes=marks)


def _mark(gain: Interval) -> str | None:
    """Return the class of a cell, which says the sign of a gain and whether it is significant."""
    if abs(gain.value) < 0.05:  # a smaller value is shown as 0.0
        return None
    return ("b" if gain.value > 0 else "w") + ("" if gain.excludes(0) else "0")


def entrants(scores: Scores) -> str:
    """Return tables of all entrants: ratios to a reference, area-weighted and not, and raw scores in each way.

    Args:
        scores: The scores.
    """
    lead, full, regression = scores.headline_lead, f"raw_{scores.full}", f"spread_regression_{scores.reduced}"
    pairs = (("crps", full), ("rmse", full), ("spread_rmse", regression), ("held_out_rmse", regression))
    tables = "".join(_ranking(scores, metric, reference, lead) for metric, reference in pairs)
    rest = _raw_table(scores) + _all_scores(scores, lead)
    return f'<h2>Everyone at {lead} h</h2><div class="side">{tables}</div>{rest}' if tables else ""


def _ranking(scores: Scores, metric: str, reference: str, lead: int) -> str:
    """Return a table of all entrants by their ratio to a reference, the best first."""
    columns, found = scores.at_lead(lead), []
    for entrant in scores.entrants():
        ratio = scores.ratio(metric, entrant, reference, columns)
        if ratio is not None:
            plain = scores.unweighted_ratio(metric, entrant, reference, columns)
            mark = "us" if entrant in scores.forecasts else None
            found.append((ratio.value, [escape(_title(scores, entrant)), number(ratio, 3), f"{plain:.3f}"], [mark] * 3))
    if not found:
        return ""
    found.sort(key=lambda item: item[0])
    caption = f"{METRICS[metric].long_name} over that of {short_name(reference)}, geometric mean"
    lines, marks = [line for _, line, _ in found], [mark for _, _, mark in found]
    return table(["", "ratio", "unweighted"], lines, caption=caption, classes=marks)


def _title(scores: Scores, entrant: str) -> str:
    mine = entrant in (*scores.forecasts, *scores.baselines) or scores.full == scores.reduced
    uses_full = entrant.endswith(f"_{scores.full}") and not mine
    return short_name(entrant) + (f" (uses all {scores.full})" if uses_full else "")


def _raw_table(scores: Scores) -> str:
    """Return a table of the raw ensembles' CRPS in each way, as ratios to the one that claims are made against."""
    columns, lines = scores.at_lead(scores.headline_lead), []
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
                ratios = (score.value / base.value)[columns]
            ratios = ratios[np.isfinite(ratios) & (ratios > 0)]
            cells.append(f"{np.exp(np.log(ratios).mean()):.3f}" if ratios.size else "")
        lines.append([f"raw {size}", *cells])
    if not any(cell for line in lines for cell in line[1:]):
        return ""
    heads = ["", "N(m, (1+1/M) s²)", "N(m, s²)", "fair, members", "ordinary, members"]
    text = f"CRPS of the raw ensembles, each way, over that of raw {scores.full} as N(m, (1+1/M) s²)"
    return table(heads, lines, caption=text)


def _all_scores(scores: Scores, lead: int) -> str:
    """Return a folded table of every score of every field at a lead."""
    shown = ("crps", "rmse", "bias", "spread_skill", "spread_rmse", "held_out_rmse")
    heads = ["entrant", "field", *(METRICS[name].long_name for name in shown)]
    lines = []
    for c in scores.at_lead(lead):
        column = scores.columns[c]
        for entrant in scores.entrants():
            cells = [_cell(scores, name, entrant, int(c)) for name in shown]
            if any(cells):
                units = registered(column.variable).units
                lines.append([escape(short_name(entrant)), escape(f"{column.title}, {units}"), *cells])
    return f"<details><summary>All scores at {lead} h</summary>{table(heads, lines)}</details>"


def _cell(scores: Scores, metric: str, entrant: str, column: int) -> str:
    score = scores.score(metric, entrant)
    if score is None or not np.isfinite(score.value[column]):
        return ""
    ends = scores.interval(score.value[column], score.draws[:, column], scores.blocks_of(metric, entrant, [column]))
    return number(ends, 4, general=True)
