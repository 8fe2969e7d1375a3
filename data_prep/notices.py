"""Notices about an archive, such as units that are assumed, each logged once even if its files are opened many times.

In Python, `ensemble_ml.open` opens an archive, and each function that takes its Dataset opens it again. The command
line opens each archive once, and logs as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Texts of the notices that were logged about the archive that is being opened; None logs all notices.
_logged: ContextVar[set[str] | None] = ContextVar("logged", default=None)


def notice_log(name: str) -> logging.Logger:
    """Return the logger of a module. Inside `once`, it logs no notice twice in the same thread."""
    log = logging.getLogger(name)
    log.addFilter(_is_new)
    return log


@contextmanager
def once(logged: set[str]) -> Iterator[None]:
    """Inside the `with` block, log only notices whose text is not in `logged`, and add their texts to it.

    This holds for the thread that enters the block, and for those that open several files for it. Other threads log all
    notices as usual.
    """
    before = _logged.set(logged)
    try:
        yield
    finally:
        _logged.reset(before)


def _is_new(record: logging.LogRecord) -> bool:
    """Return whether a notice has not been logged yet, and remember it. Outside `once`, return True."""
    logged, text = _logged.get(), record.getMessage()
    if logged is None:
        return True
    new = text not in logged
    logged.add(text)
    return new
