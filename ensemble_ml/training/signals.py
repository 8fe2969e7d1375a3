"""Ctrl-C and SIGTERM: the step that is under way is finished and kept."""

from __future__ import annotations

import signal
import threading
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While armed, a first signal is noted in `requested`; a second, or one before, raises KeyboardInterrupt at once.

    A context manager, because handlers belong to the process; outside the main thread it leaves them alone.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._armed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """From now on there is a state worth keeping."""
        self._armed = True

    def _on_signal(self, number: int, _: object) -> None:
        if not self._armed or self.requested is not None:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
