"""Folders that a command will write to, looked at before its work begins: nobody loses a night to a name."""

from __future__ import annotations

import os
from pathlib import Path

from ensemble_ml.errors import UserError


def check_writable(output: str | Path) -> None:
    """Check that files may be written to a folder, which may be made later; nothing is made here.

    Raises:
        UserError: it, or what it would be made in, is no folder, or may not be written.
    """
    there = Path(output).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UserError(f"output={output}: {there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"output={output}: {there} may not be written; choose another folder")
