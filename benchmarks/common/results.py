"""Write the results of a benchmark: results.json, and the same content as a page that needs no other file.

results.json holds `machine`, `commit`, `command`, `runs`, `figures` (name -> median, min, max, unit, for ours and for
each peer) and `claims`: one entry `{claim, value, unit, target, holds}` for each figure that was promised. A claim that
does not hold is published as such.
"""

from __future__ import annotations

import html
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student

from ensemble_ml.config import BenchmarkSize
from ensemble_ml.folders import strict, write_whole
from ensemble_ml.machine import processors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Figure:
    """The median and range of the values of several runs."""

    median: float
    min: float
    max: float
    unit: str

    @classmethod
    def of(cls, values: Sequence[float], unit: str) -> Figure:
        """Summarise values, one for each run.

        Args:
            values: the values.
            unit: their unit.
        """
        return cls(float(statistics.median(values)), float(min(values)), float(max(values)), unit)

    @classmethod
    def of_mean(cls, values: Sequence[float], unit: str) -> Figure:
        """Return the mean of the values of several seeds with its 95 % interval by Student's t.

        Args:
            values: the values; a single one has no interval, and stands for its ends.
            unit: their unit.
        """
        middle, count = statistics.fmean(values), len(values)
        if count == 1:
            return cls(middle, middle, middle, unit)
        half = float(student.isf(0.025, count - 1)) * statistics.stdev(values) / math.sqrt(count)
        return cls(middle, middle - half, middle + half, unit)


LOST = "Lost: "  # beginning of a note about a case in which another tool does better


def times_as_long(theirs: Sequence[float], ours: Sequence[float]) -> Figure:
    """Return how many times as long theirs takes as ours.

    The ratio is taken round by round: entrants take turns, so those of one round have the same noise of the machine.

    Args:
        theirs: seconds of the other tool, one for each round.
        ours: our seconds.
    """
    return Figure.of([a / b for a, b in zip(theirs, ours, strict=True)], "times")


@dataclass(frozen=True)
class Claim:
    """A promise in its own words.

    Attributes:
        claim: the promise.
        value: the measured value.
        unit: its unit.
        target: the smallest value that keeps the promise, or the largest one with `at_most`.
        at_most: whether the target is an upper limit.
    """

    claim: str
    value: float
    unit: str
    target: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the value keeps the promise. NaN never does."""
        return self.value <= self.target if self.at_most else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        """Return the entry of results.json."""
        plain = {"claim": self.claim, "value": self.value, "unit": self.unit, "target": self.target}
        return plain | {"holds": self.holds}


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, threads, memory, accelerator, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "processor": next(iter(processors()), platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(memory / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit() -> str:
    """Return the current commit, with `+` if files differ from it, or `unknown` outside a checkout."""
    head, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return "unknown" if head is None or changed is None else head + "+" * bool(changed)


def committed() -> float:
    """Return the time of the commit in seconds since 1970, or 0 outside a checkout."""
    return float(_git("log", "-1", "--format=%ct") or 0)


def _git(*command: str) -> str | None:
    """Return the output of a git command in this package's checkout, or None if it is in none."""
    here = Path(__file__).resolve().parent
    try:
        # The package may be installed in an environment inside another repository, whose commit would be wrong here.
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, check=True)
        said = subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True)
        return said.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_results(
    folder: Path,
    *,
    title: str,
    runs: int,
    figures: Mapping[str, Figure],
    claims: Sequence[Claim],
    notes: Sequence[str] = (),
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    size: BenchmarkSize = BenchmarkSize.full,
) -> Path:
    """Write results.json and report.html to a folder.

    Results of an earlier run, perhaps of other sections, are kept beside them as results.previous.json, with a warning.

    Args:
        folder: the folder.
        title: title of the page.
        runs: number of runs of each measurement.
        figures: the figures by name.
        claims: the claims.
        notes: sentences for the page.
        tables: further rows to publish, by title; the rows of a table have the same keys.
        size: the size that was run. Targets are those of the full size.

    Returns:
        The path of results.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "title": title,
        "machine": machine(),
        "commit": commit(),
        "command": ["ensemble-ml", *sys.argv[1:]] if sys.argv[1:2] == ["benchmark"] else None,
        "runs": runs,
        "size": size.value,
        "figures": {name: asdict(figure) for name, figure in figures.items()},
        "claims": [claim.to_json() for claim in claims],
        "notes": list(notes),
    } | ({"tables": {title: list(rows) for title, rows in tables.items()}} if tables else {})
    before = folder / "results.json"
    if before.exists():
        kept = before.replace(folder / "results.previous.json")
        log.warning("%s: results of an earlier run are kept as %s", before, kept.name)
    write_whole(folder / "report.html", _page(content))
    return write_whole(folder / "results.json", json.dumps(strict(content), indent=2, allow_nan=False) + "\n")


def summary(figures: Mapping[str, Figure], claims: Sequence[Claim], size: BenchmarkSize = BenchmarkSize.full) -> str:
    """Return figures and claims as text for a terminal.

    Args:
        figures: the figures by name.
        claims: the claims.
        size: the size that was run.
    """
    width = max((len(name) for name in figures), default=0)
    lines = [f"{n:{width}}  {f.median:10.4g} {f.unit}  ({f.min:.4g} to {f.max:.4g})" for n, f in figures.items()]
    for c in claims:
        lines.append(
            f"{'holds' if c.holds else 'DOES NOT HOLD'}: {c.claim}: {c.value:.4g} {c.unit}, target {c.target:g}"
        )
    if size is not BenchmarkSize.full:
        lines.append(f"size={size.value}: targets are of size=full, so that none of this is a claim")
    return "\n".join(lines)


_SMALLER = {False: "", True: ", not at full size, which targets are of: none of this is a claim"}
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}th,td{padding:.3em .8em;border-bottom:1px solid #ddd;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}.no{color:#b00020;font-weight:600}.yes{color:#0a6b2d}"
)


def _page(content: Mapping[str, Any]) -> str:
    """Return the content of results.json as a page in HTML."""
    figures = [
        [n, *(f"{f[k]:.4g}" for k in ("median", "min", "max")), f["unit"]] for n, f in content["figures"].items()
    ]
    claims = [[c["claim"], f"{c['value']:.4g}", f"{c['target']:g}", c["unit"], _verdict(c)] for c in content["claims"]]
    about = [[k, str(v)] for k, v in content["machine"].items()] + [["commit", content["commit"]]]
    parts = [
        f"<h1>{html.escape(content['title'])}</h1>",
        f"<p>Median and range of {content['runs']} runs{_SMALLER[content['size'] != 'full']}; where least and most are"
        " equal, of one run or a count. Notes say what other ranges are.</p>",
        _table(["claim", "value", "target", "unit", "holds"], claims),
        _table(["figure", "median", "least", "most", "unit"], figures),
        *(f"<p>{html.escape(note)}</p>" for note in content["notes"]),
        *(f"<h2>{html.escape(title)}</h2>{_rows(rows)}" for title, rows in content.get("tables", {}).items()),
        _table(["machine", ""], about),
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(content["title"])}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of rows, whose keys are the heads."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    return _table(heads, [["" if row.get(k) is None else str(row[k]) for k in heads] for row in rows])


def _verdict(claim: Mapping[str, Any]) -> str:
    """Return whether a claim holds, in a word."""
    return "yes" if claim["holds"] else "no"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML. Numbers are aligned to the right."""
    if not rows:
        return ""

    def cell(text: str) -> str:
        number = text.replace(".", "", 1).replace("e-", "").replace("-", "").isdigit()
        kind = "n" if number else text if text in ("yes", "no") else ""
        return f'<td class="{kind}">{html.escape(text)}</td>' if kind else f"<td>{html.escape(text)}</td>"

    top = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(cell(text) for text in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
