"""The folder that the sections of the benchmark share, and the results of a section."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.common.results import Claim, Figure
from benchmarks.prepare.data import SHAPES, Archive, Shape, archive
from ensemble_ml.config import BenchmarkSize


@dataclass
class Section:
    """The figures, claims and notes of one part of the benchmark."""

    figures: dict[str, Figure] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def speed(self, name: str, megabytes: float, seconds: Sequence[float]) -> list[float]:
        """Add a figure in MB/s (1e6 bytes a second), and return its values.

        Args:
            name: name of the figure.
            megabytes: size of the data.
            seconds: seconds of each run.
        """
        values = [megabytes / one for one in seconds]
        self.figures[name] = Figure.of(values, "MB/s")
        return values

    def least(self, claim: str, ours: Sequence[float], theirs: Sequence[float], target: float, unit: str) -> None:
        """Claim that ours is at least `target` times theirs, run by run.

        Args:
            claim: the promise in its own words.
            ours: our values, one for each run.
            theirs: the values of the other tool.
            target: the smallest ratio that keeps the promise.
            unit: "times" or "%".
        """
        factor = 100.0 if unit == "%" else 1.0
        ratios = [factor * a / b for a, b in zip(ours, theirs, strict=True)]
        self.figures[f"ratio: {claim}"] = Figure.of(ratios, unit)
        self.claims.append(Claim(claim, float(np.median(ratios)), unit, target))


@dataclass
class Workspace:
    """The data of one size, and scratch space for the output of entrants."""

    folder: Path
    size: BenchmarkSize
    repeats: int

    @property
    def shape(self) -> Shape:
        """Return the extent of the archive."""
        return SHAPES[self.size]

    @cached_property
    def archive(self) -> Archive:
        """Return the archive, which is made at the first call."""
        return archive(self.folder / self.size.value, self.shape)

    def scratch(self, name: str) -> str:
        """Return a path for the output of an entrant, and remove what is there already.

        Args:
            name: name of the output.
        """
        path = self.folder / "scratch" / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(path)

    def clean(self) -> None:
        """Remove the output of entrants; the archive stays."""
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)
