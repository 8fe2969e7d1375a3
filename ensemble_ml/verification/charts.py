"""Write the charts of the report as HTML: gains, scores by lead time, maps, and calibration of each field."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.verification.aggregation import METRICS, Column
from ensemble_ml.verification.bootstrap import FEWEST_BLOCKS, RATE
from ensemble_ml.verification.page import FIELD, FORECAST, LEAD, REGION, choice, note, table
from ensemble_ml.verification.pictures import Bins, Pictures
from ensemble_ml.verification.probability import Calibration, flatness
from ensemble_ml.verification.rankings import regions
from ensemble_ml.verification.scores import Scores, gain
from ensemble_ml.verification.summary import explained, short_name
from ensemble_ml.verification.svg import Atlas, Curve, chart, gains
from ensemble_ml.verification.values import CLIMATOLOGY


def headline(scores: Scores) -> str:
    """Return a chart of the gains over the baselines at the headline lead, with intervals; empty if there are none."""
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
    text = f"Gain in % at {lead} h (right of zero: better), geometric mean over variables and levels, with intervals"
    return gains(entries, text) + note(explained(other for _, other, _ in references))


def curves(scores: Scores, first: Column) -> str:
    """Return charts of scores by lead time: mean ratios over all fields, and the scores of each field and region.

    The field of `first` is shown first. The HTML is empty if no forecast has a score.
    """
    m, n, best = scores.reduced, scores.full, scores.best_baseline(scores.headline_lead)
    corrected = f"spread_regression_{m}", f"size_corrected_{m}"
    means = {
        f"CRPS over that of raw {n}": ("crps", f"raw_{n}", (best, f"local_{m}", f"raw_{m}")),
        f"RMSE of spread over that of raw {m}": ("spread_rmse", f"raw_{m}", corrected),
    }
    shown = ""
    for title, (metric, reference, others) in means.items():
        known = {}
        for entrant in dict.fromkeys((*scores.forecasts, *filter(None, others))):
            ratios = {lead: scores.ratio(metric, entrant, reference, scores.at_lead(lead)) for lead in scores.leads}
            points = {lead: ratio for lead, ratio in ratios.items() if ratio is not None}
            if points:
                known[short_name(entrant)] = Curve(list(points), list(points.values()))
        # A chart of baselines alone would answer no question about the forecasts.
        if any(short_name(label) in known for label in scores.forecasts):
            shown += chart(known, f"{title}, mean over all fields", "lead time, h", ticks=scores.leads, level=1.0)
    absolute = {
        "crps": (best, *scores.baselines, f"raw_{n}", f"raw_{m}", CLIMATOLOGY),
        "rmse": (best, *scores.baselines, f"raw_{n}", f"raw_{m}"),
        "spread_rmse": (*corrected, f"raw_{m}"),
    }
    cards = {}
    for words, weighting in regions(scores).items():
        for name, columns in fields(scores).items():
            charts = [_by_lead(scores, metric, others, weighting, columns) for metric, others in absolute.items()]
            cards[words, name] = _beside(charts)
    by_field = choice([REGION, FIELD], cards, (next(iter(regions(scores))), first.label))
    words = note(explained([f"local_{m}", *(other for others in absolute.values() for other in others)]))
    return f"<h2>By lead time</h2>{words}{_beside([shown])}{by_field}" if shown or by_field else ""


def fields(scores: Scores) -> dict[str, list[int]]:
    """Return the columns of each field as positions, one for each lead. The keys are the field's name with units."""
    found: dict[str, list[int]] = {}
    for c, column in enumerate(scores.columns):
        found.setdefault(column.label, []).append(c)
    return found


def _by_lead(scores: Scores, metric: str, others: tuple[str | None, ...], weighting: str, columns: list[int]) -> str:
    """Return a chart of a score of one field by lead time; empty where no forecast has it."""
    known = {}
    for entrant in dict.fromkeys((*scores.forecasts, *filter(None, others))):
        points = {scores.columns[c].lead_hours: scores.interval_of(metric, entrant, c, weighting) for c in columns}
        there = {lead: point for lead, point in points.items() if point is not None}
        if there:
            known[short_name(entrant)] = Curve(list(there), list(there.values()))
    if not any(short_name(label) in known for label in scores.forecasts):
        return ""
    units = registered(scores.columns[columns[0]].variable).units
    return chart(known, f"{METRICS[metric].long_name}, {units}", "lead time, h", ticks=scores.leads)


def _beside(parts: list[str]) -> str:
    """Return figures side by side; empty if all of them are empty."""
    return f'<div class="charts">{"".join(parts)}</div>' if any(parts) else ""


def maps(scores: Scores, pictures: Pictures, atlas: Atlas) -> str:
    """Return maps of each field and lead: the gain and the mean CRPS, and the spread on the last date that has it.

    The HTML is empty on a grid of one row or column, or if there is no map.
    """
    if min(atlas.grid.shape) < 2:
        return ""
    first = scores.columns[pictures.headline[0]].key
    better = {
        (label, *column.key): _gain_maps(scores, pictures, atlas, c, label)
        for label in scores.forecasts
        for c, column in enumerate(scores.columns)
    }
    spreads = {scores.columns[c].key: _spread_maps(scores, pictures, atlas, c) for c in sorted(pictures.snapshots)}
    tested = (
        f"Dots: significant over blocks of dates, at a rate of false discoveries of {100 * RATE:g} %; gains of a "
        "forecast that has more input than its reference have none"
    )
    if scores.blocks < FEWEST_BLOCKS:
        tested = f"Not tested for significance: fewer than {FEWEST_BLOCKS} blocks of dates"
    text = f"Gain in CRPS, mean over the test dates. Blue: better, red: worse, grey: left out. {tested}. "
    text += explained((scores.best_baseline(scores.headline_lead), f"raw_{scores.full}"))
    parts = [
        choice([FORECAST, FIELD, LEAD], better, (scores.forecasts[0], *first)),
        choice([FIELD, LEAD], spreads, first),
    ]
    if not any(parts):
        return ""
    return f"<h2>Maps</h2>{note(text if parts[0] else '')}{''.join(parts)}"


def _gain_maps(scores: Scores, pictures: Pictures, atlas: Atlas, column: int, label: str) -> str:
    """Return maps of the gain of a forecast over each reference, and of its mean CRPS; empty without a CRPS."""
    best, raw = scores.best_baseline(scores.headline_lead), f"raw_{scores.full}"
    others = [other for other in dict.fromkeys((best, raw, scores.forecasts[0])) if other]
    kept = {other: pictures.gains[column, label, other] for other in others if (column, label, other) in pictures.gains}
    mean = pictures.means.get((column, label))
    if mean is None or not np.isfinite(mean).any():
        return ""
    sizes = np.concatenate([np.abs(gain[np.isfinite(gain)]) for gain, _ in kept.values()] or [np.empty(0)])
    # One scale serves all maps of a card. It ends at a percentile, because a few extreme points would make all others
    # look alike.
    limit = float(np.clip(np.percentile(sizes, 98) if sizes.size else 1.0, 1.0, 30.0))
    parts = []
    for other, (percent, sure) in kept.items():
        # A forecast that had more input than its reference has no significant gain, only significant losses.
        certain = sure & (percent < 0) if scores.advantage("crps", label, other) else sure
        title = f"gain in CRPS over {short_name(other)}{', the best baseline' * (other == best)}"
        parts.append(atlas.gain_map(title, percent, None if scores.blocks < FEWEST_BLOCKS else certain, limit))
    units = registered(scores.columns[column].variable).units
    top = float(np.nanpercentile(mean, 98)) or 1.0
    return _beside([*parts, atlas.map("mean CRPS of the forecast", mean, "viridis", (0.0, top), units)])


def _spread_maps(scores: Scores, pictures: Pictures, atlas: Atlas, column: int) -> str:
    """Return maps of the spread on one date: of all members, of each forecast, and of the reduced ensemble."""
    shot = pictures.snapshots[column]
    shown = {f"all {scores.full} members": shot.actual}
    shown |= {f"predicted by {label}": values for label, values in shot.predicted.items()}
    if scores.reduced > 1:
        shown[f"raw {scores.reduced} members"] = shot.reduced
    top = float(np.nanpercentile(np.concatenate([values.ravel() for values in shown.values()]), 99.5)) or 1.0
    look = "viridis", (0.0, top), registered(scores.columns[column].variable).units
    return _beside([atlas.map(f"spread from {shot.date}, {words}", one, *look) for words, one in shown.items()])


def calibration(scores: Scores, found: Calibration, pictures: Pictures) -> str:
    """Return charts of each field and lead: PIT and ranks, reliability, and error and spread by predicted spread.

    The HTML is empty if there is nothing to draw.
    """
    cards = {
        column.key: _beside(
            [
                _histograms(scores, found, c),
                *(_reliability(scores, found, c, at) for at in (None, *found.thresholds(c))),
                _binned(scores, pictures.error_bins, c, "RMSE of the mean", (f"raw_{scores.full}",)),
                _binned(scores, pictures.spread_bins, c, f"mean spread of all {scores.full} members"),
            ]
        )
        + _calibration_table(scores, found, c)
        for c, column in enumerate(scores.columns)
    }
    shown = choice([FIELD, LEAD], cards, scores.columns[pictures.headline[0]].key)
    text = (
        "The first chart shows the probability integral transform of the truth, and for raw ensembles the rank of the "
        "truth among the members. It is flat at one if the forecast is calibrated, and U-shaped if its spread is too "
        "small. Reliability diagrams are for the upper tenth of the cell's climate, and for each threshold of which "
        "forecasts hold probabilities. The climate is that of all fit dates. If these are of several seasons, "
        "knowledge of the season counts as skill. The last two charts compare the predicted spread with the error of "
        f"the mean, and with the spread of all {scores.full} members. Dashed lines mark a perfect forecast. Larger "
        "dots stand for more cases."
    )
    return f"<h2>Calibration</h2>{note(text)}{shown}" if shown else ""


def _histograms(scores: Scores, found: Calibration, column: int) -> str:
    """Return a chart of PIT and rank histograms, where one is the frequency of a bin in a flat histogram."""
    kinds = [("pit", label) for label in scores.forecasts]
    kinds += [("rank", f"raw_{size}") for size in dict.fromkeys((scores.reduced, scores.full))]
    known = {}
    for kind, entrant in kinds:
        share = found.share(kind, entrant)
        if share is None or not np.isfinite(share[column]).all():
            continue
        draws = found.share(kind, entrant, scores.counts)
        assert draws is not None
        blocks, bins = scores.blocks_among(found.known(kind, entrant, column)), share.shape[1]
        relative = bins * share[column], bins * draws[:, column]
        ends = [scores.interval(value, drawn, blocks) for value, drawn in zip(relative[0], relative[1].T, strict=True)]
        points = (np.arange(bins) + 0.5) / bins
        known[f"{short_name(entrant)} ({'PIT' if kind == 'pit' else 'ranks'})"] = Curve(points.tolist(), ends)
    return chart(known, "frequency of the truth, relative to a flat one", "predicted probability below it", level=1.0)


def _reliability(scores: Scores, found: Calibration, column: int, at: float | None) -> str:
    """Return a reliability diagram of exceeding a threshold, or of the upper tenth of the climate."""
    known = {}
    for entrant in dict.fromkeys((*scores.forecasts, f"raw_{scores.reduced}", f"raw_{scores.full}")):
        if (column, entrant, at) in found.reliability:
            forecast, event, count = found.reliability[column, entrant, at].curve()
            known[short_name(entrant)] = Curve.of(forecast, event, count / max(count.sum(), 1))
    units = registered(scores.columns[column].variable).units
    what = "the upper tenth" if at is None else f"more than {at:g} {units}"
    return chart(known, f"observed frequency of {what}", "forecast probability", diagonal=True)


def _binned(
    scores: Scores, bins: Mapping[tuple[int, str], Bins], column: int, title: str, more: tuple[str, ...] = ()
) -> str:
    """Return a chart of the outcome against the predicted standard deviation."""
    known = {
        short_name(entrant): Curve.of(*bins[column, entrant].curve())
        for entrant in dict.fromkeys((*scores.forecasts, f"raw_{scores.reduced}", *more))
        if (column, entrant) in bins
    }
    units = registered(scores.columns[column].variable).units
    return chart(known, f"{title}, {units}", f"predicted standard deviation, {units}", diagonal=True)


def _calibration_table(scores: Scores, found: Calibration, column: int) -> str:
    """Return a table of the flatness of PIT histograms, and of the Brier score of the upper tenth and its parts."""
    lines = []
    for entrant in dict.fromkeys((*scores.forecasts, f"raw_{scores.reduced}", f"raw_{scores.full}")):
        share = found.share("pit", entrant)
        flat = "" if share is None or not np.isfinite(share[column]).all() else f"{flatness(share[column]):.3f}"
        event = found.reliability.get((column, entrant, None))
        values = [""] * 5
        if event is not None and event.weight.any():
            p = event.parts()
            values = [f"{x:.4f}" for x in (p.score, p.reliability, p.resolution, p.uncertainty, p.within)]
        if flat or any(values):
            lines.append([escape(short_name(entrant)), flat, *values])
    heads = [
        "", "PIT: sum |share - 0.1|", "Brier score", "= reliability", "- resolution", "+ uncertainty", "+ within bins"
    ]  # fmt: skip
    return table(heads, lines) if lines else ""
