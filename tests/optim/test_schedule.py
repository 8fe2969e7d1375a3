"""The learning rate: its ends, its warm-up, and the optimizers that a configuration builds."""

import math
from itertools import pairwise

import pytest
import torch

from ensemble_ml.config import OptimConfig, OptimName
from ensemble_ml.optim import Lion, build, warmup_cosine
from ensemble_ml.optim.lion import AdamW

RUN = {"steps": 100, "peak": 0.5, "warmup": 10, "final": 0.02}


def test_warm_up_is_linear_and_never_zero():
    rates = [warmup_cosine(s, **RUN) for s in range(10)]
    assert rates == pytest.approx([0.05 * (s + 1) for s in range(10)])


def test_cosine_ends_at_the_final_share():
    rates = [warmup_cosine(s, **RUN) for s in range(10, 100)]
    assert all(a > b for a, b in pairwise(rates))
    assert rates[-1] == pytest.approx(0.01)
    assert rates[44] == pytest.approx(0.5 * (0.02 + 0.98 / 2))  # half way
    assert warmup_cosine(1000, **RUN) == rates[-1]


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_runs_shorter_than_the_warm_up(steps):
    rates = [warmup_cosine(s, steps=steps, peak=1.0, warmup=50, final=0.1) for s in range(steps)]
    assert all(0 < r <= 1 and math.isfinite(r) for r in rates)
    assert rates[-1] == pytest.approx(0.1 if steps > 1 else 1.0)


@pytest.mark.parametrize(("name", "cls"), [(OptimName.lion, Lion), (OptimName.adamw, AdamW)])
def test_build(name, cls):
    config = OptimConfig(name=name, lr=1e-2, beta1=0.8, beta2=0.9, weight_decay=0.3, warmup=0)
    weight, bias = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))
    groups = [{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}]
    optimizer, schedule = build(config, groups, steps=10)
    assert type(optimizer) is cls
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert schedule(9) == pytest.approx(1e-2 * config.final_lr)
