"""Packing, voting and unpacking of signs, against reading and writing the same data once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ensemble_ml.distributed.pack import pack_signs, unpack_signs
from ensemble_ml.distributed.vote import majority
from ensemble_ml.models.speed import settle


def times(elements: int, ranks: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of packing `elements`, of one rank's vote on its part, of unpacking all; of a copy of the data."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    u = torch.randn(elements, device=device)
    out = torch.empty_like(u)
    packed = pack_signs(u, 0)
    planes = list(packed.view(ranks, -1).unbind())

    def everything() -> None:
        words = pack_signs(u, 0)
        majority(list(words.view(ranks, -1).unbind()), 0)
        unpack_signs(words, out)

    parts: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(u),
        "pack": lambda: pack_signs(u, 0),
        "vote": lambda: majority(planes, 0),
        "unpack": lambda: unpack_signs(packed, out),
        "pack, vote and unpack": everything,
    }
    found: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(repeats + 2):
        for name, part in parts.items():
            settle(device)
            began = time.perf_counter()
            part()
            settle(device)
            if repeat > 1:
                found[name].append((time.perf_counter() - began) * 1e3)
    return found
