"""Time the padding of one rank against `F.pad(circular)` and conv3d, forward and backward.

The plain form runs with weights and input in torch's own order of axes, and again with channels last. The faster one
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.turns import take_turns
from ensemble_ml.config import Vertical
from ensemble_ml.distributed import Session
from ensemble_ml.models.padding import Beyond, EdgeRule, Geometry, Padder
from ensemble_ml.models.speed import settle
from ensemble_ml.models.unet3d import Convolution

_CALLS = {"cpu": 3, "cuda": 20}


def race(session: Session, job: dict[str, Any]) -> dict[str, list[float]]:
    """Time a convolution that wraps in longitude and is zero beyond the poles, in all forms, which take turns.

    Args:
        session: the ranks, of which one is used.
        job: shape and settings of the network, `repeats`, `device` and `precision`.

    Returns:
        Seconds of a call by form.
    """
    device, dtype = job.get("device", "cpu"), getattr(torch, job.get("precision", "float32"))
    calls, (levels, rows, columns) = _CALLS[device], job["shape"]
    channels = job["config"].get("hidden", 32)
    edge = EdgeRule(Beyond.ZERO)
    pad = Padder(Geometry(rows, columns, True, edge, edge))
    torch.manual_seed(0)
    layer = Convolution(channels, channels, levels, Vertical.shared, pad, bias=True)
    layer.to(device, dtype)
    bias, kinds = layer.conv.bias, {"channels last": torch.channels_last_3d, "channels first": torch.contiguous_format}
    layer.conv.weight.data = layer.conv.weight.data.contiguous(memory_format=torch.channels_last_3d)
    x = torch.randn(1, channels, rows, columns, levels).to(device, dtype)
    inputs = {name: x.clone(memory_format=kind).requires_grad_() for name, kind in kinds.items()}
    weights = {
        name: layer.conv.weight.detach().clone(memory_format=kind).requires_grad_() for name, kind in kinds.items()
    }

    def plain(kind: str) -> Tensor:
        wrapped = F.pad(inputs[kind], (0, 0, 1, 1, 0, 0), mode="circular")
        return F.conv3d(wrapped, weights[kind], bias, 1, (1, 0, 1))  # zeros beyond the poles need no copy

    forms: dict[str, Callable[[], Tensor]] = {"ours": lambda: layer(inputs["channels last"])}
    forms |= {f"F.pad and conv3d, {kind}": partial(plain, kind) for kind in kinds}
    for form in forms.values():
        torch.testing.assert_close(layer(x), form(), rtol=0.02 if dtype is torch.bfloat16 else 1e-4, atol=0.02)

    def turn(form: Callable[[], Tensor]) -> None:
        for _ in range(calls):
            form().sum().backward()

    turns = {name: partial(turn, form) for name, form in forms.items()}
    seconds = take_turns(turns, job["repeats"], around=partial(settle, torch.device(device)))
    return {name: [one / calls for one in found] for name, found in seconds.items()}
