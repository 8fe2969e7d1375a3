"""The learning rate as a pure function of the step, and the optimizer that a configuration asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ensemble_ml.config import OptimConfig, OptimName
from ensemble_ml.optim.exchange import Exchange
from ensemble_ml.optim.lion import AdamW, Lion

Schedule = Callable[[int], float]


def warmup_cosine(step: int, *, steps: int, peak: float, warmup: int, final: float) -> float:
    """Return the learning rate of `step`: a linear warm-up, then half a cosine down to `final * peak`.

    The cosine is that of Loshchilov and Hutter 2017 (arXiv:1608.03983), without restarts. The warm-up takes at most
    half of the run. Steps beyond the last one keep the final rate. In a run of a single step the rate is `peak`.
    Steps are numbered from 0. `warmup` is a number of steps, and `final` a fraction of `peak`.
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
    """Make the optimizer of `config` and its learning-rate schedule.

    The schedule returns the learning rate of a step and keeps no state: set `group["lr"] = schedule(step)` before each
    step. `exchange`, with the other ranks, is attached to the optimizer; None stands for a single rank.

    Raises:
        UserError: a setting of Lion is out of range.
    """
    betas = (config.beta1, config.beta2)
    optimizer: Optimizer
    if config.name is OptimName.lion:
        optimizer = Lion(params, lr=config.lr, betas=betas, weight_decay=config.weight_decay, exchange=exchange)
    else:
        optimizer = AdamW(params, lr=config.lr, betas=betas, weight_decay=config.weight_decay)
        if exchange is not None:
            exchange.attach(optimizer)
    return optimizer, schedule_of(config, steps)


def schedule_of(config: OptimConfig, steps: int) -> Schedule:
    """Return a function that gives the learning rate of a step, numbered from 0."""

    def schedule(step: int) -> float:
        return warmup_cosine(step, steps=steps, peak=config.lr, warmup=config.warmup, final=config.final_lr)

    return schedule
