"""Ctrl-C, SIGTERM and SIGUSR1: the step that is under way is finished and kept.

SLURM sends SIGUSR1 ahead of the time limit where a job asks for it; such a run exits with a status that says so.
"""

from __future__ import annotations

import signal
import threading
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_REQUEUE = 1000


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

    @property
    def vote(self) -> float:
        """This rank's word on stopping; words of ranks are added."""
        if self.requested is None:
            return 0.0
        return float(_REQUEUE) if self.requested == signal.SIGUSR1.name else 1.0

    @staticmethod
    def requeue(votes: float) -> bool:
        """Whether any rank was asked to stop and be started again."""
        return votes >= _REQUEUE

    def _on_signal(self, number: int, _: object) -> None:
        if not self._armed or self.requested is not None:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
