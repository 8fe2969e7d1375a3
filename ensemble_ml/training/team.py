"""Shares the fits before the first step out over all ranks.

Every rank runs the same fit on a stretch of the start dates of its own, and what is summed over dates is added up over
ranks, so each date is read by one rank. All ranks then hold the same sums and work out the same numbers from them. What
hangs on the clock is said by the first rank, for the others' clocks may say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ensemble_ml.distributed import Communicator, NullCommunicator

T = TypeVar("T")


class Team:
    """The ranks that make a fit together.

    Args:
        ranks: all of them; one rank alone where it is None. They call the methods in the same order.
        on_host: how many of them share this host's memory.
    """

    def __init__(self, ranks: Communicator | None = None, on_host: int = 1):
        self._ranks, self.on_host = ranks or NullCommunicator(), on_host

    @property
    def alone(self) -> bool:
        """Return whether there is one rank only."""
        return self._ranks.size == 1

    def stretch(self, count: int) -> range:
        """Return which of `count` items this rank takes: neighbours, so that dates in a row stay together."""
        rank, size = self._ranks.rank, self._ranks.size
        return range(count * rank // size, count * (rank + 1) // size)

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's stretch of `items`."""
        taken = self.stretch(len(items))
        return items[taken.start : taken.stop]

    def add_up(self, *sums: Tensor) -> None:
        """Add each of `sums` up over ranks, in place; the order of the additions is that of the ranks, always the same.

        Booleans are joined by `or`.
        """
        if self.alone:
            return
        for values in sums:
            whole = values.contiguous() if values.dtype is not torch.bool else values.to(torch.uint8)
            self._ranks.all_reduce(whole, op="max" if values.dtype is torch.bool else "sum").wait()
            values.copy_(whole)

    def joined(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, (n of the first + n of the next ..., ...) from this rank's `rows` (n, ...)."""
        if self.alone:
            return rows
        counts = torch.zeros(self._ranks.size, dtype=torch.int64)
        counts[self._ranks.rank] = len(rows)
        self.add_up(counts)
        padded = rows.new_zeros(int(counts.max()), *rows.shape[1:])
        padded[: len(rows)] = rows
        found = padded.new_empty(self._ranks.size * padded.numel())
        self._ranks.all_gather(found, padded.flatten()).wait()
        pieces = found.view(self._ranks.size, *padded.shape)
        return torch.cat([piece[:count] for piece, count in zip(pieces, counts.tolist(), strict=True)])

    def anywhere(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        found = torch.tensor(flag)
        self.add_up(found)
        return bool(found)

    def first_says(self, number: int) -> int:
        """Return the first rank's `number`, on all of them."""
        found = torch.tensor(number)
        if not self.alone:
            self._ranks.broadcast(found).wait()
        return int(found)
