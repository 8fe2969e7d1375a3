"""Folders that a command will write to, looked at before its work begins: nobody loses a night to a name; drafts that
get their name when they are whole; and the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from ensemble_ml.errors import UserError

log = logging.getLogger(__name__)

_ABANDONED = 3600  # seconds after which a draft that nobody touches is a killed run's
_told: set[str] = set()


def check_writable(output: str | Path, key: str = "output") -> None:
    """Check that files may be written to a folder, the setting `key`, which may be made later; nothing is made here.

    Raises:
        UserError: it, or what it would be made in, is no folder, or may not be written.
    """
    there = Path(output).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UserError(f"{key}={output}: {there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key}={output}: {there} may not be written; choose another folder")


def draft_of(path: Path) -> Path:
    """A name for what shall be `path`, a file or a folder, beside it and nobody else's: processes in containers may all
    have one number. Drafts that killed runs left there are removed."""
    for draft in path.parent.glob(f".{path.name}.partial-*"):
        with suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > _ABANDONED:
                if draft.is_dir():
                    shutil.rmtree(draft, ignore_errors=True)
                else:
                    draft.unlink()
    return _draft_name(path)


def _draft_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")


def write_whole(path: Path, data: bytes | memoryview | str, *, sync: bool = False) -> Path:
    """Write a small file that others see whole or not at all, and return its path; with `sync` it is on the disk before
    it gets its name. Its folder, which may hold very many, is not searched for drafts of killed runs."""
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
    """Let a draft stand at `path`, in one step.

    Raises:
        UserError: something stands there, and `replace` is off.
    """
    if not replace:
        with suppress(OSError):  # no hard links
            try:
                os.link(draft, path)
            except FileExistsError as error:
                raise UserError(
                    f"output {path}: another process has made it meanwhile, and it is left; choose another output"
                ) from error
            return
    os.replace(draft, path)


def user_cache(kind: str) -> Path | None:
    """A folder in the user's cache ($XDG_CACHE_HOME or ~/.cache); None, told once, for a user who has no home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    if not cache:
        home = os.path.expanduser("~")
        if home == "~":  # a container's user, who has no entry in /etc/passwd
            if kind not in _told:
                log.warning("%s: nothing is kept: this user has no home; set HOME or XDG_CACHE_HOME", kind)
                _told.add(kind)
            return None
        cache = os.path.join(home, ".cache")
    return Path(cache) / "ensemble_ml" / kind


def hash_of_code(*parts: str) -> str:
    """sha256 of the modules in these folders of the package, and of those beside them: part of the key of whatever is
    kept for later runs. To be taken at import, for files may be edited while a process runs."""
    found = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted([*root.glob("*.py"), *(path for part in parts for path in (root / part).rglob("*.py"))]):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
