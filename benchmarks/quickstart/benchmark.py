"""Turn the scores of `scripts/quickstart.sh` into a results file with claims.

Nothing is computed here. `scores.json` holds the scores of our model and of every baseline, from one run on the same
test dates. The range of a figure is its confidence interval, because there is only one run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.common.results import Claim, Figure, committed, summary, write_results
from benchmarks.common.sections import chosen
from ensemble_ml.config import BenchmarkConfig
from ensemble_ml.errors import UserError

_WITHOUT_SP = ", without surface pressure"


def run(config: BenchmarkConfig) -> Path:
    """Convert `config.run`/scores.json to OUTPUT/quickstart/results.json.

    Args:
        config: the settings of the benchmark.

    Returns:
        The path of results.json.

    Raises:
        UserError: there are no scores yet, or they are older than the commit that would be named beside them.
    """
    chosen(config.only, {})
    path = Path(config.run) / "scores.json"
    if not path.is_file():
        raise UserError(f"run={config.run}: holds no scores.json; run scripts/quickstart.sh, or evaluate, first")
    if path.stat().st_mtime < committed():
        raise UserError(f"{path}: older than this commit; run scripts/quickstart.sh, or evaluate, again")
    scores = json.loads(path.read_text())
    claims = [claim for entry in scores["claims"] for claim in _claims(entry)]
    figures = {_name(entry): _figure(entry, "ratio") for entry in scores["summary"]}
    rest = [entry for entry in scores["summary"] if entry.get("without_sp")]
    figures |= {f"{_name(entry)}{_WITHOUT_SP}": _figure(entry["without_sp"], "value") for entry in rest}
    print(summary(figures, claims, config.size))
    return write_results(
        Path(config.output) / "quickstart",
        title="The main job on the embedded archive (simulated)",
        runs=1,
        figures=figures,
        claims=claims,
        notes=[*scores["headline"], "Ranges are confidence intervals of the block bootstrap over test dates."],
        size=config.size,
    )


def _claims(entry: dict[str, Any]) -> list[Claim]:
    """Return the claims of one entry of the scores.

    Ratios have to stay below their target, and gains in per cent have to reach it. A second claim says that the
    interval excludes a difference of zero.
    """
    text, unit, ratio = entry["claim"], entry["unit"], entry["unit"] == "ratio"
    end = entry.get("high" if ratio else "low")
    found = [Claim(text, entry["value"], unit, entry["target"], at_most=ratio)]
    if end is not None:  # a single block has no interval
        words = f"{text}: {'upper' if ratio else 'lower'} end of the interval"
        sure = entry["enough_blocks"] and not entry["advantage"]  # the rule by which evaluate calls a difference sure
        found.append(Claim(words, end if sure else math.nan, unit, 1.0 if ratio else 1e-9, at_most=ratio))
    if rest := entry.get("without_sp"):
        found.append(Claim(f"{text}{_WITHOUT_SP}", rest["value"], unit, entry["target"], at_most=ratio))
    return found


def _name(entry: dict[str, Any]) -> str:
    """Return the name of a figure."""
    return f"{entry['metric']} {entry['lead_hours']} h: {entry['entrant']} over {entry['reference']}"


def _figure(entry: dict[str, Any], key: str) -> Figure:
    """Return a value with its confidence interval. A single block has none."""
    low, high = (float("nan") if entry[end] is None else entry[end] for end in ("low", "high"))  # one block has none
    return Figure(entry[key], low, high, "ratio")
