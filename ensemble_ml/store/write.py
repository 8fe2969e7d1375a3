"""Write a tensor store part by part, from whole init times in memory.

This is for programs that make fields themselves (tests, simulations). For archives use `Build`, which needs less memory
than a whole init time and continues an interrupted build. This module uses it as well.

The store appears at its path only when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Lock

import numpy as np

from ensemble_ml.config import Packing
from ensemble_ml.store.build import Build
from ensemble_ml.store.date import DateEntry, DateWriter, refused
from ensemble_ml.store.folder import check_target
from ensemble_ml.store.packing import PackedBlock
from ensemble_ml.store.plan import BuildPlan
from ensemble_ml.store.schema import WRITTEN, ArraySpec, Kind
from ensemble_ml.store.source import Layout, Part


class StoreWriter:
    """A writer that builds a store beside `path`. `finish` renames the store to `path`.

    Used as a context manager, the writer calls `finish` at the end, or `abort` after an error. Several threads may call
    `write` for different init times or parts.

    Args:
        path: Folder of the store.
        layout: Coordinates of everything that will be written.
        parts: Those of forecast, control and truth that will be written. Mean and spread follow from the forecast.
        packing: Number format of forecast, control and truth; mean and spread are always float32.
        static: Static fields (Y, X) by name.
        lead_bounds: [first, last] hour for each lead of a variable over intervals; None for a lead without an interval.
        provenance: Origin of the data, as any values that JSON can hold.
        overwrite: Whether to replace a store at `path`.

    Raises:
        UserError: Something stands at `path` that may not be replaced, the folder cannot be written, or a static field
            holds NaN or infinity.
    """

    def __init__(
        self,
        path: str | Path,
        layout: Layout,
        *,
        parts: Iterable[Part],
        packing: Packing = Packing.uint16,
        static: dict[str, np.ndarray] | None = None,
        lead_bounds: dict[str, list[list[int] | None]] | None = None,
        provenance: dict | None = None,
        overwrite: bool = False,
    ):
        self.path, self.layout = Path(path).absolute(), layout
        check_target(self.path, overwrite)
        plan = BuildPlan(layout, tuple(parts), packing, static or {}, lead_bounds or {}, provenance or {})
        self.parts = plan.parts
        self._build = Build(self.path, plan, overwrite=overwrite, private=True)
        self._entries: dict[int, DateEntry] = {}
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)

    def write(self, part: Part, date: int, pressure: PackedBlock | None, surface: PackedBlock | None) -> None:
        """Write one init time of one part.

        Float32 blocks are quantised if the store is packed. Packed blocks are decoded if it is not. M is 1 for control
        and truth.

        Args:
            part: Forecast, control or truth.
            date: Index into `layout.init_time`.
            pressure: Block (M, T, V, Z, Y, X); None leaves the variables on pressure levels absent.
            surface: Block (M, T, S, Y, X); None leaves the surface variables absent.

        Raises:
            UserError: A present field holds NaN or infinity at a point that is not masked (the message names the
                field), or the system cannot write a file.
            ValueError: `parts` does not contain the part, the layout has no such init time, or a block has another
                shape.
        """
        if part not in WRITTEN or part not in self.parts:
            raise ValueError(f"part {part.value}: not among those announced ({', '.join(p.value for p in self.parts)})")
        if not 0 <= date < len(self.layout.init_time):
            raise ValueError(f"date {date}: the layout has init times 0 to {len(self.layout.init_time) - 1}")
        plan = self._build.plan
        writer = DateWriter(self._build.store, self.layout, plan.specs, date, self._pool)
        try:
            for kind, block in ((Kind.PRESSURE, pressure), (Kind.SURFACE, surface)):
                spec = plan.specs.get((part, kind))
                if spec is not None and block is not None:
                    _cells(writer, spec, block)
            entry = writer.close()
        finally:
            writer.abort()
        # Several threads may write parts of the same init time. The entries of these parts are merged.
        with self._lock:
            self._entries.setdefault(date, DateEntry()).add(entry)

    def finish(self) -> Path:
        """Write coordinates, factors, statistics and manifest, rename the store to `path`, and return `path`.

        Raises:
            UserError: No field was written, the system cannot write a file, or something else stands at `path` by now.
        """
        self._pool.shutdown()
        try:
            # Entries are saved only now, because an init time is complete when all its parts have been written.
            for date, entry in self._entries.items():
                try:
                    entry.save(self._build.entry_file(date))
                except OSError as error:
                    raise refused(self._build.store, error.filename or f"init time {date}", error) from error
            return self._build.finalise()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove everything that was written. This does nothing after `finish`."""
        self._pool.shutdown(cancel_futures=True)
        self._build.remove()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif not self._build.complete:
            self.finish()


def _cells(writer: DateWriter, spec: ArraySpec, block: PackedBlock) -> None:
    """Pass a block to `writer`, one lead and variable at a time; refuse one that has another shape than `spec`."""
    leads, variables = spec.fields[1:3]
    shape = (*spec.fields, *spec.grid)
    wanted = shape if spec.kind is Kind.PRESSURE else (*shape[:3], *shape[4:])
    if block.values.shape != wanted:
        raise ValueError(f"{spec.name}: block of shape {block.values.shape}; {wanted} is needed")
    for lead, variable in product(range(leads), range(variables)):
        cell = block[:, lead, variable]
        if spec.kind is Kind.SURFACE:
            cell = cell[:, None]
        writer.cell(spec.part, spec.kind, lead, variable, cell)
