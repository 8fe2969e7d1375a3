"""Folders that a command will write to, looked at before its work begins: nobody loses a night to a name; and the
user's cache."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ensemble_ml.errors import UserError

log = logging.getLogger(__name__)

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
