"""Write a tensor store, start date by start date; it appears under its name only when it is complete."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from threading import Lock

import numpy as np

from ensemble_ml.config import Packing
from ensemble_ml.errors import UserError
from ensemble_ml.store.folder import check_target, make_work_folder, replace
from ensemble_ml.store.manifest import Entry, make_manifest, write_manifest
from ensemble_ml.store.metadata import create_arrays, write_metadata
from ensemble_ml.store.packing import PackedBlock, check_finite, decode, error_bound, quantise
from ensemble_ml.store.schema import DERIVED, FACTORS, WRITTEN, ArraySpec, Kind, array_specs, describe_field
from ensemble_ml.store.shard import write_shard
from ensemble_ml.store.source import Layout, Part
from ensemble_ml.store.statistics import NAMES, Moments, ensemble_moments, merge_all, stack


class StoreWriter:
    """Builds a store beside `path` and renames it at `finish`; used as a context manager it finishes or aborts itself.

    Args:
        path: the folder to make.
        layout: coordinates of all that will be written.
        parts: which of forecast, control and truth will come; mean and spread follow from the forecast.
        packing: how forecast, control and truth are kept; mean and spread are always float32.
        static: fields (Y, X) by name.
        lead_bounds: for a variable over intervals, [first, last] hour for each lead, or None.
        provenance: anything that JSON can hold about where the data came from.
        overwrite: replace a store that stands at `path`.

    `write` may be called from several threads, for different dates or parts.

    Raises:
        UserError: something stands at `path` that may not be replaced, or the folder cannot be written.
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
        self.path, self.layout, self.packing = Path(path).absolute(), layout, packing
        self.static, self.lead_bounds, self.provenance = static or {}, lead_bounds or {}, provenance or {}
        self.errors: dict[str, float] = {}  # largest error of quantising, by variable
        self.masked: set[str] = set()  # variables with points that have no value
        self._masks: list[ArraySpec] = []
        self._overwrite = overwrite
        check_target(self.path, overwrite)
        for name, values in self.static.items():
            check_finite(np.asarray(values), where=partial(_describe_static, name))
        wanted = set(parts)
        derived = DERIVED if Part.FORECAST in wanted and len(layout.realization) > 1 else ()
        self.parts = tuple(part for part in (*WRITTEN, *derived) if part in wanted or part in derived)
        specs = [spec for part in self.parts for spec in array_specs(layout, part, packing)]
        self._specs = {(spec.part, spec.kind): spec for spec in specs}
        self._factors = {spec.name: _empty_factors(spec) for spec in specs}
        self._moments: dict[Kind, dict[int, Moments]] = {Kind.PRESSURE: {}, Kind.SURFACE: {}}
        self._files: dict[str, Entry] = {}
        self._lock = Lock()
        self._work = make_work_folder(self.path)
        create_arrays(self._work, specs)
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)

    def write(self, part: Part, date: int, pressure: PackedBlock | None, surface: PackedBlock | None) -> None:
        """Write one start date of one part.

        Args:
            part: forecast, control or truth.
            date: index into `layout.init_time`.
            pressure: block (M, T, V, Z, Y, X), or None where the layout has no variable on pressure levels.
            surface: block (M, T, S, Y, X), or None likewise. M is 1 for control and truth. Float32 blocks are
                quantised where the store is packed, packed ones decoded where it is not.

        Raises:
            UserError: a present field holds NaN or infinity (named by part, date, variable and level), or the disk
                refuses.
        """
        if part not in WRITTEN or part not in self.parts:
            raise ValueError(f"part {part.value}: not among those announced ({', '.join(p.value for p in self.parts)})")
        if not 0 <= date < len(self.layout.init_time):
            raise ValueError(f"date {date}: the layout has {len(self.layout.init_time)}")
        for kind, block in ((Kind.PRESSURE, pressure), (Kind.SURFACE, surface)):
            spec = self._specs.get((part, kind))
            if spec is not None and block is not None:
                block = self._admit(spec, date, block)
                self._put(spec, date, block)
                if part is Part.FORECAST:
                    self._derive(kind, date, block)

    def _admit(self, spec: ArraySpec, date: int, block: PackedBlock) -> PackedBlock:
        """Bring a block to (M, T, V, Z, Y, X) and to the packing of the store, with absent fields blank."""
        shape = (*spec.fields, *spec.grid)
        wanted = shape if spec.kind is Kind.PRESSURE else (*shape[:3], *shape[4:])
        if block.values.shape != wanted:
            raise ValueError(f"{spec.name}: block of shape {block.values.shape}; {wanted} is needed")
        factors = [f.reshape(spec.fields) for f in (block.reference, block.scale, block.decimal, block.present)]
        mask = None if block.mask is None else block.mask.reshape(shape)
        reference, scale, decimal, present = factors
        block = PackedBlock(block.values.reshape(shape), reference, scale, decimal, present, mask)

        def where(index: tuple[int, ...]) -> str:
            return describe_field(self.layout, spec.part, date, spec.kind, index)

        if block.packed:
            check_finite(block.reference[..., None, None], block.present, where=where)
        else:
            check_finite(block.values, block.present, mask=block.mask, where=where)
        if not block.present.all():
            block = _blank(block, 0)
        if block.packed and not spec.packed:
            block = PackedBlock.plain(decode(block), block.present, block.mask)
        elif spec.packed and not block.packed:
            present = block.present
            block = quantise(block.values, mask=block.mask)
            block = PackedBlock(block.values, block.reference, block.scale, block.decimal, present, block.mask)
            self._record_errors(spec, error_bound(block))
        if block.mask is not None:
            block = self._record_mask(spec, block)
        return block if spec.packed else _blank(block, np.nan)

    def _record_mask(self, spec: ArraySpec, block: PackedBlock) -> PackedBlock:
        """Note which variables have masked points, and put NaN or the integer 0 there."""
        assert block.mask is not None
        mask = block.mask & block.present[..., None, None]
        names = self.layout.variables if spec.kind is Kind.PRESSURE else self.layout.surface
        with self._lock:
            self.masked |= {name for name, any_ in zip(names, mask.any((0, 1, 3, 4, 5)), strict=True) if any_}
        values = np.where(mask, spec.dtype.type(spec.fill), block.values)
        return PackedBlock(values, block.reference, block.scale, block.decimal, block.present, mask)

    def _record_errors(self, spec: ArraySpec, bound: np.ndarray) -> None:
        names = self.layout.variables if spec.kind is Kind.PRESSURE else self.layout.surface
        with self._lock:
            for name, largest in zip(names, bound.max((0, 1, 3)), strict=True):
                self.errors[name] = max(self.errors.get(name, 0.0), float(largest))

    def _put(self, spec: ArraySpec, date: int, block: PackedBlock) -> None:
        self._put_shard(spec, date, block.values)
        if spec.packed and block.mask is not None and block.mask.any():
            with self._lock:
                if spec.mask not in self._masks:
                    create_arrays(self._work, [spec.mask])
                    self._masks.append(spec.mask)
            self._put_shard(spec.mask, date, block.mask.astype(np.uint8))
        with self._lock:
            for key, array in self._factors[spec.name].items():
                array[date] = getattr(block, key)

    def _put_shard(self, spec: ArraySpec, date: int, values: np.ndarray) -> None:
        name = spec.shard(date)
        try:
            size, digest = write_shard(self._work / name, spec, values, self._pool)
        except OSError as error:
            remedy = "free space or choose another output" if error.errno == errno.ENOSPC else "check the output folder"
            raise UserError(f"store {self.path}: cannot write {name}: {error.strerror}; {remedy}") from error
        with self._lock:
            self._files[name] = Entry(size, digest)

    def _derive(self, kind: Kind, date: int, block: PackedBlock) -> None:
        """Compute mean, spread and moments of the forecast, one field at a time in float64."""
        leads, variables, levels = block.values.shape[1:4]
        shape = (1, leads, variables, levels, *block.values.shape[-2:])
        mean, spread = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        rows = np.empty((leads, variables, levels, len(NAMES)))
        rows[:] = (0, 0, 0, np.inf, -np.inf)
        there = np.zeros(shape[:4], bool)

        def one(cell: tuple[int, int, int]) -> None:
            members = np.flatnonzero(block.present[:, *cell])
            if len(members):
                values = decode(block[members, *cell]).astype(np.float64)
                centre, deviation, rows[cell] = ensemble_moments(values)
                if len(members) > 1:
                    mean[0, *cell], spread[0, *cell], there[0, *cell] = centre, deviation, True

        list(self._pool.map(one, product(range(leads), range(variables), range(levels))))
        with self._lock:
            self._moments[kind][date] = Moments(*np.moveaxis(rows, -1, 0))
        for part, values in ((Part.MEAN, mean), (Part.SPREAD, spread)):
            spec = self._specs.get((part, kind))
            if spec is not None:
                self._put(spec, date, PackedBlock.plain(values, there))

    def finish(self) -> Path:
        """Write coordinates, factors, statistics and manifest, and give the store its name.

        Raises:
            UserError: no field was written.
        """
        if not self._files:
            self.abort()
            raise UserError(f"store {self.path}: nothing was written; the input holds no field that was asked for")
        self._pool.shutdown()
        try:
            self._write_metadata()
            write_manifest(self._work, make_manifest(self._work, self._files))
            replace(self._work, self.path, self._overwrite)
        except BaseException:
            self.abort()
            raise
        return self.path

    def _write_metadata(self) -> None:
        attributes = {
            "packing": self.packing.value,
            "parts": [part.value for part in self.parts],
            "lead_bounds": self.lead_bounds,
            "masked": [name for name in self.layout.names if name in self.masked],
            "quantisation_error": self.errors,
            "provenance": self.provenance,
        }
        factors = [(spec, self._factors[spec.name]) for spec in self._specs.values()]
        write_metadata(self._work, self.layout, attributes, factors, self.static, self._yearly())

    def _yearly(self) -> tuple[np.ndarray, dict[Kind, Moments]]:
        """Years (N,) and the moments of each, merged in the order of dates however they were written."""
        all_years = self.layout.init_time.astype("datetime64[Y]").astype(int) + 1970
        years = np.unique(all_years)
        yearly = {}
        for kind, dates in self._moments.items():
            spec = self._specs.get((Part.FORECAST, kind))
            if spec is not None:
                shape = spec.fields[1:]
                of_year = [
                    [dates[d] for d in np.flatnonzero(all_years == year).tolist() if d in dates] for year in years
                ]
                yearly[kind] = stack(merge_all(moments, shape) for moments in of_year)
        return years, yearly

    def abort(self) -> None:
        """Remove all that was written; harmless after `finish`."""
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._work, ignore_errors=True)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self._work.exists():
            self.finish()


def _describe_static(name: str, _: tuple[int, ...]) -> str:
    return f"static field {name}"


def _empty_factors(spec: ArraySpec) -> dict[str, np.ndarray]:
    shape = (spec.dates, *spec.fields)
    present = {"present": np.zeros(shape, bool)}
    if not spec.packed:
        return present
    return {name: np.ones(shape) if name == "decimal" else np.zeros(shape) for name in FACTORS} | present


def _blank(block: PackedBlock, fill: float) -> PackedBlock:
    """Put `fill` wherever a field is absent, so that what the caller left there is neither kept nor counted."""
    if block.present.all():
        return block
    values, present = block.values.copy(), block.present
    values[~present] = fill
    reference, scale = np.where(present, block.reference, 0), np.where(present, block.scale, 0)
    return PackedBlock(values, reference, scale, np.where(present, block.decimal, 1), present, block.mask)
