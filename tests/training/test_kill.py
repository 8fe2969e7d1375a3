"""`kill -9`, once while a checkpoint is being written and once at a random moment: the resumed run is the same run."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_trainer import assert_equal_runs, weights

from ensemble_ml.training import train
from ensemble_ml.training.tracking import read_log

STEPS = 40


def train_and_die(config, at):
    """Train, and do not survive the fsync of this number."""
    sys.settrace(None)  # the tracer of coverage, which would slow it down
    threading.settrace(None)
    torch.set_num_threads(1)
    real, calls = os.fsync, []

    def fsync(handle):
        calls.append(handle)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(handle)

    os.fsync = fsync
    train(config)


def start(config, die_at=0):
    """Begin a training in a fork of this process, which needs no seconds to import torch."""
    process = multiprocessing.get_context("fork").Process(target=train_and_die, args=(config, die_at))
    process.start()
    return process


def ended(process):
    """Return the status of a process once it has ended, negative for a signal; None after five minutes."""
    process.join(300)
    return process.exitcode


def kill_after(process, log, steps, moment):
    """Kill the process a moment after it has done some steps more than the log holds now."""
    before = len(read_log(log))
    limit = time.monotonic() + 60
    while len(read_log(log)) < before + steps and process.is_alive() and time.monotonic() < limit:
        time.sleep(0.005)
    time.sleep(moment)
    process.kill()
    return ended(process)


@pytest.mark.slow
def test_killed_twice_then_resumed(config_of, own_fits):
    settings = dict(steps=STEPS, checkpoint_every=2, validate_every=7)
    whole = train(config_of(run="whole", **settings))  # whose fits the forks take
    config = config_of(run="killed", **settings)
    run = Path(config.output) / "killed"
    # Five fsyncs and one a link: the 45th comes in the midst of a checkpoint some way into the run.
    assert ended(start(config, die_at=45)) == -signal.SIGKILL
    first = weights(run).meta["step"]
    assert 0 < first < STEPS
    config = replace(config, resume=True)
    chance = random.Random()  # a different moment each time is the point of this test
    process = start(config)
    assert kill_after(process, run / "log.jsonl", chance.randrange(2, 8), chance.random() * 0.05) == -signal.SIGKILL
    assert first <= weights(run).meta["step"] < STEPS
    assert ended(start(config)) == 0
    assert_equal_runs(whole, run)
    assert weights(run, "best").meta["best"] == weights(whole, "best").meta["best"]
    lines = [[line["step"] for line in read_log(r / "log.jsonl") if "loss" in line] for r in (whole, run)]
    assert lines[0] == lines[1] == list(range(1, STEPS + 1))
