"""The Cylc workflow validates, and two cycles of it run in simulation mode."""

import re
import shutil
import subprocess

import pytest
from needs import FILES, engine

from benchmarks.workflows.engines import environment

FLOW = FILES / "cylc"
TWO_DAYS = ["-s", "FIRST='20260131T00Z'", "-s", "LAST='20260201T00Z'"]


@pytest.mark.slow
def test_the_workflow_validates_and_runs_two_cycles_in_simulation_mode(tmp_path):
    cylc, environ = engine("cylc"), environment(tmp_path)

    def run(*arguments):
        return subprocess.run([cylc, *arguments], env=environ, capture_output=True, text=True, timeout=300, check=True)

    assert "Valid" in run("validate", str(FLOW)).stdout
    shutil.copytree(FLOW, tmp_path / "home" / "cylc-run" / "ens")  # `cylc install` would want rsync
    said = run("play", "--no-detach", "--mode=simulation", *TWO_DAYS, "ens")
    done = re.findall(r"\[(\d{8})T0000Z/(\w+)/01:running\] => succeeded", said.stdout + said.stderr)
    daily, monthly = ("fetch", "predict", "evaluate"), ("prepare", "check", "train")
    wanted = {(day, task) for day in ("20260131", "20260201") for task in daily}
    assert sorted(done) == sorted(wanted | {("20260131", task) for task in monthly})
    order = [task for day, task in done if day == "20260131"]
    assert order.index("prepare") < order.index("check") < order.index("train")
