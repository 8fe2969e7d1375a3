"""What training asks for its batches: `loading=clairvoyant` reads by plan, `loading=torch` with torch's DataLoader."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ensemble_ml.config import Assign, LoadingConfig
from ensemble_ml.errors import UserError
from ensemble_ml.loading.batches import Batch, Draw, collate
from ensemble_ml.loading.counters import Counters
from ensemble_ml.loading.device import Device
from ensemble_ml.loading.plan import Room
from ensemble_ml.loading.planned import Engine
from ensemble_ml.loading.reader import Reader
from ensemble_ml.loading.schedule import Schedule
from ensemble_ml.loading.timeline import Timeline
from ensemble_ml.loading.unit_cache import UnitCache
from ensemble_ml.loading.unit_peers import UnitPeers
from ensemble_ml.loading.unit_plan import PAGE, Trace, UnitPlan
from ensemble_ml.loading.units import Units
from ensemble_ml.loading.wire import Gather
from ensemble_ml.machine import free_memory

log = logging.getLogger(__name__)


class RunLoader(Protocol):
    """The batches of one rank, each used once, in the order of the schedule."""

    counters: Counters

    def train(self) -> Iterator[Batch]:
        """Batches of the training steps."""

    def validation(self, step: int) -> Iterator[Batch]:
        """Batches of the validation after `step` steps."""

    def close(self) -> None:
        """End threads and processes, give back memory; harmless when called again."""


@dataclass(frozen=True)
class Lane:
    """The ranks that read the same rows, between which units may travel: this one is at `coordinate`, `column`.

    `gather` brings the bytes of every rank of the lane to all, in the order of `coordinate * columns + column`.
    """

    coordinate: int = 0
    column: int = 0
    parts: int = 1
    columns: int = 1
    gather: Gather | None = None
    on_host: int = 1  # ranks that share this host's memory
    number: int | None = None  # this rank's in the job, where that is not its number in the lane

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.parts * self.columns

    @property
    def rank(self) -> int:
        """This one among them."""
        return self.coordinate * self.columns + self.column

    def least(self, value: int) -> int:
        """The smallest that any rank has."""
        return value if self.gather is None else min(int(text) for text in self.gather(str(value).encode()))


class PlannedLoader:
    """Batches by plan (implements `RunLoader`).

    Raises:
        UserError: settings that do not fit the store, or ranks that differ in them.
    """

    def __init__(
        self,
        config: LoadingConfig,
        schedule: Schedule,
        reader: Reader,
        device: Device,
        lane: Lane,
        timeline: Path | None = None,
    ):
        self.plan, units, self.schedule, ahead = make_plan(config, schedule, reader, lane)
        self.timeline = Timeline(timeline)
        self._peers: UnitPeers | None = None
        self._engine: Engine | None = None
        self.cache = UnitCache(self.plan, lane.rank, units, folder=config.folder, timeline=self.timeline)
        self.counters = self.cache.counters
        try:
            if lane.gather is not None:
                self.cache.others = self._peers = UnitPeers(
                    self.cache, lane.gather, config.host, config.node, lane.number
                )
            self._engine = Engine(
                self.schedule, self.cache, coordinate=lane.coordinate, device=device, ahead=ahead,
                threads=config.threads, alone=lane.ranks == 1,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def train(self) -> Iterator[Batch]:
        """Batches of the training steps."""
        assert self._engine is not None
        while (batch := self._engine.next(False)) is not None:
            yield batch

    def validation(self, step: int) -> Iterator[Batch]:
        """Batches of the validation after `step` steps."""
        assert self._engine is not None
        while (batch := self._engine.next(True, step)) is not None:
            yield batch

    def close(self) -> None:
        """End threads and connections, give back memory."""
        ended = (self._engine is None or self._engine.close()) and (self._peers is None or self._peers.close())
        if ended:  # else the threads that are left write to it
            self.cache.close()
        try:
            self.timeline.draw()
        except UserError as error:  # a picture less is no reason to end a run otherwise
            log.warning("%s", error)


def _stand_apart(_: int) -> None:
    """Take a worker out of the process group of its run: a signal to all of that (scancel, Ctrl-C) is for the run to
    answer, by a checkpoint; a worker that dies of it would end the run before. It ends when the run has."""
    os.setpgid(0, 0)


class TorchLoader:
    """Batches by torch's DataLoader, each read when its turn has come (implements `RunLoader`)."""

    def __init__(self, config: LoadingConfig, schedule: Schedule, reader: Reader, part: int = 0):
        self.counters = Counters()
        self._workers, self._ahead = config.workers, config.ahead
        self._schedule, self._reader, self._part = schedule, reader, part
        self._open: list[Any] = []

    def train(self) -> Iterator[Batch]:
        """Batches of the training steps."""
        batches = self._schedule.batches
        return self._loader(Steps(self._schedule, self._part), range(batches.start_step, batches.steps))

    def validation(self, step: int) -> Iterator[Batch]:
        """Batches of the validation after `step` steps."""
        groups = list(self._schedule.validation)[self._part :: self._schedule.parts]
        return self._loader(Groups(self._reader, groups), range(len(groups)))

    def _loader(self, dataset: Dataset[Batch], order: range) -> Iterator[Batch]:
        loader = DataLoader(
            Answers(dataset),
            batch_size=None,
            sampler=order,
            num_workers=self._workers,
            prefetch_factor=-(-self._ahead // self._workers) if self._workers else None,  # of each worker
            generator=torch.Generator(),  # else it draws from the one that training uses
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            worker_init_fn=_stand_apart,
        )
        self._open.append(found := iter(loader))  # worker processes begin at once
        return self._to_its_end(found)

    def _to_its_end(self, batches: Iterator[Batch | UserError]) -> Iterator[Batch]:
        """Let go of an iterator that has ended: each of them holds the pipes of its worker processes.

        Raises:
            UserError: what a batch's turn gave in its place.
        """
        for found in batches:
            if isinstance(found, UserError):
                raise found
            yield found
        if batches in self._open:
            self._open.remove(batches)

    def close(self) -> None:
        """End worker processes."""
        for iterator in self._open:
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
        self._open.clear()


class Steps(Dataset[Batch]):
    """The batch of each global step, by its number."""

    def __init__(self, schedule: Schedule, part: int):
        self._batches, self._parts, self._part = schedule.batches, schedule.parts, part

    def __getitem__(self, step: int) -> Batch:
        draws = self._batches.draws(step, self._parts)[self._part]
        return collate(self._batches.reader, draws or [self._batches.stand_in(step)], idle=not draws)


class Groups(Dataset[Batch]):
    """The validation batches, by their number."""

    def __init__(self, reader: Reader, groups: Sequence[Sequence[Draw]]):
        self._reader, self._groups = reader, groups

    def __getitem__(self, number: int) -> Batch:
        return collate(self._reader, self._groups[number])


class Answers(Dataset[Batch | UserError]):
    """The same batches; an error for the user takes the place of its batch, since what a worker process raises comes
    out of torch's DataLoader with the worker's traceback in its text."""

    def __init__(self, dataset: Dataset[Batch]):
        self._dataset = dataset

    def __getitem__(self, number: int) -> Batch | UserError:
        try:
            return self._dataset[number]
        except UserError as error:
            return error


def _as_it_is(found: Batch | UserError) -> Batch | UserError:
    return found


def make_plan(
    config: LoadingConfig, schedule: Schedule, reader: Reader, lane: Lane
) -> tuple[UnitPlan, Units, Schedule, int]:
    """The plan, its units, the schedule that it is for, and the look-ahead that its memory allows."""
    units = Units(reader, schedule.dates)
    homes = schedule.homes()
    if config.assign is Assign.locality:
        schedule = replace(schedule, holders=homes[np.searchsorted(units.dates, schedule.batches.dates)])
    trace = Trace.of(schedule, units)
    own = np.bincount(trace.turn[trace.user == lane.coordinate], units.sizes[trace.unit[trace.user == lane.coordinate]])
    mine = [draw for group in list(schedule.validation)[lane.coordinate :: schedule.parts] for draw in group]
    together = sum(int(units.sizes[units.of(draw)].sum()) for draw in mine) // lane.columns if lane.ranks > 1 else 0
    room, ahead = cache_room(config, schedule, reader, lane, int(own.max(initial=0)), together)
    home = np.repeat(homes * lane.columns + np.arange(len(homes)) % lane.columns, units.each)
    tiers = Room(lane.least(room), lane.least(config.disk_bytes))
    plan = UnitPlan(trace, units.sizes, home, tiers, lane.columns, lane.ranks)
    if not plan.exact:
        log.info("loading: %d uses are too many to plan each; what is used most is held", len(trace.unit))
    return plan, units, schedule, lane.least(ahead)


def cache_room(
    config: LoadingConfig, schedule: Schedule, reader: Reader, lane: Lane, packed: int, together: int = 0
) -> tuple[int, int]:
    """Bytes of memory for the cache, and batches of look-ahead.

    `loading.ram` is for all of it: the ring of decoded batches, what threads decode into, packed units on their way
    (`packed` bytes a batch at most), and the cache, which gets what is left. The turns of a validation pass `together`:
    of their bytes, those that the cache shall hold wait beside it, so as much as it holds at most.
    """
    total = config.ram_bytes
    if total is None:
        total = free_memory() // 2 // lane.on_host
    batch, scratch = decoded_bytes(schedule, reader, lane)
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
    """Bytes of a decoded batch of one rank, and of what a thread needs while it decodes a sample."""
    spec = reader.spec
    (top, bottom), (left, right) = reader.window
    field = 4 * (bottom - top) * (right - left)
    members = max(schedule.batches.sizes, default=1)
    inputs = 2 + spec.config.one_member + (members if spec.takes_members else 0) + bool(spec.masked)
    targets = spec.config.postprocess + spec.config.spread
    sample = field * spec.fields * (inputs * len(spec.leads_in) + targets * len(spec.leads_out))
    validated = max((len(group) for group in schedule.validation), default=0)
    most = max(-(-min(schedule.batches.order.batch_size, schedule.batches.order.n) // lane.parts), validated)
    cut = field * spec.fields * len(spec.leads_in)  # of one member
    whole = cut * spec.grid.shape[1] // (right - left)  # before columns are cut
    beside = members * ((cut if whole > cut else 0) + (whole // 4 if spec.masked else 0))  # the cut, the mask
    rounded = 2 if torch.cuda.is_available() else 1  # at most: torch pins memory in powers of two
    return rounded * most * sample, (members + 6) * whole + beside + sample
