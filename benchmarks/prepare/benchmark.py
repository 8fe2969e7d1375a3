"""Compare `prepare` with other tools: conversion, decoding, reductions, reading, memory, kills and workers.

    ensemble-ml benchmark benchmark=prepare [size=full] [only=[conversion,decoding]] [workspace=FOLDER]

The benchmark makes the archive itself (`prepare.data`): one date of ENS-10's size, 1.2 GB of 16-bit GRIB. Entrants
run in their own processes and take turns. Every section can be run alone.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.results import summary, write_results
from benchmarks.common.sections import chosen
from benchmarks.prepare import robustness, sections
from benchmarks.prepare.workspace import Section, Workspace
from ensemble_ml.config import BenchmarkConfig

log = logging.getLogger(__name__)

SECTIONS: dict[str, Callable[[Workspace], Section]] = {
    "conversion": sections.conversion,
    "memory": sections.memory,
    "decoding": sections.decoding,
    "reduction": sections.reduction,
    "reading": sections.reading,
    "kills": robustness.kills,
    "workers": robustness.workers,
    "real": robustness.real,
}


def run(config: BenchmarkConfig) -> Path:
    """Run all sections, or those of `only`, and write results.json and report.html.

    Args:
        config: the settings of the benchmark.

    Returns:
        The path of results.json.

    Raises:
        UserError: `only` names an unknown section, or an entrant failed.
    """
    names = chosen(config.only, SECTIONS)
    if config.workspace is not None:
        return _run(config, names, Path(config.workspace))
    Path(config.output).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prepare-", dir=config.output) as folder:
        return _run(config, names, Path(folder))


def _run(config: BenchmarkConfig, names: list[str], folder: Path) -> Path:
    """Run sections in a folder, and write the results."""
    work, total = Workspace(folder, config.size, config.repeats), Section()
    # The archive is made here, so that no section's time includes it.
    _ = work.archive
    for name in names:
        start = time.monotonic()
        found = SECTIONS[name](work)
        work.clean()
        total.figures |= found.figures
        total.claims += found.claims
        total.notes += found.notes
        log.info("%s (%.0f s)\n%s", name, time.monotonic() - start, summary(found.figures, found.claims, config.size))
    extent = work.shape
    title = f"prepare, on {extent.fields} fields of {extent.rows} x {extent.columns} points a date"
    return write_results(
        Path(config.output) / "prepare",
        title=title,
        runs=config.repeats,
        figures=total.figures,
        claims=total.claims,
        notes=total.notes,
        size=config.size,
    )
