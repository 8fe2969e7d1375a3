"""Locks between builders of one store: `flock`, which the system gives back when a process dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock on `path`, waiting for whoever has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(descriptor, path, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def shared(path: Path) -> Iterator[None]:
    """Hold the lock on `path` beside others who hold it so, waiting for who has it alone."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(descriptor, path, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Try for the lock on `path` without waiting; whether it is held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            _lock(descriptor, path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
