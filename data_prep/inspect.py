"""The report of `ensemble-ml inspect` on an archive: what `prepare` would take, what it would leave out, and why.

Everything follows from the tables of the files. Values are read only of variables that state no units, to check that
they agree with the registry's (see `data_prep.limits`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.archive import ArchiveSource, open_archive
from data_prep.file_index import user_index
from data_prep.gaps import find_gaps
from data_prep.geometry import ReducedGrid
from data_prep.records import CONTROL, IS_ACCUMULATED
from data_prep.zarr_chunks import is_zarr
from ensemble_ml.config import as_list, is_dataset, shown_input
from ensemble_ml.fields import FIELDS
from ensemble_ml.store.source import Part

_REASONS = (
    "a sum at the start of the forecast, which is zero",
    "of the control, where no member has it, or over other hours than the members'",
    "over other hours than those that are taken",
)


def describe_archive(paths: Any) -> dict[str, Any]:
    """Return what `prepare` would take of an archive with its default settings, as plain values that JSON can hold.

    Raises:
        UserError: nothing is there, a file is damaged, or the archive holds no forecast.
    """
    source = open_archive(paths, index=user_index(), several_grids=True)
    layout, used = source.layout, source.rows()
    times = layout.init_time.astype("datetime64[m]")
    years, counts = np.unique(times.astype("datetime64[Y]").astype(int) + 1970, return_counts=True)
    gaps = [gap for part in (Part.FORECAST, Part.CONTROL) for gap in find_gaps(source, part)]
    return {
        "archive": [shown_input(path) for path in as_list(paths)],
        "dates": {
            "count": len(times),
            "first": str(times[0]),
            "last": str(times[-1]),
            "by_year": {str(year): int(count) for year, count in zip(years, counts, strict=True)},
        },
        "members": list(layout.realization),
        "control": source.has(Part.CONTROL),
        "lead_hours": list(layout.lead_hours),
        "lead_bounds": source.lead_bounds,
        "cut": dict(source.cut),
        "variables": list(layout.variables),
        "levels": list(layout.levels),
        "surface": list(layout.surface),
        "static": sorted({FIELDS[index].name for index in source.catalogue.static_records["field"].tolist()}),
        "grid": _grids(source),
        "gaps": {
            "fields": sum(gap.count for gap in gaps),
            "dates": len({gap.date for gap in gaps}),
            "all": [str(gap) for gap in gaps],
        },
        "fields": len(used),
        "left_out": dict(source.catalogue.skipped) | _unread(source, used),
        "files": _files(source, used),
        "other_files": _other_files(paths, source.catalogue.files),
    }


def _grids(source: ArchiveSource) -> str:
    """Return the grids of the files in words. For several, or a Gaussian one, add the setting that `prepare` needs."""
    shown = "; ".join(grid.describe() for grid in source.catalogue.grids)
    several = len(source.catalogue.grids) > 1 or isinstance(source.catalogue.grid, ReducedGrid)
    return f"{shown} (prepare with regrid=DEGREES)" if several else shown


def _unread(source: ArchiveSource, used: np.ndarray) -> dict[str, int]:
    """Count the fields of known variables that are not read, by variable and reason."""
    records, unread = source.catalogue.records, np.ones(len(source.catalogue.records), bool)
    unread[used] = False
    fields = records["field"][unread]
    at_start = IS_ACCUMULATED[fields] & (records["lead"][unread] == 0)
    reason = np.where(at_start, 0, np.where(records["kind"][unread] == CONTROL, 1, 2))
    pairs, counts = np.unique(np.stack([fields, reason]), axis=1, return_counts=True)
    return {
        f"{FIELDS[index].name} ({_REASONS[why]})": count
        for (index, why), count in zip(pairs.T.tolist(), counts.tolist(), strict=True)
    }


def _files(source: ArchiveSource, used: np.ndarray) -> list[dict[str, Any]]:
    """List the archive's files with their sizes, and how many of their fields are taken."""
    catalogue = source.catalogue
    numbers = np.concatenate([catalogue.records["file"][used], catalogue.static_records["file"]])
    counts = np.bincount(numbers, minlength=len(catalogue.stamps)).tolist()
    return [
        {"path": path, "bytes": size, "fields": fields}
        for (path, size, _), fields in zip(catalogue.stamps, counts, strict=True)
    ]


def _other_files(paths: Any, files: list[str]) -> list[str]:
    """List the files in the given folders that are not part of the archive. A Zarr store counts as one file."""
    taken, others = {os.path.realpath(path) for path in files}, []
    named = [path for path in as_list(paths) if not is_dataset(path)]
    for folder in (path for path in named if os.path.isdir(path) and not is_zarr(path)):
        for root, folders, names in os.walk(folder):
            stores = [name for name in folders if is_zarr(os.path.join(root, name))]
            # The files in a Zarr store are its chunks, so they are not listed.
            folders[:] = sorted(set(folders) - set(stores))
            found = (Path(root, name) for name in (*stores, *names))
            others += [str(path) for path in found if os.path.realpath(path) not in taken]
    return sorted(others)
