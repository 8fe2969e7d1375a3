"""The schedule by which voting ranks average their momenta, and the choice of layers.

Voting ranks update momentum from their own gradients, so momenta drift apart by the noise of the ranks' batches. They
can be averaged after every K steps, after intervals that double, or selectively: for the layers whose variance over
ranks is largest relative to their mean square, within a budget of bytes. The variances are estimated from up to 256
elements of each layer, the same on every rank. All ranks gather these, so all choose the same layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemble_ml.config import MomentumSync
from ensemble_ml.distributed.communicator import Communicator

SAMPLED = 256  # elements of a layer from which its variance is estimated


@dataclass(frozen=True)
class Synchronised:
    """The record of one averaging.

    Attributes:
        layers: the layers that were averaged.
        bytes_sent: the bytes that this rank sent for it.
        variance: relative variance of every layer, if it was measured.
    """

    layers: tuple[int, ...]
    bytes_sent: int
    variance: tuple[float, ...] = ()


@dataclass(frozen=True)
class MomentumPlan:
    """The schedule by which momenta are averaged.

    Attributes:
        policy: never, at a fixed interval, at growing intervals, or selected layers at a fixed interval.
        every: steps between averagings; the first interval if they grow.
        budget: bytes that a rank may send in one selective averaging, besides the sampled elements.
    """

    policy: MomentumSync = MomentumSync.never
    every: int = 100
    budget: float = 1e6

    def due(self, step: int) -> bool:
        """Return whether momenta are averaged after `step` (counted from 0)."""
        if self.policy is MomentumSync.never or (step + 1) % self.every:
            return False
        turn = (step + 1) // self.every + 1
        # With growing intervals, averagings come after 1, 3, 7, 15, ... times `every` steps.
        return self.policy is not MomentumSync.growing or turn & (turn - 1) == 0

    def follow(self, momenta: Sequence[Tensor], group: Communicator, step: int) -> Synchronised | None:
        """Average the momenta that are due after `step`; return a record of it, or None."""
        if group.size == 1 or not self.due(step):
            return None
        before = group.bytes_sent
        if self.policy is not MomentumSync.selective:
            average(momenta, group)
            return Synchronised(tuple(range(len(momenta))), group.bytes_sent - before)
        variance = relative_variance(momenta, group, step)
        sizes = [m.numel() * m.element_size() * 2 * (group.size - 1) / group.size for m in momenta]
        layers = choose(variance, sizes, self.budget)
        average([momenta[i] for i in layers], group)
        return Synchronised(layers, group.bytes_sent - before, tuple(variance))


def average(momenta: Sequence[Tensor], group: Communicator) -> None:
    """Replace tensors by their mean over the ranks of `group`, in one all-reduce."""
    if group.size == 1 or not momenta:
        return
    # Elements are taken in their order in memory, which is the same on all ranks.
    flat = torch.cat([m.as_strided((m.numel(),), (1,)) for m in momenta])
    group.all_reduce(flat)
    flat /= group.size
    for m, part in zip(momenta, flat.split([m.numel() for m in momenta]), strict=True):
        m.as_strided((m.numel(),), (1,)).copy_(part)


def relative_variance(momenta: Sequence[Tensor], group: Communicator, step: int) -> list[float]:
    """Estimate for each tensor the variance over ranks (ddof = 1) divided by the mean square.

    It is 0 if the momenta agree, about 1 if they are unrelated, and P / (P - 1) at most for P ranks.

    Args:
        momenta: this rank's tensors.
        group: the ranks to compare.
        step: number of the step, which shifts the sampled elements.

    Returns:
        One number for each tensor, from up to SAMPLED of its elements; the same on all ranks.
    """
    samples = [m.as_strided((m.numel(),), (1,))[positions(m.numel(), step).to(m.device)] for m in momenta]
    own = torch.cat(samples).float()
    gathered = own.new_empty(group.size * len(own))
    group.all_gather(gathered, own)
    layers = gathered.view(group.size, -1).split([len(s) for s in samples], dim=1)
    found = []
    for values in layers:
        square = values.square().mean()
        found.append(float(values.var(0).mean() / square) if square > 0 else 0.0)
    return found


def positions(elements: int, step: int) -> Tensor:
    """Return the positions of the sampled elements, (n,) int64: evenly spaced, and shifted from step to step."""
    count = min(elements, SAMPLED)
    return (torch.arange(count) * (elements // count) + step * 7919) % elements


def choose(variance: Sequence[float], sizes: Sequence[float], budget: float) -> tuple[int, ...]:
    """Choose layers by decreasing variance, each if it fits into what is left of `budget` bytes.

    Layers without variance are left out. The result is in ascending order.
    """
    taken = []
    for i in sorted(range(len(sizes)), key=lambda i: (-variance[i], i)):
        if variance[i] > 0 and sizes[i] <= budget:
            taken.append(i)
            budget -= sizes[i]
    return tuple(sorted(taken))
