"""Shard the U-Net's weights over ranks: each rank keeps a part of every kernel, of its gradient and of its momenta.

Torch's FSDP2 (`fully_shard`) does the work. A rank gathers the weights of a residual block when it computes the block,
forward and backward, and frees them afterwards; gradients are summed and scattered. Results change only by rounding,
with or without a partition of the grid. The parameters outside the U-Net are small. They stay whole on each rank, and
their gradients are exchanged as without sharding.

Ranks that share the weights have consecutive numbers, so that they lie on one node where that is possible. If there are
more ranks than shards, they form groups that hold all weights each, and the groups add up their gradients.

FSDP2 needs contiguous kernels. If fields are channels-last, each convolution converts its kernel when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ensemble_ml.distributed.communicator import Communicator, TorchCommunicator, check_same_model
from ensemble_ml.distributed.mesh import Mesh
from ensemble_ml.models import EnsembleModel
from ensemble_ml.models.unet3d import ResidualBlock


def shard_weights(
    model: EnsembleModel, mesh: Mesh, outer: Communicator, inner: Communicator, *, after_forward: bool = True,
    by_block: bool = True,
) -> None:  # fmt: skip
    """Shard the weights of a model's U-Net over ranks, in place. All ranks of `mesh.model` call this.

    Call it after `partition_model`, and make the optimizer afterwards: the sharded parameters are new ones.

    The ranks `outer` hold the same part of the weights, and the ranks `inner` hold all weights together
    (`choice.consecutive_groups`). With `after_forward`, gathered weights are freed after the forward pass, and gathered
    again for the backward pass. With `by_block`, the weights of one residual block are gathered at a time, not those of
    the whole U-Net. Runs use these defaults; `benchmark=shard` measures the alternatives.

    Raises:
        UserError: the models of the ranks differ, in their layout or their weights.
    """
    # These take more than a second to import, and most runs do not need them.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    check_same_model(list(model.parameters()), mesh.model)
    # `from_group` takes groups that have the timeout of the job; a mesh that torch makes would have its own.
    kind, members = next(model.parameters()).device.type, torch.tensor(mesh.topology.group("data", "lat", "lon"))
    assert isinstance(inner, TorchCommunicator)
    if isinstance(outer, TorchCommunicator):
        both, names = [outer.group, inner.group], ("replicate", "shard")
        ranks = DeviceMesh.from_group(both, kind, members.view(-1, inner.size), mesh_dim_names=names)
    else:
        ranks = DeviceMesh.from_group(inner.group, kind)
    for p in model.unet.parameters():
        p.data = p.data.contiguous()
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    # Autocast rounds weights to bfloat16 in any case, so half of the bytes give the same numbers.
    if model.speed.low:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    blocks = [module for module in model.unet.modules() if by_block and isinstance(module, ResidualBlock)]
    for module in (*blocks, model.unet):
        # By default, torch leaves the outermost weights gathered after a forward pass. If no backward pass follows, the
        # model's parameters would then look as if they were not sharded.
        unit = fully_shard(module, mesh=ranks, mp_policy=policy, reshard_after_forward=after_forward)
        assert isinstance(unit, FSDPModule)
        # The ranks' losses add up to that of the batch, and so do gradients. A factor of 1.0 alone selects a collective
        # that gloo lacks, so the plain sum is requested as well.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)


def shards_of(p: Tensor) -> Any:
    """Return the ranks over which a tensor is sharded, as torch's mesh; None if it is whole on each rank."""
    return getattr(p, "device_mesh", None)  # the class itself would have to be imported, which takes a second


def local(p: Any) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory; the tensor itself if it is not sharded."""
    return p.detach() if shards_of(p) is None else p.detach().to_local()


def whole(p: Any) -> Tensor:
    """Return all of a tensor. All ranks call this if it is sharded."""
    return p.detach() if shards_of(p) is None else p.detach().full_tensor()


def like(p: Any, part: Tensor) -> Tensor:
    """Return a tensor of which `part` is this rank's part, if `p` is sharded; otherwise `part` itself."""
    mesh = shards_of(p)
    if mesh is None:
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def first_row(p: Any) -> int:
    """Return the row (index along the first axis) at which this rank's part of a tensor begins."""
    part, parts, _, _ = place_among_shards(p)
    # FSDP2 cuts as `torch.chunk` does, so the last ranks may have less, or nothing.
    return min(part * -(-len(p) // parts), len(p)) if part else 0


def place_among_shards(p: Tensor) -> tuple[int, int, int, int]:
    """Return (part, number of parts, copy, number of copies) of what this rank holds of a tensor."""
    mesh = shards_of(p)
    if mesh is None:
        return 0, 1, 0, 1
    which = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    return (*which, mesh.get_local_rank(0), mesh.size(0)) if mesh.ndim > 1 else (*which, 0, 1)


def split_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split each group of parameters into those that are whole and those that are sharded.

    An optimizer steps all parameters of a group in one operation, so they have to be of one kind. The new groups keep
    the settings of the old ones; empty groups are left out.
    """
    found = []
    for group in groups:
        for sharded in (False, True):
            some = [p for p in group["params"] if (shards_of(p) is not None) is sharded]
            found += [group | {"params": some}] if some else []
    return found


@torch.no_grad()
def idle_pass(model: EnsembleModel) -> None:
    """Run the U-Net on zeros, forward only.

    In validation, a rank without a sample calls this, because all ranks have to take part in gathering weights.
    """
    bias = model.plane_bias
    model.unet(bias.new_zeros(1, len(bias), *model.cells, bias.shape[1]))
