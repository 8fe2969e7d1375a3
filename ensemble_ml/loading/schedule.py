"""Every batch of a training run in the order in which it is used: steps, and the validations between them.

All of it follows from seed, dates and settings, the same on every rank, so that what is read can be planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ensemble_ml.loading.batches import Batches, Draw

Shares = tuple[tuple[Draw, ...], ...]


@dataclass(frozen=True, eq=False)
class Turn:
    """What all ranks use at one time: the shares of one global batch, or of a round of validation batches.

    `shares` has one entry a data coordinate; one that is empty in training has a `stand_in`, which weighs nothing.
    `step` counts the optimizer steps done before it.
    """

    step: int
    validation: bool
    shares: Shares
    stand_in: Draw | None = None

    def read_by(self, coordinate: int) -> tuple[Draw, ...]:
        """The samples that the ranks at a data coordinate read."""
        own = self.shares[coordinate]
        return own if own or self.stand_in is None else (self.stand_in,)

    def idle(self, coordinate: int) -> bool:
        """Whether what they read is a stand-in."""
        return not self.shares[coordinate] and self.stand_in is not None


@dataclass(frozen=True, eq=False)
class Schedule:
    """The turns of a run.

    Args:
        batches: of all ranks together; its start and end are those of the schedule.
        validation: batches of a validation, in order; they are dealt out to the data coordinates one by one.
        validate_every: steps between validations; one more follows the last step.
        validate_first: whether the run begins with a validation.
        parts: data coordinates.
        holders: (F,) the data coordinate that each training date should rather go to; None keeps the order's own.
    """

    batches: Batches
    validation: Sequence[Sequence[Draw]] = ()
    validate_every: int = 1
    validate_first: bool = False
    parts: int = 1
    holders: np.ndarray | None = None

    def __iter__(self) -> Iterator[Turn]:
        first, last = self.batches.start_step, self.batches.steps
        if self.validate_first:
            yield from self._validation(first)
        for step in range(first, last):
            shares = tuple(map(tuple, self.batches.draws(step, self.parts, self.holders)))
            yield Turn(step, False, shares, None if all(shares) else self.batches.stand_in(step))
            if step + 1 == last or (step + 1) % self.validate_every == 0:
                yield from self._validation(step + 1)

    def _validation(self, step: int) -> Iterator[Turn]:
        for first in range(0, len(self.validation), self.parts):
            dealt = [tuple(group) for group in self.validation[first : first + self.parts]]
            yield Turn(step, True, (*dealt, *[()] * (self.parts - len(dealt))))

    @property
    def dates(self) -> np.ndarray:
        """Indices of all start dates that are read, ascending."""
        validated = [draw.date for group in self.validation for draw in group]
        return np.unique(np.concatenate([self.batches.dates, np.asarray(validated, int)]))

    def homes(self) -> np.ndarray:
        """The data coordinate that holds each of `dates`: the one that would use it first, so shares are even."""
        found: dict[int, int] = {}
        order = self.batches.order
        for step in range(order.steps_per_epoch):
            _, samples = order.step(step)
            for part, share in enumerate(np.array_split(samples, self.parts)):
                found |= {int(self.batches.dates[sample]): part for sample in share}
        for number, group in enumerate(self.validation):
            for draw in group:
                found.setdefault(draw.date, number % self.parts)
        return np.array([found[int(date)] for date in self.dates])
