"""The folder that the sections of the benchmark share, and what a section hands back."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ensemble_ml.benchmarks.preparing.data import SHAPES, Archive, Shape, archive
from ensemble_ml.benchmarks.results import Claim, Figure
from ensemble_ml.config import BenchmarkSize


@dataclass
class Section:
    """Figures, claims and sentences of one part of the benchmark."""

    figures: dict[str, Figure] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def speed(self, name: str, megabytes: float, seconds: Sequence[float]) -> list[float]:
        """Add a figure in MB/s (1e6 bytes a second) and return its values."""
        values = [megabytes / one for one in seconds]
        self.figures[name] = Figure.of(values, "MB/s")
        return values

    def least(self, claim: str, ours: Sequence[float], theirs: Sequence[float], target: float, unit: str) -> None:
        """Claim that ours is at least `target` times theirs, run by run; `unit` may be `%`."""
        factor = 100.0 if unit == "%" else 1.0
        ratios = [factor * a / b for a, b in zip(ours, theirs, strict=True)]
        self.figures[f"ratio: {claim}"] = Figure.of(ratios, unit)
        self.claims.append(Claim(claim, float(np.median(ratios)), unit, target))


@dataclass
class Workspace:
    """Data of one size, and scratch space for what entrants write."""

    folder: Path
    size: BenchmarkSize
    repeats: int

    @property
    def shape(self) -> Shape:
        """Extent of the archive."""
        return SHAPES[self.size]

    @cached_property
    def archive(self) -> Archive:
        """The archive, made at the first call."""
        return archive(self.folder / self.size.value, self.shape)

    def scratch(self, name: str) -> str:
        """Path of something that an entrant writes, removed where it stands already."""
        path = self.folder / "scratch" / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(path)

    def clean(self) -> None:
        """Remove what entrants have written; the archive stays."""
        shutil.rmtree(self.folder / "scratch", ignore_errors=True)
