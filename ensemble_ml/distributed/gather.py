"""Collection of values from several ranks: whole fields from shards, bytes, and extremes."""

from __future__ import annotations

import math
import os
import socket

import torch
from torch import Tensor

from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.distributed.shard import Shard


def gather(part: Tensor, shard: Shard, spatial: Communicator) -> Tensor | None:
    """Collect a whole field from the shards of a spatial group.

    Args:
        part: (..., y, x) this rank's shard.
        shard: rows and columns of all ranks.
        spatial: the ranks that share the field.

    Returns:
        The whole field (..., Y, X) on the group's first rank, None on the others.
    """
    if spatial.size == 1:
        return part
    first = spatial.rank == 0
    lead = part.shape[:-2]
    shapes = [(b - a, d - c) for a, b in shard.rows for c, d in shard.columns]  # in rank order
    sizes = [math.prod(lead) * rows * columns for rows, columns in shapes]
    buffer = part.new_empty(sum(sizes) if first else 0)
    # One all_to_all_single, in which all ranks send to the first one only.
    sent = [part.numel()] + [0] * (spatial.size - 1)
    received = sizes if first else [0] * spatial.size
    spatial.all_to_all_single(buffer, part.reshape(-1), received, sent)
    if not first:
        return None
    whole = part.new_empty(*lead, shard.rows[-1][1], shard.columns[-1][1])
    places = [(rows, columns) for rows in shard.rows for columns in shard.columns]
    for values, (rows, columns), shape in zip(buffer.split(sizes), places, shapes, strict=True):
        whole[..., slice(*rows), slice(*columns)] = values.view(*lead, *shape)
    return whole


def sharing_cores(world: Communicator, device: torch.device) -> int:
    """Return how many ranks have the same host and the same cores as this process, itself included.

    These are all ranks of a host, or fewer if ranks are bound to cores. Ranks that share only some cores do not count.
    """
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = f"{socket.gethostname()} {own}".encode()
    return gather_bytes(mine, world, device).count(mine)


def gather_bytes(data: bytes, group: Communicator, device: torch.device) -> list[bytes]:
    """Return the bytes that every rank of a group gives, in rank order, on all of them."""
    sizes = torch.empty(group.size, dtype=torch.int64, device=device)
    group.all_gather(sizes, torch.tensor([len(data)], device=device))
    most = max(1, int(sizes.max()))
    # An all_gather needs the same length on every rank, so shorter inputs are padded.
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    found = torch.empty(group.size * most, dtype=torch.uint8, device=device)
    group.all_gather(found, padded.to(device))
    whole = found.cpu().numpy().reshape(group.size, most)
    return [row[:size].tobytes() for row, size in zip(whole, sizes.tolist(), strict=True)]


def agreed_extremes(low: Tensor, high: Tensor, spatial: Communicator) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest values over the ranks of a spatial group, element by element.

    Args:
        low: this rank's smallest values, NaN where it has none.
        high: its largest values, of the same shape.
        spatial: the ranks that share the fields.

    Returns:
        Two tensors of that shape, NaN where no rank has a value.
    """
    # One all-reduce by maximum does for both: the smallest value is the negative of the largest negative.
    both = torch.stack([-low, high])
    both = torch.where(both.isnan(), -torch.inf, both)
    spatial.all_reduce(both, op="max")
    both = torch.where(both.isneginf().all(0), torch.nan, both)  # one alone is a true value that is infinite
    return -both[0], both[1]
