"""The loss: CRPS of the predicted distribution, and squared error of the predicted spread, each field as a ratio.

Axes: B date, T lead, V pressure-level variable, S surface variable, Z level, Y latitude, X longitude.

    loss = sum w CRPS / error  /  sum w   +   spread_weight * sum w (spread - S)^2 / spread_error  /  sum w

w is the exact cell area, zero where the target is missing. `error` and `spread_error` are what the untrained,
statistical forecast has for the same lead, variable and level, CRPS on validation dates, squared errors on training
dates (for the same number of members): so every field starts near one, and a percent of one counts as much as a percent
of another, as in the geometric means that scores are reported in. Sums and weights are added before they are divided,
weights over all ranks, so short batches, missing fields and shards of any size are exact: a rank's loss is its share,
and the sum over ranks is the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ensemble_ml.distributed import Communicator, NullCommunicator
from ensemble_ml.fields import Family
from ensemble_ml.loading import Batch
from ensemble_ml.models import ModelSpec, Prediction, distributions
from ensemble_ml.models.positions import integers, take


@dataclass(eq=False)
class Loss:
    """Scales and weights of the loss of one run.

    `error_p` (T, V, Z), `error_s` (T, S): typical CRPS; `spread_error_p` (N + 1, T, V, Z) and `spread_error_s`
    (N + 1, T, S): typical squared error of the spread from M members in row M; `area` (Y, X): mean one over the grid;
    `ranks`: those that share the batch.
    """

    spec: ModelSpec
    error_p: Tensor
    error_s: Tensor
    spread_error_p: Tensor
    spread_error_s: Tensor
    area: Tensor
    spread_weight: float = 1.0
    ranks: Communicator = field(default_factory=NullCommunicator)

    def __call__(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Return `loss` and its parts `crps` and `spread`, where the model has the heads and the batch the targets."""
        sums: dict[str, tuple[Tensor, Tensor]] = {}
        families_p, families_s = self.spec.families
        if prediction.location_p is not None or prediction.location_s is not None:
            sums["crps"] = _added(
                self._crps(families_p, prediction.location_p, prediction.scale_p, batch.truth_p, self.error_p),
                self._crps(families_s, prediction.location_s, prediction.scale_s, batch.truth_s, self.error_s),
            )
        members = batch.inputs.count.long()
        if prediction.spread_p is not None or prediction.spread_s is not None:
            sums["spread"] = _added(
                self._square(prediction.spread_p, batch.target_spread_p, self.spread_error_p[members]),
                self._square(prediction.spread_s, batch.target_spread_s, self.spread_error_s[members]),
            )
        terms = self._over_weights(sums)
        total = terms.get("crps", 0.0) + self.spread_weight * terms.get("spread", 0.0)
        return {"loss": torch.as_tensor(total), **terms}

    def _over_weights(self, sums: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Each sum of values over the sum of weights of all ranks; zero where nothing has a weight."""
        if not sums:
            return {}
        weights = torch.stack([weight for _, weight in sums.values()])
        self.ranks.all_reduce(weights)
        least = weights.clamp(min=1e-12)
        return {k: total / weight.to(total.dtype) for (k, (total, _)), weight in zip(sums.items(), least, strict=True)}

    def _crps(
        self,
        families: Sequence[Family],
        location: Tensor | None,
        scale: Tensor | None,
        truth: Tensor | None,
        error: Tensor,
    ) -> tuple[Tensor, Tensor] | None:
        if location is None or scale is None or truth is None:
            return None
        known = torch.isfinite(truth)
        # A masked target is replaced before the formula, so that no NaN reaches a gradient.
        score = crps(families, location, scale, torch.where(known, truth, location.detach()))
        return self._sums(score / error[..., None, None], known)

    def _square(self, spread: Tensor | None, target: Tensor | None, error: Tensor) -> tuple[Tensor, Tensor] | None:
        if spread is None or target is None:
            return None
        known = torch.isfinite(target)
        square = (spread - torch.where(known, target, spread.detach())) ** 2
        return self._sums(square / error[..., None, None], known)

    def _sums(self, values: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        weight = known * self.area
        # In double precision the sum of weights does not depend on how cells are shared out.
        return (values * weight).sum(), weight.sum(dtype=torch.float64)


def crps(families: Sequence[Family], location: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """CRPS of variables on axis 2, each by its own family; all tensors (B, T, V, ...)."""
    kinds = list(dict.fromkeys(families))
    if len(kinds) == 1:
        return distributions.crps(kinds[0], location, scale, y)
    scores = torch.empty_like(location)
    for kind in kinds:
        at = [position for position, family in enumerate(families) if family is kind]
        own = (take(values, 2, at) for values in (location, scale, y))
        scores.index_copy_(2, integers(at, scores.device), distributions.crps(kind, *own))
    return scores


def _added(*sums: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Sum of all values, and of all weights."""
    there = [pair for pair in sums if pair is not None]
    total, weight = (torch.stack(parts).sum() for parts in zip(*there, strict=True))
    return total, weight
