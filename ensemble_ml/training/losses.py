"""Computes the loss: CRPS of the distribution and squared error of the spread, each relative to a baseline.

    loss = sum w CRPS / error / sum w  +  spread_weight * sum w (spread - S)^2 / spread_error / sum w

    w              exact area of the grid cell; zero where the target is missing
    CRPS           score of the predicted distribution against the truth
    error          CRPS of the untrained, statistical forecast on held-out dates, by lead and field
    spread         predicted spread of the full ensemble
    S              spread of the full ensemble
    spread_error   squared error of the untrained spread on training dates, by number of members, lead and field

With a teacher there is a third term: the squared distance of location, scale and spread to the teacher's, relative to
error^2 and spread_error, times `distill`. It also counts where the target is missing.

The loss of each field starts near one. So a gain of one percent counts the same in every field, as in the scores, which
are geometric means over fields.

A rank divides the sum over its own points by the sum of weights over the points of all ranks (`Loss.ranks`). So its
loss is its part, and the sum over ranks is exactly the loss of the whole batch, also for short batches, missing fields
and shards of any size.

Axes: B initialisation time, T lead, F field (variables and levels, then surface variables), Y latitude, X longitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ensemble_ml import distributions
from ensemble_ml.distributed import Communicator, NullCommunicator
from ensemble_ml.fields import Family
from ensemble_ml.loading import Batch
from ensemble_ml.models import AnyModel, ModelSpec, Prediction
from ensemble_ml.models.inputs import by_family, integers, take


@dataclass(eq=False)
class Loss:
    """The loss of one run.

    Attributes:
        spec: variables and their distributions.
        error: (T, F) typical CRPS, in physical units.
        spread_error: (N + 1, T, F) typical squared error of the spread; row M is for M members.
        area: (Y, X) areas of the cells, with mean one over the whole grid.
        spread_weight: weight of the spread's part.
        ranks: the ranks over whose points weights are summed: those that share the batch. If they may be some steps
            apart, only those that share a sample; the loss is then the mean over these samples.
        teacher: a model of the same fields, from whose forecasts this one learns, too; None for none.
        distill: weight of the distance to these forecasts.
    """

    spec: ModelSpec
    error: Tensor
    spread_error: Tensor
    area: Tensor
    spread_weight: float = 1.0
    ranks: Communicator = field(default_factory=NullCommunicator)
    teacher: AnyModel | None = None
    distill: float = 1.0

    def __call__(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Compute this rank's part of the loss.

        Returns:
            `loss` and its parts, scalars: `crps` and `spread`, each if the model has that head and the batch its
            target, and `distill` if there is a teacher. A part whose targets are all NaN is zero.
        """
        sums: dict[str, tuple[Tensor, Tensor] | None] = {"crps": self._crps(prediction, batch.truth)}
        # The error of the spread depends on the number of members, so each sample has the scale of its own number.
        spread_error = self.spread_error[batch.inputs.count.long()]
        sums["spread"] = self._square(prediction.spread, batch.target_spread, spread_error)
        if self.teacher is not None:
            sums["distill"] = self._distance(prediction, batch)
        terms = self._over_weights({name: pair for name, pair in sums.items() if pair is not None})
        total = terms.get("crps", 0.0) + self.spread_weight * terms.get("spread", 0.0)
        total = total + self.distill * terms["distill"] if "distill" in terms else total
        return {"loss": torch.as_tensor(total), **terms}

    def _distance(self, prediction: Prediction, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of squared distances to the teacher's forecasts, and the sum of weights."""
        assert self.teacher is not None
        with torch.no_grad():
            wanted = self.teacher(batch.inputs)
        units = {
            "location": self.error**2, "scale": self.error**2,
            "spread": self.spread_error[batch.inputs.count.long()],
        }  # fmt: skip
        return _added(*(self._square(getattr(prediction, k), getattr(wanted, k), unit) for k, unit in units.items()))

    def _over_weights(self, sums: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Divide each sum of values by the sum of weights over all ranks; zero where nothing has a weight."""
        if not sums:
            return {}
        # Values are not summed over ranks: each rank's loss is its part, and its gradients are summed later.
        weights = torch.stack([weight for _, weight in sums.values()])
        self.ranks.all_reduce(weights)
        least = weights.clamp(min=1e-12)
        return {k: total / weight.to(total.dtype) for (k, (total, _)), weight in zip(sums.items(), least, strict=True)}

    def _crps(self, prediction: Prediction, truth: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return the weighted sum of the relative CRPS and the sum of weights; None if there is nothing to score."""
        location, scale = prediction.location, prediction.scale
        if location is None or scale is None or truth is None:
            return None
        known = torch.isfinite(truth)
        # A missing target is replaced before the formula: a NaN multiplied by a weight of zero would still give a NaN
        # gradient.
        score = crps(self.spec.families, location, scale, torch.where(known, truth, location.detach()))
        return self._sums(score / self.error[..., None, None], known)

    def _square(self, predicted: Tensor | None, target: Tensor | None, error: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the weighted sum of squared errors relative to `error`, and the sum of weights.

        Return None without a prediction or a target.
        """
        if predicted is None or target is None:
            return None
        known = torch.isfinite(target)
        square = (predicted - torch.where(known, target, predicted.detach())) ** 2
        return self._sums(square / error[..., None, None], known)

    def _sums(self, values: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of values and the sum of weights."""
        weight = known * self.area
        # In double precision, the sum of weights does not depend on how the cells are divided among ranks.
        return (values * weight).sum(), weight.sum(dtype=torch.float64)


def crps(families: Sequence[Family], location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Return the CRPS of fields that have different distributions, (B, T, F, ...) in the units of `y`.

    Location and scale have the same shape and units. `families` are the distributions of the fields on axis 2.
    """
    # One call for each distribution. With a single one, no copy is needed.
    kinds = by_family(families)
    if len(kinds) == 1:
        return distributions.crps(kinds[0][0], location, scale, y)
    scores = torch.empty_like(location)
    for kind, at in kinds:
        own = (take(values, 2, at) for values in (location, scale, y))
        scores.index_copy_(2, integers(at, scores.device), distributions.crps(kind, *own))
    return scores


def _added(*sums: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return the sum of all values and the sum of all weights."""
    there = [pair for pair in sums if pair is not None]
    total, weight = (torch.stack(parts).sum() for parts in zip(*there, strict=True))
    return total, weight
