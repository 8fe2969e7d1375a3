"""Read a tensor store: only the members, leads, variables, levels and rows that are requested.

Between reads the store keeps only packing factors: those of the dates read last, and those that a loader has asked it
to keep. Every read opens its own file descriptor and uses `preadv`, so any number of threads may read at the same time.
`TensorStore.keeping` makes an exception to both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from ensemble_ml.config import Packing
from ensemble_ml.errors import UserError
from ensemble_ml.store.factors import FactorReader
from ensemble_ml.store.manifest import (
    CLIMATE,
    Entry,
    check_contents,
    check_file,
    check_sizes,
    fingerprint,
    read_manifest,
    stamp_of_manifest,
)
from ensemble_ml.store.metadata import check_root, read_array, read_metadata, read_statistics
from ensemble_ml.store.packing import dequantise, exact_in_float32
from ensemble_ml.store.schema import DAYS_KEY, FACTORS, MANIFEST, STATISTICS, ArraySpec, Kind, array_specs, shard_chunks
from ensemble_ml.store.shard import KeptShards, Shard, damaged, read_chunks, unread
from ensemble_ml.store.source import Fields, Layout, Part, Selection
from ensemble_ml.store.statistics import Moments, Statistics, merge_all

ReadChunks = Callable[[str, ArraySpec, np.ndarray], Iterator[tuple[int, np.ndarray | None]]]  # see `read_chunks`


class TensorStore:
    """A tensor store opened for reading (implements `ensemble_ml.store.source.Source`).

    Opening checks the format number, that all files are there with their sizes, and the contents of the coordinates.
    `verify` checks all contents. In methods, `date` is an index into `layout.init_time`.

    Args:
        path: Folder of the store.

    Raises:
        UserError: There is no store at `path`, or one of another format, or one with damaged or missing files.
    """

    def __init__(self, path: str | Path):
        self.path = str(path)
        self._root = Path(path).absolute()
        check_root(self._root)
        # The stamp is taken before the manifest is read, so that a store that is replaced in between is noticed later.
        self._stamp = self._look()
        self._files = read_manifest(self._root)
        check_sizes(self._root, self._files)
        self.layout, attrs = read_metadata(self._root, self._files)
        self.parts = tuple(Part(name) for name in attrs["parts"])
        self.packing = Packing(attrs["packing"])  # of forecast, control and truth
        # By variable, first and last hour of the interval of each lead; None for a lead without an interval.
        self.lead_bounds: dict[str, list[list[int] | None]] = dict(attrs["lead_bounds"])
        self.masked: tuple[str, ...] = tuple(attrs["masked"])  # variables with points that have no value
        self.provenance: dict[str, Any] = dict(attrs["provenance"])
        self.quantisation_error: dict[str, float] = dict(attrs["quantisation_error"])  # largest, in the variable's unit
        self.climate_days = int(attrs.get(DAYS_KEY, 0))  # half-width of the climate's window in days; 0 without one
        self._static_names = tuple(attrs["static"])
        self._held = tuple(Part(name) for name in attrs["held"])  # parts that have at least one field
        specs = [spec for part in self.parts for spec in array_specs(self.layout, part, self.packing)]
        self._specs = {(spec.part, spec.kind): spec for spec in specs}
        self._read_chunks: ReadChunks = read_chunks
        self._elsewhere = False  # whether chunks come from elsewhere than the store's folder
        self._factors = FactorReader(self._root, int(attrs["factor_dates"]), self._files)

    def __reduce__(self) -> tuple[Callable[[str, str], TensorStore], tuple[str, str]]:
        return _opened_again, (str(self._root), self.fingerprint())  # locks cannot be pickled

    def __repr__(self) -> str:
        lay = self.layout
        parts = ", ".join(part.value for part in self.parts)
        return f"<TensorStore {self.path}: {parts}; {len(lay.init_time)} dates, {', '.join(lay.names)}>"

    def has(self, part: Part) -> bool:
        """Return whether `part` has at least one field at one init time or more."""
        return part in self._held

    def read(
        self,
        part: Part,
        date: int,
        selection: Selection = Selection(),  # noqa: B008 - frozen
        out: Mapping[Kind, np.ndarray] | None = None,
    ) -> Fields:
        """Read one init time, with the axes in the order of the selected values.

        `out` may hold float32 arrays of the result's shapes to decode into; a kind that it lacks gets a new array.

        Returns:
            Fields (M, T, V, Z, Y, X) and (M, T, S, Y, X) float32 in the registry's units, NaN where a field is absent
            or a point is masked. M is 1 for parts other than the forecast.

        Raises:
            UserError: The part, the init time or something selected is not in the store; a file is damaged; or the
                store was replaced.
        """
        self._check(part, date)
        place = dict(out or {})
        if Kind.SURFACE in place:
            place[Kind.SURFACE] = place[Kind.SURFACE][:, :, :, None]
        found = Fields(
            self._read_kind(part, Kind.PRESSURE, date, selection, place.get(Kind.PRESSURE)),
            self._read_kind(part, Kind.SURFACE, date, selection, place.get(Kind.SURFACE))[:, :, :, 0],
        )
        if not self._elsewhere:  # the store may have been replaced after the check above
            self.check_same()
        return found

    def climate(self, date: int, lead: int, name: str) -> np.ndarray:
        """Read the stored model climate of one init time, lead (hours) and variable: quantiles (Q, Z, Y, X) float32.

        Raises:
            UserError: The store holds no model climate, or not this init time, lead or variable; it is damaged; or it
                was replaced.
        """
        if not self.climate_days:
            raise UserError(f"store {self.path}: holds no model climate; prepare it with climate_days=9")
        self._check(None, date)
        lay = self.layout
        kind, names = ("surface", lay.surface) if name in lay.surface else ("pressure", lay.variables)
        at = date, position("lead (h)", lead, lay.lead_hours, self.path), position("variable", name, names, self.path)
        array = f"{CLIMATE}{kind}"
        try:
            stored = zarr.open_array(self._root / array, mode="r")
            chunks = (".".join(map(str, ("c", *at, *rest))) for rest in np.ndindex(*stored.cdata_shape[3:]))
            for file in (f"{array}/{chunk}" for chunk in chunks):
                if file in self._files:
                    os.stat(self._root / file)  # Zarr would read a missing chunk as fill values
            found = np.asarray(stored[at])
        except (OSError, ValueError, RuntimeError) as error:
            raise damaged(self._root / array, str(error)) from error
        self.check_same()  # the store may have been replaced after the check above
        return found if kind == "pressure" else found[:, None]

    def through(self, open_shard: Callable[[str], Shard]) -> TensorStore:
        """Return the same store with its shards opened by `open_shard`, which may be a cache such as `KeptShards`."""
        return self.over(lambda path, spec, numbers: read_chunks(path, spec, numbers, open_shard))

    def keeping(self, most: int) -> TensorStore:
        """Return the same store, which keeps up to `most` bytes that it has read. Only one thread may use it.

        Fits read the training dates a dozen times, and storage may be slow.
        """
        return self.through(KeptShards(self.check_same, most))

    def over(self, read: ReadChunks) -> TensorStore:
        """Return the same store with its chunks read by `read`.

        These chunks may lack the padding rows of the last block. Reading the result does not check the store's folder,
        which may be slow to answer: if `read` reads from there, it must call `check_same` afterwards.
        """
        other = object.__new__(TensorStore)  # copy.copy would call __reduce__ and open it again
        other.__dict__ |= {**self.__dict__, "_read_chunks": read, "_elsewhere": True}
        return other

    def chunks(self, part: Part, date: int, selection: Selection) -> Iterator[tuple[ArraySpec, str, np.ndarray]]:
        """Yield the chunks of a selection of one init time.

        They include the chunks of absent fields, which `read` does not read.

        Yields:
            Array, path of the shard, and numbers of its chunks (see `read_chunks`). The chunks of a mask follow those
            of its values.

        Raises:
            UserError: The part, the init time or something selected is not in the store, or the store was replaced.
        """
        self._check(part, date)
        for kind in Kind:
            spec = self._specs.get((part, kind))
            if spec is None or spec.shard(date) not in self._files:  # nothing was written for this init time
                continue
            wanted = resolve(self.path, self.layout, part, kind, selection)
            blocks = np.arange(wanted.rows[0] // spec.rows, -(-wanted.rows[1] // spec.rows))
            cells = np.ix_(*(np.unique(axis) for axis in wanted.fields[:3]), blocks)
            numbers = np.ravel_multi_index(np.broadcast_arrays(*cells), spec.chunks).reshape(-1)
            masked = spec.packed and spec.mask.shard(date) in self._files
            for of in (spec, *((spec.mask,) if masked else ())):
                yield of, self._shard_path(of, date), numbers

    def keep_factors(self, parts: Iterable[Part], dates: Iterable[int], pool: Executor) -> None:
        """Read and keep the packing factors of all `dates` (see `FactorReader.keep`).

        A loader does so before it reads chunks. Otherwise decoding would wait for small reads queued behind large ones.

        Raises:
            UserError: A file is damaged.
        """
        wanted = set(parts)
        specs = [spec for (part, _), spec in self._specs.items() if part in wanted]
        self._factors.keep(specs, [int(date) for date in dates], pool)

    def _shard_path(self, spec: ArraySpec, date: int) -> str:
        """Return the absolute path of the shard of an init time."""
        return os.path.join(self._root, spec.shard(date))

    def present(self, part: Part, date: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which fields are there: bool (M, T, V, Z) and (M, T, S).

        Raises:
            UserError: The init time is not in the store, a file is damaged, or the store was replaced.
        """
        self._check(None, date)
        members = len(self.layout.realization) if part is Part.FORECAST else 1
        found = []
        for kind in Kind:
            spec = self._specs.get((part, kind))
            empty = np.zeros((members, *self._lengths(kind)), bool)
            found.append(self._factors.of_date(spec, "present", date).copy() if spec else empty)
        return found[0], found[1][..., 0]

    def static(self) -> dict[str, np.ndarray]:
        """Return static fields by name, (Y, X) float32.

        Raises:
            UserError: They are damaged, or the store was replaced.
        """
        self._check_files(self._static_names)
        found = {name: read_array(self._root, name) for name in self._static_names}
        self.check_same()
        return found

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal for stores of the same fields in the same packing, wherever they are."""
        return fingerprint(self._files)

    def verify(self) -> None:
        """Check the digest of every file, which reads the whole store.

        Raises:
            UserError: A file is missing, unreadable or has changed. The message names the first one.
        """
        check_contents(self._root, self._files, shard_chunks(self._specs.values()))

    @property
    def files(self) -> dict[str, Entry]:
        """Return sizes and digests of all files of the store, by their paths within it."""
        return dict(self._files)

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        """Return the arrays of fields that the store holds."""
        return tuple(self._specs.values())

    @property
    def years(self) -> tuple[int, ...]:
        """Return the calendar years of the init times, which are those that `statistics` takes."""
        return tuple(np.unique(self.layout.init_time.astype("datetime64[Y]").astype(int) + 1970).tolist())

    def statistics(self, years: Sequence[int], part: Part = Part.FORECAST) -> Statistics:
        """Return moments over the calendar years `years`, (T, V, Z) and (T, S).

        The part is FORECAST for the members' values, MEAN or SPREAD for the ensemble's mean or spread as a field.

        Raises:
            UserError: A year is not in the store, or the store is damaged or was replaced.
        """
        self._check_files([STATISTICS])
        stored, yearly = read_statistics(self._root, part)
        self.check_same()
        rows = [position("year", year, stored.tolist(), self.path) for year in years]
        merged = []
        for kind in Kind:
            shape = self._lengths(kind) if kind is Kind.PRESSURE else self._lengths(kind)[:2]
            moments = yearly.get(kind)
            merged.append(merge_all([moments.at(row) for row in rows], shape) if moments else Moments.nothing(shape))
        return Statistics(*merged)

    def _lengths(self, kind: Kind) -> tuple[int, int, int]:
        """Return T, V, Z of one kind."""
        lay = self.layout
        if kind is Kind.PRESSURE:
            return len(lay.lead_hours), len(lay.variables), len(lay.levels)
        return len(lay.lead_hours), len(lay.surface), 1

    def check_same(self) -> None:
        """Check that the store at this path is still the one that was opened.

        Bytes read from another store would be decoded with the factors of this one.

        Raises:
            UserError: It is another store, it is gone, or it cannot be read.
        """
        found = self._look()
        if found != self._stamp:
            if found is None or read_manifest(self._root) != self._files:  # equal if it was only copied or touched
                raise _replaced(self.path)
            self._stamp = found

    def _look(self) -> tuple[int, int, int] | None:
        """Return the stamp of the manifest (see `stamp_of_manifest`); None if it is gone."""
        try:
            return stamp_of_manifest(self._root)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unread(self._root / MANIFEST, error) from error

    def _check_files(self, folders: Iterable[str]) -> None:
        """Check the files of small arrays against the manifest, because they have no checksums of their own."""
        self.check_same()
        for folder in folders:
            for name, entry in self._files.items():
                if name.startswith(f"{folder}/"):
                    check_file(self._root / name, entry)

    def _check(self, part: Part | None, date: int) -> None:
        """Check that the store is still the same and that it holds the part and the init time."""
        if not self._elsewhere:
            self.check_same()
        if part is not None and part not in self.parts:
            there = ", ".join(p.value for p in self.parts)
            raise UserError(f"store {self.path}: has no {part.value}; it holds {there}")
        dates = len(self.layout.init_time)
        if not 0 <= date < dates:
            raise UserError(f"store {self.path}: has no init time {date}; it holds 0 to {dates - 1}")

    def _read_kind(
        self, part: Part, kind: Kind, date: int, selection: Selection, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read one kind of variable. A position that is requested twice is read only once."""
        wanted = resolve(self.path, self.layout, part, kind, selection)
        once, repeats = wanted.distinct()
        if once.shape != wanted.shape:
            found = self._read_wanted(part, kind, date, once)[repeats]
            if out is None:
                return found
            out[...] = found
            return out
        return self._read_wanted(part, kind, date, wanted, out)

    def _read_wanted(
        self, part: Part, kind: Kind, date: int, wanted: Wanted, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read distinct positions of one kind, with NaN where a field is absent."""
        shape = (*wanted.shape, wanted.rows[1] - wanted.rows[0], self.layout.grid.shape[1])
        if out is None:
            out = np.empty(shape, np.float32)
        assert (out.shape, out.dtype) == (shape, np.float32), (out.shape, shape)
        spec = self._specs.get((part, kind))
        if spec is None or not out.size:
            out[...] = np.nan
            return out
        grid = np.ix_(*wanted.fields)
        there = self._factors.of_date(spec, "present", date)[grid]
        factors = [self._factors.of_date(spec, name, date)[grid] for name in FACTORS] if spec.packed else []
        # Float32 factors make `dequantise` use float32 arithmetic, which is faster and gives the same bits here.
        if spec.packed and exact_in_float32(*factors):
            factors = [factor.astype(np.float32) for factor in factors]
        self._fill(out, spec, date, wanted, there, [factor[..., None, None] for factor in factors])
        if not there.all():
            out[~there] = np.nan
        return out

    def _fill(
        self, out: np.ndarray, spec: ArraySpec, date: int, wanted: Wanted, there: np.ndarray, factors: list[np.ndarray]
    ) -> None:
        """Decode every chunk that holds a wanted field into its place in `out`."""
        members, leads, variables, levels = wanted.fields
        first, last = wanted.rows
        blocks = range(first // spec.rows, -(-last // spec.rows))
        cells = np.argwhere(there.any(-1))  # positions in `out` of a member, lead and variable
        if not len(cells):
            return
        # List every wanted chunk: each cell of member, lead and variable, with each block of rows.
        m, t, v = cells.T[..., None]
        at = members[m], leads[t], variables[v], np.asarray(blocks)
        numbers = np.ravel_multi_index(at, spec.chunks).reshape(-1)
        places = [(*cell, block) for cell in cells.tolist() for block in blocks]
        target = dict(zip(numbers.tolist(), places, strict=True))
        all_levels = np.array_equal(levels, np.arange(spec.fields[3]))

        def pieces(of: ArraySpec) -> Iterator[tuple[tuple[int, int, int], np.ndarray, np.ndarray | None]]:
            """Yield for each wanted chunk its (member, lead, variable), its view of `out`, and its stored values.

            The values are None for a chunk that was left out.
            """
            for number, chunk in self._read_chunks(self._shard_path(of, date), of, numbers):
                m, t, v, block = target[number]
                top = block * of.rows
                start, stop = max(first, top), min(last, top + of.rows)
                if chunk is not None:
                    chunk = (chunk if all_levels else chunk[levels])[:, start - top : stop - top]
                yield (m, t, v), out[m, t, v, :, start - first : stop - first], chunk

        for cell, place, codes in pieces(spec):
            if codes is None:
                codes = np.full(place.shape, spec.fill, spec.dtype)
            if factors:
                dequantise(codes, [factor[cell] for factor in factors], place)
            else:
                place[...] = codes
        # Masks are applied after all values are decoded, in a second pass over their own shard.
        if spec.packed and spec.mask.shard(date) in self._files:
            for _, place, mask in pieces(spec.mask):
                if mask is not None:
                    place[mask != 0] = np.nan


def _replaced(path: str) -> UserError:
    """Make the error for a store that is not the one that was opened."""
    return UserError(f"store {path}: has been replaced since it was opened; open it again")


def _opened_again(path: str, fingerprint: str) -> TensorStore:
    """Open a store in another process; refuse one that replaced it, whose init times may be others."""
    store = TensorStore(path)
    if store.fingerprint() != fingerprint:
        raise _replaced(path)
    return store


def open_store(path: str | Path) -> TensorStore:
    """Open the tensor store at `path`; `TensorStore` names the errors that it raises."""
    return TensorStore(path)


@dataclass(frozen=True, eq=False)
class Wanted:
    """A part of one array: positions along member, lead, variable and level, and rows from start to stop (excluded)."""

    fields: tuple[np.ndarray, ...]
    rows: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of positions along each axis."""
        return tuple(len(axis) for axis in self.fields)

    def distinct(self) -> tuple[Wanted, tuple[np.ndarray, ...]]:
        """Return a copy with each position once, ascending, and the indices that restore the original positions.

        The indices are an open mesh (`np.ix_`) over the four axes.
        """
        pairs = [np.unique(axis, return_inverse=True) for axis in self.fields]
        return Wanted(tuple(once for once, _ in pairs), self.rows), np.ix_(*(inverse for _, inverse in pairs))


def resolve(path: str, layout: Layout, part: Part, kind: Kind, selection: Selection) -> Wanted:
    """Find the positions that `selection` asks for in the array of one kind of variable. Messages name `path`.

    Raises:
        UserError: A selected value is not in the layout, or the rows are empty or outside the grid.
    """

    def positions(what: str, values: Sequence[Any] | None, stored: Sequence[Any]) -> np.ndarray:
        """Return the positions of values along one axis; None stands for all."""
        if values is None:
            return np.arange(len(stored))
        return np.asarray([position(what, value, stored, path) for value in values], np.intp)

    member = positions("member", selection.realization, layout.realization)
    lead = positions("lead (h)", selection.lead_hours, layout.lead_hours)
    level = positions("level (hPa)", selection.levels, layout.levels)
    if kind is Kind.PRESSURE:
        variable = positions("variable", selection.variables, layout.variables)
    else:
        variable = positions("surface variable", selection.surface, layout.surface)
    there = layout.grid.shape[0]
    rows = selection.rows or (0, there)
    if not 0 <= rows[0] < rows[1] <= there:
        raise UserError(f"store {path}: has no rows {rows[0]} to {rows[1]}; it has rows 0 to {there}")
    only = np.zeros(1, np.intp)  # the single position of an axis that a part or kind does not have
    fields = (member if part is Part.FORECAST else only, lead, variable, level if kind is Kind.PRESSURE else only)
    return Wanted(fields, rows)


def position(what: str, value: Any, stored: Sequence[Any], path: str) -> int:
    """Return the index of `value` in `stored`, the values of the coordinate `what` of the store at `path`.

    Raises:
        UserError: The value is not there. The message lists the stored values.
    """
    try:
        return list(stored).index(value)
    except ValueError:
        there = ", ".join(map(str, stored)) or "none"
        raise UserError(f"store {path}: has no {what} {value}; it holds {there}") from None
