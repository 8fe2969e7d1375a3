"""Handle Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2: finish the current step, and let the run save its state.

If a job asks for it, SLURM sends SIGUSR1 ahead of the time limit, and submitit sends SIGUSR2. A run that gets one of
them exits with a status that asks for a restart. Before the first step there is nothing to finish: a resumed run has
its checkpoint already, and a new run starts again from the beginning, a few times at most. SIGHUP means that the
terminal is gone, for example because a connection broke. A process that was started to ignore SIGHUP (nohup) goes on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any, Self

from ensemble_ml.errors import Stopped

_AHEAD = (signal.SIGUSR1, signal.SIGUSR2)  # signals ahead of the time limit, by sbatch --signal and by submitit
_TWICE = (*_AHEAD, signal.SIGHUP)  # signals that may come twice: to the batch script and its tasks, or from a shell
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *_TWICE)
_OUTPUTS = (1, 2)
_REQUEUE = 1_000_000  # a vote for a restart, larger than the sum of all other votes can be
# Limit of restarts of a run that has no checkpoint. Without it, a job would restart forever if the fits before the
# first step take longer than its time limit.
_FRESH = 3

_noted: list[int] = []


def restarts() -> int:
    """Return how often SLURM has restarted this job; 0 if SLURM_RESTART_COUNT holds no number."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def ignored(number: int) -> bool:
    """Return whether this process was started to ignore a signal, for example by nohup."""
    return signal.getsignal(number) is signal.SIG_IGN


def note(number: int, _: object) -> None:
    """Keep a signal for the next `StopRequest`, which knows whether there is a checkpoint. This is a signal handler."""
    _noted.append(number)


def leave_gone(terminals: Sequence[int]) -> None:
    """Redirect terminals (file descriptors) that are gone to the null device.

    Writing to them would raise an error that ends a run before it has saved its state.
    """
    for terminal in terminals:
        if not os.isatty(terminal):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, terminal)
            os.close(nowhere)


class StopRequest:
    """A context manager that turns signals into a request to stop, for the duration of a run.

    Once it is armed, the name of the first signal is kept in `requested`. A second one raises KeyboardInterrupt at
    once, unless it is SIGHUP or comes ahead of the time limit.

    Before it is armed, signals raise KeyboardInterrupt at once. The first signal ahead of the time limit raises its
    subclass Stopped, which asks for a restart, but not after a few restarts without a checkpoint. Later signals of
    this kind are ignored.

    Signal handlers belong to the process, and are restored at the end. Outside the main thread they are left alone.
    """

    def __init__(self, *, kept: bool = False, first: bool = True) -> None:
        """Set up a request for a run that has a checkpoint (`kept`) or not, on the job's first rank or another."""
        self.requested: str | None = None
        self._kept, self._first, self._armed = kept, first, False
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        """Take over the signals, and handle one that arrived before (see `note`)."""
        if threading.current_thread() is threading.main_thread():
            if _noted:
                number = _noted.pop()
                _noted.clear()
                self._on_signal(number, None)
            self._terminals = [output for output in _OUTPUTS if os.isatty(output)]
            taken = [number for number in _SIGNALS if number != signal.SIGHUP or not ignored(number)]
            self._before = {number: signal.signal(number, self._on_signal) for number in taken}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the former handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """Declare that from now on there is a state worth saving."""
        self._armed = True

    @property
    def vote(self) -> float:
        """Return this rank's vote on stopping: 0 for none, 1 to stop, `_REQUEUE` to stop and be started again.

        The votes of all ranks are added.
        """
        if self.requested is None:
            return 0.0
        return float(_REQUEUE) if self.requested in [number.name for number in _AHEAD] else 1.0

    @staticmethod
    def requeue(votes: float) -> bool:
        """Return whether any rank was asked to stop and to be started again, given the sum of all votes."""
        return votes >= _REQUEUE

    def _on_signal(self, number: int, _: object) -> None:
        """Handle a signal."""
        if number == signal.SIGHUP:
            leave_gone(self._terminals)
        if self._armed and self.requested is None:
            self.requested = signal.Signals(number).name
        elif self._armed and number in _TWICE:
            pass  # the stop was already requested
        elif number not in _AHEAD:
            raise KeyboardInterrupt
        elif self.requested is None:  # only the first of several signals may unwind the stack
            self.requested = signal.Signals(number).name
            raise self._early()

    def _early(self) -> KeyboardInterrupt:
        """Return the exception for a signal ahead of the time limit that comes before the first step."""
        when = f"{self.requested} before the first step"
        if self._kept:
            return Stopped(True, self._first, f"{when}; go on with resume=true", together=False)
        if (count := restarts()) < _FRESH:
            return Stopped(True, self._first, f"{when}; the run has to begin anew", together=False)
        return KeyboardInterrupt(f"{when}, after {count} restarts; give the job more time than its fits take")
