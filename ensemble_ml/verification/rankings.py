"""Write the tables of the report: where a forecast gains, and all entrants side by side."""

from __future__ import annotations

from html import escape

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.verification.aggregation import Column
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.metrics import METRICS
from ensemble_ml.verification.page import number, table
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.summary import short_name


def where(scores: Scores) -> str:
    """Return tables of gains, variables by levels, for each forecast and lead.

    The tables of the headline lead are open, the others are folded.

    Args:
        scores: The scores.
    """
    parts = []
    for label in scores.forecasts:
        for lead in reversed(scores.leads):
            found = "".join(_gain_tables(scores, label, lead))
            if found:
                opened = " open" if lead == scores.headline_lead else ""
                title = f"{escape(label)}, {lead} h"
                parts.append(f'<details{opened}><summary>{title}</summary><div class="side">{found}</div></details>')
    return f"<h2>Where: gain by variable and level, %</h2>{''.join(parts)}" if parts else ""


def _gain_tables(scores: Scores, label: str, lead: int) -> list[str]:
    """Return the tables of gains of a forecast at a lead, one for each reference."""
    best = scores.best_baseline(lead)
    wanted = [("crps", best, f"CRPS vs {short_name(best)}, the best baseline")] if best else []
    wanted.append(("crps", f"raw_{scores.full}", f"CRPS vs raw {scores.full}"))
    for kind in ("spread_regression", "size_corrected"):
        other = f"{kind}_{scores.reduced}"
        wanted.append(("spread_rmse", other, f"RMSE of spread vs {short_name(other)}"))
    differences = ((scores.difference(metric, label, other), words) for metric, other, words in wanted)
    return [_field_table(scores, found, lead, words) for found, words in differences]


def _field_table(scores: Scores, differences: list[tuple[Interval, Interval]], lead: int, caption: str) -> str:
    """Return a table with variables as rows and levels as columns; empty if no value is finite."""
    at = {
        column: differences[c][1]
        for c, column in enumerate(scores.columns)
        if column.lead_hours == lead and differences
    }
    at = {column: value for column, value in at.items() if np.isfinite(value.value)}
    if not at:
        return ""
    levels = sorted({column.level for column in at if column.level is not None})
    heads = [str(level) for level in levels] + (["surface"] if any(c.level is None for c in at) else [])
    keys: list[int | None] = [*levels, None][: len(heads)]
    lines = []
    for name in dict.fromkeys(column.variable for column in at):
        cells = (at.get(Column(lead, name, key)) for key in keys)
        lines.append([escape(name), *("" if cell is None else number(cell) for cell in cells)])
    marks = [[None, *(_mark(at.get(Column(lead, line[0], key))) for key in keys)] for line in lines]
    return table(["variable", *heads], lines, caption=caption, classes=marks)


def _mark(cell: Interval | None) -> str | None:
    if cell is None or not cell.excludes(0) or abs(cell.value) < 0.05:  # a smaller value is shown as 0.0
        return None
    return "b" if cell.value > 0 else "w"


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
                lines.append([escape(short_name(entrant)), f"{column.name} ({units})", *cells])
    return f"<details><summary>All scores at {lead} h</summary>{table(heads, lines)}</details>"


def _cell(scores: Scores, metric: str, entrant: str, column: int) -> str:
    score = scores.score(metric, entrant)
    if score is None or not np.isfinite(score.value[column]):
        return ""
    ends = scores.interval(score.value[column], score.draws[:, column], scores.blocks_of(metric, entrant, [column]))
    return number(ends, 4, general=True)
