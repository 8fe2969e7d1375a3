"""One rank of the benchmark of the spatial partition: `python -m benchmarks.spatial.worker JOB OUT`.

JOB is a JSON object with `work`, the degrees `lat` and `lon`, and settings. Rank 0 writes the result to
OUT/results.json.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from benchmarks.common.jobs import take_part
from benchmarks.spatial import exactness, memory, periodic, rivals, steps
from ensemble_ml.config import Backend, Launcher, ParallelConfig
from ensemble_ml.distributed import Session

WORK: dict[str, Callable[[Session, dict[str, Any]], Any]] = {
    "convolutions": exactness.convolutions,
    "networks": exactness.networks,
    "rivals": rivals.convolutions,
    "steps": steps.race,
    "memory": memory.activations,
    "periodic": periodic.race,
}


def _config(job: dict[str, Any]) -> ParallelConfig:
    # `hosts` sets the variables of torchrun, whatever a launcher above has set.
    return ParallelConfig(
        lat=job["lat"], lon=job["lon"], launcher=Launcher.torchrun, backend=Backend.gloo, timeout=600.0, silence=60.0
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    take_part(lambda session, job: WORK[job["work"]](session, job), _config)
