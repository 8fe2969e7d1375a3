"""What a model loses with channels and hidden units, for compaction (`training.compact`).

A channel, or hidden unit, has the importance

    I_c = mean over batches of (sum over its weights of theta dL / dtheta)^2

of the averaged weights on training batches (Molchanov et al. 2019, doi:10.1109/CVPR.2019.01152).

The last layers of the two networks of points are linear, so they are refitted by ridge regression to the outputs of the
whole network. The second moments of the hidden units say beforehand what that leaves of the error, so the importance of
the units that go is multiplied by this share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemble_ml.models import EnsembleModel
from ensemble_ml.models.compact import NETWORKS, Group, groups
from ensemble_ml.models.surroundings import Surroundings, apply_first
from ensemble_ml.training.assemble import Run

BATCHES = 16  # training batches that importance is measured on
_STRIDE = 4  # every such point of these gives second moments of hidden units
_RIDGE = 1e-5  # of the mean second moment of hidden units


@dataclass(frozen=True)
class Importance:
    """What a model loses with channels and hidden units.

    Attributes:
        terms: importance of each channel or unit, by group.
        moments: (H + 1, H + 1) mean products of hidden units and the constant, by network.
    """

    terms: dict[str, Tensor]
    moments: dict[str, Tensor]

    def kept(self, name: str, size: int) -> list[int]:
        """Return the indices of the most important channels of a group, in their order."""
        return sorted(self.terms[name].topk(size).indices.tolist())

    def lost(self, model: EnsembleModel, name: str, size: int) -> float:
        """Return the importance of what goes with a cut of a group, less what a refit makes up for."""
        terms = self.terms[name]
        gone = float(terms.sum() - terms.topk(size).values.sum())
        if name not in NETWORKS or size == len(terms):
            return gone
        return gone * refitted(getattr(model, name).second, self.moments[name], self.kept(name, size))[1]


def measure_importance(run: Run, model: EnsembleModel) -> Importance:
    """Measure importance on the first training batches.

    Args:
        run: the run of the model.
        model: the model.
    """
    every = groups(model.spec, model.state_dict())
    networks = {name: getattr(model, name) for name in NETWORKS if name in every}
    sums = {name: torch.zeros(group.size, device=run.device) for name, group in every.items()}
    with _second_moments(networks) as moments:
        tensors = dict(model.named_parameters())
        for name, network in networks.items():  # they are buffers, which no step of training changes
            tensors |= {f"{name}.{key}": getattr(network, key).requires_grad_() for key in ("first", "second")}
        for batch in run.batches(0, BATCHES):
            moved = batch.to(run.device, run.dtype)
            loss = run.loss(model(moved.inputs), moved)["loss"]
            found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
            gradients = {key: g for key, g in zip(tensors, found, strict=True) if g is not None}
            for name, group in every.items():
                sums[name] += _terms(group, tensors, gradients) ** 2
    for network in networks.values():
        for key in ("first", "second"):
            getattr(network, key).requires_grad_(False)
    return Importance({name: values / BATCHES for name, values in sums.items()}, moments)


def _terms(group: Group, tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of weights times gradients of each channel of a group."""
    found = torch.zeros(group.size, device=next(iter(gradients.values())).device)
    for key, axis in group.parts:
        if key in gradients:
            products = (tensors[key] * gradients[key]).detach().movedim(axis, 0)[: group.size]
            found += products.reshape(group.size, -1).sum(1)
    return found


@contextmanager
def _second_moments(networks: Mapping[str, Surroundings]) -> Iterator[dict[str, Tensor]]:
    """Sum up the products of hidden units, and of the constant, of all that the networks compute within the context."""
    found: dict[str, Tensor] = {}
    hooks = []
    for name, network in networks.items():

        def add(module: Surroundings, inputs: tuple[Tensor], name: str = name) -> None:
            """Add the products at some points of a strip."""
            with torch.no_grad():
                points = inputs[0].flatten(2)[..., ::_STRIDE].float()
                hidden = apply_first(module.first.float(), points).movedim(1, 0).flatten(1).double()
                hidden = torch.cat([hidden, torch.ones_like(hidden[:1])])
                found[name] = found.get(name, 0) + hidden @ hidden.T

        hooks.append(network.register_forward_pre_hook(add))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def refitted(second: Tensor, moments: Tensor, kept: list[int]) -> tuple[Tensor, float]:
    """Fit the last layer of a network of points to the outputs of the whole network, from some of its hidden units.

    With G the second moments and S what is kept, W' = W G_S (G_SS + ridge)^-1.

    Args:
        second: (O, H + 1) the last layer W.
        moments: (H + 1, H + 1) the second moments G.
        kept: indices of hidden units; the constant is always kept.

    Returns:
        (O, kept + 1) the new layer, and the error that it leaves, as a share of what the cut alone leaves.
    """
    chosen = torch.tensor([*kept, len(moments) - 1], device=moments.device)
    weights, inner = second.double(), moments[chosen][:, chosen]
    ridge = _RIDGE * inner.diagonal().mean() * torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
    fitted = torch.linalg.solve(inner + ridge, moments[chosen] @ weights.T).T

    def error(layer: Tensor) -> Tensor:
        """Return the sum of squared differences to the outputs of the whole network."""
        difference = weights.index_add(1, chosen, -layer)
        return ((difference @ moments) * difference).sum()

    return fitted.to(second.dtype), float(error(fitted) / error(weights[:, chosen]).clamp(min=1e-300))
