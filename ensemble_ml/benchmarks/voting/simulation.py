"""How good a vote is, by simulation in one process: many ranks, each with a noisy view of a common update.

An element's update is x, drawn from a Laplace distribution as those of networks about are; rank r sees x plus normal
noise, `noise` times as large. What an exchange should give is the sign of the exact mean over ranks. Told is how often
it does, weighted by the magnitude of that mean, since a wrong sign where the mean is near zero harms little.
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
    """Share of the mean's magnitude whose sign each form gets right: 1, 2, 4, 8 bits, and published 8 bits.

    One rank's numbers are in memory at a time; of the others, only the ballots.
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
    """1 where all signs are the mean's; a sign of 0 counts half."""
    weight = total.abs()
    return float(((1 + signs.double() * total.sign()) / 2 * weight).sum() / weight.sum())


@dataclass(frozen=True)
class Costs:
    """What predicts the time of an exchange that nothing hides.

    `alpha` seconds a message, `beta` seconds a byte, `pack` seconds an element for packing, voting and unpacking.
    """

    alpha: float
    beta: float
    pack: float

    @classmethod
    def measured(cls, found: Mapping[str, Sequence[float]], elements: int, ranks: int) -> Costs:
        """From the seconds of two all-to-alls, 64 bytes and one bit an element, and of packing."""
        small, large, pack = (
            statistics.median(found[name]) for name in ("all-to-all, small", "all-to-all, large", "packing")
        )
        others = ranks - 1
        return cls(small / others, max(large - small, 0.0) / (elements / 8 * others / ranks), pack / elements)

    def vote(self, parameters: float, bits: int, ranks: int) -> float:
        """Seconds of a vote: ranks - 1 messages each way."""
        sent = parameters * (bits + 1) / 8 * (ranks - 1) / ranks
        return 2 * (ranks - 1) * self.alpha + self.beta * sent + self.pack * parameters

    def average(self, parameters: float, ranks: int) -> float:
        """Seconds of a ring all-reduce in float32; its additions are not counted."""
        return 2 * (ranks - 1) * self.alpha + self.beta * parameters * 8 * (ranks - 1) / ranks
