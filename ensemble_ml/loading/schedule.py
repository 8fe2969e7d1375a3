"""List every batch of a training run in the order of use: the training steps, and the validations between them.

The schedule follows from the seed, the dates and the settings alone, so it is the same on every rank, and all reads can
be planned from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ensemble_ml.loading.batches import Batches, Draw

Shares = tuple[tuple[Draw, ...], ...]


@dataclass(frozen=True, eq=False)
class Turn:
    """One slot of the schedule: what all ranks use at the same time.

    It holds the shares of one global training batch, or one round of validation batches.

    Attributes:
        step: Number of optimizer steps done before it.
        validation: Whether it belongs to a validation.
        shares: Samples of each data coordinate, which is the number of a share of the batch. The ranks of one
            coordinate read the same samples. A share may be empty.
        stand_in: Sample that a data coordinate with an empty share of a training batch reads instead. It has weight
            zero.
    """

    step: int
    validation: bool
    shares: Shares
    stand_in: Draw | None = None

    def read_by(self, coordinate: int) -> tuple[Draw, ...]:
        """Return the samples that the ranks at a data coordinate read."""
        own = self.shares[coordinate]
        return own if own or self.stand_in is None else (self.stand_in,)

    def idle(self, coordinate: int) -> bool:
        """Return whether the ranks at a data coordinate read a stand-in of weight zero."""
        return not self.shares[coordinate] and self.stand_in is not None


@dataclass(frozen=True, eq=False)
class Schedule:
    """The turns of a run, in order.

    Args:
        batches: Global training batches; the schedule covers its first to its last step.
        validation: Batches of one validation, in order. They are dealt out to the data coordinates one by one.
        validate_every: Number of steps between validations. A validation always follows the last step.
        validate_first: Whether the run begins with a validation.
        parts: Number of data coordinates.
        holders: (F,) data coordinate to which each training date should go if possible; None cuts each batch into
            consecutive shares, in the order in which its dates were drawn.
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
            # A rank with an empty share still takes part in every collective operation, so it reads a stand-in.
            yield Turn(step, False, shares, None if all(shares) else self.batches.stand_in(step))
            if step + 1 == last or (step + 1) % self.validate_every == 0:
                yield from self._validation(step + 1)

    def _validation(self, step: int) -> Iterator[Turn]:
        """Yield the rounds of one validation. The last round may be shorter than the number of data coordinates."""
        for first in range(0, len(self.validation), self.parts):
            dealt = [tuple(group) for group in self.validation[first : first + self.parts]]
            yield Turn(step, True, (*dealt, *[()] * (self.parts - len(dealt))))

    @property
    def dates(self) -> np.ndarray:
        """Return the indices of all training dates and of the dates that validations read, ascending."""
        validated = [draw.date for group in self.validation for draw in group]
        return np.unique(np.concatenate([self.batches.dates, np.asarray(validated, int)]))

    def homes(self) -> np.ndarray:
        """Return the data coordinate that holds each of `dates`, an array of the same length.

        For a training date it is the coordinate that uses the date in epoch 0 when every batch is cut in its own order.
        For other dates it is the coordinate that reads the date first in a validation. Shares of a batch differ
        by at most one sample. The first ones get the extra samples, so their coordinates may hold more dates.
        """
        found: dict[int, int] = {}
        order = self.batches.order
        for step in range(order.steps_per_epoch):
            _, samples = order.step(step)
            for part, share in enumerate(np.array_split(samples, self.parts)):
                found |= {int(self.batches.dates[sample]): part for sample in share}
        # Training dates have a home already; this adds the dates that only validations read.
        for number, group in enumerate(self.validation):
            for draw in group:
                found.setdefault(draw.date, number % self.parts)
        return np.array([found[int(date)] for date in self.dates])
