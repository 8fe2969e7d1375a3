"""Run entrants in their own processes, so that memory and imports of one do not affect another.

`python -m benchmarks.common.process MODULE FUNCTION ARGUMENTS` calls a function of a module of `benchmarks`, with
keyword arguments given as JSON. Its last line of output is the dictionary that the function returned, with
`peak_bytes`: the largest resident memory of the process (VmHWM), or of a child if that is larger.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
from typing import Any

from benchmarks.common.status import process_bytes
from ensemble_ml.errors import UserError


def run(module: str, function: str, *, cores: int = 2, **arguments: Any) -> dict[str, Any]:
    """Call a function of `benchmarks.MODULE` in a new process.

    Args:
        module: the module, such as `prepare.conversion`.
        function: the function, which returns a dict or None.
        cores: number of cores that the process may use.
        **arguments: arguments of the function, which JSON can hold.

    Returns:
        The result of the function, with `peak_bytes`.

    Raises:
        UserError: the function failed; the message holds its last line of standard error.
    """
    command = [sys.executable, "-m", "benchmarks.common.process", module, function, json.dumps(arguments)]
    environment = os.environ | {"ENSEMBLE_ML_CORES": str(cores), "OMP_NUM_THREADS": str(cores)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise UserError(f"benchmark: {module}.{function} failed: {said[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def peak_bytes() -> int:
    """Return the largest resident memory so far of this process, or of a child that has ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    own = process_bytes("VmHWM")  # ru_maxrss of the process itself includes what its parent had
    return max(own, children)


def bytes_read() -> int:
    """Return the bytes that this process has read so far from any file (/proc/self/io, rchar)."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar"))


def main() -> None:
    """Run the function that the command line names."""
    module, function, arguments = sys.argv[1:]
    cores = sorted(os.sched_getaffinity(0))[: int(os.environ["ENSEMBLE_ML_CORES"])]
    os.sched_setaffinity(0, cores)
    found = getattr(importlib.import_module(f"benchmarks.{module}"), function)(**json.loads(arguments))
    print(json.dumps({**(found or {}), "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
