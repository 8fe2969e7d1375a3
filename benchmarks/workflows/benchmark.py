"""Compare workflow engines: tasks a second, and what follows a task that fails.

    ensemble-ml benchmark benchmark=workflows [only=[rates,failures,enqueued]]

Tasks write one file each. All engines run two at once, but for Merlin's --local. A rate includes the start of the
engine, its server and its workers. Engines that are not installed are left out, with a note
(scripts/workflows/requirements.txt).
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.results import Figure
from benchmarks.common.sections import Bench, benchmark
from benchmarks.workflows import engines

_SECONDS = 900.0  # limit of one run
_TASKS = {"make -j2": 200, "Merlin --local": 100, "Merlin, redis": 200, "ecFlow": 50, "Cylc": 6}
_NEEDS = {
    "make -j2": ("make",),
    "Merlin --local": ("merlin",),
    "Merlin, redis": ("merlin", "celery", "redis-server"),
    "ecFlow": ("ecflow_server", "ecflow_client"),
    "Cylc": ("cylc",),
}
_HEAD = engines.ROOT / "scripts" / "workflows" / "ecflow"


class Place:
    """A folder in which an engine runs tasks that write files.

    Args:
        folder: the folder; must exist.
        count: tasks. The task `bad` fails; one more depends on all.
        bad: number of the task that fails, or 0.
    """

    def __init__(self, folder: Path, count: int, bad: int = 0):
        self.folder, self.count, self.bad = folder, count, bad
        self.environ = engines.environment(folder)
        (folder / "done").mkdir()

    def command(self, number: str) -> str:
        """Return the command of a task.

        Args:
            number: its number, or a word of the engine that becomes it.
        """
        return f"test {number} != {self.bad} || exit 3; touch {self.folder}/done/{number}"

    @property
    def last(self) -> str:
        """Return the command of the task that depends on all others."""
        return f"touch {self.folder}/last"

    def done(self) -> int:
        """Return how many tasks have written their file."""
        return len(list((self.folder / "done").iterdir()))

    def ended(self) -> bool:
        """Return whether the last task is done."""
        return (self.folder / "last").exists()

    def call(self, *words: str) -> int:
        """Run a program in the folder, and return its status.

        Args:
            *words: the program and its arguments.
        """
        program = engines.find(words[0]) or words[0]
        with (self.folder / "log").open("a") as log:
            return subprocess.run(
                [program, *words[1:]], cwd=self.folder, env=self.environ, stdout=log, stderr=log, check=False,
                timeout=_SECONDS,
            ).returncode  # fmt: skip

    def merlin(self) -> None:
        """Write a Merlin specification."""
        text = f"""
description: {{name: many, description: Tasks that write a file.}}
env: {{variables: {{OUTPUT_PATH: {self.folder}/study}}}}
study:
  - {{name: task, description: One., run: {{cmd: "{self.command("$(N)")}"}}}}
  - {{name: last, description: All., run: {{cmd: "{self.last}", depends: [task_*]}}}}
merlin:
  samples:
    column_labels: [N]
    file: $(MERLIN_INFO)/n.csv
    generate: {{cmd: "seq {self.count} > $(MERLIN_INFO)/n.csv"}}
"""
        (self.folder / "many.yaml").write_text(text)


def _make(place: Place) -> int:
    """Run all tasks by make."""
    names = " ".join(f"t{n}" for n in range(1, place.count + 1))
    rules = [f"last: {names}\n\t{place.last}\n"]
    rules += [f"t{n}:\n\t{place.command(str(n))}\n" for n in range(1, place.count + 1)]
    (place.folder / "Makefile").write_text("".join(rules))
    return place.call("make", "-j2", "-k")


def _merlin_local(place: Place) -> int:
    """Run all tasks by `merlin run --local`."""
    place.merlin()
    return place.call("merlin", "run", "--local", "many.yaml")


def _merlin_redis(place: Place) -> int:
    """Run all tasks by way of redis and a worker. The status is that of `merlin run`."""
    place.merlin()
    with engines.redis(place.folder):
        status = place.call("merlin", "run", "many.yaml")
        with engines.worker(place.folder, place.environ, 2):
            engines.wait_for(place.ended, "the last task", _SECONDS)
    return status


def _ecflow(place: Place) -> int:
    """Run all tasks by an ecFlow server, and return 1 if the suite is aborted."""
    files = place.folder / "files"
    files.mkdir()
    for name, text in (("task", place.command("%N%")), ("last", place.last)):
        (files / f"{name}.ecf").write_text(f"%include <head.h>\n{text}\n%include <tail.h>\n")
    tasks = "".join(
        f"    family f{n}\n      edit N '{n}'\n      task task\n    endfamily\n" for n in range(1, place.count + 1)
    )
    text = f"""suite many
  edit ECF_HOME '{place.folder}/jobs'
  edit ECF_FILES '{files}'
  edit ECF_INCLUDE '{_HEAD}'
  edit ECF_JOB_CMD 'bash %ECF_JOB% > %ECF_JOBOUT% 2>&1 &'
  edit ECF_TRIES '2'
  limit two 2
  inlimit two
  family all
{tasks}  endfamily
  task last
    trigger all == complete
endsuite
"""
    (place.folder / "many.def").write_text(text)
    with engines.ecflow(place.folder, place.environ) as call:
        call(f"--load={place.folder / 'many.def'}")
        call("--begin=many")

        def aborted() -> bool:  # for a moment it is before the bad task is tried again
            told = call("--get_state")
            return "suite many # begun:1 state:aborted" in told and "try:2" in told

        engines.wait_for(lambda: place.ended() or aborted(), "the last task", _SECONDS)
        time.sleep(1.0 if place.bad else 0.0)  # what depends on a bad task had its chance
        return int(aborted())


def _cylc(place: Place) -> int:
    """Run all tasks by Cylc, as background jobs."""
    flow = place.folder / "home" / "cylc-run" / "many"
    flow.mkdir(parents=True)
    text = f"""[scheduler]
    allow implicit tasks = False
    [[events]]
        stall timeout = PT0S
        abort on stall timeout = True
[task parameters]
    n = 1..{place.count}
    [[templates]]
        n = _%(n)d
[scheduling]
    [[queues]]
        [[[default]]]
            limit = 2
    [[graph]]
        R1 = task<n> => last
[runtime]
    [[root]]
        init-script = export PATH={place.environ["PATH"]}
    [[task<n>]]
        script = {place.command("$CYLC_TASK_PARAM_n")}
    [[last]]
        script = {place.last}
"""
    (flow / "flow.cylc").write_text(text)
    return place.call("cylc", "play", "--no-detach", "many")


ENGINES: dict[str, Callable[[Place], int]] = {
    "make -j2": _make,
    "Merlin --local": _merlin_local,
    "Merlin, redis": _merlin_redis,
    "ecFlow": _ecflow,
    "Cylc": _cylc,
}


def _installed(bench: Bench) -> list[str]:
    """Return the engines that can be run here, and note the others."""
    lacks = {name: [p for p in programs if engines.find(p) is None] for name, programs in _NEEDS.items()}
    for name, programs in lacks.items():
        if programs and (note := f"{name} was left out: {', '.join(programs)} not installed.") not in bench.notes:
            bench.notes.append(note)
    return [name for name, programs in lacks.items() if not programs]


def _rates(bench: Bench) -> None:
    """Time many tasks that do nearly nothing."""
    for name in _installed(bench):
        count = 2 if bench.tiny else _TASKS[name]
        rates = []
        for _ in range(bench.config.repeats):
            with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
                place = Place(Path(folder).resolve(), count)
                began = time.monotonic()
                status = ENGINES[name](place)
                if status or place.done() < count or not place.ended():
                    raise RuntimeError(f"{name}: status {status}, {place.done()} of {count} tasks were done")
                rates.append((count + 1) / (time.monotonic() - began))
        bench.figures[f"{name}: {count} tasks and one after them"] = Figure.of(rates, "tasks/s")


def _failures(bench: Bench) -> None:
    """Let one of four tasks fail, and look whether the one that depends on all of them is run."""
    rows: list[dict[str, Any]] = []
    for name in _installed(bench):
        with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
            place = Place(Path(folder).resolve(), 4, bad=3)
            status = ENGINES[name](place)
            after = "runs" if place.ended() else "does not run"
            rows.append({"engine": name, "what depends on a task that failed": after, "status": status})
    bench.tables["A task that fails"] = rows


def _enqueued(bench: Bench) -> None:
    """Time how long Merlin takes to hand many samples over to redis. Workers expand them into tasks."""
    if "Merlin, redis" not in _installed(bench):
        return
    for count in (100,) if bench.tiny else (10_000, 100_000):
        with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
            place = Place(Path(folder).resolve(), count)
            place.merlin()
            with engines.redis(place.folder):
                began = time.monotonic()
                place.call("merlin", "run", "many.yaml")
                seconds = time.monotonic() - began
        if count < 100_000:
            bench.claim(f"Merlin hands {count} samples over to redis", seconds, "s", 60.0, at_most=True)
        else:
            bench.figures[f"Merlin hands {count} samples over to redis"] = Figure.of([seconds], "s")


run = benchmark("Workflow engines: what a task costs", {"rates": _rates, "failures": _failures, "enqueued": _enqueued})
