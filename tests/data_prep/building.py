"""What tests of interrupted and shared builds have in common: an archive, a build as a process, stores compared."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gribfiles import ensemble

from data_prep.build_job import Job
from ensemble_ml.config import PrepareConfig
from ensemble_ml.store.build import Build

DATES = 12
SCRIPT = """
import json, logging, os, sys
sys.path.insert(0, {tests!r})
import building
from data_prep import prepare
from ensemble_ml.config import PrepareConfig
from ensemble_ml.errors import UserError
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
logging.getLogger("data_prep.build_job").addHandler(building.Log({log!r}))
logging.getLogger("data_prep.build_job").setLevel(logging.DEBUG)
try:
    prepare(PrepareConfig(**json.loads(sys.argv[1])))
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def archive(folder: Path, dates: int = DATES) -> Path:
    """A GRIB file of so many start dates, five members, two leads and two variables on two levels."""
    days = [20010100 + day for day in range(1, dates + 1)]
    return ensemble(folder / "a.grib", dates=days, names=("t", "z"), members=range(1, 6))


def config(archive: Path, output: Path, **changes: Any) -> PrepareConfig:
    """To build `archive` into `output`."""
    return PrepareConfig(**{"input": str(archive), "output": str(output)} | changes)


def begin(settings: PrepareConfig, dates: Iterable[int]) -> Build:
    """Build some start dates, and leave the rest, as an interruption does."""
    job = Job(settings)
    build = Build(settings.output, job.plan, overwrite=settings.overwrite)
    with ThreadPoolExecutor(1) as pool:
        for date in dates:
            assert job.run(build, date, pool, lambda: False)
    return build


class Log:
    """Handler that appends each line at once: what a killed process has said stays said."""

    level = 0

    def __init__(self, path: str):
        self.path = path

    def handle(self, record) -> None:
        with open(self.path, "a") as file:
            file.write(record.getMessage() + "\n")


def start(log: Path, **settings) -> subprocess.Popen:
    """`prepare` in a process of its own; each start date that it builds becomes a line of `log`."""
    script = textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parent), log=str(log)))
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    env = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1")
    given = json.dumps({key: str(value) if isinstance(value, Path) else value for key, value in settings.items()})
    return subprocess.Popen([sys.executable, "-c", script, given], stderr=subprocess.PIPE, text=True, env=env)


def names(folder: Path) -> list[str]:
    """What stands in a folder, but the tables of GRIB files, which are kept."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".index"))


def contents(store: Path) -> dict[str, str]:
    """Every file of a store with a hash of its bytes."""
    files = sorted(path for path in store.rglob("*") if path.is_file())
    return {path.relative_to(store).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def die(*_: object) -> None:
    """A task that kills its worker, as the system does when memory is short."""
    os._exit(9)


def ignores_interrupts(*_: object) -> bool:
    """A task that says whether its worker ignores Ctrl-C."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN
