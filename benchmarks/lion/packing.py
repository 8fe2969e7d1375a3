"""Time the packing, voting and unpacking of signs, against reading and writing the same data once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.common.turns import take_turns
from ensemble_ml.distributed.pack import pack_signs, unpack_signs
from ensemble_ml.distributed.vote import count
from ensemble_ml.models.speed import settle

_CALLS = 20  # calls in a row on a GPU, as the buckets of a training follow each other
WHOLE, COPY, KERNELS = "pack, vote and unpack", "copy", ", kernels alone"


def times(elements: int, ranks: int, repeats: int) -> dict[str, list[float]]:
    """Time the parts of a vote on one machine, without communication.

    On a GPU the kernels of so few elements end before the host has started the next one. In training the backward pass
    hides this, but here nothing does. Entries that end in `KERNELS` are the same calls in a CUDA graph, which costs the
    host nothing.

    Args:
        elements: number of elements.
        ranks: number of ranks, which decides the size of one rank's slice.
        repeats: number of measurements.

    Returns:
        Milliseconds of packing all elements, of one rank's vote on its slice, of unpacking all, of all three together,
        and of a copy of the data.
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

    def turn(part: Callable[[], object]) -> None:
        for _ in range(calls):
            part()

    turns: dict[str, Callable[[], object]] = {name: partial(turn, part) for name, part in parts.items()}
    if device.type == "cuda":
        turns |= {name + KERNELS: _recorded(parts[name]) for name in (COPY, WHOLE)}
    seconds = take_turns(turns, repeats, warm=2, around=partial(settle, device))
    return {name: [1e3 * one / calls for one in found] for name, found in seconds.items()}


def _recorded(part: Callable[[], object]) -> Callable[[], object]:
    """Return a function that runs `_CALLS` calls of `part` as a CUDA graph."""
    part()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            part()
    return graph.replay
