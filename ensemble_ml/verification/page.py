"""Provide the parts that the report is built from: definitions in words, style, script, cards and tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from ensemble_ml.verification import svg
from ensemble_ml.verification.baselines import CORRECTIONS
from ensemble_ml.verification.bootstrap import Interval

_CORRECTIONS = "; ".join(f"{name} - {words}" for name, words in CORRECTIONS.items())
DEFINITIONS = {
    "spread": """Sample standard deviation of the members with ddof = 1. The size-corrected spread of M
        members is s_M c4(N)/c4(M), where E[s] = c4 sigma for normal members. The spread regression is a + b s_M + c
        s_clim for each lead, variable and level, fitted by area-weighted least squares; s_clim is the mean of the
        full ensemble's spread over the fit dates at each grid point. While the regression is fitted, the mean leaves
        out the date itself. s_clim alone is the climatology of the spread. The start regression has the spread of the M
        members at lead 0 instead of s_M.""",
    "held-out spread": """Spread of the held-out members, times c4(N)/c4(N-M). The full ensemble shares members
        with the input; the held-out members do not. So the predicted spread S of all members is converted to what it
        implies for the N-M held-out ones: the root of ((N-1) S^2 - (M-1) s_M^2) / (N-M), but at least S/2. This is done
        for the spread regression, and for forecasts that state the M members they were made from. For climatology,
        raw and size-corrected spreads, the start regression, and forecasts made from a member that the ensemble lacks,
        S itself is scored. A forecast has no such score if it was made from a held-out member, or does not state its
        members on every date.""",
    "CRPS": """Continuous ranked probability score. A predicted distribution is scored as it is. A raw ensemble
        is scored as N(m, (1 + 1/M) s^2), which claims are made against. Three others are shown beside it: N(m, s^2);
        the fair CRPS of the members, mean|x - y| - sum over pairs |x_i - x_j| / (M (M - 1)); and the ordinary one with
        M^2. They differ: a perfect 10-member ensemble with sigma 1 scores 0.600, 0.601, 0.564 and 0.621.""",
    "baselines": f"""Fitted on the fit dates with the same members: {_CORRECTIONS}. A variance v from n dates
        (n - 1 in its denominator) predicts with v (1 + 1/n). Shrinkage keeps what odd and even blocks of
        the fit dates agree on. A quantity that cannot be negative, or is a share, is scored as a normal distribution
        and as the variable's own, both with the corrected mean. The one with the lower CRPS on the test dates is taken.
        The best baseline has the lowest geometric mean CRPS among the corrections of the reduced ensemble, climatology
        and the forecasts given as baselines. It is chosen on the test dates themselves, which favours it.""",
    "standard deviation / RMSE": """Root of the mean predicted variance over the RMSE of the mean; for a raw
        ensemble the variance is (M + 1)/M s^2. One is right; below one, too sure.""",
    "calibration": """PIT: the predicted distribution function at the truth, drawn at random where a censored
        distribution has a point mass. Ranks: those of the truth among raw members, where ties are broken at random.
        Brier score and reliability: those of the event that the truth exceeds m + 1.28 s, where m and s are the mean
        and the standard deviation of the cell's climate on the fit dates.""",
    "members together": """Ordinary CRPS, energy and variogram score (order 0.5) of members as vectors over variables
        and levels, where forecasts hold members. ECC: quantiles of the blend correction of the reduced ensemble, in the
        rank order of its members. The quantiles are at (i - 1/2)/M, which gives the least CRPS.""",
    "EFI": """Extreme forecast index of the raw full ensemble, 2/pi int (p - F(q_p)) / sqrt(p (1 - p)) dp, from -1
        to 1. F is the distribution function of the members, q_p the quantile at p of members of other years within
        climate_days of the date. Weighted by |EFI|: ratios of EECRPS, the mean of |EFI| CRPS.""",
    "significance on maps": """A t-test over blocks of dates at each point, false discoveries held at 10 % over all
        points together (Benjamini and Hochberg).""",
    "means": """Every mean is weighted by exact cell area (difference of the sines of the cell's bounds). The
        unweighted mean is shown beside it. Means over variables and levels are geometric means of score ratios.""",
    "intervals": """Block bootstrap over init times, in blocks of block_days or more. A longer gap between dates
        starts a new block. All scores use the same draws. Percentiles are taken further out where blocks are few
        (Student's t), and nothing is sure with fewer than five blocks. Better means that the whole interval of a
        difference is on the good side. A forecast is never called better if it was made from more members than its
        reference, if it does not state its members, or, for the full ensemble's spread, if it was made from all.""",
    "masks": """A point counts where all members, all forecasts and, except for scores of the spread, the truth have
        a value. Points left out are counted.""",
}

STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:#1a1a1a;max-width:1060px;margin:0 auto;
  padding:1rem 1.4rem 4rem;background:#fff}
h1{font-size:1.4rem;margin:0 0 .2rem}
h2{font-size:1.15rem;margin:2.2rem 0 .5rem;border-bottom:1px solid #ddd;padding-bottom:.2rem}
h3{font-size:1rem;margin:1.2rem 0 .3rem}
.sub,.note,caption{color:#555;font-size:.88rem}
.answer{background:#f3f7fa;border-left:4px solid #0072B2;padding:.5rem 1rem;margin:.7rem 0}
.answer p{margin:.2rem 0}
.side{display:flex;flex-wrap:wrap;gap:.4rem 2.2rem}
table{border-collapse:collapse;font-size:.86rem;margin:.5rem 0}
th,td{padding:.2rem .55rem;text-align:right;border-bottom:1px solid #e8e8e8;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
table.wrap td{white-space:normal}
thead th{border-bottom:2px solid #bbb}
caption{text-align:left;padding:.2rem 0}
td small{color:#555;display:block;font-size:.75rem}td:first-child small{white-space:normal;max-width:15rem}
.b{background:#9cc7e6;font-weight:600}.w{background:#f7c77a;font-weight:600}.us{font-weight:600}
.b0{background:#e9f2f9}.w0{background:#fdf3e2}
#bar{position:sticky;top:0;z-index:1;background:#fff;border-bottom:1px solid #bbb;margin:0;padding:.3rem 0}
#bar label{margin-right:1rem;white-space:nowrap}#bar select{max-width:13rem}
.choice h4{font-size:.92rem;margin:.6rem 0 .2rem}
figure{margin:.3rem 0}figcaption{font-size:.85rem}
.charts{display:flex;flex-wrap:wrap;gap:.4rem 1.4rem;align-items:flex-start}
.chart{width:400px;max-width:100%}.map{width:330px;max-width:100%}figure svg{display:block;width:100%}
.chart text{font-size:11px;text-anchor:middle;stroke:none}.chart .y{text-anchor:end;dominant-baseline:middle}
.g{stroke:#e4e4e4}.r{stroke:#6b6b6b;stroke-dasharray:5 4}.l{fill:none;stroke-width:1.6}
.p{stroke-width:6;stroke-linecap:round}circle{fill:currentColor;fill-opacity:.75;stroke:none}
.x{fill:none;stroke:#000;stroke-width:2;vector-effect:non-scaling-stroke}
.legend{margin:.1rem 0;font-size:.78rem;color:#333}.legend span{margin-right:.8rem;white-space:nowrap}
.legend span svg{display:inline;width:26px;height:8px;margin-right:.3rem}
.legend i{display:inline-block;width:6rem;height:.7rem;vertical-align:middle;border:1px solid #999}
.card td{cursor:pointer}.gains{display:flex;gap:.6rem;overflow-x:auto}.gains svg{width:350px;flex:none}
.gains span{display:block;line-height:20px;white-space:nowrap;font-size:.82rem;text-align:right}
.gains text{font-size:11px;text-anchor:middle}.gains .e{stroke-width:2.2}
.better{stroke:#0072B2;color:#0072B2}.worse{stroke:#E69F00;color:#E69F00}.unsure{stroke:#6b6b6b}
circle.unsure{fill:#fff;fill-opacity:1;stroke:#6b6b6b}
.map svg{background:#bbb;border:1px solid #777}image{image-rendering:pixelated}
#coast{fill:none;stroke:#000;stroke-width:.8;vector-effect:non-scaling-stroke}
.shared{position:absolute;width:0;height:0}
.scroll{overflow-x:auto}
dt{font-weight:600;margin-top:.5rem}dd{margin:0 0 0 1rem}
details summary{cursor:pointer;color:#0072B2;margin:.3rem 0}
.yes{color:#00634a;font-weight:600}.no{color:#a64a00;font-weight:600}
"""

# The whole page has one selection. Each choice is a set of cards and shows the one that belongs to the selection.
# Without a script, it shows its first card, and the others folded below it.
SCRIPT = """
const bar = document.getElementById("bar"), selects = {};
const boxes = [...document.querySelectorAll(".choice")].map(box => {
  const cards = [...box.querySelectorAll("[data-key]")], words = JSON.parse(box.dataset.words);
  const first = cards[0].dataset.key.split(" ");
  Object.entries(words).forEach(([word, options], i) => {
    const select = selects[word] ||= document.createElement("select");
    const known = [...select.options].map(option => option.value), empty = !known.length;
    options.filter(option => !known.includes(option)).forEach(option => select.add(new Option(option)));
    if (empty) select.value = options[first[i]];
  });
  return {box, words, cards: new Map(cards.map(card => [card.dataset.key, card]))};
});
function show() {
  for (const {box, words, cards} of boxes) {
    const key = Object.entries(words).map(([word, options]) => Math.max(0, options.indexOf(selects[word].value)));
    box.replaceChildren(cards.get(key.join(" ")) || "There are no scores for this selection.");
  }
  const region = [...document.querySelectorAll("[data-region]")].find(g => g.dataset.region === selects.region?.value);
  document.querySelectorAll(".veil").forEach(use => use.setAttribute("href", region ? "#" + region.id : "#none"));
}
document.addEventListener("click", event => {
  const cell = event.target.closest(".card td"), table = cell?.closest("table");
  if (!cell || !cell.cellIndex) return;
  const head = [...table.tHead.rows].at(-1).cells[cell.cellIndex];
  const chosen = {field: cell.parentElement.cells[0].textContent, lead: head.textContent, forecast: head.title};
  for (const [word, value] of Object.entries(chosen))
    if ([...selects[word]?.options || []].some(option => option.value === value)) selects[word].value = value;
  show();
});
for (const word of ["forecast", "score", "region", "field", "lead"].filter(word => selects[word])) {
  const label = document.createElement("label");
  label.append(word + " ", selects[word]);
  bar.append(label);
  selects[word].onchange = show;
}
bar.hidden = !boxes.length;
show();
"""

# The parts of the selection. All choices of a page that have the same part follow the same selection.
FORECAST, SCORE, REGION, FIELD, LEAD = "forecast", "score", "region", "field", "lead"


def choice(words: Sequence[str], cards: Mapping[Any, str], first: tuple[str, ...] | None = None) -> str:
    """Return cards as HTML, of which the page shows the selected one; empty without cards.

    Args:
        words: Name of each part of a key, such as `REGION`.
        cards: HTML of each card by its key, a tuple with one text for each of `words`. Empty cards are left out.
        first: Key of the card that is shown first. If there is no such card, the first of `cards` is.
    """
    cards = {key: card for key, card in cards.items() if card}
    if not cards:
        return ""
    first = first if first in cards else next(iter(cards))
    options = [list(dict.fromkeys(key[i] for key in cards)) for i in range(len(words))]
    made = {
        key: f'<section data-key="{" ".join(str(options[i].index(part)) for i, part in enumerate(key))}">'
        f"<h4>{escape(', '.join(key))}</h4>{card}</section>"
        for key, card in cards.items()
    }
    shown = made.pop(first)
    rest = f"<details><summary>{len(made)} more</summary>{''.join(made.values())}</details>" if made else ""
    listed = escape(json.dumps(dict(zip(words, options, strict=True))))
    return f'<div class="choice" data-words="{listed}">{shown}{rest}</div>'


def page(title: str, body: str) -> str:
    """Return a whole HTML document, of a title as text and a body as HTML.

    Its empty icon keeps a browser from asking a server for one.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}{svg.style()}</style></head><body>\n{body}\n<script>{SCRIPT}</script></body></html>\n"
    )


def note(text: str) -> str:
    """Return a remark in small type as HTML; empty without a text."""
    return f'<p class="note">{escape(text)}</p>' if text else ""


def number(value: Interval, digits: int = 1, general: bool = False) -> str:
    """Return a value with its interval below it, as HTML.

    Args:
        value: The value. Its interval is not shown if it is NaN or has length zero.
        digits: Number of digits after the point, or of significant ones if `general`.
        general: Use significant digits.
    """
    # The z in the format drops the minus sign of a number that rounds to zero.
    form: Callable[[float], str] = (lambda x: f"{x:.{digits}g}") if general else (lambda x: f"{x:z.{digits}f}")
    if not np.isfinite(value.low) or value.low == value.high:
        return form(value.value)
    return f"{form(value.value)}<small>{form(value.low)} to {form(value.high)}</small>"


def table(
    heads: Sequence[str],
    lines: list[list[str]],
    *,
    caption: str = "",
    classes: list[list[str | None]] | None = None,
    wrap: bool = False,
    groups: Mapping[str, int] | None = None,
) -> str:
    """Return a table as HTML.

    Args:
        heads: Titles of the columns as text.
        lines: Cells as HTML.
        caption: Caption as text.
        classes: CSS class of each cell, or None.
        wrap: Allow line breaks within cells.
        groups: Titles above all columns except the first, with the number of columns under each.
    """
    body = []
    for i, line in enumerate(lines):
        marks = classes[i] if classes else [None] * len(line)
        cells = (f"<td{f' class={mark}' if mark else ''}>{cell}</td>" for cell, mark in zip(line, marks, strict=True))
        body.append(f"<tr>{''.join(cells)}</tr>")
    # The HTML attribute `title` of a column is the name of its group. Browsers show it, and the script reads it.
    groups = groups or {}
    owners = ["", *(escape(name) for name, width in groups.items() for _ in range(width))]
    over = "".join(f'<th colspan="{width}" scope="colgroup">{escape(name)}</th>' for name, width in groups.items())
    head = f"<tr><th></th>{over}</tr>" if over else ""
    titles = [f' title="{owner}"' if owner else "" for owner in owners] if over else [""] * len(heads)
    head += f"<tr>{''.join(f'<th{t}>{escape(str(h))}</th>' for t, h in zip(titles, heads, strict=True))}</tr>"
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = ' class="wrap"' if wrap else ""
    rows = "".join(body)
    return f'<div class="scroll"><table{kind}>{title}<thead>{head}</thead><tbody>{rows}</tbody></table></div>'
