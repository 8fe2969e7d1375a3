"""Which code this process runs: part of the key of whatever is kept on disk for later runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ensemble_ml


def hash_of(*parts: str) -> str:
    """sha256 of the modules in these folders of the package, and of those beside them; to be taken at import, for files
    may be edited while a process runs."""
    found = hashlib.sha256()
    root = Path(ensemble_ml.__file__).parent
    for path in sorted([*root.glob("*.py"), *(path for part in parts for path in (root / part).rglob("*.py"))]):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
