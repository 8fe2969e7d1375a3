"""Lists of integers, such as positions along an axis, that are copied to a GPU once and not in every step.

A copy from the host waits for all work that the GPU has been given, and it cannot be part of a CUDA graph
(`training.recorded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def take(x: Tensor, dim: int, positions: Sequence[int]) -> Tensor:
    """Return a copy of `x` at some positions of one axis.

    Args:
        x: any tensor.
        dim: the axis.
        positions: positions along it.
    """
    return x.index_select(dim, integers(positions, x.device))


def integers(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return integers as a tensor on `device`. The caller must not write to it.

    Args:
        numbers: N integers.
        device: where the tensor is needed.

    Returns:
        (N,) int64.
    """
    # On other devices a cache saves nothing. It could even do harm: a tensor that was made in a dry run on fake tensors
    # would be fake for all later uses.
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    return _kept(tuple(numbers), device)


@lru_cache(maxsize=1024)
def _kept(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tensor from the cache, or make it."""
    # A tensor made in inference mode could not be used in training later.
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device=device)
