"""The check that all ranks hold the same model: hashes of its layout and weights, compared before the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ensemble_ml.distributed.communicator import Communicator
from ensemble_ml.errors import UserError


def check_same_model(params: Sequence[Tensor], *groups: Communicator) -> None:
    """Compare layout (shapes, types, memory formats) and weights with those of the first of the ranks that are joined.

    Args:
        params: the parameters of this rank.
        groups: communicators that together join these ranks. That of consecutive ranks comes first, then that of the
            ranks at the same place of each such group.

    Raises:
        UserError: raised on every rank. The message names the ranks that differ by their numbers, from 0, among the
            ranks that are joined.
    """
    if all(group.size == 1 for group in groups):
        return
    everyone = torch.tensor([layout_hash(params), weights_hash(params)], device=params[0].device)
    for group in groups:
        own, everyone = everyone, everyone.new_empty(group.size * len(everyone))
        group.all_gather(everyone, own)
    layouts, weights = everyone.view(-1, 2).T.tolist()
    if others := [r for r, found in enumerate(layouts) if found != layouts[0]]:
        raise UserError(
            f"ranks {', '.join(map(str, others))}: their model differs from rank 0's in its layout (shapes, types or"
            " order of axes in memory); give every rank the same model, data and precision settings"
        )
    if others := [r for r, found in enumerate(weights) if found != weights[0]]:
        raise UserError(
            f"ranks {', '.join(map(str, others))}: their weights differ from rank 0's; start every rank from the same"
            " seed or checkpoint"
        )


def layout_hash(params: Sequence[Tensor]) -> int:
    """Return 63 bits that identify how the parameters lie in memory."""
    return _number(hashlib.sha256(repr([(p.shape, p.stride(), p.dtype) for p in params]).encode()))


@torch.no_grad()
def weights_hash(params: Sequence[Tensor]) -> int:
    """Return 63 bits that identify the values of the parameters."""
    found = hashlib.sha256()
    for p in params:
        found.update(p.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return _number(found)


def _number(found: hashlib._Hash) -> int:
    """Return the first 63 bits of a hash, which fit into an int64."""
    return int.from_bytes(found.digest()[:8], "little") >> 1
