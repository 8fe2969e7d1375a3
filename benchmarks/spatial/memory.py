"""Measure the peak memory of activations of a forward and backward pass."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.memory import peak_bytes
from benchmarks.spatial.network import cut_input, network, training_loss
from benchmarks.step.benchmark import benchmark_spec, random_batch
from ensemble_ml.distributed import Session
from ensemble_ml.distributed.partition import partition_model
from ensemble_ml.models import EnsembleInput, EnsembleModel
from ensemble_ml.models.unet3d import Convolution


def peak(model: EnsembleModel, batch: EnsembleInput) -> tuple[int, int]:
    """Return the bytes at the peak of one pass above those before it, and the bytes of padding that convolutions keep.

    Gradients exist before the pass and are added to, so only activations are counted.

    Args:
        model: the model.
        batch: its input.
    """
    training_loss(model, batch).backward()
    gc.collect()
    padding, hooks = [0], []

    def count(module: Any, given: tuple[Tensor, ...]) -> None:
        batch_size, channels, rows, columns, planes = given[0].shape
        border = (rows + 2) * (columns + 2) - rows * columns
        padding[0] += batch_size * channels * planes * border * given[0].element_size()

    for module in model.modules():
        if isinstance(module, Convolution):
            hooks.append(module.register_forward_pre_hook(count))
    most = peak_bytes(lambda: training_loss(model, batch).backward())
    for hook in hooks:
        hook.remove()
    return most, padding[0]


def activations(session: Session, job: dict[str, Any]) -> dict[str, list[float]]:
    """Measure the peak of every rank, and its share of one process's peak with its own halo.

    Args:
        session: the ranks.
        job: shape and settings of the network.

    Returns:
        Bytes of all ranks: "peak", "share and halo" and, for comparison, "one process".
    """
    spec = benchmark_spec(*job["shape"], **job["config"])
    batch = random_batch(spec, 1)
    whole = session.once(lambda: peak(network(spec), batch))
    model = network(spec)
    shard = partition_model(model, session.mesh)
    found, padding = peak(model, cut_input(shard, batch))
    cells = shard.shape[0] * shard.shape[1] / (spec.grid.shape[0] * spec.grid.shape[1])
    expected = (whole[0] - whole[1]) * cells + padding
    own = torch.tensor([found, expected], dtype=torch.float64)
    everyone = own.new_empty(2 * session.topology.size)
    session.mesh.world.all_gather(everyone, own)
    return {"peak": everyone[0::2].tolist(), "share and halo": everyone[1::2].tolist(), "one process": [whole[0]]}
