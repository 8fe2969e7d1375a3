"""Locks between builders of one store, or trainers of one run: `flock`, which the system gives back when a process
dies, however it dies, and whatever processes it has forked."""

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
    """A file system that has no locks."""


def _lock(descriptor: int, path: Path, how: int) -> None:
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise NoLocks(
                f"{path.parent}: its file system has no locks ({error.strerror}); builders need them: mount Lustre with"
                " -o flock, or choose an output elsewhere"
            ) from error
        raise


_open: set[int] = set()  # descriptors of this process


def _let_go() -> None:
    """Close what a forked process (a worker of a data loader) got from its parent, or it would hold the locks on."""
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def _held(path: Path, how: int) -> Iterator[int]:
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
    """Hold the lock on `path`, waiting for whoever has it."""
    return _held(path, fcntl.LOCK_EX)


def shared(path: Path) -> AbstractContextManager[int]:
    """Hold the lock on `path` beside others who hold it so, waiting for who has it alone."""
    return _held(path, fcntl.LOCK_SH)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Try for the lock on `path` without waiting; whether it is held."""
    with ExitStack() as stack:
        try:
            stack.enter_context(_held(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
            held = True
        except BlockingIOError:
            held = False
        yield held


@contextmanager
def claimed_once(path: Path) -> Iterator[bool]:
    """As `claimed`, by a file that holds this process's host and number, and goes with the claim.

    Raises:
        NoLocks: its file system has none; the file is gone.
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
            # Whoever had it may have removed the file between our opening and locking it: then the lock is on nothing.
            held = leads_to(path, descriptor)
        if not held:
            yield False
            return
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{socket.gethostname()} {os.getpid()}".encode())
        try:
            yield True
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def leads_to(path: Path, descriptor: int) -> bool:
    """Whether a file that is open stands at `path`, and has not been removed meanwhile."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
