"""Whole numbers of the host, such as positions along an axis, without a copy in every step.

A copy from the host waits for all that a GPU has to do, and cannot be recorded (`training.recorded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def take(x: Tensor, dim: int, positions: Sequence[int]) -> Tensor:
    """A copy of `x` at `positions` of `dim`."""
    return x.index_select(dim, integers(positions, x.device))


def integers(numbers: Sequence[int], device: torch.device) -> Tensor:
    """(N,) int64, which must not be written to."""
    if device.type != "cuda":  # there is nothing to save, and a fake tensor of a rehearsal must not be kept
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    return _kept(tuple(numbers), device)


@lru_cache(maxsize=1024)
def _kept(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device=device)
