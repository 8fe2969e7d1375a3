"""Manage the folder in which a store is built.

The folder stands beside the final path of the store. When everything is there, one rename moves the store to that path.

    NAME.zarr.building/
      plan.json     facts of the plan
      lock          held while the plan is written, the store is finished, or an unfinished build is removed
      at-work.lock  shared by all builders while they build; held alone by one that removes the build
      claims/       one lock for each init time, held while it is built
      entries/      one file for each finished init time
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
    """Return the folder in which all processes build the store at `path` together."""
    return path.with_name(f"{path.name}.building")


def private_folder(path: Path) -> Path:
    """Return the folder in which this process alone builds the store at `path`.

    Such folders of processes of this machine that no longer run are removed, and a former one of this process.
    """
    host = socket.gethostname()
    for old in path.parent.glob(f"{path.name}.partial-{host}-*"):
        process = old.name.removeprefix(f"{path.name}.partial-{host}-")  # the number, unless a longer host name goes on
        if process.isdigit() and not Path(f"/proc/{process}").exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)
    work = path.with_name(f"{path.name}.partial-{host}-{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    return work


def is_building(path: Path) -> bool:
    """Return whether `path` is the folder of a build, in progress or left by a killed builder."""
    named = path.name.endswith(".building") or ".partial-" in path.name
    return named and all((path / name).is_dir() for name in _INSIDE)


def check_target(path: Path, overwrite: bool) -> None:
    """Check that a store may be written at `path`.

    Args:
        path: Path of the store.
        overwrite: Whether a store that stands there may be replaced.

    Raises:
        UserError: Something stands there and `overwrite` is off, or it is neither a store nor an empty folder.
    """
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise UserError(f"output={path}: exists already; choose another folder, or add overwrite=true")
    if not is_store(path) and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"output={path}: no tensor store, so overwrite=true leaves it alone; choose another folder")


def make_folders(work: Path, path: Path) -> None:
    """Make the folders of a build.

    Args:
        work: Folder to build in.
        path: Path of the store, for messages.

    Raises:
        UserError: They cannot be made or written.
    """
    try:
        for name in _INSIDE:
            (work / name).mkdir(parents=True, exist_ok=True)
        # The folder may belong to another user, who does not let us write. The name of the probe is random, because
        # builders in different containers may have the same process number.
        probe = work / f".probe-{secrets.token_hex(8)}"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"output={path}: cannot be written ({error.strerror}); choose another folder") from error


def give_name(work: Path, path: Path, overwrite: bool) -> None:
    """Rename the finished store in `work` to `path` in one step. A store that stood there moves into `work`.

    Raises:
        UserError: Something that may not be replaced stands at `path` by now.
        OSError: The system cannot rename it, or cannot write `swap.json`.
    """
    check_target(path, overwrite)
    # If this process dies just after the rename, `swap.json` lets the next builder recognise the store by its manifest.
    (work / "swap.json").write_text(json.dumps({"manifest": stamp(work / "store")}))
    if path.exists():
        exchange(work / "store", path)
    else:
        os.rename(work / "store", path)


def named_already(work: Path, path: Path) -> bool:
    """Return whether the store of this build stands at `path`, but its work folder has not been removed yet."""
    try:
        return json.loads((work / "swap.json").read_text())["manifest"] == list(stamp(path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def exchange(one: Path, other: Path) -> None:
    """Swap the names of two folders.

    If the system cannot swap them in one step, `other` does not exist for a moment. It is a draft beside `one`
    then, with a random name.

    Raises:
        OSError: The system cannot rename them.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None and renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return
    if renameat2 is not None and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))
    aside = one.with_name(f".{other.name}.partial-{secrets.token_hex(8)}")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    os.rename(aside, one)
