"""Write and check the manifest of a store, which lists its files, and the record of the files that it was built from.

The manifest has the size and sha256 of every file. It reveals damage, and whether two stores have the same contents.

Archive files are recorded with their size and modification time, and fields with checksums. A build that is continued
after an interruption checks whether these files are unchanged. The finished store keeps the list of files, and for each
init time the number of fields, bytes and a checksum, in `sources.json`. That file does not count for the fingerprint of
the store, because the same fields may come from files at any place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.store.remote import is_remote, remote_stamp
from ensemble_ml.store.schema import FORMAT, MANIFEST, SOURCES_FILE
from ensemble_ml.store.shard import damaged, digest_shard, unread

CLIMATE = "climate_"  # prefix of the arrays of the model climate, which follow from the fields
PLACE = np.dtype([("file", np.int32), ("offset", np.int64), ("length", np.int64)])  # of a field in a file
MEMORY = "an open Dataset ("  # begins the name that a Dataset in memory has in place of a path; its digest follows
Stamps = dict[str, tuple[int, int]]  # path -> size in bytes, modification time in ns (see `stamp`)


@dataclass(frozen=True)
class Entry:
    """The entry of one file: its size in bytes and its sha256.

    The sha256 of a shard is taken over its checksums (`shard.digest_shard`).
    """

    bytes: int
    sha256: str


def make_manifest(root: Path, known: dict[str, Entry]) -> dict[str, Entry]:
    """Return the entries of all files below `root` except the manifest, by path relative to `root`.

    `known` are entries of files that need not be read again, such as shards that were hashed while they were written.
    Those of files that do not exist are ignored.
    """
    files = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p.name != MANIFEST):
        name = path.relative_to(root).as_posix()
        files[name] = known.get(name) or Entry(path.stat().st_size, hash_file(path))
    return files


def write_manifest(root: Path, files: dict[str, Entry]) -> None:
    """Write the manifest, and wait until it is on disk."""
    body = {"format": FORMAT, "files": {name: [entry.bytes, entry.sha256] for name, entry in files.items()}}
    with open(root / MANIFEST, "w") as file:
        json.dump(body, file, indent=0)
        file.flush()
        os.fsync(file.fileno())


def stamp_of_manifest(root: Path) -> tuple[int, int, int]:
    """Return inode, size in bytes and modification time in ns of the manifest, to notice another store at this path.

    The inode alone is not enough, because the file system reuses it for later files.

    Raises:
        OSError: There is no manifest.
    """
    status = (root / MANIFEST).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_manifest(root: Path) -> dict[str, Entry]:
    """Return the entries of the manifest, by path relative to `root`.

    Raises:
        UserError: The manifest is missing, damaged or cannot be read.
    """
    try:
        body = json.loads((root / MANIFEST).read_text())
        return {name: Entry(int(size), str(digest)) for name, (size, digest) in body["files"].items()}
    except FileNotFoundError as error:
        raise UserError(f"{root}: has no {MANIFEST}, so it is no complete tensor store; prepare it again") from error
    except OSError as error:
        raise unread(root / MANIFEST, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(root / MANIFEST, str(error)) from error


def check_sizes(root: Path, files: dict[str, Entry]) -> None:
    """Check that every file is there with its size, without reading contents.

    Raises:
        UserError: A file is missing or of another size. The message names the first one and counts the others.
    """
    found: dict[str, int] = {}
    # One scan of each folder is much cheaper than a call for each file, of which there may be many thousands.
    for folder in {os.path.dirname(name) for name in files}:
        if (root / folder).is_dir():
            with os.scandir(root / folder) as entries:
                found |= {os.path.join(folder, e.name): e.stat().st_size for e in entries if e.is_file()}
    wrong = [name for name, entry in files.items() if found.get(name) != entry.bytes]
    if wrong:
        size = found.get(wrong[0])
        reason = "missing" if size is None else f"{size} bytes instead of {files[wrong[0]].bytes}"
        others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise damaged(root / wrong[0], reason + others)


def check_contents(root: Path, files: dict[str, Entry], shards: dict[str, int]) -> None:
    """Check the digest of every file, which reads the whole store. `shards` is the number of chunks of each shard.

    Raises:
        UserError: A file is missing, unreadable or has changed. The message names the first one.
    """
    for name, entry in files.items():
        check_file(root / name, entry, shards.get(name))


def check_file(path: Path, entry: Entry, chunks: int | None = None) -> None:
    """Check the digest of one file against its entry. `chunks` counts the chunks of a shard; None for other files.

    Raises:
        UserError: The file is missing or unreadable, or its contents have changed.
    """
    try:
        found = hash_file(path) if chunks is None else digest_shard(path, chunks)
    except OSError as error:
        raise unread(path, error) from error
    if found != entry.sha256:
        raise damaged(path, "its sha256 is not that of the manifest")


def fingerprint(files: dict[str, Entry]) -> str:
    """Return 16 hex digits that are equal for stores of the same fields in the same packing.

    Path and provenance do not matter. The root attributes, the list of sources and the model climate do not count.
    """
    # These files hold provenance and paths.
    aside = ("zarr.json", SOURCES_FILE)
    lines = [
        f"{name} {entry.sha256}"
        for name, entry in sorted(files.items())
        if name not in aside and not name.startswith(CLIMATE)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def hash_file(path: Path) -> str:
    """Return the sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(eq=False)
class Sources:
    """The sources of one part of an init time.

    Attributes:
        files: The files, in the order in which `places` numbers them.
        places: (N,) PLACE, the file, offset and length of each field.
        checksum: crc32c over the checksums that were passed to `add`, in this order.
    """

    files: Stamps = field(default_factory=dict)
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, PLACE))
    checksum: int = 0

    def add(self, stamps: list[tuple[str, int, int]], places: np.ndarray, checksum: int) -> None:
        """Add fields to the record.

        Args:
            stamps: Path, size in bytes and modification time in ns of each file.
            places: (n,) PLACE of the fields; its file numbers index `stamps`.
            checksum: crc32c of these fields.
        """
        places = places.copy()
        # Only files that hold one of the fields are recorded.
        used, numbers = np.unique(places["file"], return_inverse=True)
        known = list(self.files)
        for path, size, time in (stamps[number] for number in used.tolist()):
            if path not in self.files:
                known.append(path)
                self.files[path] = size, time
        # The file numbers change from positions in `stamps` to positions in `files`.
        places["file"] = np.array([known.index(stamps[number][0]) for number in used.tolist()], np.int32)[numbers]
        self.places = np.concatenate([self.places, places])
        self.checksum = google_crc32c.extend(self.checksum, checksum.to_bytes(4, "little"))

    def fields(self) -> set[tuple[str, int, int]]:
        """Return the places of all fields: path, offset and length of each."""
        names = list(self.files)
        return {(names[file], offset, length) for file, offset, length in self.places.tolist()}

    def summary(self) -> dict[str, Any]:
        """Return how much was read, as JSON stores it."""
        return {
            "fields": len(self.places),
            "bytes": int(self.places["length"].sum()),
            "crc32c": f"{self.checksum:08x}",
        }


def stamp(path: str) -> tuple[int, int] | None:
    """Return the size and modification time of a file or URL, or of all files of a Zarr folder together.

    Args:
        path: A file, a folder, a URL, or the name of a Dataset in memory. The name of a Dataset holds a digest, so
            equal names mean equal data.

    Returns:
        Size in bytes and the latest modification time in ns. A URL has a checksum in place of the time (see
        `remote_stamp`), and a Dataset has zeros. None if the file cannot be seen.
    """
    if path.startswith(MEMORY):
        return 0, 0
    if is_remote(path):
        return remote_stamp(path)
    try:
        inside = [os.path.join(root, name) for root, _, files in os.walk(path) for name in files]
        found = [os.stat(one) for one in inside or [path]]
    except OSError:
        return None
    return sum(one.st_size for one in found), max(one.st_mtime_ns for one in found)


def changed(files: Stamps, now: dict[str, tuple[int, int] | None], *, lost: bool) -> Iterator[str]:
    """Yield the paths of files that have changed since they were read.

    Args:
        files: the files with their stamps at the time of reading.
        now: The stamps that were looked up already, by path. New ones are added, so that a file from which many init
            times come is looked up only once.
        lost: Whether a file that cannot be seen counts as changed. Such a file may still exist: the process that read
            it may have seen it under another path.
    """
    for path, before in files.items():
        if path not in now:
            now[path] = stamp(path)
        if now[path] != tuple(before) and (lost or now[path] is not None):
            yield path


@dataclass
class SourceTable:
    """The content of `sources.json`: the files with their stamps, and what was read for each part of each init time.

    Attributes:
        numbers: Number of each file, by its path.
        stamps: Size in bytes and modification time in ns of each file, by its path.
        dates: By init time and part, the result of `Sources.summary` and the numbers of the `files`.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    stamps: Stamps = field(default_factory=dict)
    dates: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, start: str, parts: Mapping[str, Sources]) -> None:
        """Add the sources of each part of one init time, whose text is `start`."""
        for part, one in parts.items():
            self.stamps |= one.files
            files = [self.numbers.setdefault(path, len(self.numbers)) for path in one.files]
            self.dates.setdefault(start, {})[part] = {**one.summary(), "files": files}

    def as_dict(self) -> dict[str, Any]:
        """Return the content as JSON stores it."""
        stamps = ((path, *self.stamps[path]) for path in self.numbers)
        files = [{"path": path, "bytes": size, "mtime_ns": time} for path, size, time in stamps]
        return {"files": files, "dates": self.dates}

    def write(self, root: Path) -> None:
        """Write `sources.json` to the store at `root`. No file is written if nothing was read from files."""
        if self.numbers:
            (root / SOURCES_FILE).write_text(json.dumps(self.as_dict(), indent=0))


def read_sources(root: Path) -> dict[str, Any] | None:
    """Read `files` and `dates` from the `sources.json` of the store at `root`.

    Returns:
        Both, or None if there is no such file, as in a store that was written by `StoreWriter`.

    Raises:
        UserError: The file is damaged or cannot be read.
    """
    try:
        found = json.loads((root / SOURCES_FILE).read_text())
        return {"files": list(found["files"]), "dates": dict(found["dates"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(root / SOURCES_FILE, str(error)) from error
