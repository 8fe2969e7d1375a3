"""The running statistics of batch norms, which each forward pass in training mode changes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Running:
    """A copy of a model's running statistics, used to restore them after passes that must not change the model.

    Args:
        model: any module, with or without batch norms.
    """

    def __init__(self, model: nn.Module):
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self._kept = [(norm, {name: values.clone() for name, values in norm.named_buffers()}) for norm in norms]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the statistics to the values they had when this object was made."""
        for norm, values in self._kept:
            for name, before in values.items():
                getattr(norm, name).copy_(before)
