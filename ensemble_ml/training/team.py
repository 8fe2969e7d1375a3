"""Divide the fits before the first training step among all ranks.

Every rank runs the same fit on a contiguous block of the dates. So a pass reads each date on one rank, except for dates
at the edges of blocks and dates that show which targets exist. Sums over dates are then summed over ranks, so all ranks
compute the same numbers. Because clocks differ, the first rank decides when the fit of a network stops. If time is over
on any rank before the first step of such a fit, all ranks leave the fit out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ensemble_ml.distributed import Communicator, NullCommunicator

T = TypeVar("T")


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
        """Return which of `count` items this rank takes, as one contiguous range.

        Args:
            count: number of items.
        """
        rank, size = self._ranks.rank, self._ranks.size
        return range(count * rank // size, count * (rank + 1) // size)

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's items, a contiguous part of `items`.

        Args:
            items: the items of all ranks.
        """
        taken = self.stretch(len(items))
        return items[taken.start : taken.stop]

    def add_up(self, *sums: Tensor) -> None:
        """Sum tensors over ranks in place; booleans are combined by `or`.

        A given number of ranks always adds in the same order, so the sums are equal bit for bit from run to run.

        Args:
            sums: tensors of the same shapes on all ranks.
        """
        if self.alone:
            return
        for values in sums:
            # Communicators do not reduce booleans, so the maximum of 0 and 1 stands for `or`.
            whole = values.contiguous() if values.dtype is not torch.bool else values.to(torch.uint8)
            self._ranks.all_reduce(whole, op="max" if values.dtype is torch.bool else "sum").wait()
            values.copy_(whole)

    def joined(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks in the order of the ranks, (sum of all n, ...).

        Args:
            rows: (n, ...) the rows of this rank; n may differ between ranks.
        """
        if self.alone:
            return rows
        counts = torch.zeros(self._ranks.size, dtype=torch.int64)
        counts[self._ranks.rank] = len(rows)
        self.add_up(counts)
        # `all_gather` needs the same size from every rank, so all rows are padded to the longest.
        padded = rows.new_zeros(int(counts.max()), *rows.shape[1:])
        padded[: len(rows)] = rows
        found = padded.new_empty(self._ranks.size * padded.numel())
        self._ranks.all_gather(found, padded.flatten()).wait()
        pieces = found.view(self._ranks.size, *padded.shape)
        return torch.cat([piece[:count] for piece, count in zip(pieces, counts.tolist(), strict=True)])

    def anywhere(self, flag: bool) -> bool:
        """Return True on all ranks if `flag` is true on any rank.

        Args:
            flag: this rank's flag.
        """
        found = torch.tensor(flag)
        self.add_up(found)
        return bool(found)

    def first_says(self, number: int) -> int:
        """Return the first rank's `number` on all ranks.

        Args:
            number: this rank's number; only that of the first rank matters.
        """
        found = torch.tensor(number)
        if not self.alone:
            self._ranks.broadcast(found).wait()
        return int(found)
