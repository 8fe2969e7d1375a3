"""Simulate how good a vote is: many ranks in one process, each with a noisy view of a common update.

The update of an element is x, drawn from a Laplace distribution, as the updates of networks roughly are. Rank r sees x
plus normal noise, `noise` times as large. The right result is the sign of the exact mean over ranks. The score is how
often an exchange gives that sign, weighted by the magnitude of the mean, because a wrong sign near zero does little
harm.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemble_ml.config import VoteScale
from ensemble_ml.distributed.pack import WORD
from ensemble_ml.distributed.vote import cast, count, unit


def agreement(ranks: int, *, noise: float, elements: int = 1 << 14, seed: int = 0) -> dict[str, float]:
    """Return the share of the mean's magnitude whose sign each exchange gets right.

    The exchanges are votes of 1, 2, 4 and 8 bits, and the published Lion Cub with 8 bits.

    Only one rank's numbers are in memory at a time; of the others only the ballots are.

    Args:
        ranks: number of ranks.
        noise: scale of the noise, relative to that of the update.
        elements: number of elements.
        seed: seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.distributions.Laplace(0.0, 1.0).icdf(torch.rand(elements, generator=generator).clamp(1e-6, 1 - 1e-6))
    total = torch.zeros(elements, dtype=torch.float64)
    ballots: dict[int, list[Tensor]] = {1: [], 2: [], 4: [], 8: []}
    levels, published = 127 // ranks, torch.zeros(elements)
    for _ in range(ranks):
        u = x + noise * torch.randn(elements, generator=generator)
        total += u
        mean = float(u.abs().mean())
        for bits, cast_so_far in ballots.items():
            scaled = u.clone() if bits == 1 else u / (mean * unit(bits, VoteScale.l1))
            cast_so_far.append(cast(scaled, bits, 1, 0)[0])
        codes = (u / (mean * unit(8, VoteScale.l1)) * (levels / 2.0**7)).round()
        published += codes.clamp(-levels, levels)
    found = {
        f"{bits} bit{'s' * (bits > 1)}": _right(_signs(count(torch.stack(held), bits, 0)), total)
        for bits, held in ballots.items()
    }
    return found | {"Lion Cub, 8 bits": _right(published.sign(), total)}


def _signs(words: Tensor) -> Tensor:
    return (words[:, None] >> torch.arange(WORD) & 1).flatten() * 2.0 - 1


def _right(signs: Tensor, total: Tensor) -> float:
    """Return the weighted share of right signs. A sign of 0 counts half."""
    weight = total.abs()
    return float(((1 + signs.double() * total.sign()) / 2 * weight).sum() / weight.sum())


@dataclass(frozen=True)
class Costs:
    """A model of the time of an exchange that no computation hides.

    Attributes:
        alpha: seconds for each message.
        beta: seconds for each byte.
        pack: seconds for packing, voting and unpacking one element.
    """

    alpha: float
    beta: float
    pack: float

    @classmethod
    def measured(cls, found: Mapping[str, Sequence[float]], elements: int, ranks: int) -> Costs:
        """Derive the costs from measured seconds.

        Args:
            found: seconds of two all-to-alls (64 bytes, and one bit an element) and of packing.
            elements: number of elements.
            ranks: number of ranks.
        """
        small, large, pack = (
            statistics.median(found[name]) for name in ("all-to-all, small", "all-to-all, large", "packing")
        )
        others = ranks - 1
        return cls(small / others, max(large - small, 0.0) / (elements / 8 * others / ranks), pack / elements)

    def vote(self, parameters: float, bits: int, ranks: int) -> float:
        """Return the seconds of a vote, which sends ranks - 1 messages each way.

        Args:
            parameters: number of elements.
            bits: bits of a ballot.
            ranks: number of ranks.
        """
        sent = parameters * (bits + 1) / 8 * (ranks - 1) / ranks
        return 2 * (ranks - 1) * self.alpha + self.beta * sent + self.pack * parameters

    def average(self, parameters: float, ranks: int) -> float:
        """Return the seconds of a ring all-reduce in float32, without its additions.

        Args:
            parameters: number of elements.
            ranks: number of ranks.
        """
        return 2 * (ranks - 1) * self.alpha + self.beta * parameters * 8 * (ranks - 1) / ranks
