"""The optimizers: Lion, which steps along the sign of an interpolated momentum, and torch's AdamW.

    u        = beta1 * momentum + (1 - beta1) * gradient
    weight   = weight * (1 - lr * weight_decay) - lr * sign(u)
    momentum = beta2 * momentum + (1 - beta2) * gradient

This is Algorithm 2 of Chen et al. (2023, arXiv:2302.06675). Apart from the decay, every weight moves by exactly `lr` in
a step, or not at all if u is zero. The learning rate is therefore a third to a tenth of AdamW's, and the decay three to
ten times as large.

With several ranks the signs may come from a vote, for which Lion asks its `Exchange`.

A gradient that is NaN or infinite would stay in the momentum for ever. The weight would then never move again, or
always in one direction. In both cases it stays finite, so nobody would notice. Such a step is refused before anything
changes.

`Eager` is the base of optimizers that do not import torch's compiler. torch wraps some methods of its optimizers so
that their first call, which the constructor makes, imports `torch._dynamo`. That costs each process three to five
seconds of processor time and 80 MB, whether or not anything is compiled. Here the methods inside the wrappers are
called directly. They do the same work.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ensemble_ml.errors import UserError
from ensemble_ml.optim.exchange import HALF, Exchange, dense_values, total_norm

_ADD_PARAM_GROUP, _ZERO_GRAD, _STATE_DICT, _LOAD_STATE_DICT = (
    inspect.unwrap(method)
    for method in (Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict)
)
_ADAMW_STEP = inspect.unwrap(torch.optim.AdamW.step)


class Eager(Optimizer):
    """A base class of optimizers that are not compiled. It must come before other base classes."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do."""
        _ADD_PARAM_GROUP(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero, as torch's optimizers do."""
        _ZERO_GRAD(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings of all groups, as torch's optimizers do."""
        return _STATE_DICT(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, as torch's optimizers do."""
        _LOAD_STATE_DICT(self, state_dict)


class Lion(Eager):
    """The Lion optimizer, for one rank or many.

    Without a call of `exchange.finish()`, `step` checks all gradients first and raises an error if one is not finite.
    Weights and momenta are then unchanged, so a caller may skip the step and go on. After `exchange.finish()` it does
    not check again: `Outcome.finite` says whether the step may be taken.

    The momentum of weights in bfloat16 or float16 is kept in float32. The weights are rounded to the nearest such
    number, so a step below half of their spacing is lost.

    Args:
        params: tensors, or dictionaries with the `params` of a group and its own settings.
        lr: length of a step, in units of the weights.
        betas: beta1 and beta2, in [0, 1): weights of the momentum in the update, and in the next momentum.
        weight_decay: decoupled decay; weights shrink by `lr * weight_decay` in a step.
        exchange: exchange with the other ranks, which is attached to this optimizer; None for a single rank.

    Raises:
        UserError: a setting is out of range; in `step`, a gradient is not finite.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
        *,
        exchange: Exchange | None = None,
    ):
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})
        self.exchange = exchange or Exchange()
        self.exchange.attach(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its own settings or those of the optimizer; raise a UserError if one is out of range."""
        _check(**{key: param_group.get(key, default) for key, default in self.defaults.items()})
        super().add_param_group(param_group)
        if hasattr(self, "exchange"):  # the constructor attaches the exchange after its own groups
            self.exchange.attach(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Parameters without a gradient are left unchanged.

        As in torch's optimizers, `closure` recomputes the loss before the step, and this loss is returned.

        Raises:
            UserError: a gradient is not finite. Nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.exchange.checked:
            self._refuse_what_is_not_finite()
        self.exchange.checked = False
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            # The foreach kernels need one device and one type in a call.
            for kind in dict.fromkeys((p.device, p.dtype) for p in params):
                self._update(group, [p for p in params if (p.device, p.dtype) == kind])
        return loss

    def momentum(self, p: Tensor) -> Tensor:
        """Return the momentum of a parameter, zeros before its first step."""
        state = self.state[p]
        if "exp_avg" not in state:
            kind = torch.float32 if p.dtype in HALF else p.dtype
            state["exp_avg"] = torch.zeros_like(p, dtype=kind, memory_format=torch.preserve_format)
        return state["exp_avg"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. The momentum of weights in half precision stays float32; torch itself would round it."""
        super().load_state_dict(state_dict)
        given = state_dict["state"]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in enumerate(params):
            if p.dtype in HALF and index in given:
                self.state[p]["exp_avg"] = given[index]["exp_avg"].to(p.device, torch.float32, copy=True)

    def _refuse_what_is_not_finite(self) -> None:
        """Raise a UserError that names the first parameter whose gradient is not finite."""
        params = [p for group in self.param_groups for p in group["params"]]
        # The largest magnitude is finite if and only if all gradients are; a sum of squares might overflow.
        if math.isfinite(float(total_norm(params, math.inf))):
            return
        grads = ((i, p.grad) for i, p in enumerate(params) if p.grad is not None)
        bad = next(i for i, grad in grads if not dense_values(grad).isfinite().all())
        raise UserError(
            f"Lion: the gradient of parameter {bad}, of shape {tuple(params[bad].shape)}, is not finite; no weight was"
            " changed: skip this step, or lower lr, or clip the gradients"
        )

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Step the parameters of one device and type, and update their momenta."""
        half = params[0].dtype in HALF
        grads = [p.grad.float() if half else p.grad for p in params if p.grad is not None]
        momenta = [self.momentum(p) for p in params]
        lr, (beta1, beta2) = group["lr"], group["betas"]
        updates = self.exchange.signs(params)
        if updates is None:
            updates = list(torch._foreach_mul(momenta, beta1))
            torch._foreach_add_(updates, grads, alpha=1 - beta1)
            torch._foreach_sign_(updates)
        weights = [p.float() for p in params] if half else params
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-lr)
        if half:
            torch._foreach_copy_(params, weights)
        if not self.exchange.abstains:
            torch._foreach_mul_(momenta, beta2)
            torch._foreach_add_(momenta, grads, alpha=1 - beta2)


def _check(lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    if not (lr >= 0 and math.isfinite(lr)):
        raise UserError(f"lr={lr}: must be 0 or more, and finite")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"betas={betas}: must be two numbers in [0, 1)")
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise UserError(f"weight_decay={weight_decay}: must be 0 or more, and finite")


class AdamW(Eager, torch.optim.AdamW):
    """torch's AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, as torch's AdamW does."""
        return _ADAMW_STEP(self, closure)
