"""The watch of a rank: nobody is left waiting for a rank that is gone.

A rank that raises writes who it is, its step and the cause into the job's key-value store, and leaves; a watch thread
in every rank reads that within half a second, prints it, and ends its process, also out of a collective that would wait
for ever. A rank that dies without a word (killed, out of memory) is told from a slow one by its heartbeat, which a
thread of its own keeps up. A second thread of every other rank sees when rank 0 no longer answers, which the first may
then wait for without end.

An interruption (Ctrl-C, SIGTERM) comes to all ranks at once as a rule: the others have some time to end by themselves,
with the file that they are at.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ensemble_ml.errors import STATUS_REQUEUE, Stopped

STATUS_ABORTED = 70  # left because another rank failed
LAST = 3.0  # seconds; launchers end the others at the first status that is not 0: rank 0, which has one, comes last
_PERIOD = 0.5  # seconds between looks at the store
_SOON = 0.05  # the same for who waits for the last to leave
_GRACE = 3.0  # seconds beyond `silence` that rank 0 has to answer, and that a failed exchange waits for the cause
_UNWIND = 15.0  # seconds that a rank may go on after another was interrupted; launchers kill after thirty
_FAREWELL = 2 * _PERIOD + 0.5  # the store dies with rank 0: the others read first


class Watch:
    """The thread that keeps up this rank's heartbeat and looks for word of a failure; rank 0 counts heartbeats too, and
    on other ranks a second thread counts its answers."""

    def __init__(self, store: Any, rank: int, size: int, silence: float, step: Callable[[], int]):
        """`store`: a connection that nothing else uses, since one that waits in a collective's set-up would hold the
        heartbeat up; `silence`: seconds without a beat after which a rank is given up; `step` tells where this rank
        is."""
        self._rank, self._size, self._silence, self._step = rank, size, silence, step
        self._store = store
        self._store.set(f"beat/{self._rank}", "0 0")
        self._seen: dict[int, tuple[str, float]] = {}
        self._looked = time.monotonic()
        self._end, self._leaving, self._reported = threading.Event(), False, False
        self._interrupted: dict[str, Any] | None = None  # what was told of another rank's interruption
        self._until = 0.0  # when this rank has had its time after it
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._answered, self._gone = self._looked, threading.Event()
        self._thread.start()
        self._answers = threading.Thread(target=self._find_frozen, name="answers", daemon=True)
        if self._rank > 0:
            self._answers.start()

    def report(self, error: BaseException) -> None:
        """Write the cause; what may be the echo of another rank's failure waits for `fail`."""
        if _echo(error):
            return
        with contextlib.suppress(dist.DistError):
            if self._told() is None:
                self._reported = True
                self._tell(self._rank, error)

    def fail(self, error: BaseException) -> None:
        """Write the cause, unless another rank's failure is behind it; that one is printed, and this process ends."""
        if _echo(error):
            until = time.monotonic() + self._silence + _GRACE
            # The watch thread ends the process as soon as the cause is known, but for an interruption.
            while time.monotonic() < until and self._interrupted is None:
                time.sleep(_PERIOD)
        self._end.set()
        self._thread.join(timeout=5)
        try:
            told = self._interrupted or self._told()
            if told is None:
                self._tell(self._rank, error)
            elif told["rank"] != self._rank and not (told["interrupted"] and isinstance(error, KeyboardInterrupt)):
                self._leave(told)
            if self._rank == 0:
                time.sleep(_FAREWELL)
        except dist.DistError:
            pass  # the store is gone, and with it rank 0: nobody is left to be told
        self._let_go()

    def leave(self) -> None:
        """Clean end: rank 0, which serves the store, leaves last; the others may be at work for as long as they like
        (forecasts are shared out), and are watched meanwhile."""
        self._leaving = True
        self._end.set()
        self._thread.join()
        self._let_go()

    def _let_go(self) -> None:
        """End the second thread: one that is left when the interpreter ends may take the process down with it."""
        self._gone.set()
        if self._answers.is_alive():
            self._answers.join()

    def _run(self) -> None:
        beat = 0
        while not self._end.wait(_PERIOD) or self._leaving:
            beat += 1
            try:
                self._store.set(f"beat/{self._rank}", f"{beat} {self._step()}")
                if self._rank == 0:
                    self._find_silent()
                told = self._told()
                self._answered = time.monotonic()
                if self._leaving and told is None and self._all_done():
                    return
            except dist.DistError:
                if self._reported:  # the others have left for it, and this rank's own error is on its way up
                    return
                if self._interrupted is not None:  # rank 0 has ended by itself
                    self._gone.set()
                    if not self._end.wait(self._until - time.monotonic()):
                        self._leave(self._interrupted)
                    return
                if self._leaving or not self._end.is_set():
                    self._leave_rank_0()
                return
            if told is not None and told["rank"] != self._rank and not self._may_go_on(told):
                self._leave(told)
            if self._leaving:
                time.sleep(_SOON)

    def _may_go_on(self, told: dict[str, Any]) -> bool:
        """Whether this rank still has time to end by itself."""
        if self._leaving or not told["interrupted"]:
            return False
        if self._interrupted is None:
            self._interrupted, self._until = told, time.monotonic() + _UNWIND
        return time.monotonic() < self._until

    def _find_frozen(self) -> None:
        """Leave where rank 0 does not answer though its host keeps the connection: stopped, or without its disk."""
        looked = time.monotonic()
        while not self._gone.wait(_PERIOD):
            now = time.monotonic()
            if now - looked > self._silence / 2:  # the whole job was suspended
                self._answered = now
            looked = now
            if now - self._answered > self._silence + _GRACE:
                self._leave_rank_0()

    def _leave_rank_0(self) -> None:
        told = {"rank": 0, "host": "", "step": self._step(), "cause": "no longer answers", "interrupted": False}
        self._leave(told)

    def _all_done(self) -> bool:
        """Say that this rank has come to its end; whether it may go."""
        self._store.set(f"done/{self._rank}", "1")
        return self._rank > 0 or self._store.check([f"done/{rank}" for rank in range(self._size)])

    def _leave(self, told: dict[str, Any]) -> None:
        first = self._rank == 0
        wait = _FAREWELL if first else 0.0
        if told.get("requeue"):  # the first rank alone says so
            _leave(told, STATUS_REQUEUE if first else 0, wait + LAST if first else 0.0)
        _leave(told, STATUS_ABORTED, wait)

    def _told(self) -> dict[str, Any] | None:
        return json.loads(self._store.get("failed")) if self._store.check(["failed"]) else None

    def _tell(self, rank: int, error: BaseException | str, step: int | None = None) -> None:
        requeue = isinstance(error, Stopped) and error.requeue
        interrupted = isinstance(error, KeyboardInterrupt) and not requeue
        cause = str(error) if isinstance(error, str) or interrupted else f"{type(error).__name__}: {error}"
        host = self._store.get(f"host/{rank}").decode() if self._store.check([f"host/{rank}"]) else ""
        told = {
            "rank": rank,
            "host": host if rank != self._rank else socket.gethostname(),
            "step": self._step() if step is None else step,
            "cause": " ".join(cause.split())[:500],
            "requeue": requeue,
            "interrupted": interrupted,
        }
        self._store.compare_set("failed", "", json.dumps(told))  # the first to write is the cause

    def _find_silent(self) -> None:
        """Rank 0: write the failure of a rank whose heartbeat has stopped."""
        if self._store.check(["failed"]):
            return
        now = time.monotonic()
        slept, self._looked = now - self._looked > self._silence / 2, now
        if slept:  # the whole job was suspended: nobody can have beaten meanwhile
            self._seen.clear()
        for rank in range(1, self._size):
            if not self._store.check([f"beat/{rank}"]) or self._store.check([f"done/{rank}"]):
                continue
            beat = self._store.get(f"beat/{rank}").decode()
            if self._seen.get(rank, ("", 0.0))[0] != beat:
                self._seen[rank] = beat, now
            elif now - self._seen[rank][1] > self._silence:
                silent = f"no heartbeat for {self._silence:g} s: killed, out of memory, or its host is gone"
                self._tell(rank, silent, int(beat.split()[1]))
                return


def _echo(error: BaseException) -> bool:
    """Whether an error may only be the echo of another rank's: a connection that its partner closed."""
    return isinstance(error, dist.DistError | ConnectionError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error).lower() or "nccl" in str(error).lower())
    )


def _leave(told: dict[str, Any], status: int, wait: float) -> None:
    """Print the cause and end this process, wherever its main thread stands."""
    where = f" ({told['host']})" if told["host"] else ""
    what = "was interrupted" if told["interrupted"] else "failed" if status == STATUS_ABORTED else "stopped"
    why = f": {told['cause']}" if told["cause"] else ""
    text = f"ensemble-ml: rank {told['rank']}{where} {what} at step {told['step']}{why}; this rank leaves"
    sys.stdout.flush()
    os.write(2, f"{text}\n".encode())  # one write: lines of several ranks do not mix
    time.sleep(wait)
    os._exit(status)
