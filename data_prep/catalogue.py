"""List all fields of an archive in one table, and gather chosen ones into blocks.

Axes: M member, T lead, V pressure variable, S surface variable, Z level, Y latitude, X longitude.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from itertools import combinations, pairwise
from typing import Any, Protocol, TypeVar

import google_crc32c
import numpy as np

from data_prep.ensemble_of import decide_single_runs, of_members, of_one_kind
from data_prep.file_index import FileIndex, absolute
from data_prep.files import FORECAST, archive_files, open_readers
from data_prep.gathered import Allocate, Gathered, Masks, Target, summed, with_masks
from data_prep.geometry import Geometry
from data_prep.identity import NO_OVERRIDES, Overrides
from data_prep.intervals import COMBINED, Combine, difference, starts
from data_prep.limits import implausible
from data_prep.notices import notice_log
from data_prep.records import (
    FIELD_INDEX,
    IF_ABSENT,
    IS_STATIC,
    KEYS,
    NO_MESSAGE,
    OTHER_UNITS,
    RECORD,
    Origin,
    RawField,
    Reader,
    covers,
    describe,
    field_of,
)
from data_prep.selecting import ALL, Wanted
from data_prep.xarray_files import XarrayFile
from ensemble_ml.config import shown_input
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS, field
from ensemble_ml.grid import Grid
from ensemble_ml.store.manifest import PLACE
from ensemble_ml.store.packing import PackedBlock
from ensemble_ml.store.remote import is_remote
from ensemble_ml.store.source import Layout

log = notice_log(__name__)

_SHOWN = 30  # names of skipped variables that a message shows
_UNKNOWN = r"\d+ \([^()]*\)|[^ ()]+"  # label of a variable that the registry does not know, in GRIB or NetCDF
_LINE_EVERY = 10.0  # seconds between lines on the progress of long work


class Aligned(Protocol):
    """An object that reads some rows of a catalogue."""

    def rows(self) -> np.ndarray:
        """Return the rows of the catalogue that are read, (N,) ascending."""


A = TypeVar("A", bound=Aligned)


class Catalogue:
    """The fields of an archive's files.

    Args:
        paths: files, folders, globs or a list of them, or open Datasets.
        role: "forecast", "truth", "grid" or "static"; it appears in messages and chooses a part of a simulated archive.
        index: keeps the tables of files; None reads every file anew.
        overrides: what the user states of variables.
        several_grids: whether files may be on several grids. Values can only be read after `onto` has set one for all.
        wanted: the part that is listed of NetCDF and Zarr with very many fields.

    Attributes:
        records: one record for each field that is not static, sorted by `KEYS`.
        static_records: one record for each static field, in the order of the files.
        grid: the grid that all fields share, or that of the first file if there are several; after `onto`, the new one.
        skipped: number of fields that are left out, by a label that names them and the reason.
        without_units: variables that are left out because they state no units: name in the file -> our short name.

    Raises:
        UserError: a file is damaged, grids differ, or no known field is left.
    """

    def __init__(
        self,
        paths: Any,
        *,
        role: str,
        index: FileIndex | None = None,
        overrides: Overrides = NO_OVERRIDES,
        several_grids: bool = False,
        wanted: Wanted = ALL,
    ):
        self.path = _shown(paths)
        self.readers: list[Reader] = open_readers(
            archive_files(paths, role=role, wanted=wanted), index, overrides, wanted
        )
        self.files = [reader.path for reader in self.readers]
        self.stamps = [(absolute(reader.path), *astuple(reader.stamp)) for reader in self.readers]
        self.without_units = _check_units(self.path, self.readers)
        self.grid = _one_grid(self.readers, several=several_grids)
        self.geometry = Geometry(self.grid, self.grid)
        self._geometries = [self.geometry] * len(self.readers)  # of each file
        self.role = role
        table, self.origins = _joined_tables(self.readers)
        decide_single_runs(self.path, table, self.origins, role)
        counts: Counter[str] = Counter()
        for reader in self.readers:
            counts.update(reader.skipped)
        self.skipped = dict(counts)
        elsewhere = {name for reader in self.readers if isinstance(reader, XarrayFile) for name in reader.elsewhere}
        _report_skipped(self.path, self.skipped, elsewhere)
        if not len(table):
            raise UserError(f"{self.path}: holds no field that the registry knows")
        static = IS_STATIC[table["field"]]
        self.static_records = table[static]
        table = table[~static] if static.any() else table
        # A truth has no members. If it mixes several kinds of fields, it is refused later.
        if role == FORECAST:
            table = of_members(self.path, self.files, table, self.skipped)
            table = of_one_kind(self.path, self.readers, table, self.skipped)
        # The result does not depend on the order of the files.
        self.records = table[np.lexsort([table[name] for name in reversed(KEYS)])]

    def onto(self, geometry: Geometry) -> None:
        """Convert all values from now on by `geometry`, from the grid of the files to another one.

        Files on other grids get a conversion of their own, to the same new grid.
        """
        made = [geometry]
        self._geometries = []
        for grid in (reader.grid or geometry.source for reader in self.readers):
            known = next((one for one in made if one.source.same_as(grid)), None)
            if known is None:
                made.append(known := Geometry(grid, geometry.target, geometry.whole))
            self._geometries.append(known)
        self.geometry, self.grid = geometry, geometry.target

    @property
    def grids(self) -> list[Grid]:
        """Return the different grids of the files."""
        found: list[Grid] = []
        for grid in (reader.grid for reader in self.readers if reader.grid is not None):
            if not any(grid.same_as(one) for one in found):
                found.append(grid)
        return found

    @property
    def remote(self) -> bool:
        """Return whether files are read by URL."""
        return any(is_remote(path) for path in self.files)

    def without_empty(self, aligned: Callable[[], A], index: FileIndex | None) -> A:
        """Leave out fields that are all NaN, and return the object that reads this catalogue.

        If a field is left out, another may take its place. So the object is made again until it reads no empty field.

        Args:
            aligned: makes the object that reads this catalogue.
            index: decides by `look` whether to search for such fields, and keeps the results; None does not search.

        Raises:
            UserError: a field that is read exists twice, fields that are read come from several centres, or a file
                cannot be read or has changed.
        """
        while True:
            made = aligned()
            self._check_unique(made)
            self._check_origins(made)
            if index is None or not index.look or not self._leave_out(made.rows(), index):
                return made

    def _check_unique(self, made: Aligned) -> None:
        """Raise a UserError if a field that `made` reads exists twice.

        Other fields may exist twice, for example instantaneous gusts and the largest gusts.
        """
        records, order, begin = self.records, None, starts(self.records)
        # The table may have millions of rows, so no column is copied without need.
        keys = [begin if name == "lead_start" else records[name] for name in KEYS]
        # A sum may exist with its interval and again without it. The keys are sorted again, so that the two become
        # neighbours.
        if (begin != records["lead_start"]).any():
            order = np.lexsort(keys[::-1])
            keys = [values[order] for values in keys]
        same = np.ones(max(len(records) - 1, 0), bool)
        for values in keys:
            same &= values[1:] == values[:-1]
        if not same.any():
            return
        read = np.zeros(len(records), bool)
        read[made.rows()] = True
        if order is not None:
            records, read = records[order], read[order]
        twice = np.flatnonzero(same & (read[1:] | read[:-1]))
        if len(twice):
            first, second = records[twice[0] :][:2]
            where = " and ".join(sorted({self.files[int(first["file"])], self.files[int(second["file"])]}))
            raise UserError(f"{describe(first)}: stands twice in {where}; give each field once")

    def _check_origins(self, made: Aligned) -> None:
        """Raise a UserError if the fields that `made` reads come from several sources.

        Refused are several producers (centres, for example) in one ensemble or in one variable of a truth. In an
        ensemble, several experiments are refused as well, and so are several ensembles of a centre at one init time:
        their members have the same numbers but belong to different forecasts.

        A truth may continue in another experiment: the latest months of ERA5 are preliminary. Then a warning names
        both.
        """
        if len(self.origins) < 2:
            return
        records = self.records[made.rows()]
        one_ensemble = self.role == FORECAST
        fields = [None] if one_ensemble else np.unique(records["field"]).tolist()
        for number in fields:
            group = records if number is None else records[records["field"] == number]
            numbers, places = np.unique(group["origin"], return_index=True)
            starts_of = [np.unique(group["init"][group["origin"] == one]) for one in numbers] if one_ensemble else []
            for first, second in combinations(range(len(numbers)), 2):
                a, b = self.origins[numbers[first]], self.origins[numbers[second]]
                common = one_ensemble and np.intersect1d(starts_of[first], starts_of[second]).size > 0
                if not a.differs(b, one_start=common):
                    continue
                paths = [self.files[int(group["file"][places[one]])] for one in (first, second)]
                text = f"{self.path}: holds fields of {a} ({paths[0]}) and of {b} ({paths[1]})"
                if one_ensemble or a._replace(experiment="").differs(b):
                    raise UserError(f"{text}; give those of one alone, by a list of files or a pattern")
                log.warning("%s; both are taken", text)

    def _leave_out(self, rows: np.ndarray, index: FileIndex) -> bool:
        """Leave out those of `rows` whose fields are all NaN. Return whether there were any."""
        records = self.records[rows]
        empty = np.zeros(len(rows), bool)
        files, said = np.unique(records["file"]).tolist(), time.monotonic()
        for number, file in enumerate(files):
            if time.monotonic() - said > _LINE_EVERY:
                text = "%s: looking for fields that are all NaN: %d of %d files are looked through"
                log.info(text, self.path, number, len(files))
                said = time.monotonic()
            mine = records["file"] == file
            empty[mine] = self.readers[file].empty(records[mine], index)
        if empty.any():
            first = describe(records[empty.argmax()])
            times = len(np.unique(records["init"][empty]))
            text = "%s: %d of %d fields, on %d init times, are all NaN and count as absent; the first: %s"
            log.warning(text, self.path, empty.sum(), len(rows), times, first)
            self.records = np.delete(self.records, rows[empty])
        return bool(empty.any())

    def values(
        self, records: np.ndarray, rows: slice | None = None, into: Sequence[np.ndarray] | None = None
    ) -> Iterator[RawField]:
        """Yield the values of `records`, in their order. This is fast if the order is that of the files.

        `data_prep.records.Reader.fields` describes the values. Several threads may read at the same time.

        Raises:
            UserError: a file cannot be read or has changed, or a field cannot be decoded, has no value at any point, or
                has a value that is not plausible.
        """
        ends = np.flatnonzero(np.diff(records["file"])) + 1
        for first, last in pairwise([0, *ends.tolist(), len(records)]):
            if last > first:
                reader = self.readers[int(records["file"][first])]
                mine = records[first:last]
                fields = reader.fields(mine, rows, into[first:last] if into else None)
                for record, raw in zip(mine, fields, strict=True):
                    if raw.nothing and covers(rows, reader.grid):
                        what = f"all {raw.values.size} points are without a value"
                        raise UserError(f"{reader.path}: {describe(record)}: {what}; {IF_ABSENT}")
                    # NetCDF and Zarr are checked as they are read, whole blocks at once.
                    field, level, bits = field_of(record), int(record["level"]), int(record["bits"])
                    if reader.keyed and (wrong := implausible(field, level, raw, bits)):
                        raise UserError(f"{reader.path}: {describe(record)}: {wrong}; mend it, or leave the field out")
                    yield raw

    def gather(
        self, targets: Iterable[Target], layout: Layout, members: int, band: tuple[int, int] | None, allocate: Allocate
    ) -> Gathered:
        """Read `targets` into blocks of `members` and the other axes of `layout`.

        `band` holds the first row of latitude and the row after the last; None takes all. Of the blocks of integers
        that `allocate` makes, only fields that exist are filled.

        Raises:
            UserError: as in `values`; the grid lacks the rows; or fields cannot be combined (they are on several grids,
                or a sum falls).
        """
        rows, height = slice(*(band or (0, layout.grid.shape[0]))), layout.grid.shape[0]
        if not 0 <= rows.start < rows.stop <= height:
            raise UserError(f"{self.path}: has no rows {rows.start} to {rows.stop}; it has rows 0 to {height}")
        points = rows.stop - rows.start, layout.grid.shape[1]
        leads, levels = len(layout.lead_hours), len(layout.levels)
        out = Gathered(
            layout,
            PackedBlock.unfilled(allocate((members, leads, len(layout.variables), levels, *points))),
            PackedBlock.unfilled(allocate((members, leads, len(layout.surface), *points))),
        )
        return self._fill(out, list(targets), rows)

    def _fill(self, out: Gathered, targets: list[Target], rows: slice) -> Gathered:
        """Read single fields in the order of the files, then those that are combined from several."""
        single = [target for target in targets if target.combine is Combine.ONE]
        chosen = self.records[[target.rows[0] for target in single]]
        # Fields are read in the order in which they lie in the files, so that files are read forwards.
        order = np.lexsort((chosen["offset"], chosen["file"]))
        masks: Masks = {}
        checksum = 0
        into = [(out.surface if t.surface else out.pressure).values[t.place] for t in (single[i] for i in order)]
        for number, (index, raw) in enumerate(zip(order, self._brought(chosen[order], rows, into), strict=True)):
            target = single[index]
            checksum = summed(checksum, raw)
            if raw.packed and raw.values is not into[number]:
                into[number][...] = raw.values
            out.note(target, raw)
            if raw.packed and raw.mask is not None:
                masks[target.surface, target.place] = raw.mask
        for target in targets:
            if target.combine is not Combine.ONE:
                out.loose[target.surface, target.place] = self._combined(target, rows)
                checksum = google_crc32c.extend(checksum, out.loose[target.surface, target.place].tobytes())
        pressure, surface = with_masks(out.pressure, masks, False), with_masks(out.surface, masks, True)
        places = self._places(chosen[order], targets)
        return replace(out, pressure=pressure, surface=surface, places=places, checksum=checksum)

    def _places(self, single: np.ndarray, targets: list[Target]) -> np.ndarray:
        """Return the places of the fields of `single` and of combined targets, (N,) PLACE."""
        combined = [row for target in targets if target.combine is not Combine.ONE for row in target.rows]
        records = np.concatenate([single, self.records[combined]]) if combined else single
        places = np.empty(len(records), PLACE)
        for name in ("file", "offset", "length"):
            places[name] = records[name]
        return places

    def fields(self, rows: np.ndarray) -> set[tuple[str, int, int]]:
        """Return path, offset and length of the fields in some rows (N,) of the table."""
        records = self.records[rows]
        columns = (records[name].tolist() for name in ("file", "offset", "length"))
        return {(self.stamps[file][0], offset, length) for file, offset, length in zip(*columns, strict=True)}

    def _brought(self, records: np.ndarray, rows: slice, into: Sequence[np.ndarray]) -> Iterator[RawField]:
        """Yield `rows` of `records` on the target grid."""
        if all(geometry.same for geometry in self._geometries):
            yield from self.values(records, rows, into)
            return
        for record, raw in zip(records, self.values(records), strict=True):
            moved = self._geometries[record["file"]].field(raw)
            mask = None if moved.mask is None else moved.mask[rows]
            yield replace(moved, values=moved.values[rows], mask=mask)

    def _combined(self, target: Target, rows: slice) -> np.ndarray:
        """Combine several fields to one, for example hourly sums to a daily sum, on the target grid."""
        records = self.records[list(target.rows)]
        geometry = self._geometries[records["file"][0]]
        if any(self._geometries[number] is not geometry for number in records["file"].tolist()):
            raise UserError(f"{self.path}: {describe(records[0])}: is made of fields on several grids; leave it out")
        # Fields are decoded one after the other, because all hours of a week would need too much memory.
        parts = (raw.decode().astype(np.float64) for raw in self.values(records))
        if target.combine is not Combine.DIFFERENCE:
            made = COMBINED[target.combine](parts)
        else:
            later, earlier = self.values(records)
            try:
                made = difference(later, earlier)
            except UserError as error:
                raise UserError(f"{self.path}: {describe(records[0])}: {error}") from error
        return geometry.floats(made.astype(np.float32))[rows]

    def methods(self, name: str) -> set[str]:
        """Return the methods over time (mean, maximum, minimum) that files state for a variable."""
        files = np.unique(self.records["file"][self.records["field"] == FIELD_INDEX[name]]).tolist()
        readers = [self.readers[number] for number in files]
        return {reader.methods[name] for reader in readers if name in reader.methods}

    @property
    def masked(self) -> tuple[str, ...]:
        """Return the variables of which some fields may have points without a value, in the order of the registry."""
        fields = np.unique(self.records["field"][self.records["masked"]])
        return tuple(FIELDS[index].name for index in fields.tolist())

    def static(self, without: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Return static fields except `without` by name, (Y, X) float32; of repeated ones, the first is taken."""
        found: dict[str, np.ndarray] = {}
        for record in self.static_records:
            name = field_of(record).name
            if name not in found and name not in without:
                raw = next(self.values(np.array([record], RECORD)))
                found[name] = self._geometries[record["file"]].field(raw).decode()
        return dict(sorted(found.items()))

    def fingerprint(self, rows: np.ndarray | None = None) -> str:
        """Return 16 hex digits over file names, sizes, and keys and packing constants of all fields but static ones.

        For NetCDF and Zarr, the modification time counts as well, because their records do not depend on the values.
        Those of GRIB do, by the packing constants.

        Args:
            rows: positions in the table; only these fields and their files count then. In GRIB files, the lengths of
                these messages count in place of the size of the file, because others may have been appended to it.
        """
        records = self.records if rows is None else self.records[rows]
        digest = hashlib.sha256()
        for number in range(len(self.readers)) if rows is None else np.unique(records["file"]).tolist():
            keyed, (path, size, changed) = self.readers[number].keyed, self.stamps[number]
            stamp = "" if keyed and rows is not None else f" {size}" if keyed else f" {size} {changed}"
            digest.update(os.fsencode(os.path.basename(path)) + f"{stamp}\n".encode())
        columns = (*KEYS, "offset", "bits", "reference", "scale", "decimal", *(() if rows is None else ("length",)))
        for name in columns:
            digest.update(np.ascontiguousarray(records[name]).tobytes())
        return digest.hexdigest()[:16]


def _joined_tables(readers: list[Reader]) -> tuple[np.ndarray, list[Origin]]:
    """Return the records of all readers, numbered by file and by origin, and the list of origins.

    The readers' own records are released one by one, because there may be millions.
    """
    table = np.empty(sum(len(reader.records) for reader in readers), RECORD)
    origins: dict[Origin, int] = {}
    first = 0
    for number, reader in enumerate(readers):
        mine = table[first : first + len(reader.records)]
        mine[:] = reader.records
        mine["file"] = number
        in_archive = np.array([origins.setdefault(one, len(origins)) for one in reader.origins], np.int16)
        mine["origin"] = in_archive[mine["origin"]] if len(mine) else 0
        first += len(mine)
        reader.records = np.zeros(0, RECORD)
    return table, list(origins)


def _shown(paths: Any) -> str:
    """Return the paths of an archive in a short form, for messages."""
    first, *more = [shown_input(path) for path in (paths if isinstance(paths, list | tuple) else [paths])] or [""]
    return f"{first} and {len(more)} more" if more else first


def _one_grid(readers: list[Reader], *, several: bool) -> Grid:
    """Return the grid that all files share, or raise a UserError; the first one if there may be `several`."""
    grids = [(reader.path, reader.grid) for reader in readers if reader.grid is not None]
    if not grids:
        skipped = sorted({name for reader in readers for name in reader.skipped}, key=lambda name: " (" not in name)
        seen = f"; it has {', '.join(skipped[:20])}" if skipped else ""
        raise UserError(f"{readers[0].path}: holds no field that the registry knows{seen}")
    first_path, first = grids[0]
    for path, grid in grids:
        if not several and not grid.same_as(first):
            raise UserError(
                f"{path}: grid {grid.describe()} differs from that of {first_path}, {first.describe()}; "
                "an archive has one grid: prepare with regrid=DEGREES brings all to one"
            )
    return first


def _check_units(path: str, readers: list[Reader]) -> dict[str, str]:
    """Return the variables that are left out because they have no units: name in the file -> our short name.

    Warn about them, and about units that are assumed by convention. Refuse files with nothing else.
    """
    files = [reader for reader in readers if isinstance(reader, XarrayFile)]
    assumed = {name: units for file in files for name, units in file.assumed.items()}
    lacking = {name: ours for file in files for name, ours in file.without_units.items()}
    if lacking:
        shown, has = ", ".join(sorted(lacking)), "has" if len(lacking) == 1 else "have"
        if not any(len(reader.records) for reader in readers):
            raise UserError(f"{path}: {shown}: {has} no units; {units_setting(lacking.values())}")
        log.warning("%s: left out for having no units: %s; %s", path, shown, units_setting(lacking.values()))
    if assumed:
        shown = ", ".join(f"{name} {units}" for name, units in sorted(assumed.items()))
        text = "%s: files state no units of %s; these are assumed by convention, and values agree; if wrong, %s"
        log.warning(text, path, shown, units_setting(assumed))
    return lacking


def units_setting(names: Iterable[str]) -> str:
    """Return the remedy of a message: the setting by which a user states the units of variables (short names)."""
    said = ", ".join(f"{name}: {field(name).units}" for name in sorted(set(names)))
    return f"give them, as in 'units={{{said}}}'"


def _report_skipped(path: str, counts: dict[str, int], elsewhere: set[str]) -> None:
    """Log the variables that are left out: as a warning if the user may want them, else as information."""
    known = sorted(name for name in counts if f"({OTHER_UNITS}" in name)
    if known:
        text = "%s: left out, though the variables are known: %s; convert these, or state their units as CF does"
        log.warning(text, path, ", ".join(known))
    if gaps := sorted(name for name in counts if NO_MESSAGE in name):
        log.warning("%s: files hold %s: a message may be damaged there; fetch them again", path, _first(gaps))
        known += gaps
    if elsewhere:
        text = (
            "%s: left out because a coordinate makes them another quantity: %s; drop it if it belongs to other"
            " variables of the file"
        )
        log.warning(text, path, _first(sorted(elsewhere)))
        known += elsewhere
    # A label with a reason names a variable of the registry, which the user may miss. These are listed before the
    # unknown ones.
    reasons = [name for name in sorted(counts) if name not in known and not re.fullmatch(_UNKNOWN, name)]
    if reasons:
        log.info("%s: left out: %s", path, _first(reasons))
    others = [name for name in sorted(counts) if name not in known and name not in reasons]
    if others:
        text = "%s: %d fields of variables that the registry does not know are left out: %s"
        log.info(text, path, sum(counts[name] for name in others), _first(others))


def _first(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
