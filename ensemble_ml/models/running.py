"""What forward passes in training mode change of a model beside its gradients: running statistics of batch norms."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Running:
    """The running statistics of a model as they are now, to be put back after passes that shall leave no trace."""

    def __init__(self, model: nn.Module):
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self._kept = [(norm, {name: values.clone() for name, values in norm.named_buffers()}) for norm in norms]

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo what has changed them since."""
        for norm, values in self._kept:
            for name, before in values.items():
                getattr(norm, name).copy_(before)
