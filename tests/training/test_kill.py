"""`kill -9`, once while a checkpoint is being written and once at a random moment: the resumed run is the same run."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_trainer import assert_equal_runs, weights

from ensemble_ml.training import train
from ensemble_ml.training.tracking import read_log

STEPS = 60
# Trains with the settings of a pickle; the variable DIE_AT names the fsync that the process does not survive.
CHILD = """
import os, pickle, signal, sys
from ensemble_ml.training import train
real, calls, last = os.fsync, [], int(os.environ.get("DIE_AT", 0))
def fsync(handle):
    calls.append(handle)
    if len(calls) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    real(handle)
os.fsync = fsync
train(pickle.load(open(sys.argv[1], "rb")))
"""


def start(config, tmp_path, **environment):
    import pickle

    file = tmp_path / "config.pickle"
    file.write_bytes(pickle.dumps(config))
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(file)], env={**os.environ, "PYTHONPATH": path, **environment}
    )


def kill_after(process, log, steps, moment):
    """Kill the process a moment after it has done some steps more than the log holds now."""
    before = len(read_log(log))
    limit = time.monotonic() + 60
    while len(read_log(log)) < before + steps and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    return process.wait()


@pytest.mark.slow
def test_killed_twice_then_resumed(config_of, tmp_path, whole_fits, own_fits):
    settings = dict(steps=STEPS, checkpoint_every=2, validate_every=7)
    whole = train(config_of(run="whole", **settings))  # whose fits, as long as the child's own, the child takes
    torch.set_num_threads(1)
    config = config_of(run="killed", **settings)
    run = Path(config.output) / "killed"
    # Five fsyncs and one a link: the 45th comes in the midst of a checkpoint some way into the run.
    assert start(config, tmp_path, DIE_AT="45").wait() == -signal.SIGKILL
    first = weights(run).meta["step"]
    assert 0 < first < STEPS
    config = replace(config, resume=True)
    chance = random.Random()  # a different moment each time is the point of this test
    process = start(config, tmp_path)
    assert kill_after(process, run / "log.jsonl", chance.randrange(2, 8), chance.random() * 0.05) == -signal.SIGKILL
    assert first <= weights(run).meta["step"] < STEPS
    assert start(config, tmp_path).wait() == 0
    assert_equal_runs(whole, run)
    assert weights(run, "best").meta["best"] == weights(whole, "best").meta["best"]
    lines = [[line["step"] for line in read_log(r / "log.jsonl") if "loss" in line] for r in (whole, run)]
    assert lines[0] == lines[1] == list(range(1, STEPS + 1))
