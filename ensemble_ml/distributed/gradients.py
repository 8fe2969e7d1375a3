"""The gradient of the whole batch from each rank's share of it, in full precision."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ensemble_ml.distributed.communicator import Communicator

_BUCKET = 32_000_000  # bytes: large enough for the network, small enough to need no second copy of the model


@torch.no_grad()
def sum_gradients(params: Iterable[Tensor], ranks: Communicator) -> None:
    """Replace the gradients of `params` by their sum over `ranks`; all must have gradients of the same parameters."""
    if ranks.size == 1:
        return
    bucket: list[Tensor] = []
    for param in params:
        if param.grad is not None:
            bucket.append(param.grad)
            if sum(g.numel() * g.element_size() for g in bucket) >= _BUCKET:
                _sum(bucket, ranks)
                bucket = []
    if bucket:
        _sum(bucket, ranks)


def _sum(grads: list[Tensor], ranks: Communicator) -> None:
    flat = torch.cat([g.reshape(-1) for g in grads])
    ranks.all_reduce(flat)
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view(grad.shape))
