"""An index of archive files on disk, so that each file is scanned only once.

For a GRIB file, the index keeps a table of its messages. The headers of NetCDF files and Zarr stores state what they
hold, but not which fields are all NaN; if such fields are searched for, the result for each field is kept.

An entry belongs to one path, size and modification time, and to one version of the index. It is made anew if any of
these differs. Its file is a line of JSON, which states them and a checksum, followed by the rows as they lie in memory.
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
from ensemble_ml.errors import UserError
from ensemble_ml.fields import FIELDS
from ensemble_ml.folders import user_cache, write_whole
from ensemble_ml.store.folder import NoLocks, claimed_once
from ensemble_ml.store.manifest import MEMORY
from ensemble_ml.store.remote import is_remote

log = logging.getLogger(__name__)

UNKNOWN, FILLED, EMPTY = 0, 1, 2  # states of a field: not read yet, has a value, is all NaN

Found = TypeVar("Found")
_FORMAT = 9
_LOOK = 0.2  # seconds between checks for the table of a file that another process scans
# The rows depend on the columns and on the registry, so an index made by another version must not be used.
_VERSION = hashlib.sha256(f"{_FORMAT} {RECORD.descr} {FIELDS}".encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Table:
    """The messages of a GRIB file, as the index keeps them (see `data_prep.records.Reader`).

    Attributes:
        records: (N,) RECORD.
        scans: the grids and point orders that the column `place` of the records numbers.
        skipped: number of messages that are not read, by their description.
        methods: mean, maximum or minimum over time, by the name of a variable that is one.
        origins: the producers that the column `origin` of the records numbers.
    """

    records: np.ndarray
    scans: tuple[Scan, ...]
    skipped: dict[str, int]
    methods: dict[str, str]
    origins: tuple[Origin, ...]


class FileIndex:
    """A folder with the entries of the index. If it cannot be written, nothing is kept, and a line in the log says so.

    Args:
        folder: where the entries lie; None keeps none.
        look: whether users of the index have to search for fields that are all NaN. The search reads at least
            one row of every wanted field of NetCDF and Zarr, and the doubtful messages of GRIB (see
            `data_prep.records.Reader.empty`).
    """

    def __init__(self, folder: str | os.PathLike | None, *, look: bool = False):
        self.folder, self.look = None if folder is None else Path(folder), look
        self._warned = False

    def place(self, path: str, kind: str = "index") -> Path | None:
        """Return the file of the index that belongs to a file of an archive, or None if nothing is kept.

        Its `kind` is `index` for the table of the file, or `looks` for which of its fields are all NaN.
        """
        if self.folder is None:
            return None
        whole = absolute(path)
        # Files of the same name in different folders need different entries.
        digest = hashlib.sha256(os.fsencode(whole)).hexdigest()[:16]
        return self.folder / f"{os.path.basename(whole)[:64]}.{digest}.{kind}"

    def load(self, path: str, stamp: Stamp) -> Table | None:
        """Return the table of `path`. Return None if it is absent, damaged, or of another state of the file."""

        def table(head: dict[str, Any], rows: bytes) -> Table:
            if len(rows) != head["count"] * RECORD.itemsize:
                raise ValueError("rows are missing")
            scans = tuple(
                Scan(tuple(lat), tuple(lon), west, columns, tuple(counts))
                for lat, lon, west, columns, counts in head["scans"]
            )
            origins = tuple(Origin(*codes) for codes in head["origins"])
            return Table(np.frombuffer(rows, RECORD).copy(), scans, head["skipped"], head["methods"], origins)

        return self._load(self.place(path), path, stamp, table)

    def holds(self, path: str) -> bool:
        """Return whether there is a table that belongs to `path` as it is now; only the head of the table is read."""
        place = self.place(path)
        if place is None:
            return False
        try:
            with place.open("rb") as file:
                return _belongs(json.loads(file.readline()), path, Stamp.of_archive(path))
        except (OSError, ValueError, KeyError, TypeError, UserError):
            return False

    @contextlib.contextmanager
    def alone(self, path: str) -> Iterator[None]:
        """Wait for other processes that scan `path`, and hold them off for the duration of a `with` block.

        The block begins when this process has the lock, or when another process has saved the table. The caller
        therefore has to load the table again before it scans. Without locks, and without a folder that can be written,
        the block begins at once, and each process scans the file.
        """
        place = self.place(path)
        with contextlib.ExitStack() as stack:
            if place is not None:
                with contextlib.suppress(OSError, NoLocks):
                    place.parent.mkdir(parents=True, exist_ok=True)
                    lock = place.with_name(f".{place.name}.lock")
                    if not stack.enter_context(claimed_once(lock)):
                        log.info("%s: waiting for another process that scans this file", path)
                        while not (self.holds(path) or stack.enter_context(claimed_once(lock))):
                            stack.close()
                            time.sleep(_LOOK)
            yield

    def save(self, path: str, stamp: Stamp, table: Table) -> None:
        """Keep a table, with the stamp that the file had before it was scanned."""
        head = {
            "count": len(table.records),
            "scans": [astuple(scan) for scan in table.scans],
            "skipped": table.skipped,
            "methods": table.methods,
            "origins": table.origins,
        }
        self._save(self.place(path), path, stamp, head, table.records.tobytes())

    def load_looks(self, path: str, stamp: Stamp, fields: str, count: int) -> np.ndarray:
        """Return the state of each field, (count,) uint8: UNKNOWN, FILLED or EMPTY. Without an entry all are UNKNOWN.

        `fields` is a digest of the list of fields; results for another list do not count.
        """

        def looks(head: dict[str, Any], rows: bytes) -> np.ndarray | None:
            same = head["fields"] == fields and len(rows) == count
            return np.frombuffer(rows, np.uint8).copy() if same else None

        found = self._load(self.place(path, "looks"), path, stamp, looks)
        return np.full(count, UNKNOWN, np.uint8) if found is None else found

    def save_looks(self, path: str, stamp: Stamp, fields: str, found: np.ndarray) -> None:
        """Keep the states of fields (count,) for `load_looks`, with the stamp that the file had before it was read."""
        self._save(self.place(path, "looks"), path, stamp, {"fields": fields}, found.tobytes())

    def _load(
        self, place: Path | None, path: str, stamp: Stamp, made: Callable[[dict[str, Any], bytes], Found]
    ) -> Found | None:
        """Load an entry and pass its head and rows to `made`. Return the result of `made`.

        The result is None if the entry is absent, damaged, or of another state of `path`.
        """
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
            # A damaged table would make readers take bytes at wrong offsets for values.
            if hashlib.sha256(rows).hexdigest() != head["sha256"]:
                raise ValueError("its checksum is wrong")
            return made(head, rows)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.info("index %s: damaged (%s); %s is scanned anew", place, error, path)
            return None

    def _save(self, place: Path | None, path: str, stamp: Stamp, head: dict[str, Any], rows: bytes) -> None:
        """Write an entry; if that fails, log one warning for all entries."""
        if place is None:
            return
        whole = {"version": _VERSION, "of": _owner(path, stamp), **head, "sha256": hashlib.sha256(rows).hexdigest()}
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, json.dumps(whole).encode() + b"\n" + rows)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("index %s: cannot be kept (%s); files are scanned each time", self.folder, error.strerror)


def _owner(path: str, stamp: Stamp) -> dict[str, Any]:
    """Return the path, size and modification time to which an entry belongs."""
    return {"path": absolute(path), **asdict(stamp)}


def absolute(path: str) -> str:
    """Return an absolute path. A URL, and the text that stands for a Dataset in memory, stay as they are."""
    return path if path.startswith(MEMORY) or is_remote(path) else os.path.abspath(path)


def _belongs(head: dict[str, Any], path: str, stamp: Stamp) -> bool:
    """Return whether an entry belongs to this file and to this version of the program."""
    return bool(head["version"] == _VERSION and head["of"] == _owner(path, stamp))


def user_index() -> FileIndex:
    """Return the index for archives that are read in place: in the user's cache; without a home it keeps nothing."""
    return FileIndex(user_cache("index"))
