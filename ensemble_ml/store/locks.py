"""Lock files, so that builders of one store, trainers of one run and writers of one index do not disturb each other.

The locks use `flock`. The system releases them when a process ends, even by a crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from ensemble_ml.errors import UserError


class NoLocks(UserError):
    """An error for a file system that has no locks."""


def _lock(descriptor: int, path: Path, how: int) -> None:
    """Lock an open file by `flock`; `how` is the operation.

    Raises:
        NoLocks: The file system has no locks.
        BlockingIOError: `how` contains LOCK_NB, and the lock is held elsewhere.
    """
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise NoLocks(
                f"{path.parent}: its file system has no locks ({error.strerror}); builders need them: mount Lustre with"
                " -o flock, or choose an output elsewhere"
            ) from error
        raise


_open: set[int] = set()  # descriptors of the lock files that this process has open


def _let_go() -> None:
    """Close the descriptors that a forked process has inherited.

    A worker of a data loader would otherwise keep the locks of its parent.
    """
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_let_go)


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
    """Try to acquire an exclusive lock on `path` without waiting.

    Yields:
        Whether this process holds the lock.

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
    """Try to acquire an exclusive lock on `path` without waiting. If this succeeds, remove the file at the end.

    The file contains the host name and the process number of the holder.

    Yields:
        Whether this process holds the lock.

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
