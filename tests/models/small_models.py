"""Small models and random ensembles for the tests of `ensemble_ml.models`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ensemble_ml.config import ModelConfig
from ensemble_ml.models import Climate, EnsembleInput, EnsembleModel, ModelSpec, climate_shapes, ensemble_input

VARIABLES, SURFACE = ("t", "u", "v", "q"), ("t2m", "u10", "tp")


def make_spec(
    rows=9,
    columns=16,
    *,
    variables=VARIABLES,
    surface=SURFACE,
    levels=(500, 850),
    leads_in=(0, 24),
    leads_out=(24,),
    pole_row=True,
    static=(),
    region=None,
    **config,
) -> ModelSpec:
    settings = {"hidden": 8, "max_hidden": 16, "depth": 2, "points": 8} | config
    latitude = np.linspace(90, -90, rows) if pole_row else 90 - (np.arange(rows) + 0.5) * 180 / rows
    longitude = np.arange(columns) * 360 / columns
    if region is not None:
        latitude, longitude = region
    fields = variables, levels, surface, leads_in, leads_out, latitude, longitude, static
    return ModelSpec(ModelConfig(**settings), *fields)


def make_climate(spec: ModelSpec, seed=1) -> Climate:
    """Random but plausible statistics: positive scales, small biases."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, shape in climate_shapes(spec).items():
        kind = "points" if name.startswith("points_") else name
        ranges = {"mean": (2, 6), "bias": (-0.2, 0.2), "inflation": (-0.3, 0.3), "static": (0, 1)}
        ranges |= {"anchor": (2, 6), "correction": (-0.01, 0.01), "dry_share": (0.2, 1), "dry_mean": (0, 0.5)}
        ranges |= {"points": (-0.05, 0.05)}
        low, high = ranges.get(kind, (0.5, 2))
        values[name] = rng.uniform(low, high, shape).astype(np.float32)
    return Climate(**values)


def make_input(spec: ModelSpec, batch=2, members=3, seed=2, one_member=False) -> EnsembleInput:
    generator = torch.Generator().manual_seed(seed)
    given = 4 + torch.randn(batch, members, len(spec.leads_in), *spec.shape[1:], generator=generator)
    found = ensemble_input(given, torch.arange(1.0, batch + 1) * 40)
    return replace(found, member=given[:, 0]) if one_member else found


def awake(model, size=0.1):
    """Give the layers that start at zero something to say."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return model


def make_model(spec: ModelSpec, **kwargs) -> EnsembleModel:
    return awake(EnsembleModel(spec, make_climate(spec, **kwargs)))


def tensors(prediction) -> dict[str, torch.Tensor]:
    return {k: v for k, v in vars(prediction).items() if v is not None}
