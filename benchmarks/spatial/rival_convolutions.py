"""Convolutions of a split tensor by other libraries, for comparison: torch's DTensor, and PhysicsNeMo's ShardTensor.

Beside torch's averagers of models, this is the only code outside of `ensemble_ml.distributed` that uses
`torch.distributed`.

Axes: B init time, C channel, Y latitude, X longitude, Z level.
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
    """Distribute `x` (B, C, Y, X, Z) along `axis` over all ranks, and the weight to each, as DTensors."""
    mesh = init_device_mesh(x.device.type, (dist.get_world_size(),))
    split = distribute_tensor(x, mesh, [Shard(axis)]).requires_grad_()
    return split, distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()


def shard_tensor_place() -> Place:
    """Return a function that does the same by PhysicsNeMo, whose own convolution and padding are then called.

    Raises:
        ImportError: PhysicsNeMo, or a package that it needs, is missing.
    """
    manager = importlib.import_module("physicsnemo.distributed").DistributedManager
    parallel = importlib.import_module("physicsnemo.domain_parallel")
    for name in ("custom_ops", "custom_ops._tensor_ops", "shard_utils.conv_patches", "shard_utils.padding"):
        # The library imports these by itself only on a machine with a GPU.
        importlib.import_module(f"physicsnemo.domain_parallel.{name}")
    made = dist.init_process_group
    dist.init_process_group = lambda *_, **__: None  # the process group exists; the manager would make it once more
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
    """Return this rank's shard of a 3 x 3 x 3 convolution, padded in Y and X by wrapping round or by zeros."""
    padded = F.pad(split, (0, 0, 1, 1, 1, 1), mode="circular") if circular else split
    found: Any = F.conv3d(padded, kernel, None, 1, (0, 0, 1) if circular else (1, 1, 1))
    return found.to_local()


def gradients(split: Any, kernel: Tensor, own: Tensor, adjoint: Tensor, axis: int) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's shard of the input gradient, and the weight gradient as it is and summed over ranks.

    Args:
        split: the distributed input.
        kernel: the weight.
        own: the result of `convolved`.
        adjoint: the gradient of the whole output.
        axis: the axis along which the input is split.
    """
    part = adjoint.chunk(dist.get_world_size(), axis)[dist.get_rank()]
    # If the library gathered the field, every rank holds the whole result, and the whole adjoint belongs to it.
    (own * (adjoint if own.shape == adjoint.shape else part)).sum().backward()
    assert split.grad is not None and kernel.grad is not None
    with torch.no_grad():
        found = kernel.grad.full_tensor() if isinstance(kernel.grad, DTensor) else kernel.grad
        total = found.clone()
        dist.all_reduce(total)
    return split.grad.to_local(), [found, total]
