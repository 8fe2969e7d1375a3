"""A masked autoencoder, the rival of pretraining on members: the trunk of our model fills what was hidden from it.

Patches of latitude and longitude are hidden from the stems, on all planes at once, and a linear layer predicts the
standardised channels there from what the trunk makes of the rest (He et al. 2022, arXiv:2111.06377; of weather: Man et
al. 2023, arXiv:2304.08754). In the place of tokens that are left out, a network of convolutions is given zeros.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ensemble_ml.config import TrainConfig
from ensemble_ml.loading import Reader
from ensemble_ml.loading.batches import Batches
from ensemble_ml.models import Climate, EnsembleModel
from ensemble_ml.models.unet3d import Convolution
from ensemble_ml.store import TensorStore
from ensemble_ml.store.manifest import hash_file
from ensemble_ml.training import load_checkpoint
from ensemble_ml.training.checkpoint import META, MODEL, digest

_PATCH, _HIDDEN = 8, 0.75  # cells along each side, and the part of patches that is hidden, as in the paper on weather
_WARMUP = 40


def pretrain_masked(
    config: TrainConfig, store: TensorStore, dates: np.ndarray, given: Path, folder: Path, seconds: float
) -> int:  # fmt: skip
    """Pretrain the trunk of a model, and write a checkpoint for `init_from` whose last layer is as at the beginning.

    Args:
        config: the settings of the training whose model, batches and optimizer are taken.
        store: holds the members.
        dates: indices of the init times.
        given: a checkpoint of a training on members of these init times, whose statistics of the members are taken.
        folder: the folder of the new checkpoint.
        seconds: time of processors after which it ends.

    Returns:
        How many steps it took.
    """
    began = time.process_time()
    known = load_checkpoint(given)
    torch.manual_seed(config.seed)
    model = EnsembleModel(known.spec, Climate.default(known.spec))
    statistics = {k: known.state_dict[k] for k, _ in model.named_buffers() if k in known.state_dict}
    model.load_state_dict(statistics, strict=False)
    batches = Batches(
        Reader(store, known.spec), dates, batch_size=config.batch_size, seed=config.seed, sizes=config.data.members,
        steps=10**9,
    )  # fmt: skip
    parts = [part for part in (model.pressure, model.surface) if part is not None]
    sizes = [model.features.channels(surface=part.surface) for part in parts]
    decoders = nn.ModuleList(nn.Linear(len(model.plane_bias), size) for size in sizes)
    area = torch.from_numpy(known.spec.grid.area_weights()).float()
    learned = [*model.parameters(), *decoders.parameters()]
    optimizer = torch.optim.AdamW(learned, lr=config.optim.lr, weight_decay=config.optim.weight_decay)
    step = 0
    while step == 0 or time.process_time() - began < seconds:
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * min(1.0, (step + 1) / _WARMUP)
        hidden = _mask(area)
        with _masked(model, [part.stem for part in parts], hidden) as (trunk, channels):
            model(batches.batch(step).inputs)
        optimizer.zero_grad()
        _loss(trunk[0], channels, decoders, hidden * area).backward()
        optimizer.step()
        step += 1
    _write(model, given, folder)
    return step


def _mask(area: Tensor) -> Tensor:
    """Draw (Y, X) which cells are hidden, as ones among zeros."""
    rows, columns = (math.ceil(n / _PATCH) for n in area.shape)
    order = torch.rand(rows * columns).argsort().view(rows, columns)
    hidden = (order < _HIDDEN * order.numel()).float()
    return hidden.repeat_interleave(_PATCH, 0).repeat_interleave(_PATCH, 1)[: area.shape[0], : area.shape[1]]


@contextmanager
def _masked(
    model: EnsembleModel, stems: list[Convolution], hidden: Tensor
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:  # fmt: skip
    """Hide cells from the stems, and yield lists that a pass fills: what the trunk makes, and what the stems would see.

    All are (B, Y, X, Z, C).
    """
    channels: list[Tensor] = []
    trunk: list[Tensor] = []

    def hide(_: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        channels.append(given[0].permute(0, 2, 3, 4, 1))
        return given[0] * (1 - hidden[..., None])

    hooks = [stem.register_forward_pre_hook(hide) for stem in stems]
    hooks.append(model.scale.register_forward_hook(lambda m, g, found: trunk.append(found.permute(0, 2, 3, 4, 1))))
    try:
        yield trunk, channels
    finally:
        for hook in hooks:
            hook.remove()


def _loss(trunk: Tensor, channels: list[Tensor], decoders: nn.ModuleList, weight: Tensor) -> Tensor:
    """Return the mean squared error of the channels where they were hidden, by area, each set of planes alike."""
    pieces = trunk.split([c.shape[3] for c in channels], 3)
    both = zip(pieces, channels, decoders, strict=True)
    errors = [(decoder(piece) - wanted).square().mean((0, 3, 4)) for piece, wanted, decoder in both]
    return torch.stack([(error * weight).sum() / weight.sum() for error in errors]).sum()


def _write(model: EnsembleModel, given: Path, folder: Path) -> None:
    """Write a checkpoint like a given one, with the weights of a model."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(given.resolve(), folder)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / MODEL)
    meta = json.loads((folder / META).read_text())
    meta["files"][MODEL] = hash_file(folder / MODEL)
    meta["sha256"] = digest(meta)
    (folder / META).write_text(json.dumps(meta))
