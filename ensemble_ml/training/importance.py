"""Measures the importance of channels and hidden units, by which compaction chooses what to cut (`training.compact`).

The importance of a channel or hidden unit c is (Molchanov et al. 2019, doi:10.1109/CVPR.2019.01152)

    I_c = mean over training batches of (sum over its weights theta of theta dL / dtheta)^2

    L   the loss, with the weights that predict

After a cut, the last layer of the point network, which is linear, is refitted by ridge regression to the outputs of the
whole network. The second moments of the hidden units give the share of the error that a refit leaves. The importance of
the hidden units that are cut is multiplied by this share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemble_ml.models import EnsembleModel
from ensemble_ml.models.compact import POINTS, Group, groups
from ensemble_ml.models.points import PointNetwork, apply_first
from ensemble_ml.training.assemble import Run

BATCHES = 16  # training batches that importance is measured on
_STRIDE = 4  # second moments are summed over every fourth point of these batches
_RIDGE = 1e-5  # ridge, relative to the mean second moment of hidden units


@dataclass(frozen=True)
class Importance:
    """The importance of a model's channels and hidden units.

    Attributes:
        terms: importance of each channel or unit, by group (`models.compact`).
        moments: (H + 1, H + 1) products of the H hidden units of the point network and the constant 1, summed over
            every fourth point; None without a point network.
    """

    terms: dict[str, Tensor]
    moments: Tensor | None

    def kept(self, name: str, size: int) -> list[int]:
        """Return the indices of the `size` most important channels or units of a group, ascending."""
        return sorted(self.terms[name].topk(size).indices.tolist())

    def lost(self, model: EnsembleModel, name: str, size: int) -> float:
        """Return the importance that a cut of a group to `size` loses, after the refit of the point network."""
        terms = self.terms[name]
        gone = float(terms.sum() - terms.topk(size).values.sum())
        if self.moments is None or model.points is None or name != POINTS or size == len(terms):
            return gone
        return gone * refitted(model.points.second, self.moments, self.kept(name, size))[1]


def measure_importance(run: Run, model: EnsembleModel) -> Importance:
    """Measure the importance for a run's model, with the weights that predict, on `BATCHES` training batches."""
    every = groups(model.spec, model.state_dict())
    sums = {name: torch.zeros(group.size, device=run.device) for name, group in every.items()}
    with _second_moments(model.points) as moments:
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        # The weights of the point network are buffers, because training does not change them.
        fitted = {} if model.points is None else {f"{POINTS}.{k}": v for k, v in model.points.named_buffers()}
        fitted = {key: fitted[key].requires_grad_() for key in (f"{POINTS}.first", f"{POINTS}.second") if key in fitted}
        tensors |= fitted
        for batch in run.batches(0, BATCHES):
            moved = batch.to(run.device, run.dtype)
            loss = run.loss(model(moved.inputs), moved)["loss"]
            found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
            gradients = {key: g for key, g in zip(tensors, found, strict=True) if g is not None}
            for name, group in every.items():
                sums[name] += _terms(group, tensors, gradients) ** 2
    for weights in fitted.values():
        weights.requires_grad_(False)
    return Importance({name: values / BATCHES for name, values in sums.items()}, moments[0] if moments else None)


def _terms(group: Group, tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of weights times gradients of each channel of a group."""
    found = torch.zeros(group.size, device=next(iter(gradients.values())).device)
    for key, axis in group.parts:
        if key in gradients:
            products = (tensors[key] * gradients[key]).detach().movedim(axis, 0)[: group.size]
            found += products.reshape(group.size, -1).sum(1)
    return found


@contextmanager
def _second_moments(network: PointNetwork | None) -> Iterator[list[Tensor]]:
    """Sum the products of hidden units and the constant over every fourth point of all passes within the context.

    Yields:
        A list, empty until the first pass; then its only item is the sum (H + 1, H + 1).
    """
    found: list[Tensor] = []

    def add(module: PointNetwork, inputs: tuple[Tensor]) -> None:
        """Add the products at every fourth point of one call of the network."""
        with torch.no_grad():
            points = inputs[0].flatten(2)[..., ::_STRIDE].float()
            hidden = apply_first(module.first.float(), points).movedim(1, 0).flatten(1).double()
            hidden = torch.cat([hidden, torch.ones_like(hidden[:1])])
            found[:] = [hidden @ hidden.T + (found[0] if found else 0)]

    hook = None if network is None else network.register_forward_pre_hook(add)
    try:
        yield found
    finally:
        if hook is not None:
            hook.remove()


def refitted(second: Tensor, moments: Tensor, kept: list[int]) -> tuple[Tensor, float]:
    """Fit the last layer of a point network with fewer hidden units to the outputs of the whole network.

    With S the kept units and the constant, and I the unit matrix: W' = W G_S (G_SS + ridge I)^-1.

    Args:
        second: (O, H + 1) the last layer W.
        moments: (H + 1, H + 1) the second moments G, up to a factor.
        kept: indices of hidden units; the constant is always kept.

    Returns:
        (O, kept + 1) the new layer W', and its squared error as a share of that without a refit.
    """
    chosen = torch.tensor([*kept, len(moments) - 1], device=moments.device)
    weights, inner = second.double(), moments[chosen][:, chosen]
    ridge = _RIDGE * inner.diagonal().mean() * torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
    fitted = torch.linalg.solve(inner + ridge, moments[chosen] @ weights.T).T

    def error(layer: Tensor) -> Tensor:
        """Return the sum of squared differences from the outputs of the whole network."""
        difference = weights.index_add(1, chosen, -layer)
        return ((difference @ moments) * difference).sum()

    return fitted.to(second.dtype), float(error(fitted) / error(weights[:, chosen]).clamp(min=1e-300))
