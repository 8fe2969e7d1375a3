"""The ecFlow suite: a share that fails holds all that follows, and goes on once it is mended."""

import re

import pytest
from needs import FILES, engine

from benchmarks.workflows.engines import ecflow, environment, wait_for

SUITE = FILES / "ecflow"
STAND_IN = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in *parts=2/*) [ -e {folder}/mended ] || exit 2 ;; esac
"""


def states(call):
    """Return the states of the tasks that are not complete."""
    text = call("--get_state")
    tasks = re.findall(r"^ +task (\w+) # .*?state:(\w+)", text, re.M)
    return {f"{name} {state}" for name, state in tasks if state != "complete"}


@pytest.mark.slow
def test_nothing_follows_a_share_that_failed_until_it_is_mended(tmp_path):
    engine("ecflow_server"), engine("ecflow_client")
    environ = environment(tmp_path, STAND_IN.format(folder=tmp_path))
    text = (SUITE / "ens.def").read_text().replace("@ENS@", str(SUITE)).replace("@DATA@", str(tmp_path / "the data"))
    (tmp_path / "mine.def").write_text(text)
    with ecflow(tmp_path, environ) as call:
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
