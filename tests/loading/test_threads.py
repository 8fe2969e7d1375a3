"""Threads of a loader: how the scheduler sees them, and that they run where it cannot be told."""

import os
import queue
import threading

import pytest

from ensemble_ml.loading.threads import start

needs_classes = pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="the system has no scheduler classes")


@needs_classes
def test_they_do_not_take_the_core_when_woken_and_the_caller_stays_as_it_was():
    mine, told = os.sched_getscheduler(0), queue.SimpleQueue()
    threads = start(3, lambda: told.put((threading.current_thread().name, os.sched_getscheduler(0))))
    for thread in threads:
        thread.join()
    found = sorted(told.get() for _ in threads)
    assert found == [(f"loading-{number}", os.SCHED_BATCH) for number in range(3)]
    assert os.sched_getscheduler(0) == mine


@needs_classes
def test_a_container_that_forbids_it_is_no_error(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    worked = queue.SimpleQueue()
    for thread in start(2, lambda: worked.put(True)):
        thread.join()
    assert worked.qsize() == 2
