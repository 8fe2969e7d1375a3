"""What the start dates of a store were read from: files with size and time of change, places in them, checksums.

A build that is taken up again looks whether these files are still what they were; the finished store keeps the sums in
`sources.json`, which is no part of its fingerprint, since the same fields may come from files anywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from ensemble_ml.store.schema import SOURCES_FILE
from ensemble_ml.store.shard import damaged

PLACE = np.dtype([("file", np.int32), ("offset", np.int64), ("length", np.int64)])

MEMORY = "an open Dataset ("  # begins what stands for the path of a Dataset in memory; a digest of it follows

Stamps = dict[str, tuple[int, int]]  # path -> bytes, time of change (ns)


@dataclass(eq=False)
class Sources:
    """What one part of a start date was read from.

    `files` in the order in which `places` (N,) PLACE number them; `checksum` is the crc32c of all fields, as they were
    taken, one after the other.
    """

    files: Stamps = field(default_factory=dict)
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, PLACE))
    checksum: int = 0

    def add(self, stamps: list[tuple[str, int, int]], places: np.ndarray, checksum: int) -> None:
        """Take in more fields; `places` number the files of `stamps` (path, bytes, time of change)."""
        places = places.copy()
        used, numbers = np.unique(places["file"], return_inverse=True)
        known = list(self.files)
        for path, size, time in (stamps[number] for number in used.tolist()):
            if path not in self.files:
                known.append(path)
                self.files[path] = size, time
        places["file"] = np.array([known.index(stamps[number][0]) for number in used.tolist()], np.int32)[numbers]
        self.places = np.concatenate([self.places, places])
        self.checksum = google_crc32c.extend(self.checksum, checksum.to_bytes(4, "little"))

    def fields(self) -> set[tuple[str, int, int]]:
        """Where the fields lie: path, offset and length of each."""
        names = list(self.files)
        return {(names[file], offset, length) for file, offset, length in self.places.tolist()}

    def summary(self) -> dict[str, Any]:
        """How much was read, as JSON holds it."""
        return {
            "fields": len(self.places),
            "bytes": int(self.places["length"].sum()),
            "crc32c": f"{self.checksum:08x}",
        }


def stamp(path: str) -> tuple[int, int] | None:
    """Bytes and time of change of a file as it is now, or of all files of a Zarr folder; None where it is not seen.

    A Dataset in memory has neither, and is never another: its name holds a digest of it.
    """
    if path.startswith(MEMORY):
        return 0, 0
    try:
        inside = [os.path.join(root, name) for root, _, files in os.walk(path) for name in files]
        found = [os.stat(one) for one in inside or [path]]
    except OSError:
        return None
    return sum(one.st_size for one in found), max(one.st_mtime_ns for one in found)


def changed(files: Stamps, now: dict[str, tuple[int, int] | None], *, lost: bool) -> Iterator[str]:
    """Those of `files` that are not what they were; `now` keeps what was looked up.

    Files out of sight count only with `lost`: another builder may have reached them by another path.
    """
    for path, before in files.items():
        if path not in now:
            now[path] = stamp(path)
        if now[path] != tuple(before) and (lost or now[path] is not None):
            yield path


@dataclass
class SourceTable:
    """What `sources.json` holds: files with their stamps, and by start date and part the sums of what was read."""

    numbers: dict[str, int] = field(default_factory=dict)
    stamps: Stamps = field(default_factory=dict)
    dates: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, start: str, parts: Mapping[str, Sources]) -> None:
        """Take in one start date."""
        for part, one in parts.items():
            self.stamps |= one.files
            files = [self.numbers.setdefault(path, len(self.numbers)) for path in one.files]
            self.dates.setdefault(start, {})[part] = {**one.summary(), "files": files}

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        keys = ("bytes", "mtime_ns")
        files = [{"path": path, **dict(zip(keys, self.stamps[path], strict=True))} for path in self.numbers]
        return {"files": files, "dates": self.dates}

    def write(self, root: Path) -> None:
        """Write the file; none where nothing was read from files."""
        if self.numbers:
            (root / SOURCES_FILE).write_text(json.dumps(self.as_dict(), indent=0))


def read_sources(root: Path) -> dict[str, Any] | None:
    """`files` and `dates` of a store's `sources.json`; None where it was made from fields in memory.

    Raises:
        UserError: it is damaged.
    """
    try:
        found = json.loads((root / SOURCES_FILE).read_text())
        return {"files": list(found["files"]), "dates": dict(found["dates"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(root / SOURCES_FILE, str(error)) from error
