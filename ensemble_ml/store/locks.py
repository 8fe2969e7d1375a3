"""Locks between builders of one store: `flock`, which the system gives back when a process dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from ensemble_ml.errors import UserError


def _lock(descriptor: int, path: Path, how: int) -> None:
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise UserError(
                f"{path.parent}: its file system has no locks ({error.strerror}); builders need them: mount Lustre with"
                " -o flock, or choose an output elsewhere"
            ) from error
        raise


@contextmanager
def _held(path: Path, how: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(descriptor, path, how)
        yield
    finally:
        os.close(descriptor)


def exclusive(path: Path) -> AbstractContextManager[None]:
    """Hold the lock on `path`, waiting for whoever has it."""
    return _held(path, fcntl.LOCK_EX)


def shared(path: Path) -> AbstractContextManager[None]:
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
