"""The Cylc workflow validates, two cycles of it run in simulation mode, and its scripts call the right commands."""

import os
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


def ran(folder, task, day):
    """Run the script of a task under bash, with stand-ins for the programs; return what they were called with."""
    text = (
        (FLOW / "flow.cylc").read_text().replace("{{ ROOT }}", str(folder / "the root")).replace("{{ SETTINGS }}", "")
    )
    parts = {found.split("]]")[0]: found for found in re.split(r"\n    \[\[(?=\w)", text.partition("[runtime]")[2])}
    script = re.search(r'script = (?:"""(.*?)"""|([^\n]+))', parts[task], re.S)
    variables = [line for part in ("root", task) for line in re.findall(r"\n +([A-Z]+) = (.*)", parts[part])]
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, body in {
        "isodatetime": 'd=${1%T*}; [[ "$*" == *-P5D* ]] && d="$d - 5 days"\n'
        '[[ "$*" == *-MM-DD ]] && date -d "$d" +%Y-%m-%d || date -d "$d" +%Y',
        "ensemble-ml": f"printf '%s\\n' \"$@\" >> '{folder}/said'",
        "fetch-ensemble": f"printf '%s\\n' \"$@\" >> '{folder}/said'",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    lines = [f"export CYLC_TASK_CYCLE_POINT={day}T0000Z", *(f'export {name}="{value}"' for name, value in variables)]
    environ = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    whole = "\n".join(["set -eu", *lines, script[1] or script[2]])
    subprocess.run(["bash", "-c", whole], env=environ, check=True, stdout=subprocess.DEVNULL)
    said = folder / "said"
    told = said.read_text().splitlines() if said.exists() else []
    said.unlink(missing_ok=True)
    return told


def test_a_model_is_trained_on_the_users_years_and_never_on_those_it_forecasts(tmp_path):
    """The dates of the quickstart, 2001, are in no one else's archive. Paths may hold blanks."""
    root = tmp_path / "the root"
    (root / "model").mkdir(parents=True)
    said = ran(tmp_path, "train", "20260131")
    assert f"data.store={root}/store/2026-01-31.zarr" in said and not any("quickstart" in word for word in said)
    assert "data.train=['1900/2024']" in said and "data.validation=['2025']" in said
    assert os.readlink(root / "model" / "current") == f"{root}/runs/2026-01-31/checkpoints/best"
    for task, word in {"fetch": f"{root}/archive", "check": f"{root}/store/2026-01-31.zarr"}.items():
        assert word in ran(tmp_path, task, "20260131")
    assert f"static={root}/archive/static.grib" in ran(tmp_path, "prepare", "20260131")


def test_the_first_cycles_have_no_forecast_to_score(tmp_path):
    """That of five days ago is from before the first cycle, and the truth of later ones is not there yet."""
    root = tmp_path / "the root"
    said = ran(tmp_path, "predict", "20251230")
    assert f"output={root}/forecast/2025" in said and "dates=['2025-12-30']" in said
    assert ran(tmp_path, "evaluate", "20260104") == []
    (root / "forecast" / "2025").mkdir(parents=True)
    (root / "forecast" / "2025" / "forecast_2025123000.nc").touch()
    assert ran(tmp_path, "evaluate", "20260103") == []
    said = ran(tmp_path, "evaluate", "20260104")
    assert f"forecast={root}/forecast/2025" in said and f"output={root}/scores/2025" in said
