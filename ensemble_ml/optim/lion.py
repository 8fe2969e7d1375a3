"""Lion: the sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675).

    u      = beta1 * momentum + (1 - beta1) * gradient
    weight = weight * (1 - lr * weight_decay) - lr * sign(u)
    momentum = beta2 * momentum + (1 - beta2) * gradient

(their Algorithm 2; the decay is applied first, which is the same up to a term lr^2 * weight_decay and is the order of
lion-pytorch and of the authors' own code). Every weight moves by exactly `lr` a step, so the learning rate is a third
to a tenth of AdamW's and the decay three to ten times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ensemble_ml.errors import UserError


class Lion(Optimizer):
    """Plain Lion on one process.

    Args:
        params: tensors, or dictionaries of a group's `params` and its own settings.
        lr: length of a step, in units of the weights.
        betas: share of the momentum in the update, and the momentum's decay.
        weight_decay: decoupled decay; weights shrink by `lr * weight_decay` a step.

    Raises:
        UserError: a setting is outside its range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
    ):
        if not lr > 0:
            raise UserError(f"lr={lr}: must be above 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise UserError(f"betas={betas}: must be in [0, 1)")
        if not weight_decay >= 0:
            raise UserError(f"weight_decay={weight_decay}: must be 0 or more")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            # The foreach kernels want one device and one type a call.
            for kind in dict.fromkeys((p.device, p.dtype) for p in params):
                self._update(group, [p for p in params if (p.device, p.dtype) == kind])
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        momenta = [self._momentum(p) for p in params]
        lr, (beta1, beta2) = group["lr"], group["betas"]
        updates = torch._foreach_mul(momenta, beta1)
        torch._foreach_add_(updates, grads, alpha=1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-lr)
        torch._foreach_mul_(momenta, beta2)
        torch._foreach_add_(momenta, grads, alpha=1 - beta2)

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state["exp_avg"]
