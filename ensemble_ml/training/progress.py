"""Divide the fits before the first step among all ranks, show their progress, and keep them within `max_minutes`.

    Progress    the stages of the fits, how much of the current one is done, and when the fits have to end
    Pace        by how much each step of the point network's fit advances its schedule, so that the fit ends in time
    Team        the division of the dates among the ranks

Only the fit of the point network can stop at any time. All other fits are sums over dates. So the limit of the fits is
a deadline for the network, early enough to leave time for the fits after it.

Every rank runs the same fit on a contiguous block of the dates. So a pass reads each date on one rank, except for dates
at the edges of blocks and dates that show which targets exist. Sums over dates are then summed over ranks, so all ranks
compute the same numbers. Because clocks differ, the first rank decides when the fit of a network stops. If time is over
on any rank before the first step of such a fit, all ranks leave the fit out.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from ensemble_ml.distributed import Communicator, NullCommunicator
from ensemble_ml.distributed.communicator import gathered
from ensemble_ml.wording import duration

log = logging.getLogger(__name__)

T = TypeVar("T")

NETWORK = "point network"  # its name in messages and stages
SHARE_OF_FITS = 0.7  # largest fraction of `max_minutes` for all fits; timing, validation and steps take the rest
_UNTIL = 0.88  # deadline of the network, as a fraction of the time for all fits: sums over dates follow it
_WARM = 10  # steps of the network after which its speed is known


class Progress:
    """The stages of the fits: which one runs, how much of it is done, and whether the network was cut short.

    The fits may take `seconds` from now on; None for no limit.
    """

    def __init__(self, seconds: float | None = None):
        self.cut = False  # whether the network got fewer steps than its schedule has
        self.took: dict[str, float] = {}  # seconds of each stage so far
        self._began, self._seconds = time.monotonic(), seconds
        self._stages: list[str] = []
        self._doing: Callable[[], str] = lambda: "getting ready"

    def text(self) -> str:
        """Return a line that describes what is running now."""
        return self._doing()

    def longest(self) -> str:
        """Return a line that names the four stages that took longest, with their times."""
        stages = sorted(self.took.items(), key=lambda item: -item[1])[:4]
        return ", ".join(f"{name} {duration(seconds)}" for name, seconds in stages)

    def doing(self, text: str | Callable[[], str]) -> None:
        """Set the description of what is running from now on, or a function that returns it whenever it is shown."""
        self._doing = text if callable(text) else lambda: text

    def begin(self, stages: Sequence[str]) -> None:
        """Set the stages to come, in order, and log the time that they have."""
        self._stages = list(stages)
        if self._seconds is not None:
            log.info("fits: %d stages before the first step, in %s at most", len(stages), duration(self._seconds))

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], object]]:
        """Show a stage of `total` steps while the context is open, and yield a function that counts steps as done."""
        number = self._stages.index(name) + 1 if name in self._stages else 0
        title = f"fit {number} of {len(self._stages)}, {name}"
        began, done = time.monotonic(), 0

        def tick(steps: int) -> None:
            nonlocal done
            done += steps
            bar.update(steps)

        def text() -> str:
            """Return a line about the stage, with the time that is left at its pace so far."""
            if not done:
                return f"{title}: begun"
            left = (time.monotonic() - began) * (total - done) / done
            return f"{title}: {done / total:.0%} done, about {duration(left)} left"

        self._doing = text
        # A fit outside a run has no stages to be counted among.
        shown = number > 0 and sys.stderr.isatty()
        with tqdm(total=total, desc=title, leave=False, disable=not shown, dynamic_ncols=True) as bar:
            try:
                yield tick
            finally:
                self.took[name] = self.took.get(name, 0.0) + time.monotonic() - began

    def over(self, stage: str, items: Collection[T]) -> Iterator[T]:
        """Yield `items` as the steps of a stage."""
        with self.stage(stage, len(items)) as tick:
            for item in items:
                yield item
                tick(1)

    @property
    def deadline(self) -> float | None:
        """Return the deadline of the network, by `time.monotonic`; None for no deadline."""
        return None if self._seconds is None else self._began + _UNTIL * self._seconds

    def is_late(self) -> bool:
        """Return True if no time is left for the network."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def note_cut(self, steps: str) -> None:
        """Note that the network was cut short, and log a warning that says how many `steps` it got, in words."""
        self.cut = True
        log.warning("%s: max_minutes left time for %s; give more minutes for the whole fit", NETWORK, steps)


class Pace:
    """The pace of a fit: by how many steps each step advances the schedule, so that the fit ends by a deadline.

    Args:
        total: steps of the schedule.
        until: the deadline by `time.monotonic`; None for no deadline: each step then advances by one.
    """

    def __init__(self, total: int, until: float | None):
        self._total, self._until = total, until
        self._began = time.monotonic()
        self.steps = 0  # steps taken so far

    def stride(self, done: int) -> int:
        """Return how many steps of the schedule the next step advances, if `done` are done.

        Return zero at the end of the schedule or of the time.
        """
        left, stride = self._total - done, min(1, self._total - done)
        if self._until is not None and left:
            now = time.monotonic()
            if now >= self._until:
                return 0
            # The first few steps do not show the speed.
            if self.steps >= _WARM:
                seconds = (now - self._began) / self.steps
                # If the rest of the schedule fits into the time, the stride is one. So a run with enough time gives the
                # same numbers as one without a deadline.
                stride = min(left, max(1, math.ceil(left * seconds / (self._until - now))))
        self.steps += stride > 0
        return stride


class Team:
    """A group of ranks that make a fit together.

    Args:
        ranks: communicator of all ranks, which call the methods in the same order; None for a single rank.
        on_host: number of ranks that share this host's memory.
    """

    def __init__(self, ranks: Communicator | None = None, on_host: int = 1):
        self._ranks, self.on_host = ranks or NullCommunicator(), on_host

    @property
    def alone(self) -> bool:
        """Return True if there is only one rank."""
        return self._ranks.size == 1

    def stretch(self, count: int) -> range:
        """Return which of `count` items this rank takes, as one contiguous range."""
        rank, size = self._ranks.rank, self._ranks.size
        return range(count * rank // size, count * (rank + 1) // size)

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's items, a contiguous part of the `items` of all ranks."""
        taken = self.stretch(len(items))
        return items[taken.start : taken.stop]

    def add_up(self, *sums: Tensor) -> None:
        """Sum tensors, of the same shapes on all ranks, over ranks in place; booleans are combined by `or`.

        A given number of ranks always adds in the same order, so the sums are equal bit for bit from run to run.
        """
        if self.alone:
            return
        for values in sums:
            # Communicators do not reduce booleans, so the maximum of 0 and 1 stands for `or`.
            whole = values.contiguous() if values.dtype is not torch.bool else values.to(torch.uint8)
            self._ranks.all_reduce(whole, op="max" if values.dtype is torch.bool else "sum").wait()
            values.copy_(whole)

    def joined(self, rows: Tensor) -> Tensor:
        """Return the rows (n, ...) of all ranks in the order of the ranks, (sum of all n, ...).

        The number n may differ between ranks.
        """
        if self.alone:
            return rows
        counts = torch.zeros(self._ranks.size, dtype=torch.int64)
        counts[self._ranks.rank] = len(rows)
        self.add_up(counts)
        # `all_gather` needs the same size from every rank, so all rows are padded to the longest.
        padded = rows.new_zeros(int(counts.max()), *rows.shape[1:])
        padded[: len(rows)] = rows
        pieces = gathered(padded.flatten(), self._ranks).view(self._ranks.size, *padded.shape)
        return torch.cat([piece[:count] for piece, count in zip(pieces, counts.tolist(), strict=True)])

    def anywhere(self, flag: bool) -> bool:
        """Return True on all ranks if `flag` is true on any rank."""
        found = torch.tensor(flag)
        self.add_up(found)
        return bool(found)

    def first_says(self, number: int) -> int:
        """Return the first rank's `number` on all ranks."""
        found = torch.tensor(number)
        if not self.alone:
            self._ranks.broadcast(found).wait()
        return int(found)
