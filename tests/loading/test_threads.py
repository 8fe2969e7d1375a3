"""Threads of a loader: how the scheduler sees them, and that they run where it cannot be told."""

import os
import queue
import threading
import time

import numpy as np
import pytest

from ensemble_ml.loading import threads
from ensemble_ml.loading.clairvoyant import ClairvoyantLoader
from ensemble_ml.loading.threads import start

needs_classes = pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="the system has no scheduler classes")


@needs_classes
def test_they_do_not_take_the_core_when_woken_and_the_caller_stays_as_it_was():
    mine, told = os.sched_getscheduler(0), queue.SimpleQueue()
    three = start(3, lambda: told.put((threading.current_thread().name, os.sched_getscheduler(0))))
    for thread in three:
        thread.join()
    found = sorted(told.get() for _ in three)
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


def test_an_end_does_not_wait_for_storage_that_does_not_answer(monkeypatch, caplog):
    """A job that is told to stop has half a minute; a file system that hangs has all the time there is."""
    monkeypatch.setattr(threads, "PATIENCE", 0.2)
    answer, reads = threading.Event(), queue.SimpleQueue()

    class Slow:
        def __len__(self):
            return 40

        def __getitem__(self, sample):
            reads.put(sample)
            if reads.qsize() > 12:
                answer.wait(60)
            return np.full(1000, sample, np.float32)

    with ClairvoyantLoader(Slow(), 4, 1, 0, ram=10**9) as loader:
        batches = iter(loader)
        next(batches)
        while reads.qsize() <= 12 or loader.tiers.slowest() is None:  # else a read that ends is seen, too
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert "are not waited for: dataset: sample" in caplog.text and "without an answer" in caplog.text
    answer.set()
