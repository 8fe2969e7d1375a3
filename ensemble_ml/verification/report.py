"""The HTML report: one file that needs no network and no script; its first screen says better or not, and how sure."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.grid import Grid
from ensemble_ml.verification import plots, sections
from ensemble_ml.verification.aggregation import Column
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.case import Case
from ensemble_ml.verification.metrics import METRICS
from ensemble_ml.verification.page import image, number, page, table
from ensemble_ml.verification.pictures import Bins, Pictures
from ensemble_ml.verification.scores import Scores, gain
from ensemble_ml.verification.scoring import Tables
from ensemble_ml.verification.significance import RATE, p_values, significant
from ensemble_ml.verification.statistics import Key, Statistic
from ensemble_ml.verification.summary import short_name


def write_report(
    content: dict[str, Any], scores: Scores, tables: Tables, case: Case | None, grid: Grid, land: np.ndarray | None
) -> str:
    """Compose the page.

    Args:
        content: what scores.json holds.
        scores: the scores with their draws.
        tables: histograms, and sums for maps and bins.
        case: the most unusual test date, or None.
        grid: where the maps lie.
        land: (Y, X) land fraction for coasts, or None.
    """
    pictures = tables.pictures
    parts = [_top(content, scores)]
    parts += [_where(scores), sections.strata(content, scores), _maps(scores, pictures, grid, land)]
    parts += [_entrants(scores), _curves(scores), sections.by_members(content, scores)]
    parts += [_bins(scores, pictures), sections.calibration(scores, tables.calibration, pictures.headline)]
    parts += [sections.extreme(case, scores, grid, land), _background(content)]
    return page("Forecast evaluation", "\n".join(parts))


def _top(content: dict[str, Any], scores: Scores) -> str:
    dates = content["dates"]
    test = dates["test"]
    span = test[0] if len(test) == 1 else f"{test[0]} to {test[-1]}"
    sub = (
        f"From {scores.reduced} of {scores.full} members. {len(test)} test dates ({span}), baselines fitted on "
        f"{len(dates['fit'])} dates, {content['ensemble']['grid']}, area-weighted. "
        f"Blue: surely better; orange: surely worse; grey: the interval holds zero."
    )
    lines = "".join(f"<p>{escape(line)}</p>" for line in content["headline"])
    notes = "".join(f"<li>{escape(note)}</li>" for note in content["notes"])
    figure = _headline_figure(scores)
    return (
        f'<h1>Is the forecast better, where, by how much, how sure?</h1><p class="sub">{escape(sub)}</p>'
        f'<div class="answer">{lines}</div>{figure}{_claims(content)}'
        + (f'<ul class="note">{notes}</ul>' if notes else "")
    )


def _headline_figure(scores: Scores) -> str:
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
    text = f"Gain at {lead} h, geometric mean over variables and levels, with intervals"
    return image(plots.gains(entries), text, width=760)


def _claims(content: dict[str, Any]) -> str:
    if not content["claims"]:
        return ""
    lines = []
    for claim in content["claims"]:
        held = '<span class="yes">yes</span>' if claim["holds"] else '<span class="no">no</span>'
        sure = (
            "yes"
            if claim["certain"] and claim["enough_blocks"]
            else "yes, but few blocks"
            if claim["certain"]
            else "no"
        )
        sign = "&lt;" if claim["unit"] == "ratio" else "&ge;" if claim["target"] else "&gt;"
        digits = 3 if claim["unit"] == "ratio" else 1
        figure = number(Interval(claim["value"], claim["low"], claim["high"]), digits)
        lines.append([escape(claim["claim"]), figure, f"{sign} {claim['target']:g} {claim['unit']}", held, sure])
    listed = table(["claim", "measured", "target", "holds", "certain"], lines, wrap=True)
    return f"<details><summary>The claims, one by one</summary>{listed}</details>"


def _where(scores: Scores) -> str:
    """Tables of variables by levels, for each forecast and lead; the headline lead stands open."""
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
    best = scores.best_baseline(lead)
    wanted = [("crps", best, f"CRPS vs {short_name(best)}, the best baseline")] if best else []
    wanted.append(("crps", f"raw_{scores.full}", f"CRPS vs raw {scores.full}"))
    for kind in ("spread_regression", "size_corrected"):
        other = f"{kind}_{scores.reduced}"
        wanted.append(("spread_rmse", other, f"RMSE of spread vs {short_name(other)}"))
    differences = ((scores.difference(metric, label, other), words) for metric, other, words in wanted)
    return [_field_table(scores, found, lead, words) for found, words in differences]


def _field_table(scores: Scores, differences: list[tuple[Interval, Interval]], lead: int, caption: str) -> str:
    """Variables down, levels across; empty where nothing is finite."""
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
    if cell is None or not cell.excludes(0) or abs(cell.value) < 0.05:  # which is shown as 0.0
        return None
    return "b" if cell.value > 0 else "w"


def _entrants(scores: Scores) -> str:
    """Everyone side by side: ratios to one reference, area-weighted and not, and the raw scores each way."""
    lead, full, regression = scores.headline_lead, f"raw_{scores.full}", f"spread_regression_{scores.reduced}"
    pairs = (("crps", full), ("rmse", full), ("spread_rmse", regression), ("held_out_rmse", regression))
    tables = "".join(_ranking(scores, metric, reference, lead) for metric, reference in pairs)
    rest = _raw_table(scores) + _all_scores(scores, lead)
    return f'<h2>Everyone at {lead} h</h2><div class="side">{tables}</div>{rest}' if tables else ""


def _ranking(scores: Scores, metric: str, reference: str, lead: int) -> str:
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
    mine = entrant in scores.forecasts or scores.full == scores.reduced
    uses_full = entrant.endswith(f"_{scores.full}") and not mine
    return short_name(entrant) + (f" (uses all {scores.full})" if uses_full else "")


def _raw_table(scores: Scores) -> str:
    """Raw ensembles three ways, as ratios to the one that claims are made against."""
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
    """Every score of every field at a lead, folded away."""
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
    return number(scores.interval(score.value[column], score.draws[:, column]), 4, general=True)


def _curves(scores: Scores) -> str:
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
        if curves:
            panels[title] = curves
    if not panels:
        return ""
    return f"<h2>By lead time</h2>{image(plots.by_lead(panels), 'Ratio of scores by lead time; below one is better')}"


def _maps(scores: Scores, pictures: Pictures, grid: Grid, land: np.ndarray | None) -> str:
    if min(grid.shape) < 2:
        return ""  # a row or a column makes no map
    parts, gains = [], [found for column in pictures.headline for found in _gain_maps(scores, pictures, column)]
    if gains:
        text = (
            f"Gain of CRPS at {scores.headline_lead} h, mean over the test dates; grey: left out. Dots: significant "
            f"over blocks of dates, at a rate of false discoveries of {100 * RATE:g} %"
        )
        parts.append(image(plots.gain_maps(gains, grid, land), text))
    for column, shot in pictures.snapshots.items():
        field = scores.columns[column]
        maps = [(f"all {scores.full} members", shot.actual)]
        maps += [(f"predicted by {label}", values) for label, values in shot.predicted.items()]
        if scores.reduced > 1:
            maps.append((f"raw {scores.reduced} members", shot.reduced))
        text = f"Spread of {field.name} at {field.lead_hours} h on the last test date"
        parts.append(image(plots.spread_maps(maps, grid, land, registered(field.variable).units), text))
    return f"<h2>Maps</h2>{''.join(parts)}" if parts else ""


def _gain_maps(scores: Scores, pictures: Pictures, column: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    found = []
    for label in scores.forecasts:
        key = Key(label, Statistic.CRPS)
        ours = pictures.mean_map(column, key)
        for other in (scores.best_baseline(scores.headline_lead), f"raw_{scores.full}"):
            reference = _reference(pictures, column, other) if other else None
            if ours is None or reference is None:
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                percent = 100 * (1 - ours / np.asarray(pictures.mean_map(column, reference)))
            first, second = pictures.block_means(column, key), pictures.block_means(column, reference)
            dots = np.zeros(percent.shape, bool)
            if first is not None and second is not None:
                dots = significant(p_values(first - second))
            found.append((f"{scores.columns[column].name}: {label} vs {short_name(str(other))}", percent, dots))
    return found


def _reference(pictures: Pictures, column: int, entrant: str) -> Key | None:
    for statistic in (Statistic.CRPS, Statistic.CRPS_FAMILY):
        if pictures.mean_map(column, Key(entrant, statistic)) is not None:
            return Key(entrant, statistic)
    return None


def _bins(scores: Scores, pictures: Pictures) -> str:
    m, n = scores.reduced, scores.full
    error = (
        "Does the predicted spread tell the error? Calibrated forecasts lie on the dashed line; dots by share of area."
    )
    spread = f"Does the predicted spread tell the spread of all {n} members?"
    parts = [
        _binned(scores, pictures, pictures.error_bins, (f"raw_{m}", f"raw_{n}"), error, "RMSE of the mean"),
        _binned(scores, pictures, pictures.spread_bins, (f"raw_{m}",), spread, f"spread of all {n} members (RMS)"),
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
    panels, units = {}, []
    for column in pictures.headline:
        entrants = dict.fromkeys((*scores.forecasts, *others))
        curves = {short_name(entrant): bins[column, entrant] for entrant in entrants if (column, entrant) in bins}
        if curves:
            field = scores.columns[column]
            panels[f"{field.name}, {field.lead_hours} h"] = curves
            units.append(registered(field.variable).units)
    return image(plots.binned(panels, units, y_label), text, width=820) if panels else ""


def _background(content: dict[str, Any]) -> str:
    found = content["definitions"].items()
    words = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in found)
    dates = content["dates"]
    dropped = "; ".join(f"{d['date']} ({d['reason']})" for d in dates["dropped"]) or "none"
    listed = (
        f"<p><b>Test dates</b> {escape(', '.join(dates['test']))}</p>"
        f"<p><b>Fit dates</b> {escape(', '.join(dates['fit']))}</p>"
        f"<p><b>Not scored</b> {escape(dropped)}</p>"
    )
    settings = table(["setting", "value"], [[escape(str(k)), escape(str(v))] for k, v in content["settings"].items()])
    left_out = content["left_out"]
    lines = [[escape(str(v)) for v in entry.values()] for entry in left_out[:200]]
    masks = table(list(left_out[0]), lines) if left_out else "<p>No point was left out.</p>"
    return (
        f"<h2>Definitions</h2><dl>{words}</dl><h2>Dates, masks and settings</h2><details><summary>Show</summary>"
        f"{listed}{masks}{settings}</details>"
    )
