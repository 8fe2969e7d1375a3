"""One rank of the benchmark of the spatial partition: `python -m ensemble_ml.benchmarks.partitioning.worker JOB OUT`.

JOB is a JSON object with `work`, the degrees `lat` and `lon`, and settings; rank 0 writes what came out to
OUT/results.json.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ensemble_ml.benchmarks.partitioning import exactness, memory, periodic, rivals, steps
from ensemble_ml.config import Backend, ParallelConfig
from ensemble_ml.distributed import Session, start

WORK: dict[str, Callable[[Session, dict[str, Any]], Any]] = {
    "convolutions": exactness.convolutions,
    "networks": exactness.networks,
    "rivals": rivals.convolutions,
    "steps": steps.race,
    "memory": memory.activations,
    "periodic": periodic.race,
}


def main(job: dict[str, Any], folder: Path) -> None:
    """Do a rank's part of `job`."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    config = ParallelConfig(lat=job["lat"], lon=job["lon"], backend=Backend.gloo, timeout=600.0, silence=60.0)
    with start(config) as session:
        found = WORK[job["work"]](session, job)
        if session.first:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
