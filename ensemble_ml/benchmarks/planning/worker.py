"""One rank of the benchmark of the planner: `python -m ensemble_ml.benchmarks.planning.worker JOB FOLDER`.

JOB is a JSON object: `cases` (name, shape, model settings, batch), `repeats`, `seconds`, `cache`. Rank 0 writes the
predictions and the measured steps of every partition of every case to FOLDER/results.json.
"""

from __future__ import annotations

import gc
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ensemble_ml.benchmarks.common.jobs import take_part
from ensemble_ml.benchmarks.step import benchmark_spec
from ensemble_ml.config import ExchangeName, OptimConfig, ParallelConfig, PlanSettings, Precision, TrainConfig
from ensemble_ml.distributed import Communicator, Session
from ensemble_ml.distributed.choice import make_exchange
from ensemble_ml.distributed.mesh import Members, make_mesh
from ensemble_ml.distributed.planner import Candidate, pick
from ensemble_ml.models import ModelSpec, Speed
from ensemble_ml.training.plan import Planner
from ensemble_ml.training.probing import stepper
from ensemble_ml.training.rehearsal import Rehearsal


def compare(session: Session, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted and measured seconds of a step, for all partitions of all cases."""
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
        followed = Path(job["cache"]) / f"{case['name']}.pickle"  # what a step sends does not depend on the rate
        known = pickle.loads(followed.read_bytes()) if session.first and followed.exists() else {}
        planner = Planner(config, spec, settings, session, session.world.size, known)
        planned = planner.candidates()
        if session.first:
            followed.parent.mkdir(parents=True, exist_ok=True)
            followed.write_bytes(pickle.dumps(planner.known))
        best = pick(planned)
        for candidate in (c for c in planned if not c.why):
            seconds = measured(config, spec, candidate, session, meshes, job["repeats"])
            assert candidate.cost is not None
            row = {"case": case["name"], "data": candidate.data, "lat": candidate.lat, "lon": candidate.lon}
            row |= asdict(candidate.cost) | {"predicted": candidate.cost.seconds, "measured": seconds}
            found.append(row | {"picked": candidate.degrees == best.degrees})
    return found


def measured(
    config: TrainConfig,
    spec: ModelSpec,
    candidate: Candidate,
    session: Session,
    meshes: dict[Members, Communicator],
    repeats: int,
) -> list[float]:
    """Seconds of the slowest rank in each step of a partition."""
    topology = candidate.topology.at(session.topology.rank)
    mesh = make_mesh(topology, meshes)
    torch.manual_seed(0)  # the ranks start from the same weights
    rehearsal = Rehearsal(config, spec, mesh, candidate.samples, Speed(spec.config.precision), session.device)
    exchange = make_exchange(config.optim, topology, local_size=1)
    step = stepper(config.optim, rehearsal, exchange)
    times = []
    for _ in range(repeats + 2):
        session.mesh.world.barrier()
        slowest = torch.tensor(step()[:1], dtype=torch.float64)
        session.mesh.world.all_reduce(slowest, op="max")
        times.append(float(slowest))
    exchange.close()
    del rehearsal, step
    gc.collect()
    return times[2:]


if __name__ == "__main__":
    take_part(compare)
