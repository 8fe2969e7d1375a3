"""Packing, voting and unpacking of signs, against reading and writing the same data once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ensemble_ml.distributed.pack import pack_signs, unpack_signs
from ensemble_ml.distributed.vote import count
from ensemble_ml.models.speed import settle

_CALLS = 20  # on a GPU in a row, as a training's buckets come
WHOLE, COPY, KERNELS = "pack, vote and unpack", "copy", ", kernels alone"


def times(elements: int, ranks: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of packing `elements`, of one rank's vote on its part, of unpacking all; of a copy of the data.

    On a GPU kernels of so few elements are done before the host has called the next, which backward hides and a race
    does not; `KERNELS` are the same calls recorded once and played again, which costs the host nothing.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    u = torch.randn(elements, device=device)
    out = torch.empty_like(u)
    packed = pack_signs(u, 0)
    planes = packed.view(ranks, -1)
    calls = 1 if device.type == "cpu" else _CALLS

    def everything() -> None:
        words = pack_signs(u, 0)
        count(words.view(ranks, -1), 1, 0)
        unpack_signs(words, out)

    parts: dict[str, Callable[[], object]] = {
        COPY: lambda: out.copy_(u),
        "pack": lambda: pack_signs(u, 0),
        "vote": lambda: count(planes, 1, 0),
        "unpack": lambda: unpack_signs(packed, out),
        WHOLE: everything,
    }
    if device.type == "cuda":
        parts |= {name + KERNELS: _recorded(parts[name]) for name in (COPY, WHOLE)}
    found: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(repeats + 2):
        for name, part in parts.items():
            settle(device)
            began = time.perf_counter()
            for _ in range(1 if name.endswith(KERNELS) else calls):
                part()
            settle(device)
            if repeat > 1:
                found[name].append((time.perf_counter() - began) * 1e3 / calls)
    return found


def _recorded(part: Callable[[], object]) -> Callable[[], object]:
    """`_CALLS` calls of `part`, by a GPU alone."""
    part()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            part()
    return graph.replay
