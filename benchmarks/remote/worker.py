"""One host of the benchmark: `python -m benchmarks.remote.worker JOB FOLDER`.

Host 0 runs the entrants by turns, each in a process of its own, and writes what they return to FOLDER/rows.json. Host 1
serves the archive until then. JOB is a JSON object with `archive` (a Zarr store), `output`, `seconds` (before each
answer), `repeats` and `entrants`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import process
from benchmarks.common.hosts import address_of
from benchmarks.remote.server import Plan, serving
from ensemble_ml.folders import write_whole

ROWS = "rows.json"
_PORT = 8765
_LOOK = 0.2  # seconds between looks whether the other host is ready


def main() -> None:
    """Do the part of this host."""
    job, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    address = address_of(1)
    if os.environ["RANK"] == "1":
        archive = Path(job["archive"])
        with serving(archive.parent, Plan(seconds=job["seconds"]), (address, _PORT)):
            while not (folder / ROWS).exists():
                time.sleep(_LOOK)
        return
    _wait_for(address)
    rows = None
    try:
        rows = _rows(job, f"http://{address}:{_PORT}")
    finally:
        write_whole(folder / ROWS, json.dumps(rows))  # after an error, too, or the server would go on for hours


def _rows(job: dict[str, Any], url: str) -> list[dict[str, Any]]:
    """Return what each entrant returns, by turns."""
    rows = []
    for turn in range(job["repeats"]):
        for name in job["entrants"]:
            output = Path(job["output"]) / f"{name}.zarr"
            source = f"{url}/{Path(job['archive']).name}"
            found = process.run("remote.entrants", name, url=source, output=str(output))
            rows.append({"name": name, "turn": turn} | found)
    return rows


def _wait_for(address: str) -> None:
    """Wait until the other host serves."""
    for _ in range(300):
        try:
            socket.create_connection((address, _PORT), timeout=1).close()
            return
        except OSError:
            time.sleep(_LOOK)
    raise TimeoutError(f"{address} does not answer")


if __name__ == "__main__":
    main()
