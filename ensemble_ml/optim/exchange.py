"""The interface by which ranks agree on gradients between the backward pass and the optimizer's step.

    exchange.attach(optimizer)                  once
    exchange.begin(step)                        before backward; numbers the step
    with exchange.hold(): loss.backward()       all parts but the last of an accumulated gradient
    loss.backward()
    outcome = exchange.finish()                 gradients agreed on, checked and clipped
    optimizer.step()

`finish` and `optimizer.step()` are repeated while `outcome.missed` is set: other ranks have taken steps without this
one (`ensemble_ml.distributed.quorum`).

The base class serves a single rank and exchanges nothing. Exchanges over ranks (`ensemble_ml.distributed.exchange`)
work in one of two ways. They average gradients, which any optimizer can then use, or they vote on the signs along which
Lion moves; `signs` returns these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Outcome:
    """The outcome of the exchange of one step.

    Attributes:
        norm: norm of the gradient before clipping; if ranks vote, that of this rank's own gradient.
        culprits: ranks whose gradients were not finite. If groups of ranks average before they vote, all ranks of a
            group whose mean was not finite.
        waited: seconds spent waiting for other ranks, without those hidden by the backward pass.
        bytes_sent: bytes that this rank sent.
        missed: other ranks took this step before this rank's gradient was complete. `finish` returns the next one.
        sums: the numbers of `Exchange.tells`, summed over the ranks that took part in the step; None if the exchange
            does not sum them.
    """

    norm: float
    culprits: tuple[int, ...] = ()
    waited: float = 0.0
    bytes_sent: int = 0
    missed: bool = False
    sums: dict[str, float] | None = None

    @property
    def finite(self) -> bool:
        """Return whether the step may be taken. The answer is the same on every rank."""
        return not self.culprits


class Exchange:
    """The exchange of a single rank: gradients stay as they are.

    It is also the base class of all exchanges.

    Args:
        clip: largest norm of the gradient; 0 for no clipping.

    Attributes:
        share: fraction of the batch that this rank computes; None for as much as the others.
        with_samples: number of ranks, the first ones, that have samples of the batch; None for all.
        params: the parameters that are exchanged.
        apart: the parameters of which each rank steps only its own grid points.
        checked: whether `finish` has checked the gradients since the last step.
        tells: function that returns numbers of this rank by name, which are summed over ranks along with the gradient
            if the exchange can do so. One may be `samples`, the number of this rank's samples.
    """

    def __init__(self, clip: float = 0.0):
        self.clip = clip
        self.share: float | None = None
        self.with_samples: int | None = None
        self.params: list[Tensor] = []
        self.apart: list[Tensor] = []
        self.checked = False
        self.tells: Callable[[], Mapping[str, float]] = dict

    @property
    def slack(self) -> int:
        """Return the largest difference that ranks may have in their numbers of steps done."""
        return 0

    def meets(self, step: int) -> bool:
        """Return whether all ranks wait for each other after `step` steps."""
        return True

    @property
    def abstains(self) -> bool:
        """Return True if this rank's gradient is not used in the step, and its momentum does not change."""
        return False

    def attach(self, optimizer: Optimizer) -> None:
        """Take the parameters of `optimizer` as those to exchange."""
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.apart = []

    def begin(self, step: int) -> None:
        """Prepare for the backward pass of `step`."""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let gradients of the backward passes in this context accumulate for a later one."""
        yield

    def finish(self) -> Outcome:
        """Agree with all ranks on gradients or signs, check that they are finite, and clip them."""
        norm = total_norm(self.params)
        if not math.isfinite(float(norm)):
            return Outcome(float(norm), (0,))
        self.checked = True
        if self.clip:
            torch.nn.utils.clip_grads_with_norm_(self.params, self.clip, norm)
        return Outcome(float(norm))

    def signs(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the directions that the ranks voted for, or None if Lion takes the signs of its own updates."""
        return None

    @property
    def seconds_waited(self) -> float:
        """Return the seconds that this rank has waited in collectives so far, also those that the backward pass hid."""
        return 0.0

    def after_step(self) -> dict[str, Any]:
        """Act after the optimizer's step. Return values for the log."""
        return {}

    def complete(self, p: Tensor, held: Sequence[Tensor]) -> None:
        """Gather the ranks' parts of some tensors, so that all ranks hold them whole. They are changed in place.

        `p` is a parameter of `apart`. The tensors `held`, in its shape, are right only at this rank's own grid points.
        """

    def local_state(self) -> dict[str, Tensor]:
        """Return the tensors that differ between ranks and that a resumed run needs."""
        return {}

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """Restore tensors of a checkpoint; in this class, momenta that a run with votes has saved.

        If the saved run had another number of ranks, the caller passes the mean over its ranks.
        """
        for i, p in enumerate(self.params):
            momentum, saved = getattr(self.optimizer, "momentum", None), state.get(f"momentum.{i}")
            if momentum is not None and saved is not None:
                momentum(p).copy_(saved)

    def close(self) -> None:
        """Release threads and hooks."""


def total_norm(params: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients together, as a scalar on the device of the parameters.

    Parameters without a gradient do not count. `norm_type` is p of the norm; infinity gives the largest magnitude.
    """
    grads = [grad for p in params if p.grad is not None and (grad := dense_values(p.grad)).numel()]
    # The norm of many numbers in half precision may be too large for such a number, so it is taken in float32.
    parts = [
        torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) if grad.dtype in HALF else grad for grad in grads
    ]
    found = torch.nn.utils.get_total_norm(parts, norm_type)
    return found.to(params[0].device) if params else found


def dense_values(grad: Tensor) -> Tensor:
    """Return a gradient, or the values of a sparse one, with values at the same index summed."""
    return grad.coalesce().values() if grad.is_sparse else grad
