"""Optimizers of torch that do not import torch's compiler.

torch wraps some methods of its optimizers so that their first call, which the constructor makes, imports
`torch._dynamo`. That costs each process three to five seconds of processor time and 80 MB, whether or not anything is
compiled. Here the methods inside the wrappers are called directly. They do the same work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

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


class AdamW(Eager, torch.optim.AdamW):
    """torch's AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, as torch's AdamW does."""
        return _ADAMW_STEP(self, closure)
