"""Notices about an archive, such as units that are assumed, each logged once however often its files are opened.

In Python an archive is opened by `open`, and again by everything that its Dataset is handed to. The command line opens
each archive once, and logs as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Texts of the notices that have been logged about what is being opened; None logs all.
_logged: ContextVar[set[str] | None] = ContextVar("logged", default=None)


def notice_log(name: str) -> logging.Logger:
    """Return the logger of a module, which leaves out notices that `once` knows."""
    log = logging.getLogger(name)
    log.addFilter(_is_new)
    return log


@contextmanager
def once(logged: set[str]) -> Iterator[None]:
    """Log no notice inside the `with` block whose text is in `logged`, and add the texts of those that are logged.

    Args:
        logged: texts of notices, which is extended.
    """
    before = _logged.set(logged)
    try:
        yield
    finally:
        _logged.reset(before)


def _is_new(record: logging.LogRecord) -> bool:
    """Return whether a notice has not been logged yet, and remember it."""
    logged, text = _logged.get(), record.getMessage()
    if logged is None:
        return True
    new = text not in logged
    logged.add(text)
    return new
