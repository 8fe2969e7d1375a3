"""Make forecasts as one lazy Dataset, with the same fields as the files of `predict`.

One task of the Dask graph predicts one batch of init times. The batches are those of `predict` on one rank, because a
convolution rounds differently in a batch of another size. One further task for each variable turns the prediction into
the fields of a forecast. Axes are those of `contents`.
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
from ensemble_ml.inference.contents import (
    Header,
    Kind,
    Output,
    attributes,
    coordinates,
    dimensions,
    global_attributes,
    height_of,
)
from ensemble_ml.inference.inputs import Sample, Samples, Start, replace_static
from ensemble_ml.inference.job import Job, header_of_all, member_numbers
from ensemble_ml.inference.outputs import kinds_of, outputs
from ensemble_ml.inference.predict import batch_size, forward, put_on_device, torch_threads
from ensemble_ml.machine import return_freed_memory
from ensemble_ml.models import AnyModel, Prediction
from ensemble_ml.store.source import Fields
from ensemble_ml.training.checkpoint import load_model

# A process predicts only one batch at a time, however many threads Dask has. torch already divides each batch among all
# cores, and two batches at once would take twice the memory.
_alone = threading.Lock()

Batch = tuple[Prediction, list[Sample]]


class Forecaster:
    """A maker of the forecasts of a job, in any process. It loads the model when the first batch is asked for.

    Args:
        job: the job.
        device: the device of the model; None takes a GPU if there is one.
        threads: number of torch's threads on a CPU.
    """

    def __init__(self, job: Job, device: str | None, threads: int):
        self.job, self._device, self._threads = job, device, threads
        self._made: tuple[AnyModel, torch.device, Samples] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs, without the model, which that process loads for itself."""
        return self.__dict__ | {"_made": None}

    def batch(self, starts: Sequence[Start]) -> Batch:
        """Predict a batch of init times. Return the prediction, on the CPU, and what `variable` needs of the samples.

        Raises:
            UserError: an input cannot be read, or is NaN or infinite and the model has no mask there; or the checkpoint
                was replaced.
        """
        # The lock is also held while inputs are read. Otherwise the inputs of many batches would wait in memory.
        # The source may itself be a lazy Dataset. It is computed in this thread, because all other threads of Dask may
        # be waiting for this task.
        with _alone, dask.config.set(scheduler="synchronous"), torch_threads(self._threads), torch.inference_mode():
            model, device, samples = self._ready()
            group = [samples.read(start) for start in starts]
            return_freed_memory()  # the model needs most memory, and allocators still hold what other threads freed
            prediction = forward(model, group, device)
            return prediction, [self._kept(samples.judged(sample)) for sample in group]

    def _kept(self, sample: Sample) -> Sample:
        """Return the sample without members, mean and spread; unchanged if members are written or a variable is masked.

        It stays in memory until all variables of its batch are made.
        """
        if self.job.wanted.members or self.job.spec.masked:
            return sample
        nothing = np.empty(0, np.float32)
        return replace(sample, members=Fields(nothing, nothing), mean=nothing, spread=nothing)

    def variable(self, batch: Batch, name: str) -> dict[str, np.ndarray]:
        """Make the fields of one variable from the result of `batch`.

        Returns:
            float32 fields by the value of their kind. Each has an axis of init times at the place that `contents`
            gives it.

        Raises:
            UserError: a prediction is not finite, or a field made from it is infinite.
        """
        prediction, samples = batch
        job, made = self.job, dict[str, list[np.ndarray]]()
        with torch_threads(self._threads), torch.inference_mode():
            for at, sample in enumerate(samples):
                for one in outputs(job.spec, prediction, at, sample, job.wanted, job.places, name):
                    made.setdefault(one.kind.value, []).append(np.ascontiguousarray(one.values, np.float32))
        return {kind: _stacked(values, _time_axis(Kind(kind))) for kind, values in made.items()}

    def _ready(self) -> tuple[AnyModel, torch.device, Samples]:
        """Return the model, its device and the reader, which are made at the first call in a process."""
        if self._made is None:
            config, source = self.job.config, self.job.source
            # The command loads its weights outside of inference mode. With weights made in that mode, torch may compute
            # matrix products in another way, which rounds differently.
            with torch.inference_mode(False):
                model, meta = load_model(config.checkpoint)
            # The attributes of the forecast, which are known by now, name the checkpoint by its hash.
            if meta["sha256"] != self.job.meta["sha256"]:
                raise UserError(
                    f"checkpoint {config.checkpoint}: was replaced since the forecast was asked for; load the model"
                    " again, and predict again"
                )
            if config.static is not None:
                replace_static(model, source)
            device = solo().device if self._device is None else torch.device(self._device)
            put_on_device(model, meta, config.precision, device)
            self._made = model, device, Samples(source, self.job.spec, meta, members=self.job.wanted.members)
        return self._made


def forecast_dataset(job: Job, starts: Sequence[Start], device: str | None = None) -> xr.Dataset:
    """Return the forecasts of a job as a lazy Dataset, equal to the files of `predict` opened as one Dataset.

    Args:
        job: the job.
        starts: the init times, one or more, in ascending order.
        device: the device of the model, e.g. "cpu" or "cuda"; None takes a GPU if there is one.

    Raises:
        UserError: init times differ in their members, or there is no such device.
    """
    # The Dataset has one attribute `members_in` and one axis of members for all init times.
    if len({start.positions for start in starts}) > 1:
        few = next(start for start in starts if start.missing)
        where = f"{str(few.init_time)[:16]}: {few.missing}"
        raise UserError(f"{where}; leave such init times out with dates=, or choose others with members=[...]")
    head = header_of_all(job, starts)
    maker = Forecaster(job, _checked(device), job.config.threads or torch.get_num_threads())
    size = batch_size(job.spec)
    groups = [list(starts[first : first + size]) for first in range(0, len(starts), size)]
    # With pure=False each task gets a name of its own, and Dask does not hash its arguments.
    batches = [dask.delayed(maker.batch, pure=False)(group) for group in groups]
    found: dict[str, Any] = {one.name: (one.dims, one.values, dict(one.attributes)) for one in coordinates(head)}
    for name in (*job.spec.variables, *job.spec.surface):
        parts = [dask.delayed(maker.variable, pure=False)(batch, name) for batch in batches]
        for kind in kinds_of(job.spec, name, job.wanted):
            # Names, axes and attributes depend only on the kind, so an empty field stands for the values here.
            one = Output(name, kind, np.empty(0, np.float32))
            values = _joined(parts, [len(group) for group in groups], kind, _shape(job, head, one))
            found[f"{name}_{kind.value}"] = dimensions(head, one), values, attributes(head, one)
        if (height := height_of(name)) is not None:
            found[height.name] = height.dims, height.values, dict(height.attributes)
    about = global_attributes(head) | {"members_in": member_numbers(starts[0], job.source)}
    # The coordinates are encoded as in a file, so decoding gives the same Dataset as opening the files.
    return xr.decode_cf(xr.Dataset(found, attrs=about), decode_timedelta=True)


def _checked(device: str | None) -> str | None:
    """Return the device unchanged, or raise a UserError if it cannot be used."""
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError) as error:
            why = str(error).splitlines()[0]
            raise UserError(f"device={device}: cannot be used ({why}); give cpu, or leave it out") from error
    return device


def _stacked(values: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Stack fields along a new axis of init times. A single field, which may be large, is not copied."""
    return np.expand_dims(values[0], axis) if len(values) == 1 else np.stack(values, axis)


def _time_axis(kind: Kind) -> int:
    """Return the position of the axis of init times: behind an axis of quantiles, thresholds or members."""
    return int(kind in (Kind.QUANTILE, Kind.PROBABILITY, Kind.MEMBER))


def _shape(job: Job, head: Header, one: Output) -> tuple[int, ...]:
    """Return the shape of a field of one init time, without the axis of init times."""
    extra = {
        Kind.QUANTILE: (len(head.quantiles),),
        Kind.PROBABILITY: (len(head.thresholds.get(one.name, ())),),
        Kind.MEMBER: (len(head.members),),
    }.get(one.kind, ())
    levels = (len(head.levels),) if one.name in job.spec.variables else ()
    return (*extra, len(head.leads), *levels, *job.places.shape)


def _joined(parts: Sequence[Any], sizes: Sequence[int], kind: Kind, shape: tuple[int, ...]) -> da.Array:
    """Join the fields of all batches to one lazy array."""
    axis = _time_axis(kind)
    blocks = [
        da.from_delayed(part[kind.value], (*shape[:axis], size, *shape[axis:]), np.float32)
        for part, size in zip(parts, sizes, strict=True)
    ]
    return da.concatenate(blocks, axis)
