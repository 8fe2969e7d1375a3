"""Log a line whenever a long task has logged nothing for a while, so that nobody takes it for dead."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

_EVERY = 20.0  # seconds without a line after which one is written


class Pulse(logging.Handler):
    """A context manager that logs what is being done whenever nothing was logged for a while.

    If stderr is a terminal, progress bars show what runs, and the context manager logs nothing. It then only keeps
    lines of the log from breaking the bars.

    Args:
        text: the line to log, or a function that returns it whenever it is logged.
        every: seconds without a line after which it logs one.
    """

    def __init__(self, text: str | Callable[[], str], every: float = _EVERY):
        super().__init__(logging.INFO)
        self.doing(text)
        self._every, self._last = every, time.monotonic()
        self._over = threading.Event()
        self._stack = ExitStack()

    def doing(self, text: str | Callable[[], str]) -> None:
        """Set the line to log from now on, or a function that returns it."""
        self._text = text if callable(text) else lambda: text

    def emit(self, record: logging.LogRecord) -> None:
        """Note that something was logged."""
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            # Imported at the top of the file, tqdm would warn of a missing package in every notebook that evaluates.
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._stack.enter_context(logging_redirect_tqdm())
            return self
        logging.getLogger().addHandler(self)
        self._stack.callback(logging.getLogger().removeHandler, self)
        # A daemon, so that it cannot keep a process alive that ends by an error.
        thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(self._over.set)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def _watch(self) -> None:
        """Log a line whenever nothing was logged for `every` seconds, until the context ends."""
        while not self._over.wait(max(0.0, self._last + self._every - time.monotonic())):
            if time.monotonic() - self._last >= self._every:
                # A program whose log level hides this line does not call `emit` for it.
                self._last = time.monotonic()
                log.info("%s", self._text())
