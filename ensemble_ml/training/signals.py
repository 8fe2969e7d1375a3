"""Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2: the step that is under way is finished and kept.

SLURM sends SIGUSR1 ahead of the time limit where a job asks for it, submitit SIGUSR2; such a run exits with a status
that says so.
"""

from __future__ import annotations

import signal
import threading
from typing import Any, Self

_AHEAD = (signal.SIGUSR1, signal.SIGUSR2)  # of the time limit: as sbatch is asked to, and as submitit does
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *_AHEAD)
_REQUEUE = 1_000_000  # more than ranks can say otherwise


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
        return float(_REQUEUE) if self.requested in [number.name for number in _AHEAD] else 1.0

    @staticmethod
    def requeue(votes: float) -> bool:
        """Whether any rank was asked to stop and be started again."""
        return votes >= _REQUEUE

    def _on_signal(self, number: int, _: object) -> None:
        if not self._armed or self.requested is not None:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
