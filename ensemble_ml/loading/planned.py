"""Produce the batches of a training run in the order of its schedule.

Threads fetch packed units (`unit_plan.py`) before they are used, decode them and join them to batches. The batches lie
in a ring of page-aligned buffers, each of which is reused. On a machine with a GPU the buffers are pinned, and a
separate CUDA stream copies them to the GPU. The size of the ring limits how far ahead the threads read.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble_ml.errors import UserError
from ensemble_ml.loading.batches import Arrays, Batch, Device, Draw, Schedule, Turn, join, pages, read_sample
from ensemble_ml.loading.threads import Workers
from ensemble_ml.loading.unit_cache import UnitCache

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    """A batch in progress: a turn of the schedule, the samples decoded so far, and the batch once it is complete."""

    number: int
    turn: Turn
    draws: tuple[Draw, ...]
    idle: bool
    slot: int
    samples: list[Arrays | None]
    missing: int
    batch: Batch | None = None
    ready: Any = None


class Engine(Workers):
    """A group of threads that produce the batches of a schedule for one data coordinate.

    Args:
        schedule: Schedule of the run. The plan of `cache` must have been made for this schedule.
        coordinate: Data coordinate of this rank, which is the number of its share of each batch.
        ahead: Number of batches that are prepared ahead of the one in use.
        threads: Number of threads that fetch and decode.
        alone: True if no other rank takes units from this one. If False, the units of a batch are kept until a step or
            a meeting of all ranks shows that every rank has received the batch.
        meets: Function that takes a number of steps and returns whether all ranks wait for each other after that many.
            None if they do so in every step.
    """

    def __init__(
        self, schedule: Schedule, cache: UnitCache, *, coordinate: int, device: Device, ahead: int, threads: int,
        alone: bool, meets: Callable[[int], bool] | None = None,
    ):  # fmt: skip
        super().__init__(cache)
        self.schedule, self.cache, self._coordinate, self._device = schedule, cache, coordinate, device
        self._alone, self._meets, self._met = alone, meets, -1
        self._rings: list[dict[str, np.ndarray]] = [{} for _ in range(ahead + 1)]  # one more, for the user
        self._free = list(range(ahead + 1))
        self._jobs: deque[_Job] = deque()
        self._current: _Job | None = None
        self._passed, self._since = -1, 0.0
        self._start(threads)

    def next(self, validation: bool, step: int | None = None) -> Batch | None:
        """Return the next batch of this rank, whose memory the next call frees for reuse.

        Args:
            validation: True asks for a validation batch, False for a training batch.
            step: Number of optimizer steps done before the batch; None accepts any.

        Returns:
            The batch, or None if the next batch is of the other kind or of another step, or if the schedule has ended.

        Raises:
            UserError: The store cannot be read. Any other error of a thread is raised here as well.
        """
        self._finish()
        began = time.monotonic()
        with self._change:
            while not self._jobs and not self._ended and self._error is None:
                self._wait()
            if self._error is not None:
                raise self._error
            job = self._jobs[0] if self._jobs else None
            if job is None or job.turn.validation != validation or (step is not None and job.turn.step != step):
                return None
            while job.batch is None:
                if self._error is not None:
                    raise self._error
                self._wait()
            self._jobs.popleft()
        now = time.monotonic()
        self.cache.counters.add(waited=now - began)
        self.cache.timeline.add("wait", began, now)
        self._current, self._since = job, now
        return self._device.take(job.batch, job.ready)

    def _finish(self) -> None:
        """Free the buffer of the batch that the user holds, and record the last turn that all ranks have passed."""
        job, self._current = self._current, None
        if job is None:
            return
        self.cache.timeline.add("compute", self._since, time.monotonic())
        # The copy to the GPU must be complete before the buffer is filled again.
        self._device.wait(job.ready)
        # All ranks exchange gradients in every training step. The end of a step therefore shows that every rank has
        # received the batches up to that step. The end of a validation batch shows nothing about the other ranks.
        if self._alone or (self._meets is None and not job.turn.validation):
            self._passed = job.number
        # Ranks that do not wait for each other pass a batch at different times. A meeting shows only that every rank
        # has received the batches up to the previous meeting. A late rank may still have to fetch the batches since
        # then, even if it goes on to skip them.
        elif self._meets is not None and not job.turn.validation and self._meets(job.turn.step + 1):
            self._passed, self._met = self._met, job.number
        with self._change:
            self._free.append(job.slot)
            self._change.notify_all()

    def _list_tasks(self) -> Iterator[tuple[_Job, int, range]]:
        """Yield (job, place in the batch, numbers of the sample's uses of units). Wait while the ring is full."""
        use = 0
        for number, turn in enumerate(self.schedule):
            # Uses are numbered across all data coordinates in order (`Trace.of`), so the uses of the other coordinates
            # are counted as well.
            before = sum(1 + len(draw.read) for c in range(self._coordinate) for draw in turn.read_by(c))
            after = [turn.read_by(c) for c in range(self._coordinate + 1, len(turn.shares))]
            draws = turn.read_by(self._coordinate)
            use += before
            if draws:
                job = self._open(number, turn, draws)
                if job is None:
                    return
                for place, draw in enumerate(draws):
                    count = 1 + len(draw.read)
                    yield job, place, range(use, use + count)
                    use += count
            use += sum(1 + len(draw.read) for share in after for draw in share)
        self._end_tasks()

    def _open(self, number: int, turn: Turn, draws: tuple[Draw, ...]) -> _Job | None:
        """Wait for a free buffer of the ring, and start the batch of a turn in it. Return None after `close`."""
        with self._change:
            while not self._free and not self._stopped:
                self._change.wait()
            if self._stopped:
                return None
            slot = self._free.pop(0)
            job = _Job(number, turn, draws, turn.idle(self._coordinate), slot, [None] * len(draws), len(draws))
            self._jobs.append(job)
            self._change.notify_all()
        return job

    def _work(self) -> None:
        """Fetch and decode samples until the tasks end."""
        while not self._stopped:
            task = self._next_task()
            self.cache.passed(self._passed)
            if task is None:
                return
            self._make(*task)

    def _make(self, job: _Job, place: int, uses: range) -> None:
        """Fetch and decode one sample, and complete its batch if no other sample is missing."""
        draw = job.draws[place]
        packed = [self.cache.obtain(use) for use in uses]
        with self.cache.timeline.span("decode"):
            job.samples[place] = self._decode(draw, packed)
        self.cache.counters.add(samples=1)
        with self._change:
            job.missing -= 1
            last = not job.missing
        if last:
            self._complete(job)

    def _decode(self, draw: Draw, packed: list[np.ndarray]) -> Arrays:
        """Decode one sample. If its units are damaged, read them from storage again.

        Raises:
            UserError: The store itself is damaged.
        """
        units = self.cache.units
        try:
            return read_sample(units.over(draw, packed), draw)
        except UserError as error:  # the checksum of a chunk failed: the copy is damaged, or the store itself
            log.warning("loading: %s; it is read anew", error)
            fresh = [self.cache.again(unit) for unit in units.of(draw).tolist()]
            return read_sample(units.over(draw, fresh), draw)

    def _complete(self, job: _Job) -> None:
        """Join the samples of a batch in the buffer of its job, and start the copy to the device."""
        ring = self._rings[job.slot]

        def memory(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            """Return the buffer of one array, enlarged where it is too small."""
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            if name not in ring or len(ring[name]) < size:
                ring[name] = pages(size)
            return ring[name][:size].view(dtype).reshape(shape)

        samples = [sample for sample in job.samples if sample is not None]
        job.samples = []
        batch = join(self.cache.units.reader, job.draws, samples, idle=job.idle, new=memory)
        batch, job.ready = self._device.bring(batch)
        with self._change:
            job.batch = batch
            self._change.notify_all()
