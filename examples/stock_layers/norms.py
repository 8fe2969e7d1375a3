"""Normalisation layers over a partitioned field: moments of the shards, merged by Chan's formula in rank order.

Means of shards of different sizes do not add, but (n, mean, M2) merge exactly (Chan, Golub and LeVeque 1983,
doi:10.1080/00031305.1983.10483115):

    n    = n_a + n_b
    mean = mean_a + (mean_b - mean_a) n_b / n
    M2   = M2_a + M2_b + (mean_b - mean_a)^2 n_a n_b / n

    n      number of values
    mean   their mean
    M2     their sum of squared deviations from the mean

One all_gather carries the moments; its backward pass is a sum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.distributed.mesh import Mesh
from ensemble_ml.errors import UserError


def check_axes(layer: Any, x: Tensor, spatial: int | None = None) -> None:
    """Raise a UserError if `x` has no batch axis. Another axis would then be taken for the partitioned one.

    Args:
        layer: a partitioned layer.
        x: its input.
        spatial: number of axes after batch and channels; None for layers that accept several numbers.
    """
    least = max(layer.part_axes) + 1
    wanted = least if spatial is None else spatial + 2
    if x.ndim < least or (spatial is not None and x.ndim != wanted):
        raise UserError(
            f"{type(layer).__name__.removeprefix('Part')}: a tensor of {x.ndim} axes, {tuple(x.shape)}, whose axes"
            f" {layer.part_axes} are shared out; over several ranks it takes {wanted} axes, batch and channels first"
        )


class _AllGather(torch.autograd.Function):
    """The autograd function of `all_gather`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        out = x.new_empty(comm.size * x.numel())
        comm.all_gather(out, x.reshape(-1))
        return out.view(comm.size, *x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every rank's result depends on this rank's input, so the gradients of all ranks add up. The sum is in place,
        # and autograd may still use `grad`.
        grad = grad.contiguous().clone()
        ctx.comm.all_reduce(grad)
        return grad[ctx.comm.rank], None


def all_gather(x: Tensor, comm: Communicator) -> Tensor:
    """Return every rank's `x`, all of one shape, as (P, ...). The result is differentiable."""
    return _AllGather.apply(x, comm)


def moments(x: Tensor, dims: Sequence[int], comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    """Return (n, mean, M2) of `x` over some axes and the ranks of `comm`. The result is differentiable.

    A rank without values contributes nothing.

    Args:
        x: this rank's shard.
        dims: the axes to reduce, which are kept with length one.
        comm: the ranks that hold the shards.
    """
    values = math.prod(x.shape[d] for d in dims)
    # `new_full` avoids a copy from the host, for which a GPU would have to stop.
    count = x.new_full((), float(values))
    # Without values the mean is zero. NaN would make the merged mean of all ranks NaN.
    mean = x.sum(list(dims), keepdim=True) / max(values, 1)
    m2 = ((x - mean) ** 2).sum(list(dims), keepdim=True)
    if comm.size == 1:
        return count, mean, m2
    packed = torch.cat([count.reshape(1), mean.reshape(-1), m2.reshape(-1)])
    parts = all_gather(packed, comm)
    size = mean.numel()
    total = (parts[0, 0], parts[0, 1 : size + 1], parts[0, size + 1 :])
    for part in parts[1:]:
        total = _merged(total, (part[0], part[1 : size + 1], part[size + 1 :]))
    return total[0], total[1].view(mean.shape), total[2].view(mean.shape)


def _merged(a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the moments of two shards by Chan's formula."""
    count = a[0] + b[0]
    delta, share = b[1] - a[1], b[0] / count.clamp(min=1)  # both shards may be without values
    return count, a[1] + delta * share, a[2] + b[2] + delta**2 * (a[0] * share)


def _scaled(x: Tensor, found: tuple[Tensor, Tensor, Tensor], eps: float) -> Tensor:
    """Return `x` with mean 0 and variance 1 by the moments given."""
    count, mean, m2 = found
    return (x - mean) * torch.rsqrt(m2 / count + eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply by a weight and add a bias for each channel, where the layer has them."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


class PartGroupNorm(nn.GroupNorm):
    """A GroupNorm over the whole grid."""

    part_mesh: Mesh
    part_axes: tuple[int, int]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each group of channels by its moments over the points of all ranks.

        Args:
            x: (B, C, ...) this rank's shard.

        Returns:
            The normalised shard, in the shape and type of `x`.

        Raises:
            UserError: `x` has no batch axis.
        """
        check_axes(self, x)
        size = math.prod(x.shape[1:]) // self.num_groups  # `reshape` cannot infer -1 if there is no sample
        grouped = _wide(x).reshape(x.shape[0], self.num_groups, size)
        scaled = _scaled(grouped, moments(grouped, (2,), self.part_mesh.spatial), self.eps)
        return _affine(scaled.view(x.shape), self.weight, self.bias).to(x.dtype)


def _normalised(self: Any, x: Tensor, dims: Sequence[int], comm: Communicator) -> Tensor:
    """Normalise by the current statistics, and update the running ones if the layer tracks them."""
    check_axes(self, x, 2 if isinstance(self, nn.BatchNorm2d | nn.InstanceNorm2d) else 3)
    kind, x = x.dtype, _wide(x)
    found = moments(x, dims, comm)
    if self.training and self.track_running_stats and self.running_mean is not None:
        _track(self, found)
    return _affine(_scaled(x, found, self.eps), self.weight, self.bias).to(kind)


def _wide(x: Tensor) -> Tensor:
    """Return `x` in float32 at least.

    A count above 65,504 is infinite in float16, and bfloat16 has three digits for a mean.
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@torch.no_grad()
def _track(self: Any, found: tuple[Tensor, Tensor, Tensor]) -> None:
    """Update the running statistics of a layer as torch does."""
    count, mean, m2 = found
    momentum = self.momentum or 0.0
    # Instance norm does not count batches.
    if isinstance(self, nn.BatchNorm2d | nn.BatchNorm3d):
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        momentum = self.momentum if self.momentum is not None else 1 / int(self.num_batches_tracked)  # type: ignore[arg-type]
    found_here = torch.stack([mean, m2 / (count - 1)]).reshape(2, -1, self.num_features)
    values = found_here.sum(1)
    # Instance norm keeps the mean over all samples, those of other data ranks included.
    if not isinstance(self, nn.BatchNorm2d | nn.BatchNorm3d):
        samples = values.new_tensor([float(found_here.shape[1])])
        total = all_gather(torch.cat([values.flatten(), samples]), self.part_mesh.data).sum(0)
        values = total[:-1].view(2, -1) / total[-1]
    for kept, value in zip((self.running_mean, self.running_var), values, strict=True):
        kept.lerp_(value.to(kept.dtype), momentum)


def _uses_batch(self: Any) -> bool:
    """Return whether a layer uses the statistics of the batch, and not the running ones."""
    return self.training or self.running_mean is None


def over_batch(layer: nn.Module) -> bool:
    """Return whether a norm combines the samples of a batch, for its result or for its running statistics.

    Instance norm without running statistics does not, but is included: torch's own version fails without a sample.
    """
    return isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d | nn.InstanceNorm2d | nn.InstanceNorm3d)


class _PartBatchNorm:
    """A mixin for BatchNorm: moments over all ranks that train one set of weights."""

    part_mesh: Mesh

    def forward(self, x: Tensor) -> Tensor:
        if not _uses_batch(self):
            return super().forward(x)  # type: ignore[misc]
        return _normalised(self, x, (0, *range(2, x.ndim)), self.part_mesh.model)


class _PartInstanceNorm:
    """A mixin for instance norm: moments over all ranks that share a sample."""

    part_mesh: Mesh

    def forward(self, x: Tensor) -> Tensor:
        if not (_uses_batch(self) or not self.track_running_stats):  # type: ignore[attr-defined]
            return super().forward(x)  # type: ignore[misc]
        return _normalised(self, x, tuple(range(2, x.ndim)), self.part_mesh.spatial)


class PartBatchNorm2d(_PartBatchNorm, nn.BatchNorm2d):
    """A BatchNorm over the whole grid and the whole batch."""


class PartBatchNorm3d(_PartBatchNorm, nn.BatchNorm3d):
    """A BatchNorm over the whole grid and the whole batch."""


class PartInstanceNorm2d(_PartInstanceNorm, nn.InstanceNorm2d):
    """An instance norm over the whole grid."""


class PartInstanceNorm3d(_PartInstanceNorm, nn.InstanceNorm3d):
    """An instance norm over the whole grid."""
