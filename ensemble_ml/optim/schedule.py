"""Learning rate as a pure function of the step, and the optimizer that a configuration asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ensemble_ml.config import OptimConfig, OptimName
from ensemble_ml.optim.exchange import Exchange
from ensemble_ml.optim.lion import Lion

Schedule = Callable[[int], float]


def warmup_cosine(step: int, *, steps: int, peak: float, warmup: int, final: float) -> float:
    """Learning rate of `step` (counted from 0): linear warm-up, then a half cosine down to `final * peak`.

    A warm-up that would take more than half of a short run is cut to half of it. Steps beyond the last keep its rate,
    and a run of a single one takes it at the peak.
    (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts.)
    """
    warmup = min(warmup, steps // 2)
    if step < warmup:
        return peak * (step + 1) / warmup
    if steps == 1 and step == 0:
        return peak
    progress = min(1.0, (step - warmup + 1) / max(1, steps - warmup))
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


def build(
    config: OptimConfig,
    params: Iterable[Tensor] | Iterable[dict[str, Any]],
    steps: int,
    exchange: Exchange | None = None,
) -> tuple[Optimizer, Schedule]:
    """Make the optimizer of `config` over `params` (tensors or groups) and its schedule for a run of `steps`.

    `exchange` is attached to it; without one, a rank is alone.

    The schedule keeps no state: set `group["lr"] = schedule(step)` before each step.
    """
    betas = (config.beta1, config.beta2)
    optimizer: Optimizer
    if config.name is OptimName.lion:
        optimizer = Lion(params, lr=config.lr, betas=betas, weight_decay=config.weight_decay, exchange=exchange)
    else:
        optimizer = torch.optim.AdamW(params, lr=config.lr, betas=betas, weight_decay=config.weight_decay)
        if exchange is not None:
            exchange.attach(optimizer)

    def schedule(step: int) -> float:
        return warmup_cosine(step, steps=steps, peak=config.lr, warmup=config.warmup, final=config.final_lr)

    return optimizer, schedule
