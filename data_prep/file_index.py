"""What was found of an archive's files, kept on disk, so that each is looked through once in its life.

GRIB files have a table of their messages. The headers of NetCDF and Zarr tell what they hold, but not which of it is
all NaN: where such fields are looked for, what was found of each is kept.

Both belong to one path, size and time of change; where any of them differs they are made anew. A file of the index is
a line of JSON, which says what it belongs to, and the rows as they lie in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from data_prep.grib_io import Stamp
from data_prep.grib_keys import Scan
from data_prep.records import RECORD, Origin
from ensemble_ml.fields import FIELDS
from ensemble_ml.folders import user_cache, write_whole
from ensemble_ml.store.locks import NoLocks, claimed_once

log = logging.getLogger(__name__)

UNKNOWN, FILLED, EMPTY = 0, 1, 2  # of a field: not looked at, holds a value, is all NaN

Found = TypeVar("Found")
_FORMAT = 7
_LOOK = 0.2  # seconds between looks at a file that another process scans
# What the rows mean depends on the columns and on the registry: an index made by another version is made anew.
_VERSION = hashlib.sha256(f"{_FORMAT} {RECORD.descr} {FIELDS}".encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Table:
    """The messages of a file: rows of RECORD, the grids that they are scanned on, counts of unknown variables, which
    variables are a mean or an extreme over time, and who made the fields (see `data_prep.records.Reader`)."""

    records: np.ndarray
    scans: tuple[Scan, ...]
    skipped: dict[str, int]
    methods: dict[str, str]
    origins: tuple[Origin, ...]


class FileIndex:
    """A folder of tables. Where it cannot be written, nothing is kept, and a line in the log says so.

    Args:
        folder: where they lie; None keeps none.
        look: whether fields that are there and all NaN are looked for in NetCDF and Zarr, which reads what is wanted.
    """

    def __init__(self, folder: str | os.PathLike | None, *, look: bool = False):
        self.folder, self.look = None if folder is None else Path(folder), look
        self._told = False

    def place(self, path: str, kind: str = "index") -> Path | None:
        """The file of the index that belongs to a file of an archive."""
        if self.folder is None:
            return None
        absolute = os.path.abspath(path)
        digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
        return self.folder / f"{os.path.basename(absolute)[:64]}.{digest}.{kind}"

    def load(self, path: str, stamp: Stamp) -> Table | None:
        """The table of `path`, or None where there is none that belongs to it as it is now."""

        def table(head: dict[str, Any], rows: bytes) -> Table:
            if len(rows) != head["count"] * RECORD.itemsize:
                raise ValueError("rows are missing")
            scans = tuple(Scan(tuple(lat), tuple(lon), *flags) for lat, lon, *flags in head["scans"])
            origins = tuple(Origin(*codes) for codes in head["origins"])
            return Table(np.frombuffer(rows, RECORD).copy(), scans, head["skipped"], head["methods"], origins)

        return self._load(self.place(path), path, stamp, table)

    def holds(self, path: str) -> bool:
        """Whether there is a table that belongs to `path` as it is now, by the table's head alone."""
        place = self.place(path)
        if place is None:
            return False
        try:
            with place.open("rb") as file:
                return _belongs(json.loads(file.readline()), path, Stamp.of(path))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @contextlib.contextmanager
    def alone(self, path: str) -> Iterator[None]:
        """Hold the place of `path`'s table, so that of many builders that begin at once one scans the file; where there
        are no locks, or nothing can be kept, each of them does."""
        place = self.place(path)
        with contextlib.ExitStack() as stack:
            if place is not None:
                with contextlib.suppress(OSError, NoLocks):
                    place.parent.mkdir(parents=True, exist_ok=True)
                    lock = place.with_name(f".{place.name}.lock")
                    if not stack.enter_context(claimed_once(lock)):
                        log.info("%s: another process scans it, and its table is waited for", path)
                        while not (self.holds(path) or stack.enter_context(claimed_once(lock))):
                            stack.close()
                            time.sleep(_LOOK)
            yield

    def save(self, path: str, stamp: Stamp, table: Table) -> None:
        """Keep a table, by rename, so that no reader meets half of it."""
        head = {
            "count": len(table.records),
            "scans": [astuple(scan) for scan in table.scans],
            "skipped": table.skipped,
            "methods": table.methods,
            "origins": table.origins,
        }
        self._save(self.place(path), path, stamp, head, table.records.tobytes())

    def load_looks(self, path: str, stamp: Stamp, fields: str, count: int) -> np.ndarray:
        """What was found of each of `count` fields, (count,) uint8: UNKNOWN, FILLED or EMPTY.

        `fields` is a digest of their list: what was found of another list says nothing.
        """

        def looks(head: dict[str, Any], rows: bytes) -> np.ndarray | None:
            same = head["fields"] == fields and len(rows) == count
            return np.frombuffer(rows, np.uint8).copy() if same else None

        found = self._load(self.place(path, "looks"), path, stamp, looks)
        return np.full(count, UNKNOWN, np.uint8) if found is None else found

    def save_looks(self, path: str, stamp: Stamp, fields: str, found: np.ndarray) -> None:
        """Keep what `load_looks` gives."""
        self._save(self.place(path, "looks"), path, stamp, {"fields": fields}, found.tobytes())

    def _load(
        self, place: Path | None, path: str, stamp: Stamp, made: Callable[[dict[str, Any], bytes], Found]
    ) -> Found | None:
        """What `made` makes of a file's head and rows, if they belong to `path` as it is now."""
        if place is None:
            return None
        try:
            content = place.read_bytes()
        except OSError:
            return None
        try:
            line, _, rows = content.partition(b"\n")
            head = json.loads(line)
            if not _belongs(head, path, stamp):
                return None
            if hashlib.sha256(rows).hexdigest() != head["sha256"]:
                raise ValueError("its checksum is wrong")
            return made(head, rows)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.info("index %s: damaged (%s); %s is scanned anew", place, error, path)
            return None

    def _save(self, place: Path | None, path: str, stamp: Stamp, head: dict[str, Any], rows: bytes) -> None:
        if place is None:
            return
        whole = {"version": _VERSION, "of": _owner(path, stamp), **head, "sha256": hashlib.sha256(rows).hexdigest()}
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, json.dumps(whole).encode() + b"\n" + rows)
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning("index %s: cannot be kept (%s); files are scanned each time", self.folder, error.strerror)


def _owner(path: str, stamp: Stamp) -> dict[str, Any]:
    return {"path": os.path.abspath(path), **asdict(stamp)}


def _belongs(head: dict[str, Any], path: str, stamp: Stamp) -> bool:
    return bool(head["version"] == _VERSION and head["of"] == _owner(path, stamp))


def user_index() -> FileIndex:
    """The index of archives that are read in place: in the user's cache, where there is one."""
    return FileIndex(user_cache("index"))
