"""The ecFlow suite: a share that fails holds all that follows, and goes on once it is mended."""

import re
import subprocess
import time
from contextlib import contextmanager

from engines import FILES, engine, environment, free_port, wait_for

SUITE = FILES / "ecflow"
STAND_IN = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in *parts=2/*) [ -e {folder}/mended ] || exit 2 ;; esac
"""


@contextmanager
def server(folder, environ):
    """Run an ecFlow server, and give a function that calls its client."""
    place = {"ECF_PORT": str(free_port()), "ECF_HOST": "localhost", "ECF_HOME": str(folder / "server")}
    (folder / "server").mkdir()
    client, program = engine("ecflow_client"), engine("ecflow_server")
    environ = environ | place
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen([program, "--port", place["ECF_PORT"]], env=environ, stdout=log, stderr=log)

    def call(*arguments, check=True):
        done = subprocess.run([client, *arguments], env=environ, capture_output=True, text=True, check=check)
        return done.stdout if done.returncode == 0 else ""

    try:
        limit = time.monotonic() + 60
        while not call("--ping", check=False):
            assert time.monotonic() < limit
            time.sleep(0.2)
        call("--restart")  # it is halted at first
        yield call
    finally:
        process.kill()
        process.wait()


def states(call):
    """Return the states of the tasks that are not complete."""
    text = call("--get_state")
    tasks = re.findall(r"^ +task (\w+) # .*?state:(\w+)", text, re.M)
    return {f"{name} {state}" for name, state in tasks if state != "complete"}


def test_nothing_follows_a_share_that_failed_until_it_is_mended(tmp_path):
    environ = environment(tmp_path, STAND_IN.format(folder=tmp_path))
    text = (SUITE / "ens.def").read_text().replace("@ENS@", str(SUITE)).replace("@DATA@", str(tmp_path / "data"))
    (tmp_path / "mine.def").write_text(text)
    with server(tmp_path, environ) as call:
        call(f"--load={tmp_path / 'mine.def'}")
        call("--begin=ens")
        behind = {f"{task} queued" for task in ("check", "train", "predict", "evaluate")}

        def failed():  # a task is also aborted for a moment before it is tried again: ECF_TRIES
            tries = (tmp_path / "calls").read_text().count("parts=2/3") if (tmp_path / "calls").exists() else 0
            return tries == 3 and states(call) == behind | {"share aborted"}

        wait_for(failed, "the share to fail", 120)
        (tmp_path / "mended").touch()
        call("--requeue=abort", "/ens")
        wait_for(lambda: not states(call), "the suite to end", 120)
    done = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert sorted(done[6:]) == sorted(["prepare", "inspect", *["train", "predict", "evaluate"] * 2])
