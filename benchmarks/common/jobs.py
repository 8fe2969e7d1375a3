"""Run a job on several ranks: the benchmark sends it as JSON, and rank 0 returns its result.

hand_out(hosts, MODULE, {...}, folder, seconds=600)      runs `python -m MODULE JOB FOLDER` on every host
if __name__ == "__main__": take_part(work)               at the end of MODULE
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.hosts import Hosts, python
from ensemble_ml.config import Launcher, ParallelConfig
from ensemble_ml.distributed import Session, start
from ensemble_ml.machine import keep_freed_memory

_FOUND = "results.json"


def hand_out(
    hosts: Hosts, module: str, job: Mapping[str, Any], folder: Path, *, seconds: float,
    environment: dict[str, str] | None = None,
) -> Any:  # fmt: skip
    """Let `module` run a job on all hosts, and return the result of rank 0.

    Args:
        hosts: the hosts.
        module: a module that ends with `take_part`.
        job: the settings of the job.
        folder: a folder for temporary files.
        seconds: time limit.
        environment: further variables of the environment.

    Raises:
        UserError: a rank failed, or the job took longer than `seconds`.
    """
    with tempfile.TemporaryDirectory(dir=folder) as out:
        hosts.run(python("-m", module, json.dumps(job), out), seconds=seconds, environment=environment)
        return json.loads((Path(out) / _FOUND).read_text())


def take_part(
    work: Callable[[Session, dict[str, Any]], Any],
    config: Callable[[dict[str, Any]], ParallelConfig] = lambda job: ParallelConfig(launcher=Launcher.torchrun),
) -> None:
    """Run this rank's part of the job on the command line, with one thread. Rank 0 writes the result of `work`.

    Args:
        work: the function that does the work.
        config: returns the parallel settings of a job.
    """
    job, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    keep_freed_memory()
    with start(config(job)) as session:
        found = work(session, job)
        if session.first:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _FOUND).write_text(json.dumps(found))
