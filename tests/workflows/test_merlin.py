"""The campaign under Merlin: in one process and by workers; killed, failing, and restarted."""

import shutil
import subprocess
import time

import psutil
import pytest
import yaml
from fixtures_archive import tiny_archive  # noqa: F401
from needs import FILES, engine
from packaging.requirements import Requirement

from benchmarks.workflows.engines import environment, kill_tree, redis, wait_for, worker

CAMPAIGN = FILES / "merlin" / "campaign.yaml"
# A stand-in for all commands. It notes its arguments; some fail until there is a file `mended`.
STAND_IN = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in
*parts=1/*) [ -e {folder}/again ] || {{ touch {folder}/again; exit 75; }} ;;
*parts=2/* | inspect*) [ -e {folder}/mended ] || exit 2 ;;
esac
"""
EXPERIMENT = """# @package _global_
defaults: [quickstart]
steps: 4
max_minutes: 0
threads: 1
validate_every: 2
checkpoint_every: 1
data: {validation_members: 2, members: [1, 2, 3]}
model: {hidden: 8, max_hidden: 16, points: 0, linear: false, precision: float32}
tracking: {tensorboard: false}
"""


def merlin(folder, environ, *arguments):
    """Run Merlin where app.yaml may lie."""
    command = [engine("merlin"), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def study(data):
    """Return the workspace of the only study."""
    (found,) = (data / "study").glob("campaign_*")
    return found


def finished(folder):
    """Return the tasks that are done."""
    return {str(path.parent.relative_to(folder)) for path in folder.rglob("MERLIN_FINISHED")}


def calls(folder):
    """Return the commands that the stand-in was called with."""
    return [line.split()[0] for line in (folder / "calls").read_text().splitlines()]


TASKS = {"simulate", "prepare/00", "prepare/01", "prepare/02", "check", "finish"} | {
    f"{step}/SEED.{seed}" for step in ("train", "predict", "evaluate") for seed in (0, 1)
}


@pytest.mark.parametrize("way", ["local", pytest.param("redis", marks=pytest.mark.slow)])
def test_nothing_is_trained_after_a_share_that_failed(tmp_path, way):
    engine("merlin")
    environ, data = environment(tmp_path, STAND_IN.format(folder=tmp_path)), tmp_path / "data"

    def run(*arguments):
        if way == "local":
            return merlin(tmp_path, environ, *arguments, "--local")
        merlin(tmp_path, environ, *arguments)
        last = study(data) / "finish" / "MERLIN_STATUS.json"
        begun = last.stat().st_mtime_ns if last.exists() else 0
        with worker(tmp_path, environ):
            wait_for(lambda: last.exists() and last.stat().st_mtime_ns > begun, "the last step", 120)
            wait_for(lambda: '"RUNNING"' not in last.read_text() and '"INITIALIZED"' not in last.read_text(), "it", 60)
            time.sleep(0.5)

    def both():
        run("run", CAMPAIGN, "--vars", f"DATA={data}")
        # The share that asked to be queued again was, at once; the one that failed was not.
        assert calls(tmp_path) == ["simulate", *["prepare"] * 4, "inspect"]
        assert finished(study(data)) == {"simulate", "prepare/00", "prepare/02"}
        (tmp_path / "calls").unlink()
        (tmp_path / "mended").touch()
        run("restart", study(data))
        wanted = ["evaluate"] * 2 + ["inspect"] + ["predict"] * 2 + ["prepare"] + ["train"] * 2
        assert sorted(calls(tmp_path)) == wanted
        assert finished(study(data)) == TASKS  # all steps of every chain: celery 5.7 would leave out all but the first

    if way == "local":
        return both()
    engine("redis-server")
    with redis(tmp_path):
        both()


def test_celery_is_pinned_below_the_version_that_runs_first_steps_alone():
    lines = (FILES / "requirements.txt").read_text().splitlines()
    pins = {found.name: found.specifier for found in map(Requirement, (x for x in lines if x[0] != "#"))}
    assert "5.6.3" in pins["celery"] and "5.7.0" not in pins["celery"]
    said = subprocess.run([engine("celery"), "--version"], capture_output=True, text=True, check=True).stdout
    assert said.split()[0] in pins["celery"]


@pytest.mark.slow
def test_ten_thousand_samples_are_enqueued_in_a_minute_and_a_task_costs_half_a_second_at_most(tmp_path):
    engine("merlin"), engine("redis-server")
    environ = environment(tmp_path)
    spec = {
        "description": {"name": "many", "description": "Nothing, often."},
        "env": {"variables": {"OUTPUT_PATH": str(tmp_path / "study"), "COUNT": 10_000}},
        "study": [{"name": "nothing", "description": "Nothing.", "run": {"cmd": "true $(NUMBER)"}}],
        "merlin": {
            "samples": {
                "column_labels": ["NUMBER"],
                "file": "$(MERLIN_INFO)/numbers.csv",
                "generate": {"cmd": "seq $(COUNT) > $(MERLIN_INFO)/numbers.csv"},
            }
        },
    }
    (tmp_path / "many.yaml").write_text(yaml.safe_dump(spec))
    with redis(tmp_path):
        began = time.monotonic()
        merlin(tmp_path, environ, "run", "many.yaml")
        assert time.monotonic() - began < 60

        def done():
            return len(list((tmp_path / "study").rglob("MERLIN_FINISHED")))

        with worker(tmp_path, environ):
            wait_for(lambda: done() >= 1, "the first task", 120)
            first, began = done(), time.monotonic()
            wait_for(lambda: done() >= first + 20, "twenty tasks", 60)
            assert (time.monotonic() - began) / 20 < 0.5


@pytest.mark.slow
def test_a_campaign_that_is_killed_three_times_ends_with_the_same_scores(tmp_path, tiny_archive):  # noqa: F811
    engine("merlin"), engine("redis-server")
    environ, data = environment(tmp_path), tmp_path / "data"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "tiny.yaml").write_text(EXPERIMENT)
    spec = yaml.safe_load(CAMPAIGN.read_text())
    spec["global.parameters"]["SEED"]["values"] = [0]
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    variables = [f"DATA={data}", "SIMULATE=tiny", "SHARES=2", "MEMBERS=2", "EXPERIMENT=tiny", f"CONF={tmp_path}"]

    def begin(*more):
        shutil.copytree(tiny_archive, data / "archive")
        merlin(tmp_path, environ, "run", tmp_path / "campaign.yaml", *more, "--vars", *variables)

    def scores(folder):
        return (folder / "scores" / "seed0" / "scores.json").read_bytes()

    begin("--local")
    assert "finish" in finished(study(data))
    whole = data.rename(tmp_path / "whole")
    with redis(tmp_path):
        begin()
        with worker(tmp_path, environ) as first:
            wait_for(lambda: command_under(first.pid, "parts=2/2") is not None, "the second share", 200)
            kill_tree(child(first.pid))  # the worker itself lives, and is handed the task again
            run = data / "runs" / "seed0"
            wait_for((run / "checkpoints" / "last").exists, "a checkpoint", 300)
        assert "train/SEED.0" not in finished(study(data))  # the worker has died while it trained
        merlin(tmp_path, environ, "restart", study(data))
        with worker(tmp_path, environ):
            wait_for(lambda: list((data / "scores").glob("seed0/.*")), "the evaluation to begin", 300)
        assert "evaluate/SEED.0" not in finished(study(data))
        merlin(tmp_path, environ, "restart", study(data))
        with worker(tmp_path, environ):
            wait_for(lambda: "finish" in finished(study(data)), "the end", 300)
    assert scores(data) == scores(whole)


def child(pid: int) -> int:
    """Return the process of a worker's pool that runs a step."""
    return next(c.pid for c in psutil.Process(pid).children() if c.children())


def command_under(pid: int, word: str) -> int | None:
    """Return a descendant whose command line has a word."""
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if any(word in part for part in process.cmdline()):
                return process.pid
        except psutil.NoSuchProcess:
            continue
    return None
