"""The folder that a store is built in, beside the store's name, which it gets in one rename when all is there.

NAME.zarr.building/
  plan.json     what is being built
  lock          held while the plan is written, and while the store is finished
  claims/       one lock a start date, held while it is built
  entries/      one file a finished start date
  store/        the store itself
  swap.json     written just before the rename
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import shutil
import socket
from pathlib import Path

from ensemble_ml.errors import UserError
from ensemble_ml.store.manifest import stamp
from ensemble_ml.store.metadata import is_store

_INSIDE = "claims", "entries", "store"
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of linux/fs.h and fcntl.h


def building_folder(path: Path) -> Path:
    """Where the store of that name is built, by whatever process."""
    return path.with_name(f"{path.name}.building")


def private_folder(path: Path) -> Path:
    """Where this process builds it for itself; those that killed processes of this machine have left are removed."""
    host = socket.gethostname()
    for old in path.parent.glob(f"{path.name}.partial-{host}-*"):
        process = old.name.rpartition("-")[2]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)
    work = path.with_name(f"{path.name}.partial-{host}-{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    return work


def is_building(path: Path) -> bool:
    """Whether a folder is one in which a store is built, or was before its builder died."""
    named = path.name.endswith(".building") or ".partial-" in path.name
    return named and all((path / name).is_dir() for name in _INSIDE)


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


def make_folders(work: Path, path: Path) -> None:
    """Make the folders of a build.

    Raises:
        UserError: they cannot be made.
    """
    try:
        for name in _INSIDE:
            (work / name).mkdir(parents=True, exist_ok=True)
        # A folder of somebody else may be there, and refuse us. Builders in containers may have one number of process.
        probe = work / f".probe-{secrets.token_hex(8)}"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"output={path}: cannot be written ({error.strerror}); choose another folder") from error


def give_name(work: Path, path: Path, overwrite: bool) -> None:
    """Let the finished store in `work` have its name, in one step; what stood there is removed afterwards.

    Raises:
        UserError: somebody else has made something of that name meanwhile.
    """
    check_target(path, overwrite)
    (work / "swap.json").write_text(json.dumps({"manifest": stamp(work / "store")}))
    if path.exists():
        exchange(work / "store", path)
    else:
        os.rename(work / "store", path)


def named_already(work: Path, path: Path) -> bool:
    """Whether the store of this build has got its name, but its builder died before it could tidy up."""
    try:
        return json.loads((work / "swap.json").read_text())["manifest"] == list(stamp(path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def exchange(one: Path, other: Path) -> None:
    """Swap the names of two folders; where the system cannot do it at once, `other` has no name for a moment."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None and renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return
    if renameat2 is not None and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))
    aside = one.with_name("replaced")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    os.rename(aside, one)
