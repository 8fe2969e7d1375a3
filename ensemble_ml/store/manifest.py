"""Write and check the manifest of a store, which lists every file with its size and sha256.

The manifest reveals damage, and whether two stores have the same contents.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from ensemble_ml.errors import UserError
from ensemble_ml.store.schema import FORMAT, MANIFEST, SOURCES_FILE
from ensemble_ml.store.shard import damaged, digest_shard, unread

CLIMATE = "climate_"  # prefix of the arrays of the model climate, which follow from the fields


@dataclass(frozen=True)
class Entry:
    """The entry of one file: its size in bytes and its sha256.

    The sha256 of a shard is taken over its checksums (`shard.digest_shard`).
    """

    bytes: int
    sha256: str


def make_manifest(root: Path, known: dict[str, Entry]) -> dict[str, Entry]:
    """Return the entries of all files below `root` except the manifest, by path relative to `root`.

    Args:
        root: Folder of the store.
        known: Entries of files that need not be read again, such as shards that were hashed while they were written.
            Files that do not exist are ignored.
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


def stamp(root: Path) -> tuple[int, int, int]:
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
    """Check the digest of every file, which reads the whole store.

    Args:
        root: Folder of the store.
        files: Files with their digests.
        shards: Number of chunks of each shard, by its name.

    Raises:
        UserError: A file is missing, unreadable or has changed. The message names the first one.
    """
    for name, entry in files.items():
        check_file(root / name, entry, shards.get(name))


def check_file(path: Path, entry: Entry, chunks: int | None = None) -> None:
    """Check the digest of one file.

    Args:
        path: The file.
        entry: Its entry in the manifest.
        chunks: Number of chunks of a shard; None for other files.

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
