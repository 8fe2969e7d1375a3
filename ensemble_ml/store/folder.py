"""Manage the folder in which a store is built, and lock files.

The folder stands beside the final path of the store. When everything is there, one rename moves the store to that path.

    NAME.zarr.building/
      plan.json     facts of the plan
      lock          held while the plan is written, the store is finished, or an unfinished build is removed
      at-work.lock  shared by all builders while they build; held alone by one that removes the build
      claims/       one lock for each init time, held while it is built
      entries/      one file for each finished init time
      store/        the store itself
      swap.json     written just before the rename

Locks keep builders of one store, trainers of one run and writers of one index from disturbing each other. They use
`flock`. The system releases them when a process ends, even by a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from glob import escape
from pathlib import Path

from ensemble_ml.errors import UserError
from ensemble_ml.store.manifest import stamp_of_manifest
from ensemble_ml.store.metadata import is_store

_INSIDE = "claims", "entries", "store"
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of linux/fs.h and fcntl.h
_open: set[int] = set()  # descriptors of the lock files that this process has open


def building_folder(path: Path) -> Path:
    """Return the folder in which all processes build the store at `path` together."""
    path = path.absolute()  # `.` has no name of its own
    return path.parent / f"{path.name}.building"


def private_folder(path: Path) -> Path:
    """Return the folder in which this process alone builds the store at `path`.

    Such folders of processes of this machine that no longer run are removed, and a former one of this process.
    """
    host = socket.gethostname()
    for old in path.parent.glob(f"{escape(path.name)}.partial-{escape(host)}-*"):
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
    """Check that a store may be written at `path`, where `overwrite` lets it replace another store.

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
    """Make the folders of a build in `work`. `path` is that of the store, for messages.

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
    (work / "swap.json").write_text(json.dumps({"manifest": stamp_of_manifest(work / "store")}))
    if path.exists():
        exchange(work / "store", path)
    else:
        os.rename(work / "store", path)


def named_already(work: Path, path: Path) -> bool:
    """Return whether the store of this build stands at `path`, but its work folder has not been removed yet."""
    try:
        return json.loads((work / "swap.json").read_text())["manifest"] == list(stamp_of_manifest(path))
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


class NoLocks(UserError):
    """An error for a file system that has no locks."""


def exclusive(path: Path) -> AbstractContextManager[int]:
    """Acquire an exclusive lock on `path`, waiting for any other holder.

    The context manager yields the descriptor of the lock file. The file is created if needed, and stays afterwards.

    Raises:
        NoLocks: The file system has no locks.
        OSError: The file cannot be opened, for example because its folder is missing or read-only.
    """
    return _held(path, fcntl.LOCK_EX)


def shared(path: Path) -> AbstractContextManager[int]:
    """Acquire a shared lock on `path`, waiting for any exclusive holder; the rest is as for `exclusive`."""
    return _held(path, fcntl.LOCK_SH)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Try to acquire an exclusive lock on `path` without waiting, and yield whether this process holds it.

    Raises:
        NoLocks: The file system has no locks.
        OSError: The file cannot be opened, for example because its folder is missing or read-only.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_held(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
            held = True
        except BlockingIOError:
            held = False
        yield held


@contextmanager
def claimed_once(path: Path) -> Iterator[bool]:
    """Try to acquire an exclusive lock on `path` without waiting, and yield whether this process holds it.

    If it does, the file contains the host name and the process number of the holder, and is removed at the end.

    Raises:
        NoLocks: The file system has no locks. The file is removed.
        OSError: The file cannot be opened, for example because its folder is missing or read-only.
    """
    with ExitStack() as stack:
        held = False
        while not held:
            try:
                descriptor = stack.enter_context(_held(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                break
            except NoLocks:
                path.unlink(missing_ok=True)
                raise
            # The former holder may have removed the file after we opened it and before we locked it. The lock would
            # then be on a file without a name, so try again.
            held = leads_to(path, descriptor)
        if not held:
            yield False
            return
        # A person can read in the file which process holds the lock.
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{socket.gethostname()} {os.getpid()}".encode())
        try:
            yield True
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def leads_to(path: Path, descriptor: int) -> bool:
    """Return whether an open file is still the one at `path`, neither removed nor replaced."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def _held(path: Path, how: int) -> Iterator[int]:
    """Open `path`, creating it if needed, lock it, and close it at the end, which releases the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _open.add(descriptor)
    try:
        _lock(descriptor, path, how)
        yield descriptor
    finally:
        if descriptor in _open:
            _open.remove(descriptor)
            os.close(descriptor)


def _lock(descriptor: int, path: Path, how: int) -> None:
    """Lock an open file by `flock` with the operation `how`; raise NoLocks if the file system has no locks."""
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise NoLocks(
                f"{path.parent}: its file system has no locks ({error.strerror}); builders need them: mount Lustre with"
                " -o flock, or choose an output elsewhere"
            ) from error
        raise


def _let_go() -> None:
    """Close the descriptors that a forked process has inherited.

    A worker of a data loader would otherwise keep the locks of its parent.
    """
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_let_go)
