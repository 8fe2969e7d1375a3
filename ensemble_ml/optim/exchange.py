"""What happens between backward and step. The base class is one rank's: nothing is exchanged.

    exchange.attach(optimizer)                  once
    exchange.begin(step)                        before backward; numbers the step
    with exchange.hold(): loss.backward()       all but the last part of an accumulated gradient
    loss.backward()
    outcome = exchange.finish()                 gradients agreed on, checked and clipped
    optimizer.step()

Exchanges over ranks (`ensemble_ml.distributed.exchange`) either average gradients, which any optimizer may then use, or
vote on the signs that Lion moves along; `signs` gives those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Outcome:
    """Of the exchange of one step.

    `norm` is the gradient's before clipping (this rank's own, where ranks vote); `culprits` are the ranks whose
    gradients were not finite (where ranks average before they vote, all that share such a mean); `waited` seconds
    were spent until the others' part was there, beside those that backward hid.
    """

    norm: float
    culprits: tuple[int, ...] = ()
    waited: float = 0.0
    bytes_sent: int = 0

    @property
    def finite(self) -> bool:
        """Whether the step may be taken; the same on every rank."""
        return not self.culprits


class Exchange:
    """One rank alone: gradients stay as they are.

    Args:
        clip: largest norm of the gradient; 0 leaves it alone.
    """

    def __init__(self, clip: float = 0.0):
        self.clip = clip
        self.share: float | None = None  # of the batch, what this rank computes; None: as much as the others
        self.with_samples: int | None = None  # ranks, the first ones, that have samples of the batch; None: all
        self.params: list[Tensor] = []
        self.apart: list[Tensor] = []  # of which each rank steps its own cells alone
        self.checked = False  # whether `finish` has looked at the gradients since the last step

    @property
    def abstains(self) -> bool:
        """Whether this rank's gradient says nothing, and its momentum stays as it is."""
        return False

    def attach(self, optimizer: Optimizer) -> None:
        """Serve the parameters of `optimizer`."""
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.apart = []

    def begin(self, step: int) -> None:
        """Prepare for the backward pass of `step`."""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Gradients of a backward pass in here wait for those of later ones."""
        yield

    def finish(self) -> Outcome:
        """Return once the gradients, or signs, of all ranks are agreed on."""
        norm = total_norm(self.params)
        if not math.isfinite(float(norm)):
            return Outcome(float(norm), (0,))
        self.checked = True
        if self.clip:
            torch.nn.utils.clip_grads_with_norm_(self.params, self.clip, norm)
        return Outcome(float(norm))

    def signs(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        """The directions that ranks voted for; None where Lion takes the signs of its own updates."""
        return None

    @property
    def seconds_waited(self) -> float:
        """Seconds that this rank has waited in the exchange's own collectives so far, hidden by backward or not."""
        return 0.0

    def after_step(self) -> dict[str, Any]:
        """Follow the optimizer's step; returns what the log should tell of it."""
        return {}

    def complete(self, p: Tensor, held: Sequence[Tensor]) -> None:
        """Bring the ranks' parts of `held`, each in the shape of `p` of `apart`, together on all of them."""

    def local_state(self) -> dict[str, Tensor]:
        """Tensors that differ between ranks and that a resumed run needs."""
        return {}

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """Take back this rank's tensors, or their mean over the ranks of a run of another size: here, momenta."""
        for i, p in enumerate(self.params):
            momentum, saved = getattr(self.optimizer, "momentum", None), state.get(f"momentum.{i}")
            if momentum is not None and saved is not None:
                momentum(p).copy_(saved)

    def close(self) -> None:
        """Let go of threads and hooks."""


def total_norm(params: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients together, where the parameters are."""
    grads = [dense_values(p.grad) for p in params if p.grad is not None]
    found = torch.nn.utils.get_total_norm([grad for grad in grads if grad.numel()], norm_type)
    return found.to(params[0].device) if params else found


def dense_values(grad: Tensor) -> Tensor:
    """Return a gradient, or the values that a sparse one holds, summed where it names an element twice."""
    return grad.coalesce().values() if grad.is_sparse else grad
