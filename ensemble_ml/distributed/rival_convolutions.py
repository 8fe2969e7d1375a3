"""Other people's convolutions of a split tensor, for comparison: torch's DTensor, and PhysicsNeMo's ShardTensor on it.

Only a benchmark uses them; they stand here because no other room may use `torch.distributed`.

Axes: B date, C channel, Y latitude, X longitude, Z plane.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

Place = Callable[[Tensor, Tensor, int], tuple[Any, Tensor]]


def dtensor_place(x: Tensor, weight: Tensor, axis: int) -> tuple[Any, Tensor]:
    """`x` (B, C, Y, X, Z) split along `axis` over all ranks, and the weight on each, as DTensors."""
    mesh = init_device_mesh(x.device.type, (dist.get_world_size(),))
    split = distribute_tensor(x, mesh, [Shard(axis)]).requires_grad_()
    return split, distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()


def shard_tensor_place() -> Place:
    """The same by PhysicsNeMo, whose own convolution and padding are then called.

    Raises:
        ImportError: it, or a package that it wants, is not there.
    """
    manager = importlib.import_module("physicsnemo.distributed").DistributedManager
    parallel = importlib.import_module("physicsnemo.domain_parallel")
    for name in ("custom_ops", "custom_ops._tensor_ops", "shard_utils.conv_patches", "shard_utils.padding"):
        importlib.import_module(f"physicsnemo.domain_parallel.{name}")  # it does so by itself where there is a GPU
    made = dist.init_process_group
    dist.init_process_group = lambda *_, **__: None  # the group is there; the manager would make it once more
    try:
        manager.initialize()
    finally:
        dist.init_process_group = made
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))

    def place(x: Tensor, weight: Tensor, axis: int) -> tuple[Any, Tensor]:
        split = parallel.scatter_tensor(x, 0, mesh, (Shard(axis),), requires_grad=True)
        return split, weight.clone().requires_grad_()

    return place


def convolved(split: Any, kernel: Tensor, *, circular: bool) -> Tensor:
    """conv3d of 3 x 3 x 3, Y and X padded by what wraps round or by zeros; this rank's part."""
    padded = F.pad(split, (0, 0, 1, 1, 1, 1), mode="circular") if circular else split
    found: Any = F.conv3d(padded, kernel, None, 1, (0, 0, 1) if circular else (1, 1, 1))
    return found.to_local()


def gradients(split: Any, kernel: Tensor, own: Tensor, adjoint: Tensor, axis: int) -> tuple[Tensor, list[Tensor]]:
    """This rank's part of the input gradient, and the weight gradient as it is found, and summed over ranks.

    Args:
        own: what `convolved` gave; adjoint: of the whole output.
    """
    part = adjoint.chunk(dist.get_world_size(), axis)[dist.get_rank()]
    # Where the field was gathered, every rank has all of the result, and DTensor takes it as one.
    (own * (adjoint if own.shape == adjoint.shape else part)).sum().backward()
    assert split.grad is not None and kernel.grad is not None
    with torch.no_grad():
        found = kernel.grad.full_tensor() if isinstance(kernel.grad, DTensor) else kernel.grad
        total = found.clone()
        dist.all_reduce(total)
    return split.grad.to_local(), [found, total]
