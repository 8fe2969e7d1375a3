"""Loaders by plan for tests: of one rank, or of several in threads of one process."""

import threading
from dataclasses import fields, replace

import numpy as np
import torch

from ensemble_ml.config import LoaderName, LoadingConfig, ModelConfig
from ensemble_ml.loading import Batches, Reader
from ensemble_ml.loading.batches import Device, Schedule, fixed_draws
from ensemble_ml.loading.run_loader import Lane, PlannedLoader, TorchLoader
from ensemble_ml.models import ModelSpec

CPU = Device(torch.device("cpu"))


def spec_of(store, **config):
    lay = store.layout
    grid = tuple(lay.grid.latitude), tuple(lay.grid.longitude)
    model = ModelConfig(**{"hidden": 8, "depth": 1} | config)
    leads_out = tuple(lead for lead in lay.lead_hours if lead > 0)
    return ModelSpec(model, lay.variables, lay.levels, lay.surface, lay.lead_hours, leads_out, *grid)


def schedule_of(reader, *, dates, validation=(), parts=1, steps=9, start_step=0, sizes=(1, 2, 4), every=4, **changes):
    settings = dict(batch_size=3, seed=5, sizes=sizes, steps=steps, start_step=start_step) | changes
    batches = Batches(reader, dates, **settings)
    members = np.arange(3)
    validated = fixed_draws(reader, validation, members, settings["batch_size"])
    return Schedule(batches, validated, every, start_step == 0, parts)


def config_of(**changes):
    return LoadingConfig(**{"ahead": 2, "threads": 2} | changes)


def tensors(batch):
    """A copy of all that is in a batch, by name."""
    found = {f.name: getattr(batch.inputs, f.name) for f in fields(batch.inputs)} | vars(batch)
    return {k: v.clone() for k, v in found.items() if isinstance(v, torch.Tensor)} | {"time": tuple(batch.init_time)}


def equal(a, b):
    return a.keys() == b.keys() and all(
        np.array_equal(a[k].numpy(), b[k].numpy(), equal_nan=True) if k != "time" else a[k] == b[k] for k in a
    )


def run(loader, schedule, after=lambda: None):
    """All batches of a loader as training asks for them: (step, whether of a validation, contents).

    `after` is called behind every step, as the exchange of gradients would be.
    """
    found = []

    def validate(step):
        found.extend((step, True, tensors(batch)) for batch in loader.validation(step))
        after()

    first, last = schedule.batches.start_step, schedule.batches.steps
    if schedule.validate_first:
        validate(first)
    batches = loader.train()
    for step in range(first, last):
        found.append((step, False, tensors(next(batches))))
        after()
        if step + 1 == last or (step + 1) % schedule.validate_every == 0:
            validate(step + 1)
    return found


def plain(schedule, reader, part=0):
    """The same by torch's DataLoader."""
    loader = TorchLoader(config_of(name=LoaderName.torch), schedule, reader, part)
    return run(loader, schedule)


class Ranks:
    """Threads that stand for ranks: an all-gather and a barrier between them."""

    def __init__(self, size):
        self.size, self.barrier, self.told = size, threading.Barrier(size, timeout=60), [b""] * size

    def gather(self, rank):
        def call(data):
            self.told[rank] = data
            self.barrier.wait()
            found = list(self.told)
            self.barrier.wait()
            return found

        return call


def run_ranks(schedule, readers, *, parts, columns=1, config=None, **changes):
    """Run every rank in a thread; returns of each its batches, its counters and its plan's traffic."""
    ranks = Ranks(parts * columns)
    schedule = replace(schedule, parts=parts)
    found = [None] * ranks.size

    def work(rank):
        lane = Lane(*divmod(rank, columns), parts, columns, ranks.gather(rank), ranks.size)
        try:
            loader = PlannedLoader(config or config_of(**changes), schedule, readers[rank], CPU, lane)
            try:
                batches = run(loader, loader.schedule, ranks.barrier.wait)
                ranks.barrier.wait()
                found[rank] = batches, loader.counters.snapshot(), loader.plan.traffic(rank), loader.plan
            finally:
                loader.close()
        except BaseException:
            ranks.barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found), "a rank failed"
    return found


def readers_of(store, ranks, **config):
    return [Reader(store, spec_of(store, **config)) for _ in range(ranks)]
