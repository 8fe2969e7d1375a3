"""Assemble an archive in ENS-10's layout from parts, each of which holds one init time.

In this layout, a file holds one calendar date of all years.
"""

from __future__ import annotations

import os
from collections import defaultdict
from datetime import datetime
from pathlib import Path

import numpy as np

from data_prep.simulate.realism import Realism, measure
from data_prep.simulate.schedule import ModelYear, valid_times
from data_prep.simulate.synthesis import regular_grid
from ensemble_ml.config import SimulateConfig
from ensemble_ml.folders import draft_of, write_whole
from ensemble_ml.grid import Grid

GATE = {"z500": ("z", 500), "t850": ("t", 850)}
"""Fields whose realism is checked: variable and level in hPa."""

STATIC = ("static.grib", "forecast_static.grib")
"""Files with orography and land mask: of the truth's model, then of the forecast's, which has another orography."""


def assemble(output: Path, years: list[ModelYear]) -> None:
    """Write ensemble/, truth/ and the static files from the parts. Each file appears only when it is complete.

    Args:
        output: the folder of the archive.
        years: all model years.
    """
    starts: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    truths: dict[datetime, tuple[Path, int]] = {}
    for year in years:
        for cycle in year.written:
            part = year.part(output, cycle)
            starts[f"{cycle.start:%m%d}"].append((part, 0))
            # A cycle ends at the valid time at which the next one begins. The truth is the same in both parts.
            truths |= {time: (part, k) for k, time in enumerate(valid_times(cycle))}
    by_date: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for time in sorted(truths):
        by_date[f"{time:%m%d}"].append(truths[time])
    for kind in ("pl", "sfc"):
        for name, parts in starts.items():
            _join(output / "ensemble" / f"{kind}_{name}.grib", [(part, f"ensemble_{kind}") for part, _ in parts])
        for name, parts in by_date.items():
            _join(output / "truth" / f"{kind}_{name}.grib", [(part, f"truth_{kind}_{k}") for part, k in parts])
    for name in STATIC:
        write_whole(output / name, (output / ".parts" / name).read_bytes())


def _join(path: Path, pieces: list[tuple[Path, str]]) -> None:
    """Write the messages of several parts to one file, in one step."""
    path.parent.mkdir(exist_ok=True)
    # Two machines may write the same file at once, so each has its own draft. Drafts of killed runs are removed with
    # the parts.
    draft = draft_of(path.parent.parent / ".parts" / path.name)
    with open(draft, "wb") as file:
        for part, key in pieces:
            with np.load(part) as arrays:
                file.write(arrays[key].tobytes())
    os.replace(draft, path)


def realism(output: Path, years: list[ModelYear], config: SimulateConfig) -> dict[str, Realism]:
    """Measure the realism of the ensemble's fields at 48 h over all dates of the archive.

    Args:
        output: the folder of the archive.
        years: all model years.
        config: the settings of the simulation.

    Returns:
        The figures of each field in `GATE`.
    """
    parts = [year.part(output, cycle) for year in years for cycle in year.written]
    grid = Grid(*regular_grid(config.rows, config.columns))
    figures = {}
    for name in GATE:
        stacks: dict[str, list[np.ndarray]] = {kind: [] for kind in ("mean", "variance", "truth")}
        for part in parts:
            with np.load(part) as arrays:
                for kind, stack in stacks.items():
                    stack.append(arrays[f"{name}_{kind}"])
        mean, variance, truth = (np.stack(stack) for stack in stacks.values())
        figures[name] = measure(mean, variance, truth, config.members, grid)
    return figures
