"""Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2: the step that is under way is finished and kept.

SLURM sends SIGUSR1 ahead of the time limit where a job asks for it, submitit SIGUSR2; such a run exits with a status
that says so. Before the first step there is nothing to finish: what a resumed run has kept is there already, and a new
one begins anew, a few times. SIGHUP says that the terminal is gone, with a connection that broke; a process that was
started without regard to it (nohup) goes on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any, Self

from ensemble_ml.errors import Stopped

_AHEAD = (signal.SIGUSR1, signal.SIGUSR2)  # of the time limit: as sbatch is asked to, and as submitit does
_TWICE = (*_AHEAD, signal.SIGHUP)  # may come: a batch script and its tasks are each sent one, a shell passes it on
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *_TWICE)
_OUTPUTS = (1, 2)
_REQUEUE = 1_000_000  # more than ranks can say otherwise
_FRESH = 3  # restarts without a checkpoint: with a time limit that its fits do not fit into, a job would never end

_noted: list[int] = []


def restarts() -> int:
    """How often SLURM has begun this job again; an empty variable says nothing."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def ignored(number: int) -> bool:
    """Whether this process was started to take no notice of a signal, as nohup starts it."""
    return signal.getsignal(number) is signal.SIG_IGN


def note(number: int, _: object) -> None:
    """A handler that leaves a signal to the next `StopRequest`, which can tell what is kept."""
    _noted.append(number)


def leave_gone(terminals: Sequence[int]) -> None:
    """Let what is written to those of `terminals` (file descriptors) that are gone lead nowhere: it would be an error,
    which ends a run before it has kept its step."""
    for terminal in terminals:
        if not os.isatty(terminal):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, terminal)
            os.close(nowhere)


class StopRequest:
    """While armed, a first signal is noted in `requested`, and a second, but for those ahead of the time limit and for
    SIGHUP, raises KeyboardInterrupt at once.

    So does one before, but for those ahead of the time limit: they raise Stopped, which asks for a restart.

    A context manager, because handlers belong to the process; outside the main thread it leaves them alone.
    """

    def __init__(self, *, kept: bool = False, first: bool = True) -> None:
        """`kept`: whether the run has a checkpoint to go on from; `first`: whether this is the job's first rank."""
        self.requested: str | None = None
        self._kept, self._first, self._armed = kept, first, False
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
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
        if number == signal.SIGHUP:
            leave_gone(self._terminals)
        if self._armed and self.requested is None:
            self.requested = signal.Signals(number).name
        elif self._armed and number in _TWICE:
            pass  # asked already
        elif number not in _AHEAD:
            raise KeyboardInterrupt
        elif self.requested is None:  # of several, the first unwinds the stack
            self.requested = signal.Signals(number).name
            raise self._early()

    def _early(self) -> KeyboardInterrupt:
        when = f"{self.requested} before the first step"
        if self._kept:
            return Stopped(True, self._first, f"{when}; go on with resume=true", together=False)
        if (count := restarts()) < _FRESH:
            return Stopped(True, self._first, f"{when}; the run has to begin anew", together=False)
        return KeyboardInterrupt(f"{when}, after {count} restarts; give the job more time than its fits take")
