"""Read batches from slow storage as one of several trainers: `python -m benchmarks.tournament.worker JOB FOLDER`.

JOB is a JSON object with its settings. A step sleeps, as a step on a GPU leaves the processor to the loader. Rank 0
writes the result, for all trainers, to FOLDER/results.json.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common.jobs import take_part
from benchmarks.lion.trials import quickstart_config
from ensemble_ml.config import Launcher, LoadingConfig, ParallelConfig, TournamentConfig, TournamentData
from ensemble_ml.distributed import Session
from ensemble_ml.loading import Reader
from ensemble_ml.loading.batches import Device, Schedule
from ensemble_ml.loading.run_loader import Lane, PlannedLoader, cache_room
from ensemble_ml.loading.unit_plan import Units
from ensemble_ml.store import open_store
from ensemble_ml.training import setup
from ensemble_ml.training.assemble import batches_of

_DATES = 24  # init times, so that twenty epochs do not take long
_HUGE = 2**40
_MORE = 1.05  # parts of the dates differ a little in their bytes, and caches end at pages


def work(session: Session, job: dict[str, Any]) -> dict[str, Any]:
    """Read all batches of this trainer, and return samples a second of all trainers, and the bytes of all dates."""
    trainers, own = session.topology.trainer, session.topology.place.trainer
    config = quickstart_config(job["store"], seed=0, steps=1, optim={})
    tournament = TournamentConfig(every=config.validate_every, data=TournamentData(job["data"]))
    source = open_store(job["store"])
    reader = Reader(source, setup.build_spec(config, source))
    full = reader.full_size
    data = replace(config.data, members=[full])
    if trainers > 1:
        config = replace(config, parallel=ParallelConfig(trainer=trainers), tournament=tournament)
    config = replace(config, data=data, batch_size=1, steps=job["samples"] // trainers)
    train, _ = setup.split_dates(config.data, source.layout.init_time)
    dates = setup.own_dates(config, train[:_DATES], own)
    schedule = Schedule(batches_of(setup.own_settings(config, own, own), reader, dates, 0, config.steps), parts=1)
    sizes = Units(reader, train[:_DATES]).sizes.reshape(_DATES, -1).sum(1)
    # What passes through memory beside the cache is given to all alike, whatever it takes.
    loading = LoadingConfig(ram=_HUGE, ahead=2, threads=1)
    beside = _HUGE - cache_room(loading, schedule, reader, Lane(), int(sizes.max()))[0]
    loading = replace(loading, ram=int(beside + _MORE * sizes.sum() / job["quarter"]))
    loader = PlannedLoader(loading, schedule, reader, Device(torch.device("cpu"), torch.float32), Lane())
    session.mesh.world.barrier()
    start, count = time.perf_counter(), 0
    for batch in loader.train():
        count += len(batch)
        time.sleep(job["step"])
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    read = torch.tensor(float(loader.counters.snapshot()["storage"]), dtype=torch.float64)
    loader.close()
    session.mesh.world.all_reduce(seconds, op="max")
    session.mesh.world.all_reduce(read)
    return {"rate": trainers * count / float(seconds), "read": float(read), "bytes": float(sizes.sum())}


def _parallel(job: dict[str, Any]) -> ParallelConfig:
    """Return the ranks of a job: a rank a trainer."""
    return ParallelConfig(launcher=Launcher.torchrun, trainer=job["trainers"])


if __name__ == "__main__":
    take_part(work, _parallel)
