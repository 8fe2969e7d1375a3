"""How good a vote is, by simulation in one process: many ranks, each with a noisy view of a common update.

An element's update is x, drawn from a Laplace distribution as those of networks about are; rank r sees x plus normal
noise, `noise` times as large. What an exchange should give is the sign of the exact mean over ranks. Told is how often
it does, weighted by the magnitude of that mean, since a wrong sign where the mean is near zero harms little.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ensemble_ml.config import VoteScale
from ensemble_ml.distributed.pack import WORD
from ensemble_ml.distributed.vote import cast, count, unit


def agreement(ranks: int, *, noise: float, elements: int = 1 << 14, seed: int = 0) -> dict[str, float]:
    """Share of the mean's magnitude whose sign each form gets right: 1, 2, 4, 8 bits, and published 8 bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.distributions.Laplace(0.0, 1.0).icdf(torch.rand(elements, generator=generator).clamp(1e-6, 1 - 1e-6))
    u = x + noise * torch.randn(ranks, elements, generator=generator)
    total = u.double().sum(0)
    mean = u.abs().mean(1, keepdim=True)
    found = {}
    for bits in (1, 2, 4, 8):
        scaled = u.clone() if bits == 1 else u / (mean * unit(bits, VoteScale.l1))
        won = count(cast(scaled.flatten(), bits, ranks, 0), bits, 0)
        found[f"{bits} bit{'s' * (bits > 1)}"] = _right(_signs(won), total)
    levels = 127 // ranks
    codes = (u / (mean * unit(8, VoteScale.l1)) * (levels / 2.0**7)).round().clamp(-levels, levels)
    return found | {"Lion Cub, 8 bits": _right(codes.sum(0).sign(), total)}


def _signs(words: Tensor) -> Tensor:
    return (words[:, None] >> torch.arange(WORD) & 1).flatten() * 2.0 - 1


def _right(signs: Tensor, total: Tensor) -> float:
    """1 where all signs are the mean's; a sign of 0 counts half."""
    weight = total.abs()
    return float(((1 + signs.double() * total.sign()) / 2 * weight).sum() / weight.sum())


def step_seconds(parameters: float, bits: int, ranks: int, *, alpha: float, beta: float, pack: float) -> float:
    """Predicted seconds of one vote that nothing hides.

    Args:
        alpha: seconds a message; an exchange sends ranks - 1 of them twice.
        beta: seconds a byte.
        pack: seconds an element for packing, voting and unpacking.
    """
    sent = parameters * (bits + 1) / 8 * (ranks - 1) / ranks
    return 2 * (ranks - 1) * alpha + beta * sent + pack * parameters
