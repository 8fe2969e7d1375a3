"""How much memory a rank may use."""

from __future__ import annotations

import resource

import torch

from ensemble_ml.machine import memory_limit, taken_memory


def rank_memory(local_size: int, device: torch.device) -> int:
    """Bytes that each of `local_size` ranks of this node has: a GPU's, or its share of what this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    share = memory_limit() // max(local_size, 1)
    return share if own == resource.RLIM_INFINITY else min(own, share)


def in_use(device: torch.device, memory: int) -> int:
    """Bytes that a rank takes before it holds a model: the interpreter and its libraries, where they share memory.

    Args:
        memory: of `rank_memory`; where that is a limit on addresses (`ulimit -v`), those are what is counted.
    """
    if device.type == "cuda":
        return 0
    return taken_memory(addresses=memory == resource.getrlimit(resource.RLIMIT_AS)[0]) or 0
