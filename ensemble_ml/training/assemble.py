"""Puts a run together: climate, model, precision, optimizer and loss, anew or from its last checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ensemble_ml.config import Precision, TrainConfig
from ensemble_ml.loading import Batch, Batches, Reader
from ensemble_ml.loading.batches import spare_members
from ensemble_ml.loading.reader import iso
from ensemble_ml.models import AnyModel, Climate, Speed, build_model, choose
from ensemble_ml.models.rivals.emos_model import EmosModel
from ensemble_ml.models.speed import candidates
from ensemble_ml.optim import build
from ensemble_ml.training import setup
from ensemble_ml.training.checkpoint import Checkpoint, load_checkpoint, load_weights
from ensemble_ml.training.climate_data import ranges, split
from ensemble_ml.training.climate_fit import fit_climate
from ensemble_ml.training.emos_fit import fit_emos_model
from ensemble_ml.training.losses import Loss
from ensemble_ml.training.state import Average, State

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Run:
    """A run's settings, its data, its state, its loss, and the facts that every checkpoint of it repeats."""

    config: TrainConfig
    reader: Reader
    train_dates: np.ndarray
    validation_dates: np.ndarray
    state: State
    loss: Loss
    facts: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.state.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, and so of inputs and targets."""
        return next(self.state.model.parameters()).dtype

    def batches(self, start_step: int, steps: int) -> Batches:
        """Training batches of global steps start_step to steps."""
        return _batches(self.config, self.reader, self.train_dates, start_step, steps)


def assemble(config: TrainConfig, reader: Reader, checkpoint: Checkpoint | None, threads: int) -> Run:
    """Make the run of `config` over the reader's store, going on from `checkpoint` where there is one."""
    train, validation = setup.split_dates(config.data, reader.source.layout.init_time)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.deterministic = True
    train, validation = _whole_dates(config, reader, train, validation)
    if checkpoint is None:
        state, found = _begin(config, reader, train, validation, device)
    else:
        setup.check_same_data(reader.source, checkpoint)
        state, found = _go_on(config, checkpoint, device)
    facts = {
        "config": setup.plain_config(config),
        "spec": reader.spec.to_json(),
        "training_dates": [iso(t) for t in reader.source.layout.init_time[train]],
        "validation_dates": [iso(t) for t in reader.source.layout.init_time[validation]],
        "versions": setup.versions(),
        "data_fingerprint": reader.source.fingerprint(),
        "threads": threads,
        "seeds": {"seed": config.seed},
        **found,
    }
    return Run(config, reader, train, validation, state, _loss(config, reader, state, device), facts)


def _whole_dates(
    config: TrainConfig, reader: Reader, train: np.ndarray, validation: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The dates that have members enough: to draw from in training, the first M of each in validation."""
    least = min(config.data.members, default=1) + spare_members(reader.spec)
    most = min(config.data.validation_members, reader.full_size)
    chosen = reader.usable(validation, most, "validation") if len(validation) else validation
    return reader.usable(train, min(least, reader.full_size), "training"), chosen


def _begin(
    config: TrainConfig, reader: Reader, train: np.ndarray, validation: np.ndarray, device: torch.device
) -> tuple[State, dict[str, Any]]:
    first = _batches(config, reader, train, 0, 1)
    given = load_checkpoint(config.init_from) if config.init_from is not None else None
    if given is not None:
        setup.refuse_other_layout(reader.spec, given)
    fit = fit_climate(reader, train, validation, config.data.validation_members, config.data.members)
    torch.manual_seed(config.seed)
    model = build_model(reader.spec, fit.climate)
    if given is not None:
        load_weights(model, given)
        log.info("init_from: weights and climate of %s, step %d", given.path, given.meta["step"])
    steps, found = config.steps, {}
    if isinstance(model, EmosModel):  # fitted at once: there is nothing to step
        members = config.data.validation_members
        steps, found = 0, {"emos": fit_emos_model(model, reader, train, validation, members, config.data.members)}
    state = _state(config, model.to(device), steps, torch.from_numpy(fit.spread_error))
    speed = _fastest(config, first.batch(0), state, _loss(config, reader, state, device)) if steps else Speed()
    return state, {"precision": speed.to_json(), "input_range": ranges(reader.spec, fit.input_range), **found}


def _go_on(config: TrainConfig, checkpoint: Checkpoint, device: torch.device) -> tuple[State, dict[str, Any]]:
    model = build_model(checkpoint.spec, Climate.default(checkpoint.spec))
    speed = Speed.from_json(checkpoint.meta["precision"])
    speed.apply(model)
    load_weights(model, checkpoint)
    state = _state(config, model.to(device), checkpoint.meta["steps"], checkpoint.training["spread_error"])
    state.restore(checkpoint)
    return state, {k: checkpoint.meta[k] for k in ("precision", "input_range", "emos") if k in checkpoint.meta}


def _batches(config: TrainConfig, reader: Reader, dates: np.ndarray, start_step: int, steps: int) -> Batches:
    return Batches(
        reader,
        dates,
        batch_size=config.batch_size,
        seed=config.seed,
        sizes=config.data.members,
        steps=steps,
        start_step=start_step,
        prefetch=config.loading.prefetch,
    )


def _state(config: TrainConfig, model: AnyModel, steps: int, spread_error: torch.Tensor) -> State:
    optimizer, schedule = build(config.optim, model.param_groups(), steps)
    average = Average(model, config.average) if config.average else None
    return State(model, optimizer, schedule, steps, spread_error, average)


def _fastest(config: TrainConfig, first: Batch, state: State, loss: Loss) -> Speed:
    """Set and return the precision and order of axes that are fastest for a step of this run.

    Two runs may measure differently, and then differ in the last bits; a precision that is given is taken unmeasured.
    """
    device = loss.area.device
    if config.model.precision is not Precision.auto:
        speed = candidates(device, config.model.precision)[0]
        speed.apply(state.model)
        log.info("speed: %s, as model.precision says, channels last", speed.precision.value)
        return speed

    def step() -> None:
        batch = first.to(device, next(state.model.parameters()).dtype)
        loss(state.model(batch.inputs), batch)["loss"].backward()

    return choose(state.model, step, wanted=config.model.precision)


def _loss(config: TrainConfig, reader: Reader, state: State, device: torch.device) -> Loss:
    spread_p, spread_s = (torch.from_numpy(v) for v in split(reader.spec, state.spread_error.cpu().numpy(), 2))
    area = torch.from_numpy(reader.spec.grid.area_weights()).float()
    buffers = dict(state.model.named_buffers())
    return Loss(
        reader.spec,
        buffers["error_p"],
        buffers["error_s"],
        spread_p.to(device),
        spread_s.to(device),
        area.to(device),
        config.spread_weight,
    )
