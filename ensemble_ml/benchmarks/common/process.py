"""Entrants run in processes of their own, so that memory is theirs alone and no import helps or hinders another.

`python -m ensemble_ml.benchmarks.common.process MODULE FUNCTION ARGUMENTS` calls a function of a module of the
benchmarks with keyword arguments given as JSON and prints, as its last line, what it returned (a dictionary) with
`peak_bytes`: the largest resident memory of the process (VmHWM), or of a child of it where that is larger.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
from typing import Any

from ensemble_ml.benchmarks.common.status import process_bytes
from ensemble_ml.errors import UserError

_PACKAGE = "ensemble_ml.benchmarks"


def run(module: str, function: str, *, cores: int = 2, **arguments: Any) -> dict[str, Any]:
    """Call `function` of `ensemble_ml.benchmarks.MODULE` in a new process that may use `cores` cores.

    Raises:
        UserError: it failed; its last line of standard error is passed on.
    """
    command = [sys.executable, "-m", f"{_PACKAGE}.common.process", module, function, json.dumps(arguments)]
    environment = os.environ | {"ENSEMBLE_ML_CORES": str(cores), "OMP_NUM_THREADS": str(cores)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise UserError(f"benchmark: {module}.{function} failed: {said[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def peak_bytes() -> int:
    """Largest resident memory so far of this process or of a finished child."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    own = process_bytes("VmHWM")  # ru_maxrss of the process itself counts what its parent had, too
    return max(own, children)


def bytes_read() -> int:
    """Bytes that this process has asked the system for so far, from whatever file (/proc/self/io, rchar)."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar"))


def main() -> None:
    """Do what the command line says."""
    module, function, arguments = sys.argv[1:]
    cores = sorted(os.sched_getaffinity(0))[: int(os.environ["ENSEMBLE_ML_CORES"])]
    os.sched_setaffinity(0, cores)
    found = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), function)(**json.loads(arguments))
    print(json.dumps({**(found or {}), "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
