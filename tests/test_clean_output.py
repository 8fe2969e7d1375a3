"""The commands write to the terminal what they have to say, and no warnings of the libraries beneath them."""

import os
import re
import subprocess
import sys

import pytest
from stores import make_store

# What Python, C++ and the loggers of torch, XLA and TensorBoard put before a warning.
FOREIGN = re.compile(r"Warning\b|warnings\.warn|^\[?[WEIF]\d{4}|^\[W\d*[ :.]|NNPACK|lr_scheduler|Traceback")
DATES = [f"2001-{month:02}-{day:02}" for month in (1, 2, 3) for day in range(1, 28, 3)]
QUICK = ["steps=2", "threads=1", "max_minutes=0.2", "model.hidden=8", "model.max_hidden=16"]


def foreign_lines(folder, *arguments):
    """Run a command in a process of its own, and return the lines on its standard error that are not ours."""
    command = [sys.executable, "-m", "ensemble_ml", *arguments]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr  # the log, which stands there too
    return [line for line in ran.stderr.splitlines() if FOREIGN.search(line)]


@pytest.mark.slow
def test_no_command_shows_warnings_of_libraries(tmp_path):
    make_store(tmp_path / "store.zarr", dates=DATES, members=5, variables=("t", "q"), surface=("t2m", "tp"))
    split = ["data.train=['2001-01','2001-02']", "data.validation=['2001-03-01/2001-03-13']"]
    assert not foreign_lines(tmp_path, "train", "data.store=store.zarr", "run=first", *split, *QUICK)
    tested = ["input=store.zarr", "dates=['2001-03-16/2001-03-28']", "members_in=3", "output=forecast"]
    assert not foreign_lines(tmp_path, "predict", "checkpoint=runs/first", *tested)
    given = ["ensemble=store.zarr", "truth=store.zarr", "members_in=3", "bootstrap=100"]
    assert not foreign_lines(tmp_path, "evaluate", "forecast=forecast", *given, "output=scores")


@pytest.mark.parametrize(
    "line",
    [
        "/x/torch/optim/lr_scheduler.py:1: UserWarning: Detected call",
        "[W1127 19:08:45.956079 NNPACK.cpp:57] Could not initialize NNPACK! Reason: Unsupported hardware.",
        "E1127 19:08:45.956079    9799 slow_operation_alarm.cc:73] ",
        "/x/xarray/conventions.py:1: SerializationWarning: variable has multiple fill values",
    ],
)
def test_lines_of_libraries_are_known_as_such(line):
    assert FOREIGN.search(line)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_ends_in_one_line(unbuffered):
    """A full disk is told, and a reader that has gone, such as head, needs nothing more."""
    command, environment = (
        [sys.executable, "-m", "ensemble_ml", "--help"],
        os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    reader, pipe = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, os.fdopen(pipe, "w") as gone:
        ran = [
            subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment, check=False)
            for output in (full, gone)
        ]
    told = "ensemble-ml: output cannot be written: No space left on device; free space, or choose another disk\n"
    assert [(one.returncode, one.stderr) for one in ran] == [(2, told), (0, "")]
