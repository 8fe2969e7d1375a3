"""A benchmark in sections, each of which can be run alone: `only=[NAME,...]`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ensemble_ml.benchmarks.results import Claim, Figure, summary, times_as_long, write_results
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, require

log = logging.getLogger(__name__)


@dataclass
class Bench:
    """Settings, a folder to work in, and what the sections have found so far."""

    config: BenchmarkConfig
    folder: Path
    figures: dict[str, Figure] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def tiny(self) -> bool:
        """Whether this run only shows that everything runs."""
        return self.config.size is BenchmarkSize.tiny

    def claim(self, words: str, value: float, unit: str, target: float, *, at_most: bool = False) -> None:
        """Add a claim."""
        self.claims.append(Claim(words, value, unit, target, at_most))

    def race(self, words: str, theirs: Sequence[float], ours: Sequence[float], target: float) -> None:
        """Claim how many times as long theirs takes as ours, and keep the figure: a claim near its target shows there
        whether all rounds reach it."""
        self.figures[words] = times_as_long(theirs, ours)
        self.claim(words, self.figures[words].median, "times", target)

    def publish(self, folder: Path, title: str) -> Path:
        """Tell the log, and write `folder`/results.json and report.html; returns the path of the former."""
        log.info("%s", summary(self.figures, self.claims, self.config.size))
        return write_results(
            folder, title=title, runs=self.config.repeats, figures=self.figures, claims=self.claims, notes=self.notes,
            tables=self.tables, size=self.config.size,
        )  # fmt: skip


B = TypeVar("B", bound=Bench)


def chosen(only: Sequence[str] | None, sections: Mapping[str, object]) -> list[str]:
    """Names of the sections to run, in their order.

    Raises:
        UserError: one is not there.
    """
    for name in only or ():
        there = f"sections are {', '.join(sections)}" if sections else "this benchmark has no sections"
        require("only", name, name in sections, there)
    return [name for name in sections if only is None or name in only]


def run_sections(bench: B, sections: Mapping[str, Callable[[B], None]]) -> B:
    """Let the chosen sections add to `bench`, and return it."""
    for name in chosen(bench.config.only, sections):
        start = time.monotonic()
        log.info("%s: %s", bench.config.benchmark, name)
        sections[name](bench)
        log.info("%s: %s took %.0f s", bench.config.benchmark, name, time.monotonic() - start)
    return bench
