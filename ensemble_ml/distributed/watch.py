"""Failure detection between ranks. No rank is left waiting for a rank that is gone.

A rank that raises writes its number, its step and the cause into the job's key-value store and exits. A watch thread in
every rank polls the store every half second. On a failure it prints the cause and ends its process, even if the main
thread is inside a collective that would never return.

The watch thread also writes a heartbeat, which stops if its rank dies silently (killed, out of memory), but not if the
rank is only slow. Rank 0 serves the store. If rank 0 stops answering, the watch thread of another rank may block
forever in a request, so a second thread on every other rank checks when rank 0 last answered.

An interruption (Ctrl-C, SIGTERM) usually reaches all ranks at once. After one rank reports it, the others get some time
to end by themselves, so that they can finish the file that they are writing.
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
# Launchers end all ranks at the first exit status that is not 0. Rank 0 exits with such a status when the job asks to
# be requeued, so it waits these seconds to be the last.
LAST = 3.0
_PERIOD = 0.5  # seconds between polls of the store
_SOON = 0.05  # seconds between polls while a rank waits for the last one to leave
_GRACE = 3.0  # seconds beyond `silence` that rank 0 has to answer, and that a failed collective waits for the cause
_UNWIND = 15.0  # seconds that a rank may go on after another was interrupted; launchers kill after thirty
# Seconds that rank 0 stays after a failure. The store dies with rank 0, and the others have to read the cause first.
_FAREWELL = 2 * _PERIOD + 0.5


class Watch:
    """A thread that writes this rank's heartbeat and polls the store for a failure of another rank.

    Nothing else uses the connection `store`: on a shared one, a call that waits for a collective's set-up would delay
    the heartbeat. A rank counts as dead after `silence` seconds without one. `step` returns the step of this rank.
    """

    def __init__(self, store: Any, rank: int, size: int, silence: float, step: Callable[[], int]):
        self._store, self._rank, self._size, self._silence, self._step = store, rank, size, silence, step
        self._store.set(f"beat/{self._rank}", "0 0")
        self._seen: dict[int, tuple[str, float]] = {}
        self._looked = time.monotonic()
        self._end, self._leaving, self._reported = threading.Event(), False, False
        self._interrupted: dict[str, Any] | None = None  # the report of another rank's interruption
        self._until = 0.0  # when this rank's time to end by itself is over
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._answered, self._gone = self._looked, threading.Event()
        self._thread.start()
        self._answers = threading.Thread(target=self._find_frozen, name="answers", daemon=True)
        if self._rank > 0:
            self._answers.start()

    def report(self, error: BaseException) -> None:
        """Write the cause of a failure into the store.

        A report that another rank has written stays. An error that may follow from another rank's failure is left to
        `fail`.
        """
        if _may_follow(error):
            return
        with contextlib.suppress(dist.DistError):
            if self._first_failure() is None:
                self._reported = True
                self._write_failure(self._rank, error)

    def fail(self, error: BaseException) -> None:
        """Write the cause of a failure into the store.

        If another rank has failed first, print its cause instead and end this process, unless both were interrupted. If
        the error may follow from another rank's failure, wait for that rank's report first.
        """
        if _may_follow(error):
            # The rank at fault may not have written its cause yet: a dead rank is only found after `silence` seconds.
            until = time.monotonic() + self._silence + _GRACE
            # The watch thread ends the process as soon as the cause is known, unless the cause is an interruption.
            while time.monotonic() < until and self._interrupted is None:
                time.sleep(_PERIOD)
        self._end.set()
        self._thread.join(timeout=5)
        try:
            failure = self._interrupted or self._first_failure()
            if failure is None:
                self._write_failure(self._rank, error)
            elif failure["rank"] != self._rank and not (
                failure["interrupted"] and isinstance(error, KeyboardInterrupt)
            ):
                self._leave(failure)
            if self._rank == 0:
                time.sleep(_FAREWELL)
        except dist.DistError:
            pass  # the store is gone, and rank 0 with it, so there is nobody to report to
        self._let_go()

    def leave(self) -> None:
        """End cleanly. Rank 0, which serves the store, leaves last.

        The other ranks may still work for as long as they like (for example on their share of the forecasts), and are
        watched meanwhile.
        """
        self._leaving = True
        self._end.set()
        self._thread.join()
        self._let_go()

    def _let_go(self) -> None:
        """End the second thread. A thread that still runs when the interpreter ends may crash the process."""
        self._gone.set()
        if self._answers.is_alive():
            self._answers.join()

    def _run(self) -> None:
        """Write a heartbeat and look for a failure every `_PERIOD` seconds, until `fail` or `leave` ends it."""
        beat = 0
        while not self._end.wait(_PERIOD) or self._leaving:
            beat += 1
            try:
                self._store.set(f"beat/{self._rank}", f"{beat} {self._step()}")
                if self._rank == 0:
                    self._find_silent()
                failure = self._first_failure()
                self._answered = time.monotonic()
                if self._leaving and failure is None and self._all_done():
                    return
            except dist.DistError:
                # The other ranks have exited because of this rank's report; its own error will end this process.
                if self._reported:
                    return
                # After an interruption rank 0 has ended by itself, and this rank may use the rest of its time.
                if self._interrupted is not None:
                    self._gone.set()
                    if not self._end.wait(self._until - time.monotonic()):
                        self._leave(self._interrupted)
                    return
                if self._leaving or not self._end.is_set():
                    self._leave_rank_0()
                return
            if failure is not None and failure["rank"] != self._rank and not self._may_go_on(failure):
                self._leave(failure)
            if self._leaving:
                time.sleep(_SOON)

    def _may_go_on(self, failure: dict[str, Any]) -> bool:
        """Return whether this rank still has time to end by itself after an interruption of another rank."""
        if self._leaving or not failure["interrupted"]:
            return False
        if self._interrupted is None:
            self._interrupted, self._until = failure, time.monotonic() + _UNWIND
        return time.monotonic() < self._until

    def _find_frozen(self) -> None:
        """End this process if rank 0, stopped or blocked by its disk, does not answer while its host still does."""
        looked = time.monotonic()
        while not self._gone.wait(_PERIOD):
            now = time.monotonic()
            # A long gap between two looks means that the whole job was suspended, so rank 0 could not answer either.
            if now - looked > self._silence / 2:
                self._answered = now
            looked = now
            if now - self._answered > self._silence + _GRACE:
                self._leave_rank_0()

    def _leave_rank_0(self) -> None:
        """Print that rank 0 no longer answers, and end this process."""
        self._leave({"rank": 0, "host": "", "step": self._step(), "cause": "no longer answers", "interrupted": False})

    def _all_done(self) -> bool:
        """Register that this rank has finished. Return whether it may leave: rank 0 waits for all others."""
        self._store.set(f"done/{self._rank}", "1")
        return self._rank > 0 or self._store.check([f"done/{rank}" for rank in range(self._size)])

    def _leave(self, failure: dict[str, Any]) -> None:
        """Print another rank's report and end this process, with the status that the report calls for."""
        first = self._rank == 0
        wait = _FAREWELL if first else 0.0
        # Only rank 0 exits with the status that asks for a restart, and it exits last.
        if failure.get("requeue"):
            _print_and_exit(failure, STATUS_REQUEUE if first else 0, wait + LAST if first else 0.0)
        _print_and_exit(failure, STATUS_ABORTED, wait)

    def _first_failure(self) -> dict[str, Any] | None:
        """Return the report of the first failure, or None."""
        return json.loads(self._store.get("failed")) if self._store.check(["failed"]) else None

    def _write_failure(self, rank: int, error: BaseException | str, step: int | None = None) -> None:
        """Write the report of a failure. The first report is kept, later ones are ignored."""
        requeue = isinstance(error, Stopped) and error.requeue
        interrupted = isinstance(error, KeyboardInterrupt) and not requeue
        cause = str(error) if isinstance(error, str) or interrupted else f"{type(error).__name__}: {error}"
        host = self._store.get(f"host/{rank}").decode() if self._store.check([f"host/{rank}"]) else ""
        failure = {
            "rank": rank,
            "host": host if rank != self._rank else socket.gethostname(),
            "step": self._step() if step is None else step,
            "cause": " ".join(cause.split())[:500],
            "requeue": requeue,
            "interrupted": interrupted,
        }
        self._store.compare_set("failed", "", json.dumps(failure))

    def _find_silent(self) -> None:
        """On rank 0, write the failure of a rank whose heartbeat has stopped."""
        if self._store.check(["failed"]):
            return
        now = time.monotonic()
        slept, self._looked = now - self._looked > self._silence / 2, now
        # A long gap between two looks means that the whole job was suspended, so no rank could write a heartbeat.
        if slept:
            self._seen.clear()
        for rank in range(1, self._size):
            if not self._store.check([f"beat/{rank}"]) or self._store.check([f"done/{rank}"]):
                continue
            beat = self._store.get(f"beat/{rank}").decode()
            if self._seen.get(rank, ("", 0.0))[0] != beat:
                self._seen[rank] = beat, now
            elif now - self._seen[rank][1] > self._silence:
                silent = f"no heartbeat for {self._silence:g} s: killed, out of memory, or its host is gone"
                self._write_failure(rank, silent, int(beat.split()[1]))
                return


def _may_follow(error: BaseException) -> bool:
    """Return whether an error may be the mere consequence of another rank's failure, such as a closed connection."""
    return isinstance(error, dist.DistError | ConnectionError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error).lower() or "nccl" in str(error).lower())
    )


def _print_and_exit(failure: dict[str, Any], status: int, wait: float) -> None:
    """Print the cause and end this process, wherever its main thread stands."""
    where = f" ({failure['host']})" if failure["host"] else ""
    what = "was interrupted" if failure["interrupted"] else "failed" if status == STATUS_ABORTED else "stopped"
    why = f": {failure['cause']}" if failure["cause"] else ""
    text = f"ensemble-ml: rank {failure['rank']}{where} {what} at step {failure['step']}{why}; this rank leaves"
    try:
        sys.stdout.flush()
        os.write(2, f"{text}\n".encode())  # a single write, so that lines of several ranks do not mix
    finally:  # also where nothing can be written: the disk of the log is full, or its reader is gone
        time.sleep(wait)
        os._exit(status)
