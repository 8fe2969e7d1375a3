"""Forecasts as one lazy Dataset: the same fields as `predict` writes to files, made as they are asked for.

A task of the Dask graph predicts one batch of start dates, which are those of `predict`, so that its convolutions round
alike; one task a variable makes of it what a forecast holds. Axes are those of `contents`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import dask
import dask.array as da
import numpy as np
import torch
import xarray as xr

from ensemble_ml.distributed.launch import solo
from ensemble_ml.errors import UserError
from ensemble_ml.inference.contents import Header, Kind, Output, attributes, dimensions
from ensemble_ml.inference.coordinates import coordinates, global_attributes, height_of
from ensemble_ml.inference.inputs import Sample, Samples, replace_static
from ensemble_ml.inference.job import Job, header_of_all
from ensemble_ml.inference.outputs import kinds_of, outputs
from ensemble_ml.inference.predict import batch_size, forward, put_on_device, torch_threads
from ensemble_ml.inference.starts import Start
from ensemble_ml.models import AnyModel, Prediction
from ensemble_ml.store.source import Fields
from ensemble_ml.training.checkpoint import load_model

# Batches are predicted one after the other, whatever the number of Dask's threads: torch shares out each over the
# cores, and two of them would take twice the memory.
_alone = threading.Lock()

Batch = tuple[Prediction, list[Sample]]


class Forecaster:
    """What makes the forecasts of a job, in any process: the model is loaded where it is first asked for.

    Args:
        job: what is made.
        device: where the model computes; None takes a GPU where there is one.
        threads: of torch, on a CPU.
    """

    def __init__(self, job: Job, device: str | None, threads: int):
        self.job, self._device, self._threads = job, device, threads
        self._made: tuple[AnyModel, torch.device, Samples] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs; it loads the model for itself."""
        return self.__dict__ | {"_made": None}

    def batch(self, starts: Sequence[Start]) -> Batch:
        """Predict a batch of start dates.

        Raises:
            UserError: an input cannot be read, or is NaN or infinite where the model knows of no mask.
        """
        # The lock is held while the inputs are read, too, or those of many batches would wait in memory. What is read
        # may be lazy itself: in this thread, for a scheduler that waits for this task may have no other.
        with _alone, dask.config.set(scheduler="synchronous"), torch_threads(self._threads), torch.inference_mode():
            model, device, samples = self._ready()
            group = [samples.read(start) for start in starts]
            prediction = forward(model, group, device)
            return prediction, [self._kept(samples.judged(sample)) for sample in group]

    def _kept(self, sample: Sample) -> Sample:
        """Return what `outputs` needs of a sample, for it waits in memory until all variables are made."""
        if self.job.wanted.members or self.job.spec.masked:
            return sample
        nothing = Fields(np.empty(0, np.float32), np.empty(0, np.float32))
        return replace(sample, members=nothing, mean=nothing, spread=nothing)

    def variable(self, batch: Batch, name: str) -> dict[str, np.ndarray]:
        """Return the fields of one variable by their kind, each with an axis of start dates in its place."""
        prediction, samples = batch
        job, made = self.job, dict[str, list[np.ndarray]]()
        with torch_threads(self._threads), torch.inference_mode():
            for at, sample in enumerate(samples):
                for one in outputs(job.spec, prediction, at, sample, job.wanted, job.places, name):
                    made.setdefault(one.kind.value, []).append(np.ascontiguousarray(one.values, np.float32))
        return {kind: _stacked(values, _time_axis(Kind(kind))) for kind, values in made.items()}

    def _ready(self) -> tuple[AnyModel, torch.device, Samples]:
        if self._made is None:
            config, source = self.job.config, self.job.source
            model, meta = load_model(config.checkpoint)
            if config.static is not None:
                replace_static(model, source)
            device = solo().device if self._device is None else torch.device(self._device)
            put_on_device(model, meta, config.precision, device)
            self._made = model, device, Samples(source, self.job.spec, meta, members=self.job.wanted.members)
        return self._made


def forecast_dataset(job: Job, starts: Sequence[Start], device: str | None = None) -> xr.Dataset:
    """Return the forecasts of a job as a lazy Dataset, with the variables and coordinates of its files opened as one.

    Args:
        job: what is made of what.
        starts: the start dates, in ascending order.
        device: where the model computes, e.g. "cpu" or "cuda"; None takes a GPU where there is one.

    Raises:
        UserError: start dates have other members than others; or there is no such device.
    """
    if len({start.positions for start in starts}) > 1:
        few = next(start for start in starts if start.missing)
        where = f"{str(few.init_time)[:16]}: {few.missing}"
        raise UserError(f"{where}; leave such start dates out with dates=, or choose others with members=[...]")
    head = header_of_all(job, starts)
    maker = Forecaster(job, _checked(device), job.config.threads or torch.get_num_threads())
    size = batch_size(job.spec)
    groups = [list(starts[first : first + size]) for first in range(0, len(starts), size)]
    batches = [dask.delayed(maker.batch, pure=False)(group) for group in groups]
    found: dict[str, Any] = {one.name: (one.dims, one.values, dict(one.attributes)) for one in coordinates(head)}
    for name in (*job.spec.variables, *job.spec.surface):
        parts = [dask.delayed(maker.variable, pure=False)(batch, name) for batch in batches]
        for kind in kinds_of(job.spec, name, job.wanted):
            one = Output(name, kind, np.empty(0, np.float32))
            values = _joined(parts, [len(group) for group in groups], kind, _shape(job, head, one))
            found[f"{name}_{kind.value}"] = dimensions(head, one), values, attributes(head, one)
        if (height := height_of(name)) is not None:
            found[height.name] = height.dims, height.values, dict(height.attributes)
    members = " ".join(str(job.source.layout.realization[position]) for position in starts[0].positions)
    about = global_attributes(head) | {"members_in": members}
    return xr.decode_cf(xr.Dataset(found, attrs=about), decode_timedelta=True)


def _checked(device: str | None) -> str | None:
    """Refuse a device that is not there."""
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            why = str(error).splitlines()[0]
            raise UserError(f"device={device}: cannot be used ({why}); say cpu, or leave it out") from error
    return device


def _stacked(values: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Return fields with an axis of start dates; one alone, which is large then, is not copied."""
    return np.expand_dims(values[0], axis) if len(values) == 1 else np.stack(values, axis)


def _time_axis(kind: Kind) -> int:
    """Return where the axis of start dates stands."""
    return int(kind in (Kind.QUANTILE, Kind.PROBABILITY, Kind.MEMBER))


def _shape(job: Job, head: Header, one: Output) -> tuple[int, ...]:
    """Return the shape of a field of one start date."""
    extra = {
        Kind.QUANTILE: (len(head.quantiles),),
        Kind.PROBABILITY: (len(head.thresholds.get(one.name, ())),),
        Kind.MEMBER: (len(head.members),),
    }.get(one.kind, ())
    levels = (len(head.levels),) if one.name in job.spec.variables else ()
    return (*extra, len(head.leads), *levels, *job.places.shape)


def _joined(parts: Sequence[Any], sizes: Sequence[int], kind: Kind, shape: tuple[int, ...]) -> da.Array:
    """Return the fields of all batches as one lazy array."""
    axis = _time_axis(kind)
    blocks = [
        da.from_delayed(part[kind.value], (*shape[:axis], size, *shape[axis:]), np.float32)
        for part, size in zip(parts, sizes, strict=True)
    ]
    return da.concatenate(blocks, axis)
