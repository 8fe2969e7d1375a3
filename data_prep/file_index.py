"""The tables of an archive's files, kept on disk, so that a file is looked through once in its life.

GRIB files always have one. NetCDF and Zarr, whose headers tell what they hold but not which of it is all NaN, have one
where such fields are looked for.

A table belongs to one path, size and time of change; where any of them differs it is made anew. A file of the index is
a line of JSON, which says what it belongs to, and the rows as they lie in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.grib_io import Stamp
from data_prep.grib_keys import Scan
from data_prep.records import RECORD
from ensemble_ml.fields import FIELDS

log = logging.getLogger(__name__)

GRIB, FILLED = "index", "fields"  # kinds of tables: of messages, and of fields of other files that are not all NaN

_FORMAT = 3
# What the rows mean depends on the columns and on the registry: an index made by another version is made anew.
_VERSION = hashlib.sha256(f"{_FORMAT} {RECORD.descr} {FIELDS}".encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Table:
    """The fields of a file: rows of RECORD, the grids that they are scanned on, and counts of unknown variables."""

    records: np.ndarray
    scans: tuple[Scan, ...]
    skipped: dict[str, int]


class FileIndex:
    """A folder of tables. Where it cannot be written, nothing is kept, and a line in the log says so.

    Args:
        folder: where they lie; None keeps none.
        look: whether fields that are there and all NaN are looked for in NetCDF and Zarr, which reads all of them.
    """

    def __init__(self, folder: str | os.PathLike | None, *, look: bool = False):
        self.folder, self.look = None if folder is None else Path(folder), look
        self._told = False

    def place(self, path: str, kind: str = GRIB) -> Path | None:
        """The file of the index that belongs to a file of an archive."""
        if self.folder is None:
            return None
        absolute = os.path.abspath(path)
        digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
        return self.folder / f"{os.path.basename(absolute)[:64]}.{digest}.{kind}"

    def load(self, path: str, stamp: Stamp, kind: str = GRIB) -> Table | None:
        """The table of `path`, or None where there is none that belongs to it as it is now."""
        place = self.place(path, kind)
        if place is None:
            return None
        try:
            content = place.read_bytes()
        except OSError:
            return None
        try:
            line, _, rows = content.partition(b"\n")
            head = json.loads(line)
            if head["version"] != _VERSION or head["of"] != _owner(path, stamp):
                return None
            if hashlib.sha256(rows).hexdigest() != head["sha256"] or len(rows) != head["count"] * RECORD.itemsize:
                raise ValueError("its checksum is wrong")
            scans = tuple(Scan(tuple(lat), tuple(lon), *flags) for lat, lon, *flags in head["scans"])
            return Table(np.frombuffer(rows, RECORD).copy(), scans, head["skipped"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.info("index %s: damaged (%s); %s is scanned anew", place, error, path)
            return None

    def save(self, path: str, stamp: Stamp, table: Table, kind: str = GRIB) -> None:
        """Keep a table, by rename, so that no reader meets half of it."""
        rows = table.records.tobytes()
        head: dict[str, Any] = {"version": _VERSION, "of": _owner(path, stamp), "count": len(table.records)}
        head |= {"scans": [astuple(scan) for scan in table.scans], "skipped": table.skipped}
        head["sha256"] = hashlib.sha256(rows).hexdigest()
        place = self.place(path, kind)
        if place is None:
            return
        draft = place.with_name(f".{place.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(json.dumps(head).encode() + b"\n" + rows)
            os.replace(draft, place)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            if not self._told:
                self._told = True
                log.warning("index %s: cannot be kept (%s); files are scanned each time", self.folder, error.strerror)


def _owner(path: str, stamp: Stamp) -> dict[str, Any]:
    return {"path": os.path.abspath(path), **asdict(stamp)}


def user_index() -> FileIndex:
    """The index of archives that are read in place: in the user's cache ($XDG_CACHE_HOME or ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return FileIndex(Path(cache) / "ensemble_ml" / "index")
