"""The folders of configuration, output and cache, files that appear in one step, hashes of code, and strict JSON.

Folders are checked before a command begins its work, so that a wrong name does not cost a night of computing. Files are
written as drafts and renamed when they are complete. Strict JSON has no NaN and no infinity (RFC 8259), so null stands
for them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import shutil
import time
from contextlib import suppress
from enum import Enum
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from ensemble_ml.errors import UserError

log = logging.getLogger(__name__)

_ABANDONED = 3600  # seconds without a change after which a draft counts as left by a killed run
_warned: set[str] = set()  # kinds of cache whose absence has been logged


def conf_folder() -> Path:
    """Return the folder of the YAML files: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def check_writable(output: str | Path, key: str = "output") -> None:
    """Refuse an output folder to which no files may be written; `key` is the setting, for the message.

    The folder need not exist yet, and nothing is created.

    Raises:
        UserError: the folder, or the one in which it would be created, is no folder or may not be written.
    """
    nearest = Path(output).absolute()  # the folder itself, or the nearest parent that exists
    while not os.path.exists(nearest) and nearest != nearest.parent:  # Path.exists raises in a closed folder
        nearest = nearest.parent
    if not nearest.is_dir():
        raise UserError(f"{key}={output}: {nearest} is a file; give a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{key}={output}: {nearest} may not be written; choose another folder")


def draft_of(path: Path) -> Path:
    """Return an unused name beside `path` for a draft of it. Remove its drafts that have not changed for an hour.

    Killed runs leave such drafts. The name is random, because processes in different containers may have the same
    process id.
    """
    for draft in path.parent.glob(f".{escape(path.name)}.partial-*"):
        with suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > _ABANDONED:
                if draft.is_dir():
                    shutil.rmtree(draft, ignore_errors=True)
                else:
                    draft.unlink()
    return _draft_name(path)


def _draft_name(path: Path) -> Path:
    """Return a random hidden name beside `path`."""
    return path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")


def write_whole(path: Path, data: bytes | memoryview | str, *, sync: bool = False) -> Path:
    """Write a small file that others see either complete or not at all, and return its path.

    With `sync`, the content is on the disk before the file gets its name. The folder is not searched for drafts of
    killed runs, because it may hold very many files.

    Raises:
        OSError: the file cannot be written.
    """
    draft = _draft_name(path)
    try:
        with open(draft, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    return path


def give_name(draft: Path, path: Path, *, replace: bool) -> None:
    """Give a draft its final name in one step. With `replace`, it takes the place of an existing file.

    Without `replace`, the draft keeps its own name as well, and the caller removes it. Where no hard link can be made,
    the draft is renamed instead.

    Raises:
        UserError: the file exists, and `replace` is false.
        OSError: the draft cannot be renamed.
    """
    if not replace:
        # A hard link fails if the name exists, while a rename would replace the file silently. A file system
        # without hard links gets the rename nevertheless.
        try:
            os.link(draft, path)
            return
        except OSError as error:
            if os.path.lexists(path):
                raise UserError(
                    f"output {path}: another process has made it meanwhile, so it stays; choose another output"
                ) from error
    os.replace(draft, path)


def user_cache(kind: str) -> Path | None:
    """Return the folder `kind` in the user's cache ($XDG_CACHE_HOME or ~/.cache), which need not exist yet.

    For a user without a home it returns None and logs one warning for each kind.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    if not cache:
        home = os.path.expanduser("~")
        if home == "~":  # a container's user, who has no entry in /etc/passwd
            if kind not in _warned:
                log.warning("%s: nothing is cached, because this user has no home; set HOME or XDG_CACHE_HOME", kind)
                _warned.add(kind)
            return None
        cache = os.path.join(home, ".cache")
    return Path(cache) / "ensemble_ml" / kind


def hash_of_code(*parts: str) -> str:
    """Return the SHA-256 of the package's modules in some folders and at its top level.

    It is part of the key of every result that is cached for later runs, so that changed code does not use old results.
    Compute it at import, because files may be edited while a process runs. `parts` are folders relative to the package.
    """
    found = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted([*root.glob("*.py"), *(path for part in parts for path in (root / part).rglob("*.py"))]):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def strict(value: Any) -> Any:
    """Return a value in JSON's own types, also within nested dicts, lists and tuples.

    NumPy scalars become Python's, members of an Enum become their values, and numbers that are not finite become None.
    """
    if isinstance(value, dict):
        return {str(name): strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
