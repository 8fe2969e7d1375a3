"""Turn scores into statements: claims, sentences for the reader, and the tables of scores.json.

A sentence says "better" only where the interval supports it, and names the reason where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ensemble_ml.fields import field as registered
from ensemble_ml.verification.aggregation import METRICS
from ensemble_ml.verification.bootstrap import FEWEST_BLOCKS, Interval
from ensemble_ml.verification.scores import Scores, gain
from ensemble_ml.wording import shortened

_NAMED = 3  # number of fields that a sentence names
_SMALL_GAIN = 2.0  # percent that a network must gain over statistics to be worth having


@dataclass(frozen=True)
class Claim:
    """A statement about a forecast that holds or does not.

    Attributes:
        claim: The statement in words.
        interval: The measured value with its interval.
        unit: "ratio" of the forecast's score to the reference's, or "%" for a gain.
        target: Value that decides whether the claim holds (see `as_dict`).
        better_below: True if smaller values are better.
        forecast: Label of the forecast.
        reference: The entrant that it is compared with.
        advantage: Input that the forecast has and the reference lacks, in words. With it, the claim is never certain.
        without_sp: The value without surface pressure; None where that is not among the fields, or is the only one.
    """

    claim: str
    interval: Interval
    unit: str
    target: float
    better_below: bool
    forecast: str
    reference: str
    advantage: str = ""
    without_sp: Interval | None = None

    def as_dict(self) -> dict:
        """Return the entry of scores.json.

        `holds` means a value below the target if `better_below`, otherwise one at or above the target, or above a
        target of 0. `certain` means that the whole interval lies on the good side of no difference and rests on enough
        blocks, and that the forecast has no advantage.
        """
        value, neutral = self.interval.value, 1.0 if self.unit == "ratio" else 0.0
        holds = value < self.target if self.better_below else value >= self.target if self.target else value > 0
        certain = self.interval.below(neutral) if self.better_below else self.interval.above(neutral)
        return {
            "claim": self.claim, "value": value, "unit": self.unit, "target": self.target, "holds": bool(holds),
            "low": self.interval.low, "high": self.interval.high, "certain": bool(certain),
            "enough_blocks": self.interval.enough, "advantage": self.advantage, "forecast": self.forecast,
            "reference": self.reference, "without_sp": _ends_of(self.without_sp),
        }  # fmt: skip


def claims(scores: Scores) -> list[Claim]:
    """Return the claims on each forecast at the headline lead, for the scores that it has."""
    return [claim for label in scores.forecasts for claim in _claims_of(scores, label)]


def _claims_of(scores: Scores, label: str) -> list[Claim]:
    """Return the claims on one forecast at the headline lead."""
    m, n, lead = scores.reduced, scores.full, scores.headline_lead
    columns, rest = scores.at_lead(lead), scores.without_sp(lead)
    who = f"{label}: " if len(scores.forecasts) > 1 else ""
    start = f"{who}from {scores.made_from(label)} at {lead} h, geometric mean over variables and levels: "
    found = []
    for reference, words in (
        (f"raw_{m}", f"raw {m}"),
        (f"size_corrected_{m}", f"size-corrected {m}"),
        (f"spread_regression_{m}", "regressed"),
    ):
        ratio = scores.ratio("spread_rmse", label, reference, columns)
        if ratio is not None:
            text = f"{start}RMSE of predicted spread over that of {words} spread"
            more = scores.advantage("spread_rmse", label, reference)
            others = scores.ratio("spread_rmse", label, reference, rest)
            found.append(Claim(text, ratio, "ratio", 1.0, True, label, reference, more, others))
    best = scores.best_baseline(lead)
    references = [(best, "the best statistical baseline fitted on the training dates", _SMALL_GAIN)] if best else []
    references.append((f"raw_{n}", f"the raw {n} members' N(m, (1+1/M) s^2)", 0.0))
    # Each of several forecasts is also compared with the first.
    references += [(first, first, 0.0) for first in scores.forecasts[:1] if first != label]
    for reference, words, target in references:
        lower = gain(scores.ratio("crps", label, reference, columns))
        if lower is not None:
            text, more = f"{start}CRPS lower than that of {words}", scores.advantage("crps", label, reference)
            others = gain(scores.ratio("crps", label, reference, rest))
            found.append(Claim(text, lower, "%", target, False, label, reference, more, others))
    return found


def headline(scores: Scores, test_dates: int) -> list[str]:
    """Return sentences for the terminal and the top of the report: better or not, by how much, where, and how sure."""
    lines = []
    # With several forecasts the first question is which of them is better, so these sentences come first.
    first = scores.forecasts[0]
    for label in scores.forecasts[1:]:
        claim = next((claim for claim in _claims_of(scores, label) if claim.reference == first), None)
        where = _where(scores, label, first)
        lines += [
            f"{label}, {scores.headline_lead} h: {text}" for text in (claim and _sentence(claim, scores), where) if text
        ]
    for label in scores.forecasts:
        who = f"{label}, {scores.headline_lead} h" if len(scores.forecasts) > 1 else f"At {scores.headline_lead} h"
        # Claims on post-processing come first, because most readers look for them.
        found = [claim for claim in _claims_of(scores, label) if claim.reference not in scores.forecasts]
        found = sorted(found, key=lambda claim: claim.unit != "%")
        lines += [f"{who}: {_sentence(claim, scores)}" for claim in found]
        lines += [
            f"{who}: {text}" for text in (_where(scores, label), _bias(scores, label), _spread(scores, label)) if text
        ]
    if not lines:
        lines.append("Nothing could be compared: no field has both a forecast and something to score it with.")
    lines.append(certainty(scores.blocks, test_dates))
    return lines


def _sentence(claim: Claim, scores: Scores) -> str:
    """Return a claim as a sentence, with its interval, and with the reason where it is not sure."""
    of_crps = claim.unit == "%"
    percent = claim.interval if of_crps else claim.interval.map(lambda r: 100 * (1 - r))
    # A loss is worded as "higher ... worse", because "-3 % lower" is hard to read.
    if percent.value < 0:
        percent = percent.map(lambda p: -p)
        direction, verdict = "higher", "worse"
    else:
        direction, verdict = "lower", "better"
    best = claim.reference == scores.best_baseline(scores.headline_lead)
    # Without EMOS, the baselines have no slope on the ensemble mean and are weak. The sentence tells readers so.
    no_emos = "" if scores.baselines else " (no EMOS among the baselines)"
    what, than = (
        "CRPS" if of_crps else "spread RMSE",
        f"the best statistical baseline{no_emos}, " * (of_crps and best) + describe(claim.reference),
    )
    text = f"{what} {percent.value:.1f} % {direction} than {than}"
    # More input can explain a better score, but not a worse one.
    advantage = claim.advantage if verdict == "better" else ""
    metric, columns = "crps" if of_crps else "spread_rmse", scores.at_lead(scores.headline_lead)
    blocks = scores.least_known(metric, (claim.forecast, claim.reference), columns)
    least = shortened([scores.columns[c].title for c in blocks if blocks[c] == percent.blocks], _NAMED)
    if not np.isfinite(percent.low):
        why = f": {least} at {scores.headline_lead} h" if least else ""
        sure = f": not sure, {advantage}" if advantage else ""
        return f"{text} (no interval{why}){sure}{_without_sp(claim)}."
    # The sentence shows one digit, so a smaller difference reads as 0.0 % and must not be called better or worse.
    if percent.value < 0.05:
        verdict = "no difference"
    sure = verdict if percent.excludes(0) else "not sure, the interval holds zero"
    if not percent.enough:
        sure = f"not sure, of {percent.blocks} blocks{f' ({least})' if least else ''}"
    if advantage:
        sure = f"not sure, {advantage}"
    with_interval = f"{text} ({100 * scores.confidence:g} % interval {percent.low:.1f} to {percent.high:.1f} %): {sure}"
    return f"{with_interval}{_without_sp(claim)}."


def _without_sp(claim: Claim) -> str:
    """Return the end of a claim's sentence: the value without surface pressure; empty if there is none."""
    rest = claim.without_sp
    if rest is None:
        return ""
    less, direction = rest if claim.unit == "%" else rest.map(lambda r: 100 * (1 - r)), "lower"
    if less.value < 0:
        less, direction = less.map(lambda p: -p), "higher"
    ends = f" ({less.low:.1f} to {less.high:.1f} %)" if np.isfinite(less.low) else ""
    return f"; without surface pressure {less.value:.1f} % {direction}{ends}"


def known_in_few(scores: Scores) -> list[str]:
    """Return sentences on fields known in fewer blocks than others, and in too few to be sure of any mean over them."""
    found = []
    for metric, words in (("crps", "CRPS"), ("spread_rmse", "The spread")):
        blocks = scores.least_known(metric, scores.forecasts, range(len(scores.columns)))
        for few, text in (((1,), "no interval"), (range(2, FEWEST_BLOCKS), "nothing is sure")):
            there = [scores.columns[c] for c in blocks if blocks[c] in few]
            if there:
                names = shortened([f"{column.title} at {column.lead_hours} h" for column in there], _NAMED)
                counts = sorted({n for n in blocks.values() if n in few})
                known = f"{counts[0]}{f' to {counts[-1]}' if counts[1:] else ''} of {scores.blocks} blocks"
                which = "them" if there[1:] else "it"
                found.append(f"{words} of {names} is known in {known}: {text} of means that hold {which}.")
    return found


def _where(scores: Scores, label: str, reference: str | None = None) -> str:
    """Return a sentence on the number of fields in which a forecast is better.

    The reference, if none is given, is the best baseline, or the spread regression if the forecast has no CRPS.
    """
    lead = scores.headline_lead
    best = (reference or scores.best_baseline(lead)) if scores.score("crps", label) is not None else None
    metric, other = ("crps", best) if best else ("spread_rmse", reference or f"spread_regression_{scores.reduced}")
    pairs = scores.difference(metric, label, other)
    found = {
        scores.columns[c].title: pairs[c] for c in scores.at_lead(lead) if pairs and np.isfinite(pairs[c][1].value)
    }
    if not found:
        return ""
    better = sum(less.below(0) for less, _ in found.values())
    worse = sum(less.above(0) for less, _ in found.values())
    # The smallest and the largest gain are named, so that a mean over fields cannot hide a field with a loss.
    order = sorted(found, key=lambda name: found[name][1].value)
    low, high = order[0], order[-1]
    advantage = scores.advantage(metric, label, other)
    fields = f"{len(found)} field{'s' * (len(found) != 1)}"
    if not any(less.enough for less, _ in found.values()):
        surely = f"too few blocks of dates to be sure in any of {fields}"
    elif advantage:
        surely = f"not surely better in any of {fields}, {advantage}, surely worse in {worse}"
    else:
        surely = f"surely better in {better} of {fields}, surely worse in {worse}"
    gain = f"{found[low][1].value:+.1f} % ({low})"
    if high != low:
        gain = f"from {gain} to {found[high][1].value:+.1f} % ({high})"
    return f"{'CRPS' if best else 'spread RMSE'} against {short_name(other)}: {surely}; gain {gain}."


def _bias(scores: Scores, label: str) -> str:
    """Return a sentence on the bias of a forecast's mean, with the field where bias over RMSE is largest."""
    rmse = scores.score("rmse", label)
    if rmse is None:
        return ""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = _furthest(scores, "bias", label, 0.0, lambda bias: np.abs(bias) / rmse.value)
    if found is None:
        return ""
    column, bias, where = found
    of, share = scores.columns[column], 100 * abs(bias.value) / rmse.value[column]
    ends = f" ({bias.low:+.2g} to {bias.high:+.2g})" if np.isfinite(bias.low) else ""
    size = f"{bias.value:+.2g} {registered(of.variable).units}{ends}, {share:.0f} % of the RMSE"
    return f"mean {where.format('biased')}; largest for its RMSE in {of.title}: {size}."


def _spread(scores: Scores, label: str) -> str:
    """Return a sentence on a forecast's standard deviation over its RMSE, with the field furthest from 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = _furthest(scores, "spread_skill", label, 1.0, lambda ratio: np.abs(np.log(ratio)))
    if found is None:
        return ""
    column, ratio, where = found
    ends = f" ({ratio.low:.2f} to {ratio.high:.2f})" if np.isfinite(ratio.low) else ""
    size = f"{scores.columns[column].title}: {ratio.value:.2f}{ends}"
    return f"spread {where.format('too small or too large')}; standard deviation over RMSE furthest from 1 in {size}."


def _furthest(
    scores: Scores, metric: str, label: str, right: float, distance: Callable[[np.ndarray], np.ndarray]
) -> tuple[int, Interval, str] | None:
    """Find the field at the headline lead in which a metric of a forecast is furthest from its right value.

    Fields whose interval excludes the right value come first, because the largest deviation of all may be by chance.
    `distance` returns how far the values of all columns (C,) are off, NaN where it is not defined. The result is the
    position of the column on C, its interval, and a text with `{}` for an adjective, which tells how many fields are
    surely off; it is None if no field has the metric.
    """
    score = scores.score(metric, label)
    if score is None:
        return None
    away = distance(score.value)
    known = {
        c: one
        for c in scores.at_lead(scores.headline_lead).tolist()
        if np.isfinite(away[c]) and (one := scores.interval_of(metric, label, c)) is not None
    }
    if not known:
        return None
    off = [c for c, one in known.items() if one.excludes(right)]
    worst = max(off or known, key=lambda c: float(away[c]))
    fields = f"{len(known)} field{'s' * (len(known) != 1)}"
    where = f"surely {{}} in {len(off) or 'none'} of {fields}"
    if not any(one.enough for one in known.values()):
        where = f"{{}}: too few blocks of dates to be sure in any of {fields}"
    return worst, known[worst], where


def certainty(blocks: int, dates: int) -> str:
    """Return a sentence on how far the intervals can be trusted, given the numbers of blocks and of test dates."""
    counted = f"{dates} test date{'s' * (dates != 1)} in {blocks} independent block{'s' * (blocks != 1)}"
    if blocks < 2:
        return f"{counted}: too few for any interval."
    if blocks < FEWEST_BLOCKS:
        return f"{counted}: fewer than {FEWEST_BLOCKS}, so the intervals are only a rough guide."
    return f"{counted}."


def describe(entrant: str) -> str:
    """Return the name of an entrant in words."""
    kind, _, members = entrant.rpartition("_")
    words = {
        "raw": "the raw {} members",
        "size_corrected": "the size-corrected spread of {} members",
        "spread_regression": "the spread regression on {} members",
        "ecc": "ensemble copula coupling of {} corrected members",
        "start_regression": "the regression of the spread on that of {} members at the start",
        "held_out_regression": "the regression of the held-out spread on {} members",
        "global": "global bias-and-inflation of {} members",
        "local": "per-grid-point bias-and-inflation of {} members",
        "local_constant": "per-grid-point bias and constant sigma of {} members",
        "shrunk": "per-grid-point bias-and-inflation shrunk to global, {} members",
        "local_blend": "per-grid-point bias-and-inflation with a fitted share of s^2, {} members",
        "blend": "shrunk bias-and-inflation with a fitted share of s^2, {} members",
    }
    # The label of a forecast is returned as it is. `open_forecasts` gives no forecast the name of a baseline.
    if kind in words and members.isdigit():
        return words[kind].format(members)
    return "climatology of the fit dates" if entrant == "climatology" else entrant


def short_name(entrant: str) -> str:
    """Return a short name of an entrant, for charts and tables. The label of a forecast is returned unchanged."""
    return entrant.replace("_", " ") if describe(entrant) != entrant else entrant


def explained(entrants: Iterable[str | None]) -> str:
    """Return a sentence that explains the short names of raw ensembles and baselines; empty if there are none."""
    names = {short_name(one): describe(one) for one in dict.fromkeys(entrants) if one and describe(one) != one}
    return "; ".join(f"{short}: {words}" for short, words in names.items()) + "." * bool(names)


def rows(scores: Scores) -> list[dict]:
    """Return the `scores` of scores.json, one entry for each entrant and column.

    An entry has only the metrics that are defined for it. If there is none, there is no entry.
    """
    found = []
    for entrant in scores.entrants():
        per_metric = {name: score for name in METRICS if (score := scores.score(name, entrant)) is not None}
        for c, column in enumerate(scores.columns):
            figures = {}
            for name, score in per_metric.items():
                ends = scores.interval_of(name, entrant, c)
                if ends is not None:
                    plain = float(score.unweighted[c])
                    figures[name] = {"value": ends.value, "low": ends.low, "high": ends.high, "unweighted": plain}
            if figures:
                entry: dict = {"entrant": entrant, "lead_hours": column.lead_hours, "variable": column.variable}
                found.append(entry | {"level": column.level} | figures)
    return found


def summary_rows(scores: Scores) -> list[dict]:
    """Return the `summary` of scores.json: the geometric mean ratio of each entrant to each reference at each lead."""
    m, n = scores.reduced, scores.full
    references = {
        "crps": (f"raw_{n}", f"raw_{m}"),
        "spread_rmse": (f"raw_{m}", f"size_corrected_{m}", f"spread_regression_{m}", f"start_regression_{m}"),
        "held_out_rmse": (f"raw_{m}", f"size_corrected_{m}", f"spread_regression_{m}", f"held_out_regression_{m}"),
        "rmse": (f"raw_{n}", f"raw_{m}"),
    }
    found = []
    for lead in scores.leads:
        columns, best = scores.at_lead(lead), scores.best_baseline(lead)
        for metric, others in references.items():
            for other in (*others, best) if metric == "crps" and best else others:
                for entrant in scores.entrants():
                    ratio = scores.ratio(metric, entrant, other, columns) if entrant != other else None
                    if ratio is not None:
                        rest = scores.ratio(metric, entrant, other, scores.without_sp(lead))
                        found.append(
                            {"lead_hours": lead, "metric": metric, "entrant": entrant, "reference": other,
                             "ratio": ratio.value, "low": ratio.low, "high": ratio.high,
                             "unweighted": scores.unweighted_ratio(metric, entrant, other, columns),
                             "better": ratio.below(1.0), "best_baseline": other == best, "without_sp": _ends_of(rest)}
                        )  # fmt: skip
    return found


def comparison_rows(scores: Scores) -> list[dict]:
    """Return the `comparisons` of scores.json: each forecast against its main references in each field."""
    m, n = scores.reduced, scores.full
    found = []
    for label in scores.forecasts:
        pairs: list[tuple[str, str, int | None]] = [("crps", f"raw_{n}", None)]
        pairs += [("spread_rmse", f"{kind}_{m}", None) for kind in ("spread_regression", "size_corrected")]
        pairs += [
            (metric, other, None) for metric in ("crps", "spread_rmse") for other in scores.forecasts if other != label
        ]
        pairs += [("crps", best, lead) for lead in scores.leads if (best := scores.best_baseline(lead))]
        for metric, other, lead in pairs:
            for c, (less, percent) in enumerate(scores.difference(metric, label, other)):
                column = scores.columns[c]
                if (lead is None or column.lead_hours == lead) and np.isfinite(less.value):
                    found.append(
                        {"forecast": label, "reference": other, "metric": metric, "lead_hours": column.lead_hours,
                         "variable": column.variable, "level": column.level,
                         "difference": _ends(less), "gain_percent": _ends(percent), "better": less.below(0.0)}
                    )  # fmt: skip
    return found


def _ends_of(found: Interval | None) -> dict | None:
    return None if found is None else {"value": found.value, "low": found.low, "high": found.high}


def _ends(found: Interval) -> dict:
    return {"value": found.value, "low": found.low, "high": found.high, "blocks": found.blocks}
