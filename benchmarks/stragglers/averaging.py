"""Exchanges that average weights, the competitors of a vote that does not wait.

local SGD       ranks step alone; every `every` steps all take the mean of their weights (Stich 2019, arXiv:1805.09767)
DiLoCo          the same, but the change of the mean is the gradient of a Nesterov step (Douillard et al. 2023,
                arXiv:2311.08105)
WAGMA-SGD       between these meetings, groups average in every step, and no rank waits (Li et al. 2020,
                arXiv:2005.00124, Algorithm 2)

In WAGMA-SGD, the first rank that finishes step t starts the averages of that step in all groups. A rank that has not
finished the step contributes the weights that it sent last. Each rank then combines the weights of its group
(`combined`) by the paper's rule, or by one that leaves out weights of earlier steps.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ensemble_ml.distributed import Communicator
from ensemble_ml.distributed.hub import Link
from ensemble_ml.distributed.voting import average
from ensemble_ml.errors import UserError
from ensemble_ml.optim import Exchange

# What a rank had sent when a group's average began: its weights, and the step that they follow (-1 before the first).
Sent = tuple[Tensor, int]


class LocalSteps(Exchange):
    """An exchange that averages weights over ranks every `every` steps, and nothing else.

    Args:
        group: the ranks.
        every: number of steps between averages.
        clip: largest norm of a rank's own gradient; 0 for none.
    """

    def __init__(self, group: Communicator, every: int, clip: float = 0.0):
        super().__init__(clip)
        self._group, self._every, self._step = group, every, 0

    @property
    def slack(self) -> int:
        """Return how many steps ranks may be apart."""
        return self._every

    def meets(self, step: int) -> bool:
        """Return whether weights have been averaged when `step` steps are done."""
        return step % self._every == 0

    def begin(self, step: int) -> None:
        """Note the number of the step."""
        self._step = step

    def after_step(self) -> dict[str, Any]:
        """Average the weights where it is time."""
        if self.meets(self._step + 1):
            self._meet()
        return {}

    def _meet(self) -> None:
        average([p.data for p in self.params], self._group)


class DiLoCo(LocalSteps):
    """Local SGD with an outer Nesterov step, with the paper's rate of 0.7 and momentum of 0.9."""

    _RATE, _MOMENTUM = 0.7, 0.9

    def begin(self, step: int) -> None:
        """Note the number of the step, and the weights before the first one."""
        super().begin(step)
        if step == 0:
            self._start = [p.detach().clone() for p in self.params]
            self._momenta = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def _meet(self) -> None:
        super()._meet()
        for p, start, momentum in zip(self.params, self._start, self._momenta, strict=True):
            change = start - p
            momentum.mul_(self._MOMENTUM).add_(change)
            p.copy_(start - self._RATE * (change + self._MOMENTUM * momentum))
            start.copy_(p)


class Rounds(Protocol):
    """The averages of groups: one in each step, unless all ranks average after it."""

    def publish(self, step: int, weights: Tensor) -> None:
        """Send this rank's weights after `step`, and start the step's averages if no other rank has."""

    def take(self, step: int) -> tuple[list[Sent], int]:
        """Return what the ranks of this rank's group had sent when the average began, and this rank's place."""


class WaitAvoiding(LocalSteps):
    """The exchange of WAGMA-SGD: weights are averaged in groups, and from time to time over all ranks.

    Args:
        group: all ranks.
        every: number of steps between averages of all.
        rounds: makes the averages of groups; called with the weights before the first step.
        drop: leave buffers of earlier steps out; False follows the paper.
    """

    def __init__(self, group: Communicator, every: int, rounds: Callable[[Tensor], Rounds], *, drop: bool):
        super().__init__(group, every)
        self._make, self._drop = rounds, drop
        self._rounds: Rounds | None = None

    def begin(self, step: int) -> None:
        """Note the number of the step; at the first step, begin to take part in the averages of groups."""
        super().begin(step)
        if self._rounds is None:
            self._rounds = self._make(_flat(self.params))

    @torch.no_grad()
    def after_step(self) -> dict[str, Any]:
        """Average the weights with those of this step's group, or of all ranks where it is time."""
        assert self._rounds is not None
        own = _flat(self.params)
        self._rounds.publish(self._step, own)
        if self.meets(self._step + 1):
            return super().after_step()
        mean = combined(own, *self._rounds.take(self._step), self._step, drop=self._drop)
        parts = mean.split([p.numel() for p in self.params])
        for p, part in zip(self.params, parts, strict=True):
            p.copy_(part.view_as(p))
        return {}

    def close(self) -> None:
        """End the averages."""
        if isinstance(self._rounds, GroupRounds):
            self._rounds.close()


def combined(own: Tensor, sent: Sequence[Sent], place: int, step: int, *, drop: bool) -> Tensor:
    """Return the weights of a rank after the average of its group.

    Args:
        own: weights of the rank after its step.
        sent: what the ranks of the group had sent when the average began.
        place: place of the rank in its group.
        step: number of the step.
        drop: leave out weights of earlier steps. Otherwise the paper's rule holds: with the sum W of the S weights that
            the ranks had sent, a rank that was in time gets W / S, and a late one gets (W + own) / (S + 1).
    """
    late = sent[place][1] != step
    counted = [weights for weights, at in sent if at == step or not drop] + [own] * late
    return torch.stack(counted).mean(0)


def groups_of(ranks: int, size: int) -> list[list[list[int]]]:
    """Return the groups of each phase. In phase i, a group's rank numbers in base `size` differ only in digit i.

    After as many steps as there are phases, every rank's weights have reached every other rank.

    Raises:
        UserError: the number of ranks is not a power of the size of a group.
    """
    phases, stride = [], 1
    while stride < ranks:
        heads = [rank for rank in range(ranks) if rank // stride % size == 0]
        phases.append([[head + i * stride for i in range(size)] for head in heads])
        stride *= size
    if stride != ranks:
        raise UserError(f"groups of {size}: the number of ranks, {ranks}, is not a power of {size}")
    return phases


def _flat(params: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in params])


class Starts:
    """A hub that starts the averages: when the first rank finishes a step, it tells all ranks.

    It takes the place of a `Hub`, and uses the same connections.
    """

    def __init__(self, size: int):
        self.outboxes: list[queue.Queue[Tensor | None]] = [queue.Queue() for _ in range(size)]
        self._next, self._lock = 0, threading.Lock()

    def put(self, rank: int, words: Tensor) -> None:
        """Tell all ranks to begin the averages up to the step in `words`, except those that have begun."""
        with self._lock:
            for step in range(self._next, int(words[0]) + 1):
                for outbox in self.outboxes:
                    outbox.put(torch.tensor([step]))
                self._next = step + 1

    def close(self) -> None:
        """Tell all ranks that no average follows."""
        for outbox in self.outboxes:
            outbox.put(None)


class GroupRounds:
    """Averages of groups of processes. A thread of each rank takes part in them while the rank computes.

    Args:
        link: connection to `Starts`.
        groups: this rank's group in each phase, each with a communicator that nothing else uses.
        meets: returns whether, after a number of steps, all ranks average in place of groups.
        weights: weights before the first step.
    """

    def __init__(self, link: Link, groups: Sequence[Communicator], meets: Callable[[int], bool], weights: Tensor):
        self._link, self._groups, self._meets = link, groups, meets
        self._sent: Sent = (weights, -1)
        self._found: dict[int, list[Sent]] = {}
        self._news = threading.Condition()
        self._error: Exception | None = None
        threading.Thread(target=self._answer, name="averages", daemon=True).start()

    def publish(self, step: int, weights: Tensor) -> None:
        """Send this rank's weights after `step`, and start the step's averages if no other rank has."""
        self._sent = (weights, step)  # one assignment, so that the thread never sees new weights with an old step
        self._link.send(torch.tensor([step]))

    def take(self, step: int) -> tuple[list[Sent], int]:
        """Return what the ranks of this rank's group had sent when the average began, and this rank's place."""
        with self._news:
            self._news.wait_for(lambda: step in self._found or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._found.pop(step), self._groups[step % len(self._groups)].rank

    def close(self) -> None:
        """End the thread and the connection."""
        self._link.close()

    def _answer(self) -> None:
        """Take part in every average, with what this rank sent last."""
        try:
            while True:
                step = int(self._link.receive()[0])
                if not self._meets(step + 1):
                    group, (weights, at) = self._groups[step % len(self._groups)], self._sent
                    rows = torch.empty(group.size * (len(weights) + 1))
                    group.all_gather(rows, torch.cat([weights, torch.tensor([float(at)])])).wait()
                    with self._news:
                        self._found[step] = [(row[:-1], int(row[-1])) for row in rows.view(group.size, -1)]
                        self._news.notify_all()
        except Exception as error:
            with self._news:
                self._error = error
                self._news.notify_all()


class ScriptedRounds:
    """Averages of groups of threads, in which a script says what each rank had sent.

    Args:
        rank: the rank.
        phases: groups of each phase (`groups_of`).
        script: for each step, the step after which each rank had last sent (`clock.held`).
        sent: what ranks have sent, by rank and step; all ranks share it.
        news: notified when `sent` changes.
        weights: weights before the first step.
    """

    def __init__(
        self, rank: int, phases: Sequence[Sequence[Sequence[int]]], script: Sequence[Sequence[int]],
        sent: dict[tuple[int, int], Tensor], news: threading.Condition, weights: Tensor,
    ):  # fmt: skip
        self._rank, self._phases, self._script, self._sent, self._news = rank, phases, script, sent, news
        self.publish(-1, weights)

    def publish(self, step: int, weights: Tensor) -> None:
        """Send this rank's weights after `step`."""
        with self._news:
            self._sent[self._rank, step] = weights
            self._news.notify_all()

    def take(self, step: int) -> tuple[list[Sent], int]:
        """Return what the ranks of this rank's group had sent when the average began, and this rank's place."""
        group = next(group for group in self._phases[step % len(self._phases)] if self._rank in group)
        wanted = [(rank, self._script[step][rank]) for rank in group]
        with self._news:
            self._news.wait_for(lambda: all(key in self._sent for key in wanted))
            return [(self._sent[key], key[1]) for key in wanted], group.index(self._rank)


class TorchAverages(LocalSteps):
    """An exchange by one of torch's own averagers of models.

    Args:
        group: the ranks.
        every: number of steps between averages of all.
        sizes: for a hierarchical averager, {steps between averages: number of ranks that average}; None to average over
            all ranks only.
    """

    def __init__(self, group: Communicator, every: int, sizes: Mapping[int, int] | None = None):
        super().__init__(group, every)
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

        self._averager = PeriodicModelAverager(every) if sizes is None else HierarchicalModelAverager(sizes)
        self._averager.step = 1  # otherwise it would average after steps 1, 11, 21, ...

    def after_step(self) -> dict[str, Any]:
        """Let torch average where it finds it is time."""
        self._averager.average_parameters(self.params)  # type: ignore[arg-type]
        return {}
