"""One rank of the benchmark of the planner: `python -m benchmarks.planner.worker JOB FOLDER`.

JOB is a JSON object with `cases` (name, shape, model settings, batch), `repeats`, `seconds`, `cache` for times and
`followed` for the messages of a step. Rank 0 writes the predictions and the measured steps of every partition of every
case to FOLDER/results.json.
"""

from __future__ import annotations

import gc
import pickle
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.jobs import take_part
from benchmarks.step.benchmark import benchmark_spec
from ensemble_ml.config import ExchangeName, OptimConfig, ParallelConfig, PlanSettings, Precision, TrainConfig
from ensemble_ml.distributed import Communicator, Session
from ensemble_ml.distributed.choice import make_exchange
from ensemble_ml.distributed.mesh import Members, make_mesh
from ensemble_ml.distributed.planner import Candidate, pick
from ensemble_ml.models import ModelSpec, Speed
from ensemble_ml.training.plan import Planner
from ensemble_ml.training.probing import stepper
from ensemble_ml.training.rehearsal import Rehearsal

_TURN = 3  # steps of a partition in a turn; the first of them brings its memory back


def compare(session: Session, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Predict and measure the seconds of a step, for all partitions of all cases.

    Args:
        session: the ranks.
        job: the settings described at the head of this file.

    Returns:
        One row for each case and partition.
    """
    meshes: dict[Members, Communicator] = {}
    found = []
    for case in job["cases"]:
        spec = benchmark_spec(*case["shape"], precision=Precision.float32, **case["model"])
        optim = OptimConfig(exchange=ExchangeName(case["exchange"]))
        config = TrainConfig(
            run="benchmark",
            batch_size=case["batch"],
            model=spec.config,
            optim=optim,
            parallel=ParallelConfig(data="auto", lat="auto", lon="auto"),
        )
        settings = PlanSettings(seconds=job["seconds"], cache=job["cache"])
        followed = Path(job["followed"]) / f"{case['name']}.pickle"  # the messages of a step do not depend on the rate
        known = pickle.loads(followed.read_bytes()) if session.first and followed.exists() else {}
        planner = Planner(config, spec, settings, session, session.world.size, known)
        planned = planner.candidates()
        if session.first:
            followed.write_bytes(pickle.dumps(planner.known))
        best = pick(planned)
        fitting = [candidate for candidate in planned if not candidate.why]
        times = measured(config, spec, fitting, session, meshes, job["repeats"])
        for candidate, seconds in zip(fitting, times, strict=True):
            assert candidate.cost is not None
            row = {"case": case["name"], "data": candidate.data, "lat": candidate.lat, "lon": candidate.lon}
            row |= asdict(candidate.cost) | {"predicted": candidate.cost.seconds, "measured": seconds}
            found.append(row | {"picked": candidate.degrees == best.degrees})
    return found


def measured(
    config: TrainConfig,
    spec: ModelSpec,
    candidates: Sequence[Candidate],
    session: Session,
    meshes: dict[Members, Communicator],
    repeats: int,
) -> list[list[float]]:
    """Return the seconds of a step of each partition on the slowest rank, one value for each turn.

    Partitions take turns, because the speed of the machine changes.

    Args:
        config: the settings of the training.
        spec: the inputs and outputs of the model.
        candidates: the partitions.
        session: the ranks.
        meshes: communicators that were made already, by their ranks.
        repeats: number of turns.
    """
    entrants = [_Entrant(config, spec, candidate, session, meshes) for candidate in candidates]
    times: list[list[float]] = [[] for _ in entrants]
    for _ in range(repeats + 1):
        for entrant, found in zip(entrants, times, strict=True):
            for _ in range(_TURN):
                session.mesh.world.barrier()
                slowest = torch.tensor(entrant.step()[:1], dtype=torch.float64)
                session.mesh.world.all_reduce(slowest, op="max")
                found.append(float(slowest))
    for entrant in entrants:
        entrant.exchange.close()
    del entrants, entrant
    gc.collect()
    return [[statistics.median(found[i + 1 : i + _TURN]) for i in range(_TURN, len(found), _TURN)] for found in times]


class _Entrant:
    """A partition that is ready to run steps."""

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        candidate: Candidate,
        session: Session,
        meshes: dict[Members, Communicator],
    ):
        topology = candidate.topology.at(session.topology.rank)
        mesh = make_mesh(topology, meshes)
        torch.manual_seed(0)  # the ranks start from the same weights
        rehearsal = Rehearsal(config, spec, mesh, candidate.samples, Speed(spec.config.precision), session.device)
        self.exchange = make_exchange(config.optim, topology, local_size=1)
        self.step = stepper(config.optim, rehearsal, self.exchange)


if __name__ == "__main__":
    take_part(compare)
