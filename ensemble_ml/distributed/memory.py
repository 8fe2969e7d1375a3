"""The memory that a rank may use."""

from __future__ import annotations

import resource

import torch

from ensemble_ml.machine import memory_limit, taken_memory


def rank_memory(local_size: int, device: torch.device) -> int:
    """Return the bytes that each of `local_size` ranks of this node may use.

    On a GPU this is the whole memory of the GPU. Otherwise it is an equal share of the memory of the job, at most the
    limit on the address space of this process.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    share = memory_limit() // max(local_size, 1)
    return share if own == resource.RLIM_INFINITY else min(own, share)


def in_use(device: torch.device, memory: int) -> int:
    """Return the bytes that a rank takes before it holds a model: the interpreter and its libraries.

    This is 0 on a GPU, whose memory they do not use, and where there is no /proc.

    Args:
        device: the device of the rank.
        memory: the result of `rank_memory`. If it is a limit on the address space (`ulimit -v`), addresses are counted.
    """
    if device.type == "cuda":
        return 0
    return taken_memory(addresses=memory == resource.getrlimit(resource.RLIMIT_AS)[0]) or 0
