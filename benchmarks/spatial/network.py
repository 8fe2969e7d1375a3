"""Make the U-Nets of the benchmark of the spatial partition, and cut batches for their ranks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.step.benchmark import benchmark_spec, random_batch
from ensemble_ml.config import Precision
from ensemble_ml.distributed.topology import Shard
from ensemble_ml.distributions import crps
from ensemble_ml.fields import Family
from ensemble_ml.models import Climate, EnsembleInput, EnsembleModel, ModelSpec, Prediction, Speed


def network(spec: ModelSpec, precision: str = "float32") -> EnsembleModel:
    """Return an untrained model in channels-last layout.

    Args:
        spec: the inputs and outputs of the model.
        precision: name of the precision.
    """
    torch.manual_seed(0)
    model = EnsembleModel(spec, Climate.default(spec))
    Speed(Precision(precision), True).apply(model)
    return model


def perturbed(spec: ModelSpec) -> EnsembleModel:
    """Return a model without any branch that is zero, so that errors anywhere become visible.

    Args:
        spec: the inputs and outputs of the model.
    """
    model = network(spec)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def small_case(lat: int, lon: int, *, even: bool) -> tuple[ModelSpec, EnsembleInput]:
    """Return a grid that `lat` x `lon` ranks share, and a float64 batch on it.

    Args:
        lat: ranks along latitude.
        lon: ranks along longitude.
        even: whether all ranks get equal parts.
    """
    rows, columns = (8 * lat, 8 * lon) if even else (8 * lat + 5, 8 * lon + 8)
    config: dict[str, Any] = {"hidden": 8, "max_hidden": 16, "depth": 2}
    spec = benchmark_spec(2, rows, columns, **config)
    return spec, random_batch(spec, 2).to(torch.float64)


def cut_input(shard: Shard, x: EnsembleInput) -> EnsembleInput:
    """Return this rank's part of a batch.

    Args:
        shard: the rank's part of the grid.
        x: the batch on the whole grid.
    """
    names = [f.name for f in fields(x) if f.name not in ("count", "day_of_year")]
    return replace(x, **{n: shard.cut(getattr(x, n)).contiguous() for n in names if getattr(x, n) is not None})


def part_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """Return a spec for the grid of a rank's part alone, as if there were no other ranks.

    Args:
        spec: the spec of the whole grid.
        shard: the rank's part of the grid.
    """
    (top, bottom), (left, right) = shard.own_rows, shard.own_columns
    return replace(spec, latitude=spec.latitude[top:bottom], longitude=spec.longitude[left:right])


def weighted_loss(found: Prediction, shard: Shard | None, spec: ModelSpec) -> Tensor:
    """Return a sum over grid points of a function of all outputs, with a different weight at each point.

    Args:
        found: the prediction.
        shard: the rank's part of the grid, or None for all of it.
        spec: the spec of the whole grid.
    """
    weight = torch.rand(spec.grid.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    weight = weight if shard is None else shard.cut(weight)
    values = found.location, found.scale, found.spread
    terms = [(torch.log1p(v.double() ** 2) * weight.to(v.device)).sum() for v in values if v is not None]
    return torch.stack(terms).sum()


def training_loss(model: nn.Module, batch: EnsembleInput) -> Tensor:
    """Return CRPS and spread loss on a truth of zero, as a sum over grid points, so that the losses of parts add up.

    Args:
        model: the model.
        batch: its input.
    """
    found = model(batch)
    distance = crps(Family.NORMAL, found.location, found.scale, torch.zeros_like(found.location)).sum()
    return (distance + (found.spread - 1).square().sum()) * 1e-6
