"""What every benchmark leaves: results.json, and the same as a page that needs nothing else.

results.json holds `machine`, `commit`, `command`, `runs`, `figures` (name -> median, min, max, unit, for ours and for
each peer) and `claims`: one entry for each figure that was promised, `{claim, value, unit, target, holds}`. A claim
that does not hold stands there as such.
"""

from __future__ import annotations

import html
import json
import logging
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

from ensemble_ml.config import BenchmarkSize
from ensemble_ml.folders import write_whole
from ensemble_ml.machine import processors
from ensemble_ml.strict_json import strict

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Figure:
    """Median and range of what several runs gave."""

    median: float
    min: float
    max: float
    unit: str

    @classmethod
    def of(cls, values: Sequence[float], unit: str) -> Figure:
        """Summarise one value a run."""
        return cls(float(statistics.median(values)), float(min(values)), float(max(values)), unit)


LOST = "Lost: "  # how a note begins that tells where another does better


def times_as_long(theirs: Sequence[float], ours: Sequence[float]) -> Figure:
    """How many times as long theirs takes, round by round: entrants take turns, so one round shares its noise."""
    return Figure.of([a / b for a, b in zip(theirs, ours, strict=True)], "times")


@dataclass(frozen=True)
class Claim:
    """One promise in its own words; `target` is the least value that keeps it, the most where `at_most`."""

    claim: str
    value: float
    unit: str
    target: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether the value keeps the promise; not a number never does."""
        return self.value <= self.target if self.at_most else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        """The entry of results.json."""
        plain = {"claim": self.claim, "value": self.value, "unit": self.unit, "target": self.target}
        return plain | {"holds": self.holds}


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, threads, memory, accelerator, versions."""
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
    """The commit that ran, with `+` where files differ from it; `unknown` outside a checkout."""
    head, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return "unknown" if head is None or changed is None else head + "+" * bool(changed)


def committed() -> float:
    """When that commit was made, in seconds since 1970; 0 outside a checkout."""
    return float(_git("log", "-1", "--format=%ct") or 0)


def _git(*command: str) -> str | None:
    """What git says of the checkout of this package; None where it lies in none."""
    here = Path(__file__).resolve().parent
    try:
        # The package may lie in an environment inside somebody else's repository.
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
    """Write `folder`/results.json and `folder`/report.html; return the path of the former. What an earlier run left
    there, of other sections perhaps, is kept beside them as results.previous.json, and told.

    `tables`: what else should be published, as rows with the same keys, by title. `size`: of what was run; targets are
    of the full one.
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
    """The same for a terminal."""
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
    heads = list(dict.fromkeys(key for row in rows for key in row))
    return _table(heads, [["" if row.get(k) is None else str(row[k]) for k in heads] for row in rows])


def _verdict(claim: Mapping[str, Any]) -> str:
    return "yes" if claim["holds"] else "no"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""

    def cell(text: str) -> str:
        number = text.replace(".", "", 1).replace("e-", "").replace("-", "").isdigit()
        kind = "n" if number else text if text in ("yes", "no") else ""
        return f'<td class="{kind}">{html.escape(text)}</td>' if kind else f"<td>{html.escape(text)}</td>"

    top = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(cell(text) for text in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
