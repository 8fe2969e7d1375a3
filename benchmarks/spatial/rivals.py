"""Compare the partitioned convolutions of torch's DTensor and PhysicsNeMo's ShardTensor with one process.

PhysicsNeMo needs many packages that this program does not. `spatial.physicsnemo=FOLDER` names a folder into which it
was installed (`pip install --no-deps --target FOLDER nvidia-physicsnemo ...`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.turns import take_turns
from benchmarks.spatial.rival_convolutions import (
    Place,
    convolved,
    dtensor_place,
    gradients,
    shard_tensor_place,
)
from ensemble_ml.distributed import Session
from examples.stock_layers.layers import partition

_DTENSOR, _SHARD_TENSOR = "torch DTensor", "PhysicsNeMo ShardTensor"
_NAMES = ("forward", "input gradient", "weight gradient")
_AXES = {"latitude": 2, "longitude": 3}


def convolutions(session: Session, job: dict[str, Any]) -> dict[str, Any]:
    """Return the largest relative errors of a 3 x 3 x 3 convolution in float64, or the error that was raised.

    Seconds are measured for the packages whose result is right.

    Args:
        session: the ranks.
        job: `physicsnemo`, `repeats`, and shape and settings of the network.
    """
    places: dict[str, Place] = {_DTENSOR: dtensor_place}
    rows: list[dict[str, Any]] = []
    if job["physicsnemo"]:
        sys.path.append(job["physicsnemo"])
        try:
            places[_SHARD_TENSOR] = shard_tensor_place()
        except Exception as error:
            rows.append({"entrant": _SHARD_TENSOR, "raised": _told(error)})
    right = {}
    for name, place in places.items():
        for split, axis in _AXES.items():
            for circular in (False, True):
                padding = "circular" if circular else "zeros"
                found = _one(session, place, axis, circular)
                rows.append({"entrant": name, "split": split, "padding": padding, **found})
                if axis == 2 and not circular and max(found.get(n, 1.0) for n in _NAMES) < 1e-9:
                    right[name] = place
    return {"rows": rows, "seconds": _race(session, job, right)}


def _race(session: Session, job: dict[str, Any], places: dict[str, Place]) -> dict[str, list[float]]:
    """Time one convolution with zero padding and partitioned latitude, forward and backward. Entrants take turns."""
    levels, rows, columns = job["shape"]
    channels = job["config"].get("hidden", 32)
    torch.manual_seed(0)
    x = torch.randn(1, channels, rows, columns, levels).contiguous(memory_format=torch.channels_last_3d)
    layer = nn.Conv3d(channels, channels, 3, padding=1, bias=False)
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last_3d)
    own = _part(x, session, 2).clone(memory_format=torch.preserve_format).requires_grad_()
    forms: dict[str, Callable[[], object]] = {}
    weight = layer.weight.detach().clone()
    for name, place in places.items():
        split, kernel = place(x, weight, 2)
        forms[name] = lambda split=split, kernel=kernel: convolved(split, kernel, circular=False).sum().backward()  # type: ignore[misc]
    partition(layer, session.mesh)
    forms["ours"] = lambda: layer(own).sum().backward()
    return take_turns(forms, job["repeats"], around=session.mesh.world.barrier)


def _one(session: Session, place: Place, axis: int, circular: bool) -> dict[str, Any]:
    """Return the errors of one package for one partitioned axis and one padding."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 16, 16, 4, dtype=torch.float64, generator=random)
    weight = torch.randn(4, 4, 3, 3, 3, dtype=torch.float64, generator=random)
    adjoint = torch.randn(1, 4, 16, 16, 4, dtype=torch.float64, generator=random)
    a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    padded = F.pad(a, (0, 0, 1, 1, 1, 1), mode="circular") if circular else a
    expected = F.conv3d(padded, w, None, 1, (0, 0, 1) if circular else (1, 1, 1))
    (expected * adjoint).sum().backward()
    assert a.grad is not None and w.grad is not None
    errors: dict[str, Any] = {}
    try:
        split, kernel = place(x, weight, axis)
        own = convolved(split, kernel, circular=circular)
        truth = expected.detach() if own.shape == expected.shape else _part(expected.detach(), session, axis)
        errors["forward"] = _error(session, own.detach(), truth)
        inputs, weights = gradients(split, kernel, own, adjoint, axis)
        inputs = _part(inputs, session, axis) if inputs.shape == x.shape else inputs
        errors["input gradient"] = _error(session, inputs, _part(a.grad, session, axis))
        errors["weight gradient"] = min(_error(session, found, w.grad) for found in weights)
    except Exception as error:  # an entrant that raises an error is a row of the table
        errors["raised"] = _told(error)
    return errors


def _error(session: Session, found: Tensor, truth: Tensor) -> float:
    if found.shape != truth.shape:
        return float("inf")
    worst = ((found - truth).abs().max() / truth.abs().max()).double()
    session.mesh.world.all_reduce(worst, op="max")
    return worst.item()


def _part(x: Tensor, session: Session, axis: int) -> Tensor:
    return x.chunk(session.topology.size, axis)[session.topology.rank]


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"
