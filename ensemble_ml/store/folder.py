"""The folder that a store is built in: beside the store's name, which it gets in one rename when all is there."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from ensemble_ml.errors import UserError
from ensemble_ml.store.metadata import is_store


def check_target(path: Path, overwrite: bool) -> None:
    """Check that a store may be written at `path`.

    Raises:
        UserError: something stands there and `overwrite` is off, or it is something else than a store or empty folder.
    """
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise UserError(f"output={path}: exists already; choose another folder, or add overwrite=true")
    if not is_store(path) and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"output={path}: no tensor store, so overwrite=true leaves it alone; choose another folder")


def make_work_folder(path: Path) -> Path:
    """Make the folder that the store is built in, and remove those that killed processes of this machine have left.

    Raises:
        UserError: it cannot be made.
    """
    host = socket.gethostname()
    for old in path.parent.glob(f"{path.name}.partial-{host}-*"):
        process = old.name.rpartition("-")[2]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)
    work = path.with_name(f"{path.name}.partial-{host}-{os.getpid()}")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"output={path}: cannot be written ({error.strerror}); choose another folder") from error
    return work


def replace(work: Path, path: Path, overwrite: bool) -> None:
    """Rename `work` to `path`; an old store steps aside first, and is removed only when the new one has its name."""
    check_target(path, overwrite)  # somebody else may have made it meanwhile
    aside = work.with_name(work.name.replace(".partial-", ".replaced-"))
    if path.exists():
        path.rename(aside)
    try:
        work.rename(path)
    except OSError:
        if aside.exists():
            aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)
