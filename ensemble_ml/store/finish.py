"""Make a store from the shards of its init times and their entries (`entry.py`).

This writes arrays, packing factors, statistics, attributes, sources and the manifest.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.store.entry import DateEntry
from ensemble_ml.store.factors import dates_together, write_factors
from ensemble_ml.store.manifest import Entry, make_manifest, write_manifest
from ensemble_ml.store.metadata import create_arrays, write_metadata
from ensemble_ml.store.plan import BuildPlan
from ensemble_ml.store.schema import PLAN_KEY, Kind
from ensemble_ml.store.source import Part
from ensemble_ml.store.sources import SourceTable
from ensemble_ml.store.statistics import Moments, stack


@dataclass
class _Sum:
    """The sum of the entries of all init times. The moments of a year are merged in the order of the dates."""

    files: dict[str, Entry] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    masked: set[str] = field(default_factory=set)
    masks: set[str] = field(default_factory=set)
    held: set[Part] = field(default_factory=set)
    moments: dict[tuple[Part, Kind, int], Moments] = field(default_factory=dict)
    sources: SourceTable = field(default_factory=SourceTable)

    def add(self, entry: DateEntry, plan: BuildPlan, year: int) -> None:
        """Add one entry, whose init time lies in `year`."""
        self.files |= entry.files
        self.masked |= entry.masked
        self.masks |= entry.masks
        for name, bound in entry.errors.items():
            self.errors[name] = max(bound, self.errors.get(name, 0.0))
        for (part, _), spec in plan.specs.items():
            if spec.name in entry.factors and entry.factors[spec.name]["present"].any():
                self.held.add(part)
        of_members = {(Part.FORECAST, kind): moments for kind, moments in entry.moments.items()}
        for key, moments in {**of_members, **entry.derived}.items():
            before = self.moments.get((*key, year))
            self.moments[(*key, year)] = moments if before is None else before.merge(moments)


def finish_store(root: Path, plan: BuildPlan, entries: Iterable[tuple[int, DateEntry]]) -> None:
    """Write everything but the shards into `root`, and remove shards that no entry names.

    All other files that stand there are removed first, so this may be called again after an interruption.

    Args:
        root: Folder of the store, with its shards.
        plan: Plan of the store's contents.
        entries: Index of an init time and its entry, in ascending order.

    Raises:
        UserError: There is no field at all.
        OSError: A file cannot be written.
    """
    specs = list(plan.specs.values())
    _clear(root)
    create_arrays(root, specs)
    years = plan.layout.init_time.astype("datetime64[Y]").astype(int) + 1970
    together, total = (dates_together(specs) if specs else 1), _Sum()
    for date, entry in write_factors(root, specs, entries, together):
        total.add(entry, plan, int(years[date]))
        total.sources.add(str(plan.layout.init_time[date].astype("datetime64[m]")), entry.sources)
    if not total.files:
        raise UserError(f"store {root}: nothing was written; the input holds no field that was asked for")
    # Masks are known only now: an array gets one only where a field of it has points without a value.
    create_arrays(root, [spec.mask for spec in specs if spec.mask.name in total.masks])
    attributes = {
        "packing": plan.packing.value,
        "parts": [part.value for part in plan.parts],
        "held": [part.value for part in plan.parts if part in total.held],
        "factor_dates": together,
        "lead_bounds": plan.lead_bounds,
        "masked": [name for name in plan.layout.names if name in total.masked],
        "quantisation_error": dict(sorted(total.errors.items())),
        "provenance": plan.provenance,
        PLAN_KEY: plan.digest,
    }
    write_metadata(root, plan.layout, attributes, plan.static, _yearly(plan, np.unique(years), total))
    total.sources.write(root)
    _remove_strangers(root, total.files)
    write_manifest(root, make_manifest(root, total.files))


def _yearly(plan: BuildPlan, years: np.ndarray, total: _Sum) -> tuple[np.ndarray, dict[tuple[Part, Kind], Moments]]:
    """Return the years (N,) and, by part and kind, the moments of each year, stacked along a first axis.

    The parts are the members' values, the fields of the ensemble mean, and the fields of the spread. A year without
    values has the moments of nothing.
    """
    yearly = {}
    for part, kind in product((Part.FORECAST, Part.MEAN, Part.SPREAD), Kind):
        spec = plan.specs.get((part, kind))
        if spec is not None:
            nothing = Moments.nothing(spec.fields[1:])
            yearly[part, kind] = stack(total.moments.get((part, kind, int(year)), nothing) for year in years)
    return years, yearly


def _clear(root: Path) -> None:
    """Remove everything that an interrupted call has left, except shards."""
    for path in list(root.iterdir()):
        if path.is_file():
            path.unlink()
        elif not any(item.name.startswith("c.") for item in path.iterdir()):
            shutil.rmtree(path)
        else:
            for item in list(path.iterdir()):
                if not item.name.startswith("c."):  # metadata, drafts of it (zarr-python's *.partial) and of shards
                    item.unlink()


def _remove_strangers(root: Path, files: dict[str, Entry]) -> None:
    """Remove shards that no entry names; killed builders have left them."""
    for path in root.glob("*/*"):
        if path.name.startswith("c.") and path.relative_to(root).as_posix() not in files:
            path.unlink()
