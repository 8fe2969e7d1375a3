"""Write the model card of a checkpoint: its training data, its scores and its limits.

The headings follow Mitchell et al. (2019), doi:10.1145/3287560.3287596. Every number comes from the checkpoint or from
scores.json. If something is not known, the card says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ensemble_ml.fields import Family
from ensemble_ml.fields import field as registered
from ensemble_ml.models import ModelSpec
from ensemble_ml.models.compact import described, in_words
from ensemble_ml.training.checkpoint import predicts_members
from ensemble_ml.training.tournament import lineage, tree

_NAMES = {Family.CENSORED_SHIFTED_GAMMA: "censored shifted gamma"}  # names that differ from those in settings


def model_card(spec: ModelSpec, meta: Mapping[str, Any], scores: Mapping[str, Any] | None) -> str:
    """Return the model card of a checkpoint as Markdown text, from the contents of checkpoint.json and scores.json.

    Scores are None if the model has not been evaluated. Those of forecasts of other checkpoints are left out.
    """
    scores = None if scores is None else _of_checkpoint(scores, meta["sha256"])
    parts = [f"# Model card: {meta['config'].get('run', 'unnamed run')}", _what(spec, meta), _data(spec, meta)]
    parts += [_split(meta, scores), *_tournaments(meta), _scores(scores), _limits(spec, meta, scores), _use(meta)]
    return "\n\n".join(parts) + "\n"


def _of_checkpoint(scores: Mapping[str, Any], sha256: str) -> dict[str, Any]:
    """Return the content of scores.json, reduced to the forecasts of one checkpoint.

    Claims and strata name their forecast. Notes and headlines are plain sentences. They begin with the label of their
    forecast, so the first words decide.
    """
    every = [one["label"] for one in scores["forecasts"] if not one.get("baseline")]
    mine = {one["label"] for one in scores["forecasts"] if sha256 in one.get("checkpoints", ())}
    found = dict(scores)
    found["claims"] = [claim for claim in scores["claims"] if claim.get("forecast") in mine]
    found["strata"] = [row for row in scores.get("strata", ()) if row["forecast"] in mine]
    others = tuple(f"{label}, " for label in every if label not in mine)
    # Notes are also written about baselines, which are not in `every`.
    labels = [one["label"] for one in scores["forecasts"] if one["label"] not in mine]
    theirs = tuple(f"{label}{rest}" for label in labels for rest in (": ", " was ", " does not state ", " gives "))
    found["notes"] = [line for line in scores["notes"] if not line.startswith(theirs)]
    found["headline"] = [line for line in scores["headline"] if not line.startswith(others)]
    return found


def _what(spec: ModelSpec, meta: Mapping[str, Any]) -> str:
    """Return a table: what the model predicts, from which inputs, and how it was trained."""
    every = meta.get("full_members")
    predicts = [f"the full ensemble's spread{f', of {every} members' if every else ''}"] * spec.config.spread
    of = "another member, in place of the truth" if predicts_members(meta) else "the truth"
    predicts += [f"the distribution of {of}"] * spec.config.postprocess
    # With other numbers of members, a forecast extrapolates.
    sizes = _sizes(meta)
    shown = f"; trained with {_listed(sizes)}" if sizes else ""
    rows = [
        ("predicts", " and ".join(predicts)),
        ("from", f"a reduced ensemble of {spec.config.min_members} or more members{shown}"),
        ("network", spec.config.name + _channels(spec)),
        ("training", f"{meta['step']} of {meta['steps']} steps, seed {meta['seeds']['seed']}"),
        *_compacted(meta),
        ("hours of init times", f"{_listed(sorted({date[11:13] for date in meta['training_dates']}))} UTC"),
        ("calibration", _calibration(spec, meta) + _of(meta)),
        ("checkpoint", f"sha256 `{meta['sha256']}`"),
        ("versions", ", ".join(f"{name} {version}" for name, version in meta["versions"].items())),
    ]
    return _table(("", ""), rows)


def _compacted(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the table row on the larger model that this one was cut out of; an empty list if there was none."""
    facts = meta.get("compacted")
    if facts is None:
        return []
    after = meta["scores"].get("crps_ratio") if meta.get("validated_step", meta["step"]) == meta["step"] else None
    text = f"cut out of the checkpoint with sha256 `{facts['from']}`: {described(facts)} there"
    return [("compaction", f"{text}; {in_words(facts, after)}")]


def _sizes(meta: Mapping[str, Any]) -> list[int]:
    """Return the sizes of the member subsets that training drew, in ascending order."""
    return sorted(meta.get("config", {}).get("data", {}).get("members") or ())


def _of(meta: Mapping[str, Any]) -> str:
    """Return in words which weights were calibrated; an empty text if none, or those of the checkpoint."""
    step = meta.get("validated_step", meta["step"])
    if not meta.get("widths") or step == meta["step"]:
        return ""
    # No validation of this run has changed the factors that it began with.
    if step is None:
        return " (of the run that this one began from)"
    return f" (of the weights of step {step}; these are of step {meta['step']})"


def _channels(spec: ModelSpec) -> str:
    """Return the numbers of channels in words, for a network that has several resolutions."""
    config = spec.config
    if config.widths or config.inner:
        widths, inner = config.channels()
        return f", {_listed(widths)} channels at its levels, {_listed(inner)} inside its residual blocks"
    return f", {config.hidden} to {config.max_hidden} channels" if config.pools else ""


def _calibration(spec: ModelSpec, meta: Mapping[str, Any]) -> str:
    """Return in words how the scale was calibrated: for how many fields, by which factors, for how many members."""
    widths, members = meta.get("widths"), meta["config"]["data"]["validation_members"]
    if not spec.config.postprocess:
        return "none: the model predicts only the spread"
    if not widths:
        return "none: there was no validation date with a truth"
    found, count = _validated(widths), sum(map(len, widths))
    if not found:
        return "none: too few validation dates had a truth"
    between = f"{min(found):.3f} to {max(found):.3f}"
    sizes = sorted(map(int, meta.get("widths_by_size", ())))
    others = f"; other factors for {_listed(sizes)} members" if sizes else ""
    which = "each lead, variable and level" if len(found) == count else f"{len(found)} of {count} fields"
    return f"the scale of {which} is multiplied by {between}, from validation with at most {members} members{others}"


def _validated(widths: Sequence[Sequence[float]] | None) -> list[float]:
    """Return the calibration factors that validation dates gave. All other fields have a factor of exactly one."""
    return [one for row in widths or () for one in row if one != 1.0]


def _data(spec: ModelSpec, meta: Mapping[str, Any]) -> str:
    """Return the section on the training data: the store, the lead times and a table of the variables."""
    rows = []
    for name in (*spec.variables, *spec.surface):
        known = registered(name)
        levels = ", ".join(map(str, spec.levels)) + " hPa" if name in spec.variables else "surface"
        distribution = _NAMES.get(spec.family(name), spec.family(name).value.replace("_", " "))
        rows.append((f"`{name}`", known.long_name, known.units, levels, _over(meta, name), distribution))
    heads = ("variable", "", "units", "levels", "over", "distribution")
    return (
        f"## Data\n\nStore fingerprint `{meta['data_fingerprint']}`, grid {spec.grid.describe()}. Lead times in: "
        f"{_listed(spec.leads_in)} h; predicted: {_listed(spec.leads_out)} h. Static fields: "
        f"{_listed(spec.static) or 'none'}.\n\n{_table(heads, rows)}"
    )


def _over(meta: Mapping[str, Any], name: str) -> str:
    """Return the hours over which a variable is a sum, a mean or an extreme; empty if the archive states none."""
    intervals = meta.get("lead_bounds", {}).get(name) or ()
    return _listed(f"{first} to {last} h" for first, last in filter(None, intervals))


def _split(meta: Mapping[str, Any], scores: Mapping[str, Any] | None) -> str:
    """Return the section on the dates of training, validation and test, with the test dates that training has seen."""
    rows = [("training", *_span(meta["training_dates"])), ("validation", *_span(meta["validation_dates"]))]
    # The weights may have been initialised from another run, whose dates they have seen as well.
    earlier = meta.get("earlier_dates", {})
    rows += [(f"{part} of earlier runs", *_span(dates)) for part, dates in earlier.items()]
    if scores is not None:
        rows.append(("test", *_span(scores["dates"]["test"])))
    best = meta.get("best") or {}
    chose = meta["validation_dates"] and best.get("step") == meta["step"]
    chosen = f"{'The validation dates' if chose else 'No date'} chose the checkpoint; "
    parts = (meta["training_dates"], meta["validation_dates"], *earlier.values())
    seen = {np.datetime64(date, "ns") for dates in parts for date in dates}
    if scores is None:
        apart = "no test dates are known"
    else:
        tested = sum(np.datetime64(date, "ns") in seen for date in scores["dates"]["test"])
        apart = f"{tested} test dates had a part in training" if tested else "test dates had no part in training"
    return f"## Split\n\n{_table(('', 'init times', 'from', 'to'), rows)}\n\n{chosen}{apart}."


def _tournaments(meta: Mapping[str, Any]) -> list[str]:
    """Return the section on competing trainers; an empty list without a tournament."""
    rounds = meta.get("tournaments") or []
    if not rounds:
        return []
    trainers = len(rounds[0]["from"])
    heads = "after step", *(f"trainer {trainer}" for trainer in range(trainers))
    whose = "the mean of the last weights of all trainers"
    if "soup" not in meta:
        whose = f"trained by trainer {meta['trainer']} last ({lineage(rounds, meta['trainer'])})"
    text = f"{trainers} trainers competed by their scores on the validation dates; these weights are {whose}."
    return [f"## Tournaments\n\n{text} `<-` says whose weights a trainer took.\n\n{_table(heads, tree(rounds))}"]


def _span(dates: list[str]) -> tuple[str, str, str]:
    """Return the number of dates, the first and the last one, as texts."""
    return (str(len(dates)), min(dates)[:10], max(dates)[:10]) if dates else ("0", "", "")


def _scores(scores: Mapping[str, Any] | None) -> str:
    """Return the section on scores: the headline and the table of claims."""
    if scores is None:
        return (
            "## Scores\n\nNot evaluated: no scores.json was given. Run `ensemble-ml evaluate`, then export again with "
            "`scores=`."
        )
    lines = "\n".join(f"- {line}" for line in scores["headline"])
    rows = [
        (
            claim["claim"],
            f"{claim['value']:.4g} {claim['unit']}",
            _interval(claim),
            # As in the report, a claim is compared with no gain, and not with the targets of the benchmarks.
            "yes" if (claim["value"] < 1 if claim["unit"] == "ratio" else claim["value"] > 0) else "**no**",
            _certain(claim),
        )
        for claim in scores["claims"]
    ]
    return f"## Scores\n\n{lines}\n\n{_table(('claim', 'measured', 'interval', 'better', 'certain'), rows)}"


def _certain(claim: Mapping[str, Any]) -> str:
    """Return "yes" if a claim is certain, otherwise "no" and, if it is known, the reason."""
    if claim.get("certain"):
        return "yes"
    why = claim.get("advantage") or ("" if claim.get("enough_blocks", True) else "few blocks")
    return f"no, {why}" if why else "no"


def _interval(claim: Mapping[str, Any]) -> str:
    """Return the confidence interval of a claim as text."""
    if claim.get("low") is None or claim.get("high") is None:
        return "none"
    return f"{claim['low']:.4g} to {claim['high']:.4g}"


def _limits(spec: ModelSpec, meta: Mapping[str, Any], scores: Mapping[str, Any] | None) -> str:
    """Return the section on limits: general ones, notes of the evaluation, where the model is worse, input ranges."""
    lines = [
        "It takes only the grid, variables, levels and lead times above. Other inputs are refused with a reason.",
        f"It was trained on {len(meta['training_dates'])} init times. For other seasons and regimes it extrapolates.",
        "It is tied to the forecasting system of the training data. Train it again after a change of that system.",
    ]
    if _validated(meta.get("widths")) and spec.config.postprocess:
        lines.append(
            "It is calibrated on average. A single forecast may be off, most if the ensemble is far from its climate."
        )
    if predicts_members(meta):
        lines.append(
            "It was trained to predict a member that it did not get as input (objective=members). Its sigma is the"
            " spread of members and lacks the error of their model. Use it to start training on a truth."
        )
    if not spec.config.postprocess:
        lines.append("It predicts the spread of the ensemble, which need not be the error of its mean.")
    if scores is not None:
        lines += list(scores["notes"])
        lines += _worse(scores)
    listed = "\n".join(f"- {line}" for line in lines)
    return f"## Limits\n\n{listed}{_ranges(meta)}"


def _worse(scores: Mapping[str, Any]) -> list[str]:
    """Return a line for each case in which a forecast has a significantly worse CRPS than its reference.

    A line names the forecast, the region, season or kind of weather, and the lead.
    """
    rows = scores.get("strata", ())
    about = {row["forecast"] for row in rows}
    sizes = {one["label"]: len(one.get("members_in", ())) for one in scores["forecasts"] if one["label"] in about}
    lines = []
    for row in rows:
        if row["metric"] == "crps" and row.get("worse"):
            size = sizes[row["forecast"]]
            # Two forecasts with the same number of members are told apart by their labels.
            alone = size and list(sizes.values()).count(size) == 1
            who = f"From {size} member{'s' * (size != 1)}" if alone else row["forecast"]
            where = f"{row['stratum']}, {row['lead_hours']} h"
            lines.append(f"{who}, {where}: worse than {row['reference']}, CRPS x {row['ratio']:.3f}.")
    return lines


def _ranges(meta: Mapping[str, Any]) -> str:
    """Return the table of the smallest and largest input values in training."""
    rows = []
    for name, found in (meta.get("input_range") or {}).items():
        by_level = found.items() if isinstance(found, Mapping) else [("surface", found)]
        rows += [(f"`{name}`", level, f"{low:.4g}", f"{high:.4g}") for level, (low, high) in by_level]
    if not rows:
        return ""
    return "\n\nRange of the inputs in training:\n\n" + _table(("variable", "level", "least", "most"), rows)


def _use(meta: Mapping[str, Any]) -> str:
    """Return the section with the command for a forecast from as many members as training has seen, or 5 if unknown."""
    sizes = _sizes(meta)
    members = 5 if 5 in sizes or not sizes else sizes[len(sizes) // 2]
    command = f"ensemble-ml predict checkpoint=THIS_FOLDER input=ARCHIVE members_in={members} output=forecast"
    return (
        f"## Use\n\n    {command}\n\n"
        "Open a forecast with xarray; each variable's attributes describe it. Forecasts carry the checkpoint's hash."
    )


def _listed(values: Any) -> str:
    """Return values as one text, separated by commas."""
    return ", ".join(str(value) for value in values)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [" | ".join(heads), " | ".join("---" for _ in heads), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)
