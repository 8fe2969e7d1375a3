"""Write the sections of the report beyond the scores: strata, calibration, ensemble size and the extreme case."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.grid import Grid
from ensemble_ml.verification import figures
from ensemble_ml.verification.bootstrap import Interval
from ensemble_ml.verification.calibration import Calibration
from ensemble_ml.verification.case import Case
from ensemble_ml.verification.page import image, number, table
from ensemble_ml.verification.probability import flatness
from ensemble_ml.verification.scores import Scores
from ensemble_ml.verification.summary import short_name


def strata(content: dict[str, Any], scores: Scores) -> str:
    """Return a section on the gain in regions, seasons and unusual weather, at the headline lead.

    Args:
        content: The content of scores.json.
        scores: The scores.
    """
    rows = [row for row in content["strata"] if row["lead_hours"] == scores.headline_lead]
    parts = []
    for forecast in scores.forecasts:
        mine = [row for row in rows if row["forecast"] == forecast]
        heads = list(dict.fromkeys((row["metric"], row["reference"]) for row in mine))
        # scores.json holds no barred side, so it is worked out again for the marks of the table.
        barred_of = {head: scores.barred(head[0], forecast, head[1]) for head in heads}
        lines, marks = [], []
        for kind, name in dict.fromkeys((row["kind"], row["stratum"]) for row in mine):
            by_head = {
                (row["metric"], row["reference"]): row for row in mine if (row["kind"], row["stratum"]) == (kind, name)
            }
            gains = [
                _gain(row["ratio"], row["low"], row["high"], row["blocks"], barred)
                if (row := by_head.get(head))
                else None
                for head, barred in barred_of.items()
            ]
            first = next(iter(by_head.values()))
            dates = f"{first['dates']} ({first['blocks']})"
            lines.append([escape(name), dates, *("" if gain is None else number(gain) for gain in gains)])
            marks.append([None, None, *(_mark(gain) for gain in gains)])
        if lines:
            words = {"crps": "CRPS", "spread_rmse": "spread RMSE"}
            titles = [f"{words[metric]} vs {short_name(reference)}" for metric, reference in heads]
            who = f"{forecast}: " if len(scores.forecasts) > 1 else ""
            caption = f"{who}gain in % at {scores.headline_lead} h, geometric mean over variables and levels"
            parts.append(table(["stratum", "dates (blocks)", *titles], lines, caption=caption, classes=marks))
    return f"<h2>Where and when: regions, seasons, extremes</h2>{''.join(parts)}" if parts else ""


def together(content: dict[str, Any], scores: Scores) -> str:
    """Return a section on the scores of members as vectors, at the headline lead.

    Args:
        content: The content of scores.json.
        scores: The scores.

    Returns:
        HTML; empty if no forecast holds members.
    """
    found = [row for row in content["vectors"] if row["lead_hours"] == scores.headline_lead]
    if not found:
        return ""
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
    caption = (
        f"gain in % at {scores.headline_lead} h over {found[0]['fields']} fields, each by the deviation of its climate"
    )
    # Scores of vectors may be over fewer fields and points than all others, and the caption has to say so.
    for paired in [row["paired"] for row in found if row["metric"] == "variogram"][:1]:
        caption += f"; variogram over {len(paired)} of them"
    if found[0]["left_out_area"]:
        caption += f"; {100 * found[0]['left_out_area']:.3g} % of the area lacks a value of some field and is left out"
    if without := found[0].get("left_out_fields"):
        caption += f"; {', '.join(without)} left out: without variance on the fit dates"
    return f"<h2>Members together</h2>{table(['members', *heads], lines, caption=caption, classes=marks)}"


def _gain(ratio: float, low: float, high: float, blocks: int, barred: int) -> Interval:
    """Convert a ratio of scores with its interval to a gain in percent."""
    return Interval(ratio, low, high, blocks, barred).map(lambda r: 100 * (1 - r))


def _mark(gain: Interval | None) -> str | None:
    if gain is None or not gain.excludes(0):
        return None
    return "b" if gain.value > 0 else "w"


def calibration(scores: Scores, found: Calibration, headline: tuple[int, ...]) -> str:
    """Return a section on calibration: PIT and rank histograms, flatness, reliability with counts, sharpness.

    Args:
        scores: The scores, whose draws are used.
        found: The histograms and reliability tables.
        headline: Positions of the columns to draw.
    """
    parts = []
    for kind, entrants in (("pit", list(scores.forecasts)), ("rank", [f"raw_{scores.reduced}", f"raw_{scores.full}"])):
        panels = []
        for column in headline:
            for entrant in dict.fromkeys(entrants):
                share = found.share(kind, entrant)
                if share is None or not np.isfinite(share[column]).all():
                    continue
                draws = found.share(kind, entrant, scores.counts)
                assert draws is not None
                blocks = scores.blocks_among(found.known(kind, entrant, column))
                ends = [scores.interval(value, draws[:, column, k], blocks) for k, value in enumerate(share[column])]
                panels.append((f"{scores.columns[column].name}: {short_name(entrant)}", ends))
        if panels:
            words = (
                "Probability integral transform of the truth" if kind == "pit" else "Rank of the truth among members"
            )
            text = f"{words}: flat if calibrated, U-shaped if too sure; thin lines are intervals, where there are any"
            parts.append(image(figures.histograms(panels), text, width=980))
    parts.append(_flatness(scores, found))
    curves = {}
    for column in headline:
        entrants = [*scores.forecasts, f"raw_{scores.reduced}", f"raw_{scores.full}"]
        known = {short_name(e): found.reliability[column, e] for e in entrants if (column, e) in found.reliability}
        if known:
            field = scores.columns[column]
            curves[f"{field.name}, {field.lead_hours} h"] = known
    if curves:
        text = (
            "Reliability of the probability that the truth lies in the upper tenth of the cell's climate (below), and "
            "how often each probability is forecast (above): sharp forecasts use the ends. The diagonal is right. The "
            "climate is that of all fit dates: where these are of several seasons, to know the season counts as skill."
        )
        parts.append(image(figures.reliability(curves), text, width=900))
        parts.append(_brier(curves))
    return f"<h2>Calibration</h2>{''.join(parts)}" if any(parts) else ""


def _flatness(scores: Scores, found: Calibration) -> str:
    """Return a folded table of the flatness of the PIT in each field."""
    lines = []
    for entrant in scores.forecasts:
        share = found.share("pit", entrant)
        if share is None:
            continue
        for c in scores.at_lead(scores.headline_lead):
            if np.isfinite(share[c]).all():
                low, high = share[c].min(), share[c].max()
                cells = [f"{low:.3f}", f"{high:.3f}", f"{flatness(share[c]):.3f}"]
                lines.append([escape(entrant), scores.columns[c].name, *cells])
    heads = ["forecast", "field", "smallest bin", "largest bin", "sum |share - 0.1|"]
    listed = table(heads, lines)
    return f"<details><summary>Flatness of the PIT, field by field</summary>{listed}</details>" if lines else ""


def _brier(curves: dict[str, dict]) -> str:
    """Return a folded table of the Brier score and its parts."""
    lines = []
    for title, entrants in curves.items():
        for entrant, table_of in entrants.items():
            if not table_of.weight.any():  # this field has no truth
                continue
            p = table_of.parts()
            values = (p.score, p.reliability, p.resolution, p.uncertainty, p.within)
            lines.append([escape(f"{title}: {entrant}"), *(f"{value:.4f}" for value in values)])
    heads = ["", "Brier score", "= reliability", "- resolution", "+ uncertainty", "+ within bins"]
    return f"<details><summary>Brier score and its parts</summary>{table(heads, lines)}</details>"


def by_members(scores: Scores) -> str:
    """Return a section on scores against the number of members that forecasts were made from.

    Baselines are not shown.

    Args:
        scores: The scores.

    Returns:
        HTML; empty if all forecasts were made from the same number of members.
    """
    sizes = {label: scores.given[label] for label in scores.forecasts if label in scores.given}
    if len(set(sizes.values())) < 2:
        return ""
    columns, full = scores.at_lead(scores.headline_lead), f"raw_{scores.full}"
    panels = {}
    for metric, reference, title in (
        ("crps", full, f"CRPS over that of raw {scores.full}"),
        ("spread_rmse", f"spread_regression_{scores.reduced}", f"spread RMSE over regression on {scores.reduced}"),
    ):
        points = [(sizes[label], scores.ratio(metric, label, reference, columns)) for label in sizes]
        known = sorted(((size, ratio) for size, ratio in points if ratio is not None), key=lambda item: item[0])
        if known:
            panels[title] = known
    text = f"Forecasts from different numbers of members at {scores.headline_lead} h; below one is better"
    return f"<h2>By number of members</h2>{image(figures.by_members(panels), text)}" if panels else ""


def extreme(case: Case | None, scores: Scores, grid: Grid, land: np.ndarray | None) -> str:
    """Return a section with the raw, the predicted and the true field of the most unusual test date, side by side.

    Args:
        case: The extreme case, or None.
        scores: The scores.
        grid: Grid of the maps.
        land: (Y, X) land fraction for coasts, or None.

    Returns:
        HTML; empty without a case, or on a grid of one row or column.
    """
    if case is None or min(grid.shape) < 2:
        return ""
    units = registered(case.variable).units
    lat, lon = case.place
    lead = (
        f"{case.name} from {case.date}, {case.lead_hours} h ahead: of all test dates the one on which the raw "
        f"{scores.full} members are furthest from their climate (mean |EFI| {case.mean_index:.2f}). The cross marks "
        f"{abs(lat):g}°{'N' if lat >= 0 else 'S'} {lon:g}°E, where EFI is {case.index_at_place:+.2f}."
    )
    lines = []
    for name, (mean, deviation) in case.at_place.items():
        error = sigmas = ""
        if case.truth_at_place is not None:
            error = f"{case.truth_at_place - mean:+.3g}"
            # All members may be dry, and an error cannot be counted in deviations of zero.
            sigmas = f"{(case.truth_at_place - mean) / deviation:+.2f}" if deviation > 0 else ""
        lines.append([escape(short_name(name)), f"{mean:.5g}", f"{deviation:.3g}", error, sigmas])
    if case.truth_at_place is not None:
        lines.append(["truth", f"{case.truth_at_place:.5g}", "", "", ""])
    heads = [f"there ({units})", "mean", "standard deviation", "truth - mean", "in standard deviations"]
    text = "Mean, standard deviation and truth; the last row is the error in standard deviations (beyond 2 is rare)"
    picture = image(figures.extreme_case(case, grid, land, units), text, width=1000)
    return f'<h2 id="extreme">An extreme case</h2><p>{escape(lead)}</p>{picture}{table(heads, lines)}'
