"""Give training its batches: `loading=clairvoyant` reads by plan, `loading=torch` uses torch's DataLoader.

`PlannedLoader` and `TorchLoader` give the same batches for the same schedule. Training knows them only by the protocol
`RunLoader`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ensemble_ml.config import Assign, LoadingConfig
from ensemble_ml.errors import UserError
from ensemble_ml.loading.arena import PAGE
from ensemble_ml.loading.batches import Batch, Device, Draw, Schedule, collate
from ensemble_ml.loading.counters import Counters, Timeline
from ensemble_ml.loading.plan import Room
from ensemble_ml.loading.planned import Engine
from ensemble_ml.loading.reader import Reader
from ensemble_ml.loading.unit_cache import UnitCache
from ensemble_ml.loading.unit_peers import UnitPeers
from ensemble_ml.loading.unit_plan import Trace, UnitPlan, Units
from ensemble_ml.loading.wire import Gather
from ensemble_ml.machine import free_memory

log = logging.getLogger(__name__)


class RunLoader(Protocol):
    """The interface of the batches of one rank, each used once, in the order of the schedule."""

    counters: Counters

    def train(self) -> Iterator[Batch]:
        """Yield the batches of the training steps. A loader that reads by plan stops at the next validation."""

    def validation(self, step: int) -> Iterator[Batch]:
        """Yield the batches of the validation after `step` steps."""

    def close(self) -> None:
        """End threads and processes, and free the memory. Calling it again does nothing."""


@dataclass(frozen=True)
class Lane:
    """A group of ranks that read the same rows and may send each other cache units.

    Attributes:
        coordinate: Data coordinate of this rank: which share of each batch it reads.
        column: Position of this rank among those that share its data coordinate (the ranks along longitude).
        parts: Number of data coordinates.
        columns: Number of ranks of one data coordinate.
        gather: All-gather of bytes over the group, in the order of `coordinate * columns + column`; None for a single
            rank.
        on_host: Number of ranks that share the memory of this host.
        number: Number of this rank in the job, if it differs from its number in the group; else None.
    """

    coordinate: int = 0
    column: int = 0
    parts: int = 1
    columns: int = 1
    gather: Gather | None = None
    on_host: int = 1
    number: int | None = None

    @property
    def ranks(self) -> int:
        """Return the number of ranks in the group."""
        return self.parts * self.columns

    @property
    def rank(self) -> int:
        """Return the number of this rank in the group."""
        return self.coordinate * self.columns + self.column

    def least(self, value: int) -> int:
        """Return the smallest `value` of all ranks in the group. All of them must call it."""
        return value if self.gather is None else min(int(text) for text in self.gather(str(value).encode()))


class PlannedLoader:
    """A loader that reads by plan (implements `RunLoader`).

    Args:
        schedule: All batches of the run, in order.
        device: Device to which batches are copied.
        lane: Ranks that read the same rows.
        timeline: File for a picture of what the threads did and when; None draws none.
        meets: Function that takes a number of steps and returns whether all ranks wait for each other after that many.
            It is called only if `slack` is above 0.
        slack: Number of steps that ranks may be apart.

    Raises:
        UserError: The store lacks data of the run or is damaged, the cache folder cannot be written, or ranks have
            planned different runs.
    """

    def __init__(
        self, config: LoadingConfig, schedule: Schedule, reader: Reader, device: Device, lane: Lane,
        timeline: Path | None = None, *, meets: Callable[[int], bool] = lambda step: True, slack: int = 0,
    ):  # fmt: skip
        self.plan, units, self.schedule, ahead = make_plan(config, schedule, reader, lane, slack)
        self.timeline = Timeline(timeline)
        self._peers: UnitPeers | None = None
        self._engine: Engine | None = None
        self.cache = UnitCache(self.plan, lane.rank, units, folder=config.folder, timeline=self.timeline)
        self.counters = self.cache.counters
        try:
            if lane.gather is not None:
                self._peers = UnitPeers(self.cache, lane.gather, config.host, config.node, lane.number)
                self.cache.others = self._peers
            self._engine = Engine(
                self.schedule, self.cache, coordinate=lane.coordinate, device=device, ahead=ahead,
                threads=config.threads, alone=lane.ranks == 1, meets=meets if slack else None,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def train(self) -> Iterator[Batch]:
        """Yield the batches of the training steps, up to the next validation."""
        assert self._engine is not None
        while (batch := self._engine.next(False)) is not None:
            yield batch

    def validation(self, step: int) -> Iterator[Batch]:
        """Yield the batches of the validation after `step` steps."""
        assert self._engine is not None
        while (batch := self._engine.next(True, step)) is not None:
            yield batch

    def close(self) -> None:
        """End threads and connections, and free the memory. Draw the timeline."""
        if (self._engine is None or self._engine.close()) and (self._peers is None or self._peers.close()):
            self.cache.close()  # else the threads that still run may use it
        try:
            self.timeline.draw()
        except UserError as error:  # a missing picture is no reason to let a run fail
            log.warning("%s", error)


def _stand_apart(_: int) -> None:
    """Take a worker process out of the process group of its run.

    A signal to the whole group (scancel, Ctrl-C) is meant for the run, which answers it with a checkpoint. A worker
    that died of the signal would end the run before that. The worker ends when the run has ended.
    """
    os.setpgid(0, 0)


class TorchLoader:
    """A loader on torch's DataLoader that reads batches in the order of use (implements `RunLoader`).

    Of the settings, `workers` and `ahead` apply. `part` is the data coordinate of this rank.
    """

    def __init__(self, config: LoadingConfig, schedule: Schedule, reader: Reader, part: int = 0):
        self.counters = Counters()
        self._workers, self._ahead = config.workers, config.ahead
        self._schedule, self._reader, self._part = schedule, reader, part
        self._open: list[Any] = []

    def train(self) -> Iterator[Batch]:
        """Return the batches of all training steps."""
        batches = self._schedule.batches
        return self._loader(Steps(self._schedule, self._part), range(batches.start_step, batches.steps))

    def validation(self, step: int) -> Iterator[Batch]:
        """Return the batches of the validation after `step` steps, which are the same after any step."""
        groups = list(self._schedule.validation)[self._part :: self._schedule.parts]
        return self._loader(Groups(self._reader, groups), range(len(groups)))

    def _loader(self, dataset: Dataset[Batch], order: range) -> Iterator[Batch]:
        """Start the worker processes for the items `order` of a dataset, and return their batches."""
        loader = DataLoader(
            Answers(dataset),
            batch_size=None,
            sampler=order,
            num_workers=self._workers,
            prefetch_factor=-(-self._ahead // self._workers) if self._workers else None,  # of each worker
            generator=torch.Generator(),  # else it would draw from the generator of training
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            worker_init_fn=_stand_apart,
        )
        self._open.append(found := iter(loader))  # worker processes begin at once
        return self._to_its_end(found)

    def _to_its_end(self, batches: Iterator[Batch | UserError]) -> Iterator[Batch]:
        """Yield the batches, and drop the iterator after the last one: it holds the pipes of its worker processes."""
        for found in batches:
            if isinstance(found, UserError):
                raise found
            yield found
        if batches in self._open:
            self._open.remove(batches)

    def close(self) -> None:
        """End the worker processes."""
        for iterator in self._open:
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
        self._open.clear()


class Steps(Dataset[Batch]):
    """A dataset of the training batches, by the number of the global step."""

    def __init__(self, schedule: Schedule, part: int):
        self._batches, self._parts, self._part = schedule.batches, schedule.parts, part

    def __getitem__(self, step: int) -> Batch:
        draws = self._batches.draws(step, self._parts)[self._part]
        return collate(self._batches.reader, draws or [self._batches.stand_in(step)], idle=not draws)


class Groups(Dataset[Batch]):
    """A dataset of the validation batches, by their number."""

    def __init__(self, reader: Reader, groups: Sequence[Sequence[Draw]]):
        self._reader, self._groups = reader, groups

    def __getitem__(self, number: int) -> Batch:
        return collate(self._reader, self._groups[number])


class Answers(Dataset[Batch | UserError]):
    """A dataset that returns a UserError in place of the batch that raised it.

    An error that a worker process raises would come out of torch's DataLoader with the worker's traceback in its text.
    """

    def __init__(self, dataset: Dataset[Batch]):
        self._dataset = dataset

    def __getitem__(self, number: int) -> Batch | UserError:
        try:
            return self._dataset[number]
        except UserError as error:
            return error


def _as_it_is(found: Batch | UserError) -> Batch | UserError:
    """Return a batch unchanged: an item of the dataset is a whole batch already."""
    return found


def make_plan(
    config: LoadingConfig, schedule: Schedule, reader: Reader, lane: Lane, slack: int = 0
) -> tuple[UnitPlan, Units, Schedule, int]:
    """Plan the loading of a run, whose ranks may be `slack` steps apart.

    Returns:
        The plan, its units, the schedule for which it is made (with `holders` where `assign` is `locality`), and the
        number of batches ahead that the memory allows.

    Raises:
        UserError: The store lacks data of the run, or a shard is damaged.
    """
    units = Units(reader, schedule.dates)
    homes = schedule.homes()
    if config.assign is Assign.locality:
        schedule = replace(schedule, holders=homes[np.searchsorted(units.dates, schedule.batches.dates)])
    trace = Trace.of(schedule, units)
    # Packed bytes of each turn of this rank, and of its whole validation: they need memory besides the cache.
    used = trace.user == lane.coordinate
    own = np.bincount(trace.turn[used], units.sizes[trace.unit[used]])
    mine = [draw for group in list(schedule.validation)[lane.coordinate :: schedule.parts] for draw in group]
    together = sum(int(units.sizes[units.of(draw)].sum()) for draw in mine) // lane.columns if lane.ranks > 1 else 0
    # If ranks meet (wait for each other) only after some steps, the units that are read between two meetings stay in
    # memory until the meeting after those two.
    together += 2 * slack * int(own.max(initial=0))
    room, ahead = cache_room(config, schedule, reader, lane, int(own.max(initial=0)), together)
    # The dates of one data coordinate are spread over its columns, so that each column holds a share of them.
    home = np.repeat(homes * lane.columns + np.arange(len(homes)) % lane.columns, units.each)
    # The plan must be the same on all ranks, so the rank with the least memory decides.
    tiers = Room(lane.least(room), lane.least(config.disk_bytes))
    plan = UnitPlan(trace, units.sizes, home, tiers, lane.columns, lane.ranks)
    if not plan.exact:
        log.info("loading: too many reads (%d) to plan each; the cache holds what is read most", len(trace.unit))
    return plan, units, schedule, lane.least(ahead)


def cache_room(
    config: LoadingConfig, schedule: Schedule, reader: Reader, lane: Lane, packed: int, together: int = 0
) -> tuple[int, int]:
    """Divide `loading.ram`, or this rank's share of half of the free memory, between the cache and everything else.

    The decoded batches, the memory into which threads decode, and packed units that are being read come first: at most
    `packed` bytes for each batch. The cache gets the rest, less the units that wait to enter it. Units wait until all
    ranks have passed their turn. The turns of a validation, and those of the steps between meetings of the ranks, are
    passed together, and have `together` packed bytes. Waiting units take at most as many bytes as the cache itself, so
    the cache gets at least half of the rest.

    Returns:
        Bytes of the cache in whole pages, and number of batches to prepare ahead.
    """
    total = config.ram_bytes
    if total is None:
        total = free_memory() // 2 // lane.on_host
    batch, scratch = decoded_bytes(schedule, reader, lane)
    # If memory is short, fewer batches are prepared ahead. If even one does not fit, the run goes on without a cache,
    # and a warning says so.
    for ahead in range(config.ahead, 0, -1):
        needed = (ahead + 1) * (batch + packed) + packed + config.threads * scratch
        if needed <= total:
            break
    else:
        log.warning(
            "loading.ram=%s: one batch ahead takes %.0f MB, so nothing is cached; give more, or a smaller batch_size",
            config.ram, needed / 1e6,
        )  # fmt: skip
    left = max(0, total - needed)
    return max(left - together, left // 2) // PAGE * PAGE, ahead


def decoded_bytes(schedule: Schedule, reader: Reader, lane: Lane) -> tuple[int, int]:
    """Estimate the bytes of the largest decoded batch of one rank, and those that a thread needs to decode a sample."""
    spec = reader.spec
    (top, bottom), (left, right) = reader.window
    field = 4 * (bottom - top) * (right - left)
    members = max(schedule.batches.sizes, default=1)
    # Mean and spread, and what else the model takes.
    inputs = 2 + spec.config.one_member + (members if spec.takes_members else 0) + bool(spec.masked)
    targets = spec.config.postprocess + spec.config.spread
    sample = field * spec.fields * (inputs * len(spec.leads_in) + targets * len(spec.leads_out))
    validated = max((len(group) for group in schedule.validation), default=0)
    most = max(-(-min(schedule.batches.order.batch_size, schedule.batches.order.n) // lane.parts), validated)
    cut = field * spec.fields * len(spec.leads_in)  # one member, columns of this rank
    whole = cut * spec.grid.shape[1] // (right - left)  # one member, all columns
    read = members + (reader.withhold is not None)  # a withheld member, which stands for the truth, is read as well
    beside = read * ((cut if whole > cut else 0) + (whole // 4 if spec.masked else 0))  # copies of the cut, and masks
    rounded = 2 if torch.cuda.is_available() else 1  # torch rounds pinned memory up to a power of two
    return rounded * most * sample, (read + 6) * whole + beside + sample
