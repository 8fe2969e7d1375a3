"""Run a benchmark in sections, each of which can be run alone with `only=[NAME,...]`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common.results import Claim, Figure, summary, times_as_long, write_results
from ensemble_ml.config import BenchmarkConfig, BenchmarkSize, require

log = logging.getLogger(__name__)


@dataclass
class Bench:
    """A benchmark: its settings, its folder, which is created, and the results so far."""

    config: BenchmarkConfig
    folder: Path
    figures: dict[str, Figure] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def tiny(self) -> bool:
        """Return whether this run is a smoke test at the smallest size, whose figures do not count."""
        return self.config.size is BenchmarkSize.tiny

    def claim(self, words: str, value: float, unit: str, target: float, *, at_most: bool = False) -> None:
        """Add a claim.

        Args:
            words: the claim as a sentence.
            value: the measured value.
            unit: its unit.
            target: the smallest value with which the claim holds, or the largest one with `at_most`.
            at_most: whether the target is an upper limit.
        """
        self.claims.append(Claim(words, value, unit, target, at_most))

    def race(self, words: str, theirs: Sequence[float], ours: Sequence[float], target: float) -> None:
        """Add the claim that the other tool takes at least `target` times as long as this package.

        The ratio is also published as a figure, whose range shows whether every round reaches the target.

        Args:
            words: the claim as a sentence.
            theirs: seconds of the other tool, one for each round.
            ours: seconds of this package.
            target: the smallest ratio with which the claim holds.
        """
        self.figures[words] = times_as_long(theirs, ours)
        self.claim(words, self.figures[words].median, "times", target)

    def publish(self, title: str, folder: Path | None = None) -> Path:
        """Log the results, and write results.json and report.html.

        Args:
            title: title of the page.
            folder: where to write them; None for the folder of the benchmark.

        Returns:
            The path of results.json.
        """
        log.info("%s", summary(self.figures, self.claims, self.config.size))
        return write_results(
            folder or self.folder, title=title, runs=self.config.repeats, figures=self.figures, claims=self.claims,
            notes=self.notes, tables=self.tables, size=self.config.size,
        )  # fmt: skip


B = TypeVar("B", bound=Bench)


def chosen(only: Sequence[str] | None, sections: Mapping[str, object]) -> list[str]:
    """Return the names of the sections to run, in the order of `sections`.

    Args:
        only: the names that the settings give, or None for all.
        sections: all sections.

    Raises:
        UserError: a name is unknown.
    """
    for name in only or ():
        there = f"sections are {', '.join(sections)}" if sections else "this benchmark has no sections"
        require("only", name, name in sections, there)
    return [name for name in sections if only is None or name in only]


def run_sections(bench: B, sections: Mapping[str, Callable[[B], None]]) -> B:
    """Run the chosen sections, which add their results to `bench`, and return it.

    Args:
        bench: the benchmark.
        sections: all sections by name.
    """
    for name in chosen(bench.config.only, sections):
        start = time.monotonic()
        log.info("%s: %s", bench.config.benchmark, name)
        sections[name](bench)
        log.info("%s: %s took %.0f s", bench.config.benchmark, name, time.monotonic() - start)
    return bench


def benchmark(
    title: str,
    sections: Mapping[str, Callable[[B], None]],
    bench: Callable[[BenchmarkConfig, Path], B] = Bench,  # type: ignore[assignment]  # B is Bench by default
) -> Callable[[BenchmarkConfig], Path]:
    """Return the function that `ensemble-ml benchmark` calls.

    It runs the chosen sections, writes OUTPUT/NAME/results.json and report.html, and returns the path of the former. A
    UserError says that `only` names an unknown section, or that a section cannot be run.

    Args:
        title: title of the page.
        sections: all sections by name.
        bench: makes the benchmark from its settings and its folder.
    """

    def run(config: BenchmarkConfig) -> Path:
        return run_sections(bench(config, Path(config.output) / config.benchmark), sections).publish(title)

    return run
